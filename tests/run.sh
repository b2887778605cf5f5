#!/usr/bin/env bash
# The whole test suite: ruff, mypy, pytest with the real vLLM and the real harnesses. Arguments go to pytest.
source "$(dirname "$0")/../recipes/environments.sh"

environment_rolltap
export PATH="$VENVS/rolltap/bin:$PATH"
# a minute of work, while the others are downloaded
python recipes/quickstart/make_model.py runs/quickstart/model & model=$!
environment_vllm
environment_harnesses
export ROLLTAP_VLLM="$VENVS/vllm/bin/vllm"
wait "$model"

say "ruff"
ruff check .
ruff format --check .
say "mypy"
mypy
say "pytest"
# Two workers. What starts an engine or a harness runs one after the other on one of them.
export OMP_NUM_THREADS=1
pytest --numprocesses 2 --dist loadgroup "$@"
if [ $# -eq 0 ] && environment_312; then
    say "pytest: the addons on Python 3.12 with mitmproxy 12"
    "$VENVS/rolltap-3.12/bin/pytest" --numprocesses 2 -m "not engine" tests/addons
fi

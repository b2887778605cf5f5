#!/usr/bin/env bash
# The whole test suite: ruff, mypy, pytest with the real vLLM and the real harnesses. With arguments, `pytest ARGUMENTS`.
source "$(dirname "$0")/../recipes/environments.sh"

environment_rolltap
export PATH="$VENVS/rolltap/bin:$PATH"
trap 'kill $(jobs -p) 2>/dev/null || :' EXIT
# takes a minute, in parallel with the downloads
python recipes/quickstart/make_model.py runs/quickstart/model & model=$!
environment_vllm
environment_harnesses
programs_isolation
export PATH="$VENVS/rolltap/bin:$PATH"  # before those of the harnesses: this Python has pytest, which tasks are judged with
export ROLLTAP_VLLM="$VENVS/vllm/bin/vllm"
wait "$model"

say "ruff"
ruff check .
ruff format --check .
say "mypy"
mypy

export OMP_NUM_THREADS=1
if [ $# -gt 0 ]; then
    say "pytest $*"
    pytest "$@"
    exit
fi
# the tests with engines and harnesses run sequentially, in parallel with the others
log="$VENVS/pytest.log"
pytest -m "engine or harness" --durations 20 > "$log" 2>&1 & engines=$!
failed=0
say "pytest: what starts no engine and no harness"
pytest -q -n 2 --durations 20 -m "not engine and not harness" || failed=1
if environment_312; then
    say "pytest: the addons on Python 3.12 with mitmproxy 12"
    # those that mitmproxy takes part in; of the attacks, those on its layers
    "$VENVS/rolltap-3.12/bin/pytest" -q -n 2 -m "not engine" tests/addons/test_*.py tests/addons/endpoint \
        tests/addons/engine tests/security/test_{bodies,descriptors,egress,limits,log,raw_bytes,websockets}.py ||
        failed=1
fi
environments_wheel
say "pytest: the wheel"
"$VENVS/wheel/bin/python" -P -m pytest -q tests/wheel > "$VENVS/wheel.log" 2>&1 & wheel=$!
if [ -x "$VENVS/wheel-3.12/bin/python" ]; then
    "$VENVS/wheel-3.12/bin/python" -P -m pytest -q tests/wheel || failed=1
fi
wait "$wheel" || failed=1
cat "$VENVS/wheel.log"
wait "$engines" || failed=1
say "pytest: engines and harnesses"
cat "$log"
exit "$failed"

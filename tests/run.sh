#!/usr/bin/env bash
# The whole test suite: ruff, mypy, pytest with the real vLLM and the real harnesses. Arguments go to pytest.
source "$(dirname "$0")/../recipes/environments.sh"

environment_rolltap
environment_vllm
environment_harnesses
export PATH="$VENVS/rolltap/bin:$PATH"
export ROLLTAP_VLLM="$VENVS/vllm/bin/vllm"

say "ruff"
ruff check .
ruff format --check .
say "mypy"
mypy
say "pytest"
pytest "$@"

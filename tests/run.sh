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

processors="$(nproc)"
export OMP_NUM_THREADS=1  # nproc would print it
if [ $# -gt 0 ]; then
    say "pytest $*"
    pytest "$@"
    exit
fi
# one that hangs fails, with the stacks of its threads; the slowest takes four minutes on two loaded cores
sequential=(--timeout 1200 --durations 20)
parallel=("${sequential[@]}" -q -n $((processors < 4 ? processors : 4)))
logs="$VENVS/logs"
rm -rf "$logs" && mkdir -p "$logs"
failed=0
# the tests with engines and harnesses run sequentially, in parallel with the others
pytest "${sequential[@]}" -m "engine or harness" > "$logs/engines" 2>&1 & engines=$!
say "pytest: what starts no engine and no harness"
pytest "${parallel[@]}" -m "not engine and not harness" | tee "$logs/quick" || failed=1
if environment_312; then
    say "pytest: the addons on Python 3.12 with mitmproxy 12"
    # those that mitmproxy takes part in; of the attacks, those on its layers
    "$VENVS/rolltap-3.12/bin/pytest" "${parallel[@]}" -m "not engine" tests/addons/test_*.py tests/addons/{wire,endpoint} \
        tests/addons/engine tests/security/test_{bodies,descriptors,egress,limits,log,raw_bytes,websockets}.py |
        tee "$logs/python-3.12" || failed=1
fi
environments_wheel
say "pytest: the wheel"
"$VENVS/wheel/bin/python" -P -m pytest -q tests/wheel > "$logs/wheel" 2>&1 & wheel=$!
if [ -x "$VENVS/wheel-3.12/bin/python" ]; then
    "$VENVS/wheel-3.12/bin/python" -P -m pytest -q tests/wheel | tee "$logs/wheel-3.12" || failed=1
fi
wait "$wheel" || failed=1
cat "$logs/wheel"
wait "$engines" || failed=1
say "pytest: engines and harnesses"
cat "$logs/engines"
say "the end"
if [ "$failed" != 0 ]; then grep -hE "^(FAILED|ERROR) " "$logs"/* || :; fi
exit "$failed"

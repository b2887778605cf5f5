#!/usr/bin/env bash
# The test suite: ruff, mypy, pytest with the real vLLM and the real harnesses. The short suite has one case of each kind;
# with --deep it has every kill point, attack and example. With other arguments: `pytest ARGUMENTS`.
began=$SECONDS
source "$(dirname "$0")/../recipes/environments.sh"

if [ "${1:-}" = --deep ]; then
    export ROLLTAP_DEEP=1
    shift
fi
environment_rolltap
export PATH="$VENVS/rolltap/bin:$PATH"
trap 'kill $(jobs -p) 2>/dev/null || :' EXIT
quickstart_model & model=$!
environment_vllm
environment_vllm_0_33 & next=$!
environment_kernels & kernels=$!
environment_harnesses
programs_debian
export PATH="$VENVS/rolltap/bin:$PATH"  # before those of the harnesses: this Python has pytest, which tasks are judged with
export ROLLTAP_VLLM="$VENVS/vllm/bin/vllm" ROLLTAP_VLLM_NEXT="$VENVS/vllm-0.33/bin/vllm"
wait "$next" || say "vLLM 0.33 could not be installed (see above): its tests are skipped"
wait "$kernels" || say "fla could not be installed (see above): its tests are skipped"
wait "$model"
processors="$(nproc)"
export OMP_NUM_THREADS=1  # nproc would print it
if [ $# -gt 0 ]; then
    say "pytest $*"
    pytest "$@"
    exit
fi

logs="$VENVS/logs"
rm -rf "$logs" && mkdir -p "$logs"
times="$logs/times" failures="$logs/failures"
echo "installs $((SECONDS - began))" > "$times"

# part NAME COMMAND...: run a part of the suite; its output goes to $logs/NAME, its seconds to $times
part() {
    local name="$1" began=$SECONDS status=0
    shift
    say "$name begins"
    "$@" > "$logs/$name" 2>&1 || status=$?
    [ "$status" = 0 ] || echo "$name" >> "$failures"
    echo "$name $((SECONDS - began))" >> "$times"
    say "$name: $(tail -n 1 "$logs/$name")"
}

# A test that hangs ends its process, with the stacks of all threads, because an exception may be caught, or wait in
# turn for a child. xdist would wait for ever for the tests of a process that ended: it starts no other one.
sequential=(--timeout 1200 --timeout-method thread --durations 20 -q)
parallel=("${sequential[@]}" --dist loadfile --max-worker-restart 0 -n $((processors < 4 ? processors : 4)))

# Those in which mitmproxy takes part; of the attacks, those on its layers.
addons_312() {
    local tests=(tests/addons/test_*.py tests/addons/proxy tests/security/test_raw_bytes.py)
    if [ -n "${ROLLTAP_DEEP:-}" ]; then
        tests+=(tests/addons/{endpoint,engine} tests/security/test_{bounds,egress,limits,log}.py)
    fi
    "$VENVS/rolltap-3.12/bin/pytest" "${sequential[@]}" -m "not engine" "${tests[@]}"
}

# What an engine is asked, of the next vLLM: recording, publishing, scores. With --deep, all tests that start an engine.
vllm_0_33() {
    local tests=(tests/addons/engine tests/trainer/engine/test_{publish_vllm,scores_vllm,weights}.py)
    tests+=(tests/trainer/runs/views/test_score_vllm.py -k "not in_flight_that_is_kept")
    if [ -n "${ROLLTAP_DEEP:-}" ]; then tests=(); fi
    ROLLTAP_VLLM="$ROLLTAP_VLLM_NEXT" pytest "${sequential[@]}" -m engine "${tests[@]}"
}

# The site of the pages: a broken link is an error, and it loads nothing from elsewhere.
site() {
    NO_MKDOCS_2_WARNING=1 "$VENVS/docs/bin/mkdocs" build --quiet --strict -f recipes/site/mkdocs.yml &&
        pytest "${sequential[@]}" tests/readme/test_site.py
}

# in parallel with the tests that start no engine and no harness
others() {
    part ruff-check ruff check .
    part ruff-format ruff format --check .
    part site site
    part mypy mypy --cache-dir "$CACHE/mypy"
    part engines-harnesses pytest "${sequential[@]}" -m "engine or harness"
    if [ -x "$ROLLTAP_VLLM_NEXT" ]; then part vllm-0.33 vllm_0_33; fi
    part wheel "$VENVS/wheel/bin/python" -P -m pytest -q tests/wheel
    if [ -x "$VENVS/wheel-3.12/bin/python" ]; then
        part wheel-3.12 "$VENVS/wheel-3.12/bin/python" -P -m pytest -q tests/wheel --ignore tests/wheel/test_extras.py
    fi
}

environment_312 || say "there is no Python 3.12: the addons are tested on this one only"
environment_harbor || say "Harbor could not be installed: the tests of the runtime harbor are skipped"
environments_wheel
environment_docs
sed -i "s/^installs.*/installs $((SECONDS - began))/" "$times"
others & others=$!
part quick pytest "${parallel[@]}" -m "not engine and not harness"
# `others` takes longer than `quick`: what it does not need runs here
if [ -x "$VENVS/rolltap-3.12/bin/pytest" ]; then part python-3.12 addons_312; fi
if [ -f "$VENVS/kernels/installed" ]; then
    part kernels "$VENVS/kernels/bin/python" -m pytest "${sequential[@]}" tests/trainer/training/step/test_fla.py
fi
wait "$others" || echo others >> "$failures"
for log in "$logs"/*; do
    case "$log" in "$times" | "$failures") ;; *) say "$(basename "$log")"; cat "$log" ;; esac
done
say "seconds of each part, all together $((SECONDS - began))"
cat "$times"
if [ -s "$failures" ]; then
    say "failed: $(paste -sd ' ' "$failures")"
    grep -hE "^(FAILED|ERROR) " "$logs"/* || :
    exit 1
fi

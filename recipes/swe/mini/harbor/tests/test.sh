#!/bin/bash
# Runs the tests of the fix, in place of those in the working directory. Without pytest there is no reward.
#
# The agent's code runs in pytest. It could end pytest with status 0, bring settings and plugins for it, and write a
# reward: so nothing of the working directory is read but what the tests import, the tests that passed are counted, and
# the reward is written last.

python -m pytest --version || exit
rm -rf tests && mkdir tests && cp "$(dirname "$0")"/test_*.py tests || exit
output=$(python -P -m pytest -c /dev/null --rootdir . --noconftest -o pythonpath="$PWD" -p no:cacheprovider tests)
status=$?
echo "$output"
rm -rf /logs/verifier/reward.*
if [ $status = 0 ] && tail -n 1 <<< "$output" | grep -Eq '^=+ 32 passed.* in [0-9.]+s'; then
    echo 1 > /logs/verifier/reward.txt
elif [ $status -le 1 ]; then
    echo 0 > /logs/verifier/reward.txt
fi

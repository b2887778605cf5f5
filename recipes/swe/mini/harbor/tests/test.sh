#!/bin/bash
# Runs the tests of the fix, in place of those in the working directory. Without pytest there is no reward.

python -m pytest --version || exit
rm -rf tests && mkdir tests && cp "$(dirname "$0")"/test_*.py tests || exit
python -m pytest -p no:cacheprovider tests
case $? in
    0) echo 1 > /logs/verifier/reward.txt ;;
    1) echo 0 > /logs/verifier/reward.txt ;;
esac

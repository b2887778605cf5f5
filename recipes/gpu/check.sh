#!/usr/bin/env bash
# The acceptance of a machine with a GPU, in one command: it prints a table, and writes
# runs/gpu-check/check.json.
#
#   recipes/gpu/check.sh                    the quickstart's tiny model
#   recipes/gpu/check.sh --model DIR        a real one, such as Qwen3-4B or Qwen3.5-4B
#   recipes/gpu/check.sh --trainer-only     without vLLM; so too where vLLM cannot be installed
#   recipes/gpu/check.sh --cpu              the small form, for machines without a GPU
source "$(dirname "$0")/../environments.sh"

"${PYTHON:-python3}" recipes/gpu/machine.py "$@" ||
    fail "this machine lacks something (see above): put it right, and start this again"
if [ -n "$GPU" ]; then
    environment_gpu
    trainer=gpu
else
    environment_rolltap
    trainer=rolltap
fi
if [[ " $* " != *" --trainer-only "* ]]; then
    (environment_vllm) || say "vLLM could not be installed (see above)"
    (environment_mini_swe_agent) || say "mini-swe-agent could not be installed (see above)"
fi
export PATH="$VENVS/$trainer/bin:$VENVS/mini-swe-agent/bin:$PATH"
exec python recipes/gpu/check.py --vllm "$VENVS/vllm/bin/vllm" "$@"

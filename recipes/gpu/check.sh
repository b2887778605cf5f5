#!/usr/bin/env bash
# One command that checks a machine with a GPU: it prints a table and writes runs/gpu-check/check.json.
#
#   recipes/gpu/check.sh                    the quickstart's tiny model
#   recipes/gpu/check.sh --model DIR        a real one, such as Qwen3-4B or Qwen3.5-4B
#   recipes/gpu/check.sh --trainer-only     without vLLM; so too where vLLM cannot be installed
#   recipes/gpu/check.sh --cpu              the small form, for machines without a GPU
source "$(dirname "$0")/../environments.sh"

environment_rolltap
if [[ " $* " != *" --trainer-only "* ]]; then
    (environment_vllm) || say "vLLM could not be installed (see above)"
    (environment_mini_swe_agent) || say "mini-swe-agent could not be installed (see above)"
fi
export PATH="$VENVS/rolltap/bin:$VENVS/mini-swe-agent/bin:$PATH"
# one GPU, which the engine and the trainer share
if [ -n "$GPU" ]; then
    visible="${CUDA_VISIBLE_DEVICES:-0}"
    export CUDA_VISIBLE_DEVICES="${visible%%,*}"
fi
exec python recipes/gpu/check.py --vllm "$VENVS/vllm/bin/vllm" "$@"

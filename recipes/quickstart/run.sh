#!/usr/bin/env bash
# The whole loop on this machine: a tiny model, vLLM, the recorder, mini-swe-agent, GRPO. Arguments go to run.py.
source "$(dirname "$0")/../environments.sh"

environment_rolltap
environment_vllm
environment_mini_swe_agent
export PATH="$VENVS/rolltap/bin:$VENVS/mini-swe-agent/bin:$PATH"
exec python recipes/quickstart/run.py --vllm "$VENVS/vllm/bin/vllm" "$@"

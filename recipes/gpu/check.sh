#!/usr/bin/env bash
# The trainer's half of the check of a machine: what a model takes and computes on its GPU, against the plan.
# Prints a table, and writes gpu-check.json. `--cpu` is a small form for machines without a GPU.
source "$(dirname "$0")/../environments.sh"

environment_rolltap
exec "$VENVS/rolltap/bin/python" recipes/gpu/trainer_half.py "$@"

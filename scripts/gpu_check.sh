#!/usr/bin/env bash
# SIS on one GPU, FSDP2 and Megatron, on a tiny mixture of experts: kappa, one answer on every micro-batch size, the
# ratio of step times and peak memory. Prepared and never run so far. Ends after 8 minutes at most.
#
#   bash scripts/gpu_check.sh [PYTEST ARGUMENT ...]
#
# Needs verl with its GPU dependencies, and for Megatron: megatron-core, megatron-bridge and transformer-engine; without
# them the Megatron half is skipped, and the summary says so.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-.venv/bin/python}
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu_check: expected a GPU that torch sees, found none" >&2
    exit 1
fi
export VERL_PLATFORM=nvidia HF_HUB_OFFLINE=1
exec timeout --foreground 480 "$python" -m pytest tests/gpu -m gpu -s -p no:cacheprovider "$@"

#!/usr/bin/env bash
# From nothing to a training run with SIS on this machine's CPU: about 10 minutes the first time, 5 afterwards.
#
#   bash scripts/quickstart.sh [--base] [--output DIR] [HYDRA OVERRIDE ...]
#
# Results: runs/quickstart/metrics.jsonl, runs/quickstart/curves.png, and a table on the terminal.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh
exec .venv/bin/python -m verl_sis.cpu.quickstart "$@"

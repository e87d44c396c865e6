#!/usr/bin/env bash
# The paper's comparison in the small: a tiny mixture of experts, two CPU cores, three seeds; then tables and figures.
#
#   bash scripts/reproduce_small.sh [--full] [--falsifier] [--out DIR] [--jobs N] [--list]
#
# Results: runs/reproduce_small/tables/tables.md. Call it again after an interruption: finished cells are kept.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh
exec .venv/bin/python scripts/reproduce_small.py "$@"

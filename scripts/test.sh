#!/usr/bin/env bash
# Set up, check style and types, and run the tests.
#
#   bash scripts/test.sh [--e2e|--long] [PYTEST ARGUMENT ...]
#
# The fast suite takes minutes. --e2e adds verl's Megatron and VeOmni engines on up to four ranks, and whole training
# runs of tiny models with verl, vLLM and Ray; --long also the rest of the recipes' tiny twins.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

whole=
case ${1:-} in
    --e2e) whole="e2e and not long" ;;
    --long) whole="e2e" ;;
esac
[[ -z $whole ]] || shift

bash scripts/setup.sh
bin=.venv/bin
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/pyright" verl_sis

# Two processes: most of the time goes into fresh processes that import verl. tests/conftest.py says what goes where.
"$bin/python" -m pytest -m "not e2e" -n 2 "$@"
if [[ -n $whole ]]; then
    if ! command -v chromium >/dev/null; then
        if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
            echo "test: expected Chromium, in which reports are opened, found none. Type: sudo apt-get install chromium" >&2
            exit 1
        fi
        apt-get update -qq
        apt-get install -y -qq chromium >/dev/null
    fi
    # Their ranks take both cores.
    PYTHONPATH=$PWD/.venv/megatron-core "$bin/python" -m pytest tests/megatron "$@"
    PYTHONPATH=$PWD/.venv/veomni "$bin/python" -m pytest tests/veomni "$@"
    # Two at a time: a run takes about one core, and much of it is starting up.
    "$bin/python" -m pytest -m "$whole" -n 2 --durations 30 --ignore tests/megatron --ignore tests/veomni "$@"
fi

#!/usr/bin/env bash
# Set up, check style and types, and run the tests.
#
#   bash scripts/test.sh [--e2e] [PYTEST ARGUMENT ...]
#
# The fast suite takes minutes. --e2e adds whole training runs of a tiny model with verl, vLLM and Ray.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

e2e=false
if [[ ${1:-} == --e2e ]]; then
    e2e=true
    shift
fi

bash scripts/setup.sh
bin=.venv/bin
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/pyright" verl_sis

# Two processes: most of the time goes into fresh processes that import verl. Those are forked from a server, which
# --dist loadgroup lets one of the two have alone.
"$bin/python" -m pytest -m "not e2e" -n 2 --dist loadgroup "$@"
if $e2e; then
    if ! command -v chromium >/dev/null; then
        if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
            echo "test: expected Chromium, in which reports are opened, found none. Type: sudo apt-get install chromium" >&2
            exit 1
        fi
        apt-get update -qq
        apt-get install -y -qq chromium >/dev/null
    fi
    "$bin/python" -m pytest -m e2e "$@"
fi

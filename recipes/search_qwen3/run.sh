#!/usr/bin/env bash
# One run of a variant:  SEARCH_SERVER=http://HOST:8000 bash recipes/search_qwen3/run.sh VARIANT [HYDRA OVERRIDE ...]
# The server has to run already (README.md). --cfg job prints the configuration.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# The tool lives in Ray actors, possibly on other nodes: Ray has to carry what it reads from the environment.
env=+ray_kwargs.ray_init.runtime_env.env_vars
exec bash "$here/../launch.sh" search_qwen3 data/search "${1:-}" "data.recipe=$here" \
    "$env.SEARCH_SERVER=${SEARCH_SERVER:-http://127.0.0.1:8000}" \
    ${SEARCH_TOKENIZER:+"$env.SEARCH_TOKENIZER=$SEARCH_TOKENIZER"} "${@:2}"

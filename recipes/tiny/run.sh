#!/usr/bin/env bash
# One run of a variant on two CPU cores:  bash recipes/tiny/run.sh VARIANT [HYDRA OVERRIDE ...]
# --cfg job prints its configuration. It needs the .venv that scripts/setup.sh makes.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$here/../../.venv/bin/python
[[ ${1:-} == moe_* ]] && options=--routing
world=$("$python" -m verl_sis.cpu.tiny_world --out "$here/../../runs/tiny_world" ${options:-} | tail -n 1)
# The launcher ends all processes of a run with it. data.folder comes from here; what is left of it is the critic's.
LAUNCH="$python -m verl_sis.cpu.launch" VERL_SIS_TINY_WORLD=$world exec bash "$here/../launch.sh" tiny "$world" "$@"

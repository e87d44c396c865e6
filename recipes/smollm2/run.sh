#!/usr/bin/env bash
# One run of a variant on two CPU cores:  bash recipes/smollm2/run.sh VARIANT [HYDRA OVERRIDE ...]
# --cfg job prints its configuration. It needs the .venv that scripts/setup.sh makes.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$here/../../.venv/bin/python
world=$("$python" -m verl_sis.cpu.smollm2_world --out "$here/../../runs/tiny_world" | tail -n 1)
# Trainer and rollout engine take turns, so each may have both cores.
export LAUNCH="$python -m verl_sis.cpu.launch" OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} VERL_SIS_TINY_WORLD=$world
exec bash "$here/../launch.sh" smollm2 "$world" "$@"

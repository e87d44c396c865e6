#!/usr/bin/env bash
# One run of a variant on two CPU cores:  bash recipes/tiny/run.sh VARIANT [HYDRA OVERRIDE ...]
# --cfg job prints its configuration. It needs the .venv that scripts/setup.sh makes.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$here/../../.venv/bin/python
worlds=$here/../../runs/tiny_world name=tiny options=
[[ ${1:-} != moe_* ]] || name=tiny_moe options=--routing
world=$("$python" -m verl_sis.cpu.tiny_world --out "$worlds" $options | tail -n 1)
# A name for tables; the world's own is a hash of its settings.
[[ $(readlink "$worlds/$name") == "$world" ]] || ln -sfn "$world" "$worlds/$name"
# The launcher ends all processes of a run with it. The variable is for what the recipe leaves of the CPU preset.
export LAUNCH="$python -m verl_sis.cpu.launch" VERL_SIS_TINY_WORLD=$world
exec bash "$here/../launch.sh" tiny "$worlds/$name" "$@"

#!/usr/bin/env bash
# What every run.sh calls:  launch.sh RECIPE DATA_FOLDER VARIANT [HYDRA OVERRIDE ...]
#
# Environment: SEED (1), RUN (runs/RECIPE/VARIANT/seed_SEED), VERL_SIS_DATA (DATA_FOLDER), MODEL (the recipe's),
# LAUNCH (python -m verl.trainer.main_ppo).
set -euo pipefail
recipes=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
recipe=$1 data=${VERL_SIS_DATA:-$2} variant=${3:-} seed=${SEED:-1}
variants=$(python3 -c 'import json, sys; print(*json.load(open(sys.argv[1]))["variants"], sep="\n")' \
    "$recipes/$recipe/expected.json")
if ! grep -qxFe "$variant" <<<"$variants"; then
    printf "run.sh: expected a variant of %s, got '%s'. Type one of:\n%s\n" "$recipe" "$variant" "$variants" >&2
    exit 2
fi
run=$(realpath -m "${RUN:-runs/$recipe/$variant/seed_$seed}")
if [[ -s $run/metrics.jsonl ]]; then
    echo "run.sh: $run/metrics.jsonl exists, and verl would overwrite it. Type RUN=ANOTHER_FOLDER, or move it away" >&2
    exit 2
fi
# verl's trainer, which writes the metrics, is a Ray actor, possibly on another node: Ray has to carry the variable.
# shellcheck disable=SC2086  (LAUNCH is several words)
exec ${LAUNCH:-python -m verl.trainer.main_ppo} --config-dir "$recipes" "+$recipe@_global_=$variant" \
    "hydra.run.dir=$run" \
    "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH=$run/metrics.jsonl" \
    "data.folder=$(realpath -ms "$data")" "data.seed=$seed" ${MODEL:+"actor_rollout_ref.model.path=$MODEL"} \
    "trainer.project_name=$recipe" "trainer.experiment_name=$variant" \
    "trainer.default_local_dir=$run/checkpoints" "trainer.validation_data_dir=$run/validation" "${@:4}"

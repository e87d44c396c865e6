#!/usr/bin/env bash
# One run of a variant:  bash recipes/math_llama3_2_3b/run.sh VARIANT [HYDRA OVERRIDE ...]    --cfg job prints its configuration
exec bash "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" math_llama3_2_3b data/math "$@"

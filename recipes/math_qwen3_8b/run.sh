#!/usr/bin/env bash
# One run of a variant:  bash recipes/math_qwen3_8b/run.sh VARIANT [HYDRA OVERRIDE ...]    --cfg job prints its configuration
exec bash "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" math_qwen3_8b data/math "$@"

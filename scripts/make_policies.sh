#!/usr/bin/env bash
# Makes every file of policies/: the policies that the search finds for known models on known machines, with the full KV
# cache and with H2O at 20% (10% heavy hitters, 10% recent). Each file names the command that made it;
# tests/unit/test_saved_policies.py runs these commands again and compares.
#   bash scripts/make_policies.sh
# PYTHON: an interpreter that has all requirements.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# make ORGANISATION/NAME MACHINE FLAG...: policies/MODEL/MACHINE.json and MACHINE-h2o20.json
make() {
    local name="$1" machine="$2" model
    shift 2
    model="$(basename "${name,,}")"
    model="${model%-v0.1}"
    model="${model%-0924}"
    mkdir -p "policies/$model"
    local search=("${PYTHON:-python3}" -m flexgen_h2o.policy_search --model "$name" --hardware "$machine"
        --prompt-len 512 --gen-len 32 --num-prompts 1024 "$@")
    "${search[@]}" --output "policies/$model/$machine.json" | grep -A1 "^plan, found"
    "${search[@]}" --hh-ratio 0.1 --output "policies/$model/$machine-h2o20.json" | grep -A1 "^plan, found"
}

for machine in t4 a100-80; do
    for model in facebook/opt-6.7b facebook/opt-30b facebook/opt-175b openai/gpt-oss-20b openai/gpt-oss-120b \
        mistralai/Mixtral-8x7B-v0.1 mistralai/Mixtral-8x22B-v0.1 Qwen/Qwen3-8B Qwen/Qwen3-32B Qwen/Qwen3-30B-A3B \
        Qwen/Qwen3-235B-A22B allenai/OLMoE-1B-7B-0924; do
        make "$model" "$machine"
    done
done
# The others' checkpoints, and what their policies keep on disk besides, do not fit that machine's disk.
for model in facebook/opt-6.7b facebook/opt-30b openai/gpt-oss-20b Qwen/Qwen3-8B Qwen/Qwen3-30B-A3B \
    allenai/OLMoE-1B-7B-0924; do
    make "$model" build-2core
done

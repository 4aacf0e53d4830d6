#!/usr/bin/env bash
# Makes every file of policies/: the policies that the search finds for known models on known machines, with the full KV
# cache and with H2O at 20% (10% heavy hitters, 10% recent). Each file names the command that made it;
# tests/unit/test_saved_policies.py runs these commands again and compares.
#   bash scripts/make_policies.sh
# PYTHON: an interpreter that has all requirements.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# make MODEL MACHINE FLAG...: policies/MODEL/MACHINE.json and MACHINE-h2o20.json
make() {
    local model="$1" machine="$2"
    shift 2
    mkdir -p "policies/$model"
    local search=("${PYTHON:-python3}" -m flexgen_h2o.policy_search --model "facebook/$model" --hardware "$machine"
        --prompt-len 512 --gen-len 32 --num-prompts 1024 "$@")
    "${search[@]}" --output "policies/$model/$machine.json" | grep -A1 "^policy, found"
    "${search[@]}" --hh-ratio 0.1 --output "policies/$model/$machine-h2o20.json" | grep -A1 "^policy, found"
}

for machine in t4 a100-80; do
    make opt-6.7b "$machine"
    make opt-30b "$machine"
    make opt-175b "$machine"
done
make opt-6.7b build-2core # the checkpoint of OPT-175B does not fit that machine's disk
make opt-30b build-2core

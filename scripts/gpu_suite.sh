#!/usr/bin/env bash
# What needs a CUDA card, in less than 9 minutes: the parity tests of tests/gpu, then opt-6.7b at its true shape under
# --device-mem 15GiB in several placements, and a table of the runs.
#   bash scripts/gpu_suite.sh          needs a card, 20 GB of disk, 50 GB of RAM
#   bash scripts/gpu_suite.sh --tiny   the same steps with opt-125m on the CPU: a device tier of ordinary memory
# Results: $OUT, or bench/results/gpu (with --tiny a folder that is removed). FLEXGEN_OFFLOAD: where the weights go.
# PYTHON: an interpreter that has all requirements; without it, the environment of scripts/test.sh.
set -euo pipefail
if [[ -n "${PYTHON:-}" ]]; then
    ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
    export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
else
    source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
    use_venv dev
fi
cd "$ROOT"

LAST_START=420 # seconds after which no run is started
MOST=110       # seconds of one run
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
mkdir "$work/runs"

if [[ "${1:-}" == "--tiny" ]]; then
    export FLEXGEN_GPU_TEST_DEVICE=cpu
    results="${OUT:-$work/results}"
    engine=(--model facebook/opt-125m --device cpu --device-mem 2GiB --host-mem 2GiB --prompt-len 32 --gen-len 8)
elif ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no CUDA device is usable here; --tiny runs the same steps on the CPU" >&2
    exit 2
else
    results="${OUT:-$ROOT/bench/results/gpu}"
    engine=(--model facebook/opt-6.7b --device cuda --device-mem 15GiB --host-mem 40GiB --prompt-len 512 --gen-len 32)
fi
engine+=(--path _DUMMY_ --dtype bfloat16 --offload-dir "${FLEXGEN_OFFLOAD:-$work/offload}")
mkdir -p "$results"
failed=0

echo "== tests ($SECONDS s)"
timeout 200 "$PYTHON" -m pytest -m gpu tests/gpu 2>&1 | tee "$results/tests.log" || failed=1

# run NAME FLAG...: one flex_opt run
run() {
    local name="$1"
    shift
    if ((SECONDS > LAST_START)); then
        echo "== $name: left out, $SECONDS s have gone"
        return
    fi
    echo "== $name ($SECONDS s): $*"
    timeout "$MOST" "$PYTHON" bench/watch_flex_opt.py "$work/runs/$name.json" "${engine[@]}" "$@" || {
        echo "== $name: exit code $?"
        failed=1
    }
}

# WG WC CG CC HG HC: shares of weights, KV cache and hidden states on device and host, the rest on disk
run 1-weights-on-host --percent 0 100 100 0 100 0 --gpu-batch-size 16
run 2-the-same-sequential --percent 0 100 100 0 100 0 --gpu-batch-size 16 --overlap false --cut-gen-len 8
run 3-all-on-device --percent 100 0 100 0 100 0 --gpu-batch-size 4
run 4-weights-on-disk --percent 0 0 100 0 100 0 --gpu-batch-size 16 --cut-gen-len 4
run 5-weights-split --percent 50 50 100 0 100 0 --gpu-batch-size 8
run 6-kv-on-host --percent 80 20 0 100 100 0 --gpu-batch-size 8 --num-gpu-batches 4 --cut-gen-len 8
run 7-kv-on-host-attention-there --percent 80 20 0 100 100 0 --gpu-batch-size 8 --num-gpu-batches 4 \
    --cpu-cache-compute --cut-gen-len 4
run 8-kv-and-hidden-on-disk --percent 80 20 0 0 0 0 --gpu-batch-size 8 --cut-gen-len 4
run 9-auto --policy auto --cut-gen-len 4
run 10-kv-on-host-h2o --percent 80 20 0 100 100 0 --gpu-batch-size 8 --num-gpu-batches 4 --hh-ratio 0.1 --cut-gen-len 8

echo "== summary ($SECONDS s); a star: projected from a run that was cut short"
"$PYTHON" bench/gpu_summary.py "$work/runs" --output "$results/gpu_suite.json" | tee "$work/summary" | head -n -1
head -n -1 "$work/summary" >"$results/summary.txt"
exit "$failed"

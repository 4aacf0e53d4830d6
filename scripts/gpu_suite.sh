#!/usr/bin/env bash
# What needs a CUDA card, resumable, most worth first: parity tests, kernels, placements: bench/gpu.
#   bash scripts/gpu_suite.sh             a card; at most 9 minutes a call, the next call goes on
#   bash scripts/gpu_suite.sh --tiny      the same steps with small shapes on the CPU: a device tier of ordinary memory
#   bash scripts/gpu_suite.sh --help
# PYTHON: an interpreter that has all requirements; without it, the environment of scripts/test.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
use_python dev
"$PYTHON" -m bench.gpu.needs || exit
exec "$PYTHON" -m bench.gpu "$@"

#!/usr/bin/env bash
# Throughput of this package and its peers, each at its own best batch, under the same memory budget: bench/sweep.
#   bash bench/throughput_sweep.sh --quick             10 minutes, with all peers installed
#   bash bench/throughput_sweep.sh --help
# PYTHON: an interpreter that has all requirements; without it, the environment of scripts/test.sh. Peers have their own:
# bench/baselines/setup.sh SYSTEM makes it; one that is not there is left out.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/venv.sh"
use_python dev
exec "$PYTHON" -m bench.sweep "$@"

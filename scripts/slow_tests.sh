#!/usr/bin/env bash
# The tests marked slow, which the default suite leaves out; further arguments go to pytest. Those of jobs on Ray run where
# it is installed: FLEXGEN_VENV, or the active environment, after `pip install -e '.[dev,ray]'`. Those of the pages likewise:
# `.[browser]`, and Debian's chromium and chromium-driver.
#   bash scripts/slow_tests.sh [-k NAME ...]        (FLEXGEN_VENV=DIR: the environment to use or make)
#   FLEXGEN_SOAK_KILLS=20 bash scripts/slow_tests.sh tests/fault/soak.py        (how many jobs are killed: 100)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
use_venv dev
cd "$ROOT"
exec "$PYTHON" -m pytest -m "slow and not gpu" --timeout 1800 "$@"

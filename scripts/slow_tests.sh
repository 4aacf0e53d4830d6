#!/usr/bin/env bash
# The tests marked slow, which the default suite leaves out; further arguments go to pytest. A test that needs an extra which
# is not installed is skipped, and the last lines say so: `pip install -e '.[dev,ray]'` in FLEXGEN_VENV, or in the active
# environment, for jobs on Ray. Tests of the pages need `.[browser]`, and Debian's chromium and chromium-driver.
#   bash scripts/slow_tests.sh [-k NAME ...]        (FLEXGEN_VENV=DIR: the environment to use or make)
#   FLEXGEN_SOAK_KILLS=20 bash scripts/slow_tests.sh tests/fault/soak.py        (how many jobs are killed: 100)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
use_venv dev
cd "$ROOT"
exec "$PYTHON" -m pytest -m "slow and not gpu" --timeout 1800 "$@"

#!/usr/bin/env bash
# One command for each figure and table of the papers (bench/reproduce/README.md).
#   bash scripts/reproduce.sh --quick                 shows that each command works, on the test model: reproduce-quick.md
#   bash scripts/reproduce.sh --quick --only attention fidelity
#   bash scripts/reproduce.sh --list
# PYTHON: an interpreter that has all requirements; without it, the environment of scripts/test.sh with the extra `eval`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
use_python dev,eval
exec "$PYTHON" -m bench.reproduce "$@"

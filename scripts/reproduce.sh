#!/usr/bin/env bash
# Every figure and table of the papers, a command each (docs/developers/reproduce.md): bench/reproduce.
#   bash scripts/reproduce.sh --quick                 every row, small, on the shipped model: reproduce-quick.md
#   bash scripts/reproduce.sh --quick --only attention fidelity
#   bash scripts/reproduce.sh --list
# PYTHON: an interpreter that has all requirements; without it, the environment of scripts/test.sh with the extra `eval`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
use_python dev,eval
exec "$PYTHON" -m bench.reproduce "$@"

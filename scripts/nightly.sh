#!/usr/bin/env bash
# Everything that the default suite leaves out or skips: its own tests once more with all extras that a test needs, then
# the tests marked slow. An hour or more; in an environment of its own, so that the others stay small.
#   bash scripts/nightly.sh        (FLEXGEN_VENV=DIR: the environment to use or make; .venv-nightly by default)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
[[ -z "$ONLY_SHOW" ]] || show_comment
export FLEXGEN_VENV="${FLEXGEN_VENV:-$ROOT/.venv-nightly}"
use_venv dev,gpu,plot,bench,eval,gguf,ray,browser
cd "$ROOT"
failed=0
"$PYTHON" -m pytest -n 2 --dist worksteal --durations=25 || failed=1
"$PYTHON" -m pytest -m "slow and not gpu" --timeout 1800 --durations=25 || failed=1
exit "$failed"

# shellcheck shell=bash
# Sourced by <peer>/setup.sh: a peer's own environment, outside the tree.
#
#   peer_venv NAME   makes $PEERS/NAME with $PYTHON (or python3) and torch alone in it; sets VENV and PIP
#   bare_venv NAME   the same without torch
#
# PEERS: FLEXGEN_PEERS, or flexgen_h2o/peers in the cache folder. pip's own variables work:
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu gets torch without CUDA.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
PEERS="${FLEXGEN_PEERS:-${XDG_CACHE_HOME:-$HOME/.cache}/flexgen_h2o/peers}"

bare_venv() {
    VENV="$PEERS/$1"
    if [[ ! -x "$VENV/bin/python" ]]; then
        mkdir -p "$PEERS"
        "${PYTHON:-python3}" -m venv "$VENV"
    fi
    PIP=("$VENV/bin/python" -m pip install --quiet)
}

peer_venv() {
    bare_venv "$1"
    # First and alone, so that nothing later picks another build of it.
    "${PIP[@]}" "$(grep '^torch==' "$ROOT/constraints.txt")"
}

# The marker that the sweep looks for: written last, so that half an installation does not count.
peer_done() {
    "$VENV/bin/python" -m pip freeze >"$VENV/installed.txt"
    echo "$(basename "$VENV"): installed in $VENV"
}

#!/usr/bin/env bash
# The original FlexGen, in an environment of its own. It needs a CUDA card; without one its copy threads die and it hangs.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../venv.sh"
if ! command -v nvidia-smi >/dev/null; then
    echo "FlexGen needs a CUDA card, and there is none here: not installed" >&2
    exit 2
fi
peer_venv flexgen
"${PIP[@]}" flexgen==0.1.8 numpy
peer_done

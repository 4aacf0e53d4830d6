#!/usr/bin/env bash
# The original FlexGen, in an environment of its own (a minute). It runs on a CUDA card, and through cpu.py without one.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../venv.sh"
peer_venv flexgen
"${PIP[@]}" flexgen==0.1.8 numpy safetensors
peer_done

#!/usr/bin/env bash
# Hugging Face generate, in an environment of its own (a minute).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../venv.sh"
peer_venv hf
"${PIP[@]}" transformers==5.23.0 safetensors numpy
peer_done

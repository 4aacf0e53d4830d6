#!/usr/bin/env bash
# OpenVINO, in an environment of its own; torch, transformers and nncf are for the conversion (2 minutes).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../venv.sh"
peer_venv openvino
"${PIP[@]}" openvino==2026.4.1 nncf==3.4.0 transformers==5.23.0 safetensors numpy
peer_done

#!/usr/bin/env bash
# CTranslate2, in an environment of its own; torch and transformers are for its converter (a minute).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../venv.sh"
peer_venv ctranslate2
"${PIP[@]}" ctranslate2==4.8.5 transformers==5.23.0 safetensors numpy
peer_done

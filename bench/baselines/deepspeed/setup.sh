#!/usr/bin/env bash
# DeepSpeed from its PyPI sdist, for the CPU, in an environment of its own (5 minutes: its ops are compiled here, since
# within a memory limit the compiler would never end).
# Needs g++ and libaio's headers: apt-get install g++ libaio-dev
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../venv.sh"
if ! echo '#include <libaio.h>' | "${CXX:-g++}" -E -x c++ - >/dev/null 2>&1; then
    echo "DeepSpeed's aio needs g++ and libaio.h: apt-get install g++ libaio-dev" >&2
    exit 2
fi
peer_venv deepspeed
"${PIP[@]}" setuptools wheel ninja packaging py-cpuinfo numpy transformers==5.23.0 accelerate==1.15.0 safetensors
# Its setup.py looks at the torch that is installed: no isolated build.
DS_BUILD_OPS=0 DS_ACCELERATOR=cpu "${PIP[@]}" --no-build-isolation deepspeed==0.19.8
PATH="$VENV/bin:$PATH" DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR="$VENV/extensions" "$VENV/bin/python" -c '
from deepspeed.ops.op_builder.cpu import AsyncIOBuilder, ShareMemCommBuilder
for builder in (AsyncIOBuilder, ShareMemCommBuilder):
    builder().load(verbose=False)'
peer_done

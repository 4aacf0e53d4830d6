#!/usr/bin/env bash
# llama.cpp, from the source that the sdist of llama-cpp-python carries, for this machine's CPU (10 minutes on two cores).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../venv.sh"
if ! command -v g++ >/dev/null; then
    echo "llama.cpp is compiled here and needs g++: apt-get install g++" >&2
    exit 2
fi
bare_venv llamacpp
"${PIP[@]}" numpy gguf==0.19.0
# Native instructions, and its matrix products of bf16 on AVX-512 ("llamafile") named in case a default changes.
CMAKE_ARGS="-DGGML_NATIVE=ON -DGGML_LLAMAFILE=ON -DGGML_OPENMP=ON -DLLAVA_BUILD=OFF" CMAKE_BUILD_PARALLEL_LEVEL=2 \
    "${PIP[@]}" --no-binary llama-cpp-python llama-cpp-python==0.3.36
peer_done

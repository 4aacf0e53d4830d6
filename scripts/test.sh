#!/usr/bin/env bash
# The default test suite (CPU, no network, a few minutes); in two processes; further arguments go to pytest.
#   bash scripts/test.sh [-k NAME ...]        (FLEXGEN_VENV=DIR: the environment to use or make)
# It installs no extra but `dev`. A test that needs another extra is skipped; the last lines say what was skipped, and why.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
use_venv dev
cd "$ROOT"
# Two, however many cores there are: a test itself takes two threads, and some measure their process. Each gets half of
# the tests, in their order, so that most files' fixtures are made once; who is done first takes over some of the rest.
# A process and those that it starts take up to 2.5 GiB, so there is one if less than 5 GiB are free.
free="$("$PYTHON" -c "from flexgen_h2o.tiers.device import free_host_bytes; print(free_host_bytes() >> 20)")"
if ((free < 5 * 1024)); then
    echo "One process runs the tests, as $free MiB of memory are free."
    exec "$PYTHON" -m pytest "$@"
fi
exec "$PYTHON" -m pytest -n 2 --dist worksteal "$@"

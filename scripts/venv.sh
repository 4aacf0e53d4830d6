# shellcheck shell=bash
# Sourced by the other scripts: finds or makes the Python environment they run in.
#
#   use_python [EXTRAS] keeps PYTHON, an interpreter that has all requirements; without one, use_venv
#   use_venv [EXTRAS]   sets PYTHON to an interpreter that has the core requirements, and those of EXTRAS (`dev,ray`)
#
# Taken, in this order: $FLEXGEN_VENV, which is made or completed; the active environment if it has everything, which is
# never changed; .venv in the repository, made or completed. A new one is made with $PYTHON, or python3.
# pip's own variables work: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu gets torch without CUDA.
# A script that is asked for --help or --list installs nothing: without an environment it shows the comment at its top.

ONLY_SHOW=""
for argument in "$@"; do
    case "$argument" in -h | --help | --list) ONLY_SHOW="$argument" ;; esac
done

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# The tree is what runs, wherever a child process stands and whatever is installed.
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

# show_comment: prints the comment at the top of the script that was called, and ends it.
show_comment() {
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit 0
}

# has_requirements PYTHON [EXTRAS]: does this interpreter have what setup.py asks for?
has_requirements() {
    "$1" - "$ROOT/setup.py" "${2:-}" 2>/dev/null <<'PY'
import ast
import sys
from importlib.metadata import version

from packaging.requirements import Requirement

setup, extras = sys.argv[1:]
with open(setup, encoding="utf-8") as file:
    body = ast.parse(file.read()).body
lists = {node.targets[0].id: ast.literal_eval(node.value) for node in body if isinstance(node, ast.Assign)}
asked = [name for extra in filter(None, extras.split(",")) for name in lists["EXTRAS"][extra]]
for requirement in map(Requirement, lists["CORE"] + asked):
    if requirement.marker and not requirement.marker.evaluate():
        continue
    if not requirement.specifier.contains(version(requirement.name), prereleases=True):
        sys.exit(1)
PY
}

# install_into PYTHON [EXTRAS]: torch first and alone, so that nothing later picks another build of it.
install_into() {
    local target="$ROOT${2:+[$2]}"
    "$1" -m pip install --quiet -c "$ROOT/constraints.txt" "$(grep '^torch==' "$ROOT/constraints.txt")"
    "$1" -m pip install --quiet -c "$ROOT/constraints.txt" -e "$target"
}

use_venv() {
    local extra="${1:-}" venv="${FLEXGEN_VENV:-}" base="${PYTHON:-python3}"
    if [[ -z "$venv" ]]; then
        venv="$ROOT/.venv"
        if [[ -n "${VIRTUAL_ENV:-}" ]] && has_requirements "$VIRTUAL_ENV/bin/python" "$extra"; then
            venv="$VIRTUAL_ENV"
        fi
    fi
    PYTHON="$venv/bin/python"
    if has_requirements "$PYTHON" "$extra"; then
        return
    fi
    if [[ -n "$ONLY_SHOW" ]]; then
        show_comment
    fi
    if [[ ! -x "$PYTHON" ]]; then
        if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
            echo "$base is not Python 3.10 or newer: set PYTHON to one that is" >&2
            exit 2
        fi
        echo "Making $venv ..." >&2
        "$base" -m venv "$venv"
    fi
    echo "Installing flexgen_h2o and what it needs into $venv (minutes, the first time) ..." >&2
    install_into "$PYTHON" "$extra"
}

use_python() {
    [[ -n "${PYTHON:-}" ]] || use_venv "$@"
}

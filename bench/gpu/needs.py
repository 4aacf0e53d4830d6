"""Packages that the suite's Python must have; a machine that fetches nothing is to say at once what
it lacks.

    python -m bench.gpu.needs          exit code 2, and a line that names what to bring

Imports nothing of it at first: looking for a package takes no time, importing torch does.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec

NEEDED = (
    "torch",
    "numba",
    "transformers",
    "pulp",
    "psutil",
    "tqdm",
    "pytest",
    "pytest_timeout",
    "hypothesis",
)
IMPORTED = (
    "numba",
    "transformers",
    "pulp",
    "flexgen_h2o.llm",
)  # to see that they go with each other
ADVICE = (
    "bring wheels: pip install --no-deps --target DIR WHEEL ..., then PYTHONPATH=DIR "
    "(docs/lab/gpu.md)"
)


def problem() -> str | None:
    """Return what keeps the suite from running; None where nothing does."""
    lacking = [name.replace("_", "-") for name in NEEDED if find_spec(name) is None]
    if lacking:
        return f"{sys.executable} has no {', '.join(lacking)}; {ADVICE}"
    for name in IMPORTED:
        try:
            import_module(name)
        except Exception as error:  # a package may raise anything about a version of another
            said = " ".join(str(error).split())
            return (
                f"{sys.executable} cannot import {name} ({type(error).__name__}: {said}); {ADVICE}"
            )
    import torch

    if torch.cuda.is_available() and find_spec("triton") is None:
        return f"{sys.executable} has no triton, which the card's kernels are written in; {ADVICE}"
    return None


def main() -> int:
    found = problem()
    if found is None:
        return 0
    print(f"gpu_suite: {found}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

"""The source files of Python's standard library: text that every machine has.

The shipped model is trained on them, but for those that are held out; quality is measured on these.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from pathlib import Path

_NOT_OURS = frozenset({"site-packages", "dist-packages", "__pycache__", "lib2to3"})
_LEAST_BYTES = 200
_HELD_OUT_OF = 40


def stdlib_files() -> list[Path]:
    """All Python sources of the standard library, without installed packages, in name order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = set(below) - _NOT_OURS
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(p for p in found if p.stat().st_size > _LEAST_BYTES)


def is_held_out(path: Path) -> bool:
    """One file in 40, chosen by a hash of its name: the same files on every machine."""
    return hashlib.sha256(path.name.encode()).digest()[0] % _HELD_OUT_OF == 0


def read_text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", errors="ignore").replace("\r\n", "\n")

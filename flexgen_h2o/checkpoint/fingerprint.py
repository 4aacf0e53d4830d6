"""A short name for the state of some files, so that what was made from them is made anew when they change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path


def fingerprint(paths: Sequence[Path], *more: object) -> str:
    """16 hex digits of names, sizes and times of change; `more`: other facts that count, as JSON takes them."""
    facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return hashlib.sha256(json.dumps([*facts, *more]).encode()).hexdigest()[:16]

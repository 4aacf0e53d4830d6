"""Byte sizes as people write them (`12GiB`) and as the engine counts them (int)."""

from __future__ import annotations

import re

from flexgen_h2o.errors import UsageError

MOST_BYTES = 2**63
KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_UNITS = {
    "": 1, "b": 1,
    "k": KIB, "kib": KIB, "kb": 10**3,
    "m": MIB, "mib": MIB, "mb": 10**6,
    "g": GIB, "gib": GIB, "gb": 10**9,
    "t": TIB, "tib": TIB, "tb": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*)", re.IGNORECASE)


def parse_bytes(text: str | int, what: str = "size") -> int:
    """Read `12GiB`, `1.5g`, `800MB` or a plain count of bytes; `GiB`/`g` are binary, `GB` decimal.

    `what` names the flag in the error. Raises UsageError for anything else, zero and negative sizes.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        size: float = text
    else:
        match = _SIZE.fullmatch(str(text).strip())
        if match is None or match[2].lower() not in _UNITS:
            raise UsageError(f"{what}: {text!r} is not a size; write for example 12GiB, 800MiB or 4e9 as 4GB")
        size = float(match[1]) * _UNITS[match[2].lower()]
    if size < 1 or size > MOST_BYTES:
        raise UsageError(f"{what}: {text!r} must be from 1 byte to 2**63 bytes")
    return int(size)


def format_bytes(size: float) -> str:
    """`size` bytes for people: three significant places in the largest fitting binary unit."""
    for unit, scale in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(size) >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{int(size)} B"


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple

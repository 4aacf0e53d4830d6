"""Numbers and tables for people (`12GiB`), range checks, sizes that engine and planner share."""

from __future__ import annotations

import json
import math
import numbers
import re
from collections.abc import Sequence

from flexgen_h2o.core.errors import UsageError

MAX_BYTES = 2**63
KIB = 2**10
MIB = 2**20
GIB = 2**30
TIB = 2**40
MARGIN_SHARE = 0.1
MARGIN_BYTES = GIB // 2

_UNITS = {
    "": 1,
    "b": 1,
    "k": KIB,
    "kib": KIB,
    "kb": 10**3,
    "m": MIB,
    "mib": MIB,
    "mb": 10**6,
    "g": GIB,
    "gib": GIB,
    "gb": 10**9,
    "t": TIB,
    "tib": TIB,
    "tb": 10**12,
}
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*)", re.IGNORECASE)


def parse_bytes(text: str | float, what: str = "size") -> int:
    """Return the bytes of `12GiB`, `1.5g`, `800MB` or a plain count.

    `GiB` and `g` are binary, `GB` is decimal.

    what: names the flag in the error. Raises UsageError for anything else, fractions of bytes, zero
    and negative sizes.
    """
    if isinstance(text, numbers.Real) and not isinstance(text, bool):
        size = text if isinstance(text, numbers.Integral) else float(text)
        unit = 1
    else:
        match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None or match[2].lower() not in _UNITS:
            raise UsageError(
                f"{what}: {text!r:.60} is not a size; write for example 12GiB, 800MiB or 4e9 as 4GB"
            )
        unit = _UNITS[match[2].lower()]
        size = float(match[1]) * unit
    if not 1 <= size <= MAX_BYTES:
        raise UsageError(f"{what}: {text!r:.60} must be from 1 byte to 2**63 bytes")
    if unit == 1 and size != int(size):
        raise UsageError(
            f"{what}: {text!r} bytes are not whole; write for example 1.5GiB with its unit"
        )
    return int(size)


def check_int(name: str, value: object, low: int, high: int | None = None) -> int:
    """Return `value`, an integer of Python or numpy, as an int in [low, high].

    Raises UsageError that names `name`.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise UsageError(f"{name}: {quoted(value)} is not a whole number")
    whole = int(value)
    if whole < low or (high is not None and whole > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise UsageError(f"{name}: {whole!r:.60} must be {bounds}")
    return whole


def check_number(name: str, value: object, high: float | None) -> float:
    """Return `value`, a number of Python or numpy, as a finite float in [0, high].

    Raises UsageError that names `name`.
    """
    bounds = "a number of at least 0" if high is None else f"a number in [0, {high:g}]"
    number = as_float(value)
    if math.isfinite(number) and number >= 0 and (high is None or number <= high):
        return number
    raise UsageError(f"{name}: {quoted(value)} is not {bounds}")


def check_share(name: str, value: object) -> float:
    """Return `value` as a float in (0, 1]. Raises UsageError that names `name`."""
    share = as_float(value)
    if not 0 < share <= 1:
        raise UsageError(f"{name}: {quoted(value)} is not in (0, 1]")
    return share


def as_float(value: object) -> float:
    """Return `value` as a float; NaN if it is no real number, infinity if it is too large."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def format_bytes(size: float) -> str:
    """Return `size` bytes for people, with two decimals in the largest fitting binary unit."""
    for unit, scale in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(size) >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{int(size)} B"


def format_free(free: int, needed: int) -> str:
    """Return a text such as `2.99 MiB are free, 8.00 KiB too little`.

    It has the gap because rounded sizes may hide it.
    """
    gap = f", {format_bytes(needed - free)} too little" if free < needed else ""
    return f"{format_bytes(free)} are free{gap}"


def format_seconds(seconds: float) -> str:
    """Return a duration for people: `0.31 s`, `42 s`, `4 min 10 s`, `3 h 7 min`, `2 d 5 h`."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    minutes = round(seconds / 60)
    hours = round(seconds / 3600)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{hours // 24} d {hours % 24} h"


def aligned(rows: Sequence[Sequence[str]], right: bool = False) -> list[str]:
    """Return one line per row, with columns as wide as their widest cell. Short rows are filled up.

    right: all columns except the first are aligned to the right.
    """
    count = max(map(len, rows))
    filled = [[*row, *[""] * (count - len(row))] for row in rows]
    widths = [max(map(len, column)) for column in zip(*filled, strict=True)]
    signs = ["<", *(">" if right else "<") * (count - 1)]
    return [
        "  ".join(
            f"{cell:{sign}{width}}" for cell, sign, width in zip(row, signs, widths, strict=True)
        ).rstrip()
        for row in filled
    ]


def markdown_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: the column names, the rule below them, and the rows."""
    return [
        f"| {' | '.join(names)} |",
        "|" + "---|" * len(names),
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def counted(count: int, what: str) -> str:
    """Return a count with its noun: `1 row`, `2,000 rows`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def shortened(text: str, most: int) -> str:
    """Return a text of at most `most` characters. Dots replace the rest."""
    return text if len(text) <= most else text[: most - 3] + "..."


def quoted(value: object) -> str:
    """Return a value for a message: JSON, or as in Python if it has no JSON, shortened."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        text = text if text.isprintable() else json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return shortened(text, 60)


def kind_of_json(value: object) -> str:
    """Return what a value of JSON is, for a message; the class of another value."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    kinds |= {int: "a number", float: "a number", type(None): "null"}
    return kinds.get(type(value), type(value).__name__)


def is_text(text: str) -> bool:
    """Return whether UTF-8 and tokenizers accept a string.

    They do not accept half of a surrogate pair. JSON can escape such a half ("\\ud83e"), and Python
    makes them of bytes of the command line that are not UTF-8.
    """
    return _HALF_PAIR.search(text) is None


def check_text(name: str, text: str) -> str:
    """Return the text. Raises UsageError that names `name` if it is not valid text."""
    if not is_text(text):
        raise UsageError(f"{name}: holds half of a surrogate pair, which is not text; remove it")
    return text


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def less_margin(free: int) -> int:
    """Return what a run may hold of `free` bytes of a tier.

    A tenth of them, and at least half a GiB, stays free.
    """
    return max(0, int(free - max(MARGIN_BYTES, MARGIN_SHARE * free)))


class DiskBudget(int):
    """Bytes that the disk tier may hold."""

    free: int  # bytes that are free on the disk; no flag raises the budget beyond them

    def __new__(cls, nbytes: int, free: int) -> DiskBudget:
        made = super().__new__(cls, nbytes)
        made.free = free
        return made


def advice(tier: str, budget: int | None, needed: int) -> str:
    """Return how to give a tier `needed` bytes: a higher budget, or space on a full disk."""
    if isinstance(budget, DiskBudget) and needed > budget.free:
        return (
            f"{format_bytes(budget.free)} are free on that disk: free space, or give another "
            "--offload-dir"
        )
    return f"raise --{tier}-mem"


PAGE = 4096  # bytes; alignment of O_DIRECT reads and writes
ALIGN = 64  # bytes; alignment of tensors that are packed side by side
TRANSFER_CHUNK = 4 * 2**20  # bytes of one disk request
READ_THREADS = 2
WRITE_THREADS = 1
STAGING_BYTES = TRANSFER_CHUNK + 2 * PAGE  # bytes of a slot: a chunk and its ragged ends
# Slots of STAGING_BYTES that a thread has if it reads while earlier chunks are still copied to a
# device.
STAGING_SLOTS = 4
SAMPLING_CHUNK = 2**19  # logits whose probabilities are computed at a time
# Bytes of an n x n matrix that exist at a time: as many as both cores' caches hold.
SCORE_TILE_BYTES = 4 * 2**20
MASK_ROWS = 256  # queries at a time if they are the last of a prompt and need a mask
# Values of the KV cache that are unpacked at a time if they are not read packed.
PACKED_CHUNK = 2**22
FEW_ROWS = 32  # most input rows that a card multiplies by a weight's codes without decoding them
TOKEN_CHUNK = 1024  # tokens whose wide activations exist at a time
# Tokens of several micro-batches that a group of experts computes together: hundreds of rows per
# expert.
JOINED_TOKENS = 4096
NORM_CHUNK = 128  # rows that an RMS norm holds in fp32 at a time
ROTARY_CHUNK = 256  # tokens whose queries and keys are rotated at a time
ROLLING_CHUNK = 2**20  # elements of keys in slots that are rotated by their ranks at a time
FORCED_CHUNK = 64  # tokens of a row, known beforehand, that one decode sweep processes
SCORED_CHUNK = 64  # prompt tokens whose logits exist at a time
ROW_BLOCK = 16  # matrices are split over tiers at multiples of this many rows,
CUT_IN_BLOCKS = 1024  # but matrices with at least this many rows at multiples of BLOCK_ROWS
WRITE_BACK_STEPS = 16  # decode steps that wait in RAM before a disk unit of KV is written back
SEGMENT_SLOTS = 64  # most KV slots that are read and written as one area
WIRE_BUFFERS = 2  # micro-batches of hidden states on their way between a pipeline's stages
UNPACK_CHUNK = 2**20  # packed weights that torch operations unpack at a time
PACK_CHUNK = 2**20  # weights that are packed at a time
# Weights in 4 bits that become int8 rows at a time, if those are kept in memory.
REQUANTISE_CHUNK = 16 * 2**20
INT8_TILE = 2**21  # sums of int8 products that exist at a time
BLOCK_CHUNK = 4 * 2**20  # bytes of a matrix that are copied into the blocked layout at a time
STRIP_ROWS = 16  # packed rows that the compiled loop turns into int8 together
BLOCK_ROWS = 64  # rows of a panel of a blocked matrix; its rows and columns are multiples of this


def three_digits(value: float) -> str:
    """Return three significant digits, or all digits before the point, never with an exponent."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"

"""Tables as text."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], right: bool = False) -> list[str]:
    """A line a row, with columns as wide as their widest cell; short rows are filled up.

    right: all columns but the first are aligned to the right.
    """
    count = max(map(len, rows))
    filled = [[*row, *[""] * (count - len(row))] for row in rows]
    widths = [max(map(len, column)) for column in zip(*filled, strict=True)]
    signs = ["<", *(">" if right else "<") * (count - 1)]
    return [
        "  ".join(f"{cell:{sign}{width}}" for cell, sign, width in zip(row, signs, widths, strict=True)).rstrip()
        for row in filled
    ]


def markdown_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A line each: the column names, the rule below them, and the rows."""
    return [f"| {' | '.join(names)} |", "|" + "---|" * len(names), *(f"| {' | '.join(row)} |" for row in rows)]


def three_digits(value: float) -> str:
    """Three significant digits or all before the point, never an exponent."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"

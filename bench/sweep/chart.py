"""A grouped bar chart of ratios as SVG, on a logarithmic axis: below 1 bars go to the left. No package is needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

COLOURS, LOSES, GREY = ("#00796b", "#4db6ac", "#b2dfdb"), "#b5541c", "#555555"
WIDTH, LEFT, RIGHT, TOP, BAR, GAP = 900, 380, 60, 58, 11, 9  # pixels
TICKS = (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Bar:
    """A median and its range."""

    value: float
    low: float
    high: float


def draw(groups: Sequence[tuple[str, Sequence[Bar | None]]], legend: Sequence[str]) -> str:
    """A group of bars for each (name, bars), of two lines at most; None: no figure."""
    seen = [x for _, bars in groups for bar in bars if bar for x in (bar.low, bar.high)]
    low = max((tick for tick in TICKS if tick <= min([1.0, *seen]) / 1.1), default=TICKS[0])
    high = min((tick for tick in TICKS if tick >= max([1.0, *seen]) * 1.1), default=TICKS[-1])

    def at(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(value / low) / math.log(high / low)

    y, body = TOP, list[str]()
    for name, bars in groups:
        real = [(bar, colour) for bar, colour in zip(bars, COLOURS, strict=True) if bar]
        lines = name.splitlines()
        height = max(BAR * len(real), 12 * len(lines))
        body += [_text(LEFT - 8, y + 9 + 12 * i, line, "end", size=10) for i, line in enumerate(lines)]
        if not real:
            body.append(_text(at(1) + 6, y + BAR - 2, "no figure", colour=GREY, size=10))
        for bar, colour in real:
            body += _bar(bar, y, at, colour)
            y += BAR
        y += height - BAR * len(real) + GAP
    grid = [
        f'<line x1="{at(tick):.1f}" y1="{TOP - 6}" x2="{at(tick):.1f}" y2="{y - GAP + 4}" stroke="'
        f'{"#333333" if tick == 1 else "#dddddd"}"/>' + _text(at(tick), y + 6, f"{tick:g}", "middle", GREY, 10)
        for tick in TICKS
        if low <= tick <= high
    ]
    y += 18
    outlined = f'#ffffff" stroke="{LOSES}" stroke-width="1.5'
    for text, colour in (*zip(legend, COLOURS, strict=True), ("outlined: slower than the peer", outlined)):
        body.append(f'<rect x="{LEFT}" y="{y}" width="11" height="11" fill="{colour}"/>')
        body.append(_text(LEFT + 17, y + 10, text))
        y += 17
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 8}" font-family="sans-serif" '
        'font-size="12" role="img">',
        f'<rect width="{WIDTH}" height="{y + 8}" fill="#ffffff"/>',
        _text(12, 22, "Generated tokens/s over those of the fastest peer", size=15),
        _text(12, 40, "each at its best batch, median and range over rounds; the peer's name stands at the cell"),
    ]  # fmt: skip
    return "\n".join([*head, *grid, *body, "</svg>"]) + "\n"


def _bar(bar: Bar, y: float, at: Callable[[float], float], colour: str) -> list[str]:
    x, one, middle = at(bar.value), at(1.0), y + (BAR - 2) / 2
    shown = colour if bar.value >= 1 else f'{colour}" stroke="{LOSES}" stroke-width="1.5'
    left, right = at(bar.low), at(bar.high)
    return [
        f'<rect x="{min(x, one):.1f}" y="{y}" width="{abs(x - one):.1f}" height="{BAR - 2}" fill="{shown}"/>',
        f'<path d="M{left:.1f} {middle:.1f}H{right:.1f}M{left:.1f} {y + 2}v5M{right:.1f} {y + 2}v5" stroke="#333333" '
        'fill="none"/>',
        _text(max(right, one) + 5, y + BAR - 2, f"{bar.value:.3g}", size=10),
    ]


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = "#000000", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}">{text}</text>'

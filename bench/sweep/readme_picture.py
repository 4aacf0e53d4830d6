"""The picture of README: generated tokens/s of ours over Accelerate's disk offload, from the lines of a sweep.

    python -m bench.sweep.readme_picture --output docs/speed.svg

Cells are those with weights three times the RAM allowed; each system is at its own best batch. No package is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from bench.sweep.store import Line, Store
from bench.sweep.summary import cells_of, rows_of

RESULTS = Path(__file__).resolve().parents[1] / "results" / "build-2core" / "throughput.jsonl"
PEER = "accelerate-disk"
SHOWN = (
    ("facebook/opt-6.7b", 96, 192),
    ("facebook/opt-1.3b", 64, 128),
    ("facebook/opt-1.3b", 64, 64),
    ("facebook/opt-6.7b", 32, 32),
)
SYSTEMS = (
    ("ours-full", "full cache, nothing lost", "#00796b"),
    (
        "ours-h2o:0.1",
        "H2O, 20% of the prompt's columns: answers change (KL 1.3 to 1.7, small model)",
        "#4db6ac",
    ),
    ("ours-h2o-4bit-int8:0.1", "the same, weights and KV in 4 bits, products in int8 (KL 1.7)", "#b2dfdb"),
)
LEFT, BAR, GAP, TOP, SCALE = 205, 16, 14, 58, 18.5  # pixels; of SCALE: a ratio of 1


def ratios(lines: list[Line]) -> Iterator[tuple[str, list[float]]]:
    """A cell's name and, for each of SYSTEMS, its tokens/s over the peer's. KeyError where one was not measured."""
    cells = cells_of(lines)
    for model, prompt_len, gen_len in SHOWN:
        speed = {row.system: row.tokens_per_s for row in rows_of(cells[model, prompt_len, gen_len, "third"])}
        size = model.rpartition("/")[2].upper()
        yield f"{size}, {prompt_len} + {gen_len}", [speed[system] / speed[PEER] for system, _, _ in SYSTEMS]


def picture(lines: list[Line]) -> str:
    """SVG: a group of bars a cell."""
    cells = list(ratios(lines))
    height = TOP + len(cells) * (len(SYSTEMS) * BAR + GAP) + 78
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{height}" font-family="sans-serif" '
        'font-size="12" role="img">',
        f'<rect width="760" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="22" font-size="14" font-weight="bold">Generated tokens/s over those of '
        "Accelerate's disk offload</text>",
        f'<text x="{LEFT}" y="40" fill="#555555">weights three times the RAM allowed, 2 cores, no card, '
        "each at its best batch</text>",
    ]
    y = TOP
    for name, values in cells:
        parts.append(f'<text x="{LEFT - 10}" y="{y + 2 * BAR - 3}" text-anchor="end">{name} tokens</text>')
        for value, (_, _, colour) in zip(values, SYSTEMS, strict=True):
            width = value * SCALE
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 2}" fill="{colour}"/>')
            parts.append(f'<text x="{LEFT + width + 5:.1f}" y="{y + BAR - 4}">{value:.1f}</text>')
            y += BAR
        y += GAP
    x = LEFT + SCALE
    parts.append(f'<line x1="{x}" y1="{TOP - 4}" x2="{x}" y2="{y - GAP + 4}" stroke="#888888" stroke-dasharray="3 3"/>')
    parts.append(f'<text x="{x}" y="{y - GAP + 16}" fill="#555555" font-size="10" text-anchor="middle">1</text>')
    y += 14
    for _, text, colour in SYSTEMS:
        parts.append(f'<rect x="{LEFT}" y="{y}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + 18}" y="{y + 11}">{text}</text>')
        y += 18
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the lines of a sweep (.jsonl)")
    parser.add_argument("--output", type=Path, required=True, help="the picture (.svg)")
    args = parser.parse_args()
    args.output.write_text(picture(Store(args.results).latest()))


if __name__ == "__main__":
    main()

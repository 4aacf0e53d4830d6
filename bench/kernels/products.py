"""Matrix products of a decode step by how the engine holds the matrix: in order, blocked, int8, or
4 bits in int8.

    python -m bench.kernels.products                 matrices of OPT-1.3B, about four minutes
    python -m bench.kernels.products --hidden 4096   of OPT-6.7B

Claim: no product is slower with blocked matrices than with torch's F.linear, and those of few rows
are faster. All ways take turns call by call in one process. Every call reads its matrix from
memory, not from a cache. No checkpoint, no disk.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from typing import Any

import torch

from bench import common
from flexgen_h2o.cli_common import positive
from flexgen_h2o.core.errors import FlexgenError
from flexgen_h2o.core.units import TOKEN_CHUNK
from flexgen_h2o.kernels.linear import block_rows
from flexgen_h2o.planner.measure.bench import FASTER, HOST, MLP, Bench, Products
from flexgen_h2o.tiers.device import HostDevice

ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 512, TOKEN_CHUNK)


def main() -> int:
    args = _parse()
    hidden = args.hidden
    rows = sorted(args.rows)
    sizes = replace(
        HOST, widths=(hidden,), hidden=(hidden,), heads=(), rows=tuple(rows), figure_s=args.figure_s
    )
    bench = Bench(HostDevice(), sizes)
    with torch.inference_mode():
        if not block_rows(bench.normal(torch.bfloat16, hidden, hidden))[0].blocked:
            raise FlexgenError("nothing is blocked for this CPU (kernels/products.py)")
        products = Products(bench, torch.bfloat16)
        busy = common.wait_for_quiet(args.quiet_wait)
        found = []
        with common.BackgroundLoad() as seen:
            for inner, outer in ((hidden, hidden), (hidden, MLP * hidden), (MLP * hidden, hidden)):
                found += [_measure(bench, products, count, inner, outer) for count in rows]
    common.table("Products in bf16, medians", [_line(one) for one in found])
    result = {
        "benchmark": "products",
        "hidden": hidden,
        "products": found,
        "round": {"busy_before": busy, "others": seen.others, "stolen": seen.stolen},
    }
    common.finish(result, args.output)
    return 0


def _measure(bench: Bench, products: Products, rows: int, inner: int, outer: int) -> dict[str, Any]:
    """Return median milliseconds of F.linear, and of each other way the median of its gains, round
    by round."""
    ways = [products.call(rows, inner, outer)]
    ways += [products.call(rows, inner, outer, held) for held in FASTER]
    plain, *others = bench.rounds(*ways)
    gains = {
        held: statistics.median(a / b for a, b in zip(plain, seconds, strict=False))
        for held, seconds in zip(FASTER, others, strict=True)
    }
    return {
        "rows": rows,
        "inner": inner,
        "outer": outer,
        "plain_ms": 1e3 * statistics.median(plain),
        "gain": gains,
    }


def _line(one: dict[str, Any]) -> tuple[str, str]:
    gains = ", ".join(f"{held} {gain:.2f} x" for held, gain in one["gain"].items())
    return (
        f"{one['outer']} x {one['inner']}, {one['rows']} rows",
        f"{one['plain_ms']:.3f} ms; {gains}",
    )


def _parse() -> argparse.Namespace:
    parser = common.own_parser(__doc__)
    add = parser.add_argument
    add("--hidden", type=positive, default=2048, help="width of the model (2048: OPT-1.3B)")
    add(
        "--rows",
        nargs="+",
        type=positive,
        default=ROWS,
        help="inputs of a product (1 to one chunk of a prompt)",
    )
    add("--figure-s", type=float, default=0.6, help="seconds for each figure (0.6)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(common.door(main))

"""Matrices in RAM held blocked against matrices held in order: products in bf16, over shapes and rows.

    python -m bench.kernels.blocked_weights                 matrices of OPT-1.3B, two minutes
    python -m bench.kernels.blocked_weights --hidden 4096   of OPT-6.7B

Claim: no product of a sweep is slower with blocked matrices, and those of decode are faster. Both kinds take turns
call by call, in one process, each with matrices that come from memory. No checkpoint, no disk.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace

import torch

from bench import common
from flexgen_h2o.cli_common import positive
from flexgen_h2o.core.errors import FlexgenError
from flexgen_h2o.core.units import TOKEN_CHUNK
from flexgen_h2o.kernels.linear import BlockedRows, block_rows
from flexgen_h2o.planner.measure.bench import HOST, MLP, Bench, Products
from flexgen_h2o.tiers.device import HostDevice

ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 512, TOKEN_CHUNK)


def main() -> int:
    args = _parse()
    hidden = args.hidden
    sizes = replace(HOST, widths=(hidden,), hidden=(hidden,), heads=(), rows=ROWS, figure_s=args.figure_s)
    bench = Bench(HostDevice(), sizes)
    with torch.inference_mode():
        if not isinstance(block_rows(bench.normal(torch.bfloat16, hidden, hidden))[0], BlockedRows):
            raise FlexgenError("nothing is blocked for this CPU (kernels/products.py)")
        products = Products(bench, torch.bfloat16)
        busy = common.wait_for_quiet(args.quiet_wait)
        with common.BackgroundLoad() as seen:
            found = [
                _pair(bench, products, rows, *pair)
                for pair in ((hidden, hidden), (hidden, MLP * hidden), (MLP * hidden, hidden))
                for rows in ROWS
            ]
    lines = [
        (
            f"{f['outer']} x {f['inner']}, {f['rows']} rows",
            f"{f['plain_ms']:.3f} ms, {f['blocked_ms']:.3f} ms blocked: {f['gain']:.2f} x",
        )
        for f in found
    ]
    common.table("Products in bf16, medians", lines)
    result = {
        "benchmark": "blocked_weights", "hidden": hidden, "products": found,
        "round": {"busy_before": busy, "others": seen.others, "stolen": seen.stolen},
    }  # fmt: skip
    common.finish(result, args.output)
    return 0


def _pair(bench: Bench, products: Products, rows: int, inner: int, outer: int) -> dict[str, float]:
    """Median milliseconds of both, and the median of their ratios, round by round."""
    plain, blocked = bench.rounds(products.call(rows, inner, outer), products.call(rows, inner, outer, "blocked"))
    return {
        "rows": rows, "inner": inner, "outer": outer,
        "plain_ms": 1e3 * statistics.median(plain), "blocked_ms": 1e3 * statistics.median(blocked),
        "gain": statistics.median(a / b for a, b in zip(plain, blocked, strict=False)),
    }  # fmt: skip


def _parse() -> argparse.Namespace:
    parser = common.own_parser(__doc__)
    add = parser.add_argument
    add("--hidden", type=positive, default=2048, help="width of the model (2048: OPT-1.3B)")
    add("--figure-s", type=float, default=0.6, help="seconds for each figure (0.6)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(common.door(main))

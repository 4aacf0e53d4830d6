"""Claim: products of few rows an expert run at 0.65, 0.6, 0.75, 0.85 and 0.9 of the roofline at 8, 16, 32, 64 and 128
rows with blocked matrices, at 1.2 times F.linear with matrices in order, and twice as fast in int8.

Method: the three matrices of some experts, more than the last cache holds; all of them with as many rows each, in one
pass of `grouped_linear` for gates and ups and one for downs, against F.linear, which takes one after the other. All in
turn, in one process and with the same threads, beside the peak (a large product of torch's) and the memory (a sum over
the same matrices). The roofline is the lower of the peak and of rows x memory (2 FLOPs a weight and row, 2 bytes a
weight). `silu_gated` of all rows between the passes is what fusing could save. Medians of each round's.

    python -m bench.kernels.grouped_products                       both models, some minutes
    python -m bench.kernels.grouped_products --models gpt-oss --repeats 3
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

from bench.common import GB, BackgroundLoad, Spread, door, finish, own_parser, ratio_of, seconds, table, wait_for_quiet

# isort: split
import torch
import torch.nn.functional as F

from flexgen_h2o.cli_common import positive
from flexgen_h2o.core.errors import FlexgenError
from flexgen_h2o.engine.temporaries import product_sizes
from flexgen_h2o.kernels import products
from flexgen_h2o.kernels.elementwise import silu_gated
from flexgen_h2o.kernels.int8 import Int8Rows, block_int8_rows, pack_int8_rows
from flexgen_h2o.kernels.linear import DenseRows, RowParts, block_rows, grouped_linear
from flexgen_h2o.kernels.workspace import Workspace
from flexgen_h2o.tiers.device import host_buffer

SHAPES = {"qwen3-30b-a3b": (2048, 768), "gpt-oss": (2880, 2880)}  # hidden, an expert's own width
ROWS = (8, 16, 32, 64, 128)
POOL_BYTES = 160 * 2**20  # of each form of the matrices
PEAK_SIDE = 2048  # of the matrices of the product that is the peak
LEAST_S = 0.05  # of one figure
BUSY = 0.1  # share of the cores that others may take of a round; else there is another one, and the quietest are kept
BF16 = torch.bfloat16
Call = Callable[[], object]


def main() -> None:
    args = _parse()
    if not (products.has_loop(BF16) and products.has_loop(torch.uint8)):
        raise FlexgenError("no loop is compiled for this CPU (kernels/products.py)")
    wait_for_quiet(args.quiet_wait)
    if args.one_thread:
        torch.set_num_threads(1)
    found = []
    with torch.inference_mode(), BackgroundLoad() as seen:
        for model in args.models:
            experts = Experts(*SHAPES[model])
            for rows in args.rows:
                found.append({"model": model, "rows": rows, **_measure(experts, rows, args)})
                _show(found[-1])
    print(f"\n# other processes took {seen.others:.0%} of the cores")
    finish(
        {"benchmark": "grouped_products", "one_thread": args.one_thread, "products": found, "neighbours": seen.others},
        args.output,
    )


def _parse() -> argparse.Namespace:
    parser = own_parser(__doc__)
    parser.add_argument("--repeats", type=positive, default=7, help="rounds (7)")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES), help="of these experts (all)")
    parser.add_argument("--rows", nargs="+", type=positive, default=ROWS, help="of an expert (8 16 32 64 128)")
    parser.add_argument("--one-thread", action="store_true", help="by its CPU time: for cores that others use too")
    parser.add_argument(
        "--patience",
        type=seconds,
        default=60.0,
        metavar="S",
        help="most seconds for quiet rounds of a count of rows (60)",
    )
    return parser.parse_args()


class Experts:
    """As many as POOL_BYTES hold in bf16, of one random matrix each role; their copies lie apart in huge pages."""

    def __init__(self, hidden: int, width: int) -> None:
        self.hidden, self.width = hidden, width
        self.numel = 3 * hidden * width
        self.count = max(2, POOL_BYTES // (2 * self.numel))
        shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
        self.rows = {role: _copies(torch.randn(shape).to(BF16) / 8, self.count) for role, shape in shapes.items()}
        int8 = {role: _copies(pack_int8_rows(rows[0]), self.count) for role, rows in self.rows.items()}
        blocked = {role: _copies(rows[0], self.count) for role, rows in self.rows.items()}
        in_blocks = {role: _copies(packed[0], self.count) for role, packed in int8.items()}
        sizes = product_sizes(max(ROWS) * self.count, max(hidden, width), max(hidden, width))
        workspace = Workspace(host_buffer(sum(sizes.values())), sizes, BF16)
        self.forms: dict[str, dict[str, list[RowParts]]] = {
            "blocked": {role: [block_rows(one) for one in rows] for role, rows in blocked.items()},
            "in_order": {role: [(DenseRows(one),) for one in rows] for role, rows in self.rows.items()},
            "int8_blocked": {
                role: [tuple(Int8Rows(p, shapes[role][1], workspace) for p in block_int8_rows(one)) for one in packed]
                for role, packed in in_blocks.items()
            },
            "int8_in_order": {
                role: [(Int8Rows(one, shapes[role][1], workspace),) for one in packed] for role, packed in int8.items()
            },
        }

    def calls(self, rows: int) -> dict[str, Call]:
        """With `rows` rows of each expert."""
        tokens = rows * self.count
        x, gate, up, out = (
            host_buffer(2 * tokens * n).view(BF16)[: tokens * n].view(tokens, n).normal_()
            for n in (self.hidden, self.width, self.width, self.hidden)
        )
        counts = [rows] * self.count
        inner = gate.clone()

        def grouped(form: dict[str, list[RowParts]]) -> None:
            grouped_linear(x, counts, [(form["gate"], None, gate), (form["up"], None, up)])
            grouped_linear(inner, counts, [(form["down"], None, out)])

        def one_by_one() -> None:
            for i, (mine, own) in enumerate(zip(x.split(rows), inner.split(rows), strict=True)):
                F.linear(mine, self.rows["gate"][i])
                F.linear(mine, self.rows["up"][i])
                F.linear(own, self.rows["down"][i])

        return {
            "torch": one_by_one,
            "silu_gated": lambda: silu_gated(gate, up),
            **{name: partial(grouped, form) for name, form in self.forms.items()},
        }


def _copies(matrix: torch.Tensor, count: int) -> torch.Tensor:
    """(count, *shape), in huge pages."""
    memory = host_buffer(count * matrix.nbytes)[: count * matrix.nbytes].view(matrix.dtype)
    copies: torch.Tensor = memory.view(count, *matrix.shape).copy_(matrix)
    return copies


def _peak() -> Call:
    """A large product in bf16."""
    a, b, out = (torch.randn(PEAK_SIDE, PEAK_SIDE).to(BF16) for _ in range(3))
    return lambda: torch.mm(a, b.t(), out=out)


def _seconds(call: Call, clock: Callable[[], float]) -> float:
    """Of one call, as many of them as take LEAST_S."""
    start, count = clock(), 0
    while not count or clock() - start < LEAST_S:
        call()
        count += 1
    return (clock() - start) / count


def _round(calls: dict[str, Call], number: int, clock: Callable[[], float]) -> dict[str, float]:
    """Seconds of each, in another order each time."""
    return {name: _seconds(calls[name], clock) for name in (list(calls) if number % 2 else reversed(calls))}


def _measure(experts: Experts, rows: int, args: argparse.Namespace) -> dict[str, Any]:
    repeats, clock = args.repeats, time.thread_time if args.one_thread else time.perf_counter
    words = [rows.view(torch.int64) for rows in experts.rows.values()]
    calls = {"peak": _peak(), "memory": lambda: [w.sum() for w in words], **experts.calls(rows)}
    rounds: list[tuple[float, dict[str, float]]] = []
    until = time.monotonic() + args.patience
    _round(calls, 0, clock)
    while len(rounds) < repeats or (
        time.monotonic() < until and sorted(rounds, key=itemgetter(0))[repeats - 1][0] > BUSY
    ):
        with BackgroundLoad() as seen:
            spent = _round(calls, len(rounds), clock)
        rounds.append((seen.others, spent))
    kept = sorted(rounds, key=itemgetter(0))[:repeats]
    each = {name: [spent[name] for _, spent in kept] for name in calls}
    flops = 2 * rows * experts.numel * experts.count
    rates = {name: [flops / s for s in each[name]] for name in ("torch", *experts.forms)}
    peaks = [2 * PEAK_SIDE**3 / s for s in each["peak"]]
    memory = [2 * experts.numel * experts.count / s for s in each["memory"]]
    roofs = [min(peak, rows * speed) for peak, speed in zip(peaks, memory, strict=True)]
    return {
        "rounds": len(rounds), "others": Spread([others for others, _ in kept]), "peak_flops_per_s": Spread(peaks),
        "memory_bytes_per_s": Spread(memory),
        "flops_per_s": {name: Spread(values) for name, values in rates.items()},
        "of_roofline": {name: ratio_of(rates[name], roofs) for name in ("torch", "blocked", "in_order")},
        "over_torch": {name: ratio_of(rates[name], rates["torch"]) for name in experts.forms},
        "int8_over_bf16": {
            "blocked": ratio_of(rates["int8_blocked"], rates["blocked"]),
            "in_order": ratio_of(rates["int8_in_order"], rates["in_order"]),
        },
        "silu_share": ratio_of(each["silu_gated"], each["blocked"]),
    }  # fmt: skip


def _show(found: dict[str, Any]) -> None:
    rates, giga = found["flops_per_s"], 1e9
    lines = [
        ("others", found["others"].show("of the cores")),
        ("peak", found["peak_flops_per_s"].show("GFLOP/s", 0, giga)),
        ("memory", found["memory_bytes_per_s"].show("GB/s", 1, GB)),
    ]
    for name, spread in rates.items():
        line = spread.show("GFLOP/s", 0, giga)
        for what in ("of_roofline", "over_torch"):
            if name in found[what]:
                line += f", {found[what][name].show(what.replace('_', ' '))}"
        lines.append((name, line))
    lines += [(f"int8 over bf16, {name}", s.show("x")) for name, s in found["int8_over_bf16"].items()]
    lines.append(("silu_gated of blocked", found["silu_share"].show("of the time")))
    table(f"{found['model']}: {found['rows']} rows an expert", lines)


if __name__ == "__main__":
    sys.exit(door(main))

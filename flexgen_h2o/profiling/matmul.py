"""FLOPs a second of linear maps whose matrices come from memory, by their shape and by rows; and how many times faster
they are where matrices are blocked, or in int8.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from itertools import cycle, pairwise
from typing import Literal

import torch

from flexgen_h2o.kernels.blocked_rows import BlockedRows, block_rows
from flexgen_h2o.kernels.int8_blocked import block_int8_rows
from flexgen_h2o.kernels.int8_rows import Int8Rows, pack_int8_rows
from flexgen_h2o.kernels.linear import RowParts, linear
from flexgen_h2o.kernels.workspace import Workspace
from flexgen_h2o.planner.int8_sizes import product_sizes
from flexgen_h2o.profile import AS_FAST, Curve
from flexgen_h2o.profile import Products as Rates
from flexgen_h2o.profiling.bench import Bench, Call
from flexgen_h2o.profiling.sizes import Sizes

WARM_S = 1.0
MLP, HEAD = 4, 16  # out / in of a block's first MLP matrix, and of what stands for the head
# How matrices are held. int8: as the engine holds them in RAM, blocked where they can be.
Held = Literal["in order", "blocked", "int8"]
FASTER: tuple[Held, ...] = ("blocked", "int8")


def matmul_rates(bench: Bench, dtype: torch.dtype) -> Rates:
    """Curves over rows of (rows, in) times an (out, in) matrix and a bias, by out / in and by in.

    A sweep uses each matrix once, so the matrices here are many: they cycle through a pool larger than the caches.
    What would take too long is left to the next smaller matrix of its shape, whose rate it takes.
    """
    sizes, products = bench.sizes, Products(bench, dtype)
    most, middle = sizes.rows[-1], sizes.widths[len(sizes.widths) // 2]
    fastest = 2 * most * middle**2 / bench.once(products.call(most, middle, middle))
    by_shape = shapes(sizes)
    smallest = {by_inner[0] for by_inner in by_shape.values()}
    measured = [
        (inner, outer, rows)
        for by_inner in by_shape.values()
        for inner, outer in by_inner
        for rows in sizes.rows
        if 2 * rows * inner * outer / fastest <= sizes.longest_s or (inner, outer) in smallest
    ]
    seconds = bench.seconds_of(*(products.call(rows, inner, outer) for inner, outer, rows in measured))
    found = {(i, o, r): 2 * r * i * o / s for (i, o, r), s in zip(measured, seconds, strict=True)}
    for by_inner in by_shape.values():
        for smaller, larger in pairwise(by_inner):
            for rows in sizes.rows:
                found.setdefault((*larger, rows), found[(*smaller, rows)])

    def curve(inner: int, outer: int) -> Curve:
        return Curve(tuple((float(rows), found[inner, outer, rows]) for rows in sizes.rows))

    return tuple(
        (shape, tuple((float(inner), curve(inner, outer)) for inner, outer in by_inner))
        for shape, by_inner in by_shape.items()
    )


def speedups(bench: Bench, dtype: torch.dtype) -> dict[Held, Curve]:
    """How many times faster than with matrices in order products are, over rows: of a square matrix and of an MLP's
    first one, the mean. 1.0 where nothing is blocked, and in int8 where the host does not compute: no card has run it.
    """
    sizes, products = bench.sizes, Products(bench, dtype)
    width = sizes.widths[len(sizes.widths) // 2]
    pairs = [(width, width), (width, MLP * width)]
    there: list[Held] = ["int8"] if bench.device.is_host else []
    if isinstance(block_rows(bench.normal(dtype, width, width))[0], BlockedRows):
        there.append("blocked")
    points: dict[Held, list[tuple[float, float]]] = {held: [] for held in there}
    for rows in sizes.rows if there else ():
        calls = [products.call(rows, *pair, held) for held in ("in order", *there) for pair in pairs]
        seconds, count = bench.seconds_of(*calls), len(pairs)
        for i, held in enumerate(there, 1):
            gain = _mean_ratio(seconds[:count], seconds[i * count : (i + 1) * count])
            points[held].append((float(rows), gain))
    return {held: Curve(tuple(points[held])) if held in points else AS_FAST for held in FASTER}


def _mean_ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(a / b) for a, b in zip(slow, fast, strict=True)))


def shapes(sizes: Sizes) -> dict[float, list[tuple[int, int]]]:
    """(in, out) of the matrices that are measured, by out / in: a block's own, and the head's."""
    return {
        1 / MLP: [(MLP * h, h) for h in sizes.hidden],
        1.0: [(w, w) for w in sizes.widths],
        float(MLP): [(h, MLP * h) for h in sizes.hidden],
        float(HEAD): [(h, HEAD * h) for h in sizes.heads],
    }


class Products:
    """Products with the matrices of a pool; inputs and results are as large as the largest needs."""

    def __init__(self, bench: Bench, dtype: torch.dtype) -> None:
        self._bench = bench
        sizes = bench.sizes
        every = [pair for by_inner in shapes(sizes).values() for pair in by_inner]
        numel = max(inner * outer for inner, outer in every)
        self._pool = bench.normal(dtype, max(numel, sizes.weight_bytes // dtype.itemsize))
        self._held: dict[tuple[int, int, Held], list[RowParts]] = {}
        widest = max(outer for _, outer in every)
        self._inputs = bench.normal(dtype, sizes.rows[-1] * max(inner for inner, _ in every))
        self._bias, self._out = bench.normal(dtype, widest), bench.empty(dtype, sizes.rows[-1] * widest)

    def call(self, rows: int, inner: int, outer: int, held: Held = "in order") -> Call:
        """A product that takes the next matrix each time it is called; held: blocked only where it can be.

        Matrices in order and blocked ones are the same memory. To block some gives the others' numbers another order,
        and no others.
        """
        matrices = cycle(self._matrices(inner, outer, held))
        x, out = self._inputs[: rows * inner].view(rows, inner), self._out[: rows * outer].view(rows, outer)
        bias = self._bias[:outer]
        return lambda: linear(x, next(matrices), bias, out)

    def _matrices(self, inner: int, outer: int, held: Held) -> list[RowParts]:
        key = inner, outer, held
        if key not in self._held:
            whole = [part.view(outer, inner) for part in self._pool.split(inner * outer) if len(part) == inner * outer]
            if held == "int8":
                self._held[key] = self._in_int8(whole[0])
            else:
                self._held[key] = [block_rows(matrix) if held == "blocked" else (matrix,) for matrix in whole]
        return self._held[key]

    def _in_int8(self, matrix: torch.Tensor) -> list[RowParts]:
        """One over and over, in as many bytes as half of the pool."""
        (outer, inner), packed = matrix.shape, pack_int8_rows(matrix)
        count = max(1, self._bench.sizes.weight_bytes // 2 // packed.nbytes)
        memory = self._bench.empty(torch.uint8, count, *packed.shape)
        memory.copy_(packed)
        workspace = self._int8_workspace(inner, outer)
        return [tuple(Int8Rows(part, inner, workspace) for part in block_int8_rows(rows)) for rows in memory]

    def _int8_workspace(self, inner: int, outer: int) -> Workspace:
        sizes = product_sizes(self._bench.sizes.rows[-1], inner, outer)
        return Workspace(self._bench.empty(torch.uint8, sum(sizes.values())), sizes, self._pool.dtype)


def warm_cores(bench: Bench, dtype: torch.dtype) -> None:
    """Bring the clocks up and the libraries in before the first figure."""
    width = bench.sizes.widths[len(bench.sizes.widths) // 2]
    call = Products(bench, dtype).call(bench.sizes.rows[-1], width, width)
    until = time.perf_counter() + WARM_S
    while time.perf_counter() < until:
        bench.once(call)

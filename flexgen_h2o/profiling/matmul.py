"""FLOPs a second of linear maps whose matrices come from memory, by their shape and by rows."""

from __future__ import annotations

import math
import statistics
import time
from itertools import cycle, pairwise

import torch

from flexgen_h2o.kernels.blocked_rows import BlockedRows, block_rows
from flexgen_h2o.kernels.linear import RowParts, linear
from flexgen_h2o.profile import AS_FAST, Curve
from flexgen_h2o.profile import Products as Rates
from flexgen_h2o.profiling.bench import Bench, Call
from flexgen_h2o.profiling.sizes import Sizes

WARM_S = 1.0
MLP, HEAD = 4, 16  # out / in of a block's first MLP matrix, and of what stands for the head


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


def blocked_speedup(bench: Bench, dtype: torch.dtype) -> Curve:
    """How many times faster products are with blocked matrices, over rows: of a square matrix and of an MLP's first
    one, the mean. 1.0 where nothing is blocked."""
    sizes, products = bench.sizes, Products(bench, dtype)
    width = sizes.widths[len(sizes.widths) // 2]
    pairs = [(width, width), (width, MLP * width)]
    if not isinstance(block_rows(bench.normal(dtype, width, width))[0], BlockedRows):
        return AS_FAST

    def at(rows: int) -> float:
        plain = [products.call(rows, *pair) for pair in pairs]
        blocked = [products.call(rows, *pair, blocked=True) for pair in pairs]
        seconds = bench.seconds_of(*plain, *blocked)
        return math.exp(statistics.fmean(math.log(a / b) for a, b in zip(seconds[:2], seconds[2:], strict=True)))

    return Curve(tuple((float(rows), at(rows)) for rows in sizes.rows))


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
        sizes = bench.sizes
        every = [pair for by_inner in shapes(sizes).values() for pair in by_inner]
        numel = max(inner * outer for inner, outer in every)
        self._pool = bench.normal(dtype, max(numel, sizes.weight_bytes // dtype.itemsize))
        self._blocked: dict[tuple[int, int], list[RowParts]] = {}
        widest = max(outer for _, outer in every)
        self._inputs = bench.normal(dtype, sizes.rows[-1] * max(inner for inner, _ in every))
        self._bias, self._out = bench.normal(dtype, widest), bench.empty(dtype, sizes.rows[-1] * widest)

    def call(self, rows: int, inner: int, outer: int, blocked: bool = False) -> Call:
        """A product that takes the next matrix each time it is called; blocked: it is held so where it can be.

        All matrices are the same memory. To block some gives the others' numbers another order, and no others.
        """
        matrices = cycle(self._matrices(inner, outer, blocked))
        x, out = self._inputs[: rows * inner].view(rows, inner), self._out[: rows * outer].view(rows, outer)
        bias = self._bias[:outer]
        return lambda: linear(x, next(matrices), bias, out)

    def _matrices(self, inner: int, outer: int, blocked: bool) -> list[RowParts]:
        if (inner, outer) in self._blocked and blocked:
            return self._blocked[inner, outer]
        numel = inner * outer
        whole = [part.view(outer, inner) for part in self._pool.split(numel) if len(part) == numel]
        if not blocked:
            return [(matrix,) for matrix in whole]
        self._blocked[inner, outer] = [block_rows(matrix) for matrix in whole]
        return self._blocked[inner, outer]


def warm_cores(bench: Bench, dtype: torch.dtype) -> None:
    """Bring the clocks up and the libraries in before the first figure."""
    width = bench.sizes.widths[len(bench.sizes.widths) // 2]
    call = Products(bench, dtype).call(bench.sizes.rows[-1], width, width)
    until = time.perf_counter() + WARM_S
    while time.perf_counter() < until:
        bench.once(call)

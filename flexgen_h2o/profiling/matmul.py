"""FLOPs a second of linear maps whose matrices come from memory, by width and rows."""

from __future__ import annotations

import time
from itertools import cycle, product

import torch

from flexgen_h2o.kernels.linear import linear
from flexgen_h2o.profile import Curve
from flexgen_h2o.profiling.bench import Bench, Call

WARM_S = 1.0


def matmul_rates(bench: Bench, dtype: torch.dtype) -> tuple[tuple[float, Curve], ...]:
    """For each width, a curve over rows: (rows, width) times a (width, width) matrix and a bias.

    A sweep uses each matrix once, so the matrices here are many: they cycle through a pool larger than the caches.
    What would take too long is left to the next smaller width, whose rate it takes.
    """
    sizes, products = bench.sizes, Products(bench, dtype)
    most, middle = sizes.rows[-1], sizes.widths[len(sizes.widths) // 2]
    fastest = 2 * most * middle**2 / bench.once(products.call(most, middle))
    every = list(product(sizes.widths, sizes.rows))
    measured = [(w, r) for w, r in every if 2 * r * w * w / fastest <= sizes.longest_s or w == sizes.widths[0]]
    seconds = bench.seconds_of(*(products.call(rows, width) for width, rows in measured))
    found = {(w, r): 2 * r * w * w / s for (w, r), s in zip(measured, seconds, strict=True)}
    for width, narrower in zip(sizes.widths[1:], sizes.widths, strict=False):
        for rows in sizes.rows:
            found.setdefault((width, rows), found[narrower, rows])
    return tuple((float(w), Curve(tuple((float(r), found[w, r]) for r in sizes.rows))) for w in sizes.widths)


class Products:
    """Products with the matrices of a pool; inputs and results are as large as the largest needs."""

    def __init__(self, bench: Bench, dtype: torch.dtype) -> None:
        sizes = bench.sizes
        width, values = sizes.widths[-1], sizes.widths[-1] * sizes.rows[-1]
        self._pool = bench.normal(dtype, max(width * width, sizes.weight_bytes // dtype.itemsize))
        self._inputs, self._bias = bench.normal(dtype, values), bench.normal(dtype, width)
        self._out = bench.empty(dtype, values)

    def call(self, rows: int, width: int) -> Call:
        """A product that takes the next matrix each time it is called."""
        numel = width * width
        matrices = cycle([part.view(width, width) for part in self._pool.split(numel) if len(part) == numel])
        x, out = (t[: rows * width].view(rows, width) for t in (self._inputs, self._out))
        bias = self._bias[:width]
        return lambda: linear(x, (next(matrices),), bias, out)


def warm_cores(bench: Bench, dtype: torch.dtype) -> None:
    """Bring the clocks up and the libraries in before the first figure."""
    call = Products(bench, dtype).call(bench.sizes.rows[-1], bench.sizes.widths[len(bench.sizes.widths) // 2])
    until = time.perf_counter() + WARM_S
    while time.perf_counter() < until:
        bench.once(call)

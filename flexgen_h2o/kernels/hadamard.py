"""Apply the Walsh-Hadamard transform to heads before keys and values are packed.

It spreads a large channel over all channels (QuaRot, Ashkboos et al. 2024, arXiv 2404.00456). The
matrix is orthogonal and symmetric. So products of two transformed heads do not change, and a second
transform restores the original. A head whose width is no power of two is transformed in blocks of
the largest power of two that divides it.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from flexgen_h2o.core.units import ROTARY_CHUNK
from flexgen_h2o.kernels import triton
from flexgen_h2o.kernels.workspace import (
    element_of,
    is_compiled,
    mismatch,
    parallel_rows,
    row_slices,
)


def block_width(width: int) -> int:
    """Return how many numbers of a head are mixed with each other.

    They are 64 of 64, 32 of 96, 16 of 80, and 1 of an odd width.
    """
    return width & -width


def hadamard(x: torch.Tensor) -> None:
    """Transform heads in place: x (tokens, heads, d), any float dtype.

    Sums are in fp32 and rounded once. The numbers of a head and the heads of a token must be
    adjacent.
    """
    size = block_width(x.shape[2])
    if size == 1 or not x.numel():
        return
    if x.stride(2) != 1 or (x.shape[1] > 1 and x.stride(1) != x.shape[2]):
        raise mismatch("hadamard: heads", x)
    if triton.supports(x):
        grid = len(x), x.shape[1] * x.shape[2] // size
        warps = 4 if size <= 128 else 8
        arguments = x, x.stride(0), size**-0.5
        triton.launch(
            "rows.hadamard",
            grid,
            partial(hadamard_reference, x),
            arguments,
            SIZE=size,
            num_warps=warps,
        )
        return
    if not is_compiled(x):
        hadamard_reference(x)
        return
    from flexgen_h2o.kernels.compiled import rows as row_loops

    numbers = x.shape[1] * x.shape[2]
    step = x.stride(0) * x.itemsize
    factor = np.float32(size**-0.5)
    job = row_loops.Hadamard(size, numbers // size, x.data_ptr(), step, factor)
    parallel_rows(partial(row_loops.hadamard_rows, element_of(x.dtype), job), len(x), 8 * numbers)


def hadamard_reference(x: torch.Tensor) -> None:
    """Compute `hadamard` in torch operations, ROTARY_CHUNK tokens at a time.

    The result has the same bits as that of the compiled loop.
    """
    size = block_width(x.shape[2])
    for here in row_slices(len(x), 1, most=ROTARY_CHUNK):
        wide = x[here].float()
        step = 1
        while step < size:
            first, second = wide.unflatten(-1, (-1, 2, step)).unbind(-2)
            wide = torch.stack((first + second, first - second), dim=-2).flatten(-3)
            step *= 2
        x[here] = wide * size**-0.5

"""Apply the Walsh-Hadamard transform to heads before keys and values are packed.

It spreads a large channel over all channels (QuaRot, Ashkboos et al. 2024, arXiv 2404.00456). The
matrix is orthogonal and symmetric. So products of two transformed heads do not change, and a second
transform restores the original. A head whose width is no power of two is transformed in blocks of
the largest power of two that divides it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from flexgen_h2o.core.units import ROTARY_CHUNK
from flexgen_h2o.kernels import triton
from flexgen_h2o.kernels.ops import Layers, op, run_loop
from flexgen_h2o.kernels.workspace import row_slices


def block_width(width: int) -> int:
    """Return how many numbers of a head are mixed with each other.

    They are 64 of 64, 32 of 96, 16 of 80, and 1 of an odd width.
    """
    return width & -width


@op
def hadamard(x: torch.Tensor) -> None:
    """Transform heads in place: x (tokens, heads, d), any float dtype.

    Sums are in fp32 and rounded once; all versions give the same bits. The numbers of a head and
    the heads of a token must be adjacent. Torch operations transform ROTARY_CHUNK tokens at a time.
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


@hadamard.requires
def _are_adjacent(x: torch.Tensor) -> bool:
    return x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])


@hadamard.loop
def _hadamard_rows(x: torch.Tensor) -> None:
    size = block_width(x.shape[2])
    numbers = x.shape[1] * x.shape[2]
    step = x.stride(0) * x.itemsize
    given = size, numbers // size, x.data_ptr(), step, np.float32(size**-0.5)
    run_loop("rows.hadamard_rows", x.dtype, len(x), 8 * numbers, *given)


@hadamard.kernel
def _hadamard_kernel(x: torch.Tensor) -> None:
    size = block_width(x.shape[2])
    grid = len(x), x.shape[1] * x.shape[2] // size
    warps = 4 if size <= 128 else 8
    arguments = x, x.stride(0), size**-0.5
    triton.launch("rows.hadamard", grid, arguments, SIZE=size, num_warps=warps)


@hadamard.example
def _hadamard_calls(layers: Layers) -> Iterator[tuple[torch.Tensor]]:
    if layers.packing is not None:
        yield (layers.zeros(1, layers.kv_heads, layers.width),)

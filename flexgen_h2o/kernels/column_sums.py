"""Column scores of a prefill: how much attention each key received, summed over queries. Never an n x n matrix."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flexgen_h2o.kernels.threads import share_rows
from flexgen_h2o.kernels.tiles import LEAST_TILE_ROWS, REFERENCE_ROWS, TILE_BYTES, TILE_ROWS

_COMPILED = (torch.float32, torch.bfloat16)


def column_sums(q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, scale: float, first_row: int = 0) -> torch.Tensor:
    """The sum over query rows i >= max(first_row, j) and over the heads of a kv-group of exp(scale x q_i.k_j - lse_i).

    q: (b, heads, m, d), the last m of n rows; k: (b, kv_heads, n, d), any strides; lse: (b, heads, m) fp32, of
    `causal_attention_lse`. first_row is counted from the first of all n, as j is. Returns (b, kv_heads, n) fp32.
    Memory: `TILE_BYTES` of products, and as many queries and keys copied.

    fp32 is exact to a few 1e-6. In bf16 the products of a tile are rounded to bf16, by 2**-9 of each at most, so one
    probability may be off by scale x |q.k| / 512 of itself, to either side; what a column gets from many rows is off
    by far less.
    """
    batch, kv_heads, n, _ = k.shape
    group, before = q.shape[1] // kv_heads, n - q.shape[2]
    q, lse = q.unflatten(1, (kv_heads, group)), lse.unflatten(1, (kv_heads, group))
    sums = torch.zeros(batch, kv_heads, n, dtype=torch.float32, device=q.device)
    threads = min(torch.get_num_threads(), batch * kv_heads)
    row_bytes = group * n * q.itemsize  # of one kv-head's products with one row
    rows = max(LEAST_TILE_ROWS, min(TILE_ROWS, TILE_BYTES // (row_bytes * threads)))
    buffer = torch.empty(max(TILE_BYTES, rows * row_bytes) // q.itemsize, dtype=q.dtype, device=q.device)
    for some, parts in _pieces(batch, kv_heads, max(1, TILE_BYTES // (rows * row_bytes))):
        _add_piece(
            q[some, parts].flatten(0, 1), k[some, parts].flatten(0, 1), lse[some, parts].flatten(0, 1),
            scale, sums[some, parts].flatten(0, 1), range(max(before, first_row), n, rows), buffer,
        )  # fmt: skip
    return sums


def column_sums_reference(
    q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, scale: float, first_row: int = 0
) -> torch.Tensor:
    """`column_sums` in torch operations, all heads at once: memory O(b x heads x n x REFERENCE_ROWS)."""
    batch, kv_heads, n, _ = k.shape
    before = n - q.shape[2]
    q, lse = q.unflatten(1, (kv_heads, -1)), lse.unflatten(1, (kv_heads, -1))
    sums = torch.zeros(batch, kv_heads, n, dtype=torch.float32, device=q.device)
    for start in range(max(before, first_row), n, REFERENCE_ROWS):
        end = min(n, start + REFERENCE_ROWS)
        here = slice(start - before, end - before)
        products = (q[..., here, :] @ k[:, :, None, :end].transpose(-1, -2)).float()
        p = products.mul_(scale).sub_(lse[..., here, None]).exp_()
        sums[..., :end] += p.tril_(start).sum(dim=(2, 3))
    return sums


def _pieces(batch: int, kv_heads: int, most: int) -> Iterator[tuple[slice, slice]]:
    """Slices of sequences and of kv-heads, together at most `most` kv-heads each: whole sequences where they fit."""
    if most >= kv_heads:
        step = most // kv_heads
        yield from ((slice(i, i + step), slice(None)) for i in range(0, batch, step))
        return
    for i in range(batch):
        yield from ((slice(i, i + 1), slice(h, h + most)) for h in range(0, kv_heads, most))


def _add_piece(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    sums: torch.Tensor,
    starts: range,
    buffer: torch.Tensor,
) -> None:
    """q: (rows, group, m, d), k: (rows, n, d), lse: (rows, group, m), sums: (rows, n) with rows = kv-heads."""
    rows, group, _, width = q.shape
    n, before = k.shape[1], k.shape[1] - q.shape[2]
    k = k.contiguous()
    for start in starts:
        end = min(n, start + starts.step)
        count, here = end - start, slice(start - before, end - before)
        products = buffer[: rows * group * count * end].view(rows, group * count, end)
        torch.bmm(q[:, :, here].reshape(rows, group * count, width), k[:, :end].transpose(1, 2), out=products)
        _add_tile(products.view(rows, group, count, end), lse[:, :, here].contiguous(), scale, sums, start)


def _add_tile(products: torch.Tensor, lse: torch.Tensor, scale: float, sums: torch.Tensor, first: int) -> None:
    """lse: (rows, group, count), of the tile's own queries, which begin at row `first`."""
    rows, group, count, end = products.shape
    if products.device.type != "cpu" or products.dtype not in _COMPILED:
        p = products.float().mul_(scale).sub_(lse[..., None]).exp_().tril_(first)
        sums[:, :end] += p.sum(dim=(1, 2))
        return
    import numpy as np

    from flexgen_h2o.kernels import column_loops

    tile = column_loops.Tile(
        group, count, end, sums.shape[1], first, products.data_ptr(), lse.data_ptr(), sums.data_ptr()
    )
    element = np.float32(0) if products.dtype == torch.float32 else np.uint16(0)
    share_rows(
        lambda a, b: column_loops.add_tile(element, tile, scale, a, b),
        rows,
        4 * group * count * end * products.itemsize,
    )

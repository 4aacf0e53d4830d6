"""The compiled loop of `column_sums`: one pass over a tile of products."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flexgen_h2o.kernels import vectors
from flexgen_h2o.kernels.jit import bits_to_float, exp2, floats_at, jit, shorts_at

_LOG2_E = np.float32(1.4426950408889634)
_ROWS = 4  # query rows whose exponentials are added up before they go to memory


class Tile(NamedTuple):
    """Products of the query rows first..first+rows-1 with the keys 0..columns-1, and where their sums go.

    products: address of (kv-heads, group, rows, columns); lse: of (kv-heads, group, rows) fp32; sums: of (kv-heads, n)
    fp32, whole, from column 0.
    """

    group: int
    rows: int
    columns: int
    n: int
    first: int
    products: int
    lse: int
    sums: int


@jit
def add_tile(element, tile, scale, start, end):  # type: ignore[no-untyped-def]
    """sums[j] += exp(scale x product[i, j] - lse[i]) for all i >= j of the tile, for the kv-heads start..end-1.

    element: a number whose type says what products are: uint16 for bf16, float32 for fp32. Where rows and columns meet
    the diagonal, each row simply ends sooner: no mask.
    """
    factor = np.float32(scale) * _LOG2_E
    size = 2 if vectors.planes(element) == 2 else 4
    for head in range(start, end):
        sums = floats_at(tile.sums + 4 * head * tile.n)
        for g in range(tile.group):
            row = (head * tile.group + g) * tile.rows
            lse = floats_at(tile.lse + 4 * row)
            i = 0
            while i + _ROWS <= tile.rows:
                at = tile.products + size * (row + i) * tile.columns
                _add_four(element, at, tile.columns, lse, i, factor, sums, tile.first + i + 1)
                for late in range(1, _ROWS):  # the corner that the first of the four rows does not have
                    for j in range(tile.first + i + 1, tile.first + i + 1 + late):
                        s = _product(element, at + size * late * tile.columns, j)
                        sums[j] += exp2(s * factor - lse[i + late] * _LOG2_E)
                i += _ROWS
            while i < tile.rows:
                at = tile.products + size * (row + i) * tile.columns
                for j in range(tile.first + i + 1):
                    sums[j] += exp2(_product(element, at, j) * factor - lse[i] * _LOG2_E)
                i += 1


@jit
def _add_four(element, at, columns, lse, i, factor, sums, end):  # type: ignore[no-untyped-def]
    a, b, c, d = lse[i] * _LOG2_E, lse[i + 1] * _LOG2_E, lse[i + 2] * _LOG2_E, lse[i + 3] * _LOG2_E
    for j in range(end):
        ab = exp2(_product(element, at, j) * factor - a) + exp2(_product(element, at, columns + j) * factor - b)
        cd = exp2(_product(element, at, 2 * columns + j) * factor - c) + exp2(
            _product(element, at, 3 * columns + j) * factor - d
        )
        sums[j] += ab + cd


@jit
def _product(element, at, j):  # type: ignore[no-untyped-def]
    if vectors.planes(element) == 2:
        return bits_to_float(np.uint32(shorts_at(at)[j]) << np.uint32(16))
    else:
        return floats_at(at)[j]

"""Compiled loops over the whole columns that belong to rows of packed slots."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flexgen_h2o.kernels.compiled import vectors
from flexgen_h2o.kernels.jit import jit, number_at, planes

TILE = vectors.SLOTS  # columns that are computed together
FLOAT = np.float32(0)  # the element type of sums


class WholeAddresses(NamedTuple):
    """Hold the addresses of a kernels/beside.WholeColumns; made by `whole_addresses`."""

    columns: int  # per row
    width: int  # numbers per column
    keys: int
    values: int
    slots: int
    centres: int  # 0 if keys are not smoothed
    ranges: int


NO_WHOLE = WholeAddresses(0, 0, 0, 0, 0, 0, 0)


class WholeColumnArea(NamedTuple):
    """Describe columns of `width` numbers that are adjacent at an address."""

    columns: int  # per row, a multiple of TILE
    width: int
    at: int  # address


@jit
def beside_scratch(kind, group, width):  # type: ignore[no-untyped-def]
    """Return zeroed scratch for queries, or for sums: (group, chunks, planes, lanes).

    The layout is that of slots of elements `kind`.
    """
    words = width // planes(kind)
    lanes = vectors.WIDE if words >= vectors.WIDE else 1
    return np.zeros((group, -(-words // lanes), planes(kind), lanes), np.float32)


@jit
def spread_beside(kind, element, at, width, scratch):  # type: ignore[no-untyped-def]
    """Spread the queries at address `at`, of type `element`, over scratch.

    Lanes that two chunks share are 0 in the second chunk.
    """
    words = width // planes(kind)
    lanes = scratch.shape[3]
    for g in range(scratch.shape[0]):
        done = 0
        for c in range(scratch.shape[1]):
            start = min(c * lanes, words - lanes)
            for plane in range(planes(kind)):
                for i in range(lanes):
                    n = g * width + planes(kind) * (start + i) + plane
                    scratch[g, c, plane, i] = (
                        number_at(element, at, n) if start + i >= done else np.float32(0)
                    )
            done = start + lanes


@jit
def beside_dots(kind, columns, r, scratch, p, first):  # type: ignore[no-untyped-def]
    """Set p[g, first:] to the products of the queries in scratch and row r's columns."""
    _over_beside(kind, True, columns, r, scratch, p, first)


@jit
def beside_mix(kind, columns, r, scratch, p, first):  # type: ignore[no-untyped-def]
    """Set scratch to row r's columns, weighted with p[g, first:]."""
    scratch[:] = 0
    _over_beside(kind, False, columns, r, scratch, p, first)


@jit
def _over_beside(kind, is_dots, columns, r, scratch, p, first):  # type: ignore[no-untyped-def]
    group = np.int64(p.shape[0])
    stride = np.int64(p.shape[1])
    words = columns.width // planes(kind)
    scratch_at = np.int64(scratch.ctypes.data)
    p_at = np.int64(p.ctypes.data) + 4 * first
    for j in range(0, columns.columns, TILE):
        numbers = (
            columns.at + 4 * (r * columns.columns + j) * words,
            words,
            scratch_at,
            p_at + 4 * j,
            stride,
            group,
        )
        if is_dots:
            vectors.dots(kind, numbers)
        else:
            vectors.mix(kind, numbers)


@jit
def add_sums(kind, scratch, sums):  # type: ignore[no-untyped-def]
    """Add the sums in scratch to `sums` (group, width), in the order of numbers."""
    words = sums.shape[1] // planes(kind)
    lanes = scratch.shape[3]
    for g in range(sums.shape[0]):
        done = 0
        for c in range(scratch.shape[1]):
            start = min(c * lanes, words - lanes)
            for plane in range(planes(kind)):
                for i in range(done - start, lanes):
                    sums[g, planes(kind) * (start + i) + plane] += scratch[g, c, plane, i]
            done = start + lanes

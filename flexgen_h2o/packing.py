"""The format of compressed weights: bytes of a row. Arithmetic only; values are in kernels/packed_rows.py.

A matrix is compressed in groups of 64 neighbours of a row (the last one of a row may be shorter); vectors stay as they
are. A packed row is one run of bytes, so that rows split over tiers, files and rings as rows of any matrix do:

    values   4 bits: two to a byte, the first in the low half; 8 bits: one to a byte. Padded to a multiple of 4 bytes.
    groups   4 bytes each: scale and least value, both bfloat16, little-endian.

value = least + code x scale. bfloat16 has the exponents of float32, so no group is too large or too small for it, and
its coarse steps cost little: the least value is rounded down and the scale up, so that the codes still span the group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flexgen_h2o.config import Policy
from flexgen_h2o.units import round_up

GROUP = 64  # values that share a scale and a least value
GROUP_BYTES = 4  # of these two
FORMAT = 1  # raise it when the bytes change: stores of another format are not used


def num_groups(columns: int) -> int:
    return -(-columns // GROUP)


def value_bytes(columns: int, bits: int) -> int:
    """Bytes of a row's codes."""
    return round_up(-(-columns * bits // 8), 4)


def packed_row_bytes(columns: int, bits: int) -> int:
    """Bytes of a packed row: 4.5 or 8.5 bits a value where `columns` is a multiple of GROUP."""
    return value_bytes(columns, bits) + GROUP_BYTES * num_groups(columns)


@dataclass(frozen=True)
class WeightForm:
    """How weights are held and moved. itemsize: bytes of the compute dtype; bits: of a packed value, None: unpacked."""

    itemsize: int
    bits: int | None = None

    def packs(self, shape: tuple[int, ...]) -> bool:
        """Is a tensor of this shape packed?"""
        return self.bits is not None and len(shape) == 2

    def row_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of one row (of a vector: one element) of a tensor."""
        if self.bits is not None and len(shape) == 2:
            return packed_row_bytes(shape[1], self.bits)
        return math.prod(shape[1:]) * self.itemsize


def weight_form(policy: Policy, itemsize: int) -> WeightForm:
    return WeightForm(itemsize, policy.weight_bits if policy.compress_weight else None)

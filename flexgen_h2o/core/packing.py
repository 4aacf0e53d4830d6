"""The format of compressed weights: bytes of a row. Arithmetic only; values are in kernels/packed.py.

A matrix is compressed in groups of 64 neighbours of a row (the last one of a row may be shorter); vectors stay as they
are. A packed row is one run of bytes, so that rows split over tiers, files and rings as rows of any matrix do:

    values   4 bits: two to a byte, the first in the low half; 8 bits: one to a byte. Padded to a multiple of 4 bytes.
    groups   4 bytes each: scale and least value, both bfloat16, little-endian.

value = least + code x scale. bfloat16 has the exponents of float32, so no group is too large or too small for it, and
its coarse steps cost little: the least value is rounded down and the scale up, so that the codes still span the group.

Weights for products in int8 are packed otherwise: see `Packing`.

The format of a compressed KV column: a few bits a value, in groups with a scale and a least value. No tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.units import round_up

GROUP = 64  # values that share a scale and a least value
GROUP_BYTES = 4  # of these two
INT8_ROW_BYTES = 8  # of a row for products in int8 besides its values: its scale, and their sum
# Raise them when the bytes change: stores of another format are not used.
FORMAT, INT8_FORMAT = 1, 2


def num_groups(columns: int) -> int:
    return -(-columns // GROUP)


def value_bytes(columns: int, bits: int) -> int:
    """Bytes of a row's codes."""
    return round_up(-(-columns * bits // 8), 4)


def packed_row_bytes(columns: int, bits: int) -> int:
    """Bytes of a packed row: 4.5 or 8.5 bits a value where `columns` is a multiple of GROUP."""
    return value_bytes(columns, bits) + GROUP_BYTES * num_groups(columns)


@dataclass(frozen=True)
class Packing:
    """How the rows of matrices are packed: `bits` of a value, in groups; or by_row, for products in int8.

    by_row: a row is its values, int8, padded to a multiple of 4 bytes, its scale, a float32: value = int8 x scale, and
    the sum of its int8 values, an int32. Products of two such rows are whole numbers, so they need one scale for the
    whole of a row; the sum is what products with inputs that are not around 0 need (kernels/int8_blocked.py).
    """

    bits: int
    by_row: bool = False

    @property
    def label(self) -> str:
        return "int8" if self.by_row else f"{self.bits}bit"

    @property
    def format(self) -> int:
        return INT8_FORMAT if self.by_row else FORMAT

    def row_bytes(self, columns: int) -> int:
        return round_up(columns, 4) + INT8_ROW_BYTES if self.by_row else packed_row_bytes(columns, self.bits)


INT8 = Packing(8, by_row=True)


@dataclass(frozen=True)
class WeightForm:
    """How weights are held and moved. itemsize: bytes of the compute dtype; packing: of matrices, None: unpacked.

    to_int8: what is packed in groups becomes int8 rows for products, instead of rows in the compute dtype.
    """

    itemsize: int
    packing: Packing | None = None
    to_int8: bool = False

    def packs(self, shape: tuple[int, ...]) -> bool:
        """Is a tensor of this shape packed?"""
        return self.packing is not None and len(shape) == 2

    def unpacks(self, shape: tuple[int, ...]) -> bool:
        """Must it be unpacked for products?"""
        return self.packs(shape) and self.packing != INT8

    def row_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of one row (of a vector: one element) of a tensor."""
        if self.packing is not None and len(shape) == 2:
            return self.packing.row_bytes(shape[1])
        return math.prod(shape[1:]) * self.itemsize

    def unpacked_row_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of one row of a packed matrix once it is unpacked."""
        return INT8.row_bytes(shape[1]) if self.to_int8 else shape[1] * self.itemsize


def weight_form(policy: Policy, itemsize: int) -> WeightForm:
    if policy.compress_weight:
        return WeightForm(itemsize, Packing(policy.weight_bits), policy.int8_compute)
    return WeightForm(itemsize, INT8 if policy.int8_compute else None)


WORD = 4  # bytes
MOST_IN_GROUP = 64  # values that share a scale
_STEP = 8  # values; groups are multiples of it, so that in 4 and in 8 bits they begin with a word


@dataclass(frozen=True)
class SlotPacking:
    """How a key or a value of `width` numbers lies in 4-byte words: its values, then one word a group.

    Value i is `bits` bits (4 or 8) of word i // per_word, from the lowest on. A group's word is its scale in bf16 (low
    half) and its least value in bf16 (high half): number = scale x value + least. bf16 because it has fp32's range, so
    that no key is too large, becomes fp32 by a shift, and holds the least of bf16 numbers exactly; both are rounded
    outwards, so that no number of the group lies outside and none is further off than half its scale.
    """

    width: int
    bits: int

    @property
    def levels(self) -> int:
        """The largest value."""
        return (1 << self.bits) - 1

    @property
    def per_word(self) -> int:
        return 32 // self.bits

    @property
    def group(self) -> int:
        """Values of a group; the last one may have fewer."""
        count = -(-self.width // MOST_IN_GROUP)
        return min(self.width, round_up(-(-self.width // count), _STEP))

    @property
    def groups(self) -> int:
        return -(-self.width // self.group)

    @property
    def group_words(self) -> int:
        return -(-self.group // self.per_word)

    @property
    def value_words(self) -> int:
        return -(-self.width // self.per_word)

    @property
    def words(self) -> int:
        return self.value_words + self.groups

    @property
    def slot_bytes(self) -> int:
        return WORD * self.words

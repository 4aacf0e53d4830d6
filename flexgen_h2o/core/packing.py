"""The byte layout of packed numbers: weights in 4 or 8 bits a value, KV columns in 2, 3, 4 or 8, and int8 rows. No
tensors."""

from __future__ import annotations

from dataclasses import dataclass

from flexgen_h2o.core.units import round_up

WORD = 4  # bytes
GROUP = 64  # values that share a scale and a least value, at most
_STEP = 8  # values; groups are multiples of it, so that in 4 and in 8 bits they begin with a word
_FEW_BITS_STEP = 16  # the same, in 2 and in 3 bits
INT8_ROW_BYTES = 8  # of an int8 row besides its values: its scale, and their sum


def int8_row_bytes(columns: int) -> int:
    """Bytes of a row for products in int8: its int8 values, padded to whole words, a float32 scale and an int32 sum.

    value = int8 x scale. Products of two such rows are whole numbers, so a row has one scale; the sum is for products
    with inputs that are not around 0 (kernels/int8.py).
    """
    return round_up(columns, WORD) + INT8_ROW_BYTES


@dataclass(frozen=True)
class SlotPacking:
    """How `width` numbers lie in 4-byte words, little-endian: their values, then one word a group.

    Value i is `bits` bits (2, 4 or 8) of word i // per_word, from the lowest on. In 3 bits its lower two lie so, and its
    highest is bit i % 32 of word i // 32 behind them. A group's word is its scale in bf16 (low
    half) and its least value in bf16 (high half): number = scale x value + least. bf16 because it has fp32's range, so
    that no number is too large, becomes fp32 by a shift, and holds the least of bf16 numbers exactly; both are rounded
    outwards, so that no number of the group lies outside and none is further off than half its scale.
    """

    width: int
    bits: int

    @property
    def levels(self) -> int:
        """The largest value."""
        return (1 << self.bits) - 1

    @property
    def low_bits(self) -> int:
        """Bits of a value that lie side by side."""
        return 2 if self.bits == 3 else self.bits

    @property
    def per_word(self) -> int:
        return 32 // self.low_bits

    @property
    def group(self) -> int:
        """Values of a group; the last one may have fewer."""
        count, step = -(-self.width // GROUP), _STEP if self.low_bits > 2 else _FEW_BITS_STEP
        return min(self.width, round_up(-(-self.width // count), step))

    @property
    def groups(self) -> int:
        return -(-self.width // self.group)

    @property
    def group_words(self) -> int:
        return -(-self.group // self.per_word)

    @property
    def low_words(self) -> int:
        return -(-self.width // self.per_word)

    @property
    def value_words(self) -> int:
        return self.low_words + (-(-self.width // 32) if self.bits == 3 else 0)

    @property
    def words(self) -> int:
        return self.value_words + self.groups

    @property
    def slot_bytes(self) -> int:
        """Half a bit more than `bits` a number where `width` is a multiple of GROUP."""
        return WORD * self.words

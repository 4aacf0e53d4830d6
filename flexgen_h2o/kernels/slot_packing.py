"""The format of a compressed KV column: a few bits a value, in groups with a scale and a least value. No tensors."""

from __future__ import annotations

from dataclasses import dataclass

from flexgen_h2o.units import round_up

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

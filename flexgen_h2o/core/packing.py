"""The byte layout of packed numbers. The module has no tensors.

Weights have 4 or 8 bits per value, KV entries 3, 4 or 8. There are also rows of int8 values.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexgen_h2o.core.units import round_up

WORD = 4  # bytes
# The number of whole (unpacked) KV entries of a sequence is a multiple of this, as the decode
# kernel reads them.
COLUMN_STEP = 4
# The numbers of MXFP4's codes. Codes with the fourth bit set are negative.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP = 64  # most values that share a scale and a least value
# Groups are multiples of this many values, so that groups in 4 and in 8 bits begin with a word.
_STEP = 8
_FEW_BITS_STEP = 16  # the same for 3 bits
INT8_ROW_BYTES = 8  # bytes of an int8 row besides its values: their scale and their sum


def int8_row_bytes(columns: int) -> int:
    """Return the bytes of a row for products in int8.

    The row has its int8 values, padded to whole words, a float32 scale and an int32 sum. A value is
    int8 x scale. Products of two such rows are whole numbers, so a row has one scale. The sum is
    for products with inputs that are not centred on 0 (kernels/int8.py).
    """
    return round_up(columns, WORD) + INT8_ROW_BYTES


def low_bits_of(bits: int) -> int:
    """Return the bits of a value that are stored side by side (see `SlotPacking`)."""
    return 2 if bits == 3 else bits


@dataclass(frozen=True)
class SlotPacking:
    """The layout of packed numbers in 4-byte little-endian words: values, then a word per group.

    Value i is `bits` bits (4 or 8) of word i // per_word, from the lowest bit on. With 3 bits, the
    lower two are stored like this, and the highest is bit i % 32 of word i // 32 behind them.

    The word of a group has its scale in bf16 (low half) and its least number in bf16 (high half):
    number = scale x value + least. There are three reasons for bf16: it has fp32's range, so no
    number is too large; a shift makes it fp32; and it stores the least of bf16 numbers exactly.
    Both are rounded outwards. So no number of the group is outside their range, and no error is
    larger than half the scale.
    """

    # Numbers that are packed together.
    width: int
    # Bits per value: 3, 4 or 8.
    bits: int

    @property
    def levels(self) -> int:
        """Largest value."""
        return (1 << self.bits) - 1

    @property
    def low_bits(self) -> int:
        """Bits of a value that are stored side by side."""
        return low_bits_of(self.bits)

    @property
    def per_word(self) -> int:
        """Values per word, counting their low bits only."""
        return 32 // self.low_bits

    @property
    def group(self) -> int:
        """Number of values of a group. The last group may have fewer."""
        count = -(-self.width // GROUP)
        step = _STEP if self.low_bits > 2 else _FEW_BITS_STEP
        return min(self.width, round_up(-(-self.width // count), step))

    @property
    def groups(self) -> int:
        """Number of groups."""
        return -(-self.width // self.group)

    @property
    def group_words(self) -> int:
        """Words of the low bits of one group."""
        return -(-self.group // self.per_word)

    @property
    def low_words(self) -> int:
        """Words of the low bits of all values."""
        return -(-self.width // self.per_word)

    @property
    def value_words(self) -> int:
        """Words of all values, with their highest bits if they have 3 bits."""
        return self.low_words + (-(-self.width // 32) if self.bits == 3 else 0)

    @property
    def words(self) -> int:
        """Words of all values and groups."""
        return self.value_words + self.groups

    @property
    def slot_bytes(self) -> int:
        """Bytes of all words: `bits` + 1/2 bits per number if `width` is a multiple of GROUP."""
        return WORD * self.words


@dataclass(frozen=True)
class KVPacking:
    """The layouts of packed keys and values of one width in their slots. Their bits may differ."""

    keys: SlotPacking
    values: SlotPacking

    @classmethod
    def of(cls, width: int, bits: int | str) -> KVPacking:
        """Return the packing of keys and values of `width` numbers. bits: see `bits_of_kv`."""
        keys, values = bits_of_kv(bits)
        return cls(SlotPacking(width, keys), SlotPacking(width, values))

    @property
    def width(self) -> int:
        """Numbers of one key, and of one value."""
        return self.keys.width


def bits_of_kv(bits: int | str) -> tuple[int, int]:
    """Return the bits per number of keys and those of values.

    A number is for both, and "4/3" means keys in 4 bits and values in 3. Raise ValueError for other
    text.
    """
    keys, slash, values = str(bits).partition("/")
    return int(keys), int(values if slash else keys)


# ---- bytes of a sequence that are stored beside its packed slots


def window_of(window: int, slots: int) -> int:
    """Return how many of a sequence's newest KV entries stay whole beside its packed slots.

    window: the number that is asked for.
    slots: slots of the sequence. A window of a few KV entries is worth more than their slots, but
        it may use at most half of the slots.
    """
    return min(window, slots // 2) // COLUMN_STEP * COLUMN_STEP


@dataclass(frozen=True)
class KVSizes:
    """The bytes of a sequence's keys and values in one layer and kv-head."""

    # Numbers of one key.
    width: int
    # None if keys and values are not packed.
    packing: KVPacking | None = None
    # Most of the newest KV entries that are whole beside packed slots.
    window: int = 0
    # Bytes of a number that is not packed; by default those of bf16.
    itemsize: int = 2

    @property
    def slot_bytes(self) -> tuple[int, int]:
        """Bytes of the key of one slot, and of its value."""
        if self.packing is None:
            return self.width * self.itemsize, self.width * self.itemsize
        return self.packing.keys.slot_bytes, self.packing.values.slot_bytes

    @property
    def column_bytes(self) -> int:
        """Bytes of the key and the value of one slot together."""
        return sum(self.slot_bytes)

    def beside(self, slots: int) -> int:
        """Return the bytes beside this many slots if they are packed; otherwise 0.

        These are whole KV entries with the numbers of their slots, and the centre and range of each
        channel of the keys in bf16.
        """
        if self.packing is None:
            return 0
        columns = window_of(self.window, slots)
        return columns * (2 * self.width * self.itemsize + WORD) + 4 * self.width

    def nbytes(self, slots: int) -> int:
        """Return the bytes of slots and of what is beside them.

        An eviction policy's records of slots are not counted.
        """
        return slots * self.column_bytes + self.beside(slots)

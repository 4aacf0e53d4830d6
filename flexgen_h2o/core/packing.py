"""The byte layout of packed numbers: weights in 4 or 8 bits a value, KV columns in 3, 4 or 8, and int8 rows. No
tensors."""

from __future__ import annotations

from dataclasses import dataclass

from flexgen_h2o.core.units import round_up

WORD = 4  # bytes
COLUMN_STEP = 4  # whole columns of a row are multiples of it, as the decode kernel reads them
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of MXFP4's codes; those with the fourth bit set are negative
GROUP = 64  # values that share a scale and a least value, at most
_STEP = 8  # values; groups are multiples of it, so that in 4 and in 8 bits they begin with a word
_FEW_BITS_STEP = 16  # the same, in 3 bits
INT8_ROW_BYTES = 8  # of an int8 row besides its values: its scale, and their sum


def int8_row_bytes(columns: int) -> int:
    """Bytes of a row for products in int8: its int8 values, padded to whole words, a float32 scale and an int32 sum.

    value = int8 x scale. Products of two such rows are whole numbers, so a row has one scale; the sum is for products
    with inputs that are not around 0 (kernels/int8.py).
    """
    return round_up(columns, WORD) + INT8_ROW_BYTES


def low_bits_of(bits: int) -> int:
    """Bits of a value that lie side by side (`SlotPacking`)."""
    return 2 if bits == 3 else bits


@dataclass(frozen=True)
class SlotPacking:
    """How `width` numbers lie in 4-byte words, little-endian: their values, then one word a group.

    Value i is `bits` bits (4 or 8) of word i // per_word, from the lowest on. In 3 bits its lower two lie so, and its
    highest is bit i % 32 of word i // 32 behind them. A group's word is its scale in bf16 (low half) and its least
    value in bf16 (high half): number = scale x value + least. bf16 because it has fp32's range, so that no number is
    too large, becomes fp32 by a shift, and holds the least of bf16 numbers exactly; both are rounded outwards, so that
    no number of the group lies outside and none is further off than half its scale.
    """

    width: int
    bits: int

    @property
    def levels(self) -> int:
        """The largest value."""
        return (1 << self.bits) - 1

    @property
    def low_bits(self) -> int:
        return low_bits_of(self.bits)

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


@dataclass(frozen=True)
class KVPacking:
    """How packed keys and values of one width lie in their slots; they may have different bits."""

    keys: SlotPacking
    values: SlotPacking

    @classmethod
    def of(cls, width: int, bits: int | str) -> KVPacking:
        """bits: as of `bits_of_kv`."""
        keys, values = bits_of_kv(bits)
        return cls(SlotPacking(width, keys), SlotPacking(width, values))

    @property
    def width(self) -> int:
        return self.keys.width


def bits_of_kv(bits: int | str) -> tuple[int, int]:
    """Bits of a key's numbers and of a value's: a number is for both, "4/3" means keys in 4 and values in 3. Raises
    ValueError."""
    keys, slash, values = str(bits).partition("/")
    return int(keys), int(values if slash else keys)


# ---- what a row has beside its slots


def window_of(window: int, slots: int) -> int:
    """How many of the newest columns of a row with so many slots are whole beside its packed slots: a window of a few
    columns is worth more than their slots, but not more than half of all."""
    return min(window, slots // 2) // COLUMN_STEP * COLUMN_STEP


def whole_bytes(columns: int, width: int, itemsize: int) -> int:
    """What a row and kv-head has beside its packed slots: whole columns with the numbers of their slots, and centre and
    range of each channel of its keys in bf16."""
    return columns * (2 * width * itemsize + WORD) + 4 * width


@dataclass(frozen=True)
class KVSizes:
    """What a row's keys and values take in one layer and kv-head, with `width` numbers a key. window: newest columns
    that are whole beside packed slots, at most. itemsize: of a number that is not packed; bf16's by default."""

    width: int
    packing: KVPacking | None = None
    window: int = 0
    itemsize: int = 2

    @property
    def slot_bytes(self) -> tuple[int, int]:
        """A key of one slot, and a value."""
        if self.packing is None:
            return self.width * self.itemsize, self.width * self.itemsize
        return self.packing.keys.slot_bytes, self.packing.values.slot_bytes

    @property
    def column_bytes(self) -> int:
        """A key and a value of one slot."""
        return sum(self.slot_bytes)

    def beside(self, slots: int) -> int:
        """What lies beside so many slots where they are packed."""
        if self.packing is None:
            return 0
        return whole_bytes(window_of(self.window, slots), self.width, self.itemsize)

    def nbytes(self, slots: int) -> int:
        """Slots, and what lies beside them; not what a policy records of slots."""
        return slots * self.column_bytes + self.beside(slots)

"""Describe how slots are stored, and what rows attend to in addition: whole columns and sinks.

Whole columns are the newest columns of a packed cache, unpacked. R = rows, d = head width, as in
slots.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flexgen_h2o.core.packing import WORD, KVPacking
from flexgen_h2o.kernels.packed import unpack_columns
from flexgen_h2o.kernels.workspace import mismatch

if TYPE_CHECKING:
    from flexgen_h2o.kernels.compiled.slots import WholeAddresses


@dataclass(frozen=True)
class WholeColumns:
    """Hold the whole columns and the key statistics of rows with packed slots.

    A packed key is (key - centre) / range, number by number. If a slot's column is also whole, the
    whole column is read and the packed one is not. N = whole columns per row, a multiple of 4, or
    0. All tensors are contiguous and on the device of the keys.
    """

    centres: torch.Tensor  # (R, d) bfloat16; 0 if keys are not smoothed
    ranges: torch.Tensor  # (R, d) bfloat16, above 0; 1 if keys are not smoothed
    keys: torch.Tensor  # (R, N, d) in the queries' dtype, finite
    values: torch.Tensor  # as `keys`
    slots: torch.Tensor  # (R, N) int32: slot of each whole column, distinct within a row; -1: none

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> WholeColumns:
        """Return WholeColumns with `change` applied to every tensor."""
        return WholeColumns(*(change(t) for t in vars(self).values()))

    def smoothed(self, keys: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
        """Return keys (R, ..., d) of the rows as they are packed, in fp32."""
        centres, ranges = (self._along(t[rows], keys) for t in (self.centres, self.ranges))
        return (keys.float() - centres) / ranges

    def restored(self, keys: torch.Tensor) -> torch.Tensor:
        """Invert `smoothed` for keys (R, ..., d); the result is fp32."""
        return keys.float() * self._along(self.ranges, keys) + self._along(self.centres, keys)

    def enter(
        self, places: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Add new columns as whole columns, in place of those that leave the window.

        slots: (R,), the slots of the new columns; keys, values: (R, d); places: (R,), index among
        the whole columns, -1 for none.
        """
        # the slot's old column was evicted within the window
        self.slots.masked_fill_(self.slots == slots.int().unsqueeze(1), -1)
        row = (places >= 0).nonzero().squeeze(1)
        at = row, places[row].long()
        self.keys[at] = keys[row]
        self.values[at] = values[row]
        self.slots[at] = slots[row].int()

    def _along(self, numbers: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return numbers.float().view(len(numbers), *(1,) * (keys.dim() - 2), numbers.shape[1])


@dataclass(frozen=True)
class SlotForm:
    """Describe how slots are stored, and what rows attend to in addition to them."""

    packing: KVPacking | None = None  # None: slots are numbers of the queries' dtype
    whole: WholeColumns | None = None  # only with a packing; None: keys are packed as they are
    # (R, g) fp32, contiguous: for each query a logit that joins its softmax and has no value. None:
    # there are no sinks.
    sinks: torch.Tensor | None = None

    def rows(self, some: slice) -> SlotForm:
        """Return the form of some of the rows."""
        whole = None if self.whole is None else self.whole.map(lambda t: t[some])
        sinks = None if self.sinks is None else self.sinks[some]
        return SlotForm(self.packing, whole, sinks)


WHOLE = SlotForm()


def with_whole(
    whole: WholeColumns, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return unpacked slots (segments, R, S, d) with keys restored and whole columns filled in."""
    k = whole.restored(k.transpose(0, 1)).transpose(0, 1).contiguous()
    row, entry = (whole.slots >= 0).nonzero(as_tuple=True)
    slot = whole.slots[row, entry].long()
    per_segment = k.shape[2]
    place = slot // per_segment, row, slot % per_segment
    k[place] = whole.keys[row, entry].float()
    v[place] = whole.values[row, entry].float()
    return k, v


def unpacked(
    keys: torch.Tensor, values: torch.Tensor, form: SlotForm, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return slots as numbers of `dtype`, with whole columns in their slots."""
    if form.packing is None:
        return keys, values
    k = unpack_columns(keys, form.packing.keys, torch.float32)
    v = unpack_columns(values, form.packing.values, torch.float32)
    if form.whole is not None:
        k, v = with_whole(form.whole, k, v)
    return k.to(dtype), v.to(dtype)


def softmax(products: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the softmax of products (R, g, n) fp32; sinks, if any, join its denominator."""
    if sinks is None:
        return torch.softmax(products, dim=2)
    return products.sub_(torch.logaddexp(products.logsumexp(dim=2), sinks).unsqueeze(2)).exp_()


def joined(before: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return attention over two sets of columns, (R, g, d) fp32.

    before, own: attention over each set, and its log-sum-exp.
    """
    # share of `before` in the sum of exponentials over both sets
    share = torch.sigmoid(before[1] - own[1]).unsqueeze(2)
    return torch.lerp(own[0].float(), before[0].float(), share)


def whole_addresses(whole: WholeColumns, q: torch.Tensor) -> WholeAddresses:
    """Return the addresses of the whole columns.

    Raises ValueError if shapes or dtypes do not fit q.
    """
    from flexgen_h2o.kernels.compiled.slots import Area, WholeAddresses

    rows, count = whole.slots.shape
    width = q.shape[2]
    tensors = vars(whole).values()
    kinds = (torch.bfloat16, torch.bfloat16, q.dtype, q.dtype, torch.int32)
    shapes = (rows, width), (rows, width), (rows, count, width), (rows, count, width), (rows, count)
    ok = rows == len(q)
    for tensor, kind, shape in zip(tensors, kinds, shapes, strict=True):
        ok = ok and (tensor.dtype, tuple(tensor.shape)) == (kind, shape) and tensor.is_contiguous()
    if not ok:
        raise mismatch("attend: q, whole columns", q, *tensors)
    words = width * q.itemsize // WORD
    keys, values = (Area(t.data_ptr(), words, count, 0) for t in (whole.keys, whole.values))
    numbers = (t.data_ptr() for t in (whole.slots, whole.centres, whole.ranges))
    return WholeAddresses(count, keys, values, *numbers)

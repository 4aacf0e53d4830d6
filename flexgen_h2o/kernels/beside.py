"""What rows attend to beside their slots: the newest columns of a packed cache as they were, and sinks.

R = rows, d = head width, as in slots.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flexgen_h2o.core.packing import KVPacking
from flexgen_h2o.kernels.packed import unpack_columns
from flexgen_h2o.kernels.workspace import mismatch

if TYPE_CHECKING:
    from flexgen_h2o.kernels.compiled.beside import WholeAddresses


@dataclass(frozen=True)
class WholeColumns:
    """What rows have beside packed slots, on the device of the keys, each tensor contiguous.

    A packed key is (key - centre) / range, number by number. centres, ranges: (R, d) bfloat16, ranges above 0; 0 and 1
    where keys are not smoothed, so that their room is unused. Some slots have their columns whole, too, which are read
    in place of what is packed: keys, values (R, N, d) in the queries' dtype, finite; slots: (R, N) int32, all different
    in a row but for -1, of none. N: a multiple of 4, or 0.
    """

    centres: torch.Tensor
    ranges: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> WholeColumns:
        """`change` applied to every tensor."""
        return WholeColumns(*(change(t) for t in vars(self).values()))

    def smoothed(self, keys: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
        """Keys (R, ..., d) of the rows in fp32, as they are packed."""
        centres, ranges = (self._along(t[rows], keys) for t in (self.centres, self.ranges))
        return (keys.float() - centres) / ranges

    def restored(self, keys: torch.Tensor) -> torch.Tensor:
        """What `smoothed` has made of keys (R, ..., d), in fp32."""
        return keys.float() * self._along(self.ranges, keys) + self._along(self.centres, keys)

    def enter(self, places: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """New columns at `slots` (R,), keys and values (R, d), take the places (R,) of those that leave the window; -1
        for none."""
        self.slots.masked_fill_(self.slots == slots.int().unsqueeze(1), -1)  # evicted within the window
        row = (places >= 0).nonzero().squeeze(1)
        at = row, places[row].long()
        self.keys[at], self.values[at] = keys[row], values[row]
        self.slots[at] = slots[row].int()

    def _along(self, numbers: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return numbers.float().view(len(numbers), *(1,) * (keys.dim() - 2), numbers.shape[1])


@dataclass(frozen=True)
class SlotForm:
    """How slots are stored, and what rows attend to beside them. packing: None for numbers of the queries' dtype.

    whole: goes with a packing; without it keys are packed as they are. sinks: (R, g) fp32, contiguous: a logit of each
    query that joins its softmax and has no value; None: they have none.
    """

    packing: KVPacking | None = None
    whole: WholeColumns | None = None
    sinks: torch.Tensor | None = None

    def rows(self, some: slice) -> SlotForm:
        """Of some of the rows."""
        whole = None if self.whole is None else self.whole.map(lambda t: t[some])
        sinks = None if self.sinks is None else self.sinks[some]
        return SlotForm(self.packing, whole, sinks)


WHOLE = SlotForm()


def with_whole(whole: WholeColumns, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpacked slots (segments, R, S, d) with their keys as they were, and whole columns in their places."""
    k = whole.restored(k.transpose(0, 1)).transpose(0, 1).contiguous()
    row, entry = (whole.slots >= 0).nonzero(as_tuple=True)
    slot, per_segment = whole.slots[row, entry].long(), k.shape[2]
    place = slot // per_segment, row, slot % per_segment
    k[place], v[place] = whole.keys[row, entry].float(), whole.values[row, entry].float()
    return k, v


def unpacked(
    keys: torch.Tensor, values: torch.Tensor, form: SlotForm, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots as numbers of `dtype`, whole columns in their places."""
    if form.packing is None:
        return keys, values
    k = unpack_columns(keys, form.packing.keys, torch.float32)
    v = unpack_columns(values, form.packing.values, torch.float32)
    if form.whole is not None:
        k, v = with_whole(form.whole, k, v)
    return k.to(dtype), v.to(dtype)


def softmax(products: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Of products (R, g, n) fp32, and the sinks; without these where there are none."""
    if sinks is None:
        return torch.softmax(products, dim=2)
    return products.sub_(torch.logaddexp(products.logsumexp(dim=2), sinks).unsqueeze(2)).exp_()


def joined(before: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> torch.Tensor:
    """(R, g, d) fp32: attention over two sets of columns, from that over each, and their log-sum-exps."""
    share = torch.sigmoid(before[1] - own[1]).unsqueeze(2)  # of exp(before's) in the sum of both
    return torch.lerp(own[0].float(), before[0].float(), share)


def whole_addresses(whole: WholeColumns, q: torch.Tensor) -> WholeAddresses:
    """Raises ValueError."""
    from flexgen_h2o.kernels.compiled.beside import TILE, WholeAddresses

    (rows, count), width = whole.slots.shape, q.shape[2]
    tensors, kinds = vars(whole).values(), (torch.bfloat16, torch.bfloat16, q.dtype, q.dtype, torch.int32)
    shapes = (rows, width), (rows, width), (rows, count, width), (rows, count, width), (rows, count)
    ok = rows == len(q) and count % TILE == 0
    for tensor, kind, shape in zip(tensors, kinds, shapes, strict=True):
        ok = ok and (tensor.dtype, tuple(tensor.shape)) == (kind, shape) and tensor.is_contiguous()
    if not ok:
        raise mismatch("attend: q, whole columns", q, *tensors)
    addresses = (t.data_ptr() for t in (whole.keys, whole.values, whole.slots, whole.centres, whole.ranges))
    return WholeAddresses(count, width, *addresses)

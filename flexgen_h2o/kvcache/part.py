"""Parts of a KV unit as tensors, writes into their slots, and the unit while it is computed.

When sequences leave a micro-batch, its last ones move to the places that became free (compaction).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from flexgen_h2o.kernels import triton
from flexgen_h2o.kernels.decode_step import FILLED, NEWEST, OLDEST, PLACE, POSITION, SLOT
from flexgen_h2o.kernels.packed import pack_columns
from flexgen_h2o.kernels.slot_form import WHOLE, SlotForm, WholeColumns
from flexgen_h2o.kernels.slots import put_packed, put_slots
from flexgen_h2o.kvcache.budgets import Budgets, DecodeStep, Move
from flexgen_h2o.kvcache.eviction.policy import POSITIONS, RANKS, Columns, Eviction
from flexgen_h2o.kvcache.layout import UnitLayout
from flexgen_h2o.tiers.stream import Part


@dataclass(frozen=True)
class KVPart:
    """The rows of a KV unit that one tier holds, on the device where attention runs on them.

    A row is a pair of a sequence and a kv-head. A unit of state has one slot per row and no values:
    the state of all rows is `keys[0, :, 0]` (`state`).

    `part_view` and `common_parts` make it. The fields from `positions` on are the record of an
    eviction policy. Each is None unless the policy needs it (`Needs.record`). Entries of slots that
    are not filled are meaningless.
    """

    start: int  # row of the unit that is row 0 here
    # (segments, rows, segment slots, width). Slot j is [j // segment slots, :, j % segment slots].
    # If columns are packed, the width counts the int32 words of a key.
    keys: torch.Tensor
    values: torch.Tensor  # as `keys`, with the words of a value
    form: SlotForm = WHOLE  # how slots are stored, without sinks; if packed, with WholeColumns
    # (rows, slots) int32: positions of the columns in their sequences. None if nothing is recorded.
    positions: torch.Tensor | None = None
    # (rows,) int32: the slot that the next column of a full row takes. It is set with `positions`.
    victims: torch.Tensor | None = None
    scores: torch.Tensor | None = None  # (rows, slots) fp32: scores of the columns
    ranks: torch.Tensor | None = None  # (rows, slots) int32: how many columns of the row are older

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.keys.shape[1]

    @property
    def end(self) -> int:
        """First row of the unit behind this part."""
        return self.start + self.rows

    @property
    def state(self) -> torch.Tensor:
        """State of the rows of a unit of state, (rows, width), to read and to change in place."""
        return self.keys[0, :, 0]

    def part(self, first: int, end: int, start: int) -> KVPart:
        """Return rows [first, end) of this part as rows of a unit that begin at `start`."""
        form = self.form.rows(slice(first, end))
        record = {name: t[first:end] for name, t in self.record.items()}
        keys = self.keys[:, first:end]
        return KVPart(start, keys, self.values[:, first:end], form, **record)

    @property
    def record(self) -> dict[str, torch.Tensor]:
        """The policy's record, by field. The first dimension of each tensor is the row."""
        found = {name: getattr(self, name) for name in RECORD_FIELDS}
        return {name: t for name, t in found.items() if t is not None}

    def row_tensors(self) -> list[torch.Tensor]:
        """Return every tensor of the part, with the row as its first dimension."""
        columns = [self.keys.transpose(0, 1), self.values.transpose(0, 1), *self.record.values()]
        whole = self.form.whole
        return columns if whole is None else [*columns, *vars(whole).values()]

    def write(
        self,
        slots: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: torch.Tensor,
    ) -> None:
        """Write the new column of each row into its slot, and its record.

        A new column has score 0 and the highest rank. Ranks above that of the column that it
        replaces fall by one. All tensors are on the part's device.

        slots: (rows,) int64.
        keys, values: (rows, width).
        table: the rows' columns of `DecodeStep.table`.
        """
        areas = self.keys, self.values
        if self.form.whole is not None:
            put_packed(areas, slots, (keys, values), self.form, table[PLACE].long())
        else:
            keys, values = self._stored(keys, values)
            put_slots(areas, slots.unsqueeze(1), (keys.unsqueeze(1), values.unsqueeze(1)))
        if self.positions is None:
            return
        rows = torch.arange(len(slots), device=slots.device)
        self.positions[rows, slots] = table[POSITION]
        if self.scores is not None:
            self.scores[rows, slots] = 0.0
        if self.ranks is not None:
            self.ranks.sub_((self.ranks > self.ranks[rows, slots].unsqueeze(1)).int())
            self.ranks[rows, slots] = table[FILLED] - 1

    def may_leave(self, table: torch.Tensor) -> torch.Tensor:
        """Return which slots hold a column that may leave its row, (rows, slots) bool.

        table: the rows' columns of `DecodeStep.table`.
        """
        assert self.positions is not None
        oldest, newest, filled = (table[field].unsqueeze(1) for field in (OLDEST, NEWEST, FILLED))
        slots = torch.arange(self.positions.shape[1], device=table.device)
        return (slots < filled) & (self.positions >= oldest) & (self.positions <= newest)

    def evict(self, rank: torch.Tensor, may_leave: torch.Tensor) -> None:
        """Name each row's victim: of the columns that may leave, the oldest of the lowest rank.

        The next column of a full row overwrites the victim.

        rank: (rows, slots) fp32. may_leave: (rows, slots) bool.
        """
        assert self.positions is not None and self.victims is not None
        lowest = rank.masked_fill(~may_leave, float("inf")).amin(dim=1, keepdim=True)
        candidates = may_leave & ~(rank > lowest)
        last = torch.iinfo(torch.int32).max
        self.victims.copy_(self.positions.masked_fill(~candidates, last).argmin(dim=1))

    def write_first(self, rows: slice, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write columns to slots 0, 1, ... of some rows.

        keys, values: (rows, columns, width).
        """
        whole = self.form.whole
        keys = keys if whole is None else whole.smoothed(keys, rows)
        keys, values = self._stored(keys, values)
        per_segment = self.keys.shape[2]
        columns = keys.shape[1]
        for segment, a in enumerate(range(0, columns, per_segment)):
            b = min(columns, a + per_segment)
            self.keys[segment, rows, : b - a].copy_(keys[:, a:b])
            self.values[segment, rows, : b - a].copy_(values[:, a:b])

    def _stored(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values (..., width) in the form in which they are stored."""
        packing = self.form.packing
        if packing is None:
            return keys, values
        return pack_columns(keys, packing.keys), pack_columns(values, packing.values)


RECORD_FIELDS = ("positions", "victims", "scores", "ranks")


def first_rows(parts: Sequence[KVPart], rows: int) -> list[KVPart]:
    """Return the parts of a unit's first `rows` rows."""
    return [
        part if part.end <= rows else part.part(0, rows - part.start, part.start)
        for part in parts
        if part.start < rows
    ]


def part_view(
    layout: UnitLayout,
    part: Part,
    data: torch.Tensor,
    dtype: torch.dtype,
    record: dict[str, Any] | None = None,
) -> KVPart:
    """Return a part of a unit as tensors.

    data: uint8, the bytes of the part (`UnitLayout.part_bytes`).
    dtype: of keys and values that are not packed.
    record: the result of `record_view`; None if nothing is recorded and nothing is packed.
    """
    dtype = stored_dtype(layout, dtype)
    segments = data.view(dtype).view(layout.segments, -1)
    areas = segments.split([nbytes // dtype.itemsize for nbytes in layout.area_bytes(part)], dim=1)
    found = []
    for area, nbytes in zip(areas, layout.slot_bytes, strict=True):
        shape = part.rows, layout.segment_slots, nbytes // dtype.itemsize
        found.append(area[:, : math.prod(shape)].unflatten(1, shape))
    return KVPart(part.start, found[0], found[1], **(record or {}))


def stored_dtype(layout: UnitLayout, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of slots: `dtype`, or int32 if they are packed."""
    return dtype if layout.packing is None else torch.int32


def record_view(
    layout: UnitLayout, part: Part, data: torch.Tensor, dtype: torch.dtype
) -> dict[str, Any]:
    """Return what is kept of a part besides its slots, as the fields of KVPart that hold it.

    These are the policy's record, and behind it the whole columns of packed slots.

    data: uint8, the bytes of the metadata (`UnitLayout.metadata_bytes`).
    dtype: of whole columns.
    """
    rows = part.rows
    fields: dict[str, Any] = {}
    start = 0

    def take(columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the next (rows, columns) numbers of `data`."""
        nonlocal start
        end = start + rows * columns * dtype.itemsize
        found = data[start:end].view(dtype).view(rows, columns)
        start = end
        return found

    if layout.record:
        for name in layout.record:
            dtype_of = torch.int32 if name in (POSITIONS, RANKS) else torch.float32
            fields[name] = take(layout.slots, dtype_of)
        fields["victims"] = take(1, torch.int32).flatten()
    if layout.packing is not None:
        columns = layout.whole_columns
        width = layout.width
        centres, ranges = (take(width, torch.bfloat16) for _ in range(2))
        slots = take(columns, torch.int32)
        keys, values = (take(columns * width, dtype).view(rows, columns, width) for _ in range(2))
        whole = WholeColumns(centres, ranges, keys, values, slots)
        fields["form"] = SlotForm(layout.packing, whole)
    return fields


def common_parts(
    memory: torch.Tensor, dtype: torch.dtype, columns: int, shape: Sequence[int]
) -> list[KVPart]:
    """Return one part per transformer block of the prefix that all rows begin with.

    A part has one row per kv-head, and all its slots are filled. The first micro-batch of a block
    of rows writes them. Keys are rotated if the model has rotary embeddings.

    memory: uint8, with room for `columns` columns or more.
    shape: (transformer blocks, kv-heads, d).
    """
    blocks, heads, width = shape
    copies = memory.view(dtype)[: 2 * blocks * heads * columns * width].view(
        blocks, 2, 1, heads, columns, width
    )
    return [KVPart(0, keys, values) for keys, values in copies]


# ---- a unit while its layer is computed


@dataclass(frozen=True)
class Prompts:
    """Prompts that are computed together, with their causal attention.

    They are either a batch of b equally long prompts, or prompts of any lengths that are packed one
    behind the other. Then b = 1.

    In a prompt, query i attends to column j with the probability exp(scale x q_i.k_j - lse_i).

    `choose_columns` adds the columns that stay, and what is recorded of the prompts: the fields
    from `kept` on. Positions count from 0 in each prompt; `PromptPlace.stays` is the range of a
    packed prompt's positions.
    """

    # (b, heads, m, d) with rotary embeddings: the last m queries, which are all queries if the
    # prompts share no prefix
    q: torch.Tensor
    k: torch.Tensor  # (b, kv_heads, n, d) with rotary embeddings
    v: torch.Tensor  # as `k`
    # (b, heads, m) fp32: log-sum-exp, including sinks. None if the policy scores no prompts.
    lse: torch.Tensor | None
    scale: float
    first: int = 0  # sequence of the first prompt; the others follow
    lines: triton.PromptPlaces = ()  # one per prompt (`prompt_lines`)
    # Returns the column sums (1, kv_heads, tokens) of a shared prefix over its last query rows.
    # Argument: the number of these rows. Given if m < n and the policy scores prompts.
    prefix_sums: Callable[[int], torch.Tensor] | None = None
    # (b, kv_heads, columns that stay) int64: their positions, ascending
    kept: torch.Tensor | None = None
    # (b, kv_heads, n) fp32: scores of all columns. None if the policy records none.
    scores: torch.Tensor | None = None

    @property
    def is_packed(self) -> bool:
        """Return whether prompts are packed one behind the other."""
        return len(self.lines) > len(self.k)


@dataclass(frozen=True)
class KVUnit:
    """A KV unit while its layer is computed, and its eviction policy.

    The sequences that decode come first, and behind them those that enter with prompts.
    `engine/attention.py` makes it for each layer and micro-batch, `integrations/cache.py` for each
    layer.
    """

    policy: Eviction
    block: int  # the transformer block
    kv_heads: int  # rows per sequence
    budgets: Budgets  # of the micro-batch's sequences in this transformer block
    parts: Sequence[KVPart] = ()  # the parts that hold the rows
    decoding: int = 0  # sequences that decode
    # As CacheStore.open returned it: whether the whole unit is stored afterwards.
    store_whole: bool = True
    # Columns of the full cache that all sequences have in front of their own, in one copy
    # (`common_parts`). With a window it is used only while prompts are computed, because each row's
    # slots hold their own copy.
    common: KVPart | None = None
    # Called with the attention of prompts that the policy scores. The first argument is the first
    # of the sequences that were computed together.
    watch: Callable[[int, Prompts], None] | None = None
    window: int | None = None  # of ModelSpec.windows
    # (heads,): learned logits that join the softmax of each query of their head and have no values
    sinks: torch.Tensor | None = None
    # Slots hold transformed keys and values (kernels/hadamard.py), and keys are not smoothed.
    # Columns of `common` are not transformed.
    hadamard: bool = False
    # Share of the KV entries whose values a new token adds up (`attend_largest`)
    attn_sparsity: float = 1.0
    # The decode steps so far, which `begin` adds.
    steps: list[DecodeStep] = field(default_factory=list)
    # By part with rows that decode: (rows,) int64 on its device, the slots of the newest columns.
    # `begin` sets it. `attend_step` fills in the slots of the parts that it handles.
    taken: list[torch.Tensor] = field(default_factory=list)

    @property
    def enters(self) -> bool:
        """Return whether some sequences enter with prompts."""
        return self.decoding < len(self.budgets.prompts)

    @property
    def num_filled(self) -> int:
        """Slots in use of all sequences, once the layer is computed."""
        decoded = self.steps[-1].num_filled if self.steps else 0
        return decoded + (int(self.budgets.kept[self.decoding :].sum()) if self.enters else 0)

    @property
    def max_filled(self) -> int:
        """Slots in use of the fullest sequence, once the layer is computed."""
        decoded = self.steps[-1].max_filled if self.steps else 0
        entered = int(self.budgets.kept[self.decoding :].max()) if self.enters else 0
        return max(decoded, entered)

    @property
    def num_read(self) -> int:
        """KV entries that attention of the decoding sequences reads, in all steps."""
        return sum(step.num_filled for step in self.steps)

    @cached_property
    def decoding_parts(self) -> list[KVPart]:
        """The parts of the rows that decode."""
        return first_rows(self.parts, self.decoding * self.kv_heads)

    @property
    def slots_to_store(self) -> Sequence[torch.Tensor] | None:
        """The only slots that have changed; None if more than these have changed."""
        return self.taken if len(self.steps) == 1 and not self.store_whole else None

    def begin(self, step: DecodeStep) -> None:
        """Begin a decode step: find the slots of its new columns.

        A new column takes the next free slot. In a full row it takes the victim's slot, or that of
        the oldest column if nothing is recorded.
        """
        self.steps.append(step)
        self.taken.clear()
        for part in self.decoding_parts:
            if self.is_one_launch(part):  # the launch finds the slots itself
                slots = torch.empty(part.rows, dtype=torch.int64, device=part.keys.device)
            else:
                slots = self.table(part)[SLOT].long()
                if part.victims is not None:
                    slots = torch.where(slots < 0, part.victims, slots)
            self.taken.append(slots)

    def table(self, part: KVPart) -> torch.Tensor:
        """Return the columns of the newest step's `DecodeStep.table` for a part's rows."""
        where = part.keys.device
        return self.steps[-1].of_rows(self.kv_heads, part.start, part.end, where)

    def columns(self) -> Columns:
        """Return what a policy may know of the columns of the rows that decode.

        The tensors are on the device of the first part.
        """
        step = self.steps[-1]
        parts = self.decoding_parts
        where = parts[0].keys.device

        def joined(of_parts: list[torch.Tensor]) -> torch.Tensor:
            """Return (sequences, kv_heads, slots) of tensors (rows, slots)."""
            whole = torch.cat([t.to(where) for t in of_parts]) if len(parts) > 1 else of_parts[0]
            return whole.view(-1, self.kv_heads, whole.shape[1])

        names = [name for name in self.policy.needs.record if name != RANKS]
        return Columns(
            self.block,
            may_leave=joined([part.may_leave(self.table(part)) for part in parts]),
            newest=step.positions.to(where),
            **{name: joined([part.record[name] for part in parts]) for name in names},
        )

    def evict(self) -> None:
        """Name the victims of the rows that decode, by the policy's own rank.

        This is for policies that do not rank by score; otherwise the decode kernel names them.
        """
        columns = self.columns()
        rank = self.policy.rank(columns).flatten(0, 1)
        may_leave = columns.may_leave.flatten(0, 1)
        for part in self.decoding_parts:
            here = slice(part.start, part.end)
            where = part.keys.device
            part.evict(rank[here].to(where), may_leave[here].to(where))

    def is_one_launch(self, part: KVPart) -> bool:
        """Return whether `attend_step` runs the decode step of the part's rows."""
        in_one_launch = self.policy.needs.in_one_launch and self.attn_sparsity == 1
        return in_one_launch and triton.supports(part.keys)


def reset_state(parts: Sequence[KVPart], row: int) -> None:
    """Set the state of a unit's rows from `row` on to zero."""
    for part in parts:
        part.state[max(0, row - part.start) :].zero_()


# ---- compaction


def move_rows(parts: Sequence[KVPart], moves: Sequence[Move], kv_heads: int) -> None:
    """Copy the `kv_heads` rows of each moved sequence, and their metadata, to their new place.

    The rows of a sequence may be split over several parts.

    A layer with state also calls it if several sequences share a prefix. It computes the prefix for
    the first of them, and copies the state to the others.
    """
    for source, target in moves:
        done = 0
        while done < kv_heads:
            src_row = source * kv_heads + done
            dst_row = target * kv_heads + done
            src = next(v for v in parts if v.start <= src_row < v.end)
            dst = next(v for v in parts if v.start <= dst_row < v.end)
            n = min(kv_heads - done, src.end - src_row, dst.end - dst_row)
            a = src_row - src.start
            b = dst_row - dst.start
            for there, here in zip(dst.row_tensors(), src.row_tensors(), strict=True):
                there[b : b + n].copy_(here[a : a + n])
            done += n

"""Decode attention of the rows of a KV unit: one new token per sequence, and the next victims.

A column is one KV entry: the key and the value of one token. A victim is only named: the next
column of its row overwrites its slot.

A prefix that all sequences of a block begin with is held once per transformer block. Slots then
hold only the columns behind it. The queries of all rows read the prefix together (Hydragen,
Juravsky et al. 2024, arXiv 2402.05099). The result is combined with that of each row's own slots by
both log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from flexgen_h2o.core.units import QUERY_CHUNK, ROLLING_CHUNK
from flexgen_h2o.kernels.decode_step import (
    FILLED,
    GAIN,
    NEWEST,
    OLDEST,
    PLACE,
    POSITION,
    InFront,
    StepSlots,
    attend_step,
)
from flexgen_h2o.kernels.elementwise import Rotation
from flexgen_h2o.kernels.hadamard import hadamard
from flexgen_h2o.kernels.slot_form import SlotForm, joined, unpacked
from flexgen_h2o.kernels.slots import Pair, ScoreState, attend, attend_largest, attend_lse
from flexgen_h2o.kvcache.budgets import DecodeStep
from flexgen_h2o.kvcache.eviction.policy import (
    NORMS,
    POSITIONS,
    SCORES,
    Columns,
    KeyScores,
    Needs,
    value_sizes,
)
from flexgen_h2o.kvcache.part import KVPart, KVUnit, first_rows


def attend_slots(
    qkv: Sequence[torch.Tensor],
    unit: KVUnit,
    scale: float,
    out: torch.Tensor,
    rotation: Rotation | None = None,
) -> torch.Tensor:
    """Store each row's new column, attend over the row's filled slots, and return `out`.

    It runs the step that `KVUnit.begin` began last. The attention is written to `out`. Each part is
    computed on the device that holds it. If the policy scores columns, each slot's score grows by
    the attention that it received, and the next victim of each row is named.

    qkv: q (sequences, heads, d), k and v (sequences, kv_heads, d); all are changed in place if
    `unit.hadamard` is set.
    out: (sequences, heads x d).
    rotation: turns the keys by their ranks as they are read; None if keys are stored rotated.
    """
    step = unit.steps[-1]
    needs = unit.policy.needs
    q, k, v = qkv
    count = k.shape[0] * k.shape[1]
    width = k.shape[2]
    group = q.shape[1] // k.shape[1]
    sizes = value_sizes(needs, v.view(count, width)) if NORMS in needs.record else None
    if unit.hadamard:
        for heads in qkv:
            hadamard(heads)
    q = q.view(count, group, width)
    attn_out = out.view(count, group, width)
    k = k.view(count, width)
    v = v.view(count, width)
    # With a window, each row's own slots hold its copy of the common prefix.
    common = unit.common if unit.window is None else None
    prefix = None if common is None else _attend_common(common, q, scale)
    sinks = unit.sinks_of_rows(len(step.positions))
    parts = first_rows(unit.parts, count)
    before = _in_front(prefix, sinks) if any(map(unit.is_one_launch, parts)) else None
    for part, slots in zip(parts, unit.taken, strict=True):
        if unit.is_one_launch(part):
            slots_of_part = _step_slots(unit, part, slots, before)
            attend_step(qkv[0], qkv[1], qkv[2], slots_of_part, scale, out.view(qkv[0].shape))
            continue
        here = slice(part.start, part.end)
        where = part.keys.device
        queries, keys, values = (t[here].to(where) for t in (q, k, v))
        table = step.of_rows(unit.kv_heads, part.start, part.end, where)
        part.write(slots, keys, values, table[PLACE])
        if part.positions is not None:
            record_columns(part, slots, table, None if sizes is None else sizes[here].to(where))
        if needs.by_keys is not None:
            score_by_keys(part, unit, needs.by_keys, step)
        form = part.form if sinks is None else replace(part.form, sinks=sinks[here].to(where))
        own_prefix = None if prefix is None else [t[here].to(where) for t in prefix]
        found = _attend(unit, part, queries, table, scale, form, own_prefix, rotation)
        attn_out[here].copy_(found)
    if needs.record and not needs.ranks_by_score:
        rank_victims(unit, step)
    if unit.hadamard:
        hadamard(out.view(qkv[0].shape))
    return out


def _attend(
    unit: KVUnit,
    part: KVPart,
    q: torch.Tensor,
    table: torch.Tensor,
    scale: float,
    form: SlotForm,
    prefix: Sequence[torch.Tensor] | None,
    rotation: Rotation | None,
) -> torch.Tensor:
    """Return the attention of a part's rows, (rows, g, d), and update their scores.

    q: (rows, g, d). table: the rows' columns of `DecodeStep.table`.
    form: that of the part, with the sinks of its rows.
    prefix: the rows' attention over a common prefix, and its log-sum-exp; None if there is none.
    rotation: as in `attend_slots`.
    """
    filled = table[FILLED]
    if prefix is not None:
        return joined(prefix, attend_lse(q, part.keys, part.values, filled, scale, form.sinks))
    if unit.attn_sparsity < 1:
        share = unit.attn_sparsity
        return attend_largest(q, part.keys, part.values, filled, scale, share, form)
    state = _score_state(unit.policy.needs, part, table)
    if rotation is not None:
        return _attend_rolling(part, q, filled, scale, form, state, rotation)
    return attend(q, part.keys, part.values, filled, scale, state, form)


def _attend_rolling(
    part: KVPart,
    q: torch.Tensor,
    filled: torch.Tensor,
    scale: float,
    form: SlotForm,
    state: ScoreState | None,
    rotation: Rotation,
) -> torch.Tensor:
    """Return the attention over slots whose keys are rotated by their ranks.

    At most ROLLING_CHUNK numbers of keys are rotated at a time, but at least those of one row.
    """
    assert part.ranks is not None
    (keys,) = part.keys
    found = torch.empty_like(q)
    step = max(1, ROLLING_CHUNK // (part.keys.shape[2] * part.keys.shape[3]))
    for first in range(0, part.rows, step):
        here = slice(first, min(part.rows, first + step))
        rotated = rotation.rotated(keys[here], part.ranks[here]).unsqueeze(0)
        own = None if state is None else state.rows(here)
        values = part.values[:, here]
        found[here] = attend(q[here], rotated, values, filled[here], scale, own, form.rows(here))
    return found


def _step_slots(
    unit: KVUnit, part: KVPart, taken: torch.Tensor, before: InFront | None
) -> StepSlots:
    """Return the input of `attend_step` for one part.

    taken: (rows of the part,) int64, which `attend_step` fills with the slots of the new columns.
    before: attention in front of the slots, for all rows of the unit.
    """
    needs = unit.policy.needs
    return StepSlots(
        part.keys,
        part.values,
        part.start,
        unit.kv_heads,
        unit.steps[-1].table_on(part.keys.device),
        taken,
        part.scores,
        part.positions,
        part.victims,
        needs.decay,
        needs.per_query,
        part.form,
        before,
    )


def _score_state(needs: Needs, part: KVPart, table: torch.Tensor) -> ScoreState | None:
    """Return the scores of a part's rows, which the decode kernel updates.

    Returns None if no scores are recorded.
    """
    if part.scores is None:
        return None
    assert part.positions is not None and part.victims is not None
    return ScoreState(
        part.scores,
        part.positions,
        table[OLDEST],
        table[NEWEST],
        needs.decay,
        table[GAIN].view(torch.float32),
        part.victims,
        table[POSITION] if needs.per_query else None,
    )


def _attend_common(common: KVPart, q: torch.Tensor, scale: float) -> Pair:
    """Return attention (rows, g, d) over the common prefix and its log-sum-exp (rows, g) fp32.

    q: (rows, g, d).
    """
    rows, group, width = q.shape
    heads = common.rows
    by_head = q.view(-1, heads, group, width).transpose(0, 1).reshape(heads, -1, width)
    out, lse = attend_lse(by_head, common.keys, common.values, None, scale)
    out = out.view(heads, -1, group, width).transpose(0, 1).reshape(rows, group, width)
    return out, lse.view(heads, -1, group).transpose(0, 1).reshape(rows, group)


def _in_front(common: Pair | None, sinks: torch.Tensor | None) -> InFront | None:
    """Return what queries attend to in front of all slots, in the form of `StepSlots.before`.

    A sink counts as one more column, which has no value. Returns None if there is nothing.

    common: the result of `_attend_common`, or None. sinks: (rows, g) fp32, or None.
    """
    if common is None:
        return None if sinks is None else (None, sinks)
    if sinks is None:
        return common
    lse = torch.logaddexp(common[1], sinks)
    return (common[0] * torch.exp(common[1] - lse).unsqueeze(2)).to(common[0].dtype), lse


# ---- the record, and victims


def record_columns(
    part: KVPart, slots: torch.Tensor, table: torch.Tensor, sizes: torch.Tensor | None
) -> None:
    """Write the record of new columns, one per row, which were put at `slots`.

    They get score 0 and the highest rank. Ranks above that of the replaced column fall by one.

    slots: (rows,) int64. table: the rows' columns of `DecodeStep.table`.
    sizes: (rows,), sizes of the new values (`value_sizes`). None if they are not recorded.
    """
    assert part.positions is not None
    rows = torch.arange(len(slots), device=slots.device)
    part.positions[rows, slots] = table[POSITION]
    if part.scores is not None:
        part.scores[rows, slots] = 0.0
    if part.norms is not None and sizes is not None:
        part.norms[rows, slots] = sizes
    if part.ranks is not None:
        part.ranks.sub_((part.ranks > part.ranks[rows, slots].unsqueeze(1)).int())
        part.ranks[rows, slots] = table[FILLED] - 1


def score_by_keys(part: KVPart, unit: KVUnit, by_keys: KeyScores, step: DecodeStep) -> None:
    """Write new scores of the part's rows that have no slot left, if new scores are due.

    The new columns are in their slots already. At most QUERY_CHUNK numbers of keys are scored at a
    time, but at least one row.

    Scores are due every `by_keys.interval` steps, and in the step that fills a row. If fewer than
    `interval` recent columns are protected, a column might leave before it has a score. Such rows
    are scored in every step.
    """
    assert part.positions is not None and part.scores is not None and part.queries is not None
    budgets = step.budgets
    is_new = (
        (step.positions % by_keys.interval == 0)
        | (step.grown == budgets.slots)
        | (budgets.recent < by_keys.interval)
    )
    due = (
        ((step.grown >= budgets.slots) & is_new)
        .repeat_interleave(unit.kv_heads)[part.start : part.end]
        .nonzero()[:, 0]
    )
    if not len(due):
        return
    where = part.keys.device
    slots = part.keys.shape[2]  # Rows with a record have only one segment.
    width = part.keys.shape[3] if part.packing is None else part.packing.width
    table = step.of_rows(unit.kv_heads, part.start, part.end, where)
    for some in due.split(max(1, QUERY_CHUNK // (slots * width))):
        index = some.to(where)
        keys = part.keys[:, index]
        if part.packing is not None:
            keys, _ = unpacked(keys, part.values[:, index], part.form.rows(index), torch.float32)
        if unit.hadamard:  # The transform is its own inverse: this restores the rotated keys.
            hadamard(keys[0])
        place = part.positions[index]
        own = table[:, index].unsqueeze(2)
        may_leave = (place >= own[OLDEST]) & (place <= own[NEWEST])
        may_leave &= torch.arange(slots, device=where) < own[FILLED]
        newest = table[POSITION, index]
        part.scores[index] = by_keys.scores(keys[0], part.queries[index], newest, may_leave)


def rank_victims(unit: KVUnit, step: DecodeStep, filled: torch.Tensor | None = None) -> None:
    """Write each row's victim by the policy's own rank.

    This is for policies that do not rank by score; otherwise the decode kernel finds the victim.

    filled: as in `columns_of`.
    """
    columns = columns_of(unit, step, filled)
    rank = unit.policy.rank(columns)
    stays = ~columns.may_leave
    lowest = rank.masked_fill(stays, float("inf")).amin(dim=-1, keepdim=True)
    last = torch.iinfo(torch.int32).max
    victims = (
        columns.positions.masked_fill(stays | (rank > lowest), last).argmin(dim=-1).int().flatten()
    )
    for part in first_rows(unit.parts, len(victims)):
        assert part.victims is not None
        part.victims.copy_(victims[part.start : part.end])


def columns_of(unit: KVUnit, step: DecodeStep, filled: torch.Tensor | None = None) -> Columns:
    """Return what a policy may know of the columns of the rows that decode.

    The tensors are on the device of the first part.

    filled: (sequences,) ints, the slots in use, if they are not those of `step`.
    """
    budgets = step.budgets
    sequences = len(budgets.prompts)
    parts = first_rows(unit.parts, sequences * unit.kv_heads)
    where = parts[0].keys.device

    def whole(name: str) -> torch.Tensor | None:
        if name not in unit.policy.needs.record:
            return None
        found = [getattr(part, name) for part in parts]
        joined = found[0] if len(found) == 1 else torch.cat([t.to(where) for t in found])
        return joined.view(-1, unit.kv_heads, joined.shape[-1])

    positions = whole(POSITIONS)
    assert positions is not None
    used, sinks, recent, heavy, newest = (
        t.to(where).view(-1, 1, 1)
        for t in (
            step.filled if filled is None else filled,
            budgets.sinks,
            budgets.recent,
            budgets.heavy,
            step.positions,
        )
    )
    slots = torch.arange(positions.shape[-1], device=where)
    may_leave = (slots < used) & (positions >= sinks) & (positions <= newest - recent)
    return Columns(
        unit.block,
        positions,
        may_leave,
        newest.flatten(),
        heavy.flatten(),
        whole(SCORES),
        whole(NORMS),
    )

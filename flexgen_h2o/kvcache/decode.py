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

from flexgen_h2o.core.units import ROLLING_CHUNK
from flexgen_h2o.kernels.decode_step import (
    FILLED,
    GAIN,
    NEWEST,
    OLDEST,
    POSITION,
    InFront,
    StepSlots,
    attend_step,
)
from flexgen_h2o.kernels.elementwise import Rotation
from flexgen_h2o.kernels.hadamard import hadamard
from flexgen_h2o.kernels.slot_form import SlotForm, joined
from flexgen_h2o.kernels.slots import Pair, ScoreState, attend, attend_largest, attend_lse
from flexgen_h2o.kvcache.eviction.policy import Needs
from flexgen_h2o.kvcache.part import KVPart, KVUnit


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
    needs = unit.policy.needs
    q, k, v = qkv
    count = k.shape[0] * k.shape[1]
    width = k.shape[2]
    group = q.shape[1] // k.shape[1]
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
    sinks = None  # (rows, g) fp32
    if unit.sinks is not None:
        sinks = unit.sinks.float().view(unit.kv_heads, -1).repeat(unit.decoding, 1)
    parts = unit.decoding_parts
    before = _in_front(prefix, sinks) if any(map(unit.is_one_launch, parts)) else None
    for part, slots in zip(parts, unit.taken, strict=True):
        if unit.is_one_launch(part):
            slots_of_part = _step_slots(unit, part, slots, before)
            attend_step(qkv[0], qkv[1], qkv[2], slots_of_part, scale, out.view(qkv[0].shape))
            continue
        here = slice(part.start, part.end)
        where = part.keys.device
        queries, keys, values = (t[here].to(where) for t in (q, k, v))
        table = unit.table(part)
        part.write(slots, keys, values, table)
        form = part.form if sinks is None else replace(part.form, sinks=sinks[here].to(where))
        own_prefix = None if prefix is None else [t[here].to(where) for t in prefix]
        found = _attend(unit, part, queries, table, scale, form, own_prefix, rotation)
        attn_out[here].copy_(found)
    if needs.record and not needs.ranks_by_score:
        unit.evict()
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

"""Attention of one micro-batch against its KV unit: whole prompts, then one new token a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch

from flexgen_h2o.kernels.attention import causal_attention
from flexgen_h2o.kvcache.store import PartView

# (q, k, v, filled, longest, scale) -> (R, g, d); kernels/attention.py
SlotAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, float], torch.Tensor]


def attend_prompts(
    qkv: Sequence[torch.Tensor], counts: Sequence[int], views: Sequence[PartView], scale: float,
    out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Causal attention of packed prompts, their KV columns written to slots 0, 1, ... of each row.

    q: (tokens, heads, d); k, v: (tokens, kv_heads, d); `counts`: tokens of each sequence; out: (tokens, heads x d).
    Neighbours of equal length are computed together; nothing is ever padded.
    """
    q, k, v = qkv
    mixed = out.view(q.shape)
    start = 0
    for count, same in groupby(counts):
        number = len(list(same))
        end = start + number * count
        qs, ks, vs = (t[start:end].view(number, count, t.shape[1], -1).transpose(1, 2) for t in (q, k, v))
        mixed[start:end].view(number, count, q.shape[1], -1).copy_(causal_attention(qs, ks, vs, scale).transpose(1, 2))
        start = end
    for view in views:
        _write_prompts(view, k, v, counts)
    return out


def attend_slots(
    qkv: Sequence[torch.Tensor], slots: torch.Tensor, filled: torch.Tensor, longest: int,
    views: Sequence[PartView], scale: float, attention: SlotAttention, out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Put each row's new column into its slot and attend over its filled slots, part by part where the part lies.

    q: (sequences, heads, d); k, v: (sequences, kv_heads, d); slots, filled: (sequences x kv_heads,) int64 on the host;
    out: (sequences, heads x d).
    """
    q, k, v = qkv
    rows, width = k.shape[0] * k.shape[1], k.shape[2]
    group = q.shape[1] // k.shape[1]
    q, k, v, mixed = q.view(rows, group, width), k.view(rows, width), v.view(rows, width), out.view(rows, group, width)
    for view in views:
        here = slice(view.start, view.end)
        where = view.keys.device
        index = (torch.arange(len(view.keys), device=where), slots[here].to(where))
        view.keys[index] = k[here].to(where)
        view.values[index] = v[here].to(where)
        seen = filled[here].to(where)
        mixed[here].copy_(attention(q[here].to(where), view.keys, view.values, seen, longest, scale))
    return out


def _write_prompts(view: PartView, k: torch.Tensor, v: torch.Tensor, counts: Sequence[int]) -> None:
    kv_heads, start = k.shape[1], 0
    for sequence, count in enumerate(counts):
        first, last = sequence * kv_heads, (sequence + 1) * kv_heads
        a, b = max(first, view.start), min(last, view.end)
        if a < b:
            rows = slice(a - view.start, b - view.start)
            for target, source in ((view.keys, k), (view.values, v)):
                target[rows, :count].copy_(source[start : start + count, a - first : b - first].transpose(0, 1))
                # Empty slots are read (with weight 0) beside longer rows: they must hold numbers.
                target[rows, count:].zero_()
        start += count

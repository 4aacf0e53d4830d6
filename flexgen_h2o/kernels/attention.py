"""Attention: causal over a prompt, and one query a row over KV slots. Softmax in fp32.

Layouts: R = rows x kv-heads, g = query heads of one kv-head, C = slots, d = head width.
"""

from __future__ import annotations

import torch

from flexgen_h2o.limits import SPARSE_CHUNK
from flexgen_h2o.units import round_up


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of whole prompts, O(n) memory.

    q: (b, heads, n, d), k and v: (b, kv_heads, n, d), same dtype. Returns (b, heads, n, d).
    """
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=q.shape[2] > 1, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def slot_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, filled: torch.Tensor, longest: int, scale: float
) -> torch.Tensor:
    """One query per head over the first `filled` slots of its kv-head. All slots must hold numbers, the empty ones too.

    q: (R, g, d); k, v: (R, C, d); filled: (R,) int64, at most `longest` = filled.max(). Returns (R, g, d) in q's dtype.
    """
    # oneDNN keeps a compiled kernel for every new shape; in steps of 32 a long generation needs few.
    longest = min(k.shape[1], round_up(longest, 32))
    probabilities = _slot_probabilities(q, k, filled, longest, scale)
    return torch.bmm(probabilities.to(v.dtype), v[:, :longest])


def sparse_slot_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, filled: torch.Tensor, longest: int, scale: float, share: float
) -> torch.Tensor:
    """`slot_attention` that reads only the values of the int(share x past) most attended slots and the newest.

    FlexGen's --attn-sparsity: chosen per query head, the kept weights are not normalised again. The newest column is
    each row's slot filled - 1. Shapes as in `slot_attention`.
    """
    probabilities = _slot_probabilities(q, k, filled, longest, scale)
    rows, group, width = q.shape
    newest = (filled - 1).view(rows, 1, 1).expand(rows, group, 1)
    newest_weight = probabilities.gather(2, newest)
    past = probabilities.scatter(2, newest, -1.0)
    keep = (share * (filled - 1).double()).long()
    weights, slots = past.topk(max(1, int(keep.max())), dim=2)
    allowed = torch.arange(weights.shape[2], device=q.device) < keep.view(rows, 1, 1)
    weights = torch.where(allowed, weights, 0.0)
    weights = torch.cat([weights, newest_weight], dim=2)
    slots = torch.cat([slots, newest], dim=2)
    out = torch.empty_like(q)
    step = max(1, SPARSE_CHUNK // (group * slots.shape[2] * width))
    for a in range(0, rows, step):
        chosen = slots[a : a + step].reshape(-1, group * slots.shape[2], 1).expand(-1, -1, width)
        values = v[a : a + step].gather(1, chosen).view(-1, group, slots.shape[2], width)
        out[a : a + step] = torch.einsum("rgs,rgsd->rgd", weights[a : a + step], values.float())
    return out


def _slot_probabilities(
    q: torch.Tensor, k: torch.Tensor, filled: torch.Tensor, longest: int, scale: float
) -> torch.Tensor:
    """(R, g, longest) fp32; slots from `filled` on have probability 0."""
    scores = torch.bmm(q, k[:, :longest].transpose(1, 2)).float().mul_(scale)
    if int(filled.min()) < longest:
        empty = torch.arange(longest, device=q.device) >= filled.view(-1, 1, 1)
        scores.masked_fill_(empty, float("-inf"))
    return torch.softmax(scores, dim=-1)

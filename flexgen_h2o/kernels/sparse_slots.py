"""FlexGen's --attn-sparsity: decode attention that reads only the most attended values. In torch operations."""

from __future__ import annotations

import torch

from flexgen_h2o.kernels.slots import slot_probabilities
from flexgen_h2o.limits import SPARSE_CHUNK


def attend_sparse(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, filled: torch.Tensor, scale: float, share: float
) -> torch.Tensor:
    """`slots.attend` with the values of the int(share x past) most attended slots and the newest only.

    Chosen per query head; the kept weights are not normalised again. The newest column is each row's slot filled - 1.
    Shapes as in `slots.attend`. The other values are not read.
    """
    probabilities = slot_probabilities(q, keys, filled, scale)
    rows, group, width = q.shape
    newest = (filled.long() - 1).view(rows, 1, 1).expand(rows, group, 1)
    newest_weight = probabilities.gather(2, newest)
    past = probabilities.scatter(2, newest, -1.0)
    keep = (share * (filled - 1).double()).long()
    weights, slots = past.topk(max(1, int(keep.max())), dim=2)
    allowed = torch.arange(weights.shape[2], device=q.device) < keep.view(rows, 1, 1)
    weights = torch.cat([torch.where(allowed, weights, 0.0), newest_weight], dim=2)
    # A slot that is not allowed may be an empty one, which can hold anything: the newest stands in for it.
    slots = torch.cat([torch.where(allowed, slots, newest), newest], dim=2)
    out = torch.empty_like(q)
    step = max(1, SPARSE_CHUNK // (group * slots.shape[2] * width))
    for a in range(0, rows, step):
        chosen = slots[a : a + step]
        row = torch.arange(a, a + len(chosen), device=q.device).view(-1, 1, 1)
        found = values[chosen // values.shape[2], row, chosen % values.shape[2]]
        out[a : a + step] = torch.einsum("rgs,rgsd->rgd", weights[a : a + step], found.float())
    return out

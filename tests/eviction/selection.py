"""Attention that reads some columns, slow and obvious: one query, one kv-head and one column after another.

The others are estimated from keys in 2 bits, on a grid for each channel of the prompt's keys: a column that is not read
has its estimated probability and the mean value of those of its 32 that are not read.
"""

from __future__ import annotations

from itertools import product

import torch

BLOCK, NEWEST = 32, 16
CODE_EDGE, QUERY_EDGE, SHARE_GAP = 2e-5, 5e-5, 1e-4


class Selection:
    """share: of a row's columns that are read. is_near: rounding may decide otherwise elsewhere."""

    def __init__(self, share: float) -> None:
        self.share, self.is_near = share, False

    def mixed(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: torch.Tensor, sinks: torch.Tensor,
        found: torch.Tensor, prompt_len: int,
    ) -> torch.Tensor:  # fmt: skip
        """What queries behind the prompt get, (kv, g, n - prompt_len, d).

        scores: (kv, g, n, n), scaled products with columns as they are read; sinks: (kv, g), -inf for none; found:
        (kv, n, n, d), values as query i reads them.
        """
        kv, g, n, d = q.shape
        out = torch.zeros(kv, g, n - prompt_len, d)
        for head, i in product(range(kv), range(prompt_len, n)):
            codes, centre, step = self._codes(k[head, : i + 1], prompt_len)
            estimates = torch.stack([self._estimates(q[head, x, i], codes, centre, step) for x in range(g)])
            sink = sinks[head, :, None]
            read = self._read(torch.cat([estimates, sink], dim=1).softmax(1)[:, :-1].amax(0))
            rest = {*range(i + 1)} - {*read}
            logits = estimates.clone()
            logits[:, read] = scores[head, :, i, read]
            p = torch.cat([logits, sink], dim=1).softmax(1)
            out[head, :, i - prompt_len] = p[:, read] @ found[head, i, read]
            for first in range(0, i + 1, BLOCK):
                block = range(first, min(i + 1, first + BLOCK))
                others = [j for j in block if j in rest]
                if others:
                    total = v[head, list(block)].sum(0) - sum(found[head, i, j] for j in block if j not in rest)
                    out[head, :, i - prompt_len] += p[:, others].sum(1, keepdim=True) * total / len(others)
        return out

    def _codes(self, k: torch.Tensor, prompt_len: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        prompt = k[:prompt_len].double()
        centre, step = prompt.mean(0), 1.2 * prompt.std(0, correction=0)
        step = torch.maximum(step, step.mean() / 16)
        step = torch.where(step > 0, step, 1.0)
        places = (k - centre) / step + 2
        is_edge = (places > 0.5) & (places < 3.5) & (places != 2)  # the only column of a prompt is its own centre
        self.is_near |= bool(((places - places.round()).abs() < CODE_EDGE)[is_edge].any())
        return places.floor().clamp(0, 3).float(), centre.float(), step.float()

    def _estimates(
        self, q: torch.Tensor, codes: torch.Tensor, centre: torch.Tensor, step: torch.Tensor
    ) -> torch.Tensor:
        most = min(127, 32767 // (3 * len(q))) / (q * step).abs().max()
        places = q * step * most
        self.is_near |= bool(((places - places.floor() - 0.5).abs() < QUERY_EDGE).any())
        return (q @ centre + (codes - 1.5) @ places.round() / most) * len(q) ** -0.5

    def _read(self, shares: torch.Tensor) -> list[int]:
        n = len(shares)
        count = max(1, int(self.share * n))
        newest = min(NEWEST, count // 2)
        best = sorted(range(n - newest), key=lambda j: (-float(shares[j]), j))
        if count < n:
            last, next_ = shares[best[count - newest - 1]], shares[best[count - newest]]
            self.is_near |= bool(last - next_ < SHARE_GAP * last)
        return sorted([*best[: count - newest], *range(n - newest, n)])

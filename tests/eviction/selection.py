"""FlexGen's sparse attention, slow and obvious: one query, one query head and one column after
another."""

from __future__ import annotations

from itertools import product

import torch

SHARE_GAP = 1e-5


class Selection:
    """share: of a row's columns whose values count, the newest beside them. is_near: rounding may
    decide otherwise elsewhere."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.is_near = False

    def mixed(
        self, scores: torch.Tensor, sinks: torch.Tensor, found: torch.Tensor, prompt_len: int
    ) -> torch.Tensor:
        """What queries behind the prompt get, (kv, g, n - prompt_len, d).

        scores: (kv, g, n, n), scaled products with columns as they are read; sinks: (kv, g), -inf
        for none; found: (kv, n, n, d), values as query i reads them.
        """
        kv, g, n, _ = scores.shape
        out = torch.zeros(kv, g, n - prompt_len, found.shape[-1])
        for head, x, i in product(range(kv), range(g), range(prompt_len, n)):
            logits = torch.cat([scores[head, x, i, : i + 1], sinks[head, x, None]])
            p = logits.softmax(0).tolist()
            for j in [*self._largest(p[:i]), i]:
                out[head, x, i - prompt_len] += p[j] * found[head, i, j]
        return out

    def _largest(self, p: list[float]) -> list[int]:
        count = int(self.share * len(p))
        order = sorted(range(len(p)), key=lambda j: (-p[j], j))
        if 0 < count < len(p):
            last = p[order[count - 1]]
            next_ = p[order[count]]
            self.is_near |= last - next_ < SHARE_GAP * last
        return order[:count]

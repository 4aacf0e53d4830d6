"""A transformers cache of evicting layers, and what its sequences bring in each forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import Cache

from flexgen_h2o.errors import UsageError
from flexgen_h2o.integrations.dropping import DroppingLayer
from flexgen_h2o.integrations.layer import Arriving, EvictingLayer
from flexgen_h2o.integrations.masking import MaskingLayer
from flexgen_h2o.kvcache.eviction.policy import EVERYTHING, Eviction
from flexgen_h2o.kvcache.slots import SlotTable

MODES: Mapping[str, type[EvictingLayer]] = {"drop": DroppingLayer, "mask": MaskingLayer}


class EvictingCache(Cache):
    """What `past_key_values` is while eviction is enabled.

    eviction: a policy of `flexgen_h2o.kvcache.eviction`. num_layers: transformer blocks. mode: "drop" or "mask".
    keeps: False for a forward without a cache; each layer is emptied after its attention.
    """

    def __init__(self, eviction: Eviction, num_layers: int, mode: str = "drop", keeps: bool = True) -> None:
        self._blocks = [MODES[mode](eviction, block) for block in range(num_layers)]
        super().__init__(layers=[*self._blocks])
        self._policy, self._keeps = eviction, keeps
        self._table: SlotTable | None = None
        self._arriving: Arriving | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and of what the policy records of them."""
        return sum(layer.nbytes for layer in self._blocks)

    def arrive(self, sequences: int, tokens: int, attention_mask: torch.Tensor | None, one_by_one: bool) -> None:
        """A forward with (sequences, tokens) ids begins.

        attention_mask: (sequences, tokens seen so far + tokens), 0 for padding; None for none. one_by_one: as in
        `Arriving`. Raises UsageError for a mask that eviction cannot follow.
        """
        seen = self.get_seq_length()
        spans = [(0, tokens)] * sequences
        if attention_mask is not None:
            spans = _spans(attention_mask, seen + tokens)
            if seen and any(first + count != seen + tokens for first, count in spans):
                raise UsageError("attention_mask: tokens that follow on a cache are padding; pad on the left")
            spans = [(0, tokens)] * sequences if seen else spans
        if not seen:
            self._table = SlotTable(self._policy, [(count, EVERYTHING) for _, count in spans], len(self._blocks))
        self._arriving = Arriving(spans, one_by_one)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new columns alone. Raises UsageError where no attention of ours will follow."""
        if self._arriving is None:
            raise UsageError("past_key_values: made while eviction was enabled, which it is no longer; give a new one")
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def attend(self, block: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of the tokens that arrived, in one block: `EvictingLayer.attend`."""
        assert self._table is not None and self._arriving is not None
        layer = self._blocks[block]
        if layer.rows is None:
            layer.begin(self._table.at(block, range(len(q))))
        out = layer.attend(q, k, v, scale, self._arriving)
        if not self._keeps:
            layer.reset()
        if block == len(self._blocks) - 1:
            self._arriving = None
        return out


def _spans(mask: torch.Tensor, length: int) -> list[tuple[int, int]]:
    """(first, count) of the tokens of each sequence."""
    if mask.dim() != 2 or mask.shape[1] != length:
        raise UsageError(f"attention_mask: shape {tuple(mask.shape)}, but eviction needs (sequences, {length})")
    real = mask.cpu() != 0
    counts, firsts = real.sum(1), real.int().argmax(1)
    lasts = length - real.flip(1).int().argmax(1)
    if bool((counts == 0).any()):
        raise UsageError(f"attention_mask: sequence {int(counts.argmin())} is nothing but padding")
    if bool((lasts - firsts != counts).any()):
        raise UsageError("attention_mask: padding between the tokens of a sequence; put it on the left")
    return list(zip(firsts.tolist(), counts.tolist(), strict=True))

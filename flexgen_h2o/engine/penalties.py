"""Penalties: changes of a sequence's logits before its next token is chosen.

They are transformers' logits processors. Each answer has its own processors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexgen_h2o.core.settings import SamplingParams
from flexgen_h2o.models.generation_config import AnswerContext, GenerationConfig, Processor
from flexgen_h2o.models.load import Model


class Penalties:
    """The logits processors of one answer, made at its first token.

    They see all tokens in front of the next one.

    ends: tokens that end the answer.
    most: the most new tokens of the answer.
    """

    def __init__(self, generation: GenerationConfig, ends: Sequence[int], most: int) -> None:
        self._generation = generation
        self._ends = ends
        self._most = most
        self._processors: list[Processor] | None = None
        self._ids: torch.Tensor | None = None  # (1, tokens), on the logits' device

    def __call__(
        self, before: Sequence[int], own: Sequence[int], logits: torch.Tensor
    ) -> torch.Tensor:
        """Return the changed logits, (1, vocab) fp32.

        before: the tokens in front of the answer, the same at each step.
        own: the answer's own tokens up to now.
        logits: (1, vocab) of any float dtype.
        """
        device = logits.device
        if self._processors is None or self._ids is None:
            ends = [token for token in self._ends if 0 <= token < logits.shape[1]]
            answer = AnswerContext(before, ends, self._most, device)
            self._processors = self._generation.processors(answer)
            self._ids = answer.prompt_tensor
        known = self._ids.shape[1] - len(before)
        self._ids = torch.cat(
            [self._ids, torch.tensor([list(own[known:])], dtype=torch.int64, device=device)], dim=1
        )
        scores = logits.to(torch.float32, copy=True)
        for process in self._processors:
            scores = process(self._ids, scores)
        return scores


def penalties_of(model: Model, params: SamplingParams) -> Penalties | None:
    """Return the penalties of an answer of the model, or None if nothing changes its logits."""
    generation = model.generation.with_penalty(params.repetition_penalty)
    if not generation.settings:
        return None
    ends = () if params.ignore_eos else (*model.spec.eos_token_ids, *params.stop_token_ids)
    return Penalties(generation, ends, params.max_tokens)

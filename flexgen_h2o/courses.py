"""Courses: what steers rows instead of their sampling parameters, such as teacher forcing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from flexgen_h2o.config import ModelSpec
from flexgen_h2o.errors import UsageError
from flexgen_h2o.generation import Chooser, Row
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.kvcache.eviction.rolling import most_new_tokens
from flexgen_h2o.prompts import Prompt, prompts_from_python


class Course(Chooser, Protocol):
    """Which tokens rows take, and when they are done."""

    def most_new(self, row: int) -> int:
        """The most tokens that the row of this index takes."""

    def end(self, row: Row) -> str | None:
        """Why the row is done with its newest token (Decoding.end)."""


@dataclass(frozen=True)
class ForcedTokens:
    """Teacher forcing: rows take the tokens that they are given, whatever the logits: `tokens[row][step]`."""

    tokens: Mapping[int, Sequence[int]]

    def choose(self, logits: torch.Tensor, rows: Sequence[int], steps: Sequence[int]) -> list[int]:
        return [self.tokens[row][step] for row, step in zip(rows, steps, strict=True)]

    def most_new(self, row: int) -> int:
        return len(self.tokens[row])

    def end(self, row: Row) -> str | None:
        return "length" if len(row.token_ids) >= row.max_new else None


def forced_rows(
    prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]], eviction: Eviction, spec: ModelSpec
) -> tuple[list[Prompt], ForcedTokens]:
    """Prompts of token ids, each with the tokens that it is to take. UsageError where they do not fit together."""
    read = prompts_from_python(prompts, None, spec.vocab_size)
    after = prompts_from_python(continuations, None, spec.vocab_size)
    if len(read) != len(after):
        raise UsageError(f"continuations: {len(after)} for {len(read)} prompts")
    for prompt, more in zip(read, after, strict=True):
        length, new = len(prompt.token_ids), len(more.token_ids)
        if length > spec.max_positions or most_new_tokens(eviction, spec, length, new) < new:
            raise UsageError(
                f"prompts[{prompt.index}]: with its continuation longer than {spec.max_positions} positions"
            )
    return read, ForcedTokens({p.index: p.token_ids for p in after})

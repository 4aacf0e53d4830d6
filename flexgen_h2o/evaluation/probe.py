"""A policy that drops nothing and remembers what each decode step attended to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from flexgen_h2o.kvcache.eviction import Full
from flexgen_h2o.kvcache.eviction.policy import POSITIONS, SCORES, Columns, Needs


@dataclass(frozen=True)
class Probe(Full):
    """The full cache whose scores are one step's attention probabilities, summed over the query heads of a kv-head.

    They sum to the number of these query heads. Prompts are scored by one row, which the first decode step forgets: so
    that no score is ever undefined, and that prompts are computed exactly as they are for policies that score.
    """

    name: ClassVar[str] = "probe"

    @property
    def needs(self) -> Needs:
        return Needs(record=(POSITIONS, SCORES), query_rows=1, fade=0.0, gain=1.0)

    def prompt_scores(self, sums: torch.Tensor, query_rows: int) -> torch.Tensor:
        return sums

    def rank(self, columns: Columns) -> torch.Tensor:
        assert columns.scores is not None
        return columns.scores

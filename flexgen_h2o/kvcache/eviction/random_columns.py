"""Random columns: the baseline that any policy must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flexgen_h2o.core.settings import setting
from flexgen_h2o.kvcache.eviction.policy import POSITIONS, Columns, Evicting, Needs, pseudo_random

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Random(Evicting):
    """The policy that keeps the recent columns, and others at random.

    A hash of seed, layer, kv-head and position ranks the columns.
    """

    name: ClassVar[str] = "random"

    seed: int = setting(0, low=0, high=2**31)

    @property
    def measures(self) -> Needs:
        return Needs((POSITIONS,), ranks_by_score=False)

    def rank(self, columns: Columns) -> torch.Tensor:
        return pseudo_random(columns, self.seed).float()

"""H2O that also uses values: a column with a small value is worth little, even if attended to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from flexgen_h2o.kvcache.eviction.h2o_norm import H2ONorm
from flexgen_h2o.kvcache.eviction.policy import NORMS, Columns, Needs, best_of

if TYPE_CHECKING:
    import torch

# As in CriticalKV. A column that no query has attended to still counts by its value.
MIN_WEIGHT = 1e-4


@dataclass(frozen=True)
class ValueH2O(H2ONorm):
    """The policy that keeps half of the heavy share by the score of `h2o-norm`, half with values.

    The second half ranks by (score + 1e-4) x norm of the value. The two stages are those of
    CriticalKV (Feng et al. 2025, arXiv 2502.03805), which uses the norm of the value's output
    projection instead.
    """

    name: ClassVar[str] = "h2o-v"

    @property
    def measures(self) -> Needs:
        needs = super().measures
        return replace(needs, record=(*needs.record, NORMS), ranks_by_score=False, per_query=False)

    def rank(self, columns: Columns) -> torch.Tensor:
        assert columns.norms is not None
        score = super().rank(columns)
        by_score = best_of(score, columns, columns.heavy // 2)
        return ((score + MIN_WEIGHT) * columns.norms).masked_fill(by_score, float("inf"))

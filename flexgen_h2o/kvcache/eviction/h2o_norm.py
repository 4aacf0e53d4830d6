"""H2O with its age bias taken out: a column's score per query that saw it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flexgen_h2o.core.settings import setting
from flexgen_h2o.kvcache.eviction.policy import EVERYTHING, POSITIONS, SCORES, Columns, Evicting, Needs, RowBudget

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class H2ONorm(Evicting):
    """H2O whose sums are divided by the number of queries behind them, which favour old columns otherwise.

    The normalisation is that of OpenVINO GenAI (AggregationMode.NORM_SUM) and of kvpress's ObservedAttention. Of the
    heavy share the `sinks` first columns are set aside, and as much as is needed so that a new column is not judged
    before `grace` queries saw it. What a decode step gives counts in proportion to the columns that are left:
    probabilities of a prompt's queries, which are shared among all columns, and of those that see few could not be
    compared otherwise.
    """

    name: ClassVar[str] = "h2o-norm"

    sinks: int = setting(4, low=0, high=EVERYTHING)
    grace: int = setting(16, low=0, high=EVERYTHING)

    @property
    def measures(self) -> Needs:
        return Needs((POSITIONS, SCORES), query_rows=None, even=True, per_query=True)

    def split(self, heavy: int, recent: int) -> RowBudget:
        """Sinks first, then grace, both out of the heavy share; grace leaves half of it to the heavy hitters."""
        sinks = min(self.sinks, heavy)
        waiting = min(max(0, self.grace - recent), (heavy - sinks) // 2)
        return RowBudget(sinks, heavy - sinks - waiting, recent + waiting)

    def rank(self, columns: Columns) -> torch.Tensor:
        assert columns.scores is not None
        return columns.scores / columns.seen()

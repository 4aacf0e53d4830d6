"""H2O without its age bias: a column's score is divided by the number of queries that saw it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flexgen_h2o.core.settings import setting
from flexgen_h2o.kvcache.eviction.policy import (
    EVERYTHING,
    POSITIONS,
    SCORES,
    Columns,
    Evicting,
    Needs,
    RowBudget,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class H2ONorm(Evicting):
    """The policy that keeps columns by the mean attention per query that saw them.

    Sums of attention favour old columns, so each sum is divided by the number of queries that saw
    the column. OpenVINO GenAI (AggregationMode.NORM_SUM) and kvpress's ObservedAttention normalise
    in the same way.

    The heavy share pays for the `sinks` first columns. It also pays for enough recent columns that
    a new column is not judged before `grace` queries saw it.

    A query's probabilities are shared among all columns that it sees. A decode step sees only the
    columns that are left, so what it adds is scaled by the share of columns that are left (`even`
    in `Needs`). Without this, it could not be compared with the attention of a prompt's queries.
    """

    name: ClassVar[str] = "h2o-norm"

    sinks: int = setting(4, low=0, high=EVERYTHING)
    grace: int = setting(16, low=0, high=EVERYTHING)

    @property
    def measures(self) -> Needs:
        return Needs((POSITIONS, SCORES), query_rows=None, even=True, per_query=True)

    def split(self, heavy: int, recent: int) -> RowBudget:
        """Return the budget, in which sinks and then grace are taken from the heavy share.

        Grace leaves at least half of the rest to the heavy hitters.
        """
        sinks = min(self.sinks, heavy)
        waiting = min(max(0, self.grace - recent), (heavy - sinks) // 2)
        return RowBudget(sinks, heavy - sinks - waiting, recent + waiting)

    def rank(self, columns: Columns) -> torch.Tensor:
        assert columns.scores is not None
        return columns.scores / columns.seen()

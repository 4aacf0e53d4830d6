"""TOVA: the columns that the newest query attends to the most, one set for all heads of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flexgen_h2o.kvcache.eviction.policy import POSITIONS, SCORES, Columns, Evicting, Needs, RowBudget

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Tova(Evicting):
    """Oren et al. 2024, "Transformers are Multi-State RNNs" (arXiv 2401.06104).

    Nothing is remembered: after each query the column that it attended to the least, on average over all heads, leaves.
    No window is protected, but for the newest column, so heavy + recent is one budget.
    """

    name: ClassVar[str] = "tova"

    @property
    def measures(self) -> Needs:
        return Needs((POSITIONS, SCORES), query_rows=1, decay=0.0, ranks_by_score=False)

    def split(self, heavy: int, recent: int) -> RowBudget:
        return RowBudget(0, heavy + recent - 1, 1)

    def rank(self, columns: Columns) -> torch.Tensor:
        """The kv-heads of a sequence hold the same columns in the same slots, since all rank them alike."""
        assert columns.scores is not None
        return columns.scores.mean(dim=1, keepdim=True).expand_as(columns.scores).contiguous()

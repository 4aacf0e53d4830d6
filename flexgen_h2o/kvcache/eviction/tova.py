"""TOVA: the columns that the newest query attends to most, the same for all heads of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flexgen_h2o.kvcache.eviction.policy import (
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
class Tova(Evicting):
    """The policy that keeps the columns that the newest query attends to most.

    After each query, the column that it attended to least leaves. Attention is averaged over all
    heads, and attention of earlier queries does not count. Only the newest column is protected, so
    heavy + recent is one budget.

    Paper: Oren et al. 2024, "Transformers are Multi-State RNNs" (arXiv 2401.06104).
    """

    name: ClassVar[str] = "tova"

    @property
    def measures(self) -> Needs:
        return Needs((POSITIONS, SCORES), query_rows=1, decay=0.0, ranks_by_score=False)

    def split(self, heavy: int, recent: int) -> RowBudget:
        return RowBudget(0, heavy + recent - 1, 1)

    def rank(self, columns: Columns) -> torch.Tensor:
        """Return the mean scores over the kv-heads, (b, kv_heads, n) fp32.

        All kv-heads of a sequence rank alike, so they hold the same columns in the same slots.
        """
        assert columns.scores is not None
        return columns.scores.mean(dim=1, keepdim=True).expand_as(columns.scores).contiguous()

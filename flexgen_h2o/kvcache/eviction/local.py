"""Sinks and a window: the first and the newest columns of a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flexgen_h2o.core.settings import setting
from flexgen_h2o.kvcache.eviction.policy import (
    EVERYTHING,
    POSITIONS,
    Columns,
    Evicting,
    Needs,
    RowBudget,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Local(Evicting):
    """The policy that keeps the `sinks` first columns and the newest ones.

    Paper: Xiao et al. 2024, "Efficient Streaming Language Models with Attention Sinks"
    (StreamingLLM), here with the true positions of tokens. The heavy and the recent share together
    are the sinks and the window. No scores are needed.
    """

    name: ClassVar[str] = "local"

    sinks: int = setting(4, low=0, high=EVERYTHING)

    @property
    def measures(self) -> Needs:
        return Needs(record=(POSITIONS,), ranks_by_score=False)

    def _share(self, kind: str) -> tuple[str, int | float]:
        """Return the share as the base class does, but no default heavy share.

        A window that is set by recent columns alone is not widened.
        """
        recent_alone = (
            self.heavy_ratio is None
            and self.heavy_size is None
            and (self.recent_ratio or self.recent_size)
        )
        return ("size", 0) if kind == "heavy" and recent_alone else super()._share(kind)

    def split(self, heavy: int, recent: int) -> RowBudget:
        sinks = min(self.sinks, heavy + recent - 1)
        return RowBudget(sinks, 0, heavy + recent - sinks)

    def rank(self, columns: Columns) -> torch.Tensor:
        return columns.positions.float()

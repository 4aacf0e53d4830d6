"""The full cache: every column stays, in the slot of its position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flexgen_h2o.kvcache.eviction.policy import EVERYTHING, Columns, Needs, RowBudget

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Full:
    """The policy that keeps all columns.

    No column leaves, so scores and ranks are only for analysis (evaluation/).
    """

    name: ClassVar[str] = "full"

    @property
    def needs(self) -> Needs:
        return Needs()

    def budget(self, prompt_len: int, gen_len: int, block: int) -> RowBudget:
        return RowBudget(0, 0, EVERYTHING)

    def slots(self, prompt_len: int, gen_len: int, block: int = 0) -> int:
        return max(1, prompt_len + gen_len - 1)

    def prompt_scores(self, sums: torch.Tensor, query_rows: int) -> torch.Tensor:
        return sums

    def rank(self, columns: Columns) -> torch.Tensor:
        assert columns.scores is not None
        return columns.scores

    def to_json(self) -> dict[str, object]:
        return {"name": self.name}

"""An eviction policy as a stage of a pipeline sees it, whose blocks are counted from the stage's first one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from flexgen_h2o.kvcache.eviction.policy import Columns, Eviction, Needs, RowBudget


@dataclass(frozen=True)
class OfStage:
    """`policy` of a model of `depth` transformer blocks, where block 0 is the model's block `first`."""

    policy: Eviction
    first: int
    depth: int

    @property
    def name(self) -> str:
        return self.policy.name

    @property
    def needs(self) -> Needs:
        return self.policy.needs

    def budget(self, prompt_len: int, block: int, num_blocks: int) -> RowBudget:
        return self.policy.budget(prompt_len, self.first + block, self.depth)

    def slots(self, prompt_len: int, gen_len: int, block: int, num_blocks: int) -> int:
        return self.policy.slots(prompt_len, gen_len, self.first + block, self.depth)

    def prompt_scores(self, sums: torch.Tensor, query_rows: int) -> torch.Tensor:
        return self.policy.prompt_scores(sums, query_rows)

    def rank(self, columns: Columns) -> torch.Tensor:
        return self.policy.rank(replace(columns, block=self.first + columns.block))

    def to_json(self) -> dict[str, Any]:
        return self.policy.to_json()

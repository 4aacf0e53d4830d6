"""VaSE: sinks, columns with values of large range, and others that are drawn by their attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flexgen_h2o.core.settings import setting
from flexgen_h2o.kvcache.eviction.policy import (
    EVERYTHING,
    NORMS,
    POSITIONS,
    SCORES,
    Columns,
    Needs,
    RowBudget,
    best_of,
    pseudo_random,
)
from flexgen_h2o.kvcache.eviction.snapkv import SnapKV

if TYPE_CHECKING:
    import torch

MIN_SCORE = 1e-9  # added to all scores; a column without attention is drawn last
_DRAWS = 2**24  # number of possible results of pseudo_random


@dataclass(frozen=True)
class VaSE(SnapKV):
    """The policy that keeps sinks, columns with values of large range, and a sample of the others.

    It keeps 4 sinks. A quarter of the heavy columns are chosen by the range of their values: the
    largest less the smallest number. The others are drawn by the attention of the last `window`
    queries, smoothed over `kernel` neighbours. Sinks are part of the heavy share. Recent columns
    are those of the budget.

    The highest values of log(score) + Gumbel noise are a sample without replacement. The noise
    comes from a hash of seed, layer, kv-head and position.

    Differences from the paper: it draws anew every 64 steps. Here a column keeps its noise, and one
    column leaves per step.

    Paper: VaSE (arXiv 2606.03928).
    """

    name: ClassVar[str] = "vase"

    window: int = setting(64, low=1, high=EVERYTHING)
    sinks: int = setting(4, low=0, high=EVERYTHING)
    seed: int = setting(0, low=0, high=2**31)

    @property
    def measures(self) -> Needs:
        step = 1 / self.window
        return Needs(
            (POSITIONS, SCORES, NORMS),
            self.window,
            decay=1 - step,
            gain=step,
            ranks_by_score=False,
            value_range=True,
        )

    def split(self, heavy: int, recent: int) -> RowBudget:
        sinks = min(self.sinks, heavy)
        return RowBudget(sinks, heavy - sinks, recent)

    def rank(self, columns: Columns) -> torch.Tensor:
        assert columns.scores is not None and columns.norms is not None
        uniform = (pseudo_random(columns, self.seed).float() + 0.5) / _DRAWS
        drawn = (columns.scores + MIN_SCORE).log() - (-uniform.log()).log()
        by_range = best_of(columns.norms, columns, columns.heavy // 4)
        return drawn.masked_fill(by_range, float("inf"))

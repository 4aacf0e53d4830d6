"""SnapKV: the columns that the prompt's last queries attend to most, smoothed over neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.settings import setting
from flexgen_h2o.kvcache.eviction.policy import EVERYTHING, POSITIONS, SCORES, Evicting, Needs

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SnapKV(Evicting):
    """The policy that keeps the columns to which the last `window` queries of a prompt attend most.

    A column's score is the mean attention of these queries. Scores of the columns before the window
    are averaged over `kernel` neighbours, with zeros beyond both ends. So a column stays with its
    context.

    Difference from the paper: it drops only columns of the prompt. Here columns leave while
    decoding too, and the score continues as a moving average over about `window` queries.

    Paper: Li et al. 2024, "SnapKV: LLM Knows What You are Looking for Before Generation"
    (arXiv 2404.14469).
    """

    name: ClassVar[str] = "snapkv"

    window: int = setting(32, low=1, high=EVERYTHING)
    kernel: int = setting(7, low=1, high=EVERYTHING)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel % 2 == 0:
            raise UsageError(f"kernel: {self.kernel} is not odd; give an odd number")

    @property
    def measures(self) -> Needs:
        return Needs(
            (POSITIONS, SCORES),
            query_rows=self.window,
            decay=1 - 1 / self.window,
            gain=1 / self.window,
        )

    def prompt_scores(self, sums: torch.Tensor, query_rows: int) -> torch.Tensor:
        import torch.nn.functional as F

        mean = sums / query_rows
        before = max(0, mean.shape[-1] - self.window)
        if before:
            mean[..., :before] = F.avg_pool1d(
                mean[..., :before], self.kernel, stride=1, padding=self.kernel // 2
            )
        return mean

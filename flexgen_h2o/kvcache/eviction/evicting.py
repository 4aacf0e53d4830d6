"""What all policies that drop columns share: the budget of a row, over its prompt's length and the layers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch

from flexgen_h2o.errors import UsageError
from flexgen_h2o.kvcache.eviction.policy import EVERYTHING, RANKS, Columns, Needs, RowBudget
from flexgen_h2o.units import check_int, check_share

DEFAULT_RATIO = 0.1
SCHEDULES = ("uniform", "pyramid")
ORIGINAL, ROLLING = "original", "rolling"
PYRAMID_BETA = 20  # PyramidKV: the last layer's heavy budget is the mean / beta


@dataclass(frozen=True)
class Evicting:
    """Settings of a policy that keeps heavy + recent columns a row: as shares of the row's prompt, or as counts.

    heavy_ratio, recent_ratio: in (0, 1]; int(ratio x prompt tokens) columns, at least 1. heavy_size, recent_size:
    columns; heavy 0 is what the H2O paper calls "local". What is not given of recent is as heavy; nothing at all is
    0.1 each. layer_schedule: "uniform", or "pyramid", where lower layers keep more heavy columns and upper ones fewer,
    as many in sum (PyramidKV, Cai et al. 2024, arXiv 2406.02069). while_decoding: False drops columns of the prompt
    only and keeps all that are generated (FlexGen's H2O without --hh-all). positions: "original", or "rolling": while
    decoding a column's position is its rank among those that its row holds (StreamingLLM, Xiao et al. 2024, section
    3.2), so that rows may grow past the positions that the model was trained for. Needs rotary embeddings.

    Raises UsageError for a setting out of range.
    """

    name: ClassVar[str] = ""

    heavy_ratio: float | None = None
    recent_ratio: float | None = None
    heavy_size: int | None = None
    recent_size: int | None = None
    layer_schedule: str = "uniform"
    while_decoding: bool = True
    positions: str = ORIGINAL

    def __post_init__(self) -> None:
        for kind in ("heavy", "recent"):
            ratio, size = getattr(self, f"{kind}_ratio"), getattr(self, f"{kind}_size")
            if ratio is not None and size is not None:
                raise UsageError(f"{kind}_size: both a count and a share of {kind} columns are given; give one of them")
            if ratio is not None:
                object.__setattr__(self, f"{kind}_ratio", check_share(f"{kind}_ratio", ratio))
            if size is not None:
                self._take_int(f"{kind}_size", low=0 if kind == "heavy" else 1)
        if self.heavy_size == 0 and self.recent_size is None and self.recent_ratio is None:
            raise UsageError("heavy_size: 0 alone leaves nothing; say how many recent columns stay")
        if self.layer_schedule not in SCHEDULES:
            raise UsageError(f"layer_schedule: {self.layer_schedule!r} is not one of {', '.join(SCHEDULES)}")
        if not isinstance(self.while_decoding, bool):
            raise UsageError(f"while_decoding: {self.while_decoding!r} is not true or false")
        if self.positions not in (ORIGINAL, ROLLING):
            raise UsageError(f"positions: {self.positions!r} is neither {ORIGINAL} nor {ROLLING}")

    def _take_int(self, name: str, low: int, high: int | None = None) -> int:
        """A setting as a plain int, which a report can hold."""
        value = check_int(name, getattr(self, name), low, high)
        object.__setattr__(self, name, value)
        return value

    @property
    def needs(self) -> Needs:
        found = self.measures
        return replace(found, record=(*found.record, RANKS)) if self.positions == ROLLING else found

    @property
    def measures(self) -> Needs:
        """What the policy itself needs, wherever positions come from."""
        raise NotImplementedError

    def split(self, heavy: int, recent: int) -> RowBudget:
        """How the policy uses heavy + recent columns."""
        return RowBudget(0, heavy, recent)

    def budget(self, prompt_len: int, block: int, num_blocks: int) -> RowBudget:
        heavy, recent = self._count("heavy", prompt_len), self._count("recent", prompt_len)
        if self.layer_schedule == "pyramid":
            heavy = _pyramid(heavy, prompt_len - recent, block, num_blocks)
        return self.split(heavy, recent)

    def slots(self, prompt_len: int, gen_len: int, block: int, num_blocks: int) -> int:
        columns = self.budget(prompt_len, block, num_blocks).columns
        grown = min(columns, prompt_len) + gen_len - 1
        return max(1, min(columns + 1, grown) if self.while_decoding else grown)

    def prompt_scores(self, sums: torch.Tensor, query_rows: int) -> torch.Tensor:
        return sums

    def rank(self, columns: Columns) -> torch.Tensor:
        assert columns.scores is not None
        return columns.scores

    def to_json(self) -> dict[str, Any]:
        """The settings as they are used: defaults filled in, each share a ratio or a size."""
        shares = {f"{kind}_{what}": value for kind in ("heavy", "recent") for what, value in [self._share(kind)]}
        settings = {k: v for k, v in asdict(self).items() if v is not None and (k, v) != ("positions", ORIGINAL)}
        return {"name": self.name, **settings, **shares}

    def _share(self, kind: str) -> tuple[str, int | float]:
        """("size", columns) or ("ratio", of the prompt)."""
        ratio, size = getattr(self, f"{kind}_ratio"), getattr(self, f"{kind}_size")
        if ratio is None and size is None and kind == "recent":
            ratio, size = self.heavy_ratio, self.heavy_size
        if size is not None:
            return "size", size
        return "ratio", DEFAULT_RATIO if ratio is None else ratio

    def _count(self, kind: str, prompt_len: int) -> int:
        what, value = self._share(kind)
        return min(int(value), EVERYTHING) if what == "size" else max(1, int(value * prompt_len))


def _pyramid(heavy: int, most: int, block: int, num_blocks: int) -> int:
    """The heavy columns of one block: falling in a line, `num_blocks * heavy` in sum, no block above `most`."""
    if num_blocks == 1:
        return heavy
    high = min(2 * heavy - heavy / PYRAMID_BETA, max(heavy, most))
    step = 2 * (high - heavy) / (num_blocks - 1)

    def below(blocks: int) -> int:
        """Heavy columns of the first `blocks`, rounded so that every sum is a whole number."""
        return round(blocks * high - step * blocks * (blocks - 1) / 2)

    return below(block + 1) - below(block)

"""Adaptation of an eviction policy to a model.

Layers that attend to a window keep the columns of that window. The policy applies to the other
layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.kvcache.eviction.full import Full
from flexgen_h2o.kvcache.eviction.policy import (
    Columns,
    Eviction,
    Needs,
    RowBudget,
    is_rolling,
    with_sizes,
)

if TYPE_CHECKING:
    import torch

    from flexgen_h2o.core.model import ModelSpec
    from flexgen_h2o.core.packing import KVSizes


@dataclass(frozen=True)
class Window(Full):
    """The policy that keeps the newest columns, for a layer whose queries see no others.

    In a full row, the oldest column leaves for each new one. So the slots are a ring, and nothing
    is recorded of them.
    """

    name: ClassVar[str] = "window"

    columns: int = 0  # number of newest columns that stay

    def budget(self, prompt_len: int, gen_len: int, block: int) -> RowBudget:
        return RowBudget(0, 0, self.columns)

    def slots(self, prompt_len: int, gen_len: int, block: int = 0) -> int:
        return min(self.columns, super().slots(prompt_len, gen_len))


@dataclass(frozen=True)
class OfModel:
    """The policy `policy` in the transformer blocks of a model, or of one stage of a model.

    Blocks with a window have the policy `Window` instead.
    """

    policy: Eviction
    windows: tuple[int | None, ...] = ()  # by block; None: no window; (): no block has one
    first: int = 0  # the model's block that is block 0 of the stage

    @property
    def name(self) -> str:
        return self.policy.name

    @property
    def needs(self) -> Needs:
        return self.policy.needs

    @property
    def while_decoding(self) -> bool:
        """Whether `policy` drops columns while decoding."""
        return bool(getattr(self.policy, "while_decoding", False))

    def budget(self, prompt_len: int, gen_len: int, block: int) -> RowBudget:
        return self._at(block).budget(prompt_len, gen_len, self.first + block)

    def slots(self, prompt_len: int, gen_len: int, block: int) -> int:
        return self._at(block).slots(prompt_len, gen_len, self.first + block)

    def prompt_scores(self, sums: torch.Tensor, query_rows: int) -> torch.Tensor:
        return self.policy.prompt_scores(sums, query_rows)

    def rank(self, columns: Columns) -> torch.Tensor:
        return self.policy.rank(replace(columns, block=self.first + columns.block))

    def to_json(self) -> dict[str, Any]:
        return self.policy.to_json()

    def _at(self, block: int) -> Eviction:
        """Return the policy of one transformer block."""
        window = self.windows[self.first + block] if self.windows else None
        return self.policy if window is None else Window(window)


def fitted(eviction: Eviction, spec: ModelSpec, sizes: KVSizes) -> Eviction:
    """Return the policy for a model.

    It applies only to the layers without a window, and knows the bytes of columns if it needs them.
    """
    eviction = with_sizes(eviction, sizes)
    return OfModel(eviction, spec.windows) if spec.windows else eviction


def check_for_model(eviction: Eviction, spec: ModelSpec, compresses_cache: bool) -> None:
    """Raise UsageError if a policy does not work with a model.

    There are two cases. A policy that drops columns needs a layer without a window. Rolling
    positions need rotary embeddings and a KV cache that is not compressed.
    """
    asked = eviction.policy if isinstance(eviction, OfModel) else eviction
    if spec.windows and None not in spec.windows and not isinstance(asked, Full):
        raise UsageError(
            f"--eviction {eviction.name}: every layer of {spec.name} attends to a window of its "
            "newest KV entries, "
            f"{max(w for w in spec.windows if w)} at most, and keeps no others; leave it out"
        )
    if not is_rolling(eviction):
        return
    if spec.rotary is None:
        raise UsageError(
            f"--positions rolling: needs rotary embeddings, and {spec.name} has learned positions, "
            "which its hidden "
            "states and so its keys hold; leave it at original"
        )
    if compresses_cache:
        raise UsageError(
            "--positions rolling: does not work with a compressed KV cache; leave out "
            "--compress-cache"
        )

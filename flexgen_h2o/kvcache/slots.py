"""Which slots the rows of a micro-batch hold, and which their next column takes. No keys and no values here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexgen_h2o.kvcache.eviction.policy import Eviction


@dataclass(frozen=True)
class RowSlots:
    """The rows of a micro-batch in one transformer block; each field (sequences,) int64 on the host.

    prompts: tokens of the prompt. sinks, heavy, recent: the row's budget. slots: what the row may fill; a row that has
    filled them drops a column for each new one.
    """

    prompts: torch.Tensor
    sinks: torch.Tensor
    heavy: torch.Tensor
    recent: torch.Tensor
    slots: torch.Tensor

    @property
    def kept(self) -> torch.Tensor:
        """Columns left of each prompt after the prefill sweep."""
        return torch.minimum(self.prompts, self.sinks + self.heavy + self.recent)


@dataclass(frozen=True)
class Joining:
    """The new columns of one decode step; each field (sequences,) int64 on the host.

    past: their positions. slot: where each goes, -1 for the victim of the step before. filled: slots in use with it.
    """

    past: torch.Tensor
    slot: torch.Tensor
    filled: torch.Tensor


def joining(rows: RowSlots, past: torch.Tensor) -> Joining:
    """Where the columns at positions `past` go: the next free slot, or in a full row the slot of its victim."""
    held = rows.kept + past - rows.prompts
    filled = torch.minimum(held + 1, rows.slots)
    return Joining(past, torch.where(held < rows.slots, held, -1), filled)


class SlotTable:
    """Budgets of the rows of a micro-batch in every transformer block.

    rows: (prompt tokens, most new tokens) of each.
    """

    def __init__(self, policy: Eviction, rows: Sequence[tuple[int, int]], num_blocks: int) -> None:
        def entry(prompt_len: int, gen_len: int, block: int) -> list[int]:
            budget = policy.budget(prompt_len, block, num_blocks)
            slots = policy.slots(prompt_len, gen_len, block, num_blocks)
            return [prompt_len, budget.sinks, budget.heavy, budget.recent, slots]

        self._table = torch.tensor([[entry(*row, block) for row in rows] for block in range(num_blocks)])

    def at(self, block: int, rows: Sequence[int]) -> RowSlots:
        """`rows`: which of the rows are left, in their present order."""
        return RowSlots(*self._table[block, list(rows)].unbind(1))

    def most_slots(self, block: int) -> int:
        return int(self._table[block, :, -1].max())

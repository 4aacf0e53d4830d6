"""Which slots the rows of a micro-batch hold, and which their next column takes. No keys and no values here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexgen_h2o.kvcache.eviction.policy import Eviction
from flexgen_h2o.kvcache.moves import Move, order_after


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

    def part(self, start: int, end: int | None) -> RowSlots:
        """The sequences [start, end); None: to the last."""
        return RowSlots(*(t[start:end] for t in (self.prompts, self.sinks, self.heavy, self.recent, self.slots)))


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
        self._policy, self._num_blocks = policy, num_blocks
        self._table = self._entries(rows)

    def close_ranks(self, moves: Sequence[Move], remaining: int) -> None:
        """Rows have left: `moves` bring the others to the front, `remaining` stay."""
        self._table = self._table[:, order_after(moves, remaining)]

    def enter(self, rows: Sequence[tuple[int, int]]) -> None:
        """More rows, behind the others."""
        self._table = torch.cat([self._table, self._entries(rows)], dim=1)

    def at(self, block: int, rows: Sequence[int] | None = None) -> RowSlots:
        """`rows`: which of the rows, in their order; None: all."""
        table = self._table[block]
        return RowSlots(*(table if rows is None else table[list(rows)]).unbind(1))

    def most_slots(self, block: int) -> int:
        return int(self._table[block, :, -1].max())

    def _entries(self, rows: Sequence[tuple[int, int]]) -> torch.Tensor:
        """(blocks, rows, 5) int64"""
        policy, num_blocks = self._policy, self._num_blocks

        def entry(prompt_len: int, gen_len: int, block: int) -> list[int]:
            budget = policy.budget(prompt_len, block, num_blocks)
            slots = policy.slots(prompt_len, gen_len, block, num_blocks)
            return [prompt_len, budget.sinks, budget.heavy, budget.recent, slots]

        return torch.tensor([[entry(*row, block) for row in rows] for block in range(num_blocks)])

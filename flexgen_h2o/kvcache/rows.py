"""Rows of a micro-batch: their budgets, what the host knows of their new columns, and who moves up when rows leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple
from weakref import ref

import torch

from flexgen_h2o.core.packing import window_of
from flexgen_h2o.kernels.workspace import upload_together
from flexgen_h2o.kvcache.eviction.policy import Eviction, Needs

Move = tuple[int, int]  # from sequence, to sequence


def plan_moves(leaving: Sequence[int], count: int) -> tuple[list[Move], list[int]]:
    """Fill the places of `leaving` (indices of `count` sequences) from the end.

    Returns the moves and, for each remaining place, the sequence that stands there now.
    """
    gone = set(leaving)
    remaining = count - len(gone)
    donors = [i for i in range(count - 1, remaining - 1, -1) if i not in gone]
    moves = list(zip(donors, sorted(i for i in gone if i < remaining), strict=True))
    return moves, order_after(moves, remaining)


def order_after(moves: Sequence[Move], remaining: int) -> list[int]:
    """For each of the `remaining` places, the sequence that stands there after the moves."""
    came_from = {target: source for source, target in moves}
    return [came_from.get(place, place) for place in range(remaining)]


@dataclass(frozen=True, eq=False)
class RowBudgets:
    """Budgets of sequences in one transformer block; each field (sequences,) int64 on the host.

    prompts: tokens of the prompt. sinks, heavy, recent: columns that stay (`RowBudget`). slots: what the sequence may
    fill; one that has filled them drops a column for each new one.
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

    def stay(self, sequence: int) -> tuple[int, int, int]:
        """Sinks, heavy and recent columns of one of them."""
        return int(self.sinks[sequence]), int(self.heavy[sequence]), int(self.recent[sequence])

    def select(self, rows: slice | torch.Tensor) -> RowBudgets:
        if isinstance(rows, slice) and rows == slice(0, len(self.prompts)):
            return self
        return RowBudgets(*(t[rows] for t in vars(self).values()))


class NumbersOfRows(NamedTuple):
    """What some rows of a KV unit have of a decode step, each (rows,), on their device: the position of the new column,
    the slots in use with it, the range of positions in which a column may leave, what its score gains, and where the
    new column goes (StepNumbers.free, oldest_slot)."""

    positions: torch.Tensor
    filled: torch.Tensor
    oldest: torch.Tensor
    newest: torch.Tensor
    gains: torch.Tensor
    free: torch.Tensor
    oldest_slot: torch.Tensor


class StepNumbers:
    """What the host knows of the new columns of one decode step, the same for all transformer blocks of equal budgets.

    positions: (sequences,) int64, of the columns. filled: slots in use with them. replaces: where they take the place
    of another column. free: the next free slot, or -1. oldest_slot: of the oldest column, where slots are filled in the
    order of columns. Each (sequences,) on the host. whole: the most columns of a row that are whole beside packed ones.
    """

    def __init__(self, budgets: RowBudgets, needs: Needs, positions: torch.Tensor, whole: int = 0) -> None:
        held = budgets.kept + positions - budgets.prompts
        self.positions, self.filled = positions, torch.minimum(held + 1, budgets.slots)
        self.replaces = held >= budgets.slots
        self.free, self.oldest_slot = held.masked_fill(self.replaces, -1), held % budgets.slots
        self._budgets, self._needs, self._whole = budgets, needs, whole
        self._states: dict[torch.device, torch.Tensor] = {}
        self._together: Sequence[ref[StepNumbers]] = ()
        self._of_rows: dict[tuple[int, int, int, torch.device], NumbersOfRows] = {}
        self._places: dict[int, torch.Tensor] = {}

    def of_rows(self, kv_heads: int, first: int, end: int, where: torch.device) -> NumbersOfRows:
        """Of the rows [first, end), `kv_heads` of them a sequence: int32, gains fp32, slots int64. Worked out once."""
        key = kv_heads, first, end, where
        if key not in self._of_rows:
            ints = self.positions, self.filled, self._budgets.sinks, self.positions - self._budgets.recent
            every = [*(t.int() for t in ints), self.gains.float(), self.free, self.oldest_slot]
            rows = [t.repeat_interleave(kv_heads)[first:end].to(where) for t in every]
            self._of_rows[key] = NumbersOfRows._make(rows)
        return self._of_rows[key]

    @cached_property
    def held(self) -> int:
        """Slots in use of all sequences."""
        return int(self.filled.sum())

    @cached_property
    def most(self) -> int:
        """Slots in use of the fullest."""
        return int(self.filled.max())

    @property
    def gains(self) -> torch.Tensor:
        """(sequences,) fp32: what a score grows by with a whole probability."""
        gains = torch.full((len(self.filled),), self._needs.gain, dtype=torch.float32, device="cpu")
        return gains * (self.filled.float() / (self.positions + 1)) if self._needs.even else gains

    def whole_places(self, most: int) -> torch.Tensor:
        """(sequences,) int64: the places of the columns among the newest, which are whole beside packed slots; -1 for
        none. most: room for them in a row. Worked out once."""
        if most not in self._places:
            windows = torch.tensor([window_of(most, held) for held in self._budgets.slots.tolist()], device="cpu")
            self._places[most] = torch.where(windows > 0, self.positions % windows.clamp(min=1), -1)
        return self._places[most]

    def state(self, where: torch.device) -> torch.Tensor:
        """The state of the step (kernels/decode_step.StepSlots) on a card, which is copied there once, with those of
        `copied_together`."""
        if where not in self._states:
            together = [one for found in self._together if (one := found()) is not None] or [self]
            copies = upload_together([one._state_on_host().flatten() for one in together], where)
            for one, copy in zip(together, copies, strict=True):
                one._states[where] = copy.view(-1, len(one.positions))
        return self._states[where]

    def _state_on_host(self) -> torch.Tensor:
        slots = self.free if self._needs.record else self.oldest_slot
        newest = self.positions - self._budgets.recent
        fields = torch.stack([self.filled, slots, self.positions, self._budgets.sinks, newest]).int()
        gains, places = self.gains.float().view(torch.int32), self.whole_places(self._whole).int()
        return torch.cat([fields, gains[None], places[None]])


def copied_together(numbers: Sequence[StepNumbers]) -> None:
    """A card gets the states of these in one copy."""
    together = [ref(one) for one in numbers]
    for one in numbers:
        one._together = together


class SlotTable:
    """Budgets of the rows of a micro-batch in every transformer block.

    rows: (prompt tokens, most new tokens) of each, which its budgets are of, and where the prompt is fed in part, how
    many of its tokens. elsewhere: of each block, the first tokens of all rows whose columns need no slots.
    """

    def __init__(
        self, policy: Eviction, rows: Sequence[tuple[int, ...]], num_blocks: int, elsewhere: Sequence[int] = ()
    ) -> None:
        self._policy, self._num_blocks, self._elsewhere = policy, num_blocks, elsewhere or (0,) * num_blocks
        self._table = self._entries(rows)
        self._budgets: list[RowBudgets] = []  # by block; made anew when rows have changed

    def compact(self, moves: Sequence[Move], remaining: int) -> None:
        """Rows have left: `moves` bring the others to the front, `remaining` stay."""
        self._table = self._table[:, order_after(moves, remaining)]
        self._budgets.clear()

    def admit(self, rows: Sequence[tuple[int, ...]]) -> None:
        """More rows, behind the others."""
        self._table = torch.cat([self._table, self._entries(rows)], dim=1)
        self._budgets.clear()

    def at(self, block: int) -> RowBudgets:
        """Blocks of equal budgets share them."""
        if not self._budgets:
            known: dict[bytes, RowBudgets] = {}
            for table in self._table:
                self._budgets.append(known.setdefault(table.numpy().tobytes(), RowBudgets(*table.unbind(1))))
        return self._budgets[block]

    @property
    def shared(self) -> tuple[int, ...]:
        """For each block the first one that has its budgets."""
        first: dict[RowBudgets, int] = {}
        return tuple(first.setdefault(self.at(block), block) for block in range(self._num_blocks))

    def most_slots(self, block: int) -> int:
        return int(self._table[block, :, -1].max())

    def _entries(self, rows: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """(blocks, rows, 5) int64"""
        policy, num_blocks = self._policy, self._num_blocks

        def entry(block: int, prompt_len: int, gen_len: int, fed: int | None = None) -> list[int]:
            before = self._elsewhere[block]
            budget = policy.budget(prompt_len - before, gen_len, block)
            slots = policy.slots(prompt_len - before, gen_len, block)
            return [(fed or prompt_len) - before, budget.sinks, budget.heavy, budget.recent, slots]

        table = [[entry(block, *row) for row in rows] for block in range(num_blocks)]
        return torch.tensor(table, dtype=torch.int64, device="cpu").view(num_blocks, len(rows), 5)

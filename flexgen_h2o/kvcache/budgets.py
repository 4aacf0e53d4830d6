"""Sequences of a micro-batch: budgets, the numbers of a decode step, and moves when some leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from flexgen_h2o.core.packing import window_of
from flexgen_h2o.kernels.workspace import upload_together
from flexgen_h2o.kvcache.eviction.policy import Eviction, Needs

Move = tuple[int, int]  # from sequence, to sequence


def plan_moves(leaving: Sequence[int], count: int) -> tuple[list[Move], list[int]]:
    """Return the moves that fill the places of leaving sequences with the last ones.

    Also returns, for each remaining place, the sequence that it holds after the moves.

    leaving: indices of the sequences that leave. count: sequences before they leave.
    """
    gone = set(leaving)
    remaining = count - len(gone)
    donors = [i for i in range(count - 1, remaining - 1, -1) if i not in gone]
    moves = list(zip(donors, sorted(i for i in gone if i < remaining), strict=True))
    return moves, order_after(moves, remaining)


def order_after(moves: Sequence[Move], remaining: int) -> list[int]:
    """Return, for each of the `remaining` places, the sequence that it holds after the moves."""
    came_from = {target: source for source, target in moves}
    return [came_from.get(place, place) for place in range(remaining)]


@dataclass(frozen=True, eq=False)
class Budgets:
    """Budgets of sequences in one transformer block. `BudgetTable` makes it.

    Each field is (sequences,) int64 on the host. Sinks, heavy and recent columns are those of
    `RowBudget`.
    """

    prompts: torch.Tensor  # tokens of the prompt whose columns go to slots
    sinks: torch.Tensor  # first columns that stay
    heavy: torch.Tensor  # columns that stay by their rank
    recent: torch.Tensor  # newest columns that stay
    slots: torch.Tensor  # slots per row; if all are filled, each new column replaces another

    @property
    def kept(self) -> torch.Tensor:
        """Columns that are left of each prompt after the prefill sweep, (sequences,) int64."""
        return torch.minimum(self.prompts, self.sinks + self.heavy + self.recent)

    def select(self, rows: slice | torch.Tensor) -> Budgets:
        """Return the budgets of some of the sequences."""
        if isinstance(rows, slice) and rows == slice(0, len(self.prompts)):
            return self
        return Budgets(*(t[rows] for t in vars(self).values()))


class DecodeStep:
    """The numbers of the new columns of one decode step, which the host computes in advance.

    Transformer blocks of equal budgets share them. Attributes:

    budgets, needs: of the sequences that decode, and of their policy.
    window: the most columns of a row that are also kept whole beside packed slots.
    positions: (sequences,) int64 on the host, positions of the new columns.
    filled: (sequences,) int64 on the host, slots in use with the new columns.
    """

    def __init__(
        self, budgets: Budgets, needs: Needs, positions: torch.Tensor, window: int = 0
    ) -> None:
        self.budgets = budgets
        self.needs = needs
        self.window = window
        self.positions = positions
        self.filled = torch.minimum(self.grown, budgets.slots)
        self._of_rows: dict[tuple[int, int, int, torch.device], torch.Tensor] = {}
        self._copies: dict[torch.device, torch.Tensor] = {}

    def next(self) -> DecodeStep:
        """Return the step in which each sequence gets one more column."""
        return DecodeStep(self.budgets, self.needs, self.positions + 1, self.window)

    @property
    def grown(self) -> torch.Tensor:
        """Slots that each sequence would use if no column left while decoding, (sequences,)."""
        return self.budgets.kept + self.positions - self.budgets.prompts + 1

    @cached_property
    def num_filled(self) -> int:
        """Slots in use, summed over all sequences."""
        return int(self.filled.sum())

    @cached_property
    def max_filled(self) -> int:
        """Slots in use of the sequence that has the most."""
        return int(self.filled.max())

    @cached_property
    def table(self) -> torch.Tensor:
        """The step as decode kernels read it, (7, sequences) int32 (`StepSlots.state`)."""
        needs = self.needs
        budgets = self.budgets
        before = self.grown - 1
        slots = before % budgets.slots  # of the oldest column, if slots are a ring
        if needs.record:  # the next free slot, or -1: the victim's
            slots = before.masked_fill(before >= budgets.slots, -1)
        gains = torch.full((len(before),), needs.gain, dtype=torch.float32, device="cpu")
        if needs.even:
            gains *= self.filled.float() / (self.positions + 1)
        places = torch.full_like(before, -1)
        if self.window:
            windows = torch.tensor(
                [window_of(self.window, count) for count in budgets.slots.tolist()], device="cpu"
            )
            places = torch.where(windows > 0, self.positions % windows.clamp(min=1), places)
        newest = self.positions - budgets.recent
        fields = torch.stack([self.filled, slots, self.positions, budgets.sinks, newest]).int()
        return torch.cat([fields, gains.view(torch.int32)[None], places.int()[None]])

    def of_rows(self, kv_heads: int, first: int, end: int, where: torch.device) -> torch.Tensor:
        """Return the columns of `table` for a unit's rows [first, end), on device `where`.

        A sequence has `kv_heads` rows. The result is cached.
        """
        key = kv_heads, first, end, where
        if key not in self._of_rows:
            rows = self.table.repeat_interleave(kv_heads, dim=1)[:, first:end]
            self._of_rows[key] = rows.to(where)
        return self._of_rows[key]

    def table_on(self, where: torch.device) -> torch.Tensor:
        """Return the copy of `table` on a device, which is made once."""
        if where not in self._copies:
            copy_tables([self], where)
        return self._copies[where]


def copy_tables(steps: Sequence[DecodeStep], where: torch.device) -> None:
    """Copy the tables of several steps to a device, in one copy."""
    copies = upload_together([step.table.flatten() for step in steps], where)
    for step, copy in zip(steps, copies, strict=True):
        step._copies[where] = copy.view(-1, len(step.positions))


class BudgetTable:
    """The budgets of a micro-batch's sequences in every transformer block.

    rows: for each sequence (prompt tokens, most new tokens), which determine its budgets
        (`Sequence.size`). A third entry is the number of prompt tokens that are prefilled. It is
        smaller if the rest of the prompt is taken in decode steps.
    elsewhere: for each block, the number of first tokens whose columns need no slots, because they
        are stored elsewhere. It is the same for all sequences.
    """

    def __init__(
        self,
        policy: Eviction,
        rows: Sequence[tuple[int, ...]],
        num_blocks: int,
        elsewhere: Sequence[int] = (),
    ) -> None:
        self._policy = policy
        self._num_blocks = num_blocks
        self._elsewhere = elsewhere or (0,) * num_blocks
        self._table = self._entries(rows)
        self._budgets: list[Budgets] = []  # by block; cleared when sequences change

    def compact(self, moves: Sequence[Move], remaining: int) -> None:
        """Remove sequences that left. `moves` bring the `remaining` others to the front."""
        self._table = self._table[:, order_after(moves, remaining)]
        self._budgets.clear()

    def admit(self, rows: Sequence[tuple[int, ...]]) -> None:
        """Add sequences behind the others. rows: as for the class."""
        self._table = torch.cat([self._table, self._entries(rows)], dim=1)
        self._budgets.clear()

    def at(self, block: int) -> Budgets:
        """Return the budgets in one transformer block. Blocks of equal budgets share one object."""
        if not self._budgets:
            known: dict[bytes, Budgets] = {}
            for table in self._table:
                self._budgets.append(
                    known.setdefault(table.numpy().tobytes(), Budgets(*table.unbind(1)))
                )
        return self._budgets[block]

    @property
    def shared(self) -> tuple[int, ...]:
        """The first block that has the same budgets, for each block."""
        first: dict[Budgets, int] = {}
        return tuple(first.setdefault(self.at(block), block) for block in range(self._num_blocks))

    def most_slots(self, block: int) -> int:
        """Return the slots of the sequence that has the most of them in this block."""
        return int(self._table[block, :, -1].max())

    def _entries(self, rows: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Return the fields of Budgets, in their order, (blocks, sequences, 5) int64."""
        policy = self._policy
        num_blocks = self._num_blocks

        def entry(block: int, prompt_len: int, gen_len: int, fed: int | None = None) -> list[int]:
            before = self._elsewhere[block]
            budget = policy.budget(prompt_len - before, gen_len, block)
            slots = policy.slots(prompt_len - before, gen_len, block)
            return [(fed or prompt_len) - before, budget.sinks, budget.heavy, budget.recent, slots]

        table = [[entry(block, *row) for row in rows] for block in range(num_blocks)]
        return torch.tensor(table, dtype=torch.int64, device="cpu").view(num_blocks, len(rows), 5)

"""Sequences of a micro-batch: budgets, the numbers of a decode step, and moves when some leave."""

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


class StepOfRows(NamedTuple):
    """The DecodeStep of some rows of a KV unit. `DecodeStep.of_rows` makes it.

    Each field is (rows,) on the device of the rows.
    """

    positions: torch.Tensor  # int32: position of the new column
    filled: torch.Tensor  # int32: slots in use, including the new column
    oldest: torch.Tensor  # int32: first position of the columns that may leave
    newest: torch.Tensor  # int32: last position of the columns that may leave, inclusive
    gains: torch.Tensor  # fp32: as DecodeStep.gains
    free: torch.Tensor  # int64: as DecodeStep.free
    oldest_slot: torch.Tensor  # int64: as DecodeStep.oldest_slot


class DecodeStep:
    """The numbers of the new columns of one decode step, which the host computes in advance.

    Transformer blocks of equal budgets share them. Attributes:

    budgets, needs: of the sequences that decode, and of their policy.
    whole: the most columns of a row that are kept whole beside packed slots.

    The others are each (sequences,) on the host:

    positions: int64, positions of the new columns.
    filled: int64, slots in use with the new columns.
    replaces: bool, whether the new column replaces another one.
    free: int64, the next free slot, or -1.
    oldest_slot: int64, the slot of the oldest column, if slots are filled in the order of columns.
    """

    def __init__(
        self, budgets: Budgets, needs: Needs, positions: torch.Tensor, whole: int = 0
    ) -> None:
        held = budgets.kept + positions - budgets.prompts
        self.positions = positions
        self.filled = torch.minimum(held + 1, budgets.slots)
        self.replaces = held >= budgets.slots
        self.free = held.masked_fill(self.replaces, -1)
        self.oldest_slot = held % budgets.slots
        self.budgets = budgets
        self.needs = needs
        self.whole = whole
        self._states: dict[torch.device, torch.Tensor] = {}
        self._together: Sequence[ref[DecodeStep]] = ()
        self._of_rows: dict[tuple[int, int, int, torch.device], StepOfRows] = {}
        self._places: dict[int, torch.Tensor] = {}

    def next(self) -> DecodeStep:
        """Return the step in which each sequence gets one more column."""
        return DecodeStep(self.budgets, self.needs, self.positions + 1, self.whole)

    def of_rows(self, kv_heads: int, first: int, end: int, where: torch.device) -> StepOfRows:
        """Return the numbers of a unit's rows [first, end) on device `where`.

        A sequence has `kv_heads` rows. The result is cached.
        """
        key = kv_heads, first, end, where
        if key not in self._of_rows:
            ints = (
                self.positions,
                self.filled,
                self.budgets.sinks,
                self.positions - self.budgets.recent,
            )
            every = [*(t.int() for t in ints), self.gains.float(), self.free, self.oldest_slot]
            rows = [t.repeat_interleave(kv_heads)[first:end].to(where) for t in every]
            self._of_rows[key] = StepOfRows._make(rows)
        return self._of_rows[key]

    @cached_property
    def held(self) -> int:
        """Slots in use, summed over all sequences."""
        return int(self.filled.sum())

    @cached_property
    def most(self) -> int:
        """Slots in use of the sequence that has the most."""
        return int(self.filled.max())

    @property
    def gains(self) -> torch.Tensor:
        """Gain of a score for an attention probability of 1, (sequences,) fp32 (`Needs.gain`)."""
        gains = torch.full((len(self.filled),), self.needs.gain, dtype=torch.float32, device="cpu")
        return gains * (self.filled.float() / (self.positions + 1)) if self.needs.even else gains

    def whole_places(self, most: int) -> torch.Tensor:
        """Return the index of each new column among its row's whole columns, (sequences,) int64.

        It is -1 if the row keeps no whole columns. The result is cached.

        most: whole columns that a row has room for.
        """
        if most not in self._places:
            windows = torch.tensor(
                [window_of(most, held) for held in self.budgets.slots.tolist()], device="cpu"
            )
            self._places[most] = torch.where(windows > 0, self.positions % windows.clamp(min=1), -1)
        return self._places[most]

    def state(self, where: torch.device) -> torch.Tensor:
        """Return the state of the step (`StepSlots.state` in kernels/decode_step.py) on a GPU.

        The first call copies it there, together with the states of all steps that were passed to
        `copied_together` with this one. Later calls return the copy.
        """
        if where not in self._states:
            together = [one for found in self._together if (one := found()) is not None] or [self]
            copies = upload_together([one._state_on_host().flatten() for one in together], where)
            for one, copy in zip(together, copies, strict=True):
                one._states[where] = copy.view(-1, len(one.positions))
        return self._states[where]

    def _state_on_host(self) -> torch.Tensor:
        """Return the state of the step, (7, sequences) int32; gains are stored as fp32 bits."""
        slots = self.free if self.needs.record else self.oldest_slot
        newest = self.positions - self.budgets.recent
        fields = torch.stack([self.filled, slots, self.positions, self.budgets.sinks, newest]).int()
        gains = self.gains.float().view(torch.int32)
        places = self.whole_places(self.whole).int()
        return torch.cat([fields, gains[None], places[None]])


def copied_together(numbers: Sequence[DecodeStep]) -> None:
    """Register steps whose states are later copied to a GPU in one copy.

    The first call of `DecodeStep.state` copies them.
    """
    together = [ref(one) for one in numbers]
    for one in numbers:
        one._together = together


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

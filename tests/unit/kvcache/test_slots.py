"""Where new columns go, step by step, against lists of positions that rows hold."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.kvcache.eviction import H2O, Eviction, Full, Local, SnapKV
from flexgen_h2o.kvcache.slots import RowSlots, SlotTable, new_columns, plan_moves

BLOCKS = 3

budgets = st.tuples(st.integers(1, 6), st.integers(1, 6))
policies = st.one_of(
    st.just(Full()),
    st.builds(lambda b, w: H2O(heavy_size=b[0], recent_size=b[1], while_decoding=w), budgets, st.booleans()),
    st.builds(lambda b: H2O(heavy_size=b[0], recent_size=b[1], layer_schedule="pyramid"), budgets),
    st.builds(lambda b, sinks: Local(heavy_size=b[0], recent_size=b[1], sinks=sinks), budgets, st.integers(0, 4)),
    st.builds(lambda ratio, w: SnapKV(heavy_ratio=ratio, while_decoding=w), st.floats(0.01, 1), st.booleans()),
)
workloads = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=4)


@dataclass
class PlainRow:
    """A row as a list: slot i holds the column at position slots[i]."""

    slots: list[int]
    room: int
    victim: int | None = None

    def join(self, position: int) -> tuple[int, int]:
        """The slot that the column takes (-1: the victim's) and the slots that are filled then."""
        if len(self.slots) < self.room:
            self.slots.append(position)
            return len(self.slots) - 1, len(self.slots)
        assert self.victim is not None
        self.slots[self.victim] = position
        return -1, len(self.slots)


@given(policies, workloads, st.integers(0, BLOCKS - 1))
def test_rows_grow_to_their_budget_and_then_stand(
    policy: Eviction, workload: list[tuple[int, int]], block: int
) -> None:
    """Prompts shorter than, as long as and longer than what is kept; never a slot more than the row was given."""
    rows = SlotTable(policy, workload, BLOCKS).at(block, range(len(workload)))
    plain = []
    for i, (prompt, gen) in enumerate(workload):
        budget = policy.budget(prompt, block, BLOCKS)
        kept = min(prompt, budget.columns)
        assert int(rows.kept[i]) == kept
        plain.append(PlainRow(list(range(kept)), policy.slots(prompt, gen, block, BLOCKS)))
        assert len(plain[-1].slots) <= plain[-1].room
    # The last token of a row is never fed, so it has gen - 1 decode steps; rows that end sooner leave.
    for step in range(max(gen for _, gen in workload) - 1):
        left = [i for i, (_, gen) in enumerate(workload) if step < gen - 1]
        past = torch.tensor([workload[i][0] + step for i in left])
        new = new_columns(SlotTable(policy, workload, BLOCKS).at(block, left), past)
        assert torch.equal(new.past, past)
        for place, i in enumerate(left):
            budget = policy.budget(workload[i][0], block, BLOCKS)
            if len(plain[i].slots) > budget.columns:
                plain[i].victim = int(torch.randint(len(plain[i].slots), ()))
            expected = plain[i].join(workload[i][0] + step)
            assert (int(new.slot[place]), int(new.filled[place])) == expected
    for row, (prompt, gen) in zip(plain, workload, strict=True):
        assert len(row.slots) == row.room == policy.slots(prompt, gen, block, BLOCKS) or gen == 1


def one_row(policy: Eviction, prompt: int, gen: int) -> list[tuple[int, int]]:
    """(slot, filled) of each decode step."""
    rows = SlotTable(policy, [(prompt, gen)], 1).at(0, [0])
    steps = [new_columns(rows, torch.tensor([prompt + step])) for step in range(gen - 1)]
    return [(int(new.slot), int(new.filled)) for new in steps]


KEEP = H2O(heavy_size=2, recent_size=3)
PROMPT_ONLY = H2O(heavy_size=2, recent_size=3, while_decoding=False)


@pytest.mark.parametrize(
    ("policy", "prompt", "steps"),
    [
        # A longer prompt is cut to five columns; the sixth slot is the new column's, then always the victim's.
        (KEEP, 9, [(5, 6), (-1, 6), (-1, 6), (-1, 6)]),
        (KEEP, 5, [(5, 6), (-1, 6), (-1, 6), (-1, 6)]),
        (KEEP, 3, [(3, 4), (4, 5), (5, 6), (-1, 6)]),  # the budget is reached while decoding
        (KEEP, 1, [(1, 2), (2, 3), (3, 4), (4, 5)]),  # or never
        (PROMPT_ONLY, 9, [(5, 6), (6, 7), (7, 8), (8, 9)]),
        (PROMPT_ONLY, 3, [(3, 4), (4, 5), (5, 6), (6, 7)]),
        (Full(), 3, [(3, 4), (4, 5), (5, 6), (6, 7)]),
        (H2O(heavy_size=1, recent_size=1), 1, [(1, 2), (2, 3), (-1, 3), (-1, 3)]),
        (Local(heavy_size=0, recent_size=1, sinks=4), 6, [(1, 2), (-1, 2), (-1, 2), (-1, 2)]),
    ],
)
def test_examples(policy: Eviction, prompt: int, steps: list[tuple[int, int]]) -> None:
    assert one_row(policy, prompt, 5) == steps


@pytest.mark.parametrize(("prompt", "gen", "slots"), [(9, 8, 6), (5, 1, 5), (5, 2, 6), (3, 2, 4), (2, 3, 4), (1, 1, 1)])
def test_a_row_has_no_slot_that_it_never_fills(prompt: int, gen: int, slots: int) -> None:
    assert KEEP.slots(prompt, gen, 0, 1) == slots
    assert max(filled for _, filled in [(0, min(prompt, 5)), *one_row(KEEP, prompt, gen)]) == slots


def test_tables_follow_rows_and_blocks() -> None:
    policy = H2O(heavy_size=4, recent_size=2, layer_schedule="pyramid")
    table = SlotTable(policy, [(30, 9), (5, 2), (20, 9)], BLOCKS)
    for block in range(BLOCKS):
        rows = table.at(block, [2, 0])
        assert isinstance(rows, RowSlots) and rows.prompts.tolist() == [20, 30]
        budget = policy.budget(20, block, BLOCKS)
        assert (int(rows.sinks[0]), int(rows.heavy[0]), int(rows.recent[0])) == (budget.sinks, budget.heavy, 2)
        most = max(policy.slots(*size, block, BLOCKS) for size in ((30, 9), (5, 2), (20, 9)))
        assert table.most_slots(block) == most
    assert table.most_slots(0) > table.most_slots(2)


def test_tables_follow_rows_that_leave_and_enter() -> None:
    policy = H2O(heavy_ratio=0.2, recent_size=2)
    shapes = [(30, 9), (5, 2), (20, 9), (8, 8)]
    table = SlotTable(policy, shapes, BLOCKS)
    moves, order = plan_moves([1], len(shapes))
    table.compact(moves, len(order))
    table.admit([(40, 3), (9, 1)])
    now = SlotTable(policy, [*(shapes[i] for i in order), (40, 3), (9, 1)], BLOCKS)
    for block in range(BLOCKS):
        mine, want = table.at(block), now.at(block)
        assert mine.prompts.tolist() == [30, 8, 20, 40, 9]
        for name in ("prompts", "sinks", "heavy", "recent", "slots"):
            assert torch.equal(getattr(mine, name), getattr(want, name))
            assert torch.equal(getattr(mine.part(3, None), name), getattr(want, name)[3:])
    table.compact([], 0)
    table.admit([(3, 3)])
    assert table.at(0).prompts.tolist() == [3]

"""What is to be run: KV entries that sequences hold, micro-batches, blocks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.core.config import Policy
from flexgen_h2o.engine.workload import Workload, even_blocks, shape_of, workload_of
from flexgen_h2o.kvcache.eviction import H2O, Eviction, Full, SnapKV
from flexgen_h2o.kvcache.eviction.of_model import OfModel

NEW = 8


@pytest.mark.parametrize(
    "eviction",
    [
        Full(),
        H2O(heavy_size=6, recent_size=6),
        H2O(0.2, while_decoding=False),
        SnapKV(0.3, 0.1),
        H2O(kv_budget=0.25),
        H2O(kv_budget=0.95),
    ],
    ids=lambda eviction: repr(vars(eviction)),
)
@pytest.mark.parametrize("prompt_len", [60, 10])
def test_shorter_prompts_hold_what_the_policy_says(eviction: Eviction, prompt_len: int) -> None:
    """After prefill and in the end, beside longer prompts; between them entries never get fewer."""
    need = workload_of(eviction, 9, {(100, NEW), (prompt_len, NEW), (10, NEW)}, 2)
    held = [need.columns(0, sweep, prompt_len) for sweep in range(NEW)]
    assert held[0] == min(prompt_len, eviction.budget(prompt_len, NEW, 0).columns)
    assert held[-1] == eviction.slots(prompt_len, NEW, 0) == need.slots_of(0, prompt_len)
    assert held == sorted(held) and all(b - a <= 1 for a, b in pairwise(held))


def test_slots_cover_the_sequence_that_is_longest_in_all() -> None:
    """Here that is not the one with the longest prompt."""
    eviction = H2O(kv_budget=0.5)
    need = workload_of(eviction, 3, {(40, 2), (10, 90), (30, 6)}, 2)
    assert (need.prompt_len, need.gen_len, need.sequence) == (40, 90, 100)
    assert need.slots[0] == eviction.slots(10, 90, 0) == need.columns(0, 80, 10)
    assert need.columns(0, 0, 10) == 10


def test_layers_may_keep_different_numbers() -> None:
    """A window's slots are its KV entries; other layers have one more than they keep."""
    windows = (5, None, 3, None)
    need = workload_of(OfModel(H2O(0.2), windows), 9, {(100, 8)}, 4, windows)
    assert need.slots == (5, 41, 3, 41) and need.kept == (5, 40, 3, 40)
    assert need.record == ("positions", "scores") and need.needs.query_rows is None


def test_a_common_prefix_is_in_no_slot_and_fed_once() -> None:
    whole = replace(Workload.full(7, 10, 5, 2), rows=6)
    need = whole.in_one_copy(6)
    assert need.slots == tuple(slots - 6 for slots in whole.slots)
    for sweep in range(5):
        assert need.columns(0, sweep, 10) == whole.columns(0, sweep, 10) - 6
    ((first, second), _), ((third,), _) = even_blocks(Policy(2, 2), need)
    assert first == third
    assert (first.fed - second.fed, second.fed, first.tokens) == (6, 2 * 4, 20)
    assert first.pairs - second.pairs == 6**2, "the prefix attends to itself"
    shape = shape_of(Policy(2, 2), need)
    assert (shape.common, shape.tokens) == (6, first.fed)


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 9))
def test_blocks_are_all_sequences_and_fit_the_shape(rows: int, gbs: int, batches: int) -> None:
    """All but the last block are full, and so are all but the last of a block's micro-batches."""
    need = Workload.full(rows, 10, 2, 1)
    policy = Policy(gbs, batches)
    shape = shape_of(policy, need)
    blocks = even_blocks(policy, need)
    assert sum(count * sum(batch.rows for batch in block) for block, count in blocks) == rows
    assert [count for _, count in blocks[1:]] in ([], [1])
    largest = blocks[0][0]
    assert (largest[0].rows, len(largest)) == (shape.rows, shape.micro_batches)
    assert largest[0].fed == shape.tokens
    for block, _ in blocks:
        assert len({batch.rows for batch in block[:-1]} | {shape.rows}) == 1

"""Which heads are computed in parts, into how many, and what memory and time that takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.core.config import TIERS, Policy
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.engine.memory import MemoryPlanner
from flexgen_h2o.engine.memory_plan import OVERLAPPED, SEQUENTIAL, BlockShape, Depth, MemoryPlan
from flexgen_h2o.engine.workload import Workload, even_blocks
from flexgen_h2o.planner.predict import predict
from tests.unit.planner.made_up import (
    RESIDENT,
    WEIGHTS_ON_DISK,
    costs_of,
    machine,
    make_spec,
    percents,
    plan_of,
    public,
)

STREAMED = Policy(percent=WEIGHTS_ON_DISK)
TIED, UNTIED = (make_spec(vocab_size=9000, tie_word_embeddings=tied) for tied in (True, False))
SMALL = BlockShape(rows=2, micro_batches=2, tokens=8, slots=(9,) * UNTIED.num_blocks)
NO_PARTS = "flexgen_h2o.engine.memory.MemoryPlanner.head_rows"


def plan(
    spec: ModelSpec,
    policy: Policy = STREAMED,
    shape: BlockShape = SMALL,
    itemsize: int = 4,
    is_host: bool = True,
    depth: Depth = SEQUENTIAL,
) -> MemoryPlan:
    return MemoryPlanner(spec, policy, itemsize, is_host).plan(shape, depth)


def rows_of(*args: Any, **more: Any) -> int:
    return plan(*args, **more).head_rows


LARGE = make_spec(vocab_size=100_000)
LAST = LARGE.stage(range(3, 4))
SHORT = replace(SMALL, slots=(9,))
HEADS: dict[str, tuple[bool, ModelSpec, dict[str, Any]]] = {
    "streamed": (True, UNTIED, {}),
    "nothing is streamed": (False, UNTIED, {"policy": Policy(percent=RESIDENT)}),
    "more logits": (False, UNTIED, {"shape": replace(SMALL, needs_all_logits=True)}),
    "logits are more than is saved": (False, UNTIED, {"shape": replace(SMALL, micro_batches=200)}),
    "the embedding is as large": (False, UNTIED, {"is_host": False}),
    "no larger than others": (False, make_spec(vocab_size=500, tie_word_embeddings=False), {}),
    "tied: a thread that reads rows takes more": (False, TIED, {}),
    "tied: it takes less": (True, make_spec(vocab_size=30_000), {}),
    "tied: whole on a card": (False, LARGE, {"is_host": False}),
    "the last stage has no embedding": (True, LAST, {"shape": SHORT, "is_host": False}),
    "packed, on a card": (
        False,
        LARGE,
        {"policy": replace(STREAMED, compress_weight=True), "is_host": False},
    ),
    "in int8": (True, LARGE, {"policy": replace(STREAMED, int8_compute=True)}),
}


@pytest.mark.parametrize("why", HEADS)
def test_which_heads_are_cut(why: str) -> None:
    is_cut, spec, more = HEADS[why]
    assert (rows_of(spec, **more) > 0) is is_cut


def test_a_packed_table_is_looked_up_where_it_lies() -> None:
    """With int8 products, nothing is held of the table but what a part of the head takes."""
    spec = public("facebook/opt-1.3b")
    policy = Policy(16, 4, WEIGHTS_ON_DISK, compress_weight=True, int8_compute=True)
    found = plan(spec, policy, BlockShape(16, 4, 2048, (53,) * 24), 2, depth=OVERLAPPED[0])
    table = spec.vocab_size * spec.hidden_size
    assert found.head_rows and found.size("unpacked weights") < 0.4 * table


@given(
    percents,
    st.integers(1, 40),
    st.integers(1, 8),
    st.booleans(),
    st.sampled_from(OVERLAPPED),
    st.booleans(),
)
def test_parts_never_take_more(
    percent: tuple[int, ...], rows: int, batches: int, is_host: bool, depth: Depth, tied: bool
) -> None:
    """Although the logits of a block are held until the last part."""
    spec = make_spec(vocab_size=30_000, tie_word_embeddings=tied)
    shape = replace(SMALL, rows=rows, micro_batches=batches)
    asked = (spec, Policy(percent=percent), shape, 4, is_host, depth)
    cut = plan(*asked)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(NO_PARTS, lambda *_: 0)
        whole = plan(*asked)
    if not cut.head_rows:
        return
    held, before = (sum(one.bytes_on(tier) for tier in TIERS[:2]) for one in (cut, whole))
    logits, few = (dict(one.workspace)["logits"] for one in (cut, whole))
    assert held < before and logits == pytest.approx(batches * few, rel=0.01)
    assert cut.serves(shape) and not cut.serves(replace(shape, needs_all_logits=True))


def test_parts_take_as_long_as_the_whole_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although only some blocks of a deep model are walked."""
    spec = make_spec(vocab_size=9000, tie_word_embeddings=False, num_hidden_layers=40)
    need = Workload.full(8, 20, 6, 40)
    policy = Policy(2, 4, WEIGHTS_ON_DISK)
    found = []
    for is_cut in (True, False):
        if not is_cut:
            monkeypatch.setattr(NO_PARTS, lambda *_: 0)
        made = plan_of(policy, need, True, spec)
        assert bool(made.head_rows) is is_cut
        costs = costs_of(policy, need, machine(True), spec)
        found.append(predict(costs, made, even_blocks(policy, need)))
    assert found[0].total_s == pytest.approx(found[1].total_s, rel=0.03)
    reads = [one.busy["decode"]["disk_read"] for one in found]
    assert reads[0] == pytest.approx(reads[1], rel=0.01)

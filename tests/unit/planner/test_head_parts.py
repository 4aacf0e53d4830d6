"""Which heads are computed in parts, into how many, and what memory and time that takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.checkpoint.formats import Shard, layout_of
from flexgen_h2o.checkpoint.formats.fp8 import BlockFp8
from flexgen_h2o.core.config import TIERS, Policy
from flexgen_h2o.core.model import ModelSpec, TensorSpec, with_head_rows
from flexgen_h2o.engine.memory import MemoryPlanner
from flexgen_h2o.engine.memory_plan import (
    OVERLAPPED,
    SEQUENTIAL,
    BlockShape,
    Depth,
)
from flexgen_h2o.engine.weight_units import HEAD_ROWS
from flexgen_h2o.engine.workload import Workload, even_blocks
from flexgen_h2o.models import built_in_spec
from flexgen_h2o.planner.predict import predict
from flexgen_h2o.tiers.stream import Part
from tests.unit.planner.made_up import machine, make_spec, percents, plan_of

ON_DISK = (0, 0, 100, 0, 100, 0)
STREAMED = Policy(percent=ON_DISK)
TIED, UNTIED = (make_spec(vocab_size=9000, tie_word_embeddings=tied) for tied in (True, False))
SMALL = BlockShape(rows=2, micro_batches=2, tokens=8, slots=(9,) * UNTIED.num_blocks)


def public(name: str) -> ModelSpec:
    found = built_in_spec(name)
    assert found is not None
    return found[0]


def rows_of(
    spec: ModelSpec,
    policy: Policy = STREAMED,
    shape: BlockShape = SMALL,
    itemsize: int = 4,
    is_host: bool = True,
    depth: Depth = SEQUENTIAL,
) -> int:
    return MemoryPlanner(spec, policy, itemsize, is_host).plan(shape, depth).head_rows


# ---- layers


@pytest.mark.parametrize("spec", [TIED, UNTIED], ids=["tied", "untied"])
def test_parts_are_all_rows_in_order(spec: ModelSpec) -> None:
    cut = with_head_rows(spec, 2048)
    plan = cut.layers(sep_layer=True)
    parts = [layer for layer in plan.layers if layer.kind == "head"]
    assert [(x.rows.start, x.rows.stop) for x in parts] == [
        *pairwise((0, 2048, 4096, 6144, 8192, 9000))
    ]
    assert plan.layers[-5:] == tuple(parts) and len({x.unit for x in plan.layers}) == len(
        plan.layers
    )
    for layer in parts:
        *vectors, table = plan.units[layer.unit].tensors
        assert tuple(vectors) == spec.head[:-1] and all(len(t.shape) == 1 for t in vectors)
        assert (table.whole, table.first, table.shape) == (
            spec.head[-1],
            layer.rows.start,
            (len(layer.rows), 128),
        )
    assert plan.units[0].tensors[0].looked_up, "the embedding has a table of its own"
    assert (cut.num_weights, [t.key for t in cut.tensors]) == (
        spec.num_weights,
        [t.key for t in spec.tensors],
    )
    assert with_head_rows(spec, 2048) is cut and with_head_rows(spec, 0) is spec
    assert cut.of_blocks([0]).head_rows == 2048 and not cut.stage(range(1)).head


def test_rows_of_a_quantised_tensor_are_decoded_as_those_of_the_whole() -> None:
    """Scales of blocks of 16 x 32 are cut with the rows that share them."""
    form = BlockFp8(4, block=(16, 32))
    tensor = TensorSpec("", BlockFp8.sample_name, (90, 64))
    whole = form.layout(tensor)
    rows = range(32, 90)
    cut = layout_of(form, tensor.rows(rows))
    assert (
        whole.cuts_at(32)
        and not whole.cuts_at(24)
        and not replace(whole, by_columns=True).cuts_at(32)
    )
    assert [(s.first, s.shape[0]) for s in cut.stored] == [(32, 58), (2, 4)]
    codes = torch.randint(0, 120, (90, 64), dtype=torch.uint8)
    scales = torch.rand(6, 2)
    stored = (codes, scales.view(torch.uint8).view(6, -1))
    want = torch.empty(90, 64)
    form.decode_rows(whole, Shard("disk", 0, 90, [s.reshape(-1) for s in stored]), want)
    found = torch.empty(58, 64)
    for part in (Part("host", 0, 16), Part("disk", 16, 58)):
        pieces = []
        for one, held in zip(cut.stored, stored, strict=True):
            first, end = one.rows_of(part.start, part.end)
            pieces.append(held[one.first + first : one.first + end].reshape(-1))
        form.decode_range(cut, [Shard(part.tier, part.start, part.end, pieces)], 0, found)
    assert torch.equal(found, want[32:])


# ---- which


@pytest.mark.parametrize(
    ("name", "sep_layer", "parts"),
    [
        ("meta-llama/Meta-Llama-3-8B", True, 5),
        ("meta-llama/Meta-Llama-3-8B", False, 3),
        ("facebook/opt-1.3b", True, 5),
        ("facebook/opt-6.7b", True, 3),
        ("facebook/opt-66b", True, 0),
        ("Qwen/Qwen3-30B-A3B", True, 9),
    ],
)
def test_as_many_as_make_parts_as_large_as_other_units(
    name: str, sep_layer: bool, parts: int
) -> None:
    spec = public(name)
    policy = Policy(16, 4, ON_DISK, sep_layer=sep_layer, expert_group=8)
    rows = rows_of(spec, policy, BlockShape(16, 4, 8192, (543,) * spec.num_blocks), itemsize=2)
    assert rows % HEAD_ROWS == 0 and (-(-spec.vocab_size // rows) if rows else 0) == parts


def test_where_the_head_is_whole() -> None:
    assert rows_of(UNTIED) == rows_of(UNTIED, depth=OVERLAPPED[0]) > 0
    assert not rows_of(UNTIED, Policy(percent=(100, 0, 100, 0, 100, 0))), "nothing is streamed"
    assert not rows_of(UNTIED, shape=replace(SMALL, needs_all_logits=True)), (
        "more logits are wanted"
    )
    assert not rows_of(UNTIED, shape=replace(SMALL, micro_batches=200)), (
        "the block's logits are more than is saved"
    )
    assert not rows_of(UNTIED, is_host=False), (
        "the ring has room for the embedding, which is as large"
    )
    assert not rows_of(make_spec(vocab_size=500, tie_word_embeddings=False)), (
        "it is no larger than other units"
    )
    assert not rows_of(TIED), "a thread that reads rows of the table takes more than is saved"
    assert rows_of(make_spec(vocab_size=30_000)), "here it takes less"


SWITCHES: list[dict[str, Any]] = [
    {"compress_weight": True},
    {"int8_compute": True},
    {"compress_weight": True, "int8_compute": True},
]


@pytest.mark.parametrize("switches", [{}, *SWITCHES])
def test_a_tied_table_is_whole_on_a_card(switches: dict[str, Any]) -> None:
    """But for the last stage of a pipeline, which has no embedding: its rows cannot be read one by
    one."""
    large = make_spec(vocab_size=100_000)
    policy = Policy(percent=ON_DISK, **switches)
    last = large.stage(range(3, 4))
    shape = replace(SMALL, slots=(9,))
    assert not rows_of(large, policy, is_host=False) and rows_of(large, policy)
    assert rows_of(last, policy, shape, is_host=False) and rows_of(last, policy, shape)
    assert not rows_of(large.stage(range(3)), policy, replace(SMALL, slots=(9,) * 3)), (
        "and no head either"
    )


def test_a_packed_table_is_looked_up_where_it_lies() -> None:
    """Of OPT-1.3B in 4 bits with int8 products, nothing is held of the table but what a part of the
    head takes."""
    spec = public("facebook/opt-1.3b")
    shape = BlockShape(16, 4, 2048, (53,) * 24)
    policy = Policy(16, 4, ON_DISK, compress_weight=True, int8_compute=True)
    plan = MemoryPlanner(spec, policy, 2, True).plan(shape, OVERLAPPED[0])
    assert (
        plan.head_rows and plan.size("unpacked weights") < 0.4 * spec.vocab_size * spec.hidden_size
    )
    untied = make_spec(vocab_size=30_000, tie_word_embeddings=False)
    packed = MemoryPlanner(untied, replace(STREAMED, compress_weight=True), 4, True).plan(
        SMALL, SEQUENTIAL
    )
    assert packed.size("unpacked weights") < 30_000 * 128 * 4 / 2


# ---- memory


def whole_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryPlanner, "head_rows", lambda *_: 0)


def test_the_logits_of_a_block_are_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(SMALL, rows=3, micro_batches=4)
    policy = Policy(percent=ON_DISK)
    cut = MemoryPlanner(UNTIED, policy, 4, True).plan(shape, OVERLAPPED[2])
    assert cut.head_rows and dict(cut.workspace)["logits"] == pytest.approx(
        3 * 4 * 9000 * 4, abs=64
    )
    assert cut.serves(shape) and not cut.serves(replace(shape, needs_all_logits=True))
    whole_heads(monkeypatch)
    whole = MemoryPlanner(UNTIED, policy, 4, True).plan(shape, OVERLAPPED[2])
    assert dict(whole.workspace)["logits"] == pytest.approx(3 * 9000 * 4, abs=64)
    assert whole.serves(replace(shape, needs_all_logits=True))
    more = dict(cut.workspace)["logits"] - dict(whole.workspace)["logits"]
    saved = whole.size("weight ring") - cut.size("weight ring")
    assert saved > more
    others = {b.name for b in whole.buffers} - {"weight ring", "workspace", "weights"}
    assert all(cut.size(name) == whole.size(name) for name in others)


@given(
    percents,
    st.integers(1, 40),
    st.integers(1, 8),
    st.booleans(),
    st.sampled_from(OVERLAPPED),
    st.booleans(),
)
def test_parts_never_take_more(
    percent: tuple[int, int, int, int, int, int],
    rows: int,
    batches: int,
    is_host: bool,
    depth: Depth,
    tied: bool,
) -> None:
    spec = make_spec(vocab_size=30_000, tie_word_embeddings=tied)
    shape = replace(SMALL, rows=rows, micro_batches=batches)
    policy = Policy(percent=percent)
    cut = MemoryPlanner(spec, policy, 4, is_host).plan(shape, depth)
    with pytest.MonkeyPatch.context() as patched:
        whole_heads(patched)
        whole = MemoryPlanner(spec, policy, 4, is_host).plan(shape, depth)
    held, before = (sum(plan.bytes_on(tier) for tier in TIERS[:2]) for plan in (cut, whole))
    assert held < before if cut.head_rows else cut == whole


# ---- time


@pytest.mark.parametrize("listens", [False, True])
def test_parts_are_walked_and_priced(listens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the whole head, within what their steps take; also of a deep model, of which a few blocks
    are walked."""
    spec = make_spec(vocab_size=9000, tie_word_embeddings=False, num_hidden_layers=40)
    where = machine(True)
    need = Workload.full(8, 20, 6, 40)
    policy = Policy(2, 4, ON_DISK)
    on_span: Callable[..., None] | None = (lambda *span: None) if listens else None
    found = []
    for is_cut in (True, False):
        if not is_cut:
            whole_heads(monkeypatch)
        plan = plan_of(policy, need, True, spec)
        assert bool(plan.head_rows) is is_cut
        found.append(predict(spec, policy, need, where, plan, even_blocks(policy, need), on_span))
    assert found[0].total_s == pytest.approx(found[1].total_s, rel=0.03)
    assert found[0].busy["decode"]["disk_read"] == pytest.approx(
        found[1].busy["decode"]["disk_read"], rel=0.01
    )

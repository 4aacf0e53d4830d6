"""Formulas of work: what they say of eviction, batches and tiers. That they are true is shown in tests/parity."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.checkpoint.formats.groupwise import Groupwise
from flexgen_h2o.core.config import Policy, TensorSpec
from flexgen_h2o.core.packing import SlotPacking
from flexgen_h2o.core.units import WRITE_BACK_STEPS, round_up
from flexgen_h2o.engine.memory_plan import OVERLAPPED, memory_plan
from flexgen_h2o.engine.workload import Batch, WorkloadShape, shape_of
from flexgen_h2o.models import built_in_spec
from flexgen_h2o.planner.work import CostContext, Work, kv_load_moves, kv_store_moves, layer_work, weight_moves
from flexgen_h2o.tiers.placement import Part
from tests.unit.planner.made_up import BLOCKS, SPEC, evicting, make_spec, policies

COLUMN = SPEC.kv_bytes_per_token(4) // BLOCKS


def setting(policy: Policy, need: WorkloadShape, is_host: bool = False) -> CostContext:
    return CostContext(SPEC, policy, need, 4, is_host)


def kv_bytes(policy: Policy, need: WorkloadShape, is_host: bool) -> float:
    """Over all lanes and sweeps of a micro-batch, in one transformer block."""
    at, batch = setting(policy, need, is_host), Batch.even(need.rows, need.prompt_len)
    moves = (kv_load_moves, kv_store_moves)
    return sum(m.nbytes for sweep in range(need.gen_len) for of in moves for m in of(at, 0, batch, sweep))


@settings(max_examples=12)
@given(policies, st.integers(1, 20), st.integers(40, 200), st.integers(1, 40), st.data())
def test_eviction_never_moves_nor_holds_more_kv(
    policy: Policy, rows: int, prompt_len: int, gen_len: int, data: st.DataObject
) -> None:
    """Where at most half of a prompt is kept. A unit moves with all its slots then, and in segments without."""
    is_host, kept = data.draw(st.booleans()), data.draw(st.integers(1, prompt_len // 2))
    full, few = WorkloadShape.full(rows, prompt_len, gen_len, BLOCKS), evicting(rows, prompt_len, gen_len, kept)
    assert kv_bytes(policy, few, is_host) <= kv_bytes(policy, full, is_host)
    held = []
    for need in (few, full):
        plan = memory_plan(SPEC, policy, shape_of(policy, need), 4, is_host, OVERLAPPED[0])
        names = ("cache", "cache record", "cache ring", "cache overlay")
        held.append([sum(b.nbytes for b in plan.buffers if b.tier == t and b.name in names) for t in ("host", "disk")])
    assert all(a <= b for a, b in zip(*held, strict=True))


@pytest.mark.parametrize("is_host", [True, False])
def test_attention_reads_the_columns_that_are_held(is_host: bool) -> None:
    """Of all rows, the sweep's own among them, and nothing in prefill."""
    need, batch = WorkloadShape.full(6, 10, 4, BLOCKS), Batch.even(6, 10)
    at = setting(Policy(), need, is_host)
    layer = at.spec.layers(True).layers[1]
    unit = at.spec.layers(True).units[layer.unit]
    for sweep in (1, 2, 3):
        work = layer_work(at, layer, unit, batch, sweep)
        assert (work.device_kv, work.host_kv, work.crossing) == (6 * (10 + sweep) * COLUMN, 0, 0)
    assert layer_work(at, layer, unit, batch, 0).device_kv == 0


def blocked_rows(policy: Policy, is_host: bool, tied: bool) -> dict[str, tuple[int, int]]:
    """By kind of layer: rows of matrices that are multiplied blocked, and of all."""
    spec, need = make_spec(tie_word_embeddings=tied), WorkloadShape.full(2, 10, 2, BLOCKS)
    at, plan = CostContext(spec, policy, need, 2, is_host), spec.layers(True)
    found = {}
    for layer in (plan.layers[1], plan.layers[2], plan.layers[-1]):
        work = layer_work(at, layer, plan.units[layer.unit], Batch.even(2, 10), 1)
        every = [(p.outer, p.blocked) for p in work.products]
        found[layer.kind] = sum(n for n, blocked in every if blocked), sum(n for n, _ in every)
    return found


@pytest.mark.parametrize("tied", [True, False])
def test_what_lies_where_it_is_computed_on_is_multiplied_blocked(tied: bool) -> None:
    head = 0 if tied else SPEC.vocab_size
    whole = {"attention": (512, 512), "mlp": (640, 640), "head": (head, SPEC.vocab_size)}
    nothing = {kind: (0, every) for kind, (_, every) in whole.items()}
    rest = (100, 0, 100, 0)
    assert blocked_rows(Policy(percent=(100, 0, *rest)), True, tied) == whole
    assert blocked_rows(Policy(percent=(0, 100, *rest)), True, tied) == whole
    assert blocked_rows(Policy(percent=(100, 0, *rest)), False, tied) == nothing
    assert blocked_rows(Policy(percent=(0, 100, *rest)), False, tied) == nothing
    assert blocked_rows(Policy(percent=(0, 0, *rest)), True, tied) == nothing
    assert blocked_rows(Policy(percent=(100, 0, *rest), compress_weight=True), True, tied) == nothing
    assert blocked_rows(Policy(percent=(100, 0, *rest), int8_compute=True), True, tied) == nothing
    half = blocked_rows(Policy(percent=(50, 0, *rest)), True, tied)
    assert half["attention"] == (256, 512) and half["mlp"] == (320, 640)


def test_attention_on_the_host_reads_its_share_there() -> None:
    """Queries and results cross, KV does not move."""
    need, batch = WorkloadShape.full(6, 10, 4, BLOCKS), Batch.even(6, 10)
    at = setting(Policy(percent=(100, 0, 25, 75, 100, 0), cpu_cache_compute=True), need)
    layer = at.spec.layers(True).layers[1]
    work = layer_work(at, layer, at.spec.layers(True).units[layer.unit], batch, 1)
    assert (work.device_kv, work.host_kv) == (0.25 * 6 * 11 * COLUMN, 0.75 * 6 * 11 * COLUMN)
    assert work.crossing > 0 and not kv_load_moves(at, 0, batch, 1)


def block_work(name: str, sweep: int, need: WorkloadShape) -> Work:
    """Of a transformer block of a public shape in bf16, all its steps together."""
    found = built_in_spec(name)
    assert found is not None
    at = CostContext(found[0], Policy(), need, 2, True)
    plan = at.spec.layers(at.policy.sep_layer)
    steps = [layer_work(at, x, plan.units[x.unit], Batch.even(4, 100), sweep) for x in plan.layers if x.block == 0]
    return Work(
        tuple(p for step in steps for p in step.products),
        **{f: sum(getattr(step, f) for step in steps) for f in ("prompt_flops", "device_kv", "elementwise")},
    )


@pytest.mark.parametrize(
    ("name", "matrices", "columns", "numbers"),
    [
        # q and o, k and v, three of the MLP; two norms, the heads that turn, gate and product of the MLP
        (
            "Meta-Llama-3-8B", 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336, 2 * 8 * 128,
            4 * 4096 + 2 * 40 * 128 + 4 * 14336,
        ),
        # the fused matrix and what comes of it, one step for both halves; a quarter of each head turns
        (
            "gpt-neox-20b", 4 * 6144 * 6144 + 2 * 6144 * 24576, 2 * 64 * 96,
            4 * 6144 + 2 * 128 * 24 + 2 * 24576 + 2 * 3 * 6144,
        ),
    ],
)  # fmt: skip
def test_a_block_of_a_public_shape(name: str, matrices: int, columns: int, numbers: int) -> None:
    """matrices: elements; columns: numbers of a key and a value of all kv-heads; numbers: elementwise, of a token."""
    need = WorkloadShape.full(4, 100, 4, 80)
    prompt, decode = (block_work(name, sweep, need) for sweep in (0, 2))
    assert sum(p.flops for p in prompt.products) == 2 * 400 * matrices
    assert sum(p.flops for p in decode.products) == 2 * 4 * matrices
    assert decode.device_kv == 4 * 102 * columns * 2
    assert decode.elementwise == 4 * numbers * 2
    assert prompt.elementwise == 400 * numbers * 2 + 400 * 2 * columns * 2  # what is kept is copied


def test_rolling_positions_turn_the_keys_that_are_read() -> None:
    need = evicting(4, 100, 4, 20)
    still, rolling = (block_work("Meta-Llama-3-8B", 2, replace(need, record=r)) for r in ((), ("positions", "ranks")))
    columns = rolling.device_kv / (2 * 8 * 128 * 2)
    assert rolling.elementwise - still.elementwise == 6 * columns * 8 * 128 * 2


def test_vectors_stay_with_the_device() -> None:
    """All of the matrices move, and nothing else."""
    unit = SPEC.layers(True).units[1]
    matrices = sum(4 * t.numel for t in unit.tensors if len(t.shape) == 2)
    need = WorkloadShape.full(1, 1, 1, BLOCKS)
    moves = weight_moves(setting(Policy(percent=(0, 0, 100, 0, 100, 0)), need), unit)
    assert [(m.lane, m.nbytes, m.crosses) for m in moves] == [("disk_read", matrices, True)]
    moves = weight_moves(setting(Policy(percent=(0, 100, 100, 0, 100, 0)), need), unit)
    assert [(m.lane, m.nbytes, m.crosses) for m in moves] == [("h2d", matrices, False)]
    assert not weight_moves(setting(Policy(percent=(0, 100, 100, 0, 100, 0)), need, is_host=True), unit)


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_weights_move_their_codes_and_groups(bits: int) -> None:
    """To the byte; 4.5 or 8.5 bits a value where rows are whole groups; and products are whole once unpacked."""
    need, unit = WorkloadShape.full(4, 10, 4, BLOCKS), SPEC.layers(True).units[1]
    policy = Policy(percent=(0, 40, 0, 100, 100, 0), compress_weight=True, weight_bits=bits)
    packed = setting(policy, need)
    matrices = [t.shape for t in unit.tensors if len(t.shape) == 2]
    want = sum(rows * (round_up(-(-columns * bits // 8), 4) + 4 * -(-columns // 64)) for rows, columns in matrices)
    assert sum(m.nbytes for m in weight_moves(packed, unit)) == want
    products = layer_work(packed, SPEC.layers(True).layers[1], unit, Batch.even(4, 10), 1).products
    assert sorted((p.inner, p.outer) for p in products) == sorted((columns, rows) for rows, columns in matrices)
    wide, row = Groupwise(2, bits), Part("host", 0, 1)
    assert wide.layout(TensorSpec("", "", (3, 6400))).part_bytes(row) == 6400 * (bits + 0.5) / 8
    assert wide.layout(TensorSpec("", "", (3,))).part_bytes(row) == 2


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_kv_moves_its_slots(bits: int) -> None:
    need, policy = WorkloadShape.full(4, 10, 4, BLOCKS), Policy(percent=(0, 0, 0, 100, 100, 0), cache_bits=bits)
    plain, small = setting(policy, need), setting(replace(policy, compress_cache=True), need)
    for at, slot in ((plain, 4 * SPEC.head_dim), (small, SlotPacking(SPEC.head_dim, bits).slot_bytes)):
        moves = kv_store_moves(at, 0, Batch.even(4, 10), 1)
        assert [m.nbytes for m in moves] == [4 * SPEC.num_kv_heads * 2 * slot]


def test_int8_rows_move_a_byte_a_value_a_scale_and_a_sum() -> None:
    """And are multiplied where they lie, in parts."""
    need, unit = WorkloadShape.full(4, 10, 4, BLOCKS), SPEC.layers(True).units[1]
    at = setting(Policy(percent=(0, 40, 0, 100, 100, 0), int8_compute=True), need)
    matrices = [t.shape for t in unit.tensors if len(t.shape) == 2]
    assert sum(m.nbytes for m in weight_moves(at, unit)) == sum(n * (round_up(k, 4) + 8) for n, k in matrices)
    products = layer_work(at, SPEC.layers(True).layers[1], unit, Batch.even(4, 10), 1).products
    assert len(products) > len(matrices) and sum(p.outer for p in products) == sum(n for n, _ in matrices)


@pytest.mark.parametrize("steps", [1, 7, WRITE_BACK_STEPS, WRITE_BACK_STEPS + 1, 3 * WRITE_BACK_STEPS + 5])
@pytest.mark.parametrize("on_disk", [0, 40, 100])
def test_columns_that_wait_for_the_disk_are_laid_over_their_unit(steps: int, on_disk: int) -> None:
    """In a decode sweep those since the last write-back, and its own is taken up; each read and written."""
    need, policy = WorkloadShape.full(6, 30, 1 + steps, BLOCKS), Policy(6, 1, (100, 0, 100 - on_disk, 0, 100, 0))
    at, batch = setting(policy, need, is_host=True), Batch.even(6, 30)
    layers = SPEC.layers(True)
    layer = next(one for one in layers.layers if one.kind == "attention")
    work = [layer_work(at, layer, layers.units[layer.unit], batch, sweep) for sweep in range(1 + steps)]
    columns = sum(1 + sweep % WRITE_BACK_STEPS for sweep in range(steps))
    assert sum(w.overlay for w in work) == pytest.approx(2 * columns * 6 * COLUMN * on_disk / 100)
    assert work[0].overlay == 0

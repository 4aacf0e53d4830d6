"""Work and its seconds: what they say of eviction, batches, tiers and int8. That the bytes are
those that the engine moves is shown in tests/parity."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.checkpoint.formats import layouts_of
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.units import FEW_ROWS, TOKEN_CHUNK, WRITE_BACK_STEPS
from flexgen_h2o.engine.workload import MicroBatchShape, Workload, even_blocks, workload_of
from flexgen_h2o.kvcache.eviction import H2O, Full, H2ONorm, Tova
from flexgen_h2o.kvcache.eviction.policy import Eviction
from flexgen_h2o.planner.cost_model import (
    PROMPT_LAUNCHES,
    CostModel,
    Machine,
    Product,
    Work,
    coded_bytes,
    kv_load_moves,
    layer_work,
)
from flexgen_h2o.planner.profile import AS_FAST, Curve
from tests.unit.planner.made_up import (
    BLOCKS,
    DTYPE,
    SPEC,
    costs_of,
    evicting,
    machine,
    make_spec,
    policies,
)

COLUMN = SPEC.kv_bytes_per_token(4) // BLOCKS
NEED = Workload.full(6, 10, 4, BLOCKS)
TIMES = Curve(((1.0, 4.0), (64.0, 2.0)))
MORE_TIMES = Curve(((1.0, 3.0), (64.0, 1.5)))


def context(policy: Policy, need: Workload = NEED, is_host: bool = False) -> CostModel:
    return CostModel(SPEC, policy, need, machine(is_host))


def half_precision(is_host: bool) -> Machine:
    return replace(machine(is_host), dtype="bfloat16")


def attention(at: CostModel, sweep: int) -> Work:
    """Of the first attention layer."""
    plan = at.spec.layers(True)
    return layer_work(
        at,
        plan.layers[1],
        plan.units[1],
        MicroBatchShape.even(at.need.rows, at.need.prompt_len),
        sweep,
    )


# ---- bytes and FLOPs


def test_attention_reads_the_columns_that_are_held() -> None:
    """Of all rows, the sweep's own among them; on the host its share there, and then queries and
    results cross."""
    for is_host in (True, False):
        for sweep in range(4):
            work = attention(context(Policy(), is_host=is_host), sweep)
            held = 6 * (10 + sweep) * COLUMN if sweep else 0
            assert (work.device_kv, work.host_kv, work.crossing) == (held, 0, 0)
    at = context(Policy(percent=(100, 0, 25, 75, 100, 0), cpu_cache_compute=True))
    work = attention(at, 1)
    assert (work.device_kv, work.host_kv) == (0.25 * 6 * 11 * COLUMN, 0.75 * 6 * 11 * COLUMN)
    assert work.crossing > 0 and not kv_load_moves(at, 0, MicroBatchShape.even(6, 10), 1)


@settings(max_examples=25)
@given(policies, st.booleans(), st.sampled_from([0, 1]))
def test_products_multiply_each_token_by_every_matrix_once(
    policy: Policy, is_host: bool, sweep: int
) -> None:
    """However matrices are split over tiers."""
    at = context(policy, is_host=is_host)
    batch = MicroBatchShape.even(6, 10)
    for layer in at.layers.layers:
        if layer.kind in ("attention", "mlp", "block"):
            unit = at.layers.units[layer.unit]
            work = layer_work(at, layer, unit, batch, sweep)
            numbers = sum(t.numel for t in unit.tensors if len(t.shape) == 2)
            multiplied = sum(p.rows * p.inner * p.outer for p in work.products)
            assert multiplied == numbers * (6 if sweep else 60)


@pytest.mark.parametrize("is_host", [False, True])
@pytest.mark.parametrize("compress", [False, True])
def test_fewer_kv_entries_are_never_slower(is_host: bool, compress: bool) -> None:
    policy = Policy(6, 1, (100, 0, 0, 100, 100, 0), compress_cache=compress)
    batch = MicroBatchShape.even(6, 100)
    seconds = []
    for kept in range(1, 100, 7):
        step = costs_of(policy, evicting(6, 100, 8, kept), machine(is_host)).step(1, batch, 1)
        moved = sum(load.seconds for load in step.kv_load)
        seconds.append(step.device_s + step.host_s + moved)
    assert seconds == sorted(seconds) and seconds[0] < seconds[-1]


@pytest.mark.parametrize("on_host", [False, True])
def test_attention_to_a_share_of_the_values_costs_what_the_full_cache_does(on_host: bool) -> None:
    policy = Policy(6, 1, (100, 0, 0, 100, 100, 0), cpu_cache_compute=on_host)
    assert attention(context(replace(policy, attn_sparsity=0.1)), 2) == attention(
        context(policy), 2
    )


def blocked_rows(policy: Policy, is_host: bool, tied: bool) -> dict[str, tuple[int, int]]:
    """By kind of layer: rows of matrices that are multiplied blocked, and of all."""
    spec = make_spec(tie_word_embeddings=tied)
    need = Workload.full(2, 10, 2, BLOCKS)
    at = CostModel(spec, policy, need, half_precision(is_host))
    plan = spec.layers(True)
    found = {}
    for layer in (plan.layers[1], plan.layers[2], plan.layers[-1]):
        work = layer_work(at, layer, plan.units[layer.unit], MicroBatchShape.even(2, 10), 1)
        every = [(p.outer, p.blocked) for p in work.products]
        found[layer.kind] = sum(n for n, blocked in every if blocked), sum(n for n, _ in every)
    return found


@pytest.mark.parametrize("tied", [True, False])
def test_what_lies_where_it_is_computed_on_is_multiplied_blocked(tied: bool) -> None:
    whole = {"attention": (512, 512), "mlp": (640, 640), "head": (SPEC.vocab_size, SPEC.vocab_size)}
    nothing = {kind: (0, every) for kind, (_, every) in whole.items()}
    rest = (100, 0, 100, 0)
    for on_device, on_host in ((100, 0), (0, 100)):
        assert blocked_rows(Policy(percent=(on_device, on_host, *rest)), True, tied) == whole
        assert blocked_rows(Policy(percent=(on_device, on_host, *rest)), False, tied) == nothing
    assert blocked_rows(Policy(percent=(0, 0, *rest)), True, tied) == nothing
    assert blocked_rows(Policy(compress_weight=True), True, tied) == nothing
    assert blocked_rows(Policy(int8_compute=True), True, tied) == nothing
    half = blocked_rows(Policy(percent=(50, 0, *rest)), True, tied)
    assert half["attention"] == (256, 512) and half["mlp"] == (320, 640)


@pytest.mark.parametrize("steps", [1, WRITE_BACK_STEPS + 1, 3 * WRITE_BACK_STEPS + 5])
def test_columns_that_wait_for_the_disk_are_laid_over_their_unit(steps: int) -> None:
    """In a decode sweep those since the last write-back, and its own is taken up; each read and
    written."""
    need = Workload.full(6, 30, 1 + steps, BLOCKS)
    for on_disk in (0, 40):
        at = context(Policy(6, 1, (100, 0, 100 - on_disk, 0, 100, 0)), need, is_host=True)
        work = [attention(at, sweep) for sweep in range(1 + steps)]
        columns = sum(1 + sweep % WRITE_BACK_STEPS for sweep in range(steps))
        assert sum(w.overlay for w in work) == pytest.approx(
            2 * columns * 6 * COLUMN * on_disk / 100
        )
        assert work[0].overlay == 0


# ---- seconds


def measured(
    int8: Curve, int4: Curve = AS_FAST, is_host: bool = True, blocked: float = 1.0
) -> Machine:
    """Those rates in the dtype of the other tests; no fixed costs."""
    where = machine(is_host)
    rates = replace(
        where.profile.rates(DTYPE),
        int8_speedup=int8,
        int4_speedup=int4,
        blocked_speedup=Curve.flat(blocked),
    )
    return replace(where, profile=replace(where.profile, compute={DTYPE: rates}))


def product_seconds(policy: Policy, where: Machine, rows: int, is_blocked: bool = False) -> float:
    work = Work(products=(Product(rows, 128, 512, is_blocked),))
    return costs_of(policy, NEED, where).compute_seconds(work)[0]


@pytest.mark.parametrize("rows", [1, 8, 200])
def test_products_in_int8_and_blocked_ones_are_faster_by_rows(rows: int) -> None:
    where = measured(TIMES, blocked=1.5)
    in_order, blocked = (
        product_seconds(Policy(4), where, rows, is_blocked) for is_blocked in (False, True)
    )
    assert in_order == pytest.approx(1.5 * blocked)
    int8 = product_seconds(Policy(4, int8_compute=True), where, rows)
    assert in_order == pytest.approx(int8 * TIMES.at(rows))


def decoding_s(costs: CostModel, layer: int = 1, sweep: int = 1) -> float:
    """Of a layer's weights, in a sweep of a block of the policy's size."""
    steps = costs.steps_of(
        costs.layers.layers[layer].kind, even_blocks(costs.policy, NEED)[0][0], sweep
    )
    return costs.decoding(layer, steps.values(), sweep).device_s


def test_products_of_few_rows_on_a_card_take_codes_as_they_are() -> None:
    """They read those alone, or multiply as fast as many rows are; what streams, or more rows take,
    is decoded."""
    where = machine(False)
    policy = Policy(6, compress_weight=True, weight_bits=4)
    many = NEED.rows * NEED.prompt_len
    costs = costs_of(policy, NEED, where)
    unit = costs.layers.units[1]
    work, prompts = (
        layer_work(costs, costs.layers.layers[1], unit, MicroBatchShape.even(6, 10), sweep)
        for sweep in (1, 0)
    )
    codes = [
        coded_bytes(costs, layout)
        for layout in layouts_of(costs.memory.form, unit.tensors)
        if layout.is_matrix
    ]
    assert [p.coded for p in work.products] == codes and min(codes) > 0 and many > FEW_ROWS
    assert not any(p.coded for p in prompts.products)
    assert decoding_s(costs) == 0.0 < decoding_s(costs, sweep=0)
    assert decoding_s(costs, layer=0) > 0.0, "a table is looked up in"
    read_s = sum(codes) / where.profile.device_memory_bytes_per_s
    assert costs.compute_seconds(Work(work.products))[0] == pytest.approx(read_s)
    slow = machine(False, kernel_s=1.0)
    assert costs_of(policy, NEED, slow).compute_seconds(Work(work.products))[0] == pytest.approx(
        len(codes) + read_s
    )
    in_memory = replace(where, profile=replace(where.profile, device_memory_bytes_per_s=1e18))
    fastest = where.profile.rates(DTYPE).matmul_rate(TOKEN_CHUNK, 128, 128)
    multiplied_s = sum(2 * p.rows * p.inner * p.outer for p in work.products) / fastest
    assert costs_of(policy, NEED, in_memory).compute_seconds(Work(work.products))[
        0
    ] == pytest.approx(multiplied_s)
    for other, on in ((replace(policy, percent=(50, 50, 100, 0, 100, 0)), False), (policy, True)):
        decoded = costs_of(other, NEED, machine(on))
        assert decoding_s(decoded) > 0 and not any(p.coded for p in attention(decoded, 1).products)


def test_of_a_quantised_checkpoint_only_what_is_quantised_is_unpacked() -> None:
    where = machine(is_host=True)
    policy = Policy(4, percent=(0, 0, 100, 0, 100, 0))
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    plain, quantised = (
        costs_of(policy, NEED, where, replace(SPEC, quantization=config)) for config in (None, fp8)
    )
    assert decoding_s(quantised, 0) == decoding_s(plain) == 0.0 < decoding_s(quantised)
    assert quantised.weight_load(0, 1) == plain.weight_load(0, 1)
    assert sum(t.seconds for t in quantised.weight_load(1, 1)) < sum(
        t.seconds for t in plain.weight_load(1, 1)
    )


def test_a_quantised_checkpoint_is_decoded_at_its_own_rate() -> None:
    """As 4 bits are unpacked where the profile does not tell."""
    where = measured(TIMES)
    spec = replace(SPEC, quantization={"quant_method": "gptq", "bits": 4, "group_size": 128})
    for on, name in ((False, "gptq"), (True, "gptq_int8")):
        rates = replace(where.profile.compute[DTYPE], decode_speedup={name: 0.2})
        known = replace(where, profile=replace(where.profile, compute={DTYPE: rates}))
        own, any_s = (
            decoding_s(costs_of(Policy(4, int8_compute=on), NEED, m, spec)) for m in (known, where)
        )
        assert own == pytest.approx(any_s / 0.2) and any_s > 0


def test_launches_take_the_time_of_the_thread_that_issues_them() -> None:
    """Those that a dense decode step, of which step_s tells, does without. A host issues
    nothing."""
    policy = Policy(6, percent=(0, 100, 100, 0, 100, 0), compress_weight=True)
    batch = MicroBatchShape.even(6, 10)
    for is_host in (False, True):
        free, slow = (costs_of(policy, NEED, machine(is_host, kernel_s=s)) for s in (0.0, 1e-3))
        for sweep, launches in ((0, PROMPT_LAUNCHES), (1, 0)):
            before, after = (costs.step(1, batch, sweep) for costs in (free, slow))
            assert after.issue_s - before.issue_s == pytest.approx(
                0.0 if is_host else launches * 1e-3
            )
        matrices = 4  # of attention; each is unpacked in a launch
        issued = slow.decoding(1, [(batch, batch.rows)], 1).issue_s
        assert issued == pytest.approx(0.0 if is_host else matrices * 1e-3)


@pytest.mark.parametrize(
    ("percent", "eviction", "in_graphs"),
    [
        ((100, 0, 100, 0, 100, 0), Full(), True),
        ((100, 0, 100, 0, 100, 0), H2O(heavy_size=4, recent_size=4), True),
        ((100, 0, 100, 0, 100, 0), H2ONorm(heavy_size=4, recent_size=4), True),
        ((100, 0, 100, 0, 100, 0), Tova(heavy_size=4), False),
        ((99, 1, 100, 0, 100, 0), Full(), False),
        ((100, 0, 0, 100, 100, 0), Full(), False),
        ((100, 0, 100, 0, 0, 100), Full(), False),
    ],
)
def test_steps_that_are_graphs_are_issued_as_one(
    percent: tuple[int, ...], eviction: Eviction, in_graphs: bool
) -> None:
    """On a card, of decode sweeps, where all is on it and steps launch alike (engine/graphs.py)."""
    need = workload_of(eviction, 6, {(10, 4)}, BLOCKS)
    batch = MicroBatchShape.even(6, 10)
    known: dict[str, Any] = {"step_s": 1e-3, "graph_step_s": 1e-4, "device_is_asynchronous": True}
    costs = costs_of(Policy(6, percent=percent), need, machine(False, **known))
    for layer in (1, 2):  # attention and MLP
        assert [costs.step(layer, batch, sweep).issue_s for sweep in (0, 1)] == [
            1e-3,
            1e-4 if in_graphs else 1e-3,
        ]
    waits = costs_of(
        Policy(6, percent=percent),
        need,
        machine(False, **{**known, "device_is_asynchronous": False}),
    )
    apart = costs_of(Policy(6, percent=percent, overlap=False), need, machine(False, **known))
    assert waits.step(1, batch, 1).issue_s == apart.step(1, batch, 1).issue_s == 1e-3


def test_without_overlap_a_step_takes_at_least_as_long_as_issuing_it() -> None:
    """On a device that is asynchronous: with overlap issuing goes on beside other steps, without
    each is waited for."""
    where = machine(False, step_s=1e-3, device_is_asynchronous=True)
    batch = MicroBatchShape.even(6, 10)
    for overlap in (True, False):
        costs = costs_of(Policy(6, overlap=overlap), NEED, where)
        steps = [costs.step(i, batch, 1) for i in range(len(costs.layers.layers))]
        slow = replace(costs.machine.profile, step_s=min(s.device_s for s in steps) * 2)
        costs = replace(costs, machine=replace(costs.machine, profile=slow))
        steps = [costs.step(i, batch, 1) for i in range(len(costs.layers.layers))]
        assert any(s.device_s > s.issue_s for s in steps) and any(
            s.device_s < s.issue_s for s in steps
        )
        waited = sum(max(s.device_s, s.issue_s) for s in steps)
        beside = max(sum(s.device_s for s in steps), sum(s.issue_s for s in steps))
        assert costs.busy([batch], 1)["device_compute"] == pytest.approx(
            beside if overlap else waited
        )
        assert beside < waited

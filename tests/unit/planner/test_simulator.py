"""The simulator and predictions: sums that can be done by hand, and what must hold of any run.

The order of events is checked against the engine in tests/parity/test_planned_order.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.core.config import TIERS, Policy
from flexgen_h2o.engine.memory_plan import MemoryPlan
from flexgen_h2o.engine.workload import Block, Workload, even_blocks
from flexgen_h2o.planner.cost_model import LANES, CostModel, Machine
from flexgen_h2o.planner.predict import (
    MAX_WALKED,
    Prediction,
    Simulation,
    predict,
    simulate,
    walked_sweeps,
)
from tests.unit.planner.made_up import (
    BLOCKS,
    COMPUTE_RATES,
    CONTENTION,
    FIXED,
    RATES,
    RESIDENT,
    WEIGHTS_ON_DISK,
    cases,
    costs_of,
    evicting,
    faster,
    machine,
    make_spec,
    plan_of,
)

SWEEPS = 6
NEED = Workload.full(24, 40, SWEEPS, BLOCKS)
STREAMED = (0, 30, 20, 40, 0, 100)
Spans = dict[str, list[tuple[str, float, float]]]
Case = tuple[Policy, Workload, Machine, MemoryPlan]


def walk(
    policy: Policy,
    where: Machine,
    need: Workload = NEED,
    plan: MemoryPlan | None = None,
    sweeps: Sequence[int] | None = None,
) -> tuple[CostModel, Block, Simulation, Spans]:
    """Simulate the first block and all its sweeps. Return its spans by lane, too."""
    costs = costs_of(policy, need, where)
    block = even_blocks(policy, need)[0][0]
    spans: Spans = defaultdict(list)
    found = simulate(
        costs,
        costs,
        plan or plan_of(policy, need, where.device_is_host),
        block,
        range(need.gen_len) if sweeps is None else sweeps,
        lambda lane, name, start, end: spans[lane].append((name, start, end)),
    )
    return costs, block, found, spans


def totals(costs: CostModel, block: Block, sweep: int) -> tuple[float, float, float]:
    """Return the seconds of device, host and issuing of all steps of a sweep."""
    found = [
        costs.step(i, batch, sweep, tokens)
        for i, layer in enumerate(costs.layers.layers)
        for batch, tokens in costs.steps_of(layer.kind, block, sweep).values()
    ]
    return (
        sum(step.device_s for step in found),
        sum(step.host_s for step in found),
        sum(step.issue_s for step in found),
    )


def loads_s(costs: CostModel) -> float:
    """Return the seconds of the weight loads of a sweep."""
    units = range(len(costs.layers.units))
    return sum(load.seconds for unit in units for load in costs.weight_load(unit, 1))


def lasting(found: Simulation) -> list[float]:
    return [end - start for start, end in pairwise((0.0, *found.ends))]


def predicted(
    policy: Policy, need: Workload, where: Machine, plan: MemoryPlan | None = None
) -> Prediction:
    plan = plan or plan_of(policy, need, where.device_is_host)
    return predict(costs_of(policy, need, where), plan, even_blocks(policy, need))


# ---- by hand


@pytest.mark.parametrize("disk_read", [1e7, 2e8, 1e10])
@pytest.mark.parametrize("overlap", [True, False])
def test_reading_weights_hides_behind_compute_only_with_overlap(
    disk_read: float, overlap: bool
) -> None:
    """A sweep then takes the longer of both, within a layer's time; otherwise the sum."""
    policy = Policy(24, 1, WEIGHTS_ON_DISK, overlap=overlap)
    costs, block, found, _ = walk(policy, machine(True, disk_read_bytes_per_s=disk_read))
    for sweep, seconds in list(enumerate(lasting(found)))[2:]:
        compute = sum(totals(costs, block, sweep))
        if overlap:
            longest = max(loads_s(costs), compute)
            assert longest * (1 - 1e-9) <= seconds <= longest + (loads_s(costs) + compute) / 2
        else:
            assert seconds == pytest.approx(loads_s(costs) + compute)


@pytest.mark.parametrize("step_s", [1e-9, 1.0])
def test_issuing_hides_behind_what_is_queued_on_a_device(step_s: float) -> None:
    """Or compute hides behind issuing. The host waits for the tokens of each sweep."""
    costs, block, found, _ = walk(Policy(8, 1), machine(False, step_s=step_s))
    for sweep, seconds in enumerate(lasting(found)):
        device, _, issue = totals(costs, block, sweep)
        assert seconds == pytest.approx(max(device, issue), rel=1e-3)


# ---- of any run


@settings(max_examples=12)
@given(cases())
def test_a_lane_does_one_thing_at_a_time_and_nothing_is_counted_twice(case: Case) -> None:
    """A run takes no longer than all resources one after the other, and no less than compute."""
    policy, need, where, plan = case
    costs, block, found, spans = walk(policy, where, need, plan)
    for lane in (*LANES, "compute"):
        assert all(b[1] >= a[2] - 1e-12 for a, b in pairwise(spans[lane]))
        assert all(start >= 0 for _, start, _ in spans[lane])
    sums = [totals(costs, block, sweep) for sweep in range(need.gen_len)]
    device, host, issue = (sum(column) for column in zip(*sums, strict=True))
    asynchronous = where.profile.device_is_asynchronous
    least = max(device, issue) + host if asynchronous else device + host + issue
    if not policy.overlap:  # no lane works while a step computes
        least = device + host + max(found.busy_at_ends[-1][lane] for lane in LANES)
    most = sum(found.busy_at_ends[-1].values()) + (issue if asynchronous else 0)
    assert least * (1 - 1e-9) <= found.ends[-1] <= most * (1 + 1e-9)
    assert list(found.ends) == sorted(found.ends)


@settings(max_examples=25)
@given(
    cases(),
    st.sampled_from(RATES + FIXED + COMPUTE_RATES),
    st.sampled_from([1.01, 1.5, 4.0, 100.0]),
)
def test_faster_hardware_is_never_predicted_slower(case: Case, name: str, factor: float) -> None:
    """This holds at the end of any sweep, because the order of events is fixed."""
    policy, need, where, plan = case
    quick = replace(where, profile=faster(where.profile, name, factor))
    before, after = (walk(policy, one, need, plan)[2].ends for one in (where, quick))
    assert all(b <= a * (1 + 1e-9) for a, b in zip(before, after, strict=True))


# ---- predictions


@pytest.mark.parametrize(
    ("gen_len", "percent", "prompt_len", "within"),
    [
        (1, STREAMED, 60, 1e-9),
        (MAX_WALKED, STREAMED, 60, 1e-9),
        (MAX_WALKED + 1, STREAMED, 400, 0.03),
        (20, WEIGHTS_ON_DISK, 60, 0.1),
    ],
)
def test_sweeps_that_are_not_walked_are_interpolated(
    gen_len: int, percent: tuple[int, ...], prompt_len: int, within: float
) -> None:
    """All sweeps but the first are decode. The cache grows in steps of whole segments."""
    need = Workload.full(12, prompt_len, gen_len, BLOCKS)
    policy = Policy(4, 3, percent=percent)
    ends = walk(policy, machine(False), need)[2].ends
    found = predicted(policy, need, machine(False))
    assert len(walked_sweeps(gen_len)) == min(gen_len, MAX_WALKED)
    assert found.prefill_s == pytest.approx(ends[0])
    assert found.total_s == pytest.approx(ends[-1], rel=within)
    assert (found.decode_s == 0) is (gen_len == 1)


@pytest.mark.parametrize(
    ("percent", "differ", "within"), [(STREAMED, 1, 0.05), ((50, 50, 0, 100, 0, 0), 0, 0.02)]
)
def test_a_deep_model_costs_what_walking_all_of_it_says(
    percent: tuple[int, ...], differ: int, within: float
) -> None:
    """Only a part of the layers is walked, unless somebody listens. They may differ."""
    depth = 40
    where = machine(False, disk_read_bytes_per_s=5e8, step_s=1e-4)
    deep = make_spec(num_hidden_layers=depth)
    need = evicting(12, 60, 6, 20, depth)
    slots, kept = (tuple(most - differ * i for i in range(depth)) for most in (50, 49))
    need = replace(need, slots=slots, kept=kept) if differ else need
    policy = Policy(4, 3, percent=percent)
    plan = plan_of(policy, need, False, deep)
    blocks = even_blocks(policy, need)
    costs = costs_of(policy, need, where, deep)
    part = predict(costs, plan, blocks)
    whole = predict(costs, plan, blocks, lambda *span: None)
    assert part.prefill_s == pytest.approx(whole.prefill_s, rel=within)
    assert part.decode_s == pytest.approx(whole.decode_s, rel=within)


def test_blocks_add_up_and_the_last_may_be_smaller() -> None:
    policy = Policy(4, 2, WEIGHTS_ON_DISK)
    plan = plan_of(policy, Workload.full(99, 20, 4, BLOCKS), True)
    one, more, rest = (
        predicted(policy, Workload.full(rows, 20, 4, BLOCKS), machine(True, step_s=1e-3), plan)
        for rows in (8, 27, 3)
    )
    assert more.total_s == pytest.approx(3 * one.total_s + rest.total_s)
    assert more.tokens_per_s == pytest.approx(27 * 4 / more.total_s)
    reads = [found.busy["decode"]["disk_read"] for found in (one, more, rest)]
    assert reads[1] == pytest.approx(3 * reads[0] + reads[2])
    assert more.peak_bytes == {tier: plan.bytes_on(tier) for tier in TIERS}


def test_what_binds_is_what_works_longest_in_the_longer_phase() -> None:
    """Compute binds prefill here, and the disk decode."""
    where = machine(True, disk_read_bytes_per_s=1e8)
    where = replace(where, profile=faster(where.profile, "matmul_flops_per_s", 1e-1))
    for gen_len, longer in ((2, "device_compute"), (40, "disk_read")):
        need = Workload.full(8, 200, gen_len, BLOCKS)
        found = predicted(Policy(8, 1, WEIGHTS_ON_DISK), need, where)
        assert (found.binds("prefill"), found.binds("decode")) == ("device_compute", "disk_read")
        assert found.bound_by == longer


# ---- contention

CONTENDED = Workload.full(32, 64, 6, BLOCKS)
BESIDE = ("disk_read_beside_compute", "compute_beside_disk_read")


@pytest.mark.parametrize("name", ["disk_read_bytes_per_s", "matmul_flops_per_s"])
def test_contention_does_not_turn_a_gain_into_a_loss(name: str) -> None:
    """This holds if at least half of the disk's rate is left beside compute."""
    where = machine(True, disk_read_bytes_per_s=1e9, **dict.fromkeys(BESIDE, 0.5))
    profiles = [faster(where.profile, name, 0.1 * 2**i) for i in range(8)]
    policy = Policy(32, 1, WEIGHTS_ON_DISK)
    seconds = [
        predicted(policy, CONTENDED, replace(where, profile=profile)).total_s
        for profile in profiles
    ]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > 2 * seconds[-1]


SLOW = {"h2d_bytes_per_s": 1e7, "d2h_bytes_per_s": 1e7, "disk_read_bytes_per_s": 5e8}


@pytest.mark.parametrize(
    ("is_host", "percent", "overlap", "is_slower"),
    [
        (True, WEIGHTS_ON_DISK, True, True),
        (True, RESIDENT, True, False),
        (True, WEIGHTS_ON_DISK, False, False),
        (False, (100, 0, 100, 0, 0, 100), True, True),
        (False, (0, 100, 100, 0, 100, 0), True, False),
    ],
)
def test_contention_costs_time_only_where_both_are_busy(
    is_host: bool, percent: tuple[int, ...], overlap: bool, is_slower: bool
) -> None:
    """Hidden states on the host use both ways of the link; weights only come."""
    policy = Policy(32, 1, percent=percent, overlap=overlap)
    free, contended = (
        predicted(policy, CONTENDED, machine(is_host, **SLOW, **shares)).total_s
        for shares in ({}, dict.fromkeys(CONTENTION, 0.5))
    )
    assert contended >= free * (1.01 if is_slower else 1.0)
    assert is_slower or contended <= free * 1.02

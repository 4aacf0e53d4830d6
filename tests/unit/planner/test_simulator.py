"""The simulator: sums that can be done by hand, and what must hold of any run.

Times are of made-up machines; the order of events is checked against the engine in
tests/parity/test_planned_order.py.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.core.config import Policy
from flexgen_h2o.engine.memory_plan import MemoryPlan
from flexgen_h2o.engine.workload import Block, Workload, even_blocks
from flexgen_h2o.planner.cost_model import LANES, CostModel, Machine
from flexgen_h2o.planner.predict import Simulation, simulate
from flexgen_h2o.planner.profile import HardwareProfile
from tests.unit.planner.made_up import (
    BLOCKS,
    COMPUTE_RATES,
    DTYPE,
    FIXED,
    RATES,
    cases,
    costs_of,
    faster,
    machine,
    plan_of,
)

SWEEPS = 6
NEED = Workload.full(24, 40, SWEEPS, BLOCKS)
WEIGHTS_ON_DISK = (0, 0, 100, 0, 100, 0)
Spans = dict[str, list[tuple[str, float, float]]]


def walk(
    policy: Policy, where: Machine, need: Workload = NEED, depth: int = 0
) -> tuple[CostModel, Block, Simulation, Spans]:
    """The first block, all of its sweeps, with what was heard of each lane."""
    costs = costs_of(policy, need, where)
    block = even_blocks(policy, need)[0][0]
    spans: Spans = defaultdict(list)
    found = simulate(
        costs,
        costs,
        plan_of(policy, need, where.device_is_host, depth=depth),
        block,
        range(need.gen_len),
        lambda lane, name, start, end: spans[lane].append((name, start, end)),
    )
    return costs, block, found, spans


def steps_of(costs: CostModel, block: Block, sweep: int) -> list[tuple[float, float, float]]:
    """(device, host, issue) seconds of each step of a sweep."""
    found = [
        costs.step(i, batch, sweep, tokens)
        for i, layer in enumerate(costs.layers.layers)
        for batch, tokens in costs.steps_of(layer.kind, block, sweep).values()
    ]
    return [(step.device_s, step.host_s, step.issue_s) for step in found]


def compute_s(costs: CostModel, block: Block, sweep: int) -> float:
    return sum(map(sum, steps_of(costs, block, sweep)))


def loads_of(costs: CostModel) -> list[float]:
    """Seconds of the weight loads of a sweep that follows another: a tied head and the embedding
    are one."""
    return [
        sum(load.seconds for load in costs.weight_load(unit, 1))
        for unit in range(len(costs.layers.units))
    ]


def lasting(found: Simulation) -> list[float]:
    return [end - start for start, end in pairwise((0.0, *found.ends))]


# ---- by hand


@pytest.mark.parametrize("overlap", [True, False])
def test_with_everything_resident_a_run_is_the_sum_of_its_compute(overlap: bool) -> None:
    """Nothing is waited for."""
    costs, block, found, spans = walk(
        Policy(8, 3, overlap=overlap), machine(True, step_s=1e-3, row_s=1e-5)
    )
    assert lasting(found) == pytest.approx(
        [compute_s(costs, block, sweep) for sweep in range(SWEEPS)]
    )
    assert set(spans) == {"compute"}
    assert found.busy_at_ends[-1]["device_compute"] == pytest.approx(found.ends[-1])


@pytest.mark.parametrize("disk_read", [1e7, 2e8, 1e10])
def test_reading_weights_hides_behind_compute_or_the_other_way_round(disk_read: float) -> None:
    """With overlap a sweep takes the longer of both, within a layer's time."""
    policy = Policy(24, 1, WEIGHTS_ON_DISK)
    costs, block, found, _ = walk(policy, machine(True, disk_read_bytes_per_s=disk_read))
    loads = loads_of(costs)
    for sweep, seconds in list(enumerate(lasting(found)))[2:]:
        steps = [sum(step) for step in steps_of(costs, block, sweep)]
        longest = max(sum(loads), sum(steps))
        assert longest * (1 - 1e-9) <= seconds <= longest + max(loads) + max(steps)


def test_without_overlap_transfers_and_compute_add_up() -> None:
    """One after the other."""
    policy = Policy(8, 3, (0, 0, 100, 0, 0, 0), overlap=False)
    costs, block, found, _ = walk(
        policy, machine(True, disk_read_bytes_per_s=1e8, disk_request_s=1e-3)
    )
    for sweep, seconds in list(enumerate(lasting(found)))[1:]:
        hidden = [costs.step(i, b, sweep) for i in range(len(costs.layers.layers)) for b in block]
        moved = sum(m.seconds for step in hidden for m in (*step.hidden_load, *step.hidden_store))
        assert moved > 0
        assert seconds == pytest.approx(
            sum(loads_of(costs)) + moved + compute_s(costs, block, sweep)
        )


def test_micro_batches_share_each_weight_load() -> None:
    """Four read no more than one, and take as long where the disk binds."""
    slow = machine(True, disk_read_bytes_per_s=1e6)
    one, four = (walk(Policy(6, k, WEIGHTS_ON_DISK), slow)[2] for k in (1, 4))
    assert one.busy_at_ends[-1]["disk_read"] == four.busy_at_ends[-1]["disk_read"]
    assert four.ends[-1] == pytest.approx(one.ends[-1], rel=0.01)


def test_issuing_hides_behind_what_is_queued_on_a_device() -> None:
    """Or compute behind issuing, if that takes longer; the host waits for the tokens of each
    sweep."""
    for step_s in (1e-9, 1.0):
        costs, block, found, _ = walk(Policy(8, 1), machine(False, step_s=step_s))
        for sweep, seconds in enumerate(lasting(found)):
            steps = steps_of(costs, block, sweep)
            device = sum(s[0] for s in steps)
            issue = sum(s[2] for s in steps)
            assert seconds == pytest.approx(max(device, issue), rel=1e-3)


def test_attention_on_the_host_is_waited_for() -> None:
    """The device has nothing to do meanwhile."""
    policy = Policy(8, 1, (100, 0, 0, 100, 100, 0), cpu_cache_compute=True)
    costs, block, found, _ = walk(policy, machine(False))
    for sweep, seconds in enumerate(lasting(found)):
        steps = steps_of(costs, block, sweep)
        assert any(host for _, host, _ in steps)
        assert seconds == pytest.approx(sum(device + host for device, host, _ in steps))


def test_a_kv_unit_is_loaded_after_it_was_stored() -> None:
    """A slow link holds the first decode sweep up until the prompt's columns are there."""
    slow = machine(False, d2h_bytes_per_s=1e7)
    _, _, found, spans = walk(Policy(24, 1, (100, 0, 0, 100, 100, 0)), slow)
    first_load = next(start for name, start, _ in spans["h2d"] if name == "load_cache")
    first_store = next(end for name, _, end in spans["d2h"] if name == "store_cache")
    assert first_load >= first_store
    assert lasting(found)[1] > 10 * lasting(found)[2] > 0


# ---- of any run


@settings(max_examples=12)
@given(cases())
def test_a_lane_does_one_thing_at_a_time_and_nothing_is_counted_twice(
    case: tuple[Policy, Workload, Machine, MemoryPlan],
) -> None:
    """Spans of a lane follow one another; a run takes no longer than all resources one after the
    other."""
    policy, need, where, plan = case
    costs = costs_of(policy, need, where)
    block = even_blocks(policy, need)[0][0]
    spans: Spans = defaultdict(list)
    found = simulate(
        costs,
        costs,
        plan,
        block,
        range(need.gen_len),
        lambda lane, *span: spans[lane].append(span),
    )
    for lane in (*LANES, "compute"):
        assert all(b[1] >= a[2] - 1e-12 for a, b in pairwise(spans[lane]))
        assert all(start >= 0 for _, start, _ in spans[lane])
    sums = [
        [sum(x) for x in zip(*steps_of(costs, block, sweep), strict=True)]
        for sweep in range(need.gen_len)
    ]
    device, host, issue = (sum(column) for column in zip(*sums, strict=True))
    asynchronous = where.profile.device_is_asynchronous
    least = max(device, issue) + host if asynchronous else device + host + issue
    most = sum(found.busy_at_ends[-1].values()) + (issue if asynchronous else 0)
    assert least * (1 - 1e-9) <= found.ends[-1] <= most * (1 + 1e-9)
    assert list(found.ends) == sorted(found.ends)


@settings(max_examples=12)
@given(cases())
def test_steady_sweeps_take_no_less_than_their_busiest_resource(
    case: tuple[Policy, Workload, Machine, MemoryPlan],
) -> None:
    """CostModel.busy, which the linear program counts with, is a lower bound of what the
    simulator finds.

    Over a few sweeps: what is loaded before the first or stored after the last may be outside.
    """
    policy, need, where, plan = case
    costs = costs_of(policy, need, where)
    block = even_blocks(policy, need)[0][0]
    found = simulate(costs, costs, plan, block, [0, *[1] * 11])
    busy = costs.busy(block, 1)
    resources = [
        busy["device_compute"] + busy["host_compute"],
        *(busy[lane] for lane in LANES if policy.overlap),
    ]
    assert (found.ends[-1] - found.ends[1]) / 10 >= max(resources) * 0.9 * (1 - 1e-9)


@settings(max_examples=25)
@given(
    cases(),
    st.sampled_from(RATES + FIXED + COMPUTE_RATES),
    st.sampled_from([1.01, 1.5, 4.0, 100.0]),
)
def test_faster_hardware_is_never_predicted_slower(
    case: tuple[Policy, Workload, Machine, MemoryPlan], name: str, factor: float
) -> None:
    """At the end of any sweep: an event is the latest of some events and a duration, and the order
    is fixed."""
    policy, need, where, plan = case
    block = even_blocks(policy, need)[0][0]

    def ends(profile: HardwareProfile) -> tuple[float, ...]:
        costs = costs_of(policy, need, Machine(profile, DTYPE, where.device_is_host))
        return simulate(costs, costs, plan, block, range(need.gen_len)).ends

    before = ends(where.profile)
    after = ends(faster(where.profile, name, factor))
    assert all(b <= a * (1 + 1e-9) for a, b in zip(before, after, strict=True))

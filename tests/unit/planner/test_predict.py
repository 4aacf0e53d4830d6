"""From simulated sweeps to the seconds of a pile; what speed and contention do to a prediction."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexgen_h2o.core.config import TIERS, Policy
from flexgen_h2o.engine.memory_plan import MemoryPlan
from flexgen_h2o.engine.workload import Workload, even_blocks
from flexgen_h2o.planner.cost_model import RESOURCES, Machine
from flexgen_h2o.planner.predict import MAX_WALKED, Prediction, predict, simulate, walked_sweeps
from flexgen_h2o.planner.report import bound_text
from tests.unit.planner.made_up import (
    BLOCKS,
    SPEC,
    costs_of,
    evicting,
    faster,
    machine,
    make_spec,
    plan_of,
)

STREAMED = (0, 30, 20, 40, 0, 100)
WEIGHTS_ON_DISK = (0, 0, 100, 0, 100, 0)
Percent = tuple[int, int, int, int, int, int]
Case = tuple[Policy, Workload, Machine, MemoryPlan]


def predicted(
    policy: Policy, need: Workload, where: Machine, plan: MemoryPlan | None = None
) -> Prediction:
    plan = plan or plan_of(policy, need, where.device_is_host)
    return predict(SPEC, policy, need, where, plan, even_blocks(policy, need))


# ---- sums


@pytest.mark.parametrize("gen_len", [1, MAX_WALKED])
def test_all_sweeps_of_a_short_generation_count_as_they_are(gen_len: int) -> None:
    """All but the first are decode."""
    need = Workload.full(12, 60, gen_len, BLOCKS)
    policy = Policy(4, 3, STREAMED)
    where = machine(False)
    costs = costs_of(policy, need, where)
    ends = simulate(
        costs,
        costs,
        plan_of(policy, need, False),
        even_blocks(policy, need)[0][0],
        range(gen_len),
    ).ends
    found = predicted(policy, need, where)
    assert (found.prefill_s, found.total_s) == pytest.approx((ends[0], ends[-1]))
    assert (found.decode_s == 0) is (gen_len == 1)


@pytest.mark.parametrize(
    ("gen_len", "percent", "prompt_len", "within"),
    [
        (MAX_WALKED + 1, STREAMED, 400, 0.03),
        (100, STREAMED, 60, 0.1),
        (20, WEIGHTS_ON_DISK, 60, 0.1),
    ],
)
def test_what_is_not_walked_is_interpolated(
    gen_len: int, percent: Percent, prompt_len: int, within: float
) -> None:
    """Beside walking all sweeps, though the cache grows: in steps of whole segments, which are
    large for short rows."""
    need = Workload.full(12, prompt_len, gen_len, BLOCKS)
    policy = Policy(4, 3, percent)
    where = machine(False)
    costs = costs_of(policy, need, where)
    ends = simulate(
        costs,
        costs,
        plan_of(policy, need, False),
        even_blocks(policy, need)[0][0],
        range(gen_len),
    ).ends
    assert len(walked_sweeps(gen_len)) == MAX_WALKED
    assert predicted(policy, need, where).total_s == pytest.approx(ends[-1], rel=within)


@pytest.mark.parametrize(("percent", "differ"), [(STREAMED, True), ((50, 50, 0, 100, 0, 0), False)])
def test_a_deep_model_costs_what_walking_all_of_it_says(percent: Percent, differ: bool) -> None:
    """Within 2%, and 5% where layers differ: only a part of them are walked, unless somebody
    listens."""
    depth = 40
    where = machine(False, disk_read_bytes_per_s=5e8, step_s=1e-4)
    deep = make_spec(num_hidden_layers=depth)
    need = evicting(12, 60, 6, 20, depth)
    if differ:
        need = replace(
            need,
            slots=tuple(50 - i for i in range(depth)),
            kept=tuple(49 - i for i in range(depth)),
        )
    policy = Policy(4, 3, percent)
    plan = plan_of(policy, need, False, deep)
    blocks = even_blocks(policy, need)
    part = predict(deep, policy, need, where, plan, blocks)
    whole = predict(deep, policy, need, where, plan, blocks, lambda *span: None)
    assert (part.prefill_s, part.decode_s) == pytest.approx(
        (whole.prefill_s, whole.decode_s), rel=0.05 if differ else 0.02
    )


def test_blocks_add_up_and_the_last_may_be_smaller() -> None:
    """Seconds, tokens and busy seconds of a pile are sums over its blocks."""
    where = machine(True, step_s=1e-3)
    policy = Policy(4, 2, (0, 0, 100, 0, 100, 0))

    def of(rows: int) -> Prediction:
        return predicted(
            policy,
            Workload.full(rows, 20, 4, BLOCKS),
            where,
            plan_of(policy, Workload.full(99, 20, 4, BLOCKS), True),
        )

    assert of(24).total_s == pytest.approx(3 * of(8).total_s)
    assert of(27).total_s == pytest.approx(3 * of(8).total_s + of(3).total_s)
    assert of(27).new_tokens == 27 * 4 and of(27).tokens_per_s == pytest.approx(
        27 * 4 / of(27).total_s
    )
    assert of(24).busy["decode"]["disk_read"] == pytest.approx(
        3 * of(8).busy["decode"]["disk_read"]
    )


def test_what_binds_is_what_works_longest_in_the_longer_phase() -> None:
    """Prefill is bound by compute and decode by the disk here; which phase is longer decides."""
    disk = Policy(8, 1, WEIGHTS_ON_DISK)
    where = machine(True, disk_read_bytes_per_s=1e8)
    slow = faster(where.profile, "matmul_flops_per_s", 1e-1)
    for gen_len, decode_is_longer in ((2, False), (40, True)):
        need = Workload.full(8, 200, gen_len, BLOCKS)
        found = predicted(disk, need, replace(where, profile=slow))
        assert (found.binds("prefill"), found.binds("decode")) == ("device_compute", "disk_read")
        assert (found.decode_s > found.prefill_s) is decode_is_longer
        assert found.bound_by == ("disk_read" if decode_is_longer else "device_compute")
    assert found.busy["decode"]["disk_read"] == pytest.approx(found.decode_s, rel=0.3)
    plan = plan_of(disk, need, True)
    assert found.peak_bytes == {tier: plan.bytes_on(tier) for tier in TIERS}


def test_what_works_for_a_part_of_the_time_binds_nothing_alone() -> None:
    busy = dict.fromkeys(RESOURCES, 0.0) | {"disk_read": 7.0, "device_compute": 5.0}
    found = Prediction(10.0, 8.0, 1, {}, {"prefill": busy, "decode": busy})
    assert bound_text(found, "prefill", 10.0) == "prefill by none alone (disk read 70%)"
    assert bound_text(found, "decode", 8.0) == "decode by disk read"


# ---- monotony


@pytest.mark.parametrize("name", ["disk_read_bytes_per_s", "matmul_flops_per_s"])
def test_contention_does_not_turn_a_gain_into_a_loss(name: str) -> None:
    """Where at least half of the disk's rate is left beside compute. Below, a faster disk that is
    busy beside compute for longer could be predicted slower."""
    policy = Policy(32, 1, (0, 0, 100, 0, 100, 0))
    need = Workload.full(32, 64, 6, BLOCKS)
    where = machine(
        True, disk_read_beside_compute=0.5, compute_beside_disk_read=0.5, disk_read_bytes_per_s=1e9
    )
    where = replace(where, profile=faster(where.profile, name, 1e-1))
    seconds = [
        predicted(policy, need, replace(where, profile=faster(where.profile, name, 1.1**i))).total_s
        for i in range(0, 50, 6)
    ]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > 2 * seconds[-1]


def test_contention_costs_time_only_where_both_are_busy() -> None:
    """Not where the disk is idle, and not without overlap."""
    need = Workload.full(32, 64, 6, BLOCKS)
    disk = (0, 0, 100, 0, 100, 0)
    for percent, slower in ((disk, True), ((100, 0, 100, 0, 100, 0), False)):
        policy = Policy(32, 1, percent)
        free, beside = (
            predicted(
                policy,
                need,
                machine(
                    True,
                    disk_read_bytes_per_s=5e8,
                    disk_read_beside_compute=left,
                    compute_beside_disk_read=left,
                ),
            ).total_s
            for left in (1.0, 0.6)
        )
        assert (beside > free * 1.01) is slower and beside >= free
    sequential = Policy(32, 1, disk, overlap=False)
    slowed = machine(True, disk_read_beside_compute=0.5, compute_beside_disk_read=0.5)
    assert (
        predicted(sequential, need, slowed).total_s
        == predicted(sequential, need, machine(True)).total_s
    )


def test_ways_of_the_link_slow_each_other_where_both_are_busy() -> None:
    """Hidden states go both ways; weights only come. As much as the profile says, where the link
    binds."""
    need = Workload.full(32, 64, 6, BLOCKS)
    slow = {"h2d_bytes_per_s": 1e7, "d2h_bytes_per_s": 1e7}
    for percent, factor in (((100, 0, 100, 0, 0, 100), 2.0), ((0, 100, 100, 0, 100, 0), 1.0)):
        policy = Policy(32, 1, percent)
        alone, both = (
            predicted(policy, need, machine(False, link_both_ways=s, **slow)).total_s
            for s in (1.0, 0.5)
        )
        assert both == pytest.approx(factor * alone, rel=0.02)


# ---- the room

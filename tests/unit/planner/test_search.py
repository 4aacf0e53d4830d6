"""The policy search: what it finds fits and is fast, and a refusal says what would do."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.core.config import MAX_ROWS, TIERS, Policy
from flexgen_h2o.core.errors import DoesNotFitError
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.core.units import GIB, MIB, PAGE
from flexgen_h2o.engine.memory import MemoryPlanner
from flexgen_h2o.engine.memory_plan import SEQUENTIAL
from flexgen_h2o.engine.workload import Workload, shape_of
from flexgen_h2o.planner.cost_model import Machine
from flexgen_h2o.planner.lp import (
    HELD,
    Candidate,
    SearchSpace,
    fastest_shares,
    find_corners,
)
from flexgen_h2o.planner.profile import Curve, nominal_profile
from flexgen_h2o.planner.search import (
    bounded,
    candidates,
    disk_reads,
    evaluate,
    search,
    sensitivity,
    tight_fit,
    worth_more,
)
from tests.unit.planner.made_up import (
    BLOCKS,
    DTYPE,
    HUGE,
    NOTHING,
    RESIDENT,
    SPEC,
    WEIGHTS_ON_DISK,
    machine,
    public,
    shipped,
)

NEED = Workload.full(8, 20, 5, BLOCKS)
Budgets = dict[str, int | None]


def nominal(is_host: bool) -> Machine:
    return Machine(nominal_profile(is_host), DTYPE, is_host)


def space_of(
    where: Machine,
    budgets: Budgets = HUGE,
    need: Workload = NEED,
    spec: ModelSpec = SPEC,
    **more: Any,
) -> SearchSpace:
    return SearchSpace(spec, need, more.pop("base", Policy()), where, budgets, **more)


def all_on_disk(need: Workload, is_host: bool) -> dict[str, int]:
    """Return the bytes on each tier with one prompt at a time and the rest on disk."""
    plan = space_of(nominal(is_host), need=need).memory(Policy(1, 1, NOTHING), SEQUENTIAL)
    return {tier: plan.bytes_on(tier) for tier in TIERS}


# ---- what is chosen


@pytest.mark.parametrize("is_host", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_with_room_for_everything_everything_is_resident(is_host: bool, overlap: bool) -> None:
    """In one micro-batch. No tier is worth more."""
    space = space_of(nominal(is_host), base=Policy(overlap=overlap))
    found = search(space)
    assert found.policy == Policy(NEED.rows, 1, RESIDENT, overlap=overlap)
    assert sensitivity(space, found) == pytest.approx(dict.fromkeys(TIERS, 0.0), abs=1e-9)


def test_everything_but_batches_and_shares_is_the_base_policys() -> None:
    others = {"cpu_cache_compute": True, "sep_layer": False, "pin_weight": False}
    base = Policy(7, 9, (1, 2, 3, 4, 5, 6), **others, attn_sparsity=0.5)
    chosen = search(space_of(nominal(False), base=base)).policy
    back = replace(chosen, gpu_batch_size=7, num_gpu_batches=9, percent=base.percent)
    assert chosen != base == back


def test_a_small_device_leaves_weights_on_the_host_before_the_disk() -> None:
    room = {**HUGE, "device": all_on_disk(NEED, False)["device"] + 3 * MIB}
    percent = search(space_of(nominal(False), room)).policy.percent
    assert percent[0] + percent[1] == 100 > percent[0] and percent[2] + percent[3] == 100


def test_more_ram_saves_reading_and_time() -> None:
    room = all_on_disk(NEED, True)["host"] + MIB
    found = [
        search(space_of(nominal(True), {**HUGE, "device": 0, "host": room + more * MIB}))
        for more in (0, 2, 9)
    ]
    assert [plan.policy.percent[0] == 100 for plan in found] == [False, False, True]
    reads = [plan.prediction.busy["decode"]["disk_read"] for plan in found]
    assert reads[0] > 0 and reads == sorted(reads, reverse=True) and reads[-1] == 0
    seconds = [plan.seconds for plan in found]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("disk", [1e7, 1e9])
@pytest.mark.parametrize("room", [0.0, 0.1, 0.5, 2.0])
def test_memory_saves_no_more_than_the_plan_takes_longer_than_one_in_memory(
    disk: float, room: float
) -> None:
    """A GiB is far more than the model needs, and computing takes its time anyway."""
    least = all_on_disk(NEED, True)["host"]
    budgets = {**HUGE, "device": 0, "host": least + int(room * MIB)}
    space = space_of(machine(True, disk_read_bytes_per_s=disk), budgets)
    found = search(space)
    resident = evaluate(space_of(space.machine), replace(found.policy, percent=RESIDENT))
    gain = sensitivity(space, found)["host"]
    assert gain <= 1.01 * (found.seconds - resident.seconds)
    assert gain > 0.9 * (found.seconds - resident.seconds) or disk > 1e7


def test_memory_is_proposed_only_if_the_machine_has_it_and_it_saves_time() -> None:
    slow = machine(True, disk_read_bytes_per_s=1e7, host_mem_bytes=GIB)
    least = all_on_disk(NEED, True)["host"]
    space = space_of(slow, {**HUGE, "device": 0, "host": least})
    found = search(space)
    reads = disk_reads(space, found.policy)
    more = worth_more(space, reads, found.seconds)
    assert more is not None and least < more[0]["host"] < GIB // 2 and more[1] < reads / 2
    faster = search(replace(space, budgets={**space.budgets, **more[0]})).seconds
    assert worth_more(space, reads, 1.01 * faster) is None
    for room in (more[0]["host"] - 1, least):
        has = GIB // 2 + room  # half a GiB stays free
        small = replace(slow, profile=replace(slow.profile, host_mem_bytes=has))
        less = worth_more(replace(space, machine=small), reads, found.seconds)
        assert less is None or least < less[0]["host"] <= room
    assert less is None


@pytest.mark.parametrize("compress", [(), ("compress_weight",)])
def test_only_switches_that_are_asked_for_are_set(compress: tuple[str, ...]) -> None:
    """Compression halves what a slow link must bring, so it wins if it may."""
    tight = {**HUGE, "device": all_on_disk(NEED, False)["device"] + MIB}
    slow = machine(False, h2d_bytes_per_s=1e7, d2h_bytes_per_s=1e7, disk_read_bytes_per_s=1e6)
    space = space_of(slow, tight, replace(NEED, rows=2), compress=compress)
    found = search(space).policy
    assert found.compress_weight is bool(compress) and not found.compress_cache


def test_shares_that_split_matrices_are_not_priced_as_products_of_codes() -> None:
    """Few rows on a card multiply by codes if all weights are on it. That is on no line between
    there and the host."""
    quick = machine(False, h2d_bytes_per_s=1e12, d2h_bytes_per_s=1e12)
    space = space_of(quick, need=replace(NEED, rows=4), base=Policy(compress_weight=True))
    asked = Candidate(Policy(4, 1, NOTHING, compress_weight=True), SEQUENTIAL)
    enough = round(find_corners(space, asked.policy, SEQUENTIAL, 0)[0,][HELD, "device"] * GIB)
    whole, split, none = (
        fastest_shares(space, asked, {**HUGE, "device": room})
        for room in (enough, enough - PAGE, 0)
    )
    assert none is None and whole is not None and split is not None
    assert whole.shares[0] == 1.0 > split.shares[0]
    assert split.block_s > 1.01 * whole.block_s


# ---- blocks that do not cut the workload evenly

SMALL = public("facebook/opt-125m")
LONG = Workload.full(96, 64, 32, SMALL.num_blocks)


def in_ram(rows: int) -> int:
    """Return the bytes of a block of one micro-batch with everything in RAM."""
    policy = Policy(rows, 1, RESIDENT)
    memory = MemoryPlanner(SMALL, policy, 2, True)
    return memory.plan(shape_of(policy, LONG), SEQUENTIAL).bytes_on("host")


def even_products(blocked: float = 1.0, **changes: Any) -> Machine:
    """Return a machine whose products take as long for each row, however many there are."""
    profile = replace(nominal_profile(True), **changes)
    rates = replace(
        profile.rates("bfloat16"),
        matmul_flops_per_s=((1.0, ((4096.0, Curve.flat(3e11)),)),),
        blocked_speedup=Curve.flat(blocked),
    )
    return Machine(replace(profile, compute={"bfloat16": rates}), "bfloat16", True)


def test_the_largest_blocks_that_memory_holds_are_tried_and_win_over_a_slow_disk() -> None:
    """No power of two cuts the workload into them."""
    budgets = {**HUGE, "device": 0, "host": in_ram(23)}
    slow = even_products(disk_read_bytes_per_s=2e8, disk_write_bytes_per_s=2e8)
    sizes = {c.policy.block_size for c in candidates(space_of(slow, budgets, LONG, SMALL))}
    assert {23, 20} <= sizes, "the most, and as many equal blocks"
    chosen = search(space_of(slow, budgets, LONG, SMALL)).policy
    assert (chosen.percent, chosen.block_size) == (RESIDENT, 23)


@pytest.mark.parametrize("blocked", [0.97, 0.8])
def test_the_disk_is_used_only_for_more_than_a_profile_tells(blocked: float) -> None:
    """Products with matrices in RAM seem slower than with those that are read.

    They seem so by little, as in a profile of a busy moment, or by much.
    """
    spec = public("facebook/opt-1.3b")
    need = Workload.full(16, 512, 8, spec.num_blocks)
    where = even_products(blocked, disk_read_bytes_per_s=1e11, short_read_compute_s=0.0)
    space = space_of(where, HUGE, need, spec)
    in_ram, streamed = (
        evaluate(space, Policy(16, 1, percent)) for percent in (RESIDENT, WEIGHTS_ON_DISK)
    )
    assert streamed.seconds < in_ram.seconds
    assert search(space).uses_disk is (blocked == 0.8)


def test_a_bound_is_below_what_the_best_placement_takes() -> None:
    """Costly reads that are not needed do not count."""
    policy = Policy(24, 1, RESIDENT)
    space = space_of(even_products(short_read_compute_s=1e-2), HUGE, LONG, SMALL, base=policy)
    found = bounded(space, policy)
    assert found is not None and found.bound_s <= evaluate(space, policy).seconds


# ---- what fits

small_needs = st.builds(
    Workload.full,
    rows=st.integers(1, 12),
    prompt_len=st.integers(1, 40),
    gen_len=st.integers(1, 4),
    num_blocks=st.just(BLOCKS),
)
# From too little up to where everything is resident: shares of the least, and bytes beside it.
rooms = st.fixed_dictionaries(
    {tier: st.tuples(st.sampled_from([1, 1, 0.6]), st.integers(0, 5 * MIB)) for tier in TIERS}
)


def budgets_of(need: Workload, is_host: bool, room: dict[str, tuple[float, int]]) -> Budgets:
    least = all_on_disk(need, is_host)
    return {tier: int(least[tier] * share + more) for tier, (share, more) in room.items()}


@settings(max_examples=6)
@given(small_needs, st.booleans(), st.booleans(), rooms)
def test_what_is_found_fits_and_a_refusal_names_what_would(
    need: Workload, is_host: bool, overlap: bool, room: dict[str, tuple[float, int]]
) -> None:
    """Given the bytes that a refusal names, the search finds something."""
    budgets = budgets_of(need, is_host, room)
    space = space_of(nominal(is_host), budgets, need, base=Policy(overlap=overlap))
    try:
        found = search(space)
    except DoesNotFitError as error:
        said = str(error).split("would do:")[1].split("(")[0]
        named = {tier: int(n) for tier, n in re.findall(r"--(\w+)-mem (\d+)", said)}
        assert named and all(nbytes > (budgets[tier] or 0) for tier, nbytes in named.items())
        space = replace(space, budgets={**budgets, **named})
        found = search(space)
    assert not found.memory.overflow(space.budgets)
    assert found.memory == evaluate(space, found.policy).memory
    assert found.policy.gpu_batch_size <= need.rows and found.policy.overlap is overlap


@settings(max_examples=5)
@given(small_needs, st.booleans(), st.data())
def test_no_placement_needs_less_than_a_refusal_says(
    need: Workload, is_host: bool, data: st.DataObject
) -> None:
    """Mixed ones and attention on the host included: none exceeds the budgets by much less."""
    budgets = {tier: n // 2 for tier, n in all_on_disk(need, is_host).items()}
    space = space_of(nominal(is_host), budgets, need)
    excess = sum(tight_fit(space).memory.overflow(budgets).values())
    shares = st.tuples(st.integers(0, 100), st.integers(0, 100)).map(sorted)
    for _ in range(30):
        pairs = [(a, 0 if is_host else b - a) for a, b in (data.draw(shares) for _ in range(3))]
        on_host = data.draw(st.booleans())
        tried = Policy(percent=(*pairs[0], *pairs[1], *pairs[2]), cpu_cache_compute=on_host)
        assert excess <= sum(space.overflow(tried, SEQUENTIAL).values()) + 4096


def test_a_long_workload_is_cut_into_blocks_of_bounded_size() -> None:
    found = search(space_of(nominal(True), HUGE, Workload.full(3 * MAX_ROWS, 2, 2, BLOCKS)))
    assert found.policy.block_size <= MAX_ROWS
    assert found.prediction.new_tokens == 6 * MAX_ROWS


# ---- real models on a real machine


def test_nothing_that_is_tried_by_hand_is_faster() -> None:
    """With the memory that the other policy holds, and no more."""
    spec = public("facebook/opt-350m")
    need = Workload.full(16, 256, 32, spec.num_blocks)
    space = space_of(shipped("t4"), HUGE, need, spec)
    tried = evaluate(space, Policy(8, 2, (30, 70, 50, 50, 100, 0)))
    budgets = {tier: tried.memory.bytes_on(tier) for tier in TIERS}
    assert search(replace(space, budgets=budgets)).seconds <= tried.seconds


def test_what_all_tiers_together_cannot_hold_is_not_tried() -> None:
    """Nearly all block sizes are too large: none of them takes the place of one that fits."""
    spec = public("facebook/opt-30b")
    need = Workload.full(100_000, 2016, 32, spec.num_blocks)
    budgets: Budgets = {"device": 16 * GIB, "host": 32 * GIB, "disk": 50 * GIB}
    space = space_of(shipped("t4"), budgets, need, spec)
    sizes = [candidate.policy.block_size for candidate in candidates(space)]
    assert max(sizes) > 10 and max(sizes) * spec.kv_bytes_per_token(2) * 2047 < 98 * GIB


@pytest.mark.parametrize("is_host", [True, False])
def test_one_row_at_a_time_is_tried_where_nothing_that_is_solved_fits(
    is_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The candidates with the lowest bounds may all be too large."""
    monkeypatch.setattr("flexgen_h2o.planner.search.MAX_SOLVED", 0)
    monkeypatch.setattr("flexgen_h2o.planner.search.MAX_STEPS", 0)
    budgets: Budgets = {**all_on_disk(NEED, is_host)}
    found = search(space_of(nominal(is_host), budgets))
    assert found.policy.block_size == 1 and not found.memory.overflow(budgets)

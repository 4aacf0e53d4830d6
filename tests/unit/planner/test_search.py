"""The policy search: what it finds fits, is fast and is found again, and a refusal says what would
do."""

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
from flexgen_h2o.models import built_in_spec
from flexgen_h2o.planner.cost_model import Machine
from flexgen_h2o.planner.lp import (
    SearchSpace,
    fastest_shares,
    find_corners,
    placements,
)
from flexgen_h2o.planner.profile import Curve, find_profile, nominal_profile, read_profile
from flexgen_h2o.planner.search import (
    Plan,
    bounded,
    candidates,
    evaluate,
    search,
    sensitivity,
    tight_fit,
)
from tests.unit.planner.made_up import BLOCKS, DTYPE, HUGE, SPEC, evicting, fitted, machine

NEED = Workload.full(8, 20, 5, BLOCKS)
NOTHING = (0, 0, 0, 0, 0, 0)
T4_BUDGETS: dict[str, int | None] = {"device": 15 * GIB, "host": 208 * 10**9, "disk": 1500 * 10**9}


def nominal(is_host: bool) -> Machine:
    return Machine(nominal_profile(is_host), DTYPE, is_host)


def t4() -> Machine:
    return Machine(read_profile(find_profile("t4")), "float16", False)


def known(name: str) -> ModelSpec:
    found = built_in_spec(f"facebook/{name}")
    assert found is not None
    return found[0]


def all_on_disk(need: Workload, is_host: bool, base: Policy | None = None) -> dict[str, int]:
    """Bytes on each tier with one row at a time and the rest on disk."""
    policy = replace(base or Policy(), gpu_batch_size=1, num_gpu_batches=1, percent=NOTHING)
    plan = MemoryPlanner(SPEC, policy, 4, is_host).plan(shape_of(policy, need), SEQUENTIAL)
    return {tier: plan.bytes_on(tier) for tier in TIERS}


def fits(
    plan: Plan, need: Workload, is_host: bool, budgets: dict[str, Any], spec: ModelSpec = SPEC
) -> bool:
    return (
        MemoryPlanner(spec, plan.policy, 4, is_host).plan_within(
            shape_of(plan.policy, need), budgets
        )
        == plan.memory
    )


# ---- what is chosen


@pytest.mark.parametrize("is_host", [True, False])
@pytest.mark.parametrize("rows", [1, 8])
def test_with_room_for_everything_everything_is_resident(is_host: bool, rows: int) -> None:
    """In one block of one micro-batch, and no tier is worth more."""
    found = search(SearchSpace(SPEC, replace(NEED, rows=rows), Policy(), nominal(is_host), HUGE))
    assert found.policy == Policy(rows, 1, (100, 0, 100, 0, 100, 0))
    space = SearchSpace(SPEC, replace(NEED, rows=rows), Policy(), nominal(is_host), HUGE)
    assert sensitivity(space, found.policy) == pytest.approx(dict.fromkeys(TIERS, 0.0), abs=1e-9)


def test_everything_but_batches_and_shares_is_the_base_policys() -> None:
    """Whatever else it says."""
    others: dict[str, Any] = {
        "cpu_cache_compute": True,
        "sep_layer": False,
        "pin_weight": False,
        "attn_sparsity": 0.5,
    }
    base = Policy(7, 9, (1, 2, 3, 4, 5, 6), **others)
    chosen = search(SearchSpace(SPEC, NEED, base, nominal(False), HUGE)).policy
    same: dict[str, Any] = {
        "gpu_batch_size": 7,
        "num_gpu_batches": 9,
        "percent": (1, 2, 3, 4, 5, 6),
    }
    assert chosen != base and replace(chosen, **same) == base


def test_a_small_device_leaves_weights_on_the_host_before_the_disk() -> None:
    """The link is faster than the disk."""
    room = {**HUGE, "device": all_on_disk(NEED, False)["device"] + 3 * MIB}
    percent = search(SearchSpace(SPEC, NEED, Policy(), nominal(False), room)).policy.percent
    assert percent[0] + percent[1] == 100 > percent[0] and percent[2] + percent[3] == 100


def test_small_ram_leaves_weights_on_disk() -> None:
    """More RAM saves reading."""
    room = all_on_disk(NEED, True)["host"] + MIB
    found = [
        search(
            SearchSpace(
                SPEC,
                NEED,
                Policy(),
                nominal(True),
                {**HUGE, "device": 0, "host": room + more * MIB},
            )
        )
        for more in (0, 2, 9)
    ]
    assert (
        all(plan.policy.percent[0] < 100 for plan in found[:2])
        and found[2].policy.percent[0] == 100
    )
    read_s = [plan.prediction.busy["decode"]["disk_read"] for plan in found]
    assert read_s[0] > read_s[-2] > 0 == read_s[-1]
    seconds = [plan.prediction.total_s for plan in found]
    assert seconds == sorted(seconds, reverse=True)


def test_fewer_slots_make_more_of_the_same_ram() -> None:
    """H2O is faster where memory is short."""
    few = evicting(40, 250, 40, 25)
    full = Workload.full(40, 250, 40, BLOCKS)
    budgets = {**HUGE, "device": 0, "host": all_on_disk(few, True)["host"] + 12 * MIB}
    slow_disk = machine(True, disk_read_bytes_per_s=1e8)
    kept, whole = (
        search(SearchSpace(SPEC, need, Policy(), slow_disk, budgets)) for need in (few, full)
    )
    assert kept.prediction.total_s < whole.prediction.total_s


def test_only_switches_that_are_asked_for_are_set() -> None:
    """Compression halves what a link must bring, so it wins where it may."""
    tight = {**HUGE, "device": all_on_disk(NEED, False)["device"] + MIB}
    need = replace(NEED, rows=2)
    slow = machine(False, h2d_bytes_per_s=1e7, d2h_bytes_per_s=1e7, disk_read_bytes_per_s=1e6)
    for compress in ((), ("compress_weight",)):
        found = search(SearchSpace(SPEC, need, Policy(), slow, tight, compress)).policy
        assert found.compress_weight is bool(compress) and not found.compress_cache


def test_shares_that_split_matrices_are_not_priced_as_products_of_codes() -> None:
    """Few rows on a card multiply by codes where all weights are on it; on no line between there
    and the host."""
    quick = machine(False, h2d_bytes_per_s=1e12, d2h_bytes_per_s=1e12)
    space = SearchSpace(SPEC, replace(NEED, rows=4), Policy(compress_weight=True), quick, HUGE)
    policy = Policy(4, 1, NOTHING, compress_weight=True)
    depth = SEQUENTIAL
    split = find_corners(space, policy, depth)
    whole = find_corners(space, policy, depth, 0)
    assert (
        whole.base.busy["decode"]["device_compute"]
        < split.moved[0].busy["decode"]["device_compute"]
    )
    assert set(whole.moved) == {2, 3, 4, 5} and whole.base.nbytes == split.moved[0].nbytes
    found, slower = (
        fastest_shares(space, policy, depth, budgets) for budgets in (HUGE, {**HUGE, "device": 0})
    )
    assert found is not None and found.shares[0] == 1.0 and slower is None
    enough = {**HUGE, "device": whole.base.nbytes["device"]}
    all_there, almost = (
        fastest_shares(space, policy, depth, {**enough, "device": enough["device"] - less})
        for less in (0, PAGE)
    )
    assert (
        all_there is not None
        and almost is not None
        and all_there.shares[0] == 1.0 > almost.shares[0]
    )
    assert almost.seconds > 1.01 * all_there.seconds


# ---- what more memory is worth


# ---- blocks that do not cut the pile evenly


def in_ram(rows: int, need: Workload, spec: ModelSpec) -> int:
    """Bytes of a block of one micro-batch with everything in RAM."""
    policy = Policy(rows, 1, (100, 0, 100, 0, 100, 0))
    return (
        MemoryPlanner(spec, policy, 2, True)
        .plan(shape_of(policy, need), SEQUENTIAL)
        .bytes_on("host")
    )


def test_the_largest_blocks_that_memory_holds_are_candidates() -> None:
    """Besides those that cut the pile into equal parts, and those that cut it into as few equal
    ones."""
    spec = known("opt-125m")
    fits = 11
    need = Workload.full(100, 64, 32, spec.num_blocks)
    budgets = {**HUGE, "device": 0, "host": in_ram(fits, need, spec)}
    assert in_ram(fits + 1, need, spec) > (budgets["host"] or 0)
    space = SearchSpace(
        spec, need, Policy(), Machine(nominal_profile(True), "bfloat16", True), budgets
    )
    sizes = {(c.policy.gpu_batch_size, c.policy.num_gpu_batches) for c in candidates(space)}
    blocks = -(-need.rows // fits)
    assert {(fits, 1), (-(-need.rows // blocks), 1)} <= sizes


def even_products(**changes: Any) -> Machine:
    """Products that take as long for each row, however many there are."""
    profile = replace(nominal_profile(True), **changes)
    flat = replace(
        profile.rates("bfloat16"), matmul_flops_per_s=((1.0, ((4096.0, Curve.flat(3e11)),)),)
    )
    return Machine(replace(profile, compute={"bfloat16": flat}), "bfloat16", True)


def test_all_in_ram_is_chosen_where_the_profile_says_so() -> None:
    """Of OPT-125m, with a pile that no power of two cuts into the most that RAM holds; and where
    the disk costs nothing, something is on it so that there are fewer blocks."""
    spec = known("opt-125m")
    need = Workload.full(96, 64, 32, spec.num_blocks)
    budgets = {**HUGE, "device": 0, "host": in_ram(23, need, spec)}
    slow = even_products(disk_read_bytes_per_s=2e8, disk_write_bytes_per_s=2e8)
    chosen = search(SearchSpace(spec, need, Policy(), slow, budgets)).policy
    assert (chosen.percent, chosen.block_size) == ((100, 0, 100, 0, 100, 0), 23)
    free = even_products(
        disk_read_bytes_per_s=1e12, disk_request_s=0.0, short_read_compute_s=0.0, step_s=1e-3
    )
    assert search(SearchSpace(spec, need, Policy(), free, budgets)).policy.percent != (
        100,
        0,
        100,
        0,
        100,
        0,
    )


@pytest.mark.parametrize("blocked", [0.97, 0.8])
def test_the_disk_is_used_only_for_more_than_a_profile_tells(blocked: float) -> None:
    """Products with matrices in RAM seem slower than with those that are read: by little, as in a
    profile of a busy moment, or by much."""
    spec = known("opt-1.3b")
    need = Workload.full(16, 512, 8, spec.num_blocks)
    machine = even_products(disk_read_bytes_per_s=1e11, short_read_compute_s=0.0)
    rates = replace(machine.profile.rates("bfloat16"), blocked_speedup=Curve.flat(blocked))
    machine = replace(machine, profile=replace(machine.profile, compute={"bfloat16": rates}))
    space = SearchSpace(spec, need, Policy(), machine, HUGE)
    in_ram = evaluate(space, Policy(16, 1, (100, 0, 100, 0, 100, 0)))
    chosen = search(space)
    streamed = evaluate(space, Policy(16, 1, (0, 0, 100, 0, 100, 0)))
    assert streamed.seconds < in_ram.seconds
    assert chosen.uses_disk is (blocked == 0.8)


def test_bound_is_none_of_reads_that_are_not_needed() -> None:
    """Or the search would leave out what is all in RAM without a look."""
    spec = known("opt-125m")
    policy = Policy(24, 1, (100, 0, 100, 0, 100, 0))
    need = Workload.full(96, 64, 32, spec.num_blocks)
    costly = even_products(short_read_compute_s=1e-2)
    found = bounded(SearchSpace(spec, need, policy, costly, HUGE), policy)
    assert found is not None
    assert (
        found.bound_s
        <= evaluate(SearchSpace(spec, need, Policy(), costly, HUGE), policy).prediction.total_s
    )


@pytest.mark.slow
def test_more_memory_is_not_slower() -> None:
    """OLMoE on two cores: with 16 GB many micro-batches look best to the program, and wait."""
    spec = built_in_spec("allenai/OLMoE-1B-7B-0924")
    assert spec is not None
    need = Workload.full(10_000, 512, 128, spec[0].num_blocks)
    machine = Machine(read_profile(find_profile("build-2core")), "bfloat16", True)
    budgets = [
        {"device": 0, "host": int(0.9 * ram * 10**9), "disk": 450 * 10**9} for ram in (8, 16)
    ]
    less, more = (
        search(SearchSpace(spec[0], need, Policy(), machine, room)).seconds for room in budgets
    )
    assert more < less


# ---- what fits


@st.composite
def budgets_of(
    draw: st.DrawFn, need: Workload, is_host: bool, base: Policy
) -> dict[str, int | None]:
    """From what little does up to where everything is resident."""
    found: dict[str, int | None] = {}
    for tier, nbytes in all_on_disk(need, is_host, base).items():
        found[tier] = int(
            nbytes * draw(st.sampled_from([1, 1, 0.6])) + draw(st.integers(0, 5 * MIB))
        )
    return found


small_needs = st.builds(
    Workload.full,
    rows=st.integers(1, 12),
    prompt_len=st.integers(1, 40),
    gen_len=st.integers(1, 4),
    num_blocks=st.just(BLOCKS),
)


@settings(max_examples=6)
@given(small_needs, st.booleans(), st.booleans(), st.data())
def test_what_is_found_fits_and_a_refusal_names_what_would(
    need: Workload, is_host: bool, overlap: bool, data: st.DataObject
) -> None:
    """Rounding breaks no budget. Given the bytes that a refusal names, the search finds
    something."""
    base = Policy(overlap=overlap)
    where = nominal(is_host)
    budgets = data.draw(budgets_of(need, is_host, base))
    try:
        found = search(SearchSpace(SPEC, need, base, where, budgets))
    except DoesNotFitError as error:
        named = dict(
            re.findall(r"--(\w+)-mem (\d+)", str(error).split("would do:")[1].split("(")[0])
        )
        assert named and all(int(nbytes) > (budgets[tier] or 0) for tier, nbytes in named.items())
        budgets |= {tier: int(nbytes) for tier, nbytes in named.items()}
        found = search(SearchSpace(SPEC, need, base, where, budgets))
    assert fits(found, need, is_host, budgets)
    assert found.policy.gpu_batch_size <= need.rows and found.policy.overlap is overlap


@settings(max_examples=5)
@given(small_needs, st.booleans(), st.data())
def test_no_placement_needs_less_than_a_refusal_says(
    need: Workload, is_host: bool, data: st.DataObject
) -> None:
    """Mixed ones and attention on the host included: none exceeds the budgets by less, but for a
    page or so."""
    budgets: dict[str, int | None] = {}
    for tier, nbytes in all_on_disk(need, is_host).items():
        budgets[tier] = int(nbytes * data.draw(st.floats(0, 1.1)))
    space = SearchSpace(SPEC, need, Policy(), nominal(is_host), budgets)
    excess = sum(tight_fit(space).memory.overflow(budgets).values())
    shares = st.tuples(st.integers(0, 100), st.integers(0, 100), st.integers(0, 100)).map(
        lambda s: sorted(s)
    )
    for _ in range(40):
        pairs = [
            (s[0], 0 if is_host else s[1] - s[0]) for s in (data.draw(shares) for _ in range(3))
        ]
        tried = Policy(
            percent=(*pairs[0], *pairs[1], *pairs[2]), cpu_cache_compute=data.draw(st.booleans())
        )
        plan = MemoryPlanner(SPEC, tried, 4, is_host).plan(shape_of(tried, need), SEQUENTIAL)
        assert excess <= sum(plan.overflow(budgets).values()) + 4096


@settings(max_examples=8)
@given(small_needs, st.booleans(), st.lists(st.floats(0, 0.5), min_size=6, max_size=6), st.data())
def test_rounding_breaks_no_budget(
    need: Workload, is_host: bool, shares: list[float], data: st.DataObject
) -> None:
    """Whatever shares it starts from."""
    policy = fitted(Policy(4, 3), need)
    where = nominal(is_host)
    budgets = data.draw(budgets_of(need, is_host, Policy()))
    for placed in placements(SearchSpace(SPEC, need, policy, where, budgets), policy, shares):
        assert (
            not MemoryPlanner(SPEC, placed, 4, is_host)
            .plan_within(shape_of(placed, need), budgets)
            .overflow(budgets)
        )
        assert replace(placed, percent=NOTHING) == replace(policy, percent=NOTHING)


def test_a_long_pile_is_cut_into_blocks_of_bounded_size() -> None:
    """Of rows that a policy may have."""
    need = Workload.full(3 * MAX_ROWS, 2, 2, BLOCKS)
    found = search(SearchSpace(SPEC, need, Policy(), nominal(True), HUGE))
    assert found.policy.block_size <= MAX_ROWS
    assert found.prediction.new_tokens == 2 * need.rows


# ---- real models on a real machine


def test_a_model_on_the_card_is_not_run_row_by_row() -> None:
    """FlexGen's cost model has no fixed costs, and so its planner chose batches of one."""
    spec = known("opt-6.7b")
    need = Workload.full(64, 512, 32, spec.num_blocks)
    found = search(SearchSpace(spec, need, Policy(), t4(), {**T4_BUDGETS, "device": 40 * GIB}))
    assert found.policy.gpu_batch_size >= 4 and found.policy.percent[0] >= 80
    one = evaluate(
        SearchSpace(spec, need, Policy(), t4(), T4_BUDGETS),
        replace(found.policy, gpu_batch_size=1, num_gpu_batches=1),
    )
    assert found.prediction.total_s < one.prediction.total_s / 2


def test_nothing_that_is_tried_by_hand_is_faster() -> None:
    """With the memory that the other policy holds, and no more."""
    spec = known("opt-350m")
    by_hand = Policy(8, 2, (30, 70, 50, 50, 100, 0))
    need = Workload.full(16, 256, 32, spec.num_blocks)
    tried = evaluate(SearchSpace(spec, need, Policy(), t4(), HUGE), by_hand)
    budgets: dict[str, int | None] = {tier: tried.memory.bytes_on(tier) for tier in TIERS}
    found = search(SearchSpace(spec, need, Policy(), t4(), budgets))
    assert found.prediction.total_s <= tried.prediction.total_s


def test_the_published_policies_of_a_t4_fit_it() -> None:
    """FlexGen's own planner had its memory multiplied by a fudge factor."""
    for name, policy, prompt_len in (
        ("opt-30b", Policy(48, 3, (20, 80, 0, 100, 0, 100), cpu_cache_compute=True), 512),
        ("opt-175b", Policy(32, 8, (0, 50, 0, 0, 0, 100)), 512),
        ("opt-6.7b", Policy(72, 1, (100, 0, 100, 0, 100, 0), compress_weight=True), 256),
    ):
        spec = known(name)
        need = Workload.full(policy.block_size, prompt_len, 32, spec.num_blocks)
        assert (
            evaluate(
                SearchSpace(spec, need, Policy(), t4(), T4_BUDGETS), policy
            ).prediction.tokens_per_s
            > 0
        )


def test_what_all_tiers_together_cannot_hold_is_not_tried() -> None:
    """Of a long pile nearly all block sizes are too large: none of them takes the place of one that
    fits."""
    spec = known("opt-30b")
    need = Workload.full(100_000, 2016, 32, spec.num_blocks)
    budgets: dict[str, int | None] = {"device": 16 * GIB, "host": 32 * GIB, "disk": 50 * GIB}
    space = SearchSpace(spec, need, Policy(), t4(), budgets)
    sizes = [candidate.policy.block_size for candidate in candidates(space)]
    assert sizes and max(sizes) * spec.kv_bytes_per_token(2) * 2047 < 98 * GIB
    assert search(space).policy.block_size > 10


@pytest.mark.parametrize("is_host", [True, False])
def test_one_row_at_a_time_is_tried_where_nothing_that_is_solved_fits(
    is_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a long pile the candidates with the lowest bounds may all be too large."""
    monkeypatch.setattr("flexgen_h2o.planner.search.MAX_SOLVED", 0)
    monkeypatch.setattr("flexgen_h2o.planner.search.MAX_STEPS", 0)
    budgets: dict[str, int | None] = {**all_on_disk(NEED, is_host)}
    found = search(SearchSpace(SPEC, NEED, Policy(), nominal(is_host), budgets))
    assert found.policy.block_size == 1 and fits(found, NEED, is_host, budgets)

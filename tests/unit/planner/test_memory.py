"""The memory plan: grows with the work, shrinks with the look-ahead, and says what does not fit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from flexgen_h2o.checkpoint.formats import Codec
from flexgen_h2o.core.config import TIERS, Policy
from flexgen_h2o.core.errors import DoesNotFitError
from flexgen_h2o.core.timeline import Timeline
from flexgen_h2o.engine.loop import weight_sequence
from flexgen_h2o.engine.memory import MemoryPlanner
from flexgen_h2o.engine.memory_plan import (
    OVERLAPPED,
    SEQUENTIAL,
    BlockShape,
    Depth,
    MemoryPlan,
)
from flexgen_h2o.engine.weight_units import streamed_bytes
from flexgen_h2o.kvcache.eviction.policy import NO_RECORD, RowRecord
from flexgen_h2o.kvcache.store import CacheStore
from flexgen_h2o.tiers.device import HostDevice, StandInDevice
from flexgen_h2o.tiers.transfers import Lanes, Mover
from tests.unit.planner.made_up import small_spec

UNLIMITED: dict[str, int | None] = dict.fromkeys(TIERS)


SPEC = small_spec()
pairs = st.integers(0, 100).flatmap(lambda a: st.tuples(st.just(a), st.integers(0, 100 - a)))
percents = st.tuples(pairs, pairs, pairs).map(lambda three: sum(three, ()))
policies = st.builds(
    Policy,
    percent=percents,
    sep_layer=st.booleans(),
    cpu_cache_compute=st.booleans(),
    compress_cache=st.booleans(),
    cache_bits=st.sampled_from([3, 4, 8, "4/3", "3/8"]),
    cache_window=st.sampled_from([0, 4, 16]),
)
slot_counts = st.tuples(st.integers(1, 90), st.integers(1, 90))  # of each of the two blocks
names = st.sampled_from([("positions",), ("positions", "scores"), ("positions", "scores", "norms")])
records = st.just(NO_RECORD) | st.builds(RowRecord, names, st.integers(0, 9))
shapes = st.builds(
    BlockShape,
    rows=st.integers(1, 9),
    micro_batches=st.integers(1, 4),
    tokens=st.integers(1, 60),
    slots=slot_counts,
    record=records,
)


def make_plan(
    policy: Policy, shape: BlockShape, is_host: bool, depth: Depth = OVERLAPPED[2]
) -> MemoryPlan:
    return MemoryPlanner(SPEC, policy, 4, is_host).plan(shape, depth)


def totals(plan: MemoryPlan) -> list[int]:
    return [plan.bytes_on(tier) for tier in TIERS]


# ---- what grows


def one_more(shape: BlockShape, field: str) -> BlockShape:
    """The shape with one more of a number; "slots 1" stands for those of block 1."""
    name, _, place = field.partition(" ")
    if not place:
        return replace(shape, **{name: getattr(shape, name) + 1})
    slots = list(shape.slots)
    slots[int(place)] += 1
    return replace(shape, slots=tuple(slots))


@given(
    policies,
    shapes,
    st.sampled_from(["rows", "micro_batches", "tokens", "slots 0", "slots 1"]),
    st.booleans(),
)
def test_more_of_anything_needs_no_less_of_any_tier(
    policy: Policy, shape: BlockShape, field: str, is_host: bool
) -> None:
    on_device, on_host = policy.percent[2:4]
    in_three = on_device and on_host and on_device + on_host < 100 and not is_host
    assume(field != "rows" or not in_three)  # see test_smaller_micro_batches_fit_too
    more = one_more(shape, field)
    assert more.covers(shape) and not shape.covers(more)
    small = totals(make_plan(policy, shape, is_host))
    large = totals(make_plan(policy, more, is_host))
    assert all(b >= a for a, b in zip(small, large, strict=True))


def test_smaller_micro_batches_fit_too() -> None:
    """The last micro-batch of a run is carved from the homes of the largest."""
    spec = small_spec(num_attention_heads=2)
    for pair in [(25, 50), *((on_device, 5) for on_device in range(5, 95, 10))]:
        policy = Policy(percent=(100, 0, *pair, 100, 0))
        for most in range(1, 16):
            plan = MemoryPlanner(spec, policy, 4, False).plan(
                BlockShape(most, 1, 10, (50, 50)), SEQUENTIAL
            )
            homes = {b.tier: b.nbytes for b in plan.buffers if b.name == "cache"}
            for rows in range(1, most + 1):
                layout = MemoryPlanner(spec, policy, 4, False).kv_layout(rows, 50, ())
                for part in layout.parts:
                    assert spec.num_blocks * layout.part_bytes(part) <= homes.get(part.tier, 0)


@pytest.mark.parametrize("most", [65, 193])
def test_shorter_rows_fit_too(most: int) -> None:
    """A micro-batch whose rows need fewer slots is carved from the homes of the neediest, and comes
    through its ring.

    Its slots may be cut into fewer segments, whose areas end elsewhere in a page.
    """
    spec = small_spec(num_attention_heads=1, hidden_size=20, word_embed_proj_dim=20)
    for percent in ((0, 0, 0, 0, 0, 0), (0, 0, 0, 60, 0, 0)):
        policy = Policy(percent=percent)
        for rows in (1, 2, 5):
            plan = MemoryPlanner(spec, policy, 4, False).plan(
                BlockShape(rows, 1, 10, (most, most)), SEQUENTIAL
            )
            homes = {b.tier: b.nbytes for b in plan.buffers if b.name == "cache"}
            for slots in range(1, most + 1):
                layout = MemoryPlanner(spec, policy, 4, False).kv_layout(rows, slots, ())
                for part in layout.parts:
                    assert spec.num_blocks * layout.part_bytes(part) <= homes.get(part.tier, 0), (
                        slots
                    )
                assert sum(map(layout.part_bytes, layout.parts)) <= plan.size("cache ring")


@given(policies, shapes, st.booleans())
def test_a_shallower_ring_needs_no_more(policy: Policy, shape: BlockShape, is_host: bool) -> None:
    sizes = [totals(make_plan(policy, shape, is_host, depth)) for depth in OVERLAPPED]
    for deep, shallow in pairwise(sizes):
        assert all(b <= a for a, b in zip(deep, shallow, strict=True))


# ---- what is in it


@given(policies, shapes, st.booleans())
def test_where_the_device_is_host_memory_it_holds_nothing(
    policy: Policy, shape: BlockShape, is_host: bool
) -> None:
    plan = make_plan(policy, shape, is_host)
    assert (plan.bytes_on("device") == 0) is is_host
    assert len({(b.name, b.tier) for b in plan.buffers}) == len(plan.buffers)
    assert all(b.nbytes > 0 for b in plan.buffers)
    assert sum(totals(plan)) == sum(plan.size(name) for name in {b.name for b in plan.buffers})
    assert plan.size("workspace") == sum(n for _, n in plan.workspace)


def test_all_on_the_device_needs_no_ring_no_overlay_and_no_disk() -> None:
    plan = make_plan(Policy(), BlockShape(4, 2, 40, (20, 20)), is_host=False)
    assert {b.name for b in plan.buffers} == {
        "weights",
        "cache",
        "hidden",
        "workspace",
        "temporaries",
        "staging",
    }
    assert plan.bytes_on("disk") == 0 and {b.name for b in plan.buffers if b.tier == "host"} == {
        "staging"
    }
    assert plan.size("weights") >= SPEC.num_weights * 4
    assert plan.size("cache") >= 2 * 4 * 20 * SPEC.kv_bytes_per_token(4)


def test_rows_that_share_a_prefix_attend_together_in_buffers_for_others_too() -> None:
    in_parts = BlockShape(4, 2, 400, (20, 20), max_attending_tokens=100)
    shares = BlockShape(4, 2, 80, (20, 20), sharing=30)
    assert (in_parts.most_attending, shares.most_attending) == (100, 80)
    for both in (in_parts.union(shares), shares.union(in_parts)):
        assert both.most_attending == both.most_tokens == 400
        assert both.covers(in_parts) and both.covers(shares) and not in_parts.covers(both)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("depth", [1, 3, 50])
def test_the_weight_ring_holds_any_so_many_neighbours_of_the_cycle(depth: int, tied: bool) -> None:
    """Sweeps follow one another: behind the head comes the embedding, in one load when they are
    tied."""
    spec = small_spec(tie_word_embeddings=tied, vocab_size=900)
    policy = Policy(percent=(0, 0, 100, 0, 100, 0))
    plan = MemoryPlanner(spec, policy, 4, True).plan(
        BlockShape(1, 1, 1, (1, 1)), Depth(depth, 1, 1)
    )
    ring = plan.size("weight ring")
    layers = MemoryPlanner(spec, policy, 4, True).with_head_rows(plan.head_rows).layers
    assert (plan.head_rows > 0) is (not tied and depth < 50), "in parts where that saves something"
    sizes = [streamed_bytes(u, policy.weight_shares, Codec(4), True) for u in layers.units]
    loads = list(weight_sequence(5, tuple(layer.unit for layer in layers.layers)))[1:]
    count = min(depth, len(layers.units))
    assert ring == max(sum(sizes[u] for u in loads[i : i + count]) for i in range(len(loads)))


@given(policies, shapes.filter(lambda s: s.record), st.booleans(), st.data())
def test_records_and_overlays_are_taken_from_what_is_planned_for_them(
    policy: Policy, shape: BlockShape, is_host: bool, data: st.DataObject
) -> None:
    """The store carves the record of each part where attention runs on it: every tier's arena holds
    its parts."""
    plan = make_plan(policy, shape, is_host)
    arenas = {
        b.tier: torch.empty(b.nbytes, dtype=torch.uint8)
        for b in plan.buffers
        if b.name == "cache record"
    }
    homes = {
        b.tier: torch.empty(b.nbytes, dtype=torch.uint8) for b in plan.buffers if b.name == "cache"
    }
    homes.pop("disk", None)
    overlay = torch.empty(plan.size("cache overlay"), dtype=torch.uint8)
    lanes = Lanes({}, Timeline())
    device = HostDevice() if is_host else StandInDevice()
    attends_on_host = is_host or policy.cpu_cache_compute
    store = CacheStore(
        Mover(device, lanes), torch.float32, homes, None, overlay, arenas, attends_on_host
    )
    rows = data.draw(st.lists(st.integers(1, shape.rows), min_size=1, max_size=shape.micro_batches))
    rows[0] = shape.rows
    layouts = [
        [MemoryPlanner(SPEC, policy, 4, is_host).kv_layout(n, slots, shape.record) for n in rows]
        for slots in shape.slots
    ]
    store.begin_block(layouts, rows)
    for unit in store._units.values():
        for home in unit.homes:
            assert home.record["victims"].shape == (home.part.rows,)
            for name in shape.record.names:
                assert home.record[name].shape == (home.part.rows, unit.layout.slots)
            record = dict(home.record)
            whole = record.pop("whole", None)
            assert (whole is not None) is policy.compress_cache
            tier = home.part.tier if not home.streamed else "host" if attends_on_host else "device"
            beside = [] if whole is None else [t for t in vars(whole).values() if t.numel()]
            found = {t.untyped_storage().data_ptr() for t in [*record.values(), *beside]}
            assert found == {arenas[tier].untyped_storage().data_ptr()}
    lanes.close()


# ---- what fits


def test_a_refusal_names_tier_numbers_and_flags() -> None:
    plan = make_plan(Policy(), BlockShape(4, 2, 40, (20, 20)), is_host=False)
    need = plan.bytes_on("device")
    plan.check({"device": need, "host": None, "disk": 0})
    budgets = {"device": need - 2048, "host": None, "disk": 0}
    assert plan.overflow(budgets) == {"device": 2048}
    with pytest.raises(DoesNotFitError) as caught:
        plan.check(budgets)
    text = str(caught.value)
    for part in (
        "on the device tier",
        "2.00 KiB more than its budget",
        "--device-mem",
        "--gpu-batch-size",
        "--num-gpu-batches",
        "--percent",
        "weights ",
    ):
        assert part in text
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("is_host", [False, True])
def test_look_ahead_shrinks_with_the_budget_before_anything_is_refused(is_host: bool) -> None:
    policy = Policy(percent=(0, 0, 0, 0, 0, 0))
    shape = BlockShape(4, 2, 40, (20, 20))
    tier = "host" if is_host else "device"
    plans = [make_plan(policy, shape, is_host, depth) for depth in OVERLAPPED]
    for depth, plan in zip(OVERLAPPED, plans, strict=True):
        budgets = {**UNLIMITED, tier: plan.bytes_on(tier)}
        assert MemoryPlanner(SPEC, policy, 4, is_host).plan_within(shape, budgets).depth == depth
    assert (
        MemoryPlanner(SPEC, replace(policy, overlap=False), 4, is_host)
        .plan_within(shape, UNLIMITED)
        .depth
        == SEQUENTIAL
    )
    with pytest.raises(DoesNotFitError, match=f"on the {tier} tier"):
        MemoryPlanner(SPEC, policy, 4, is_host).plan_within(
            shape, {**UNLIMITED, tier: plans[-1].bytes_on(tier) - 1}
        )


# ---- blocked

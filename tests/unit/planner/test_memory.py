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
from flexgen_h2o.engine.memory_plan import OVERLAPPED, SEQUENTIAL, BlockShape, Depth, MemoryPlan
from flexgen_h2o.engine.weight_units import streamed_bytes
from flexgen_h2o.kvcache.store import CacheStore
from flexgen_h2o.tiers.device import HostDevice, StandInDevice
from flexgen_h2o.tiers.transfers import Lanes, Mover
from tests.unit.planner.made_up import NOTHING, WEIGHTS_ON_DISK, percents, small_spec

UNLIMITED: dict[str, int | None] = dict.fromkeys(TIERS)
SPEC = small_spec()
policies = st.builds(
    Policy,
    percent=percents,
    sep_layer=st.booleans(),
    cpu_cache_compute=st.booleans(),
    compress_cache=st.booleans(),
    cache_bits=st.sampled_from([3, 4, 8, "4/3", "3/8"]),
    cache_window=st.sampled_from([0, 4, 16]),
)
RECORDS = [(), ("positions",), ("positions", "scores"), ("positions", "scores", "ranks")]
shapes = st.builds(
    BlockShape,
    rows=st.integers(1, 9),
    micro_batches=st.integers(1, 4),
    tokens=st.integers(1, 60),
    slots=st.tuples(st.integers(1, 90), st.integers(1, 90)),  # of each of the two blocks
    record=st.sampled_from(RECORDS),
)
SMALL = BlockShape(4, 2, 40, (20, 20))


def make_plan(
    policy: Policy, shape: BlockShape, is_host: bool, depth: Depth = OVERLAPPED[2]
) -> MemoryPlan:
    return MemoryPlanner(SPEC, policy, 4, is_host).plan(shape, depth)


def totals(plan: MemoryPlan) -> list[int]:
    return [plan.bytes_on(tier) for tier in TIERS]


# ---- what grows


@given(policies, shapes, st.sampled_from(["rows", "micro_batches", "tokens", 0, 1]), st.booleans())
def test_more_of_anything_needs_no_less_of_any_tier(
    policy: Policy, shape: BlockShape, field: str | int, is_host: bool
) -> None:
    """A number is the transformer block that has one slot more."""
    on_device, on_host = policy.percent[2:4]
    in_three = on_device and on_host and on_device + on_host < 100 and not is_host
    assume(field != "rows" or not in_three)  # see test_smaller_units_fit_into_what_is_planned
    if isinstance(field, str):
        more = replace(shape, **{field: getattr(shape, field) + 1})
    else:
        more = replace(shape, slots=tuple(n + (i == field) for i, n in enumerate(shape.slots)))
    assert more.covers(shape) and not shape.covers(more) and shape.union(more).covers(more)
    small, large = (totals(make_plan(policy, one, is_host)) for one in (shape, more))
    assert all(b >= a for a, b in zip(small, large, strict=True))


@pytest.mark.parametrize("pair", [(0, 60), (25, 50), (45, 5)])
@pytest.mark.parametrize("most", [3, 65, 193])
def test_smaller_units_fit_into_what_is_planned(most: int, pair: tuple[int, int]) -> None:
    """Micro-batches of fewer sequences or fewer slots use the homes and the ring of the largest.

    Fewer slots may be cut into fewer segments, whose areas end elsewhere in a page.
    """
    policy = Policy(percent=(100, 0, *pair, 100, 0))
    memory = MemoryPlanner(small_spec(num_attention_heads=2), policy, 4, False)
    for rows in (1, 2, 5):
        plan = memory.plan(BlockShape(rows, 1, 10, (most, most)), SEQUENTIAL)
        homes = {b.tier: b.nbytes for b in plan.buffers if b.name == "cache"}
        for fewer, slots in [(n, most) for n in range(1, rows)] + [
            (rows, n + 1) for n in range(most)
        ]:
            layout = memory.kv_layout(fewer, slots, None)
            sizes = {part.tier: layout.part_bytes(part) for part in layout.parts}
            assert all(2 * nbytes <= homes.get(tier, 0) for tier, nbytes in sizes.items())
            assert sizes.get("host", 0) + sizes.get("disk", 0) <= plan.size("cache ring")


@given(policies, shapes, st.booleans())
def test_a_plan_shrinks_with_its_rings(policy: Policy, shape: BlockShape, is_host: bool) -> None:
    """If the device is host memory, it holds nothing."""
    plans = [make_plan(policy, shape, is_host, depth) for depth in OVERLAPPED]
    for deep, shallow in pairwise(map(totals, plans)):
        assert all(b <= a for a, b in zip(deep, shallow, strict=True))
    plan = plans[2]
    assert (plan.bytes_on("device") == 0) is is_host
    assert len({(b.name, b.tier) for b in plan.buffers}) == len(plan.buffers)
    assert plan.size("workspace") == sum(n for _, n in plan.workspace)


# ---- what is in it


def test_all_on_the_device_needs_no_ring_no_overlay_and_no_disk() -> None:
    plan = make_plan(Policy(), SMALL, is_host=False)
    moved = {"weight ring", "cache ring", "hidden ring", "cache overlay", "unpacked weights"}
    assert not moved & {b.name for b in plan.buffers}
    assert {b.name for b in plan.buffers if b.tier != "device"} == {"staging"}
    assert plan.size("weights") >= SPEC.num_weights * 4
    assert plan.size("cache") >= 2 * 4 * 20 * SPEC.kv_bytes_per_token(4)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("depth", [1, 3, 50])
def test_the_weight_ring_holds_any_so_many_neighbours_of_the_cycle(depth: int, tied: bool) -> None:
    """Sweeps follow one another: the embedding comes after the head, in one load if tied."""
    spec = small_spec(tie_word_embeddings=tied, vocab_size=900)
    policy = Policy(percent=WEIGHTS_ON_DISK)
    memory = MemoryPlanner(spec, policy, 4, True)
    plan = memory.plan(BlockShape(1, 1, 1, (1, 1)), Depth(depth, 1, 1))
    layers = memory.with_head_rows(plan.head_rows).layers
    assert (plan.head_rows > 0) is (not tied and depth < 50), "in parts if that saves something"
    sizes = [streamed_bytes(u, policy.weight_shares, Codec(4), True) for u in layers.units]
    loads = list(weight_sequence(5, tuple(layer.unit for layer in layers.layers)))[1:]
    count = min(depth, len(layers.units))
    most = max(sum(sizes[u] for u in loads[i : i + count]) for i in range(len(loads)))
    assert plan.size("weight ring") == most


@given(policies, shapes, st.booleans(), st.data())
def test_the_cache_store_takes_its_parts_from_what_is_planned(
    policy: Policy, shape: BlockShape, is_host: bool, data: st.DataObject
) -> None:
    """Also those of smaller micro-batches behind the first."""
    plan = make_plan(policy, shape, is_host)
    memory = MemoryPlanner(SPEC, policy, 4, is_host)
    homes, records = (
        {
            b.tier: torch.empty(b.nbytes, dtype=torch.uint8)
            for b in plan.buffers
            if b.name == name and (name, b.tier) != ("cache", "disk")
        }
        for name in ("cache", "cache record")
    )
    overlay = torch.empty(plan.size("cache overlay"), dtype=torch.uint8)
    lanes = Lanes({}, Timeline())
    mover = Mover(HostDevice() if is_host else StandInDevice(), lanes)
    store = CacheStore(mover, torch.float32, homes, None, overlay, records, memory.attends_on_host)
    fewer = st.lists(st.integers(1, shape.rows), max_size=shape.micro_batches - 1)
    rows = [shape.rows, *data.draw(fewer)]
    layouts = [[memory.kv_layout(n, slots, shape.record) for n in rows] for slots in shape.slots]
    store.begin_block(layouts, rows)
    lanes.close()


# ---- what fits


@pytest.mark.parametrize("is_host", [False, True])
def test_look_ahead_shrinks_with_the_budget_before_anything_is_refused(is_host: bool) -> None:
    policy = Policy(percent=NOTHING)
    memory = MemoryPlanner(SPEC, policy, 4, is_host)
    tier = "host" if is_host else "device"
    for depth in OVERLAPPED:
        held = memory.plan(SMALL, depth).bytes_on(tier)
        assert memory.plan_within(SMALL, {**UNLIMITED, tier: held}).depth == depth
    with pytest.raises(DoesNotFitError, match=f"--{tier}-mem"):
        memory.plan_within(SMALL, {**UNLIMITED, tier: held - 1})
    sequential = replace(memory, policy=replace(policy, overlap=False))
    assert sequential.plan_within(SMALL, UNLIMITED).depth == SEQUENTIAL

"""Predict the cost of a policy: seconds of both phases, bytes on each tier, and what binds.

A simulation decides. It runs the engine's own walk (engine/loop.py) on a simulated clock, with
rings of the sizes that the memory plan gives. A load is an event at the end of its lane's queue,
and waiting for it sets the clock. Each lane serves its queue in order, and whatever an operation
waits for was queued before it. So the time of an event is known when it is queued.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from flexgen_h2o.core.config import TIERS
from flexgen_h2o.engine.loop import ATTENTION_KINDS, Step, UnitKey, Walk, WeightStream
from flexgen_h2o.engine.memory_plan import MemoryPlan
from flexgen_h2o.engine.workload import Block, MicroBatchShape
from flexgen_h2o.planner.cost_model import (
    LANES,
    RESOURCES,
    CostModel,
    StepCost,
    Transfer,
    kv_ring_bytes,
    tokens_of,
    weight_ring_bytes,
)
from flexgen_h2o.tiers.stream import Done, Region, Ring, Waitable, wait_all

if TYPE_CHECKING:
    from flexgen_h2o.kernels.linear import RowParts

PHASES = ("prefill", "decode")
# A deep model is simulated with n and with 2n transformer blocks. n is at most CUT_BLOCKS and at
# least MIN_BLOCKS. It is smaller if groups of experts make many layers (CUT_LAYERS) of a block.
CUT_BLOCKS = 6
MIN_BLOCKS = 2
CUT_LAYERS = 24
MAX_WALKED = 8  # sweeps of a block that are simulated; the others are interpolated
ALL = "all"  # the key of a phase's seconds as a whole, beside the busy seconds of each resource
Spent = dict[str, dict[str, float]]  # seconds by phase, then by resource or ALL
OnSpan = Callable[[str, str, float, float], None]  # takes lane, name, start and end in seconds
_NO_SPAN = nullcontext()


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of running a whole workload. `predict` makes it."""

    # Seconds of the prefill sweeps of all blocks.
    prefill_s: float
    # Seconds of the decode sweeps of all blocks.
    decode_s: float
    # Tokens that all sequences generate together.
    new_tokens: int
    # Bytes by tier.
    peak_bytes: Mapping[str, int]
    # Busy seconds by phase, then by resource (planner.cost_model.RESOURCES).
    busy: Mapping[str, Mapping[str, float]]

    @property
    def total_s(self) -> float:
        """Seconds of both phases."""
        return self.prefill_s + self.decode_s

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of both phases, as FlexGen counts."""
        return self.new_tokens / self.total_s

    @property
    def waits_s(self) -> float:
        """Seconds in which the device computes nothing."""
        return max(0.0, self.total_s - sum(b["device_compute"] for b in self.busy.values()))

    def binds(self, phase: str) -> str:
        """Return the resource that works longest in a phase."""
        return max(RESOURCES, key=lambda name: self.busy[phase][name])

    @property
    def bound_by(self) -> str:
        """Resource that binds the longer phase."""
        return self.binds("decode" if self.decode_s > self.prefill_s else "prefill")

    def scaled(self, prefill: float, decode: float, new_tokens: int) -> Prediction:
        """Return the prediction with all seconds of each phase times a factor.

        new_tokens: those that all sequences generate together in these seconds.
        """
        factors = {"prefill": prefill, "decode": decode}
        return replace(
            self,
            prefill_s=prefill * self.prefill_s,
            decode_s=decode * self.decode_s,
            new_tokens=new_tokens,
            busy={
                phase: {name: factors[phase] * seconds for name, seconds in busy.items()}
                for phase, busy in self.busy.items()
            },
        )

    def to_json(self) -> dict[str, Any]:
        """Return the prediction as JSON values, without busy seconds."""
        return {
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
            "tokens_per_s": self.tokens_per_s,
            "peak_bytes": dict(self.peak_bytes),
        }


def predict(
    costs: CostModel,
    plan: MemoryPlan,
    blocks: Sequence[tuple[Block, int]],
    on_span: OnSpan | None = None,
) -> Prediction:
    """Return the cost of running `blocks` with the buffers of `plan`.

    costs: of the whole model, whose head the plan may cut.
    blocks: pairs of a block and the number of times that it runs.
    on_span: is called for each operation of the first block.
    """
    costs = costs.with_head_rows(plan.head_rows)
    spent: Spent = {phase: dict.fromkeys((ALL, *RESOURCES), 0.0) for phase in PHASES}
    for i, (block, count) in enumerate(blocks):
        for phase, found in _of_block(costs, plan, block, on_span if i == 0 else None).items():
            for name, seconds in found.items():
                spent[phase][name] += count * seconds
    prefill_s, decode_s = (spent[phase].pop(ALL) for phase in PHASES)
    peak = {tier: plan.bytes_on(tier) for tier in TIERS}
    new_tokens = costs.need.rows * costs.need.gen_len
    return Prediction(prefill_s, decode_s, new_tokens, peak, spent)


def walked_sweeps(gen_len: int) -> tuple[int, ...]:
    """Return the indices of the sweeps of a block that are simulated.

    All sweeps of a short generation are simulated. Of a long one these are sweeps 0 to 3, two in
    the middle and the last two.
    """
    if gen_len <= MAX_WALKED:
        return tuple(range(gen_len))
    middle = (gen_len + 1) // 2
    return (0, 1, 2, 3, middle, middle + 1, gen_len - 2, gen_len - 1)


def _of_block(costs: CostModel, plan: MemoryPlan, block: Block, on_span: OnSpan | None) -> Spent:
    """Return the seconds of one block of micro-batches.

    A deep model is simulated with n and with 2n transformer blocks, and extrapolated linearly.
    Each further n adds the difference, or the time that the busiest resource works for them if
    that is more.
    """
    depth = costs.spec.num_blocks
    cut = cut_blocks(depth, len(costs.layers.layers))
    if 2 * cut >= depth or on_span is not None:
        return _walk(costs, plan, block, on_span)
    few, more = (_walk(costs.cut(n), plan, block, None) for n in (cut, 2 * cut))
    for phase, full in more.items():
        added = {name: max(0.0, seconds - few[phase][name]) for name, seconds in full.items()}
        added[ALL] = max(
            added[ALL],
            added["device_compute"] + added["host_compute"],
            *map(added.__getitem__, LANES),
        )
        more[phase] = {
            name: seconds + added[name] * (depth / cut - 2) for name, seconds in full.items()
        }
    return more


def cut_blocks(depth: int, layers: int) -> int:
    """Return the number of transformer blocks to simulate for a model of `depth` blocks.

    layers: the number of layers of the whole model. The result is even, since every other
    transformer block may have a window.
    """
    return max(MIN_BLOCKS, min(CUT_BLOCKS, CUT_LAYERS * depth // layers) // 2 * 2)


def _walk(costs: CostModel, plan: MemoryPlan, block: Block, on_span: OnSpan | None) -> Spent:
    """Simulate some sweeps of a block and return the seconds of all of them.

    The sweeps that are not simulated are interpolated between those that are.
    """
    gen_len = costs.need.gen_len
    walked = walked_sweeps(gen_len)
    prefill = costs.with_contention(block, 0)
    decode = costs.with_contention(block, gen_len // 2 or 1)
    result = simulate(prefill, decode, plan, block, walked, on_span)
    ends = ({ALL: end, **busy} for end, busy in zip(result.ends, result.busy_at_ends, strict=True))
    sums = [dict.fromkeys((ALL, *RESOURCES), 0.0), *ends]
    sweeps = [{name: now[name] - past[name] for name in now} for past, now in pairwise(sums)]
    decode_s = {
        name: _sum_of_sweeps(walked[1:], [sweep[name] for sweep in sweeps[1:]]) for name in sums[0]
    }
    spent = {"prefill": sweeps[0], "decode": decode_s}
    spent["decode" if gen_len > 1 else "prefill"][ALL] += result.settle_s
    return spent


def _sum_of_sweeps(walked: Sequence[int], values: Sequence[float]) -> float:
    """Return the sum over decode sweeps 1, 2, ... up to the last of `walked`.

    walked: indices of the decode sweeps that were simulated.
    values: the value of each of them.

    The first sweep counts as it is. The other simulated sweeps are pairs of neighbours. The sweeps
    between two pairs are interpolated between the means of these pairs, since a sweep may have
    loaded for the next one.
    """
    if not walked or walked[-1] == len(walked):
        return sum(values)
    total = values[0]
    pairs = [
        ((walked[i] + walked[i + 1]) / 2, (values[i] + values[i + 1]) / 2)
        for i in range(1, len(walked), 2)
    ]
    for sweep in range(2, walked[-1] + 1):
        (a, low), (b, high) = next(
            (p for p in pairwise(pairs) if sweep <= p[1][0]), (pairs[-2], pairs[-1])
        )
        total += low + (high - low) * (sweep - a) / (b - a)
    return total


# ---- the simulation


def simulate(
    prefill: CostModel,
    decode: CostModel,
    plan: MemoryPlan,
    block: Sequence[MicroBatchShape],
    sweeps: Sequence[int],
    on_span: OnSpan | None = None,
) -> Simulation:
    """Simulate the given sweeps of a block and return the times at which they end.

    prefill, decode: the costs of prefill sweeps and those of decode sweeps.
    sweeps: rising indices of sweeps. The first is the prefill sweep, 0. Indices may be left out, so
        that a few sweeps stand for a long generation. Units then have the KV entries of the sweeps
        that are simulated.
    """
    sim = Simulation(prefill, decode, plan, block, sweeps, on_span)
    layers = prefill.layers.layers
    overlap = prefill.policy.overlap
    ahead = len(layers) if overlap else 0
    # One more sweep: the engine loads ahead for later sweeps and for the next block.
    ring = sim.ring("weight ring")
    waits = prefill.memory.waits_for_router
    weights = WeightStream(sim, ring, layers, len(sweeps) + 1, ahead, waits)
    sim.begin_walk(
        weights,
        layers,
        sim.cache,
        sim.hidden,
        sim.ring,
        plan.depth,
        overlap,
        len(sweeps),
        len(block),
    )
    sim.walk()
    return sim


class _Event(Waitable):
    """The end of an operation at `time`, in seconds. Waiting for it sets the clock."""

    __slots__ = ("_sim", "time")

    def __init__(self, sim: Simulation, time: float) -> None:
        self._sim = sim
        self.time = time

    def wait(self) -> None:
        if self.time > self._sim.now:
            self._sim.now = self.time

    @property
    def is_done(self) -> bool:
        return self.time <= self._sim.now


class Simulation(Walk):
    """A walk on a simulated clock, and the weight units of it.

    Nothing has memory: only sizes and seconds count. All times are in seconds.

    ends: when each simulated sweep ended.
    busy_at_ends: busy seconds of each resource from the start to the end of each simulated sweep.
    now: the time of the thread that issues compute.
    device: when the device has done all that was issued.
    _computed: start and end of the device's newest operation.
    _chosen: by micro-batch, when the tokens of its last sweep are chosen. The thread waits for them
        before it feeds them.
    free: by lane, when its queue ends.
    _busy: by resource, the seconds that it has worked.
    """

    def __init__(
        self,
        prefill: CostModel,
        decode: CostModel,
        plan: MemoryPlan,
        block: Sequence[MicroBatchShape],
        sweeps: Sequence[int],
        on_span: OnSpan | None,
    ) -> None:
        self.prefill_costs = prefill
        self.decode_costs = decode
        self.costs_now = prefill
        self._plan = plan
        self._on_span = on_span
        self._is_asynchronous = prefill.machine.profile.device_is_asynchronous
        self._sweeps = len(sweeps)
        self.now = self.device = 0.0
        self._opened = 0, 0
        self._computed = (0.0, 0.0)
        self._chosen = [0.0] * len(block)
        self.free = dict.fromkeys(LANES, 0.0)
        self._busy = dict.fromkeys(RESOURCES, 0.0)
        self.ends: list[float] = []
        self.busy_at_ends: list[dict[str, float]] = []
        layers = prefill.layers.layers
        self._layers = layers
        self._last_layer = len(layers) - 1
        made = {
            kind: [prefill.steps_of(kind, block, sweep) for sweep in (0, 1)]
            for kind in {x.kind for x in layers}
        }
        # By layer, then by phase (0 prefill, 1 decode): the steps as CostModel.steps_of returns
        # them.
        self._steps = [made[layer.kind] for layer in layers]
        # By (index into `sweeps`, layer, micro-batch).
        costs = {
            (i, layer, k): (decode if i else prefill).step(layer, batch, sweep, tokens)
            for i, sweep in enumerate(sweeps)
            for layer, steps in enumerate(self._steps)
            for k, (batch, tokens) in steps[i > 0].items()
        }
        self._costs = costs
        self._tokens = [sum(tokens_of(batch, sweep) for batch in block) for sweep in (0, 1)]
        self.tokens_now = self._tokens[0]
        attention = {x.block: i for i, x in enumerate(layers) if x.kind in ATTENTION_KINDS}
        units = {
            (x, k): kv_ring_bytes(prefill, x, batch)
            for x in attention
            for k, batch in enumerate(block)
        }
        row = sum(prefill.memory.hidden_row_bytes) if prefill.memory.hidden_is_streamed else 0
        hidden = [[tokens_of(batch, sweep) * row for batch in block] for sweep in (0, 1)]
        self.cache = _Store(
            self,
            "cache",
            1,
            lambda key: units[key[1:]],
            lambda key: key[0],
            lambda key: costs[key[0], attention[key[1]], key[2]],
        )
        self.hidden = _Store(
            self,
            "hidden",
            2,
            lambda key: hidden[key[0] > 0][key[2]],
            lambda key: key[0] * len(layers) + key[1],
            costs.__getitem__,
        )
        self._unit_bytes = [weight_ring_bytes(prefill, unit) for unit in prefill.layers.units]
        self._coded = {layer.unit for layer in layers if prefill.decodes_in_products(layer)}
        self.decodes = prefill.memory.form.decoded_at == "load"

    @property
    def settle_s(self) -> float:
        """Seconds that the last stores take after the last sweep."""
        return max(0.0, max(self.free["disk_write"], self.free["d2h"]) - self.ends[-1])

    def ring(self, name: str) -> Ring | None:
        """Return a ring of the size that the memory plan gives; None if that is 0 bytes."""
        nbytes = self._plan.size(name)
        return Ring(nbytes) if nbytes else None

    def queue(
        self, name: str, costs: Iterable[Transfer], after: Iterable[Waitable]
    ) -> list[Waitable]:
        """Queue operations at the ends of their lanes' queues and return their events.

        after: the events that all of these operations wait for.
        """
        free = self.free
        busy = self._busy
        events = list[Waitable]()
        ready = self.now
        for event in after:
            ready = max(ready, cast(_Event, event).time)
        for cost in costs:
            lane = cost.lane
            link = cost.link
            start = max(ready, free[lane])
            free[lane] = end = start + cost.seconds
            busy[lane] += cost.seconds
            if link:  # another lane's copies over the same link wait meanwhile
                busy[link] += cost.link_s
                free[link] = max(free[link], start) + cost.link_s
            self._record(lane, name, start, end)
            events.append(_Event(self, end))
        return events

    def _record(self, lane: str, name: str, start: float, end: float) -> None:
        if self._on_span is not None and end > start:
            self._on_span(lane, name, start, end)

    def span(self, lane: str, name: str) -> AbstractContextManager[None]:
        """Return a context that records the time waited within it.

        If the lane is "compute", it records the newest computation of the device instead.
        """
        return _NO_SPAN if self._on_span is None else self._span(lane, name)

    @contextmanager
    def _span(self, lane: str, name: str) -> Iterator[None]:
        start = self.now
        yield
        self._record(lane, name, *(self._computed if lane == "compute" else (start, self.now)))

    def fence(self) -> Waitable:
        """Return the event at which the device has done all that was issued."""
        return _Event(self, self.device)

    def begin_step(self, step: Step) -> str | None:
        """Begin a step and return its phase; None if an earlier micro-batch's step computes it."""
        self._opened = layer, phase = step.layer, int(step.sweep > 0)
        self.costs_now = self.decode_costs if phase else self.prefill_costs
        self.tokens_now = self._tokens[phase]
        if step.layer == 0:
            self.now = max(self.now, self._chosen[step.micro_batch])
        if step.micro_batch not in self._steps[layer][phase]:  # computed with an earlier one
            return None
        return "decode" if step.sweep else "prefill"

    def open_cache(self, key: UnitKey, region: Region | None) -> None:
        """Wait for the last users of a region, which may still use it if no load fills it."""
        if region is not None:
            wait_all(region.after)

    open_hidden = open_cache

    def close_cache(self, key: UnitKey, region: Region | None) -> list[Waitable]:
        """Queue the store of a KV unit."""
        return self.cache.close(key)

    def close_hidden(self, key: UnitKey, region: Region | None) -> list[Waitable]:
        """Queue the store of hidden states."""
        return self.hidden.close(key)

    def nbytes(self, unit: int) -> int:
        """Return the bytes of a weight unit in its ring."""
        return self._unit_bytes[unit]

    def load(self, unit: int, region: Region) -> list[Done]:
        """Queue the load of a weight unit and return its events."""
        cost = self.costs_now.weight_load(unit, self.tokens_now)
        return cast(list[Done], self.queue("load_weight", cost, region.after))

    def open_unit(self, unit: int, region: Region | None) -> Mapping[str, RowParts]:
        """Return no tensors."""
        return {}

    def decode_unit(self, unit: int, region: Region | None) -> tuple[Mapping[str, RowParts], bool]:
        """Advance the clock by decoding a weight unit for the step that has opened it."""
        layer, phase = self._opened
        start = max(self.now, self.device)
        cost = self.costs_now.decoding(layer, self._steps[layer][phase].values(), phase)
        self.device = start + cost.device_s
        self._busy["device_compute"] += cost.device_s
        self.now = self.now + cost.issue_s if self._is_asynchronous else self.device
        self._computed = (start, self.device)
        return {}, unit in self._coded

    def compute(self, step: Step) -> None:
        """Advance the clock by the computation of a step."""
        cost = self._costs[step.sweep, step.layer, step.micro_batch]
        busy = self._busy
        busy["device_compute"] += cost.device_s
        busy["host_compute"] += cost.host_s
        if self._is_asynchronous:
            start = max(self.now, self.device)
            self.device = start + cost.device_s
            self.now += cost.issue_s
            if cost.host_s:  # the host needs the queries, and its result is waited for
                self.now = max(self.now, self.device) + cost.host_s
                self.device = self.now
        else:
            start = self.now
            self.now = self.device = start + cost.device_s + cost.host_s + cost.issue_s
            busy["device_compute"] += cost.issue_s
        self._computed = (start, self.device)
        if step.layer == self._last_layer:
            self._chosen[step.micro_batch] = self.device

    def end_layer(self, step: Step) -> bool:
        """End a layer of a sweep. Return whether the walk is over."""
        layer = self._layers[step.layer]
        if (
            self.costs_now.memory.waits_for_router
            and layer.kind == "attention"
            and self.costs_now.spec.experts is not None
        ):
            self.weights.choose(layer.block, range(self.costs_now.spec.experts.count))
        if step.layer < self._last_layer:
            return False
        is_over = len(self.ends) == self._sweeps - 1
        # The engine waits for the chosen tokens, which tell whether any sequence goes on.
        self.now = max(self.now, self._chosen[-1 if is_over else 0])
        self.ends.append(self.now)
        self.busy_at_ends.append(dict(self._busy))
        return is_over


class _Store:
    """KV units or hidden states without memory: only their sizes and seconds count.

    It stands for kvcache/store.CacheStore or engine/stores.HiddenStore.

    first: key[first:] names the unit of a key (sweep, layer, micro-batch).
    nbytes: returns the ring bytes of the unit of a key.
    use: returns how often the unit was used before this key.
    cost: returns the cost of the step that uses the unit.
    """

    def __init__(
        self,
        sim: Simulation,
        name: str,
        first: int,
        nbytes: Callable[[UnitKey], int],
        use: Callable[[UnitKey], int],
        cost: Callable[[UnitKey], StepCost],
    ) -> None:
        self.nbytes = nbytes
        self._sim = sim
        self._name = name
        self._first = first
        self._use = use
        self._cost = cost
        self._uses: Counter[tuple[int, ...]] = Counter()
        self._stores: dict[tuple[int, ...], list[Waitable]] = {}

    def is_needed(self, key: UnitKey) -> bool:
        """Return True: a simulated unit is always needed."""
        return True

    def is_ready(self, key: UnitKey) -> bool:
        """Return whether all earlier uses of the unit have ended."""
        return self._uses[key[self._first :]] == self._use(key)

    def load(self, key: UnitKey, region: Region) -> list[Done]:
        """Queue the load of a unit, after its last store, and return its events."""
        cost = self._cost(key)
        moved = cost.kv_load if self._first == 1 else cost.hidden_load
        after = [*region.after, *self._stores.get(key[self._first :], ())]
        return cast(list[Done], self._sim.queue(f"load_{self._name}", moved, after))

    def close(self, key: UnitKey) -> list[Waitable]:
        """Queue the store of a unit after the device is done. Return the fence and the stores."""
        unit = key[self._first :]
        cost = self._cost(key)
        moved = cost.kv_store if self._first == 1 else cost.hidden_store
        self._uses[unit] += 1
        self._stores[unit] = self._sim.queue(
            f"store_{self._name}", moved, [done := self._sim.fence()]
        )
        return [done, *self._stores[unit]]

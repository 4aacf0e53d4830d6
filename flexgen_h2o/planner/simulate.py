"""A discrete-event simulation of one block: the engine's own walk (engine/loop.py) on a simulated clock.

The rings have the sizes of the memory plan. A load is an event at the end of its lane's queue, and waiting sets the
clock. Each lane serves its queue in order and whatever an operation waits for was queued before it, so the time of an
event is known when it is queued.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

from flexgen_h2o.engine.loop import ATTENTION_KINDS, BaseWeightStream, Step, UnitKey, Walk, weight_sequence
from flexgen_h2o.engine.memory_plan import MemoryPlan
from flexgen_h2o.engine.workload import Batch
from flexgen_h2o.planner.costs import LANES, RESOURCES, Costs, StepCost, TransferCost
from flexgen_h2o.planner.work import hidden_is_brought, kv_ring_bytes, tokens_of, weight_ring_bytes
from flexgen_h2o.tiers.stream import Done, Region, Ring, Waitable, wait_all

OnSpan = Callable[[str, str, float, float], None]  # lane, name, start and end in seconds
_NO_SPAN = nullcontext()


class _Clock:
    """now: of the thread that issues compute. device: when the device has done all that was issued.

    computed: start and end of what the device was given last.
    """

    def __init__(self, on_span: OnSpan | None, is_asynchronous: bool) -> None:
        self.now = self.device = 0.0
        self.computed = (0.0, 0.0)
        self._is_asynchronous = is_asynchronous
        self.free = dict.fromkeys(LANES, 0.0)
        self.busy = dict.fromkeys(RESOURCES, 0.0)
        self._on_span = on_span

    def record(self, lane: str, name: str, start: float, end: float) -> None:
        if self._on_span is not None and end > start:
            self._on_span(lane, name, start, end)

    def span(self, lane: str, name: str) -> AbstractContextManager[None]:
        """Of what is waited for within it, or computed."""
        return _NO_SPAN if self._on_span is None else self._span(lane, name)

    @contextmanager
    def _span(self, lane: str, name: str) -> Iterator[None]:
        start = self.now
        yield
        self.record(lane, name, *(self.computed if lane == "compute" else (start, self.now)))

    def queue(self, name: str, costs: Sequence[TransferCost], after: Iterable[Waitable]) -> list[Waitable]:
        """Operations at the ends of their lanes' queues."""
        ready = max((cast(_Event, event).time for event in after), default=0.0)
        return [self._queue(name, cost, ready) for cost in costs]

    def _queue(self, name: str, cost: TransferCost, ready: float) -> _Event:
        start = max(self.now, self.free[cost.lane], ready)
        end = start + cost.seconds
        self.free[cost.lane] = end
        self.busy[cost.lane] += cost.seconds
        if cost.link:  # another lane's copies over the same link wait meanwhile
            self.busy[cost.link] += cost.link_s
            self.free[cost.link] = max(self.free[cost.link], start) + cost.link_s
        self.record(cost.lane, name, start, end)
        return _Event(self, end)

    def fence(self) -> Waitable:
        return _Event(self, self.device)

    def decode(self, seconds: float) -> None:
        start = max(self.now, self.device)
        self.device = start + seconds
        self.busy["device_compute"] += seconds
        if not self._is_asynchronous:
            self.now = self.device
        self.computed = (start, self.device)

    def compute(self, cost: StepCost) -> None:
        self.busy["device_compute"] += cost.device_s
        self.busy["host_compute"] += cost.host_s
        if self._is_asynchronous:
            start = max(self.now, self.device)
            self.device = start + cost.device_s
            self.now += cost.issue_s
            if cost.host_s:  # it needs the queries, and its result is waited for
                self.now = max(self.now, self.device) + cost.host_s
                self.device = self.now
        else:
            start = self.now
            self.now = self.device = start + cost.device_s + cost.host_s + cost.issue_s
            self.busy["device_compute"] += cost.issue_s
        self.computed = (start, self.device)


class _Event:
    """Something is done at `time`; waiting for it sets the clock."""

    __slots__ = ("_clock", "time")

    def __init__(self, clock: _Clock, time: float) -> None:
        self._clock, self.time = clock, time

    def wait(self) -> None:
        self._clock.now = max(self._clock.now, self.time)

    @property
    def is_done(self) -> bool:
        return self.time <= self._clock.now


class _Space:
    """A buffer of which only the size counts."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def numel(self) -> int:
        return self._nbytes

    def __getitem__(self, part: slice) -> _Space:
        return self


class _WeightStream(BaseWeightStream[None]):
    """Weights of which only the seconds count; a source of its own."""

    def __init__(self, sim: _Simulation, sweeps: int) -> None:
        costs = sim.costs[0]
        at, layers = costs.at, costs.layers
        units = tuple(layer.unit for layer in layers.layers)
        self._sim, self._nbytes = sim, [weight_ring_bytes(at, unit) for unit in layers.units]
        ahead = len(units) if at.policy.overlap else 0
        # Other sweeps, and the next block, follow: the engine loads ahead for them.
        sequence = weight_sequence(sweeps + 1, units)
        super().__init__(self, sim.ring("weight ring"), sequence, ahead, at.form.decodes)

    def nbytes(self, key: int) -> int:
        return self._nbytes[key]

    def is_needed(self, key: int) -> bool:
        return True

    def is_ready(self, key: int) -> bool:
        return True

    def load(self, key: int, region: Region) -> list[Done]:
        costs = self._sim.costs_now.weight_load(key)
        return cast(list[Done], self._sim.clock.queue("load_weight", costs, region.after))

    def _open(self, unit: int, region: Region | None) -> None:
        pass

    def _decode(self, unit: int, region: Region | None) -> tuple[None, bool]:
        self._sim.clock.decode(self._sim.costs_now.dequantise_s(unit))
        return None, False


Costed = tuple[Sequence[TransferCost], Sequence[TransferCost]]  # loads and stores of a unit


class _Store:
    """KV units or hidden states of which only sizes and seconds count, as of kvcache/store.CacheStore and
    engine/stores.HiddenStore.

    Of a key, key[first:] names the unit; `nbytes` are its ring bytes, `costs` its loads and stores, `use` says how
    often the unit was used before.
    """

    def __init__(
        self, clock: _Clock, name: str, first: int, nbytes: Callable[[UnitKey], int],
        costs: Callable[[UnitKey], Costed], use: Callable[[UnitKey], int],
    ) -> None:  # fmt: skip
        self.nbytes = nbytes
        self._clock, self._name, self._first, self._costs, self._use = clock, name, first, costs, use
        self._uses: Counter[tuple[int, ...]] = Counter()
        self._stores: dict[tuple[int, ...], list[Waitable]] = {}

    def is_needed(self, key: UnitKey) -> bool:
        return True

    def is_ready(self, key: UnitKey) -> bool:
        return self._uses[key[self._first :]] == self._use(key)

    def load(self, key: UnitKey, region: Region) -> list[Done]:
        after = [*region.after, *self._stores.get(key[self._first :], ())]
        return cast(list[Done], self._clock.queue(f"load_{self._name}", self._costs(key)[0], after))

    def open(self, key: UnitKey, region: Region | None) -> None:
        """A region that no load fills may still be in the hands of its last users."""
        wait_all(region.after if region is not None else ())

    def close(self, key: UnitKey, region: Region | None, fence: Waitable) -> list[Waitable]:
        unit = key[self._first :]
        self._uses[unit] += 1
        self._stores[unit] = self._clock.queue(f"store_{self._name}", self._costs(key)[1], [fence])
        return [fence, *self._stores[unit]]


@dataclass(frozen=True)
class Simulated:
    """ends: when each simulated sweep ended, in seconds from the start; busy: seconds of each resource up to then.

    settle_s: that the last stores take after the last sweep.
    """

    ends: tuple[float, ...]
    busy: tuple[dict[str, float], ...]
    settle_s: float


def simulate(
    costs: tuple[Costs, Costs], plan: MemoryPlan, block: Sequence[Batch], sweeps: Sequence[int],
    on_span: OnSpan | None = None,
) -> Simulated:  # fmt: skip
    """Walk the given sweeps of a block (the first is the prefill sweep, 0) and say when each ends.

    costs: of prefill and of decode sweeps. `sweeps` may leave out some: units then have the columns of those that are
    walked, so that a few sweeps stand for a long generation.
    """
    sim = _Simulation(costs, plan, block, sweeps, on_span)
    layers, overlap = costs[0].layers.layers, costs[0].at.policy.overlap
    walk = Walk(sim, layers, plan.depth, overlap, len(sweeps), len(block))
    walk.run(sim, _WeightStream(sim, len(sweeps)))
    end, free = sim.ends[-1], sim.clock.free
    return Simulated(tuple(sim.ends), tuple(sim.busy), max(end, free["disk_write"], free["d2h"]) - end)


class _Simulation:
    """The tiers and the runner of a walk, on a clock."""

    def __init__(
        self, costs: tuple[Costs, Costs], plan: MemoryPlan, block: Sequence[Batch], sweeps: Sequence[int],
        on_span: OnSpan | None,
    ) -> None:  # fmt: skip
        self.costs, self.costs_now, self.block = costs, costs[0], tuple(block)
        self._plan, self._sweeps = plan, tuple(sweeps)
        self._costs: dict[UnitKey, StepCost] = {}
        self.last_layer = len(costs[0].layers.layers) - 1
        self.clock = _Clock(on_span, costs[0].profile.device_is_asynchronous)
        self.span, self.fence = self.clock.span, self.clock.fence
        self.cache, self.hidden = self._cache_store(), self._hidden_store()
        self.open_cache, self.close_cache = self.cache.open, self.cache.close
        self.open_hidden, self.close_hidden = self.hidden.open, self.hidden.close
        self.ends: list[float] = []
        self.busy: list[dict[str, float]] = []

    def _cache_store(self) -> _Store:
        at, layers = self.costs[0].at, self.costs[0].layers.layers
        layer_of = {layer.block: i for i, layer in enumerate(layers) if layer.kind in ATTENTION_KINDS}
        nbytes = {(x, k): kv_ring_bytes(at, x, batch) for x in layer_of for k, batch in enumerate(self.block)}

        def costs(key: UnitKey) -> Costed:
            cost = self.cost(key[0], layer_of[key[1]], key[2])
            return cost.kv_load, cost.kv_store

        return _Store(self.clock, "cache", 1, lambda key: nbytes[key[1:]], costs, lambda key: key[0])

    def _hidden_store(self) -> _Store:
        at, layers = self.costs[0].at, self.last_layer + 1
        row = at.spec.hidden_size * at.itemsize if hidden_is_brought(at) else 0

        def nbytes(key: UnitKey) -> int:
            return tokens_of(self.block[key[2]], key[0]) * row

        def costs(key: UnitKey) -> Costed:
            cost = self.cost(*key)
            return cost.hidden_load, cost.hidden_store

        return _Store(self.clock, "hidden", 2, nbytes, costs, lambda key: key[0] * layers + key[1])

    def cost(self, sweep: int, layer: int, k: int) -> StepCost:
        key = (sweep, layer, k)
        if key not in self._costs:
            self._costs[key] = self.costs[sweep > 0].step(layer, self.block[k], self._sweeps[sweep])
        return self._costs[key]

    def ring(self, name: str) -> Ring | None:
        nbytes = self._plan.size(name)
        return Ring(cast(Any, _Space(nbytes))) if nbytes else None

    def begin_step(self, step: Step) -> str:
        self.costs_now = self.costs[step.sweep > 0]
        return "decode" if step.sweep else "prefill"

    def compute(self, step: Step) -> None:
        self.clock.compute(self.cost(step.sweep, step.layer, step.micro_batch))
        if step.layer == self.last_layer:  # tokens are chosen on the host
            self.clock.now = max(self.clock.now, self.clock.device)

    def end_layer(self, step: Step) -> bool:
        if step.layer < self.last_layer:
            return False
        self.ends.append(self.clock.now)
        self.busy.append(dict(self.clock.busy))
        return len(self.ends) == len(self._sweeps)

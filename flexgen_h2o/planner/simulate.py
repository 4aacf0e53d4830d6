"""A discrete-event simulation of one block: the engine's zig-zag order, look-ahead and rings on a simulated clock.

What decides is the engine's own: `schedule.zigzag`, `tiers.stream.Stream` and `tiers.ring.Ring`, with the ring bytes of
the memory plan. What is simulated is time: a load is an event at the end of its lane's queue, waiting sets the clock.
Since each lane serves its queue in order and everything that an operation waits for was queued before it, the time of
an event is known when it is queued.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from flexgen_h2o.core.schedule import Step, weight_sequence, zigzag
from flexgen_h2o.engine.memory_plan import MemoryPlan
from flexgen_h2o.engine.workload import Batch
from flexgen_h2o.planner.costs import ATTENTION_KINDS, LANES, RESOURCES, Costs, StepCost, TransferCost
from flexgen_h2o.planner.work import CostContext, hidden_is_brought, kv_ring_bytes, tokens_of, weight_ring_bytes
from flexgen_h2o.tiers.stream import Done, Region, Ring, Stream, Waitable

OnSpan = Callable[[str, str, float, float], None]  # lane, name, start and end in seconds


class _Clock:
    """now: of the thread that issues compute. device: when the device has done all that was issued."""

    def __init__(self, on_span: OnSpan | None) -> None:
        self.now = self.device = 0.0
        self.free = dict.fromkeys(LANES, 0.0)
        self.busy = dict.fromkeys(RESOURCES, 0.0)
        self._on_span = on_span

    def span(self, lane: str, name: str, start: float, end: float) -> None:
        if self._on_span is not None and end > start:
            self._on_span(lane, name, start, end)

    def queue(self, name: str, lasting: TransferCost, after: Iterable[Waitable]) -> _Event:
        """An operation at the end of its lane's queue."""
        start = max(self.now, self.free[lasting.lane], max((cast(_Event, e).time for e in after), default=0.0))
        end = start + lasting.seconds
        self.free[lasting.lane] = end
        self.busy[lasting.lane] += lasting.seconds
        if lasting.link:  # another lane's copies over the same link wait meanwhile
            self.busy[lasting.link] += lasting.link_s
            self.free[lasting.link] = max(self.free[lasting.link], start) + lasting.link_s
        self.span(lasting.lane, name, start, end)
        return _Event(self, end)


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


class _WeightSource:
    def __init__(self, clock: _Clock, costs: Callable[[], Costs], nbytes: Sequence[int]) -> None:
        self._clock, self._costs, self._nbytes = clock, costs, nbytes

    def nbytes(self, key: int) -> int:
        return self._nbytes[key]

    def is_needed(self, key: int) -> bool:
        return True

    def is_ready(self, key: int) -> bool:
        return True

    def load(self, key: int, region: Region) -> list[Done]:
        loads = self._costs().weight_load(key)
        return cast(list[Done], [self._clock.queue("load_weight", lasting, region.after) for lasting in loads])


UnitKey = tuple[int, int, int]  # sweep, layer, micro-batch


@dataclass
class _UnitState:
    """What the engine knows of a KV or hidden unit: its last user, and the stores that are under way."""

    in_use: bool = False
    closed: tuple[int, int] | None = None
    stores: list[Waitable] = field(default_factory=list)


class _CacheSource:
    """KV units, as kvcache/store.CacheStore."""

    def __init__(self, sim: _Simulation) -> None:
        self._sim = sim
        self.units: dict[tuple[int, int], _UnitState] = {}

    def unit(self, key: UnitKey) -> _UnitState:
        return self.units.setdefault(key[1:], _UnitState())

    def nbytes(self, key: UnitKey) -> int:
        return self._sim.kv_bytes[key[1]][key[2]]

    def is_needed(self, key: UnitKey) -> bool:
        return True

    def is_ready(self, key: UnitKey) -> bool:
        unit = self.unit(key)
        return not unit.in_use and (unit.closed is not None or key[0] == 0)

    def load(self, key: UnitKey, region: Region) -> list[Done]:
        unit = self.unit(key)
        unit.in_use = True
        after = [*region.after, *unit.stores]
        loads = self._sim.cost(*key).kv_load
        return cast(list[Done], [self._sim.clock.queue("load_cache", lasting, after) for lasting in loads])


class _HiddenSource:
    """Hidden states, as hidden.HiddenStore. One unit a micro-batch."""

    def __init__(self, sim: _Simulation) -> None:
        self._sim = sim
        self.units = [_UnitState() for _ in sim.block]

    def nbytes(self, key: UnitKey) -> int:
        return self._sim.hidden_bytes(key)

    def is_needed(self, key: UnitKey) -> bool:
        return True

    def is_ready(self, key: UnitKey) -> bool:
        sweep, layer, k = key
        last = len(self._sim.costs[0].layers.layers) - 1
        before = (sweep, layer - 1) if layer else ((sweep - 1, last) if sweep else None)
        return self.units[k].closed == before

    def load(self, key: UnitKey, region: Region) -> list[Done]:
        after = [*region.after, *self.units[key[2]].stores]
        loads = self._sim.cost(*key).hidden_load
        return cast(list[Done], [self._sim.clock.queue("load_hidden", lasting, after) for lasting in loads])


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
    return _Simulation(costs, plan, block, sweeps, on_span).run()


class _Simulation:
    """Mirrors executor.Executor step by step."""

    def __init__(
        self, costs: tuple[Costs, Costs], plan: MemoryPlan, block: Sequence[Batch], sweeps: Sequence[int],
        on_span: OnSpan | None,
    ) -> None:  # fmt: skip
        self.costs, self.block, self._sweeps = costs, tuple(block), tuple(sweeps)
        at: CostContext = costs[0].at
        self._at, self._layers, self._overlap = at, costs[0].layers, at.policy.overlap
        self._asynchronous = costs[0].profile.device_is_asynchronous
        self.clock = _Clock(on_span)
        self._sweep = 0
        self.kv_bytes = [
            [kv_ring_bytes(at, layer.block, b) if layer.kind in ATTENTION_KINDS else 0 for b in block]
            for layer in self._layers.layers
        ]
        self._hidden_row = at.spec.hidden_size * at.itemsize if hidden_is_brought(at) else 0
        ahead = (len(self._layers.layers), plan.depth.cache, plan.depth.hidden) if self._overlap else (0, 0, 0)
        units = tuple(layer.unit for layer in self._layers.layers)
        # Other sweeps, and the next block, follow: the engine loads ahead for them.
        weights = _WeightSource(self.clock, self._now, [weight_ring_bytes(at, u) for u in self._layers.units])
        self._weights: Stream[int] = Stream(
            _ring(plan, "weight ring"), weight_sequence(len(sweeps) + 1, units), weights, ahead[0]
        )
        self._cache_source, self._hidden_source = _CacheSource(self), _HiddenSource(self)
        keys = [(s.sweep, s.layer, s.micro_batch) for s in zigzag(len(sweeps), len(units), len(block))]
        self._cache: Stream[UnitKey] = Stream(
            _ring(plan, "cache ring"), (k for k in keys if self.kv_bytes[k[1]][k[2]]), self._cache_source, ahead[1]
        )
        self._hidden: Stream[UnitKey] = Stream(_ring(plan, "hidden ring"), iter(keys), self._hidden_source, ahead[2])
        self._open: tuple[int, Region | None] | None = None

    def _now(self) -> Costs:
        return self.costs[self._sweep > 0]

    def cost(self, sweep: int, layer: int, k: int) -> StepCost:
        return self.costs[sweep > 0].step(layer, self.block[k], self._sweeps[sweep])

    def hidden_bytes(self, key: UnitKey) -> int:
        return tokens_of(self.block[key[2]], key[0]) * self._hidden_row

    def run(self) -> Simulated:
        ends, busy = [], []
        for step in zigzag(len(self._sweeps), len(self._layers.layers), len(self.block)):
            self._sweep = step.sweep
            self._run_step(step)
            if step.layer < len(self._layers.layers) - 1:
                continue
            self.clock.now = max(self.clock.now, self.clock.device)  # tokens are chosen on the host
            if step.micro_batch == len(self.block) - 1:
                ends.append(self.clock.now)
                busy.append(dict(self.clock.busy))
        stored = max(ends[-1], self.clock.free["disk_write"], self.clock.free["d2h"])
        return Simulated(tuple(ends), tuple(busy), stored - ends[-1])

    def _run_step(self, step: Step) -> None:
        key = (step.sweep, step.layer, step.micro_batch)
        cost, phase = self.cost(*key), "decode" if step.sweep else "prefill"
        for stream in (self._weights, self._cache, self._hidden):
            stream.prefetch()
        with self._waiting("load_weight"):
            fresh = self._open_weights(self._layers.layers[step.layer].unit)
        if fresh:
            self._unpack(self._layers.layers[step.layer].unit)
        self._weights.prefetch()
        with self._waiting(f"load_hidden {phase}"):
            hidden = self._hidden.take(key) if self._hidden_row else None
            _wait_for_space(hidden, loaded=bool(cost.hidden_load))
        has_cache = self._layers.layers[step.layer].kind in ATTENTION_KINDS
        cache = None
        if has_cache:
            with self._waiting(f"load_cache {phase}"):
                cache = self._cache.take(key) if self.kv_bytes[key[1]][key[2]] else None
                _wait_for_space(cache, loaded=bool(cost.kv_load))
                self._cache_source.unit(key).in_use = True
        fence = self._compute(cost, f"compute_layer {phase}")
        if has_cache:
            self._close_cache(key, cache, cost, fence)
        self._close_hidden(key, hidden, cost, fence)

    def _open_weights(self, unit: int) -> bool:
        """Take the unit's weights; False where it is open already."""
        if self._open is not None and self._open[0] == unit:
            return False
        if self._open is not None:
            self._weights.give_back(self._open[1], [_Event(self.clock, self.clock.device)])
        self._open = (unit, self._weights.take(unit))
        return True

    def _unpack(self, unit: int) -> None:
        """Packed weights are unpacked once they have come, and their region is free again."""
        if not self._at.form.decodes:
            return
        clock, seconds = self.clock, self._now().dequantise_s(unit)
        start = max(clock.now, clock.device)
        clock.device = start + seconds
        clock.busy["device_compute"] += seconds
        if not self._asynchronous:
            clock.now = clock.device
        clock.span("compute", "unpack_weights", start, clock.device)
        assert self._open is not None
        self._weights.give_back(self._open[1], [_Event(clock, clock.device)])
        self._open = (unit, None)

    def _compute(self, cost: StepCost, name: str) -> _Event:
        clock, device_s = self.clock, cost.device_s
        clock.busy["device_compute"] += device_s
        clock.busy["host_compute"] += cost.host_s
        if self._asynchronous:
            start = max(clock.now, clock.device)
            clock.device = start + device_s
            clock.now += cost.issue_s
            if cost.host_s:  # it needs the queries, and its result is waited for
                clock.now = max(clock.now, clock.device) + cost.host_s
                clock.device = clock.now
        else:
            start = clock.now
            clock.now = clock.device = start + device_s + cost.host_s + cost.issue_s
            clock.busy["device_compute"] += cost.issue_s
        clock.span("compute", name, start, clock.device)
        return _Event(clock, clock.device)

    def _close_cache(self, key: UnitKey, region: Region | None, cost: StepCost, fence: _Event) -> None:
        unit = self._cache_source.unit(key)
        stores: list[Waitable] = [self.clock.queue("store_cache", lasting, [fence]) for lasting in cost.kv_store]
        unit.in_use, unit.closed, unit.stores = False, key[:2], stores
        self._cache.give_back(region, [fence, *stores])
        self._settle(stores, "store_cache")

    def _close_hidden(self, key: UnitKey, region: Region | None, cost: StepCost, fence: _Event) -> None:
        unit = self._hidden_source.units[key[2]]
        stores: list[Waitable] = [self.clock.queue("store_hidden", lasting, [fence]) for lasting in cost.hidden_store]
        unit.closed, unit.stores = key[:2], stores
        self._hidden.give_back(region, [fence, *stores])
        self._settle([fence, *stores], "store_hidden")

    def _settle(self, stores: Sequence[Waitable], name: str) -> None:
        """Without overlap every transfer ends before the next step begins."""
        if not self._overlap:
            with self._waiting(name):
                for event in stores:
                    event.wait()

    def _waiting(self, name: str) -> _Wait:
        return _Wait(self.clock, name)


class _Wait:
    """A span of the `wait` lane."""

    def __init__(self, clock: _Clock, name: str) -> None:
        self._clock, self._name = clock, name

    def __enter__(self) -> None:
        self._start = self._clock.now

    def __exit__(self, *error: object) -> None:
        self._clock.span("wait", self._name, self._start, self._clock.now)


def _wait_for_space(region: Region | None, loaded: bool) -> None:
    """A region that no load fills may still be in the hands of its last users."""
    if region is not None and not loaded:
        for event in region.after:
            event.wait()


def _ring(plan: MemoryPlan, name: str) -> Ring | None:
    nbytes = plan.size(name)
    return Ring(cast(Any, _Space(nbytes))) if nbytes else None

"""The walk of a block through its layers: which loads start, and what is waited for, computed and stored after what.

Its order is FlexGen's zig-zag block schedule (Sheng et al. 2023, section 4.1): all micro-batches of a block go through
a layer before the next layer is touched, so each weight load serves the whole block.

The executor walks with real transfers and compute, the planner's simulator on a clock, so what is predicted is what
runs. No torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count, tee
from typing import Any, Generic, Protocol, TypeVar

from flexgen_h2o.core.model import Layer, LayerKind
from flexgen_h2o.engine.memory_plan import Depth
from flexgen_h2o.tiers.stream import Done, Region, Ring, Source, Stream, Waitable, streamed_keys, wait_all

ATTENTION_KINDS = ("attention", "block")
JOINED_KINDS: tuple[LayerKind, ...] = ("attention", "block", "mlp", "experts")  # several micro-batches as one
UnitKey = tuple[int, int, int]  # sweep; transformer block of KV, layer of hidden states; micro-batch
WeightKey = tuple[int, int]  # how often the unit has been named up to now, and the unit


@dataclass(frozen=True)
class Step:
    """One unit of compute: `sweep` 0 fills the KV cache of rows that enter with it, later sweeps decode.

    What a micro-batch's rows do in a sweep (prefill or decode) belongs to the rows, not to the order, so one
    sweep may mix both.
    """

    sweep: int
    layer: int
    micro_batch: int


def zigzag(
    num_sweeps: int | None, num_layers: int, num_micro_batches: int, together: int | None = None
) -> Iterator[Step]:
    """Steps of one block in compute order; every consumer (loads, compute, stores) walks the same order.

    num_sweeps: None where nobody knows how many there will be: for ever. together: micro-batches that share each weight
    load; all of them by default. Where a block has more (that of a pipeline), they go through all layers in groups of
    so many, one group after the other.
    """
    size = max(1, together or num_micro_batches)
    for sweep in _sweeps(num_sweeps):
        for first in range(0, num_micro_batches, size):
            for layer in range(num_layers):
                for micro_batch in range(first, min(first + size, num_micro_batches)):
                    yield Step(sweep, layer, micro_batch)


def joined(tokens: Sequence[int], most: int) -> dict[int, tuple[int, ...]]:
    """Neighbouring micro-batches that a layer computes together, by the first of them: its matrices are then brought
    from memory once for the rows of all, and products of more rows are faster.

    tokens: of each micro-batch in this sweep; those without any are left out. most: tokens together at most, or one
    micro-batch (BlockShape.most_joined); 0: each alone.
    """
    found: list[list[int]] = []
    room = 0
    for k, fed in enumerate(tokens):
        if fed > room or not most:
            found.append([])
            room = most
        if fed:
            found[-1].append(k)
            room -= fed
    return {run[0]: tuple(run) for run in found if run}


def weight_sequence(num_sweeps: int | None, unit_of_layer: tuple[int, ...]) -> Iterator[int]:
    """Weight units in the order they are needed, a unit that stays in place between two layers named once.

    With tied embeddings the head of a sweep and the embedding of the next share one load. num_sweeps: as of `zigzag`.
    """
    last = None
    for _ in _sweeps(num_sweeps):
        for unit in unit_of_layer:
            if unit != last:
                yield unit
                last = unit


def _sweeps(number: int | None) -> Iterable[int]:
    return count() if number is None else range(number)


Opened = TypeVar("Opened")


class WeightUnits(Protocol):
    """Where weight units come from. decodes: units are decoded once they are open."""

    @property
    def decodes(self) -> bool: ...

    def nbytes(self, unit: int) -> int:
        """Ring bytes of one load of a unit; 0 when all its rows are used where they live."""

    def load(self, unit: int, region: Region) -> list[Done]:
        """Start filling the region."""


class _Loads:
    """The source of a stream of weight units, whose keys are (n, unit): the n-th time that the sweeps name the unit.

    Groups of experts that their block's router has not chosen are not needed. waits: they are loaded once it has
    chosen; otherwise ahead of it.
    """

    def __init__(self, units: WeightUnits, layers: Sequence[Layer], waits: bool) -> None:
        self._units, self._waits = units, waits
        self._groups = {layer.unit: layer for layer in layers if layer.kind == "experts"}
        self.chosen: dict[int, tuple[int, frozenset[int]]] = {}  # by block: for which n, and which experts

    def nbytes(self, key: WeightKey) -> int:
        return self._units.nbytes(key[1])

    def load(self, key: WeightKey, region: Region) -> list[Done]:
        return self._units.load(key[1], region)

    def is_ready(self, key: WeightKey) -> bool:
        layer = self._groups.get(key[1]) if self._waits else None
        return layer is None or self._chosen_for(key[0], layer) is not None

    def is_needed(self, key: WeightKey) -> bool:
        layer = self._groups.get(key[1])
        chosen = None if layer is None else self._chosen_for(key[0], layer)
        return layer is None or chosen is None or not chosen.isdisjoint(layer.experts)

    def _chosen_for(self, number: int, layer: Layer) -> frozenset[int] | None:
        """The experts of the layer's block that are used this time; None where its router has not chosen yet."""
        found = self.chosen.get(layer.block)
        return found[1] if found is not None and found[0] == number else None


class BaseWeightStream(ABC, Generic[Opened]):
    """The open weight unit, and the loads ahead of it.

    sweeps: of `layers`; None for any number. ahead: loads besides the one in use. waits: groups of experts are loaded
    once their block's router has chosen, those that it has chosen; otherwise they are loaded ahead.
    """

    def __init__(
        self, units: WeightUnits, ring: Ring | None, layers: Sequence[Layer], sweeps: int | None, ahead: int,
        waits: bool = False,
    ) -> None:  # fmt: skip
        used = tuple(layer.unit for layer in layers)
        keys, self._to_open = tee(_numbered(weight_sequence(sweeps, used)))
        self._loads = _Loads(units, layers, waits)
        keys = streamed_keys(keys, ((1, unit) for unit in used), self._loads)
        self._stream: Stream[WeightKey] = Stream(ring, keys, self._loads, ahead)
        self._region: Region | None = None
        self.decodes = units.decodes
        self._number, self.unit = 0, -1
        self.opened: Opened

    @abstractmethod
    def _open(self, unit: int, region: Region | None) -> Opened:
        """What compute uses of a unit that is loaded: its streamed bytes are in the region."""

    @abstractmethod
    def _decode(self, unit: int, region: Region | None) -> tuple[Opened, bool]:
        """The same, decoded; and whether compute still uses the region."""

    def choose(self, block: int, experts: Iterable[int]) -> None:
        """The router of the block, whose attention unit is open, has chosen these for all micro-batches."""
        self._loads.chosen[block] = self._number, frozenset(experts)

    def prefetch(self) -> None:
        """Start every load that may start now."""
        self._stream.prefetch()

    def open(self, unit: int, fence: Callable[[], Waitable]) -> Opened:
        """Wait for `unit` and open it. Another unit that is open is closed: its last reader is done with the fence.

        fence: makes an event that is done when what was computed up to now is; called where somebody waits for it.
        """
        if unit != self.unit:
            if self._region is not None:
                self._stream.give_back(self._region, [fence()])
            key = next(key for key in self._to_open if key[1] == unit)
            self._region = self._stream.take(key)
            (self._number, self.unit), self.opened = key, self._open(unit, self._region)
        return self.opened

    def decode(self, fence: Callable[[], Waitable]) -> Opened:
        """Decode the unit that was just opened; its region is free from then on, unless compute still uses it. fence:
        as of `open`."""
        if self.decodes and self.unit >= 0:
            self.opened, uses_region = self._decode(self.unit, self._region)
            if not uses_region and self._region is not None:
                self._stream.give_back(self._region, [fence()])
                self._region = None
        return self.opened

    def drain(self) -> None:
        """Wait for loads under way, so that nothing writes into the ring any more."""
        self._stream.drain()


def _numbered(sequence: Iterable[int]) -> Iterator[WeightKey]:
    counts: Counter[int] = Counter()
    for unit in sequence:
        counts[unit] += 1
        yield counts[unit], unit


class Runner(Protocol):
    """What a walk drives."""

    def span(self, lane: str, name: str) -> AbstractContextManager[object]:
        """Record what is done within it in the timeline."""

    def fence(self) -> Waitable:
        """Done when all compute issued so far is."""

    def begin_step(self, step: Step) -> str | None:
        """The phase of the step's rows (prefill, decode or mixed); None where the layer has nothing to do for the
        micro-batch: it has no rows, its tokens chose no expert of the group, or an earlier step has computed them
        (`joined`). Each micro-batch has a step of attention: KV units come one after the other."""

    def open_hidden(self, key: UnitKey, region: Region | None) -> None:
        """Hidden states are loaded, into the region or where they live."""

    def open_cache(self, key: UnitKey, region: Region | None) -> None:
        """The same of a KV unit."""

    def compute(self, step: Step) -> None: ...

    def close_cache(self, key: UnitKey, region: Region | None, fence: Callable[[], Waitable]) -> list[Waitable]:
        """Start storing what has changed; returns what the region's next writer waits for. fence: makes one, where
        there is a next writer."""

    def close_hidden(self, key: UnitKey, region: Region | None, fence: Callable[[], Waitable]) -> list[Waitable]:
        """The same of hidden states."""

    def end_layer(self, step: Step) -> bool:
        """All micro-batches have been through a layer; True ends the block."""


class Tiers(Protocol):
    """Where KV units and hidden states come from, and the buffers that they come into."""

    @property
    def cache(self) -> Source[UnitKey]: ...

    @property
    def hidden(self) -> Source[UnitKey]: ...

    def ring(self, name: str) -> Ring | None:
        """The buffer of that name; None where nothing comes into it."""


class Walk:
    """The steps of a block, and the KV units and hidden states that are loaded ahead of them.

    sweeps: for how many there is something to load; None for any number. count: micro-batches; together: those that
    share each weight load (zigzag). A walk holds no `Runner`: the engine's memory would be held in a
    circle of references.
    """

    def __init__(
        self, tiers: Tiers, layers: Sequence[Layer], depth: Depth, overlap: bool, sweeps: int | None, count: int,
        together: int | None = None,
    ) -> None:  # fmt: skip
        self._layers, self._overlap, self._count = layers, overlap, count
        self._order = zigzag(None, len(layers), count, together)

        def steps(sweeps: int | None) -> Iterator[tuple[Step, Layer]]:
            return ((s, layers[s.layer]) for s in zigzag(sweeps, len(layers), count, together))

        def cache_keys(sweeps: int | None) -> Iterator[UnitKey]:
            return ((s.sweep, x.block, s.micro_batch) for s, x in steps(sweeps) if x.kind in ATTENTION_KINDS)

        def hidden_keys(sweeps: int | None) -> Iterator[UnitKey]:
            return ((s.sweep, s.layer, s.micro_batch) for s, _ in steps(sweeps))

        ahead = (depth.cache, depth.hidden) if overlap else (0, 0)
        keys = streamed_keys(cache_keys(sweeps), cache_keys(1), tiers.cache)
        self._cache: Stream[UnitKey] = Stream(tiers.ring("cache ring"), keys, tiers.cache, ahead[0])
        keys = streamed_keys(hidden_keys(sweeps), hidden_keys(1), tiers.hidden)
        self._hidden: Stream[UnitKey] = Stream(tiers.ring("hidden ring"), keys, tiers.hidden, ahead[1])

    def run(self, runner: Runner, weights: BaseWeightStream[Any], order: Iterable[Step] | None = None) -> None:
        """Run the block until the runner ends it; `order` may cut it short."""
        for step in order or self._order:
            phase = runner.begin_step(step)
            if phase is not None:
                self._run_step(step, phase, runner, weights)
            if step.micro_batch == self._count - 1 and runner.end_layer(step):
                break
        self._cache.drain()
        self._hidden.drain()

    def _run_step(self, step: Step, phase: str, runner: Runner, weights: BaseWeightStream[Any]) -> None:
        layer, span = self._layers[step.layer], runner.span
        for stream in (weights, self._cache, self._hidden):
            stream.prefetch()
        self._open_weights(layer.unit, runner, weights)
        hidden_key = (step.sweep, step.layer, step.micro_batch)
        with span("wait", f"load_hidden {phase}"):
            hidden = self._hidden.take(hidden_key)
            runner.open_hidden(hidden_key, hidden)
        if layer.kind in ATTENTION_KINDS:
            cache_key = (step.sweep, layer.block, step.micro_batch)
            with span("wait", f"load_cache {phase}"):
                cache = self._cache.take(cache_key)
                runner.open_cache(cache_key, cache)
        with span("compute", f"compute_layer {phase}"):
            runner.compute(step)
        if layer.kind in ATTENTION_KINDS:
            with span("wait", f"store_cache {phase}"):
                stores = runner.close_cache(cache_key, cache, runner.fence)
                self._give_back(self._cache, cache, stores, runner)
        with span("wait", f"store_hidden {phase}"):
            stores = runner.close_hidden(hidden_key, hidden, runner.fence)
            self._give_back(self._hidden, hidden, stores, runner)

    @staticmethod
    def _open_weights(unit: int, runner: Runner, weights: BaseWeightStream[Any]) -> None:
        is_fresh = unit != weights.unit
        with runner.span("wait", "load_weight"):
            if is_fresh:
                weights.open(unit, runner.fence)
        if is_fresh and weights.decodes:
            with runner.span("compute", "unpack_weights"):
                weights.decode(runner.fence)
        weights.prefetch()  # into the space of the unit that has just been closed

    def _give_back(
        self, stream: Stream[UnitKey], region: Region | None, stores: list[Waitable], runner: Runner
    ) -> None:  # fmt: skip
        """The next writer of the region waits for its stores; without overlap the next step does, or for compute where
        there are none."""
        stream.give_back(region, stores)
        if not self._overlap:
            wait_all(stores or [runner.fence()])

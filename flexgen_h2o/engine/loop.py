"""The walk of a block through its layers: the order of loads, waits, compute and stores.

The order is FlexGen's zig-zag block schedule (Sheng et al. 2023, section 4.1). All micro-batches of
a block go through a layer before the next layer is touched. So each weight load serves the whole
block.

A block of a run walks with real transfers and compute (`executor.BlockRun`). The planner's
simulation walks on a clock. So the planner predicts the same steps that run. This module imports no
torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count, tee
from typing import TYPE_CHECKING, Protocol

from flexgen_h2o.core.model import Layer, LayerKind
from flexgen_h2o.engine.memory_plan import Depth
from flexgen_h2o.tiers.stream import (
    Done,
    Region,
    Ring,
    Source,
    Stream,
    Waitable,
    streamed_keys,
    wait_all,
)

if TYPE_CHECKING:
    from flexgen_h2o.kernels.linear import RowParts

ATTENTION_KINDS = ("attention", "block")
# Layers that compute several micro-batches as one.
JOINED_KINDS: tuple[LayerKind, ...] = ("attention", "block", "mlp", "experts")
# (sweep, index, micro-batch). The index is a transformer block for KV, a layer for hidden states.
UnitKey = tuple[int, int, int]
WeightKey = tuple[int, int]  # (how often the schedule has named the unit so far, the unit)


@dataclass(frozen=True)
class Step:
    """One unit of compute: a layer of one micro-batch in one sweep.

    Prefill or decode is a property of the sequences, not of the order. So one sweep may mix both.
    """

    # Sweep 0 fills the KV cache of the first sequences. Later sweeps decode, and fill the cache of
    # sequences that join.
    sweep: int
    layer: int
    micro_batch: int


def zigzag(
    num_sweeps: int | None, num_layers: int, num_micro_batches: int, together: int | None = None
) -> Iterator[Step]:
    """Yield the steps of one block in compute order. Loads, compute and stores all walk this order.

    num_sweeps: None if the number is not known; then the steps never end.
    together: micro-batches that share each weight load; None: all of them. If a block has more (in
        a pipeline), the micro-batches go through all layers in groups of this size, one group after
        another.
    """
    size = max(1, together or num_micro_batches)
    for sweep in _sweeps(num_sweeps):
        for first in range(0, num_micro_batches, size):
            for layer in range(num_layers):
                for micro_batch in range(first, min(first + size, num_micro_batches)):
                    yield Step(sweep, layer, micro_batch)


def joined(tokens: Sequence[int], most: int) -> dict[int, tuple[int, ...]]:
    """Return the micro-batches that a layer computes together, by the first one of each run.

    A run consists of neighbours. The layer's matrices are then read from memory once for all
    sequences of a run. Larger matrix multiplications are also faster.

    tokens: the tokens of each micro-batch in this sweep. Micro-batches without tokens are left out.
    most: the most tokens of a run (BlockShape.most_joined). A single micro-batch may have more. 0:
        compute each micro-batch alone.
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
    """Yield weight units in the order in which they are needed.

    A unit that stays in place between two layers is named once. With tied embeddings the head of a
    sweep and the embedding of the next sweep share one load.

    num_sweeps: see `zigzag`.
    """
    last = None
    for _ in _sweeps(num_sweeps):
        for unit in unit_of_layer:
            if unit != last:
                yield unit
                last = unit


def _sweeps(number: int | None) -> Iterable[int]:
    return count() if number is None else range(number)


class WeightUnits(Protocol):
    """The source of weight units. `decodes`: units are decoded once they are open."""

    decodes: bool

    def nbytes(self, unit: int) -> int:
        """Return the ring bytes of one load of a unit; 0 if all its rows are used in place."""

    def load(self, unit: int, region: Region) -> list[Done]:
        """Start filling the region with the unit."""

    def open_unit(self, unit: int, region: Region | None) -> Mapping[str, RowParts]:
        """Return what compute uses of a loaded unit, by role.

        The unit's streamed bytes are in the region.
        """

    def decode_unit(self, unit: int, region: Region | None) -> tuple[Mapping[str, RowParts], bool]:
        """Return what is decoded of a loaded unit, and whether compute still uses the region."""


class _Loads:
    """The source of a stream of weight units with keys (n, unit).

    n counts how often the sweeps have named the unit. A group of experts is not needed if its
    block's router has chosen none of them.

    waits: groups of experts are loaded after the router has chosen; otherwise they are loaded
        before.
    """

    def __init__(self, units: WeightUnits, layers: Sequence[Layer], waits: bool) -> None:
        self._units = units
        self._waits = waits
        self._groups = {layer.unit: layer for layer in layers if layer.kind == "experts"}
        # By block: the n of the attention unit when the router chose, and the chosen experts.
        self.chosen: dict[int, tuple[int, frozenset[int]]] = {}

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
        """Return the experts that this load needs, or None if the router has not chosen yet."""
        found = self.chosen.get(layer.block)
        return found[1] if found is not None and found[0] == number else None


class WeightStream:
    """The open weight unit, and the loads ahead of it.

    sweeps: how often `layers` are walked; None for any number.
    ahead: the number of loads besides the one in use.
    waits: groups of experts are loaded once their block's router has chosen, and only chosen
        groups; otherwise they are loaded ahead.
    opened: the tensors of the open unit, by role.
    """

    def __init__(
        self,
        units: WeightUnits,
        ring: Ring | None,
        layers: Sequence[Layer],
        sweeps: int | None,
        ahead: int,
        waits: bool = False,
    ) -> None:
        used = tuple(layer.unit for layer in layers)
        keys, self._to_open = tee(_numbered(weight_sequence(sweeps, used)))
        self._units = units
        self._loads = _Loads(units, layers, waits)
        keys = streamed_keys(keys, ((1, unit) for unit in used), self._loads)
        self._stream: Stream[WeightKey] = Stream(ring, keys, self._loads, ahead)
        self._region: Region | None = None
        self.decodes = units.decodes
        self._number = 0
        self.unit = -1
        self.opened: Mapping[str, RowParts] = {}

    def choose(self, block: int, experts: Iterable[int]) -> None:
        """Record the experts that a block's router has chosen for all micro-batches.

        The attention unit of the block must be open.
        """
        self._loads.chosen[block] = self._number, frozenset(experts)

    def prefetch(self) -> None:
        """Start every load that may start now."""
        self._stream.prefetch()

    def open(self, unit: int, fence: Callable[[], Waitable]) -> Mapping[str, RowParts]:
        """Wait for `unit` and open it. Another open unit is closed.

        fence: returns an event that is done when all compute issued so far is done. The last reader
            of the closed unit is done with it. It is called only if somebody waits for it.
        """
        if unit != self.unit:
            if self._region is not None:
                self._stream.give_back(self._region, [fence()])
            key = next(key for key in self._to_open if key[1] == unit)
            self._region = self._stream.take(key)
            self.opened = self._units.open_unit(unit, self._region)
            self._number, self.unit = key
        return self.opened

    def decode(self, fence: Callable[[], Waitable]) -> None:
        """Decode the unit that was just opened.

        Its region is free afterwards unless compute still uses it.

        fence: see `open`.
        """
        if self.decodes and self.unit >= 0:
            decoded, uses_region = self._units.decode_unit(self.unit, self._region)
            self.opened = {**self.opened, **decoded}
            if not uses_region and self._region is not None:
                self._stream.give_back(self._region, [fence()])
                self._region = None

    def drain(self) -> None:
        """Wait for loads under way, so that nothing writes into the ring any more."""
        self._stream.drain()


def _numbered(sequence: Iterable[int]) -> Iterator[WeightKey]:
    counts: Counter[int] = Counter()
    for unit in sequence:
        counts[unit] += 1
        yield counts[unit], unit


class Walk(ABC):
    """The steps of a block, and the KV units and hidden states that are loaded ahead of them.

    A subclass computes the steps. It calls `begin_walk` once its KV units and hidden states are
    set up, and then `walk`.
    """

    def begin_walk(
        self,
        weights: WeightStream,
        layers: Sequence[Layer],
        cache: Source[UnitKey],
        hidden: Source[UnitKey],
        ring: Callable[[str], Ring | None],
        depth: Depth,
        overlap: bool,
        sweeps: int | None,
        count: int,
        together: int | None = None,
    ) -> None:
        """Set what is walked through.

        cache, hidden: the sources of KV units and hidden states.
        ring: returns the buffer of that name, or None if nothing is loaded into it.
        sweeps: the number of sweeps with something to load; None for any number.
        count: the number of micro-batches.
        together: micro-batches that share each weight load (`zigzag`).
        """
        self.weights = weights
        self._layers = layers
        self._overlap = overlap
        self._count = count
        self._order = zigzag(None, len(layers), count, together)

        def steps(sweeps: int | None) -> Iterator[tuple[Step, Layer]]:
            return ((s, layers[s.layer]) for s in zigzag(sweeps, len(layers), count, together))

        def cache_keys(sweeps: int | None) -> Iterator[UnitKey]:
            return (
                (s.sweep, x.block, s.micro_batch)
                for s, x in steps(sweeps)
                if x.kind in ATTENTION_KINDS
            )

        def hidden_keys(sweeps: int | None) -> Iterator[UnitKey]:
            return ((s.sweep, s.layer, s.micro_batch) for s, _ in steps(sweeps))

        keys = streamed_keys(cache_keys(sweeps), cache_keys(1), cache)
        ahead = depth.cache if overlap else 0
        self._cache_stream: Stream[UnitKey] = Stream(ring("cache ring"), keys, cache, ahead)
        keys = streamed_keys(hidden_keys(sweeps), hidden_keys(1), hidden)
        ahead = depth.hidden if overlap else 0
        self._hidden_stream: Stream[UnitKey] = Stream(ring("hidden ring"), keys, hidden, ahead)

    def walk(self, order: Iterable[Step] | None = None) -> None:
        """Run the block until `end_layer` ends it. `order` may cut it short."""
        for step in order or self._order:
            phase = self.begin_step(step)
            if phase is not None:
                self._run_step(step, phase)
            if step.micro_batch == self._count - 1 and self.end_layer(step):
                break
        self._cache_stream.drain()
        self._hidden_stream.drain()

    def _run_step(self, step: Step, phase: str) -> None:
        layer = self._layers[step.layer]
        for stream in (self.weights, self._cache_stream, self._hidden_stream):
            stream.prefetch()
        self._open_weights(layer.unit)
        hidden_key = (step.sweep, step.layer, step.micro_batch)
        with self.span("wait", f"load_hidden {phase}"):
            hidden = self._hidden_stream.take(hidden_key)
            self.open_hidden(hidden_key, hidden)
        if layer.kind in ATTENTION_KINDS:
            cache_key = (step.sweep, layer.block, step.micro_batch)
            with self.span("wait", f"load_cache {phase}"):
                cache = self._cache_stream.take(cache_key)
                self.open_cache(cache_key, cache)
        with self.span("compute", f"compute_layer {phase}"):
            self.compute(step)
        if layer.kind in ATTENTION_KINDS:
            with self.span("wait", f"store_cache {phase}"):
                stores = self.close_cache(cache_key, cache)
                self._give_back(self._cache_stream, cache, stores)
        with self.span("wait", f"store_hidden {phase}"):
            stores = self.close_hidden(hidden_key, hidden)
            self._give_back(self._hidden_stream, hidden, stores)

    def _open_weights(self, unit: int) -> None:
        weights = self.weights
        is_fresh = unit != weights.unit
        with self.span("wait", "load_weight"):
            if is_fresh:
                weights.open(unit, self.fence)
        if is_fresh and weights.decodes:
            with self.span("compute", "unpack_weights"):
                weights.decode(self.fence)
        weights.prefetch()  # this may use the space of the unit that was just closed

    def _give_back(
        self, stream: Stream[UnitKey], region: Region | None, stores: list[Waitable]
    ) -> None:
        """Give the region back. Its next writer waits for the stores.

        Without overlap, wait here for the stores, or for compute if there are none.
        """
        stream.give_back(region, stores)
        if not self._overlap:
            wait_all(stores or [self.fence()])

    # What a subclass does in a step

    @abstractmethod
    def span(self, lane: str, name: str) -> AbstractContextManager[object]:
        """Record in the timeline what is done within this context."""

    @abstractmethod
    def fence(self) -> Waitable:
        """Return an event that is done when all compute issued so far is done."""

    @abstractmethod
    def begin_step(self, step: Step) -> str | None:
        """Return the phase of the step's sequences: prefill, decode or mixed.

        Return None if the layer has nothing to do for the micro-batch. That is so if the
        micro-batch has no sequences, if its tokens chose no expert of the group, or if an earlier
        step has computed them (`joined`). Each micro-batch has its own attention step, because KV
        units come one after another.
        """

    @abstractmethod
    def open_hidden(self, key: UnitKey, region: Region | None) -> None:
        """Open hidden states that are loaded, either into the region or at their home."""

    @abstractmethod
    def open_cache(self, key: UnitKey, region: Region | None) -> None:
        """Open a KV unit that is loaded, either into the region or at its home."""

    @abstractmethod
    def compute(self, step: Step) -> None: ...

    @abstractmethod
    def close_cache(self, key: UnitKey, region: Region | None) -> list[Waitable]:
        """Start storing what has changed in a KV unit.

        Return what the region's next writer waits for.
        """

    @abstractmethod
    def close_hidden(self, key: UnitKey, region: Region | None) -> list[Waitable]:
        """Start storing hidden states. Return what the region's next writer waits for."""

    @abstractmethod
    def end_layer(self, step: Step) -> bool:
        """Note that all micro-batches have been through a layer. Return True to end the block."""

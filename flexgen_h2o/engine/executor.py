"""Run blocks of sequences.

The executor fills the steps of the walk (engine/loop.py) with real transfers and compute. It moves
what a step needs, and calls the function of the layer's kind (engine/layer_kinds.py).
"""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch

from flexgen_h2o.core import interrupts
from flexgen_h2o.core.model import Layer
from flexgen_h2o.engine.attention import UnitAttention
from flexgen_h2o.engine.block_run import BlockRun, RunContext
from flexgen_h2o.engine.decoding import Decoding
from flexgen_h2o.engine.distributed import Wire
from flexgen_h2o.engine.generation import BlockStats, MicroBatch, Sweep
from flexgen_h2o.engine.graphs import StepGraphs, graphs_of
from flexgen_h2o.engine.layer_kinds import LAYERS
from flexgen_h2o.engine.loop import (
    ATTENTION_KINDS,
    JOINED_KINDS,
    Step,
    UnitKey,
    Walk,
    WeightStream,
)
from flexgen_h2o.engine.resources import Engine
from flexgen_h2o.engine.scheduler import Scheduler
from flexgen_h2o.engine.sequence import Sequence
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.kvcache.part import KVUnit, Prompts
from flexgen_h2o.kvcache.prefixes import Sharing
from flexgen_h2o.models import family_of
from flexgen_h2o.tiers.stream import Region, Waitable

Order = Callable[[int, int], Iterator[Step]]


class Executor:
    """Runs blocks on an engine, one after another.

    on_finished: gets sequences as they finish.
    max_sweeps: an upper bound of the sweeps over all blocks, because weights are loaded ahead
        across blocks. None if an unknown number of sequences may enter.
    sharing: when sequences of a micro-batch share a prefix; None: never.
    common: the number of tokens that all sequences begin with. Their KV entries are held in one
        copy.

    `graphs` holds the CUDA graphs of decode steps, or None if none are made.
    """

    def __init__(
        self,
        engine: Engine,
        eviction: Eviction,
        decoding: Decoding,
        on_finished: Callable[[list[Sequence]], None],
        max_sweeps: int | None,
        sharing: Sharing | None = None,
        common: int = 0,
    ) -> None:
        copies = engine.common_prefix(common) if common else None
        attention = UnitAttention(
            engine.spec, eviction, engine.policy, engine.device.torch_device, copies
        )
        self._context = RunContext(
            engine,
            eviction,
            family_of(engine.spec),
            attention,
            decoding,
            on_finished,
            sharing,
            common,
        )
        self._engine = engine
        self._layers: tuple[Layer, ...] = engine.layers.layers
        self._max_sweeps = max_sweeps
        self._weights = self._weight_stream()
        self.graphs = graphs_of(engine, eviction)
        self._blocks = 0

    @property
    def _in_step(self) -> bool:
        """Return whether all micro-batches are at the same layer at a time.

        In a pipeline they are not: there each micro-batch is computed alone, with all groups of
        experts.
        """
        return self._engine.wire is None

    def _weight_stream(self) -> WeightStream:
        engine = self._engine
        ahead = len(self._layers) if engine.policy.overlap else 0
        waits = self._in_step and engine.memory.waits_for_router
        ring = engine.ring("weight ring")
        return WeightStream(engine.weights, ring, self._layers, self._max_sweeps, ahead, waits)

    @torch.inference_mode()
    def run(
        self, scheduler: Scheduler, order: Order | None, on_tokens: Callable[[int], None]
    ) -> None:
        """Run the blocks of a scheduler one after another, and add their stats to it.

        order, on_tokens: see `run_block`. `order` is called with the numbers of layers and
            micro-batches.
        """
        waiting = scheduler if scheduler.is_continuous else None
        for block in scheduler.blocks:
            stats = BlockStats(keeps_lists=waiting is None)
            steps = order(len(self._layers), len(block)) if order is not None else None
            self.run_block(block, stats, steps, on_tokens, waiting)
            scheduler.stats.append(stats)
            if order is not None:  # the order may end within a sweep, so the weights start anew
                self.finish()
                self._weights = self._weight_stream()
        self.finish()

    def run_block(
        self,
        rows: abc.Sequence[abc.Sequence[Sequence]],
        stats: BlockStats,
        order: Iterator[Step] | None = None,
        on_tokens: Callable[[int], None] = lambda count: None,
        waiting: Scheduler | None = None,
    ) -> None:
        """Generate for the sequences of a block, given as micro-batches.

        stats: counts the layers and sweeps of the block.
        order: may cut the schedule short (debug modes). By default the block runs until every
            sequence has finished.
        on_tokens: called with the number of tokens that a micro-batch has got.
        waiting: sequences that take the places of finished ones, as far as the engine's buffers
            have room.
        """
        engine = self._engine
        context = self._context
        batches = [
            MicroBatch(r, context.sharing, context.common, opens=k == 0) for k, r in enumerate(rows)
        ]
        sweeps = max(r.max_new for batch in rows for r in batch) if waiting is None else None
        self._blocks += 1
        self._block = BlockRun(context, self._weights, batches, stats, on_tokens, waiting)
        self._block.begin()
        together = None
        if engine.wire is not None:  # in a pipeline some micro-batches travel while others compute
            engine.wire.begin_block([len(r) for r in rows])
            together = engine.policy.num_gpu_batches
        walk = Walk(
            engine,
            self._layers,
            engine.plan.depth,
            engine.policy.overlap,
            sweeps,
            len(rows),
            together,
        )
        self._sweep_start = self._layer_start = time.perf_counter()
        walk.run(self, self._weights, order)
        self._block.settle(len(rows))
        for store in (engine.cache, engine.hidden):
            store.settle()
        engine.weights.check_unchanged()  # for cut sequences and for logits callbacks
        if order is None:  # the time of stores still under way belongs to the block
            stats.add_seconds(time.perf_counter() - self._sweep_start)

    def finish(self) -> None:
        """Wait for loads still under way. Call this once after the last block."""
        self._weights.drain()

    # StepRunner of a Walk

    def span(self, lane: str, name: str) -> AbstractContextManager[None]:
        return self._engine.timeline.span(lane, name)

    def fence(self) -> Waitable:
        return self._engine.device.fence()

    def begin_step(self, step: Step) -> str | None:
        """Return the phase of the step, after settling the last sweep if a new one begins.

        Return None if the step is skipped, because it has nothing to compute (`StepRunner`).
        """
        interrupts.check()
        block = self._block
        k = step.micro_batch
        if step.layer == 0:
            block.settle(k)
            if self._engine.wire is not None:
                self._receive_tokens(step, self._engine.wire)
        if not block.batches[k].rows:
            if block.waiting is not None and step.layer == len(self._layers) - 1:
                block.settle(k)
                block.refill(k)
            return None
        if step.layer == 0:
            self._count_fed(k)
        layer = self._layers[step.layer]
        together = (k,) if layer.kind in ATTENTION_KINDS else block.together(layer, k)
        if not together:  # an earlier micro-batch's step has computed it
            return None
        if layer.kind == "experts" and not self._chooses(layer, k):
            self._engine.hidden.skip((step.sweep, step.layer, k))
            return None
        phases = {block.inputs[j].phase for j in together}
        return phases.pop() if len(phases) == 1 else "mixed"

    def _count_fed(self, k: int) -> None:
        """Count what a micro-batch feeds into its sweep."""
        fed = self._block.inputs[k]
        self._block.sweep.fed += len(fed.ids)
        self._block.sweep.prompts += fed.prompt_tokens
        self._block.stats.fed_tokens += fed.prompt_tokens

    def _chooses(self, layer: Layer, k: int) -> bool:
        """Return whether a token of the micro-batches joined to `k` has chosen one of the experts.

        A pipeline computes all groups of experts.
        """
        if not self._in_step:
            return True
        counts = self._block.counts[k]
        return any(counts[expert] for expert in layer.experts)

    def open_hidden(self, key: UnitKey, region: Region | None) -> None:
        _, layer, k = key
        opened = self._block.together(self._layers[layer], k)
        if opened:
            self._block.hidden = self._engine.hidden.open(key, region, opened[-1])

    def open_cache(self, key: UnitKey, region: Region | None) -> None:
        _, block, k = key
        run = self._block
        views, store_whole = self._engine.cache.open(key, region)
        cache = self._context.attention.open(
            block, run.tables[k], run.inputs[k], views, store_whole
        )
        run.cache = self._with_watch(block, k, cache)

    def compute(self, step: Step) -> None:
        if self.graphs is None or self._layers[step.layer].kind not in JOINED_KINDS:
            self._compute(step)
            return
        held = self._block.cache, self._block.inputs[step.micro_batch]
        self.graphs.run((step.layer, step.micro_batch), partial(self._compute, step), held)

    def _compute(self, step: Step) -> None:
        """Compute a layer for a micro-batch, after adding the output of experts in front of it.

        The experts of a block are several layers, and those that no token has chosen are skipped.
        So no layer of experts knows that it is the last one, and the next layer adds their sum
        `hidden.mixed`. Joined micro-batches have their hidden states opened together. If the next
        layer is attention, its first micro-batch adds the sum for all of them. `attending` is set
        while the others follow.
        """
        layer = self._layers[step.layer]
        hidden = self._block.hidden
        follows_experts = layer.kind != "experts" and self._layers[step.layer - 1].kind == "experts"
        if follows_experts and hidden.mixed is not None and self._block.attending is None:
            hidden.x.add_(hidden.mixed)
        LAYERS[layer.kind](self._block, layer, step.micro_batch)

    def close_cache(
        self, key: UnitKey, region: Region | None, fence: Callable[[], Waitable]
    ) -> list[Waitable]:
        _, block, k = key
        cache = self._block.cache
        sweep = self._block.sweep
        fed = self._block.inputs[k]
        window = self._engine.spec.window(block)
        if cache.steps:
            sweep.read += cache.num_read + fed.steps * (fed.common if window is None else 0)
        self._show_slots(k, cache)
        sweep.held += cache.num_filled
        sweep.full += fed.seen(window)
        sweep.units += len(fed.counts)
        return self._engine.cache.close(key, region, cache.max_filled, cache.slots_to_store, fence)

    def close_hidden(
        self, key: UnitKey, region: Region | None, fence: Callable[[], Waitable]
    ) -> list[Waitable]:
        return self._engine.hidden.close(key, region, fence)

    def end_layer(self, step: Step) -> bool:
        """Record that all micro-batches have been through a layer.

        Return True if the block ends here: after the last layer, if no sequences are left.
        """
        is_last = step.layer == len(self._layers) - 1
        if is_last:
            self._settle_until_one_continues()
        now = time.perf_counter()
        self._block.stats.end_layer(now - self._layer_start)
        self._layer_start = now
        if self._in_step and step.layer == 0:
            self._join()
        layer = self._layers[step.layer]
        if (
            self._in_step
            and layer.kind == "attention"
            and self._engine.spec.experts_of(layer.block)
        ):
            self._load_experts(layer)
        if not is_last:
            return False
        self._end_sweep(now)
        wire = self._engine.wire
        has_rows = any(batch.rows for batch in self._block.batches)
        return not has_rows and (wire is None or wire.is_over)

    def _settle_until_one_continues(self) -> None:
        """Settle micro-batches in order, until one of them still has sequences.

        The micro-batches behind it are settled before their next embedding.
        """
        for k, batch in enumerate(self._block.batches):
            self._block.settle(k)
            if batch.rows:
                return

    def _join(self) -> None:
        """Choose the micro-batches that layers compute together in this sweep."""
        shape = self._engine.plan.shape
        hidden = self._engine.hidden
        self._block.joined = {kind: hidden.joined(shape.most_joined(kind)) for kind in JOINED_KINDS}
        if self.graphs is not None:
            self._begin_graphs(self.graphs)

    def _load_experts(self, layer: Layer) -> None:
        """Tell the weight stream which experts of a block the micro-batches have chosen."""
        runs = self._block.joined["experts"]
        counts = self._block.counts
        for first, run in runs.items():
            counts[first] = list(map(sum, zip(*(counts[k] for k in run), strict=True)))
        self._weights.choose(
            layer.block, (expert for k in runs for expert, n in enumerate(counts[k]) if n)
        )

    def _end_sweep(self, now: float) -> None:
        stats = self._block.stats
        if self._block.sweep.fed:
            stats.end_sweep(self._block.sweep, now - self._sweep_start)
            self._block.sweep = Sweep()
        else:  # the ranks of a pipeline have told each other that no sequences are left
            stats.add_seconds(now - self._sweep_start)
        self._sweep_start = now

    def _begin_graphs(self, graphs: StepGraphs) -> None:
        """Tell the graphs what this sweep's steps launch.

        Two sweeps of a block launch the same under three conditions. Every sequence decodes one
        token. The micro-batches have the same numbers of sequences. The same transformer blocks
        share budgets.
        """
        block = self._block
        live = [
            (k, block.tables[k], block.inputs[k])
            for k, batch in enumerate(block.batches)
            if batch.rows
        ]
        is_plain = self._context.decoding.watches.slots is None and all(
            fed.phase == "decode" and fed.steps == 1 for *_, fed in live
        )
        rows = (
            (self._blocks, *((k, len(fed.ids), table.shared) for k, table, fed in live))
            if is_plain
            else None
        )
        attention = self._context.attention
        graphs.begin_sweep(
            rows, lambda: [t for _, table, fed in live for t in attention.inputs(table, fed)]
        )

    def _receive_tokens(self, step: Step, wire: Wire) -> None:
        """Receive the tokens of a micro-batch's last sweep that another rank has chosen."""
        k = step.micro_batch
        with self.span("wait", "receive"):
            tokens = wire.recv_tokens(step.sweep, k)
        if tokens:
            self._block.end_sweep(k, tokens)
        wire.check(k, len(self._block.batches[k].rows))

    # Callbacks of a caller that watches the run

    def _show_slots(self, k: int, cache: KVUnit) -> None:
        """Show what a decode step's attention saw to the slots callback."""
        watch = self._context.decoding.watches.slots
        if watch is not None and cache.steps and cache.policy.needs.record:
            rows = [r.index for r in self._block.batches[k].rows[: cache.decoding]]
            step = cache.steps[-1]
            watch(rows, step.filled, cache.columns())

    def _with_watch(self, block: int, k: int, cache: KVUnit) -> KVUnit:
        """Return `cache` with the prompts callback attached to the sequences that enter."""
        watch = self._context.decoding.watches.prompts
        if watch is None or not cache.enters:
            return cache
        rows = [r.index for r in self._block.batches[k].rows]

        def see(first: int, attention: Prompts) -> None:
            watch(rows[first : first + len(attention.q)], block, attention)

        return replace(cache, watch=see)

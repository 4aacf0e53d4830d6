"""Run blocks of sequences.

A block fills the steps of its walk (engine/loop.py) with real transfers and compute. It moves what
a step needs, and calls the function of the layer's kind (engine/layer_kinds.py).
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
from flexgen_h2o.engine.decoding import Decoding
from flexgen_h2o.engine.distributed import Wire
from flexgen_h2o.engine.generation import BlockStats, Sweep
from flexgen_h2o.engine.graphs import StepGraphs, graphs_of
from flexgen_h2o.engine.layer_kinds import LAYERS, JoinedAttention
from flexgen_h2o.engine.loop import (
    ATTENTION_KINDS,
    JOINED_KINDS,
    Step,
    UnitKey,
    Walk,
    WeightStream,
)
from flexgen_h2o.engine.resources import Engine
from flexgen_h2o.engine.scheduler import MicroBatch, Scheduler, SweepInput
from flexgen_h2o.engine.sequence import Sequence
from flexgen_h2o.kvcache.budgets import BudgetTable, Move
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.kvcache.layout import UnitLayout
from flexgen_h2o.kvcache.part import KVUnit, Prompts
from flexgen_h2o.kvcache.prefixes import Sharing
from flexgen_h2o.models import Hidden, Weights, family_of
from flexgen_h2o.tiers.stream import Region, Waitable

Order = Callable[[int, int], Iterator[Step]]


class Executor:
    """Runs blocks on an engine, one after another, and has what all of them share.

    on_finished: gets sequences as they finish.
    max_sweeps: an upper bound of the sweeps over all blocks, because weights are loaded ahead
        across blocks. None if an unknown number of sequences may enter.
    sharing: when sequences of a micro-batch share a prefix; None: never.
    common: the number of tokens that all sequences begin with. Their KV entries are held in one
        copy.

    `graphs` holds the CUDA graphs of decode steps, or None if none are made. `blocks` is the number
    of blocks that have begun.
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
        self.engine = engine
        self.eviction = eviction
        self.decoding = decoding
        self.on_finished = on_finished
        self.sharing = sharing
        self.common = common
        self.family = family_of(engine.spec)
        copies = engine.common_prefix(common) if common else None
        self.attention = UnitAttention(
            engine.spec, eviction, engine.policy, engine.device.torch_device, copies
        )
        self._max_sweeps = max_sweeps
        self.weights = self._weight_stream()
        self.graphs = graphs_of(engine, eviction)
        self.blocks = 0

    def _weight_stream(self) -> WeightStream:
        engine = self.engine
        layers = engine.layers.layers
        ahead = len(layers) if engine.policy.overlap else 0
        # In a pipeline each micro-batch is computed alone, with all groups of experts.
        waits = engine.wire is None and engine.memory.waits_for_router
        ring = engine.ring("weight ring")
        return WeightStream(engine.weights, ring, layers, self._max_sweeps, ahead, waits)

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
            num_layers = len(self.engine.layers.layers)
            steps = order(num_layers, len(block)) if order is not None else None
            self.run_block(block, stats, steps, on_tokens, waiting)
            scheduler.stats.append(stats)
            if order is not None:  # the order may end within a sweep, so the weights start anew
                self.finish()
                self.weights = self._weight_stream()
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
        engine = self.engine
        self.blocks += 1
        block = BlockRun(self, rows, stats, on_tokens, waiting)
        block.walk(order)
        block.settle(len(rows))
        for store in (engine.cache, engine.hidden):
            store.settle()
        engine.weights.check_unchanged()  # for cut sequences and for logits callbacks
        if order is None:  # the time of stores still under way belongs to the block
            stats.add_seconds(time.perf_counter() - block.sweep_start)

    def finish(self) -> None:
        """Wait for loads still under way. Call this once after the last block."""
        self.weights.drain()


class BlockRun(Walk):
    """A block of micro-batches on its way through the layers: what crosses steps and sweeps.

    Keys of dicts are numbers of micro-batches. The arguments are those of `Executor.run_block`.
    """

    # Set by `open_hidden` and `open_cache` before a step.
    hidden: Hidden  # the hidden states of the step's micro-batches
    cache: KVUnit  # the KV unit of the step, in layers with attention

    def __init__(
        self,
        executor: Executor,
        rows: abc.Sequence[abc.Sequence[Sequence]],
        stats: BlockStats,
        on_tokens: Callable[[int], None],
        waiting: Scheduler | None,
    ) -> None:
        engine = executor.engine
        self.executor = executor
        self.engine = engine
        self.spec = engine.spec
        self.family = executor.family
        self.workspace = engine.workspace
        self.batches = [
            MicroBatch(r, executor.sharing, executor.common, opens=k == 0)
            for k, r in enumerate(rows)
        ]
        self.stats = stats
        self.on_tokens = on_tokens
        self.waiting = waiting
        # All micro-batches are at the same layer at a time. In a pipeline they are not: there each
        # micro-batch is computed alone, with all groups of experts.
        self._in_step = engine.wire is None

        # What a micro-batch feeds into its next sweep, and the parts of it that attend one after
        # another. Set by `begin_sweep`.
        self.inputs: dict[int, SweepInput] = {}
        self.parts: dict[int, list[SweepInput]] = {}

        # The micro-batches that are computed together. Keys are the kind of layer, then the first
        # of these micro-batches. Set after the first layer of a sweep.
        self.joined: dict[str, dict[int, tuple[int, ...]]] = {}
        # The attention of joined micro-batches, until the last of them has attended. Set by
        # `layer_kinds._attend`.
        self.attending: JoinedAttention | None = None
        # How many tokens have chosen each expert. `layer_kinds._route` sets it for each
        # micro-batch. `_load_experts` then stores the sum of joined ones at the first of them.
        self.counts: dict[int, list[int]] = {}
        # Micro-batches whose choices are not sorted by expert yet. Set by `layer_kinds._route`.
        self.unsorted: set[int] = set()
        # Functions that wait for sampled tokens, of micro-batches that are not settled. Set by
        # `layer_kinds._sample`.
        self.sampled: dict[int, Callable[[], list[int]]] = {}
        # Counts of the current sweep.
        self.sweep = Sweep()

        self._begin_units()
        sweeps = max(r.max_new for batch in rows for r in batch) if waiting is None else None
        together = None
        if engine.wire is not None:  # in a pipeline some micro-batches travel while others compute
            engine.wire.begin_block([len(r) for r in rows])
            together = engine.policy.num_gpu_batches
        self.begin_walk(
            executor.weights,
            engine.layers.layers,
            engine.cache,
            engine.hidden,
            engine.ring,
            engine.plan.depth,
            engine.policy.overlap,
            sweeps,
            len(rows),
            together,
        )
        self.sweep_start = self._layer_start = time.perf_counter()

    @property
    def opened(self) -> Weights:
        """The tensors of the current layer, by role."""
        return self.weights.opened

    def together(self, layer: Layer, k: int) -> tuple[int, ...]:
        """Return the micro-batches whose hidden states the layer opens together. `k` is the first.

        Return () if the step of an earlier micro-batch has opened those of `k`.
        """
        return self.joined[layer.kind].get(k, ()) if layer.kind in self.joined else (k,)

    # ---- Buffers

    def _begin_units(self) -> None:
        """Give each micro-batch its budgets and buffers, and fix its first input."""
        engine = self.engine
        spec = self.spec
        count = len(self.batches)
        blocks = range(spec.num_blocks)
        executor = self.executor
        common = executor.common
        in_copy = [common if spec.window(block) is None else 0 for block in blocks]
        self.tables = [
            BudgetTable(executor.eviction, _sizes(batch.rows), len(blocks), in_copy)
            for batch in self.batches
        ]
        layouts = [[self._layout(block, k) for k in range(count)] for block in blocks]
        is_open = self.waiting is not None
        engine.cache.begin_block(layouts, [len(b.rows) for b in self.batches], is_open)
        engine.hidden.begin_block([self._most_tokens(b) for b in self.batches], is_open)
        for k in range(count):
            self.begin_sweep(k)

    def _layout(self, block: int, k: int) -> UnitLayout:
        """Return the layout of a KV unit.

        If sequences may enter, it has room for the engine's largest ones.
        """
        engine = self.engine
        if self.waiting is not None:
            rows = engine.plan.shape.rows
            slots = engine.plan.shape.slots[block]
        else:
            rows = len(self.batches[k].rows)
            slots = self.tables[k].most_slots(block)
        record = engine.memory.record_in(block, engine.plan.shape.record)
        return engine.memory.kv_layout(rows, slots, record)

    def _most_tokens(self, batch: MicroBatch) -> int:
        """Return the tokens of the largest sweep of the micro-batch."""
        if self.waiting is not None:
            return self.engine.plan.shape.most_tokens
        return max(batch.prompt_tokens, sum(row.max_tokens_per_sweep for row in batch.rows))

    # ---- Sequences

    def begin_sweep(self, k: int) -> None:
        """Fix what micro-batch `k` feeds into its next sweep, if it has sequences left."""
        engine = self.engine
        decoding = self.executor.decoding
        batch = self.batches[k]
        tokens = 0
        if batch.rows:
            # A slots callback sees every step, and the ranks of a pipeline exchange one step's
            # tokens.
            one_step = decoding.watches.slots is not None or engine.wire is not None
            fed = batch.sweep_input(None if one_step else decoding.known_tokens)
            self.inputs[k] = fed.to(engine.device.torch_device)
            self.parts[k] = self.inputs[k].parts(engine.plan.shape.most_attending)
            tokens = len(fed.ids)
        engine.hidden.begin_sweep(k, tokens)
        engine.cache.begin_sweep(k)

    def settle(self, last: int) -> None:
        """Wait for the sampled tokens of micro-batches 0..last, and end their last sweeps.

        They are settled in order, so that free places are always refilled in the same order.
        """
        wire = self.engine.wire
        for k in [k for k in self.sampled if k <= last]:
            with self.engine.timeline.span("wait", "tokens"):
                tokens = self.sampled.pop(k)()
            self.end_sweep(k, tokens)
            if wire is not None:
                wire.send_tokens(k, len(self.batches[k].rows), tokens)

    def end_sweep(self, k: int, tokens: abc.Sequence[int]) -> None:
        """Append the next token of each sequence of a micro-batch, and begin its next sweep.

        Finished sequences are handed out, and others enter.
        """
        finished, moves = self.append_tokens(k, tokens)
        if finished:
            self.engine.weights.check_unchanged()  # no answer may come from two different models
            self.executor.on_finished(finished)
        self._change_rows(k, moves, bool(finished))
        self.begin_sweep(k)

    def append_tokens(self, k: int, tokens: abc.Sequence[int]) -> tuple[list[Sequence], list[Move]]:
        """Append the next token of each sequence of a micro-batch (MicroBatch.append_tokens)."""
        accepted = self.batches[k].append_tokens(tokens, self.executor.decoding.end)
        self.on_tokens(len(tokens))
        return accepted

    def refill(self, k: int) -> None:
        """Let waiting sequences enter an empty micro-batch at the end of a sweep."""
        self._change_rows(k, [], False)
        self.begin_sweep(k)

    def _change_rows(self, k: int, moves: abc.Sequence[Move], have_left: bool) -> None:
        """Move sequences up after a sweep, and let others take the free places behind them."""
        batch = self.batches[k]
        table = self.tables[k]
        shape = self.engine.plan.shape
        left = len(batch.rows)
        entering = []
        if self.waiting is not None:
            entering = self.waiting.take(shape.rows - left, self._most_tokens(batch) - left)
        if have_left:
            table.compact(moves, left)
        if entering:
            longest = max(len(row.fed_ids) for row in entering)
            batch.admit(entering, self.executor.sharing if longest <= shape.sharing else None)
            table.admit(_sizes(entering))
        if have_left or entering:
            self.engine.cache.change_rows(k, moves, left, len(entering))

    # ---- Steps of the walk

    def span(self, lane: str, name: str) -> AbstractContextManager[None]:
        return self.engine.timeline.span(lane, name)

    def fence(self) -> Waitable:
        return self.engine.device.fence()

    def begin_step(self, step: Step) -> str | None:
        """Return the phase of the step, after settling the last sweep if a new one begins.

        Return None if the step is skipped, because it has nothing to compute (`Walk.begin_step`).
        """
        interrupts.check()
        k = step.micro_batch
        if step.layer == 0:
            self.settle(k)
            if self.engine.wire is not None:
                self._receive_tokens(step, self.engine.wire)
        if not self.batches[k].rows:
            if self.waiting is not None and step.layer == len(self._layers) - 1:
                self.settle(k)
                self.refill(k)
            return None
        if step.layer == 0:
            self._count_fed(k)
        layer = self._layers[step.layer]
        together = (k,) if layer.kind in ATTENTION_KINDS else self.together(layer, k)
        if not together:  # an earlier micro-batch's step has computed it
            return None
        if layer.kind == "experts" and not self._chooses(layer, k):
            self.engine.hidden.skip((step.sweep, step.layer, k))
            return None
        phases = {self.inputs[j].phase for j in together}
        return phases.pop() if len(phases) == 1 else "mixed"

    def _count_fed(self, k: int) -> None:
        """Count what a micro-batch feeds into its sweep."""
        fed = self.inputs[k]
        self.sweep.fed += len(fed.ids)
        self.sweep.prompts += fed.prompt_tokens
        self.stats.fed_tokens += fed.prompt_tokens

    def _chooses(self, layer: Layer, k: int) -> bool:
        """Return whether a token of the micro-batches joined to `k` has chosen one of the experts.

        A pipeline computes all groups of experts.
        """
        if not self._in_step:
            return True
        counts = self.counts[k]
        return any(counts[expert] for expert in layer.experts)

    def open_hidden(self, key: UnitKey, region: Region | None) -> None:
        _, layer, k = key
        opened = self.together(self._layers[layer], k)
        if opened:
            self.hidden = self.engine.hidden.open(key, region, opened[-1])

    def open_cache(self, key: UnitKey, region: Region | None) -> None:
        _, block, k = key
        views, store_whole = self.engine.cache.open(key, region)
        cache = self.executor.attention.open(
            block, self.tables[k], self.inputs[k], views, store_whole
        )
        self.cache = self._with_watch(block, k, cache)

    def compute(self, step: Step) -> None:
        graphs = self.executor.graphs
        if graphs is None or self._layers[step.layer].kind not in JOINED_KINDS:
            self._compute(step)
            return
        held = self.cache, self.inputs[step.micro_batch]
        graphs.run((step.layer, step.micro_batch), partial(self._compute, step), held)

    def _compute(self, step: Step) -> None:
        """Compute a layer for a micro-batch, after adding the output of experts in front of it.

        The experts of a block are several layers, and those that no token has chosen are skipped.
        So no layer of experts knows that it is the last one, and the next layer adds their sum
        `hidden.mixed`. Joined micro-batches have their hidden states opened together. If the next
        layer is attention, its first micro-batch adds the sum for all of them. `attending` is set
        while the others follow.
        """
        layer = self._layers[step.layer]
        hidden = self.hidden
        follows_experts = layer.kind != "experts" and self._layers[step.layer - 1].kind == "experts"
        if follows_experts and hidden.mixed is not None and self.attending is None:
            hidden.x.add_(hidden.mixed)
        LAYERS[layer.kind](self, layer, step.micro_batch)

    def close_cache(self, key: UnitKey, region: Region | None) -> list[Waitable]:
        _, block, k = key
        cache = self.cache
        sweep = self.sweep
        fed = self.inputs[k]
        window = self.engine.spec.window(block)
        if cache.steps:
            sweep.read += cache.num_read + fed.steps * (fed.common if window is None else 0)
        self._show_slots(k, cache)
        sweep.held += cache.num_filled
        sweep.full += fed.seen(window)
        sweep.units += len(fed.counts)
        return self.engine.cache.close(
            key, region, cache.max_filled, cache.slots_to_store, self.fence
        )

    def close_hidden(self, key: UnitKey, region: Region | None) -> list[Waitable]:
        return self.engine.hidden.close(key, region, self.fence)

    def end_layer(self, step: Step) -> bool:
        """Record that all micro-batches have been through a layer.

        Return True if the block ends here: after the last layer, if no sequences are left.
        """
        is_last = step.layer == len(self._layers) - 1
        if is_last:
            self._settle_until_one_continues()
        now = time.perf_counter()
        self.stats.end_layer(now - self._layer_start)
        self._layer_start = now
        if self._in_step and step.layer == 0:
            self._join()
        layer = self._layers[step.layer]
        if self._in_step and layer.kind == "attention" and self.engine.spec.experts_of(layer.block):
            self._load_experts(layer)
        if not is_last:
            return False
        self._end_sweep(now)
        wire = self.engine.wire
        has_rows = any(batch.rows for batch in self.batches)
        return not has_rows and (wire is None or wire.is_over)

    def _settle_until_one_continues(self) -> None:
        """Settle micro-batches in order, until one of them still has sequences.

        The micro-batches behind it are settled before their next embedding.
        """
        for k, batch in enumerate(self.batches):
            self.settle(k)
            if batch.rows:
                return

    def _join(self) -> None:
        """Choose the micro-batches that layers compute together in this sweep."""
        shape = self.engine.plan.shape
        hidden = self.engine.hidden
        self.joined = {kind: hidden.joined(shape.most_joined(kind)) for kind in JOINED_KINDS}
        if self.executor.graphs is not None:
            self._begin_graphs(self.executor.graphs)

    def _load_experts(self, layer: Layer) -> None:
        """Tell the weight stream which experts of a block the micro-batches have chosen."""
        runs = self.joined["experts"]
        counts = self.counts
        for first, run in runs.items():
            counts[first] = list(map(sum, zip(*(counts[k] for k in run), strict=True)))
        self.weights.choose(
            layer.block, (expert for k in runs for expert, n in enumerate(counts[k]) if n)
        )

    def _end_sweep(self, now: float) -> None:
        stats = self.stats
        if self.sweep.fed:
            stats.end_sweep(self.sweep, now - self.sweep_start)
            self.sweep = Sweep()
        else:  # the ranks of a pipeline have told each other that no sequences are left
            stats.add_seconds(now - self.sweep_start)
        self.sweep_start = now

    def _begin_graphs(self, graphs: StepGraphs) -> None:
        """Tell the graphs what this sweep's steps launch.

        Two sweeps of a block launch the same under three conditions. Every sequence decodes one
        token. The micro-batches have the same numbers of sequences. The same transformer blocks
        share budgets.
        """
        live = [
            (k, self.tables[k], self.inputs[k])
            for k, batch in enumerate(self.batches)
            if batch.rows
        ]
        is_plain = self.executor.decoding.watches.slots is None and all(
            fed.phase == "decode" and fed.steps == 1 for *_, fed in live
        )
        rows = (
            (self.executor.blocks, *((k, len(fed.ids), table.shared) for k, table, fed in live))
            if is_plain
            else None
        )
        attention = self.executor.attention
        graphs.begin_sweep(
            rows, lambda: [t for _, table, fed in live for t in attention.inputs(table, fed)]
        )

    def _receive_tokens(self, step: Step, wire: Wire) -> None:
        """Receive the tokens of a micro-batch's last sweep that another rank has chosen."""
        k = step.micro_batch
        with self.span("wait", "receive"):
            tokens = wire.recv_tokens(step.sweep, k)
        if tokens:
            self.end_sweep(k, tokens)
        wire.check(k, len(self.batches[k].rows))

    # Callbacks of a caller that watches the run

    def _show_slots(self, k: int, cache: KVUnit) -> None:
        """Show what a decode step's attention saw to the slots callback."""
        watch = self.executor.decoding.watches.slots
        if watch is not None and cache.steps and cache.policy.needs.record:
            rows = [r.index for r in self.batches[k].rows[: cache.decoding]]
            step = cache.steps[-1]
            watch(rows, step.filled, cache.columns())

    def _with_watch(self, block: int, k: int, cache: KVUnit) -> KVUnit:
        """Return `cache` with the prompts callback attached to the sequences that enter."""
        watch = self.executor.decoding.watches.prompts
        if watch is None or not cache.enters:
            return cache
        rows = [r.index for r in self.batches[k].rows]

        def see(first: int, attention: Prompts) -> None:
            watch(rows[first : first + len(attention.q)], block, attention)

        return replace(cache, watch=see)


def _sizes(rows: abc.Sequence[Sequence]) -> list[tuple[int, int, int]]:
    """Return the `rows` of BudgetTable: for each sequence, its size and its prefilled tokens."""
    return [(*row.size, len(row.fed_ids)) for row in rows]

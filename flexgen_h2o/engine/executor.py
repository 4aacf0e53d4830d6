"""Run blocks of sequences.

The executor fills the steps of the walk (engine/loop.py) with real transfers and compute. This
module knows tiers and sequences. It knows only one thing of the model: a family computes a layer
from named tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch

from flexgen_h2o.core import interrupts
from flexgen_h2o.core.model import Layer
from flexgen_h2o.engine.attention import CacheStep, JoinedAttention, UnitAttention
from flexgen_h2o.engine.decoding import Decoding, SampledTokens, score_prompts, scored_tokens
from flexgen_h2o.engine.distributed import Wire
from flexgen_h2o.engine.generation import BlockStats, MicroBatch, Sweep, SweepInput
from flexgen_h2o.engine.graphs import StepGraphs, graphs_of
from flexgen_h2o.engine.loop import ATTENTION_KINDS, JOINED_KINDS, Step, UnitKey, Walk
from flexgen_h2o.engine.resources import Engine
from flexgen_h2o.engine.scheduler import Scheduler
from flexgen_h2o.engine.sequence import Sequence as Row
from flexgen_h2o.engine.stores import WeightStream
from flexgen_h2o.kernels.workspace import upload
from flexgen_h2o.kvcache.evict import columns_of
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.kvcache.layout import UnitLayout
from flexgen_h2o.kvcache.prefixes import Sharing
from flexgen_h2o.kvcache.rows import Move, SlotTable
from flexgen_h2o.kvcache.slots import PromptAttention
from flexgen_h2o.models import Attention, Hidden, Weights, family_of
from flexgen_h2o.models.layers import count_choices, sort_choices
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
        on_finished: Callable[[list[Row]], None],
        max_sweeps: int | None,
        sharing: Sharing | None = None,
        common: int = 0,
    ) -> None:
        self._engine = engine
        self._eviction = eviction
        self._decoding = decoding
        self._on_finished = on_finished
        self._sharing = sharing
        self._common = common
        self._family = family_of(engine.spec)
        self._workspace = engine.workspace
        self._layers: tuple[Layer, ...] = engine.layers.layers
        self._wire = engine.wire
        self._max_sweeps = max_sweeps
        self._waits = self._in_step and engine.memory.waits_for_router
        self._weights = self._weight_stream()
        self._torch_device = engine.device.torch_device
        copies = engine.common_prefix(common) if common else None
        self._attention = UnitAttention(
            engine.spec, eviction, engine.policy, self._torch_device, copies
        )
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
        ahead = len(self._layers) if self._engine.policy.overlap else 0
        return WeightStream(
            engine.weights, engine.ring("weight ring"), self._max_sweeps, ahead, self._waits
        )

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
        rows: Sequence[Sequence[Row]],
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
        self._stats = stats
        self._on_tokens = on_tokens
        self._waiting = waiting
        self._batches = [
            MicroBatch(r, self._sharing, self._common, opens=k == 0) for k, r in enumerate(rows)
        ]
        self._blocks += 1
        sweeps = max(r.max_new for batch in rows for r in batch) if waiting is None else None
        engine = self._engine
        together = None
        self._begin_block()
        if self._wire is not None:  # in a pipeline some micro-batches travel while others compute
            self._wire.begin_block([len(r) for r in rows])
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
        self._settle(len(rows))
        for store in (engine.cache, engine.hidden):
            store.settle()
        engine.weights.check_unchanged()  # for cut sequences and for logits callbacks
        if order is None:  # the time of stores still under way belongs to the block
            stats.add_seconds(time.perf_counter() - self._sweep_start)

    def finish(self) -> None:
        """Wait for loads still under way. Call this once after the last block."""
        self._weights.drain()

    def _begin_block(self) -> None:
        engine = self._engine
        count = len(self._batches)
        blocks = range(engine.spec.num_blocks)
        in_copy = [self._common if engine.spec.window(block) is None else 0 for block in blocks]
        sizes = [_sizes(batch.rows) for batch in self._batches]
        self._tables = [SlotTable(self._eviction, rows, len(blocks), in_copy) for rows in sizes]
        layouts = [[self._layout(block, k) for k in range(count)] for block in blocks]
        is_open = self._waiting is not None
        engine.cache.begin_block(layouts, [len(b.rows) for b in self._batches], is_open)
        engine.hidden.begin_block([self._most_tokens(b) for b in self._batches], is_open)
        self._inputs: dict[int, SweepInput] = {}
        # By micro-batch: the parts of its input, which attend one after another.
        self._parts: dict[int, list[SweepInput]] = {}
        # By kind of layer: HiddenStore.joined in this sweep.
        self._joined: dict[str, dict[int, tuple[int, ...]]] = {}
        self._attending: JoinedAttention | None = None
        # By micro-batch: its `Hidden.counts`; the first of joined ones has their sum.
        self._counts: dict[int, list[int]] = {}
        self._unsorted: set[int] = set()  # micro-batches whose choices are not sorted by expert yet
        self._chosen: dict[
            int, SampledTokens
        ] = {}  # sampled tokens of micro-batches that are not settled
        for k in range(count):
            self._begin_sweep(k)
        self._sweep = Sweep()

    def _layout(self, block: int, k: int) -> UnitLayout:
        """Return the layout of a KV unit.

        If sequences may enter, it has room for the engine's largest ones.
        """
        engine = self._engine
        if self._waiting is not None:
            rows = engine.plan.shape.rows
            slots = engine.plan.shape.slots[block]
        else:
            rows = len(self._batches[k].rows)
            slots = self._tables[k].most_slots(block)
        record = engine.memory.record_in(block, engine.plan.shape.record)
        return engine.memory.kv_layout(rows, slots, record)

    def _most_tokens(self, batch: MicroBatch) -> int:
        """Return the tokens of the largest sweep of the micro-batch."""
        if self._waiting is not None:
            return self._engine.plan.shape.most_tokens
        return max(batch.prompt_tokens, sum(row.max_tokens_per_sweep for row in batch.rows))

    # StepRunner of a Walk

    def span(self, lane: str, name: str) -> AbstractContextManager[None]:
        return self._engine.timeline.span(lane, name)

    def fence(self) -> Waitable:
        return self._engine.device.fence()

    def begin_step(self, step: Step) -> str | None:
        interrupts.check()
        k = step.micro_batch
        if step.layer == 0:
            self._settle(k)
            if self._wire is not None:
                self._receive_tokens(step, self._wire)
        if not self._batches[k].rows:
            if self._waiting is not None and step.layer == len(self._layers) - 1:
                self._settle(k)
                self._after_sweep(k, [], [])  # when others get sequences too
            return None
        if step.layer == 0:
            sweep_input = self._inputs[k]
            self._sweep.fed += len(sweep_input.ids)
            self._sweep.prompts += sweep_input.prompt_tokens
            self._stats.fed_tokens += sweep_input.prompt_tokens
        layer = self._layers[step.layer]
        together = (k,) if layer.kind in ATTENTION_KINDS else self._opened(layer, k)
        if not together:  # an earlier micro-batch's step has computed it
            return None
        if (
            layer.kind == "experts"
            and self._in_step
            and not any(self._counts[k][expert] for expert in layer.experts)
        ):
            self._engine.hidden.skip((step.sweep, step.layer, k))
            return None
        phases = {self._inputs[j].phase for j in together}
        return phases.pop() if len(phases) == 1 else "mixed"

    def _opened(self, layer: Layer, k: int) -> tuple[int, ...]:
        """Return the micro-batches whose hidden states the layer opens together. `k` is the first.

        Return () if the step of an earlier micro-batch has opened those of `k`.
        """
        return self._joined[layer.kind].get(k, ()) if layer.kind in self._joined else (k,)

    def open_hidden(self, key: UnitKey, region: Region | None) -> None:
        opened = self._opened(self._layers[key[1]], key[2])
        if opened:
            self._hidden = self._engine.hidden.open(key, region, opened[-1])

    def open_cache(self, key: UnitKey, region: Region | None) -> None:
        _, block, k = key
        views, store_whole = self._engine.cache.open(key, region)
        cache = self._attention.open(block, self._tables[k], self._inputs[k], views, store_whole)
        self._cache = self._with_watch(block, k, cache)

    def compute(self, step: Step) -> None:
        if self.graphs is None or self._layers[step.layer].kind not in JOINED_KINDS:
            self._issue(step)
            return
        held = self._cache, self._inputs[step.micro_batch]
        self.graphs.run((step.layer, step.micro_batch), partial(self._issue, step), held)

    def _issue(self, step: Step) -> None:
        layer = self._layers[step.layer]
        k = step.micro_batch
        w = self._weights.opened
        hidden = self._hidden
        spec = self._engine.spec
        family = self._family
        ws = self._workspace
        if layer.kind == "experts":
            if k in self._unsorted:
                self._unsorted.remove(k)
                sort_choices(hidden)
            family.experts(spec, w, layer.experts, hidden._replace(counts=self._counts[k]), ws)
        elif (
            hidden.mixed is not None
            and self._layers[step.layer - 1].kind == "experts"
            and self._attending is None
        ):
            hidden.x.add_(hidden.mixed)
        if layer.kind == "receive" and self._wire is not None:
            self._wire.recv_hidden(k, hidden.x)
        if layer.kind == "embedding":
            sweep_input = self._inputs[k]
            family.embed(spec, w, sweep_input.ids, sweep_input.positions, hidden.x, ws)
        if layer.kind in ATTENTION_KINDS:
            attended = self._attend(layer, k, w)
            if attended is None:
                return
            hidden = attended.hidden
            if layer.kind == "attention" and spec.experts_of(layer.block):
                self._route(attended.run, w, hidden)
        if layer.kind in ("mlp", "block") and spec.mlp[layer.block]:
            family.mlp(spec, w, hidden.x, ws)
        if layer.kind == "head":
            self._head(layer, k, w, hidden.x)
        if layer.kind == "send" and self._wire is not None:
            self._engine.weights.check_unchanged()  # later ranks hand out what they compute from it
            self._wire.send_hidden(k, len(self._batches[k].rows), hidden.x)

    def _attend(self, layer: Layer, k: int, w: Weights) -> JoinedAttention | None:
        """Run the attention of one micro-batch in a layer.

        The first of several joined micro-batches computes the queries of all of them, the last one
        their outputs. Return the joined attention after the last micro-batch, and None before that.
        """
        spec = self._engine.spec
        ws = self._workspace

        def begin(x: torch.Tensor) -> tuple[torch.Tensor, Attention]:
            return ws.get("mixed", len(x), spec.num_heads * spec.head_dim), self._family.attention(
                spec, w, x, ws
            )

        attending = self._attending or JoinedAttention(self._opened(layer, k), self._hidden, begin)
        attending.attend(self._parts[k], partial(self._attention.attend, self._cache))
        is_last = k == attending.run[-1]
        self._attending = None if is_last else attending
        return attending if is_last else None

    def _route(self, run: tuple[int, ...], w: Weights, hidden: Hidden) -> None:
        """Choose the experts of the tokens of the micro-batches in `run`."""
        spec = self._engine.spec
        assert hidden.mixed is not None and hidden.chosen is not None and spec.experts is not None
        self._family.route(spec, w, hidden, self._workspace)
        hidden.mixed.zero_()
        counts = count_choices(
            hidden.chosen, [len(self._inputs[k].ids) for k in run], spec.experts.count
        )
        self._counts.update(zip(run, counts, strict=True))
        self._unsorted.update(run)

    def close_cache(
        self, key: UnitKey, region: Region | None, fence: Callable[[], Waitable]
    ) -> list[Waitable]:
        cache = self._cache
        sweep_input = self._inputs[key[2]]
        _, block, k = key
        window = self._engine.spec.window(block)
        if cache.new:
            self._sweep.read += cache.read + sweep_input.steps * (
                sweep_input.common if window is None else 0
            )
        self._show_slots(k, cache)
        self._sweep.held += cache.held
        self._sweep.full += sweep_input.seen(window)
        self._sweep.units += len(sweep_input.counts)
        return self._engine.cache.close(key, region, cache.most, cache.slots_to_store, fence)

    def close_hidden(
        self, key: UnitKey, region: Region | None, fence: Callable[[], Waitable]
    ) -> list[Waitable]:
        return self._engine.hidden.close(key, region, fence)

    def end_layer(self, step: Step) -> bool:
        # Find out whether any sequence continues. Tokens of later micro-batches are waited for at
        # their next embedding.
        if step.layer == len(self._layers) - 1:
            for k, batch in enumerate(self._batches):
                self._settle(k)
                if batch.rows:
                    break
        now = time.perf_counter()
        self._stats.end_layer(now - self._layer_start)
        self._layer_start = now
        layer = self._layers[step.layer]
        if self._in_step and step.layer == 0:
            shape = self._engine.plan.shape
            hidden = self._engine.hidden
            self._joined = {kind: hidden.joined(shape.most_joined(kind)) for kind in JOINED_KINDS}
            if self.graphs is not None:
                self._begin_graphs(self.graphs)
        if (
            self._in_step
            and layer.kind == "attention"
            and self._engine.spec.experts_of(layer.block)
        ):
            runs = self._joined["experts"]
            for first, run in runs.items():
                self._counts[first] = list(
                    map(sum, zip(*(self._counts[k] for k in run), strict=True))
                )
            self._weights.choose(
                layer.block, (e for first in runs for e, n in enumerate(self._counts[first]) if n)
            )
        if step.layer < len(self._layers) - 1:
            return False
        if self._sweep.fed:
            self._stats.end_sweep(self._sweep, now - self._sweep_start)
            self._sweep = Sweep()
        else:  # the ranks of a pipeline have told each other that no sequences are left
            self._stats.add_seconds(now - self._sweep_start)
        self._sweep_start = now
        return not any(batch.rows for batch in self._batches) and (
            self._wire is None or self._wire.is_over
        )

    def _begin_graphs(self, graphs: StepGraphs) -> None:
        """Tell the graphs what this sweep's steps launch.

        Two sweeps of a block launch the same under three conditions. Every sequence decodes one
        token. The micro-batches have the same numbers of sequences. The same transformer blocks
        share budgets.
        """
        live = [
            (k, self._tables[k], self._inputs[k])
            for k, batch in enumerate(self._batches)
            if batch.rows
        ]
        is_plain = self._decoding.watches.slots is None and all(
            f.phase == "decode" and f.steps == 1 for *_, f in live
        )
        rows = (
            (
                self._blocks,
                *((k, len(sweep_input.ids), table.shared) for k, table, sweep_input in live),
            )
            if is_plain
            else None
        )
        graphs.begin_sweep(
            rows,
            lambda: [
                t
                for _, table, sweep_input in live
                for t in self._attention.inputs(table, sweep_input)
            ],
        )

    # Sequences

    def _receive_tokens(self, step: Step, wire: Wire) -> None:
        """Receive the tokens of a micro-batch's last sweep that another rank has chosen."""
        k = step.micro_batch
        with self.span("wait", "receive"):
            tokens = wire.recv_tokens(step.sweep, k)
        if tokens:
            self._after_sweep(k, *self._append_tokens(k, tokens))
        wire.check(k, len(self._batches[k].rows))

    def _show_slots(self, k: int, cache: CacheStep) -> None:
        """Show what a decode step's attention saw to the slots callback."""
        watch = self._decoding.watches.slots
        if watch is not None and cache.decoding is not None and cache.decoding.policy.needs.record:
            rows = [r.index for r in self._batches[k].rows[: self._inputs[k].decoding]]
            watch(
                rows,
                cache.new[-1].filled,
                columns_of(cache.decoding, cache.new[-1].positions, cache.new[-1].filled),
            )

    def _with_watch(self, block: int, k: int, cache: CacheStep) -> CacheStep:
        """Return `cache` with the prompts callback attached to the sequences that enter."""
        watch = self._decoding.watches.prompts
        if watch is None or cache.entering is None:
            return cache
        rows = [r.index for r in self._batches[k].rows[self._inputs[k].decoding :]]

        def see(first: int, attention: PromptAttention) -> None:
            watch(rows[first : first + len(attention.q)], block, attention)

        return replace(cache, entering=replace(cache.entering, watch=see))

    def _begin_sweep(self, k: int) -> None:
        """Fix what micro-batch `k` feeds into its next sweep, if it has sequences left."""
        batch = self._batches[k]
        tokens = 0
        if batch.rows:
            # A slots callback sees every step, and the ranks of a pipeline exchange one step's
            # tokens.
            one_step = self._decoding.watches.slots is not None or self._wire is not None
            sweep_input = batch.sweep_input(None if one_step else self._decoding.known_tokens).to(
                self._torch_device
            )
            self._parts[k] = sweep_input.parts(self._engine.plan.shape.most_attending)
            self._inputs[k] = sweep_input
            tokens = len(sweep_input.ids)
        self._engine.hidden.begin_sweep(k, tokens)
        self._engine.cache.begin_sweep(k)

    def _head(self, layer: Layer, k: int, w: Weights, x: torch.Tensor) -> None:
        """Compute the logits of a micro-batch and sample its next tokens.

        If the head is cut into parts, each part computes some columns of the logits. They are held
        until the last part has run.
        """
        batch = self._batches[k]
        sweep_input = self._inputs[k]
        spec = self._engine.spec
        ws = self._workspace
        # Rows of logits that belong to earlier micro-batches.
        first = k * self._engine.plan.shape.rows if spec.head_rows else 0

        def logits_at(places: slice | torch.Tensor) -> torch.Tensor:
            inputs = x[places] if isinstance(places, slice) else x.index_select(0, places)
            logits = ws.get("logits", first + len(inputs), spec.vocab_size)[first:]
            self._family.head(spec, w, inputs, logits[:, layer.rows.start : layer.rows.stop], ws)
            return logits

        if layer.rows.stop < spec.vocab_size:
            logits_at(sweep_input.last())
            return
        scored = scored_tokens(batch, sweep_input)
        score_prompts(
            scored,
            lambda places: logits_at(upload(torch.tensor(places, device="cpu"), x.device)),
            self._decoding.watches.isolates_errors,
        )
        for step in range(sweep_input.steps):
            if step:
                finished, _ = self._append_tokens(k, self._chosen.pop(k).take())
                assert not finished  # a sequence takes all the tokens that were fed ahead
            self._chosen[k] = self._decoding.sample(
                batch, logits_at(sweep_input.last(step)), self._engine.device.read_back
            )
        if self._wire is not None or self._chosen[k].ready.is_done:
            self._settle(k)

    def _settle(self, last: int) -> None:
        """Wait for the sampled tokens of micro-batches 0..last, and end their last sweeps.

        They are settled in order, so that free places are always refilled in the same order.
        """
        for k in [k for k in self._chosen if k <= last]:
            with self.span("wait", "tokens"):
                tokens = self._chosen.pop(k).take()
            self._after_sweep(k, *self._append_tokens(k, tokens))
            if self._wire is not None:
                self._wire.send_tokens(k, len(self._batches[k].rows), tokens)

    def _append_tokens(self, k: int, tokens: Sequence[int]) -> tuple[list[Row], list[Move]]:
        """Append the next token of each sequence of a micro-batch (MicroBatch.append_tokens)."""
        accepted = self._batches[k].append_tokens(tokens, self._decoding.end)
        self._on_tokens(len(tokens))
        return accepted

    def _after_sweep(self, k: int, finished: list[Row], moves: list[Move]) -> None:
        """Hand out the finished sequences of a micro-batch, remove them, and let others enter."""
        if finished:
            self._engine.weights.check_unchanged()  # no answer may come from two different models
            self._on_finished(finished)
        self._change_rows(k, moves, bool(finished))
        self._begin_sweep(k)

    def _change_rows(self, k: int, moves: Sequence[Move], have_left: bool) -> None:
        """Move sequences up after a sweep, and let others take the free places behind them."""
        batch = self._batches[k]
        table = self._tables[k]
        shape = self._engine.plan.shape
        left = len(batch.rows)
        entering = []
        if self._waiting is not None:
            entering = self._waiting.take(shape.rows - left, self._most_tokens(batch) - left)
        if have_left:
            table.compact(moves, left)
        if entering:
            longest = max(len(row.fed_ids) for row in entering)
            batch.admit(entering, self._sharing if longest <= shape.sharing else None)
            table.admit(_sizes(entering))
        if have_left or entering:
            self._engine.cache.change_rows(k, moves, left, len(entering))


def _sizes(rows: Sequence[Row]) -> list[tuple[int, int, int]]:
    """Return for each sequence (*Row.size, prompt tokens), as SlotTable needs it."""
    return [(*row.size, len(row.fed_ids)) for row in rows]

"""Walks the zig-zag order: loads ahead, computes, stores behind. One loop for sequential and overlapped runs.

Knows tiers and rows; of the model it knows only that a family computes a layer from named tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch

from flexgen_h2o.core import interrupts
from flexgen_h2o.core.config import Layer
from flexgen_h2o.core.schedule import Step, weight_sequence, zigzag
from flexgen_h2o.engine.attention import CacheStep, DecodingRows, UnitAttention, UnitViews
from flexgen_h2o.engine.distributed import Handoff
from flexgen_h2o.engine.generation import Decoding, MicroBatch, Row, SweepInput, Waiting
from flexgen_h2o.engine.hidden import HiddenKey
from flexgen_h2o.engine.memory_plan import kv_layout
from flexgen_h2o.engine.metrics import BlockStats, Sweep
from flexgen_h2o.engine.resources import Engine
from flexgen_h2o.engine.weights import WeightStream
from flexgen_h2o.kvcache.evict import unit_columns
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.kvcache.layout import UnitLayout
from flexgen_h2o.kvcache.prefixes import Sharing
from flexgen_h2o.kvcache.slots import Move, SlotTable
from flexgen_h2o.kvcache.store import CacheKey
from flexgen_h2o.models import Weights, family_of
from flexgen_h2o.tiers.stream import Stream, Waitable, streamed_keys, wait_all

ATTENTION_KINDS = ("attention", "block")
OnFinished = Callable[[list[Row]], None]


class Executor:
    """Runs blocks on an engine, one after another.

    max_sweeps: an upper bound of sweeps over all blocks (weights are loaded ahead across blocks); None where rows enter
    that nobody has counted. on_finished gets rows as they finish. sharing: when rows of a micro-batch share a prefix;
    None: never. common: tokens that all rows begin with, whose columns are held in one copy.
    """

    def __init__(
        self, engine: Engine, eviction: Eviction, decoding: Decoding, on_finished: OnFinished,
        max_sweeps: int | None, sharing: Sharing | None = None, common: int = 0,
    ) -> None:  # fmt: skip
        self._engine, self._eviction, self._decoding, self._on_finished = engine, eviction, decoding, on_finished
        self._sharing, self._common = sharing, common
        self._family = family_of(engine.spec)
        self._workspace = engine.workspace()
        self._layers: tuple[Layer, ...] = engine.layers.layers
        self._overlap = engine.policy.overlap
        self._handoff = Handoff(engine.wire, engine.device.fence) if engine.wire is not None else None
        self._max_sweeps = max_sweeps
        self._weights = self._weight_stream()
        device, sparsity = engine.device.torch_device, engine.policy.attn_sparsity
        copies = engine.common_prefix(common) if common else None
        self._attention = UnitAttention(engine.spec, eviction, sparsity, device, copies)

    def _weight_stream(self) -> WeightStream:
        engine, units = self._engine, tuple(layer.unit for layer in self._layers)
        sequence = streamed_keys(weight_sequence(self._max_sweeps, units), units, engine.weights)
        return WeightStream(engine.weights, engine.weight_ring(), sequence, len(units) if self._overlap else 0)

    def run_block(
        self, rows: Sequence[Sequence[Row]], facts: BlockStats, order: Iterator[Step] | None = None,
        on_tokens: Callable[[int], None] = lambda count: None, waiting: Waiting | None = None,
    ) -> None:  # fmt: skip
        """Generate for the rows of a block, given as micro-batches.

        facts hears of its layers and sweeps. `order` may cut the schedule short (debug modes); by default it runs until
        every row has finished. on_tokens hears how many tokens a micro-batch has got. waiting: rows that take the
        places of those that have finished, each as far as the engine's buffers have room for it.
        """
        self._facts, self._on_tokens, self._waiting = facts, on_tokens, waiting
        self._batches = [MicroBatch(r, self._sharing, self._common, opens=k == 0) for k, r in enumerate(rows)]
        sweeps = max(r.max_new for batch in rows for r in batch) if waiting is None else None
        self._begin(sweeps)
        stage = self._handoff
        if stage is not None:  # which hears of a sweep's tokens in the next one: the last one has nothing else
            stage.begin_block([len(r) for r in rows])
            sweeps = None
        sweep_start = layer_start = time.perf_counter()
        for step in order or self._order(sweeps, len(rows)):
            interrupts.check()
            if step.layer == 0 and stage is not None:
                self._hear(step, stage)
            if self._batches[step.micro_batch].rows:
                self._run_step(step)
            if step.micro_batch == len(rows) - 1:
                now = time.perf_counter()
                facts.end_layer(now - layer_start)
                layer_start = now
                if step.layer == len(self._layers) - 1:
                    self._end_sweep(now - sweep_start)
                    sweep_start = now
                    if not any(batch.rows for batch in self._batches) and (stage is None or stage.is_over):
                        break
        for stream, store in ((self._cache, self._engine.cache), (self._hidden, self._engine.hidden)):
            stream.drain()
            store.settle()
        self._engine.weights.check_unchanged()  # for rows that are cut short, and for whoever watches logits
        if order is None:  # what was still being stored belongs to the block
            facts.add_seconds(time.perf_counter() - sweep_start)

    def restart(self) -> None:
        """Load weights from the first unit on; call after a block that was cut short within a sweep."""
        self.finish()
        self._weights = self._weight_stream()

    def finish(self) -> None:
        """Wait for loads still under way; call once after the last block."""
        self._weights.drain()

    def _begin(self, sweeps: int | None) -> None:
        engine, count = self._engine, len(self._batches)
        self._tables = [SlotTable(self._eviction, self._sizes(b.rows), engine.spec.num_blocks) for b in self._batches]
        layouts = [[self._layout(block, k) for k in range(count)] for block in range(engine.spec.num_blocks)]
        engine.cache.begin_block(layouts, [len(b.rows) for b in self._batches])
        engine.hidden.begin_block([self._most_tokens(b) for b in self._batches])
        self._inputs: dict[int, SweepInput] = {}
        for k in range(count):
            self._begin_sweep(k)
        self._held = self._full = self._read = self._fed = self._prompts = 0  # columns and tokens in this sweep
        ahead = (engine.plan.depth.cache, engine.plan.depth.hidden) if self._overlap else (0, 0)
        cache_keys = streamed_keys(self._cache_keys(sweeps, count), self._cache_keys(1, count), engine.cache)
        hidden_keys = streamed_keys(self._hidden_keys(sweeps, count), self._hidden_keys(1, count), engine.hidden)
        self._cache: Stream[CacheKey] = Stream(engine.cache_ring(), cache_keys, engine.cache, ahead[0])
        self._hidden: Stream[HiddenKey] = Stream(engine.hidden_ring(), hidden_keys, engine.hidden, ahead[1])

    def _layout(self, block: int, k: int) -> UnitLayout:
        """Of a KV unit; for any rows that the engine has room for where rows may enter."""
        engine, rows, slots = self._engine, len(self._batches[k].rows), self._tables[k].most_slots(block)
        if self._waiting is not None:
            rows, slots = engine.plan.shape.rows, engine.plan.shape.slots[block]
        record, itemsize = self._eviction.needs.record, engine.dtype.itemsize
        return kv_layout(engine.spec, engine.policy, rows, slots, record, itemsize, engine.device.is_host)

    def _most_tokens(self, batch: MicroBatch) -> int:
        """Of its largest sweep."""
        shape = self._engine.plan.shape
        least = max(batch.prompt_tokens, sum(row.max_tokens_per_sweep for row in batch.rows))
        return least if self._waiting is None else max(shape.tokens, shape.rows)

    def _order(self, sweeps: int | None, count: int) -> Iterator[Step]:
        """`count` micro-batches; a stage of a pipeline has some of them on their way while it computes others."""
        together = None if self._handoff is None else self._engine.policy.num_gpu_batches
        return zigzag(sweeps, len(self._layers), count, together)

    # Keys without `self`: they would hold the executor, and so the engine's memory, in a circle after the run.
    def _cache_keys(self, sweeps: int | None, count: int) -> Iterator[CacheKey]:
        order, layers = self._order(sweeps, count), self._layers
        at = ((layers[s.layer], s) for s in order)
        return ((s.sweep, layer.block, s.micro_batch) for layer, s in at if layer.kind in ATTENTION_KINDS)

    def _hidden_keys(self, sweeps: int | None, count: int) -> Iterator[HiddenKey]:
        return ((s.sweep, s.layer, s.micro_batch) for s in self._order(sweeps, count))

    def _hear(self, step: Step, stage: Handoff) -> None:
        """The tokens of a micro-batch's last sweep, where another rank has chosen them."""
        k = step.micro_batch
        with self._engine.timeline.span("wait", "receive"):
            tokens = stage.recv_tokens(step.sweep, k)
        if tokens:
            self._after_sweep(k, *self._accept(k, tokens))
        stage.check(k, len(self._batches[k].rows))

    def _run_step(self, step: Step) -> None:
        engine, layer, k = self._engine, self._layers[step.layer], step.micro_batch
        for stream in (self._weights, self._cache, self._hidden):
            stream.prefetch()
        if step.layer == 0:
            self._count_tokens(self._inputs[k])
        phase = self._inputs[k].phase
        span, key = engine.timeline.span, (step.sweep, step.layer, k)
        is_fresh = layer.unit != self._weights.unit
        with span("wait", "load_weight"):
            w = self._weights.open(layer.unit, engine.device.fence())
        if is_fresh and self._weights.decodes:
            with span("compute", "unpack_weights"):
                w = self._weights.decode(engine.device.fence)
        self._weights.prefetch()  # into the space of the unit that has just been closed
        with span("wait", f"load_hidden {phase}"):
            region = self._hidden.take(key)
            x = engine.hidden.open(key, region)
        cache: CacheStep | None = None
        if layer.kind in ATTENTION_KINDS:
            with span("wait", f"load_cache {phase}"):
                cache = self._open_cache(step, layer)
        with span("compute", f"compute_layer {phase}"):
            self._compute(k, layer, w, x, cache)
        if cache is not None:
            self._count(k, cache)
            if cache.decoding is not None:
                self._watch_slots(k, cache.decoding)
            with span("wait", f"store_cache {phase}"):
                self._close_cache(step, layer, cache)
        with span("wait", f"store_hidden {phase}"):
            stores = engine.hidden.close(key, region, engine.device.fence())
            self._hidden.give_back(region, stores)
            self._settle(stores)

    def _settle(self, stores: Iterable[Waitable]) -> None:
        """Without overlap every transfer ends before the next step begins."""
        if not self._overlap:
            wait_all(stores)

    def _open_cache(self, step: Step, layer: Layer) -> CacheStep:
        key, k = (step.sweep, layer.block, step.micro_batch), step.micro_batch
        region = self._cache.take(key)
        views, store_whole = self._engine.cache.open(key, region)
        rows = self._tables[k].at(layer.block)
        return self._attention.open(layer.block, rows, self._inputs[k], UnitViews(region, views, store_whole))

    def _close_cache(self, step: Step, layer: Layer, cache: CacheStep) -> None:
        key, engine, region = (step.sweep, layer.block, step.micro_batch), self._engine, cache.unit.region
        stores = engine.cache.close(key, region, cache.columns, cache.slots_to_store, engine.device.fence())
        self._cache.give_back(region, stores)
        self._settle(stores)

    def _end_sweep(self, seconds: float) -> None:
        if not self._fed:  # the ranks of a pipeline have told each other that no rows are left
            self._facts.add_seconds(seconds)
            return
        self._facts.end_sweep(Sweep(seconds, self._prompts / self._fed, self._held, self._full, self._read))
        self._held = self._full = self._read = self._fed = self._prompts = 0

    def _count_tokens(self, fed: SweepInput) -> None:
        """The tokens of a micro-batch's sweep."""
        self._fed += len(fed.ids)
        self._prompts += fed.prompt_tokens
        self._facts.fed.add(fed.groups)

    def _count(self, k: int, cache: CacheStep) -> None:
        """The columns of one layer."""
        fed = self._inputs[k]
        self._read += cache.decoding.read + fed.steps * fed.common if cache.decoding is not None else 0
        self._held += int(cache.decoded.sum()) + int(cache.entered.sum())
        self._full += fed.seen

    def _watch_slots(self, k: int, decoding: DecodingRows) -> None:
        """Show what a decode step's attention saw to whoever watches."""
        watch = self._decoding.watches.slots
        if watch is not None:
            rows = [r.prompt.index for r in self._batches[k].rows[: self._inputs[k].decoding]]
            watch(rows, decoding.new.filled, unit_columns(decoding.hook, decoding.views, decoding.new))

    def _begin_sweep(self, k: int) -> None:
        """Fix what micro-batch `k` feeds into its next sweep, if it has rows left."""
        batch, tokens = self._batches[k], 0
        if batch.rows:
            alone = self._decoding.watches.slots is None  # who watches slots sees every step's
            self._inputs[k] = batch.sweep_input(self._decoding.known_tokens if alone else None)
            tokens = len(self._inputs[k].ids)
        self._engine.hidden.begin_sweep(k, tokens)

    def _compute(self, k: int, layer: Layer, w: Weights, x: torch.Tensor, cache: CacheStep | None) -> None:
        spec, family, ws, fed = self._engine.spec, self._family, self._workspace, self._inputs[k]
        if layer.kind == "receive" and self._handoff is not None:
            self._handoff.recv_hidden(k, x)
        if layer.kind == "embedding":
            family.embed(spec, w, fed.ids.to(x.device), fed.positions.to(x.device), x, ws)
        if cache is not None:
            out = ws.get("mixed", len(x), spec.num_heads * spec.head_dim)
            family.attention(spec, w, x, partial(self._attention.attend, fed, cache, out), ws)
        if layer.kind in ("mlp", "block") and spec.mlp[layer.block]:
            family.mlp(spec, w, x, ws)
        if layer.kind == "head":
            self._head(k, w, x)
        if layer.kind == "send" and self._handoff is not None:
            self._engine.weights.check_unchanged()  # the ranks behind hand out what comes of it
            self._handoff.send_hidden(k, len(self._batches[k].rows), x)

    def _head(self, k: int, w: Weights, x: torch.Tensor) -> None:
        batch, fed = self._batches[k], self._inputs[k]
        finished, moves = list[Row](), list[Move]()
        for step in range(fed.steps):
            assert not finished  # what was fed of the steps to come is taken
            last = x.index_select(0, fed.last(step).to(x.device))
            logits = self._family.head(self._engine.spec, w, last, self._workspace)
            tokens = self._decoding.sample(batch, logits)
            finished, moves = self._accept(k, tokens)
        self._after_sweep(k, finished, moves)
        if self._handoff is not None:
            self._handoff.send_tokens(k, len(self._batches[k].rows), tokens)

    def _accept(self, k: int, tokens: Sequence[int]) -> tuple[list[Row], list[Move]]:
        """The next token of each row of a micro-batch (MicroBatch.accept)."""
        accepted = self._batches[k].append_tokens(tokens, self._decoding.end)
        self._on_tokens(len(tokens))
        return accepted

    def _after_sweep(self, k: int, finished: list[Row], moves: list[Move]) -> None:
        """Hand out the rows of a micro-batch that have ended with a sweep; they leave, and others may enter."""
        if finished:
            self._engine.weights.check_unchanged()  # no row leaves that may have been computed with two models
            self._on_finished(finished)
        self._change_rows(k, moves, bool(finished))
        self._begin_sweep(k)

    def _change_rows(self, k: int, moves: Sequence[Move], have_left: bool) -> None:
        """Rows close ranks after a sweep, and others take the places that are free behind them."""
        batch, table, shape = self._batches[k], self._tables[k], self._engine.plan.shape
        left, entering = len(batch.rows), []
        if self._waiting is not None:
            entering = self._waiting.take(shape.rows - left, self._most_tokens(batch) - left)
        if have_left:
            table.compact(moves, left)
        if entering:
            longest = max(len(row.prompt.token_ids) for row in entering)
            batch.admit(entering, self._sharing if longest <= shape.sharing else None)
            table.admit(self._sizes(entering))
        if have_left or entering:
            self._engine.cache.change_rows(k, moves, left, len(entering))

    def _sizes(self, rows: Sequence[Row]) -> list[tuple[int, int]]:
        """What SlotTable asks of rows."""
        return [(len(row.prompt.token_ids) - self._common, row.max_new) for row in rows]

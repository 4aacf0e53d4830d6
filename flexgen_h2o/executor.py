"""Walks the zig-zag order: loads ahead, computes, stores behind. One loop for sequential and overlapped runs.

Knows tiers and rows; of the model it knows only that a family computes a layer from named tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from flexgen_h2o import interrupts
from flexgen_h2o.config import Layer, Rotary
from flexgen_h2o.engine import Engine
from flexgen_h2o.generation import Decoding, MicroBatch, Row, SweepInput
from flexgen_h2o.handoff import Handoff
from flexgen_h2o.hidden import HiddenKey
from flexgen_h2o.kernels import slots as slot_kernels
from flexgen_h2o.kernels.rotary import Rotation
from flexgen_h2o.kernels.sparse_slots import attend_sparse
from flexgen_h2o.kvcache.attend import SlotAttention, attend_prompts, attend_slots
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.kvcache.eviction.policy import RANKS
from flexgen_h2o.kvcache.hook import Hook, unit_columns
from flexgen_h2o.kvcache.slots import Joining, SlotTable, joining
from flexgen_h2o.kvcache.store import CacheKey
from flexgen_h2o.kvcache.view import PartView
from flexgen_h2o.models import Weights, family_of
from flexgen_h2o.planner.memory import kv_layout
from flexgen_h2o.schedule import Step, weight_sequence, zigzag
from flexgen_h2o.tiers.events import Waitable, wait_all
from flexgen_h2o.tiers.ring import Region
from flexgen_h2o.tiers.stream import Stream
from flexgen_h2o.weights import WeightStream

ATTENTION_KINDS = ("attention", "block")
OnFinished = Callable[[list[Row]], None]


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of each sweep of a block, and of each layer of each sweep (all its micro-batches)."""

    sweeps: list[float]
    layers: list[float]


@dataclass(frozen=True)
class KvUse:
    """KV columns that the rows of a block held in each sweep, and those that the full cache would have held.

    Columns of all rows and layers; a column is one key and one value of every kv-head.
    """

    held: list[int]
    full: list[int]


@dataclass(frozen=True)
class _CacheStep:
    """The KV unit of one attention layer while it is computed. new, slots: None in the prefill sweep."""

    hook: Hook
    region: Region | None
    views: list[PartView]
    store_whole: bool
    new: Joining | None = None
    slots: list[torch.Tensor] | None = None

    @property
    def columns(self) -> int:
        """Slots in use of the fullest row, once the layer is computed."""
        return int((self.hook.rows.kept if self.new is None else self.new.filled).max())


class Executor:
    """Runs blocks on an engine, one after another.

    max_sweeps: an upper bound of sweeps over all blocks (weights are loaded ahead across blocks). on_finished gets
    rows as they finish. After each block `times` holds its seconds and `kv_use` its columns.
    """

    def __init__(
        self, engine: Engine, eviction: Eviction, decoding: Decoding, on_finished: OnFinished, max_sweeps: int
    ) -> None:
        self._engine, self._eviction, self._decoding, self._on_finished = engine, eviction, decoding, on_finished
        self._family = family_of(engine.spec)
        self._workspace = engine.workspace()
        self._layers: tuple[Layer, ...] = engine.layers.layers
        self._overlap = engine.policy.overlap
        self._handoff = Handoff(engine.wire, engine.device.fence) if engine.wire is not None else None
        units = tuple(layer.unit for layer in self._layers)
        ahead = len(units) if self._overlap else 0
        self._weights = WeightStream(
            engine.weights, engine.weight_ring(), weight_sequence(max_sweeps, units), ahead,
            engine.unpacked_weights(), engine.int8_workspace(),
        )  # fmt: skip
        sparsity = engine.policy.attn_sparsity
        self._slot_attention: SlotAttention = (
            slot_kernels.attend if sparsity == 1 else partial(attend_sparse, share=sparsity)
        )
        self._scale = engine.spec.head_dim**-0.5
        self._rotation = _rotation(engine.spec.rotary, engine.device.torch_device)
        self._is_rolling = RANKS in eviction.needs.record
        self.times = BlockTimes([], [])
        self.kv_use = KvUse([], [])

    def run_block(
        self, rows: Sequence[Sequence[Row]], order: Iterator[Step] | None = None,
        on_tokens: Callable[[int], None] = lambda count: None,
    ) -> None:  # fmt: skip
        """Generate for the rows of a block, given as micro-batches.

        `order` may cut the schedule short (debug modes); by default it runs until every row has finished.
        on_tokens hears how many tokens a micro-batch has got.
        """
        self._on_tokens = on_tokens
        self._batches = [MicroBatch(r) for r in rows]
        sweeps = max(r.max_new for batch in rows for r in batch)
        self._begin(sweeps)
        stage = self._handoff
        if stage is not None:
            stage.begin_block([len(r) for r in rows])
        self.times, self.kv_use = BlockTimes([], []), KvUse([], [])
        sweep_start = layer_start = time.perf_counter()
        # A stage hears of a sweep's tokens in the next one: the last sweep of all has nothing else.
        for step in order or self._order(sweeps + (stage is not None), len(rows)):
            interrupts.check()
            if step.layer == 0 and stage is not None:
                self._hear(step, stage)
            if self._batches[step.micro_batch].rows:
                self._run_step(step)
            if step.micro_batch == len(rows) - 1:
                now = time.perf_counter()
                self.times.layers.append(now - layer_start)
                layer_start = now
                if step.layer == len(self._layers) - 1:
                    self._end_sweep(now - sweep_start)
                    sweep_start = now
                    if not any(batch.rows for batch in self._batches) and (stage is None or stage.is_over):
                        break
        for stream, store in ((self._cache, self._engine.cache), (self._hidden, self._engine.hidden)):
            stream.drain()
            store.settle()
        if order is None:  # what was still being stored belongs to the block
            self.times.sweeps[-1] += time.perf_counter() - sweep_start
        if stage is not None:  # what the ranks said to each other at the end
            seconds, _, _ = self.times.sweeps.pop(), self.kv_use.held.pop(), self.kv_use.full.pop()
            self.times.sweeps[-1] += seconds

    def finish(self) -> None:
        """Wait for loads still under way; call once after the last block."""
        self._weights.drain()

    def _begin(self, sweeps: int) -> None:
        engine, spec, count = self._engine, self._engine.spec, len(self._batches)
        itemsize, on_host_device, record = engine.dtype.itemsize, engine.device.is_host, self._eviction.needs.record
        self._tables = [
            SlotTable(self._eviction, [(len(r.prompt.token_ids), r.max_new) for r in b.rows], spec.num_blocks)
            for b in self._batches
        ]
        self._places = {id(row): place for b in self._batches for place, row in enumerate(b.rows)}
        engine.cache.begin_block(
            [
                [
                    kv_layout(
                        spec, engine.policy, len(b.rows), table.most_slots(block), record, itemsize, on_host_device
                    )
                    for b, table in zip(self._batches, self._tables, strict=True)
                ]
                for block in range(spec.num_blocks)
            ]
        )
        engine.hidden.begin_block([b.prompt_tokens for b in self._batches], [len(b.rows) for b in self._batches])
        self._inputs: dict[int, SweepInput] = {}
        self._left: dict[int, list[int]] = {}  # where the rows that are left stood at the block's beginning
        self._held = self._full = 0  # columns in this sweep
        ahead = (engine.plan.depth.cache, engine.plan.depth.hidden) if self._overlap else (0, 0)
        self._cache: Stream[CacheKey] = Stream(
            engine.cache_ring(), self._cache_keys(sweeps, count), engine.cache, ahead[0]
        )
        self._hidden: Stream[HiddenKey] = Stream(
            engine.hidden_ring(), self._hidden_keys(sweeps, count), engine.hidden, ahead[1]
        )

    def _order(self, sweeps: int, count: int) -> Iterator[Step]:
        together = None if self._handoff is None else self._engine.policy.num_gpu_batches
        return zigzag(sweeps, len(self._layers), count, together)

    def _cache_keys(self, sweeps: int, count: int) -> Iterator[CacheKey]:
        for s in self._order(sweeps, count):
            layer = self._layers[s.layer]
            if layer.kind in ATTENTION_KINDS:
                yield s.sweep, layer.block, s.micro_batch

    def _hidden_keys(self, sweeps: int, count: int) -> Iterator[HiddenKey]:
        for s in self._order(sweeps, count):
            yield s.sweep, s.layer, s.micro_batch

    def _hear(self, step: Step, stage: Handoff) -> None:
        """The tokens of a micro-batch's last sweep, where another rank has chosen them."""
        k = step.micro_batch
        with self._engine.timeline.span("wait", "receive"):
            tokens = stage.hear(step.sweep, k)
        if tokens:
            self._accept(k, tokens)
        stage.check(k, len(self._batches[k].rows))

    def _run_step(self, step: Step) -> None:
        engine, layer, k = self._engine, self._layers[step.layer], step.micro_batch
        for stream in (self._weights, self._cache, self._hidden):
            stream.prefetch()
        if step.layer == 0:
            self._begin_sweep(k)
        phase = "prefill" if self._inputs[k].is_prefill else "decode"
        span, key = engine.timeline.span, (step.sweep, step.layer, k)
        is_fresh = layer.unit != self._weights.unit
        with span("wait", "load_weight"):
            w = self._weights.open(layer.unit, engine.device.fence())
        if is_fresh and engine.policy.compress_weight:
            with span("compute", "unpack_weights"):
                w = self._weights.unpack(engine.device.fence)
        self._weights.prefetch()  # into the space of the unit that has just been closed
        with span("wait", f"load_hidden {phase}"):
            region = self._hidden.take(key)
            x = engine.hidden.open(key, region)
        cache: _CacheStep | None = None
        if layer.kind in ATTENTION_KINDS:
            with span("wait", f"load_cache {phase}"):
                cache = self._open_cache(step, layer)
        with span("compute", f"compute_layer {phase}"):
            self._compute(k, layer, w, x, cache)
        if cache is not None:
            self._watch_slots(k, cache)
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

    def _open_cache(self, step: Step, layer: Layer) -> _CacheStep:
        k, fed = step.micro_batch, self._inputs[step.micro_batch]
        key = (step.sweep, layer.block, k)
        region = self._cache.take(key)
        views, store_whole = self._engine.cache.open(key, region)
        rows = self._tables[k].at(layer.block, self._left[k])
        hook = Hook(self._eviction, layer.block, rows, self._engine.spec.num_kv_heads)
        if fed.is_prefill:
            self._count_columns(rows.kept, fed)
            return _CacheStep(hook, region, views, store_whole)
        new = joining(rows, torch.tensor(fed.past))
        self._count_columns(new.filled, fed)
        return _CacheStep(hook, region, views, store_whole, new, hook.next_slots(views, new))

    def _close_cache(self, step: Step, layer: Layer, cache: _CacheStep) -> None:
        key, engine = (step.sweep, layer.block, step.micro_batch), self._engine
        slots = None if cache.store_whole else cache.slots
        stores = engine.cache.close(key, cache.region, cache.columns, slots, engine.device.fence())
        self._cache.give_back(cache.region, stores)
        self._settle(stores)

    def _end_sweep(self, seconds: float) -> None:
        self.times.sweeps.append(seconds)
        self.kv_use.held.append(self._held)
        self.kv_use.full.append(self._full)
        self._held = self._full = 0

    def _count_columns(self, held: torch.Tensor, fed: SweepInput) -> None:
        """held: (sequences,) columns of one layer."""
        self._held += int(held.sum())
        self._full += sum(fed.past) + sum(fed.counts)

    def _watch_slots(self, k: int, cache: _CacheStep) -> None:
        """Show what a decode step's attention saw to whoever watches."""
        watch = self._decoding.watches.slots
        if watch is not None and cache.new is not None:
            rows = [r.prompt.index for r in self._batches[k].rows]
            watch(rows, cache.new.filled, unit_columns(cache.hook, cache.views, cache.new))

    def _begin_sweep(self, k: int) -> None:
        """Fix what micro-batch `k` feeds into this sweep, and which of its rows are left."""
        fed = self._batches[k].sweep_input()
        self._inputs[k] = fed
        self._left[k] = [self._places[id(row)] for row in self._batches[k].rows]
        self._engine.hidden.begin_sweep(k, len(fed.ids))

    def _compute(self, k: int, layer: Layer, w: Weights, x: torch.Tensor, cache: _CacheStep | None) -> None:
        spec, family, ws, fed = self._engine.spec, self._family, self._workspace, self._inputs[k]
        if layer.kind == "receive" and self._handoff is not None:
            self._handoff.take_over(k, x)
        if layer.kind == "embedding":
            family.embed(spec, w, fed.ids.to(x.device), fed.positions.to(x.device), x, ws)
        if cache is not None:
            out = ws.get("mixed", len(x), spec.num_heads * spec.head_dim)
            family.attention(spec, w, x, partial(self._attend, fed, cache, out), ws)
        if layer.kind in ("mlp", "block") and spec.mlp[layer.block]:
            family.mlp(spec, w, x, ws)
        if layer.kind == "head":
            self._head(k, w, x)
        if layer.kind == "send" and self._handoff is not None:
            self._handoff.pass_on(k, len(self._batches[k].rows), x)

    def _attend(self, fed: SweepInput, cache: _CacheStep, out: torch.Tensor, *qkv: torch.Tensor) -> torch.Tensor:
        """Keys are kept as they are rotated here, by the positions of their tokens; rolling, as they come."""
        (q, k, v), rotation, rolls = qkv, self._rotation, self._is_rolling
        if cache.new is None or cache.slots is None:
            if rotation is not None:
                k = k.clone() if rolls else k
                rotation.turn((q, k), fed.positions)
            return attend_prompts((q, k, v), fed.counts, cache.views, cache.hook, self._scale, out, qkv[1])
        if rotation is not None:
            rotation.turn((q,) if rolls else (q, k), cache.new.filled - 1 if rolls else fed.positions)
        return attend_slots(
            (q, k, v), cache.new, cache.slots, cache.views, cache.hook, self._scale, self._slot_attention, out,
            rotation if rolls else None,
        )  # fmt: skip

    def _head(self, k: int, w: Weights, x: torch.Tensor) -> None:
        batch = self._batches[k]
        last = x.index_select(0, self._inputs[k].last().to(x.device))
        logits = self._family.head(self._engine.spec, w, last, self._workspace)
        tokens = self._decoding.choose(batch, logits)
        self._accept(k, tokens)
        if self._handoff is not None:
            self._handoff.tell(k, len(batch.rows), tokens)

    def _accept(self, k: int, tokens: Sequence[int]) -> None:
        """The next token of each row of a micro-batch; those that it ends are handed out, and leave."""
        batch = self._batches[k]
        finished, moves = batch.accept(tokens, self._decoding.end)
        self._on_tokens(len(tokens))
        if finished:
            self._engine.cache.compact(k, moves, len(batch.rows))
            self._on_finished(finished)
        if not batch.rows:
            self._engine.hidden.begin_sweep(k, 0)


def _rotation(rotary: Rotary | None, device: torch.device) -> Rotation | None:
    """None where a model has no rotary embeddings."""
    if rotary is None:
        return None
    return Rotation(torch.tensor(rotary.frequencies, dtype=torch.float32, device=device), rotary.scaling)

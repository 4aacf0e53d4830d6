"""One block of sequences on its way through the layers: what crosses steps and sweeps."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field

from flexgen_h2o.core.model import Layer, ModelSpec
from flexgen_h2o.engine.attention import JoinedAttention, UnitAttention
from flexgen_h2o.engine.decoding import Decoding, SampledTokens
from flexgen_h2o.engine.generation import BlockStats, MicroBatch, Sweep, SweepInput
from flexgen_h2o.engine.loop import WeightStream
from flexgen_h2o.engine.resources import Engine
from flexgen_h2o.engine.scheduler import Scheduler
from flexgen_h2o.engine.sequence import Sequence
from flexgen_h2o.kernels.workspace import Workspace
from flexgen_h2o.kvcache.budgets import BudgetTable, Move
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.kvcache.layout import UnitLayout
from flexgen_h2o.kvcache.part import KVUnit
from flexgen_h2o.kvcache.prefixes import Sharing
from flexgen_h2o.models import Family, Hidden, Weights


@dataclass(frozen=True)
class RunContext:
    """The objects that all blocks of a run share. The executor makes it."""

    engine: Engine
    eviction: Eviction
    family: Family
    attention: UnitAttention
    decoding: Decoding
    on_finished: Callable[[list[Sequence]], None]  # gets sequences as they finish
    sharing: Sharing | None  # when sequences of a micro-batch share a prefix; None: never
    common: int  # tokens that all sequences begin with; their KV entries are held in one copy


@dataclass(eq=False)
class BlockRun:
    """A block of micro-batches while it runs.

    The executor makes it with the fields of the first part, and calls `begin`. Keys of dicts are
    numbers of micro-batches.
    """

    context: RunContext
    weights: WeightStream  # its open unit holds the tensors of the current layer
    batches: list[MicroBatch]
    stats: BlockStats  # counts the layers and sweeps of the block
    on_tokens: Callable[[int], None]  # gets the number of tokens that a micro-batch has got
    # Sequences that take the places of finished ones, as far as the buffers have room.
    waiting: Scheduler | None

    # Set by `begin`.
    tables: list[BudgetTable] = field(init=False)

    # Set by `begin_sweep` for the micro-batch's next sweep.
    inputs: dict[int, SweepInput] = field(default_factory=dict)
    # The parts of each input, which attend one after another.
    parts: dict[int, list[SweepInput]] = field(default_factory=dict)

    # The micro-batches that are computed together. Keys are the kind of layer, then the first of
    # these micro-batches. The executor sets it after the first layer of a sweep.
    joined: dict[str, dict[int, tuple[int, ...]]] = field(default_factory=dict)

    # Set by the executor before a step.
    hidden: Hidden = field(init=False)  # the hidden states of the step's micro-batches
    cache: KVUnit = field(init=False)  # the KV unit of the step, in layers with attention

    # The attention of joined micro-batches, until the last of them has attended. Set by
    # `layer_kinds._attend`.
    attending: JoinedAttention | None = None
    # How many tokens have chosen each expert. `layer_kinds._route` sets it for each micro-batch.
    # `Executor._load_experts` then stores the sum of joined ones at the first of them.
    counts: dict[int, list[int]] = field(default_factory=dict)
    # Micro-batches whose choices are not sorted by expert yet. Set by `layer_kinds._route`.
    unsorted: set[int] = field(default_factory=set)
    # Sampled tokens of micro-batches that are not settled. Set by `layer_kinds._sample`.
    sampled: dict[int, SampledTokens] = field(default_factory=dict)

    # Counts of the current sweep. The executor adds to them and begins new ones.
    sweep: Sweep = field(default_factory=Sweep)

    @property
    def engine(self) -> Engine:
        return self.context.engine

    @property
    def spec(self) -> ModelSpec:
        return self.engine.spec

    @property
    def family(self) -> Family:
        return self.context.family

    @property
    def workspace(self) -> Workspace:
        return self.engine.workspace

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

    def begin(self) -> None:
        """Give each micro-batch its budgets and buffers, and fix its first input."""
        engine = self.engine
        spec = self.spec
        count = len(self.batches)
        blocks = range(spec.num_blocks)
        common = self.context.common
        in_copy = [common if spec.window(block) is None else 0 for block in blocks]
        self.tables = [
            BudgetTable(self.context.eviction, _sizes(batch.rows), len(blocks), in_copy)
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
        decoding = self.context.decoding
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
                tokens = self.sampled.pop(k).take()
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
            self.context.on_finished(finished)
        self._change_rows(k, moves, bool(finished))
        self.begin_sweep(k)

    def append_tokens(self, k: int, tokens: abc.Sequence[int]) -> tuple[list[Sequence], list[Move]]:
        """Append the next token of each sequence of a micro-batch (MicroBatch.append_tokens)."""
        accepted = self.batches[k].append_tokens(tokens, self.context.decoding.end)
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
            batch.admit(entering, self.context.sharing if longest <= shape.sharing else None)
            table.admit(_sizes(entering))
        if have_left or entering:
            self.engine.cache.change_rows(k, moves, left, len(entering))


def _sizes(rows: abc.Sequence[Sequence]) -> list[tuple[int, int, int]]:
    """Return the `rows` of BudgetTable: for each sequence, its size and its prefilled tokens."""
    return [(*row.size, len(row.fed_ids)) for row in rows]

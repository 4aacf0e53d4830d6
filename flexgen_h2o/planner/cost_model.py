"""Count the work of every load, store and step of a sweep, and compute its seconds.

The bytes are those that the engine moves (engine/stores.py, kvcache/store.py). The terms are those
of FlexGen's cost model (Sheng et al. 2023, appendix A.3), with H2O's slots in place of the whole
context. Seconds are the work at the rates of a hardware profile.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from flexgen_h2o.checkpoint.formats import TensorLayout, layouts_of, weight_parts
from flexgen_h2o.core.config import DTYPE_BYTES, Policy
from flexgen_h2o.core.model import (
    Layer,
    LayerKind,
    LayerPlan,
    ModelSpec,
    TensorSpec,
    WeightUnit,
    with_head_rows,
)
from flexgen_h2o.core.units import (
    BLOCK_ROWS,
    FEW_ROWS,
    PAGE,
    READ_THREADS,
    TOKEN_CHUNK,
    TRANSFER_CHUNK,
    WRITE_BACK_STEPS,
    round_up,
)
from flexgen_h2o.engine.loop import ATTENTION_KINDS, JOINED_KINDS, joined
from flexgen_h2o.engine.memory import MemoryPlanner
from flexgen_h2o.engine.weight_units import layer_kinds, loaded_kinds, streamed_bytes
from flexgen_h2o.engine.workload import Block, MicroBatchShape, Workload, shape_of
from flexgen_h2o.kvcache.eviction.policy import RANKS
from flexgen_h2o.kvcache.layout import UnitLayout
from flexgen_h2o.planner.profile import ComputeRates, Curve, HardwareProfile
from flexgen_h2o.tiers.stream import Part, Shares, is_streamed, split_rows

LANES = ("disk_read", "disk_write", "h2d", "d2h")
# Everything that can be busy. The first four are lanes. Device and host compute follow one another,
# because one thread issues both.
RESOURCES = (*LANES, "device_compute", "host_compute")
# On a CPU, attention over packed slots is bound by its arithmetic. A packed value takes as long as
# this many bytes of a cache that is not packed. bench.kernels.decode_kernel measured on a 2-core
# CPU: 12.5 G values/s in 4 bits and 11.0 in 8 bits, while bf16 is read at 13.8 GB/s.
PACKED_VALUE_BYTES = 1.2
# The rates besides products that are slower while the disk is read.
ATTENTION_RATES = (
    "prefill_attention_flops_per_s",
    "device_attention_bytes_per_s",
    "device_scored_attention_bytes_per_s",
    "host_attention_bytes_per_s",
    "host_scored_attention_bytes_per_s",
)
OTHER_RATES = ("elementwise_bytes_per_s", "device_dequantise_bytes_per_s", "logits_per_s")
# HardwareProfile.step_s tells the issuing time of a dense decode step. These are launches that
# other steps add: of attention over prompts, of a router, and of a group of experts. The test
# tests/gpu/test_fake_card.py counts them.
PROMPT_LAUNCHES = 6
ROUTER_LAUNCHES = 7
EXPERTS_LAUNCHES = 6
STEP_COSTS = (
    "kernel_s",
    "step_s",
    "attention_step_s",
    "eviction_step_s",
    "row_s",
    "cache_load_step_s",
)
WHOLE: Shares = (1.0, 0.0, 0.0)
LOAD_LANES = {"disk": "disk_read", "host": "h2d"}  # by the tier that a part is on
STORE_LANES = {"disk": "disk_write", "host": "d2h"}
# Packing one number of the KV cache takes as long as this many bytes of norms and activations.
PACK_BYTES = 6


@dataclass(frozen=True)
class Transfer:
    """Bytes that one lane moves for a load or a store. CostModel.transfer makes and prices it."""

    # One of LANES.
    lane: str
    nbytes: float
    # Number of separate transfers.
    pieces: float
    # Seconds that it occupies the lane.
    seconds: float
    # The lane of copies between device and host that bytes between disk and device also occupy; ""
    # for other bytes.
    link: str = ""
    # Seconds that it occupies `link`.
    link_s: float = 0.0
    # Seconds that it takes from compute.
    taken_s: float = 0.0


@dataclass(frozen=True)
class StepCost:
    """The cost of one (layer, micro-batch) step. CostModel.step makes it.

    The step may compute for several micro-batches that are joined.
    """

    # Seconds that the device computes.
    device_s: float
    # Seconds that the host computes while the device waits.
    host_s: float = 0.0
    # Seconds of the thread that issues the step, in addition to the step's kernels.
    issue_s: float = 0.0
    # Rows of the step's largest product.
    rows: int = 0
    kv_load: tuple[Transfer, ...] = ()
    kv_store: tuple[Transfer, ...] = ()
    hidden_load: tuple[Transfer, ...] = ()
    hidden_store: tuple[Transfer, ...] = ()

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """All loads and stores."""
        return (*self.kv_load, *self.kv_store, *self.hidden_load, *self.hidden_store)


@dataclass(frozen=True)
class Machine:
    """The machine of a run, as the planner sees it."""

    # Measured speeds.
    profile: HardwareProfile
    # Name of the dtype that the run computes in.
    dtype: str
    # May differ from the profile's field. On a CPU, a device tier with its own budget stands in for
    # a card.
    device_is_host: bool

    @property
    def itemsize(self) -> int:
        """Bytes of one number of the dtype."""
        return DTYPE_BYTES[self.dtype]

    @property
    def has_card(self) -> bool:
        """Whether the device is a card."""
        return not self.device_is_host and not self.profile.device_is_host


@dataclass(frozen=True)
class CostModel:
    """Work of a run under one policy, and its seconds on one machine.

    Raises UsageError if the machine's profile has no rates of the dtype.
    """

    spec: ModelSpec
    policy: Policy
    need: Workload
    machine: Machine
    # Price products as if each matrix lay on more than one tier, whatever the shares.
    splits: bool = False

    def __post_init__(self) -> None:
        self.machine.profile.rates(self.machine.dtype)

    @cached_property
    def rates(self) -> ComputeRates:
        """Compute rates of the run's dtype."""
        return self.machine.profile.rates(self.machine.dtype)

    @cached_property
    def memory(self) -> MemoryPlanner:
        """Planner of what the run holds."""
        machine = self.machine
        return MemoryPlanner(self.spec, self.policy, machine.itemsize, machine.device_is_host)

    @property
    def reads_codes(self) -> bool:
        """Whether products of few rows read the codes of matrices that are whole on the device."""
        return (
            not self.splits
            and not self.memory.device_is_host
            and bool(self.memory.form.decoder_in_products)
        )

    def with_head_rows(self, rows: int) -> CostModel:
        """Return the costs of the model with its head cut into parts of so many rows."""
        return replace(self, spec=with_head_rows(self.spec, rows)) if rows else self

    def cut(self, depth: int) -> CostModel:
        """Return the costs of only `depth` transformer blocks, evenly taken from all."""
        spec = self.spec
        need = self.need
        chosen = [round(i * (spec.num_blocks - 1) / (depth - 1)) for i in range(depth)]
        slots, kept = (tuple(values[i] for i in chosen) for values in (need.slots, need.kept))
        cut = spec.of_blocks(chosen)
        cut_need = replace(need, slots=slots, kept=kept, windows=cut.windows)
        return replace(self, spec=cut, need=cut_need)

    @cached_property
    def _layouts(self) -> dict[tuple[int, int, tuple[str, ...]], UnitLayout]:
        return {}

    def kv_layout(self, block: int, batch: MicroBatchShape) -> UnitLayout:
        """Return the layout of the KV unit of a micro-batch in a transformer block."""
        record = self.memory.record_in(block, self.need.record)
        key = self.need.slots_of(block, batch.longest), batch.rows, record
        if key not in self._layouts:
            self._layouts[key] = self.memory.kv_layout(batch.rows, key[0], record)
        return self._layouts[key]

    @cached_property
    def layers(self) -> LayerPlan:
        """Layers and weight units of a sweep."""
        return self.memory.layers

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """By layer, the index of the first layer that costs the same."""
        return layer_kinds(self.layers, tuple(self.need.kinds))

    @cached_property
    def loaded_kinds(self) -> Counter[int]:
        """By kind of layer (an index of `kinds`), how often a sweep loads weights of the kind.

        A tied head and the next embedding are one load.
        """
        return loaded_kinds(self.layers, self.kinds)

    @cached_property
    def _step_costs(self) -> dict[tuple[int, MicroBatchShape, int, int | None], StepCost]:
        return {}

    @cached_property
    def _weight_loads(self) -> dict[tuple[int, int], tuple[Transfer, ...]]:
        return {}

    @cached_property
    def _decoded(self) -> dict[tuple[int, bool], StepCost]:
        return {}

    @cached_property
    def _launch_s(self) -> float:
        """Seconds per launch of the thread that issues it; 0 if the device is not asynchronous."""
        return self.machine.profile.kernel_s if self.machine.profile.device_is_asynchronous else 0.0

    @cached_property
    def _unpacks(self) -> bool:
        """Whether a card unpacks slots before it attends to them.

        It does not if one launch reads them as they are (KVUnit.is_one_launch).
        """
        return self.policy.attn_sparsity < 1 or not self.need.needs.in_one_launch

    @cached_property
    def _kind_of(self) -> dict[int, int]:
        """By weight unit, the first layer that costs the same as a layer of the unit (indices)."""
        return {
            layer.unit: kind for kind, layer in zip(self.kinds, self.layers.layers, strict=True)
        }

    def weight_load(self, unit: int, tokens: int) -> tuple[Transfer, ...]:
        """Return the cost of one load of a weight unit.

        If groups of experts wait for the router, this is the expected cost in a sweep.
        tokens: tokens that the whole block feeds into the sweep.
        """
        key = self._kind_of[unit], tokens if self.memory.waits_for_router else 0
        if key not in self._weight_loads:
            experts = len(self.layers.layers[key[0]].experts)
            share = _share_used(self, experts, tokens) if self.memory.waits_for_router else 1.0
            moves = weight_moves(self, self.layers.units[unit])
            self._weight_loads[key] = tuple(_scaled(move, share) for move in moves)
        return self._weight_loads[key]

    def weights_s(self, tokens: int) -> float:
        """Return the seconds that loads of weights occupy the busiest lane in a sweep.

        tokens: tokens that the whole block feeds into the sweep.
        """
        lanes = dict.fromkeys(LANES, 0.0)
        for index, count in self.loaded_kinds.items():
            for load in self.weight_load(self.layers.layers[index].unit, tokens):
                lanes[load.lane] += count * load.seconds
        return max(lanes.values())

    def decodes_in_products(self, layer: Layer) -> float:
        """Return how fast a CPU decodes experts while it multiplies; 0 if it does not do that.

        The speed is a multiple of the speed at which 4-bit weights are unpacked into the dtype.
        """
        if layer.kind != "experts" or not self.memory.device_is_host:
            return 0.0
        return self.rates.decode_speedup.get(self.memory.form.decoder_in_products, 0.0)

    def decoding(
        self, index: int, steps: Iterable[tuple[MicroBatchShape, int]], sweep: int
    ) -> StepCost:
        """Return the cost of unpacking a layer's weight unit for some steps of the layer.

        steps: the values that `steps_of` returns.

        A matrix is not unpacked if all of these steps multiply by its codes as they are. A table in
        which an embedding looks up is unpacked.
        """
        layer = self.layers.layers[index]
        if self.memory.form.decoded_at != "load":
            return StepCost(0.0)
        few = self.reads_codes and layer.unit != self.layers.layers[0].unit
        few = few and all(
            self.step(index, batch, sweep, tokens).rows <= FEW_ROWS for batch, tokens in steps
        )
        key = self._kind_of[layer.unit], few
        if key not in self._decoded:
            speedup = self.decodes_in_products(layer) or self.rates.decode_speedup.get(
                self.memory.form.decoder, 1.0
            )
            rate = self.rates.device_dequantise_bytes_per_s * speedup
            layouts = layouts_of(self.memory.form, self.layers.units[layer.unit].tensors)
            sizes = [
                math.prod(x.shape)
                for x in layouts
                if x.decoded_row_bytes and not (few and coded_bytes(self, x))
            ]
            self._decoded[key] = StepCost(
                sum(sizes) * self.memory.itemsize / rate, issue_s=len(sizes) * self._launch_s
            )
        return self._decoded[key]

    def step(
        self, layer_index: int, batch: MicroBatchShape, sweep: int, tokens: int | None = None
    ) -> StepCost:
        """Return the cost of one (layer, micro-batch) step.

        tokens: tokens that the step computes outside attention; None for those of the batch (see
            `layer_work`).
        """
        key = (self.kinds[layer_index], batch, sweep, tokens)
        if key not in self._step_costs:
            self._step_costs[key] = self._step(layer_index, batch, sweep, tokens)
        return self._step_costs[key]

    def _step(self, index: int, batch: MicroBatchShape, sweep: int, tokens: int | None) -> StepCost:
        p = self.machine.profile
        layer = self.layers.layers[index]
        fed = tokens_of(batch, sweep)
        cost = self._computing(layer, batch, sweep, fed if tokens is None else tokens)
        # The step is left out if no token needs its experts.
        share = _share_used(self, len(layer.experts), fed)
        issue_s = p.step_s * share
        # One launch multiplies few rows of all experts. With more rows, each expert has its own.
        if layer.kind == "experts":
            matrices = len(self._matrix_parts(self.layers.units[layer.unit].tensors))
            apart = matrices if cost.rows > FEW_ROWS else 0
            issue_s += self._launch_s * (EXPERTS_LAUNCHES + apart) * share
        elif self.memory.device_is_host:
            issue_s += p.row_s * batch.rows
        if layer.kind in ATTENTION_KINDS:
            kv_load = kv_load_moves(self, layer.block, batch, sweep)
            kv_store = kv_store_moves(self, layer.block, batch, sweep)
            cost = replace(cost, kv_load=kv_load, kv_store=kv_store)
            issue_s += p.attention_step_s + (
                p.eviction_step_s if self._evicts(layer.block) else 0.0
            )
            issue_s += p.cache_load_step_s if kv_load else 0.0
            routes = layer.kind == "attention" and self.spec.experts_of(layer.block)
            issue_s += self._launch_s * (
                PROMPT_LAUNCHES * (sweep == 0) + (ROUTER_LAUNCHES if routes else 0)
            )
        load = hidden_moves(self, batch, sweep, store=False) if index else ()
        store = hidden_moves(self, batch, sweep, store=True) if index < len(self.kinds) - 1 else ()
        in_graphs = self.memory.makes_graphs(self.need.needs.in_one_launch)
        if sweep and p.device_is_asynchronous and in_graphs:
            issue_s = min(issue_s, p.graph_step_s)
        return replace(
            cost,
            issue_s=issue_s,
            hidden_load=tuple(_scaled(move, share) for move in load),
            hidden_store=tuple(_scaled(move, share) for move in store),
        )

    def _evicts(self, block: int) -> bool:
        """Whether the KV entries of a transformer block are evicted by their scores."""
        return bool(self.need.needs.record) and self.spec.window(block) is None

    @cached_property
    def _most_joined(self) -> dict[str, int]:
        """By kind of layer, the most tokens of joined micro-batches; empty if none are joined."""
        shape = shape_of(self.policy, self.need)
        return (
            {}
            if self.memory.hidden_is_streamed
            else {kind: shape.most_joined(kind) for kind in JOINED_KINDS}
        )

    def steps_of(
        self, kind: LayerKind, block: Sequence[MicroBatchShape], sweep: int
    ) -> dict[int, tuple[MicroBatchShape, int]]:
        """Return the steps of a layer of this kind, by the index of the micro-batch.

        Each step is (batch, tokens). `tokens` counts what the step computes outside attention. The
        first of joined micro-batches (loop.joined) computes the tokens of all of them. Attention
        layers have a step for every micro-batch. In other layers only the first of them has one,
        for the joined batch.
        """
        tokens = [tokens_of(batch, sweep) for batch in block]
        most = self._most_joined.get(kind, 0)
        if not most or len(block) == 1:
            return dict(enumerate(zip(block, tokens, strict=True)))
        runs = joined(tokens, most)
        computed = {first: sum(tokens[k] for k in run) for first, run in runs.items()}
        if kind in ATTENTION_KINDS:
            return {k: (batch, computed.get(k, 0)) for k, batch in enumerate(block)}
        return {
            first: (MicroBatchShape.joined([block[k] for k in run]), computed[first])
            for first, run in runs.items()
        }

    # ---- computing

    def _computing(self, layer: Layer, batch: MicroBatchShape, sweep: int, tokens: int) -> StepCost:
        """Return the seconds of computing one (layer, micro-batch) step, and its rows.

        tokens: tokens that the step computes outside attention.
        """
        spec = self.spec
        kind = layer.kind
        tensors = self.layers.units[layer.unit].tensors
        if kind == "embedding":
            return StepCost(self._elementwise_s(3.0 * tokens * spec.hidden_size))
        if kind == "head":
            tensors = spec.head if spec.shares_table else tensors
            choosing_s = batch.rows * len(layer.rows) / self.rates.logits_per_s
            return StepCost(self.products_s(tensors, batch.rows) + choosing_s, rows=batch.rows)
        if kind == "experts":
            return self._experts(len(layer.experts), tensors, tokens)
        device_s = self.products_s(tensors, tokens)
        device_s += self._elementwise_s(tokens * _elementwise_width(spec, kind))
        if kind == "mlp":
            return StepCost(device_s, rows=tokens)
        attention_s, host_s = (
            self._decode_attention(layer.block, batch, sweep)
            if sweep
            else self._prompt_attention(layer.block, batch)
        )
        return StepCost(device_s + attention_s, host_s, rows=tokens)

    def _elementwise_s(self, numbers: float) -> float:
        """Return the seconds in which norms and activations read and write so many numbers."""
        return numbers * self.memory.itemsize / self.rates.elementwise_bytes_per_s

    def _experts(self, size: int, tensors: tuple[TensorSpec, ...], tokens: int) -> StepCost:
        """Return the cost of computing a group of `size` experts.

        `per_token` experts of a block compute each token. The choice is assumed to be even.
        """
        experts = self.spec.experts
        assert experts is not None
        used = experts.share_used(tokens) * size
        pairs = tokens * experts.per_token * size / experts.count
        # The experts of a model are alike, so the first one's products stand for those of any.
        # Threads share the products of all experts (kernels/linear.grouped_linear). That takes as
        # long as one matrix with the rows of all of them.
        rows = max(1, round(pairs / used))
        device_s = self.products_s(tensors, rows, size, used)
        # Numbers that are gathered, normed, gated, weighed and added.
        width = 8 * self.spec.hidden_size + 4 * experts.ffn_size
        return StepCost(device_s + self._elementwise_s(pairs * width), rows=rows)

    def _column(self, block: int, batch: MicroBatchShape) -> tuple[int, float]:
        """Return (bytes of the slots, elementwise bytes of packing them) of one KV entry.

        Both count all kv-heads of one sequence together.
        """
        values = 2 * self.spec.num_kv_heads * self.spec.head_dim
        packing = float(PACK_BYTES * values * self.policy.compress_cache)
        return self.spec.num_kv_heads * self.kv_layout(block, batch).column_bytes, packing

    def _prompt_attention(self, block: int, batch: MicroBatchShape) -> tuple[float, float]:
        """Return the seconds of device and host for attention over prompts."""
        spec = self.spec
        column = 2 * spec.num_kv_heads * spec.head_dim * self.memory.itemsize
        stored, packing = self._column(block, batch)
        kept = batch.rows * self.need.columns(block, 0, batch.mean_len)
        # If attention runs on the host, kept KV entries go there as they are written.
        off_device = (
            1.0 - self.policy.cache_shares[0]
            if self.memory.attends_on_host and not self.memory.device_is_host
            else 0.0
        )
        # Shared prefixes are copied in front of the sequences' own KV entries.
        copied = 2.0 * batch.tokens * column if batch.saved else 0.0
        flops = float(batch.pairs * spec.num_heads * spec.head_dim)
        window = spec.window(block)
        # A query does not read the KV entries that have left its window.
        if window is not None:
            flops *= 1 - max(0.0, 1 - window / batch.mean_len) ** 2
        device_s = self._prompt_flops_s(2.0 * flops)
        if self.need.needs.query_rows is None and window is None:
            device_s += flops / self.rates.column_sums_flops_per_s.at(self.need.prompt_len)
        moved = copied + kept * (2.0 * stored + packing)
        return device_s + moved / self.rates.elementwise_bytes_per_s, self._crossing_s(
            kept * stored * off_device
        )

    def _decode_attention(
        self, block: int, batch: MicroBatchShape, sweep: int
    ) -> tuple[float, float]:
        """Return the seconds of device and host for attention over the sequences' KV slots."""
        spec = self.spec
        memory = self.memory
        p = self.machine.profile
        rates = self.rates
        q_width = spec.num_heads * spec.head_dim
        values = 2 * spec.num_kv_heads * spec.head_dim
        stored, packing = self._column(block, batch)
        columns = float(batch.rows * self.need.columns(block, sweep, batch.mean_len))
        beside = spec.num_kv_heads * self.kv_layout(block, batch).beside_bytes
        read = columns * stored + batch.rows * beside
        in_window = spec.window(block) is not None
        common = 0 if in_window else self.need.common
        attends_apart = memory.attends_on_host and not memory.device_is_host
        on_device = memory.cache_shares[0] if attends_apart else 1.0
        device_kv = read * on_device + common * stored
        host_kv = read * (1 - on_device)
        packed = columns * values * self.policy.compress_cache
        moved = batch.rows * packing
        # With rolling positions, keys are rotated as they are read.
        if RANKS in self.need.needs.record and spec.rotary and not in_window:
            moved += 6.0 * columns * spec.num_kv_heads * spec.rotary.width * memory.itemsize
        device_s = moved / rates.elementwise_bytes_per_s
        waiting = 1 + _waiting_columns(self.need.gen_len)
        overlay = 2.0 * memory.cache_shares[2] * batch.rows * stored * waiting
        device_s += overlay / p.overlay_bytes_per_s
        # The queries of all sequences read the common prefix together. Its bytes count once, and
        # its FLOPs as those of prompts.
        device_s += self._prompt_flops_s(4.0 * batch.rows * common * q_width)
        # Attention that reads packed slots in place takes as long as for so many unpacked bytes.
        packed_share = packed * PACKED_VALUE_BYTES / (device_kv + host_kv)
        if device_kv:
            seen = device_kv
            if p.device_is_host:
                seen *= max(1.0, packed_share)
            elif packed and self._unpacks:
                seen *= packed * memory.itemsize / (device_kv + host_kv)
                device_s += seen / rates.device_dequantise_bytes_per_s
            device_s += seen / self._attention_rate("device") + p.kernel_s
        host_s = self._crossing_s(
            (1 - on_device) * batch.rows * (2 * q_width + values) * memory.itemsize
        )
        if host_kv:
            host_s += host_kv * max(1.0, packed_share) / self._attention_rate("host") + p.kernel_s
            # A card computes sequences side by side; the host evicts them one by one.
            if self._evicts(block):
                host_s += p.row_s * batch.rows * host_kv / (host_kv + device_kv)
        return device_s, host_s

    def _attention_rate(self, side: str) -> float:
        """Return the bytes of KV slots that decode attention reads per second on host or device."""
        scored = "_scored" if self.need.needs.record else ""
        curve: Curve = getattr(self.rates, f"{side}{scored}_attention_bytes_per_s")
        return curve.at(self.spec.head_dim)

    def _prompt_flops_s(self, flops: float) -> float:
        """Return the seconds of causal attention."""
        if not flops:
            return 0.0
        rate = self.rates.prefill_attention_flops_per_s.at(self.need.prompt_len)
        return flops / rate + self.machine.profile.kernel_s

    def _crossing_s(self, nbytes: float) -> float:
        """Return the seconds in which bytes cross between device and host while a step waits."""
        p = self.machine.profile
        return nbytes / p.d2h_bytes_per_s + 4 * p.transfer_s if nbytes else 0.0

    def _matrix_parts(self, tensors: Iterable[TensorSpec]) -> tuple[tuple[int, Part], ...]:
        """Return (columns, rows) of each part of a matrix that is multiplied on its tier.

        A split matrix takes several products. A packed matrix is whole once it is unpacked, or is
        multiplied as it is.
        """
        shares = WHOLE if self.memory.form.decoded_at == "load" else self.memory.weight_shares
        return _part_shapes(tuple(t.shape for t in tensors if len(t.shape) == 2), shares)

    def products_s(
        self, tensors: tuple[TensorSpec, ...], rows: int, experts: int = 1, used: float = 1.0
    ) -> float:
        """Return the seconds of multiplying `rows` rows by all matrices of a weight unit.

        Resident parts of matrices are blocked.

        experts: of a unit of so many alike experts, the matrices of the first one count.
        used: how many times as many rows its matrices have.
        """
        parts = self._matrix_parts(tensors)
        parts = parts[: len(parts) // experts]
        blocks = self.memory.blocks_rows
        # Bytes of the codes that a product reads as they are (kernels/coded.py).
        coded = [0.0] * len(parts)
        if rows <= FEW_ROWS and self.reads_codes:
            layouts = layouts_of(self.memory.form, tensors)
            coded = [used * coded_bytes(self, layout) for layout in layouts if layout.is_matrix]
            coded = coded[: len(parts)]
        seconds = 0.0
        for (columns, part), nbytes in zip(parts, coded, strict=True):
            outer = max(1, round(used * part.rows))
            blocked = blocks and part.tier != "disk" and columns % BLOCK_ROWS == 0
            seconds += (
                self._coded_product_s(rows, columns, outer, nbytes)
                if nbytes
                else self._product_s(rows, columns, outer, blocked)
            )
        return seconds

    def _coded_product_s(self, rows: int, inner: int, outer: int, nbytes: float) -> float:
        """Return the seconds of a product of few rows that reads codes as they are.

        The measured rates of few rows include reading a matrix in the dtype. Arithmetic alone
        reaches the rate of many rows.
        """
        fastest = self.rates.matmul_rate(TOKEN_CHUNK, inner, outer)
        read_s = nbytes / self.machine.profile.device_memory_bytes_per_s
        return max(read_s, 2.0 * rows * inner * outer / fastest) + self.machine.profile.kernel_s

    def _product_s(self, rows: int, inner: int, outer: int, blocked: bool) -> float:
        """Return the seconds of (rows, inner) x (inner, outer), at most TOKEN_CHUNK rows at a time.

        blocked: whether the matrix is held in the blocked layout.
        """
        rates = self.rates
        seconds = 0.0
        whole, rest = divmod(rows, TOKEN_CHUNK)
        for count, chunk in ((whole, TOKEN_CHUNK), (1, rest)):
            if count and chunk:
                rate = rates.matmul_rate(chunk, inner, outer)
                if self.memory.form.in_int8:
                    in_4_bits = self.memory.form.decoded_at == "product"
                    rate *= (rates.int4_speedup if in_4_bits else rates.int8_speedup).at(chunk)
                elif blocked:
                    rate *= rates.blocked_speedup.at(chunk)
                flops = 2.0 * chunk * inner * outer
                seconds += count * (flops / rate + self.machine.profile.kernel_s)
        return seconds

    # ---- transfers

    def transfer(self, lane: str, nbytes: float, pieces: float, crosses: bool = False) -> Transfer:
        """Return a transfer with its cost.

        crosses: whether the bytes go between disk and device.

        If bytes cross from disk to the device, each reader thread copies its own bytes. On an
        asynchronous device the copy overlaps with the thread's next read. Otherwise READ_THREADS
        threads share the copying.
        """
        p = self.machine.profile
        pinned = self.policy.pin_weight
        if lane in ("h2d", "d2h"):
            rate = getattr(p, f"{lane}_bytes_per_s" if pinned else f"{lane}_unpinned_bytes_per_s")
            return Transfer(lane, nbytes, pieces, nbytes / rate + pieces * p.transfer_s)
        reads = lane == "disk_read"
        each = 1 / (p.disk_read_bytes_per_s if reads else p.disk_write_bytes_per_s)
        link, link_rate = ("h2d", p.h2d_bytes_per_s) if reads else ("d2h", p.d2h_bytes_per_s)
        if crosses:
            both = each + 1 / link_rate
            # The reader thread itself copies memory that is not pinned.
            beside = p.device_is_asynchronous and pinned
            each = each if reads and beside else max(each, both / READ_THREADS) if reads else both
        seconds = nbytes * each + pieces * p.disk_request_s / (READ_THREADS if reads else 1)
        taken_s = 0.0
        if reads and self.policy.overlap:
            taken_s = short_requests(nbytes, pieces) * p.short_read_compute_s
        if not crosses:
            return Transfer(lane, nbytes, pieces, seconds, taken_s=taken_s)
        link_s = nbytes / link_rate + pieces * p.transfer_s
        return Transfer(lane, nbytes, pieces, max(seconds, link_s), link, link_s, taken_s)

    def busy(self, block: Sequence[MicroBatchShape], sweep: int) -> dict[str, float]:
        """Return the seconds that each resource works in a sweep of a block.

        The largest of them bounds the sweep from below if everything overlaps. Their sum does if
        nothing overlaps. Seconds that loads take from compute count as compute.
        """
        return self._busy(*self._of_sweep(block, sweep))

    def _busy(
        self, moved: Sequence[tuple[Transfer, int]], steps: Sequence[tuple[StepCost, int]]
    ) -> dict[str, float]:
        """Return busy seconds by resource, of transfers and steps with the number of each."""
        found = dict.fromkeys(RESOURCES, 0.0)
        # On an asynchronous device the thread issues while the device computes.
        beside = self.machine.profile.device_is_asynchronous
        issue_s = 0.0
        for transfer, times in moved:
            found[transfer.lane] += times * transfer.seconds
            found["device_compute"] += times * transfer.taken_s
            if transfer.link:
                found[transfer.link] += times * transfer.link_s
        for cost, times in steps:
            device_s = cost.device_s if beside else cost.device_s + cost.issue_s
            if not self.policy.overlap:  # each step is waited for
                device_s = max(device_s, cost.issue_s)
            found["device_compute"] += times * device_s
            found["host_compute"] += times * cost.host_s
            issue_s += times * cost.issue_s
        found["device_compute"] = max(found["device_compute"], issue_s)
        return found

    def _of_sweep(
        self, block: Sequence[MicroBatchShape], sweep: int
    ) -> tuple[list[tuple[Transfer, int]], list[tuple[StepCost, int]]]:
        """Return the transfers and the steps of a sweep, each with its number of occurrences."""
        kinds = {index: self.layers.layers[index].kind for index in self.kinds}
        of_kinds = {
            kind: Counter(self.steps_of(kind, block, sweep).values())
            for kind in set(kinds.values())
        }
        steps = [
            (self.step(index, batch, sweep, tokens), layers * count)
            for index, layers in Counter(self.kinds).items()
            for (batch, tokens), count in of_kinds[kinds[index]].items()
        ]
        steps += [
            (self.decoding(i, of_kinds[kinds[i]], sweep), count)
            for i, count in self.loaded_kinds.items()
        ]
        moved = [
            (load, count)
            for index, count in self.loaded_kinds.items()
            for load in self.weight_load(
                self.layers.layers[index].unit, sum(tokens_of(batch, sweep) for batch in block)
            )
        ]
        for cost, times in steps:
            moved += ((transfer, times) for transfer in cost.transfers)
        return moved, steps

    def with_contention(self, block: Sequence[MicroBatchShape], sweep: int) -> CostModel:
        """Return the costs of this sweep if resources slow each other down while they overlap.

        Disk reads and compute slow each other down, the more the shorter the requests are. So do
        the two directions of the link. Copies to and from a device that is made of ordinary memory
        occupy the cores that compute.
        """
        p = self.machine.profile
        moved, steps = self._of_sweep(block, sweep)
        busy = self._busy(moved, steps)
        compute = busy["device_compute"] + busy["host_compute"]
        if not self.policy.overlap or not compute:
            return self
        read_left = compute_left = rest_left = 1.0
        if busy["disk_read"]:
            longest = max(compute, busy["disk_read"])
            read_left = 1 - compute / longest * (1 - p.disk_read_beside_compute)
            compute_left = 1 - busy["disk_read"] / longest * (1 - p.compute_beside_disk_read)
            # Reads while compute waits take nothing from it.
            taken = sum(times * transfer.taken_s for transfer, times in moved)
            slower = (compute - taken) / compute_left
            rest_left = slower / (slower + taken * compute / longest)
        if p.device_is_host and not self.memory.device_is_host:
            compute_left *= compute / (compute + busy["h2d"] + busy["d2h"])
        slowed = _slowed(p, self.machine.dtype, read_left, compute_left * rest_left, rest_left)
        links = dict[str, Any]()
        for way, other in (("h2d", "d2h"), ("d2h", "h2d")):
            left = (
                1 - min(1.0, busy[other] / busy[way]) * (1 - p.link_both_ways) if busy[way] else 1.0
            )
            for name in (f"{way}_bytes_per_s", f"{way}_unpinned_bytes_per_s"):
                links[name] = getattr(p, name) * left
        machine = replace(self.machine, profile=replace(slowed, **links))
        return replace(self, machine=machine)


def _scaled(move: Transfer, share: float) -> Transfer:
    """Return a share of a transfer: that part of its bytes, pieces and seconds."""
    if share == 1:
        return move
    numbers = ("nbytes", "pieces", "seconds", "link_s", "taken_s")
    return replace(move, **{name: share * getattr(move, name) for name in numbers})


def short_requests(nbytes: float, pieces: float) -> float:
    """Return the number of pieces beyond those that requests of TRANSFER_CHUNK bytes would need.

    The measured rates are those of requests of TRANSFER_CHUNK bytes.
    """
    return max(0.0, pieces - nbytes / TRANSFER_CHUNK)


def _slowed(
    profile: HardwareProfile, dtype: str, read_left: float, compute_left: float, rest_left: float
) -> HardwareProfile:
    """Return the profile with lower rates.

    read_left: the share that is left of the disk's read rate.
    compute_left: the share that is left of the rates of products and attention.
    rest_left: the share that is left of all other compute rates. Fixed costs of steps grow alike.
    """
    rates = profile.rates(dtype)
    matmul = tuple(
        (shape, tuple((inner, curve.scaled(compute_left)) for inner, curve in by_inner))
        for shape, by_inner in rates.matmul_flops_per_s
    )
    attention = {name: getattr(rates, name).scaled(compute_left) for name in ATTENTION_RATES}
    rest = {name: getattr(rates, name) * rest_left for name in OTHER_RATES}
    compute = {dtype: replace(rates, matmul_flops_per_s=matmul, **attention, **rest)}
    fixed = {name: getattr(profile, name) / rest_left for name in STEP_COSTS}
    return replace(
        profile,
        disk_read_bytes_per_s=profile.disk_read_bytes_per_s * read_left,
        compute=compute,
        **fixed,
    )


# ---- transfers


def weight_moves(at: CostModel, unit: WeightUnit) -> tuple[Transfer, ...]:
    """Return the transfers of one load of a weight unit: from disk and from the host."""
    memory = at.memory
    layouts = layouts_of(memory.form, unit.tensors)
    streamed = _streamed(layouts, memory.weight_shares, memory.device_is_host)
    return tuple(
        at.transfer(LOAD_LANES[tier], nbytes, pieces, tier == "disk" and not memory.device_is_host)
        for tier, (nbytes, pieces) in streamed.items()
    )


def looked_up_bytes(at: CostModel) -> int:
    """Return the bytes that are read from disk per token for table lookups.

    A row of a table takes at least one page. No two tokens are assumed to be alike.
    """
    return sum(
        round_up(stored.row_bytes, PAGE)
        for layout in layouts_of(at.memory.form, at.spec.embedding)
        for part, streamed in layout.homes(at.memory.weight_shares, at.memory.device_is_host)
        if part.tier == "disk" and not streamed
        for stored in layout.stored
    )


def coded_bytes(at: CostModel, layout: TensorLayout) -> int:
    """Return the bytes of a matrix whose codes products of few rows read as they are.

    The result is 0 if the matrix is decoded for them.
    """
    if not at.reads_codes or not layout.decoded_row_bytes:
        return 0
    parts, streamed = zip(
        *layout.homes(at.memory.weight_shares, at.memory.device_is_host), strict=True
    )
    return 0 if any(streamed) else sum(map(layout.part_bytes, parts))


def weight_ring_bytes(at: CostModel, unit: WeightUnit) -> int:
    """Return the bytes of a weight unit that go through the weight ring."""
    return streamed_bytes(unit, at.memory.weight_shares, at.memory.form, at.memory.device_is_host)


# A model has about four kinds of units, so the cache answers nearly all calls.
@lru_cache(maxsize=4096)
def _streamed(
    layouts: tuple[TensorLayout, ...], shares: Shares, device_is_host: bool
) -> dict[str, tuple[float, int]]:
    """Return, by tier, the bytes and the pieces of a weight unit that are streamed from it."""
    found: dict[str, tuple[float, int]] = {}
    for layout in layouts:
        for part, streamed in layout.homes(shares, device_is_host):
            if streamed:
                nbytes, pieces = found.get(part.tier, (0.0, 0))
                found[part.tier] = (
                    nbytes + layout.part_bytes(part),
                    pieces + len(layout.stored),
                )
    return {tier: pair for tier, pair in sorted(found.items()) if pair[0]}


def kv_ring_bytes(at: CostModel, block: int, batch: MicroBatchShape) -> int:
    """Return the bytes of a KV unit that go through the cache ring."""
    layout = at.kv_layout(block, batch)
    return sum(
        layout.part_bytes(p) for p in layout.parts if is_streamed(p.tier, at.memory.attends_on_host)
    )


def kv_load_moves(
    at: CostModel, block: int, batch: MicroBatchShape, sweep: int
) -> tuple[Transfer, ...]:
    """Return the transfers that load a KV unit for decode sweep `sweep`; none for prefill.

    They load the KV entries that the sweep before has left.
    """
    return _unit_moves(at, block, batch, sweep - 1, LOAD_LANES) if sweep else ()


def kv_store_moves(
    at: CostModel, block: int, batch: MicroBatchShape, sweep: int
) -> tuple[Transfer, ...]:
    """Return the transfers that store a KV unit after a sweep.

    After prefill the whole unit is stored. After a decode sweep the new KV entries are stored to
    the host. The disk gets a share of a whole unit per decode sweep, since the overlay is written
    back every WRITE_BACK_STEPS sweeps.
    """
    whole = _unit_moves(at, block, batch, sweep, STORE_LANES)
    if sweep == 0:
        return whole
    decode_sweeps = max(1, at.need.gen_len - 1)
    share = decode_sweeps // WRITE_BACK_STEPS / decode_sweeps
    found = [_scaled(move, share) for move in whole if move.lane == "disk_write" and share]
    layout = at.kv_layout(block, batch)
    on_host = [
        part for part in layout.parts if part.tier == "host" and not at.memory.attends_on_host
    ]
    return (*found, *(at.transfer("d2h", part.rows * layout.column_bytes, 1) for part in on_host))


def _unit_moves(
    at: CostModel, block: int, batch: MicroBatchShape, sweep: int, lanes: dict[str, str]
) -> tuple[Transfer, ...]:
    """Return the transfers of the KV entries that a sweep leaves, for each streamed part of a unit.

    lanes: the lane by tier of a part.
    """
    layout = at.kv_layout(block, batch)
    columns = at.need.columns(block, sweep, batch.longest)
    found = []
    for part in layout.parts:
        if is_streamed(part.tier, at.memory.attends_on_host):
            ranges = layout.live_ranges(part, batch.rows, columns)
            crosses = part.tier == "disk" and not at.memory.attends_on_host
            nbytes = sum(n for _, n in ranges)
            found.append(at.transfer(lanes[part.tier], nbytes, len(ranges), crosses))
    return tuple(found)


def hidden_moves(
    at: CostModel, batch: MicroBatchShape, sweep: int, store: bool
) -> tuple[Transfer, ...]:
    """Return the transfers that load or store a micro-batch's hidden states between two layers."""
    if not at.memory.hidden_is_streamed:
        return ()
    # The device's own share is copied out of the ring and back.
    lanes = {"device": "d2h", **STORE_LANES} if store else {"device": "h2d", **LOAD_LANES}
    rows = at.memory.hidden_row_bytes
    return tuple(
        at.transfer(
            lanes[part.tier],
            part.rows * sum(rows),
            len(rows),
            part.tier == "disk" and not at.memory.device_is_host,
        )
        for part in split_rows(tokens_of(batch, sweep), at.memory.hidden_shares)
    )


def disk_read_bytes(at: CostModel, blocks: Sequence[tuple[Block, int]]) -> float:
    """Return the bytes that all sweeps of `blocks` read from disk, if no sequence ends early.

    blocks: pairs of a block and the number of times that it runs.
    """
    sweeps = at.need.gen_len
    layers = Counter(len(layer.experts) for layer in at.layers.layers[1:])
    columns = at.need.kinds
    blocks_alike = {columns.index(key): count for key, count in Counter(columns).items()}

    def of_weights(tokens: int) -> float:
        """Return the bytes of weights that a sweep reads which feeds `tokens` tokens."""
        return sum(
            count * _from_disk(at.weight_load(at.layers.layers[i].unit, tokens))
            for i, count in at.loaded_kinds.items()
        )

    def of_hidden(batch: MicroBatchShape, sweep: int) -> float:
        steps = sum(
            count * _share_used(at, experts, tokens_of(batch, sweep))
            for experts, count in layers.items()
        )
        return steps * _from_disk(hidden_moves(at, batch, sweep, store=False))

    def of_batch(batch: MicroBatchShape) -> float:
        cache = 0.0
        for sweep in range(1, sweeps if at.policy.cache_shares[2] else 1):
            cache += sum(
                n * _from_disk(kv_load_moves(at, i, batch, sweep)) for i, n in blocks_alike.items()
            )
        rows = (batch.fed + (sweeps - 1) * batch.rows) * looked_up_bytes(at)
        return cache + rows + of_hidden(batch, 0) + (sweeps - 1) * of_hidden(batch, 1)

    # A tied head and the next embedding are one load, except before the very first sweep.
    table = weight_moves(at, at.layers.units[at.layers.layers[0].unit])
    total = _from_disk(table) if at.spec.shares_table else 0.0
    for block, count in blocks:
        prefill, decode = (
            of_weights(sum(tokens_of(batch, sweep) for batch in block)) for sweep in (0, 1)
        )
        total += count * (prefill + (sweeps - 1) * decode)
        total += count * sum(n * of_batch(batch) for batch, n in Counter(block).items())
    return total


def _from_disk(moves: Sequence[Transfer]) -> float:
    return sum(move.nbytes for move in moves if move.lane == "disk_read")


# ---- steps


def tokens_of(batch: MicroBatchShape, sweep: int) -> int:
    """Return the number of tokens that a micro-batch feeds into a sweep."""
    return batch.rows if sweep else batch.fed


def _share_used(at: CostModel, experts: int, tokens: int) -> float:
    """Return the share of sweeps in which one of `tokens` tokens needs a unit of these experts.

    The result is 1 for units without experts.
    """
    return at.spec.experts.share_used(tokens, experts) if at.spec.experts and experts else 1.0


def _elementwise_width(spec: ModelSpec, kind: LayerKind) -> int:
    """Return the numbers that norms, activations and rotary embeddings read and write per token.

    Each number of a model family's own buffers is written, and read once more. A number that is
    rotated is read and written.
    """
    norm = 2 * spec.hidden_size
    width = 0
    if kind != "mlp":
        rotated = spec.rotary.width * (spec.num_heads + spec.num_kv_heads) if spec.rotary else 0
        width += norm + 2 * rotated
    if kind != "attention":
        width += norm + 2 * spec.ffn_size
    return width + sum(2 * b.width for b in spec.buffers if kind in (b.layer, "block"))


def _waiting_columns(gen_len: int) -> float:
    """Return the mean, over decode sweeps, of a sequence's KV entries that wait in RAM.

    They wait there to be written back to their unit on disk.
    """
    sweeps = max(1, gen_len - 1)
    written, rest = divmod(sweeps, WRITE_BACK_STEPS)
    return (written * WRITE_BACK_STEPS * (WRITE_BACK_STEPS - 1) + rest * (rest - 1)) / 2 / sweeps


@lru_cache(maxsize=4096)
def _part_shapes(
    shapes: tuple[tuple[int, ...], ...], shares: Shares
) -> tuple[tuple[int, Part], ...]:
    """Return (matrix columns, rows) of each part of each matrix."""
    return tuple((shape[1], part) for shape in shapes for part in weight_parts(shape, shares))

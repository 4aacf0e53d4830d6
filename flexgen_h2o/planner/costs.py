"""Compute the seconds of every load, store and step.

They are the work that planner/work.py counts, at the rates of a hardware profile.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from flexgen_h2o.checkpoint.formats import layouts_of
from flexgen_h2o.core.config import DTYPE_BYTES, Policy
from flexgen_h2o.core.model import Layer, LayerKind, LayerPlan, ModelSpec
from flexgen_h2o.core.units import FEW_ROWS, READ_THREADS, TOKEN_CHUNK
from flexgen_h2o.engine.loop import ATTENTION_KINDS, JOINED_KINDS, joined
from flexgen_h2o.engine.memory import MemoryPlanner
from flexgen_h2o.engine.weight_units import (
    layer_kinds,
    loaded_kinds,
)
from flexgen_h2o.engine.workload import MicroBatchShape, Workload, shape_of
from flexgen_h2o.planner.profile import HardwareProfile
from flexgen_h2o.planner.work import (
    CostContext,
    Product,
    Transfer,
    Work,
    coded_bytes,
    hidden_is_brought,
    hidden_moves,
    kv_load_moves,
    kv_store_moves,
    layer_work,
    needed_share,
    tokens_of,
    weight_moves,
)

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


@dataclass(frozen=True)
class TransferCost:
    """The cost of a load or a store. Costs makes it."""

    # The lane that it occupies (LANES).
    lane: str
    # Seconds that it occupies the lane.
    seconds: float
    # Another lane that it also occupies, for copies between device and host; "" if there is none.
    link: str = ""
    # Seconds that it occupies `link`.
    link_s: float = 0.0
    # Seconds that it takes from compute.
    taken_s: float = 0.0


@dataclass(frozen=True)
class StepCost:
    """The cost of one (layer, micro-batch) step. Costs.step makes it.

    The step may compute for several micro-batches that are joined.
    """

    # Seconds that the device computes.
    device_s: float
    # Seconds that the host computes while the device waits.
    host_s: float
    # Seconds of the thread that issues the step, in addition to the step's kernels.
    issue_s: float
    kv_load: tuple[TransferCost, ...] = ()
    kv_store: tuple[TransferCost, ...] = ()
    hidden_load: tuple[TransferCost, ...] = ()
    hidden_store: tuple[TransferCost, ...] = ()
    # Rows of the step's largest product.
    rows: int = 0


@dataclass(frozen=True)
class Costs:
    """Seconds of the operations of a run on one machine. Machine.costs makes it.

    Raises UsageError if the profile has no rates of the dtype.
    """

    # Everything that fixes the bytes and FLOPs of the run.
    at: CostContext
    profile: HardwareProfile
    # Name of the dtype that the run computes in.
    dtype: str

    def __post_init__(self) -> None:
        self.profile.rates(self.dtype)

    @cached_property
    def layers(self) -> LayerPlan:
        """Layers and weight units of a sweep."""
        return self.at.memory.layers

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """By layer, the index of the first layer that costs the same."""
        return layer_kinds(self.layers, tuple(self.at.need.kinds))

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
    def _weight_loads(self) -> dict[tuple[int, int], tuple[TransferCost, ...]]:
        return {}

    @cached_property
    def _decoded(self) -> dict[tuple[int, bool], StepCost]:
        return {}

    @cached_property
    def _launch_s(self) -> float:
        """Seconds per launch of the thread that issues it; 0 if the device is not asynchronous."""
        return self.profile.kernel_s if self.profile.device_is_asynchronous else 0.0

    @cached_property
    def waits(self) -> bool:
        """Whether groups of experts are loaded only if the router chose them."""
        return self.at.memory.waits_for_router

    @cached_property
    def _unpacks(self) -> bool:
        """Whether a card unpacks slots before it attends to them.

        It does not if one launch reads them as they are (KVRows.is_one_launch).
        """
        return self.at.policy.attn_sparsity < 1 or not self.at.need.in_one_launch

    @cached_property
    def _kind_of(self) -> dict[int, int]:
        """By weight unit, the first layer that costs the same as a layer of the unit (indices)."""
        return {
            layer.unit: kind for kind, layer in zip(self.kinds, self.layers.layers, strict=True)
        }

    def weight_load(self, unit: int, tokens: int) -> tuple[TransferCost, ...]:
        """Return the cost of one load of a weight unit.

        If groups of experts wait for the router, this is the expected cost in a sweep.
        tokens: tokens that the whole block feeds into the sweep.
        """
        key = self._kind_of[unit], tokens if self.waits else 0
        if key not in self._weight_loads:
            share = needed_share(self.at, self.layers.layers[key[0]], tokens) if self.waits else 1.0
            moves = weight_moves(self.at, self.layers.units[unit])
            self._weight_loads[key] = self._priced([_scaled(move, share) for move in moves])
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
        if layer.kind != "experts" or not self.at.device_is_host:
            return 0.0
        return self.profile.rates(self.dtype).decode_speedup.get(
            self.at.form.decoder_in_products, 0.0
        )

    def decoding(
        self, index: int, steps: Iterable[tuple[MicroBatchShape, int]], sweep: int
    ) -> StepCost:
        """Return the cost of unpacking a layer's weight unit for some steps of the layer.

        steps: the values that `steps_of` returns.

        A matrix is not unpacked if all of these steps multiply by its codes as they are. A table in
        which an embedding looks up is unpacked.
        """
        at = self.at
        layer = self.layers.layers[index]
        if at.form.decoded_at != "load":
            return StepCost(0.0, 0.0, 0.0)
        few = at.reads_codes and layer.unit != self.layers.layers[0].unit
        few = few and all(
            self.step(index, batch, sweep, tokens).rows <= FEW_ROWS for batch, tokens in steps
        )
        key = self._kind_of[layer.unit], few
        if key not in self._decoded:
            rates = self.profile.rates(self.dtype)
            speedup = self.decodes_in_products(layer) or rates.decode_speedup.get(
                at.form.decoder, 1.0
            )
            rate = rates.device_dequantise_bytes_per_s * speedup
            layouts = layouts_of(at.form, self.layers.units[layer.unit].tensors)
            sizes = [
                math.prod(x.shape)
                for x in layouts
                if x.decoded_row_bytes and not (few and coded_bytes(at, x))
            ]
            self._decoded[key] = StepCost(
                sum(sizes) * at.itemsize / rate, 0.0, len(sizes) * self._launch_s
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
        at = self.at
        p = self.profile
        layer = self.layers.layers[index]
        work = layer_work(at, layer, self.layers.units[layer.unit], batch, sweep, tokens)
        device_s, host_s = self.compute_seconds(work)
        evicts = bool(at.need.record) and at.spec.window(layer.block) is None
        # The step is left out if no token needs its experts.
        share = needed_share(at, layer, tokens_of(batch, sweep))
        rows = max((product.rows for product in work.products), default=0)
        issue_s = p.step_s * share
        # One launch multiplies few rows of all experts. With more rows, each expert has its own.
        if layer.kind == "experts":
            apart = len(work.products) * len(layer.experts) if rows > FEW_ROWS else 0
            issue_s += self._launch_s * (EXPERTS_LAUNCHES + apart) * share
        if at.device_is_host and layer.kind != "experts":
            issue_s += p.row_s * batch.rows
        # A card computes sequences side by side; the host evicts KV entries sequence by sequence.
        elif evicts and work.host_kv:
            host_s += p.row_s * batch.rows * work.host_kv / (work.host_kv + work.device_kv)
        kv: tuple[tuple[Transfer, ...], tuple[Transfer, ...]] = ((), ())
        if layer.kind in ATTENTION_KINDS:
            kv = (
                kv_load_moves(at, layer.block, batch, sweep),
                kv_store_moves(at, layer.block, batch, sweep),
            )
            issue_s += p.attention_step_s + (p.eviction_step_s if evicts else 0.0)
            issue_s += p.cache_load_step_s if kv[0] else 0.0
            routes = layer.kind == "attention" and at.spec.experts_of(layer.block)
            issue_s += self._launch_s * (
                PROMPT_LAUNCHES * (sweep == 0) + (ROUTER_LAUNCHES if routes else 0)
            )
        load = hidden_moves(at, batch, sweep, store=False) if index else ()
        store = hidden_moves(at, batch, sweep, store=True) if index < len(self.kinds) - 1 else ()
        if sweep and p.device_is_asynchronous and at.memory.makes_graphs(at.need.in_one_launch):
            issue_s = min(issue_s, p.graph_step_s)
        hidden = ([_scaled(move, share) for move in moves] for moves in (load, store))
        kv_load, kv_store, hidden_load, hidden_store = (
            self._priced(moves) for moves in (*kv, *hidden)
        )
        return StepCost(
            device_s, host_s, issue_s, kv_load, kv_store, hidden_load, hidden_store, rows
        )

    @cached_property
    def _most_joined(self) -> dict[str, int]:
        """By kind of layer, the most tokens of joined micro-batches; empty if none are joined."""
        shape = shape_of(self.at.policy, self.at.need)
        return (
            {}
            if hidden_is_brought(self.at)
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

    def compute_seconds(self, work: Work) -> tuple[float, float]:
        """Return the seconds of the device, and those of the host while the device waits."""
        at = self.at
        p = self.profile
        rates = self.profile.rates(self.dtype)
        width = float(self.at.spec.head_dim)
        scored = bool(self.at.need.record)
        on_device = (
            rates.device_scored_attention_bytes_per_s
            if scored
            else rates.device_attention_bytes_per_s
        )
        on_host = (
            rates.host_scored_attention_bytes_per_s if scored else rates.host_attention_bytes_per_s
        )
        device = sum(self._product_seconds(product) for product in work.products)
        device += (
            work.elementwise / rates.elementwise_bytes_per_s + work.logits / rates.logits_per_s
        )
        device += work.overlay / p.overlay_bytes_per_s
        if work.prompt_flops:
            n = self.at.need.prompt_len
            device += work.prompt_flops / rates.prefill_attention_flops_per_s.at(n) + p.kernel_s
            device += work.sums_flops / rates.column_sums_flops_per_s.at(n)
        if work.device_kv:
            read = work.device_kv
            if p.device_is_host:
                read = self._slot_bytes(work, read)
            elif work.packed_values and self._unpacks:
                read = work.packed_values * at.itemsize * read / (read + work.host_kv)
                device += read / rates.device_dequantise_bytes_per_s
            device += read / on_device.at(width) + p.kernel_s
        host = 0.0
        if work.host_kv:
            host = self._slot_bytes(work, work.host_kv) / on_host.at(width) + p.kernel_s
        if work.crossing:
            host += work.crossing / p.d2h_bytes_per_s + 4 * p.transfer_s
        return device, host

    def _slot_bytes(self, work: Work, read: float) -> float:
        """Return the unpacked bytes that attention would read in the time that it needs for `read`.

        The two differ if attention reads packed slots in place.
        """
        if not work.packed_values:
            return read
        share = read / (work.device_kv + work.host_kv)
        return max(read, share * work.packed_values * PACKED_VALUE_BYTES)

    def _product_seconds(self, product: Product) -> float:
        """Return the seconds of one product. It multiplies at most TOKEN_CHUNK rows at a time."""
        rates = self.profile.rates(self.dtype)
        seconds = 0.0
        # The measured rates of few rows include reading a matrix in the dtype. Arithmetic alone
        # reaches the rate of many rows.
        if product.coded:
            fastest = rates.matmul_rate(TOKEN_CHUNK, product.inner, product.outer)
            flops = 2.0 * product.rows * product.inner * product.outer
            read_s = product.coded / self.profile.device_memory_bytes_per_s
            return max(read_s, flops / fastest) + self.profile.kernel_s
        whole, rest = divmod(product.rows, TOKEN_CHUNK)
        for count, rows in ((whole, TOKEN_CHUNK), (1, rest)):
            if count and rows:
                rate = rates.matmul_rate(rows, product.inner, product.outer)
                if self.at.form.in_int8:
                    rate *= (
                        rates.int4_speedup
                        if self.at.form.decoded_at == "product"
                        else rates.int8_speedup
                    ).at(rows)
                elif product.blocked:
                    rate *= rates.blocked_speedup.at(rows)
                flops = 2.0 * rows * product.inner * product.outer
                seconds += count * (flops / rate + self.profile.kernel_s)
        return seconds

    def _priced(self, moves: Sequence[Transfer]) -> tuple[TransferCost, ...]:
        """Return the costs of all transfers that are not empty."""
        return tuple(self._transfer_cost(m) for m in moves if m.nbytes)

    def _transfer_cost(self, move: Transfer) -> TransferCost:
        """Return the cost of one transfer.

        If bytes cross from disk to the device, each reader thread copies its own bytes. On an
        asynchronous device the copy overlaps with the thread's next read. Otherwise READ_THREADS
        threads share the copying.
        """
        p = self.profile
        pinned = self.at.policy.pin_weight
        if move.lane in ("h2d", "d2h"):
            rate = getattr(
                p, f"{move.lane}_bytes_per_s" if pinned else f"{move.lane}_unpinned_bytes_per_s"
            )
            return TransferCost(move.lane, move.nbytes / rate + move.pieces * p.transfer_s)
        reads = move.lane == "disk_read"
        each = 1 / (p.disk_read_bytes_per_s if reads else p.disk_write_bytes_per_s)
        link, link_rate = ("h2d", p.h2d_bytes_per_s) if reads else ("d2h", p.d2h_bytes_per_s)
        if move.crosses:
            both = each + 1 / link_rate
            # The reader thread itself copies memory that is not pinned.
            beside = p.device_is_asynchronous and pinned
            each = each if reads and beside else max(each, both / READ_THREADS) if reads else both
        seconds = move.nbytes * each + move.pieces * p.disk_request_s / (
            READ_THREADS if reads else 1
        )
        taken_s = (
            move.short_requests * p.short_read_compute_s
            if reads and self.at.policy.overlap
            else 0.0
        )
        if not move.crosses:
            return TransferCost(move.lane, seconds, taken_s=taken_s)
        link_s = move.nbytes / link_rate + move.pieces * p.transfer_s
        return TransferCost(move.lane, max(seconds, link_s), link, link_s, taken_s)

    def busy(self, block: Sequence[MicroBatchShape], sweep: int) -> dict[str, float]:
        """Return the seconds that each resource works in a sweep of a block.

        The largest of them bounds the sweep from below if everything overlaps. Their sum does if
        nothing overlaps. Seconds that loads take from compute count as compute.
        """
        return self._busy(*self._of_sweep(block, sweep))

    def _busy(
        self, moved: Sequence[tuple[TransferCost, int]], steps: Sequence[tuple[StepCost, int]]
    ) -> dict[str, float]:
        """Return busy seconds by resource, of transfers and steps with the number of each."""
        found = dict.fromkeys(RESOURCES, 0.0)
        # On an asynchronous device the thread issues while the device computes.
        beside = self.profile.device_is_asynchronous
        issue_s = 0.0
        for transfer, times in moved:
            found[transfer.lane] += times * transfer.seconds
            found["device_compute"] += times * transfer.taken_s
            if transfer.link:
                found[transfer.link] += times * transfer.link_s
        for cost, times in steps:
            device_s = cost.device_s if beside else cost.device_s + cost.issue_s
            if not self.at.policy.overlap:  # each step is waited for
                device_s = max(device_s, cost.issue_s)
            found["device_compute"] += times * device_s
            found["host_compute"] += times * cost.host_s
            issue_s += times * cost.issue_s
        found["device_compute"] = max(found["device_compute"], issue_s)
        return found

    def _of_sweep(
        self, block: Sequence[MicroBatchShape], sweep: int
    ) -> tuple[list[tuple[TransferCost, int]], list[tuple[StepCost, int]]]:
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
            every = (*cost.kv_load, *cost.kv_store, *cost.hidden_load, *cost.hidden_store)
            moved += ((transfer, times) for transfer in every)
        return moved, steps

    def with_contention(self, block: Sequence[MicroBatchShape], sweep: int) -> Costs:
        """Return the costs of this sweep if resources slow each other down while they overlap.

        Disk reads and compute slow each other down, the more the shorter the requests are. So do
        the two directions of the link. Copies to and from a device that is made of ordinary memory
        occupy the cores that compute.
        """
        p = self.profile
        moved, steps = self._of_sweep(block, sweep)
        busy = self._busy(moved, steps)
        compute = busy["device_compute"] + busy["host_compute"]
        if not self.at.policy.overlap or not compute:
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
        if p.device_is_host and not self.at.device_is_host:
            compute_left *= compute / (compute + busy["h2d"] + busy["d2h"])
        slowed = _slowed(p, self.dtype, read_left, compute_left * rest_left, rest_left)
        links = dict[str, Any]()
        for way, other in (("h2d", "d2h"), ("d2h", "h2d")):
            left = (
                1 - min(1.0, busy[other] / busy[way]) * (1 - p.link_both_ways) if busy[way] else 1.0
            )
            for name in (f"{way}_bytes_per_s", f"{way}_unpinned_bytes_per_s"):
                links[name] = getattr(p, name) * left
        return replace(self, profile=replace(slowed, **links))


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

    def memory(self, spec: ModelSpec, policy: Policy) -> MemoryPlanner:
        """Return the planner of what a run holds on this machine."""
        return MemoryPlanner(spec, policy, self.itemsize, self.device_is_host)

    def setting(
        self, spec: ModelSpec, policy: Policy, need: Workload, splits: bool = False
    ) -> CostContext:
        """Return everything that fixes the bytes and FLOPs of a run on this machine."""
        return CostContext(spec, policy, need, self.itemsize, self.device_is_host, splits)

    def costs(self, spec: ModelSpec, policy: Policy, need: Workload, splits: bool = False) -> Costs:
        """Return the costs of a run on this machine. splits: see `CostContext`."""
        return Costs(self.setting(spec, policy, need, splits), self.profile, self.dtype)


def _scaled(move: Transfer, share: float) -> Transfer:
    """Return a share of a transfer: that part of its bytes and its pieces."""
    return replace(move, nbytes=move.nbytes * share, pieces=move.pieces * share)


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

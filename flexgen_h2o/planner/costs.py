"""Seconds of every load, store and step: the work of planner/work.py at the rates of a hardware profile."""

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
from flexgen_h2o.engine.memory_plan import makes_graphs
from flexgen_h2o.engine.weight_units import layer_kinds, layer_plan, layer_steps, loaded_kinds, waits_for_router
from flexgen_h2o.engine.workload import Batch, WorkloadShape, shape_of
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
# What can be busy; the first four are lanes. Device and host compute are one after the other: one thread issues both.
RESOURCES = (*LANES, "device_compute", "host_compute")
# Attention over packed slots is bound by its arithmetic where it runs on a CPU: a value takes as long as so many bytes
# of a cache that is not packed. bench.kernels.decode_kernel on a 2-core CPU: 12.5 G values/s in 4 bits, 11.0 in 8,
# where bf16 is read at 13.8 GB/s.
PACKED_VALUE_BYTES = 1.2
# What computing beside disk reads slows down, besides products.
ATTENTION_RATES = (
    "prefill_attention_flops_per_s", "device_attention_bytes_per_s", "device_scored_attention_bytes_per_s",
    "host_attention_bytes_per_s", "host_scored_attention_bytes_per_s",
)  # fmt: skip
OTHER_RATES = ("elementwise_bytes_per_s", "device_dequantise_bytes_per_s", "logits_per_s")
# Launches that a dense decode step, whose issuing step_s tells, does without: of attention to prompts, of a router, and
# of a group of experts (counted by tests/gpu/test_fake_card.py).
PROMPT_LAUNCHES, ROUTER_LAUNCHES, EXPERTS_LAUNCHES = 6, 7, 6
STEP_COSTS = ("kernel_s", "step_s", "attention_step_s", "eviction_step_s", "row_s", "cache_load_step_s")


@dataclass(frozen=True)
class TransferCost:
    """A load or store: `seconds` on a lane. link_s: seconds that it also occupies `link`; taken_s: compute seconds that
    it costs."""

    lane: str
    seconds: float
    link: str = ""
    link_s: float = 0.0
    taken_s: float = 0.0


@dataclass(frozen=True)
class StepCost:
    """One (layer, micro-batch) step, which may compute for micro-batches that are joined. Seconds; issue_s: of the
    thread that issues it, beside its kernels. rows: of its largest product."""

    device_s: float
    host_s: float
    issue_s: float
    kv_load: tuple[TransferCost, ...] = ()
    kv_store: tuple[TransferCost, ...] = ()
    hidden_load: tuple[TransferCost, ...] = ()
    hidden_store: tuple[TransferCost, ...] = ()
    rows: int = 0


@dataclass(frozen=True)
class Costs:
    """Seconds under one setting on one machine. dtype: that is computed in."""

    at: CostContext
    profile: HardwareProfile
    dtype: str

    def __post_init__(self) -> None:
        self.profile.rates(self.dtype)

    @cached_property
    def _steps(self) -> tuple[bool, int]:
        return layer_steps(self.at.spec, self.at.policy)

    @cached_property
    def layers(self) -> LayerPlan:
        return layer_plan(self.at.spec, self._steps)

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """For each layer the first layer that costs the same."""
        return layer_kinds(self.at.spec, self._steps, tuple(self.at.need.kinds))

    @cached_property
    def loaded_kinds(self) -> Counter[int]:
        """How often a sweep loads each kind of layer's weights; a tied head and the next embedding are one load."""
        return loaded_kinds(self.at.spec, self._steps, self.kinds)

    @cached_property
    def _step_costs(self) -> dict[tuple[int, Batch, int, int | None], StepCost]:
        return {}

    @cached_property
    def _weight_loads(self) -> dict[tuple[int, int], tuple[TransferCost, ...]]:
        return {}

    @cached_property
    def _decoded(self) -> dict[tuple[int, bool], StepCost]:
        return {}

    @cached_property
    def _launch_s(self) -> float:
        """Of the thread that issues it: each launch of a device that computes beside that thread."""
        return self.profile.kernel_s if self.profile.device_is_asynchronous else 0.0

    @cached_property
    def waits(self) -> bool:
        """Are groups of experts loaded only if they are chosen?"""
        return waits_for_router(self.at.spec, self.at.policy)

    @cached_property
    def _unpacks(self) -> bool:
        """Does a card unpack slots before it attends to them? One launch reads them as they are
        (KVRows.is_one_launch)."""
        return self.at.policy.attn_sparsity < 1 or not self.at.need.in_one_launch

    @cached_property
    def _kind_of(self) -> dict[int, int]:
        """Of each weight unit the first layer that costs the same as a layer of it."""
        return {layer.unit: kind for kind, layer in zip(self.kinds, self.layers.layers, strict=True)}

    def weight_load(self, unit: int, tokens: int) -> tuple[TransferCost, ...]:
        """One load of a weight unit, or what is expected of it in a sweep of a block that feeds so many tokens."""
        key = self._kind_of[unit], tokens if self.waits else 0
        if key not in self._weight_loads:
            share = needed_share(self.at, self.layers.layers[key[0]], tokens) if self.waits else 1.0
            moves = weight_moves(self.at, self.layers.units[unit])
            self._weight_loads[key] = self._priced([_scaled(move, share) for move in moves])
        return self._weight_loads[key]

    def weights_s(self, tokens: int) -> float:
        """Seconds that loads of weights take of the busiest lane in a sweep that feeds a block so many tokens."""
        lanes = dict.fromkeys(LANES, 0.0)
        for index, count in self.loaded_kinds.items():
            for load in self.weight_load(self.layers.layers[index].unit, tokens):
                lanes[load.lane] += count * load.seconds
        return max(lanes.values())

    def decodes_in_products(self, layer: Layer) -> float:
        """Of experts that a CPU decodes as it multiplies, how many times faster than 4 bits become the dtype; or 0."""
        if layer.kind != "experts" or not self.at.device_is_host:
            return 0.0
        return self.profile.rates(self.dtype).decode_speedup.get(self.at.form.decoder_in_products, 0.0)

    def decoding(self, index: int, steps: Iterable[tuple[Batch, int]], sweep: int) -> StepCost:
        """Unpacking a layer's weight unit for these steps of the layer (`steps_of`): not what all of them multiply by
        as it is. A table that an embedding looks up in is unpacked."""
        at, layer = self.at, self.layers.layers[index]
        if not at.form.decodes:
            return StepCost(0.0, 0.0, 0.0)
        few = at.reads_codes and layer.unit != self.layers.layers[0].unit
        few = few and all(self.step(index, batch, sweep, tokens).rows <= FEW_ROWS for batch, tokens in steps)
        key = self._kind_of[layer.unit], few
        if key not in self._decoded:
            rates = self.profile.rates(self.dtype)
            speedup = self.decodes_in_products(layer) or rates.decode_speedup.get(at.form.decoder, 1.0)
            rate = rates.device_dequantise_bytes_per_s * speedup
            layouts = layouts_of(at.form, self.layers.units[layer.unit].tensors)
            sizes = [math.prod(x.shape) for x in layouts if x.decoded_row_bytes and not (few and coded_bytes(at, x))]
            self._decoded[key] = StepCost(sum(sizes) * at.itemsize / rate, 0.0, len(sizes) * self._launch_s)
        return self._decoded[key]

    def step(self, layer_index: int, batch: Batch, sweep: int, tokens: int | None = None) -> StepCost:
        """tokens: as of `layer_work`."""
        key = (self.kinds[layer_index], batch, sweep, tokens)
        if key not in self._step_costs:
            self._step_costs[key] = self._step(layer_index, batch, sweep, tokens)
        return self._step_costs[key]

    def _step(self, index: int, batch: Batch, sweep: int, tokens: int | None) -> StepCost:
        at, p, layer = self.at, self.profile, self.layers.layers[index]
        work = layer_work(at, layer, self.layers.units[layer.unit], batch, sweep, tokens)
        device_s, host_s = self.compute_seconds(work)
        evicts = bool(at.need.record) and at.spec.window(layer.block) is None
        share = needed_share(at, layer, tokens_of(batch, sweep))  # the step is left out where no token needs it
        rows = max((product.rows for product in work.products), default=0)
        issue_s = p.step_s * share
        if layer.kind == "experts":  # one launch multiplies few rows of all, others are each expert's own
            apart = len(work.products) * len(layer.experts) if rows > FEW_ROWS else 0
            issue_s += self._launch_s * (EXPERTS_LAUNCHES + apart) * share
        if at.device_is_host and layer.kind != "experts":
            issue_s += p.row_s * batch.rows
        elif evicts and work.host_kv:  # a card computes rows side by side, a host drops columns row by row
            host_s += p.row_s * batch.rows * work.host_kv / (work.host_kv + work.device_kv)
        kv: tuple[tuple[Transfer, ...], tuple[Transfer, ...]] = ((), ())
        if layer.kind in ATTENTION_KINDS:
            kv = kv_load_moves(at, layer.block, batch, sweep), kv_store_moves(at, layer.block, batch, sweep)
            issue_s += p.attention_step_s + (p.eviction_step_s if evicts else 0.0)
            issue_s += p.cache_load_step_s if kv[0] else 0.0
            routes = layer.kind == "attention" and at.spec.experts_of(layer.block)
            issue_s += self._launch_s * (PROMPT_LAUNCHES * (sweep == 0) + (ROUTER_LAUNCHES if routes else 0))
        load = hidden_moves(at, batch, sweep, store=False) if index else ()
        store = hidden_moves(at, batch, sweep, store=True) if index < len(self.kinds) - 1 else ()
        if sweep and p.device_is_asynchronous and makes_graphs(at.spec, at.policy, at.need.in_one_launch):
            issue_s = min(issue_s, p.graph_step_s)
        hidden = ([_scaled(move, share) for move in moves] for moves in (load, store))
        kv_load, kv_store, hidden_load, hidden_store = (self._priced(moves) for moves in (*kv, *hidden))
        return StepCost(device_s, host_s, issue_s, kv_load, kv_store, hidden_load, hidden_store, rows)

    @cached_property
    def _most_joined(self) -> dict[str, int]:
        shape = shape_of(self.at.policy, self.at.need)
        return {} if hidden_is_brought(self.at) else {kind: shape.most_joined(kind) for kind in JOINED_KINDS}

    def steps_of(self, kind: LayerKind, block: Sequence[Batch], sweep: int) -> dict[int, tuple[Batch, int]]:
        """The steps of a layer of a kind, by micro-batch: what each is of, and tokens that it computes besides
        attention: those of all that are joined with the first of them (loop.joined)."""
        tokens = [tokens_of(batch, sweep) for batch in block]
        most = self._most_joined.get(kind, 0)
        if not most or len(block) == 1:
            return dict(enumerate(zip(block, tokens, strict=True)))
        runs = joined(tokens, most)
        computed = {first: sum(tokens[k] for k in run) for first, run in runs.items()}
        if kind in ATTENTION_KINDS:
            return {k: (batch, computed.get(k, 0)) for k, batch in enumerate(block)}
        return {first: (Batch.joined([block[k] for k in run]), computed[first]) for first, run in runs.items()}

    def compute_seconds(self, work: Work) -> tuple[float, float]:
        """Seconds of the device, and of the host while the device waits."""
        at, p, rates, width = self.at, self.profile, self.profile.rates(self.dtype), float(self.at.spec.head_dim)
        scored = bool(self.at.need.record)
        on_device = rates.device_scored_attention_bytes_per_s if scored else rates.device_attention_bytes_per_s
        on_host = rates.host_scored_attention_bytes_per_s if scored else rates.host_attention_bytes_per_s
        device = sum(self._product_seconds(product) for product in work.products)
        device += work.elementwise / rates.elementwise_bytes_per_s + work.logits / rates.logits_per_s
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
        """Bytes that attention would take as long for as for the `read` ones, where it reads packed slots in place."""
        if not work.packed_values:
            return read
        share = read / (work.device_kv + work.host_kv)
        return max(read, share * work.packed_values * PACKED_VALUE_BYTES)

    def _product_seconds(self, product: Product) -> float:
        """Rows are multiplied at most TOKEN_CHUNK at a time."""
        rates, seconds = self.profile.rates(self.dtype), 0.0
        if product.coded:  # rates of few rows are of reading the dtype: multiplying alone goes at that of many
            fastest = rates.matmul_rate(TOKEN_CHUNK, product.inner, product.outer)
            flops = 2.0 * product.rows * product.inner * product.outer
            read_s = product.coded / self.profile.device_memory_bytes_per_s
            return max(read_s, flops / fastest) + self.profile.kernel_s
        whole, rest = divmod(product.rows, TOKEN_CHUNK)
        for count, rows in ((whole, TOKEN_CHUNK), (1, rest)):
            if count and rows:
                rate = rates.matmul_rate(rows, product.inner, product.outer)
                if self.at.form.in_int8:
                    rate *= (rates.int4_speedup if self.at.form.requantises else rates.int8_speedup).at(rows)
                elif product.blocked:
                    rate *= rates.blocked_speedup.at(rows)
                flops = 2.0 * rows * product.inner * product.outer
                seconds += count * (flops / rate + self.profile.kernel_s)
        return seconds

    def _priced(self, moves: Sequence[Transfer]) -> tuple[TransferCost, ...]:
        return tuple(self._transfer_cost(m) for m in moves if m.nbytes)

    def _transfer_cost(self, move: Transfer) -> TransferCost:
        """Of a disk's bytes that cross to the device each reader copies its own: beside its next read where the device
        is asynchronous, else two of them share the copying."""
        p, pinned = self.profile, self.at.policy.pin_weight
        if move.lane in ("h2d", "d2h"):
            rate = getattr(p, f"{move.lane}_bytes_per_s" if pinned else f"{move.lane}_unpinned_bytes_per_s")
            return TransferCost(move.lane, move.nbytes / rate + move.pieces * p.transfer_s)
        reads = move.lane == "disk_read"
        each = 1 / (p.disk_read_bytes_per_s if reads else p.disk_write_bytes_per_s)
        link, link_rate = ("h2d", p.h2d_bytes_per_s) if reads else ("d2h", p.d2h_bytes_per_s)
        if move.crosses:
            both = each + 1 / link_rate
            beside = p.device_is_asynchronous and pinned  # what is not pinned is copied by the reader itself
            each = each if reads and beside else max(each, both / READ_THREADS) if reads else both
        seconds = move.nbytes * each + move.pieces * p.disk_request_s / (READ_THREADS if reads else 1)
        taken_s = move.short_requests * p.short_read_compute_s if reads and self.at.policy.overlap else 0.0
        if not move.crosses:
            return TransferCost(move.lane, seconds, taken_s=taken_s)
        link_s = move.nbytes / link_rate + move.pieces * p.transfer_s
        return TransferCost(move.lane, max(seconds, link_s), link, link_s, taken_s)

    def busy(self, block: Sequence[Batch], sweep: int) -> dict[str, float]:
        """Seconds that each resource works in a sweep of a block; their largest bounds the sweep from below when all
        overlap, their sum when nothing does. What loads take from compute is compute."""
        return self._busy(*self._of_sweep(block, sweep))

    def _busy(
        self, moved: Sequence[tuple[TransferCost, int]], steps: Sequence[tuple[StepCost, int]]
    ) -> dict[str, float]:
        found = dict.fromkeys(RESOURCES, 0.0)
        beside = self.profile.device_is_asynchronous  # issuing goes on beside what is queued on the device
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
        self, block: Sequence[Batch], sweep: int
    ) -> tuple[list[tuple[TransferCost, int]], list[tuple[StepCost, int]]]:
        """The transfers and the steps of a sweep, each with how often."""
        kinds = {index: self.layers.layers[index].kind for index in self.kinds}
        of_kinds = {kind: Counter(self.steps_of(kind, block, sweep).values()) for kind in set(kinds.values())}
        steps = [
            (self.step(index, batch, sweep, tokens), layers * count)
            for index, layers in Counter(self.kinds).items()
            for (batch, tokens), count in of_kinds[kinds[index]].items()
        ]
        steps += [(self.decoding(i, of_kinds[kinds[i]], sweep), count) for i, count in self.loaded_kinds.items()]
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

    def with_contention(self, block: Sequence[Batch], sweep: int) -> Costs:
        """The same, where resources slow each other down as far as they are busy at once.

        Reading the disk and computing do, the more the shorter the requests are; so do both ways of the link; and
        copies to and from a device that is made of ordinary memory take the cores that compute.
        """
        p, (moved, steps) = self.profile, self._of_sweep(block, sweep)
        busy = self._busy(moved, steps)
        compute = busy["device_compute"] + busy["host_compute"]
        if not self.at.policy.overlap or not compute:
            return self
        read_left = compute_left = rest_left = 1.0
        if busy["disk_read"]:
            longest = max(compute, busy["disk_read"])
            read_left = 1 - compute / longest * (1 - p.disk_read_beside_compute)
            compute_left = 1 - busy["disk_read"] / longest * (1 - p.compute_beside_disk_read)
            # What is read while compute waits takes nothing from it.
            taken = sum(times * transfer.taken_s for transfer, times in moved)
            slower = (compute - taken) / compute_left
            rest_left = slower / (slower + taken * compute / longest)
        if p.device_is_host and not self.at.device_is_host:
            compute_left *= compute / (compute + busy["h2d"] + busy["d2h"])
        slowed, links = _slowed(p, self.dtype, read_left, compute_left * rest_left, rest_left), dict[str, Any]()
        for way, other in (("h2d", "d2h"), ("d2h", "h2d")):
            left = 1 - min(1.0, busy[other] / busy[way]) * (1 - p.link_both_ways) if busy[way] else 1.0
            for name in (f"{way}_bytes_per_s", f"{way}_unpinned_bytes_per_s"):
                links[name] = getattr(p, name) * left
        return replace(self, profile=replace(slowed, **links))


@dataclass(frozen=True)
class Machine:
    """Where a run takes place: measured speeds, and the dtype that is computed in.

    device_is_host may differ from the profile's: on a CPU a device tier with a budget of its own stands in for a card.
    """

    profile: HardwareProfile
    dtype: str
    device_is_host: bool

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.dtype]

    def setting(self, spec: ModelSpec, policy: Policy, need: WorkloadShape, splits: bool = False) -> CostContext:
        return CostContext(spec, policy, need, self.itemsize, self.device_is_host, splits)

    def costs(self, spec: ModelSpec, policy: Policy, need: WorkloadShape, splits: bool = False) -> Costs:
        return Costs(self.setting(spec, policy, need, splits), self.profile, self.dtype)


def _scaled(move: Transfer, share: float) -> Transfer:
    return replace(move, nbytes=move.nbytes * share, pieces=move.pieces * share)


def _slowed(
    profile: HardwareProfile, dtype: str, read_left: float, compute_left: float, rest_left: float
) -> HardwareProfile:
    """The profile with only these shares of its disk's read rate and of its compute rates. rest_left: of what is
    computed besides products and attention, steps' fixed costs included."""
    rates = profile.rates(dtype)
    matmul = tuple(
        (shape, tuple((inner, curve.scaled(compute_left)) for inner, curve in by_inner))
        for shape, by_inner in rates.matmul_flops_per_s
    )
    attention = {name: getattr(rates, name).scaled(compute_left) for name in ATTENTION_RATES}
    rest = {name: getattr(rates, name) * rest_left for name in OTHER_RATES}
    compute = {dtype: replace(rates, matmul_flops_per_s=matmul, **attention, **rest)}
    fixed = {name: getattr(profile, name) / rest_left for name in STEP_COSTS}
    return replace(profile, disk_read_bytes_per_s=profile.disk_read_bytes_per_s * read_left, compute=compute, **fixed)

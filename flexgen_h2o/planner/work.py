"""Count the bytes and FLOPs of every load, store and step of a sweep.

The module has formulas only: no speeds, no memory, no torch. The bytes are those that the engine
moves (engine/stores.py, kvcache/store.py). The terms are those of FlexGen's cost model (Sheng et
al. 2023, appendix A.3), with H2O's slots in place of the whole context.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from flexgen_h2o.checkpoint.formats import (
    TensorLayout,
    WeightFormat,
    layouts_of,
    weight_parts,
)
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.model import Layer, LayerKind, ModelSpec, WeightUnit
from flexgen_h2o.core.units import (
    BLOCK_ROWS,
    FEW_ROWS,
    PAGE,
    TRANSFER_CHUNK,
    WRITE_BACK_STEPS,
    round_up,
)
from flexgen_h2o.engine.memory import MemoryPlanner
from flexgen_h2o.engine.memory_plan import hidden_is_streamed
from flexgen_h2o.engine.weight_units import streamed_bytes
from flexgen_h2o.engine.workload import Block, MicroBatchShape, Workload
from flexgen_h2o.kvcache.eviction.policy import RowRecord
from flexgen_h2o.kvcache.layout import UnitLayout
from flexgen_h2o.tiers.stream import Part, Shares, is_streamed, split_rows

WHOLE: Shares = (1.0, 0.0, 0.0)
LOAD_LANES = {"disk": "disk_read", "host": "h2d"}  # by the tier that a part is on
STORE_LANES = {"disk": "disk_write", "host": "d2h"}
# Packing one number of the KV cache takes as long as this many bytes of norms and activations.
PACK_BYTES = 6


@dataclass(frozen=True)
class Transfer:
    """Bytes that one lane moves for a load or a store."""

    # One of costs.LANES.
    lane: str
    nbytes: float
    # Number of separate transfers.
    pieces: float
    # True if the bytes go between disk and device.
    crosses: bool = False

    @property
    def short_requests(self) -> float:
        """Number of pieces beyond those that requests of TRANSFER_CHUNK bytes would need.

        The measured rates are those of requests of TRANSFER_CHUNK bytes.
        """
        return max(0.0, self.pieces - self.nbytes / TRANSFER_CHUNK)


@dataclass(frozen=True)
class Product:
    """A product x W^T with one row part of a matrix: (rows, inner) times (inner, outer)."""

    rows: int
    inner: int
    outer: int
    # Whether the part is held in the blocked layout.
    blocked: bool = False
    # Bytes of the codes that the product reads as they are (kernels/coded.py). 0 if it reads
    # numbers of the dtype.
    coded: float = 0.0


@dataclass(frozen=True)
class Work:
    """The computation of one (layer, micro-batch) step. `layer_work` makes it."""

    products: tuple[Product, ...] = ()
    # FLOPs of causal attention over prompts, as profile.ComputeRates counts them.
    prompt_flops: float = 0.0
    # FLOPs of the column sums of an eviction policy, as profile.ComputeRates counts them.
    sums_flops: float = 0.0
    # Bytes of keys and values that decode attention reads on the device.
    device_kv: float = 0.0
    # Bytes of keys and values that decode attention reads on the host.
    host_kv: float = 0.0
    # Bytes that norms, activations and packing read and write.
    elementwise: float = 0.0
    # Numbers in packed slots, among the keys and values that are read.
    packed_values: float = 0.0
    # Logits that are read to choose tokens.
    logits: float = 0.0
    # Bytes between device and host that the step itself waits for.
    crossing: float = 0.0
    # Bytes read and written of KV entries that wait for their unit on disk.
    overlay: float = 0.0


@dataclass(frozen=True)
class CostContext:
    """Everything that fixes the bytes and FLOPs of a run. costs.Machine.setting makes it."""

    spec: ModelSpec
    policy: Policy
    need: Workload
    # Bytes of one number of the dtype that the run computes in.
    itemsize: int
    device_is_host: bool
    # Price products as if each matrix lay on more than one tier, whatever the shares.
    splits: bool = False

    @cached_property
    def memory(self) -> MemoryPlanner:
        """Planner of what the run holds."""
        return MemoryPlanner(self.spec, self.policy, self.itemsize, self.device_is_host)

    @cached_property
    def on_host(self) -> bool:
        """Whether attention runs on the host."""
        return self.memory.attends_on_host

    @cached_property
    def form(self) -> WeightFormat:
        """Format in which weights are held."""
        return self.memory.form

    @property
    def reads_codes(self) -> bool:
        """Whether products of few rows read the codes of matrices that are whole on the device."""
        return not self.splits and not self.device_is_host and self.form.has_codes

    @cached_property
    def weight_shares(self) -> Shares:
        """Shares of the weights on device, host and disk."""
        return self.memory.weight_shares

    @cached_property
    def hidden_shares(self) -> Shares:
        """Shares of the hidden states on device, host and disk."""
        return self.memory.hidden_shares

    def cut(self, depth: int) -> CostContext:
        """Return the same context with only `depth` transformer blocks, evenly taken from all."""
        spec = self.spec
        need = self.need
        chosen = [round(i * (spec.num_blocks - 1) / (depth - 1)) for i in range(depth)]
        slots, kept = (tuple(values[i] for i in chosen) for values in (need.slots, need.kept))
        cut = spec.of_blocks(chosen)
        cut_need = replace(need, slots=slots, kept=kept, windows=cut.windows)
        return replace(self, spec=cut, need=cut_need)

    @cached_property
    def _layouts(self) -> dict[tuple[int, int, RowRecord | None], UnitLayout]:
        return {}

    def kv_layout(self, block: int, batch: MicroBatchShape) -> UnitLayout:
        """Return the layout of the KV unit of a micro-batch in a transformer block."""
        record = self.memory.record_in(block, self.need.record)
        key = self.need.slots_of(block, batch.longest), batch.rows, record
        if key not in self._layouts:
            self._layouts[key] = self.memory.kv_layout(batch.rows, key[0], record)
        return self._layouts[key]


# ---- transfers


def weight_moves(at: CostContext, unit: WeightUnit) -> tuple[Transfer, ...]:
    """Return the transfers of one load of a weight unit: from disk and from the host."""
    return _weight_moves(layouts_of(at.form, unit.tensors), at.weight_shares, at.device_is_host)


def looked_up_bytes(at: CostContext) -> int:
    """Return the bytes that are read from disk per token for table lookups.

    A row of a table takes at least one page. No two tokens are assumed to be alike.
    """
    return sum(
        round_up(stored.row_bytes, PAGE)
        for layout in layouts_of(at.form, at.spec.embedding)
        for part, streamed in layout.homes(at.weight_shares, at.device_is_host)
        if part.tier == "disk" and not streamed
        for stored in layout.stored
    )


def coded_bytes(at: CostContext, layout: TensorLayout) -> int:
    """Return the bytes of a matrix whose codes products of few rows read as they are.

    The result is 0 if the matrix is decoded for them.
    """
    if not at.reads_codes or not layout.decoded_row_bytes:
        return 0
    parts, streamed = zip(*layout.homes(at.weight_shares, at.device_is_host), strict=True)
    return 0 if any(streamed) else sum(map(layout.part_bytes, parts))


def weight_ring_bytes(at: CostContext, unit: WeightUnit) -> int:
    """Return the bytes of a weight unit that go through the weight ring."""
    return streamed_bytes(unit, at.weight_shares, at.form, at.device_is_host)


# A model has about four kinds of units, so the cache answers nearly all calls.
@lru_cache(maxsize=4096)
def _weight_moves(
    layouts: tuple[TensorLayout, ...], shares: Shares, device_is_host: bool
) -> tuple[Transfer, ...]:
    nbytes = {"disk": 0.0, "host": 0.0}
    pieces = {"disk": 0, "host": 0}
    for layout in layouts:
        for part, streamed in layout.homes(shares, device_is_host):
            if streamed:
                nbytes[part.tier] += layout.part_bytes(part)
                pieces[part.tier] += len(layout.stored)
    crosses = {"disk": not device_is_host, "host": False}
    return tuple(
        Transfer(lane, nbytes[t], pieces[t], crosses[t])
        for t, lane in LOAD_LANES.items()
        if nbytes[t]
    )


def kv_ring_bytes(at: CostContext, block: int, batch: MicroBatchShape) -> int:
    """Return the bytes of a KV unit that go through the cache ring."""
    layout = at.kv_layout(block, batch)
    return sum(layout.part_bytes(p) for p in layout.parts if is_streamed(p.tier, at.on_host))


def kv_load_moves(
    at: CostContext, block: int, batch: MicroBatchShape, sweep: int
) -> tuple[Transfer, ...]:
    """Return the transfers that load a KV unit for decode sweep `sweep`; none for prefill.

    They load the KV entries that the sweep before has left.
    """
    return _unit_moves(at, block, batch, sweep - 1, LOAD_LANES) if sweep else ()


def kv_store_moves(
    at: CostContext, block: int, batch: MicroBatchShape, sweep: int
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
    found = [
        replace(m, nbytes=m.nbytes * share, pieces=m.pieces * share)
        for m in whole
        if m.lane == "disk_write" and share
    ]
    layout = at.kv_layout(block, batch)
    on_host = [part for part in layout.parts if part.tier == "host" and not at.on_host]
    return (*found, *(Transfer("d2h", part.rows * layout.column_bytes, 1) for part in on_host))


def _unit_moves(
    at: CostContext, block: int, batch: MicroBatchShape, sweep: int, lanes: dict[str, str]
) -> tuple[Transfer, ...]:
    """Return the transfers of the KV entries that a sweep leaves, for each streamed part of a unit.

    lanes: the lane by tier of a part.
    """
    layout = at.kv_layout(block, batch)
    columns = at.need.columns(block, sweep, batch.longest)
    found = []
    for part in layout.parts:
        if is_streamed(part.tier, at.on_host):
            ranges = layout.live_ranges(part, batch.rows, columns)
            crosses = part.tier == "disk" and not at.on_host
            found.append(
                Transfer(lanes[part.tier], sum(n for _, n in ranges), len(ranges), crosses)
            )
    return tuple(found)


def hidden_moves(
    at: CostContext, batch: MicroBatchShape, sweep: int, store: bool
) -> tuple[Transfer, ...]:
    """Return the transfers that load or store a micro-batch's hidden states between two layers."""
    if not hidden_is_brought(at):
        return ()
    # The device's own share is copied out of the ring and back.
    lanes = {"device": "d2h", **STORE_LANES} if store else {"device": "h2d", **LOAD_LANES}
    rows = at.memory.hidden_row_bytes
    return tuple(
        Transfer(
            lanes[part.tier],
            part.rows * sum(rows),
            len(rows),
            part.tier == "disk" and not at.device_is_host,
        )
        for part in split_rows(tokens_of(batch, sweep), at.hidden_shares)
    )


def hidden_is_brought(at: CostContext) -> bool:
    """Return whether hidden states are streamed, so that each layer loads and stores them."""
    return hidden_is_streamed(at.hidden_shares, at.device_is_host)


def disk_read_bytes(at: CostContext, blocks: Sequence[tuple[Block, int]]) -> float:
    """Return the bytes that all sweeps of `blocks` read from disk, if no sequence ends early.

    blocks: pairs of a block and the number of times that it runs.
    """
    kinds = at.memory.unit_kinds
    sweeps = at.need.gen_len
    from_disk = [
        _from_disk(_weight_moves(k, at.weight_shares, at.device_is_host)) for k in kinds.layouts
    ]
    loads = Counter(kinds.cycle)
    waits = at.memory.waits_for_router
    layers = Counter(len(layer.experts) for layer in at.memory.layers.layers[1:])
    columns = at.need.kinds
    blocks_alike = {columns.index(key): count for key, count in Counter(columns).items()}

    def of_weights(tokens: int) -> float:
        """Return the bytes of weights that a sweep reads which feeds `tokens` tokens."""
        shares = [_share_used(at, experts, tokens) if waits else 1.0 for experts in kinds.experts]
        return sum(count * from_disk[kind] * shares[kind] for kind, count in loads.items())

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
    total = from_disk[kinds.cycle[-1]] if at.spec.shares_table else 0.0
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


def layer_work(
    at: CostContext,
    layer: Layer,
    unit: WeightUnit,
    batch: MicroBatchShape,
    sweep: int,
    tokens: int | None = None,
) -> Work:
    """Return the work of one (layer, micro-batch) step.

    tokens: tokens that the step computes outside attention; None for those of the batch.
    """
    tokens = tokens_of(batch, sweep) if tokens is None else tokens
    if layer.kind == "embedding":
        return Work(elementwise=3.0 * tokens * at.spec.hidden_size * at.itemsize)
    if layer.kind == "head":
        head = WeightUnit("", at.spec.head) if at.spec.shares_table else unit
        return Work(_products(at, head, batch.rows), logits=float(batch.rows * len(layer.rows)))
    if layer.kind == "experts":
        return _experts_work(at, layer, unit, tokens)
    elementwise = float(tokens * _elementwise_width(at.spec, layer.kind) * at.itemsize)
    alone = Work(_products(at, unit, tokens), elementwise=elementwise)
    if layer.kind == "mlp":
        return alone
    return (
        _with_decode(at, alone, layer.block, batch, sweep)
        if sweep
        else _with_prefill(at, alone, layer.block, batch)
    )


def _experts_work(at: CostContext, layer: Layer, unit: WeightUnit, tokens: int) -> Work:
    """Return the work of a group of experts.

    `per_token` experts of a block compute each token. The choice is assumed to be even.
    """
    experts = at.spec.experts
    size = len(layer.experts)
    assert experts is not None
    used = experts.share_used(tokens) * size
    pairs = tokens * experts.per_token * size / experts.count
    # The experts of a model are alike, so the first one's products stand for those of any. Threads
    # share the products of all experts (kernels/linear.grouped_linear). That takes as long as one
    # matrix with the rows of all of them.
    products = _products(at, unit, max(1, round(pairs / used)))
    own = [
        replace(product, outer=max(1, round(used * product.outer)), coded=used * product.coded)
        for product in products[: len(products) // size]
    ]
    # Numbers that are gathered, normed, gated, weighed and added.
    width = 8 * at.spec.hidden_size + 4 * experts.ffn_size
    return Work(tuple(own), elementwise=pairs * width * at.itemsize)


def needed_share(at: CostContext, layer: Layer, tokens: int) -> float:
    """Return the share of sweeps in which one of `tokens` tokens needs the layer.

    It is below 1 only for a group of experts.
    """
    return _share_used(at, len(layer.experts), tokens)


def _share_used(at: CostContext, experts: int, tokens: int) -> float:
    """Return the share of units of `experts` experts that `tokens` tokens need.

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


def _column(at: CostContext, block: int, batch: MicroBatchShape) -> tuple[int, float]:
    """Return (bytes of the slots, elementwise bytes of packing them) of one KV entry.

    Both count all kv-heads of one sequence together.
    """
    values = 2 * at.spec.num_kv_heads * at.spec.head_dim
    packing = float(PACK_BYTES * values * at.policy.compress_cache)
    return at.spec.num_kv_heads * at.kv_layout(block, batch).column_bytes, packing


def _with_prefill(at: CostContext, alone: Work, block: int, batch: MicroBatchShape) -> Work:
    """Return the work `alone`, without attention, plus attention over prompts."""
    q_width = at.spec.num_heads * at.spec.head_dim
    column = 2 * at.spec.num_kv_heads * at.spec.head_dim * at.itemsize
    stored, packing = _column(at, block, batch)
    kept = batch.rows * at.need.columns(block, 0, batch.mean_len)
    # If attention runs on the host, kept KV entries go there as they are written.
    off_device = 1.0 - at.policy.cache_shares[0] if at.on_host and not at.device_is_host else 0.0
    # Shared prefixes are copied in front of the sequences' own KV entries.
    copied = 2.0 * batch.tokens * column if batch.saved else 0.0
    pairs = float(batch.pairs)
    window = at.spec.window(block)
    # A query does not read the KV entries that have left its window.
    if window is not None:
        pairs *= 1 - max(0.0, 1 - window / batch.mean_len) ** 2
    return replace(
        alone,
        prompt_flops=2.0 * pairs * q_width,
        sums_flops=1.0 * pairs * q_width * (at.need.scored and window is None),
        elementwise=alone.elementwise + copied + kept * (2.0 * stored + packing),
        crossing=kept * stored * off_device,
    )


def _with_decode(
    at: CostContext, alone: Work, block: int, batch: MicroBatchShape, sweep: int
) -> Work:
    """Return the work `alone`, without attention, plus attention over the sequences' KV slots."""
    spec = at.spec
    q_width = spec.num_heads * spec.head_dim
    column = 2 * spec.num_kv_heads * spec.head_dim * at.itemsize
    stored, packing = _column(at, block, batch)
    columns = float(batch.rows * at.need.columns(block, sweep, batch.mean_len))
    read = (
        columns * stored + batch.rows * spec.num_kv_heads * at.kv_layout(block, batch).beside_bytes
    )
    cache = at.memory.cache_shares
    in_window = spec.window(block) is not None
    common = 0 if in_window else at.need.common
    on_device = cache[0] if at.on_host and not at.device_is_host else 1.0
    elementwise = alone.elementwise
    # With rolling positions, keys are rotated as they are read.
    if "ranks" in at.need.record.names and spec.rotary and not in_window:
        elementwise += 6.0 * columns * spec.num_kv_heads * spec.rotary.width * at.itemsize
    return replace(
        alone,
        # The queries of all sequences read the common prefix together. Its bytes count once, and
        # its FLOPs as those of prompts.
        prompt_flops=4.0 * batch.rows * common * q_width,
        device_kv=read * on_device + common * stored,
        host_kv=read * (1 - on_device),
        elementwise=elementwise + batch.rows * packing,
        packed_values=columns * 2 * spec.num_kv_heads * spec.head_dim * at.policy.compress_cache,
        crossing=(1 - on_device) * batch.rows * (2 * q_width * at.itemsize + column),
        overlay=2.0 * cache[2] * batch.rows * stored * (1 + _waiting_columns(at.need.gen_len)),
    )


def _waiting_columns(gen_len: int) -> float:
    """Return the mean, over decode sweeps, of a sequence's KV entries that wait in RAM.

    They wait there to be written back to their unit on disk.
    """
    sweeps = max(1, gen_len - 1)
    written, rest = divmod(sweeps, WRITE_BACK_STEPS)
    return (written * WRITE_BACK_STEPS * (WRITE_BACK_STEPS - 1) + rest * (rest - 1)) / 2 / sweeps


def _products(at: CostContext, unit: WeightUnit, rows: int) -> tuple[Product, ...]:
    """Return the products of `rows` rows with all matrices of a weight unit.

    Each part of a matrix is multiplied on its tier, so a split matrix takes several products. A
    packed matrix is whole once it is unpacked, or is multiplied as it is. Resident parts are
    blocked.
    """
    shares = WHOLE if at.form.decoded_at == "load" else at.weight_shares
    shapes = tuple(t.shape for t in unit.tensors if len(t.shape) == 2)
    blocks = at.memory.blocks_rows
    found = tuple(
        Product(
            rows, columns, part.rows, blocks and part.tier != "disk" and columns % BLOCK_ROWS == 0
        )
        for columns, part in _part_shapes(shapes, shares)
    )
    if rows > FEW_ROWS or not at.reads_codes:
        return found
    matrices = (layout for layout in layouts_of(at.form, unit.tensors) if layout.is_matrix)
    return tuple(
        replace(p, coded=coded_bytes(at, layout)) for p, layout in zip(found, matrices, strict=True)
    )


@lru_cache(maxsize=4096)
def _part_shapes(
    shapes: tuple[tuple[int, ...], ...], shares: Shares
) -> tuple[tuple[int, Part], ...]:
    """Return (matrix columns, rows) of each part of each matrix."""
    return tuple((shape[1], part) for shape in shapes for part in weight_parts(shape, shares))

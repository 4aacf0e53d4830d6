"""Bytes and FLOPs of every load, store and step of a sweep. Formulas only: no speeds, no memory, no torch.

The bytes are those that the engine moves (engine/stores.py, kvcache/store.py); the terms are those
of FlexGen's cost model (Sheng et al. 2023, appendix A.3), with H2O's slots in place of the whole context.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from flexgen_h2o.checkpoint.formats import TensorLayout, WeightFormat, layouts_of, weight_format, weight_parts
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.model import Layer, LayerKind, ModelSpec, WeightUnit
from flexgen_h2o.core.units import BLOCK_ROWS, FEW_ROWS, PAGE, TRANSFER_CHUNK, WRITE_BACK_STEPS, round_up
from flexgen_h2o.engine.memory_plan import attends_on_host, hidden_is_streamed, hidden_row_bytes, kv_layout, record_in
from flexgen_h2o.engine.temporaries import is_blocked
from flexgen_h2o.engine.weight_units import layers_of, streamed_bytes, unit_kinds, waits_for_router
from flexgen_h2o.engine.workload import Batch, Block, WorkloadShape
from flexgen_h2o.kvcache.eviction.policy import RowRecord
from flexgen_h2o.kvcache.layout import UnitLayout
from flexgen_h2o.tiers.stream import Part, Shares, is_streamed, split_rows, tier_shares

WHOLE: Shares = (1.0, 0.0, 0.0)
LOAD_LANES = {"disk": "disk_read", "host": "h2d"}  # by the tier that a part is on
STORE_LANES = {"disk": "disk_write", "host": "d2h"}
PACK_BYTES = 6  # to pack a number of KV takes as long as norms and activations take for so many bytes


@dataclass(frozen=True)
class Transfer:
    """Bytes over one lane, in `pieces` separate transfers. crosses: the bytes go between disk and device."""

    lane: str
    nbytes: float
    pieces: float
    crosses: bool = False

    @property
    def short_requests(self) -> float:
        """The pieces less those that it would take in requests of TRANSFER_CHUNK, which is what rates are of."""
        return max(0.0, self.pieces - self.nbytes / TRANSFER_CHUNK)


@dataclass(frozen=True)
class Product:
    """x W^T of one row part of a matrix: (rows, inner) times (inner, outer). blocked: is the part held blocked? coded:
    bytes of codes that it is multiplied by as they are (kernels/coded.py); 0: by numbers of the dtype."""

    rows: int
    inner: int
    outer: int
    blocked: bool = False
    coded: float = 0.0


@dataclass(frozen=True)
class Work:
    """What one (layer, micro-batch) step computes.

    prompt_flops: causal attention; sums_flops: column sums; both as profile.ComputeRates counts them. device_kv,
    host_kv: bytes of keys and values that decode attention reads on each side. elementwise: bytes read and written by
    norms, activations and packing. packed_values: of the KV that is read, numbers in packed slots. logits: looked at to
    choose tokens. crossing: bytes between device and host that the step itself waits for. overlay: bytes read and
    written of columns that wait for their unit on disk.
    """

    products: tuple[Product, ...] = ()
    prompt_flops: float = 0.0
    sums_flops: float = 0.0
    device_kv: float = 0.0
    host_kv: float = 0.0
    elementwise: float = 0.0
    packed_values: float = 0.0
    logits: float = 0.0
    crossing: float = 0.0
    overlay: float = 0.0


@dataclass(frozen=True)
class CostContext:
    """Everything that fixes the bytes and FLOPs of a run.

    splits: products are priced as where each matrix lies on more than one tier, whatever the shares.
    """

    spec: ModelSpec
    policy: Policy
    need: WorkloadShape
    itemsize: int
    device_is_host: bool
    splits: bool = False

    @cached_property
    def on_host(self) -> bool:
        """Does attention run on the host?"""
        return attends_on_host(self.policy, self.device_is_host)

    @cached_property
    def form(self) -> WeightFormat:
        """How weights are held."""
        return weight_format(self.spec, self.policy, self.itemsize)

    @property
    def reads_codes(self) -> bool:
        """Do products of few rows take matrices that lie on the device whole as they are held?"""
        return not self.splits and not self.device_is_host and self.form.has_codes

    @cached_property
    def weight_shares(self) -> Shares:
        return tier_shares(self.policy.weight_shares, self.device_is_host)

    @cached_property
    def hidden_shares(self) -> Shares:
        return tier_shares(self.policy.hidden_shares, self.device_is_host)

    def cut(self, depth: int) -> CostContext:
        """The same with `depth` transformer blocks, evenly taken from all."""
        spec, need = self.spec, self.need
        chosen = [round(i * (spec.num_blocks - 1) / (depth - 1)) for i in range(depth)]
        slots, kept = (tuple(values[i] for i in chosen) for values in (need.slots, need.kept))
        cut = spec.of_blocks(chosen)
        cut_need = replace(need, slots=slots, kept=kept, windows=cut.windows)
        return replace(self, spec=cut, need=cut_need)

    @cached_property
    def _layouts(self) -> dict[tuple[int, int, RowRecord | None], UnitLayout]:
        return {}

    def kv_layout(self, block: int, batch: Batch) -> UnitLayout:
        """Of the KV unit of a micro-batch in a transformer block."""
        record = record_in(self.spec, block, self.need.record)
        key = self.need.slots_of(block, batch.longest), batch.rows, record
        if key not in self._layouts:
            self._layouts[key] = kv_layout(
                self.spec, self.policy, batch.rows, key[0], record, self.itemsize, self.device_is_host
            )
        return self._layouts[key]


# ---- transfers


def weight_moves(at: CostContext, unit: WeightUnit) -> tuple[Transfer, ...]:
    """One load of a weight unit: what comes from disk and what from the host."""
    return _weight_moves(layouts_of(at.form, unit.tensors), at.weight_shares, at.device_is_host)


def looked_up_bytes(at: CostContext) -> int:
    """Bytes that are read from disk of tables for each token: a page or more a row, where no two tokens are alike."""
    return sum(
        round_up(stored.row_bytes, PAGE)
        for layout in layouts_of(at.form, at.spec.embedding)
        for part, streamed in layout.homes(at.weight_shares, at.device_is_host)
        if part.tier == "disk" and not streamed
        for stored in layout.stored
    )


def coded_bytes(at: CostContext, layout: TensorLayout) -> int:
    """Of a matrix that products of few rows take as it is held; 0: it is decoded for them."""
    if not at.reads_codes or not layout.decoded_row_bytes:
        return 0
    parts, streamed = zip(*layout.homes(at.weight_shares, at.device_is_host), strict=True)
    return 0 if any(streamed) else sum(map(layout.part_bytes, parts))


def weight_ring_bytes(at: CostContext, unit: WeightUnit) -> int:
    return streamed_bytes(unit, at.weight_shares, at.form, at.device_is_host)


# Units of a model are of four kinds or so.
@lru_cache(maxsize=4096)
def _weight_moves(layouts: tuple[TensorLayout, ...], shares: Shares, device_is_host: bool) -> tuple[Transfer, ...]:
    nbytes, pieces = {"disk": 0.0, "host": 0.0}, {"disk": 0, "host": 0}
    for layout in layouts:
        for part, streamed in layout.homes(shares, device_is_host):
            if streamed:
                nbytes[part.tier] += layout.part_bytes(part)
                pieces[part.tier] += len(layout.stored)
    crosses = {"disk": not device_is_host, "host": False}
    return tuple(Transfer(lane, nbytes[t], pieces[t], crosses[t]) for t, lane in LOAD_LANES.items() if nbytes[t])


def kv_ring_bytes(at: CostContext, block: int, batch: Batch) -> int:
    layout = at.kv_layout(block, batch)
    return sum(layout.part_bytes(p) for p in layout.parts if is_streamed(p.tier, at.on_host))


def kv_load_moves(at: CostContext, block: int, batch: Batch, sweep: int) -> tuple[Transfer, ...]:
    """Bring a KV unit for decode sweep `sweep`: the columns that the sweep before has left."""
    return _unit_moves(at, block, batch, sweep - 1, LOAD_LANES) if sweep else ()


def kv_store_moves(at: CostContext, block: int, batch: Batch, sweep: int) -> tuple[Transfer, ...]:
    """Store a KV unit: whole after prefill; in decode the new columns to the host, and a share of a whole unit to disk
    (the overlay is written back every WRITE_BACK_STEPS sweeps)."""
    whole = _unit_moves(at, block, batch, sweep, STORE_LANES)
    if sweep == 0:
        return whole
    decode_sweeps = max(1, at.need.gen_len - 1)
    share = decode_sweeps // WRITE_BACK_STEPS / decode_sweeps
    found = [
        replace(m, nbytes=m.nbytes * share, pieces=m.pieces * share) for m in whole if m.lane == "disk_write" and share
    ]
    layout = at.kv_layout(block, batch)
    on_host = [part for part in layout.parts if part.tier == "host" and not at.on_host]
    return (*found, *(Transfer("d2h", part.rows * layout.column_bytes, 1) for part in on_host))


def _unit_moves(at: CostContext, block: int, batch: Batch, sweep: int, lanes: dict[str, str]) -> tuple[Transfer, ...]:
    """The columns that a sweep leaves, of every streamed part of a unit, over the lane of its tier."""
    layout, columns = at.kv_layout(block, batch), at.need.columns(block, sweep, batch.longest)
    found = []
    for part in layout.parts:
        if is_streamed(part.tier, at.on_host):
            ranges = layout.live_ranges(part, batch.rows, columns)
            crosses = part.tier == "disk" and not at.on_host
            found.append(Transfer(lanes[part.tier], sum(n for _, n in ranges), len(ranges), crosses))
    return tuple(found)


def hidden_moves(at: CostContext, batch: Batch, sweep: int, store: bool) -> tuple[Transfer, ...]:
    """Hidden states of a micro-batch between two layers."""
    if not hidden_is_brought(at):
        return ()
    # The device's own share is copied out of the ring and back.
    lanes = {"device": "d2h", **STORE_LANES} if store else {"device": "h2d", **LOAD_LANES}
    rows = hidden_row_bytes(at.spec, at.itemsize)
    return tuple(
        Transfer(lanes[part.tier], part.rows * sum(rows), len(rows), part.tier == "disk" and not at.device_is_host)
        for part in split_rows(tokens_of(batch, sweep), at.hidden_shares)
    )


def hidden_is_brought(at: CostContext) -> bool:
    return hidden_is_streamed(at.hidden_shares, at.device_is_host)


def disk_read_bytes(at: CostContext, blocks: Sequence[tuple[Block, int]]) -> float:
    """That the sweeps of `blocks`, each as often as it says, read from disk; rows do not end early."""
    kinds, sweeps = unit_kinds(at.spec, at.policy, at.form), at.need.gen_len
    from_disk = [_from_disk(_weight_moves(k, at.weight_shares, at.device_is_host)) for k in kinds.layouts]
    loads, waits = Counter(kinds.cycle), waits_for_router(at.spec, at.policy)
    layers = Counter(len(layer.experts) for layer in layers_of(at.spec, at.policy).layers[1:])
    columns = at.need.kinds
    blocks_alike = {columns.index(key): count for key, count in Counter(columns).items()}

    def of_weights(tokens: int) -> float:
        """Of a sweep that feeds so many tokens."""
        shares = [_share_used(at, experts, tokens) if waits else 1.0 for experts in kinds.experts]
        return sum(count * from_disk[kind] * shares[kind] for kind, count in loads.items())

    def of_hidden(batch: Batch, sweep: int) -> float:
        steps = sum(count * _share_used(at, experts, tokens_of(batch, sweep)) for experts, count in layers.items())
        return steps * _from_disk(hidden_moves(at, batch, sweep, store=False))

    def of_batch(batch: Batch) -> float:
        cache = 0.0
        for sweep in range(1, sweeps if at.policy.cache_shares[2] else 1):
            cache += sum(n * _from_disk(kv_load_moves(at, i, batch, sweep)) for i, n in blocks_alike.items())
        rows = (batch.fed + (sweeps - 1) * batch.rows) * looked_up_bytes(at)
        return cache + rows + of_hidden(batch, 0) + (sweeps - 1) * of_hidden(batch, 1)

    # A tied head and the next embedding are one load, but for the very first.
    total = from_disk[kinds.cycle[-1]] if at.spec.shares_table else 0.0
    for block, count in blocks:
        prefill, decode = (of_weights(sum(tokens_of(batch, sweep) for batch in block)) for sweep in (0, 1))
        total += count * (prefill + (sweeps - 1) * decode)
        total += count * sum(n * of_batch(batch) for batch, n in Counter(block).items())
    return total


def _from_disk(moves: Sequence[Transfer]) -> float:
    return sum(move.nbytes for move in moves if move.lane == "disk_read")


# ---- steps


def tokens_of(batch: Batch, sweep: int) -> int:
    """Tokens that a micro-batch feeds into a sweep."""
    return batch.rows if sweep else batch.fed


def layer_work(
    at: CostContext, layer: Layer, unit: WeightUnit, batch: Batch, sweep: int, tokens: int | None = None
) -> Work:
    """One (layer, micro-batch) step. tokens: that it computes besides attention, where not those of the batch."""
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
    return _with_decode(at, alone, layer.block, batch, sweep) if sweep else _with_prefill(at, alone, layer.block, batch)


def _experts_work(at: CostContext, layer: Layer, unit: WeightUnit, tokens: int) -> Work:
    """A group of experts: each token is computed by `per_token` of them, which they choose evenly."""
    experts, size = at.spec.experts, len(layer.experts)
    assert experts is not None
    used = experts.share_used(tokens) * size
    pairs = tokens * experts.per_token * size / experts.count
    # The experts of a model are alike, so the first one's products are those of any; threads share those of all
    # (kernels/linear.grouped_linear), which takes as long as a matrix of all their rows.
    products = _products(at, unit, max(1, round(pairs / used)))
    own = [
        replace(product, outer=max(1, round(used * product.outer)), coded=used * product.coded)
        for product in products[: len(products) // size]
    ]
    width = 8 * at.spec.hidden_size + 4 * experts.ffn_size  # gathered, normed, gated, weighed and added
    return Work(tuple(own), elementwise=pairs * width * at.itemsize)


def needed_share(at: CostContext, layer: Layer, tokens: int) -> float:
    """The share of sweeps in which one of `tokens` tokens needs the layer: less than 1 of a group of experts."""
    return _share_used(at, len(layer.experts), tokens)


def _share_used(at: CostContext, experts: int, tokens: int) -> float:
    """Of units of so many experts, the share that `tokens` tokens need; 1 of units of none."""
    return at.spec.experts.share_used(tokens, experts) if at.spec.experts and experts else 1.0


def _elementwise_width(spec: ModelSpec, kind: LayerKind) -> int:
    """Numbers that norms, activations and rotary embeddings of a layer read and write for a token.

    A buffer of the family's own is read once more and written; a number that is rotated is read and written.
    """
    norm, width = 2 * spec.hidden_size, 0
    if kind != "mlp":
        rotated = spec.rotary.width * (spec.num_heads + spec.num_kv_heads) if spec.rotary else 0
        width += norm + 2 * rotated
    if kind != "attention":
        width += norm + 2 * spec.ffn_size
    return width + sum(2 * b.width for b in spec.buffers if kind in (b.layer, "block"))


def _column(at: CostContext, block: int, batch: Batch) -> tuple[int, float]:
    """Of a column of a row, all kv-heads together: bytes of its slots, and elementwise bytes of packing them."""
    values = 2 * at.spec.num_kv_heads * at.spec.head_dim
    packing = float(PACK_BYTES * values * at.policy.compress_cache)
    return at.spec.num_kv_heads * at.kv_layout(block, batch).column_bytes, packing


def _with_prefill(at: CostContext, alone: Work, block: int, batch: Batch) -> Work:
    """The step with attention over prompts."""
    q_width, column = at.spec.num_heads * at.spec.head_dim, 2 * at.spec.num_kv_heads * at.spec.head_dim * at.itemsize
    stored, packing = _column(at, block, batch)
    kept = batch.rows * at.need.columns(block, 0, batch.mean_len)
    # Under attention on the host, kept columns go there as they are written.
    off_device = 1.0 - at.policy.cache_shares[0] if at.on_host and not at.device_is_host else 0.0
    copied = 2.0 * batch.tokens * column if batch.saved else 0.0  # prefixes in front of rows' own columns
    pairs, window = float(batch.pairs), at.spec.window(block)
    if window is not None:  # of a prompt all pairs but those of its queries with what has left their windows
        pairs *= 1 - max(0.0, 1 - window / batch.mean_len) ** 2
    return replace(
        alone,
        prompt_flops=2.0 * pairs * q_width,
        sums_flops=1.0 * pairs * q_width * (at.need.scored and window is None),
        elementwise=alone.elementwise + copied + kept * (2.0 * stored + packing),
        crossing=kept * stored * off_device,
    )


def _with_decode(at: CostContext, alone: Work, block: int, batch: Batch, sweep: int) -> Work:
    """The step with attention over the KV slots of rows."""
    spec = at.spec
    q_width, column = spec.num_heads * spec.head_dim, 2 * spec.num_kv_heads * spec.head_dim * at.itemsize
    stored, packing = _column(at, block, batch)
    columns = float(batch.rows * at.need.columns(block, sweep, batch.mean_len))
    read = columns * stored + batch.rows * spec.num_kv_heads * at.kv_layout(block, batch).beside_bytes
    cache = tier_shares(at.policy.cache_shares, at.device_is_host)
    in_window = spec.window(block) is not None
    common = 0 if in_window else at.need.common
    on_device = cache[0] if at.on_host and not at.device_is_host else 1.0
    elementwise = alone.elementwise
    if "ranks" in at.need.record.names and spec.rotary and not in_window:  # keys are rotated as they are read
        elementwise += 6.0 * columns * spec.num_kv_heads * spec.rotary.width * at.itemsize
    return replace(
        alone,
        # All rows' queries read the common prefix together: its bytes once, and as many products as prompts have.
        prompt_flops=4.0 * batch.rows * common * q_width,
        device_kv=read * on_device + common * stored,
        host_kv=read * (1 - on_device),
        elementwise=elementwise + batch.rows * packing,
        packed_values=columns * 2 * spec.num_kv_heads * spec.head_dim * at.policy.compress_cache,
        crossing=(1 - on_device) * batch.rows * (2 * q_width * at.itemsize + column),
        overlay=2.0 * cache[2] * batch.rows * stored * (1 + _waiting_columns(at.need.gen_len)),
    )


def _waiting_columns(gen_len: int) -> float:
    """Columns of a row that wait in RAM for their unit on disk, at a decode sweep: their mean over all of them."""
    sweeps = max(1, gen_len - 1)
    written, rest = divmod(sweeps, WRITE_BACK_STEPS)
    return (written * WRITE_BACK_STEPS * (WRITE_BACK_STEPS - 1) + rest * (rest - 1)) / 2 / sweeps


def _products(at: CostContext, unit: WeightUnit, rows: int) -> tuple[Product, ...]:
    """Each part of a matrix is multiplied where it lies, so a split matrix takes several products; a packed one is
    whole once it is unpacked, or multiplied as it is. Resident parts are blocked."""
    shares = WHOLE if at.form.decodes else at.weight_shares
    shapes = tuple(t.shape for t in unit.tensors if len(t.shape) == 2)
    blocks = is_blocked(at.form, at.device_is_host)
    found = tuple(
        Product(rows, columns, part.rows, blocks and part.tier != "disk" and columns % BLOCK_ROWS == 0)
        for columns, part in _part_shapes(shapes, shares)
    )
    if rows > FEW_ROWS or not at.reads_codes:
        return found
    matrices = (layout for layout in layouts_of(at.form, unit.tensors) if layout.is_matrix)
    return tuple(replace(p, coded=coded_bytes(at, layout)) for p, layout in zip(found, matrices, strict=True))


@lru_cache(maxsize=4096)
def _part_shapes(shapes: tuple[tuple[int, ...], ...], shares: Shares) -> tuple[tuple[int, Part], ...]:
    """Columns and rows of each part."""
    return tuple((shape[1], part) for shape in shapes for part in weight_parts(shape, shares))

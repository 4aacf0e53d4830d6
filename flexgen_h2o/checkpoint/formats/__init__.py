"""How the matrices of a model are stored, held on their tiers and multiplied: one module a format, named in `FORMATS`.

A module has `recognise(policy, quantization, itemsize)`: its format where the policy's switches, or else the
`quantization_config` of a checkpoint, ask for it. Plans ask formats for bytes, so torch is imported where it is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from flexgen_h2o.core.config import DTYPE_BYTES, TIERS, WIDE, Policy
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.model import ModelSpec, Stacked, TensorSpec, slice_key
from flexgen_h2o.core.units import BLOCK_ROWS, CUT_IN_BLOCKS, FEW_ROWS, ROW_BLOCK
from flexgen_h2o.tiers.stream import Part, Shares, is_streamed, split_rows

if TYPE_CHECKING:
    import torch

    from flexgen_h2o.kernels.coded import Codes
    from flexgen_h2o.kernels.linear import RowParts
    from flexgen_h2o.kernels.workspace import Workspace

FORMATS = {
    "groupwise": "flexgen_h2o.checkpoint.formats.groupwise",
    "mxfp4": "flexgen_h2o.checkpoint.formats.mxfp4",
    "fp8": "flexgen_h2o.checkpoint.formats.fp8",
    "compressed-tensors": "flexgen_h2o.checkpoint.formats.compressed_tensors",
    "gptq": "flexgen_h2o.checkpoint.formats.gptq",
    "awq": "flexgen_h2o.checkpoint.formats.awq",
    "int8": "flexgen_h2o.checkpoint.formats.int8",
    "dense": "flexgen_h2o.checkpoint.formats",
}
# Of checkpoints; the others are by a policy's switches, or their absence.
QUANTISED = tuple(name for name in FORMATS if name not in ("groupwise", "int8", "dense"))
IN_PRODUCTS = "mxfp4_in_products", "4bit_in_products"  # WeightFormat.decoder_in_products


@dataclass(frozen=True)
class StoredRows:
    """One of the stored tensors that a matrix, or a vector, is made of.

    names: that it may have in a checkpoint; shape, dtypes: that it must have there (as of safetensors.StoredTensor).
    row_bytes: of one of its rows, along its first dimension, in memory. rows_each: rows of the matrix that share a row
    of it, such as 128 for the scales of blocks of 128 x 128; 0: each part needs all of it. is_values: numbers, which
    are converted to the compute dtype as they are read; in_float32: numbers, which become float32; otherwise bytes.
    index: it is this slice of what has the name (TensorSpec.index). stacked: as of TensorSpec. random: of random
    weights, byte i is (any byte & mask) + base, where both repeat; by default any byte. first: it is `shape[0]` rows of
    what has the name, from this one on, and its rows are counted from there (`of_rows`).
    """

    names: tuple[str, ...] = field(compare=False)
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    row_bytes: int
    rows_each: int = 1
    is_values: bool = False
    in_float32: bool = False
    index: int | None = field(default=None, compare=False)
    stacked: Stacked | None = field(default=None, compare=False)
    random: tuple[bytes, bytes] = field(default=(b"\xff", b"\0"), compare=False)
    first: int = field(default=0, compare=False)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def key(self) -> str:
        """No other stored tensor, or slice of one, has it."""
        return slice_key(self.name, self.index)

    def part_rows(self, part: Part) -> tuple[int, int]:
        """Its rows [first, end) that rows of the matrix need."""
        return self.rows_of(part.start, part.end)

    def rows_of(self, first: int, end: int) -> tuple[int, int]:
        """`part_rows` of rows [first, end) of the matrix."""
        if not self.rows_each:
            return 0, self.shape[0]
        return first // self.rows_each, -(-end // self.rows_each)

    def file_rows(self, part: Part) -> tuple[int, int]:
        """`part_rows` of what has the name in the checkpoint."""
        first, end = self.part_rows(part)
        return self.first + first, self.first + end

    def part_bytes(self, part: Part) -> int:
        first, end = self.part_rows(part)
        return (end - first) * self.row_bytes

    def of_rows(self, chosen: range) -> StoredRows:
        """The rows that rows of the matrix need, as if it had no others."""
        first, end = self.rows_of(chosen.start, chosen.stop)
        return replace(self, shape=(end - first, *self.shape[1:]), first=first)

    def held(self, raw: torch.Tensor, dtype: str) -> torch.Tensor:
        """Bytes (uint8) of a checkpoint, where it is stored as `dtype`, as a piece for `WeightFormat.decode_rows`."""
        import torch

        return raw.view(getattr(torch, dtype)).float().view(torch.uint8) if self.in_float32 else raw


@dataclass(frozen=True)
class TensorLayout:
    """A tensor in a format. Equal for tensors that take the same bytes.

    decoded_row_bytes: of a row in the buffer that it is decoded into when its unit is opened; 0: it is used as held.
    by_columns: what is stored runs along its columns, so that its parts are runs of columns: what is said of rows of
    parts and of StoredRows is then meant of columns. looked_up: as of TensorSpec; its rows can be read one by one.
    """

    shape: tuple[int, ...]
    stored: tuple[StoredRows, ...]
    decoded_row_bytes: int = 0
    by_columns: bool = False
    looked_up: bool = False

    @property
    def cut_shape(self) -> tuple[int, ...]:
        """Its sizes, that which is cut into parts first."""
        return self.shape[::-1] if self.by_columns else self.shape

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) == 2

    def part_bytes(self, part: Part) -> int:
        """In memory."""
        return sum(stored.part_bytes(part) for stored in self.stored)

    def cuts_at(self, multiple: int) -> bool:
        """Can its rows be cut at multiples of so many into tensors that share nothing (`of_rows`)?"""
        return not self.by_columns and all(multiple % max(1, stored.rows_each) == 0 for stored in self.stored)

    def of_rows(self, chosen: range) -> TensorLayout:
        """Of these rows alone."""
        return replace(
            self, shape=(len(chosen), *self.shape[1:]), stored=tuple(stored.of_rows(chosen) for stored in self.stored)
        )

    def homes(self, shares: Shares, device_is_host: bool) -> tuple[tuple[Part, bool], ...]:
        """Its parts, and of each whether it is streamed.

        A table of which nothing is used but rows is not split where the device is host memory: it lies on the last tier
        that has a share of the weights. On disk the rows that a step wants are read, in memory they are there.
        """
        if self.looked_up and device_is_host:
            last = max(i for i, share in enumerate(shares) if share > 0)
            return ((Part(TIERS[last], 0, self.cut_shape[0]), False),)
        parts = weight_parts(self.cut_shape, shares)
        return tuple((part, is_streamed(part.tier, device_is_host)) for part in parts)


def weight_parts(shape: tuple[int, ...], shares: Shares) -> tuple[Part, ...]:
    """Homes of a tensor's rows: matrices are split by the shares, vectors stay with the device. shape: as of
    TensorLayout.cut_shape. Large matrices are cut where blocks of rows end: the compiled loop takes whole ones."""
    if len(shape) < 2:
        return split_rows(shape[0], (1.0, 0.0, 0.0))
    return split_rows(shape[0], shares, BLOCK_ROWS if shape[0] >= CUT_IN_BLOCKS else ROW_BLOCK)


class Held(NamedTuple):
    """A part of a matrix and, of each stored tensor, the rows that it needs (uint8)."""

    part: Part
    pieces: Sequence[torch.Tensor]


def pieces_of(layout: TensorLayout, held: Held, first: int, end: int) -> Iterator[torch.Tensor]:
    """Of the pieces of a part what rows [first, end) of the matrix need, which are among its own."""
    for stored, piece in zip(layout.stored, held.pieces, strict=True):
        begin, _ = stored.part_rows(held.part)
        a, b = stored.rows_of(first, end)
        yield piece[(a - begin) * stored.row_bytes : (b - begin) * stored.row_bytes]


def plain_layout(tensor: TensorSpec, itemsize: int) -> TensorLayout:
    """A tensor whose numbers are stored as they are, in any float dtype, and held in the compute dtype."""
    shape = tensor.shape[::-1] if tensor.transposed else tensor.shape
    row_bytes = itemsize * (tensor.numel // shape[0])
    names = (tensor.name, *tensor.aliases)
    stored = StoredRows(
        names, shape, (*DTYPE_BYTES, WIDE), row_bytes, is_values=True, index=tensor.index, stacked=tensor.stacked
    )
    return TensorLayout(tensor.shape, (stored,), by_columns=tensor.transposed, looked_up=tensor.looked_up)


@dataclass(frozen=True)
class WeightFormat:
    """One format; subclasses say how matrices are laid out and decoded. Vectors are always plain.

    This class itself is the format `dense`, of most checkpoints: any float dtype, held in the compute dtype.

    itemsize: bytes of the compute dtype. decodes: are matrices decoded into a buffer when their unit is opened? Else
    they are used as held.
    """

    itemsize: int
    decodes: ClassVar[bool] = False
    sample_name: ClassVar[str] = ""  # of a tensor that it has matrices of, whatever the model
    sample_columns: ClassVar[tuple[int, ...]] = (BLOCK_ROWS,)  # of matrices that take different loops; last a card's

    @property
    def in_int8(self) -> bool:
        """Are products in int8?"""
        return False

    @property
    def requantises(self) -> bool:
        """Do matrices become int8 rows as they are multiplied?"""
        return False

    @property
    def decodes_in_place(self) -> bool:
        """Does decoding a matrix take no memory besides?"""
        return True

    @property
    def decoder(self) -> str:
        """What decodes a quantised checkpoint's matrices, as profiles name it; "" of others."""
        return ""

    @property
    def decoder_in_products(self) -> str:
        """What decodes experts' matrices as a CPU multiplies them (`codes`), as profiles name it; "" of others."""
        return ""

    @property
    def has_codes(self) -> bool:
        """Do products take matrices as they are held (`codes`): on a card, and on a CPU those of experts?"""
        return type(self).codes is not WeightFormat.codes and not self.in_int8

    @property
    def packed(self) -> PackedFormat | None:
        """Itself where checkpoints have first to be brought into it."""
        return None

    def layout(self, tensor: TensorSpec) -> TensorLayout:
        return plain_layout(tensor, self.itemsize)

    def row_parts(
        self, layout: TensorLayout, pieces: Sequence[torch.Tensor], workspace: Workspace, blocks: bool
    ) -> RowParts:
        """Rows of a tensor that is used as held. pieces: of each stored tensor, uint8. blocks: bring the rows into the
        order that products are fastest with, where they lie."""
        from flexgen_h2o.kernels.linear import DenseRows, InputRows, block_rows

        rows = pieces[0].view(workspace.dtype).view(-1, *layout.cut_shape[1:])
        if layout.by_columns:
            return (InputRows(rows),)
        return block_rows(rows) if blocks and layout.is_matrix else (DenseRows(rows),)

    def decoded_parts(self, layout: TensorLayout, memory: torch.Tensor, workspace: Workspace) -> RowParts:
        """The rows of a matrix that `decode` fills, in `memory` (uint8)."""
        from flexgen_h2o.kernels.linear import DenseRows

        if not self.in_int8:
            return (DenseRows(memory.view(workspace.dtype).view(layout.shape)),)
        from flexgen_h2o.kernels.int8 import Int8Rows, blank_int8_rows

        rows = blank_int8_rows(memory.view(layout.shape[0], -1))
        return tuple(Int8Rows(some, layout.shape[1], workspace) for some in rows)

    def decode(self, layout: TensorLayout, held: Sequence[Held], out: RowParts) -> None:
        """Fill a matrix. held: all its rows, in order."""
        from flexgen_h2o.kernels.linear import DenseRows

        (whole,) = out
        assert isinstance(whole, DenseRows)
        self.decode_range(layout, held, 0, whole.rows)

    def coded_parts(self, layout: TensorLayout, held: Sequence[Held], decoded: RowParts) -> RowParts:
        """The rows of a matrix that products take from their codes while inputs are few, and that are decoded into
        `decoded` when others want them; () where that cannot be. held: all its rows, in order, which stay there."""
        if not self.has_codes:
            return ()
        from flexgen_h2o.kernels import triton
        from flexgen_h2o.kernels.coded import CodedRows, are_multiplied
        from flexgen_h2o.kernels.linear import DenseRows

        (whole,) = decoded
        if len(held) > 1 and triton.takes(*held[0].pieces):
            return ()
        assert isinstance(whole, DenseRows)
        found = [(self.codes(layout, one), whole.rows[one.part.start : one.part.end]) for one in held]
        if not all(are_multiplied(codes, rows) for codes, rows in found):
            return ()
        return tuple(CodedRows(codes, DenseRows(rows)) for codes, rows in found)

    def codes(self, layout: TensorLayout, held: Held) -> Codes:
        """Some rows of a matrix as products take them; formats without it are decoded."""
        raise NotImplementedError

    def decode_range(self, layout: TensorLayout, held: Sequence[Held], first: int, out: torch.Tensor) -> torch.Tensor:
        """Fill out (n, columns), in a float dtype, with rows from `first` on, and return it. held: what has them."""
        for one in held:
            begin, end = max(first, one.part.start), min(first + len(out), one.part.end)
            if begin < end:
                part, pieces = Part(one.part.tier, begin, end), [*pieces_of(layout, one, begin, end)]
                self.decode_rows(layout, part, pieces, out[begin - first : end - first])
        return out

    def decode_rows(self, layout: TensorLayout, part: Part, pieces: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Fill out (rows of the part, columns), in a float dtype, whose rows are contiguous."""
        raise NotImplementedError


@dataclass(frozen=True)
class PackedFormat(WeightFormat):
    """A format that weights are brought into, once (checkpoint/packed_store.py), because a switch of the policy asks.

    A tensor is one stored tensor under its own key: a matrix uint8 of (rows, row bytes). flag: of that switch.
    """

    flag: ClassVar[str]

    @property
    def packed(self) -> PackedFormat:
        return self

    @property
    def name(self) -> str:
        """Of the store."""
        raise NotImplementedError

    @property
    def record(self) -> dict[str, object]:
        """What the bytes mean. `format` is a number that rises when they change: stores of another one are not used."""
        raise NotImplementedError

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: (n, columns), any float dtype, on the host. Returns (n, row bytes) uint8. ValueError: not finite."""
        raise NotImplementedError

    def packed_layout(self, tensor: TensorSpec, row_bytes: int, decoded_row_bytes: int = 0) -> TensorLayout:
        if len(tensor.shape) != 2 or tensor.exact:
            return plain_layout(tensor, self.itemsize)
        stored = StoredRows((tensor.key,), (tensor.shape[0], row_bytes), ("uint8",), row_bytes)
        decoded = 0 if tensor.looked_up else decoded_row_bytes  # rows that are wanted are decoded one by one
        return TensorLayout(tensor.shape, (stored,), decoded, looked_up=tensor.looked_up)


def recognise(policy: Policy, quantization: Mapping[str, Any] | None, itemsize: int) -> WeightFormat | None:
    """Of the format `dense`."""
    return WeightFormat(itemsize) if quantization is None else None


@lru_cache(maxsize=1024)
def weight_format(spec: ModelSpec, policy: Policy, itemsize: int) -> WeightFormat:
    """How a run holds a model's weights: as the policy's switches ask, else as the checkpoint has them."""
    return _recognised(policy, spec.quantization, itemsize)


def checkpoint_format(spec: ModelSpec) -> WeightFormat:
    """How a model's checkpoint has its weights, whatever a policy makes of them."""
    return weight_format(spec, Policy(), 4)


def check_quantization(quantization: Mapping[str, Any] | None) -> None:
    """UsageError for a `quantization_config` that no format knows."""
    _recognised(Policy(), quantization, 4)


def _recognised(policy: Policy, quantization: Mapping[str, Any] | None, itemsize: int) -> WeightFormat:
    is_known_type = quantization is None or isinstance(quantization, Mapping)
    for module in FORMATS.values() if is_known_type else ():
        found: WeightFormat | None = importlib.import_module(module).recognise(policy, quantization, itemsize)
        if found is not None:
            return found
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    raise UsageError(
        f"quantization_config: quant_method {method!r:.60} is not supported, only {', '.join(QUANTISED)}; give a"
        " checkpoint in one of these (docs/reference/models.md), or an unquantised one"
    )


@lru_cache(maxsize=4096)
def layouts_of(form: WeightFormat, tensors: tuple[TensorSpec, ...]) -> tuple[TensorLayout, ...]:
    """Of the tensors of a unit."""
    return tuple(layout_of(form, tensor) for tensor in tensors)


def layout_of(form: WeightFormat, tensor: TensorSpec) -> TensorLayout:
    """Of a tensor, or of some rows of one."""
    if tensor.whole is None:
        return form.layout(tensor)
    return form.layout(tensor.whole).of_rows(range(tensor.first, tensor.first + tensor.shape[0]))


def warm_up(form: WeightFormat, device: torch.device, dtype: torch.dtype, experts: bool = False) -> None:
    """Compile what decoding and products need: decode and multiply zeros, in rows that can be blocked and in one that
    cannot; on a card from codes, too. experts: and what their products are on a card."""
    import torch

    from flexgen_h2o.kernels import triton
    from flexgen_h2o.kernels.int8 import BUFFERS
    from flexgen_h2o.kernels.linear import grouped_linear, linear, linear_each
    from flexgen_h2o.kernels.workspace import Workspace, warm_up_helpers

    warm_up_helpers()
    sizes = dict.fromkeys(BUFFERS, 2**17)
    workspace = Workspace(torch.zeros(sum(sizes.values()), dtype=torch.uint8, device=device), sizes, dtype)
    for rows, columns in product((BLOCK_ROWS, 8), form.sample_columns):
        is_last = (rows, columns) == (BLOCK_ROWS, form.sample_columns[-1])  # one kernel is for all multiples of 16
        layout = form.layout(TensorSpec("", form.sample_name, (rows, columns)))
        part = Part("device", 0, layout.cut_shape[0])
        pieces = [torch.zeros(stored.part_bytes(part), dtype=torch.uint8, device=device) for stored in layout.stored]
        coded: RowParts = ()
        if layout.decoded_row_bytes:
            memory = torch.zeros(rows * layout.decoded_row_bytes, dtype=torch.uint8, device=device)
            weight, held = form.decoded_parts(layout, memory, workspace), [Held(part, pieces)]
            form.decode(layout, held, weight)
            if is_last:
                coded = form.coded_parts(layout, held, weight)
        else:
            weight = form.row_parts(layout, pieces, workspace, blocks=True)
        x, out = (torch.zeros(FEW_ROWS, n, dtype=dtype, device=device) for n in (columns, rows))
        linear(x[:1], weight, None, out[:1])
        for few, bias, adds in product((x[:1], x), (None, out[0].clone()), (False, True)) if coded else ():
            linear_each(few, ((coded, bias, out[: len(few)]),), adds)
        if not (experts and is_last and triton.takes(x)):
            continue
        for some, tokens, biases in product(filter(None, (weight, coded)), (1, FEW_ROWS), (None, [out[0].clone()] * 2)):
            inputs, result = (torch.cat([t[:tokens]] * 2) for t in (x, out))
            grouped_linear(inputs, [tokens] * 2, (([some] * 2, biases, result),))

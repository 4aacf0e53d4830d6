"""How the matrices of a model are stored, held on their tiers and multiplied.

`weight_format` returns the `Codec` that the policy's switches or the checkpoint's
`quantization_config` ask for. `FORMATS` names the module of each `quant_method`. A module has
`codec_of(config, itemsize, in_int8)`, which checks the config and returns its codec. Plans ask
codecs for bytes, so torch is imported only in the functions that use it.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from flexgen_h2o.checkpoint.safetensors import StoredTensor, bytes_of_dtype
from flexgen_h2o.core.config import DTYPE_BYTES, TIERS, WIDE, Policy
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.model import ModelSpec, TensorSpec, slice_key
from flexgen_h2o.core.packing import int8_row_bytes
from flexgen_h2o.core.units import BLOCK_ROWS, CUT_IN_BLOCKS, FEW_ROWS, ROW_BLOCK
from flexgen_h2o.tiers.stream import Part, Shares, is_streamed, split_rows

if TYPE_CHECKING:
    import torch

    from flexgen_h2o.kernels.coded import Codes
    from flexgen_h2o.kernels.int8 import Int8Rows
    from flexgen_h2o.kernels.linear import RowParts
    from flexgen_h2o.kernels.workspace import Workspace

# The module of each format, by the `quant_method` of its quantization_config.
FORMATS = {
    "mxfp4": "flexgen_h2o.checkpoint.formats.mxfp4",
    "fp8": "flexgen_h2o.checkpoint.formats.fp8",
    "compressed-tensors": "flexgen_h2o.checkpoint.formats.compressed_tensors",
    "gptq": "flexgen_h2o.checkpoint.formats.gptq",
    "awq": "flexgen_h2o.checkpoint.formats.awq",
}
# A quant_method whose checkpoints are in one of these formats.
_AUTO_ROUND = "auto-round"
# When matrices are decoded: into a buffer as their unit is opened, or to int8 rows while they are
# multiplied, or never, because they are used as held.
DecodedAt = Literal["load", "product", "never"]


@dataclass(frozen=True)
class StoredRows:
    """One of the stored tensors that a matrix, or a vector, is made of.

    `Codec.stored_rows` makes it.
    """

    # The matrix or vector.
    tensor: TensorSpec = field(compare=False)
    # Shape that the tensor must have in the checkpoint (as safetensors.StoredTensor.shape).
    shape: tuple[int, ...]
    # Dtypes that the tensor may have in the checkpoint (as safetensors.StoredTensor.dtype). Random
    # weights have the first one.
    dtypes: tuple[str, ...]
    # Follows the matrix's name in the tensor's name. One that begins with a dot takes the place of
    # `.weight`.
    suffix: str = field(default="", compare=False)
    # Rows of the matrix that share one row of this tensor, such as 128 for the scales of blocks of
    # 128 x 128. 0: each part needs the whole tensor.
    rows_per_stored_row: int = 1
    # The tensor holds numbers that become float32 as they are read.
    in_float32: bool = False
    # The tensor holds numbers that are converted to the compute dtype, of this many bytes, as they
    # are read. 0: they are not; without `in_float32` the tensor is then held as it is stored.
    itemsize: int = 0
    # (mask, base), for random weights: byte i is (any byte & mask[i]) + base[i], where both repeat.
    # The default allows any byte.
    random: tuple[bytes, bytes] = field(default=(b"\xff", b"\0"), compare=False)
    # This tensor is `shape[0]` rows, from row `first` on, of the checkpoint's tensor of that name.
    # Its rows are counted from there. Set by `of_rows`.
    first: int = field(default=0, compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Names that the tensor may have in a checkpoint."""
        end = ".weight" if self.suffix.startswith(".") else ""
        own = (self.tensor.name, *self.tensor.aliases)
        return tuple(name.removesuffix(end) + self.suffix for name in own)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def index(self) -> int | None:
        """This tensor is that slice of the checkpoint's tensor of its name (TensorSpec.index)."""
        return self.tensor.index

    @property
    def key(self) -> str:
        """A name that no other stored tensor, or slice of one, has."""
        return slice_key(self.name, self.index)

    @property
    def is_values(self) -> bool:
        """Whether the tensor holds the numbers of the matrix or vector themselves."""
        return self.itemsize > 0

    @cached_property
    def row_bytes(self) -> int:
        """Bytes in memory of one row, along the first dimension."""
        itemsize = 4 if self.in_float32 else self.itemsize or bytes_of_dtype(self.dtypes[0])
        return math.prod(self.shape[1:]) * itemsize

    def rows_of(self, first: int, end: int) -> tuple[int, int]:
        """Return the rows [first, end) of this tensor that rows [first, end) of the matrix need."""
        if not self.rows_per_stored_row:
            return 0, self.shape[0]
        return first // self.rows_per_stored_row, -(-end // self.rows_per_stored_row)

    def part_bytes(self, part: Part) -> int:
        first, end = self.rows_of(part.start, part.end)
        return (end - first) * self.row_bytes

    def of_rows(self, chosen: range) -> StoredRows:
        """Return a tensor of only those rows that the chosen rows of the matrix need."""
        first, end = self.rows_of(chosen.start, chosen.stop)
        return replace(self, shape=(end - first, *self.shape[1:]), first=first)

    def held(self, raw: torch.Tensor, dtype: str) -> torch.Tensor:
        """Return bytes of a checkpoint as a piece of a Shard.

        raw: uint8, numbers that the checkpoint stores as `dtype`. They become float32 if
        `in_float32` is set.
        """
        import torch

        return raw.view(getattr(torch, dtype)).float().view(torch.uint8) if self.in_float32 else raw


@dataclass(frozen=True)
class TensorLayout:
    """A tensor in a format. Layouts of tensors that take the same bytes are equal."""

    # Shape of the tensor, as TensorSpec.shape.
    shape: tuple[int, ...]
    # The stored tensors that it is made of.
    stored: tuple[StoredRows, ...]
    # Bytes of one row in the buffer that the matrix is decoded into when its unit is opened.
    # 0: the matrix is used as held.
    decoded_row_bytes: int = 0
    # The stored bytes run along the matrix's columns, so its parts are runs of columns. Whatever is
    # said of the rows of parts and of StoredRows then means columns.
    by_columns: bool = False
    # As TensorSpec.looked_up: rows of the tensor can be read one by one.
    looked_up: bool = False

    @property
    def cut_shape(self) -> tuple[int, ...]:
        """Sizes of the tensor, with the dimension that is cut into parts first."""
        return self.shape[::-1] if self.by_columns else self.shape

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) == 2

    def part_bytes(self, part: Part) -> int:
        """Return the bytes of a part in memory."""
        return sum(stored.part_bytes(part) for stored in self.stored)

    def cuts_at(self, multiple: int) -> bool:
        """Return whether cuts at multiples of `multiple` rows give tensors that share nothing.

        `of_rows` makes such tensors.
        """
        return not self.by_columns and all(
            multiple % max(1, stored.rows_per_stored_row) == 0 for stored in self.stored
        )

    def of_rows(self, chosen: range) -> TensorLayout:
        """Return the layout of the chosen rows alone."""
        return replace(
            self,
            shape=(len(chosen), *self.shape[1:]),
            stored=tuple(stored.of_rows(chosen) for stored in self.stored),
        )

    def homes(self, shares: Shares, device_is_host: bool) -> tuple[tuple[Part, bool], ...]:
        """Return the parts of the tensor, each with whether it is streamed.

        A table that is only looked up by row is not split if the device is host memory. It then
        lies on the last tier that has a share of the weights. On disk only the rows that a step
        needs are read. In memory they are already there.
        """
        if self.looked_up and device_is_host:
            last = max(i for i, share in enumerate(shares) if share > 0)
            return ((Part(TIERS[last], 0, self.cut_shape[0]), False),)
        parts = weight_parts(self.cut_shape, shares)
        return tuple((part, is_streamed(part.tier, device_is_host)) for part in parts)


def weight_parts(shape: tuple[int, ...], shares: Shares) -> tuple[Part, ...]:
    """Return the homes of a tensor's rows. Shares split matrices; vectors stay on the device.

    shape: as TensorLayout.cut_shape. Large matrices are cut at the ends of blocks of rows, because
    the compiled loop reads whole blocks.
    """
    if len(shape) < 2:
        return split_rows(shape[0], (1.0, 0.0, 0.0))
    return split_rows(shape[0], shares, BLOCK_ROWS if shape[0] >= CUT_IN_BLOCKS else ROW_BLOCK)


@dataclass(frozen=True, eq=False)
class Shard(Part):
    """Rows [start, end) of a matrix, with the bytes that they need of each stored tensor.

    Sequences have one item per StoredRows of the layout, in its order.
    """

    # The bytes, uint8. Empty: they are not in memory.
    pieces: Sequence[torch.Tensor] = ()
    # The rest is for WeightStore, which sets it. The byte ranges of the pieces in files:
    sources: Sequence[StoredTensor] = ()
    # Where the room of each piece begins in a load's region, in bytes, and where the last one ends.
    places: Sequence[int] = ()
    # The rows are loaded before they are used, and not used where their home is.
    is_streamed: bool = False
    # The rows as matrix multiplications take them, if they are used at their home as they are held.
    held: RowParts = ()

    def cut(self, layout: TensorLayout, start: int, end: int) -> Shard:
        """Return the rows [start, end) of the matrix, which must lie in this shard; views."""
        pieces = []
        for stored, piece in zip(layout.stored, self.pieces, strict=True):
            begin, _ = stored.rows_of(self.start, self.end)
            a, b = stored.rows_of(start, end)
            pieces.append(piece[(a - begin) * stored.row_bytes : (b - begin) * stored.row_bytes])
        return Shard(self.tier, start, end, pieces)


def plain_layout(tensor: TensorSpec, itemsize: int) -> TensorLayout:
    """Return the layout of a tensor whose numbers are stored in any float dtype.

    They are held in the compute dtype.
    """
    shape = tensor.shape[::-1] if tensor.transposed else tensor.shape
    stored = StoredRows(tensor, shape, (*DTYPE_BYTES, WIDE), itemsize=itemsize)
    return TensorLayout(
        tensor.shape, (stored,), by_columns=tensor.transposed, looked_up=tensor.looked_up
    )


def is_converted(tensor: TensorSpec) -> bool:
    """Return whether a switch of a policy converts the tensor."""
    return len(tensor.shape) == 2 and not tensor.exact


def packed_rows(tensor: TensorSpec, row_bytes: int) -> tuple[StoredRows, ...]:
    """Return the stored tensor of a matrix in the format that a switch asks for.

    It is uint8 of (rows, row bytes), as packed_store.py stores it.
    """
    return (StoredRows(tensor, (tensor.shape[0], row_bytes), ("uint8",)),)


@dataclass(frozen=True)
class Codec:
    """One format of weights: how matrices are laid out, decoded and multiplied.

    This class itself is the format `dense`, which most checkpoints have: any float dtype, held in
    the compute dtype. Each other format is a subclass. Vectors are always plain.
    """

    itemsize: int  # bytes of one number of the compute dtype
    # Matrices are multiplied in int8.
    in_int8: bool = field(default=False, kw_only=True)
    # Name of the format in profiles and of its packed stores.
    name: ClassVar[str] = "dense"
    # When matrices are decoded.
    decoded_at: ClassVar[DecodedAt] = "never"
    # As TensorLayout.by_columns.
    by_columns: ClassVar[bool] = False
    # The command-line flag that asks for this format. packed_store.py then converts weights to it
    # once. "": checkpoints have this format.
    converted_by: ClassVar[str] = ""
    # Name of a tensor that is a matrix of this format in any model. `warm_up` decodes such a
    # matrix.
    sample_name: ClassVar[str] = "model.layers.0.mlp.up_proj.weight"
    # Columns of matrices that different loops multiply. The last is for the kernel on a card.
    sample_columns: ClassVar[tuple[int, ...]] = (BLOCK_ROWS,)

    @property
    def decoder(self) -> str:
        """Name in profiles of what decodes matrices when their unit is opened."""
        return f"{self.name}_int8" if self.in_int8 else self.name

    @property
    def decoder_in_products(self) -> str:
        """Name in profiles of what decodes matrices as products read them as held (`codes`).

        Products do so on a card, and on a CPU for experts. The name is "" for formats without
        codes.
        """
        has_codes = type(self).codes is not Codec.codes and not self.in_int8
        return f"{self.name}_in_products" if has_codes else ""

    def holds(self, tensor: TensorSpec) -> bool:
        """Return whether the tensor is stored in this format. Otherwise it is plain numbers."""
        return False

    def stored_rows(self, tensor: TensorSpec) -> tuple[StoredRows, ...]:
        """Return the stored tensors that a matrix of this format is made of."""
        raise NotImplementedError

    def layout(self, tensor: TensorSpec) -> TensorLayout:
        if not self.holds(tensor):
            return plain_layout(tensor, self.itemsize)
        columns = tensor.shape[1]
        decoded = int8_row_bytes(columns) if self.in_int8 else columns * self.itemsize
        if self.decoded_at != "load" or tensor.looked_up:  # looked-up rows are decoded one by one
            decoded = 0
        stored = self.stored_rows(tensor)
        return TensorLayout(tensor.shape, stored, decoded, self.by_columns, tensor.looked_up)

    # ---- Matrices that are used as held

    def row_parts(
        self,
        layout: TensorLayout,
        pieces: Sequence[torch.Tensor],
        workspace: Workspace,
        blocks: bool,
    ) -> RowParts:
        """Return the rows of a tensor that is used as held.

        pieces: one uint8 tensor per stored tensor. blocks: reorder the rows in place into the order
        in which products are fastest.
        """
        from flexgen_h2o.kernels.linear import DenseRows, block_rows

        if not layout.stored[0].is_values:
            return self.matrix_parts(layout, pieces, workspace, blocks)
        rows = pieces[0].view(workspace.dtype).view(-1, *layout.cut_shape[1:])
        if layout.by_columns:
            return (DenseRows(rows.t()),)
        return block_rows(rows) if blocks and layout.is_matrix else (DenseRows(rows),)

    def matrix_parts(
        self,
        layout: TensorLayout,
        pieces: Sequence[torch.Tensor],
        workspace: Workspace,
        blocks: bool,
    ) -> RowParts:
        """Return `row_parts` of a matrix that is stored in this format."""
        raise NotImplementedError

    def codes(self, layout: TensorLayout, shard: Shard) -> Codes:
        """Return some rows of a matrix as products read them.

        Formats without this method are decoded.
        """
        raise NotImplementedError

    def coded_parts(
        self, layout: TensorLayout, held: Sequence[Shard], decoded: RowParts
    ) -> RowParts:
        """Return the rows of a matrix that products read from their codes while inputs are few.

        With more inputs they are decoded into `decoded` first. Returns () if products cannot read
        the codes. held: all rows of the matrix, in order. They must stay where they are.
        """
        if not self.decoder_in_products:
            return ()
        from flexgen_h2o.kernels import triton
        from flexgen_h2o.kernels.coded import CodedRows, can_multiply_codes
        from flexgen_h2o.kernels.linear import DenseRows

        (whole,) = decoded
        if len(held) > 1 and triton.supports(*held[0].pieces):
            return ()
        assert isinstance(whole, DenseRows)
        found = [(self.codes(layout, one), whole.rows[one.start : one.end]) for one in held]
        if not all(can_multiply_codes(codes, rows) for codes, rows in found):
            return ()
        return tuple(CodedRows(codes, DenseRows(rows)) for codes, rows in found)

    # ---- Matrices that are decoded when their unit is opened

    def decoded_parts(
        self, layout: TensorLayout, memory: torch.Tensor, workspace: Workspace
    ) -> RowParts:
        """Return the rows of a matrix that `decode` fills. They lie in `memory` (uint8)."""
        from flexgen_h2o.kernels.int8 import blank_int8_rows
        from flexgen_h2o.kernels.linear import DenseRows

        if not self.in_int8:
            return (DenseRows(memory.view(workspace.dtype).view(layout.shape)),)
        rows, columns = layout.shape
        return blank_int8_rows(memory.view(rows, -1), columns, workspace)

    def decode(self, layout: TensorLayout, held: Sequence[Shard], out: RowParts) -> None:
        """Fill a matrix. held: all its rows, in order."""
        import torch

        from flexgen_h2o.kernels.int8 import Int8Rows
        from flexgen_h2o.kernels.linear import DenseRows
        from flexgen_h2o.kernels.quantised import fill_int8_rows
        from flexgen_h2o.kernels.workspace import row_slices

        if not self.in_int8:
            (whole,) = out
            assert isinstance(whole, DenseRows)
            self.decode_range(layout, held, 0, whole.rows)
            return
        rows, columns = layout.shape
        parts = [part for part in out if isinstance(part, Int8Rows)]
        first = parts[0]
        done = len(first) if first.blocked and self.fill_blocks(layout, held, first) else 0
        some_rows = list(row_slices(rows - done, columns, BLOCK_ROWS))
        max_rows = some_rows[0].stop if some_rows else 0
        values = torch.empty(
            max_rows, columns, device=held[0].pieces[0].device, dtype=torch.float32
        )
        for some in some_rows:
            here = self.decode_range(
                layout, held, done + some.start, values[: some.stop - some.start]
            )
            fill_int8_rows(here, done + some.start, parts)

    def fill_blocks(self, layout: TensorLayout, held: Sequence[Shard], out: Int8Rows) -> bool:
        """Fill the first rows of a matrix as blocked int8 rows in one pass.

        Returns False if no loop does that.
        """
        return False

    def decode_range(
        self, layout: TensorLayout, held: Sequence[Shard], first: int, out: torch.Tensor
    ) -> torch.Tensor:
        """Fill `out` with rows from `first` on, and return it.

        out: (n, columns), a float dtype. held: shards that contain those rows.
        """
        from flexgen_h2o.kernels.workspace import row_slices

        if self.by_columns:
            for some in row_slices(len(out), layout.shape[1]):  # slices keep temporary memory small
                for one in held:
                    columns = out[some, one.start : one.end]
                    self.decode_columns(layout, one, first + some.start, columns)
            return out
        for one in held:
            begin = max(first, one.start)
            end = min(first + len(out), one.end)
            if begin < end:
                some_rows = one.cut(layout, begin, end)
                self.decode_rows(layout, some_rows, out[begin - first : end - first])
        return out

    def decode_rows(self, layout: TensorLayout, shard: Shard, out: torch.Tensor) -> None:
        """Fill `out` with the rows of a shard.

        out: (rows of the shard, columns), a float dtype, with contiguous rows.
        """
        raise NotImplementedError

    def decode_columns(
        self, layout: TensorLayout, shard: Shard, first: int, out: torch.Tensor
    ) -> None:
        """Fill `out` from a shard of a matrix that is stored by columns.

        out: (rows from `first` on, columns of the shard), a float dtype.
        """
        raise NotImplementedError

    # ---- Formats to which a switch converts weights (`converted_by`)

    @property
    def record(self) -> dict[str, object]:
        """A description of what the bytes of a packed store mean.

        Its entry `format` is a number that rises when the meaning changes. Stores with another
        number are not used.
        """
        raise NotImplementedError

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows in this format, (n, row bytes) uint8.

        rows: (n, columns), any float dtype, on the host. Raises ValueError if a number is not
        finite.
        """
        raise NotImplementedError


@lru_cache(maxsize=1024)
def weight_format(spec: ModelSpec, policy: Policy, itemsize: int) -> Codec:
    """Return the format in which a run holds a model's weights.

    It is what the policy asks for, or else the checkpoint's. itemsize: bytes of one number of the
    compute dtype. Raises UsageError as `checkpoint_codec`.
    """
    from flexgen_h2o.checkpoint.formats.groupwise import Groupwise
    from flexgen_h2o.checkpoint.formats.int8 import Int8

    if policy.compress_weight:
        return Groupwise(itemsize, policy.weight_bits, in_int8=policy.int8_compute)
    if spec.quantization is None and policy.int8_compute:
        return Int8(itemsize)
    return checkpoint_codec(spec.quantization, itemsize, policy.int8_compute)


def checkpoint_format(spec: ModelSpec) -> Codec:
    """Return the format of a model's checkpoint, whatever a policy makes of its weights."""
    return weight_format(spec, Policy(), 4)


def checkpoint_codec(
    quantization: Mapping[str, Any] | None, itemsize: int = 4, in_int8: bool = False
) -> Codec:
    """Return the format of checkpoints with this `quantization_config`; None: plain numbers.

    Raises UsageError if no format supports it.
    """
    if quantization is None:
        return Codec(itemsize)
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    modules = {**FORMATS, _AUTO_ROUND: "flexgen_h2o.checkpoint.formats.auto_round"}
    if isinstance(method, str):
        method = method.removeprefix("intel/")  # AutoRound's older name
    if not isinstance(method, str) or method not in modules:
        raise UsageError(
            f"quantization_config: quant_method {method!r:.60} is not supported, only "
            f"{', '.join(modules)}; give a"
            " checkpoint in one of these (docs/reference/models.md), or an unquantised one"
        )
    module = importlib.import_module(modules[method])
    found: Codec = module.codec_of(quantization, itemsize, in_int8)
    return found


@lru_cache(maxsize=4096)
def layouts_of(form: Codec, tensors: tuple[TensorSpec, ...]) -> tuple[TensorLayout, ...]:
    """Return the layouts of a unit's tensors."""
    return tuple(layout_of(form, tensor) for tensor in tensors)


def layout_of(form: Codec, tensor: TensorSpec) -> TensorLayout:
    """Return the layout of a tensor, or of some rows of one."""
    if tensor.whole is None:
        return form.layout(tensor)
    return form.layout(tensor.whole).of_rows(range(tensor.first, tensor.first + tensor.shape[0]))


def _least_bytes(stored: StoredRows, nbytes: int) -> torch.Tensor:
    """Return the least bytes (uint8) that random weights have in a stored tensor."""
    import torch

    if stored.in_float32:
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    base = stored.random[1]
    repeated = bytearray(base * -(-nbytes // len(base)))[:nbytes]
    return torch.frombuffer(repeated, dtype=torch.uint8)


def warm_up(form: Codec, device: torch.device, dtype: torch.dtype, experts: bool = False) -> None:
    """Compile what decoding and products need by decoding and multiplying a sample.

    Its bytes are the least that random weights have, because a format may refuse others.

    The matrices have rows that can be blocked, and rows that cannot. On a card, products from codes
    are compiled too. experts: also compile the products of experts on a card.
    """
    import torch

    from flexgen_h2o.kernels import triton
    from flexgen_h2o.kernels.int8 import BUFFERS
    from flexgen_h2o.kernels.linear import grouped_linear, linear, linear_shared_input
    from flexgen_h2o.kernels.workspace import Workspace, warm_up_helpers

    warm_up_helpers()
    sizes = dict.fromkeys(BUFFERS, 2**17)
    workspace = Workspace(
        torch.zeros(sum(sizes.values()), dtype=torch.uint8, device=device), sizes, dtype
    )
    for rows, columns in product((BLOCK_ROWS, 8), form.sample_columns):
        # One kernel on a card serves all multiples of 16, so it is compiled for one size only.
        is_last = (rows, columns) == (BLOCK_ROWS, form.sample_columns[-1])
        layout = form.layout(TensorSpec("", form.sample_name, (rows, columns)))
        part = Part("device", 0, layout.cut_shape[0])
        pieces = [
            _least_bytes(stored, stored.part_bytes(part)).to(device) for stored in layout.stored
        ]
        coded: RowParts = ()
        if layout.decoded_row_bytes:
            memory = torch.zeros(rows * layout.decoded_row_bytes, dtype=torch.uint8, device=device)
            weight = form.decoded_parts(layout, memory, workspace)
            held = [Shard(part.tier, part.start, part.end, pieces)]
            form.decode(layout, held, weight)
            if is_last:
                coded = form.coded_parts(layout, held, weight)
        else:
            weight = form.row_parts(layout, pieces, workspace, blocks=True)
        x, out = (torch.zeros(FEW_ROWS, n, dtype=dtype, device=device) for n in (columns, rows))
        linear(x[:1], weight, None, out[:1])
        for few, bias, adds in (
            product((x[:1], x), (None, out[0].clone()), (False, True)) if coded else ()
        ):
            linear_shared_input(few, ((coded, bias, out[: len(few)]),), adds)
        if not (experts and is_last and triton.supports(x)):
            continue
        for some, tokens, biases in product(
            filter(None, (weight, coded)), (1, FEW_ROWS), (None, [out[0].clone()] * 2)
        ):
            inputs, result = (torch.cat([t[:tokens]] * 2) for t in (x, out))
            grouped_linear(inputs, [tokens] * 2, (([some] * 2, biases, result),))

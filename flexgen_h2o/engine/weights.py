"""Weights on their home tiers, brought to the device unit by unit in schedule order.

Resident rows are read once; streamed rows (on disk, and on host where the device is not host memory) are loaded into a
ring ahead of the compute that needs them. Packed matrices (core/packing.py) stay packed in both; when their unit is
opened they are unpacked into one buffer, in the compute dtype or in int8, or wrapped for products in int8. Resident
matrices that are multiplied are blocked once, where they lie. Knows nothing of file formats (it is given byte ranges)
nor of models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from flexgen_h2o.checkpoint.atomic_folder import check_unchanged
from flexgen_h2o.checkpoint.safetensors import Checkpoint, StoredTensor
from flexgen_h2o.core.config import LayerPlan, TensorSpec, WeightUnit
from flexgen_h2o.core.packing import INT8, WeightForm
from flexgen_h2o.core.units import ALIGN, PAGE, round_up
from flexgen_h2o.engine.loop import BaseWeightStream
from flexgen_h2o.engine.memory_plan import part_bytes, streamed_bytes, streamed_part_bytes, unpacked_bytes, weight_parts
from flexgen_h2o.engine.product_sizes import is_blocked
from flexgen_h2o.kernels.blocked import BlockedRows, block_rows
from flexgen_h2o.kernels.int8 import Int8Rows
from flexgen_h2o.kernels.int8_blocked import BlockedInt8, blank_int8_rows, block_int8_rows, requantise_rows
from flexgen_h2o.kernels.linear import RowParts
from flexgen_h2o.kernels.packed import unpack_rows
from flexgen_h2o.kernels.workspace import Workspace
from flexgen_h2o.tiers.disk import DirectFile, FileRange, aligned_range
from flexgen_h2o.tiers.placement import Part, Shares, is_streamed
from flexgen_h2o.tiers.stream import Done, Region, Ring, Waitable, wait_all
from flexgen_h2o.tiers.transfers import Memory, Mover

# Of a matrix: rows in the compute dtype, in order or blocked, or packed ones as uint8, those for int8 maybe blocked
HeldParts = tuple[torch.Tensor | BlockedRows | BlockedInt8, ...]


@dataclass(frozen=True)
class _Piece:
    """Streamed rows of one tensor in a load's region: set aside from `start`, the values themselves at `offset`."""

    tensor: TensorSpec
    part: Part
    start: int
    offset: int


class WeightStore:
    """Homes of all units. `open_unit` gives the tensors of a unit from its resident rows and a loaded region.

    form: how the checkpoint's matrices are packed, and what they become; by default they are in a float dtype.
    """

    def __init__(
        self, plan: LayerPlan, checkpoint: Checkpoint, shares: Shares, dtype: torch.dtype, mover: Mover,
        form: WeightForm | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.dtype, self._mover = plan, dtype, mover
        self._checkpoint, self._form = checkpoint, form or WeightForm(dtype.itemsize)
        self._is_host = mover.device.is_host
        self._files: dict[Path, DirectFile] = {}
        self._resident: dict[tuple[str, int], torch.Tensor] = {}
        self._blocked: dict[tuple[str, int], HeldParts] = {}
        self._int8: dict[tuple[int, tuple[int, ...]], tuple[torch.Tensor | BlockedInt8, ...]] = {}
        self._parts = {t.name: weight_parts(t, shares) for unit in plan.units for t in unit.tensors}
        streamed = [name for name, parts in self._parts.items() if any(part.tier == "disk" for part in parts)]
        self._read_in_sweeps = {stored.path: stored.state for stored in map(checkpoint.tensors.__getitem__, streamed)}
        self._pieces = [self._lay_out(unit) for unit in plan.units]
        self._sizes = [streamed_bytes(unit, shares, self._form, self._is_host) for unit in plan.units]

    def load_resident(self, memory: dict[str, torch.Tensor]) -> None:
        """Read every row whose home is device or host memory into `memory` (uint8 by tier); block there what can be.

        Where the device is host memory, what belongs to the device is in `host` too.
        """
        used = dict.fromkeys(memory, 0)
        reads = []
        for unit in self.plan.units:
            for tensor in unit.tensors:
                for part in self._parts[tensor.name]:
                    if part.tier == "disk":
                        continue
                    nbytes = part_bytes(tensor, part, self._form)
                    tier = part.tier if part.tier in memory else "host"
                    start = used[tier]
                    used[tier] += round_up(nbytes, ALIGN)
                    rows = self._rows(tensor, part, memory[tier][start : start + nbytes])
                    self._resident[tensor.name, part.start] = rows
                    home: Memory = "host" if part.tier == "host" else "device"
                    reads.append(self._read(tensor, part, rows.view(-1), home, ()))
        wait_all(reads)
        if is_blocked(self._form, self._is_host) or (self._form.packing == INT8 and self._is_host):
            self._block_resident()

    def _block_resident(self) -> None:
        """Block the rows of matrices that are multiplied where they live.

        Of blocked rows only those in int8 can be looked up, so in the compute dtype a tied table stays in order.
        """
        layers, is_int8 = self.plan.layers, self._form.packing == INT8
        tables = {layer.unit for layer in layers if layer.kind == "embedding"}
        tables -= {layer.unit for layer in layers if layer.kind != "embedding" and is_int8}
        for number, unit in enumerate(self.plan.units):
            for tensor in unit.tensors if number not in tables else ():
                for part in self._parts[tensor.name]:
                    key = tensor.name, part.start
                    if key in self._resident and len(tensor.shape) == 2:
                        rows = self._resident[key]
                        self._blocked[key] = block_int8_rows(rows) if is_int8 else block_rows(rows)

    def check_unchanged(self) -> None:
        """CheckpointChangedError where a file that sweeps read from is not as it was when the checkpoint was opened.

        What is resident was checked once it was loaded (Engine): nothing that is done to its files reaches it.
        """
        check_unchanged(self._read_in_sweeps)

    def nbytes(self, key: int) -> int:
        """Ring bytes of one load of a unit; 0 when all its rows are used where they live."""
        return self._sizes[key]

    def is_needed(self, key: int) -> bool:
        return True

    def is_ready(self, key: int) -> bool:
        return True

    def load(self, key: int, region: Region) -> list[Done]:
        """Start bringing the streamed rows of unit `key` into `region`."""
        return [self._load_piece(piece, region) for piece in self._pieces[key].values()]

    def open_unit(self, unit: int, region: Region | None) -> dict[str, HeldParts]:
        """Tensors of a loaded unit by role, each as row parts in order, packed where the store is."""
        streamed = self._pieces[unit]
        found: dict[str, HeldParts] = {}
        for tensor in self.plan.units[unit].tensors:
            parts: list[torch.Tensor | BlockedRows | BlockedInt8] = []
            for part in self._parts[tensor.name]:
                key = tensor.name, part.start
                piece = streamed.get(key)
                if piece is None:
                    parts += self._blocked.get(key) or [self._resident[key]]
                else:
                    assert region is not None
                    parts.append(self._view(piece, region))
            found[tensor.role] = tuple(parts)
        return found

    def for_products(self, unit: int, tensors: Mapping[str, HeldParts], workspace: Workspace) -> dict[str, RowParts]:
        """An opened unit's tensors as products take them where nothing is unpacked: matrices in int8 as `Int8Rows`."""
        found: dict[str, RowParts] = {}
        for tensor in self.plan.units[unit].tensors:
            held = tensors[tensor.role]
            if self._form.packs(tensor.shape):
                rows = [part for part in held if not isinstance(part, BlockedRows)]
                found[tensor.role] = tuple(Int8Rows(part, tensor.shape[1], workspace) for part in rows)
            else:
                found[tensor.role] = _as_held(held)
        return found

    def unpack(
        self, unit: int, tensors: Mapping[str, HeldParts], memory: torch.Tensor, int8: Workspace | None = None
    ) -> dict[str, RowParts]:
        """An opened unit's tensors as products take them: packed matrices whole in `memory` (uint8), others as given.

        int8: the workspace of products in int8, for which matrices become int8 rows. None: they are in the compute
        dtype.
        """
        found = {role: _as_held(parts) for role, parts in tensors.items()}
        start = 0
        for tensor in self.plan.units[unit].tensors:
            if self._form.packs(tensor.shape):
                whole = memory[start : start + tensor.shape[0] * self._form.unpacked_row_bytes(tensor.shape)]
                if int8 is None:
                    found[tensor.role] = self._unpacked(tensor, tensors[tensor.role], whole)
                else:
                    rows = self._requantised(tensor, tensors[tensor.role], whole, start)
                    found[tensor.role] = tuple(Int8Rows(part, tensor.shape[1], int8) for part in rows)
                start += unpacked_bytes(tensor, self._form)
        return found

    def _unpacked(self, tensor: TensorSpec, parts: HeldParts, memory: torch.Tensor) -> tuple[torch.Tensor]:
        assert self._form.packing is not None
        whole = memory.view(self.dtype).view(tensor.shape)
        for first, part in _in_turn(parts):
            unpack_rows(part, self._form.packing.bits, whole[first : first + len(part)])
        return (whole,)

    def _requantised(
        self, tensor: TensorSpec, parts: HeldParts, memory: torch.Tensor, start: int
    ) -> tuple[torch.Tensor | BlockedInt8, ...]:
        """`memory` is at `start` of what all units are unpacked into: its int8 rows are made once, and then filled."""
        key = start, tensor.shape
        if key not in self._int8:
            self._int8[key] = blank_int8_rows(memory.view(tensor.shape[0], -1))
        for first, part in _in_turn(parts):
            requantise_rows(part, first, self._int8[key], tensor.shape[1])
        return self._int8[key]

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _lay_out(self, unit: WeightUnit) -> dict[tuple[str, int], _Piece]:
        """The streamed pieces of a unit by tensor name and first row, in the order of their place in a region."""
        pieces, start = {}, 0
        for tensor in unit.tensors:
            for part in self._parts[tensor.name]:
                if not is_streamed(part.tier, self._is_host):
                    continue
                shift = self._file_range(tensor, part)[0] % PAGE if self._is_direct(tensor, part) else 0
                pieces[tensor.name, part.start] = _Piece(tensor, part, start, start + shift)
                start += streamed_part_bytes(tensor, part, self._form)
        return pieces

    def _load_piece(self, piece: _Piece, region: Region) -> Done:
        tensor, part = piece.tensor, piece.part
        if part.tier == "host":
            src = self._resident[tensor.name, part.start]
            return self._mover.copy("h2d", "load_weight", self._view(piece, region), src, region.after)
        if self._is_direct(tensor, part):
            offset, nbytes = self._file_range(tensor, part)
            start, length = aligned_range(offset, nbytes)
            dst = region.data[piece.start : piece.start + length]
            file = self._file(tensor)
            source = FileRange(file, start, offset - start + nbytes)
            return self._mover.read("load_weight", dst, "device", source, region.after)
        return self._read(tensor, part, self._view(piece, region).view(-1), "device", region.after)

    def _read(
        self, tensor: TensorSpec, part: Part, dst: torch.Tensor, memory: Memory, after: Sequence[Waitable]
    ) -> Done:
        offset, nbytes = self._file_range(tensor, part)
        source = FileRange(self._file(tensor), offset, nbytes, getattr(torch, self._stored(tensor).dtype))
        return self._mover.read("load_weight", dst, memory, source, after)

    def _view(self, piece: _Piece, region: Region) -> torch.Tensor:
        nbytes = part_bytes(piece.tensor, piece.part, self._form)
        return self._rows(piece.tensor, piece.part, region.data[piece.offset : piece.offset + nbytes])

    def _rows(self, tensor: TensorSpec, part: Part, data: torch.Tensor) -> torch.Tensor:
        """Bytes of a part as rows: in the compute dtype, or uint8 (rows, bytes of a packed row)."""
        if self._form.packs(tensor.shape):
            return data.view(part.rows, -1)
        return data.view(self.dtype).view(part.rows, *tensor.shape[1:])

    def _held_dtype(self, tensor: TensorSpec) -> torch.dtype:
        return torch.uint8 if self._form.packs(tensor.shape) else self.dtype

    def _is_direct(self, tensor: TensorSpec, part: Part) -> bool:
        """May the file's bytes be computed on as they are, where the reader puts them?"""
        stored = self._stored(tensor)
        same = getattr(torch, stored.dtype) == self._held_dtype(tensor)
        return part.tier == "disk" and self._is_host and same and stored.offset % self.dtype.itemsize == 0

    def _stored(self, tensor: TensorSpec) -> StoredTensor:
        return self._checkpoint.tensors[tensor.name]

    def _file(self, tensor: TensorSpec) -> DirectFile:
        path = self._stored(tensor).path
        if path not in self._files:
            self._files[path] = DirectFile(path)
        return self._files[path]

    def _file_range(self, tensor: TensorSpec, part: Part) -> tuple[int, int]:
        stored = self._stored(tensor)
        row = stored.nbytes // tensor.shape[0]
        return stored.offset + part.start * row, part.rows * row


class WeightStream(BaseWeightStream[Mapping[str, RowParts]]):
    """The tensors of the open unit, and the loads ahead of it.

    unpacked: memory for the open unit's matrices where the store is packed to be unpacked; int8: the workspace of
    products where these are in int8. Else None.
    """

    def __init__(
        self, store: WeightStore, ring: Ring | None, sequence: Iterator[int], ahead: int,
        unpacked: torch.Tensor | None = None, int8: Workspace | None = None,
    ) -> None:  # fmt: skip
        super().__init__(store, ring, sequence, ahead, unpacked is not None)
        self._store, self._unpacked, self._int8 = store, unpacked, int8
        self._held: Mapping[str, HeldParts] = {}

    def _open(self, unit: int, region: Region | None) -> Mapping[str, RowParts]:
        self._held = self._store.open_unit(unit, region)
        if self._int8 is not None and self._unpacked is None:
            return self._store.for_products(unit, self._held, self._int8)
        return {role: _as_held(parts) for role, parts in self._held.items()}

    def _unpack(self, unit: int) -> Mapping[str, RowParts]:
        assert self._unpacked is not None
        return self._store.unpack(unit, self._held, self._unpacked, self._int8)


def _as_held(parts: HeldParts) -> RowParts:
    """Parts that are not in int8, as products take them."""
    return tuple(part for part in parts if not isinstance(part, BlockedInt8))


def _in_turn(parts: HeldParts) -> Iterator[tuple[int, torch.Tensor]]:
    """Packed parts of a matrix, which are never blocked, each with the number of its first row."""
    first = 0
    for part in parts:
        assert isinstance(part, torch.Tensor)
        yield first, part
        first += len(part)

"""Weights and hidden states on their home tiers, and how they are brought to the device.

They are brought unit by unit in schedule order.

Weights: resident rows are read once. Streamed rows are loaded into a ring ahead of the compute that
    needs them. They are those on disk, and those on the host if the device is not host memory. Both
    stay in the format in which they are stored (checkpoint/formats). If that format must be
    decoded, matrices are decoded into one buffer when their unit is opened.

Hidden states: a unit is a micro-batch, (tokens, width). If their home is the device, they stay in
place, next to those of the block's other micro-batches. Otherwise they are brought into a ring for
each layer and stored after it.

Nothing here knows a format or a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flexgen_h2o.checkpoint.atomic_folder import check_unchanged
from flexgen_h2o.checkpoint.formats import (
    Shard,
    StoredRows,
    TensorLayout,
    WeightFormat,
    layout_of,
)
from flexgen_h2o.checkpoint.safetensors import Checkpoint, StoredTensor
from flexgen_h2o.core.model import LayerPlan, ModelSpec, TensorSpec
from flexgen_h2o.core.packing import WORD
from flexgen_h2o.core.units import ALIGN, PAGE, round_up
from flexgen_h2o.engine.loop import UnitKey, joined
from flexgen_h2o.engine.memory_plan import hidden_home_bytes, hidden_is_streamed
from flexgen_h2o.engine.weight_units import streamed_bytes, streamed_part_bytes
from flexgen_h2o.kernels.linear import RowPart, RowParts, lookup
from flexgen_h2o.kernels.workspace import Workspace, parallel_each
from flexgen_h2o.models import Hidden
from flexgen_h2o.tiers.disk import DirectFile, FileRange, aligned_range
from flexgen_h2o.tiers.stream import (
    Done,
    Part,
    Region,
    Shares,
    Waitable,
    split_rows,
    wait_all,
    wait_all_on_card,
)
from flexgen_h2o.tiers.transfers import Memory, Mover

# A unit with so many matrices or more is decoded with one thread per matrix. Its matrices are about
# equally large: they belong to experts, not to attention.
_MANY_TASKS = 16


@dataclass
class _Piece:
    """The rows of one stored tensor that a part needs. WeightStore makes it."""

    stored: StoredRows
    # The byte range of the rows in a file.
    source: StoredTensor
    nbytes: int
    # Where their room begins in a load's region, in bytes. WeightStore's constructor sets it.
    start: int = 0
    # The rows themselves, uint8; None if they are not in memory. `load_resident` sets it.
    resident: torch.Tensor | None = None


@dataclass
class _HeldPart:
    """The rows of a tensor that have one home tier. WeightStore makes it."""

    part: Part
    # One for each stored tensor (values, scales).
    pieces: list[_Piece]
    streamed: bool
    # The rows as matrix multiplications take them, if they are resident and used as they are held.
    rows: RowParts = ()


class TableOnDisk(RowPart):
    """A table on disk. The wanted rows are read, each once.

    held: turns rows that were read into parts to look up in.
    """

    def __init__(
        self,
        mover: Mover,
        open_file: Callable[[Path], DirectFile],
        source: StoredTensor,
        held: Callable[[torch.Tensor], RowParts],
    ) -> None:
        self._mover = mover
        self._open = open_file
        self._source = source
        self._held = held

    def __len__(self) -> int:
        return self._source.shape[0]

    def look_up(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        source = self._source
        stored = getattr(torch, self._source.dtype)
        wanted, places = ids.unique(return_inverse=True)
        rows = torch.empty(
            len(wanted),
            source.shape[1],
            dtype=out.dtype if stored.is_floating_point else stored,
            device="cpu",
        )
        first = FileRange(
            self._open(source.path), source.offset, source.nbytes // source.shape[0], stored
        )
        self._mover.read_rows(
            "look_up_weight", [*zip(rows, wanted.tolist(), strict=True)], first
        ).wait()
        lookup(places, self._held(rows), out)


class WeightStore:
    """The homes of all weight units.

    `open_unit` returns the tensors of a unit from its resident rows and a loaded region.

    form: the format of the checkpoint.
    workspace: used by int8 matrix multiplications. Its dtype is the compute dtype.
    decoded: memory (uint8) for the matrices of the open unit, if the format is decoded.
    """

    def __init__(
        self,
        plan: LayerPlan,
        checkpoint: Checkpoint,
        shares: Shares,
        form: WeightFormat,
        mover: Mover,
        workspace: Workspace,
        decoded: torch.Tensor | None = None,
    ) -> None:
        self.plan = plan
        self.decodes = form.decoded_at == "load"
        self._form = form
        self._mover = mover
        self._workspace = workspace
        self._decoded = decoded
        self._is_host = mover.device.is_host
        self._experts = {layer.unit for layer in plan.layers if layer.kind == "experts"}
        self._files: dict[Path, DirectFile] = {}
        self._layouts = {t.key: layout_of(form, t) for unit in plan.units for t in unit.tensors}
        self._parts = {
            t.key: self._parts_of(t, checkpoint, shares)
            for unit in plan.units
            for t in unit.tensors
        }
        self._filled: dict[tuple[int, TensorLayout], RowParts] = {}
        sources = [
            p.source
            for parts in self._parts.values()
            for h in parts
            if h.part.tier == "disk"
            for p in h.pieces
        ]
        self._read_in_sweeps = {source.path: source.state for source in sources}
        for unit in plan.units:
            start = 0
            for piece in (
                p for t in unit.tensors for h in self._parts[t.key] if h.streamed for p in h.pieces
            ):
                piece.start = start
                start += streamed_part_bytes(piece.nbytes)
        self._sizes = [streamed_bytes(unit, shares, form, self._is_host) for unit in plan.units]

    def _parts_of(
        self, tensor: TensorSpec, checkpoint: Checkpoint, shares: Shares
    ) -> list[_HeldPart]:
        found = []
        layout = self._layouts[tensor.key]
        for part, streamed in layout.homes(shares, self._is_host):
            pieces = [
                _Piece(
                    stored,
                    checkpoint.tensors[stored.key].rows(*stored.file_rows(part)),
                    stored.part_bytes(part),
                )
                for stored in layout.stored
            ]
            rows: RowParts = ()
            if part.tier == "disk" and not streamed:
                rows = (
                    TableOnDisk(
                        self._mover, self._file, pieces[0].source, partial(self._table_of, layout)
                    ),
                )
            found.append(_HeldPart(part, pieces, streamed, rows))
        return found

    def load_resident(self, memory: dict[str, torch.Tensor]) -> None:
        """Read every row whose home is device or host memory into `memory` (uint8 by tier).

        Rows are put into the blocked layout if that is possible. If the device is host memory, rows
        of the device are in `host` too.
        """
        used = dict.fromkeys(memory, 0)
        reads = []
        for held in (
            held for u in self.plan.units for t in u.tensors for held in self._parts[t.key]
        ):
            for piece in held.pieces if held.part.tier != "disk" else ():
                tier = held.part.tier if held.part.tier in memory else "host"
                piece.resident = memory[tier][used[tier] : used[tier] + piece.nbytes]
                used[tier] += round_up(piece.nbytes, ALIGN)
                home: Memory = "host" if held.part.tier == "host" else "device"
                reads.append(self._read(piece, piece.resident, home, ()))
        wait_all(reads)
        # A tensor that two units share occurs once.
        tensors = {
            t.key: number for number, unit in enumerate(self.plan.units) for t in unit.tensors
        }
        for key, number in tensors.items():
            layout = self._layouts[key]
            blocks = self._blocks(number)
            if not layout.decoded_row_bytes:
                for held in self._parts[key]:
                    if held.part.tier != "disk" and not held.streamed:
                        held.rows = self._as_held(layout, held, None, blocks)

    def _blocks(self, unit: int) -> bool:
        """Return whether resident rows of this unit are blocked.

        Those are rows that are multiplied in place.
        """
        is_multiplied = any(
            layer.kind != "embedding" for layer in self.plan.layers if layer.unit == unit
        )
        return self._is_host and not self.decodes and is_multiplied

    def check_unchanged(self) -> None:
        """Raise CheckpointChangedError if a file that sweeps read from has changed.

        The file must be as it was when the checkpoint was opened. Resident rows were checked once
        after loading (Engine). Later changes of their files do not reach them.
        """
        check_unchanged(self._read_in_sweeps)

    def nbytes(self, unit: int) -> int:
        """Return the ring bytes of one load of a unit; 0 if all its rows are used in place."""
        return self._sizes[unit]

    def load(self, unit: int, region: Region) -> list[Done]:
        """Start bringing the streamed rows of a unit into `region`."""
        tensors = self.plan.units[unit].tensors
        streamed = (held for tensor in tensors for held in self._parts[tensor.key] if held.streamed)
        return [self._load(piece, region) for held in streamed for piece in held.pieces]

    def open_unit(self, unit: int, region: Region | None) -> dict[str, RowParts]:
        """Return the tensors of a loaded unit by role, without those to be decoded.

        The row parts of a tensor are in order.
        """
        found = {}
        for tensor in self.plan.units[unit].tensors:
            layout = self._layouts[tensor.key]
            if not layout.decoded_row_bytes:
                parts: list[RowPart] = []
                for held in self._parts[tensor.key]:
                    parts += held.rows or self._as_held(layout, held, region, blocks=False)
                found[tensor.role] = tuple(parts)
        return found

    def decode_unit(self, unit: int, region: Region | None) -> tuple[dict[str, RowParts], bool]:
        """Return the decoded tensors of a loaded unit by role, and whether its region is in use.

        The region may be used by these tensors or by those of `open_unit`. Each tensor is decoded
        whole, into memory that the next unit overwrites. Decoding happens at once, or is deferred
        until the rows are used. It is deferred if codes stay on a GPU. It is also deferred for
        experts on a CPU, whose tensors one multiplication for all micro-batches uses.
        """
        found = {}
        tasks = list[Callable[[], object]]()
        start = 0
        by_columns = False
        uses_region = self._streams_as_held(unit)
        for tensor in self.plan.units[unit].tensors:
            layout = self._layouts[tensor.key]
            if not layout.decoded_row_bytes:
                continue
            by_columns = by_columns or layout.by_columns
            nbytes = layout.shape[0] * layout.decoded_row_bytes
            if (start, layout) not in self._filled:  # made once, then refilled
                assert self._decoded is not None
                memory = self._decoded[start : start + nbytes]
                self._filled[start, layout] = self._form.decoded_parts(
                    layout, memory, self._workspace
                )
            rows = self._filled[start, layout]
            parts = self._parts[tensor.key]
            whole = [
                Shard(h.part.tier, h.part.start, h.part.end, self._pieces(h, region)) for h in parts
            ]
            is_streamed = any(held.streamed for held in parts)
            stays = unit in self._experts if self._is_host else not is_streamed
            coded = self._form.coded_parts(layout, whole, rows) if stays else ()
            found[tensor.role] = coded or rows
            uses_region = uses_region or (is_streamed and bool(coded))
            if not coded:
                tasks.append(partial(self._form.decode, layout, whole, rows))
            start += round_up(nbytes, ALIGN)
        # Other decoders need temporary memory, which must not exist once per thread.
        in_place = not self._form.in_int8 and not by_columns
        if len(tasks) >= _MANY_TASKS and self._is_host and in_place:
            parallel_each(tasks, start // len(tasks))
        else:
            for task in tasks:
                task()
        return found, uses_region

    def _streams_as_held(self, unit: int) -> bool:
        """Return whether a loaded region has rows that are used where they are."""
        tensors = (
            t for t in self.plan.units[unit].tensors if not self._layouts[t.key].decoded_row_bytes
        )
        return any(held.streamed for tensor in tensors for held in self._parts[tensor.key])

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _as_held(
        self, layout: TensorLayout, held: _HeldPart, region: Region | None, blocks: bool
    ) -> RowParts:
        return self._form.row_parts(layout, self._pieces(held, region), self._workspace, blocks)

    def _table_of(self, layout: TensorLayout, rows: torch.Tensor) -> RowParts:
        """Return some rows of a table, in the format in which they are held."""
        return self._form.row_parts(
            layout, [rows.view(torch.uint8).view(-1)], self._workspace, blocks=False
        )

    def _pieces(self, held: _HeldPart, region: Region | None) -> list[torch.Tensor]:
        """Return the bytes (uint8) of each piece in the memory that the device computes on."""
        if held.streamed:
            assert region is not None
            return [self._view(piece, region) for piece in held.pieces]
        return [piece.resident for piece in held.pieces if piece.resident is not None]

    def _view(self, piece: _Piece, region: Region) -> torch.Tensor:
        start = piece.start + (piece.source.offset % PAGE if self._is_direct(piece) else 0)
        return region.data[start : start + piece.nbytes]

    def _load(self, piece: _Piece, region: Region) -> Done:
        if piece.resident is not None:
            dst = self._view(piece, region)
            return self._mover.copy("h2d", "load_weight", dst, piece.resident, region.after)
        if self._is_direct(piece):
            offset = piece.source.offset
            nbytes = piece.source.nbytes
            start, length = aligned_range(offset, nbytes)
            dst = region.data[piece.start : piece.start + length]
            file = self._file(piece.source.path)
            source = FileRange(file, start, offset - start + nbytes)
            return self._mover.read("load_weight", dst, "device", source, region.after)
        return self._read(piece, self._view(piece, region), "device", region.after)

    def _read(
        self, piece: _Piece, dst: torch.Tensor, memory: Memory, after: Sequence[Waitable]
    ) -> Done:
        found = piece.source
        stored = torch.uint8
        if (dtype := self._converted(piece)) is not None:
            dst = dst.view(dtype)
            stored = getattr(torch, found.dtype)
        source = FileRange(self._file(found.path), found.offset, found.nbytes, stored)
        return self._mover.read("load_weight", dst, memory, source, after)

    def _is_direct(self, piece: _Piece) -> bool:
        """Return whether compute can use the file's bytes as they are, where the reader
        puts them.
        """
        if not self._is_host or piece.resident is not None:
            return False
        dtype = self._converted(piece)
        source = piece.source
        if dtype is None:
            return source.offset % WORD == 0
        return getattr(torch, source.dtype) == dtype and source.offset % dtype.itemsize == 0

    def _converted(self, piece: _Piece) -> torch.dtype | None:
        """Return the dtype of the piece's numbers, or None if it is held as stored."""
        if piece.stored.in_float32:
            return torch.float32
        return self._workspace.dtype if piece.stored.is_values else None

    def _file(self, path: Path) -> DirectFile:
        if path not in self._files:
            self._files[path] = DirectFile(path)
        return self._files[path]


def hidden_fields(spec: ModelSpec, dtype: torch.dtype) -> list[tuple[int, torch.dtype]]:
    """Return (elements per token, dtype) of each field of a model's hidden states.

    Their bytes are those of MemoryPlanner.hidden_row_bytes.
    """
    fields = [(spec.hidden_size, dtype)]
    if spec.experts:
        fields += [
            fields[0],
            (spec.experts.per_token, torch.int32),
            (spec.experts.per_token, torch.float32),
        ]
    return fields


class HiddenStore:
    """The hidden states of the current block.

    fields: elements and dtype that each field of `Hidden` has for a token.
    memory: uint8 arenas by tier.
    file: the disk arena.
    """

    def __init__(
        self,
        mover: Mover,
        fields: Sequence[tuple[int, torch.dtype]],
        shares: Shares,
        num_layers: int,
        memory: dict[str, torch.Tensor],
        file: DirectFile | None,
    ) -> None:
        self._mover = mover
        self._fields = tuple(fields)
        self._shares = shares
        self._last_layer = num_layers - 1
        self._memory = memory
        self._file = file
        self._row_bytes = [width * dtype.itemsize for width, dtype in fields]
        self._streamed = hidden_is_streamed(shares, mover.device.is_host)

    def begin_block(self, most: list[int], is_open: bool = False) -> None:
        """Set up the homes of a block's micro-batches.

        most: for each micro-batch, the tokens of its largest sweep.
        is_open: sequences may enter micro-batches that have none.
        """
        # _known_sweeps: for each micro-batch the newest sweep whose tokens are settled.
        self._is_open = is_open
        self._known_sweeps = [-1] * len(most)
        self._num_tokens = [0] * len(most)
        self._closed: list[tuple[int, int] | None] = [None] * len(most)
        self._stores: list[list[Waitable]] = [[] for _ in most]
        # For each micro-batch: tokens of earlier ones in this sweep, in fields that are in place.
        self._starts = [0] * len(most)
        # Hidden states in place, by their first and last micro-batch.
        self._opened: dict[tuple[int, int], Hidden] = {}
        # Byte offsets into the arenas: [field][micro-batch][tier].
        self._offsets: list[list[dict[str, int]]] = []
        used = dict.fromkeys(("device", "host", "disk"), 0)
        for row in self._row_bytes:
            self._offsets.append([])
            for tokens in most:
                self._offsets[-1].append(dict(used))
                for tier, nbytes in hidden_home_bytes(tokens, self._shares, row).items():
                    used[tier] += nbytes

    def begin_sweep(self, micro_batch: int, tokens: int) -> None:
        """Set the tokens of the micro-batch from its next embedding on.

        tokens: 0 if it has no sequences any more.
        """
        known = self._known_sweeps[micro_batch]
        # A micro-batch without tokens was not closed by the head.
        if self._is_open and known >= 0 and not self._num_tokens[micro_batch]:
            self._closed[micro_batch] = known, self._last_layer
        self._known_sweeps[micro_batch] = known + 1
        self._num_tokens[micro_batch] = tokens
        self._opened.clear()

    def skip(self, key: UnitKey) -> None:
        """Note that a layer leaves the micro-batch as it is and does not open it."""
        self._closed[key[2]] = key[:2]

    def joined(self, most: int) -> dict[int, tuple[int, ...]]:
        """Return the micro-batches that a layer may open together, by the first (loop.joined)."""
        return joined(self._num_tokens, 0 if self._streamed else most)

    # Source of a Stream[UnitKey]

    def nbytes(self, key: UnitKey) -> int:
        return max(1, sum(self._region_sizes(key[2]))) if self._streamed else 0

    def is_needed(self, key: UnitKey) -> bool:
        closed = self._closed[key[2]]
        k = key[2]
        if not self._num_tokens[k]:
            return self._is_open and key[0] > self._known_sweeps[k]  # not known yet
        return closed is None or key[:2] > closed

    def is_ready(self, key: UnitKey) -> bool:
        sweep, layer, k = key
        before = (sweep, layer - 1) if layer else ((sweep - 1, self._last_layer) if sweep else None)
        return self._closed[k] == before and sweep <= self._known_sweeps[k]

    def load(self, key: UnitKey, region: Region) -> list[Done]:
        _, layer, k = key
        if layer == 0:
            return []
        mover = self._mover
        after = [*region.after, *self._stores[k]]
        return [
            mover.read("load_hidden", data, "device", home, after)
            if isinstance(home, FileRange)
            else mover.copy("h2d", "load_hidden", data, home, after)
            for data, home in self._parts(k, region)
        ]

    # Compute side

    def open(self, key: UnitKey, region: Region | None, last: int | None = None) -> Hidden:
        """Return the hidden states of one micro-batch, or of several `joined` ones.

        last: the last of several micro-batches; the key names the first.
        """
        _, layer, k = key
        run = k, k if last is None else last
        if region is None and layer and run in self._opened:
            return self._opened[run]
        if region is not None:
            wait_all_on_card(region.after)
        elif layer == 0:  # the states of the last sweep are not needed any more
            self._starts[k] = sum(self._num_tokens[:k])
        tokens = sum(self._num_tokens[k : run[1] + 1])
        fields = zip(self._open(k, region), self._fields, strict=True)
        found: list[Any] = [
            x[: tokens * n * kind.itemsize].view(kind).view(tokens, n) for x, (n, kind) in fields
        ]
        self._opened[run] = Hidden(*found)
        return self._opened[run]

    def _open(self, k: int, region: Region | None) -> list[torch.Tensor]:
        """Return the memory of each field."""
        if region is not None:
            sizes = self._region_sizes(k)
            return list(region.data[: sum(sizes)].split(sizes))
        (part,) = split_rows(self._num_tokens[k], self._shares)
        start = self._starts[k]
        memory = self._memory[part.tier]
        fields = zip(self._offsets, self._row_bytes, strict=True)
        return [memory[offsets[0][part.tier] + start * row :] for offsets, row in fields]

    def close(
        self, key: UnitKey, region: Region | None, fence: Callable[[], Waitable]
    ) -> list[Waitable]:
        """Store what the layer left, except for the head, which leaves nothing.

        Return what the region's next writer waits for.

        fence: makes an event that is done when the layer is done; not called without a region.
        """
        sweep, layer, k = key
        done: list[Waitable] = [] if region is None else [fence()]
        stores: list[Waitable] = []
        if region is not None and layer != self._last_layer:
            for data, home in self._parts(k, region):
                if isinstance(home, FileRange):
                    stores.append(
                        self._mover.write(
                            "store_hidden", home.file, home.offset, data, "device", done
                        )
                    )
                else:
                    stores.append(self._mover.copy("d2h", "store_hidden", home, data, done))
        self._closed[k] = (sweep, layer)
        self._stores[k] = stores
        return [*done, *stores]

    def settle(self) -> None:
        """Wait for stores under way, so that the next block may reuse the homes."""
        for stores in self._stores:
            wait_all(stores)

    def _region_sizes(self, k: int) -> list[int]:
        """Return the bytes of each field in a ring's region."""
        return [round_up(self._num_tokens[k] * row, PAGE) for row in self._row_bytes]

    def _parts(self, k: int, region: Region) -> list[tuple[torch.Tensor, torch.Tensor | FileRange]]:
        """Return for each part of a micro-batch its bytes in the region and its home."""
        found = list[tuple[torch.Tensor, torch.Tensor | FileRange]]()
        parts = split_rows(self._num_tokens[k], self._shares)
        for field, row, offsets in zip(
            self._open(k, region), self._row_bytes, self._offsets, strict=True
        ):
            for part in parts:
                data = field[part.start * row : part.end * row]
                start = offsets[k][part.tier]
                if part.tier != "disk":
                    found.append((data, self._memory[part.tier][start : start + data.numel()]))
                else:
                    assert self._file is not None
                    found.append((data, FileRange(self._file, start, data.numel())))
        return found

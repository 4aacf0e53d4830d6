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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flexgen_h2o.checkpoint.atomic_folder import check_unchanged
from flexgen_h2o.checkpoint.formats import (
    Codec,
    Shard,
    StoredRows,
    TensorLayout,
    layout_of,
)
from flexgen_h2o.checkpoint.safetensors import Checkpoint, StoredTensor
from flexgen_h2o.core.model import LayerPlan, TensorSpec
from flexgen_h2o.core.packing import WORD
from flexgen_h2o.core.units import ALIGN, PAGE, round_up
from flexgen_h2o.engine.loop import UnitKey, joined
from flexgen_h2o.engine.memory_plan import hidden_home_bytes, hidden_is_streamed
from flexgen_h2o.engine.weight_units import streamed_bytes, streamed_part_bytes
from flexgen_h2o.kernels.linear import Matrix, RowParts, Table, lookup
from flexgen_h2o.kernels.workspace import Workspace, parallel_each
from flexgen_h2o.models import Hidden
from flexgen_h2o.tiers.disk import DirectFile, FileRange, aligned_range
from flexgen_h2o.tiers.stream import (
    Done,
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
        form: Codec,
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
        self._shards = dict[str, list[Shard]]()
        for unit in plan.units:
            start = 0
            for tensor in unit.tensors:
                shards = self._shards_of(tensor, checkpoint, shares, start)
                self._shards[tensor.key] = shards
                start = shards[-1].places[-1]
        self._filled: dict[tuple[int, TensorLayout], RowParts] = {}
        on_disk = (one for shards in self._shards.values() for one in shards if one.tier == "disk")
        self._read_in_sweeps = {
            source.path: source.state for shard in on_disk for source in shard.sources
        }
        self._sizes = [streamed_bytes(unit, shares, form, self._is_host) for unit in plan.units]

    def _shards_of(
        self, tensor: TensorSpec, checkpoint: Checkpoint, shares: Shares, start: int
    ) -> list[Shard]:
        """Return the shards of a tensor, none of which is in memory.

        start: the first free byte of a load's region. The last place of a shard is the next one.
        """
        found = []
        layout = self._layouts[tensor.key]
        for part, is_streamed in layout.homes(shares, self._is_host):
            sources = []
            places = [start]
            for stored in layout.stored:
                first, end = stored.rows_of(part.start, part.end)
                whole = checkpoint.tensors[stored.key]
                sources.append(whole.rows(stored.first + first, stored.first + end))
                if is_streamed:
                    start += streamed_part_bytes(stored.part_bytes(part))
                places.append(start)
            shard = Shard(part.tier, part.start, part.end, (), sources, places, is_streamed)
            if part.tier == "disk" and not is_streamed:
                table = Table(shard.rows, partial(self._look_up_on_disk, layout, sources[0]))
                shard = replace(shard, held=(table,))
            found.append(shard)
        return found

    def load_resident(self, memory: dict[str, torch.Tensor]) -> None:
        """Read every row whose home is device or host memory into `memory` (uint8 by tier).

        Rows are put into the blocked layout if that is possible. If the device is host memory, rows
        of the device are in `host` too.
        """
        used = dict.fromkeys(memory, 0)
        reads = []
        # A tensor that two units share occurs once.
        units = {t.key: number for number, unit in enumerate(self.plan.units) for t in unit.tensors}
        for key in units:
            layout = self._layouts[key]
            for i, shard in enumerate(self._shards[key]):
                if shard.tier == "disk":
                    continue
                tier = shard.tier if shard.tier in memory else "host"
                home: Memory = "host" if shard.tier == "host" else "device"
                pieces = []
                for stored, source in zip(layout.stored, shard.sources, strict=True):
                    nbytes = stored.part_bytes(shard)
                    pieces.append(memory[tier][used[tier] : used[tier] + nbytes])
                    used[tier] += round_up(nbytes, ALIGN)
                    reads.append(self._read(stored, source, pieces[-1], home, ()))
                self._shards[key][i] = replace(shard, pieces=pieces)
        wait_all(reads)
        for key, number in units.items():
            layout = self._layouts[key]
            for i, shard in enumerate(self._shards[key]):
                if shard.pieces and not shard.is_streamed and not layout.decoded_row_bytes:
                    held = self._form.row_parts(
                        layout, shard.pieces, self._workspace, self._blocks(number)
                    )
                    self._shards[key][i] = replace(shard, held=held)

    def _blocks(self, unit: int) -> bool:
        """Return whether resident rows of this unit are blocked.

        Those are rows that are multiplied in place.
        """
        is_multiplied = any(
            layer.kind != "embedding" for layer in self.plan.layers if layer.unit == unit
        )
        return self._is_host and not self.decodes and is_multiplied

    def check_unchanged(self) -> None:
        """Raise FlexgenError if a file that sweeps read from has changed.

        The file must be as it was when the checkpoint was opened. Resident rows were checked once
        after loading (Engine). Later changes of their files do not reach them.
        """
        check_unchanged(self._read_in_sweeps)

    def nbytes(self, unit: int) -> int:
        """Return the ring bytes of one load of a unit; 0 if all its rows are used in place."""
        return self._sizes[unit]

    def load(self, unit: int, region: Region) -> list[Done]:
        """Start bringing the streamed rows of a unit into `region`."""
        loads = list[Done]()
        for tensor in self.plan.units[unit].tensors:
            for shard in self._shards[tensor.key]:
                if shard.is_streamed:
                    loads += self._load(self._layouts[tensor.key], shard, region)
        return loads

    def open_unit(self, unit: int, region: Region | None) -> dict[str, RowParts]:
        """Return the tensors of a loaded unit by role, without those to be decoded.

        The row parts of a tensor are in order.
        """
        found = {}
        for tensor in self.plan.units[unit].tensors:
            layout = self._layouts[tensor.key]
            if not layout.decoded_row_bytes:
                parts: list[Matrix] = []
                for shard in self._shards[tensor.key]:
                    parts += shard.held or self._form.row_parts(
                        layout, self._pieces(layout, shard, region), self._workspace, blocks=False
                    )
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
            shards = self._shards[tensor.key]
            whole = [replace(one, pieces=self._pieces(layout, one, region)) for one in shards]
            is_streamed = any(shard.is_streamed for shard in shards)
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
        return any(shard.is_streamed for tensor in tensors for shard in self._shards[tensor.key])

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _look_up_on_disk(
        self, layout: TensorLayout, source: StoredTensor, ids: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Look up in a table on disk. The wanted rows are read, each once."""
        stored = getattr(torch, source.dtype)
        wanted, places = ids.unique(return_inverse=True)
        rows = torch.empty(
            len(wanted),
            source.shape[1],
            dtype=out.dtype if stored.is_floating_point else stored,
            device="cpu",
        )
        row_bytes = source.nbytes // source.shape[0]
        first = FileRange(self._file(source.path), source.offset, row_bytes, stored)
        self._mover.read_rows(
            "look_up_weight", [*zip(rows, wanted.tolist(), strict=True)], first
        ).wait()
        pieces = [rows.view(torch.uint8).view(-1)]
        lookup(places, self._form.row_parts(layout, pieces, self._workspace, blocks=False), out)

    def _pieces(
        self, layout: TensorLayout, shard: Shard, region: Region | None
    ) -> Sequence[torch.Tensor]:
        """Return the bytes (uint8) of each piece in the memory that the device computes on."""
        if not shard.is_streamed:
            return shard.pieces
        assert region is not None
        pieces = []
        for stored, source, place in zip(layout.stored, shard.sources, shard.places, strict=False):
            inside = source.offset % PAGE if self._is_direct(stored, source, shard) else 0
            pieces.append(region.data[place + inside :][: stored.part_bytes(shard)])
        return pieces

    def _load(self, layout: TensorLayout, shard: Shard, region: Region) -> Iterator[Done]:
        rooms = self._pieces(layout, shard, region)
        for i, (stored, source) in enumerate(zip(layout.stored, shard.sources, strict=True)):
            if shard.pieces:
                yield self._mover.copy(
                    "h2d", "load_weight", rooms[i], shard.pieces[i], region.after
                )
            elif self._is_direct(stored, source, shard):
                start, length = aligned_range(source.offset, source.nbytes)
                room = region.data[shard.places[i] : shard.places[i] + length]
                nbytes = source.offset - start + source.nbytes
                found = FileRange(self._file(source.path), start, nbytes)
                yield self._mover.read("load_weight", room, "device", found, region.after)
            else:
                yield self._read(stored, source, rooms[i], "device", region.after)

    def _read(
        self,
        stored: StoredRows,
        source: StoredTensor,
        dst: torch.Tensor,
        memory: Memory,
        after: Sequence[Waitable],
    ) -> Done:
        dtype = torch.uint8
        if (number := self._converted(stored)) is not None:
            dst = dst.view(number)
            dtype = getattr(torch, source.dtype)
        found = FileRange(self._file(source.path), source.offset, source.nbytes, dtype)
        return self._mover.read("load_weight", dst, memory, found, after)

    def _is_direct(self, stored: StoredRows, source: StoredTensor, shard: Shard) -> bool:
        """Return whether compute can use the file's bytes as they are, where the reader
        puts them.
        """
        if not self._is_host or shard.pieces:
            return False
        dtype = self._converted(stored)
        if dtype is None:
            return source.offset % WORD == 0
        return getattr(torch, source.dtype) == dtype and source.offset % dtype.itemsize == 0

    def _converted(self, stored: StoredRows) -> torch.dtype | None:
        """Return the dtype of a stored tensor's numbers, or None if it is held as stored."""
        if stored.in_float32:
            return torch.float32
        return self._workspace.dtype if stored.is_values else None

    def _file(self, path: Path) -> DirectFile:
        if path not in self._files:
            self._files[path] = DirectFile(path)
        return self._files[path]


# Dtypes of the fields of `Hidden`; None: the compute dtype.
HIDDEN_DTYPES = (None, None, torch.int32, torch.float32)


class HiddenStore:
    """The hidden states of the current block.

    row_bytes: bytes of a token in each field of `Hidden` (MemoryPlanner.hidden_row_bytes).
    dtype: the compute dtype.
    memory: uint8 arenas by tier.
    file: the disk arena.
    """

    def __init__(
        self,
        mover: Mover,
        row_bytes: Sequence[int],
        dtype: torch.dtype,
        shares: Shares,
        num_layers: int,
        memory: dict[str, torch.Tensor],
        file: DirectFile | None,
    ) -> None:
        self._mover = mover
        self._row_bytes = row_bytes
        self._dtypes = [kind or dtype for kind in HIDDEN_DTYPES]
        self._shares = shares
        self._last_layer = num_layers - 1
        self._memory = memory
        self._file = file
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
        fields = zip(self._open(k, region), self._row_bytes, self._dtypes, strict=False)
        found: list[Any] = [
            x[: tokens * row].view(kind).view(tokens, row // kind.itemsize)
            for x, row, kind in fields
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

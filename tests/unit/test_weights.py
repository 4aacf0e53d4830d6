"""Weights of a real checkpoint, split over tiers and streamed: what a layer opens is what the file
holds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from flexgen_h2o.checkpoint import Checkpoint, match, pack_checkpoint, read_index
from flexgen_h2o.checkpoint.formats.groupwise import Groupwise
from flexgen_h2o.core.errors import TransferError
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.core.units import PAGE, ROW_BLOCK
from flexgen_h2o.kernels.linear import DenseRows, lookup
from flexgen_h2o.kernels.packed import pack_rows, unpack_rows
from flexgen_h2o.tiers.device import Device, HostDevice, StandInDevice
from flexgen_h2o.tiers.stream import NOTHING, Done, Region
from tests.unit.weight_room import (
    PAIRS,
    opened,
    spec_of,
    taken,
    unpacked_layers,
    values,
    within,
    write_checkpoint,
)

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module", params=[(torch.float32, 0), (torch.bfloat16, 1)], ids=str)
def stored(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[bool, Any]:
    """By tied or not: (spec, checkpoint, its tensors)."""
    found = {}
    for tied in (True, False):
        folder = tmp_path_factory.mktemp("weights")
        spec = spec_of(tied)
        tensors = write_checkpoint(folder, spec, *request.param)
        found[tied] = spec, match(spec, read_index(folder), folder), tensors
    return found


@pytest.fixture
def small(tmp_path: Path) -> tuple[ModelSpec, Checkpoint, dict[str, torch.Tensor]]:
    spec = spec_of(tied=True)
    tensors = write_checkpoint(tmp_path, spec, torch.float32, 0)
    return spec, match(spec, read_index(tmp_path), tmp_path), tensors


@pytest.mark.parametrize(("place", "device"), PAIRS)
def test_layers_open_what_the_file_holds(
    stored: dict[bool, Any], place: tuple[int, int], device: type[Device]
) -> None:
    """Over two sweeps, through a ring that is reused, in the dtype that is computed in."""
    for tied, sep_layer, dtype in ((True, True, torch.float32), (False, False, torch.bfloat16)):
        spec, checkpoint, tensors = stored[tied]
        with opened(spec, checkpoint, place, device(), dtype, sep_layer=sep_layer) as room:
            stream = room.stream(2, ahead=len(room.layers.layers))
            for layer in room.layers.layers * 2:
                stream.prefetch()
                w = stream.open(layer.unit, lambda: NOTHING)
                assert set(w) == {t.role for t in room.layers.units[layer.unit].tensors}
                for t in room.layers.units[layer.unit].tensors:
                    if not (t.looked_up and device is HostDevice):
                        assert torch.equal(values(w[t.role]), tensors[t.name].to(dtype)), t.name
            stream.drain()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("place", "near", "pages"),
    [((0, 99), 0, (3, 6)), ((0, 99), 2**17, (7, 17)), ((60, 40), 0, (0, 0))],
)
def test_rows_of_a_table_are_read_as_they_are_looked_up(
    stored: dict[bool, Any],
    place: tuple[int, int],
    near: int,
    pages: tuple[int, int],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each once, into memory whose rows need not be adjacent; with nothing else on disk they are in
    memory. What lies between rows that are near is read with them."""
    monkeypatch.setattr("flexgen_h2o.tiers.transfers.NEAR_BYTES", near)
    spec, checkpoint, tensors = stored[False]
    with opened(spec, checkpoint, place, HostDevice(), dtype) as room:
        table = room.store.open_unit(0, taken(room, 0))["embed_tokens.weight"]
        expected = tensors["model.decoder.embed_tokens.weight"].to(dtype)
        before = room.lanes.bytes_moved["disk_read"]
        ids = torch.tensor([3, len(expected) - 1, 3, 0, 3])
        out = torch.empty(len(ids), 2 * expected.shape[1], dtype=dtype)[:, : expected.shape[1]]
        assert torch.equal(lookup(ids, table, out), expected[ids])
        least, most = pages
        assert least <= (room.lanes.bytes_moved["disk_read"] - before) // PAGE <= most


@pytest.mark.parametrize("place", [(20, 80), (20, 30), (99, 0)])
def test_twenty_percent_is_twenty_percent_of_every_matrix(
    small: Any, place: tuple[int, int]
) -> None:
    spec, checkpoint, _ = small
    with opened(spec, checkpoint, place, StandInDevice(), torch.float32) as room:
        arenas = {tier: m.data_ptr() for tier, m in room.memory.items()}
        for unit in range(len(room.layers.units)):
            region = taken(room, unit)
            for t in room.layers.units[unit].tensors:
                parts = room.store.open_unit(unit, region)[t.role]
                assert all(len(p) % ROW_BLOCK == 0 for p in parts[:-1])
                on_device = sum(
                    len(p)
                    for p in parts
                    if within(p.rows, arenas.get("device"), room.memory.get("device"))
                )
                share = place[0] / 100 if len(t.shape) > 1 else 1.0
                assert abs(on_device - share * t.shape[0]) <= ROW_BLOCK


def test_tied_head_and_next_embedding_are_loaded_once(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, checkpoint, _ = small
    with opened(spec, checkpoint, (0, 0), HostDevice(), torch.float32) as room:
        loads: list[int] = []
        load = room.store.load

        def recorded(key: int, region: Region) -> list[Done]:
            loads.append(key)
            return load(key, region)

        monkeypatch.setattr(room.store, "load", recorded)
        stream = room.stream(3, ahead=2)
        for layer in room.layers.layers * 3:
            stream.open(layer.unit, lambda: NOTHING)
        assert loads == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0]


def test_a_file_that_shrinks_during_the_run_ends_it_with_its_name(small: Any) -> None:
    spec, checkpoint, _ = small
    with opened(spec, checkpoint, (0, 0), HostDevice(), torch.float32) as room:
        os.truncate(checkpoint.folder / "model.safetensors", 5 * PAGE)
        stream = room.stream(1, ahead=4)
        stream.prefetch()
        with pytest.raises(TransferError, match=r"model\.safetensors: ends at byte "):
            _ = [stream.open(layer.unit, lambda: NOTHING) for layer in room.layers.layers]


def test_a_unit_that_is_open_stays_open(small: Any) -> None:
    """The micro-batches of a layer share its load."""
    spec, checkpoint, _ = small
    with opened(spec, checkpoint, (0, 0), HostDevice(), torch.float32) as room:
        stream = room.stream(1, ahead=0)
        first = stream.open(0, lambda: NOTHING)
        assert stream.open(0, lambda: NOTHING) is first
        assert stream.open(1, lambda: NOTHING) is not first


# ---- Packed weights that are unpacked


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[bool, int], Any]:
    """By tied or not and bits: (spec, packed checkpoint, tensors that it was made from)."""
    found = {}
    for tied in (True, False):
        folder = tmp_path_factory.mktemp("weights")
        spec = spec_of(tied)
        tensors = write_checkpoint(folder, spec, torch.bfloat16, 1)
        checkpoint = match(spec, read_index(folder), folder)
        for bits in (4, 8):
            found[tied, bits] = (
                spec,
                pack_checkpoint(spec, checkpoint, folder, Groupwise(2, bits)),
                tensors,
            )
    return found


@pytest.mark.parametrize(
    ("dtype", "bits", "tied"), [(torch.float32, 4, True), (torch.bfloat16, 8, False)]
)
@pytest.mark.parametrize(("place", "device"), PAIRS)
def test_packed_layers_are_unpacked_into_the_planned_memory(
    packed: dict[tuple[bool, int], Any],
    place: tuple[int, int],
    device: type[Device],
    dtype: torch.dtype,
    bits: int,
    tied: bool,
) -> None:
    """Matrices whole, as their values were rounded, tables row by row; vectors as the file holds
    them. A region is free once unpacked."""
    spec, checkpoint, tensors = packed[tied, bits]
    with opened(
        spec,
        checkpoint,
        place,
        device(),
        dtype,
        sep_layer=tied,
        form=Groupwise(dtype.itemsize, bits),
    ) as room:
        stream = room.stream(2, ahead=len(room.layers.layers))
        for unit, w in unpacked_layers(room, stream):
            for t in unit.tensors:
                want = tensors[t.name]
                found = w[t.role]
                if t.looked_up:
                    rows = lookup(
                        torch.arange(len(want)), found, torch.empty(want.shape, dtype=dtype)
                    )
                    found = (DenseRows(rows),)
                if want.dim() == 2:
                    assert len(found) == 1
                    want = unpack_rows.torch(
                        pack_rows(want, bits), bits, torch.empty(want.shape, dtype=dtype)
                    )
                assert torch.equal(values(found), want.to(dtype)), t.name


def test_a_region_is_taken_again_after_what_unpacked_it(
    packed: dict[tuple[bool, int], Any],
) -> None:
    """Its next writer waits for the fence of the unpacking, not for the compute that follows."""
    spec, checkpoint, _ = packed[True, 4]
    with opened(
        spec, checkpoint, (0, 0), HostDevice(), torch.float32, depth=1, form=Groupwise(4, 4)
    ) as room:
        stream = room.stream(2, ahead=1)
        fence = Done()
        (first, second) = (room.layers.layers[i].unit for i in range(2))
        assert room.ring is not None
        stream.open(first, lambda: NOTHING)
        stream.decode(lambda: fence)
        region = room.ring.take(room.store.nbytes(second))
        assert region is not None and region.after == [fence]
        fence.finish_one()

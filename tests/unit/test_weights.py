"""Weights of a real checkpoint, split over tiers and streamed: what a layer opens is what the file
holds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from flexgen_h2o.checkpoint import Checkpoint, match, pack_checkpoint, read_index
from flexgen_h2o.checkpoint.formats.int8 import Int8
from flexgen_h2o.core.errors import TransferError
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.core.units import ALIGN, PAGE, ROW_BLOCK, round_up
from flexgen_h2o.engine.stores import TableOnDisk
from flexgen_h2o.kernels.int8 import BlockedInt8, Int8Rows, pack_int8_rows
from flexgen_h2o.kernels.linear import BlockedRows, block_rows, linear, lookup
from flexgen_h2o.tiers.device import Device, HostDevice, StandInDevice
from flexgen_h2o.tiers.stream import NOTHING, Done, Region
from tests.unit.weight_room import (
    PAIRS,
    Room,
    int8_workspace,
    opened,
    spec_of,
    taken,
    values,
    wide_models,
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


def resident_rows(room: Room) -> list[torch.Tensor]:
    pieces = (
        piece for parts in room.store._parts.values() for held in parts for piece in held.pieces
    )
    return [piece.resident for piece in pieces if piece.resident is not None]


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


@pytest.mark.parametrize(("place", "device"), PAIRS)
def test_resident_rows_fill_exactly_the_planned_memory(
    small: Any, place: tuple[int, int], device: type[Device]
) -> None:
    spec, checkpoint, _ = small
    with opened(spec, checkpoint, place, device(), torch.float32) as room:
        arenas = {tier: m.data_ptr() for tier, m in room.memory.items()}
        ends = dict.fromkeys(arenas, 0)
        for part in resident_rows(room):
            tier = next(t for t in arenas if within(part, arenas[t], room.memory[t]))
            ends[tier] = max(ends[tier], part.data_ptr() + part.nbytes - arenas[tier])
        assert {tier: round_up(end, ALIGN) for tier, end in ends.items()} == {
            tier: m.numel() for tier, m in room.memory.items()
        }


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


# ---- blocked


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Any]:
    if not isinstance(block_rows(torch.zeros(64, 64, dtype=torch.bfloat16))[0], BlockedRows):
        pytest.skip("torch does not block here")
    return wide_models(tmp_path_factory)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("place", "device"), PAIRS)
def test_what_is_multiplied_where_it_lives_is_blocked(
    wide: dict[bool, Any], place: tuple[int, int], device: type[Device], tied: bool
) -> None:
    """Beside streamed rows of the same matrix, and in the planned memory; a tied table too. What is
    only looked up in, what is streamed and what a device of its own computes on are not."""
    spec, checkpoint, tensors = wide[tied]
    with opened(spec, checkpoint, place, device(), torch.bfloat16) as room:
        tables = {t.name for t in spec.embedding} if not tied else set()
        resident = sum(place) if device is HostDevice else 0
        blocked = 0
        for unit in range(len(room.layers.units)):
            region = taken(room, unit)
            for t in room.layers.units[unit].tensors:
                parts = room.store.open_unit(unit, region)[t.role]
                here = [p for p in parts if isinstance(p, BlockedRows)]
                assert not here or (t.name not in tables and len(t.shape) == 2)
                assert all(
                    any(within(p.memory, m.data_ptr(), m) for m in room.memory.values())
                    for p in here
                )
                blocked += sum(map(len, here))
                if len(t.shape) == 2 and t.name not in tables:
                    assert (
                        sum(map(len, here))
                        == round(t.shape[0] * resident / 100 / ROW_BLOCK) * ROW_BLOCK // 64 * 64
                    )
                    x = torch.randn(5, t.shape[1]).bfloat16()
                    out = linear(x, parts, None, torch.empty(5, t.shape[0], dtype=torch.bfloat16))
                    want = x.float() @ tensors[t.name].float().t()
                    assert torch.allclose(out.float(), want, atol=0.3, rtol=2**-7)
                elif not t.looked_up:  # its rows are read one by one
                    assert torch.equal(values(parts), tensors[t.name])
        assert bool(blocked) == bool(resident)


def test_fp32_is_not_blocked(wide: dict[bool, Any]) -> None:
    spec, checkpoint, tensors = wide[False]
    with opened(spec, checkpoint, (100, 0), HostDevice(), torch.float32) as room:
        for number, unit in enumerate(room.layers.units):
            for role, parts in room.store.open_unit(number, None).items():
                name = next(t.name for t in unit.tensors if t.role == role)
                assert torch.equal(values(parts), tensors[name].float())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("place", "device"), PAIRS)
def test_int8_rows_are_blocked_where_they_live(
    wide: dict[bool, Any], tmp_path: Path, place: tuple[int, int], device: type[Device], tied: bool
) -> None:
    """A tied table too, as blocked rows can be looked up; in the planned memory. All is as it is
    from rows in order."""
    spec, source, tensors = wide[tied]
    checkpoint = pack_checkpoint(spec, source, tmp_path, Int8(2))
    with opened(spec, checkpoint, place, device(), torch.bfloat16, form=Int8(2)) as room:
        tables = {t.name for t in spec.embedding} if not tied else set()
        resident = sum(place) if device is HostDevice else 0
        ws = int8_workspace()
        for number, unit in enumerate(room.layers.units):
            parts = room.store.open_unit(number, taken(room, number))
            for t in [t for t in unit.tensors if len(t.shape) == 2]:
                here = [p.packed for p in parts[t.role] if isinstance(p, Int8Rows)]
                there = [p for p in here if isinstance(p, BlockedInt8)]
                assert all(
                    any(within(p.memory, m.data_ptr(), m) for m in room.memory.values())
                    for p in there
                )
                blocked = round(t.shape[0] * resident / 100 / ROW_BLOCK) * ROW_BLOCK // 64 * 64
                assert sum(map(len, there)) == (0 if t.name in tables else blocked)
                whole = (Int8Rows(pack_int8_rows(tensors[t.name]), t.shape[1], ws),)
                x = torch.randn(5, t.shape[1])
                if not any(
                    isinstance(p, TableOnDisk) for p in parts[t.role]
                ):  # whose rows are read one by one
                    found = [
                        linear(x, p, None, torch.empty(5, t.shape[0]))
                        for p in (whole, parts[t.role])
                    ]
                    assert torch.equal(*found)
                ids = torch.tensor([0, t.shape[0] - 1, t.shape[0] // 2])
                rows = torch.zeros(2, 3, t.shape[1])
                assert torch.equal(lookup(ids, whole, rows[0]), lookup(ids, parts[t.role], rows[1]))

"""Weights of a real checkpoint, split over tiers and streamed: what a layer opens is what the file holds."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from flexgen_h2o.checkpoint import Checkpoint, match, pack_checkpoint, read_index
from flexgen_h2o.config import ModelSpec, Policy
from flexgen_h2o.errors import TransferError
from flexgen_h2o.kernels.blocked_rows import BlockedRows, block_rows
from flexgen_h2o.kernels.int8_blocked import BlockedInt8
from flexgen_h2o.kernels.int8_rows import Int8Rows, pack_int8_rows
from flexgen_h2o.kernels.linear import linear, lookup
from flexgen_h2o.kernels.packed_rows import pack_rows, unpack_rows_reference
from flexgen_h2o.kernels.requantised import requantise_rows_reference
from flexgen_h2o.kernels.workspace import Workspace
from flexgen_h2o.limits import ALIGN, PAGE, ROW_BLOCK
from flexgen_h2o.models import spec_from_config
from flexgen_h2o.packing import INT8, Packing, WeightForm
from flexgen_h2o.planner.memory import Depth, Shape, memory_plan, tier_shares
from flexgen_h2o.schedule import weight_sequence
from flexgen_h2o.tiers.buffers import host_buffer
from flexgen_h2o.tiers.device import Device, HostDevice, StandInDevice
from flexgen_h2o.tiers.events import NOTHING, Done
from flexgen_h2o.tiers.mover import Mover
from flexgen_h2o.tiers.ring import Region, Ring
from flexgen_h2o.tiers.transfer import Lanes
from flexgen_h2o.timeline import Timeline
from flexgen_h2o.units import round_up
from flexgen_h2o.weights import WeightStore, WeightStream

pytestmark = pytest.mark.timeout(60)

CONFIG: dict[str, Any] = {
    "model_type": "opt", "vocab_size": 200, "hidden_size": 80, "num_hidden_layers": 2, "ffn_dim": 160,
    "max_position_embeddings": 30, "num_attention_heads": 4, "word_embed_proj_dim": 80, "activation_function": "relu",
    "enable_bias": True, "layer_norm_elementwise_affine": True, "do_layer_norm_before": True,
}  # fmt: skip
SAFETENSORS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
PLACES = [(100, 0), (0, 100), (0, 0), (20, 80), (20, 30), (0, 50), (99, 0)]
DEVICES: list[type[Device]] = [HostDevice, StandInDevice]


def spec_of(tied: bool) -> ModelSpec:
    return spec_from_config("tiny", {**CONFIG, "tie_word_embeddings": tied}, "here")


def write_checkpoint(folder: Path, spec: ModelSpec, dtype: torch.dtype, shift: int) -> dict[str, torch.Tensor]:
    """model.safetensors with all tensors of `spec` behind a tensor of `shift` bytes, which spoils their alignment."""
    tensors = {t.name: torch.randn(t.shape).to(dtype) for unit in spec.layers(True).units for t in unit.tensors}
    head: dict[str, Any] = {"pad": {"dtype": "U8", "shape": [shift], "data_offsets": [0, shift]}}
    end = shift
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        head[name] = {"dtype": SAFETENSORS[dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(head).encode()
    data = b"".join(bytes(t.view(torch.uint8).flatten().tolist()) for t in tensors.values())
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(shift) + data)
    return tensors


class Room:
    """A store as the engine opens it, with exactly the memory that the plan names."""

    def __init__(
        self, spec: ModelSpec, checkpoint: Checkpoint, place: tuple[int, int], device: Device, dtype: torch.dtype,
        depth: int = 3, sep_layer: bool = True, packing: Packing | None = None, to_int8: bool = False,
    ) -> None:  # fmt: skip
        policy = Policy(
            percent=(*place, 100, 0, 100, 0), sep_layer=sep_layer, compress_weight=packing is not None,
            weight_bits=packing.bits if packing else 4, int8_compute=to_int8,
        )  # fmt: skip
        shape = Shape(rows=1, micro_batches=1, tokens=1, slots=(1,))
        plan = memory_plan(spec, policy, shape, dtype.itemsize, device.is_host, Depth(depth, 1, 1))
        self.memory = {b.tier: host_buffer(b.nbytes) for b in plan.buffers if b.name == "weights"}
        self.ring = Ring(host_buffer(plan.size("weight ring"))) if plan.size("weight ring") else None
        self.lanes = Lanes({"disk_read": 2, "h2d": 1}, Timeline())
        self.layers = spec.layers(sep_layer)
        shares, form = tier_shares(policy.weight_shares, device.is_host), WeightForm(dtype.itemsize, packing, to_int8)
        self.store = WeightStore(self.layers, checkpoint, shares, dtype, Mover(device, self.lanes), form)
        self.unpacked = host_buffer(plan.size("unpacked weights")) if packing else None
        self.store.load_resident(self.memory)

    def stream(self, sweeps: int, ahead: int, int8: Workspace | None = None) -> WeightStream:
        units = tuple(layer.unit for layer in self.layers.layers)
        return WeightStream(self.store, self.ring, weight_sequence(sweeps, units), ahead, self.unpacked, int8)

    def close(self) -> None:
        self.lanes.close()
        self.store.close()


@contextmanager
def opened(*args: Any, **more: Any) -> Iterator[Room]:
    room = Room(*args, **more)
    try:
        yield room
    finally:
        room.close()


@pytest.fixture(scope="module", params=[(torch.float32, 0), (torch.bfloat16, 0), (torch.bfloat16, 1)], ids=str)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Any]:
    """By tied or not: (spec, checkpoint, its tensors)."""
    found = {}
    for tied in (True, False):
        folder, spec = tmp_path_factory.mktemp("weights"), spec_of(tied)
        tensors = write_checkpoint(folder, spec, *request.param)
        found[tied] = spec, match(spec, read_index(folder), folder), tensors
    return found


@pytest.fixture
def small(tmp_path: Path) -> tuple[ModelSpec, Checkpoint, dict[str, torch.Tensor]]:
    spec = spec_of(tied=True)
    tensors = write_checkpoint(tmp_path, spec, torch.float32, 0)
    return spec, match(spec, read_index(tmp_path), tmp_path), tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("place", PLACES)
def test_layers_open_what_the_file_holds(
    stored: dict[bool, Any], place: tuple[int, int], device: type[Device], dtype: torch.dtype
) -> None:
    """Over two sweeps, through a ring that is reused, in the dtype that is computed in."""
    for tied, sep_layer in ((True, True), (False, False)):
        spec, checkpoint, tensors = stored[tied]
        with opened(spec, checkpoint, place, device(), dtype, sep_layer=sep_layer) as room:
            stream = room.stream(2, ahead=len(room.layers.layers))
            for layer in room.layers.layers * 2:
                stream.prefetch()
                w = stream.open(layer.unit, NOTHING)
                assert set(w) == {t.role for t in room.layers.units[layer.unit].tensors}
                for t in room.layers.units[layer.unit].tensors:
                    assert torch.equal(torch.cat(w[t.role]), tensors[t.name].to(dtype)), t.name
            stream.drain()


@pytest.mark.parametrize("place", PLACES)
def test_twenty_percent_is_twenty_percent_of_every_matrix(small: Any, place: tuple[int, int]) -> None:
    spec, checkpoint, _ = small
    with opened(spec, checkpoint, place, StandInDevice(), torch.float32) as room:
        arenas = {tier: m.data_ptr() for tier, m in room.memory.items()}
        for unit in range(len(room.layers.units)):
            region = taken(room, unit)
            for t in room.layers.units[unit].tensors:
                parts = room.store.open_unit(unit, region)[t.role]
                assert all(p.shape[0] % ROW_BLOCK == 0 for p in parts[:-1])
                on_device = sum(len(p) for p in parts if within(p, arenas.get("device"), room.memory.get("device")))
                share = place[0] / 100 if len(t.shape) > 1 else 1.0
                assert abs(on_device - share * t.shape[0]) <= ROW_BLOCK


def taken(room: Room, unit: int) -> Region | None:
    """A region of the unit alone, loaded."""
    if not room.store.nbytes(unit):
        return None
    assert room.ring is not None
    region = room.ring.take(room.store.nbytes(unit))
    assert region is not None
    for done in room.store.load(unit, region):
        done.wait()
    room.ring.give_back(region)
    return region


def within(part: torch.Tensor, start: int | None, arena: torch.Tensor | None) -> bool:
    return start is not None and arena is not None and start <= part.data_ptr() < start + arena.numel()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("place", PLACES)
def test_resident_rows_fill_exactly_the_planned_memory(
    small: Any, place: tuple[int, int], device: type[Device]
) -> None:
    spec, checkpoint, _ = small
    with opened(spec, checkpoint, place, device(), torch.float32) as room:
        arenas = {tier: m.data_ptr() for tier, m in room.memory.items()}
        ends = dict.fromkeys(arenas, 0)
        for part in room.store._resident.values():
            tier = next(t for t in arenas if within(part, arenas[t], room.memory[t]))
            ends[tier] = max(ends[tier], part.data_ptr() + part.nbytes - arenas[tier])
        assert {tier: round_up(end, ALIGN) for tier, end in ends.items()} == {
            tier: m.numel() for tier, m in room.memory.items()
        }


def test_tied_head_and_next_embedding_are_loaded_once(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
            stream.open(layer.unit, NOTHING)
        assert loads == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_only_streamed_rows_are_read_again_each_sweep(small: Any, device: type[Device]) -> None:
    spec, checkpoint, tensors = small
    every, vectors = (sum(t.nbytes for t in tensors.values() if t.dim() <= n) for n in (2, 1))
    with opened(spec, checkpoint, (50, 50), device(), torch.float32) as room:
        before = dict(room.lanes.bytes_moved)
        for unit in range(len(room.layers.units)):
            taken(room, unit)
        host = room.memory["host"]
        on_host = sum(p.nbytes for p in room.store._resident.values() if within(p, host.data_ptr(), host))
        crossing = device is not HostDevice
        assert before["h2d"] == (every - on_host) * crossing  # once, and straight to their home
        moved = {lane: n - before[lane] for lane, n in room.lanes.bytes_moved.items()}
        assert moved == {"disk_read": 0, "h2d": on_host * crossing}
    with opened(spec, checkpoint, (0, 0), device(), torch.float32) as room:
        before = dict(room.lanes.bytes_moved)
        for unit in range(len(room.layers.units)):
            taken(room, unit)
        moved = {lane: n - before[lane] for lane, n in room.lanes.bytes_moved.items()}
        assert 0 <= moved["disk_read"] - (every - vectors) <= 2 * PAGE * len(tensors)
        assert moved["h2d"] == (every - vectors) * crossing


def test_a_file_that_shrinks_during_the_run_ends_it_with_its_name(small: Any) -> None:
    spec, checkpoint, _ = small
    with opened(spec, checkpoint, (0, 0), HostDevice(), torch.float32) as room:
        os.truncate(checkpoint.folder / "model.safetensors", 5 * PAGE)
        stream = room.stream(1, ahead=4)
        stream.prefetch()
        with pytest.raises(TransferError, match=r"model\.safetensors: ends at byte "):
            _ = [stream.open(layer.unit, NOTHING) for layer in room.layers.layers]


def test_a_unit_that_is_open_stays_open(small: Any) -> None:
    """The micro-batches of a layer share its load."""
    spec, checkpoint, _ = small
    with opened(spec, checkpoint, (0, 0), HostDevice(), torch.float32) as room:
        stream = room.stream(1, ahead=0)
        first = stream.open(0, NOTHING)
        assert stream.open(0, NOTHING) is first
        assert stream.open(1, NOTHING) is not first


# ---- blocked

WIDE = {"hidden_size": 128, "ffn_dim": 320, "word_embed_proj_dim": 128}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Any]:
    """A bf16 model that can be blocked, by tied or not: (spec, checkpoint, its tensors)."""
    if isinstance(block_rows(torch.zeros(64, 64, dtype=torch.bfloat16))[0], torch.Tensor):
        pytest.skip("torch does not block here")
    found = {}
    for tied in (True, False):
        folder = tmp_path_factory.mktemp("wide")
        spec = spec_from_config("tiny", {**CONFIG, **WIDE, "tie_word_embeddings": tied}, "here")
        tensors = write_checkpoint(folder, spec, torch.bfloat16, 0)
        found[tied] = spec, match(spec, read_index(folder), folder), tensors
    return found


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("place", PLACES)
def test_what_is_multiplied_where_it_lives_is_blocked(
    wide: dict[bool, Any], place: tuple[int, int], device: type[Device], tied: bool
) -> None:
    """Beside streamed rows of the same matrix, and in the planned memory. Tables, what is streamed and what a device of
    its own computes on are not."""
    spec, checkpoint, tensors = wide[tied]
    with opened(spec, checkpoint, place, device(), torch.bfloat16) as room:
        tables = {t.name for t in (*spec.embedding, *(spec.head if tied else ()))}
        resident = sum(place) if device is HostDevice else 0
        blocked = 0
        for unit in range(len(room.layers.units)):
            region = taken(room, unit)
            for t in room.layers.units[unit].tensors:
                parts = room.store.open_unit(unit, region)[t.role]
                here = [p for p in parts if isinstance(p, BlockedRows)]
                assert not here or (t.name not in tables and len(t.shape) == 2)
                assert all(any(within(p.memory, m.data_ptr(), m) for m in room.memory.values()) for p in here)
                blocked += sum(map(len, here))
                if len(t.shape) == 2 and t.name not in tables:
                    assert sum(map(len, here)) == round(t.shape[0] * resident / 100 / ROW_BLOCK) * ROW_BLOCK // 64 * 64
                    x = torch.randn(5, t.shape[1]).bfloat16()
                    out = linear(x, parts, None, torch.empty(5, t.shape[0], dtype=torch.bfloat16))
                    want = x.float() @ tensors[t.name].float().t()
                    assert torch.allclose(out.float(), want, atol=0.3, rtol=2**-7)
                else:
                    assert torch.equal(torch.cat(parts), tensors[t.name])
        assert bool(blocked) == bool(resident)


def test_fp32_is_not_blocked(wide: dict[bool, Any]) -> None:
    spec, checkpoint, tensors = wide[False]
    with opened(spec, checkpoint, (100, 0), HostDevice(), torch.float32) as room:
        for number, unit in enumerate(room.layers.units):
            for role, parts in room.store.open_unit(number, None).items():
                name = next(t.name for t in unit.tensors if t.role == role)
                assert torch.equal(torch.cat(parts), tensors[name].float())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("place", PLACES)
def test_int8_rows_are_blocked_where_they_live(
    wide: dict[bool, Any], tmp_path: Path, place: tuple[int, int], device: type[Device], tied: bool
) -> None:
    """A tied table too, as blocked rows can be looked up; in the planned memory. All is as it is from rows in order."""
    spec, source, tensors = wide[tied]
    checkpoint = pack_checkpoint(spec, source, tmp_path, INT8)
    with opened(spec, checkpoint, place, device(), torch.bfloat16, packing=INT8) as room:
        tables = {t.name for t in spec.embedding} if not tied else set()
        resident = sum(place) if device is HostDevice else 0
        sizes = dict.fromkeys(("int8 inputs", "int8 input scales", "int8 weight scales", "int8 sums"), 2**16)
        ws = Workspace(torch.empty(2**18, dtype=torch.uint8), sizes, torch.bfloat16)
        for number, unit in enumerate(room.layers.units):
            parts = room.store.for_products(number, room.store.open_unit(number, taken(room, number)), ws)
            for t in [t for t in unit.tensors if len(t.shape) == 2]:
                here = [p.packed for p in parts[t.role] if isinstance(p, Int8Rows)]
                there = [p for p in here if isinstance(p, BlockedInt8)]
                assert all(any(within(p.memory, m.data_ptr(), m) for m in room.memory.values()) for p in there)
                rows = round(t.shape[0] * resident / 100 / ROW_BLOCK) * ROW_BLOCK // 64 * 64
                assert sum(map(len, there)) == (0 if t.name in tables else rows)
                whole, x = (Int8Rows(pack_int8_rows(tensors[t.name]), t.shape[1], ws),), torch.randn(5, t.shape[1])
                assert torch.equal(*(linear(x, p, None, torch.empty(5, t.shape[0])) for p in (whole, parts[t.role])))
                ids, found = torch.tensor([0, t.shape[0] - 1, t.shape[0] // 2]), torch.zeros(2, 3, t.shape[1])
                assert torch.equal(lookup(ids, whole, found[0]), lookup(ids, parts[t.role], found[1]))


# ---- packed


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[bool, int], Any]:
    """By tied or not and bits: (spec, packed checkpoint, tensors that it was made from)."""
    found = {}
    for tied in (True, False):
        folder, spec = tmp_path_factory.mktemp("weights"), spec_of(tied)
        tensors = write_checkpoint(folder, spec, torch.bfloat16, 1)
        checkpoint = match(spec, read_index(folder), folder)
        for bits in (4, 8):
            found[tied, bits] = spec, pack_checkpoint(spec, checkpoint, folder, Packing(bits)), tensors
    return found


@pytest.mark.parametrize(("dtype", "bits", "tied"), [(torch.float32, 4, True), (torch.bfloat16, 8, False)])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("place", PLACES)
def test_packed_layers_are_unpacked_into_the_planned_memory(
    packed: dict[tuple[bool, int], Any], place: tuple[int, int], device: type[Device], dtype: torch.dtype, bits: int,
    tied: bool,
) -> None:  # fmt: skip
    """Matrices whole, as their values were rounded; vectors as the file holds them. A region is free once unpacked."""
    spec, checkpoint, tensors = packed[tied, bits]
    with opened(spec, checkpoint, place, device(), dtype, sep_layer=tied, packing=Packing(bits)) as room:
        stream = room.stream(2, ahead=len(room.layers.layers))
        for layer in room.layers.layers * 2:
            stream.prefetch()
            if layer.unit != stream.unit:
                stream.open(layer.unit, NOTHING)
                stream.unpack(lambda: NOTHING)
            w = stream.open(layer.unit, NOTHING)
            for t in room.layers.units[layer.unit].tensors:
                want = tensors[t.name]
                if want.dim() == 2:
                    assert len(w[t.role]) == 1
                    want = unpack_rows_reference(pack_rows(want, bits), bits, torch.empty(want.shape, dtype=dtype))
                assert torch.equal(torch.cat(w[t.role]), want.to(dtype)), t.name
        stream.drain()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("place", PLACES)
def test_4_bits_become_int8_rows_in_the_planned_memory(
    wide: dict[bool, Any], tmp_path: Path, place: tuple[int, int], device: type[Device], tied: bool
) -> None:
    """However a matrix is split: products and looked-up rows are those of its int8 rows in order, in every sweep."""
    spec, source, tensors = wide[tied]
    checkpoint = pack_checkpoint(spec, source, tmp_path, Packing(4))
    with opened(spec, checkpoint, place, device(), torch.bfloat16, packing=Packing(4), to_int8=True) as room:
        sizes = dict.fromkeys(("int8 inputs", "int8 input scales", "int8 weight scales", "int8 sums"), 2**16)
        ws = Workspace(torch.empty(2**18, dtype=torch.uint8), sizes, torch.bfloat16)
        stream = room.stream(2, ahead=len(room.layers.layers), int8=ws)
        for layer in room.layers.layers * 2:
            stream.prefetch()
            if layer.unit != stream.unit:
                stream.open(layer.unit, NOTHING)
                stream.unpack(lambda: NOTHING)
            parts = stream.open(layer.unit, NOTHING)
            for t in room.layers.units[layer.unit].tensors:
                if len(t.shape) == 1:
                    assert torch.equal(torch.cat(parts[t.role]), tensors[t.name])
                    continue
                rows = torch.empty(t.shape[0], INT8.row_bytes(t.shape[1]), dtype=torch.uint8)
                requantise_rows_reference(pack_rows(tensors[t.name], 4), rows, t.shape[1])
                whole, x = (Int8Rows(rows, t.shape[1], ws),), torch.randn(5, t.shape[1])
                found = torch.empty(2, 5, t.shape[0])
                assert torch.equal(linear(x, whole, None, found[0]), linear(x, parts[t.role], None, found[1]))
                ids, found = torch.tensor([0, t.shape[0] - 1, t.shape[0] // 2]), torch.zeros(2, 3, t.shape[1])
                assert torch.equal(lookup(ids, whole, found[0]), lookup(ids, parts[t.role], found[1]))
        stream.drain()


def test_a_region_is_taken_again_after_what_unpacked_it(packed: dict[tuple[bool, int], Any]) -> None:
    """Its next writer waits for the fence of the unpacking, not for the compute that follows."""
    spec, checkpoint, _ = packed[True, 4]
    with opened(spec, checkpoint, (0, 0), HostDevice(), torch.float32, depth=1, packing=Packing(4)) as room:
        stream, fence = room.stream(2, ahead=1), Done()
        (first, second) = (room.layers.layers[i].unit for i in range(2))
        assert room.ring is not None
        stream.open(first, NOTHING)
        stream.unpack(lambda: fence)
        region = room.ring.take(room.store.nbytes(second))
        assert region is not None and region.after == [fence]
        fence.finish_one()

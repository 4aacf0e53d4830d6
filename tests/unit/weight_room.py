"""A store of weights as the engine opens it, and checkpoints for it, for tests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flexgen_h2o.checkpoint import Checkpoint
from flexgen_h2o.checkpoint.formats import Codec
from flexgen_h2o.checkpoint.formats.groupwise import Groupwise
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.model import ModelSpec, WeightUnit
from flexgen_h2o.core.timeline import Timeline
from flexgen_h2o.engine.loop import WeightStream
from flexgen_h2o.engine.memory import MemoryPlanner
from flexgen_h2o.engine.memory_plan import BlockShape, Depth
from flexgen_h2o.engine.stores import WeightStore
from flexgen_h2o.kernels.int8 import BUFFERS, Int8Rows
from flexgen_h2o.kernels.linear import DenseRows, RowParts
from flexgen_h2o.kernels.workspace import Workspace
from flexgen_h2o.models import spec_from_config
from flexgen_h2o.tiers.device import Device, HostDevice, StandInDevice, host_buffer
from flexgen_h2o.tiers.stream import NOTHING, Region, Ring, tier_shares
from flexgen_h2o.tiers.transfers import Lanes, Mover

CONFIG: dict[str, Any] = {
    "model_type": "opt",
    "vocab_size": 200,
    "hidden_size": 80,
    "num_hidden_layers": 2,
    "ffn_dim": 160,
    "max_position_embeddings": 30,
    "num_attention_heads": 4,
    "word_embed_proj_dim": 80,
    "activation_function": "relu",
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "do_layer_norm_before": True,
}
SAFETENSORS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
# Percent of the weights on device and host, and where the device is: what is on the host is
# streamed to one of its own.
PAIRS: list[tuple[tuple[int, int], type[Device]]] = [
    ((100, 0), HostDevice),
    ((0, 100), StandInDevice),
    ((0, 0), HostDevice),
    ((0, 0), StandInDevice),
    ((20, 80), StandInDevice),
    ((20, 30), HostDevice),
    ((20, 30), StandInDevice),
    ((0, 50), HostDevice),
]


def spec_of(tied: bool) -> ModelSpec:
    return spec_from_config("tiny", {**CONFIG, "tie_word_embeddings": tied}, "here")


def write_checkpoint(
    folder: Path, spec: ModelSpec, dtype: torch.dtype, shift: int
) -> dict[str, torch.Tensor]:
    """model.safetensors with all tensors of `spec` behind a tensor of `shift` bytes, which spoils
    their alignment."""
    tensors = {
        t.name: torch.randn(t.shape).to(dtype)
        for unit in spec.layers(True).units
        for t in unit.tensors
    }
    head: dict[str, Any] = {"pad": {"dtype": "U8", "shape": [shift], "data_offsets": [0, shift]}}
    end = shift
    for name, tensor in tensors.items():
        begin = end
        end = end + tensor.nbytes
        head[name] = {
            "dtype": SAFETENSORS[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(head).encode()
    data = b"".join(bytes(t.view(torch.uint8).flatten().tolist()) for t in tensors.values())
    (folder / "model.safetensors").write_bytes(
        len(text).to_bytes(8, "little") + text + bytes(shift) + data
    )
    return tensors


class Room:
    """A store as the engine opens it, with exactly the memory that the plan names."""

    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        place: tuple[int, int],
        device: Device,
        dtype: torch.dtype,
        depth: int = 3,
        sep_layer: bool = True,
        form: Codec | None = None,
    ) -> None:
        policy = Policy(
            percent=(*place, 100, 0, 100, 0),
            sep_layer=sep_layer,
            compress_weight=isinstance(form, Groupwise),
            weight_bits=form.bits if isinstance(form, Groupwise) else 4,
            int8_compute=form is not None and form.in_int8,
        )
        shape = BlockShape(rows=1, micro_batches=1, tokens=1, slots=(1,))
        plan = MemoryPlanner(spec, policy, dtype.itemsize, device.is_host).plan(
            shape, Depth(depth, 1, 1)
        )
        self.memory = {b.tier: host_buffer(b.nbytes) for b in plan.buffers if b.name == "weights"}
        self.ring = (
            Ring(host_buffer(plan.size("weight ring"))) if plan.size("weight ring") else None
        )
        self.lanes = Lanes({"disk_read": 2, "h2d": 1}, Timeline())
        self.layers = spec.layers(sep_layer)
        shares = tier_shares(policy.weight_shares, device.is_host)
        decoded = (
            host_buffer(plan.size("unpacked weights"))
            if form is not None and form.decoded_at == "load"
            else None
        )
        self.store = WeightStore(
            self.layers,
            checkpoint,
            shares,
            form or Codec(dtype.itemsize),
            Mover(device, self.lanes),
            int8_workspace(dtype),
            decoded,
        )
        self.store.load_resident(self.memory)

    def stream(self, sweeps: int, ahead: int) -> WeightStream:
        return WeightStream(self.store, self.ring, self.layers.layers, sweeps, ahead)

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


def unpacked_layers(
    room: Room, stream: WeightStream
) -> Iterator[tuple[WeightUnit, Mapping[str, RowParts]]]:
    """Two sweeps of a stream, each layer's unit and its tensors, unpacked once a unit; the region
    is given back."""
    for layer in room.layers.layers * 2:
        stream.prefetch()
        if layer.unit != stream.unit:
            stream.open(layer.unit, lambda: NOTHING)
            stream.decode(lambda: NOTHING)
        yield room.layers.units[layer.unit], stream.open(layer.unit, lambda: NOTHING)
    stream.drain()


def int8_workspace(dtype: torch.dtype = torch.bfloat16) -> Workspace:
    """Room for products in int8 of the shapes here."""
    return Workspace(
        torch.empty(len(BUFFERS) * 2**16, dtype=torch.uint8), dict.fromkeys(BUFFERS, 2**16), dtype
    )


def values(parts: RowParts) -> torch.Tensor:
    """Of rows that are not packed, together."""
    return torch.cat([part.rows for part in parts if isinstance(part, DenseRows)])


def int8_values(parts: RowParts) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers (n, columns) that int8 rows stand for, and their scales (n, 1)."""
    numbers = []
    scales = []
    for part in parts:
        assert isinstance(part, Int8Rows)
        numbers.append(torch.empty(len(part), part.columns))
        part.look_up(torch.arange(len(part)), numbers[-1])
        scales.append(part.scales)
    return torch.cat(numbers), torch.cat(scales).unsqueeze(1)


def within(part: torch.Tensor, start: int | None, arena: torch.Tensor | None) -> bool:
    return (
        start is not None and arena is not None and start <= part.data_ptr() < start + arena.numel()
    )

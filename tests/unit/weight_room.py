"""A store of weights as the engine opens it, and checkpoints for it, for tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
from flexgen_h2o.tiers.device import Device, host_buffer
from flexgen_h2o.tiers.stream import NOTHING, Ring, tier_shares
from flexgen_h2o.tiers.transfers import Lanes, Mover


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

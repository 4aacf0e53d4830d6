"""The engine holds what the plan says, buffer by buffer, and gives all of it back."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import save_file

from flexgen_h2o.checkpoint import Checkpoint, match, read_index
from flexgen_h2o.core.config import TIERS, Policy
from flexgen_h2o.core.errors import DoesNotFitError
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.core.timeline import Timeline
from flexgen_h2o.core.units import READ_THREADS, STAGING_BYTES, STAGING_SLOTS, WRITE_THREADS
from flexgen_h2o.engine.distributed import ModelPart
from flexgen_h2o.engine.memory import MemoryPlanner
from flexgen_h2o.engine.memory_plan import OVERLAPPED, BlockShape, MemoryPlan
from flexgen_h2o.engine.resources import Engine
from flexgen_h2o.kvcache.eviction import Full
from flexgen_h2o.tiers.device import Device, HostDevice, StandInDevice
from flexgen_h2o.tiers.disk import DirectFile
from tests.unit.planner.made_up import small_spec

SHAPE = BlockShape(
    rows=3, micro_batches=2, tokens=20, slots=(15, 70), record=("positions", "scores")
)
UNLIMITED: dict[str, int | None] = dict.fromkeys(TIERS)
PERCENTS = [
    (100, 0, 100, 0, 100, 0),
    (0, 100, 0, 100, 0, 100),
    (0, 0, 0, 0, 0, 0),
    (30, 30, 30, 30, 30, 30),
    (0, 50, 50, 0, 0, 100),
    (100, 0, 0, 50, 0, 0),
]
DEVICES = (HostDevice, StandInDevice)
TAKEN_BY_USERS = ("temporaries", "staging")
Open = Callable[..., Engine]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelSpec, Checkpoint]:
    folder = tmp_path_factory.mktemp("model")
    spec = small_spec()
    tensors = {
        t.name: torch.randn(t.shape) for unit in spec.layers(True).units for t in unit.tensors
    }
    save_file(tensors, folder / "model.safetensors")
    return spec, match(spec, read_index(folder), folder)


@pytest.fixture
def open_engine(model: tuple[ModelSpec, Checkpoint], tmp_path: Path) -> Open:
    spec, checkpoint = model

    def open_one(
        policy: Policy, device: Device, budgets: dict[str, int | None] = UNLIMITED
    ) -> Engine:
        plan = MemoryPlanner(spec, policy, 4, device.is_host).plan(SHAPE, OVERLAPPED[0])
        part = ModelPart(spec, Full())
        site = (device, budgets, tmp_path / "offload")
        return Engine(part, checkpoint, policy, plan, torch.float32, *site, Timeline())

    return open_one


def planned(plan: MemoryPlan) -> dict[tuple[str, str], int]:
    return {(b.name, b.tier): b.nbytes for b in plan.buffers}


@pytest.mark.parametrize(
    ("device", "percent", "on_host"),
    [
        (device, percent, (i + j) % 2 == 0)
        for i, device in enumerate(DEVICES)
        for j, percent in enumerate(PERCENTS)
    ],
)
def test_every_planned_buffer_is_taken_at_its_size(
    open_engine: Open, device: type[Device], percent: tuple[int, ...], on_host: bool
) -> None:
    policy = Policy(percent=percent, cpu_cache_compute=on_host)  # type: ignore[arg-type]
    with open_engine(policy, device()) as engine:
        plan = planned(engine.plan)
        memory = {place: buffer.numel() for place, buffer in engine._buffers.items()}
        files = {(name, "disk"): file.path.stat().st_size for name, file in engine._files.items()}
        assert not any(tier == "disk" for _, tier in memory)
        assert {**memory, **files} == {
            place: n for place, n in plan.items() if place[0] not in TAKEN_BY_USERS
        }
        kinds = engine.peak_bytes_by_kind.values()
        assert engine.peak_bytes == {tier: sum(one[tier] for one in kinds) for tier in TIERS}
        slots = 1 if device is HostDevice else STAGING_SLOTS  # of each thread that reads
        assert plan["staging", "host"] == (READ_THREADS * slots + WRITE_THREADS) * STAGING_BYTES
        for name in ("weight ring", "cache ring", "hidden ring"):
            ring = engine.ring(name)
            assert (ring.capacity if ring is not None else 0) == engine.plan.size(name)


@pytest.fixture
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """Threads, files and descriptors are afterwards what they were before."""
    threads = set(threading.enumerate())
    descriptors = len(os.listdir("/proc/self/fd"))
    yield
    assert set(threading.enumerate()) == threads
    assert list(tmp_path.glob("offload/*")) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


DISK = Policy(percent=(0, 0, 0, 0, 0, 0))


@pytest.mark.usefixtures("nothing_left")
def test_an_engine_leaves_no_thread_no_file_and_no_descriptor(
    open_engine: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that opens, and one that does not."""
    with open_engine(DISK, StandInDevice()):
        assert len(threading.enumerate()) > 1
        assert len(list(tmp_path.glob("offload/*"))) == 1  # its folder
    (tmp_path / "offload").rmdir()
    with pytest.raises(DoesNotFitError, match="on the disk tier"):
        open_engine(DISK, HostDevice(), {"device": 0, "host": None, "disk": 1})
    assert not (tmp_path / "offload").exists()
    monkeypatch.setattr(DirectFile, "read", MagicMock(side_effect=OSError("no reads today")))
    with pytest.raises(OSError, match="no reads today"):
        open_engine(Policy(percent=(50, 0, 0, 0, 0, 0)), HostDevice())

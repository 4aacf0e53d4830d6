"""The engine's own weight reader without its compute: what the disk gives to the same requests."""

from __future__ import annotations

import math
import time
from collections import deque
from pathlib import Path
from types import TracebackType

import torch

from bench.common import storage_read_bytes
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.timeline import Timeline
from flexgen_h2o.engine.memory import MemoryPlanner
from flexgen_h2o.engine.resources import LANE_THREADS
from flexgen_h2o.engine.stores import WeightStore
from flexgen_h2o.kernels.workspace import Workspace
from flexgen_h2o.llm import RANDOM_WEIGHTS_SEED
from flexgen_h2o.models.load import Model, find_checkpoint
from flexgen_h2o.tiers.device import HostDevice, host_buffer
from flexgen_h2o.tiers.stream import Done, Region, Ring, wait_all
from flexgen_h2o.tiers.transfers import Lanes, Mover


class Reader:
    """Reads a model's disk weights unit by unit in the order of a sweep, into a ring that is always
    full of requests.

    Same files, byte ranges, request sizes, threads and kind of buffer as the engine's; nothing
    computes meanwhile. The ring has room for the largest unit twice.
    """

    def __init__(
        self,
        model: Model,
        policy: Policy,
        dtype: str,
        offload_dir: Path,
    ) -> None:
        self._lanes = Lanes(LANE_THREADS, Timeline())
        mover = Mover(HostDevice(), self._lanes)
        workspace = Workspace(torch.empty(0, dtype=torch.uint8), {}, getattr(torch, dtype))
        itemsize = workspace.dtype.itemsize
        memory = MemoryPlanner(model.spec, policy, itemsize, device_is_host=True)
        layers = memory.layers
        form = memory.form
        checkpoint = find_checkpoint(
            model,
            dtype,
            offload_dir,
            RANDOM_WEIGHTS_SEED,
            True,
            form if form.converted_by else None,
        )
        self._store = WeightStore(layers, checkpoint, memory.weight_shares, form, mover, workspace)
        self._units = [unit for unit in range(len(layers.units)) if self._store.nbytes(unit)]
        sizes = [self._store.nbytes(unit) for unit in self._units]
        self.nbytes = sum(sizes)  # of a sweep
        self._ring = Ring(host_buffer(2 * max(sizes)))

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lanes.close()
        self._store.close()

    def read(self, sweeps: int, most: float = math.inf) -> tuple[int, float]:
        """Bytes and seconds of so many sweeps' reads, which end after `most` bytes."""
        before = storage_read_bytes()
        start = time.perf_counter()
        under_way: deque[tuple[Region, list[Done]]] = deque()
        for unit in self._units * sweeps:
            if storage_read_bytes() - before >= most:
                break
            while (region := self._ring.take(self._store.nbytes(unit))) is None:
                self._end(*under_way.popleft())
            under_way.append((region, self._store.load(unit, region)))
        while under_way:
            self._end(*under_way.popleft())
        return storage_read_bytes() - before, time.perf_counter() - start

    def _end(self, region: Region, loads: list[Done]) -> None:
        wait_all(loads)
        self._ring.give_back(region)

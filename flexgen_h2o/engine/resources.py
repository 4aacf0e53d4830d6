"""Everything that a run holds.

That is buffers by tier, transfer lanes, and stores of weights, KV cache and hidden states. Every
byte is allocated here, as the memory plan lists it, before the first sweep.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from pathlib import Path
from types import TracebackType
from typing import ClassVar

import torch

from flexgen_h2o.checkpoint.safetensors import Checkpoint
from flexgen_h2o.core import forks, interrupts
from flexgen_h2o.core.config import TIERS, Policy
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.model import with_head_rows
from flexgen_h2o.core.timeline import Timeline
from flexgen_h2o.core.units import READ_THREADS, WRITE_THREADS
from flexgen_h2o.engine.distributed import ModelPart, Wire
from flexgen_h2o.engine.memory import MemoryPlanner
from flexgen_h2o.engine.memory_plan import MemoryPlan, packing_of
from flexgen_h2o.engine.stores import HiddenStore, WeightStore
from flexgen_h2o.kernels.ops import Layers
from flexgen_h2o.kernels.warm_up import warm_up_card
from flexgen_h2o.kernels.workspace import Workspace
from flexgen_h2o.kvcache.part import KVPart, common_parts
from flexgen_h2o.kvcache.store import CacheStore
from flexgen_h2o.tiers.device import Device, host_buffer
from flexgen_h2o.tiers.disk import DirectFile, Scratch
from flexgen_h2o.tiers.stream import Ring
from flexgen_h2o.tiers.transfers import Lanes, Mover

LANE_THREADS = {"disk_read": READ_THREADS, "disk_write": WRITE_THREADS, "h2d": 1, "d2h": 1}
# Kinds of bytes that lanes move, by the last word of the operation's name.
KINDS = {"weight": "weights", "cache": "kv", "hidden": "hidden"}
DROPPED_PATIENCE_S = 10.0
# Host buffers whose bytes are copied to a GPU and back. They are pinned.
COPIED_HOMES = ("weights", "cache", "hidden")


class Engine:
    """The resources of a run, as a context manager.

    Leaving it ends the worker threads and removes the scratch folder. The end of the process and of
    the last reference do the same: threads and clean-up hold no reference to the engine.

    budgets: bytes that each tier may hold; None: any number.
    offload_dir: folder of the disk tier.
    """

    _first_process: ClassVar[int | None] = None  # the id of the process that opened an engine

    def __init__(
        self,
        part: ModelPart,
        checkpoint: Checkpoint,
        policy: Policy,
        plan: MemoryPlan,
        dtype: torch.dtype,
        device: Device,
        budgets: dict[str, int | None],
        offload_dir: Path,
        timeline: Timeline,
    ) -> None:
        self.check_not_forked()
        spec = with_head_rows(part.spec, plan.head_rows)
        plan.check(budgets)
        checkpoint.check_unchanged()
        Engine._first_process = os.getpid()
        self.spec = spec
        self.policy = policy
        self.plan = plan
        self.dtype = dtype
        self.device = device
        self.timeline = timeline
        self.budgets = budgets
        self._checkpoint = checkpoint  # its folder counts as in use as long as this object exists
        self.memory = MemoryPlanner(spec, policy, dtype.itemsize, device.is_host)
        self.layers = self.memory.layers
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}
        self._files: dict[str, DirectFile] = {}
        self.lanes = Lanes(LANE_THREADS, timeline)
        self.mover = Mover(device, self.lanes, pins=policy.pin_weight)
        shares = self.memory.weight_shares
        form = self.memory.form
        with contextlib.ExitStack() as stack:
            stack.callback(self.lanes.close)
            self._take_buffers(offload_dir, stack)
            decoded = self._buffers.get(("unpacked weights", device.tier))
            sizes = dict(plan.workspace)
            self.workspace = Workspace(self._buffers["workspace", device.tier], sizes, dtype)
            self.weights = WeightStore(
                self.layers, checkpoint, shares, form, self.mover, self.workspace, decoded
            )
            stack.callback(self.weights.close)
            # The stack unwinds in reverse: threads end before the files that they use.
            stack.callback(self.lanes.close)
            interrupts.check()  # a signal may have been lost during an import
            self.weights.load_resident(self._arenas("weights"))
            checkpoint.check_unchanged()
            overlay = self._buffers.get(
                ("cache overlay", "host"), torch.empty(0, dtype=torch.uint8, device="cpu")
            )
            self.cache = CacheStore(
                self.mover,
                dtype,
                self._arenas("cache"),
                self._files.get("cache"),
                overlay,
                self._arenas("cache record"),
                self.memory.attends_on_host,
            )
            shares = self.memory.hidden_shares
            arenas = self._arenas("hidden")
            count = len(self.layers.layers)
            self.hidden = HiddenStore(
                self.mover,
                self.memory.hidden_row_bytes,
                dtype,
                shares,
                count,
                arenas,
                self._files.get("hidden"),
            )
            self.wire: Wire | None = None  # the link to the other ranks of a pipeline
            if part.pipeline is not None:
                self.wire = Wire(part.pipeline, device, self._buffers["wire", device.tier])
                stack.callback(self.wire.close)
            self._compile_for_card(part)
            self._stack = stack.pop_all()
        self._dropped = weakref.finalize(self, _close_dropped, self._stack, os.getpid())

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._dropped.detach() is not None:
            self._stack.close()

    @staticmethod
    def check_not_forked() -> None:
        """Raise UsageError in a child of os.fork() whose parent has opened an engine.

        The threads of the engine and of OpenMP do not exist in the child, which would wait for them
        for ever.
        """
        forks.check_threads()
        if Engine._first_process not in (None, os.getpid()):
            raise UsageError(
                "this process was forked from one whose LLM has run, and cannot run one: start it "
                "with "
                "multiprocessing's 'spawn', or fork before the first generate"
            )

    @property
    def io_bytes_by_kind(self) -> dict[str, dict[str, int]]:
        """Bytes moved since the engine was opened, by kind and lane."""
        found = {kind: dict.fromkeys(LANE_THREADS, 0) for kind in KINDS.values()}
        for (lane, name), nbytes in list(self.lanes.bytes_by_name.items()):
            found[KINDS[name.rpartition("_")[2]]][lane] += nbytes
        return found

    @property
    def peak_bytes(self) -> dict[str, int]:
        """The most bytes that each tier held. Disk is the offload dir, without the checkpoint."""
        return {tier: self.plan.bytes_on(tier) for tier in TIERS}

    @property
    def peak_bytes_by_kind(self) -> dict[str, dict[str, int]]:
        """The most bytes by kind and tier.

        Kinds are those of KINDS, and the plan's other buffers by name.
        """
        found = {kind: dict.fromkeys(TIERS, 0) for kind in KINDS.values()}
        for b in self.plan.buffers:
            held = found.setdefault(KINDS.get(b.name, b.name), dict.fromkeys(TIERS, 0))
            held[b.tier] += b.nbytes
        return found

    def _compile_for_card(self, part: ModelPart) -> None:
        """On a GPU, compile kernels for the model's sizes before the first sweep is timed.

        Kernels that are on disk already are read.
        """
        spec = self.spec
        needs = part.eviction.needs
        pairs = 0 if spec.rotary is None else len(spec.rotary.frequencies)
        sinks = any(t.name == "sinks" for block in spec.attention for t in block)
        before = (int(sinks), *([2] if self.plan.shape.common else []))
        warm_up_card(
            Layers(
                self.device.torch_device,
                self.dtype,
                spec.hidden_size,
                spec.num_heads,
                spec.num_kv_heads,
                spec.head_dim,
                pairs,
                bool(needs.record),
                needs.per_query,
                packing_of(spec, self.policy),
                before=before,
            )
        )

    def _take_buffers(self, offload_dir: Path, stack: contextlib.ExitStack) -> None:
        on_disk = [b for b in self.plan.buffers if b.tier == "disk"]
        if on_disk:
            with interrupts.held():
                scratch = Scratch(offload_dir)
                stack.callback(scratch.close)
            interrupts.check()
            for b in on_disk:
                self._files[b.name] = file = scratch.create(f"{b.name}.bin", b.nbytes)
                stack.callback(file.close)
        for b in self.plan.buffers:
            # These are allocated by the code that uses them.
            if b.tier != "disk" and b.name not in ("temporaries", "staging", "prompts"):
                pinned = b.name in COPIED_HOMES and self.policy.pin_weight
                on_host = self.device.host_staging if pinned else host_buffer
                take = self.device.buffer if b.tier == self.device.tier else on_host
                self._buffers[b.name, b.tier] = take(b.nbytes)

    def _arenas(self, name: str) -> dict[str, torch.Tensor]:
        return {tier: buffer for (what, tier), buffer in self._buffers.items() if what == name}

    def ring(self, name: str) -> Ring | None:
        """Return the plan's ring of that name, or None if nothing is loaded into it."""
        buffers = list(self._arenas(name).values())
        return Ring(buffers[0]) if buffers else None

    def common_prefix(self, columns: int) -> list[KVPart]:
        """Return the plan's room for one copy of so many KV entries."""
        spec = self.spec
        memory = self._buffers["common prefix", self.device.tier]
        return common_parts(
            memory, self.dtype, columns, (spec.num_blocks, spec.num_kv_heads, spec.head_dim)
        )


def _close_dropped(stack: contextlib.ExitStack, owner: int) -> None:
    """Close what an engine without references held.

    Garbage collection may call this in any line of any thread. That may be a thread of the engine,
    or one with a lock that the engine's threads need to end. So another thread closes, and the wait
    for it is bounded.
    """
    with interrupts.held():
        closing = threading.Thread(target=stack.close, name="closing")
        try:
            if os.getpid() == owner:
                closing.start()
                closing.join(DROPPED_PATIENCE_S)
                return
        except RuntimeError:
            pass  # newer Pythons start no thread while they shut down; they collect no garbage then
        stack.close()

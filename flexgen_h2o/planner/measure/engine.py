"""Rates that the engine reaches: of its lanes between tiers, and the fixed costs of a step of its
loop.

Each function gives fields of a HardwareProfile. A step's fixed costs are the seconds of a small
model's steps, less what its arithmetic takes alone. The model is wide enough that its matrices push
the loop's code and data out of the caches, as real ones do: a step of a model that fits into the
caches costs half as much.
"""

from __future__ import annotations

import random
import shutil
import statistics
import time
from collections import abc, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from flexgen_h2o.checkpoint import open_checkpoint, write_random_checkpoint
from flexgen_h2o.core import interrupts
from flexgen_h2o.core.config import TIERS, Policy
from flexgen_h2o.core.errors import DoesNotFitError
from flexgen_h2o.core.files import existing_folder
from flexgen_h2o.core.timeline import Timeline
from flexgen_h2o.core.units import (
    MIB,
    PAGE,
    SEGMENT_SLOTS,
    TRANSFER_CHUNK,
    WRITE_BACK_STEPS,
    format_bytes,
)
from flexgen_h2o.engine.decoding import Decoding
from flexgen_h2o.engine.distributed import ModelPart
from flexgen_h2o.engine.executor import Executor
from flexgen_h2o.engine.generation import BlockStats
from flexgen_h2o.engine.memory_plan import OVERLAPPED, SEQUENTIAL
from flexgen_h2o.engine.resources import LANE_THREADS, Engine
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.engine.sequence import Sequence
from flexgen_h2o.engine.workload import MicroBatchShape, shape_of, workload_of
from flexgen_h2o.kernels.warm_up import compile_subprocess, warm_up
from flexgen_h2o.kvcache.eviction import H2O, Eviction, Full
from flexgen_h2o.kvcache.layout import UnitLayout
from flexgen_h2o.kvcache.part import KVPart, part_view
from flexgen_h2o.kvcache.store import Overlay
from flexgen_h2o.models import spec_from_config
from flexgen_h2o.planner.cost_model import (
    CostModel,
    Machine,
    kv_load_moves,
    short_requests,
    weight_moves,
)
from flexgen_h2o.planner.lp import Percent
from flexgen_h2o.planner.measure.bench import ROUNDS, Bench, Call, Figures, Products
from flexgen_h2o.planner.profile import HardwareProfile
from flexgen_h2o.planner.search import IN_MEMORY
from flexgen_h2o.tiers.device import Device, host_buffer
from flexgen_h2o.tiers.disk import FileRange, Scratch
from flexgen_h2o.tiers.stream import Done, wait_all
from flexgen_h2o.tiers.transfers import Lanes, Mover

HEADS = 12
HEAD_DIM = 64
HOST_PIECE = 4 * TRANSFER_CHUNK  # one copy of weights that live on the host


def link_rates(bench: Bench, mover: Mover) -> Figures:
    """Return the rates of copies between the host and a device that is not host memory itself."""
    device = bench.device
    nbytes = bench.sizes.link_bytes
    pinned = device.host_staging(nbytes)
    plain = host_buffer(nbytes)
    there = device.buffer(nbytes)
    half = nbytes // 2

    def copies(*ways: tuple[str, torch.Tensor, torch.Tensor]) -> Call:
        """Return a call that queues all pieces of the copies. ways: lane, target and source."""
        cut = [
            (lane, target.split(HOST_PIECE), source.split(HOST_PIECE))
            for lane, target, source in ways
        ]
        return lambda: wait_all(
            [mover.copy(lane, "probe", *p) for lane, t, s in cut for p in zip(t, s, strict=True)]
        )

    calls = {
        "h2d_bytes_per_s": copies(("h2d", there, pinned)),
        "d2h_bytes_per_s": copies(("d2h", pinned, there)),
        "h2d_unpinned_bytes_per_s": copies(("h2d", there, plain)),
        "d2h_unpinned_bytes_per_s": copies(("d2h", plain, there)),
    }
    *seconds, both_s, transfer_s = bench.seconds_of(
        *calls.values(),
        copies(("h2d", there[:half], pinned[:half]), ("d2h", pinned[half:], there[half:])),
        lambda: mover.copy("h2d", "probe", there[:PAGE], pinned[:PAGE]).wait(),
    )
    rates: Figures = {name: nbytes / s for name, s in zip(calls, seconds, strict=True)}
    return {
        **rates,
        "link_both_ways": _share(max(seconds[:2]) / 2, both_s),
        "transfer_s": transfer_s,
    }


def overlay_rate(bench: Bench, dtype: torch.dtype) -> float:
    """Return bytes read and written per second when waiting KV entries are laid over a unit.

    Another entry is then added to those that wait. The units together are larger than the caches.
    Each is a step further than the one before, up to the step at which units are written back.
    """
    on_disk = (0.0, 0.0, 1.0)
    layout = UnitLayout(
        bench.sizes.step_rows[0], HEADS, SEGMENT_SLOTS, HEAD_DIM, dtype.itemsize, on_disk
    )
    (part,) = layout.parts

    def unit(waiting: int) -> tuple[Overlay, KVPart]:
        """Return a unit where it is computed on, and an overlay of `waiting` entries in RAM."""
        view = part_view(layout, part, bench.empty(torch.uint8, layout.part_bytes(part)), dtype)
        overlay = Overlay(layout, part, host_buffer(layout.overlay_bytes(part)), dtype)
        for slot in range(waiting):
            overlay.add(view, torch.full((part.rows,), slot, device=view.keys.device))
        return overlay, view

    count = max(1, bench.sizes.cache_bytes // layout.part_bytes(part) // WRITE_BACK_STEPS)
    every = [unit(i % WRITE_BACK_STEPS) for i in range(count * WRITE_BACK_STEPS)]
    units = cycle(every)
    slots = torch.full((part.rows,), SEGMENT_SLOTS - 1, device=every[0][1].keys.device)

    def steps() -> None:
        for overlay, view in islice(units, WRITE_BACK_STEPS):
            overlay.apply(view)
            overlay.add(view, slots)
            if overlay.is_full:
                overlay.clear()

    columns = WRITE_BACK_STEPS * (WRITE_BACK_STEPS + 1) / 2  # waiting and new, of as many steps
    return 2 * columns * part.rows * layout.column_bytes / bench.seconds_of(steps)[0]


MIN_FREE = 256 * MIB
PASSES = 3
BUFFERS = 2
LOAD_PIECE = 16 * TRANSFER_CHUNK  # of one load


def check_space(offload_dir: Path) -> None:
    """Raise DoesNotFitError if the disk has no room for a file to measure with.

    The folder need not exist.
    """
    free = shutil.disk_usage(existing_folder(offload_dir)).free
    if free < MIN_FREE:
        raise DoesNotFitError(
            f"--offload-dir {offload_dir}: {format_bytes(free)} are free there, and measuring the "
            "disk takes at least "
            f"{format_bytes(MIN_FREE)}; free space or give another --offload-dir"
        )


@contextmanager
def open_mover(device: Device) -> Iterator[Mover]:
    """Open a mover with the lanes of a run."""
    lanes = Lanes(LANE_THREADS, Timeline())
    try:
        yield Mover(device, lanes)
    finally:
        with interrupts.held():
            lanes.close()


@contextmanager
def open_scratch(offload_dir: Path) -> Iterator[Scratch]:
    """Open a folder that is removed afterwards, however this ends.

    The next run removes what kill -9 leaves.
    """
    with interrupts.held():
        scratch = Scratch(offload_dir)
    try:
        interrupts.check()
        yield scratch
    finally:
        with interrupts.held():
            scratch.close()


@contextmanager
def open_probe(bench: Bench, scratch: Scratch) -> Iterator[DiskProbe]:
    """Open a probe of the disk tier in a folder of it. bench: of the host."""
    with open_mover(bench.device) as mover:
        probe = DiskProbe(bench, mover, scratch)
        try:
            yield probe
        finally:
            # The lanes end first, so that nothing reads a file that is closed.
            with interrupts.held():
                mover.lanes.close()
                probe.close()


class DiskProbe:
    """A file on the disk tier that is read and written in pieces, through host buffers in turn."""

    def __init__(self, bench: Bench, mover: Mover, scratch: Scratch) -> None:
        self._bench = bench
        self.mover = mover
        piece = min(LOAD_PIECE, bench.sizes.disk_bytes)
        self._buffers = (
            bench.normal(torch.float32, BUFFERS * piece // 4).view(torch.uint8).split(piece)
        )
        most = max(
            1, min(bench.sizes.disk_bytes, shutil.disk_usage(scratch.folder).free // 2) // piece
        )
        self._file = scratch.create("profile.bin", most * piece)
        self._pieces = most
        until = time.perf_counter() + bench.sizes.disk_s
        for written, store in enumerate(self._writes(), 1):
            store.wait()
            if time.perf_counter() > until:
                self._pieces = written
                break

    @property
    def nbytes(self) -> int:
        return self._pieces * len(self._buffers[0])

    @property
    def is_direct(self) -> bool:
        """Whether the file system takes O_DIRECT."""
        return self._file.direct

    def rates(self) -> Figures:
        """Return the rates of a file whose space was written before, as in scratch files."""
        generator = random.Random(0)
        page = self._buffers[0][:PAGE]

        def small() -> None:
            offset = generator.randrange(self.nbytes // PAGE) * PAGE
            self.mover.read("request", page, "host", FileRange(self._file, offset, PAGE)).wait()

        passes = {"disk_read_bytes_per_s": self.reads, "disk_write_bytes_per_s": self._writes}
        figures = {"disk_request_s": self._bench.seconds_of(small)[0]}
        timings: dict[str, list[float]] = {name: [] for name in passes}
        for _ in range(PASSES):  # in turn; fewer where the disk is slow
            for name, whole in passes.items():
                if sum(timings[name]) < self._bench.sizes.disk_s:
                    interrupts.check()
                    start = time.perf_counter()
                    wait_all(list(whole()))
                    timings[name].append(time.perf_counter() - start)
        return figures | {
            name: self.nbytes / statistics.median(found) for name, found in timings.items()
        }

    def close(self) -> None:
        """Close the file. No lane may use it any more."""
        self._file.close()

    def reads(self) -> Iterator[Done]:
        """Queue the reading of the whole file, piece by piece."""
        for offset, piece in self._in_turn():
            yield self.mover.read("probe", piece, "host", FileRange(self._file, offset, len(piece)))

    def _writes(self) -> Iterator[Done]:
        for offset, piece in self._in_turn():
            yield self.mover.write("probe", self._file, offset, piece, "host")

    def _in_turn(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield offsets in the file, each with a buffer."""
        for i in range(self._pieces):
            piece = self._buffers[i % BUFFERS]
            yield i * len(piece), piece


ROWS = 64
WIDTH = 4096
ISSUED = 8  # products before the device is waited for
AHEAD = 8  # loads that wait in the lane: more than are read while the products run
TURNS = 3  # alone and together, so that a machine's drift counts for all
IDLE_S = 0.005
MIN_LEFT = 0.01


def contention(bench: Bench, probe: DiskProbe, dtype: torch.dtype) -> Figures:
    """Return what is left of the disk's read rate beside products, and of products beside reads."""
    mover = probe.mover
    rows = min(ROWS, bench.sizes.rows[-1])
    width = min(WIDTH, bench.sizes.widths[-1])
    call = Products(bench, dtype).call(rows, width, width)
    seconds = bench.sizes.beside_s / TURNS

    def compute() -> None:
        for _ in range(ISSUED):
            call()
        bench.finish()

    def reads() -> Iterator[Done]:
        while True:
            yield from probe.reads()

    compute()
    computed = read = computed_beside = read_beside = 0.0
    for _ in range(TURNS):
        computed += _beside(compute, seconds, mover, iter(()))[0]
        read += _beside(lambda: time.sleep(IDLE_S), seconds, mover, reads())[1]
        calls, nbytes = _beside(compute, seconds, mover, reads())
        computed_beside += calls
        read_beside += nbytes
    return {
        "disk_read_beside_compute": _share(read_beside, read),
        "compute_beside_disk_read": _share(computed_beside, computed),
    }


def _beside(
    work: Callable[[], None], seconds: float, mover: Mover, loads: Iterator[Done]
) -> tuple[float, float]:
    """Return calls of `work` per second and bytes read per second.

    `AHEAD` of the loads are always in the lane.
    """
    queued: deque[Done] = deque()
    moved = mover.lanes.bytes_moved
    start = time.perf_counter()
    calls = 0
    before = moved["disk_read"]
    while time.perf_counter() - start < seconds or not calls:
        interrupts.check()
        while queued and queued[0].is_done:
            queued.popleft().wait()
        while len(queued) < AHEAD and (load := next(loads, None)) is not None:
            queued.append(load)
        work()
        calls += 1
    nbytes = moved["disk_read"] - before
    took = time.perf_counter() - start
    wait_all(queued)
    return calls / took, nbytes / took


def _share(beside: float, alone: float) -> float:
    return min(1.0, max(MIN_LEFT, beside / alone if alone else 1.0))


# ---- a step of the loop

BLOCKS = 8
VOCABULARY = 128
PROMPT = 16
FIXED = (
    "step_s",
    "attention_step_s",
    "eviction_step_s",
    "row_s",
    "short_read_compute_s",
    "cache_load_step_s",
)
KINDS = ("attention", "mlp")
Steps = tuple[float, ...]  # seconds of a step of each kind
SOME_WEIGHTS: Percent = (90, 0, 100, 0, 100, 0)
NO_CACHE: Percent = (100, 0, 0, 0, 100, 0)
LOOK_AHEAD = OVERLAPPED[2]  # the deepest that the search counts on
FREE = 1e9  # times a rate
MIN_S = 1e-7  # a difference of two timings may be anything


def config_of(width: int) -> dict[str, Any]:
    """Return the config of an OPT model with square matrices only."""
    return {
        "model_type": "opt",
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "num_hidden_layers": BLOCKS,
        "ffn_dim": width,
        "max_position_embeddings": 2048,
        "num_attention_heads": width // HEAD_DIM,
        "word_embed_proj_dim": width,
        "activation_function": "relu",
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "do_layer_norm_before": True,
    }


def with_step_costs(
    bench: Bench, profile: HardwareProfile, dtype: str, folder: Path
) -> HardwareProfile:
    """Return the profile with the fixed costs of a step, and with other elementwise rates.

    A fixed cost is what decode sweeps take longer than the planner says without it. The sweeps are
    of a few sequences, of many, of a few that drop a KV entry at each step, and of a few with some
    weights or the cache on disk. A few, not one: from some rows on every operation wakes all cores.
    The elementwise rate is that at which the planner is right about a prefill sweep. The rates of
    other dtypes change as much.

    folder: for the small model's checkpoint.
    """
    config = config_of(bench.sizes.step_width)
    sizes = bench.sizes
    spec = spec_from_config("small", config, "profiling")
    write_random_checkpoint(spec, config, folder / "weights", dtype)
    nothing: Figures = dict.fromkeys(FIXED, 0.0)
    profile = replace(profile, **nothing)
    machine = Machine(profile, dtype, profile.device_is_host)
    few, many = sizes.step_rows
    full = Full()
    h2o = H2O(heavy_size=4, recent_size=4)
    new = 1 + sizes.steps

    def run(
        rows: int,
        eviction: Eviction = full,
        percent: Percent = IN_MEMORY,
        prompt_len: int = PROMPT,
        gen_len: int = new,
    ) -> tuple[CostModel, Eviction]:
        """Return a block of equal sequences. What is not in memory is on disk."""
        need = workload_of(eviction, rows, {(prompt_len, gen_len)}, spec.num_blocks)
        return CostModel(spec, Policy(rows, 1, percent), need, machine), eviction

    runs = (
        run(few),
        run(many),
        run(few, h2o),
        run(few, percent=SOME_WEIGHTS),
        run(few, percent=NO_CACHE),
        run(few, prompt_len=sizes.step_prompt, gen_len=2),
    )
    with ExitStack() as stack:
        engines = [stack.enter_context(_engine(bench, folder, *one)) for one in runs]
        # In turn, as all figures; the first round only warms up.
        rounds = [
            [_run_block(e, *one) for e, one in zip(engines, runs, strict=True)]
            for _ in range(1 + ROUNDS)
        ][1:]
        graphs = [
            _run_block(engines[0], *runs[0], with_graphs=True)[1]
            for _ in range(ROUNDS * bench.device.is_asynchronous)
        ]
    costs = [cost for cost, _ in runs]
    decode = [_median([found[i][1] for found in rounds]) for i in range(len(runs))]
    if (
        bench.device.is_asynchronous
    ):  # what a thread that only issues them takes is part of the step
        return replace(
            profile, **fixed_costs(decode[:3], 0, 0), graph_step_s=statistics.fmean(_median(graphs))
        )
    planned = [_planned(cost, new // 2) for cost in costs[:-1]]
    left = [(d[0] - p[0], d[1] - p[1]) for d, p in zip(decode, planned, strict=False)]
    more = [statistics.median(found[i][2] for found in rounds) - sum(planned[i]) for i in (0, 3, 4)]
    loads = load_costs(costs[3], costs[4], more[1] - more[0], more[2] - more[0])
    profile = replace(profile, **fixed_costs(left[:3], few, many), **loads)
    prefill = sum(_median([found[-1][0] for found in rounds]))
    return _with_elementwise(_at(costs[-1], profile), prefill)


def fixed_costs(left: abc.Sequence[Steps], few: int, many: int) -> Figures:
    """Return fields of the profile.

    left: what the planner leaves of a few sequences, of many, and of a few with eviction.
    few, many: how many sequences, or 0 if sequences cost nothing.
    """
    less, more, evicting = left
    row_s = max(MIN_S, (sum(more) - sum(less)) / 2 / (many - few)) if many > few else MIN_S
    return {
        "step_s": max(MIN_S, less[1] - few * row_s),
        "attention_step_s": max(MIN_S, less[0] - less[1]),
        "eviction_step_s": max(MIN_S, evicting[0] - less[0]),
        "row_s": row_s,
    }


def load_costs(weights: CostModel, cache: CostModel, weights_s: float, cache_s: float) -> Figures:
    """Return fields of the profile, at least 0.

    weights, cache: the costs of runs with some weights and with the cache on disk.
    weights_s, cache_s: what a transformer block of these took longer. They are means, because reads
        disturb compute now and then.
    """
    reads = short_reads(weights)
    short_s = max(0.0, weights_s) / reads if reads else 0.0
    brought_s = cache_s - short_s * short_reads(cache)
    return {"short_read_compute_s": short_s, "cache_load_step_s": max(0.0, brought_s)}


def short_reads(costs: CostModel) -> float:
    """Return the number of short reads for weights and KV of a transformer block in the middle."""
    layers = costs.layers
    half = costs.spec.num_blocks // 2
    units = {layer.unit for layer in layers.layers if layer.block == half}
    moves = [move for unit in units for move in weight_moves(costs, layers.units[unit])]
    moves += kv_load_moves(costs, half, _batch(costs), costs.need.gen_len // 2)
    return sum(short_requests(move.nbytes, move.pieces) for move in moves)


def _batch(costs: CostModel) -> MicroBatchShape:
    """Return the one micro-batch of a run."""
    return costs.need.block((costs.need.rows,))[0]


def _at(costs: CostModel, profile: HardwareProfile) -> CostModel:
    """Return the costs with the rates of another profile."""
    return replace(costs, machine=replace(costs.machine, profile=profile))


def _with_elementwise(costs: CostModel, measured_s: float) -> HardwareProfile:
    """Return the profile with another elementwise rate.

    It is the bytes that norms, activations and copies read and write, over the seconds that nothing
    else explains. It is between a twentieth of what a loop over them alone reaches and four times
    that.
    """
    profile = costs.machine.profile
    free = _at(costs, _elementwise(profile, FREE))
    alone_s = 0.0
    explained_s = 0.0
    for index in _indices(costs):
        step, others = (one.step(index, _batch(costs), 0) for one in (costs, free))
        alone_s += step.device_s - others.device_s
        explained_s += others.device_s + step.issue_s
    left_s = measured_s - explained_s
    change = min(4.0, max(1 / 20, alone_s / left_s)) if left_s > 0 else 4.0
    return _elementwise(profile, change)


def _elementwise(profile: HardwareProfile, change: float) -> HardwareProfile:
    """Return the profile with elementwise rates that are `change` times as high."""
    compute = {
        dtype: replace(rates, elementwise_bytes_per_s=rates.elementwise_bytes_per_s * change)
        for dtype, rates in profile.compute.items()
    }
    return replace(profile, compute=compute)


def _planned(costs: CostModel, sweep: int) -> Steps:
    """Return the predicted seconds of the steps of a sweep, without their fixed costs."""
    batch = _batch(costs)
    costs = costs.with_contention([batch], sweep)
    return tuple(costs.step(index, batch, sweep).device_s for index in _indices(costs))


def _indices(costs: CostModel) -> list[int]:
    """Return the first layer of each kind."""
    kinds: list[str] = [layer.kind for layer in costs.layers.layers]
    return [kinds.index(kind) for kind in KINDS]


def _median(found: abc.Sequence[Steps]) -> Steps:
    return tuple(map(statistics.median, zip(*found, strict=True)))


def _run_block(
    engine: Engine, costs: CostModel, eviction: Eviction, with_graphs: bool = False
) -> tuple[Steps, Steps, float]:
    """Return seconds of steps in a prefill sweep, in decode sweeps, and of a transformer block.

    The seconds of steps are medians over the layers of a kind. Those of a block are a mean.
    """
    need = costs.need
    params = SamplingParams(max_tokens=need.gen_len, ignore_eos=True)
    decoding = Decoding((), None)
    executor = Executor(engine, eviction, decoding, lambda finished: None, params.max_tokens)
    executor.graphs = executor.graphs if with_graphs else None
    ids = tuple(i % VOCABULARY for i in range(need.prompt_len))
    stats = BlockStats()
    rows = [Sequence(i, ids, params=params, max_new=params.max_tokens) for i in range(need.rows)]
    executor.run_block([rows], stats)
    executor.finish()
    kinds = [layer.kind for layer in engine.layers.layers]
    seconds = stats.layer_seconds

    def of_kinds(seconds: abc.Sequence[float]) -> tuple[list[float], ...]:
        return tuple(
            [s for i, s in enumerate(seconds) if kinds[i % len(kinds)] == kind] for kind in KINDS
        )

    prefill = of_kinds(seconds[: len(kinds)])
    decode = of_kinds(seconds[len(kinds) :])
    mean = statistics.fmean([s for found in decode for s in found])
    return tuple(map(statistics.median, prefill)), tuple(map(statistics.median, decode)), 2 * mean


@contextmanager
def _engine(bench: Bench, folder: Path, costs: CostModel, eviction: Eviction) -> Iterator[Engine]:
    """Open an engine for the run. What is on disk is loaded ahead."""
    spec = costs.spec
    policy = costs.policy
    kind = getattr(torch, costs.machine.dtype)
    shape = shape_of(policy, costs.need)
    depth = SEQUENTIAL if policy.percent == IN_MEMORY else LOOK_AHEAD
    plan = costs.memory.plan(shape, depth)
    compile_subprocess(warm_up, bench.device.torch_device, kind, bool(eviction.needs.record))
    checkpoint = open_checkpoint(spec, folder / "weights", folder)
    part = ModelPart(spec, eviction)
    site = (bench.device, dict.fromkeys(TIERS), folder)  # no budgets
    engine = Engine(part, checkpoint, policy, plan, kind, *site, Timeline())
    try:
        yield engine
    finally:
        with interrupts.held():
            engine.__exit__(None, None, None)

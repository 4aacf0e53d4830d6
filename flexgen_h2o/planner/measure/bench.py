"""Timing of calls on a device, and the compute rates of one dtype: products, attention and
elementwise work."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, cycle, pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F

from flexgen_h2o.core import interrupts
from flexgen_h2o.core.units import GIB, MIB, TOKEN_CHUNK
from flexgen_h2o.engine.memory import product_sizes, requantised_bytes
from flexgen_h2o.engine.sampling import SamplingParams, sample_tokens
from flexgen_h2o.kernels import triton
from flexgen_h2o.kernels.decode_step import (
    FILLED,
    GAIN,
    NEWEST,
    PLACE,
    POSITION,
    SLOT,
    StepSlots,
    attend_step,
)
from flexgen_h2o.kernels.int8 import RequantisedRows, block_int8_rows, pack_int8_rows
from flexgen_h2o.kernels.linear import DenseRows, RowParts, block_rows, linear
from flexgen_h2o.kernels.packed import pack_rows
from flexgen_h2o.kernels.prefill_attention import causal_attention, causal_attention_lse
from flexgen_h2o.kernels.slots import ScoreState, attend
from flexgen_h2o.kernels.workspace import Workspace, upload
from flexgen_h2o.kvcache.budgets import BudgetTable
from flexgen_h2o.kvcache.eviction import H2O
from flexgen_h2o.kvcache.part import KVUnit, Prompts
from flexgen_h2o.kvcache.prefill import choose_columns, prompt_lines
from flexgen_h2o.planner.profile import AS_FAST, Curve
from flexgen_h2o.planner.profile import Products as Rates
from flexgen_h2o.tiers.device import Device


@dataclass(frozen=True)
class Sizes:
    """Sizes and durations of what is measured.

    Buffers are larger than the caches, so that a figure is that of memory.
    """

    # Seconds that one figure should take.
    figure_s: float = 0.12
    # A product that would take more seconds is not measured; another call is timed once.
    longest_s: float = 0.5
    # Bytes and seconds of the file, whichever is reached first.
    disk_bytes: int = 2 * GIB
    disk_s: float = 3.0
    # Bytes that copies over the link walk through.
    link_bytes: int = 256 * MIB
    # Bytes that are copied from and to.
    memory_bytes: int = 256 * MIB
    # Bytes of the matrices that products cycle through.
    weight_bytes: int = 256 * MIB
    # Widths of square matrices.
    widths: tuple[int, ...] = (64, 256, 768, 2048, 4096, 8192)
    # h of matrices (4 h, h) and (h, 4 h).
    hidden: tuple[int, ...] = (64, 256, 768, 2048, 4096)
    # h of matrices (16 h, h).
    heads: tuple[int, ...] = (768, 2048)
    # Rows of the products.
    rows: tuple[int, ...] = (1, 4, 16, 32, 64, 128, 256, TOKEN_CHUNK)
    # Tokens of a micro-batch of prompts.
    prompt_tokens: int = 2048
    # Tokens of one prompt.
    prompt_lengths: tuple[int, ...] = (64, 256, 1024, 2048)
    # Heads x head width.
    prompt_width: int = 2048
    # Bytes of the keys and values that decode attention reads.
    cache_bytes: int = 256 * MIB
    # Head widths and slots of decode attention.
    head_widths: tuple[int, ...] = (64, 80, 128)
    slots: int = 512
    # (tokens, width) of elementwise work; the width is also that of unpacked matrices.
    block: tuple[int, int] = (1024, 4096)
    # (rows, vocabulary).
    logits: tuple[int, int] = (32, 50272)
    # Decode sweeps of a small model.
    steps: int = 48
    # Its micro-batches.
    step_rows: tuple[int, int] = (8, 64)
    # Its width.
    step_width: int = 768
    # Tokens of a prompt in its prefill sweep.
    step_prompt: int = 128
    # Seconds of disk reads and compute together.
    beside_s: float = 1.5


HOST = Sizes()
# A card has larger caches and needs more work at a time to be busy; its prompts of a micro-batch
# fill it.
CARD = replace(
    HOST,
    memory_bytes=GIB,
    weight_bytes=GIB,
    widths=(*HOST.widths, 12288),
    hidden=(256, 2048, 4096, 12288),
    prompt_tokens=16384,
    cache_bytes=GIB,
    head_widths=(64, 128),
)
# Of a card's host: attention there may run through torch operations that a CPU computes slowly.
CARD_HOST = replace(HOST, head_widths=CARD.head_widths)

ROUNDS = 5
MIN_ROUNDS = 2  # of a call that takes longer than a figure should
Call = Callable[[], object]
Figures = dict[str, Any]  # fields of a profile
_TABLE = 2**20  # normal numbers that buffers are filled with, over and over


def undisturbed(timings: Sequence[float]) -> float:
    """Return the lower quartile of up to five timings; of two or three the shortest.

    A neighbour only makes timings longer.
    """
    return sorted(timings)[len(timings) // 4]


@dataclass(frozen=True)
class Bench:
    """A device, and how much is measured on it."""

    device: Device
    sizes: Sizes

    def seconds_of(self, *calls: Call) -> list[float]:
        """Return the seconds of each call, as `undisturbed` has them."""
        return [undisturbed(timings) for timings in self.rounds(*calls)]

    def rounds(self, *calls: Call) -> list[list[float]]:
        """Return the seconds of each call in each round.

        The calls run in turn, so that a second in which the machine is slow spoils a round and not
        a figure.
        """
        tried = [self.once(call) for call in calls]
        counts = [max(1, int(self.sizes.figure_s / ROUNDS / seconds)) for seconds in tried]
        # What takes very long is timed once.
        found = [
            [seconds] * MIN_ROUNDS if seconds > self.sizes.longest_s else [] for seconds in tried
        ]
        for _ in range(ROUNDS):
            for call, count, timings in zip(calls, counts, found, strict=True):
                if len(timings) < MIN_ROUNDS or sum(timings) * count < self.sizes.figure_s:
                    timings.append(self.timed(call, count))
        return found

    def once(self, call: Call) -> float:
        """Return the seconds of the second of two calls."""
        self.timed(call)
        return self.timed(call)

    def timed(self, call: Call, count: int = 1) -> float:
        """Return the mean seconds of `count` calls, until the device has done everything."""
        interrupts.check()
        start = time.perf_counter()
        for _ in range(count):
            call()
        self.finish()
        return max(1e-9, (time.perf_counter() - start) / count)

    def finish(self) -> None:
        """Wait until the device has done what was issued."""
        self.device.fence().wait()

    def empty(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """Return a tensor in a buffer as the engine takes them."""
        return self.device.buffer(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def normal(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """Return such a tensor filled with normal numbers.

        Computing on zeros is faster, and some disks do not store them.
        """
        made = self.empty(dtype, *shape)
        table = _table(made.device, dtype)
        for part in made.view(-1).split(_TABLE):
            part.copy_(table[: len(part)])
        self.finish()
        return made


@lru_cache(maxsize=2)
def _table(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(
        _TABLE, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu"
    ).to(device, dtype)


HEAD_WIDTH = 64  # of prompts
# scoring takes at least this share of attention: the difference of two timings may be anything
MIN_SHARE = 0.05
PROBE = 16  # a cache smaller by this factor is tried first, and kept where attention is slow


def prefill_rates(bench: Bench, dtype: torch.dtype) -> tuple[Curve, Curve]:
    """Return FLOPs per second, over the tokens of a prompt, of attention and of scoring.

    The first curve is causal attention. The second is what H2O adds to it: the log-sum-exp of
    attention, the column sums, and choosing the KV entries to keep.
    """
    lengths = bench.sizes.prompt_lengths
    timings = bench.rounds(
        *(call for length in lengths for call in _prefill_calls(bench, dtype, length))
    )
    attention = []
    scoring = []
    one_prompt = []
    for length, plain, scored in zip(lengths, timings[::2], timings[1::2], strict=True):
        pairs = _prompts(bench, length) * length**2 * bench.sizes.prompt_width
        seconds = undisturbed(plain)
        # Both ran in the same rounds, so each round has its difference.
        added = statistics.median(b - a for a, b in zip(plain, scored, strict=False))
        attention.append((float(length), 2 * pairs / seconds))
        one_prompt.append(max(added, MIN_SHARE * seconds) / _prompts(bench, length))
    for length, added in zip(lengths, no_longer_than_next(one_prompt), strict=True):
        scoring.append((float(length), length**2 * bench.sizes.prompt_width / added))
    return Curve(tuple(attention)), Curve(tuple(scoring))


def no_longer_than_next(seconds: Sequence[float]) -> list[float]:
    """Return seconds of growing work, none longer than those of more work.

    Work that took longer than the next was disturbed, and gets the next one's seconds.
    """
    return list(accumulate(reversed(seconds), min))[::-1]


def _prompts(bench: Bench, length: int) -> int:
    return max(1, bench.sizes.prompt_tokens // length)


def _prefill_calls(bench: Bench, dtype: torch.dtype, length: int) -> tuple[Call, Call]:
    """Return calls of attention over a micro-batch of equal prompts, without and with scores.

    The prompts are packed as the engine packs them.
    """
    prompts = _prompts(bench, length)
    heads = bench.sizes.prompt_width // HEAD_WIDTH
    q, k, v = (
        bench.normal(dtype, prompts, length, heads, HEAD_WIDTH).transpose(1, 2) for _ in range(3)
    )
    policy = H2O()
    scale = HEAD_WIDTH**-0.5
    unit = KVUnit(policy, 0, heads, BudgetTable(policy, [(length, 1)] * prompts, 1).at(0))
    lines = prompt_lines(unit, 0, [length] * prompts, is_packed=False)

    def scored() -> None:
        _, lse = causal_attention_lse(q, k, v, scale)
        choose_columns(unit, Prompts(q, k, v, lse, scale, 0, lines))

    return lambda: causal_attention(q, k, v, scale), scored


def decode_rates(bench: Bench, dtype: torch.dtype) -> tuple[Curve, Curve]:
    """Return bytes of keys and values read per second, over the head width.

    One query per head reads them. The second curve includes scores.
    """
    cache = bench.normal(dtype, 2, bench.sizes.cache_bytes // dtype.itemsize // 2)
    widths = bench.sizes.head_widths
    sizes = []
    calls: list[Call] = []
    for width in widths:
        rows = max(1, cache.shape[1] // (bench.sizes.slots * width))
        few = max(1, rows // PROBE)
        tried = bench.once(_decode_calls(bench, cache, width, few)[1])
        rows = rows if tried * rows / few < bench.sizes.longest_s else few
        calls += _decode_calls(bench, cache, width, rows)
        sizes += [2 * rows * bench.sizes.slots * width * dtype.itemsize] * 2
    rates = [
        nbytes / seconds for nbytes, seconds in zip(sizes, bench.seconds_of(*calls), strict=True)
    ]
    plain, scored = (
        Curve(tuple(zip(map(float, widths), rates[i::2], strict=True))) for i in range(2)
    )
    return plain, scored


def _decode_calls(bench: Bench, cache: torch.Tensor, width: int, rows: int) -> tuple[Call, Call]:
    """Return calls of decode attention, without and with scores.

    cache: (2, values), of which the rows take what they need for keys and for values.
    """
    slots = bench.sizes.slots
    scale = width**-0.5
    where = cache.device
    keys, values = (part[: rows * slots * width].view(1, rows, slots, width) for part in cache)
    q = bench.normal(cache.dtype, rows, 1, width)

    def ints(value: int) -> torch.Tensor:
        return torch.full((rows,), value, dtype=torch.int32, device=where)

    positions = torch.arange(slots, dtype=torch.int32, device=where).repeat(rows, 1)
    scores = torch.zeros(rows, slots, device=where, dtype=torch.float32)
    weights = torch.ones(rows, device=where, dtype=torch.float32)
    state = ScoreState(scores, positions, ints(0), ints(slots // 2), 1.0, weights, ints(0))
    if triton.supports(keys):
        return _step_calls(bench, keys, values, state)
    filled = ints(slots)
    return (
        lambda: attend(q, keys, values, filled, scale),
        lambda: attend(q, keys, values, filled, scale, state),
    )


def _step_calls(
    bench: Bench, keys: torch.Tensor, values: torch.Tensor, recorded: ScoreState
) -> tuple[Call, Call]:
    """Return the same calls by the one launch of a card.

    The launch also puts a new KV entry into each row: always into its last slot, and never one
    that a row may lose. A sequence has one KV head.
    """
    _, rows, slots, width = keys.shape
    q, k, v, out = (bench.normal(keys.dtype, rows, 1, width) for _ in range(4))
    state = torch.zeros(7, rows, dtype=torch.int32, device="cpu")
    state[FILLED] = slots
    state[SLOT] = slots - 1
    state[POSITION] = slots - 1
    state[NEWEST] = slots // 2
    state[PLACE] = -1
    state[GAIN] = torch.ones(rows, dtype=torch.float32, device="cpu").view(torch.int32)
    taken = torch.zeros(rows, dtype=torch.int64, device=keys.device)
    plain = StepSlots(keys, values, 0, 1, upload(state, keys.device), taken)
    scored = replace(
        plain, scores=recorded.scores, positions=recorded.positions, victims=recorded.victims
    )
    return (
        lambda: attend_step(q, k, v, plain, width**-0.5, out),
        lambda: attend_step(q, k, v, scored, width**-0.5, out),
    )


WARM_S = 1.0
# out / in of a block's first MLP matrix, and of what stands for the head
MLP = 4
HEAD = 16
PACKED_BITS = 4
# How matrices are held. int8: as the engine holds them in RAM, blocked where they can be; int4:
# multiplied in int8.
Held = Literal["in order", "blocked", "int8", "int4"]
FASTER: tuple[Held, ...] = ("blocked", "int8", "int4")


def matmul_rates(bench: Bench, dtype: torch.dtype) -> Rates:
    """Return curves over rows of (rows, in) times an (out, in) matrix and a bias.

    They are by out / in and by in. A sweep uses each matrix once, so matrices cycle through a pool
    larger than the caches. A product that would take too long gets the rate of the next smaller
    matrix of its shape.
    """
    sizes = bench.sizes
    products = Products(bench, dtype)
    most = sizes.rows[-1]
    middle = sizes.widths[len(sizes.widths) // 2]
    fastest = 2 * most * middle**2 / bench.once(products.call(most, middle, middle))
    by_shape = shapes(sizes)
    smallest = {by_inner[0] for by_inner in by_shape.values()}
    measured = [
        (inner, outer, rows)
        for by_inner in by_shape.values()
        for inner, outer in by_inner
        for rows in sizes.rows
        if 2 * rows * inner * outer / fastest <= sizes.longest_s or (inner, outer) in smallest
    ]
    seconds = bench.seconds_of(
        *(products.call(rows, inner, outer) for inner, outer, rows in measured)
    )
    found = {(i, o, r): 2 * r * i * o / s for (i, o, r), s in zip(measured, seconds, strict=True)}
    for by_inner in by_shape.values():
        for smaller, larger in pairwise(by_inner):
            for rows in sizes.rows:
                found.setdefault((*larger, rows), found[(*smaller, rows)])

    def curve(inner: int, outer: int) -> Curve:
        return Curve(tuple((float(rows), found[inner, outer, rows]) for rows in sizes.rows))

    return tuple(
        (shape, tuple((float(inner), curve(inner, outer)) for inner, outer in by_inner))
        for shape, by_inner in by_shape.items()
    )


def speedups(bench: Bench, dtype: torch.dtype) -> Figures:
    """Return `blocked_speedup`, `int8_speedup` and `int4_speedup` over rows.

    They say how many times faster products are than with matrices in order: the mean of a square
    matrix and an MLP's first one. They are 1.0 if nothing is blocked, and in int8 on a card.
    """
    sizes = bench.sizes
    products = Products(bench, dtype)
    width = sizes.widths[len(sizes.widths) // 2]
    pairs = [(width, width), (width, MLP * width)]
    faster: list[Held] = ["int8", "int4"] if bench.device.is_host else []
    if block_rows(bench.normal(dtype, width, width))[0].blocked:
        faster.append("blocked")
    points: dict[Held, list[tuple[float, float]]] = {held: [] for held in faster}
    for rows in sizes.rows if faster else ():
        seconds = bench.seconds_of(
            *(products.call(rows, *pair, way) for way in ("in order", *faster) for pair in pairs)
        )
        square = seconds[::2]
        mlp = seconds[1::2]
        for i, held in enumerate(faster, 1):
            points[held].append((float(rows), math.sqrt(square[0] / square[i] * mlp[0] / mlp[i])))
    return {
        f"{held}_speedup": Curve(tuple(points[held])) if held in points else AS_FAST
        for held in FASTER
    }


def shapes(sizes: Sizes) -> dict[float, list[tuple[int, int]]]:
    """Return (in, out) of the matrices that are measured, by out / in.

    They are those of a transformer block and of the head.
    """
    return {
        1 / MLP: [(MLP * h, h) for h in sizes.hidden],
        1.0: [(w, w) for w in sizes.widths],
        float(MLP): [(h, MLP * h) for h in sizes.hidden],
        float(HEAD): [(h, HEAD * h) for h in sizes.heads],
    }


class Products:
    """Products with the matrices of a pool. Inputs and results suffice for the largest."""

    def __init__(self, bench: Bench, dtype: torch.dtype) -> None:
        self._bench = bench
        sizes = bench.sizes
        every = [pair for by_inner in shapes(sizes).values() for pair in by_inner]
        numel = max(inner * outer for inner, outer in every)
        self._pool = bench.normal(dtype, max(numel, sizes.weight_bytes // dtype.itemsize))
        self._held: dict[tuple[int, int, Held], list[RowParts]] = {}
        widest = max(outer for _, outer in every)
        self._inputs = bench.normal(dtype, sizes.rows[-1] * max(inner for inner, _ in every))
        self._bias = bench.normal(dtype, widest)
        self._out = bench.empty(dtype, sizes.rows[-1] * widest)

    def call(self, rows: int, inner: int, outer: int, held: Held = "in order") -> Call:
        """Return a product that takes the next matrix each time it is called.

        held: blocked only if it can be. Blocked matrices share their memory with those in order,
            whose numbers get another order.
        """
        matrices = cycle(self._matrices(inner, outer, held))
        x = self._inputs[: rows * inner].view(rows, inner)
        out = self._out[: rows * outer].view(rows, outer)
        bias = self._bias[:outer]
        return lambda: linear(x, next(matrices), bias, out)

    def _matrices(self, inner: int, outer: int, held: Held) -> list[RowParts]:
        key = inner, outer, held
        if key not in self._held:
            whole = [
                part.view(outer, inner)
                for part in self._pool.split(inner * outer)
                if len(part) == inner * outer
            ]
            if held in ("int8", "int4"):
                self._held[key] = self._in_int8(whole[0], packed=held == "int4")
            elif held == "blocked":
                self._held[key] = [block_rows(matrix) for matrix in whole]
            else:
                self._held[key] = [(DenseRows(matrix),) for matrix in whole]
        return self._held[key]

    def _in_int8(self, matrix: torch.Tensor, packed: bool) -> list[RowParts]:
        """Return copies of one matrix in int8, or packed in 4 bits, in half of the pool's bytes."""
        outer, inner = matrix.shape
        made = pack_rows(matrix, PACKED_BITS) if packed else pack_int8_rows(matrix)
        count = max(1, self._bench.sizes.weight_bytes // 2 // made.nbytes)
        memory = self._bench.empty(torch.uint8, count, *made.shape)
        memory.copy_(made)
        sizes = product_sizes(self._bench.sizes.rows[-1], inner, outer)
        if packed:
            sizes["int8 rows"] = requantised_bytes(outer, inner)
        workspace = Workspace(
            self._bench.empty(torch.uint8, sum(sizes.values())), sizes, self._pool.dtype
        )
        if packed:
            return [(RequantisedRows(rows, inner, workspace),) for rows in memory]
        return [block_int8_rows(rows, inner, workspace) for rows in memory]


def warm_cores(bench: Bench, dtype: torch.dtype) -> None:
    """Bring the clocks up and the libraries in before the first figure."""
    width = bench.sizes.widths[len(bench.sizes.widths) // 2]
    call = Products(bench, dtype).call(bench.sizes.rows[-1], width, width)
    until = time.perf_counter() + WARM_S
    while time.perf_counter() < until:
        bench.once(call)


def memory_rate(bench: Bench) -> float:
    """Return bytes per second, read and written, of a copy that is larger than the caches."""
    target, source = (bench.empty(torch.uint8, bench.sizes.memory_bytes) for _ in range(2))
    return 2 * bench.sizes.memory_bytes / bench.seconds_of(lambda: target.copy_(source))[0]


def kernel_seconds(bench: Bench) -> float:
    """Return the seconds of one operation that has almost nothing to do, between others."""
    one = bench.normal(torch.float32, 1)
    return bench.seconds_of(lambda: one.add_(1.0))[0]


def other_rates(bench: Bench, dtype: torch.dtype) -> Figures:
    """Return the fields of ComputeRates for norms and activations, and for choosing tokens."""
    tokens, width = bench.sizes.block
    logits = bench.normal(dtype, *bench.sizes.logits)
    x, weight, bias = (
        bench.normal(dtype, *shape) for shape in ((tokens, width), (width,), (width,))
    )
    params = [SamplingParams()] * len(logits)
    rows = range(len(logits))
    calls: list[Call] = [
        lambda: torch.relu_(
            F.layer_norm(x, (width,), weight, bias)
        ),  # each reads and writes all of x
        lambda: sample_tokens(logits, params, rows, rows),
    ]
    elementwise, choice = bench.seconds_of(*calls)
    return {
        "elementwise_bytes_per_s": 4 * tokens * width * dtype.itemsize / elementwise,
        "logits_per_s": logits.numel() / choice,
    }

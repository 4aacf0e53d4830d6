"""Fixed costs of the engine's loop: the seconds of a small model's steps, less what its arithmetic takes alone.

The model is wide enough that its matrices push the loop's code and data out of the caches, as real ones do: a step of a
model that fits into the caches costs half as much.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from flexgen_h2o.checkpoint import open_checkpoint, write_random_checkpoint
from flexgen_h2o.core import interrupts
from flexgen_h2o.core.config import TIERS, ModelSpec, Policy
from flexgen_h2o.core.timeline import Timeline
from flexgen_h2o.engine.distributed import Part
from flexgen_h2o.engine.executor import Executor
from flexgen_h2o.engine.generation import BlockStats, Decoding, Row, StopCriteria
from flexgen_h2o.engine.memory_plan import OVERLAPPED, SEQUENTIAL, BlockShape, memory_plan
from flexgen_h2o.engine.prompts import Prompt
from flexgen_h2o.engine.resources import Engine
from flexgen_h2o.engine.sampling import Sampler, SamplingParams
from flexgen_h2o.engine.workload import Batch, need_of
from flexgen_h2o.kernels.warm_up import warm_up
from flexgen_h2o.kvcache.eviction import H2O, Eviction, Full
from flexgen_h2o.models import spec_from_config
from flexgen_h2o.planner.costs import Costs
from flexgen_h2o.planner.lp import Percent
from flexgen_h2o.planner.measure.bench import Bench, Figures
from flexgen_h2o.planner.predict import Machine
from flexgen_h2o.planner.profile import HardwareProfile
from flexgen_h2o.planner.search import IN_MEMORY
from flexgen_h2o.planner.work import kv_load_moves, layer_work, weight_moves
from flexgen_h2o.tiers.device import Site

BLOCKS, VOCABULARY, PROMPT, HEAD_DIM = 8, 128, 16, 64
FIXED = ("step_s", "attention_step_s", "eviction_step_s", "row_s", "short_read_compute_s", "cache_load_step_s")
KINDS = ("attention", "mlp")
Steps = tuple[float, float]  # seconds of a step of each kind
SOME_WEIGHTS: Percent = (90, 0, 100, 0, 100, 0)
NO_CACHE: Percent = (100, 0, 0, 0, 100, 0)
LOOK_AHEAD = OVERLAPPED[2]  # the deepest that the search counts on
ROUNDS = 5
MIN_S = 1e-7  # a difference of two timings may be anything


def config_of(width: int) -> dict[str, Any]:
    """OPT with square matrices only."""
    return {
        "model_type": "opt", "vocab_size": VOCABULARY, "hidden_size": width, "num_hidden_layers": BLOCKS,
        "ffn_dim": width, "max_position_embeddings": 2048, "num_attention_heads": width // HEAD_DIM,
        "word_embed_proj_dim": width, "activation_function": "relu", "enable_bias": True,
        "layer_norm_elementwise_affine": True, "do_layer_norm_before": True,
    }  # fmt: skip


@dataclass(frozen=True)
class _Run:
    """A block of equal rows. percent: what is not in memory is on disk."""

    rows: int
    prompt_len: int
    new_tokens: int
    eviction: Eviction
    percent: Percent = IN_MEMORY

    @property
    def policy(self) -> Policy:
        return Policy(self.rows, 1, self.percent)

    @property
    def batch(self) -> Batch:
        return Batch.even(self.rows, self.prompt_len)

    def costs(self, spec: ModelSpec, profile: HardwareProfile, dtype: str) -> Costs:
        need = need_of(self.eviction, self.rows, {(self.prompt_len, self.new_tokens)}, spec.num_blocks)
        machine = Machine(profile, dtype, profile.device_is_host)
        return Costs(machine.setting(spec, self.policy, need), profile, dtype)


def with_step_costs(bench: Bench, profile: HardwareProfile, dtype: str, folder: Path) -> HardwareProfile:
    """The profile with the fixed costs of a step, and with other elementwise rates.

    A fixed cost is what decode sweeps take more than the planner says without any: sweeps of a few rows, of many rows,
    of a few rows that drop a column at each step, and of a few with some weights or the cache on disk. A few rows, not
    one: from some rows on every operation wakes all cores. The elementwise rate is that at which the planner is right
    about a prefill sweep; the rates of other dtypes change as much. folder: for the small model's checkpoint.
    """
    config, sizes = config_of(bench.sizes.step_width), bench.sizes
    spec = spec_from_config("small", config, "profiling")
    write_random_checkpoint(spec, config, folder / "weights", dtype)
    few, many = sizes.step_rows
    full, h2o, new = Full(), H2O(heavy_size=4, recent_size=4), 1 + sizes.steps
    runs = (
        _Run(few, PROMPT, new, full), _Run(many, PROMPT, new, full), _Run(few, PROMPT, new, h2o),
        _Run(few, PROMPT, new, full, SOME_WEIGHTS), _Run(few, PROMPT, new, full, NO_CACHE),
        _Run(few, sizes.step_prompt, 2, full),
    )  # fmt: skip
    with ExitStack() as stack:
        engines = [stack.enter_context(_engine(bench, spec, dtype, folder, run)) for run in runs]
        # In turn, as all figures; the first round only warms up.
        rounds = [[_run_block(e, run) for e, run in zip(engines, runs, strict=True)] for _ in range(1 + ROUNDS)][1:]
    nothing: Figures = dict.fromkeys(FIXED, 0.0)
    profile = replace(profile, **nothing)
    decode = [_median([found[i][1] for found in rounds]) for i in range(len(runs))]
    if bench.device.is_asynchronous:  # what a thread that only issues them takes is part of the step
        return replace(profile, **fixed_costs(decode[:3], 0, 0))
    costs = [run.costs(spec, profile, dtype) for run in runs]
    planned = [_planned(c, run, new // 2) for c, run in zip(costs[:-1], runs, strict=False)]
    left = [(d[0] - p[0], d[1] - p[1]) for d, p in zip(decode, planned, strict=False)]
    more = [statistics.median(found[i][2] for found in rounds) - sum(planned[i]) for i in (0, 3, 4)]
    loads = load_costs((costs[3], costs[4]), more[1] - more[0], more[2] - more[0])
    profile = replace(profile, **fixed_costs(left[:3], few, many), **loads)
    prefill = sum(_median([found[-1][0] for found in rounds]))
    return _with_elementwise(runs[-1].costs(spec, profile, dtype), runs[-1], prefill)


def fixed_costs(left: Sequence[Steps], few: int, many: int) -> Figures:
    """Fields of the profile. left: what the planner leaves of a few rows, of many, and of a few with eviction; few,
    many: how many rows, 0 where rows cost nothing."""
    less, more, evicting = left
    row_s = max(MIN_S, (sum(more) - sum(less)) / 2 / (many - few)) if many > few else MIN_S
    return {
        "step_s": max(MIN_S, less[1] - few * row_s),
        "attention_step_s": max(MIN_S, less[0] - less[1]),
        "eviction_step_s": max(MIN_S, evicting[0] - less[0]),
        "row_s": row_s,
    }


def load_costs(costs: tuple[Costs, Costs], weights_s: float, cache_s: float) -> Figures:
    """Fields of the profile, at least 0. costs: of runs with some weights and with the cache on disk; weights_s,
    cache_s: what a transformer block of these took longer on average, as reads disturb compute now and then."""
    reads = short_requests(costs[0])
    short_s = max(0.0, weights_s) / reads if reads else 0.0
    brought_s = cache_s - short_s * short_requests(costs[1])
    return {"short_read_compute_s": short_s, "cache_load_step_s": max(0.0, brought_s)}


def short_requests(costs: Costs) -> float:
    """Of weights and KV of a transformer block in the middle."""
    at, layers, half = costs.at, costs.layers, costs.at.spec.num_blocks // 2
    units = {layer.unit for layer in layers.layers if layer.block == half}
    moves = [move for unit in units for move in weight_moves(at, layers.units[unit])]
    batch = at.need.block((at.need.rows,))[0]
    return sum(move.short_requests for move in (*moves, *kv_load_moves(at, half, batch, at.need.gen_len // 2)))


def _with_elementwise(costs: Costs, run: _Run, measured_s: float) -> HardwareProfile:
    """The profile with the bytes that norms, activations and copies read and write, over the seconds that nothing else
    explains. Between a twentieth of what a loop over them alone reaches and four times that."""
    profile, alone = costs.profile, costs.profile.rates(costs.dtype).elementwise_bytes_per_s
    nbytes, explained = 0.0, 0.0
    for index in _indices(costs):
        layer = costs.layers.layers[index]
        nbytes += layer_work(costs.at, layer, costs.layers.units[layer.unit], run.batch, 0).elementwise
        step = costs.step(index, run.batch, 0)
        explained += step.device_s + step.issue_s
    left = measured_s - (explained - nbytes / alone)
    change = min(4.0, max(1 / 20, nbytes / left / alone)) if left > 0 else 4.0
    compute = {
        dtype: replace(rates, elementwise_bytes_per_s=rates.elementwise_bytes_per_s * change)
        for dtype, rates in profile.compute.items()
    }
    return replace(profile, compute=compute)


def _planned(costs: Costs, run: _Run, sweep: int) -> Steps:
    """What the planner says of the steps of a sweep, without their fixed costs."""
    costs = costs.with_contention([run.batch], sweep)
    attention, mlp = (costs.step(index, run.batch, sweep).device_s for index in _indices(costs))
    return attention, mlp


def _indices(costs: Costs) -> tuple[int, int]:
    """The first layer of each kind."""
    kinds = [layer.kind for layer in costs.layers.layers]
    return kinds.index("attention"), kinds.index("mlp")


def _median(found: Sequence[Steps]) -> Steps:
    return statistics.median(f[0] for f in found), statistics.median(f[1] for f in found)


def _run_block(engine: Engine, run: _Run) -> tuple[Steps, Steps, float]:
    """Medians over the layers of a kind, in the prefill sweep and in the decode sweeps of a block; and the mean seconds
    of a transformer block in those."""
    params = SamplingParams(max_tokens=run.new_tokens, ignore_eos=True)
    decoding = Decoding(Sampler(params), StopCriteria((), (), None))
    executor = Executor(engine, run.eviction, decoding, lambda finished: None, params.max_tokens)
    ids = tuple(i % VOCABULARY for i in range(run.prompt_len))
    stats = BlockStats()
    executor.run_block([[Row(Prompt(i, ids, None), params.max_tokens) for i in range(run.rows)]], stats)
    executor.finish()
    kinds, seconds = [layer.kind for layer in engine.layers.layers], stats.times.layers

    def of_kind(kind: str, first: int, end: int | None = None) -> list[float]:
        return [s for i, s in enumerate(seconds[first:end]) if kinds[i % len(kinds)] == kind]

    count = len(kinds)
    prefill = [statistics.median(of_kind(kind, 0, count)) for kind in KINDS]
    decode = [of_kind(kind, count) for kind in KINDS]
    medians, blocks = [statistics.median(found) for found in decode], decode[0] + decode[1]
    return (prefill[0], prefill[1]), (medians[0], medians[1]), 2 * statistics.fmean(blocks)


@contextmanager
def _engine(bench: Bench, spec: ModelSpec, dtype: str, folder: Path, run: _Run) -> Iterator[Engine]:
    """An engine for the run; what is on disk is loaded ahead."""
    policy, kind, blocks = run.policy, getattr(torch, dtype), spec.num_blocks
    slots = tuple(run.eviction.slots(run.prompt_len, run.new_tokens, block, blocks) for block in range(blocks))
    shape = BlockShape(run.rows, 1, run.rows * run.prompt_len, slots, run.eviction.needs.record)
    depth = SEQUENTIAL if run.percent == IN_MEMORY else LOOK_AHEAD
    plan = memory_plan(spec, policy, shape, kind.itemsize, bench.device.is_host, depth)
    warm_up(bench.device.torch_device, kind, bool(run.eviction.needs.record))
    checkpoint = open_checkpoint(spec, folder / "weights", folder)
    site = Site(bench.device, dict.fromkeys(TIERS), folder)
    engine = Engine(Part(spec, run.eviction), checkpoint, policy, plan, kind, site, Timeline())
    try:
        yield engine
    finally:
        with interrupts.held():
            engine.__exit__(None, None, None)

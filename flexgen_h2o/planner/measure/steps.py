"""Fixed costs of the engine's own loop: a small model, everything resident, less what its arithmetic takes alone.

The model is wide enough that its matrices push the loop's own code and data out of the caches, as real ones do: a
step of a model that fits into the caches costs half as much.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from flexgen_h2o.checkpoint import open_checkpoint, write_random_checkpoint
from flexgen_h2o.core import interrupts
from flexgen_h2o.core.config import TIERS, ModelSpec, Policy
from flexgen_h2o.core.timeline import Timeline
from flexgen_h2o.engine.distributed import Part
from flexgen_h2o.engine.executor import Executor
from flexgen_h2o.engine.generation import Decoding, Row, StopCriteria
from flexgen_h2o.engine.memory_plan import OVERLAPPED, SEQUENTIAL, BlockShape, memory_plan
from flexgen_h2o.engine.prompts import Prompt
from flexgen_h2o.engine.report import BlockStats
from flexgen_h2o.engine.resources import Engine
from flexgen_h2o.engine.sampling import Sampler, SamplingParams, StopStrings
from flexgen_h2o.engine.workload import Batch, need_of
from flexgen_h2o.kernels.warm_up import warm_up
from flexgen_h2o.kvcache.eviction import H2O, Eviction, Full
from flexgen_h2o.models import spec_from_config
from flexgen_h2o.planner.candidates import IN_MEMORY
from flexgen_h2o.planner.costs import Costs
from flexgen_h2o.planner.lp import Percent
from flexgen_h2o.planner.measure.bench import Bench
from flexgen_h2o.planner.predict import Machine
from flexgen_h2o.planner.profile import HardwareProfile
from flexgen_h2o.planner.work import kv_load_moves, layer_work, weight_moves
from flexgen_h2o.tiers.device import Site

BLOCKS, VOCABULARY, PROMPT, HEAD_DIM = 8, 128, 16, 64
FIXED = ("step_s", "attention_step_s", "eviction_step_s", "row_s", "short_read_compute_s", "cache_load_step_s")
SOME_WEIGHTS: Percent = (90, 0, 100, 0, 100, 0)
NO_CACHE: Percent = (100, 0, 0, 0, 100, 0)
LOOK_AHEAD = OVERLAPPED[2]  # the deepest that the search counts on
ROUNDS = 5
LEAST_S = 1e-7  # a difference of two timings may be anything


def config_of(width: int) -> dict[str, Any]:
    """OPT with square matrices only."""
    return {
        "model_type": "opt", "vocab_size": VOCABULARY, "hidden_size": width, "num_hidden_layers": BLOCKS,
        "ffn_dim": width, "max_position_embeddings": 2048, "num_attention_heads": width // HEAD_DIM,
        "word_embed_proj_dim": width, "activation_function": "relu", "enable_bias": True,
        "layer_norm_elementwise_affine": True, "do_layer_norm_before": True,
    }  # fmt: skip


@dataclass(frozen=True)
class StepCosts:
    """Seconds, and bytes a second, as the profile has them."""

    step_s: float
    attention_step_s: float
    eviction_step_s: float
    row_s: float
    elementwise_bytes_per_s: float
    short_read_compute_s: float = 0.0
    cache_load_step_s: float = 0.0


@dataclass(frozen=True)
class _Run:
    """A block of equal rows; percent: what is not in memory is on disk."""

    rows: int
    prompt_len: int
    new_tokens: int
    eviction: Eviction
    percent: Percent = IN_MEMORY

    @property
    def policy(self) -> Policy:
        return Policy(self.rows, 1, self.percent)


@dataclass(frozen=True)
class _Steps:
    """Seconds of a step of a sweep, by its kind."""

    attention: float
    mlp: float


def step_costs(bench: Bench, profile: HardwareProfile, dtype: str, folder: Path) -> StepCosts:
    """What decode sweeps of a few rows, of many rows, of a few that drop a column at each step, and of a few with some
    weights or the cache on disk, take more than the planner says with a profile whose step costs are 0; and the rate
    of norms, activations and copies at which it is right about a prefill sweep.

    A few rows, not one: from some rows on every operation wakes all cores. folder: for the small model's checkpoint.
    """
    config, sizes = config_of(bench.sizes.step_width), bench.sizes
    spec = spec_from_config("small", config, "profiling")
    write_random_checkpoint(spec, config, folder / "weights", dtype)
    few, many = sizes.step_rows
    full, h2o, new = Full(), H2O(heavy_size=4, recent_size=4), 1 + sizes.steps
    runs = (
        _Run(few, PROMPT, new, full), _Run(many, PROMPT, new, full), _Run(few, PROMPT, new, h2o),
        _Run(few, PROMPT, new, full, SOME_WEIGHTS), _Run(few, PROMPT, new, full, NO_CACHE),
    )  # fmt: skip
    prompts = _Run(few, sizes.step_prompt, 2, full)
    with ExitStack() as stack:
        engines = [stack.enter_context(_engine(bench, spec, dtype, folder, run)) for run in (*runs, prompts)]
        # In turns, as all figures; the first round only warms up.
        rounds = [
            [_run_block(engine, run) for engine, run in zip(engines, (*runs, prompts), strict=True)]
            for _ in range(1 + ROUNDS)
        ][1:]
    decode = [_median([found[i][1] for found in rounds]) for i in range(len(runs))]
    elementwise = profile.rates(dtype).elementwise_bytes_per_s
    if bench.device.is_asynchronous:  # what a thread that only issues them takes is part of the step
        return _solve(decode[:3], 0, 0, elementwise)
    planned = [_planned(_costs(spec, profile, dtype, run), run, new // 2) for run in runs]
    left = [_Steps(d.attention - p.attention, d.mlp - p.mlp) for d, p in zip(decode, planned, strict=True)]
    found = _solve(left[:3], few, many, elementwise)
    loading = [
        _Loading(_costs(spec, profile, dtype, runs[i]), statistics.median(r[i][2] for r in rounds) - _sum(planned[i]))
        for i in (0, 3, 4)
    ]
    found = replace(found, **_load_costs(*loading))
    costs = _costs(spec, replace(profile, **{k: v for k, v in asdict(found).items() if k in FIXED}), dtype, prompts)
    return replace(found, elementwise_bytes_per_s=_elementwise(costs, prompts, _median([r[-1][0] for r in rounds])))


def _solve(left: Sequence[_Steps], few: int, many: int, elementwise: float) -> StepCosts:
    """left: what the planner leaves of a few rows, of many, of a few with eviction. few, many: 0 if not told apart."""
    less, more, evicting = left
    grown = more.attention + more.mlp - less.attention - less.mlp
    row_s = max(LEAST_S, grown / 2 / (many - few)) if many > few else LEAST_S
    step_s, attention_s = less.mlp - few * row_s, less.attention - less.mlp
    evicting_s = evicting.attention - less.attention
    return StepCosts(max(LEAST_S, step_s), max(LEAST_S, attention_s), max(LEAST_S, evicting_s), row_s, elementwise)


@dataclass(frozen=True)
class _Loading:
    """A run of a few rows. left_s: what the planner leaves of a transformer block in a decode sweep, on average: what
    reads take from compute they take now and then."""

    costs: Costs
    left_s: float

    def short_requests(self) -> float:
        """Of weights and KV of a transformer block in the middle."""
        at, layers, half = self.costs.at, self.costs.layers, self.costs.at.spec.num_blocks // 2
        units = {layer.unit for layer in layers.layers if layer.block == half}
        moves = [move for unit in units for move in weight_moves(at, layers.units[unit])]
        batch = at.need.block((at.need.rows,))[0]
        return sum(move.short_requests for move in (*moves, *kv_load_moves(at, half, batch, at.need.gen_len // 2)))


def _load_costs(alone: _Loading, weights: _Loading, cache: _Loading) -> dict[str, float]:
    """Seconds, at least 0. Of equal rows: all in memory, with some weights and with the cache on disk."""
    reads, more_s = weights.short_requests(), weights.left_s - alone.left_s
    short_s = max(0.0, more_s) / reads if reads else 0.0
    brought_s = cache.left_s - alone.left_s - short_s * cache.short_requests()
    return {"short_read_compute_s": short_s, "cache_load_step_s": max(0.0, brought_s)}


def _elementwise(costs: Costs, run: _Run, measured: _Steps) -> float:
    """Bytes a second: those that norms, activations and copies of both layers read and write, over the seconds that
    nothing else explains. Between a twentieth of what a loop over them alone reaches and four times that."""
    alone = costs.profile.rates(costs.dtype).elementwise_bytes_per_s
    kinds = [layer.kind for layer in costs.layers.layers]
    nbytes, explained = 0.0, 0.0
    for index in (kinds.index("attention"), kinds.index("mlp")):
        layer = costs.layers.layers[index]
        batch = Batch.even(run.rows, run.prompt_len)
        nbytes += layer_work(costs.at, layer, costs.layers.units[layer.unit], batch, 0).elementwise
        step = costs.step(index, batch, 0)
        explained += step.device_s + step.issue_s
    left = measured.attention + measured.mlp - (explained - nbytes / alone)
    return min(4 * alone, max(alone / 20, nbytes / left)) if left > 0 else 4 * alone


def _costs(spec: ModelSpec, profile: HardwareProfile, dtype: str, run: _Run) -> Costs:
    need = need_of(run.eviction, run.rows, {(run.prompt_len, run.new_tokens)}, spec.num_blocks)
    machine = Machine(profile, dtype, profile.device_is_host)
    return Costs(machine.setting(spec, run.policy, need), profile, dtype)


def _planned(costs: Costs, run: _Run, sweep: int) -> _Steps:
    """What the planner says of a step of a sweep, its fixed costs aside."""
    kinds, batch = [layer.kind for layer in costs.layers.layers], Batch.even(run.rows, run.prompt_len)
    costs = costs.with_contention([batch], sweep)
    return _Steps(*(costs.step(kinds.index(kind), batch, sweep).device_s for kind in ("attention", "mlp")))


def _median(found: Sequence[_Steps]) -> _Steps:
    return _Steps(statistics.median(f.attention for f in found), statistics.median(f.mlp for f in found))


def _sum(steps: _Steps) -> float:
    """Of both layers of a transformer block."""
    return steps.attention + steps.mlp


def _run_block(engine: Engine, run: _Run) -> tuple[_Steps, _Steps, float]:
    """Medians over the layers of one kind, in the prefill sweep and in the decode sweeps of a block; and the mean
    seconds of a transformer block in those."""
    params = SamplingParams(max_tokens=run.new_tokens, ignore_eos=True)
    decoding = Decoding(Sampler(params), StopCriteria(params, (), StopStrings(None, ())))
    executor = Executor(engine, run.eviction, decoding, lambda finished: None, params.max_tokens)
    ids = tuple(i % VOCABULARY for i in range(run.prompt_len))
    facts = BlockStats()
    executor.run_block([[Row(Prompt(i, ids, None), params.max_tokens) for i in range(run.rows)]], facts)
    executor.finish()
    kinds, seconds = [layer.kind for layer in engine.layers.layers], facts.times.layers

    def medians(part: Sequence[float]) -> _Steps:
        return _Steps(
            *(
                statistics.median(s for i, s in enumerate(part) if kinds[i % len(kinds)] == kind)
                for kind in ("attention", "mlp")
            )
        )

    blocks = [s for i, s in enumerate(seconds) if i >= len(kinds) and kinds[i % len(kinds)] in ("attention", "mlp")]
    return medians(seconds[: len(kinds)]), medians(seconds[len(kinds) :]), 2 * statistics.fmean(blocks)


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

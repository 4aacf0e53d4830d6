"""Fixed costs of the engine's own loop: a small model, everything resident, less what its arithmetic takes alone.

The model is wide enough that its matrices push the loop's own code and data out of the caches, as real ones do: a
step of a model that fits into the caches costs half as much.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flexgen_h2o import interrupts
from flexgen_h2o.checkpoint import open_checkpoint, write_random_checkpoint
from flexgen_h2o.config import TIERS, ModelSpec, Policy
from flexgen_h2o.engine import Engine
from flexgen_h2o.eviction_need import need_of
from flexgen_h2o.executor import Executor
from flexgen_h2o.generation import Decoding, Row, RowEnd
from flexgen_h2o.kernels.warm_up import warm_up
from flexgen_h2o.kvcache.eviction import H2O, Eviction, Full
from flexgen_h2o.models import spec_from_config
from flexgen_h2o.planner.costs import Costs
from flexgen_h2o.planner.memory import SEQUENTIAL, Shape, memory_plan
from flexgen_h2o.planner.need import Batch
from flexgen_h2o.planner.predict import Machine
from flexgen_h2o.profile import HardwareProfile
from flexgen_h2o.profiling.bench import Bench
from flexgen_h2o.prompts import Prompt
from flexgen_h2o.sampling import SamplingParams, StopStrings, TokenChooser
from flexgen_h2o.timeline import Timeline

BLOCKS, VOCABULARY, PROMPT, HEAD_DIM = 4, 128, 16, 64
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
    """Seconds, as HardwareProfile has them."""

    step_s: float
    attention_step_s: float
    eviction_step_s: float
    row_s: float


@dataclass(frozen=True)
class _Steps:
    """Seconds of a step of a decode sweep, by its kind."""

    attention: float
    mlp: float


def step_costs(bench: Bench, profile: HardwareProfile, dtype: str, folder: Path) -> StepCosts:
    """What decode sweeps of a few rows, of many rows, and of a few that drop a column at each step, take more than the
    planner says with a profile whose step costs are 0.

    A few rows, not one: from some rows on every operation wakes all cores. folder: for the small model's checkpoint.
    """
    config, sizes = config_of(bench.sizes.step_width), bench.sizes
    spec = spec_from_config("small", config, "profiling")
    write_random_checkpoint(spec, config, folder / "weights", dtype)
    few, many = sizes.step_rows
    kinds: tuple[tuple[int, Eviction], ...] = ((few, Full()), (many, Full()), (few, H2O(heavy_size=4, recent_size=4)))
    with ExitStack() as stack:
        engines = [stack.enter_context(_engine(bench, spec, dtype, folder, *kind)) for kind in kinds]
        # In turns, as all figures; the first round only warms up.
        rounds = [
            [_run_block(engine, *kind, sizes.steps) for engine, kind in zip(engines, kinds, strict=True)]
            for _ in range(1 + ROUNDS)
        ]
    if bench.device.is_asynchronous:  # what a thread that only issues them takes is part of the step
        return _solve(rounds[1:], [_Steps(0.0, 0.0)] * len(kinds), 0, 0)
    planned = [_planned(spec, profile, dtype, sizes.steps, *kind) for kind in kinds]
    return _solve(rounds[1:], planned, few, many)


def _solve(rounds: Sequence[Sequence[_Steps]], planned: Sequence[_Steps], few: int, many: int) -> StepCosts:
    """rounds, planned: of a few rows, of many, of a few with eviction. few, many: 0 where rows are not told apart."""
    less, more, evicting = (
        _Steps(
            statistics.median(found[i].attention for found in rounds) - planned[i].attention,
            statistics.median(found[i].mlp for found in rounds) - planned[i].mlp,
        )
        for i in range(3)
    )
    grown = more.attention + more.mlp - less.attention - less.mlp
    row_s = max(LEAST_S, grown / 2 / (many - few)) if many > few else LEAST_S
    step_s, attention_s = less.mlp - few * row_s, less.attention - less.mlp
    evicting_s = evicting.attention - less.attention
    return StepCosts(max(LEAST_S, step_s), max(LEAST_S, attention_s), max(LEAST_S, evicting_s), row_s)


def _planned(
    spec: ModelSpec, profile: HardwareProfile, dtype: str, steps: int, rows: int, eviction: Eviction
) -> _Steps:  # fmt: skip
    """What the planner says of a step in the middle of the run."""
    need = need_of(eviction, rows, {(PROMPT, 1 + steps)}, spec.num_blocks)
    machine = Machine(profile, dtype, profile.device_is_host)
    costs = Costs(machine.setting(spec, Policy(gpu_batch_size=rows), need), profile, dtype)
    kinds = [layer.kind for layer in costs.layers.layers]
    attention, mlp = (
        costs.step(kinds.index(kind), Batch.even(rows, PROMPT), (1 + steps) // 2).device_s
        for kind in ("attention", "mlp")
    )
    return _Steps(attention, mlp)


def _run_block(engine: Engine, rows: int, eviction: Eviction, steps: int) -> _Steps:
    """Medians over the layers of one kind and the decode sweeps of a block."""
    params = SamplingParams(max_tokens=1 + steps, ignore_eos=True)
    decoding = Decoding(TokenChooser(params), RowEnd(params, (), StopStrings(None, ())))
    executor = Executor(engine, eviction, decoding, lambda finished: None, params.max_tokens)
    executor.run_block([[Row(Prompt(i, tuple(range(PROMPT)), None), params.max_tokens) for i in range(rows)]])
    executor.finish()
    kinds = [layer.kind for layer in engine.layers.layers]
    decode = executor.times.layers[len(kinds) :]

    def median(kind: str) -> float:
        return statistics.median(s for i, s in enumerate(decode) if kinds[i % len(kinds)] == kind)

    return _Steps(median("attention"), median("mlp"))


@contextmanager
def _engine(bench: Bench, spec: ModelSpec, dtype: str, folder: Path, rows: int, eviction: Eviction) -> Iterator[Engine]:
    """Everything resident on the device."""
    policy, kind = Policy(gpu_batch_size=rows), getattr(torch, dtype)
    slots = tuple(eviction.slots(PROMPT, 1 + bench.sizes.steps, block, BLOCKS) for block in range(BLOCKS))
    shape = Shape(rows, 1, rows * PROMPT, slots, eviction.needs.record)
    plan = memory_plan(spec, policy, shape, kind.itemsize, bench.device.is_host, SEQUENTIAL)
    warm_up(bench.device.torch_device, kind, bool(eviction.needs.record))
    checkpoint = open_checkpoint(spec, folder / "weights", folder)
    engine = Engine(spec, checkpoint, policy, plan, kind, bench.device, dict.fromkeys(TIERS), folder, Timeline())
    try:
        yield engine
    finally:
        with interrupts.held():
            engine.__exit__(None, None, None)

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
from flexgen_h2o.executor import Executor
from flexgen_h2o.generation import Decoding, Row, RowEnd
from flexgen_h2o.kernels.warm_up import warm_up
from flexgen_h2o.kvcache.eviction import H2O, Eviction, Full
from flexgen_h2o.models import spec_from_config
from flexgen_h2o.planner.memory import SEQUENTIAL, Shape, memory_plan
from flexgen_h2o.profiling.bench import Bench
from flexgen_h2o.profiling.matmul import Products
from flexgen_h2o.prompts import Prompt
from flexgen_h2o.sampling import SamplingParams, StopStrings, TokenChooser
from flexgen_h2o.timeline import Timeline

BLOCKS, VOCABULARY, PROMPT, HEAD_DIM = 4, 128, 16, 64
# What the planner counts apart from a step's fixed costs: its products, kernel_s for each of them and for attention.
MLP_PRODUCTS, ATTENTION_PRODUCTS, ATTENTION_KERNELS = 2, 4, 5
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


def step_costs(bench: Bench, dtype: str, folder: Path, kernel_s: float) -> StepCosts:
    """From decode sweeps of one row, of many rows, and of one row that drops a column at each step.

    folder: for the tiny model's checkpoint. kernel_s: of an operation that has next to nothing to do.
    """
    config, many = config_of(bench.sizes.step_width), bench.sizes.step_rows
    spec = spec_from_config("small", config, "profiling")
    write_random_checkpoint(spec, config, folder / "weights", dtype)
    kinds: tuple[tuple[int, Eviction], ...] = ((1, Full()), (many, Full()), (1, H2O(heavy_size=4, recent_size=4)))
    with ExitStack() as stack:
        engines = [stack.enter_context(_engine(bench, spec, dtype, folder, *kind)) for kind in kinds]
        # In turns, as all figures; the first round only warms up.
        rounds = [
            [_run_block(engine, *kind, bench.sizes.steps) for engine, kind in zip(engines, kinds, strict=True)]
            for _ in range(1 + ROUNDS)
        ]
    if bench.device.is_asynchronous:  # what a thread that only issues them takes is part of the step
        return _solve(rounds[1:], _Steps(0.0, 0.0), _Steps(0.0, 0.0), many - 1)
    product, wide = _product_seconds(bench, dtype, 1, many)
    counted = _Steps(ATTENTION_PRODUCTS * product + ATTENTION_KERNELS * kernel_s, MLP_PRODUCTS * (product + kernel_s))
    more = _Steps(ATTENTION_PRODUCTS * (wide - product), MLP_PRODUCTS * (wide - product))
    return _solve(rounds[1:], counted, more, many - 1)


def _solve(rounds: Sequence[Sequence[_Steps]], counted: _Steps, more: _Steps, more_rows: int) -> StepCosts:
    """rounds: of one row, of many, of one with eviction. counted: of one row, elsewhere; more: with the other rows."""
    mlp = statistics.median(one.mlp for one, _, _ in rounds)
    attention = statistics.median(one.attention - one.mlp for one, _, _ in rounds)
    evicting = statistics.median(evicting.attention - one.attention for one, _, evicting in rounds)
    rows = statistics.median(many.attention + many.mlp - one.attention - one.mlp for one, many, _ in rounds)
    found = (
        mlp - counted.mlp,
        attention - counted.attention + counted.mlp,
        evicting,
        (rows - more.attention - more.mlp) / 2 / more_rows,
    )
    return StepCosts(*(max(LEAST_S, seconds) for seconds in found))


def _product_seconds(bench: Bench, dtype: str, *rows: int) -> list[float]:
    """Of one product of the small model, with another matrix each time."""
    width, products = bench.sizes.step_width, Products(bench, getattr(torch, dtype))
    return bench.seconds_of(*(products.call(r, width, width) for r in rows))


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

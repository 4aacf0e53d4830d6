"""A head that is computed in parts gives the tokens and logits of transformers, and those of the
whole head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from flexgen_h2o import LLM, MemoryBudget, Policy, SamplingParams
from flexgen_h2o.engine.memory import MemoryPlanner
from flexgen_h2o.engine.memory_plan import SEQUENTIAL, BlockShape, Depth
from flexgen_h2o.models.load import find_model
from tests.forks import Forks
from tests.parity.cases import CONFIGURATIONS, LAID_OUT, PLACEMENTS, thinned
from tests.parity.conftest import Check
from tests.parity.ranks import Run
from tests.parity.reference import (
    LOGIT_TOLERANCE,
    LONG,
    ByShape,
    Ended,
    LogitsByRow,
    greedy,
    opened,
    random_model,
    random_prompts,
    tokens_of,
)
from tests.parity.test_pipeline import answers_of

ROWS = 48  # of a part: the last one has fewer
TIED = (
    "qwen3, biases, one kv-head, odd sizes, tied",
    "gpt_neox, no bias, odd sizes, tied",
    "qwen3_moe, a narrow MLP in every other layer, tied",
)
SHAPES = (*LAID_OUT, *TIED, "qwen3_moe", "mixtral", "olmoe")
NAMES = list(CONFIGURATIONS)
CASES = [
    (SHAPES[(3 * i + j) % len(SHAPES)], placement, NAMES[(i + 4 * j) % len(NAMES)])
    for i, placement in enumerate(PLACEMENTS)
    for j in range(8)
]
DISK = PLACEMENTS["weights on disk"]
HALVES = PLACEMENTS["device and disk in halves"]


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Once it is called all heads are in parts, whether that pays or not."""

    def head_rows(memory: MemoryPlanner, shape: BlockShape, depth: Depth) -> int:
        return ROWS if memory.spec.head and not shape.needs_all_logits else 0

    return lambda: monkeypatch.setattr(MemoryPlanner, "head_rows", head_rows)


def rows_of_parts(llm: LLM) -> int:
    """ModelSpec.head_rows of the newest run."""
    planned = llm.planner.planned
    assert planned is not None
    return planned.memory.head_rows


@pytest.mark.parametrize(("shape", "placement", "configuration"), thinned(CASES, 5))
def test_tokens_and_logits_are_those_of_transformers(
    shape: str, placement: str, configuration: str, check: Check, forced: Callable[[], None]
) -> None:
    forced()
    check(shape, placement, configuration)


# ---- as the whole head

SWITCHES: tuple[dict[str, Any], ...] = (
    {"compress_weight": True},
    {"int8_compute": True},
    {"compress_weight": True, "int8_compute": True},
)
PACKED = ("normal", "llama, one kv-head, odd sizes", "post-norm, narrow embedding (350m)")


@pytest.mark.parametrize(
    ("shape", "switches", "stand_in"), thinned(product(PACKED, SWITCHES, (False, True)), 5)
)
def test_packed_weights_and_products_in_int8(
    shape: str,
    switches: dict[str, Any],
    stand_in: bool,
    reference: ByShape,
    offload_dir: Path,
    forced: Callable[[], None],
) -> None:
    budget = MemoryBudget("64MiB" if stand_in else None)
    known = reference(shape)
    found = []
    for forces in (False, True):
        if forces:
            forced()
        watch = LogitsByRow()
        with opened(
            known.folder, Policy(2, 2, HALVES, **switches), offload_dir, budget=budget
        ) as llm:
            out = llm.generate(known.prompts, SamplingParams(max_tokens=4), watch_logits=watch)
        found.append((tokens_of(out), torch.stack(watch.of_rows)))
    (tokens, logits), (same, near) = found
    assert same == tokens and (near - logits).abs().max() <= LOGIT_TOLERANCE


@pytest.mark.parametrize(
    ("dtype", "shape"),
    thinned([("bfloat16", "normal"), ("float32", "untied head"), ("bfloat16", "qwen3_moe")], 2),
)
def test_samples_and_log_probabilities(
    shape: str,
    dtype: str,
    reference: ByShape,
    tmp_path: Path,
    forced: Callable[[], None],
) -> None:
    """A prompt that is scored wants more logits than one: such rows have the whole head, and others
    parts again. So have rows that take several given tokens a sweep."""
    known = reference(shape)
    drawn = SamplingParams(max_tokens=6, temperature=1.3, top_k=20, top_p=0.9, seed=5, logprobs=3)
    scored = replace(drawn, prompt_logprobs=1)
    found = []
    for rows in (0, ROWS):
        if rows:
            forced()
        with opened(known.folder, Policy(2, 3, HALVES), tmp_path, dtype=dtype) as llm:
            for params in (drawn, scored, drawn):
                found.append(llm.generate(known.prompts, params))
                assert rows_of_parts(llm) == (rows if params is drawn else 0)
            found.append(llm.generate(known.prompts, drawn, refill=True))
            for most, expected in ((1, rows), (3, 0)):
                llm.follow(known.prompts, known.tokens, LogitsByRow(), max_tokens_per_sweep=most)
                assert rows_of_parts(llm) == expected
    for whole, cut in zip(found[:4], found[4:], strict=True):
        assert tokens_of(whole) == tokens_of(cut)
        assert len(set(map(tuple, tokens_of(whole)))) == len(whole)
        for one, other in zip(whole, cut, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


@pytest.mark.parametrize("configuration", ["2x2", "1x3, sequential, joined", "device, 2x2"])
@pytest.mark.parametrize("refill", [False, True])
def test_rows_that_end_and_rows_that_enter(
    refill: bool, configuration: str, ended: Ended, tmp_path: Path, forced: Callable[[], None]
) -> None:
    forced()
    chosen = CONFIGURATIONS[configuration]
    params = SamplingParams(max_tokens=LONG)
    with opened(ended.folder, chosen.policy(HALVES), tmp_path, budget=chosen.budget) as llm:
        assert tokens_of(llm.generate(ended.prompts, params, refill=refill)) == ended.tokens


@pytest.mark.parametrize("stand_in", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_last_rank_of_a_pipeline(stand_in: bool, forks: Forks, tmp_path: Path) -> None:
    """It has no embedding, so that parts pay beside a device as well, and with a tied head."""
    policy = Policy(1, 2, DISK)
    models = [random_model(vocab_size=2000), random_model(model_type="llama", vocab_size=2000)]
    prompts = random_prompts((5, 9, 1))
    runs = []
    for i, model in enumerate(models):
        folder = tmp_path / f"model {i}"
        model.save_pretrained(folder)
        spec = find_model(str(folder), None).spec.stage(range(1, 2))
        memory = MemoryPlanner(spec, policy, 4, not stand_in)
        assert memory.head_rows(BlockShape(1, 4, 12, (16,)), SEQUENTIAL)
        more = {"stand_in": stand_in, "in_flight": 2}
        runs.append(Run(str(folder), prompts, 3, policy.to_json(), **more))
    for model, answer in zip(models, answers_of(forks, 2, runs, tmp_path), strict=True):
        assert answer["tokens"] == [greedy(model, prompt, 3) for prompt in prompts]

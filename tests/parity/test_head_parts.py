"""A head that is computed in parts gives the tokens and logits of transformers, and those of the
whole head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from flexgen_h2o import LLM, MemoryBudget, Policy, SamplingParams
from flexgen_h2o.core.model import with_head_rows
from flexgen_h2o.engine.memory import MemoryPlanner
from flexgen_h2o.engine.memory_plan import SEQUENTIAL, BlockShape, Depth
from flexgen_h2o.models.load import find_model
from flexgen_h2o.planner.cost_model import CostModel, Machine, disk_read_bytes
from flexgen_h2o.planner.lp import Percent
from flexgen_h2o.planner.profile import nominal_profile
from tests.forks import Forks
from tests.parity.cases import CONFIGURATIONS, LAID_OUT, PLACEMENTS, thinned
from tests.parity.planned import FAMILIES, SHAPE, Run, write_aligned
from tests.parity.quantisers import QUANTISERS, save_quantised
from tests.parity.ranks import Run as PipelineRun
from tests.parity.reference import (
    LONG,
    Ended,
    LogitsByRow,
    Reference,
    assert_equal,
    greedy,
    make_reference,
    random_model,
    random_prompts,
    run,
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
MANY = {
    "vocab_size": 2000
}  # so many tokens that parts pay by themselves, where the head is not tied


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Once it is called all heads are in parts, whether that pays or not."""

    def head_rows(memory: MemoryPlanner, shape: BlockShape, depth: Depth) -> int:
        return ROWS if memory.spec.head and not shape.needs_all_logits else 0

    return lambda: monkeypatch.setattr(MemoryPlanner, "head_rows", head_rows)


def rows_of_parts(llm: LLM) -> int:
    """ModelSpec.head_rows of the newest run."""
    planned = llm._planner.planned
    assert planned is not None
    return planned.memory.head_rows


def logits_of(
    known: Reference, policy: Policy, offload_dir: Path, budget: MemoryBudget | None = None
) -> tuple[list[list[int]], torch.Tensor]:
    watch = LogitsByRow()
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    out = run(known.folder, known.prompts, policy, offload_dir, params, budget, watch)
    return tokens_of(out), torch.stack([torch.stack(watch.rows[i]) for i in range(len(out))])


@pytest.mark.parametrize(("shape", "placement", "configuration"), thinned(CASES, 5))
def test_tokens_and_logits_are_those_of_transformers(
    shape: str,
    placement: str,
    configuration: str,
    reference: Callable[[str], Reference],
    tmp_path: Path,
    forced: Callable[[], None],
) -> None:
    forced()
    chosen = CONFIGURATIONS[configuration]
    assert_equal(reference(shape), chosen.policy(PLACEMENTS[placement]), chosen.budget, tmp_path)


# ---- as the whole head


SWITCHES: dict[str, dict[str, Any]] = {
    "4 bits": {"compress_weight": True},
    "8 bits": {"compress_weight": True, "weight_bits": 8},
    "int8": {"int8_compute": True},
    "4 bits, int8": {"compress_weight": True, "int8_compute": True},
}


PACKED_SHAPES = "normal", "llama, one kv-head, odd sizes", "post-norm, narrow embedding (350m)"
PACKED_CASES = product(
    ("device and disk in halves", "weights on disk"), PACKED_SHAPES, SWITCHES, (False, True)
)


@pytest.mark.parametrize(("placement", "shape", "switches", "stand_in"), thinned(PACKED_CASES, 5))
def test_packed_weights_and_products_in_int8(
    placement: str,
    shape: str,
    switches: str,
    stand_in: bool,
    reference: Callable[[str], Reference],
    offload_dir: Path,
    forced: Callable[[], None],
) -> None:
    known = reference(shape)
    policy = Policy(2, 2, PLACEMENTS[placement], **SWITCHES[switches])
    budget = MemoryBudget("64MiB" if stand_in else None)
    tokens, logits = logits_of(known, policy, offload_dir, budget)
    forced()
    same, near = logits_of(known, policy, offload_dir, budget)
    assert same == tokens
    assert (near - logits).abs().max() <= 1e-4


@pytest.mark.parametrize("name", QUANTISERS)
def test_quantised_checkpoints(name: str, tmp_path: Path, forced: Callable[[], None]) -> None:
    """Heads that are plain, beside matrices that are decoded; and in formats that hold heads too,
    these."""
    model = random_model(2, **QUANTISERS[name].shape)
    prompts = random_prompts((5, 9, 1))
    save_quantised(model, tmp_path / "model", QUANTISERS[name])
    known = Reference(tmp_path / "model", model, prompts, [], [])
    policy = Policy(2, 2, HALVES)
    tokens, logits = logits_of(known, policy, tmp_path / "offload")
    forced()
    same, near = logits_of(known, policy, tmp_path / "offload")
    assert same == tokens
    assert (near - logits).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("dtype", "shape"),
    thinned(product(("bfloat16", "float32"), ("normal", "untied head", "qwen3_moe")), 4),
)
def test_samples_and_log_probabilities(
    shape: str,
    dtype: str,
    reference: Callable[[str], Reference],
    tmp_path: Path,
    forced: Callable[[], None],
) -> None:
    """A prompt that is scored wants more logits than one: such rows have the whole head, and others
    parts again."""
    known = reference(shape)
    found = []
    drawn = SamplingParams(max_tokens=6, temperature=1.3, top_k=20, top_p=0.9, seed=5, logprobs=3)
    scored = replace(drawn, prompt_logprobs=1)
    for parts in (False, True):
        if parts:
            forced()
        with LLM(str(known.folder), Policy(2, 3, HALVES), dtype=dtype, offload_dir=tmp_path) as llm:
            for params in (drawn, scored, drawn):
                found.append(llm.generate(known.prompts, params))
                assert rows_of_parts(llm) == (ROWS if parts and params is drawn else 0)
            found.append(llm.generate(known.prompts, drawn, refill=True))
    for whole, cut in zip(found[:4], found[4:], strict=True):
        assert tokens_of(whole) == tokens_of(cut) and len(set(map(tuple, tokens_of(whole)))) == len(
            whole
        )
        for one, other in zip(whole, cut, strict=True):
            assert one.logprobs is not None and other.logprobs is not None
            assert [o.logprob for o in other.logprobs] == pytest.approx(
                [o.logprob for o in one.logprobs], abs=1e-4
            )


@pytest.mark.parametrize("max_tokens_per_sweep", [1, 3])
def test_given_tokens(
    max_tokens_per_sweep: int,
    reference: Callable[[str], Reference],
    tmp_path: Path,
    forced: Callable[[], None],
) -> None:
    known = reference("normal")
    watch = LogitsByRow()
    forced()
    with LLM(str(known.folder), Policy(2, 2, HALVES), dtype="float32", offload_dir=tmp_path) as llm:
        llm.generate(known.prompts, SamplingParams(max_tokens=2))
        llm.follow(known.prompts, known.tokens, watch, max_tokens_per_sweep=max_tokens_per_sweep)
        assert rows_of_parts(llm) == (ROWS if max_tokens_per_sweep == 1 else 0)
    for row, want in enumerate(known.logits):
        assert (torch.stack(watch.rows[row])[: len(want)] - want).abs().max() <= 1e-4


@pytest.mark.parametrize("configuration", ["2x2", "1x3, sequential, joined", "device, 2x2"])
@pytest.mark.parametrize("refill", [False, True])
def test_rows_that_end_and_rows_that_enter(
    refill: bool, configuration: str, ended: Ended, tmp_path: Path, forced: Callable[[], None]
) -> None:
    forced()
    chosen = CONFIGURATIONS[configuration]
    policy = chosen.policy(HALVES)
    params = SamplingParams(max_tokens=LONG)
    with LLM(
        str(ended.folder), policy, dtype="float32", budget=chosen.budget, offload_dir=tmp_path
    ) as llm:
        assert tokens_of(llm.generate(ended.prompts, params, refill=refill)) == ended.tokens


# ---- where parts pay


@pytest.fixture(scope="module")
def many_tokens(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """A model with many tokens, by its family."""

    @cache
    def made(family: str) -> Reference:
        more = {"opt": {"tie_word_embeddings": False}, "gpt_neox": {"num_hidden_layers": 4}}.get(
            family, {}
        )
        model = random_model(model_type=family, **MANY, **more)
        prompts = random_prompts((5, 9, 9, 1, 12))
        return make_reference(model, tmp_path_factory.mktemp("model"), prompts, 4)

    return made


@pytest.mark.parametrize(
    ("percent", "family"),
    thinned(
        product((DISK, (10, 10, 40, 0, 50, 0)), ("opt", "llama", "gpt_neox", "qwen3", "mixtral")), 2
    ),
)
def test_many_tokens(
    family: str, percent: Percent, many_tokens: Callable[[str], Reference], tmp_path: Path
) -> None:
    known = many_tokens(family)
    policy = Policy(2, 2, percent)
    assert_equal(known, policy, MemoryBudget(), tmp_path)
    with LLM(str(known.folder), policy, dtype="float32", offload_dir=tmp_path) as llm:
        llm.generate(known.prompts, SamplingParams(max_tokens=1))
        assert 0 < rows_of_parts(llm) < MANY["vocab_size"]


def test_a_tied_table_with_many_rows(tmp_path: Path) -> None:
    """Its embedding reads rows, as of a model that is not tied."""
    model = random_model(vocab_size=45_000)
    prompts = random_prompts((5, 3))
    model.save_pretrained(tmp_path / "model")
    with LLM(
        str(tmp_path / "model"), Policy(1, 2, DISK), dtype="float32", offload_dir=tmp_path
    ) as llm:
        assert tokens_of(llm.generate(prompts, SamplingParams(max_tokens=3))) == [
            greedy(model, p, 3) for p in prompts
        ]
        assert 0 < rows_of_parts(llm) < 45_000


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_read_is_planned(tied: bool, tmp_path: Path, forced: Callable[[], None]) -> None:
    """Every part once a sweep, and of the embedding a page for the row's token."""
    forced()
    model = random_model(**SHAPE) if tied else random_model(model_type="llama", **FAMILIES["llama"])
    write_aligned(model, tmp_path)
    one_row = Run(1, 1, stand_in=False, lengths=(1,), new_tokens=5)
    llm = one_row.go(tmp_path, DISK, tmp_path)
    assert llm.policy is not None and llm.report is not None
    spec = with_head_rows(llm.model.spec, rows_of_parts(llm))
    at = CostModel(
        spec, llm.policy, one_row.need(spec), Machine(nominal_profile(True), "float32", True)
    )
    read = disk_read_bytes(at, [(tuple(one_row.blocks[0]), 1)])
    assert llm.report.io_bytes_by_kind["weights"]["disk_read"] == read


@pytest.mark.parametrize("stand_in", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_last_rank_of_a_pipeline(
    stand_in: bool, many_tokens: Callable[[str], Reference], forks: Forks, tmp_path: Path
) -> None:
    """It has no embedding, so that parts pay beside a device as well, and with a tied head."""
    tied = random_model(**MANY)
    tied.save_pretrained(tmp_path / "tied")
    known = many_tokens("llama")
    policy = Policy(1, 2, DISK)
    spec = find_model(str(tmp_path / "tied"), None).spec.stage(range(1, 2))
    assert MemoryPlanner(spec, policy, 4, not stand_in).head_rows(
        BlockShape(1, 4, 12, (16,)), SEQUENTIAL
    )
    work = [(known.folder, known.model), (tmp_path / "tied", tied)]
    runs = [
        PipelineRun(str(folder), known.prompts, 3, policy.to_json(), stand_in=stand_in, in_flight=2)
        for folder, _ in work
    ]
    for (_, model), answer in zip(work, answers_of(forks, 2, runs, tmp_path), strict=True):
        assert answer["tokens"] == [greedy(model, prompt, 3) for prompt in known.prompts]

"""Layers with sliding windows: transformers' tokens however long rows are, and eviction in the
other layers as the slow reference has it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from flexgen_h2o import LLM, Policy, SamplingParams
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.core.settings import DECODE, PREFILL
from flexgen_h2o.engine.memory import MemoryPlanner
from flexgen_h2o.engine.workload import workload_of
from flexgen_h2o.evaluation.fidelity import Probe
from flexgen_h2o.kvcache.eviction import H2O, Full
from flexgen_h2o.kvcache.eviction.of_model import OfModel
from flexgen_h2o.kvcache.eviction.policy import RowBudget, RowRecord
from tests.eviction import policies as plain
from tests.eviction.conftest import Known
from tests.eviction.engine import (
    PAIRS,
    STAND_IN,
    Pair,
    Wanted,
    assert_same,
    cut,
    generate,
    run_with,
    wanted,
)
from tests.eviction.plain_models import PlainLlama
from tests.eviction.test_packed_cache import FULL, Rounded
from tests.eviction.test_packed_cache import check as check_packed
from tests.eviction.test_rolling import rolling
from tests.eviction.test_selection import reading
from tests.parity.cases import PLACEMENTS, thinned
from tests.parity.reference import (
    LOGIT_TOLERANCE,
    LogitsByRow,
    greedy,
    random_prompts,
    teacher_forced,
    tokens_of,
)

# 6, 7 and 8 columns
MIXED = "qwen2, windows"
ALL = "mistral, windows"
OTHER = "gpt_oss"
# Within a window for good; that leave it while decoding; one column more, a few, and many.
LENGTHS = (1, 4, 7, 8, 8, 40)
NEW_TOKENS = 14


def prompts_of(
    shape: str, known: Callable[[str], Known]
) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts without near ties, and transformers' tokens for them."""
    model = known(shape).model
    prompts = list[list[int]]()
    tokens = list[list[int]]()
    for i, length in enumerate(LENGTHS):
        for seed in range(20):
            (prompt,) = random_prompts((length,), seed=50 * i + seed)
            own = greedy(model, prompt, NEW_TOKENS)
            best = teacher_forced(model, prompt, own).topk(2).values
            if float((best[:, 0] - best[:, 1]).min()) > 1e-3:
                break
        prompts.append(prompt)
        tokens.append(own)
    assert len({token for row in tokens for token in row}) > 10
    return prompts, tokens


# ---- every column that is seen


@pytest.mark.parametrize("shape", [MIXED, ALL, OTHER])
def test_tokens_and_logits_are_those_of_transformers(
    shape: str, known: Callable[[str], Known], tmp_path: Path
) -> None:
    """tests/parity has the placements. Windows hold what they see; what a row of its own length
    holds is full."""
    prompts, tokens = prompts_of(shape, known)
    policy = Policy(2, 2, PLACEMENTS["kv split three ways"])
    watch = LogitsByRow()
    with LLM(str(known(shape).folder), policy, None, "auto", "float32", STAND_IN, tmp_path) as llm:
        out = llm.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS), watch_logits=watch)
        spec = llm.model.spec
        report = llm.report
    assert tokens_of(out) == tokens
    for row, own in enumerate(tokens):
        want = teacher_forced(known(shape).model, prompts[row], own)
        assert (torch.stack(watch.rows[row]) - want).abs().max() <= LOGIT_TOLERANCE, f"row {row}"
    assert report is not None and report.kv["bytes"] == report.kv["full_bytes"]
    column = spec.kv_bytes_per_token(4) // spec.num_blocks
    in_windows = sum(min(w, n + NEW_TOKENS) for w in spec.windows if w for n in LENGTHS)
    others = spec.windows.count(None) * sum(n + NEW_TOKENS for n in LENGTHS)
    assert report.cache_bytes == column * (in_windows + others)


@pytest.mark.parametrize("shape", [MIXED, ALL, OTHER])
def test_rows_that_begin_alike(shape: str, known: Callable[[str], Known], tmp_path: Path) -> None:
    """A prefix longer than the window and one that is shorter, fed once; layers without one hold it
    in one copy."""
    model = known(shape).model
    header = random_prompts((19,), seed=8)[0]
    for length in (19, 3):
        prompts = [[*header[:length], *own] for own in random_prompts((3, 1, 6, 2, 9), seed=4)]
        want = [greedy(model, prompt, 9) for prompt in prompts]
        policy = Policy(3, 2, PLACEMENTS["kv on host and disk"])
        ran = generate(
            known(shape).folder, prompts, 9, None, policy, tmp_path, STAND_IN, share_prefix="on"
        )
        assert ran.tokens == want
        assert ran.report.spared_tokens >= 3 * length
        assert ran.report.extra["common_prefix"]["tokens"] == (0 if shape == ALL else length)


def test_rows_that_enter_behind_one_copy(known: Callable[[str], Known], tmp_path: Path) -> None:
    """Their windows hold what they see of it."""
    model = known(MIXED).model
    header = random_prompts((11,), seed=8)[0]
    asked = (3, 9, 1, 12, 5, 2, 7, 4, 9)
    prompts = [[*header, *own] for own in random_prompts((3, 1, 6, 2, 9, 1, 12, 4, 2), seed=4)]
    want = [greedy(model, prompt, n) for prompt, n in zip(prompts, asked, strict=True)]
    policy = Policy(2, 1, PLACEMENTS["kv on disk"])
    params = [SamplingParams(max_tokens=n) for n in asked]
    with LLM(str(known(MIXED).folder), policy, None, "auto", "float32", STAND_IN, tmp_path) as llm:
        llm.share_prefix = "on"
        ran = run_with(llm, prompts, params, refill=True)
    assert ran.tokens == want
    assert ran.report.extra["refilled"] == 7 and ran.report.extra["common_prefix"]["tokens"] == 11


@pytest.mark.parametrize("shape", [MIXED, ALL, OTHER])
def test_rows_that_enter(shape: str, known: Callable[[str], Known], tmp_path: Path) -> None:
    """Where rows that were longer or shorter have been."""
    prompts, tokens = (3 * found for found in prompts_of(shape, known))
    asked = [1 + 5 * i % NEW_TOKENS for i in range(len(prompts))]
    policy = Policy(2, 2, PLACEMENTS["kv split three ways"])
    with LLM(str(known(shape).folder), policy, None, "auto", "float32", STAND_IN, tmp_path) as llm:
        ran = run_with(llm, prompts, [SamplingParams(max_tokens=n) for n in asked], refill=True)
    assert ran.tokens == [row[:n] for row, n in zip(tokens, asked, strict=True)]
    assert ran.report.extra["refilled"] == len(prompts) - policy.block_size


@pytest.mark.parametrize("placement", ["all on device", "kv on disk"])
def test_many_tokens_in_one_sweep(
    placement: str, known: Callable[[str], Known], tmp_path: Path
) -> None:
    """Known ones: each is a step, and drops a column of its own."""
    prompts, tokens = prompts_of(MIXED, known)
    watch = LogitsByRow()
    policy = Policy(3, 2, PLACEMENTS[placement])
    with LLM(str(known(MIXED).folder), policy, None, "auto", "float32", STAND_IN, tmp_path) as llm:
        llm.follow(prompts, tokens, watch, max_tokens_per_sweep=9)
    for row, own in enumerate(tokens):
        want = teacher_forced(known(MIXED).model, prompts[row], own)
        assert (torch.stack(watch.rows[row]) - want).abs().max() <= LOGIT_TOLERANCE, f"row {row}"


@pytest.mark.parametrize("mode", [DECODE, PREFILL])
def test_log_probabilities(mode: str, known: Callable[[str], Known], tmp_path: Path) -> None:
    """Of continuations, decoded and behind their prompts."""
    prompts, tokens = prompts_of(MIXED, known)
    with LLM(
        str(known(MIXED).folder), Policy(2, 2), None, "auto", "float32", offload_dir=tmp_path
    ) as llm:
        found = llm.score(prompts, tokens, mode)
    for prompt, own, one in zip(prompts, tokens, found, strict=True):
        want = teacher_forced(known(MIXED).model, prompt, own).log_softmax(-1)[range(len(own)), own]
        assert one.is_greedy and one.logprob == pytest.approx(float(want.sum()), abs=1e-3)


def test_prompts_beyond_a_budget_get_log_probabilities(
    known: Callable[[str], Known], tmp_path: Path
) -> None:
    """They are fed up to the budget of the layers without a window, which is not the least of
    all."""
    prompt = random_prompts((30,))[0]
    params = SamplingParams(max_tokens=3, prompt_logprobs=0)
    with LLM(
        str(known(MIXED).folder), Policy(1), H2O(heavy_size=8, recent_size=4), offload_dir=tmp_path
    ) as llm:
        (out,) = llm.generate([prompt], params)
        assert llm.report is not None and llm.report.extra["prefill_fed_tokens"] == 12
    assert (
        out.prompt_logprobs is not None
        and len(out.prompt_logprobs) == 30
        and len(out.token_ids) == 3
    )


# ---- columns that are dropped, packed, rolled or not read


@pytest.fixture(scope="module")
def made(known: Callable[[str], Known]) -> Callable[..., Wanted]:
    """What the slow reference generates with the mixed model."""

    @cache
    def reference(pair: str, how: str = "") -> Wanted:
        one = known(MIXED)
        plain_model = PlainLlama(one.model, rolling=True) if how == "rolling" else one.plain
        stored = (lambda: Rounded(4)) if how == "packed" else None
        turn = plain_model.turn if how == "rolling" else None
        pairs = {
            **PAIRS,
            FULL: Pair(
                PAIRS["local"].engine, plain.h2o(plain.Budget(heavy_size=99, recent_size=9))
            ),
        }
        return wanted(plain_model, pairs[pair], (4, 9, 9, 21), 12, stored, turn)

    return reference


PLACES = ("kv split three ways", "kv on disk", "all on device", "kv on host and disk")
POLICIES = (
    "h2o",
    "h2o-norm, of the sequence",
    "h2o-norm",
    "snapkv",
    "local",
    "random",
    "h2o, prompt only",
)


@pytest.mark.parametrize(
    ("pair", "place"), thinned([(pair, PLACES[i % 4]) for i, pair in enumerate(POLICIES)], 3)
)
def test_a_policy_drops_columns_of_the_other_layers(
    pair: str,
    place: str,
    known: Callable[[str], Known],
    made: Callable[..., Wanted],
    tmp_path: Path,
) -> None:
    """Two of four."""
    ran = generate(
        known(MIXED).folder,
        made(pair).prompts,
        12,
        PAIRS[pair].engine,
        Policy(2, 2, PLACEMENTS[place]),
        tmp_path,
        STAND_IN,
    )
    assert_same(made(pair), ran)
    assert {block for _, block in ran.seen} == {1, 3}


@pytest.mark.parametrize(("pair", "place"), [(FULL, "kv on disk"), ("h2o", "kv split three ways")])
def test_packed_columns(
    pair: str,
    place: str,
    known: Callable[[str], Known],
    made: Callable[..., Wanted],
    tmp_path: Path,
) -> None:
    policy = Policy(2, 2, PLACEMENTS[place], compress_cache=True, cache_bits=4)
    check_packed(made(pair, "packed"), pair, known(MIXED).folder, policy, tmp_path, STAND_IN)


def test_rolling_positions(
    known: Callable[[str], Known], made: Callable[..., Wanted], tmp_path: Path
) -> None:
    """Within a window the columns are as far from each other as they were."""
    want = made("h2o", "rolling")
    policy = Policy(2, 2, PLACEMENTS["kv on host and disk"])
    ran = generate(
        known(MIXED).folder, want.prompts, 12, rolling("h2o").engine, policy, tmp_path, STAND_IN
    )
    assert_same(want, ran)


def test_windows_count_whole_beside_selection(
    known: Callable[[str], Known], tmp_path: Path
) -> None:
    found = wanted(known(MIXED).plain, reading(0.3), (9, 14), 8)
    want = Wanted(found.prompts, [row.without_kept() for row in found.rows])
    policy = Policy(2, 1, PLACEMENTS["kv on host"], attn_sparsity=0.3)
    assert_same(
        want, generate(known(MIXED).folder, want.prompts, 8, None, policy, tmp_path, STAND_IN)
    )


def test_rows_that_enter_are_evicted(
    known: Callable[[str], Known], made: Callable[..., Wanted], tmp_path: Path
) -> None:
    one = made("h2o")
    asked = (3, 12, 1, 5, 2, 9, 12, 4)
    want = cut(Wanted(one.prompts * 2, one.rows * 2), asked)
    policy = Policy(2, 1, PLACEMENTS["kv on disk"])
    params = [SamplingParams(max_tokens=n) for n in asked]
    with LLM(
        str(known(MIXED).folder), policy, PAIRS["h2o"].engine, "auto", "float32", STAND_IN, tmp_path
    ) as llm:
        assert_same(want, run_with(llm, want.prompts, params, refill=True))


# ---- budgets, plans, refusals


def test_budgets_are_of_the_layers_without_a_window() -> None:
    windows = (5, None, 3, None)
    policy = OfModel(H2O(heavy_size=6, recent_size=2), windows)
    found = [policy.budget(20, 4, block) for block in range(4)]
    assert found == [RowBudget(0, 0, 5), RowBudget(0, 6, 2), RowBudget(0, 0, 3), RowBudget(0, 6, 2)]
    assert [policy.slots(20, 4, block) for block in range(4)] == [5, 9, 3, 9]
    assert [OfModel(Full(), windows).slots(2, 2, block) for block in range(4)] == [3, 3, 3, 3]


def test_a_plan_counts_windows(known: Callable[[str], Known], tmp_path: Path) -> None:
    """Slots, columns of each sweep, and what is recorded of them."""
    with LLM(
        str(known(MIXED).folder), Policy(1), H2O(0.5, kv_budget=None), offload_dir=tmp_path
    ) as llm:
        spec: ModelSpec = llm.model.spec
        need = workload_of(llm.eviction, 3, {(20, 6), (4, 6)}, spec.num_blocks, spec.windows)
    assert need.slots == (6, 21, 6, 21) and need.kept == (6, 20, 6, 20)
    assert [need.columns(0, sweep, 4) for sweep in range(4)] == [4, 5, 6, 6]
    assert [need.columns(0, sweep, 20) for sweep in range(4)] == [6, 6, 6, 6]
    assert need.columns(1, 1, 10) == 11
    record = RowRecord(("positions", "scores"))
    memory = MemoryPlanner(spec, Policy(), 4, True)
    layouts = [memory.kv_layout(2, 8, memory.record_in(block, record)) for block in (0, 1)]
    assert [layout.record for layout in layouts] == [RowRecord(), record]


@pytest.mark.parametrize("how", [{"heavy_size": 3, "recent_size": 3}, {"kv_budget": 0.5}])
def test_where_all_layers_have_windows_nothing_is_left_to_drop(
    how: dict[str, Any], known: Callable[[str], Known], tmp_path: Path
) -> None:
    with LLM(str(known(ALL).folder), Policy(1), H2O(**how), offload_dir=tmp_path) as llm:
        for ask in (llm.check_plan, lambda: llm.generate([[5, 6]], SamplingParams(max_tokens=2))):
            with pytest.raises(
                UsageError, match=r"--eviction h2o: every layer of .* 7 at most, .*; leave it out"
            ):
                ask()
        llm.eviction = Probe()  # the full cache, watched
        llm.check_plan()

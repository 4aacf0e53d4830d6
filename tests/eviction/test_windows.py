"""Layers with sliding windows: what their rows hold, and budgets of the other layers; the cases of
tests/eviction/cases.py and tests/parity have the tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o import LLM, Policy, SamplingParams
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.evaluation.fidelity import Probe
from flexgen_h2o.kvcache.eviction import H2O, Full
from flexgen_h2o.kvcache.eviction.of_model import OfModel
from flexgen_h2o.kvcache.eviction.policy import RowBudget
from tests.eviction.cases import WINDOWS, Known
from tests.parity.reference import random_prompts

ALL = "mistral, windows"
LENGTHS = (1, 4, 7, 8, 40)
NEW_TOKENS = 14


@pytest.mark.parametrize("shape", [WINDOWS, ALL, "gpt_oss"])
def test_windows_hold_what_they_see(
    shape: str, known: Callable[[str], Known], tmp_path: Path
) -> None:
    """What a row of its own length holds is full."""
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    folder = str(known(shape).folder)
    with LLM(folder, Policy(2, 2), None, "auto", "float32", offload_dir=tmp_path) as llm:
        llm.generate(random_prompts(LENGTHS), params)
        spec = llm.model.spec
        report = llm.report
    assert report is not None and report.kv["bytes"] == report.kv["full_bytes"]
    column = spec.kv_bytes_per_token(4) // spec.num_blocks
    in_windows = sum(min(w, n + NEW_TOKENS) for w in spec.windows if w for n in LENGTHS)
    others = spec.windows.count(None) * sum(n + NEW_TOKENS for n in LENGTHS)
    assert report.cache_bytes == column * (in_windows + others)


def test_prompts_beyond_a_budget_get_log_probabilities(
    known: Callable[[str], Known], tmp_path: Path
) -> None:
    """They are fed up to the budget of the layers without a window, which is not the least of
    all."""
    prompt = random_prompts((30,))[0]
    params = SamplingParams(max_tokens=3, prompt_logprobs=0)
    with LLM(
        str(known(WINDOWS).folder),
        Policy(1),
        H2O(heavy_size=8, recent_size=4),
        offload_dir=tmp_path,
    ) as llm:
        (out,) = llm.generate([prompt], params)
        assert llm.report is not None and llm.report.extra["prefill_fed_tokens"] == 12
    assert (
        out.prompt_logprobs is not None
        and len(out.prompt_logprobs) == 30
        and len(out.token_ids) == 3
    )


# ---- budgets, plans, refusals


def test_budgets_are_of_the_layers_without_a_window() -> None:
    windows = (5, None, 3, None)
    policy = OfModel(H2O(heavy_size=6, recent_size=2), windows)
    found = [policy.budget(20, 4, block) for block in range(4)]
    assert found == [RowBudget(0, 0, 5), RowBudget(0, 6, 2), RowBudget(0, 0, 3), RowBudget(0, 6, 2)]
    assert [policy.slots(20, 4, block) for block in range(4)] == [5, 9, 3, 9]
    assert [OfModel(Full(), windows).slots(2, 2, block) for block in range(4)] == [3, 3, 3, 3]


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

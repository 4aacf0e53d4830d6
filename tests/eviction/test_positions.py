"""Rows that fill the model's positions, and with rolling positions outgrow them: a column's position
is then its rank among those that its row holds."""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flexgen_h2o import LLM, Policy, SamplingParams
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.settings import ROLLING
from flexgen_h2o.kvcache.eviction import H2O
from tests.eviction.cases import Case, Known, run_case
from tests.eviction.engine import Wanted
from tests.parity.reference import random_prompts

KnownModels = Callable[[str], Known]
OUTGROWING = Case(
    "h2o", "llama, 16 positions", "kv on disk", lengths=(12, 9, 5), new=24, rolling=True
)


def test_rows_outgrow_the_positions(
    known: KnownModels, reference: Callable[[Case], Wanted], tmp_path: Path
) -> None:
    """24 tokens after 12, 9 and 5, with 16 positions; with original ones a row ends when they are
    used up."""
    original = replace(OUTGROWING, rolling=False, new=(5, 8, 12), asked=24)
    for case in (OUTGROWING, original):
        run_case(case, reference(case), known(case.shape), tmp_path)


@pytest.mark.parametrize(
    ("shape", "eviction", "prompt", "grows", "slots"),
    [
        ("llama, 16 positions", H2O(heavy_size=10, recent_size=8), 5, 12, 16),
        ("llama, 16 positions", H2O(heavy_size=2, while_decoding=False), 5, 13, 16),
        # int(0.4 x (9 + 150)) columns and the newcomer are 64; one token more makes them 65.
        ("llama", H2O(kv_budget=0.4), 9, 150, 64),
    ],
)
def test_a_row_that_holds_as_many_columns_as_there_are_positions_ends(
    shape: str,
    eviction: H2O,
    prompt: int,
    grows: int,
    slots: int,
    known: KnownModels,
    tmp_path: Path,
) -> None:
    """Nobody else's row ends with it."""
    policy = replace(eviction, positions=ROLLING)
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1000, 4)]
    folder = str(known(shape).folder)
    with LLM(folder, Policy(2), policy, dtype="float32", offload_dir=tmp_path) as llm:
        found = llm.generate(random_prompts((prompt, 3)), params)
        assert llm.report is not None and llm.report.kv["slots"] == slots
    assert [len(row.token_ids) for row in found] == [grows, 4]
    assert [row.finish_reason for row in found] == ["length", "length"]


@pytest.mark.parametrize(
    ("shape", "policy", "eviction", "says"),
    [
        ("normal", Policy(1), H2O(positions=ROLLING), "--positions rolling: .*rotary embeddings"),
        (
            "llama",
            Policy(1, compress_cache=True),
            H2O(positions=ROLLING),
            "--positions rolling: .*--compress-cache",
        ),
        ("mistral, windows", Policy(1), H2O(kv_budget=0.5), "--eviction h2o: .* 7 at most"),
    ],
)
def test_what_a_model_cannot_do(
    shape: str, policy: Policy, eviction: H2O, says: str, known: KnownModels, tmp_path: Path
) -> None:
    """Roll positions, or drop columns if every layer has a window."""
    with LLM(str(known(shape).folder), policy, eviction, offload_dir=tmp_path) as llm:
        for ask in (llm.check_plan, lambda: llm.generate([[5, 6]], SamplingParams(max_tokens=2))):
            with pytest.raises(UsageError, match=says):
                ask()

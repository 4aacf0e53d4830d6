"""Rows that enter a running block: the tokens that each gets alone, on every tier and with every eviction policy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flexgen_h2o import LLM, SamplingParams
from tests.parity.cases import CONFIGURATIONS, PLACEMENTS, thinned
from tests.parity.reference import LONG, Reference, greedy, random_prompts, tokens_of

# In the order of the input; a block holds 4 to 8 of them. The longest answer goes on while all others come and go.
LENGTHS = (5, 9, 9, 1, 12, 3, 17, 2, 9, 4, 6, 21, 8, 1, 5, 7, 11)
ASKED = (3, 8, 1, 5, 2, LONG, 4, 9, 1, 2, 13, 3, 6, 1, 20, 2, 7)


@pytest.fixture(scope="module")
def known(reference: Callable[[str], Reference]) -> tuple[Path, list[list[int]], list[list[int]]]:
    """A model's folder, prompts, and what transformers makes of them."""
    model, prompts = reference("normal"), random_prompts(LENGTHS, seed=5)
    return model.folder, prompts, [greedy(model.model, p, n) for p, n in zip(prompts, ASKED, strict=True)]


# Every configuration, and every placement but those of weights alone, which rows that enter do not move.
NAMES = [name for name in PLACEMENTS if not name.startswith("weights")]
CASES = [(placement, list(CONFIGURATIONS)[i % len(CONFIGURATIONS)]) for i, placement in enumerate(NAMES)]


@pytest.mark.parametrize(("placement", "configuration"), thinned(CASES, 2))
def test_placement_by_configuration(
    placement: str, configuration: str, known: tuple[Path, list[list[int]], list[list[int]]], tmp_path: Path
) -> None:
    folder, prompts, tokens = known
    chosen = CONFIGURATIONS[configuration]
    policy, params = chosen.policy(PLACEMENTS[placement]), [SamplingParams(max_tokens=n) for n in ASKED]
    with LLM(str(folder), policy, dtype="float32", budget=chosen.budget, offload_dir=tmp_path) as llm:
        out = llm.generate(prompts, params)
        assert tokens_of(out) == tokens
        assert llm.report is not None
        refilled, sweeps = llm.report.extra["refilled"], llm.report.extra["sweeps"]
        assert refilled == len(prompts) - policy.block_size and llm.report.extra["blocks"] == 1
        separate = llm.generate(prompts, params, refill=False)
        assert tokens_of(separate) == tokens
        assert llm.report.extra["blocks"] > 1 and "refilled" not in llm.report.extra
        assert sweeps < llm.report.extra["sweeps"]

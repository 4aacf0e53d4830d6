"""Rows that share a prefix give what they give alone: transformers' tokens and logits, whatever is
shared and where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flexgen_h2o import LLM, MemoryBudget, Policy, SamplingParams
from flexgen_h2o.kvcache.prefixes import SHARINGS, group_prompts
from tests.parity.beginnings import cases, references
from tests.parity.cases import CONFIGURATIONS, PLACEMENTS, thinned
from tests.parity.conftest import NEW_TOKENS
from tests.parity.reference import (
    LogitsByRow,
    Reference,
    make_reference,
    opened,
    random_model,
    random_prompts,
    tokens_of,
)

# Two headers that begin with the same three tokens, a prompt with neither, two that are equal, one
# that another begins with, and one of a single token.
HEADERS = (13, 10)
OTHERS = (4, 6)


def alike(seed: int = 5) -> list[list[int]]:
    first, second = random_prompts(HEADERS, seed)
    second[:3] = first[:3]
    owns = random_prompts((3, 1, 3, 6, 2, 9, 1, 2), seed + 1)
    rows = [[*(first if i % 2 else second), *own] for i, own in enumerate(owns)]
    return [*rows, rows[0], rows[3][:-2], *random_prompts((*OTHERS, 1), seed + 2)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """The reference of a shape by its name."""
    return references(alike, tmp_path_factory)


def generate(
    known: Reference,
    policy: Policy,
    offload_dir: Path,
    how: str,
    budget: MemoryBudget | None = None,
) -> int:
    """Check the tokens and the logits, and return how many prompt tokens were fed."""
    watch = LogitsByRow()
    with opened(known.folder, policy, offload_dir, budget=budget) as llm:
        llm.share_prefix = how
        out = llm.generate(known.prompts, SamplingParams(max_tokens=NEW_TOKENS), watch_logits=watch)
    assert tokens_of(out) == known.tokens
    watch.check(known.logits)
    assert llm.report is not None and llm.report.prefill.tokens == sum(map(len, known.prompts))
    return fed_tokens(llm)


def fed_tokens(llm: LLM) -> int:
    assert llm.report is not None
    return int(llm.report.extra["prefill_fed_tokens"])


@pytest.mark.parametrize(("shape", "placement", "configuration"), thinned(cases(), 2))
def test_tokens_and_logits(
    shape: str,
    placement: str,
    configuration: str,
    shared: Callable[[str], Reference],
    tmp_path: Path,
) -> None:
    known = shared(shape)
    chosen = CONFIGURATIONS[configuration]
    fed = generate(known, chosen.policy(PLACEMENTS[placement]), tmp_path, "on", chosen.budget)
    assert (fed < sum(map(len, known.prompts))) is (chosen.gbs > 1)


def test_the_prefix_is_fed_once_a_micro_batch(
    shared: Callable[[str], Reference], tmp_path: Path
) -> None:
    """Counted where the tokens are fed: in one micro-batch the two headers, the rows' own tokens,
    and the others."""
    known = shared("normal")
    whole = sum(map(len, known.prompts))
    fed = {how: generate(known, Policy(16, 1), tmp_path, how) for how in SHARINGS}
    assert fed["off"] == fed["auto"] == whole  # both headers are shorter than what pays
    # Four rows have the first header and one is the beginning of one of them; five have the second,
    # two of them equal.
    assert fed["on"] <= whole - 4 * HEADERS[0] - 4 * HEADERS[1]


def test_auto_shares_a_long_header(tmp_path: Path) -> None:
    """With the defaults; all rows have it, so it is fed once a block."""
    model = random_model(max_position_embeddings=96)
    header = random_prompts((40,), 8)[0]
    owns = random_prompts((5, 2, 9, 1, 5, 7), 9)
    known = make_reference(model, tmp_path / "model", [[*header, *own] for own in owns], NEW_TOKENS)
    assert generate(known, Policy(2, 2), tmp_path, "auto") == 2 * 40 + sum(map(len, owns))


def test_what_is_planned_is_what_is_fed(tmp_path: Path) -> None:
    """Step buffers and hidden states have room for the tokens that are fed, and a larger block
    fits."""
    random_model(max_position_embeddings=1024).save_pretrained(tmp_path / "model")
    header = random_prompts((600,), 8)[0]
    prompts = [[*header, *own] for own in random_prompts((5,) * 16, 9)]
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    held = {}
    for how, common in (("off", 0), ("auto", 600)):
        with opened(tmp_path / "model", Policy(8, 2), tmp_path) as llm:
            llm.share_prefix = how
            llm.generate(prompts, params)
            held[how] = llm.peak_bytes["host"]
            assert llm._engine is not None
            shape = llm._engine.plan.shape
        parts = (group_prompts(prompts[i : i + 8], SHARINGS[how]) for i in (0, 8))
        assert shape.tokens == max(sum(g.tokens for g in groups) for groups in parts)
        assert shape.common == common
    assert held["auto"] < held["off"]
    with opened(tmp_path / "model", "auto", tmp_path) as llm:
        llm.generate(prompts, params)
    assert fed_tokens(llm) <= 600 + 16 * 5 + 600

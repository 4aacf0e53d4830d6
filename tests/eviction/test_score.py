"""Scored tokens are forced through decode: eviction acts on them as on generated ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from flexgen_h2o import LLM, Policy, SamplingParams
from tests.eviction.conftest import Known
from tests.eviction.engine import PAIRS
from tests.eviction.policies import Policy as PlainPolicy
from tests.eviction.policies import Sizes
from tests.eviction.reference import evicted_greedy
from tests.parity.reference import random_prompts

LENGTHS, SCORED = (12, 12, 3, 21, 1), (6, 9, 12, 4, 15)
PROMPTS, SCORES = random_prompts(LENGTHS, seed=11), random_prompts(SCORED, seed=12)
PROMPTS[1] = PROMPTS[0]


@pytest.mark.parametrize(
    ("shape", "pair", "policy"),
    [
        ("normal", "h2o", Policy(2, 2)),
        ("llama", "h2o", Policy(5, 1, (50, 0, 0, 50, 0, 100))),
        ("llama", "h2o, ratios", Policy(3, 1)),
        ("gpt_neox", "tova", Policy(2, 1)),
        ("normal", "local", Policy(4, 1)),
    ],
)
def test_scores_equal_the_reference(
    shape: str, pair: str, policy: Policy, known: Callable[[str], Known], tmp_path: Path
) -> None:
    one, both = known(shape), PAIRS[pair]
    with LLM(str(one.folder), policy, both.engine, dtype="float32", offload_dir=tmp_path) as llm:
        found = llm.score(PROMPTS, SCORES)
        whole = llm.score(PROMPTS, SCORES, "prefill")
        full = [sum(each.logprob for each in row.logprobs or ()) for row in whole]
    for prompt, ids, row in zip(PROMPTS, SCORES, found, strict=True):
        want = evicted_greedy(one.plain, prompt, len(ids), both.plain, given=dict(enumerate(ids)))
        each = want.logits.log_softmax(-1)[range(len(ids)), ids]
        assert row.logprobs is not None
        assert [lp.logprob for lp in row.logprobs] == pytest.approx(each.tolist(), abs=1e-4)
    assert max(abs(a.logprob - b) for a, b in zip(found, full, strict=True)) > 1e-3, "nothing was evicted"


def of_length(policy: PlainPolicy, length: int, prompt_len: int, layer: int) -> Sizes:
    """What the policy keeps of a prompt of another length."""
    return policy.sizes(length, layer)


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("pair", ["h2o, ratios", "h2o", "local"])
def test_prompts_beyond_the_budget_are_scored_in_decode_steps(
    pair: str, max_tokens: int, known: Callable[[str], Known], tmp_path: Path
) -> None:
    """As h2o_hf's mask does: a budget of the whole prompt, full until it is used up, and one column out for each in."""
    one, both = known("llama"), PAIRS[pair]
    prompts = random_prompts((30, 9, 1, 17, 8), seed=13)
    with LLM(str(one.folder), Policy(3, 1), both.engine, dtype="float32", offload_dir=tmp_path) as llm:
        params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=1, logprobs=0)
        found = llm.generate(prompts, params)
        budgets = [both.engine.budget(len(p), 0, llm.model.spec.num_blocks).columns for p in prompts]
    evicted = 0
    for prompt, columns, row in zip(prompts, budgets, found, strict=True):
        assert row.prompt_logprobs is not None and len(row.prompt_logprobs) == len(prompt)
        assert row.token_ids == row.token_ids[:max_tokens] and len(row.logprobs or ()) == len(row.token_ids)
        fed = min(columns, len(prompt))
        of_whole = replace(both.plain, sizes=partial(of_length, both.plain, len(prompt)))
        given = dict(enumerate(prompt[fed:]))
        want = evicted_greedy(one.plain, prompt[:fed], len(given) + max(1, max_tokens), of_whole, given=given)
        evicted += len(given)
        each = want.logits.log_softmax(-1)
        wanted = each[range(len(given)), prompt[fed:]].tolist()
        assert [lp.logprob for lp in row.prompt_logprobs[fed:] if lp] == pytest.approx(wanted, abs=1e-4)
        if max_tokens and want.least_token_gap > 1e-3:
            assert row.token_ids == want.tokens[len(given) :]
    assert evicted > 15

"""Scored tokens are forced through decode: eviction acts on them as on generated ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flexgen_h2o import H2O, LLM, Policy, SamplingParams
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.engine.generation import Callbacks
from flexgen_h2o.engine.sequence import Sequence, with_params
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.models import llama
from tests.eviction.cases import WINDOWS, Known
from tests.eviction.engine import PAIRS
from tests.eviction.reference import evicted_greedy
from tests.parity.reference import random_prompts

LENGTHS = (12, 12, 3, 21, 1)
SCORED = (6, 9, 12, 4, 15)
PROMPTS = random_prompts(LENGTHS, seed=11)
SCORES = random_prompts(SCORED, seed=12)
PROMPTS[1] = PROMPTS[0]
EIGHT = H2O(heavy_size=4, recent_size=4)  # columns of a row


def opened(one: Known, policy: Policy, eviction: Eviction | None, folder: Path) -> LLM:
    return LLM(str(one.folder), policy, eviction, dtype="float32", offload_dir=folder)


@pytest.mark.parametrize(
    ("shape", "pair", "policy"),
    [
        ("normal", "h2o", Policy(2, 2)),
        ("llama", "h2o, ratios", Policy(5, 1, (50, 0, 0, 50, 0, 100))),
        ("normal", "h2o, of the sequence", Policy(3, 1)),
        ("gpt_neox", "tova", Policy(2, 1)),
    ],
)
def test_scores_equal_the_reference(
    shape: str, pair: str, policy: Policy, known: Callable[[str], Known], tmp_path: Path
) -> None:
    one = known(shape)
    both = PAIRS[pair]
    with opened(one, policy, both.engine, tmp_path) as llm:
        found = llm.score(PROMPTS, SCORES)
        whole = llm.score(PROMPTS, SCORES, "prefill")
        full = [sum(each.logprob for each in row.logprobs or ()) for row in whole]
    for prompt, ids, row in zip(PROMPTS, SCORES, found, strict=True):
        want = evicted_greedy(one.plain, prompt, len(ids), both.plain, given=dict(enumerate(ids)))
        each = want.logits.log_softmax(-1)[range(len(ids)), ids]
        assert row.logprobs is not None
        assert [lp.logprob for lp in row.logprobs] == pytest.approx(each.tolist(), abs=1e-4)
    assert max(abs(a.logprob - b) for a, b in zip(found, full, strict=True)) > 1e-3, (
        "nothing was evicted"
    )


@pytest.mark.parametrize(
    ("shape", "pair", "max_tokens"),
    [
        ("llama", "h2o, ratios", 5),
        ("llama", "h2o", 0),
        (WINDOWS, "h2o", 3),  # up to the budget of the layers without a window, the larger one
        ("llama", "local", 1),
        ("llama", "h2o, of the sequence", 5),
    ],
)
def test_prompts_beyond_the_budget_are_scored_in_decode_steps(
    shape: str, pair: str, max_tokens: int, known: Callable[[str], Known], tmp_path: Path
) -> None:
    """As h2o_hf's mask does: a budget of the whole prompt, full until it is used up, and one column
    out for each in."""
    one = known(shape)
    both = PAIRS[pair]
    prompts = random_prompts((30, 9, 1, 17, 8), seed=13)
    with opened(one, Policy(3, 1), both.engine, tmp_path) as llm:
        params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=1, logprobs=0)
        found = llm.generate(prompts, params)
    new = max(2, max_tokens)
    evicted = 0
    for prompt, row in zip(prompts, found, strict=True):
        assert row.prompt_logprobs is not None and len(row.prompt_logprobs) == len(prompt)
        assert len(row.logprobs or ()) == len(row.token_ids) <= max_tokens
        sizes = both.plain.sizes(len(prompt), new)
        fed = min(sizes.total, len(prompt))
        of_whole = replace(both.plain, sizes=lambda fed, decoded, whole=sizes: whole)
        given = dict(enumerate(prompt[fed:]))
        want = evicted_greedy(
            one.plain, prompt[:fed], len(given) + max(1, max_tokens), of_whole, given=given
        )
        evicted += len(given)
        each = want.logits.log_softmax(-1)
        wanted = each[range(len(given)), prompt[fed:]].tolist()
        assert [lp.logprob for lp in row.prompt_logprobs[fed:] if lp] == pytest.approx(
            wanted, abs=1e-4
        )
        if max_tokens and want.least_token_gap > 1e-3:
            assert row.token_ids == want.tokens[len(given) :]
    assert evicted > 15


@pytest.mark.parametrize("fails", [False, True])
def test_rows_that_fail_or_that_nobody_waits_for_take_all_tokens_that_they_are_given(
    fails: bool, known: Callable[[str], Known], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of these and a row's own first one come out of one sweep, in which no row may end
    before."""
    head = llama.head
    calls = list[int]()

    def broken(spec: Any, w: Any, x: torch.Tensor, logits: torch.Tensor, ws: Any) -> None:
        head(spec, w, x, logits, ws)
        calls.append(len(x))
        if len(calls) > 2:  # from the first decode sweep on
            logits[0] = torch.nan

    if fails:
        monkeypatch.setattr(llama, "head", broken)
    prompts = [Sequence(i, tuple(ids)) for i, ids in enumerate(random_prompts((30, 30), seed=13))]
    done = list[Sequence]()
    seen = list[int]()
    params = SamplingParams(max_tokens=5, prompt_logprobs=0, ignore_eos=True)
    callbacks = Callbacks(
        should_continue=lambda row: bool(seen.append(len(row.generated_ids))), isolates_errors=True
    )
    with opened(known("llama"), Policy(2, 1), EIGHT, tmp_path) as llm:
        llm.run(with_params(prompts, params), done.extend, callbacks)
    assert sorted(str(one.finish_reason) for one in done) == (
        ["error", "length"] if fails else ["length", "length"]
    )
    assert seen == [1] * (1 if fails else 2)


def test_the_report_is_of_the_budgets_that_rows_had(
    known: Callable[[str], Known], tmp_path: Path
) -> None:
    """Of a prompt that is cut to its budget, not of what is left of it."""
    params = SamplingParams(max_tokens=3, prompt_logprobs=0, ignore_eos=True)
    eviction = H2O(heavy_ratio=0.2, recent_ratio=0.2, protect=4)
    with opened(known("llama"), Policy(2, 1), eviction, tmp_path) as llm:
        llm.generate(random_prompts((30, 30), seed=13), params)
        report = llm.report
    assert report is not None and (report.prompt_len, report.gen_len) == (30, 3)
    assert report.kv["slots"] == 13 and report.prefill.tokens == 2 * 12


def test_wrong_continuations_are_named_by_their_place(
    known: Callable[[str], Known], tmp_path: Path
) -> None:
    with opened(known("llama"), Policy(2, 1), None, tmp_path) as llm:
        for wrong, name in (([10**6], "continuations"), ([4] * 5000, "prompts")):
            with pytest.raises(UsageError, match=rf"^{name}\[1\]: "):
                llm.follow([[3], [4]], [[3], wrong], lambda rows, logits: None)

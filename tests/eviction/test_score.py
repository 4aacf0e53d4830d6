"""Scored tokens are forced through decode: eviction acts on them as on generated ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from flexgen_h2o import H2O, LLM, Policy, SamplingParams
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.engine.generation import Callbacks
from flexgen_h2o.engine.sequence import Sequence, with_params
from flexgen_h2o.kernels.workspace import Workspace
from flexgen_h2o.models import Weights, llama
from tests.eviction.cases import Known
from tests.eviction.engine import PAIRS
from tests.eviction.policies import Policy as PlainPolicy
from tests.eviction.policies import Sizes
from tests.eviction.reference import evicted_greedy
from tests.parity.reference import random_prompts

LENGTHS = (12, 12, 3, 21, 1)
SCORED = (6, 9, 12, 4, 15)
PROMPTS = random_prompts(LENGTHS, seed=11)
SCORES = random_prompts(SCORED, seed=12)
PROMPTS[1] = PROMPTS[0]
EIGHT = H2O(heavy_size=4, recent_size=4)  # columns of a row


@pytest.mark.parametrize(
    ("shape", "pair", "policy"),
    [
        ("normal", "h2o", Policy(2, 2)),
        ("llama", "h2o", Policy(5, 1, (50, 0, 0, 50, 0, 100))),
        ("llama", "h2o, ratios", Policy(3, 1)),
        ("normal", "h2o, of the sequence", Policy(3, 1)),
        ("gpt_neox", "tova", Policy(2, 1)),
        ("normal", "local", Policy(4, 1)),
    ],
)
def test_scores_equal_the_reference(
    shape: str, pair: str, policy: Policy, known: Callable[[str], Known], tmp_path: Path
) -> None:
    one = known(shape)
    both = PAIRS[pair]
    with LLM(str(one.folder), policy, both.engine, dtype="float32", offload_dir=tmp_path) as llm:
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


def of_length(policy: PlainPolicy, length: int, most_new: int, fed: int, decoded: int) -> Sizes:
    """What the policy keeps of a longer prompt, and of other new tokens."""
    return policy.sizes(length, most_new)


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("pair", ["h2o, ratios", "h2o", "local", "h2o, of the sequence"])
def test_prompts_beyond_the_budget_are_scored_in_decode_steps(
    pair: str, max_tokens: int, known: Callable[[str], Known], tmp_path: Path
) -> None:
    """As h2o_hf's mask does: a budget of the whole prompt, full until it is used up, and one column
    out for each in."""
    one = known("llama")
    both = PAIRS[pair]
    prompts = random_prompts((30, 9, 1, 17, 8), seed=13)
    with LLM(
        str(one.folder), Policy(3, 1), both.engine, dtype="float32", offload_dir=tmp_path
    ) as llm:
        params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=1, logprobs=0)
        found = llm.generate(prompts, params)
        new = max(2, max_tokens)
        budgets = [both.engine.budget(len(p), new, 0).columns for p in prompts]
    evicted = 0
    for prompt, columns, row in zip(prompts, budgets, found, strict=True):
        assert row.prompt_logprobs is not None and len(row.prompt_logprobs) == len(prompt)
        assert row.token_ids == row.token_ids[:max_tokens] and len(row.logprobs or ()) == len(
            row.token_ids
        )
        fed = min(columns, len(prompt))
        of_whole = replace(both.plain, sizes=partial(of_length, both.plain, len(prompt), new))
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

    def broken(
        spec: ModelSpec, w: Weights, x: torch.Tensor, logits: torch.Tensor, ws: Workspace
    ) -> None:
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
    with LLM(
        str(known("llama").folder), Policy(2, 1), EIGHT, dtype="float32", offload_dir=tmp_path
    ) as llm:
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
    with LLM(
        str(known("llama").folder), Policy(2, 1), eviction, dtype="float32", offload_dir=tmp_path
    ) as llm:
        llm.generate(random_prompts((30, 30), seed=13), params)
        report = llm.report
    assert report is not None and (report.prompt_len, report.gen_len, report.kv["slots"]) == (
        30,
        3,
        13,
    )
    assert report.prefill.tokens == 2 * 12


def test_rows_enter_only_where_their_given_tokens_have_room(
    known: Callable[[str], Known], tmp_path: Path
) -> None:
    """Longer prompts take more tokens a sweep."""
    asked = SamplingParams(max_tokens=3, prompt_logprobs=0)
    few = Sequence(1, (5,) * 9, params=asked)
    many = Sequence(2, (5,) * 40, params=asked)
    with LLM(
        str(known("llama").folder), Policy(3, 1), EIGHT, dtype="float32", offload_dir=tmp_path
    ) as llm:
        llm.prepare([few])
        assert llm.has_room([few]) and not llm.has_room([many])


def test_wrong_continuations_are_named_by_their_place(
    known: Callable[[str], Known], tmp_path: Path
) -> None:
    with LLM(
        str(known("llama").folder), Policy(2, 1), dtype="float32", offload_dir=tmp_path
    ) as llm:
        for wrong, says in (([[3], [10**6]], "token id"), ([[3], [4] * 5000], "do not fit")):
            name = r"continuations\[1\]" if says == "token id" else r"prompts\[1\]"
            with pytest.raises(UsageError, match=f"^{name}: .*{says}"):
                llm.follow([[3], [4]], wrong, lambda rows, logits: None)

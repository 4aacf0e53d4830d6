"""Log-probabilities of given tokens and of prompts equal transformers', wherever rows stand and
prompts are shared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from flexgen_h2o import MemoryBudget, Policy, SamplingParams
from flexgen_h2o.core.errors import UsageError
from tests.parity.cases import PLACEMENTS
from tests.parity.reference import ByShape, Reference, greedy, opened, random_prompts

# A context for four choices, of which two begin alike; a context of one token; longer and shorter
# ones.
CONTEXT = random_prompts((11,), seed=5)[0]
PROMPTS = [CONTEXT] * 4 + random_prompts((1, 12, 5, 3), seed=6)
CHOICES = random_prompts((1, 3, 2, 3, 2, 1, 4, 5), seed=7)
CHOICES[3][:2] = CHOICES[1][:2]


BUDGET = MemoryBudget("64MiB", "64MiB", "64MiB")


def expected(known: Reference, ids: Sequence[int], first: int) -> tuple[list[float], list[int]]:
    """Of ids[first:], each after those before it: its log-probability, and the likeliest token in
    its place."""
    with torch.no_grad():
        logits = known.model(torch.tensor([list(ids)])).logits[0, first - 1 : -1]
    own = torch.tensor(ids)[first:, None]
    return logits.log_softmax(-1).gather(1, own)[:, 0].tolist(), logits.argmax(-1).tolist()


@pytest.mark.parametrize("mode", ["decode", "prefill"])
@pytest.mark.parametrize(
    ("shape", "policy", "share"),
    [
        ("normal", Policy(3, 2), "auto"),
        ("llama", Policy(8, 1, PLACEMENTS["everything split 30/30"]), "on"),
        ("gpt_neox", Policy(2, 4, PLACEMENTS["kv on disk"]), "on"),
        ("one layer", "auto", "off"),
    ],
)
def test_scores(
    shape: str,
    policy: Policy | str,
    share: str,
    mode: str,
    reference: ByShape,
    tmp_path: Path,
) -> None:
    known = reference(shape)
    likeliest = [expected(known, [*prompt, 5], len(prompt))[1] for prompt in PROMPTS]
    choices = [*CHOICES, *likeliest, *CHOICES[1:4]]
    with opened(known.folder, policy, tmp_path, budget=BUDGET) as llm:
        llm.share_prefix = share
        out = llm.score([*PROMPTS, *PROMPTS], [*CHOICES, *likeliest], mode)
        # All rows begin alike: one copy, unless scores need it.
        out += llm.score([CONTEXT] * 3, CHOICES[1:4], mode)
    for prompt, choice, one in zip([*PROMPTS * 2, *[CONTEXT] * 3], choices, out, strict=True):
        want, best = expected(known, prompt + choice, len(prompt))
        assert one.token_ids == choice and one.logprobs is not None
        assert [each.logprob for each in one.logprobs] == pytest.approx(want, abs=1e-4)
        assert one.logprob == pytest.approx(sum(want), abs=1e-3)
        assert one.is_greedy == (best == choice)
    assert all(one.is_greedy for one in out[8:16])


# Rows that score, rows that generate, rows whose prompts are scored, with nothing generated or
# something.
MIXED = [
    SamplingParams(score=CHOICES[0]),
    SamplingParams(max_tokens=7, prompt_logprobs=0),
    SamplingParams(score=CHOICES[2], score_mode="prefill"),
    SamplingParams(max_tokens=5, logprobs=2),
    SamplingParams(max_tokens=0, prompt_logprobs=1),
    SamplingParams(max_tokens=0, prompt_logprobs=3),
    SamplingParams(max_tokens=4),
    SamplingParams(max_tokens=2, prompt_logprobs=1, logprobs=0),
]


@pytest.mark.parametrize("refill", [False, True])
def test_rows_that_score_beside_others(refill: bool, reference: ByShape, tmp_path: Path) -> None:
    known = reference("normal")
    with opened(known.folder, Policy(2, 1), tmp_path, budget=BUDGET) as llm:
        out = llm.generate(PROMPTS, MIXED, refill=refill)
    for prompt, params, one in zip(PROMPTS, MIXED, out, strict=True):
        if params.score is not None:
            want = sum(expected(known, prompt + one.token_ids, len(prompt))[0])
            assert one.logprob == pytest.approx(want, abs=1e-3)
            continue
        tokens = greedy(known.model, prompt, max(1, params.max_tokens))
        assert one.token_ids == tokens[: params.max_tokens]
        assert (one.logprobs is None) == (params.logprobs is None)
        assert (one.prompt_logprobs is None) == (params.prompt_logprobs is None)
        if one.prompt_logprobs is not None:
            found = one.prompt_logprobs[1:]
            assert one.prompt_logprobs[0] is None and None not in found
            assert {len(each.top) for each in found if each} <= {params.prompt_logprobs}
            want_each = pytest.approx(expected(known, prompt, 1)[0], abs=1e-4)
            assert [each.logprob for each in found if each] == want_each


def test_all_positions_can_be_scored(reference: ByShape, tmp_path: Path) -> None:
    known = reference("normal")
    with opened(known.folder, Policy(1, 1), tmp_path, budget=BUDGET) as llm:
        positions = llm.model.spec.max_positions
        (ids,) = random_prompts((positions + 1,), seed=8)
        for mode in ("decode", "prefill"):
            (one,) = llm.score([ids[:5]], [ids[5:]], mode)
            assert one.logprobs is not None and len(one.logprobs) == positions - 4
            want = pytest.approx(expected(known, ids[:-1], 5)[0], abs=1e-4)
            assert [each.logprob for each in one.logprobs[:-1]] == want
            says = r"prompts\[0\]: \d+ tokens and \d+ to score do not fit"
            with pytest.raises(UsageError, match=says):
                llm.score([ids[:6]], [[*ids[6:], 3]], mode)
            with pytest.raises(UsageError, match="score: token id 99999"):
                llm.generate([[5]], SamplingParams(score=[99999], score_mode=mode))


def test_scores_that_were_not_asked_for(reference: ByShape, tmp_path: Path) -> None:
    with opened(reference("normal").folder, Policy(1, 1), tmp_path, budget=BUDGET) as llm:
        (one,) = llm.score(iter([[5]]), iter([[6, 7]]))  # type: ignore[arg-type]
        assert one.token_ids == [6, 7]
        for given, name in (([[5], [6]], "continuations: "), ([[]], r"continuations\[0\]: ")):
            with pytest.raises(UsageError, match=name):
                llm.score([[5]], given)
        for logprobs, name in ((0, "is_greedy"), (None, "logprob")):
            (one,) = llm.generate([[5]], SamplingParams(max_tokens=2, logprobs=logprobs))
            with pytest.raises(UsageError, match=f"{name}: "):
                getattr(one, name)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"score": []}, "score: "),
        ({"score": [1.5]}, "score: 1.5 is not a whole number"),
        ({"score": "text"}, "score: 'text'"),
        ({"score": [3], "prompt_logprobs": 1}, "prompt_logprobs: "),
        ({"score": [3], "score_mode": "fast"}, 'score_mode: "fast" is not one of decode, prefill'),
    ],
)
def test_bad_parameters(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=f"^{said}"):
        SamplingParams(**values)

"""Log-probabilities of given tokens and of prompts equal transformers', wherever rows stand and
prompts are shared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from flexgen_h2o import LLM, Completion, MemoryBudget, Policy, SamplingParams
from flexgen_h2o.core.errors import UsageError
from tests.parity.cases import PLACEMENTS
from tests.parity.reference import Reference, random_prompts

# A context for four choices, of which two begin alike; a context of one token; longer and shorter
# ones.
CONTEXT = random_prompts((11,), seed=5)[0]
PROMPTS = [CONTEXT] * 4 + random_prompts((1, 12, 5, 3), seed=6)
CHOICES = random_prompts((1, 3, 2, 3, 2, 1, 4, 5), seed=7)
CHOICES[3][:2] = CHOICES[1][:2]


def engine(known: Reference, policy: Policy | str, tmp_path: Path) -> LLM:
    budget = MemoryBudget("64MiB", "64MiB", "64MiB")
    return LLM(str(known.folder), policy, dtype="float32", budget=budget, offload_dir=tmp_path)


def expected(known: Reference, ids: Sequence[int], first: int) -> list[float]:
    """Of ids[first:], each after those before it."""
    with torch.no_grad():
        found = known.model(torch.tensor([list(ids)])).logits[0].log_softmax(-1)
    return [float(found[at - 1, ids[at]]) for at in range(first, len(ids))]


def assert_scores(known: Reference, out: Sequence[Completion]) -> None:
    for prompt, choice, one in zip(PROMPTS, CHOICES, out, strict=True):
        want = expected(known, prompt + choice, len(prompt))
        assert one.token_ids == choice and one.logprobs is not None
        assert [each.logprob for each in one.logprobs] == pytest.approx(want, abs=1e-4)
        assert one.logprob == pytest.approx(sum(want), abs=1e-3)
        with torch.no_grad():
            best = (
                known.model(torch.tensor([prompt + choice]))
                .logits[0, len(prompt) - 1 : -1]
                .argmax(-1)
            )
        assert one.is_greedy == (best.tolist() == choice)


@pytest.mark.parametrize("mode", ["decode", "prefill"])
@pytest.mark.parametrize(
    ("shape", "policy", "share"),
    [
        ("normal", Policy(3, 2), "auto"),
        ("llama", Policy(8, 1, PLACEMENTS["everything split 30/30"]), "on"),
        ("gpt_neox", Policy(2, 4, PLACEMENTS["kv on disk"]), "on"),
        ("post-norm, narrow embedding (350m)", Policy(1, 1), "off"),
        ("one layer", "auto", "on"),
    ],
)
def test_scores(
    shape: str,
    policy: Policy | str,
    share: str,
    mode: str,
    reference: Callable[[str], Reference],
    tmp_path: Path,
) -> None:
    known = reference(shape)
    with engine(known, policy, tmp_path) as llm:
        llm.share_prefix = share
        assert_scores(known, llm.score(PROMPTS, CHOICES, mode))
        same = llm.score(
            [CONTEXT] * 3, CHOICES[1:4], mode
        )  # all rows begin alike: one copy, unless scores need it
    want = [expected(known, CONTEXT + choice, len(CONTEXT)) for choice in CHOICES[1:4]]
    assert [one.logprob for one in same] == pytest.approx(list(map(sum, want)), abs=1e-3)


def test_greedy_tokens_are_said_to_be(
    reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    with engine(reference("normal"), Policy(4, 1), tmp_path) as llm:
        greedy = [one.token_ids for one in llm.generate(PROMPTS, SamplingParams(max_tokens=4))]
        other = [[*ids[:-1], (ids[-1] + 1) % 100] for ids in greedy]
        for mode in ("decode", "prefill"):
            assert all(one.is_greedy for one in llm.score(PROMPTS, greedy, mode))
            assert not any(one.is_greedy for one in llm.score(PROMPTS, other, mode))


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
def test_rows_that_score_beside_others(
    refill: bool, reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    known = reference("normal")
    with engine(known, Policy(2, 1), tmp_path) as llm:
        out = llm.generate(PROMPTS, MIXED, refill=refill)
        alone = [
            llm.generate([p], [SamplingParams(max_tokens=max(1, m.max_tokens))])[0]
            for p, m in zip(PROMPTS, MIXED, strict=True)
        ]
    for prompt, params, one, plain in zip(PROMPTS, MIXED, out, alone, strict=True):
        if params.score is not None:
            assert one.logprob == pytest.approx(
                sum(expected(known, prompt + one.token_ids, len(prompt))), abs=1e-3
            )
            continue
        assert one.token_ids == plain.token_ids[: params.max_tokens]
        assert (one.logprobs is None) == (params.logprobs is None)
        assert (one.prompt_logprobs is None) == (params.prompt_logprobs is None)
        if one.prompt_logprobs is not None:
            first, *rest = one.prompt_logprobs
            assert first is None and all(
                len(each.top) == params.prompt_logprobs for each in rest if each is not None
            )
            found = [each.logprob for each in rest if each is not None]
            assert found == pytest.approx(expected(known, prompt, 1), abs=1e-4)


def test_all_positions_can_be_scored(reference: Callable[[str], Reference], tmp_path: Path) -> None:
    known = reference("normal")
    with engine(known, Policy(1, 1), tmp_path) as llm:
        positions = llm.model.spec.max_positions
        (ids,) = random_prompts((positions + 1,), seed=8)
        for mode in ("decode", "prefill"):
            (one,) = llm.score([ids[:5]], [ids[5:]], mode)
            assert one.logprobs is not None and len(one.logprobs) == positions - 4
            assert [each.logprob for each in one.logprobs[:-1]] == pytest.approx(
                expected(known, ids[:-1], 5), abs=1e-4
            )
            with pytest.raises(
                UsageError, match=r"prompts\[0\]: \d+ tokens and \d+ to score do not fit"
            ):
                llm.score([ids[:6]], [[*ids[6:], 3]], mode)
            with pytest.raises(UsageError, match="score: token id 99999"):
                llm.generate([[5]], SamplingParams(score=[99999], score_mode=mode))
    with engine(known, Policy(1, 1), tmp_path) as llm:
        for given, said in (
            ([[5], [6]], "continuations: 2 for 1 prompts; give one for each"),
            ([[]], r"continuations\[0\]: "),
        ):
            with pytest.raises(UsageError, match=said):
                llm.score([[5]], given)
        (one,) = llm.score(iter([[5]]), iter([[6, 7]]))  # type: ignore[arg-type]
        assert one.token_ids == [6, 7]
        (plain,) = llm.generate([[5]], SamplingParams(max_tokens=2, logprobs=0))
        assert plain.logprob < 0
        with pytest.raises(UsageError, match="is_greedy: the result has none"):
            assert plain.is_greedy
        (plain,) = llm.generate([[5]], SamplingParams(max_tokens=2))
        with pytest.raises(UsageError, match="logprob: the result has none"):
            assert plain.logprob


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: SamplingParams(score=[]), "score: "),
        (lambda: SamplingParams(score=[1.5]), "score: 1.5 is not a whole number"),
        (lambda: SamplingParams(score="text"), "score: 'text'"),
        (lambda: SamplingParams(score=[3], prompt_logprobs=1), "prompt_logprobs: "),
        (
            lambda: SamplingParams(score=[3], score_mode="fast"),
            "score_mode: 'fast' is not one of decode, prefill",
        ),
        (lambda: SamplingParams(max_tokens=0), "max_tokens: 0 must be at least 1"),
        (lambda: SamplingParams(prompt_logprobs=21), "prompt_logprobs: 21"),
    ],
)
def test_bad_parameters(made: Callable[[], SamplingParams], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        made()
    assert str(caught.value).startswith(said)

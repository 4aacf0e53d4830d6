"""Rows that ask for different things in one block: each gets what it gets alone. And parts of one
job."""

from __future__ import annotations

from collections import abc
from dataclasses import replace
from pathlib import Path

import pytest

from flexgen_h2o import LLM, Completion, MemoryBudget, Policy, SamplingParams
from flexgen_h2o.core.errors import DoesNotFitError
from flexgen_h2o.engine.prompts import prompts_from_python
from flexgen_h2o.engine.sequence import Sequence, with_params
from tests.parity.cases import PLACEMENTS
from tests.parity.reference import (
    LONG,
    ByShape,
    greedy,
    opened,
    random_prompts,
    tokens_of,
)

# What rows may ask for beside each other: lengths, sampling, seeds, log-probabilities.
ASKED = [
    SamplingParams(LONG),
    SamplingParams(3, temperature=0.8, seed=7),
    SamplingParams(9, temperature=0.8, seed=7, top_p=0.7),
    SamplingParams(1, logprobs=2),
    SamplingParams(LONG, temperature=1.2, top_k=5, seed=8, logprobs=0),
    SamplingParams(5, temperature=0.8, seed=7),
]
PROMPTS = random_prompts((5, 9, 9, 1, 12, 9), seed=4)


BUDGET = MemoryBudget("64MiB", "64MiB", "64MiB")


@pytest.fixture(scope="module")
def alone(reference: ByShape, tmp_path_factory: pytest.TempPathFactory) -> list[Completion]:
    folder = tmp_path_factory.mktemp("alone")
    with opened(reference("normal").folder, Policy(1, 1), folder, budget=BUDGET) as llm:
        found = [llm.generate([p], [asked])[0] for p, asked in zip(PROMPTS, ASKED, strict=True)]
    assert found[1].token_ids != greedy(reference("normal").model, PROMPTS[1], 3), "nothing drawn"
    return found


@pytest.mark.parametrize(
    ("policy", "placement"),
    [
        (Policy(6, 1), "kv on disk"),
        (Policy(2, 2), "everything split 30/30"),
        (Policy(4, 2), "all on device"),
    ],
)
def test_a_row_gets_what_it_gets_alone(
    policy: Policy,
    placement: str,
    alone: list[Completion],
    reference: ByShape,
    tmp_path: Path,
) -> None:
    policy = replace(policy, percent=PLACEMENTS[placement])
    order = [3, 1, 5, 0, 4, 2]
    with opened(reference("normal").folder, policy, tmp_path, budget=BUDGET) as llm:
        out = llm.generate([PROMPTS[i] for i in order], [ASKED[i] for i in order])
    assert tokens_of(out) == [alone[i].token_ids for i in order]
    assert [len(one.token_ids) for one in out] == [ASKED[i].max_tokens for i in order]


# ---- parts of a job


def part(lengths: tuple[int, ...], new: int) -> abc.Sequence[Sequence]:
    read = prompts_from_python(random_prompts(lengths), None, 120)
    return with_params(read, [SamplingParams(new)] * len(read))


def run_part(llm: LLM, lengths: tuple[int, ...], new: int) -> object:
    """The engine that ran it, by identity: is it the same one?"""
    llm.run(part(lengths, new), lambda done: None)
    return llm._engine


@pytest.mark.parametrize("job_rows", [100, 0])
def test_an_engine_that_is_opened_again_serves_the_parts_before(
    job_rows: int, reference: ByShape, tmp_path: Path
) -> None:
    """Long prompts, then long answers, then long prompts again: in a job, the third finds an engine
    that does."""
    long = (30, 9, 9, 9)
    with opened(reference("normal").folder, Policy(2, 2), tmp_path, budget=BUDGET) as llm:
        llm.planner.job_rows = job_rows
        first = run_part(llm, long, 2)
        second = run_part(llm, (9, 9, 9, 9), 30)
        assert first is not second
        assert (run_part(llm, long, 2) is second) is (job_rows > 0)


def test_auto_plans_for_the_whole_job(reference: ByShape, tmp_path: Path) -> None:
    """A first part of two rows must not make blocks of two rows."""
    known = reference("normal")
    with opened(known.folder, "auto", tmp_path) as llm:
        llm.planner.job_rows = 64
        policy = llm.prepare(part((9, 9), 3))
        assert policy.block_size > 2
        first = llm._engine
        assert run_part(llm, (9, 9), 3) is first


def test_what_does_not_fit_is_said_and_nothing_is_open(reference: ByShape, tmp_path: Path) -> None:
    rows = part((60, 9), 2)
    allowed = MemoryBudget(host="12.4MiB")  # 12 MiB are staging of disk reads
    with opened(reference("normal").folder, Policy(2, 1), tmp_path, budget=allowed) as llm:
        llm.planner.job_rows = 2
        for look in (llm.prepare, llm.check_fit):
            with pytest.raises(DoesNotFitError):
                look(rows)
            assert llm.peak_bytes == {}
            look(rows[1:])
        llm.prepare(rows[1:])
        assert 0 < llm.peak_bytes["host"] <= (allowed.host or 0)


def test_questions_keep_answers(reference: ByShape, tmp_path: Path) -> None:
    with opened(reference("normal").folder, Policy(6, 1), tmp_path, budget=BUDGET) as llm:
        done = llm.generate(PROMPTS, ASKED)
        before = [dict(vars(one)) for one in done]
        llm.predict_run(done)
        llm.has_room(done)
        llm.check_fit(done)
        assert [vars(one) for one in done] == before
        assert all(one.token_ids and one.finish_reason for one in done)

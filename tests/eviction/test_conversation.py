"""Turns in one conversation: the KV of a row lives on, and room is made for the coming turn as for
any new column."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

from flexgen_h2o import LLM, MemoryBudget, Policy, SamplingParams
from flexgen_h2o.core.settings import ORIGINAL, ROLLING
from flexgen_h2o.core.units import FORCED_CHUNK
from flexgen_h2o.engine.conversation import Conversation, tokens_after_first
from flexgen_h2o.engine.decoding import StopCriteria
from flexgen_h2o.engine.generation import Callbacks
from flexgen_h2o.kvcache.eviction import H2O, Eviction
from tests.eviction.cases import WINDOWS, Known
from tests.eviction.engine import MIN_SCORE_GAP, PAIRS, STAND_IN, SeenByRow
from tests.eviction.plain_models import PlainLlama
from tests.eviction.reference import Evicted, PlainModel, Turn, evicted_greedy
from tests.parity.cases import PLACEMENTS
from tests.parity.reference import LOGIT_TOLERANCE, MIN_GAP, LogitsByRow, random_prompts

LENGTHS = (9, 5, 1, 7)
ANSWER = 4
ON_DISK = PLACEMENTS["kv on disk"]


class Held:
    """An audience that keeps everything, and what else a conversation was.

    answers: by turn. tokens: all behind the first turn; logits and held positions by step.
    """

    tokens: list[int]
    columns: list[int]
    peak: dict[str, int]

    def __init__(self) -> None:
        self.turn = 0
        self.taken: list[tuple[int, int]] = []
        self.answers: dict[int, list[int]] = defaultdict(list)
        self.reasons: list[str | None] = []
        self.logits = LogitsByRow()
        self.seen = SeenByRow()

    def given(self, token: int, logits: torch.Tensor) -> None:
        assert logits.dim() == 1
        self.taken.append((self.turn, token))

    def said(self, token: int, reason: str | None) -> None:
        self.answers[self.turn].append(token)
        self.reasons.append(reason)

    def next(self, turns: Sequence[Sequence[int]]) -> Iterator[Sequence[int]]:
        for self.turn in range(1, len(turns)):
            yield turns[self.turn]


def converse(
    folder: Path,
    turns: Sequence[Sequence[int]],
    eviction: Eviction | None,
    policy: Policy,
    offload_dir: Path,
    answer: int = ANSWER,
    eos: Sequence[int] = (),
    budget: MemoryBudget | None = None,
    max_tokens_per_sweep: int = FORCED_CHUNK,
) -> Held:
    """One token at once: held positions too."""
    found = Held()
    params = SamplingParams(max_tokens=answer)
    ends = StopCriteria((), eos, None)
    room = tokens_after_first(turns, answer)
    talk = Conversation(
        turns[0], found.next(turns), params, ends, found, room, max_tokens_per_sweep
    )
    with LLM(str(folder), policy, eviction, "auto", "float32", budget, offload_dir) as llm:
        watch = found.seen if max_tokens_per_sweep == 1 and llm.eviction.needs.record else None
        llm.run([talk.sequence], callbacks=Callbacks(found.logits, watch))
        found.tokens = talk.sequence.token_ids
        found.columns = llm.times[0].held_by_sweep
        found.peak = llm.peak_bytes
    return found


CASES = [
    ("llama", "h2o", ROLLING, Policy(1, percent=ON_DISK), None),
    ("long", "h2o", ORIGINAL, Policy(1, percent=PLACEMENTS["everything split 30/30"]), STAND_IN),
    ("long", "tova", ORIGINAL, Policy(1, 1, ON_DISK, sep_layer=False, overlap=False), None),
]


@pytest.mark.parametrize(("shape", "pair", "positions", "policy", "budget"), CASES)
def test_every_turn_equals_the_reference(
    shape: str,
    pair: str,
    positions: str,
    policy: Policy,
    budget: MemoryBudget | None,
    known: Callable[[str], Known],
    tmp_path: Path,
) -> None:
    """Tokens, logits and held columns of a run that computes everything anew from the ids at each
    token.

    However many tokens of a turn a sweep takes: of 5 tokens all, some, or one at a time.
    """
    model = known(shape)
    plain = PlainLlama(model.model, rolling=True) if positions == ROLLING else model.plain
    turns, want = turns_without_near_ties(plain, pair, plain.turn if positions == ROLLING else None)
    for max_tokens_per_sweep in (FORCED_CHUNK, 3, 1):
        found = converse(
            model.folder,
            turns,
            replace(PAIRS[pair].engine, positions=positions),
            policy,
            tmp_path,
            budget=budget,
            max_tokens_per_sweep=max_tokens_per_sweep,
        )
        assert found.tokens == want.tokens
        assert (found.logits.of_rows[0] - want.logits).abs().max() <= LOGIT_TOLERANCE
        assert found.taken == [
            (i, token) for i, turn in enumerate(turns[1:], start=1) for token in turn
        ]
        assert [len(found.answers[i]) for i in range(len(turns))] == [ANSWER] * len(turns)
        if max_tokens_per_sweep == FORCED_CHUNK:
            assert len(found.columns) == ANSWER * len(turns)
    for step, kept in enumerate(want.kept[:-1]):
        for block, heads in enumerate(kept):
            assert found.seen.rows[0, block][step] == [
                [*held, len(turns[0]) + step] for held in heads
            ]


def turns_without_near_ties(
    plain: PlainModel, pair: str, turn: Turn | None
) -> tuple[list[list[int]], Evicted]:
    """Random turns, and what the reference makes of them."""
    for seed in count(1000):
        turns = random_prompts(LENGTHS, seed)
        # At which step behind the first turn each token of the later ones is taken.
        given: dict[int, int] = {}
        for i, later in enumerate(turns[1:], start=1):
            given |= dict(enumerate(later, start=i * ANSWER + len(given)))
        most = tokens_after_first(turns, ANSWER)
        want = evicted_greedy(plain, turns[0], most, PAIRS[pair].plain, turn=turn, given=given)
        if want.least_gap > MIN_SCORE_GAP and want.least_token_gap > MIN_GAP:
            return turns, want
    raise AssertionError


@pytest.mark.parametrize(
    ("shape", "name"), [("llama", "kv split three ways"), (WINDOWS, "all on device")]
)
def test_many_rows_follow_many_tokens_at_once(
    shape: str, name: str, known: Callable[[str], Known], tmp_path: Path
) -> None:
    """Rows of unequal prompts and ends, in two micro-batches, with a full cache in segments: logits
    of single steps."""
    model = known(shape)
    prompts = random_prompts((5, 9, 2, 7))
    more = random_prompts((40, 31, 57, 57), seed=5)
    for eviction in (None, PAIRS["h2o"].engine, replace(PAIRS["h2o"].engine, positions=ROLLING)):
        found = []
        for max_tokens_per_sweep in (1, 7):
            seen = LogitsByRow()
            policy = Policy(2, 2, PLACEMENTS[name])
            folder = str(model.folder)
            with LLM(folder, policy, eviction, "auto", "float32", STAND_IN, tmp_path) as llm:
                llm.follow(prompts, more, seen, max_tokens_per_sweep=max_tokens_per_sweep)
            found.append(seen.rows)
        one, many = found
        for row, tokens in enumerate(more):
            assert len(one[row]) == len(many[row]) == len(tokens)
            assert (torch.stack(one[row]) - torch.stack(many[row])).abs().max() <= LOGIT_TOLERANCE


def test_memory_does_not_grow_with_the_conversation(
    known: Callable[[str], Known], tmp_path: Path
) -> None:
    """Neither what rows hold nor what the budgets are charged; nor do rolling positions run out: 16
    there are."""
    eviction = H2O(heavy_size=3, recent_size=4, positions=ROLLING)
    folder = known("llama, 16 positions").folder
    short, long = (
        converse(folder, random_prompts((8,) * turns), eviction, Policy(1), tmp_path)
        for turns in (3, 12)
    )
    assert len(long.tokens) == 12 * ANSWER + 11 * 8
    assert set(short.columns[1:]) == set(long.columns[1:]) == {8 * 2}  # of two layers
    assert short.peak == long.peak


def test_an_end_of_sequence_token_ends_an_answer_and_is_not_repeated(
    known: Callable[[str], Known], tmp_path: Path
) -> None:
    folder = known("llama").folder
    first, second = random_prompts((6, 3))
    free = converse(folder, [first, second], None, Policy(1), tmp_path).answers[0]
    eos = free[1]
    assert eos != free[0]
    turns = [first, [eos, *second]]
    found = converse(folder, turns, None, Policy(1), tmp_path, eos=[eos])
    assert found.answers[0] == free[:2] and found.reasons[:2] == [None, "stop"]
    assert found.tokens[2:5] == second
    other = converse(folder, turns, None, Policy(1), tmp_path, answer=1, eos=[eos])
    assert other.tokens[1:5] == turns[1], "an answer that was cut is closed by the turn"

"""Turns in one conversation: the KV of a row lives on, and room is made for the coming turn as for
any new column."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import pytest
import torch

from flexgen_h2o import LLM, MemoryBudget, Policy, SamplingParams
from flexgen_h2o.core.units import FORCED_CHUNK
from flexgen_h2o.engine.conversation import Conversation, tokens_after_first
from flexgen_h2o.engine.decoding import StopCriteria
from flexgen_h2o.engine.generation import Callbacks
from flexgen_h2o.kvcache.eviction import H2O, Eviction
from flexgen_h2o.kvcache.eviction.policy import ROLLING
from tests.eviction.cases import WINDOWS, Known
from tests.eviction.engine import MIN_SCORE_GAP, PAIRS, STAND_IN, SeenByRow
from tests.eviction.plain_models import PlainLlama
from tests.eviction.reference import Evicted, PlainModel, Turn, evicted_greedy
from tests.parity.cases import PLACEMENTS
from tests.parity.reference import LOGIT_TOLERANCE, MIN_GAP, LogitsByRow, random_prompts

LENGTHS = (9, 5, 1, 7)
ANSWER = 4


@dataclass
class Heard:
    """An audience that keeps everything. said: by turn."""

    turn: int = 0
    taken: list[tuple[int, int]] = field(default_factory=list)
    answers: dict[int, list[int]] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)

    def given(self, token: int, logits: torch.Tensor) -> None:
        assert logits.dim() == 1
        self.taken.append((self.turn, token))

    def said(self, token: int, reason: str | None) -> None:
        self.answers.setdefault(self.turn, []).append(token)
        self.reasons += [reason] if reason else []

    def next(self, turns: Sequence[Sequence[int]]) -> Iterator[Sequence[int]]:
        for self.turn in range(1, len(turns)):
            yield turns[self.turn]


@dataclass(frozen=True)
class Held:
    """What a conversation was: every token behind the first turn, logits and held positions by
    step."""

    heard: Heard
    tokens: list[int]
    logits: torch.Tensor
    seen: SeenByRow
    columns: list[int]
    peak: dict[str, int]


def converse(
    folder: Path,
    turns: Sequence[Sequence[int]],
    eviction: Eviction | None,
    policy: Policy,
    offload_dir: Path,
    answer: int = ANSWER,
    eos: Sequence[int] = (),
    budget: MemoryBudget | None = None,
    room: int | None = None,
    max_tokens_per_sweep: int = FORCED_CHUNK,
) -> Held:
    """One token at once: held positions too."""
    heard = Heard()
    logits = LogitsByRow()
    seen = SeenByRow()
    params = SamplingParams(max_tokens=answer)
    ends = StopCriteria((), eos, None)
    room = tokens_after_first(turns, answer) if room is None else room
    talk = Conversation(
        turns[0], heard.next(turns), params, ends, heard, room, max_tokens_per_sweep
    )
    done: list[list[int]] = []
    with LLM(
        str(folder), policy, eviction, dtype="float32", budget=budget, offload_dir=offload_dir
    ) as llm:
        watch = seen if max_tokens_per_sweep == 1 and llm.eviction.needs.record else None
        llm.run(
            [talk.sequence],
            lambda rows: done.extend(row.token_ids for row in rows),
            Callbacks(logits, watch),
        )
        return Held(
            heard,
            done[0],
            torch.stack(logits.rows[0]),
            seen,
            llm.times[0].held_by_sweep,
            llm.peak_bytes,
        )


def given_steps(turns: Sequence[Sequence[int]], answer: int) -> dict[int, int]:
    """At which step behind the first turn each token of the later ones is taken, where all answers
    are as long."""
    steps = {}
    at = 0
    for turn in turns[1:]:
        at += answer
        steps |= dict(enumerate(turn, start=at))
        at += len(turn)
    return steps


CASES = [
    ("llama", "h2o", "rolling", Policy(1, percent=PLACEMENTS["kv on disk"]), None),
    (
        "llama",
        "h2o-norm, one sink",
        "rolling",
        Policy(1, percent=PLACEMENTS["kv split three ways"]),
        STAND_IN,
    ),
    ("long", "h2o", "original", Policy(1, percent=PLACEMENTS["everything split 30/30"]), STAND_IN),
    (
        "long",
        "tova",
        "original",
        Policy(1, percent=PLACEMENTS["kv on disk"], sep_layer=False, overlap=False),
        None,
    ),
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
    how = PAIRS[pair]
    plain = PlainLlama(model.model, rolling=True) if positions == ROLLING else model.plain
    turns, want = turns_without_near_ties(plain, pair, plain.turn if positions == ROLLING else None)
    given = sum(map(len, turns[1:]))
    for max_tokens_per_sweep in (FORCED_CHUNK, 3, 1):
        found = converse(
            model.folder,
            turns,
            replace(how.engine, positions=positions),
            policy,
            tmp_path,
            budget=budget,
            max_tokens_per_sweep=max_tokens_per_sweep,
        )
        assert found.tokens == want.tokens
        assert (found.logits - want.logits).abs().max() <= LOGIT_TOLERANCE
        assert found.heard.taken == [
            (i, token) for i, turn in enumerate(turns[1:], start=1) for token in turn
        ]
        assert [len(found.heard.answers[i]) for i in range(len(turns))] == [ANSWER] * len(turns)
        sweeps = {FORCED_CHUNK: len(want.tokens) - given, 1: len(want.tokens)}
        assert len(found.columns) == sweeps.get(max_tokens_per_sweep, len(found.columns))
    for step, kept in enumerate(want.kept[:-1]):
        for block, heads in enumerate(kept):
            assert found.seen.rows[0, block][step] == [
                [*held, len(turns[0]) + step] for held in heads
            ]


def turns_without_near_ties(
    plain: PlainModel, pair: str, turn: Turn | None
) -> tuple[list[list[int]], Evicted]:
    """Random turns, and what the reference makes of them."""
    most = tokens_after_first([[0] * n for n in LENGTHS], ANSWER)
    for seed in count(1000):
        turns = random_prompts(LENGTHS, seed)
        given = given_steps(turns, ANSWER)
        want = evicted_greedy(plain, turns[0], most, PAIRS[pair].plain, turn=turn, given=given)
        if want.least_gap > MIN_SCORE_GAP and want.least_token_gap > MIN_GAP:
            break
    return turns, want


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
    budget = None if name == "all on device" else STAND_IN
    for eviction in (None, PAIRS["h2o"].engine, replace(PAIRS["h2o"].engine, positions=ROLLING)):
        found = []
        for max_tokens_per_sweep in (1, 7):
            seen = LogitsByRow()
            policy = Policy(2, 2, PLACEMENTS[name])
            with LLM(
                str(model.folder),
                policy,
                eviction,
                dtype="float32",
                budget=budget,
                offload_dir=tmp_path,
            ) as llm:
                llm.follow(prompts, more, seen, max_tokens_per_sweep=max_tokens_per_sweep)
                read = sum(llm.times[0].read_by_sweep)
            found.append((seen.rows, read))
        (one, read), (many, as_much) = found
        assert read == as_much
        for row, tokens in enumerate(more):
            assert len(one[row]) == len(many[row]) == len(tokens)
            assert (torch.stack(one[row]) - torch.stack(many[row])).abs().max() <= LOGIT_TOLERANCE


def test_memory_does_not_grow_with_the_conversation(
    known: Callable[[str], Known], tmp_path: Path
) -> None:
    """Neither what rows hold nor what the budgets are charged; nor do rolling positions run out: 16
    there are."""
    model = known("llama, 16 positions")
    eviction = H2O(heavy_size=3, recent_size=4, positions=ROLLING)
    peaks = []
    for turns in (3, 12):
        asked = random_prompts((8,) * turns)
        found = converse(model.folder, asked, eviction, Policy(1), tmp_path)
        blocks = model.model.config.num_hidden_layers
        assert len(found.tokens) == turns * ANSWER + (turns - 1) * 8
        assert set(found.columns[1:]) == {8 * blocks}
        peaks.append(found.peak)
    assert peaks[0] == peaks[1]


def test_an_end_of_sequence_token_ends_an_answer_and_is_not_repeated(
    known: Callable[[str], Known], tmp_path: Path
) -> None:
    model = known("llama")
    turns = random_prompts((6, 3))
    free = converse(model.folder, turns, None, Policy(1), tmp_path)
    eos = free.heard.answers[0][1]
    assert eos != free.heard.answers[0][0]
    found = converse(
        model.folder, [turns[0], [eos, *turns[1]]], None, Policy(1), tmp_path, eos=[eos]
    )
    assert found.heard.answers[0] == free.heard.answers[0][:2] and found.heard.reasons[0] == "stop"
    assert found.tokens[2:5] == turns[1]
    other = converse(
        model.folder, [turns[0], [eos, *turns[1]]], None, Policy(1), tmp_path, answer=1, eos=[eos]
    )
    assert other.tokens[1:5] == [eos, *turns[1]], "an answer that was cut is closed by the turn"


def test_a_conversation_ends_where_the_room_does(
    known: Callable[[str], Known], tmp_path: Path
) -> None:
    turns = random_prompts((6, 3, 4))
    found = converse(known("llama").folder, turns, None, Policy(1), tmp_path, room=9)
    assert len(found.tokens) == 9
    assert sorted(found.heard.answers) == [0, 1] and len(found.heard.answers[1]) == 2
    assert found.heard.reasons == ["length"]

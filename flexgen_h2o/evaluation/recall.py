"""Recall rows: pairs that are stated early and asked for later, so that columns far back in the KV cache matter.

The shipped model is trained on `training_row`s (scripts/train_tiny_opt.py). A `Planter` states pairs at a given depth
of a prompt of given length, in the same words.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flexgen_h2o.errors import UsageError

Encode = Callable[[str], list[int]]
Pair = tuple[str, str]

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PAIRS = 10


@dataclass(frozen=True)
class Question:
    """A pair that is asked for.

    at: where the prompt states it, as a share of the prompt. inside: the prompt ends with the question; else it comes
    after the prompt. answer: indices of its tokens in the continuation.
    """

    at: float
    inside: bool
    answer: tuple[int, ...]


@dataclass(frozen=True)
class RecallRow:
    """Token ids of a prompt and of what follows on it, and the questions whose answers are in the latter.

    depth: which of a number of depths the pairs are stated at, 0 being the prompt's beginning.
    """

    depth: int
    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    questions: tuple[Question, ...]


def draw_pairs(rng: random.Random, count: int) -> list[Pair]:
    """`count` names or fewer, if names are drawn twice, each with a number of two digits."""
    names = {"".join(rng.choices(LETTERS, k=2)) for _ in range(count)}
    pairs = [(name, f"{rng.randint(0, 99):02d}") for name in sorted(names)]
    rng.shuffle(pairs)
    return pairs


def statement(pair: Pair) -> str:
    return f"let {pair[0]} = {pair[1]}\n"


def question(pair: Pair) -> str:
    return f"ask {pair[0]} = {pair[1]}\n"


def training_row(
    rng: random.Random, encode: Encode, bos: int, code: Sequence[int], length: int
) -> tuple[list[int], list[int]]:
    """Pairs, then a stretch of code, then the same pairs asked for in another order; again until the row is full.

    Returns `length` token ids and the positions of the answer digits that were asked for. `encode` gives each digit a
    token and adds no special ones.
    """
    ids = [bos]
    answers: list[int] = []
    while len(ids) < length:
        pairs = draw_pairs(rng, rng.randint(2, 16))
        for pair in pairs:
            ids.extend(encode(statement(pair)))
        filler = rng.choice([0, 0, rng.randint(16, 64), rng.randint(64, length // 2)])
        ids.extend(_stretch(rng, code, filler))
        ids.extend(encode("\n"))
        rng.shuffle(pairs)
        for pair in pairs:
            ids.extend(encode(question(pair)))
            answers.extend([len(ids) - 3, len(ids) - 2])  # two digits, then the newline
    return ids[:length], [p for p in answers if p < length]


class Planter:
    """Makes recall rows of exactly `prompt_len` + at most `continuation_len` tokens.

    encode: token ids of a text without special tokens, with any tokenizer; start: what a prompt begins with. code:
    token ids to fill the prompt with; depths: places in it, evenly apart, where its pairs may be stated.
    """

    def __init__(
        self, encode: Encode, start: Sequence[int], code: Sequence[int], prompt_len: int, continuation_len: int,
        depths: int,
    ) -> None:  # fmt: skip
        self._encode, self._start, self._code = encode, list(start), code
        self._prompt_len, self._continuation_len, self._depths = prompt_len, continuation_len, depths

    def row(self, rng: random.Random, depth: int) -> RecallRow:
        """Code, pairs, code, and a question; then its answer, and all other pairs asked for in another order.

        The pairs are stated together, as in training: apart, the shipped model with its full cache misses one in ten.
        Raises UsageError if the prompt has no room for them.
        """
        pairs = self._distinct_pairs(rng)
        first, *others = rng.sample(pairs, len(pairs))
        prompt, at = self._prompt(rng, pairs, depth, first)
        continuation: list[int] = []
        questions = []
        for pair in (first, *others):
            continuation += self._encode(" =") if pair == first else self._encode(f"ask {pair[0]} =")
            answer = self._encode(f" {pair[1]}")
            steps = range(len(continuation), len(continuation) + len(answer))
            continuation += [*answer, *self._encode("\n")]
            if steps.stop <= self._continuation_len:
                questions.append(Question(at[pair] / self._prompt_len, pair == first, tuple(steps)))
        return RecallRow(depth, tuple(prompt), tuple(continuation[: self._continuation_len]), tuple(questions))

    def _distinct_pairs(self, rng: random.Random) -> list[Pair]:
        pairs: dict[str, str] = {}
        while len(pairs) < PAIRS:
            pairs.update(draw_pairs(rng, PAIRS - len(pairs)))
        return list(pairs.items())

    def _prompt(
        self, rng: random.Random, pairs: Sequence[Pair], depth: int, asked: Pair
    ) -> tuple[list[int], dict[Pair, int]]:
        """The prompt, and where in it each pair's statement ends."""
        newline, end = self._encode("\n"), self._encode(f"ask {asked[0]}")
        stated = {pair: self._encode(statement(pair)) for pair in pairs}
        taken = len(self._start) + len(end) + sum(map(len, stated.values())) + 2 * len(newline)
        room = self._prompt_len - taken
        if room < 0:
            raise UsageError(f"--prompt-len {self._prompt_len}: too short for recall rows, which take {taken} and more")
        before = room * depth // max(1, self._depths - 1)
        ids, at = [*self._start, *_stretch(rng, self._code, before), *newline], {}
        for pair, tokens in stated.items():
            ids += tokens
            at[pair] = len(ids)
        return [*ids, *_stretch(rng, self._code, room - before), *newline, *end], at


def _stretch(rng: random.Random, code: Sequence[int], length: int) -> list[int]:
    start = rng.randrange(len(code) - length - 1)
    return [int(i) for i in code[start : start + length]]

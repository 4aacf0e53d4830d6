"""Long-context questions of RULER's kinds, made without a network.

The kinds are those of Hsieh et al. (arXiv 2404.06654, section 3). niah hides one number in filler.
niah-multikey hides four numbers and asks for one. vt has a chain of variable assignments to follow.
cwe and fwe ask for the most common words of a list. The sentences are this project's own. As in
RULER, a score is the share of the wanted strings that the answer contains.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from flexgen_h2o.core.errors import UsageError

if TYPE_CHECKING:
    from flexgen_h2o.models.load import Model

FILLER = (
    "The road goes up the hill. A dog sleeps by the door. Rain is falling on the roof. We "
    "wait for the bus."
)
WORDS = (
    "apple",
    "bridge",
    "candle",
    "desert",
    "engine",
    "forest",
    "garden",
    "hammer",
    "island",
    "jacket",
    "kettle",
    "ladder",
    "market",
    "needle",
    "office",
    "pencil",
    "quarry",
    "ribbon",
    "saddle",
    "temple",
    "unicorn",
    "valley",
    "window",
    "yellow",
    "zipper",
    "anchor",
    "basket",
    "castle",
    "donkey",
    "eagle",
    "feather",
    "guitar",
    "harbor",
    "insect",
    "jungle",
    "kitten",
    "lemon",
    "mirror",
    "napkin",
    "orange",
    "parrot",
    "rabbit",
    "silver",
    "ticket",
    "umbrella",
    "violin",
    "wallet",
)
# cwe: number of words asked for, how often each of them is listed, and how often each other word.
COMMON = 5
COMMON_TIMES = 8
RARE_TIMES = 2
CHAIN = 4  # vt: variables that have the value
FREQUENT = 3  # fwe: number of words asked for


@dataclass(frozen=True)
class TaskQuestion:
    """One question of a task; made by `questions`."""

    prompt: tuple[int, ...]  # token ids
    answers: tuple[str, ...]  # strings that the answer should contain
    max_tokens: int  # most tokens of the answer

    def score(self, text: str) -> float:
        """Return the share of the wanted strings that the text contains; case is ignored."""
        lower = text.lower()
        return sum(answer.lower() in lower for answer in self.answers) / len(self.answers)


# Takes a random source and a number of sentences or words; returns the prompt and its answers.
Maker = Callable[[random.Random, int], tuple[str, tuple[str, ...]]]


def questions(task: str, model: Model, length: int, count: int, seed: int) -> list[TaskQuestion]:
    """Return `count` questions of at most `length` tokens, each as long as possible.

    Raise UsageError naming --prompt-len if a question has no room, or --tasks if the model has no
    tokenizer.
    """
    if model.tokenizer is None:
        raise UsageError(f"--tasks {task}: {model.name} has no tokenizer; leave it out")
    make, max_tokens = TASKS[task]
    found = []
    for number in range(count):
        name = f"{seed} {task} {number}"
        prompt, answers = _longest(make, name, model, length, task)
        found.append(TaskQuestion(prompt, answers, max_tokens))
    return found


def _longest(
    make: Maker, name: str, model: Model, length: int, task: str
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the question with the largest size that fits: its token ids and answers."""

    def tokens_of(size: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
        text, answers = make(random.Random(name), size)
        return tuple(model.encode(text)), answers

    fits = 1
    fits_not = 2
    if len(tokens_of(fits)[0]) > length:
        raise UsageError(
            f"--prompt-len {length}: too short for a question of {task}; give more, or leave it out"
        )
    while len(tokens_of(fits_not)[0]) <= length:
        fits = fits_not
        fits_not = 2 * fits_not
    while fits_not - fits > 1:
        middle = (fits + fits_not) // 2
        if len(tokens_of(middle)[0]) <= length:
            fits = middle
        else:
            fits_not = middle
    return tokens_of(fits)


def _filler(size: int) -> list[str]:
    sentences = [sentence + "." for sentence in FILLER.removesuffix(".").split(". ")]
    return [sentences[i % len(sentences)] for i in range(size)]


def _hidden(rng: random.Random, size: int, sentences: Sequence[str]) -> str:
    """Return filler of `size` sentences with `sentences` at random places, their order kept."""
    places = sorted(rng.choices(range(size + 1), k=len(sentences)))
    text = _filler(size)
    for place, sentence in reversed(list(zip(places, sentences, strict=True))):
        text.insert(place, sentence)
    return " ".join(text)


def _needles(rng: random.Random, size: int, keys: int) -> tuple[str, tuple[str, ...]]:
    names = rng.sample(WORDS, keys)
    numbers = [str(rng.randrange(10**6, 10**7)) for _ in names]
    needles = [
        f"The secret number of the {name} is {number}."
        for name, number in zip(names, numbers, strict=True)
    ]
    text = _hidden(rng, size, needles)
    asked = rng.randrange(keys)
    prompt = (
        "Remember the secret numbers in this text. There will be a question about them.\n"
        f"{text}\n"
        f"Question: What is the secret number of the {names[asked]} in the text?\n"
        f"Answer: The secret number of the {names[asked]} is"
    )
    return prompt, (numbers[asked],)


def _needle(rng: random.Random, size: int) -> tuple[str, tuple[str, ...]]:
    return _needles(rng, size, 1)


def _several_needles(rng: random.Random, size: int) -> tuple[str, tuple[str, ...]]:
    return _needles(rng, size, 4)


def _chain(rng: random.Random, size: int) -> tuple[str, tuple[str, ...]]:
    names = ["".join(rng.choices(string.ascii_uppercase, k=4)) for _ in range(CHAIN)]
    value = str(rng.randrange(10**4, 10**5))
    steps = [f"VAR {names[0]} = {value}."]
    steps += [f"VAR {later} = VAR {earlier}." for earlier, later in pairwise(names)]
    text = _hidden(rng, size, steps)
    prompt = (
        "Follow the assignments of variables in this text.\n"
        f"{text}\n"
        f"Question: Which {CHAIN} variables have the value {value}?\n"
        f"Answer: The {CHAIN} variables with the value {value} are VAR"
    )
    return prompt, tuple(names)


def _common_words(rng: random.Random, size: int) -> tuple[str, tuple[str, ...]]:
    names = rng.sample(WORDS, len(WORDS))
    common = names[:COMMON]
    others = [_word(rng) for _ in range(size)]
    listed = common * COMMON_TIMES + others * RARE_TIMES
    rng.shuffle(listed)
    text = " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1))
    prompt = (
        "This numbered list has some words more often than others.\n"
        f"{text}\n"
        f"Question: Which {COMMON} words are the most common in the list?\n"
        f"Answer: The {COMMON} most common words are"
    )
    return prompt, tuple(common)


def _frequent_words(rng: random.Random, size: int) -> tuple[str, tuple[str, ...]]:
    names = [_word(rng) for _ in range(10)]
    weights = [1 / (i + 1) ** 2 for i in range(len(names))]
    drawn = rng.choices(names, weights, k=max(size, 20))
    ordered = sorted(names, key=lambda name: -drawn.count(name))
    prompt = (
        "Count the code words in this text.\n"
        f"{' '.join(drawn)}\n"
        f"Question: Which {FREQUENT} code words are the most frequent?\n"
        f"Answer: The {FREQUENT} most frequent code words are"
    )
    return prompt, tuple(ordered[:FREQUENT])


def _word(rng: random.Random) -> str:
    """Return an invented word of six letters."""
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3))


# Task: (function that makes a question, most tokens of its answer).
TASKS: dict[str, tuple[Maker, int]] = {
    "niah": (_needle, 12),
    "niah-multikey": (_several_needles, 12),
    "vt": (_chain, 24),
    "cwe": (_common_words, 32),
    "fwe": (_frequent_words, 32),
}

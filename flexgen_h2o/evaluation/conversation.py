"""Conversations of many turns that keep their KV cache: turns from a file, one row that answers them, its figures.

The first turn is the row's prompt. Every later token, of a turn or an answer, is a decode step: its column joins the
cache and, where the row is full, takes the slot of the eviction policy's victim. The tokens of a turn are known
beforehand, so one sweep over the weights takes many of them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import torch

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.units import GIVEN_CHUNK, format_bytes, format_seconds
from flexgen_h2o.engine.decoding import StopCriteria
from flexgen_h2o.engine.generation import Callbacks, Row, Silent
from flexgen_h2o.engine.prompts import Prompt, lines_of, make_prompt, object_of_json, prompt_of_json
from flexgen_h2o.engine.sampling import Sampler, SamplingParams, Tokenizer, decode_text
from flexgen_h2o.evaluation.figures import bytes_of_column, held_columns, perplexity, surprise
from flexgen_h2o.evaluation.rows import Case
from flexgen_h2o.kvcache.eviction.policy import most_new_tokens
from flexgen_h2o.llm import LLM
from flexgen_h2o.models.load import Model

PLACE = "{turn}"
FORMAT = "\n{turn}\n"  # apart from the answer before it, which may have been cut anywhere
# Without --turns: what the shipped model, which knows Python sources, can go on with.
TURNS = (
    "import os\nimport sys\n\ndef read_lines(path):",
    "class Shape:\n    def __init__(self, name):",
    "    def area(self):",
    "for name in os.listdir(path):",
    "try:\n    import json\nexcept ImportError:",
    "class TestShape(unittest.TestCase):\n    def test_area(self):",
    'if __name__ == "__main__":',
    "def main(argv=None):",
)


@dataclass(frozen=True)
class Turn:
    """What is said to the model: a text, or token ids. place: where it stands, for errors. labels: what the file says
    of it (`question_id`, `category`)."""

    content: object
    place: str
    labels: dict[str, Any]


def read_turns(path: Path | None) -> list[Turn]:
    """All turns of a file, in its order; TURNS without one.

    `.txt`: one a line. `.jsonl`: a line is a question of MT-bench, `{"question_id", "category", "turns": [...]}`, with
    texts or lists of token ids as turns; or one turn, as `prompt` or `prompt_token_ids`. Raises UsageError naming
    `--turns FILE:LINE`.
    """
    if path is None:
        return [Turn(text, "--turns", {}) for text in TURNS]
    if path.suffix.lower() not in (".txt", ".jsonl"):
        raise UsageError(f"--turns {path}: the file name must end in .txt (a turn a line) or .jsonl")
    is_text, turns = path.suffix.lower() == ".txt", []
    for place, line in lines_of(path, "--turns"):
        try:
            turns += [Turn(line, place, {})] if is_text else _turns_of_json(line, place)
        except UsageError as error:
            raise UsageError(f"{place}: {error}") from error
    if not turns:
        raise UsageError(f"--turns {path}: no turn in it, only blank lines or nothing")
    return turns


def _turns_of_json(line: str, place: str) -> list[Turn]:
    body = object_of_json(line)
    labels = {key: body[key] for key in ("question_id", "category") if body.get(key) is not None}
    if body.get("turns") is None:
        return [Turn(prompt_of_json(line), place, labels)]
    turns = body["turns"]
    if not isinstance(turns, list) or not turns:
        raise UsageError("turns must be a list of at least one text or list of token ids")
    for turn in turns:
        if not isinstance(turn, str | list):
            raise UsageError(f"a turn is a text or a list of token ids, not {type(turn).__name__}")
    return [Turn(turn, place, labels) for turn in turns]


def encoded(turns: Sequence[Turn], model: Model, form: str | None, chat: bool) -> list[tuple[int, ...]]:
    """The turns as token ids; those that are ids stay as they are.

    form: what a text is put into, at PLACE; only the first turn gets the tokenizer's special tokens. chat: by the
    model's chat template instead. Raises UsageError naming the turn's place.
    """
    if chat:
        model.check_chat()
    found: list[tuple[int, ...]] = []

    def encode(text: str) -> list[int]:
        if chat:
            return model.encode_turn([str(turn.content) for turn in turns[: len(found) + 1]])
        whole = (form or FORMAT).replace(PLACE, text)
        if not found:
            return model.encode(whole)
        model.check_fits(whole)
        return model.encode_more(whole)

    given = encode if model.tokenizer is not None else None
    for turn in turns:
        if chat and not isinstance(turn.content, str):
            raise UsageError(f"{turn.place}: a chat template takes texts, not token ids; leave --chat out")
        try:
            found.append(make_prompt(0, turn.content, given, model.spec.vocab_size).token_ids)
        except (UsageError, ValueError) as error:
            raise UsageError(f"{turn.place}: {error}") from error
    return found


class Audience(Protocol):
    """Callbacks of a conversation. turn: 0 is the first."""

    def given(self, turn: int, token: int, logits: torch.Tensor) -> None:
        """A token of a turn is taken. logits: (vocab,), of the step before it; not to be kept."""

    def said(self, turn: int, token: int, reason: str | None) -> None:
        """The answer to a turn has another token. reason: why it ends there, "stop" or "length"; None: it goes on."""


class Conversation:
    """A token source (engine.decoding.TokenSource) of one row through all turns.

    Each is answered with at most `max_tokens` tokens.

    turns: token ids, one of them at least. sampler: of the answers' tokens; ends: when an answer is over, by its own
    tokens. max_tokens_per_sweep: the most tokens of a turn in one sweep. room: the most tokens that may follow on the
    first turn; where they are used up, the conversation ends.
    The end-of-sequence token that ends an answer stays, as all that is said; a turn that begins with the same token,
    as chat templates write it, does not repeat it.
    """

    def __init__(
        self, turns: Sequence[Sequence[int]], max_tokens: int, sampler: Sampler, ends: StopCriteria, audience: Audience,
        room: int | None = None, max_tokens_per_sweep: int = GIVEN_CHUNK,
    ) -> None:  # fmt: skip
        self._turns, self._max_tokens, self._sampler, self._ends = turns, max_tokens, sampler, ends
        self._audience, self.max_tokens_per_sweep = audience, max_tokens_per_sweep
        most = tokens_after_first(turns, max_tokens)
        self._most = most if room is None else min(most, room)
        self._turn = 0
        self._coming: deque[int] = deque()
        self._answer = Row(self.prompt, max_tokens)

    @property
    def prompt(self) -> Prompt:
        """The first turn, as the row's prompt."""
        return Prompt(0, tuple(self._turns[0]), None)

    def sample(self, logits: torch.Tensor, rows: Sequence[int], steps: Sequence[int]) -> list[int]:
        if self._coming:
            token = self._coming.popleft()
            self._audience.given(self._turn, token, logits[0])
            return [token]
        (token,) = self._sampler.sample(logits, rows, steps)
        self._answer.token_ids.append(token)
        reason = self._ends(self._answer)
        self._audience.said(self._turn, token, reason)
        if reason is not None:
            self._next_turn(token)
        return [token]

    def most_new(self, row: int) -> int:
        return self._most

    def end(self, row: Row) -> str | None:
        if self._turn == len(self._turns):
            return "stop"
        return "length" if len(row.token_ids) >= row.max_new else None

    def known_tokens(self, row: Row) -> Sequence[int]:
        return list(islice(self._coming, self.max_tokens_per_sweep))

    def _next_turn(self, last: int) -> None:
        self._turn += 1
        self._answer = Row(self.prompt, self._max_tokens)
        if self._turn < len(self._turns):
            turn = list(self._turns[self._turn])
            is_said = self._ends.is_eos(last) and turn[:1] == [last]
            self._coming.extend(turn[1:] if is_said else turn)


def tokens_after_first(turns: Sequence[Sequence[int]], max_tokens: int) -> int:
    """The most tokens that follow on the first turn where every answer has at most `max_tokens`."""
    return sum(map(len, turns[1:])) + max_tokens * len(turns)


@dataclass
class Exchange:
    """One turn and the answer to it.

    tokens: of the turn. nats: of those that were fed through the cache, which the first turn's are not. text: of the
    answer, as far as it was shown. reason: None where the conversation broke off. columns: KV columns held at its end,
    mean over the transformer blocks.
    """

    turn: Turn
    tokens: int = 0
    nats: list[float] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    text: str = ""
    reason: str | None = None
    seconds: float = 0.0
    columns: float = 0.0
    kv_bytes: int = 0

    def more_text(self, tokenizer: Tokenizer | None) -> str:
        """What may be shown of the answer with its newest token: a character that is not whole yet waits, unless it is
        the last; the token's id without a tokenizer."""
        if tokenizer is None:
            return f"{self.answer[-1]} "
        text = decode_text(tokenizer, self.answer)
        if text.endswith("\ufffd") and self.reason is None:
            return ""
        new, self.text = text[len(self.text) :], max(self.text, text, key=len)
        return new

    def figures(self, tokenizer: Tokenizer | None, stop: tuple[str, ...]) -> dict[str, Any]:
        """For the JSON."""
        whole = StopCriteria(stop, (), tokenizer).text(self.answer)
        return {
            **self.turn.labels, "prompt": self.turn.content, "tokens": self.tokens,
            "nll": fmean(self.nats) if self.nats else None, "text": whole, "token_ids": self.answer,
            "finish_reason": self.reason, "seconds": self.seconds, "kv_columns": self.columns,
            "kv_bytes": self.kv_bytes,
        }  # fmt: skip


class Shown:
    """An audience that shows the answers as they come, and counts tokens, nats, columns and seconds of each turn."""

    def __init__(self, llm: LLM, turns: Sequence[Turn], first: int, show: Callable[[str], None]) -> None:
        self.exchanges: list[Exchange] = []
        self._llm, self._turns, self._first, self._show = llm, turns, first, show
        self._taken, self._began = 0, 0.0  # tokens behind the first turn; when the exchange began

    def begin(self, tokens: int = 0) -> None:
        """The next turn, of whose tokens so many are taken, is to be answered. At first: the model is loaded."""
        turn, number = self._turns[len(self.exchanges)], len(self.exchanges) + 1
        self.exchanges.append(Exchange(turn, tokens))
        self._began = self._began or time.perf_counter()
        self._show(f"\n[turn {number} of {len(self._turns)}] {turn.content}\n")

    def given(self, turn: int, token: int, logits: torch.Tensor) -> None:
        now = self._at(turn)
        now.tokens += 1
        now.nats.append(float(surprise(logits[None], torch.tensor([token], device=logits.device))))
        self._taken += 1

    def said(self, turn: int, token: int, reason: str | None) -> None:
        now = self._at(turn)
        now.answer.append(token)
        now.reason = reason
        self._taken += 1
        self._show(now.more_text(self._llm.model.tokenizer))
        if reason is not None:
            self.end()

    def end(self) -> None:
        """The newest exchange is over."""
        now, blocks = self.exchanges[-1], self._llm.model.spec.num_blocks
        held = held_columns(self._llm.eviction, self._first, self._taken, blocks)
        now.columns, now.kv_bytes = held / blocks, held * bytes_of_column(self._llm)
        now.seconds = time.perf_counter() - self._began
        self._began += now.seconds
        surprised = f", perplexity {perplexity(fmean(now.nats)):.1f}" if now.nats else ""
        self._show(
            f"\n({now.tokens} tokens{surprised}; {len(now.answer)} in answer, {now.reason or 'broken off'}; "
            f"KV {now.columns:.4g} columns, {format_bytes(now.kv_bytes)}; {format_seconds(now.seconds)})\n"
        )

    def _at(self, turn: int) -> Exchange:
        if turn == len(self.exchanges):
            self.begin()
        return self.exchanges[turn]


def converse(
    llm: LLM, case: Case, turns: Sequence[Turn], ids: Sequence[Sequence[int]], params: SamplingParams,
    show: Callable[[str], None],
) -> tuple[dict[str, Any], int, float]:  # fmt: skip
    """One conversation with a policy: figures for the JSON, all tokens, seconds. ids: of the turns; params: of each
    answer."""
    llm.eviction, spec = case.eviction, llm.model.spec
    room = most_new_tokens(case.eviction, spec, len(ids[0]), tokens_after_first(ids, params.max_tokens))
    eos = () if params.ignore_eos else spec.eos_token_ids
    ends = StopCriteria(params.stop, eos, llm.model.tokenizer)
    shown = Shown(llm, turns, len(ids[0]), show)
    talk = Conversation(ids, params.max_tokens, Sampler(params), ends, shown, room)
    llm.prepare([talk.prompt], talk)
    shown.begin(len(ids[0]))
    llm.run([talk.prompt], talk, lambda done: None, Callbacks(listener=Silent()))
    found = shown.exchanges
    if found[-1].reason is None:
        shown.end()
        show(
            f"the {spec.max_positions} positions of {llm.model.name} are used up; --positions rolling goes on, with "
            "rotary embeddings\n"
        )
    nats, tokens = [n for one in found for n in one.nats], sum(one.tokens + len(one.answer) for one in found)
    figures = {
        "turns": [{"turn": i, **one.figures(llm.model.tokenizer, params.stop)} for i, one in enumerate(found)],
        "answered": sum(one.reason is not None for one in found),
        "tokens": tokens,
        "measured_tokens": len(nats),
        "nll": fmean(nats) if nats else None,
        "perplexity": perplexity(fmean(nats)) if nats else None,
        "kv_bytes": max(one.kv_bytes for one in found),
    }
    return figures, tokens, sum(one.seconds for one in found)

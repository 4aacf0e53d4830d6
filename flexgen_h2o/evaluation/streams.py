"""Conversations of many turns that keep their KV cache: turns from a file, one row that answers them, and the figures.

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
from typing import Any, Protocol

import torch

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.units import GIVEN_CHUNK, format_bytes, format_seconds
from flexgen_h2o.engine.generation import Callbacks, Row, Silent, StopCriteria
from flexgen_h2o.engine.prompts import Prompt, lines_of, make_prompt, object_of_json, prompt_of_json
from flexgen_h2o.engine.report import RunReport
from flexgen_h2o.engine.sampling import Sampler, SamplingParams, Tokenizer, decode_text
from flexgen_h2o.evaluation.metrics import (
    Bootstrap,
    Case,
    Figures,
    NatsWatch,
    bytes_of_column,
    held_columns,
    perplexity,
    surprise,
)  # fmt: skip
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
    found, said = [], []
    for i, turn in enumerate(turns):
        said += [turn.content] if isinstance(turn.content, str) else []
        if chat and len(said) != i + 1:
            raise UsageError(f"{turn.place}: a chat template takes texts, not token ids; leave --chat out")
        try:
            found.append(_ids(turn.content, model, (form or FORMAT), said if chat else None, first=not i))
        except (UsageError, ValueError) as error:
            raise UsageError(f"{turn.place}: {error}") from error
    return found


def _ids(content: object, model: Model, form: str, said: list[str] | None, first: bool) -> tuple[int, ...]:
    def encode(text: str) -> list[int]:
        if said is not None:
            return model.encode_turn(said)
        text = form.replace(PLACE, text)
        if first:
            return model.encode(text)
        model.check_fits(text)
        return model.encode_more(text)

    given = encode if model.tokenizer is not None else None
    return make_prompt(0, content, given, model.spec.vocab_size).token_ids


class Audience(Protocol):
    """Callbacks of a conversation. turn: 0 is the first."""

    def given(self, turn: int, token: int, logits: torch.Tensor) -> None:
        """A token of a turn is taken. logits: (vocab,), of the step before it; not to be kept."""

    def said(self, turn: int, token: int, reason: str | None) -> None:
        """The answer to a turn has another token. reason: why it ends there, "stop" or "length"; None: it goes on."""


class Conversation:
    """A token source (engine.generation.TokenSource) of one row through all turns.

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
        self._turns, self._max_tokens, self._chooser, self._ends = turns, max_tokens, sampler, ends
        self._audience, self.max_tokens_per_sweep = audience, max_tokens_per_sweep
        self._most = tokens_after_first(turns, max_tokens)
        if room is not None:
            self._most = min(self._most, room)
        self._turn = 0
        self._coming: deque[int] = deque()
        self._answer = self._new_answer()

    @property
    def prompt(self) -> Prompt:
        """The first turn, as the row's prompt."""
        return Prompt(0, tuple(self._turns[0]), None)

    def sample(self, logits: torch.Tensor, rows: Sequence[int], steps: Sequence[int]) -> list[int]:
        if self._coming:
            token = self._coming.popleft()
            self._audience.given(self._turn, token, logits[0])
            return [token]
        (token,) = self._chooser.sample(logits, rows, steps)
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
        self._answer = self._new_answer()
        if self._turn < len(self._turns):
            turn = list(self._turns[self._turn])
            is_said = self._ends.is_eos(last) and turn[:1] == [last]
            self._coming.extend(turn[1:] if is_said else turn)

    def _new_answer(self) -> Row:
        return Row(self.prompt, self._max_tokens)


def tokens_after_first(turns: Sequence[Sequence[int]], max_tokens: int) -> int:
    """The most tokens that follow on the first turn where every answer has at most `max_tokens`."""
    return sum(map(len, turns[1:])) + max_tokens * len(turns)


@dataclass
class Exchange:
    """One turn and the answer to it.

    tokens: of the turn. nats: of those that were fed through the cache, which the first turn's are not. reason: None
    where the conversation broke off. columns: KV columns held at its end, mean over the transformer blocks.
    """

    tokens: int = 0
    nats: list[float] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    reason: str | None = None
    seconds: float = 0.0
    columns: float = 0.0
    kv_bytes: int = 0


class Shown:
    """An audience that shows the answers as they come, and counts tokens, nats, columns and seconds of each turn."""

    def __init__(self, llm: LLM, turns: Sequence[Turn], first: int, show: Callable[[str], None]) -> None:
        self.exchanges = [Exchange(first)]
        self._llm, self._turns, self._first, self._show = llm, turns, first, show
        self._text = TextStream(llm.model.tokenizer)
        self._taken = 0  # tokens behind the first turn

    def begin(self) -> None:
        """The model is loaded; the first turn is to be answered."""
        self._began = time.perf_counter()
        self._introduce()

    def given(self, turn: int, token: int, logits: torch.Tensor) -> None:
        now = self._at(turn)
        now.tokens += 1
        now.nats.append(float(surprise(logits[None], torch.tensor([token], device=logits.device))))
        self._taken += 1

    def said(self, turn: int, token: int, reason: str | None) -> None:
        now = self._at(turn)
        now.answer.append(token)
        self._taken += 1
        self._show(self._text.more(token, is_last=reason is not None))
        if reason is not None:
            now.reason = reason
            self.end()

    def end(self) -> None:
        """The newest exchange is over."""
        now, blocks = self.exchanges[-1], self._llm.model.spec.num_blocks
        held = held_columns(self._llm.eviction, self._first, self._taken, blocks)
        now.columns, now.kv_bytes = held / blocks, held * bytes_of_column(self._llm)
        now.seconds = time.perf_counter() - self._began
        self._began += now.seconds
        self._text = TextStream(self._llm.model.tokenizer)
        surprised = f", perplexity {perplexity(_mean(now.nats)):.1f}" if now.nats else ""
        self._show(
            f"\n({now.tokens} tokens{surprised}; {len(now.answer)} in answer, {now.reason or 'broken off'}; "
            f"KV {now.columns:.4g} columns, {format_bytes(now.kv_bytes)}; {format_seconds(now.seconds)})\n"
        )

    def _at(self, turn: int) -> Exchange:
        if turn == len(self.exchanges):
            self.exchanges.append(Exchange())
            self._introduce()
        return self.exchanges[turn]

    def _introduce(self) -> None:
        number = len(self.exchanges)
        self._show(f"\n[turn {number} of {len(self._turns)}] {self._turns[number - 1].content}\n")


class TextStream:
    """The text of growing token ids, bit by bit; the ids themselves where there is no tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer, self._ids, self._shown = tokenizer, list[int](), 0

    def more(self, token: int, is_last: bool) -> str:
        """What may be shown with this token: a character that is not whole yet waits, unless it is the last."""
        self._ids.append(token)
        if self._tokenizer is None:
            return f"{token} "
        text = decode_text(self._tokenizer, self._ids)
        if text.endswith("\ufffd") and not is_last:
            return ""
        new, self._shown = text[self._shown :], max(self._shown, len(text))
        return new


def converse(
    llm: LLM,
    case: Case,
    turns: Sequence[Turn],
    ids: Sequence[Sequence[int]],
    params: SamplingParams,
    show: Callable[[str], None],
) -> dict[str, Any]:
    """One conversation with a policy; what it was, for the JSON. ids: of the turns; params: of each answer."""
    llm.eviction, spec = case.eviction, llm.model.spec
    room = most_new_tokens(case.eviction, spec, len(ids[0]), tokens_after_first(ids, params.max_tokens))
    eos = () if params.ignore_eos else spec.eos_token_ids
    ends = StopCriteria(params.stop, eos, llm.model.tokenizer)
    shown = Shown(llm, turns, len(ids[0]), show)
    talk = Conversation(ids, params.max_tokens, Sampler(params), ends, shown, room)
    llm.prepare([talk.prompt], talk)
    shown.begin()
    report = llm.run([talk.prompt], talk, lambda done: None, Callbacks(listener=Silent()))
    found = shown.exchanges
    if found[-1].reason is None:
        shown.end()
        show(
            f"the {spec.max_positions} positions of {llm.model.name} are used up; --positions rolling goes on, with "
            "rotary embeddings\n"
        )
    answered = sum(one.reason is not None for one in found)
    nats, tokens = [n for one in found for n in one.nats], sum(one.tokens + len(one.answer) for one in found)
    own: Figures = {
        "turns": [_facts(i, turn, one, llm, params) for i, (turn, one) in enumerate(zip(turns, found, strict=False))],
        "answered": answered,
        "tokens": tokens,
        "measured_tokens": len(nats),
        "nll": _mean(nats) if nats else None,
        "perplexity": perplexity(_mean(nats)) if nats else None,
        "kv_bytes": max(one.kv_bytes for one in found),
    }
    return _result(case, own, report, tokens, sum(one.seconds for one in found))


def _result(case: Case, own: Figures, report: RunReport, tokens: int, seconds: float) -> Figures:
    """One policy's part of the JSON. own: figures of its measure."""
    return {
        "policy": case.label,
        "positions": case.positions,
        "eviction": case.eviction.to_json(),
        **own,
        "kv_reserved_bytes": report.extra["kv_reserved_bytes"],
        "peak_bytes": report.peak_bytes,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
    }


def _mean(nats: Sequence[float]) -> float:
    return sum(nats) / len(nats)


def _facts(index: int, turn: Turn, one: Exchange, llm: LLM, params: SamplingParams) -> dict[str, Any]:
    tokenizer, text = llm.model.tokenizer, None
    if tokenizer is not None:
        text = StopCriteria(params.stop, (), tokenizer).cut(decode_text(tokenizer, one.answer))
    return {
        "turn": index,
        **turn.labels,
        "prompt": turn.content,
        "tokens": one.tokens,
        "nll": _mean(one.nats) if one.nats else None,
        "text": text,
        "token_ids": one.answer,
        "finish_reason": one.reason,
        "seconds": one.seconds,
        "kv_columns": one.columns,
        "kv_bytes": one.kv_bytes,
    }


RESAMPLES = 1000
AT_ONCE = 16  # tokens of every stream in one sweep


def measure_streams(llm: LLM, case: Case, streams: Sequence[Sequence[int]], windows: int, seed: int) -> dict[str, Any]:
    """Each stream token by token with a policy; NLL and KV by window, for the JSON. Windows count tokens from 1, which
    nothing is expected for.

    Every token is a decode step: the policy decides after each, and no prompt is attended to as a whole.
    """
    llm.eviction, tokens = case.eviction, torch.tensor([list(s) for s in streams])
    n, length = tokens.shape
    watch = NatsWatch(tokens[:, 1:])
    report = llm.follow(tokens[:, :1].tolist(), tokens[:, 1:].tolist(), watch, max_tokens_per_sweep=AT_ONCE)
    seconds = report.prefill.seconds + report.decode.seconds
    edges = [length * i // windows for i in range(windows + 1)]
    held = [held_columns(case.eviction, 1, last - 1, llm.model.spec.num_blocks) for last in edges[1:]]
    found = [
        {
            "first": first + 1,
            "last": last,
            "nll": _interval(watch.nats[:, max(0, first - 1) : last - 1], seed),
            "kv_columns": columns / llm.model.spec.num_blocks,
            "kv_bytes": columns * bytes_of_column(llm),
        }
        for first, last, columns in zip(edges, edges[1:], held, strict=False)
    ]
    whole = _interval(watch.nats, seed)
    own: Figures = {"windows": found, "nll": whole, "perplexity": perplexity(whole["value"])}
    return _result(case, own, report, n * length, seconds)


def _interval(nats: torch.Tensor, seed: int) -> dict[str, Any]:
    """Of (streams, tokens), with an interval over streams."""
    return Bootstrap(len(nats), RESAMPLES, seed).mean(nats.mean(dim=1).numpy())

"""Conversations of many turns: reading turns, answering them in one row, and their figures."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.units import format_bytes, format_seconds
from flexgen_h2o.engine.channels import ChatText
from flexgen_h2o.engine.conversation import Conversation, tokens_after_first
from flexgen_h2o.engine.decoding import stop_criteria
from flexgen_h2o.engine.generation import Callbacks, Listener
from flexgen_h2o.engine.harmony import marks_of
from flexgen_h2o.engine.penalties import penalties_of
from flexgen_h2o.engine.prompts import lines_of, make_prompt, object_of_json, prompt_of_json
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.evaluation.figures import held_kv, perplexity, surprise
from flexgen_h2o.evaluation.rows import Case, at_line
from flexgen_h2o.kvcache.eviction.policy import most_new_tokens
from flexgen_h2o.llm import LLM
from flexgen_h2o.models.load import Model

PLACE = "{turn}"
CONTEXT = 256  # tokens kept from before an answer; its text depends on fewer
FORMAT = "\n{turn}\n"  # newlines separate a turn from the last answer, which may be cut anywhere
# Turns without --turns. The shipped model, which was trained on Python sources, can continue them.
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


@dataclass
class Turn:
    """One message to the model, and the answer to it, which `Shown` fills in."""

    content: object  # a text, or a list of token ids
    place: str = ""  # file and line of the turn, for errors
    # `question_id` and `category` of the file's line.
    labels: dict[str, Any] = field(default_factory=dict)
    # Number of tokens of the turn.
    tokens: int = 0
    # Surprise of each token of the turn, in nats; empty for the first turn, which is the prompt.
    nats: list[float] = field(default_factory=list)
    # Token ids of the answer.
    answer: list[int] = field(default_factory=list)
    # The last token ids before the answer, at most CONTEXT.
    before: list[int] = field(default_factory=list)
    # Finish reason of the answer; None if the conversation broke off.
    reason: str | None = None
    # Seconds from the turn's beginning to the end of the answer.
    seconds: float = 0.0
    # KV entries held at the end of the answer, a mean over the transformer blocks, and their bytes
    # in all blocks.
    columns: float = 0.0
    kv_bytes: int = 0

    def figures(self, model: Model, params: SamplingParams) -> dict[str, Any]:
        """Return the figures of the turn for the JSON. params: those of the answer."""
        if marks_of(model.tokenizer) is None:
            whole = stop_criteria(model, params).text(self.answer, self.before)
        else:
            whole, _ = ChatText(model.tokenizer, params, self.before).more(self.answer, True)
        return {
            **self.labels,
            "prompt": self.content,
            "tokens": self.tokens,
            "nll": fmean(self.nats) if self.nats else None,
            "text": whole,
            "token_ids": self.answer,
            "finish_reason": self.reason,
            "seconds": self.seconds,
            "kv_columns": self.columns,
            "kv_bytes": self.kv_bytes,
        }


def read_turns(path: Path | None) -> list[Turn]:
    """Return all turns of a file, in its order; TURNS if `path` is None.

    A `.txt` file has one turn per line. A line of a `.jsonl` file is a question of MT-bench,
    `{"question_id", "category", "turns": [...]}`, with texts or lists of token ids as turns. It may
    also be one turn, as `prompt` or `prompt_token_ids`.

    Raise UsageError naming `--turns FILE:LINE`.
    """
    if path is None:
        return [Turn(text, "--turns") for text in TURNS]
    if path.suffix.lower() not in (".txt", ".jsonl"):
        raise UsageError(
            f"--turns {path}: the file name must end in .txt (one turn per line) or .jsonl"
        )
    is_text = path.suffix.lower() == ".txt"
    turns = []
    for place, line in lines_of(path, "--turns"):
        with at_line(place):
            turns += [Turn(line, place)] if is_text else _turns_of_json(line, place)
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


def encoded(
    turns: Sequence[Turn], model: Model, form: str | None, chat: bool
) -> list[tuple[int, ...]]:
    """Return the turns as token ids; turns that are ids already stay as they are.

    form, chat: as for `encoded_turn`. Raise UsageError naming the turn's place.
    """
    if chat:
        model.check_chat()
    found: list[tuple[int, ...]] = []
    for i, turn in enumerate(turns):
        if chat and not isinstance(turn.content, str):
            raise UsageError(
                f"{turn.place}: a chat template takes texts, not token ids; leave --chat out"
            )
        try:
            found.append(encoded_turn(turns[: i + 1], model, form, chat))
        except (UsageError, ValueError) as error:
            raise UsageError(f"{turn.place}: {error}") from error
    return found


def encoded_turn(
    turns: Sequence[Turn], model: Model, form: str | None, chat: bool, system: str | None = None
) -> tuple[int, ...]:
    """Return the last of the turns as token ids; the others came before it.

    form: text that a turn is put into, at PLACE (None: FORMAT). Only the first turn gets the
    tokenizer's special tokens. chat: the model's chat template is used instead. system: text that
    the conversation begins with. Raise UsageError, or the template's ValueError.
    """

    def encode(text: str) -> list[int]:
        if chat:
            return model.encode_turn([str(turn.content) for turn in turns], system)
        whole = (form or FORMAT).replace(PLACE, text)
        if len(turns) == 1:
            return model.encode(whole if system is None else f"{system}\n{whole}")
        model.check_fits(whole)
        return model.encode_plain(whole)

    given = encode if model.tokenizer is not None else None
    return tuple(make_prompt(0, turns[-1].content, given, model.spec.vocab_size).prompt_ids)


class Shown:
    """An audience that shows answers as they come, and records figures of each turn.

    The figures are tokens, nats, KV entries and seconds. first: token ids of the first turn.
    params: sampling of the answers. show: called with each piece of text. over: called with each
    turn as it ends.
    """

    def __init__(
        self,
        llm: LLM,
        first: Sequence[int],
        params: SamplingParams,
        show: Callable[[str], None],
        over: Callable[[Turn], None],
    ) -> None:
        self.turns: list[Turn] = []
        self._llm = llm
        self._first = len(first)
        self._params = params
        self._show = show
        self._over = over
        self._taken = 0  # tokens after the first turn
        self._before = deque(first, maxlen=CONTEXT)
        self._text: ChatText

    def begin(self, turn: Turn) -> None:
        """Begin the next turn."""
        tokens = 0 if self.turns else self._first
        self.turns.append(Turn(turn.content, turn.place, turn.labels, tokens))
        self._began = time.perf_counter()

    def given(self, token: int, logits: torch.Tensor) -> None:
        """Record a token of a later turn. logits: (vocab,), from which it is predicted."""
        now = self.turns[-1]
        now.tokens += 1
        now.nats.append(float(surprise(logits[None], torch.tensor([token], device=logits.device))))
        self._taken += 1
        self._before.append(token)

    def said(self, token: int, reason: str | None) -> None:
        """Record and show a token of the answer. reason: the finish reason with its last token."""
        now = self.turns[-1]
        if not now.answer:
            now.before = list(self._before)
            self._text = ChatText(self._llm.model.tokenizer, self._params, now.before)
        now.answer.append(token)
        now.reason = reason
        self._taken += 1
        self._before.append(token)
        self._show(self._text.shown(now.answer, reason is not None))
        if reason is not None:
            self._end()

    def break_off(self) -> None:
        """End the newest turn if the run ended before its answer did."""
        now = self.turns[-1]
        if now.reason is None:
            if now.answer:
                self._show(self._text.shown(now.answer, True))
            self._end()

    def _end(self) -> None:
        now = self.turns[-1]
        blocks = self._llm.model.spec.num_blocks
        held, now.kv_bytes = held_kv(self._llm, (self._first, self._taken), self._taken)
        now.columns = held / blocks
        now.seconds = time.perf_counter() - self._began
        self._over(now)


def converse(
    llm: LLM,
    case: Case,
    turns: Sequence[Turn],
    ids: Sequence[Sequence[int]],
    params: SamplingParams,
    show: Callable[[str], None],
) -> tuple[dict[str, Any], int, float]:
    """Run one conversation with a policy. Return (figures for the JSON, all tokens, seconds).

    ids: token ids of the turns. params: sampling of each answer. show: called with each piece of
    text.
    """
    llm.eviction = case.eviction
    spec = llm.model.spec
    shown = Shown(llm, ids[0], params, show, lambda now: show(f"\n({_line(now)})\n"))

    def begin(number: int) -> Sequence[int]:
        show(f"\n[turn {number + 1} of {len(turns)}] {turns[number].content}\n")
        shown.begin(turns[number])
        return ids[number]

    more: Iterator[Sequence[int]] = map(begin, range(1, len(turns)))
    params = llm.model.generation.for_drawing(params)
    ends = stop_criteria(llm.model, params)
    room = most_new_tokens(
        llm.eviction, spec, len(ids[0]), tokens_after_first(ids, params.max_tokens)
    )
    talk = Conversation(
        ids[0], more, params, ends, shown, room, penalties=partial(penalties_of, llm.model, params)
    )
    llm.prepare([talk.sequence])
    begin(0)
    llm.run([talk.sequence], lambda done: None, Callbacks(listener=Listener()))
    found = shown.turns
    if found[-1].reason is None:
        shown.break_off()
        show(
            f"the {spec.max_positions} positions of {llm.model.name} are used up; --positions "
            "rolling goes on, with "
            "rotary embeddings\n"
        )
    nats = [n for one in found for n in one.nats]
    tokens = sum(one.tokens + len(one.answer) for one in found)
    figures = {
        "turns": [{"turn": i, **one.figures(llm.model, params)} for i, one in enumerate(found)],
        "answered": sum(one.reason is not None for one in found),
        "tokens": tokens,
        "nll": fmean(nats) if nats else None,
        "perplexity": perplexity(fmean(nats)) if nats else None,
        "kv_bytes": max(one.kv_bytes for one in found),
    }
    return figures, tokens, sum(one.seconds for one in found)


def _line(now: Turn) -> str:
    surprised = f", perplexity {perplexity(fmean(now.nats)):.1f}" if now.nats else ""
    return (
        f"{now.tokens} tokens{surprised}; {len(now.answer)} in answer, "
        f"{now.reason or 'broken off'}; "
        f"KV {now.columns:.4g} entries, {format_bytes(now.kv_bytes)}; {format_seconds(now.seconds)}"
    )

"""Many turns in one conversation whose KV lives on, shown as it goes, with what each turn took."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flexgen_h2o.conversation import Conversation, tokens_after_first
from flexgen_h2o.evaluation.cells import Case
from flexgen_h2o.evaluation.held import bytes_of_column, held_columns
from flexgen_h2o.evaluation.metrics import perplexity, surprise
from flexgen_h2o.evaluation.turns import Turn
from flexgen_h2o.generation import RowEnd
from flexgen_h2o.kvcache.eviction.rolling import most_new_tokens
from flexgen_h2o.llm import LLM
from flexgen_h2o.progress import Silent
from flexgen_h2o.sampling import SamplingParams, StopStrings, TokenChooser, Tokenizer, decode_text
from flexgen_h2o.units import format_bytes, format_seconds

Show = Callable[[str], None]


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
    """The audience (conversation.Audience) of a conversation: shows the answers as they come, and counts."""

    def __init__(self, llm: LLM, turns: Sequence[Turn], first: int, show: Show) -> None:
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
        self._show(self._text.more(token, last=reason is not None))
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

    def more(self, token: int, last: bool) -> str:
        """What may be shown with this token: a character that is not whole yet waits, unless it is the last."""
        self._ids.append(token)
        if self._tokenizer is None:
            return f"{token} "
        text = decode_text(self._tokenizer, self._ids)
        if text.endswith("\ufffd") and not last:
            return ""
        new, self._shown = text[self._shown :], max(self._shown, len(text))
        return new


def converse(
    llm: LLM, case: Case, turns: Sequence[Turn], ids: Sequence[Sequence[int]], params: SamplingParams, show: Show
) -> dict[str, Any]:
    """One conversation with a policy; what it was, for the JSON. ids: of the turns; params: of each answer."""
    llm.eviction, spec = case.eviction, llm.model.spec
    room = most_new_tokens(case.eviction, spec, len(ids[0]), tokens_after_first(ids, params.max_tokens))
    ends = RowEnd(params, spec.eos_token_ids, StopStrings(llm.model.tokenizer, params.stop))
    shown = Shown(llm, turns, len(ids[0]), show)
    talk = Conversation(ids, params.max_tokens, TokenChooser(params), ends, shown, room)
    llm.prepare([talk.prompt], [params], talk)
    shown.begin()
    report = llm.run([talk.prompt], params, lambda done: None, course=talk, listener=Silent())
    found = shown.exchanges
    if found[-1].reason is None:
        shown.end()
        show(
            f"the {spec.max_positions} positions of {llm.model.name} are used up; --positions rolling goes on, with "
            "rotary embeddings\n"
        )
    answered = sum(one.reason is not None for one in found)
    nats, tokens = [n for one in found for n in one.nats], sum(one.tokens + len(one.answer) for one in found)
    seconds = sum(one.seconds for one in found)
    return {
        "policy": case.label,
        "positions": case.positions,
        "eviction": case.eviction.to_json(),
        "turns": [_facts(i, turn, one, llm, params) for i, (turn, one) in enumerate(zip(turns, found, strict=False))],
        "answered": answered,
        "tokens": tokens,
        "measured_tokens": len(nats),
        "nll": _mean(nats) if nats else None,
        "perplexity": perplexity(_mean(nats)) if nats else None,
        "kv_bytes": max(one.kv_bytes for one in found),
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
        text = StopStrings(tokenizer, params.stop).cut(decode_text(tokenizer, one.answer))
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

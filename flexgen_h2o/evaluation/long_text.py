"""The surprise of long texts, fed token by token: where it grows with their length, the cache is at fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flexgen_h2o.errors import UsageError
from flexgen_h2o.evaluation.bootstrap import Bootstrap
from flexgen_h2o.evaluation.cells import Case
from flexgen_h2o.evaluation.held import bytes_of_column, held_columns
from flexgen_h2o.evaluation.metrics import perplexity, surprise
from flexgen_h2o.evaluation.rows import HeldOutText, held_out_text
from flexgen_h2o.evaluation.watches import StepCounter
from flexgen_h2o.files import read_bounded
from flexgen_h2o.llm import LLM
from flexgen_h2o.source import Model

RESAMPLES = 1000
MOST_TEXT_BYTES = 16 * 2**20  # of a file: more than any stream is long
AT_ONCE = 16  # tokens of every stream in one sweep


@dataclass
class NatsWatch:
    """The surprise of given tokens: `nats`, (n, steps) float64. tokens: (n, steps) int64."""

    tokens: torch.Tensor
    nats: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._counter = StepCounter(len(self.tokens))
        self.nats = torch.zeros(self.tokens.shape, dtype=torch.float64)

    def __call__(self, rows: list[int], logits: torch.Tensor) -> None:
        at = (rows, self._counter.next(rows))
        self.nats[at] = surprise(logits.cpu(), self.tokens[at])


def text_of(path: Path | None, model: Model) -> HeldOutText:
    """A file's text, or that of the sources which the shipped model has not seen, as token ids."""
    if model.tokenizer is None:
        raise UsageError(f"--model {model.name}: has no tokenizer, and --text needs one")
    if path is None:
        return held_out_text(model)
    try:
        text = read_bounded(path, MOST_TEXT_BYTES).decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"--text {path}: not UTF-8 text; save the file as UTF-8") from error
    except OSError as error:
        raise UsageError(f"--text {path}: {error.strerror or error}") from error
    return HeldOutText(model.encode_more, tuple(model.encode("")), model.encode_long(text))


def streams_of(text: HeldOutText, count: int, length: int | None) -> list[tuple[int, ...]]:
    """Stretches of the text, evenly apart, each behind what a prompt begins with; None: as long as there is text."""
    have = len(text.tokens)
    size = have // count if length is None else length - len(text.start)
    if size + len(text.start) < 2 or count * size > have:
        raise UsageError(
            f"--stream-len {'(all of the text)' if length is None else length}, --streams {count}: the text has {have} "
            "tokens, and a stream takes at least 2; ask for fewer, shorter or longer ones"
        )
    return [(*text.start, *text.tokens[at : at + size]) for at in (i * have // count for i in range(count))]


def measure(llm: LLM, case: Case, streams: Sequence[Sequence[int]], windows: int, seed: int) -> dict[str, Any]:
    """Each stream token by token with a policy; NLL and KV by window, for the JSON. Windows count tokens from 1, which
    nothing is expected for.

    Every token is a decode step: the policy decides after each, and no prompt is attended to as a whole.
    """
    llm.eviction, tokens = case.eviction, torch.tensor([list(s) for s in streams])
    n, length = tokens.shape
    watch = NatsWatch(tokens[:, 1:])
    report = llm.follow(tokens[:, :1].tolist(), tokens[:, 1:].tolist(), watch, at_once=AT_ONCE)
    seconds = report.prefill.seconds + report.decode.seconds
    edges = [length * i // windows for i in range(windows + 1)]
    held = [held_columns(case.eviction, 1, last - 1, llm.model.spec.num_blocks) for last in edges[1:]]
    found = [
        {
            "first": first + 1,
            "last": last,
            "nll": _mean(watch.nats[:, max(0, first - 1) : last - 1], seed),
            "kv_columns": columns / llm.model.spec.num_blocks,
            "kv_bytes": columns * bytes_of_column(llm),
        }
        for first, last, columns in zip(edges, edges[1:], held, strict=False)
    ]
    whole = _mean(watch.nats, seed)
    return {
        "policy": case.label,
        "positions": case.positions,
        "eviction": case.eviction.to_json(),
        "windows": found,
        "nll": whole,
        "perplexity": perplexity(whole["value"]),
        "kv_reserved_bytes": report.extra["kv_reserved_bytes"],
        "peak_bytes": report.peak_bytes,
        "seconds": seconds,
        "tokens_per_s": n * length / seconds,
    }


def _mean(nats: torch.Tensor, seed: int) -> dict[str, Any]:
    """Of (streams, tokens), with an interval over streams."""
    return Bootstrap(len(nats), RESAMPLES, seed).mean(nats.mean(dim=1).numpy()).to_json()

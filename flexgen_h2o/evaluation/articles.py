"""Articles to be summarised, as h2o_hf and llama-recipes keep them, and ROUGE of a summary. Imports no torch.

A record is a line of a .jsonl file: {"article", "summary_gt", "temperature", "top_p", "max_tokens", "stop", "n",
"logprobs"}. Its article is the whole prompt: solved examples if there are any, the article, and the instruction.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.settings import SamplingParams
from flexgen_h2o.engine.prompts import lines_of, object_of_json

LAYOUT = (
    'one JSON object a line, {"article": "the prompt", "summary_gt": "the reference", "max_tokens": 64, ...}, as in '
    "h2o_hf/data/summarization_data of github.com/FMInference/H2O"
)
# Of rouge-score (Google's, with Porter's stemmer, as HELM has it) and of the package rouge (h2o_hf's tables).
ROUGE_SCORE, ROUGE = ("rouge1", "rouge2", "rougeL"), ("rouge-1", "rouge-2", "rouge-l")
METRICS = (*ROUGE_SCORE, *ROUGE)
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "stop", "seed", "ignore_eos", "logprobs")
INSTRUCTION = "Summarize the article in one sentence."  # of a message, if its record has none
_EXAMPLE = re.compile(r"(?m)^(?=###$)")
_FREE_FRAMES = 1000  # of Python's stack, beside those of the package rouge


def read_records(path: Path, most: int | None, fields: Mapping[str, Any], default_len: int) -> Iterator[dict[str, Any]]:
    """The first `most` records of a file, each with `fields` in place of its own and a `max_tokens`.

    UsageError naming `--input FILE:LINE` for a line that is no such record, or whose sampling cannot be had.
    """
    for place, line in islice(lines_of(path, "--input"), most):
        try:
            record = {**object_of_json(line), **fields}
            for name in ("article", "summary_gt"):
                value = record.get(name)
                if not isinstance(value, str) or not value.strip():
                    raise UsageError(f"{name}: a text is expected; {LAYOUT}")
            if record.get("n") not in (None, 1):
                raise UsageError(f"n: {record['n']!r:.20}, but one summary of an article is scored; write 1")
            if record.get("max_tokens") is None:
                record["max_tokens"] = default_len
            SamplingParams(**{name: record[name] for name in _SAMPLING if record.get(name) is not None})
        except UsageError as error:
            raise UsageError(f"{place}: {error}") from error
        yield record


def split_instruction(prompt: str) -> tuple[str, str, str]:
    """(article, what is between, instruction) of a prompt: what follows its last blank line says what is to be done.

    A prompt without a blank line is an article alone.
    """
    article, gap, instruction = prompt.rpartition("\n\n")
    return (article, gap, instruction) if gap else (prompt, "", "")


def as_message(prompt: str) -> str:
    """Return a record's prompt as a user's message: with an instruction behind it, if it has none."""
    text = prompt.strip()
    return text if split_instruction(text)[2] else f"{text}\n\n{INSTRUCTION}"


def prompt_of(request: Mapping[str, Any]) -> str:
    """Return the text of a request that was made of a record: its article, or its only message."""
    text: str = request["messages"][0]["content"] if "messages" in request else request["article"]
    return text


def shortened(prompt: str, fits: Callable[[str], bool]) -> str | None:
    """As much of a prompt as `fits`: without its first solved examples, if that is enough, else without the end of its
    article too. The instruction stays, as in HELM. None where not a word of the article fits."""
    examples = [part for part in _EXAMPLE.split(prompt) if part]
    while len(examples) > 1 and not fits("".join(examples)):
        del examples[0]
    whole = "".join(examples)
    if fits(whole):
        return whole
    article, gap, instruction = split_instruction(whole)
    ends = [word.end() for word in re.finditer(r"\S+", article)]

    def cut(words: int) -> str:
        return article[: ends[words - 1]] + gap + instruction

    words = bisect_left(range(1, len(ends) + 1), True, key=lambda n: not fits(cut(n)))
    while words and not fits(cut(words)):  # a word more may take a token less
        words -= 1
    return cut(words) if words else None


class Rouge:
    """ROUGE-1, -2 and -L of a summary, F measures in [0, 1]: of rouge-score, then of the package rouge."""

    def __init__(self) -> None:
        from rouge import Rouge as Plain
        from rouge_score.rouge_scorer import RougeScorer

        self._plain, self._scorer = Plain(), RougeScorer(list(ROUGE_SCORE), use_stemmer=True)

    def __call__(self, text: str, reference: str) -> list[float]:
        """One number for each of METRICS; an empty text has 0 in all."""
        found = self._scorer.score(reference, text)
        scores = [float(found[name].fmeasure) for name in ROUGE_SCORE]
        if not _has_words(text) or not _has_words(reference):  # the package raises there
            return [*scores, *(0.0 for _ in ROUGE)]
        limit, words = sys.getrecursionlimit(), len(text.split()) + len(reference.split())
        sys.setrecursionlimit(max(limit, words + _FREE_FRAMES))  # it goes through two sentences word by word
        try:
            (plain,) = self._plain.get_scores(text, reference)
        finally:
            sys.setrecursionlimit(limit)
        return [*scores, *(float(plain[name]["f"]) for name in ROUGE)]


def _has_words(text: str) -> bool:
    return any(sentence.split() for sentence in text.split("."))

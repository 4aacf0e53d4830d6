"""Articles to summarise, as h2o_hf and llama-recipes keep them, and ROUGE of a summary.

A record is a line of a .jsonl file: {"article", "summary_gt", "temperature", "top_p", "max_tokens",
"stop", "n", "logprobs"}. Its article is the whole prompt: solved examples if there are any, the
article, and the instruction. This module imports no torch.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.settings import SamplingParams
from flexgen_h2o.engine.prompts import lines_of, object_of_json
from flexgen_h2o.evaluation.rows import at_line

LAYOUT = (
    'one JSON object a line, {"article": "the prompt", "summary_gt": "the reference", '
    '"max_tokens": 64, ...}, as in '
    "h2o_hf/data/summarization_data of github.com/FMInference/H2O"
)
# Names of the measures in rouge-score (Google's, with Porter's stemmer, as in HELM), and in the
# package rouge (h2o_hf's tables).
ROUGE_SCORE = ("rouge1", "rouge2", "rougeL")
ROUGE = ("rouge-1", "rouge-2", "rouge-l")
METRICS = (*ROUGE_SCORE, *ROUGE)
_SAMPLING = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "stop",
    "seed",
    "ignore_eos",
    "logprobs",
)
INSTRUCTION = "Summarize the article in one sentence."  # used if a record has none
_EXAMPLE = re.compile(r"(?m)^(?=###$)")
_FREE_FRAMES = 1000  # frames of Python's stack for others than the package rouge


def read_records(
    path: Path, most: int | None, fields: Mapping[str, Any], default_len: int
) -> Iterator[dict[str, Any]]:
    """Yield the first `most` records of a file (None: all).

    fields: replace a record's own. default_len: the `max_tokens` of a record that has none. Raise
    UsageError naming `--input FILE:LINE` for a line that is no such record, or whose sampling is
    not supported.
    """
    for place, line in islice(lines_of(path, "--input"), most):
        with at_line(place):
            record = {**object_of_json(line), **fields}
            for name in ("article", "summary_gt"):
                value = record.get(name)
                if not isinstance(value, str) or not value.strip():
                    raise UsageError(f"{name}: a text is expected; {LAYOUT}")
            if record.get("n") not in (None, 1):
                raise UsageError(
                    f"n: {record['n']!r:.20}, but one summary of an article is scored; write 1"
                )
            if record.get("max_tokens") is None:
                record["max_tokens"] = default_len
            SamplingParams(
                **{name: record[name] for name in _SAMPLING if record.get(name) is not None}
            )
        yield record


def split_instruction(prompt: str) -> tuple[str, str, str]:
    """Split a prompt into (article, blank line, instruction).

    The instruction is the text after the last blank line. A prompt without a blank line is an
    article alone.
    """
    article, gap, instruction = prompt.rpartition("\n\n")
    return (article, gap, instruction) if gap else (prompt, "", "")


def as_message(prompt: str) -> str:
    """Return a record's prompt as a user's message, with INSTRUCTION if it has no instruction."""
    text = prompt.strip()
    return text if split_instruction(text)[2] else f"{text}\n\n{INSTRUCTION}"


def prompt_of(request: Mapping[str, Any]) -> str:
    """Return the text of a request that was made of a record: its article, or its only message."""
    text: str = request["messages"][0]["content"] if "messages" in request else request["article"]
    return text


def shortened(prompt: str, fits: Callable[[str], bool]) -> str | None:
    """Return as much of a prompt as `fits`; None if not a word of the article fits.

    The first solved examples are left out. If that is not enough, the end of the article is left
    out too. The instruction stays, as in HELM.
    """
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
    while words and not fits(cut(words)):  # one more word may need one token less
        words -= 1
    return cut(words) if words else None


@cache
def _scorers() -> tuple[Any, Any]:
    from rouge import Rouge
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(ROUGE_SCORE), use_stemmer=True), Rouge()


def rouge_of(text: str, reference: str) -> list[float]:
    """Return F measures of ROUGE-1, -2 and -L in [0, 1], by rouge-score and then by the package
    rouge: one number for each of METRICS. An empty text scores 0 in all.
    """
    scorer, plain = _scorers()
    found = scorer.score(reference, text)
    scores = [float(found[name].fmeasure) for name in ROUGE_SCORE]
    if not _has_words(text) or not _has_words(reference):  # the package raises errors
        return [*scores, *(0.0 for _ in ROUGE)]
    limit = sys.getrecursionlimit()
    words = len(text.split()) + len(reference.split())
    # The package recurses word by word through two sentences.
    sys.setrecursionlimit(max(limit, words + _FREE_FRAMES))
    try:
        (others,) = plain.get_scores(text, reference)
    finally:
        sys.setrecursionlimit(limit)
    return [*scores, *(float(others[name]["f"]) for name in ROUGE)]


def _has_words(text: str) -> bool:
    return any(sentence.split() for sentence in text.split("."))

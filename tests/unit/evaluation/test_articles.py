"""Records of articles, prompts that are cut, and ROUGE against values worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o.evaluation.articles import (
    METRICS,
    read_records,
    rouge_of,
    shortened,
)
from tests.extras import needs

INSTRUCTION = "Summarize the above article in 1 sentence.\n"


def prompt(*articles: str) -> str:
    """Solved examples, then the article that is asked for."""
    *solved, last = (f"###\nArticle: {text}\n\n{INSTRUCTION}" for text in articles)
    return "".join(f"{one}A summary.\n\n" for one in solved) + last


def words(most: int) -> Any:
    return lambda text: len(text.split()) <= most


@pytest.mark.parametrize("left", [1, 2, 5])
def test_the_end_of_an_article_goes_and_its_instruction_stays(left: int) -> None:
    text = "one two\nthree four five six"
    fixed = len(prompt("").split())
    cut = shortened(prompt("an example", text), words(fixed + left))
    assert cut == prompt(" ".join(text.split()[:left]).replace("two three", "two\nthree"))
    assert cut.endswith(f"\n\n{INSTRUCTION}") and len(cut.split()) == fixed + left


def records(
    path: Path, *lines: Any, most: int | None = None, **fields: Any
) -> list[dict[str, Any]]:
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )
    return list(read_records(path, most, fields, 64))


GOOD = {
    "article": "a",
    "summary_gt": "b",
    "temperature": 0.3,
    "top_p": 1.0,
    "stop": ["###"],
    "n": 1,
    "logprobs": 1,
}


def test_records(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    one, two = records(path, GOOD, "", {**GOOD, "max_tokens": 5, "id": 7})
    assert one == {**GOOD, "max_tokens": 64} and two == {**GOOD, "max_tokens": 5, "id": 7}
    assert records(path, GOOD, "{bad", most=1, temperature=0.0) == [
        {**GOOD, "max_tokens": 64, "temperature": 0.0}
    ]


@needs("eval")
def test_rouge() -> None:
    same = rouge_of("The dogs sleep. They eat.", "The dogs sleep. They eat.")
    assert same == pytest.approx([1.0] * len(METRICS), abs=1e-6)
    # 3 words and 2 pairs each; the common ones: 2 and 1; the longest common subsequence: 2
    found = rouge_of("the cat sat", "the cat ran")
    assert found == pytest.approx([2 / 3, 1 / 2, 2 / 3] * 2, abs=1e-6)
    # rouge-score stems ("dogs" is "dog") and takes no case; the package rouge does neither
    assert rouge_of("Dog", "dogs") == pytest.approx([1, 0, 1, 0, 0, 0])

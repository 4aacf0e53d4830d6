"""Prompts from files and from Python, and the benchmark prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.engine.prompts import (
    BENCHMARK_TEXT,
    benchmark_prompts,
    prompts_from_python,
    read_prompts,
)

VOCAB = 300


def encode(text: str) -> list[int]:
    """A BOS (2), then a token a byte."""
    return [2, *(b + 4 for b in text.encode())]


def put(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# ---- reading


def test_text_file_keeps_spaces_and_skips_blank_lines(tmp_path: Path) -> None:
    path = put(
        tmp_path,
        "p.TXT",
        "\ufefffirst\r\n\n  \t\n  two \u2028 2\x85 \n\ufefflast".encode(),
    )
    found = read_prompts(path, encode, VOCAB)
    assert [p.prompt for p in found] == ["first", "  two \u2028 2\x85 ", "last"]
    assert [p.index for p in found] == [0, 1, 2]
    assert [p.prompt_ids for p in found] == [tuple(encode(p.prompt or "")) for p in found]


def test_a_file_that_is_being_written_is_refused_if_its_last_line_has_no_newline(
    tmp_path: Path,
) -> None:
    path = tmp_path / "p.txt"
    with path.open("w") as file:
        for text, is_line in (("one\n", True), ("tw", False), ("o\n", True)):
            file.write(text)
            file.flush()
            if is_line:
                assert read_prompts(path, encode, VOCAB)[-1].prompt in ("one", "two")
            else:
                with pytest.raises(UsageError, match=r"p\.txt:2: has no newline at its end"):
                    read_prompts(path, encode, VOCAB)
        file.write("three")
    assert len(read_prompts(path, encode, VOCAB)) == 3


def test_jsonl_takes_text_and_token_ids(tmp_path: Path) -> None:
    lines = [
        {"prompt": "a\nb", "id": 7},
        {"prompt_token_ids": [0, 299], "prompt": None},
        {"prompt": ""},
    ]
    path = put(tmp_path, "p.jsonl", "\n\n".join(map(json.dumps, lines)) + "\n")
    assert [(p.index, p.prompt_ids, p.prompt) for p in read_prompts(path, encode, VOCAB)] == [
        (0, tuple(encode("a\nb")), "a\nb"),
        (1, (0, 299), None),
        (2, (2,), ""),
    ]
    ids_only = put(tmp_path, "ids.jsonl", '{"prompt_token_ids": [1]}')
    [only] = read_prompts(ids_only, None, VOCAB)
    assert (only.prompt_ids, only.prompt) == ((1,), None)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "JSON"),
        ('{"prompt": "a"}\ufeff{"prompt": "b"}', "byte order mark at character 16"),
        ("[" * 100_000, "JSON"),
        ('"text"', "object"),
        ('{"prompt": null}', "found prompt (null)"),
        ('{"promt": "x"}', "did you mean prompt by promt?"),
        ('{"prompt": "x", "prompt_token_ids": [1]}', "both"),
        ('{"prompt": 5}', "prompt must be a string"),
        ('{"prompt_token_ids": "12"}', "list"),
        ('{"prompt_token_ids": []}', "no tokens"),
        ('{"prompt_token_ids": [1, true]}', "true is not a whole number"),
        ('{"prompt_token_ids": [300]}', "token id 300 is outside"),
        ('{"prompt": "\\ud83d"}', "surrogate"),
        (b'{"prompt": "\xff"}', "UTF-8"),
    ],
)
def test_bad_lines_are_named_by_file_and_line(tmp_path: Path, line: str | bytes, says: str) -> None:
    raw = line.encode() if isinstance(line, str) else line
    path = put(tmp_path, "p.jsonl", b'{"prompt": "ok"}\n\n' + raw + b'\n{"prompt": "ok"}\n')
    with pytest.raises(UsageError) as error:
        read_prompts(path, encode, VOCAB)
    message = str(error.value)
    assert message.startswith(f"--prompts {path}:3: ") and says in message
    assert "\n" not in message and len(message) < 300


def test_python_inputs_of_every_kind() -> None:
    ids = [[1, 2], (3,), np.array([4, 5]), torch.tensor([6]), [np.int64(7), torch.tensor(8)]]
    found = prompts_from_python(["hi", *ids], encode, VOCAB)
    kept = [(1, 2), (3,), (4, 5), (6,), (7, 8)]
    assert [p.prompt_ids for p in found] == [tuple(encode("hi")), *kept]
    assert [p.prompt for p in found] == ["hi"] + [None] * 5
    assert all(type(i) is int for p in found for i in p.prompt_ids)
    rows: Any = torch.tensor([[1, 2], [3, 4]])
    assert [p.prompt_ids for p in prompts_from_python(rows, None, VOCAB)] == [(1, 2), (3, 4)]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (5, "not a number"),
        ([VOCAB], "outside"),
        ([torch.tensor(True)], "whole number"),
        (np.array([1.0]), "whole number"),
        (torch.tensor(1), "not Tensor"),
        ("\ud800", "surrogate"),
    ],
)
def test_bad_python_inputs_are_named_by_place(bad: Any, says: str) -> None:
    with pytest.raises(UsageError, match=r"^prompts\[3\]: ") as error:
        prompts_from_python([[1], [1], [1], bad], encode, VOCAB)
    assert says in str(error.value)
    with pytest.raises(UsageError, match=r"^prompts: a list"):
        prompts_from_python("one string", encode, VOCAB)


# ---- benchmark prompt


@pytest.mark.parametrize("length", [1, 29, 100])
def test_benchmark_prompt_has_the_length_and_one_bos(length: int) -> None:
    body = encode(BENCHMARK_TEXT)[1:]
    found = benchmark_prompts(3, length, encode, VOCAB)
    assert [p.index for p in found] == [0, 1, 2] and len({p.prompt_ids for p in found}) == 1
    assert found[0].prompt_ids == tuple([2, *(body * 5)][:length])
    assert found[0].prompt == (BENCHMARK_TEXT if length == len(body) + 1 else None)

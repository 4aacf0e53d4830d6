"""A row can end no more than itself, whatever its text is, and whatever tokenizer and template
raise for it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from flexgen_h2o import LLM, SamplingParams
from flexgen_h2o.core.errors import FlexgenError, UsageError
from flexgen_h2o.core.interrupts import Interrupted
from flexgen_h2o.engine import decoding
from tests.text.conftest import Job
from tests.text.tiny import chat_line, text_line

Run = Callable[..., Job]
HALF = "cut emoji \ud83e"
MARK = "BOOM"  # in a text: the tokenizer raises


class PanicException(BaseException):
    """As pyo3 has it: no `Exception`."""


BAD_SEED = 666


@pytest.fixture(params=[PanicException, RecursionError], ids=lambda kind: kind.__name__)
def raising(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[BaseException]:
    """A tokenizer that raises for texts with MARK in them, and when it decodes the byte `!`."""
    encode = PreTrainedTokenizerFast.__call__
    decode = PreTrainedTokenizerFast.decode

    def encoded(self: Any, text: str, **options: Any) -> Any:
        if MARK in text:
            raise request.param("called `Option::unwrap()` on a `None` value")
        return encode(self, text, **options)

    def decoded(self: Any, ids: Any, **options: Any) -> Any:
        if ord("!") in ([ids] if isinstance(ids, int) else list(ids)):
            raise request.param("index out of bounds")
        return decode(self, ids, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", encoded)
    monkeypatch.setattr(PreTrainedTokenizerFast, "decode", decoded)
    kind: type[BaseException] = request.param
    return kind


def test_what_a_tokenizer_raises_for_a_text_is_that_rows_error(
    run_job: Run, bytes_model: Path, raising: type[BaseException]
) -> None:
    job = run_job(
        bytes_model,
        text_line("before", "one"),
        chat_line("chat", f"a {MARK}"),
        text_line("text", MARK),
        chat_line("after", "two"),
    )
    assert job.code == 0 and job.out.splitlines()[-1] == "errors: 2 internal_error"
    assert job.rows["before"]["error"] is job.rows["after"]["error"] is None
    for number, name in ((2, "chat"), (3, "text")):
        code, message = job.error(name)
        assert code == "internal_error"
        assert (
            message.startswith(f"line {number}: internal error: ") and raising.__name__ in message
        )
        assert f"batch: {message}" in job.err.splitlines()


def choosing(monkeypatch: pytest.MonkeyPatch, token_of: Callable[[int], int]) -> None:
    """Let each sequence take the token that a function returns for its seed."""
    before = decoding.choose_tokens

    def choose(logits: Any, params: Any, streams: Any, steps: Any) -> Any:
        found = before(logits, params, streams, steps)
        for i, asked in enumerate(params):
            found[i] = token_of(asked.seed)
        return found

    monkeypatch.setattr(decoding, "choose_tokens", choose)


def test_what_a_tokenizer_raises_for_an_answer_is_that_rows_error(
    run_job: Run, bytes_model: Path, raising: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For its text, for a search for stop strings, and for log-probabilities."""
    bad: dict[str, dict[str, Any]] = {
        "plain": {},
        "stop": {"stop": ["zzz"]},
        "logprobs": {"logprobs": 0},
    }
    # The tokenizer cannot decode `!`, which may be the neighbour behind which a token is decoded.
    lines = [
        text_line(f"{name} {seed}", [5, 6], max_tokens=1, ignore_eos=True, seed=seed, **more)
        for name, more in bad.items()
        for seed in (0, BAD_SEED)
        if (name, seed) != ("logprobs", 0)
    ]
    choosing(monkeypatch, lambda seed: ord("!" if seed == BAD_SEED else "a"))
    job = run_job(bytes_model, *lines, flags="--gpu-batch-size 6 --num-gpu-batches 1")
    assert job.code == 0
    assert job.rows["plain 0"]["error"] is job.rows["stop 0"]["error"] is None
    for name in bad:
        code, message = job.error(f"{name} {BAD_SEED}")
        assert code == "internal_error" and raising.__name__ in message and message in job.err


@pytest.mark.parametrize("bad", [[2], [1, 2, 3]], ids=["one", "all"])
def test_what_sampling_raises_for_a_row(
    bad: list[int], run_job: Run, bytes_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all rows it is the engine's matter, and the job ends."""

    def token_of(seed: int) -> int:
        if seed in bad:
            raise ValueError("a distribution of nothing")
        return ord("a")

    choosing(monkeypatch, token_of)
    lines = [text_line(f"row {i}", f"{i}", max_tokens=3, seed=i) for i in (1, 2, 3)]
    if len(bad) == len(lines):
        with pytest.raises(ValueError, match="a distribution of nothing"):
            run_job(bytes_model, *lines)
        return
    job = run_job(bytes_model, *lines)
    assert job.code == 0 and {name for name, row in job.rows.items() if row["error"]} == {"row 2"}
    says = "line 2: internal error: ValueError: a distribution of nothing"
    assert job.error("row 2") == ("internal_error", says)


def test_internal_errors_do_not_flood_stderr(
    run_job: Run, bytes_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexgen_h2o.jobs.runner.MAX_SAID", 2)
    monkeypatch.setattr("flexgen_h2o.models.load.Model.encode", lambda self, text, *_, **__: 1 // 0)
    job = run_job(bytes_model, *(text_line(str(i), "x") for i in range(5)))
    said = [line for line in job.err.splitlines() if "ZeroDivisionError" in line]
    assert job.code == 4 and len(said) == 3
    assert said[-1].endswith("further internal errors are in the output alone")


@pytest.mark.parametrize("flag", ["--system", "--turn-format"])
def test_bytes_of_the_command_line_that_are_not_utf8(
    flag: str, bytes_model: Path, call: Callable[..., Job]
) -> None:
    said = call("chat", "--model", bytes_model, "--gen-len", "2", flag, "caf\udce9 {turn}")
    assert (said.code, said.err) == (2, f"chat: {flag}: is not UTF-8 text; write it in UTF-8\n")


def test_a_request_to_end_is_no_rows_error(
    run_job: Run, bytes_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The tokenizer's code is where a signal may arrive."""

    def encoded(self: Any, text: str, **options: Any) -> Any:
        raise Interrupted(2)

    monkeypatch.setattr(
        "flexgen_h2o.models.load._load_tokenizer", PreTrainedTokenizerFast.from_pretrained
    )
    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", encoded)
    job = run_job(bytes_model, text_line("one", "one"), text_line("two", "two"))
    assert job.code == 130 and not job.rows


def test_python_gets_an_error_of_its_own(
    bytes_model: Path, raising: type[BaseException], tmp_path: Path
) -> None:
    """A panic would pass by every `except Exception` of the caller."""
    with LLM(str(bytes_model), dtype="float32", offload_dir=tmp_path) as llm:
        with pytest.raises(
            FlexgenError, match=f"the tokenizer of .* fails on the text .{raising.__name__}: called"
        ):
            llm.generate([f"a {MARK}"])
        with pytest.raises(UsageError, match="half of a surrogate pair"):
            llm.generate([HALF])
        with pytest.raises(UsageError, match="stop: holds half of a surrogate pair"):
            SamplingParams(stop=("\ud83e",))
        with pytest.raises(FlexgenError, match=raising.__name__):
            llm.model.encode_turn([MARK])
        with pytest.raises(UsageError, match="surrogate"):
            llm.model.encode_turn(["fine"], HALF)


def test_a_template_that_raises_is_its_rows_error(
    run_job: Run, bytes_model: Path, tmp_path: Path
) -> None:
    """What it writes is checked too: here it makes half a character of whole ones."""
    folder = shutil.copytree(bytes_model, tmp_path / "model")
    template = (
        "{% for m in messages %}{% if m.content == 'half' %}{{ '\\ud83e' }}{% elif m.content == "
        "'zero' %}{{ 1 / 0 }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    job = run_job(
        folder, *(chat_line(name, name, max_tokens=2) for name in ("one", "half", "zero", "two"))
    )
    assert job.code == 0 and job.rows["one"]["error"] is job.rows["two"]["error"] is None
    assert job.error("half") == (
        "invalid_request",
        "line 2: messages: the text: holds half of a surrogate pair, which is not text; remove it",
    )
    code, message = job.error("zero")
    assert (
        code == "invalid_request"
        and "the chat template does not take them (division by zero)" in message
    )

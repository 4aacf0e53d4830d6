"""A worker that raises ends the run at once, with its own error: no hang, no thread, no file left
behind."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o import LLM, MemoryBudget, Policy, SamplingParams, flex_opt
from flexgen_h2o.core.errors import DoesNotFitError, TransferError
from flexgen_h2o.tiers.device import StandInDevice
from flexgen_h2o.tiers.disk import DirectFile
from tests.fault.conftest import NEW_TOKENS, workers
from tests.parity.reference import Reference, tokens_of

PARAMS = SamplingParams(max_tokens=NEW_TOKENS)
STAND_IN = MemoryBudget("64MiB", "64MiB", "64MiB")


class OnFireError(Exception):
    """Nothing that the package could have raised itself."""


def fail_after(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, calls: int, error: Exception
) -> Callable[[], int]:
    """`owner.name` works `calls` times and raises from then on. Returns how often it has been
    called."""
    whole = getattr(owner, name)
    count = 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count > calls:
            raise error
        return whole(*args, **kwargs)

    failing.__name__ = name
    monkeypatch.setattr(owner, name, failing)
    return lambda: count


OWNERS = {"read": DirectFile, "write": DirectFile, "copy": StandInDevice}
SPLIT = (30, 30, 30, 30, 30, 30)


@pytest.fixture(scope="module")
def calls_of_a_run(known: Reference, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """How often each kind of work is done in a run that ends well."""
    counts = {}
    for work, owner in OWNERS.items():
        with pytest.MonkeyPatch.context() as patch:
            made = fail_after(patch, owner, work, 10**9, OnFireError())
            with LLM(
                str(known.folder),
                Policy(2, 2, SPLIT),
                device="cpu",
                dtype="float32",
                budget=STAND_IN,
                offload_dir=tmp_path_factory.mktemp("offload"),
            ) as llm:
                assert tokens_of(llm.generate(known.prompts, PARAMS)) == known.tokens
            counts[work] = made()
    return counts


@pytest.mark.parametrize(
    ("work", "share", "overlap"),
    [
        ("read", 0, True),
        ("read", 0.9, False),
        ("write", 0, False),
        ("write", 0.4, True),
        ("copy", 0.4, False),
        ("copy", 0.9, True),
    ],
)
def test_its_error_reaches_the_caller(
    work: str,
    share: float,
    overlap: bool,
    calls_of_a_run,
    known: Reference,
    tmp_path: Path,
    monkeypatch,
    assert_clean,
) -> None:
    error = OnFireError(f"{work} {share}")
    calls = int(share * calls_of_a_run[work])
    policy = Policy(2, 2, SPLIT, overlap=overlap)
    with LLM(
        str(known.folder),
        policy,
        dtype="float32",
        budget=STAND_IN,
        offload_dir=tmp_path / "offload",
    ) as llm:
        with monkeypatch.context() as patch:
            fail_after(patch, OWNERS[work], work, calls, error)
            with pytest.raises(OnFireError) as caught:
                llm.generate(known.prompts, PARAMS)
            assert caught.value is error
            assert_clean()
        assert tokens_of(llm.generate(known.prompts, PARAMS)) == known.tokens, (
            "the LLM must be usable again"
        )
    assert_clean()


@pytest.mark.parametrize("step", [1, 4])
def test_an_error_of_the_caller_passes_through(
    step: int, known: Reference, tmp_path: Path, assert_clean
) -> None:
    """As a KeyboardInterrupt in the middle of compute: loads ahead and stores behind are under
    way."""
    steps = 0

    def watch(rows: list[int], logits: object) -> None:
        nonlocal steps
        steps += 1
        if steps == step:
            raise KeyboardInterrupt

    with LLM(
        str(known.folder), Policy(2, 2, (0,) * 6), dtype="float32", offload_dir=tmp_path / "offload"
    ) as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(known.prompts, PARAMS, watch_logits=watch)
        assert_clean()


def test_workers_end_before_their_files_are_closed(
    known: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that still writes by a closed file's number writes into whichever file has got that
    number since."""
    alive: list[str] = []
    close = DirectFile.close

    def watched(file: DirectFile) -> None:
        alive.extend(workers())
        close(file)

    def interrupt(rows: list[int], logits: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(DirectFile, "close", watched)
    llm = LLM(
        str(known.folder), Policy(2, 2, (0,) * 6), dtype="float32", offload_dir=tmp_path / "offload"
    )
    with llm, pytest.raises(KeyboardInterrupt):
        llm.generate(known.prompts, PARAMS, watch_logits=interrupt)
    assert not alive


# ---- The disk


def run_cli(
    known: Reference, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> tuple[int, str, list[str]]:
    """flex_opt over 40 prompts in blocks of four with everything on disk: exit code, stderr, lines
    of the output."""
    prompts = tmp_path / "prompts.jsonl"
    out = tmp_path / "out.jsonl"
    prompts.write_text('{"prompt_token_ids": [4, 5, 6]}\n' * 40)
    flags = "--percent 0 0 0 0 0 0 --gpu-batch-size 2 --num-gpu-batches 2 --gen-len 3 --no-log"
    argv = ["--model", known.folder, "--prompts", prompts, "--output", out, *flags.split()]
    capfd.readouterr()
    code = flex_opt.main([*map(str, argv), "--offload-dir", str(tmp_path / "offload")])
    return code, capfd.readouterr().err, out.read_text().splitlines() if out.exists() else []


@pytest.mark.parametrize("calls", [0, 150])
def test_the_disk_fills_up_during_the_run(
    calls: int, known: Reference, tmp_path: Path, monkeypatch, capfd, assert_clean
) -> None:
    """It cannot where files are reserved; file systems that only pretend to reserve exist."""
    fail_after(monkeypatch, os, "pwritev", calls, OSError(errno.ENOSPC, "No space left on device"))
    code, err, rows = run_cli(known, tmp_path, capfd)
    assert code == DoesNotFitError.exit_code and len(err.splitlines()) == 1
    assert "--offload-dir" in err and "full" in err
    assert len(rows) % 4 == 0 and (0 < len(rows) < 40 if calls else rows == []), (
        "rows of whole blocks are kept"
    )
    assert_clean()


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_the_disk_fails_during_the_run(
    call: str, known: Reference, tmp_path: Path, monkeypatch, capfd, assert_clean
) -> None:
    fail_after(monkeypatch, os, call, 100, OSError(errno.EIO, "Input/output error"))
    code, err, _ = run_cli(known, tmp_path, capfd)
    assert code == TransferError.exit_code == 1 and len(err.splitlines()) == 1
    assert call in err and "Input/output error" in err
    assert_clean()

"""A worker that raises ends the run at once, with its own error: no hang, no thread, no file left
behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o import LLM, MemoryBudget, Policy, SamplingParams, flex_opt
from flexgen_h2o.core.errors import EXIT_DOES_NOT_FIT, EXIT_FAILED
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
) -> None:
    """`owner.name` works `calls` times and raises from then on."""
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


OWNERS = {"read": DirectFile, "write": DirectFile, "copy": StandInDevice}
SPLIT = (30, 30, 30, 30, 30, 30)


@pytest.mark.parametrize(
    ("work", "calls", "overlap"),
    [
        ("read", 0, True),
        ("read", 30, False),
        ("write", 0, False),
        ("write", 9, True),
        ("copy", 9, False),
        ("copy", 30, True),
    ],
)
def test_its_error_reaches_the_caller(
    work: str,
    calls: int,
    overlap: bool,
    known: Reference,
    tmp_path: Path,
    monkeypatch,
    assert_clean,
) -> None:
    error = OnFireError(f"{work} {calls}")
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
    step: int, known: Reference, tmp_path: Path, monkeypatch, assert_clean
) -> None:
    """As a KeyboardInterrupt in the middle of compute: loads ahead and stores behind are under way.

    Workers end before their files are closed. One that still writes by a closed file's number
    writes into whichever file has got that number since.
    """
    steps = 0
    alive: list[str] = []
    close = DirectFile.close

    def watched(file: DirectFile) -> None:
        alive.extend(workers())
        close(file)

    def watch(rows: list[int], logits: object) -> None:
        nonlocal steps
        steps += 1
        if steps == step:
            raise KeyboardInterrupt

    monkeypatch.setattr(DirectFile, "close", watched)
    policy = Policy(2, 2, (0,) * 6)
    with LLM(str(known.folder), policy, dtype="float32", offload_dir=tmp_path / "offload") as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(known.prompts, PARAMS, watch_logits=watch)
        assert_clean()
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


ENOSPC = OSError(errno.ENOSPC, "No space left on device")
EIO = OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize(
    ("call", "calls", "error", "code", "says"),
    [
        ("pwritev", 0, ENOSPC, EXIT_DOES_NOT_FIT, "--offload-dir"),
        ("pwritev", 150, ENOSPC, EXIT_DOES_NOT_FIT, "--offload-dir"),
        ("preadv", 100, EIO, EXIT_FAILED, "preadv"),
        ("pwritev", 100, EIO, EXIT_FAILED, "pwritev"),
    ],
)
def test_the_disk_fails_during_the_run(
    call: str,
    calls: int,
    error: OSError,
    code: int,
    says: str,
    known: Reference,
    tmp_path: Path,
    monkeypatch,
    capfd,
    assert_clean,
) -> None:
    """It cannot be full where files are reserved; some file systems only pretend to reserve."""
    fail_after(monkeypatch, os, call, calls, error)
    found, err, rows = run_cli(known, tmp_path, capfd)
    assert found == code and len(err.splitlines()) == 1 and says in err
    assert len(rows) % 4 == 0 and len(rows) < 40 and bool(rows) >= (calls == 150), (
        "rows of whole blocks are kept"
    )
    assert_clean()

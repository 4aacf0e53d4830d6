"""Files of a checkpoint that change while it is in use: no row leaves that may have been computed
with two models."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from flexgen_h2o import LLM, Policy, SamplingParams
from flexgen_h2o.checkpoint import atomic_folder
from flexgen_h2o.core.errors import FlexgenError
from flexgen_h2o.core.notes import say_once
from flexgen_h2o.engine.generation import Callbacks
from flexgen_h2o.engine.prompts import prompts_from_python
from flexgen_h2o.engine.sequence import Sequence, with_params
from tests.parity.reference import Reference

NEW_TOKENS = (
    1,
    5,
    2,
    5,
    4,
)  # of each prompt: some rows finish before the change, others are in the middle
ON_DISK = (0, 0, 100, 0, 100, 0)


def noise(data: bytes) -> bytes:
    """The same safetensors header over the same values in another order."""
    start = 8 + int.from_bytes(data[:8], "little")
    return data[:start] + np.frombuffer(data[start:], np.uint32)[::-1].tobytes()


def overwrite(path: Path) -> None:
    """In place, with the same size and time."""
    times = path.stat()
    with path.open("r+b") as file:
        file.write(noise(path.read_bytes()))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def point_elsewhere(path: Path) -> None:
    """As a link that a download of another revision sets anew."""
    other = path.with_name("blob")
    other.write_bytes(noise(path.read_bytes()))
    path.unlink()
    path.symlink_to(other)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


CHANGES = (overwrite, point_elsewhere, Path.unlink, truncate)


@pytest.fixture
def folder(known: Reference, tmp_path: Path) -> Path:
    """The known model as the hub's cache has it: links to files with other names."""
    found = tmp_path / "model"
    blobs = tmp_path / "blobs"
    known.model.save_pretrained(blobs, max_shard_size="60KB")
    found.mkdir()
    for path in blobs.iterdir():
        (found / path.name).symlink_to(path)
    assert len(shards(found)) > 1
    return found


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def opened(folder: Path, tmp_path: Path, policy: Policy) -> LLM:
    return LLM(str(folder), policy, dtype="float32", offload_dir=tmp_path / "offload")


def run(llm: LLM, known: Reference, refill: bool, at_step: Callable[[int], None]) -> list[Sequence]:
    """What is handed out. at_step: called with the number of each step that logits are looked
    at."""
    done: list[Sequence] = []
    steps = 0

    def watch(rows: list[int], logits: torch.Tensor) -> None:
        nonlocal steps
        steps += 1
        at_step(steps)

    prompts = prompts_from_python(known.prompts, None, llm.model.spec.vocab_size)
    params = [SamplingParams(max_tokens=n) for n in NEW_TOKENS]
    try:
        llm.run(with_params(prompts, params), done.extend, Callbacks(watch), refill=refill)
    except FlexgenError:
        assert len(done) < len(prompts)
        raise
    finally:
        for one in done:
            assert one.token_ids == known.tokens[one.index][: NEW_TOKENS[one.index]]
    return done


@pytest.mark.parametrize(
    ("change", "refill"), zip(CHANGES, (True, False, False, True), strict=True)
)
def test_a_run_that_streams_weights_ends(
    change: Callable[[Path], None],
    refill: bool,
    folder: Path,
    known: Reference,
    tmp_path: Path,
    assert_clean: Callable[[], None],
) -> None:
    path = shards(folder)[-1] if change is point_elsewhere else shards(folder)[-1].resolve()
    with opened(folder, tmp_path, Policy(2, 1, ON_DISK)) as llm:
        with pytest.raises(FlexgenError, match=shards(folder)[-1].name) as caught:
            run(llm, known, refill, lambda step: change(path) if step == 3 else None)
        assert "\n" not in str(caught.value)
        assert_clean()
        # the LLM is of the checkpoint that it has opened
        with pytest.raises(FlexgenError, match=shards(folder)[-1].name):
            run(llm, known, refill, lambda step: None)
    assert_clean()


def copy_with_links(path: Path) -> None:
    """As `cp -al` makes a copy of the folder."""
    copy = path.parent.with_name(f"copy-{random.getrandbits(60):x}")
    copy.mkdir()
    for one in path.parent.iterdir():
        os.link(one, copy / one.name, follow_symlinks=False)


def change_mode(path: Path) -> None:
    path.chmod(random.choice((0o600, 0o444, 0o755, 0o000)))


def rename_and_back(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.with_name("elsewhere").rename(path)


def rename_for_a_while(path: Path) -> None:
    """The check may come while the file is away."""
    path.rename(path.with_name("elsewhere"))
    threading.Timer(0.1, path.with_name("elsewhere").rename, [path]).start()


METADATA = (copy_with_links, change_mode, rename_and_back, rename_for_a_while)


@pytest.mark.parametrize("change", METADATA)
def test_metadata_is_not_content(
    change: Callable[[Path], None],
    folder: Path,
    known: Reference,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A file with another ctime and the same contents ends no run; that is said once. Then new
    contents end it."""
    say_once.cache_clear()
    path = shards(folder)[-1].resolve()
    with opened(folder, tmp_path, Policy(2, 1, ON_DISK)) as llm:
        for _ in range(2):
            before = path.stat().st_ctime_ns
            done = run(llm, known, True, lambda step: change(path) if step == 3 else None)
            assert len(done) == len(known.prompts)
            assert path.stat().st_ctime_ns != before
        path.chmod(0o644)
        llm.digests()
        assert capfd.readouterr().err.count("the same contents; the run goes on") == 1
        with pytest.raises(FlexgenError, match=shards(folder)[-1].name):
            run(llm, known, True, lambda step: overwrite(path) if step == 3 else None)


def test_a_copy_keeps_its_fingerprint_through_changes_of_metadata(tmp_path: Path) -> None:
    """What was imported or packed is found again; other contents of the same size and time are
    not."""
    path = tmp_path / "model" / "pytorch_model.bin"
    path.parent.mkdir()
    path.write_bytes(bytes(1000))
    first = atomic_folder.fingerprint([path])
    for change in METADATA:
        change(path)
        time.sleep(0.2 if change is rename_for_a_while else 0)
        path.chmod(0o644)
        assert atomic_folder.fingerprint([path]) == first
    time_before = path.stat().st_mtime_ns
    path.write_bytes(bytes(999) + b"1")
    os.utime(path, ns=(time_before, time_before))
    assert atomic_folder.fingerprint([path]) != first


def test_what_is_in_memory_is_not_reached(folder: Path, known: Reference, tmp_path: Path) -> None:
    """A run that holds all weights goes on, with the right tokens; what would read the files again
    does not."""
    with opened(folder, tmp_path, Policy(2, 1, (100, 0, 100, 0, 100, 0))) as llm:
        done = run(
            llm,
            known,
            True,
            lambda step: overwrite(shards(folder)[-1].resolve()) if step == 3 else None,
        )
        assert len(done) == len(known.prompts)
        assert len(run(llm, known, True, lambda step: None)) == len(known.prompts)
        llm.close()
        with pytest.raises(FlexgenError, match=shards(folder)[-1].name):
            run(llm, known, True, lambda step: None)

"""The offload dir between runs: shared by two at a time, cleaned after a killed one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from flexgen_h2o import LLM, Policy, SamplingParams
from flexgen_h2o.tiers.disk import Scratch
from tests.fault.conftest import NEW_TOKENS
from tests.forks import Forks
from tests.parity.reference import Reference, tokens_of

PARAMS = SamplingParams(max_tokens=NEW_TOKENS)
ALL_ON_DISK = Policy(2, 2, (0, 0, 0, 0, 0, 0))


def generate(folder: Path, known: Reference, offload_dir: Path) -> list[list[int]]:
    with LLM(str(folder), ALL_ON_DISK, dtype="float32", offload_dir=offload_dir) as llm:
        return tokens_of(llm.generate(known.prompts, PARAMS))


def test_two_runs_at_the_same_time(
    known: Reference, tmp_path: Path, assert_clean: Callable[[], None]
) -> None:
    """From one .bin checkpoint: one imports it, the other waits and uses the import."""
    folder = tmp_path / "model"
    offload = tmp_path / "offload"
    folder.mkdir()
    (folder / "config.json").write_text((known.folder / "config.json").read_text())
    torch.save(known.model.state_dict(), folder / "pytorch_model.bin")
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(generate, folder, known, offload) for _ in range(2)]
    assert [run.result() for run in runs] == [known.tokens] * 2
    assert_clean()
    assert len(list(offload.rglob("*.safetensors"))) == 1


# Leaves its scratch folder behind, as kill -9 does, and says its name.
DIES = """
import os, sys
from pathlib import Path
from flexgen_h2o.tiers.disk import Scratch
scratch = Scratch(Path(sys.argv[1]))
scratch.create("cache.bin", 4096).close()
print(scratch.folder, flush=True)
os._exit(9)
"""


@pytest.fixture
def dead_run(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Makes the scratch folder of a run that was killed, in an offload dir."""

    def made(offload: Path) -> Path:
        done = forks.run(tmp_path_factory.mktemp("dead"), DIES, offload)
        assert done.code == 9, done.err
        return Path(done.out.strip())

    return made


def test_folders_of_live_and_dead_runs(
    known: Reference, tmp_path: Path, dead_run: Callable[[Path], Path]
) -> None:
    """What looks like a run's folder is removed only if its lock can be taken."""
    offload = tmp_path / "offload"
    alive = Scratch(offload)
    (alive.folder / "cache.bin").write_bytes(b"in use")
    dead = dead_run(offload)
    assert (dead / "cache.bin").is_file()
    assert generate(known.folder, known, offload) == known.tokens
    assert [p.name for p in offload.iterdir()] == [alive.folder.name]
    assert (alive.folder / "cache.bin").read_bytes() == b"in use"
    alive.close()


def test_what_only_looks_like_a_scratch_folder_stays(
    known: Reference, tmp_path: Path, dead_run: Callable[[Path], Path]
) -> None:
    """A user's folders beside locks, also under a name of our pattern, without our mark; a copy
    with the mark under another name; a link to a scratch folder elsewhere."""
    offload = tmp_path / "offload"
    names = ("run-exp1", "run-7", "run-1234-0123abcd")
    for name in names:
        (offload / name).mkdir(parents=True)
        (offload / name / "cache.bin").write_text("results of a week")
        (offload / f"{name}.lock").touch()
    dead_run(offload).rename(offload / "run-kept-for-later")
    linked = dead_run(tmp_path / "elsewhere")
    (offload / linked.name).symlink_to(linked)
    before = sorted(offload.iterdir())
    assert generate(known.folder, known, offload) == known.tokens
    left = sorted(offload.iterdir())
    assert [path for path in before if path not in left and path.suffix != ".lock"] == []
    assert all((offload / f"{name}.lock").exists() for name in names)
    assert all((offload / name / "cache.bin").read_text() == "results of a week" for name in names)
    assert (offload / "run-kept-for-later" / "cache.bin").is_file() and (
        linked / "cache.bin"
    ).is_file()

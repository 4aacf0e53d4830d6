"""`flexgen-h2o cache`: what is kept is listed and removed; what is in use, or not the package's
own, stays."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flexgen_h2o import LLM, Policy, SamplingParams
from tests.doors.conftest import Answer, Door
from tests.forks import Forks

ALL_ON_DISK = Policy(1, 1, (0, 0, 0, 0, 0, 0))


@pytest.fixture
def cache(
    command: Callable[[str], Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Door:
    """The verb, with `tmp_path / "offload"` and a folder for profiles that nobody else uses."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return lambda *flags: command(
        shlex.join(["cache", *flags, "--offload-dir", str(tmp_path / "offload")])
    )


def names(listed: Answer) -> list[str]:
    """First column of the table, without its head and the line below it."""
    return [line.split()[0] for line in listed.out.splitlines()[1:-1]]


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def random_weights(model: Path, offload: Path) -> LLM:
    """An LLM that has generated with weights written to `offload`, and is open."""
    llm = LLM(str(model), ALL_ON_DISK, device="cpu", path="_DUMMY_", offload_dir=offload)
    llm.generate([[4, 5, 6]], SamplingParams(max_tokens=2))
    return llm


@pytest.mark.slow
def test_what_runs_keep(door: Door, cache, ids_model: Path, tmp_path: Path) -> None:
    """Before it is written one line says how much and where; once it is there nothing is said or
    written."""
    bins = tmp_path / "bins"
    shutil.copytree(ids_model, bins)
    torch.save(load_file(bins / "model.safetensors"), bins / "pytorch_model.bin")
    (bins / "model.safetensors").unlink()
    runs = {
        "random": (("--path", "_DUMMY_"), ids_model, f"random weights of {ids_model}"),
        "packed": (("--compress-weight",), ids_model, f"4bit weights of {ids_model}"),
        "imported": ((), bins, "imported checkpoint of bins"),
    }
    offload = tmp_path / "offload" / "weights"
    for group, (flags, model, what) in runs.items():
        first = door(*flags, "--no-log", model=model)
        assert first.code == 0, first.err
        [line] = first.err.splitlines()
        [made] = (offload / group).iterdir()
        assert f"{made} ({what})" in line and "iB" in line
        again = door(*flags, "--no-log", model=model)
        assert (again.code, again.err) == (0, "")
    kept = {name.partition("/")[0]: name for name in names(cache("--list"))}
    assert list(kept) == ["random", "imported", "packed"]
    size = sum(path.stat().st_size for path in offload.rglob("*") if path.is_file())
    assert f"{size / 1024:.2f} KiB kept" in cache().out
    removed = cache("--remove", kept["packed"])
    assert (removed.code, removed.err) == (0, "") and f"removed {kept['packed']}" in removed.out
    assert names(cache()) == [kept["random"], kept["imported"]] and not list(
        (offload / "packed").iterdir()
    )
    assert cache("--remove-all").code == 0
    assert everything(offload) == []
    assert door("--compress-weight --no-log").code == 0, "it is made again"


def test_what_is_in_use_stays(cache, ids_model: Path, tmp_path: Path) -> None:
    """Weights and scratch of an open LLM, also between its runs; when nobody has it any more they
    can go."""
    llm = random_weights(ids_model, tmp_path / "offload")
    before = everything(tmp_path / "offload")
    weights, scratch = names(cache())
    assert cache().out.count("in use") == 2
    for name in (weights, scratch):
        refused = cache("--remove", name)
        assert (
            refused.code == 2
            and f"--remove {name}: is in use" in refused.err
            and refused.err.count("\n") == 1
        )
    left = cache("--remove-all")
    assert left.code == 0 and left.out.count("left ") == 2 and "0 B freed" in left.out
    assert everything(tmp_path / "offload") == before
    llm.close()
    assert names(cache()) == [weights] and "in use" in cache().out
    del llm
    assert "in use" not in cache().out
    assert cache("--remove", weights).code == 0
    assert everything(tmp_path / "offload") == []


# Leaves a scratch folder and a half-written folder of weights, as kill -9 does.
DIES = """
import os, sys
from pathlib import Path
from flexgen_h2o.checkpoint.atomic_folder import building
from flexgen_h2o.tiers.disk import Scratch
offload = Path(sys.argv[1])
Scratch(offload).create("cache.bin", 4096)
with building(offload / "weights" / "random" / "big", 10, "random weights", "big") as temp:
    (temp / "model.safetensors").write_bytes(b"half")
    os._exit(9)
"""


def test_what_killed_runs_left(cache, forks: Forks, tmp_path: Path) -> None:
    offload = tmp_path / "offload"
    done = forks.run(tmp_path, DIES, offload)
    assert done.code == 9, done.err
    unfinished, scratch = names(cache())
    assert unfinished.startswith("random/.big") and scratch.startswith("run-")
    assert "unfinished random weights" in cache().out and "in use" not in cache().out
    assert cache("--remove", scratch, unfinished).code == 0
    assert everything(offload) == []


def test_nothing_of_the_users_is_removed(cache, ids_model: Path, tmp_path: Path) -> None:
    """Neither listed nor touched: folders that only look like ours, and links. A kept folder with
    more in it stays."""
    offload = tmp_path / "offload"
    random_weights(ids_model, offload).close()
    [name] = names(cache())
    kept = offload / "weights" / name
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(kept, elsewhere)
    (kept.parent / "link").symlink_to(elsewhere)
    for path in (
        offload / "run-exp1/cache.bin",
        offload / "run-12-0123abcd/cache.bin",
        offload / "notes.txt",
        offload / "weights/imported/my-model/model.safetensors",
        offload / "weights/packed/.x.flexgen-building/a",
        tmp_path / "xdg/flexgen_h2o/profile-notes.json",
        kept / "tokenizer.json",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    before = everything(tmp_path)
    assert (
        names(cache()) == [name]
        and "holds 'tokenizer.json', which is not the package's" in cache().out
    )
    refused = cache("--remove", name)
    assert refused.code == 2 and "'tokenizer.json'" in refused.err and "move it away" in refused.err
    assert cache("--remove-all").code == 0
    assert everything(tmp_path) == before
    (kept / "tokenizer.json").unlink()
    assert cache("--remove-all").code == 0
    gone = {path for path in before if path.startswith(f"offload/weights/{name}/")}
    assert everything(tmp_path) == sorted(set(before) - gone)

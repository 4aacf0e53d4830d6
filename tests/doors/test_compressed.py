"""Compressed weights through the doors: flags, policy files, `auto`, and the command that
policy_search prints."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flexgen_h2o import LLM, flex_opt, policy_search
from flexgen_h2o.core.config import Policy, SavedPolicy, write_policy
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.engine.workload import AutoPolicy
from flexgen_h2o.planner.profile import nominal_profile, write_profile
from tests.doors.conftest import Answer

Door = Callable[..., Answer]
ON_DISK = ["--percent", "0", "0", "100", "0", "100", "0", "--gpu-batch-size", "2"]


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    write_profile(tmp_path / "host.json", nominal_profile(True))
    return tmp_path / "host.json"


def stores() -> list[Path]:
    return sorted(Path("offload/weights/packed").glob("*/model.safetensors"))


def test_less_is_read(door: Door) -> None:
    """From a store that the first run makes and the next one finds."""
    read = []
    made = {}
    for more in (
        [],
        ["--compress-weight", "--weight-bits", "8"],
        ["--int8-compute"],
        ["--compress-weight"],
    ):
        for _ in range(2):
            assert door(*ON_DISK, "--json", "r.json", *more).code == 0
            report = json.loads(Path("r.json").read_text())
            times = {p: p.stat().st_mtime_ns for p in stores()}
            assert made.items() <= times.items() and report["policy"]["compress_weight"] == (
                "--compress-weight" in more
            )
            made = times
        read.append(report["io_bytes"]["disk_read"])
    assert len(made) == 3
    # Rows of 64 values: beside 8 bits a value, 4 bytes of a group's ends, or 8 of a row's scale and
    # sum.
    assert read[0] > read[2] >= read[1] > read[3]


def test_the_breakdown_shows_unpacking(door: Door) -> None:
    assert (
        "unpack_weights (per-layer): 0.0"
        in door(*ON_DISK, "--compress-weight", "--debug-mode", "breakdown").out
    )
    assert "unpack_weights" not in door(*ON_DISK, "--debug-mode", "breakdown").out


@pytest.mark.parametrize(("flags", "store"), [("", "-int8-"), ("--compress-weight", "-4bit-")])
def test_products_in_int8(flags: str, store: str, door: Door, profile: Path) -> None:
    """From flags, a policy file and `auto`; with 4 bits from their store, unpacked once a block."""
    out = door(
        *ON_DISK, "--int8-compute", *flags.split(), "--debug-mode", "breakdown", "--json", "r.json"
    )
    assert out.code == 0 and ("unpack_weights (per-layer): 0.0" in out.out) == bool(flags), out.err
    policy = json.loads(Path("r.json").read_text())["policy"]
    assert policy["int8_compute"] and policy["compress_weight"] == bool(flags)
    assert [store in path.parent.name for path in stores()] == [True]
    saved = Policy(2, 2, (0, 40, 100, 0, 100, 0), compress_weight=bool(flags), int8_compute=True)
    write_policy(Path("p.json"), SavedPolicy(saved))
    assert door("--policy", "p.json").code == 0
    out = door("--int8-compute", *flags.split(), "--hardware", profile, "--json", "r.json")
    assert out.code == 0, out.err
    assert json.loads(Path("r.json").read_text())["policy"]["int8_compute"]


def test_bits_without_compression_are_refused_in_python(ids_model: Path, tmp_path: Path) -> None:
    model = str(ids_model)
    says = "^weight_bits: 8 goes with compress_weight, which is off; give both$"
    for policy in (Policy(weight_bits=8), AutoPolicy(Policy(weight_bits=8, compress_cache=True))):
        with pytest.raises(UsageError, match=says):
            LLM(model, policy, offload_dir=tmp_path)
        with (
            LLM(model, Policy(weight_bits=4), offload_dir=tmp_path) as llm,
            pytest.raises(UsageError, match=says),
        ):
            llm.use(policy)


def test_the_command_of_a_plan_runs(
    door: Door, ids_model: Path, profile: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a given policy that compresses."""
    asked = (
        f"--model {ids_model} --prompt-len 8 --gen-len 4 --num-prompts 4 --hardware {profile} "
        "--offload-dir offload"
    )
    given = [*ON_DISK, "--num-gpu-batches", "2", "--compress-weight", "--weight-bits", "8"]
    assert policy_search.main([*asked.split(), *given]) == 0
    lines = [line.strip() for line in capfd.readouterr().out.splitlines()]
    command = shlex.split(lines[lines.index("benchmark it:") + 1])[2:]
    assert {"--compress-weight", "--weight-bits"} <= set(command)
    assert flex_opt.main(command) == 0


def test_a_weight_that_is_not_finite(door: Door, ids_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    name = "model.decoder.layers.0.fc1.weight"
    folder.mkdir()
    (folder / "config.json").write_text((ids_model / "config.json").read_text())
    state = load_file(ids_model / "model.safetensors")
    state[name][3, 3] = torch.nan
    save_file(state, folder / "model.safetensors")
    out = door("--compress-weight", *ON_DISK, model=folder)
    said, error = out.err.splitlines()
    assert out.code == 2 and name in error and said.startswith("# ")
    assert not stores()

"""Checkpoints with something wrong are refused before the run, by name; one that breaks during it
ends the run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flexgen_h2o import LLM, Policy, SamplingParams, flex_opt
from flexgen_h2o.core.errors import TransferError
from tests.fault.conftest import NEW_TOKENS
from tests.parity.reference import Reference, run, tokens_of

FC1 = "model.decoder.layers.1.fc1.weight"


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def shard_with(folder: Path, tensor: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][tensor]


def change_tensor(
    folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]
) -> str:
    path = shard_with(folder, name)
    state = load_file(path)
    changed = change(state.pop(name))
    save_file(
        state if changed is None else {**state, name: changed.contiguous()},
        path,
        metadata={"format": "pt"},
    )
    return path.name


def truncated_shard(folder: Path) -> tuple[str, ...]:
    path = shards(folder)[1]
    os.truncate(path, path.stat().st_size - 1)
    return path.name, "truncated"


def missing_tensor(folder: Path) -> tuple[str, ...]:
    return change_tensor(folder, FC1, lambda value: None), FC1


def integers(folder: Path) -> tuple[str, ...]:
    return change_tensor(folder, FC1, lambda value: value.to(torch.int8)), FC1, "I8"


def transposed(folder: Path) -> tuple[str, ...]:
    return change_tensor(folder, FC1, lambda value: value.t()), FC1, "(48, 96)", "(96, 48)"


def broken_index(folder: Path) -> tuple[str, ...]:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ')
    return ("model.safetensors.index.json",)


@pytest.mark.parametrize(
    "damage",
    [truncated_shard, missing_tensor, integers, transposed, broken_index],
)
def test_refused_before_the_run(
    damage: Callable[[Path], tuple[str, ...]],
    known: Reference,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    assert_clean: Callable[[], None],
) -> None:
    folder = tmp_path / "model"
    known.model.save_pretrained(folder, max_shard_size="30KB")
    says = damage(folder)
    (tmp_path / "prompts.jsonl").write_text('{"prompt_token_ids": [4, 5]}\n')
    capfd.readouterr()
    argv = [
        "--model",
        str(folder),
        "--prompts",
        str(tmp_path / "prompts.jsonl"),
        "--no-log",
        "--percent",
        *"000000",
    ]
    code = flex_opt.main([*argv, "--offload-dir", str(tmp_path / "offload")])
    [line] = capfd.readouterr().err.splitlines()
    assert code == 2, line
    assert all(text in line for text in says), line
    assert_clean()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("overlap", [True, False])
def test_a_checkpoint_truncated_during_the_run(
    overlap: bool, known: Reference, tmp_path: Path, assert_clean: Callable[[], None]
) -> None:
    folder = tmp_path / "model"
    known.model.save_pretrained(folder)
    path = folder / "model.safetensors"
    steps = 0
    whole = path.read_bytes()

    def truncate(rows: list[int], logits: torch.Tensor) -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            os.truncate(path, len(whole) // 2)

    params = SamplingParams(max_tokens=NEW_TOKENS)
    policy = Policy(2, 2, (0, 0, 0, 0, 0, 0), overlap=overlap)
    with LLM(str(folder), policy, dtype="float32", offload_dir=tmp_path / "offload") as llm:
        with pytest.raises(TransferError, match=f"{path.name}: ends at byte"):
            llm.generate(known.prompts, params, watch_logits=truncate)
        assert_clean()
    path.write_bytes(whole)
    assert (
        tokens_of(run(folder, known.prompts, policy, tmp_path / "offload", params)) == known.tokens
    )
    assert_clean()

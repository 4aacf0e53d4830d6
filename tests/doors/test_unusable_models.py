"""Models and policy files that cannot be used: exit code 2, one line that names the folder or file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o.core.config import Policy, SavedPolicy, write_policy
from tests.doors.conftest import Answer
from tests.doors.test_refusals import assert_refused


def config_folder(ids_model: Path, folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    config = json.loads((ids_model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def test_folder_without_config(door: Callable[..., Answer], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert_refused(door(model=tmp_path / "empty"), "--model", "config.json")


def test_no_such_folder(door: Callable[..., Answer]) -> None:
    assert_refused(door(model="/no/such/folder"), "--model /no/such/folder")


def test_unsupported_family(door: Callable[..., Answer], tmp_path: Path) -> None:
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert"}')
    assert_refused(door(model=tmp_path / "bert"), "bert", "opt")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": 5}', "{}"])
def test_config_that_is_none(text: str, door: Callable[..., Answer], tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text(text)
    assert_refused(door(model=tmp_path / "broken"), "broken")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_attention_heads": 5}, "num_attention_heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"activation_function": "swish"}, "activation_function"),
        ({"vocab_size": "many"}, "vocab_size"),
    ],
)
def test_config_with_a_bad_field(
    changes: dict[str, Any], says: str, door: Callable[..., Answer], ids_model: Path, tmp_path: Path
) -> None:
    assert_refused(door(model=config_folder(ids_model, tmp_path / "model", **changes)), says)


def test_folder_without_weights(door: Callable[..., Answer], ids_model: Path, tmp_path: Path) -> None:
    assert_refused(door(model=config_folder(ids_model, tmp_path / "bare")), "bare", "no weights")


def test_weights_of_another_shape(door: Callable[..., Answer], ids_model: Path, tmp_path: Path) -> None:
    folder = config_folder(ids_model, tmp_path / "model", ffn_dim=80)
    shutil.copy(ids_model / "model.safetensors", folder)
    assert_refused(door(model=folder), "model.safetensors", "fc1", "(80, 32)", "(64, 32)")


def test_hub_id_while_offline(door: Callable[..., Answer]) -> None:
    answer = door(model="nobody/no-such-model")
    assert_refused(answer, "--model nobody/no-such-model", "_DUMMY_")


def test_random_weights_of_an_unknown_shape(door: Callable[..., Answer]) -> None:
    assert_refused(door("--path", "_DUMMY_", model="nobody/no-such-model"), "--model", "facebook/opt-125m")


def test_broken_tokenizer(door: Callable[..., Answer], ids_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(ids_model, folder)
    (folder / "tokenizer.json").write_text("{")
    assert_refused(door(model=folder), "tokenizer")


def test_a_tokenizer_whose_settings_are_of_a_wrong_type(
    door: Callable[..., Answer], words_model: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(words_model, tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": "many"}))
    (tmp_path / "prompts.txt").write_text("import os")
    assert_refused(door("--prompts", "prompts.txt", model=folder), "its tokenizer cannot be read")


# ---- Policy files


def policy_file(path: Path, **changes: Any) -> Path:
    """A good policy file with fields changed; None takes a field out."""
    write_policy(path, SavedPolicy(Policy()))
    body = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in body.items() if key in ("model",) or value is not None}))
    return path


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"colour": "red"}, "colour"),
        ({"overlap": None}, "overlap"),
        ({"schema": 99}, "99"),
        ({"schema": None}, "schema"),
        ({"percent": [60, 60, 0, 0, 0, 0]}, "60 + 60"),
        ({"percent": [1, 2]}, "percent"),
        ({"gpu_batch_size": 0}, "gpu_batch_size"),
        ({"gpu_batch_size": "4"}, "gpu_batch_size"),
        ({"overlap": "yes"}, "overlap"),
        ({"attn_sparsity": 0}, "attn_sparsity"),
    ],
    ids=str,
)
def test_bad_policy_file(changes: dict[str, Any], says: str, door: Callable[..., Answer], tmp_path: Path) -> None:
    path = policy_file(tmp_path / "policy.json", **changes)
    assert_refused(door("--policy", path), f"--policy {path}", says)


def test_policy_file_that_is_none(door: Callable[..., Answer], tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    for text in ("", "[]", "{", "\xff"):
        path.write_text(text, encoding="latin-1")
        assert_refused(door("--policy", path), f"--policy {path}")


@pytest.mark.parametrize("flags", ["--percent 0 0 0 0 0 0", "--gpu-batch-size 2", "--overlap false"])
def test_policy_file_beside_a_flag(flags: str, door: Callable[..., Answer], tmp_path: Path) -> None:
    path = policy_file(tmp_path / "policy.json")
    assert_refused(door("--policy", path, *flags.split()), "--policy", flags.split()[0])


def test_policy_file_that_asks_for_two_forms_of_weights(door: Callable[..., Answer], tmp_path: Path) -> None:
    path = policy_file(tmp_path / "policy.json", int8_compute=True, compress_weight=True, weight_bits=8)
    assert_refused(door("--policy", path), f"--policy {path}: int8_compute")

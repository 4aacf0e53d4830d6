"""Which folder a model's name stands for, and a way out in one line where there is none."""

from __future__ import annotations

import errno
import json
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from flexgen_h2o.checkpoint import resolve
from flexgen_h2o.checkpoint.resolve import PACKAGED
from flexgen_h2o.core.errors import DoesNotFitError, UsageError

ID = "someone/some-model"
BIN = "pytorch_model.bin"


def make(folder: Path, *files: str) -> Path:
    folder.mkdir(parents=True)
    for name in ("config.json", *files):
        (folder / name).write_text("{}")
    return folder


def cached(home: Path, *files: str) -> Path:
    """A snapshot in a hub cache, as huggingface_hub lays it out."""
    root = home / "hub" / "models--someone--some-model"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("0" * 40)
    return make(root / "snapshots" / ("0" * 40), *files)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch) -> Path:
    """An empty hub cache, offline."""
    folder = tmp_path / "home"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return folder


@pytest.fixture
def hub(monkeypatch):
    """A hub that offers files; records what is asked of it."""
    asked: list[dict] = []

    def install(
        folder: Path, *files: str, error: Exception | None = None, size: int | None = None
    ) -> list[dict]:
        def info(self, model, revision=None, timeout=None, files_metadata=False):
            assert timeout
            offered = [SimpleNamespace(rfilename=name, size=size) for name in files]
            return SimpleNamespace(siblings=offered)

        def download(model, **options):
            if options.get("local_files_only"):
                raise LocalEntryNotFoundError("not cached")
            if error is not None:
                raise error
            asked.append({"model": model, **options})
            return str(folder)

        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        return asked

    return install


@pytest.mark.parametrize("model", ["./nowhere", "", "{tmp}"])
def test_no_such_folder_or_none_with_a_config(model: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--model"):
        resolve(model.format(tmp=tmp_path), None)


def test_packaged_unless_there_is_such_a_folder(tmp_path: Path, monkeypatch) -> None:
    folder = make(tmp_path / "assets")
    monkeypatch.setitem(PACKAGED, "opt-tiny", folder)
    assert resolve("opt-tiny", None) == folder
    assert resolve("opt-tiny", "_DUMMY_") == folder
    make(tmp_path / "opt-tiny")
    monkeypatch.chdir(tmp_path)
    assert resolve("opt-tiny", None) == Path("opt-tiny")


def test_local_folder(tmp_path: Path) -> None:
    folder = make(tmp_path / "m")
    assert resolve(str(folder), None) == resolve(str(folder), "_DUMMY_") == folder
    assert resolve(ID, "x/_DUMMY_") is None


@pytest.mark.parametrize("where", ["", ID, "some-model"])
def test_under_path(tmp_path: Path, where: str) -> None:
    folder = make(tmp_path / "weights" / where)
    assert resolve(ID, str(tmp_path / "weights")) == folder


def test_cached(home: Path) -> None:
    folder = cached(home, "model.safetensors")
    assert resolve(ID, None) == folder
    (home / "others").mkdir()
    assert resolve(ID, str(home / "others")) == folder
    with pytest.raises(UsageError, match=r"--model a\.gguf: GGUF is not read"):
        resolve("a.gguf", None)
    with pytest.raises(
        UsageError, match=r"--path .*: there is no such folder"
    ):  # mistyped, most likely
        resolve(ID, str(home / "nothing here"))


def test_cached_in_part(home: Path) -> None:
    """Without weights it is enough for a plan."""
    folder = cached(home, "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert resolve(ID, None, weights=False) == folder
    with pytest.raises(UsageError, match="not complete in the local cache"):
        resolve(ID, None)
    (folder / "b.safetensors").write_text("")
    assert resolve(ID, None) == folder


@pytest.mark.parametrize(("model", "offline"), [(ID, True), (ID, False), ("bad id//x", True)])
def test_not_to_be_had(monkeypatch, model: str, offline: bool) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    if not offline:
        # A port where nobody listens: the same failure as no network, on any machine.
        monkeypatch.setattr(huggingface_hub.HfApi, "__init__", _with_endpoint("http://127.0.0.1:9"))
    with pytest.raises(UsageError, match=rf"--model {model}: .*--random-weights") as caught:
        resolve(model, None)
    assert "\n" not in str(caught.value)


def test_a_silent_network_does_not_hang(monkeypatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setitem(resolve.__globals__, "_HUB_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(huggingface_hub.HfApi, "__init__", _with_endpoint(endpoint))
        with pytest.raises(UsageError, match="Timeout"):
            resolve(ID, None)


def _with_endpoint(endpoint: str, init=huggingface_hub.HfApi.__init__):
    return lambda self, *args, **options: init(self, *args, **{**options, "endpoint": endpoint})


def test_what_is_downloaded(tmp_path: Path, hub) -> None:
    """One format of the weights, one copy of Mistral's, and the end-of-sequence ids too."""
    safe = ["model-00001-of-00001.safetensors", "model.safetensors.index.json"]
    small = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer.model.v3"]
    others = ["consolidated.safetensors", "original/consolidated.00.pth", "x.md"]
    folder = make(tmp_path / "got")
    for files, wanted in (([*safe, BIN], safe), ([BIN], [BIN])):
        asked = hub(folder, *small, *files, *others)
        assert resolve(ID, None, revision="v1") == folder
        patterns = {name: asked[-1][name] for name in ("allow_patterns", "ignore_patterns")}
        every = [*small, *files, *others]
        assert list(filter_repo_objects(every, **patterns)) == [*small, *wanted]
        assert asked[-1]["revision"] == "v1"


def test_a_download_that_does_not_fit_the_disk_is_not_begun(
    tmp_path: Path, hub, monkeypatch, home: Path
) -> None:
    """Only files that would be fetched count, and bytes that are there already do not."""
    names = ("a.safetensors", "model.safetensors", "config.json", "original/other.safetensors", BIN)
    asked = hub(make(tmp_path / "got"), *names, size=300)
    blobs = home / "hub" / "models--someone--some-model" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "x.incomplete").write_bytes(bytes(100))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=799))
    with pytest.raises(DoesNotFitError, match=r"800 B .* 799 B are free, 1 B too little.*HF_HOME"):
        resolve(ID, None)
    assert not asked
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=800))
    assert resolve(ID, None) == tmp_path / "got"


def test_a_download_that_fails(tmp_path: Path, hub) -> None:
    hub(tmp_path, error=OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(DoesNotFitError, match="HF_HOME"):
        resolve(ID, None)
    response = SimpleNamespace(headers={}, request=None, status_code=404)
    hub(
        tmp_path,
        error=RepositoryNotFoundError("404 Client Error.\n\nLong advice.", response=response),
    )
    with pytest.raises(UsageError, match=r"RepositoryNotFoundError: 404 Client Error\)"):
        resolve(ID, None)


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "special_tokens_map.json",
        "chat_template.jinja",
    ],
)
def test_a_link_to_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    """As a cache has it that was copied without its blobs."""
    folder = make(tmp_path / "snapshots" / "0123", name)
    (folder / "README.md").symlink_to("../../blobs/gone")  # is not read
    assert resolve(str(folder), None) == folder
    (folder / name).unlink()
    (folder / name).symlink_to("../../blobs/gone")
    says = f"{folder / name}: this is a link to ../../blobs/gone, which is missing; download"
    for model, path in ((str(folder), None), ("0123", str(folder)), ("0123", str(folder.parent))):
        with pytest.raises(UsageError, match=says):
            resolve(model, path)


def test_a_folder_that_is_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to("gone")
    with pytest.raises(UsageError, match="model: this is a link to gone, which is missing"):
        resolve(str(tmp_path / "model"), None)


def test_the_folder_of_a_cache_names_its_snapshot(home: Path) -> None:
    snapshot = cached(home)
    with pytest.raises(UsageError, match=f"its files are in snapshots; give {snapshot}"):
        resolve(str(snapshot.parent.parent), None)

"""Files and batches on a disk that is full: what cannot be written has not happened. No engine."""

from __future__ import annotations

import asyncio
import errno
import io
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flexgen_h2o.core import files
from flexgen_h2o.core.errors import FlexgenError
from flexgen_h2o.serving.answers import Refused
from flexgen_h2o.serving.app import Server
from flexgen_h2o.serving.batches import Batch, Batches, Store

BODY = {"endpoint": "/v1/completions", "completion_window": "24h"}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = Store(tmp_path, 2**20)
    yield found
    found.close()


@pytest.fixture
def batches(store: Store, monkeypatch: pytest.MonkeyPatch) -> Batches:
    monkeypatch.setattr(Batch, "open", lambda *args: None)
    service: Any = SimpleNamespace(add_batch=lambda run: None, wake=lambda: None)
    return Batches(store, service, SimpleNamespace(), {})  # type: ignore[arg-type]


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **other: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_whole", refuse)


def new_batch(store: Store) -> dict[str, Any]:
    file = store.add_file(io.BytesIO(b"{}"), "a.jsonl")
    return store.add_batch({**BODY, "input_file_id": file["id"]})


def test_a_file_without_a_record_leaves_nothing(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_disk(monkeypatch)
    with pytest.raises(Refused, match="No space left"):
        store.add_file(io.BytesIO(b"{}"), "a.jsonl")
    assert not store.files and not list((tmp_path / "files").iterdir())


def test_a_temporary_folder_that_is_full_is_told_to_the_client() -> None:
    async def form(**_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    sent: Any = SimpleNamespace(headers={"content-type": "multipart/form-data; boundary=a"}, form=form)
    with pytest.raises(Refused, match="No space left") as caught:
        asyncio.run(Server.add_file(None, sent))  # type: ignore[arg-type]
    assert (caught.value.status, caught.value.body["error"]["code"]) == (500, "storage_failed")


def test_what_a_kill_left_goes_away_and_folders_stay(tmp_path: Path) -> None:
    Store(tmp_path, 2**20).close()
    (tmp_path / "files" / "a.part").write_text("x")
    (tmp_path / "files" / "b.part").mkdir()
    Store(tmp_path, 2**20).close()
    assert [path.name for path in (tmp_path / "files").iterdir()] == ["b.part"]


def test_a_cancellation_that_cannot_be_written_changes_nothing(
    store: Store, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = new_batch(store)
    batches._start(batch)
    with monkeypatch.context() as full:
        fill_disk(full)
        with pytest.raises(FlexgenError, match="No space left"):
            batches.cancel(batch["id"])
        assert batch["status"] == "in_progress" and not batches.running[batch["id"]].is_gone
    batches.cancel(batch["id"])
    assert batch["status"] == "cancelling" and batches.running[batch["id"]].is_gone


def test_a_batch_whose_start_cannot_be_written_fails_until_the_next_server(
    store: Store, batches: Batches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = new_batch(store)
    fill_disk(monkeypatch)
    batches._start(batch)
    assert batch["status"] == "failed" and "No space left" in batch["errors"]["data"][0]["message"]
    assert not batches.running
    assert json.loads((tmp_path / "batches" / f"{batch['id']}.json").read_text())["status"] == "validating"

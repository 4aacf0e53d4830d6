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
from flexgen_h2o.core.interrupts import Interrupted
from flexgen_h2o.serving.answers import Refused
from flexgen_h2o.serving.app import Server
from flexgen_h2o.serving.batches import Batch, Batches, Store

BODY = {"endpoint": "/v1/completions", "completion_window": "24h"}
ROW = '{"custom_id": "a", "response": {}, "error": null}\n'
COUNTS = {"total": 1, "completed": 1, "failed": 0}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = Store(tmp_path, 2**20)
    yield found
    found.close()


@pytest.fixture
def batches(store: Store, monkeypatch: pytest.MonkeyPatch) -> Batches:
    monkeypatch.setattr(Batch, "open", lambda *args: None)
    return batches_of(store)


def batches_of(store: Store) -> Batches:
    service: Any = SimpleNamespace(add_batch=lambda run: None, wake=lambda: None)
    return Batches(store, service, SimpleNamespace(), {})  # type: ignore[arg-type]


def start_again(store: Store) -> None:
    batches = batches_of(store)
    batches.go_on()
    batches._clerk.shutdown()


def refuse(*args: Any, **other: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "write_whole", refuse)


def new_batch(store: Store, content: bytes = b"{}") -> dict[str, Any]:
    file = store.add_file(io.BytesIO(content), "a.jsonl")
    return store.add_batch({**BODY, "input_file_id": file["id"]})


def message_of(batch: dict[str, Any]) -> str:
    assert batch["status"] == "failed"
    return str(batch["errors"]["data"][0]["message"])


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
    (tmp_path / "files" / f"file-{'0' * 24}-output").write_text("its record was to be written next")
    Store(tmp_path, 2**20).close()
    assert [path.name for path in (tmp_path / "files").iterdir()] == ["b.part"]


def test_rows_of_a_failed_batch_become_a_file_at_the_first_start_with_room(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = new_batch(store)
    store.output(batch).write_text(ROW)
    with monkeypatch.context() as full:
        full.setattr(Store, "_keep", refuse)
        batches_of(store)._fail(batch, FlexgenError("a reason"))
        start_again(store)
        assert message_of(batch) == "a reason" and batch["output_file_id"] is None
        assert store.output(batch).read_text() == ROW
        assert not list(store.path(batch["input_file_id"]).parent.glob("*.part"))
    start_again(store)
    assert store.path(batch["output_file_id"]).read_text() == ROW and not store.output(batch).exists()


def test_counts_of_a_batch_that_is_over_as_the_server_starts(store: Store, tmp_path: Path) -> None:
    """Cancelled before, or it cannot go on: an earlier server has counted nothing."""
    cancelled, failed = (new_batch(store, b"{}\n" * 4) for _ in range(2))
    for batch in (cancelled, failed):
        store.output(batch).write_text(ROW * 2 + ROW.replace("null", '{"code": "x"}'))
    store.save(cancelled, status="cancelling")
    start_again(store)
    for batch, status in ((cancelled, "cancelled"), (failed, "failed")):
        kept = json.loads((tmp_path / "batches" / f"{batch['id']}.json").read_text())
        assert kept["status"] == status and kept["request_counts"] == {"total": 4, "completed": 2, "failed": 1}


def test_counts_are_kept_where_nothing_can_be_read(store: Store) -> None:
    batch = new_batch(store)
    batch["request_counts"] = COUNTS
    store.output(batch).mkdir()
    assert batches_of(store)._counts(batch) == COUNTS
    store.output(batch).rmdir()
    store.output(batch).write_text(ROW)
    store.path(batch["input_file_id"]).unlink()
    assert batches_of(store)._counts(batch) == COUNTS


def test_clients_are_told_ids_in_the_place_of_paths_and_flags(store: Store, tmp_path: Path) -> None:
    twice, mixed = new_batch(store, b'{"custom_id": "a"}\n' * 2), new_batch(store)
    store.output(mixed).write_text(ROW)
    for batch, begins in (
        (twice, f"{twice['input_file_id']}: lines 1 and 2 both have the custom_id"),
        (mixed, f"{mixed['id']}: has rows, and no {mixed['id']}.jsonl.job.json beside it"),
    ):
        batches_of(store)._start(batch)
        message = message_of(batch)
        assert message.startswith(begins) and "--" not in message and str(tmp_path) not in message


@pytest.mark.parametrize("when", ["start", "end"])
def test_a_bug_of_ours_ends_its_batch(
    when: str, store: Store, batches: Batches, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any) -> None:
        raise KeyError("x")

    batch = new_batch(store)
    monkeypatch.setattr(Batch, "counts", COUNTS)
    monkeypatch.setattr(*((Batch, "open", fail) if when == "start" else (Store, "split", fail)))
    batches._start(batch)
    if when == "end":
        batches._end(batches.running[batch["id"]], None)
    assert message_of(batch) == "internal error" and not batches.running
    assert capsys.readouterr().err == f"serve: {batch['id']}: internal error: KeyError: 'x'\n"


class Panic(BaseException):
    """What a Rust library's panic is in Python: no Exception."""


@pytest.mark.parametrize("fault", [Panic("Rust"), ValueError("half an emoji")], ids=repr)
def test_a_line_that_breaks_its_reader_ends_its_batch(
    fault: BaseException, store: Store, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read() -> Iterator[Any]:
        yield SimpleNamespace()
        raise fault

    monkeypatch.setattr(Batch, "counts", COUNTS)
    record = new_batch(store)
    batches._start(record)
    run = batches.running[record["id"]]
    run._rows = SimpleNamespace(requests=read())  # type: ignore[assignment]
    assert run.next() is not None and run.next() is None and run.is_gone
    run.end()
    batches._clerk.shutdown()
    assert message_of(record) == "internal error" and not batches.running


@pytest.mark.parametrize("fault", [Panic("Rust"), ValueError("half an emoji")], ids=repr)
def test_an_answer_that_cannot_be_written_is_an_error_row(
    fault: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    failed: list[tuple[Any, str]] = []

    def finish(done: Any) -> None:
        raise fault

    batch = Batch({"id": "batch_1"}, lambda run, error: None)
    batch.writer = SimpleNamespace(status=SimpleNamespace(tokens=0))  # type: ignore[assignment]
    batch._rows = SimpleNamespace(  # type: ignore[assignment]
        finish=finish, fail=lambda request, error: failed.append((request, error.code))
    )
    request: Any = SimpleNamespace(prompt=SimpleNamespace(index=7))
    batch.finish(request, SimpleNamespace(token_ids=[5]))  # type: ignore[arg-type]
    assert failed == [(request, "internal_error")] and not batch.is_gone
    assert capsys.readouterr().err.startswith("serve: batch_1, line 7: internal error: ")


def test_a_signal_goes_through_a_batch() -> None:
    def read() -> Iterator[Any]:
        raise Interrupted(15)
        yield

    batch = Batch({}, lambda run, error: None)
    batch._rows = SimpleNamespace(requests=read())  # type: ignore[assignment]
    with pytest.raises(Interrupted):
        batch.next()
    assert not batch.is_gone


def test_a_batch_is_asked_again_after_many_bad_lines() -> None:
    batch, request = Batch({}, lambda run, error: None), SimpleNamespace()
    batch._rows = SimpleNamespace(requests=iter([None, request]))  # type: ignore[assignment]
    assert [(batch.next(), batch.asks_again) for _ in range(3)] == [(None, True), (request, False), (None, False)]


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
    assert "No space left" in message_of(batch) and not batches.running
    assert json.loads((tmp_path / "batches" / f"{batch['id']}.json").read_text())["status"] == "validating"

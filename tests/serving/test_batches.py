"""Batches on disk, in hand and waiting. What cannot be written has not happened; waiting costs
nothing. No engine."""

from __future__ import annotations

import asyncio
import errno
import io
import itertools
import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flexgen_h2o.core import files
from flexgen_h2o.core.errors import FlexgenError
from flexgen_h2o.core.interrupts import Interrupted
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.jobs.input import scan_input
from flexgen_h2o.jobs.requests import Request, RequestReader
from flexgen_h2o.jobs.sidecar import Status, status_path
from flexgen_h2o.models.load import find_model
from flexgen_h2o.serving import batches as module
from flexgen_h2o.serving.answers import RequestRefused
from flexgen_h2o.serving.app import Server
from flexgen_h2o.serving.batches import MAX_FEEDING, Batches, OpenBatch
from flexgen_h2o.serving.held import MAX_DEATHS
from flexgen_h2o.serving.store import Store
from tests.serving.conftest import Panic

BODY = {"endpoint": "/v1/completions", "completion_window": "24h"}
ROW = '{"custom_id": "a", "response": {}, "error": null}\n'
ERROR_ROW = ROW.replace("null", '{"code": "x"}').replace('"a"', '"b"')
COUNTS = {"total": 1, "completed": 1, "failed": 0}
CAPACITY = 4
SETTINGS = {"model": "m"}


class StubService:
    """A block that takes rows when it is told to. runs: batches that were added, in order."""

    def __init__(self) -> None:
        self.capacity = CAPACITY
        self.llm = SimpleNamespace(peak_bytes={})
        self.runs: list[OpenBatch] = []

    def add_batch(self, run: OpenBatch) -> None:
        self.runs.append(run)

    def wake(self) -> None: ...


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = Store(tmp_path, 2**20)
    yield found
    found.close()


@pytest.fixture(scope="module")
def reader() -> RequestReader:
    return RequestReader(find_model("opt-tiny", None, None), SamplingParams(max_tokens=2))


@pytest.fixture
def batches(store: Store, reader: RequestReader) -> Batches:
    return batches_of(store, reader)


def batches_of(store: Store, reader: RequestReader, most_rows: int = 50_000) -> Batches:
    return Batches(store, StubService(), reader, SETTINGS, most_rows)  # type: ignore[arg-type]


def runs_of(batches: Batches) -> list[OpenBatch]:
    found: list[OpenBatch] = batches.service.runs  # type: ignore[attr-defined]
    return found


def work(batches: Batches, pieces: float = float("inf")) -> None:
    """Do what the clerk's threads do, until nothing is left to do; at most so many pieces."""
    clerk = batches._clerk
    while pieces > 0 and (waiting := [lane for lane in clerk.lanes if not lane.empty()]):
        clerk.do(waiting[0].get())
        pieces -= 1


def start_again(store: Store, reader: RequestReader) -> Batches:
    """The next server, as far as it gets without running rows."""
    batches = batches_of(store, reader)
    batches._clerk.start = lambda: None  # type: ignore[method-assign]
    batches.go_on()
    batches._fill()
    work(batches)
    return batches


def finish(run: OpenBatch, request: Request) -> None:
    request.text = "x"
    request.token_ids = [5]
    request.finish_reason = "length"
    run.finish(request)


def run_rows(batches: Batches) -> list[str]:
    """All rows of all batches, as the block takes them; the ids of the batches as they end."""
    work(batches)
    ended: list[str] = []
    while runs_of(batches):
        run = runs_of(batches)[0]
        run_one(batches)
        if run.has_ended and run.name not in ended:
            ended.append(run.name)
    return ended


def run_one(batches: Batches) -> None:
    take_one(batches)
    work(batches)


def take_one(batches: Batches) -> None:
    """A row of the next batch, or its end."""
    if not runs_of(batches):
        return
    run = runs_of(batches).pop(0)
    request = None if run.is_gone else run.next()
    if request is not None:
        finish(run, request)
    if request is not None:
        runs_of(batches).append(run)
    elif run.is_over:
        run.end()


def create(batches: Batches, content: bytes, endpoint: str = "/v1/completions") -> dict[str, Any]:
    file = batches.store.add_file(io.BytesIO(content), "a.jsonl")
    return batches.create({**BODY, "input_file_id": file["id"], "endpoint": endpoint})


def lines(count: int, bad: int = 0, url: str = "/v1/completions") -> bytes:
    """Requests, of which the last ones are wrong."""
    found = [
        {
            "custom_id": f"r{i}",
            "method": "POST",
            "url": url,
            "body": {"prompt": [5, 6], "max_tokens": 1},
        }
        for i in range(count - bad)
    ]
    return "".join(json.dumps(one) + "\n" for one in found).encode() + b"x\n" * bad


def rows_of(store: Store, batch: dict[str, Any], field: str) -> list[dict[str, Any]]:
    """Rows of a result file of the batch."""
    return [json.loads(line) for line in store.path(batch[field]).read_text().splitlines()]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


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


def test_a_file_without_a_record_leaves_nothing(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk(monkeypatch)
    with pytest.raises(RequestRefused, match="No space left"):
        store.add_file(io.BytesIO(b"{}"), "a.jsonl")
    assert not store.files and not list((tmp_path / "files").iterdir())


def test_a_temporary_folder_that_is_full_is_told_to_the_client() -> None:
    async def form(**_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    sent: Any = SimpleNamespace(
        headers={"content-type": "multipart/form-data; boundary=a"}, form=form
    )
    with pytest.raises(RequestRefused, match="No space left") as caught:
        asyncio.run(Server.add_file(None, sent))  # type: ignore[arg-type]
    assert (caught.value.status, caught.value.body["error"]["code"]) == (500, "storage_failed")


def test_what_a_kill_left_goes_away_and_folders_stay(tmp_path: Path) -> None:
    Store(tmp_path, 2**20).close()
    (tmp_path / "files" / "a.part").write_text("x")
    (tmp_path / "files" / "b.part").mkdir()
    (tmp_path / "files" / f"file-{'0' * 24}-output").write_text("its record was to be written next")
    Store(tmp_path, 2**20).close()
    assert [path.name for path in (tmp_path / "files").iterdir()] == ["b.part"]


def in_progress(
    store: Store, content: bytes, answers: str = "", errors: str = ""
) -> dict[str, Any]:
    """A batch that an earlier server has begun."""
    batch = new_batch(store, content)
    store.save(batch, status="in_progress")
    store.output(batch).write_text(answers)
    store.errors(batch).write_text(errors)
    return batch


def test_rows_of_a_failed_batch_become_a_file_at_the_first_start_with_room(
    store: Store, reader: RequestReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = in_progress(store, lines(1), ROW)
    with monkeypatch.context() as full:
        full.setattr(Store, "_keep", refuse)
        batches_of(store, reader)._fail(batch, FlexgenError("a reason"))
        start_again(store, reader)
        assert message_of(batch) == "a reason" and batch["output_file_id"] is None
        assert store.output(batch).read_text() == ROW
        assert not list(store.path(batch["input_file_id"]).parent.glob("*.part"))
    start_again(store, reader)
    assert (
        store.path(batch["output_file_id"]).read_text() == ROW and not store.output(batch).exists()
    )


def test_counts_of_a_batch_that_is_over_as_the_server_starts(
    store: Store, reader: RequestReader, tmp_path: Path
) -> None:
    """Cancelled before, or it cannot go on: an earlier server has counted nothing."""
    cancelled, failed = (in_progress(store, lines(4), ROW * 2, ERROR_ROW) for _ in range(2))
    store.save(cancelled, status="cancelling")
    start_again(store, reader)
    for batch, status in ((cancelled, "cancelled"), (failed, "failed")):
        kept = json.loads((tmp_path / "batches" / f"{batch['id']}.json").read_text())
        assert kept["status"] == status and kept["request_counts"] == {
            "total": 3,
            "completed": 2,
            "failed": 1,
        }


def test_clients_are_told_ids_in_the_place_of_paths_and_flags(
    store: Store, reader: RequestReader, tmp_path: Path
) -> None:
    twice = new_batch(store, b'{"custom_id": "a"}\n' * 2)
    mixed = in_progress(store, lines(1), ROW)
    torn = in_progress(store, lines(1), "", "no row\n")
    start_again(store, reader)
    for batch, begins in (
        (twice, f"{twice['input_file_id']}: lines 1 and 2 both have the custom_id"),
        (mixed, f"{mixed['id']}: has rows, and no {mixed['id']}.jsonl.job.json beside it"),
        (torn, f"{torn['id']}: has rows, and no {torn['id']}.jsonl.job.json beside it"),
    ):
        message = message_of(batch)
        assert message.startswith(begins) and "--" not in message and str(tmp_path) not in message


@pytest.mark.parametrize(
    "where", [(module, "scan_input"), (OpenBatch, "open"), (Batches, "_results")]
)
def test_a_bug_of_ours_ends_its_batch(
    where: tuple[Any, str],
    batches: Batches,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*args: Any, **how: Any) -> None:
        raise KeyError("x")

    batch = create(batches, lines(1))
    other = create(batches, lines(2))
    with monkeypatch.context() as broken:
        broken.setattr(*where, fail)
        work(batches)
        while runs_of(batches) and not batch["errors"]:
            run_one(batches)
    assert message_of(batch) == "internal error" and batch["id"] not in batches.running
    assert capsys.readouterr().err.startswith(
        f"serve: {batch['id']}: internal error: KeyError: 'x'\n"
    )
    if where[1] == "_results":
        run_rows(batches)
        assert other["status"] == "completed"


def test_a_line_that_breaks_its_reader_ends_its_batch(store: Store, batches: Batches) -> None:
    """Another batch goes on; and what is done is in a file."""

    def read() -> Iterator[Any]:
        yield from whole
        raise Panic("Rust")

    batch = create(batches, lines(3))
    other = create(batches, lines(2))
    work(batches)
    run = batches.running[batch["id"]]
    whole = list(run.requests)[:2]
    run.requests = read()
    run_rows(batches)
    assert message_of(batch) == "internal error" and not batches.running
    assert len(rows_of(store, batch, "output_file_id")) == 2
    assert (
        batch["request_counts"] == {"total": 3, "completed": 2, "failed": 0}
        and other["status"] == "completed"
    )


def test_a_batch_is_asked_again_after_many_bad_lines(batches: Batches) -> None:
    batch = OpenBatch({}, batches)
    batch.writer = SimpleNamespace(status=Status())  # type: ignore[assignment]
    request = SimpleNamespace()
    batch.requests = iter([None, request])  # type: ignore[list-item]
    assert [(batch.next(), len(runs_of(batches))) for _ in range(3)] == [
        (None, 1),
        (request, 1),
        (None, 1),
    ]


def test_a_cancellation_that_cannot_be_written_changes_nothing(
    store: Store, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = create(batches, lines(2))
    work(batches)
    with monkeypatch.context() as full:
        fill_disk(full)
        with pytest.raises(FlexgenError, match="No space left"):
            batches.cancel(batch["id"])
        assert batch["status"] == "in_progress" and not batches.running[batch["id"]].is_gone
    batches.cancel(batch["id"])
    assert batch["status"] == "cancelling" and batches.running[batch["id"]].is_gone
    run_rows(batches)
    assert batch["status"] == "cancelled" and not batches.running


# ---- Waiting costs nothing


def test_batches_that_wait_hold_no_descriptor_and_keep_their_order(
    store: Store, batches: Batches
) -> None:
    before = descriptors()
    made = [create(batches, lines(1 + i % 3)) for i in range(60)]
    work(batches)
    assert {one["status"] for one in made} == {"in_progress"} and descriptors() == before
    assert len(batches.running) == MAX_FEEDING and [
        one["request_counts"]["total"] for one in made[:3]
    ] == [1, 2, 3]
    most = 0
    while runs_of(batches):
        run_one(batches)
        most = max(most, len(batches.running))
    assert {one["status"] for one in made} == {"completed"} and most <= MAX_FEEDING + CAPACITY
    assert descriptors() == before and not batches.others_wait
    assert not store.with_jobs() and len(store.files) == 120


def test_batches_of_one_row_fill_the_block(store: Store, batches: Batches) -> None:
    batches.service.capacity = 20
    made = [create(batches, lines(1)) for i in range(30)]
    work(batches)
    assert [run.name for run in runs_of(batches)] == [one["id"] for one in made[:20]]
    assert run_rows(batches) == [one["id"] for one in made]


def test_a_short_batch_overtakes_long_ones_that_have_had_a_turn(
    store: Store, batches: Batches
) -> None:
    made = [create(batches, lines(40)) for _ in range(MAX_FEEDING + 2)]
    short = [create(batches, lines(1)) for _ in range(2)]
    ended = run_rows(batches)
    assert ended[:2] == [one["id"] for one in short] and len(ended) == len(made) + 2
    for one in (*made, *short):
        names = {row["custom_id"] for row in rows_of(store, one, "output_file_id")}
        assert names == {f"r{i}" for i in range(one["request_counts"]["total"])}


def test_a_batch_that_rests_can_be_cancelled(store: Store, batches: Batches) -> None:
    made = [create(batches, lines(40)) for _ in range(MAX_FEEDING + 4)]
    work(batches)
    while not isinstance(batches._waiting[-1], OpenBatch):
        run_one(batches)
    resting = batches._waiting[-1].record
    batches.cancel(resting["id"])
    assert len(run_rows(batches)) == len(made) and resting["status"] == "cancelled"
    assert len(rows_of(store, resting, "output_file_id")) >= CAPACITY
    assert [one["status"] for one in made if one is not resting] == ["completed"] * (len(made) - 1)


def test_no_descriptor_left_is_waited_for(
    store: Store, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is being done with the batch's files, it does not fail."""
    monkeypatch.setattr(files, "_PATIENCE_S", 0.0)
    batch = create(batches, lines(3))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    for _ in range(8):
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() - 1, limits[1]))
        try:
            work(batches, 1)
            take_one(batches)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        work(batches, 1)
    while batch["status"] == "in_progress":
        batches._fill()
        run_rows(batches)
    assert batch["status"] == "completed"
    assert len(rows_of(store, batch, "output_file_id")) == 3


def test_files_expire_when_no_batch_reads_them(store: Store, batches: Batches) -> None:
    kept, gone, read = (
        str(store.add_file(io.BytesIO(lines(1)), "a.jsonl", expires_in=seconds)["id"])
        for seconds in (None, 3600, 3600)
    )
    batch = batches.create({**BODY, "input_file_id": read})
    path = store.path(gone)
    store.expire(time.time() + 3000)
    assert list(store.files) == [kept, gone, read]
    store.expire(time.time() + 4000)
    assert list(store.files) == [kept, read] and not path.exists()
    run_rows(batches)
    store.expire(time.time() + 5000)
    assert batch["status"] == "completed" and read not in store.files and kept in store.files


# ---- One long thing delays no short one


def test_a_long_scan_delays_no_short_one_and_can_be_ended(
    store: Store, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a cancellation, and by the end of the server. It takes without end here."""

    def scan(path: Path, check: Callable[[], None], **how: Any) -> Any:
        while path.stat().st_size >= 2**20:
            time.sleep(0.001)
            check()
        return scan_input(path, check=check, **how)

    monkeypatch.setattr(module, "scan_input", scan)
    store._most_bytes = 2**30
    batches._clerk.start()
    content = b"1\n" * 2**20
    long = create(batches, content)
    other = create(batches, content)
    short = create(batches, lines(2))
    while short["status"] != "in_progress":
        time.sleep(0.001)
    batches.cancel(long["id"])
    while long["status"] != "cancelled" or other["id"] not in store.held.names:
        time.sleep(0.001)
    batches.close(Interrupted(15))
    assert other["status"] == "validating" and not store.held.names


@pytest.mark.parametrize(
    ("content", "says"), [(lines(11), "more than 10 requests"), (b"\n" * 21, "more than 20 lines")]
)
def test_rows_of_a_batch_are_bounded(
    content: bytes, says: str, store: Store, reader: RequestReader
) -> None:
    batches = batches_of(store, reader, most_rows=10)
    batch = create(batches, content)
    whole = create(batches, lines(10))
    run_rows(batches)
    assert says in message_of(batch) and whole["status"] == "completed"


def test_error_rows_are_stored_once_and_count(
    store: Store, batches: Batches, tmp_path: Path
) -> None:
    """Two bytes of upload become some two hundred of an error row."""
    room = store._most_bytes
    batch = create(batches, lines(1000, bad=990))
    work(batches)
    [run] = runs_of(batches)
    while not run.is_over:
        if (request := run.next()) is not None:
            finish(run, request)
    sizes = {path.stat().st_ino: path.stat().st_size for path in tmp_path.rglob("*.jsonl")}
    run.end()
    work(batches)
    assert batch["request_counts"] == {"total": 1000, "completed": 10, "failed": 990}
    files = [store.files[batch[name]]["bytes"] for name in ("output_file_id", "error_file_id")]
    assert sorted(files) == sorted(sizes.values()) and files[1] > 90_000
    upload = store.files[batch["input_file_id"]]["bytes"]
    assert store._stored == upload + files[1]
    store.delete_file(batch["error_file_id"])
    store.delete_file(batch["input_file_id"])
    assert store._stored == 0 and store._most_bytes == room


def test_a_batch_without_room_for_its_error_rows_fails_and_others_run(
    store: Store, batches: Batches, tmp_path: Path
) -> None:
    store._most_bytes = 50_000
    many = create(batches, lines(1000, bad=990))
    good = create(batches, lines(5))
    run_rows(batches)
    assert "no room for more error rows" in message_of(many) and good["status"] == "completed"
    assert many["request_counts"]["completed"] == 10
    assert store._stored == sum(
        one["bytes"]
        for one in store.files.values()
        if one["purpose"] == "batch" or "-errors" in one["id"]
    )
    store._most_bytes = store._stored
    with pytest.raises(RequestRefused, match="no room"):
        create(batches, b"")
    store.close()
    again = Store(tmp_path, 2**20)
    assert again._stored == store._stored
    store._fd = again._fd


# ---- A batch that ends the server


def test_a_batch_that_gets_on_is_tried_again_however_often_the_server_dies(
    store: Store, reader: RequestReader
) -> None:
    batches = batches_of(store, reader)
    batch = create(batches, lines(5))
    work(batches)
    for _ in range(4):
        run_one(batches)
        batches = start_again(store, reader)
    assert batch["status"] == "in_progress"
    run_rows(batches)
    assert batch["status"] == "completed" and batch["request_counts"]["completed"] == 5


def test_a_server_that_is_told_to_end_counts_no_death(store: Store, reader: RequestReader) -> None:
    batches = batches_of(store, reader)
    batch = create(batches, lines(5))
    work(batches)
    for _ in range(MAX_DEATHS + 1):
        batches.close(Interrupted(15))
        batches = start_again(store, reader)
        assert store.held.deaths(batch["id"]) == 0
    for deaths in range(1, MAX_DEATHS + 1):
        assert batch["status"] == "in_progress"
        batches.close(RuntimeError("the server has failed"))
        batches = start_again(store, reader)
        assert deaths == MAX_DEATHS or store.held.deaths(batch["id"]) == deaths
        batches.close(Interrupted(15))
        if deaths < MAX_DEATHS:
            batches = start_again(store, reader)
    assert batch["status"] == "failed"


def test_batches_that_were_open_run_apart_half_as_many_at_a_time(
    store: Store, reader: RequestReader
) -> None:
    """Until each has a new row. Others, also new ones, wait meanwhile."""
    batches = batches_of(store, reader)
    made = [create(batches, lines(3)) for _ in range(4)]
    work(batches)
    batches = start_again(store, reader)
    new = create(batches, lines(1))
    work(batches)
    assert [run.name for run in runs_of(batches)] == [one["id"] for one in made[:2]]
    run_one(batches)
    batches._fill()
    work(batches)
    assert {run.name for run in runs_of(batches)} <= {one["id"] for one in made[:3]}
    batches = start_again(store, reader)
    batches = start_again(store, reader)
    assert len(runs_of(batches)) == 1 and all(one["status"] == "in_progress" for one in made)
    while runs_of(batches):
        run_rows(batches)
        batches._fill()
        work(batches)
    assert [one["status"] for one in (*made, new)] == ["completed"] * 5
    assert not any(map(store.held.most_beside, store.batches))


def test_deaths_count_only_against_a_batch_that_was_alone(
    store: Store, reader: RequestReader
) -> None:
    """Five deaths of the server, none of them anybody's fault, and one while clients ask."""
    batches = batches_of(store, reader)
    made = [create(batches, lines(3)) for _ in range(2)]
    work(batches)
    for _ in range(MAX_DEATHS + 1):
        batches = start_again(store, reader)
    assert {one["status"] for one in made} == {"in_progress"}
    assert sorted(store.held.deaths(one["id"]) for one in made) == [2, 2]
    store.held.note_clients(True)
    batches = start_again(store, reader)
    assert sorted(store.held.deaths(one["id"]) for one in made) == [2, 2.5]


@pytest.mark.parametrize("beside", [0, 1, 5])
def test_a_batch_that_ends_the_server_is_given_up_alone_and_can_be_resumed(
    store: Store, reader: RequestReader, beside: int
) -> None:
    batches = batches_of(store, reader)
    bad = create(batches, lines(3))
    good = [create(batches, lines(3)) for _ in range(beside)]
    work(batches)
    rows = starts = 0
    while bad["status"] == "in_progress":
        poison = next((run for run in runs_of(batches) if run.name == bad["id"]), None)
        if poison is not None and (rows or runs_of(batches)[0] is poison):
            starts += 1
            assert starts < 3 * MAX_DEATHS
            batches = start_again(store, reader)  # all that ran is lost
        elif not rows and poison is not None:
            take_one(batches)
            rows += 1
        else:
            run_one(batches)
            batches._fill()
            work(batches)
    while runs_of(batches) or batches.others_wait:
        batches._fill()
        run_rows(batches)
    assert {one["status"] for one in good} <= {"completed"}
    assert "resume" in message_of(bad) and bad["errors"]["data"][0]["code"] == "server_died"
    batches = start_again(store, reader)
    if good:
        with pytest.raises(RequestRefused, match="is completed; only a batch that failed"):
            batches.resume(good[0]["id"])
    batches.resume(bad["id"])
    assert bad["status"] == "in_progress" and bad["errors"] is None
    run_rows(batches)
    assert bad["status"] == "completed" and len(rows_of(store, bad, "output_file_id")) == 3


@pytest.mark.parametrize("deleted", [False, True])
def test_rows_of_a_batch_that_was_given_up_are_kept(
    store: Store, reader: RequestReader, tmp_path: Path, deleted: bool
) -> None:
    """They are its files; resumed, it does the others. The bytes of error rows count once."""
    batches = batches_of(store, reader)
    batch = create(batches, b"x\n" * 2 + lines(3))
    work(batches)
    take_one(batches)
    batches.close(RuntimeError("the server has failed"))
    stored = store._stored
    for _ in range(1 + MAX_DEATHS):
        start_again(store, reader)
    assert batch["status"] == "failed" and len(rows_of(store, batch, "output_file_id")) == 1
    store.close()
    again = Store(tmp_path, 2**20)
    assert again._stored == store._stored == stored
    record = again.batches[batch["id"]]
    if deleted:
        again.delete_file(record["output_file_id"])
    batches = start_again(again, reader)
    resumed = batches.resume(record["id"])
    assert resumed["output_file_id"] is None and len(again.files) == 1
    run_rows(batches)
    assert record["request_counts"] == {"total": 5, "completed": 3, "failed": 2}
    assert len(rows_of(again, record, "output_file_id")) == 3
    again.delete_file(record["error_file_id"])
    again.delete_file(record["input_file_id"])
    assert again._stored == 0
    store._fd = again._fd


@pytest.mark.parametrize("left", [None, "{", '{"done": 1e999}'])
def test_counts_never_go_back_over_a_kill(
    store: Store, reader: RequestReader, left: str | None
) -> None:
    """The job's status may be a second old, torn, or not there: rows on disk count."""
    batches = batches_of(store, reader)
    batch = create(batches, lines(9, bad=3))
    work(batches)
    shown = [batches.shown(batch)["request_counts"]]
    for _ in range(4):
        take_one(batches)
        shown.append(batches.shown(batch)["request_counts"])
        if left is not None:
            status_path(store.output(batch)).write_text(left)
        batches = batches_of(store, reader)
        batches._clerk.start = lambda: None  # type: ignore[method-assign]
        batches.go_on()
        shown.append(batches.shown(batch)["request_counts"])
        work(batches)
        batches._fill()
        work(batches)
        shown.append(batches.shown(batch)["request_counts"])
    run_rows(batches)
    shown.append(batches.shown(batch)["request_counts"])
    for before, after in itertools.pairwise(shown):
        assert all(before[name] <= after[name] for name in before)
    assert shown[-1] == {"total": 9, "completed": 6, "failed": 3}


# ---- Lines of another endpoint


def test_lines_of_another_endpoint_are_error_rows(store: Store, batches: Batches) -> None:
    batch = create(batches, lines(2), endpoint="/v1/chat/completions")
    run_rows(batches)
    assert batch["request_counts"] == {"total": 2, "completed": 0, "failed": 2}
    for row in rows_of(store, batch, "error_file_id"):
        assert row["error"]["code"] == "unknown_url"
        assert "/v1/chat/completions" in row["error"]["message"]

"""State folders in which something is odd: a server starts, says so, and answers for all the rest.
No rows run."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from flexgen_h2o import LLM, Full, Policy
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.jobs.requests import RequestReader
from flexgen_h2o.serving.app import Server
from flexgen_h2o.serving.batches import Batches
from flexgen_h2o.serving.block import Service
from flexgen_h2o.serving.records import BATCH_FIELDS, FILE_FIELDS
from flexgen_h2o.serving.store import Store
from tests.serving.test_batches import batches_of, create, lines, run_rows, take_one, work

LISTS = ("/v1/files", "/v1/files?purpose=batch&order=asc", "/v1/batches?limit=100", "/status")
PAGES = (*LISTS, "/metrics", "/v1/models", "/health")
DEEP = "[" * 100_000 + "]" * 100_000
VALUES = (
    None,
    True,
    0,
    -1,
    1.5,
    2**53,
    10**400,
    float("nan"),
    float("inf"),
    "",
    "lots",
    "\ud83e",
    "\0",
    "../../etc",
    "a" * 5000,
    [],
    {},
    [[]],
    {"total": 1},
    {"data": 3},
    {"data": [{}]},
    {"total": -1, "completed": 0, "failed": 0},
    {"a": 1},
    {str(i): "" for i in range(99)},
)
BYTES = (b"", b"\0" * 500, b"{", b"null", b"[]", b'"a"', b"3", b"\xff\xfe{}", DEEP.encode())


def make_state(folder: Path, reader: RequestReader) -> None:
    """A folder as servers leave it: batches in all states, with their files."""
    store = Store(folder, 2**30)
    batches = batches_of(store, reader)
    for content in (lines(3), lines(4, bad=2)):
        create(batches, content)
    run_rows(batches)
    cancelled, failed, running, waiting = (create(batches, lines(5, bad=1)) for _ in range(4))
    work(batches)
    for _ in range(6):
        take_one(batches)
    store.save(cancelled, status="cancelling")
    batches._fail(failed, ValueError("x"))
    new = create(batches, lines(2))
    assert running["status"] == waiting["status"] == "in_progress" and new["status"] == "validating"
    store.close()


class Damage:
    """One odd thing in a copy of a state folder. `path` is where."""

    def __init__(self, folder: Path, generator: random.Random) -> None:
        self.folder = folder
        self._random = generator
        paths = sorted(
            path
            for path in folder.rglob("*")
            if path.is_file() and path.name != "lock" and path.suffix != ".tmp"
        )
        records = [path for path in paths if is_record(path)]
        self.path = generator.choice(records if generator.random() < 0.7 else paths)
        ways = [self.junk, self.cut, self.flip, self.other_kind, self.gone, self.large]
        if is_record(self.path) or self.path.suffix == ".json":
            ways += [self.field] * 8 + [self.renamed]
        self.way = generator.choice(ways)
        self.what = f"{self.way.__name__} {self.path.relative_to(folder)}"
        self.way()

    def junk(self) -> None:
        self.path.write_bytes(self._random.choice((*BYTES, self._random.randbytes(300))))

    def cut(self) -> None:
        size = self.path.stat().st_size
        os.truncate(self.path, self._random.randrange(max(1, size)))

    def flip(self) -> None:
        data = bytearray(self.path.read_bytes() or b"x")
        for _ in range(self._random.randrange(1, 4)):
            data[self._random.randrange(len(data))] = self._random.randrange(256)
        self.path.write_bytes(data)

    def other_kind(self) -> None:
        self.path.unlink()
        kind = self._random.randrange(5)
        if kind == 0:
            self.path.mkdir()
        elif kind == 1:
            self.path.mkdir()
            (self.path / "x").write_text("x")
        elif kind == 2:
            os.mkfifo(self.path)
        else:
            self.path.symlink_to(self.path.name if kind == 3 else "gone")

    def gone(self) -> None:
        self.path.unlink()

    def large(self) -> None:
        with self.path.open("ab") as file:
            file.truncate(self._random.choice((2**20 + 1, 2**24)))

    def renamed(self) -> None:
        name = f"{self.path.name[:20]}0{self.path.name[21:]}"
        self.path = self.path.rename(self.path.with_name(name))

    def field(self) -> None:
        body: dict[str, Any] = json.loads(self.path.read_text())
        place = body
        name = self._random.choice([*body])
        if isinstance(body[name], dict) and body[name] and self._random.random() < 0.5:
            place = body[name]
            name = self._random.choice([*place])
        change = self._random.randrange(4)
        if change == 0:
            del place[name]
        elif change == 1:
            place["of a newer version"] = self._random.choice(VALUES)
        else:
            place[name] = self._random.choice(VALUES)
        self.path.write_text(json.dumps(body))


def is_record(path: Path) -> bool:
    fields = {"files": FILE_FIELDS, "batches": BATCH_FIELDS}.get(path.parent.name)
    return fields is not None and path.suffix == ".json" and fields["id"](path.stem)


def ids_of(folder: Path) -> set[str]:
    return {path.stem for path in folder.rglob("*.json") if is_record(path)}


def looks(path: Path) -> tuple[int, bytes]:
    """Return the type of what is at a path, and a regular file's bytes."""
    mode = os.lstat(path).st_mode
    return stat.S_IFMT(mode), path.read_bytes() if stat.S_ISREG(mode) else b""


@contextlib.contextmanager
def served(folder: Path, service: Service, reader: RequestReader) -> Iterator[TestClient]:
    """A server of the folder, as far as it gets without running rows."""
    store = Store(folder, 2**30)
    batches = Batches(store, service, reader, {"model": "m"})
    batches._clerk.start = lambda: None  # type: ignore[method-assign]
    try:
        batches.go_on()
        yield TestClient(Server(service, batches, reader).app())
        batches._fill()
        work(batches)
    finally:
        for run in batches.running.values():
            run.close("ended")
        service._batches.clear()
        store.close()


def check(folder: Path, service: Service, reader: RequestReader, damage: Damage, err: Any) -> bool:
    """Whether the record that was damaged is listed."""
    before = looks(damage.path) if os.path.lexists(damage.path) else None
    known = ids_of(folder) - {damage.path.stem}
    err()
    with served(folder, service, reader) as web:
        said = err()
        found = {page: web.get(page) for page in PAGES}
        assert {page: one.status_code for page, one in found.items()} == dict.fromkeys(PAGES, 200)
        listed = {one["id"] for page in LISTS[::2] for one in found[page].json()["data"]}
        gone = {damage.path.name} if not damage.path.is_file() else set()  # content of a file
        assert listed >= known - gone
        if is_record(damage.path) and before is not None and damage.path.stem not in listed:
            assert looks(damage.path) == before
            [line] = said.splitlines()
            assert str(damage.path) in line and "not listed" in line and len(line) < 1000
        for one in sorted(known | {damage.path.stem}):
            for path in (f"/v1/files/{one}", f"/v1/files/{one}/content", f"/v1/batches/{one}"):
                assert web.get(path).status_code in (200, 404)
    with served(folder, service, reader) as web:
        for page in PAGES:
            assert web.get(page).status_code == 200
        for one in sorted(known):
            if one.startswith("batch"):
                assert web.post(f"/v1/batches/{one}/cancel").status_code in (200, 400)
    return damage.path.stem in listed


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with LLM("opt-tiny", Policy(2, 1), Full(), dtype="float32", device="cpu") as llm:
        found = Service(llm, 2, 64, 10, 0.25)
        found.open()
        yield found


CASES = 40


def test_one_odd_thing_in_a_state_folder_hides_nothing_else(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reader = RequestReader(service.llm.model, SamplingParams(max_tokens=2))
    make_state(tmp_path / "whole", reader)
    for seed in range(CASES):
        folder = tmp_path / f"state{seed}"
        shutil.copytree(tmp_path / "whole", folder)
        damage = Damage(folder, random.Random(seed))
        try:
            check(folder, service, reader, damage, lambda: capsys.readouterr().err)
        except BaseException as error:
            error.add_note(f"seed {seed}: {damage.what}")
            raise
        shutil.rmtree(folder)


ODD = {
    "files": [("bytes", None), ("bytes", "10"), ("purpose", None), ("created_at", float("nan"))],
    "batches": [
        ("status", None),
        ("endpoint", "/v1/embeddings"),
        ("endpoint", ["/v1/completions"]),
        ("status", "paused"),
        ("request_counts", None),
        ("metadata", None),
        ("created_at", 1e300),
    ],
}


@pytest.mark.parametrize("kind", ODD)
def test_a_record_without_a_field_is_named_and_left(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """None stands for no field. Who asks for the record by its id is told why it is not there."""
    reader = RequestReader(service.llm.model, SamplingParams(max_tokens=2))
    make_state(tmp_path, reader)
    for name, value in ODD[kind]:
        path = min(path for path in (tmp_path / kind).glob("*.json") if is_record(path))
        whole = path.read_text()
        body = {**json.loads(whole), name: value}
        if value is None:
            del body[name]
        path.write_text(json.dumps(body))
        capsys.readouterr()
        with served(tmp_path, service, reader) as web:
            assert f"{path}: {name} is" in capsys.readouterr().err
            answer = web.get(f"/v1/{kind}/{path.stem}")
            assert answer.status_code == 404 and f"{name} is" in answer.json()["error"]["message"]
            assert path.stem not in web.get(f"/v1/{kind}").text
            assert web.get("/status").status_code == 200
        assert json.dumps(json.loads(path.read_text())) == json.dumps(body)
        path.write_text(whole)

"""The driver of a job on Ray and a window in its actor, without Ray: sizes, room, rows that come
twice or never."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flexgen_h2o import LLM, Full, Policy, batch, generate
from flexgen_h2o.core.errors import DoesNotFitError, FlexgenError, UsageError
from flexgen_h2o.core.units import less_margin
from flexgen_h2o.engine.sampling import NotFiniteError, SamplingParams
from flexgen_h2o.jobs import on_ray
from flexgen_h2o.jobs.input import InputPart, cut_input, read_lines, read_part, scan_input
from flexgen_h2o.jobs.on_ray import EngineArguments, find_pool, run_on_ray, run_window, window_size
from flexgen_h2o.jobs.output import OutputFile
from flexgen_h2o.jobs.requests import Request, RequestReader
from flexgen_h2o.jobs.runner import JobWriter, rows_before
from flexgen_h2o.jobs.sidecar import Status
from flexgen_h2o.models.load import Model
from tests.unit.jobs.stub import StubLLM, read_rows, write_lines

GIB = 2**30


def test_windows_are_whole_blocks_and_about_as_many_for_each_actor() -> None:
    assert window_size(10, 2, 4, asked=5) == 8
    assert window_size(300, 2, 4, None) == 152, "one each"
    assert window_size(10_000, 4, 8, None) == 840, "three each: no more than 1,024"
    assert window_size(10_000, 2, 1000, None) == 3000, "two each, of whole blocks"


# ---- room for actors

LARGE = {"CPU": 8, "memory": 64 * GIB}
SMALL = {"CPU": 4, "memory": 32 * GIB}
CARDS = {"CPU": 16, "GPU": 2, "memory": 64 * GIB}
NO_CARD = {"CPU": 16, "memory": 64 * GIB}


@pytest.mark.parametrize(
    ("nodes", "asked", "pool"),
    [
        ((LARGE, SMALL), (None, None, "cpu"), (2, 4, 0, less_margin(32 * GIB))),
        ((LARGE, SMALL), (3, 20 * GIB, "cpu"), (3, 4, 0, 20 * GIB)),
        ((CARDS, NO_CARD), (None, None, "auto"), (2, 8, 1, less_margin(32 * GIB))),
        ((CARDS, NO_CARD), (None, 8 * GIB, "cpu"), (2, 16, 0, 8 * GIB)),
        ((SMALL,), (5, None, "cpu"), r"--ray-actors 5: .* 4 cores"),
        ((SMALL,), (2, 17 * GIB, "cpu"), r"--ray-actors 2: .* 17.00 GiB \(--host-mem\)"),
    ],
)
def test_room_for_actors(
    nodes: tuple[dict[str, int], ...], asked: Any, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One on each node, or as many as are asked for, or one on each card. A dead node has none."""
    found = [{"Alive": True, "Resources": node} for node in nodes]
    found.append({"Alive": False, "Resources": {"CPU": 64, "memory": GIB}})
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(nodes=lambda: found))
    if isinstance(pool, str):
        with pytest.raises(DoesNotFitError, match=pool):
            find_pool(*asked)
    else:
        actors, resources = find_pool(*asked)
        assert (actors, *resources.values()) == pool


def test_an_address_where_nobody_listens_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    for address in ("127.0.0.1:1", "localhost:99999"):
        says = f"--ray {address}: no Ray there"
        with pytest.raises(UsageError, match=says), on_ray.ray_at(address):
            pass


# ---- a window in its actor


def window(llm: Any, lines: list[Any], **how: Any) -> Iterator[Any]:
    reader = RequestReader(llm.model, SamplingParams())
    return run_window(llm, reader, lines, None, refill=True, **how)


def test_a_window_answers_each_row_once(tmp_path: Path, words: Model) -> None:
    requests = [{"prompt": [9, 8, 7], "max_tokens": 1 + i % 3} for i in range(7)]
    source = write_lines(tmp_path / "in.jsonl", *requests[:4], "{", "", *requests[4:])
    [cut] = cut_input(source, np.array([False] * 3 + [True] * 2 + [False] * 3), 100)
    llm = StubLLM(words, spared=4)
    *some, counts = window(llm, list(read_part(source, cut)))
    found = sorted((one.row, len(one.token_ids)) for done in some for one in done)
    assert found == [(0, 1), (1, 2), (2, 3), (5, 2), (6, 3), (7, 1)]
    assert (counts.prompt_tokens, counts.spared_tokens, llm.planner.job_rows) == (6 * 3, 4, 6)


def test_what_the_engine_raises_comes_out_after_what_was_done(tmp_path: Path, words: Model) -> None:
    source = write_lines(tmp_path / "in.jsonl", "{", *({"prompt": [9, 8]} for _ in range(3)))

    def fail(line: int) -> None:
        if line == 3:
            raise OSError("a broken disk")

    found = window(StubLLM(words, before_row=fail), list(read_lines(source)))
    assert [(one.row, one.error_code) for one in next(found)] == [(0, "invalid_json")]
    assert [(one.row, one.error_code) for one in next(found)] == [(1, "")]
    with pytest.raises(OSError, match="a broken disk"):
        next(found)


def test_only_a_first_window_ends_the_job_where_its_rows_do_not_fit_together(
    tmp_path: Path, words: Model
) -> None:
    source = write_lines(tmp_path / "in.jsonl", *({"prompt": [9] * 5} for _ in range(6)))
    lines = list(read_lines(source))
    *answers, _ = window(StubLLM(words, room=20), lines, has_run=True)
    assert sum(map(len, answers)) == 6
    with pytest.raises(DoesNotFitError):
        list(window(StubLLM(words, room=20), lines))


# ---- the driver


class Driven:
    """A driver over an input of rows, whose flows are given: what the actors answer to the parts
    that each gets. asked: the rows of these parts."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, model: Model, rows: int, *flows: Any
    ) -> None:
        self._source = write_lines(
            folder / "in.jsonl", *({"custom_id": f"r{i}"} for i in range(rows))
        )
        self._path = folder / "out.jsonl"
        output = OutputFile(self._path)
        self._before = rows_before(output.rows(), scan_input(self._source).ids)
        self.writer = JobWriter([output], model, self._before, dict)
        self.asked: list[list[int]] = []
        left = iter(flows)

        def flow(source: Path, cuts: list[InputPart], *how: Any) -> None:
            self.asked.append([line.row for cut in cuts for line in read_part(source, cut)])
            for found in next(left):
                how[-1](found)

        resources = {"num_cpus": 1, "num_gpus": 0, "memory": GIB}
        monkeypatch.setattr(on_ray, "find_pool", lambda *asked: (2, resources))
        monkeypatch.setattr(on_ray, "_run_flow", flow)

    def run(self) -> None:
        words = ["--model", "opt-tiny", "--window", "4", "--ray"]
        args = batch._parser().parse_args(words)
        args.input = self._source
        opening = EngineArguments(args, Policy(), True, Full(), {})
        run_on_ray(self._before.done, self.writer, opening)

    def ids(self) -> list[str]:
        return [row["custom_id"] for row in read_rows(self._path)]


def answers(*rows: int) -> list[Request]:
    return [Request(row, (), custom_id=f"r{row}", row=row, token_ids=[5, 6]) for row in rows]


def gives_up(*found: Any) -> Iterator[Any]:
    yield from found
    yield "the actor died"


def test_rows_that_come_twice_are_written_once_and_those_that_do_not_are_run_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ids_only: Model,
) -> None:
    counts = Status(prompt_tokens=9, spared_tokens=2, peak_bytes={"host": 5})
    others = Status(prompt_tokens=6, spared_tokens=3, peak_bytes={"host": 3, "disk": 1})
    driven = Driven(
        tmp_path,
        monkeypatch,
        ids_only,
        6,
        [answers(3, 1), answers(1), answers(0, 3), counts],
        gives_up(answers(4)),
        [answers(5, 4), others, answers(2)],
    )
    driven.run()
    assert driven.ids() == ["r3", "r1", "r0", "r4", "r5", "r2"]
    assert driven.asked == [[0, 1, 2, 3, 4, 5], [2, 4, 5], [2, 5]]
    said = capsys.readouterr().err.splitlines()
    assert "2 rows are missing (the actor died); they are run again" in said[-1]
    status = driven.writer.status
    assert (status.done, status.tokens, status.prompt_tokens, status.spared_tokens) == (
        *(6, 12),
        *(15, 5),
    )
    assert status.peak_bytes == {"host": 5, "disk": 1}


def test_a_job_ends_of_which_nothing_comes_back_or_whose_engine_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ids_only: Model
) -> None:
    driven = Driven(tmp_path, monkeypatch, ids_only, 3, gives_up(answers(1)), gives_up(answers(1)))
    says = r"no answer came back from any actor \(the actor died\)"
    with pytest.raises(FlexgenError, match=says):
        driven.run()
    assert driven.ids() == ["r1"]
    error = NotFiniteError(3, "at step 2", [1])
    sent = pickle.loads(on_ray._packed("found", (error, "where it was"))["found"][0])
    (tmp_path / "again").mkdir()
    driven = Driven(tmp_path / "again", monkeypatch, ids_only, 3, [answers(2), sent])
    with pytest.raises(NotFiniteError) as found:
        driven.run()
    assert (str(found.value), found.value.places) == (str(error), (1,))
    assert str(found.value.__cause__) == "where it was" and driven.ids() == ["r2"]


def test_an_actor_that_finds_another_model_ends_the_job(tmp_path: Path) -> None:
    """Started again by Ray after the model was replaced, or on a node that has another one."""
    words = ["--model", "opt-tiny", "--offload-dir", str(tmp_path), "--device", "cpu"]
    how = (batch._parser().parse_args(words), Policy(), False, Full())
    with LLM("opt-tiny", offload_dir=tmp_path, device="cpu") as driver:
        digests = driver.digests()
    EngineArguments(*how, digests).open().close()
    with pytest.raises(FlexgenError, match=r"weights of opt-tiny on .* are not those"):
        EngineArguments(*how, {**digests, "weights": "0" * 16}).open()


# ---- the door


def test_ray_that_is_not_installed_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "find_spec", lambda name: None)
    source = write_lines(tmp_path / "in.jsonl", {"prompt": [5]})
    argv = ["--input", str(source), "--output", str(tmp_path / "out.jsonl")]
    assert batch.main([*argv, "--ray"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line == "batch: --ray: needs Ray Data; pip install -e '.[ray]' in a clone"
    assert batch.main([*argv, "--ray-actors", "2"]) == 2
    assert "goes with --ray" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]

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
from flexgen_h2o.jobs.input import InputPart, cut_input, read_cut, read_lines, scan_input
from flexgen_h2o.jobs.on_ray import (
    ActorError,
    EngineArguments,
    Pool,
    RayJob,
    find_pool,
    run_window,
    window_size,
)
from flexgen_h2o.jobs.output import OutputFile
from flexgen_h2o.jobs.requests import RequestReader
from flexgen_h2o.jobs.runner import EngineCounts, FinishedRow, JobWriter
from flexgen_h2o.models.load import Model
from tests.unit.jobs.stub import StubLLM, read_rows, rows_before, write_lines

GIB = 2**30


def test_windows_are_whole_blocks_and_about_as_many_for_each_actor() -> None:
    assert window_size(10, 2, 4, asked=5) == 8
    assert window_size(300, 2, 4, None) == 152, "one each"
    assert window_size(10_000, 4, 8, None) == 840, "three each: no more than 1,024"
    assert window_size(10_000, 2, 1000, None) == 3000, "two each, of whole blocks"
    assert window_size(1, 8, 1, None) == 1


# ---- room for actors


def ray_of(
    monkeypatch: pytest.MonkeyPatch, *nodes: dict[str, float], dead: dict[str, float] | None = None
) -> None:
    found = [{"Alive": True, "Resources": node} for node in nodes]
    found += [{"Alive": False, "Resources": dead}] if dead else []
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(nodes=lambda: found))


def test_an_actor_a_node_gets_its_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_of(
        monkeypatch,
        {"CPU": 8, "memory": 64 * GIB},
        {"CPU": 4, "memory": 32 * GIB},
        dead={"CPU": 64, "memory": GIB},
    )
    assert find_pool(None, None, "cpu") == Pool(2, 4, 0, less_margin(32 * GIB)), (
        "the large node has room for two"
    )
    assert find_pool(3, None, "cpu") == Pool(3, 4, 0, less_margin(32 * GIB))
    assert find_pool(2, 20 * GIB, "cpu") == Pool(2, 4, 0, 20 * GIB)


def test_an_actor_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_of(monkeypatch, {"CPU": 16, "GPU": 2, "memory": 64 * GIB}, {"CPU": 16, "memory": 64 * GIB})
    assert find_pool(None, None, "auto") == Pool(2, 8, 1, less_margin(32 * GIB)), (
        "both where the cards are"
    )
    assert find_pool(None, 8 * GIB, "cpu").cards == 0


def test_actors_that_have_no_room_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_of(monkeypatch, {"CPU": 4, "memory": 16 * GIB})
    with pytest.raises(DoesNotFitError, match=r"--ray-actors 5: .* 4 cores"):
        find_pool(5, None, "cpu")
    with pytest.raises(DoesNotFitError, match=r"--ray-actors 2: .* 9.00 GiB \(--host-mem\)"):
        find_pool(2, 9 * GIB, "cpu")


def test_an_address_where_nobody_listens_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    for address in ("127.0.0.1:1", "localhost:99999"):
        with (
            pytest.raises(UsageError, match=f"--ray {address}: no Ray there"),
            on_ray.ray_at(address),
        ):
            pass


# ---- a window in its actor


def window(llm: Any, lines: list[Any], **how: Any) -> Iterator[Any]:
    return run_window(
        llm, RequestReader(llm.model, SamplingParams()), lines, None, refill=True, **how
    )


def test_a_window_answers_each_row_once(tmp_path: Path, words: Model) -> None:
    requests = [{"prompt": [9, 8, 7], "max_tokens": 1 + i % 3} for i in range(7)]
    source = write_lines(tmp_path / "in.jsonl", *requests[:4], "{", "", *requests[4:])
    [cut] = cut_input(source, np.array([False] * 3 + [True] * 2 + [False] * 3), 100)
    llm = StubLLM(words, spared=4)
    *some, notes = window(llm, list(read_cut(source, cut)))
    found = sorted((one.row, one.tokens, one.error) for answers in some for one in answers)
    assert found == [
        (0, 1, None),
        (1, 2, None),
        (2, 3, None),
        (5, 2, None),
        (6, 3, None),
        (7, 1, None),
    ]
    assert (notes.prompt_tokens, notes.spared_tokens, llm.expected) == (6 * 3, 4, 6)


def test_what_the_engine_raises_comes_out_after_what_was_done(tmp_path: Path, words: Model) -> None:
    source = write_lines(tmp_path / "in.jsonl", "{", *({"prompt": [9, 8]} for _ in range(3)))

    def fail(line: int) -> None:
        if line == 3:
            raise OSError("a broken disk")

    found = window(StubLLM(words, before_row=fail), list(read_lines(source)))
    assert [(one.row, one.error) for one in next(found)] == [(0, "invalid_json")]
    assert [(one.row, one.error) for one in next(found)] == [(1, None)]
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
    that each gets."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        rows: int,
        *flows: Any,
        max_errors: int | None = None,
    ) -> None:
        self.path = folder / "out.jsonl"
        source = write_lines(folder / "in.jsonl", *({"custom_id": f"r{i}"} for i in range(rows)))
        scan = scan_input(source)
        self.output = OutputFile(self.path)
        before = rows_before(self.output, scan.ids)
        self.writer = JobWriter(self.output, before, dict, max_errors)
        opening: Any = SimpleNamespace(args=SimpleNamespace(window=4), is_auto=True)
        self.job = RayJob(source, before.done, self.writer, Pool(2, 1, 0, GIB), opening)
        self.asked: list[list[int]] = []
        left = iter(flows)

        def flow(job: RayJob, cuts: list[InputPart]) -> Iterator[Any]:
            self.asked.append([line.row for cut in cuts for line in read_cut(source, cut)])
            yield from next(left)

        monkeypatch.setattr(RayJob, "_flow", flow)

    def ids(self) -> list[str]:
        return [row["custom_id"] for row in read_rows(self.path)]


def answers(*rows: int, error: str | None = None) -> list[FinishedRow]:
    return [
        FinishedRow(row, b'{"custom_id": "r%d", "error": null}' % row, 2, error) for row in rows
    ]


def gives_up(*found: Any) -> Iterator[Any]:
    yield from found
    raise on_ray._FlowError("the actor died")


def test_rows_that_come_twice_are_written_once_and_those_that_do_not_are_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = (
        EngineCounts(2, "m in line 1", 9, 2, {"host": 5}),
        EngineCounts(1, "n in line 4", 6, 3, {"host": 3, "disk": 1}),
    )
    driven = Driven(
        tmp_path,
        monkeypatch,
        6,
        [answers(3, 1), answers(1), answers(0, 3), notes[0]],
        gives_up(answers(4)),
        [answers(5, 4), notes[1], answers(2)],
    )
    driven.job.run()
    assert driven.ids() == ["r3", "r1", "r0", "r4", "r5", "r2"]
    assert driven.asked == [[0, 1, 2, 3, 4, 5], [2, 4, 5], [2, 5]]
    assert driven.writer.notes == EngineCounts(3, "m in line 1", 15, 5, {"host": 5, "disk": 1})
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "2 rows are missing (the actor died); they are run again" in said[1]
    assert (driven.writer.status.done, driven.writer.status.tokens) == (6, 12)


def test_a_job_of_which_nothing_comes_back_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = Driven(tmp_path, monkeypatch, 3, gives_up(answers(1)), gives_up(answers(1)))
    with pytest.raises(
        FlexgenError, match=r"no answer came back from any actor \(the actor died\)"
    ):
        driven.job.run()
    assert driven.ids() == ["r1"]


def test_what_an_engine_raises_ends_the_job_as_it_would_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = Driven(
        tmp_path,
        monkeypatch,
        3,
        [answers(2), ActorError(DoesNotFitError("too large"), "where it was")],
    )
    with pytest.raises(DoesNotFitError, match="too large") as found:
        driven.job.run()
    assert str(found.value.__cause__) == "where it was" and driven.ids() == ["r2"]


def test_logits_that_are_not_finite_are_told_to_the_driver() -> None:
    error = NotFiniteError(3, "at step 2", [1])
    found = pickle.loads(
        on_ray._packed("found", ActorError(error, "where it was"))["found"][0]
    ).error
    assert (str(found), found.reason, found.places) == (str(error), error.reason, (1,))


def test_an_actor_that_finds_another_model_ends_the_job(tmp_path: Path) -> None:
    """Started again by Ray after the model was replaced, or on a node that has another one."""
    args = batch._parser().parse_args(
        ["--model", "opt-tiny", "--offload-dir", str(tmp_path), "--device", "cpu"]
    )
    how = (args, Policy(), False, Full())
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
    assert (
        batch.main([*argv, "--ray-actors", "2"]) == 2
        and "goes with --ray" in capsys.readouterr().err
    )
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]

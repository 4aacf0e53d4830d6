"""The throughput sweep's command line: wrong use, limits, and peers that break."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "bench" / "baselines"))

from bench.baselines.contract import drop_page_cache
from bench.sweep import __main__ as door
from bench.sweep.grid import SYSTEMS, Cell, System
from bench.sweep.runner import Setup, command_of, environment_of, load_libraries, measure
from bench.sweep.store import DOES_NOT_FIT, FAILED, OK, REFUSED, TIMEOUT, Line, Store
from flexgen_h2o.core.errors import UsageError
from tests.unit.bench.test_throughput_sweep import OPT_TINY, ROOT, figures
from tests.unit.tiers.test_under_way import until


def test_libraries_of_an_environment_are_read_outside_a_group(tmp_path: Path) -> None:
    """Once they are in the page cache a read of them does not wait."""
    library = tmp_path / "lib" / "python3" / "site-packages" / "a.so.1"
    library.parent.mkdir(parents=True)
    with library.open("wb") as file:
        file.write(bytes(2**23))
        os.fsync(file.fileno())
    drop_page_cache(library)
    with library.open("rb") as file:
        try:
            os.preadv(file.fileno(), [bytearray(1)], 2**22, os.RWF_NOWAIT)
            pytest.skip("this file system does not drop a page that it is told to")
        except BlockingIOError:
            pass
        except OSError as error:
            pytest.skip(f"no reads without waiting here: {error}")
        load_libraries(tmp_path / "bin" / "python")
        assert os.preadv(file.fileno(), [bytearray(1)], 2**22, os.RWF_NOWAIT) == 1


class _Timed:
    """`Sweep._measure` with a run that times out after whatever its limit is."""

    def __init__(self, path: Path, limit_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0

        def run(setup: Setup, *_: object) -> Line:
            self.calls += 1
            return {"status": TIMEOUT, "reason": "", "limit_s": setup.limit_s}

        monkeypatch.setattr(door, "measure", run)
        sweep = door.Sweep(Setup(Path(), Path(), 1, limit_s, 0.0), Store(path), 0)
        sweep._measure(SYSTEMS[0], Cell("m", 1, 2, "none", (1, 1)), Path(), 1, 0)


def test_what_a_limit_ended_is_tried_again_with_a_higher_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [
        _Timed(tmp_path / "lines.jsonl", limit, monkeypatch).calls
        for limit in (5.0, 5.0, 3.0, 9.0, 9.0)
    ]
    assert calls == [1, 0, 0, 1, 0]


CELL = "facebook/opt-125m,16,4,none,2,2"


@pytest.mark.parametrize(
    "flags",
    [
        ["--cell", "facebook/opt-125m,0,4,none,2,2"],
        ["--cell", "facebook/opt-125m,16,1,none,2,2"],
        ["--cell", "facebook/opt-125m,16,4,none,4,2"],
        ["--cell", "facebook/opt-125m,16,4,much,2,2"],
        ["--cell", "facebook/opt-125m,2046,4,none,2,2"],
        ["--cell", "nobody/none,16,4,none,2,2"],
        ["--cell", "facebook/opt-125m,16"],
        ["--systems", "ours-h2o", "--cell", CELL],
        ["--cell", "facebook/opt-125m,16,4,none,2,6"],
        ["--systems", "ours-h2o:2", "--cell", CELL],
        ["--systems", "ours-h2o:kv-budget=2", "--cell", CELL],
        ["--systems", "ours-h2o:kv-budget", "--cell", CELL],
        ["--limit", "0", "--cell", CELL],
        ["--quiet-wait", "-1", "--cell", CELL],
        ["--device-mem", "12XB", "--cell", CELL],
        ["--systems", "ours-full@0", "--cell", CELL],
        ["--systems", "ours@4", "--cell", CELL],
        ["--cell", "facebook/opt-125m:13,16,4,none,2,2"],
        ["--cell", "facebook/opt-125m:0,16,4,none,2,2"],
        ["--cell", "opt-tiny:1,16,4,none,2,2"],
        ["--systems", "accelerate-disk@2", "--cell", CELL],
        ["--name", "../x", "--cell", CELL],
    ],
)
def test_wrong_use_is_one_line_before_anything_runs(
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also where a cell before it is well."""
    monkeypatch.setattr(door, "measure", pytest.fail)
    well = [] if "--cell" not in flags or flags[-1] == CELL else ["--cell", CELL]
    monkeypatch.setattr(
        sys, "argv", ["sweep", *flags[:1], *well[1:], *flags[1:], "--results", str(tmp_path / "r")]
    )
    assert door.main() == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and flags[0] in said.err
    assert said.out == "" and not (tmp_path / "r").exists()


def test_the_model_of_several_cells_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To check cells before any of them runs, and for the weights of each."""
    read = []
    find = door.find_model
    monkeypatch.setattr(
        door, "find_model", lambda name, path: read.append(name) or find(name, path)
    )
    folder = tmp_path / "model"
    shutil.copytree(OPT_TINY, folder)
    args = door._parse(
        ["--cell", f"{folder},8,4,none,2,2", f"{folder},4,4,third,2,2", "--results", str(tmp_path)]
    )
    setup = Setup(tmp_path, tmp_path / "offload", 1, 5.0, 0.0)
    weights = {door._model_folder(cell.model, setup) for cell, _ in door._cells(args)}
    assert len(weights) == 1 and read == [str(folder)]


@pytest.mark.parametrize(
    ("script", "status", "reason"),
    [
        ("true", FAILED, "printed no figures"),
        ("printf '\\377\\n'", FAILED, "printed no figures"),
        ("echo '{\"tokens_per_s\": 1}'; echo why >&2", FAILED, "printed no figures; why"),
        ("kill -9 $$", DOES_NOT_FIT, "killed: no memory left"),
        ("sleep 60 & sleep 60", TIMEOUT, "not done after 2 s"),
    ],
)
def test_a_peer_that_breaks_is_a_line(
    script: str, status: str, reason: str, tmp_path: Path
) -> None:
    python = tmp_path / "peers" / "hf" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/bash\n{script}\n")
    python.chmod(0o755)
    setup = Setup(tmp_path / "peers", tmp_path, 1, 2.0 if status == TIMEOUT else 30.0, 0.0)
    line = measure(
        setup, System("hf", "sdpa", ("ram",)), Cell("m", 8, 4, "none", (1, 1)), OPT_TINY, 1
    )
    assert (line["status"], line["reason"]) == (status, reason)


def test_a_system_of_another_kind_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was asked for, and nothing else was."""
    monkeypatch.setattr(door, "measure", pytest.fail)
    asked = {"none": "accelerate-disk", "third": "hf-eager"}
    for budget, name in asked.items():
        flags = [
            "--cell",
            f"facebook/opt-125m,16,4,{budget},2,2",
            "--systems",
            name,
            "--results",
            str(tmp_path),
        ]
        monkeypatch.setattr(sys, "argv", ["sweep", *flags])
        assert door.main() == 2
    said = capsys.readouterr().err
    assert "--systems: accelerate-disk: it is for a budget" in said
    assert "--systems: hf-eager: it runs all in RAM only" in said


def test_half_an_environment_is_none(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "installed.txt").touch()
    why = Setup(tmp_path, tmp_path, 1, 1.0, 0.0).missing(System("hf", "sdpa", ("ram",)))
    assert why is not None and "bench/baselines/hf/setup.sh" in why


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        ([REFUSED, REFUSED], 0),
        ([FAILED, OK], 0),
        ([FAILED, REFUSED], 1),
        ([TIMEOUT, DOES_NOT_FIT], 1),
        ([DOES_NOT_FIT, REFUSED], 3),
    ],
)
def test_a_cell_without_a_figure_has_an_exit_code(
    statuses: list[str],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """That all refuse is an answer; a line says why there is none."""
    by_name = dict(zip(("ours-full", "ours-h2o:0.1"), statuses, strict=True))

    def run(setup: Setup, system: System, *_: object) -> Line:
        status = by_name[system.name]
        return figures(5.0) if status == OK else {"status": status, "reason": "why"}

    monkeypatch.setattr(door, "measure", run)
    monkeypatch.setattr(door, "_model_folder", lambda *_: tmp_path)
    monkeypatch.setattr(door, "_show", lambda *_: None)
    flags = ["--cell", CELL, "--repeats", "0", "--results", str(tmp_path), "--systems", *by_name]
    monkeypatch.setattr(sys, "argv", ["sweep", *flags])
    assert door.main() == code
    said = capsys.readouterr().err
    assert said.count("\n") == bool(code) and ("no figure; ours-full: " in said) == bool(code)


@pytest.mark.parametrize(("seconds", "rounds"), [(100.0, 3), (32.0, 2), (0.0, 1)])
def test_rows_that_are_given_are_not_searched_for(
    seconds: float, rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds in turn, the order turned each time, of what gave a figure in the first; none is begun
    that would take longer than there is time."""
    now = [0.0]
    seen = list[tuple[str, int]]()

    def run(setup: Setup, system: System, cell: Cell, folder: Path, rows: int) -> Line:
        now[0] += 5.0
        seen.append((system.name, rows))
        return {"status": FAILED, "reason": "why"} if rows == 9 else figures(5.0)

    monkeypatch.setattr(door, "measure", run)
    monkeypatch.setattr(door, "_model_folder", lambda *_: tmp_path)
    monkeypatch.setattr(door, "time", SimpleNamespace(monotonic=lambda: now[0]))
    flags = ["--cell", CELL, "--repeats", "3", "--time", str(seconds), "--results", str(tmp_path)]
    systems = ["ours-full@12", "ours-full-4bit@9", "ours-h2o:0.1@7"]
    monkeypatch.setattr(sys, "argv", ["sweep", *flags, "--systems", *systems])
    assert door.main() == 0
    first = [("ours-full", 12), ("ours-full-4bit", 9), ("ours-h2o:0.1", 7)]
    others = [first[0], first[2]]
    assert seen == [*first, *others[::-1], *others][: 1 + 2 * rounds]
    assert "**5.00** (5.00 - 5.00)" in (tmp_path / "throughput.md").read_text()


def test_what_was_carried_along_is_found_by_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer has an environment of its own."""
    monkeypatch.setenv("PYTHONPATH", "/tmp/site")
    setup = Setup(Path(), Path(), 1, 1.0, 0.0)
    ours, peer = (
        environment_of(setup, system)[0] for system in (SYSTEMS[0], System("hf", "sdpa", ("ram",)))
    )
    assert (
        ours["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "/tmp/site"]
        and "PYTHONPATH" not in peer
    )


def test_settings_of_peers_are_those_of_the_machine_or_of_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(tmp_path, tmp_path / "offload", 1, 5.0, 0.0)
    cell = Cell("m", 8, 4, "none", (1, 1))

    def settings(peer: str, cpu: str) -> dict[str, int] | None:
        monkeypatch.setattr("bench.sweep.runner.cpu_name", lambda: cpu)
        command = command_of(setup, System(peer, "x", ("ram",)), cell, tmp_path, 1, None)
        return (
            json.loads(command[command.index("--settings") + 1])
            if "--settings" in command
            else None
        )

    assert settings("hf", "AMD EPYC (25/1) with AVX2") == {"max_autotune": 1}
    assert settings("hf", "AMD EPYC (25/17) with AVX-512") == {"cpp_wrapper": 1}
    assert setup.settings("llamacpp") == {}  # tuned there, too: its defaults are best
    assert settings("openvino", "Intel (6/207) with AMX") == {"group": 0}
    assert (
        settings("hf", "Intel (6/63)")
        is settings("ctranslate2", "AMD EPYC (25/1) with AVX2")
        is None
    )
    assert (
        replace(setup, device="cuda").settings("hf") == {}
    )  # what is best on a CPU says nothing of a card
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/settings.json").write_text('{"freezing": 0}\n')  # as tune.py writes it
    assert settings("hf", "AMD EPYC (25/1) with AVX2") == settings("hf", "Intel") == {"freezing": 0}
    (tmp_path / "hf/settings.json").write_text("[1]")
    with pytest.raises(UsageError, match=r"hf/settings\.json: not a JSON object of .*; remove it"):
        settings("hf", "Intel")


def test_a_peer_that_was_not_tuned_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    setup = Setup(tmp_path, tmp_path / "offload", 1, 5.0, 0.0)
    cell = Cell(str(OPT_TINY), 8, 4, "none", (1, 1))
    systems = tuple(System(peer, "x", ("ram",)) for peer in ("hf", "openvino", "ctranslate2"))
    monkeypatch.setattr(Setup, "missing", lambda self, system: None)
    monkeypatch.setattr(door, "search", lambda measure, first, last: [])  # no peer is run
    monkeypatch.setattr(door, "_without_figure", lambda cell, tried: 0)
    sweep = door.Sweep(setup, door.Store(tmp_path / "lines.jsonl"), 1)

    def named(cpu: str) -> list[str]:
        monkeypatch.setattr("bench.sweep.runner.cpu_name", lambda: cpu)
        assert sweep.cell(cell, systems) == 0
        return [
            line.partition(":")[0]
            for line in capsys.readouterr().out.splitlines()
            if "not tuned" in line
        ]

    assert named("Intel (6/63)") == ["hf", "openvino"]
    assert named("AMD EPYC (25/1) with AVX2") == named("Intel (6/207) with AMX") == []
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/settings.json").write_text('{"freezing": 0}')
    assert named("Intel (6/63)") == ["openvino"]


def test_a_dtype_is_that_of_weights_commands_and_files(tmp_path: Path) -> None:
    asked = ["--cell", CELL]
    names = [
        door._parse([*asked, *flags]).name
        for flags in ([], ["--dtype", "fp16"], ["--dtype", "fp32"])
    ]
    assert names == ["throughput", "throughput-fp16", "throughput-fp32"]
    setup = replace(Setup(tmp_path, tmp_path / "offload", 1, 5.0, 0.0), dtype="fp16")
    folder = door._model_folder(str(OPT_TINY), setup)
    assert "-float16-" in folder.name
    command = command_of(setup, SYSTEMS[0], Cell("m", 8, 4, "none", (1, 1)), folder, 1, None)
    assert command[command.index("--dtype") + 1] == "fp16"
    own = System(
        "hf", "sdpa", ("ram",), dtype="fp32"
    )  # computes in another dtype than the files have
    command = command_of(setup, own, Cell("m", 8, 4, "none", (1, 1)), folder, 1, None)
    assert command[command.index("--dtype") + 1] == "fp32" and command[
        command.index("--model-dir") + 1
    ] == str(folder)


def test_what_a_sweep_has_started_ends_with_it(tmp_path: Path) -> None:
    """Also where SIGKILL ends it: nothing runs beside the same sweep, begun again."""
    file = tmp_path / "pid"
    code = (
        f"from bench.common import run_limited; run_limited(['sh', '-c', 'echo $$ > {file}; "
        "exec sleep 60'], {}, 60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}
    ) as sweep:
        while not (file.exists() and file.read_text().endswith("\n")):
            assert sweep.poll() is None
            time.sleep(0.01)
        sweep.kill()
    started = Path("/proc") / file.read_text().strip() / "cmdline"
    until(lambda: not started.exists() or not started.read_bytes())  # a zombie has no command line

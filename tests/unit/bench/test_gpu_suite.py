"""The GPU suite: steps under limits, going on where it was stopped, the report; and the sweep's
device tier."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[3] / "bench" / "baselines"))

from contract import CARD_SLACK, RefusedError, hold_card, is_out_of_card_memory

from bench.gpu import __main__ as door
from bench.gpu import runner
from bench.gpu.gates import gates
from bench.gpu.kernels import DECODED
from bench.gpu.launches import SWEEPS, counts
from bench.gpu.report import kernel_texts, run_texts, write_report
from bench.gpu.runner import CUT, DOES_NOT_FIT, DONE, FAILED, REFUSED, TIMEOUT, Suite
from bench.gpu.steps import CALLS, Setting, Step, all_steps, tiny_setting
from bench.sweep.grid import SYSTEMS
from bench.sweep.runner import Setup
from bench.sweep.store import Store
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.planner.profile import NOMINAL
from tests.unit.bench.test_throughput_sweep import figures, key

ROOT = Path(__file__).resolve().parents[3]
OURS = SYSTEMS[0]
PEER = next(system for system in SYSTEMS if system.name == "accelerate-cpu")


def step(
    name: str, code: str, tmp_path: Path, limit: float = 30.0, kind: str = "placement"
) -> Step:
    return Step(name, kind, (sys.executable, "-c", code), limit, tmp_path / f"{name}.json")


def run(steps: list[Step], results: Path, limit: float = 60.0, **other: Any) -> dict[str, str]:
    suite = Suite(results, limit, **other)
    suite.run(steps, lambda state: None)
    return {name: found["status"] for name, found in suite.state.items()}


def exit_with(code: int, said: str = "") -> str:
    return f"import sys; print({said!r}, file=sys.stderr); sys.exit({code})"


def test_a_step_ends_as_its_exit_code_says(tmp_path: Path) -> None:
    steps = [step(str(code), exit_with(code, "why not"), tmp_path) for code in (0, 1, 2, 3)]
    steps.append(
        step("tests", exit_with(2), tmp_path, kind="tests")
    )  # of tests every code is a failure
    ends = {"0": DONE, "1": FAILED, "2": REFUSED, "3": DOES_NOT_FIT, "tests": FAILED}
    assert run(steps, tmp_path, copy_to=tmp_path / "out") == ends
    assert json.loads((tmp_path / "out" / "steps.json").read_text())["0"]["status"] == DONE
    state = json.loads((tmp_path / "steps.json").read_text())
    assert state["3"]["reason"] == "why not"
    assert state["0"]["reason"] == ""


def test_the_next_call_goes_on(tmp_path: Path) -> None:
    """Finished steps are kept, what failed is tried once more, a refusal every time."""
    count = (
        "import pathlib, sys; p = pathlib.Path({0!r}); p.write_text(p.read_text() + 'x' if "
        "p.exists() else 'x')"
    )
    files = {code: tmp_path / f"count{code}" for code in (0, 1, 2, 3)}
    steps = [
        step(str(c), f"{count.format(str(p))}; sys.exit({c})", tmp_path) for c, p in files.items()
    ]
    for _ in range(4):
        run(steps, tmp_path)
    assert [len(p.read_text()) for p in files.values()] == [1, runner.MAX_ATTEMPTS, 4, 1]
    run(steps[:1], tmp_path, again=True)
    assert len(files[0].read_text()) == 2


def _is_running(pid: int) -> bool:
    """Is there such a process, and is it not one that is dead and only waits to be forgotten by its
    parent?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_step_that_takes_too_long_is_ended_with_what_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = (
        f"import subprocess; p = subprocess.Popen(['sleep', '60']); open({str(pid)!r}, "
        "'w').write(str(p.pid)); p.wait()"
    )
    assert run([step("slow", code, tmp_path, limit=2.0)], tmp_path) == {"slow": TIMEOUT}
    assert not _is_running(int(pid.read_text()))


def test_the_suite_keeps_its_own_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that the suite's end cuts has not failed; one that could not begin is not there."""
    monkeypatch.setattr(runner, "MIN_S", 0.5)
    steps = [step("cut", "import time; time.sleep(60)", tmp_path), step("late", "", tmp_path)]
    assert run(steps, tmp_path, limit=1.0) == {"cut": CUT}
    assert json.loads((tmp_path / "steps.json").read_text())["cut"]["attempts"] == 0


@pytest.mark.parametrize(
    "state", ['{"auto": ', "[1]", '{"auto": 1}', '{"auto": {"status": "done"}}']
)
def test_a_state_that_is_none_is_named(state: str, tmp_path: Path) -> None:
    (tmp_path / "steps.json").write_text(state)
    with pytest.raises(UsageError, match=r"steps\.json: is (damaged|not what the suite keeps)"):
        run([], tmp_path)
    assert run([], tmp_path, again=True) == {}


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    tiny = ["--tiny", "--results", str(tmp_path / "r")]
    for flags in (["--limit", "0"], ["--only", "nothing"]):
        with pytest.raises(UsageError, match=flags[0]):
            door._run([*tiny, *flags])
    if not torch.cuda.is_available():
        with pytest.raises(
            UsageError, match="no CUDA device is usable here; --tiny runs the same steps on the CPU"
        ):
            door._run(tiny[1:])
    assert not (tmp_path / "r").exists()


def test_results_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--results .*file: cannot be written to"):
        run([], tmp_path / "file")
    with pytest.raises(UsageError, match=r"OUT .*file: cannot be written to"):
        run([], tmp_path / "results", copy_to=tmp_path / "file")


def test_what_was_killed_while_it_wrote_is_left_out(tmp_path: Path) -> None:
    setting = tiny_setting(tmp_path, tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "auto.json").write_text('{"exit_code": ')
    (tmp_path / "parity-tests.xml").write_text("<testsuites><testsuite tests=")
    write_report(setting, all_steps(setting), {})
    text = (tmp_path / "gpu_suite.md").read_text()
    assert (
        "parity-tests:" not in text
        and json.loads((tmp_path / "gpu_suite.json").read_text())["runs"] == {}
    )


@pytest.mark.parametrize("content", ["null", '{"report": {"gen_len": 4}, "card": null}'])
def test_what_no_placement_has_left_is_named(content: str, tmp_path: Path) -> None:
    """Before the first step runs: the suite reports first."""
    setting = tiny_setting(tmp_path, tmp_path)
    ran = tmp_path / "ran"
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "auto.json").write_text(content)
    only = step("one", f"open({str(ran)!r}, 'w')", tmp_path)
    report = partial(write_report, setting, all_steps(setting))
    with pytest.raises(
        UsageError, match=r"auto\.json: is not what a placement leaves .*; remove it"
    ):
        Suite(tmp_path, 60.0).run([only], report)
    assert not ran.exists()


def test_steps_are_in_order_of_worth_and_the_same_when_tiny(tmp_path: Path) -> None:
    full = all_steps(Setting(False, tmp_path, tmp_path))
    tiny = all_steps(tiny_setting(tmp_path, tmp_path))
    assert [s.name for s in full][:3] == ["parity-tests", "kernel-tests", "kernels"]
    assert len({s.name for s in full}) == len(full)
    assert [s.name for s in full if s.kind == "placement"] == [
        s.name for s in tiny if s.kind == "placement"
    ]
    modules = {s.command[s.command.index("-m") + 1] for s in full}
    assert all(find_spec(name) is not None for name in modules), modules
    for steps, device in ((full, "cuda"), (tiny, "cpu")):
        for command in (s.command for s in steps if s.kind != "tests" and s.name != "weights"):
            assert command[command.index("--device") + 1] == device
    shapes = [s.name for s in full if s.name.startswith("table")]
    assert shapes == [
        f"table {size} 512+{gen}" for size in ("6.7b", "30b") for gen in (32, 512, 1024)
    ]


def test_a_small_card_gives_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A T4 has less than 15 GiB, and no tensor cores for bfloat16."""
    card = MagicMock()
    card.free_bytes.return_value = 14 * 2**30
    card.compute_dtype.return_value = "float16"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(door, "open_device", lambda *_, **__: card)
    setting = door._card_setting(tmp_path, tmp_path)
    assert (setting.device_mem, setting.dtype) == ("12GiB", "float16")
    commands = [step.command for step in all_steps(setting)]
    assert not any("bfloat16" in command or "15GiB" in command for command in commands)


def test_the_report_tells_what_is_there(tmp_path: Path) -> None:
    """Also before anything has run, and of runs that gave no figures."""
    setting = tiny_setting(tmp_path, tmp_path)
    steps = all_steps(setting)
    write_report(setting, steps, {})
    assert "| auto | left out |" in (tmp_path / "gpu_suite.md").read_text()
    failed = {"exit_code": 3, "report": None, "card": None}
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "auto.json").write_text(json.dumps(failed))
    write_report(
        setting, steps, {"auto": {"status": DOES_NOT_FIT, "seconds": 3.0, "reason": "a | b"}}
    )
    text = (tmp_path / "gpu_suite.md").read_text()
    assert "| auto | does_not_fit | 3 | a / b |" in text
    assert "| auto | exit code 3 |" in text
    assert run_texts("auto", failed)[:2] == ["auto", "exit code 3"]


def test_the_report_has_one_title_and_names_placements_of_another_model(tmp_path: Path) -> None:
    """The sweep's page is a part of it; the tiny suite has one model."""
    Store(tmp_path / "table.jsonl").add(key(), figures(5.0))
    said = []
    for setting in (Setting(False, tmp_path, tmp_path), tiny_setting(tmp_path, tmp_path)):
        write_report(setting, all_steps(setting), {})
        lines = (tmp_path / "gpu_suite.md").read_text().splitlines()
        heads = [line for line in lines if line.startswith("#")]
        assert [head for head in heads if head.startswith("# ")] == heads[:1]
        assert heads[-2] == "## Throughput" and heads[-1].startswith("### facebook/opt-125m")
        said.append(next(line for line in lines if line.startswith(setting.model)))
    assert said == [
        "facebook/opt-6.7b, 512 + 32 tokens, bfloat16; opt-30b-4bit: facebook/opt-30b.",
        "facebook/opt-125m, 32 + 8 tokens, bfloat16.",
    ]


@pytest.mark.parametrize(
    ("device", "flags"), [("cpu", []), ("cuda", ["--device", "cuda", "--device-mem", "7"])]
)
def test_a_device_tier_of_ram_is_for_ours_only(device: str, flags: list[str]) -> None:
    setup = Setup(Path(), Path(), 1, 1.0, 1.0, device, 7)
    assert setup.device_flags(PEER) == flags
    assert setup.device_flags(OURS) == ["--device", device, "--device-mem", "7"]
    assert setup.ram(100) == (107 if device == "cpu" else 100)
    assert setup.ram(None) is None
    assert replace(setup, device_mem=None).device_flags(OURS) == ["--device", device]


def card(usable: bool, total: int) -> Any:
    """torch, on a machine with or without a card."""
    found = MagicMock()
    found.cuda.is_available.return_value = usable
    found.cuda.get_device_properties.return_value.total_memory = total
    return found


def test_every_system_is_held_to_the_same_share_of_the_card() -> None:
    limited = card(True, 100 * 2**30)
    total = 100 * 2**30
    hold_card(limited, 15 * 2**30)
    limited.cuda.set_per_process_memory_fraction.assert_called_once_with(
        (15 * 2**30 + CARD_SLACK) / total
    )
    whole = card(True, total)
    hold_card(whole, None)
    whole.cuda.set_per_process_memory_fraction.assert_not_called()
    with pytest.raises(RefusedError):
        hold_card(card(False, total), None)


def test_out_of_memory_is_seen_through_other_errors() -> None:
    class OutOfMemoryError(RuntimeError): ...

    outer = RuntimeError("a layer failed")
    outer.__cause__ = OutOfMemoryError()
    assert is_out_of_card_memory(outer)
    assert is_out_of_card_memory(OutOfMemoryError())
    assert not is_out_of_card_memory(RuntimeError())


@pytest.mark.slow
def test_the_tiny_suite_runs(tmp_path: Path) -> None:
    flags = [
        "--tiny",
        "--results",
        tmp_path / "r",
        "--offload-dir",
        tmp_path / "weights",
        "--limit",
        "1200",
    ]
    command = ["bash", str(ROOT / "scripts/gpu_suite.sh"), *map(str, flags)]
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    whole = json.loads((tmp_path / "r" / "gpu_suite.json").read_text())
    statuses = {name: found["status"] for name, found in whole["steps"].items()}
    assert set(statuses.values()) == {DONE}
    assert {
        line["status"] for line in whole["table"] if line["system"] in ("ours-full", "ours-h2o:0.1")
    } == {"ok"}
    assert "| auto | done |" in (tmp_path / "r" / "gpu_suite.md").read_text()


def test_a_call_has_steps_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--tiny", "--results", str(tmp_path / "r"), "--list"]
    found = []
    for call in CALLS:
        assert door._run([*flags, "--call", str(call)]) == 0
        found.append(capsys.readouterr().out.splitlines())
        assert all(f"(call {call}: {CALLS[call]})" in line for line in found[-1])
    whole = [step for step in all_steps(tiny_setting(tmp_path, tmp_path)) if step.call]
    assert [len(lines) for lines in found] == [
        sum(step.call == call for step in whole) for call in CALLS
    ]
    assert all(found)
    with pytest.raises(UsageError, match="--only table: no step of --call 1 has such a name"):
        door._run(["--tiny", "--results", str(tmp_path / "r"), "--call", "1", "--only", "table"])


def event(
    name: str, category: str, start: float, seconds: float, thread: int = 1
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": 1e6 * start,
        "dur": 1e6 * seconds,
        "tid": thread,
    }


def test_launches_and_waits_of_a_trace() -> None:
    """Of the thread that computes, while sweeps are watched; and how long no kernel runs."""
    events = [
        {"ph": "M", "name": "process_name"},
        event(SWEEPS, "user_annotation", 10, 8),
        event("cudaLaunchKernel", "cuda_runtime", 9, 1),  # before
        event("cudaLaunchKernel", "cuda_runtime", 10, 0.1),
        event("cuLaunchKernelEx", "cuda_driver", 11, 0.1),
        event("cudaMemcpyAsync", "cuda_runtime", 12, 0.1),
        event("cudaEventQuery", "cuda_runtime", 12, 0.1),
        event("cudaStreamSynchronize", "cuda_runtime", 13, 0.1),
        event("cudaStreamSynchronize", "cuda_runtime", 13, 0.1, thread=2),  # a worker's
        event("cudaLaunchKernel", "cuda_runtime", 13, 0.1, thread=2),
        event("a", "kernel", 10, 2, thread=7),
        event("b", "kernel", 11, 3, thread=8),
        event("c", "kernel", 17, 5, thread=7),
        event("copy", "gpu_memcpy", 14, 3, thread=9),
    ]
    found = counts(events, steps=2)
    assert found == {
        "launches": 1.5,
        "syncs": 0.5,
        "seconds": 4.0,
        "idle share": pytest.approx(3 / 8),
    }


def test_gates_are_met_missed_or_not_measured() -> None:
    assert {verdict for *_, verdict in gates({}, {})} == {"not measured"}
    report = {
        "model_bytes": 80,
        "gen_len": 3,
        "decode": {"seconds": 2.0},
        "total": {"seconds": 10.0},
        "predicted": {"prefill_s": 4.0, "decode_s": 7.0},
        "extra": {"profile": "measured"},
    }
    runs = {"weights-on-host": {"report": report}, "auto": {"report": None}}
    kernels = [
        ("unpack, 4 bits", 0.9),
        ("unpack, 8 bits", 0.65),
        ("decode, OPT", 0.7),
        ("gate", 0.1),
    ]
    figures = {
        "kernels": {
            "kernels": [{"kernel": name, "share_of_copy": share} for name, share in kernels]
        },
        "launches-opt": {"counts": {"launches": 12.5, "syncs": 0.0}, "rates": {"h2d": 100}},
    }
    found = {name: (text, verdict) for name, text, _, verdict in gates(runs, figures)}
    assert found == {
        "launches-opt: launches a block": ("12.50", "MISSED"),
        "launches-opt: waits a block": ("0.00", "met"),
        "unpack: least share of a copy's bandwidth": ("0.65", "MISSED"),
        "decode: least share of a copy's bandwidth": ("0.70", "met"),
        "link: share of time in which it is busy": ("0.80", "MISSED"),
        "prediction: largest error of a run": ("0.10", "met"),
    }
    unknown = {"predicted": {"decode_s": None}}
    guessed = {"extra": {"profile": NOMINAL}}
    for other in (unknown, guessed):
        given = {"weights-on-host": {"report": report | other}}
        verdicts = {name: verdict for name, _, _, verdict in gates(given, figures)}
        assert verdicts["prediction: largest error of a run"] == "not measured"


def test_kernels_have_cases_where_there_is_no_card(tmp_path: Path) -> None:
    """In small, by references: what the cases build is what kernels take."""
    output = tmp_path / "kernels.json"
    command = [
        sys.executable,
        "-m",
        "bench.gpu.kernels",
        "--device",
        "cpu",
        "--quiet-wait",
        "0",
        "--output",
        output,
    ]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    found = json.loads(output.read_text())
    assert found["rates"] == {} and all(case["bytes"] > 0 for case in found["kernels"])
    kinds = {"unpack", "decode", "column sums", "gate", "experts"}
    assert {case["kernel"].split(",")[0] for case in found["kernels"]} >= kinds
    names = {case["kernel"] for case in found["kernels"]}
    products = {name for name in names if name.startswith("product") and not name.endswith(DECODED)}
    assert len(products) == 6 and {name + DECODED for name in products} <= names


def test_products_stand_beside_decoding_first() -> None:
    name = "product, 4 bits, 1 rows"
    timed = {name: 2e-6, name + DECODED: 6e-6, "gate": 5e-6}
    more = {"share_of_copy": 0.5, "issue_seconds": 4e-6}
    found = [{"kernel": kernel, "seconds": s, **more} for kernel, s in timed.items()]
    texts = kernel_texts([*found, {"kernel": "RMS norm", "bytes": 3}])
    assert texts == [[name, "2", "0.50", "4", "6", "3.00"], ["gate", "5", "0.50", "4", "", ""]]

"""The GPU suite: steps under limits, going on where it was stopped, and the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "bench" / "baselines"))


from bench.gpu.gates import gates
from bench.gpu.kernels import DECODED
from bench.gpu.report import write_report
from bench.gpu.runner import DOES_NOT_FIT, DONE, FAILED, REFUSED, TIMEOUT, Suite
from bench.gpu.steps import Step, all_steps, tiny_setting
from flexgen_h2o.planner.profile import NOMINAL

ROOT = Path(__file__).resolve().parents[3]


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
    """Finished steps are kept, all others tried again."""
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
    assert [len(p.read_text()) for p in files.values()] == [1, 4, 4, 1]
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


@pytest.mark.slow
def test_the_tiny_suite_runs(tmp_path: Path) -> None:
    flags = f"--tiny --results {tmp_path}/r --offload-dir {tmp_path}/weights --limit 1200"
    command = ["bash", str(ROOT / "scripts/gpu_suite.sh"), *flags.split()]
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    whole = json.loads((tmp_path / "r" / "gpu_suite.json").read_text())
    statuses = {name: found["status"] for name, found in whole["steps"].items()}
    assert set(statuses.values()) == {DONE}
    assert "| auto | done |" in (tmp_path / "r" / "gpu_suite.md").read_text()


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


@pytest.mark.slow
def test_kernels_have_cases_where_there_is_no_card(tmp_path: Path) -> None:
    """In small, by references: what the cases build is what kernels take."""
    output = tmp_path / "kernels.json"
    flags = f"-m bench.gpu.kernels --device cpu --quiet-wait 0 --output {output}"
    command = [sys.executable, *flags.split()]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    found = json.loads(output.read_text())
    assert found["rates"] == {} and all(case["bytes"] > 0 for case in found["kernels"])
    kinds = {"unpack", "decode", "column sums", "gate", "experts"}
    assert {case["kernel"].split(",")[0] for case in found["kernels"]} >= kinds
    names = {case["kernel"] for case in found["kernels"]}
    products = {name for name in names if name.startswith("product") and not name.endswith(DECODED)}
    assert len(products) == 6 and {name + DECODED for name in products} <= names

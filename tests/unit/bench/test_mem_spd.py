"""MiniKV's grid: rows for what ran and what did not, nothing measured twice, and its columns from ours."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "bench" / "baselines"))

from contract import phases

from bench.sweep import mem_spd
from bench.sweep.store import DOES_NOT_FIT, FAILED, OK, Line
from flexgen_h2o.core.errors import UsageError
from tests.extras import needs
from tests.unit.bench.test_throughput_sweep import OPT_TINY

GRID = "--model {} --batch 1 4 --prompt-len 16 2000 --gen-len 8 --policies full h2o-4bit:0.25 --repeats 2"


class Measured:
    """In place of a process: a batch of 4 does not fit, and every second run takes twice as long."""

    def __init__(self, fails: str = DOES_NOT_FIT) -> None:
        self.calls, self.fails = 0, fails

    def __call__(self, setup: Any, system: Any, cell: Any, folder: Path, rows: int) -> Line:
        self.calls += 1
        assert folder == OPT_TINY and cell.rows == (rows, rows)
        if rows == 4:
            return {"status": self.fails, "reason": "needs more, or less", "others": 0.0}
        memory = {"peak_rss_bytes": 2**29, "read_bytes": 0, "others": 0.25, "budget_bytes": None}
        setting = {
            "peak_bytes": {"device": 0, "host": 2**28, "disk": 5},
            "kv": {"slots": 9, "bytes": 10, "full_bytes": 20},
        }
        scale = 2 if self.calls % 2 == 0 else 1
        return {"status": OK, "setting": setting, **memory, **phases(rows, 8, 0.5 * scale, 1.5 * scale)}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def call(flags: str, measured: Measured) -> tuple[int, list[dict[str, str]]]:
        monkeypatch.setattr(mem_spd, "measure", measured)
        output = tmp_path / "m.csv"
        words = [*flags.format(OPT_TINY).split(), "--output", str(output), "--offload-dir", str(tmp_path / "o")]
        monkeypatch.setattr(sys, "argv", ["mem_spd.py", *words])
        code = mem_spd.main()
        return code, list(csv.DictReader(output.open()))

    return call


def test_every_shape_is_a_row_whether_it_ran_or_not(run: Any) -> None:
    measured = Measured()
    code, rows = run(GRID, measured)
    assert code == 0 and len(rows) == 8
    ran, too_much, too_long = rows[0], rows[2], rows[4]
    assert (ran["strategy"], ran["batch_size"], ran["prompt_length"], ran["output_length"]) == ("full", "1", "16", "8")
    assert ran["OOM"] == "False" and ran["repeats"] == "2" and ran["quantization"] == "none"
    assert float(ran["latency_mean"]) == 3 and float(ran["latency_min"]) == 2 and float(ran["latency_Q3"]) == 3.5
    assert float(ran["tokens/second"]) == 8 and float(ran["generated_tokens_per_s"]) == pytest.approx(8 / 3, rel=1e-4)
    assert float(ran["peak_mem_usage_max"]) == 0.5 and float(ran["peak_mem_reserved_mean"]) == 0.25
    assert (ran["kv_bytes"], ran["kv_full_bytes"], ran["peak_disk_bytes"]) == ("10", "20", "5")
    assert (rows[1]["strategy"], rows[1]["quantization"], rows[1]["ratio"]) == ("h2o", "4bit", "0.25")
    assert (too_much["OOM"], too_much["latency_mean"], too_much["reason"]) == ("True", "", "needs more, or less")
    assert (too_long["OOM"], too_long["status"]) == ("False", "refused") and "positions" in too_long["reason"]
    assert measured.calls == 8, "what has no positions starts no process"


def test_a_grid_goes_on_where_it_stopped(run: Any) -> None:
    first, again, anew = Measured(), Measured(), Measured()
    _, before = run(GRID.replace("1 4", "1"), first)
    _, after = run(GRID, again)
    assert (first.calls, again.calls) == (4, 4), "the batch of 1 is kept"
    assert [row for row in after if row["batch_size"] == "1"] == before
    run(GRID + " --again", anew)
    assert anew.calls == 8


def test_a_failure_is_told_by_the_exit_code(run: Any) -> None:
    assert run(GRID, Measured(FAILED))[0] == 1


@needs("plot")
def test_the_picture_has_all_benchmarks(run: Any, tmp_path: Path) -> None:
    """Those too that did not fit, failed or were refused, with the reason."""
    for measured, why in ((Measured(), "does not fit"), (Measured(FAILED), "failed")):
        run(GRID + f" --plot {tmp_path}/m.svg --again", measured)
        picture = (tmp_path / "m.svg").read_text()
        for shape in ("1 x (16 + 8)", "4 x (16 + 8)", "1 x (2000 + 8)", "4 x (2000 + 8)"):
            assert picture.count(f"<!-- {shape} -->") == 2, "below both axes"
        # two policies, in each of two parts of the picture
        assert picture.count(f"<!-- {why} -->") == 4 and picture.count("<!-- too few positions -->") == 8


@needs("plot")
def test_the_picture_is_drawn_also_where_nothing_ran(run: Any, tmp_path: Path) -> None:
    for batches, measured in (("1", Measured()), ("4", Measured())):
        run(GRID.replace("1 4", batches) + f" --plot {tmp_path}/m{batches}.png --again", measured)
        assert (tmp_path / f"m{batches}.png").stat().st_size > 5000


def test_shapes_as_mem_spd_test_takes_them(run: Any) -> None:
    _, rows = run("--model {} --batch_prompt_output [(1,128,16),(2,64,8)] --ratio 0.1", Measured())
    assert [(r["batch_size"], r["prompt_length"], r["output_length"]) for r in rows] == [
        ("1", "128", "16"),
        ("2", "64", "8"),
    ]
    assert {(row["strategy"], row["ratio"]) for row in rows} == {("h2o", "0.1")}
    for text in ("", "[]", "1", "[(1,2,1)]", "[(0,2,2)]", "[(1,2,'x')]", "__import__('os')"):
        with pytest.raises(UsageError, match="--batch_prompt_output"):
            mem_spd._listed(text)


def test_the_shapes_of_minikv_are_all_there() -> None:
    assert len(mem_spd.MINIKV) == 18 and (32, 2048, 1024) in mem_spd.MINIKV and (1, 1024, 65536) in mem_spd.MINIKV

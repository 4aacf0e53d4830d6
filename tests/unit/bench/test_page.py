"""What README, the Results page and the pages beside the lines make of stored lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.sweep import page, rounds, tables
from bench.sweep.grid import SIGNED, System, systems_of
from bench.sweep.rounds import DISK, found_of
from bench.sweep.store import FAILED, Store
from flexgen_h2o.core.errors import UsageError
from tests.unit.bench.test_signed_grid import CELL, OURS, PEER, STEADY, Sweep
from tests.unit.bench.test_throughput_sweep import figures


def test_ratios_are_of_one_round_and_losses_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "signed.jsonl"
    sweep = Sweep(path, {OURS.name: 2.0, PEER.name: 4.0, tables.MIX: 8.0})
    mix = next(system for system in systems_of("signed", CELL) if system.name == tables.MIX)
    sweep.run(OURS, PEER, mix)
    lines = list(sweep.store.lines)
    for line in lines[:3]:
        line["tokens_per_s"] *= 10  # a fast hour: of this round alone
    found = found_of(CELL, lines)
    assert found.ratios(tables.FULL) == pytest.approx([0.5] * 3, rel=0.01)
    assert found.ratios(tables.MIX, "accelerate") == pytest.approx([2.0] * 3, rel=0.01)
    assert not found.ratios(tables.H2O)
    assert tables.slower([found]).count("\n- ") == 0 and "of `accelerate-disk`" in tables.slower(
        [found]
    )
    failed = {"status": FAILED, "reason": "a | b", "cpu": "Xeon"}
    sweep.store.add(rounds.key_of(CELL, System("deepspeed", "nvme", ()), 16, 0), failed)
    text = page.made(tmp_path)[1]["signed.md"]
    assert (
        "| `accelerate-disk` (fastest other) | 8, no others tried | 4" in text
        and "failed: a / b" in text
    )
    assert "not run yet: `ours-h2o:kv-budget=0.2`" in text and "ran in a memory cgroup" in text
    assert "1 of 23 benchmarks have been run" in text and "‡" not in text


def test_like_is_compared_with_like(tmp_path: Path) -> None:
    path = tmp_path / "signed.jsonl"
    cell = SIGNED["signed-opt-1.3b-none"][1]
    speeds = {"ours-full": 4.0, "ours-full-int8": 6.0, "vllm-bf16": 2.0, "ctranslate2-int8": 8.0}
    systems = [System(*name.split("-", 1), ("ram",)) for name in speeds]
    Sweep(path, speeds).rounds.run(cell, [(system, 8) for system in systems], 1)
    lines = page.made(tmp_path)[0]["classes"].splitlines()[2:]
    assert [line.split(" | ")[2] for line in lines] == ["1", "0", "0"]  # 16 bits; 8 bits; any
    assert [line.split(" | ")[3][:3] for line in lines] == ["2.0", "0.7", "0.5"]


def test_a_cell_names_its_machine(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "signed.jsonl", {OURS.name: 2.0}, [STEADY, STEADY | {DISK: 2.2e9}] * 3)
    sweep.run(OURS, count=3)
    found = found_of(CELL, sweep.store.lines)
    head, _, row = tables.machines([found]).splitlines()
    assert head.count("|") == row.count("|") and f"| {found.title} | Xeon | 1 (1 - 1) |" in row
    assert "| 2.1 (2 - 2.2) |" in row and "## The machines" in tables.details([found], [], "signed")
    for line in sweep.store.lines:  # from before the name was kept
        del line["cpu"]
    assert "| not recorded |" in tables.machines([found_of(CELL, sweep.store.lines)])


def test_a_cell_is_of_one_machine(tmp_path: Path) -> None:
    """On another one all is measured again, and shown once it has as many rounds."""
    path = tmp_path / "signed.jsonl"
    speeds = {OURS.name: 2.0, PEER.name: 1.0}
    sweep = Sweep(path, speeds)
    key = rounds.key_of(CELL, PEER, 8, 0)
    sweep.store.add(key, figures(1.0) | {"cpu": "Xeon"})
    sweep.run(OURS, PEER, count=2)
    for count, shown in ((1, 2.0), (2, 6.0)):
        other = Sweep(path, {OURS.name: 6.0, PEER.name: 1.0}, cpu="EPYC")
        assert other.store.find(key) is None and len(other.run(OURS, PEER, count=count)) == 2
        found = found_of(CELL, Store(path).lines)
        assert found.entries[OURS.name].median("tokens_per_s") == pytest.approx(shown, rel=0.01)
        assert ("Xeon" in tables.machines([found])) != ("EPYC" in tables.machines([found]))
    assert Sweep(path, speeds).store.find(key) is not None and not Sweep(path, {}).run(
        OURS, PEER, count=2
    )


def test_pages_are_written_between_their_marks(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    start, end = (mark.format(name="speed") for mark in page.MARKS)
    for name in page.PAGES:
        (tmp_path / name).write_text(f"a\n{start}\nold\n{end}\nb\n")
    for _ in range(2):
        page.write(tmp_path, tmp_path)
    written = (tmp_path / "README.md").read_text()
    assert (
        written.startswith("a\n")
        and written.endswith("\nb\n")
        and "old" not in written
        and "planned" in written
    )
    assert (tmp_path / "signed.md").read_text().startswith("*Made by `python -m bench.sweep.page`")
    with pytest.raises(UsageError, match="no <!-- speed"):
        page.replaced("a", {"speed": "b"})

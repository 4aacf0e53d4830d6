"""What README, the Results page and the pages beside the lines make of stored lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.sweep import page, rounds, tables
from bench.sweep.rounds import found_of
from bench.sweep.store import Store
from flexgen_h2o.core.errors import UsageError
from tests.unit.bench.test_signed_grid import CELL, OURS, PEER, Sweep
from tests.unit.bench.test_throughput_sweep import figures


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

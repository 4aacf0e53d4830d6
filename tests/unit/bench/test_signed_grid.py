"""The signed grid: its rounds and how they go on, and what it refuses."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from bench import common
from bench.sweep import __main__ as door
from bench.sweep import rounds, tables
from bench.sweep.grid import SIGNED, Cell, System
from bench.sweep.rounds import (
    DISK,
    MEMORY,
    PRODUCTS,
    Rates,
    Rounds,
    found_of,
    is_of,
    rounds_of,
    valid_rounds,
)
from bench.sweep.store import OK, REFUSED, Line, Store
from tests.unit.bench.test_throughput_sweep import OPT_TINY, figures

CELL = SIGNED["signed-opt-1.3b-third"][0]
OURS = System("ours", "full", ("ram", "offload"))
PEER = System("accelerate", "disk", ("offload",))
STEADY = {PRODUCTS: 1e12, MEMORY: 2e10, DISK: 2e9}


class Sweep:
    """Rounds with systems whose speed is `speeds` and a machine whose rates are `rates`, in
    turn."""

    def __init__(
        self,
        path: Path,
        speeds: dict[str, float],
        rates: list[Rates] | None = None,
        cpu: str = "Xeon",
    ) -> None:
        self.store = Store(path, cpu)
        self.speeds = speeds
        self.ran = list[str]()
        seen = itertools.chain(rates or [], itertools.repeat(STEADY))
        clock = itertools.count(len(self.store.lines))
        self.cpu = cpu
        self.rounds = Rounds(
            self.store, self.measure, lambda: next(seen), lambda: str(next(clock)), lambda: None
        )

    def measure(self, system: System, rows: int) -> Line:
        self.ran.append(system.name)
        if not self.speeds[system.name]:
            raise KeyboardInterrupt
        line = figures(self.speeds[system.name] + len(self.ran) / 1000)
        facts = {
            "commit": "abc",
            "cpu": self.cpu,
            "date": "2026-11-23T10",
            "cgroup": True,
            "budget_bytes": 10**9,
        }
        return line | facts

    def run(self, *systems: System, count: int = 3) -> list[str]:
        self.rounds.run(CELL, [(system, 8) for system in systems], count)
        return self.ran


def test_a_round_that_was_killed_is_done_again(tmp_path: Path) -> None:
    path = tmp_path / "signed.jsonl"
    with pytest.raises(KeyboardInterrupt):
        Sweep(path, {OURS.name: 6.0, PEER.name: 0.0}).run(OURS, PEER)
    assert not path.exists()
    Sweep(path, {OURS.name: 6.0, PEER.name: 2.0}).run(OURS, PEER, count=1)
    half = path.read_text().splitlines()[0] + "\n"
    path.write_text(half)  # a write that was cut off
    assert rounds_of(Store(path).lines) == {} and valid_rounds(Store(path).lines) == []
    assert Sweep(path, {OURS.name: 6.0, PEER.name: 2.0}).run(OURS, PEER, count=1) == [
        OURS.name,
        PEER.name,
    ]


def test_a_round_is_repeated_while_the_machine_moves_but_not_for_ever(tmp_path: Path) -> None:
    slow = STEADY | {DISK: 1e9}
    sweep = Sweep(tmp_path / "once.jsonl", {OURS.name: 6.0}, [STEADY, slow, slow, slow])
    assert len(sweep.run(OURS, count=1)) == 2
    (some,) = valid_rounds(sweep.store.lines)
    assert [line["round"]["steady"] for line in some] == [True]
    never = Sweep(tmp_path / "never.jsonl", {OURS.name: 6.0}, [STEADY, slow] * 3)
    assert len(never.run(OURS, count=1)) == 1 + rounds.MAX_EXTRA
    (some,) = valid_rounds(never.store.lines)
    assert some == [never.store.lines[-1]] and not some[0]["round"]["steady"]
    assert some[0]["round"]["moved"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--grid signed"),
        (["--quick"], "--quick"),
        (["--repeats", "2"], "--repeats 2"),
    ],
)
def test_what_could_not_be_signed_is_refused_in_a_line(
    flags: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without flags: a work tree with changes."""
    monkeypatch.setattr(door, "measure", pytest.fail)
    monkeypatch.setattr(common, "commit", lambda: "abc-dirty")
    monkeypatch.setattr(
        sys, "argv", ["sweep", "--grid", "signed", *flags, "--results", str(tmp_path / "r")]
    )
    assert door.main() == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and said in err and not (tmp_path / "r").exists()


def test_a_cell_is_searched_then_goes_round_and_its_quality_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole door with systems that are none."""
    monkeypatch.setattr(common, "commit", lambda: "abc")
    monkeypatch.setattr(door, "can_limit", lambda: False)
    monkeypatch.setattr(door, "machine_rates", lambda *_: STEADY)
    monkeypatch.setattr(door.quality, "measure", lambda *args: measured.append("quality"))
    measured: list[str] = []

    def run(setup: door.Setup, system: System, *_: object) -> Line:
        speed = 4.0 if system.name == "hf-sdpa" else 5.0
        facts = {"cgroup": setup.cgroup, "date": "2026-11-23", "budget_bytes": None}
        facts |= {name: common.machine_facts()[name] for name in ("commit", "cpu")}
        return (
            {"status": REFUSED, "reason": "no"} | facts
            if system.peer == "llamacpp"
            else figures(speed) | facts
        )

    monkeypatch.setattr(door, "measure", run)
    monkeypatch.setattr(door, "measure_profile", lambda setup: measured.append("profile"))
    monkeypatch.setattr(door.Setup, "missing", lambda *_: None)
    flags = (
        f"--signed --cell {OPT_TINY},8,4,none,8,8 --systems ours-full hf-sdpa hf-eager "
        f"--results {tmp_path} --offload-dir {tmp_path}/o --quiet-wait 0"
    )
    monkeypatch.setattr(sys, "argv", ["sweep", *flags.split()])
    for _ in range(2):
        assert door.main() == 0
    lines = Store(tmp_path / "signed.jsonl").lines
    assert [line["repeat"] for line in lines] == [0, 0, 1, 1, 2, 2, 3, 3] and {
        x["status"] for x in lines
    } == {OK}
    assert [line["system"] for line in lines[:4]] == [
        "hf-sdpa",
        "hf-eager",
        "ours-full",
        "hf-eager",
    ]
    written = (tmp_path / "signed.md").read_text()
    assert measured == ["profile", "quality", "quality"] and "opt-tiny, 8 + 4, in RAM" in written
    assert "in the search only: 4 with 8 prompts; `hf-eager` made 5 with 8 prompts there" in written
    assert all(is_of(Cell(str(OPT_TINY), 8, 4, "none", (8, 8)), line) for line in lines)
    given = list(sys.argv)
    monkeypatch.setattr(
        sys, "argv", [*given, "--systems", "llamacpp-bf16"]
    )  # where all refuse there is no round
    assert door.main() == 0 and Store(tmp_path / "signed.jsonl").lines[-1]["status"] == REFUSED


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

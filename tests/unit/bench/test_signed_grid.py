"""The signed grid: its cells, its rounds and how they go on, what it refuses, and the page of its
lines."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import common
from bench.sweep import __main__ as door
from bench.sweep import quality, rounds, runner, tables
from bench.sweep.grid import IN_RAM, OPT, SHORT, SIGNED, Cell, System, systems_of
from bench.sweep.rounds import DISK, MEMORY, PRODUCTS, Rates, Rounds, is_of, rounds_of, valid_rounds
from bench.sweep.runner import BASELINES, Setup
from bench.sweep.store import OK, REFUSED, Line, Store
from flexgen_h2o.evaluation.rows import TextRow
from flexgen_h2o.kvcache.eviction.mixes import table_for
from flexgen_h2o.models.load import find_model
from tests.unit.bench.test_throughput_sweep import OPT_TINY, figures

CELL = SIGNED["signed-opt-1.3b-third"][0]
OURS = System("ours", "full", ("ram", "offload"))
PEER = System("accelerate", "disk", ("offload",))
SETUP = Setup(Path("peers"), Path("offload"), threads=2, limit_s=60.0, quiet_wait=0.0)
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
        self.store = Store(path, cpu=cpu)
        self.speeds = speeds
        self.ran = list[str]()
        seen = itertools.chain(rates or [], itertools.repeat(STEADY))
        clock = itertools.count(len(self.store.lines))
        self.prepared = 0
        self.cpu = cpu
        self.rounds = Rounds(
            self.store, self.measure, lambda: next(seen), lambda: str(next(clock)), self.prepare
        )

    def prepare(self) -> None:
        self.prepared += 1

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


def test_a_round_is_each_system_once_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "signed.jsonl"
    sweep = Sweep(path, {OURS.name: 6.0, PEER.name: 2.0})
    ran = sweep.run(OURS, PEER)
    assert sweep.prepared == 1 and ran == [
        OURS.name,
        PEER.name,
        PEER.name,
        OURS.name,
        OURS.name,
        PEER.name,
    ]
    lines = Store(path).lines
    assert [line["repeat"] for line in lines] == [1, 1, 2, 2, 3, 3]
    assert all(line["round"]["before"] == line["round"]["after"] == STEADY for line in lines)
    sweep = Sweep(path, {})
    assert sweep.run(OURS, PEER) == [] and not sweep.prepared  # nothing is left to do
    assert len(Sweep(path, {OURS.name: 1.0, PEER.name: 1.0}).run(OURS, PEER, count=4)) == 2


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


def test_a_peer_that_comes_later_gets_rounds_with_all(tmp_path: Path) -> None:
    path = tmp_path / "signed.jsonl"
    speeds = {OURS.name: 6.0, PEER.name: 2.0}
    Sweep(path, speeds).run(OURS, count=1)
    assert Sweep(path, speeds).run(OURS, PEER, count=1) == [OURS.name, PEER.name]
    (some,) = valid_rounds(Store(path).lines)
    assert len(some) == 2


def test_rates_are_those_that_a_cell_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Probe:
        def __init__(self, dtype: object) -> None: ...

        def now(self) -> Any:
            return type("Peak", (), {"flops_per_s": 3.0, "memory_bytes_per_s": 2.0})

    monkeypatch.setattr(rounds, "PeakProbe", Probe)
    monkeypatch.setattr(rounds, "READ_SWEEPS", 1)
    model = find_model(str(OPT_TINY), "_DUMMY_")
    in_ram, third = (Cell(str(OPT_TINY), 8, 4, budget, (1, 1)) for budget in ("none", "third"))
    assert rounds.machine_rates(in_ram, model, tmp_path) == {PRODUCTS: 3.0, MEMORY: 2.0}
    assert rounds.machine_rates(third, model, tmp_path).keys() == {PRODUCTS, MEMORY, DISK}


def test_cells_are_of_shapes_with_so_many_positions_and_systems_belong_to_them() -> None:
    every = [*SIGNED["signed"], *SIGNED[SHORT]]
    assert len(every) == (sum(map(len, SIGNED.values())) + len(SIGNED[SHORT])) // 2
    # By what lines are told apart (rounds.is_of).
    assert len({(cell.model, cell.prompt_len, cell.gen_len, cell.budget) for cell in every}) == len(
        every
    )
    for cell in every:
        assert (
            cell.prompt_len + cell.gen_len
            <= door._model(door._cut(cell.model)[0]).spec.max_positions
        )
        for cpu, is_slow in (
            ("Xeon with AMX", False),
            ("EPYC with AVX-512", False),
            ("EPYC with AVX2", True),
        ):
            names = [system.name for system in systems_of("signed", cell, cpu)]
            assert len(set(names)) == len(names) and tables.FULL in names and tables.SMALL in names
            assert ("hf-eager" in names) == (cell.kind == IN_RAM and not is_slow)
            assert any(name.endswith("-fp32") for name in names) == (
                is_slow and cell.model != OPT["30b"]
            )
            assert ("llamacpp-q4_0" in names) == (
                cell.model != OPT["30b"]
            ) and "llamacpp-q4_k" not in names
    whole, cut = SIGNED["signed-opt-30b"]
    names = [
        {system.name for system in systems_of("signed", cell) if not system.ours}
        for cell in (whole, cut)
    ]
    assert names[0] == {"accelerate-disk"} < names[1]


def test_a_model_may_be_its_first_blocks(tmp_path: Path) -> None:
    model = door._model_of("facebook/opt-125m:3", tmp_path)
    assert model.spec.num_blocks == 3 and door._cut("facebook/opt-125m:3") == (
        "facebook/opt-125m",
        3,
    )
    assert door._cut("facebook/opt-125m") == ("facebook/opt-125m", None)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--grid signed"),
        (["--quick"], "--quick"),
        (["--repeats", "2"], "--repeats 2"),
        (["--device-mem", "1GiB"], "--device-mem: "),
        (["--dtype", "fp16"], "--dtype: "),
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


def test_results_and_pages_do_not_make_a_tree_dirty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "ROOT", tmp_path)
    assert common.commit() is None
    files = ["bench/results/here/signed.jsonl", "docs/results.md", "README.md", "code.py"]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "a"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    clean = common.commit()
    for name in files[:3]:
        (tmp_path / name).write_text("2")
    assert clean is not None and common.commit() == clean
    (tmp_path / "code.py").write_text("2")
    assert common.commit() == f"{clean}-dirty"


MIX = table_for().mix_of(0.2).eviction


@pytest.mark.parametrize(
    ("variant", "flags", "policy"),
    [
        ("h2o:kv-budget=0.2", "--policies h2o --budgets 0.2 --budgets-of sequence", "h2o"),
        ("h2o:0.1", "--policies h2o --budgets 0.2 --budgets-of prompt", "h2o"),
        ("full-int8", "--int8-compute --policies h2o --budgets 0.2 --budgets-of sequence", "full"),
        (
            "mix:kv-bytes=0.2",
            f"--compress-cache --cache-bits 4/3 --cache-window 16 --policies {MIX} --budgets 0.2 "
            "--budgets-of bytes",
            MIX,
        ),
    ],
)
def test_quality_is_measured_with_the_flags_of_the_speed(
    variant: str, flags: str, policy: str
) -> None:
    assert quality.flags_of(variant) == (flags.split(), policy)


def test_quality_is_made_once_and_one_run_compares_what_has_the_same_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []
    loss = {"kl": {"value": 0.5}, "flips": {"value": 0.25}, "kv_share": 0.2}

    def cells(command: list[str], offload_dir: Path) -> dict[str, Any] | str:
        ran.append(command)
        return (
            "too few positions" if "--int8-compute" not in command else {"full": loss, "h2o": loss}
        )

    monkeypatch.setattr(quality, "_cells", cells)
    systems = [
        System("ours", name, ("offload",))
        for name in ("full", "h2o:kv-budget=0.2", "full-4bit-int8")
    ]
    systems.append(System("ours", "h2o-4bit-int8:kv-budget=0.2", ("offload",)))
    for _ in range(2):
        quality.measure(tmp_path, CELL, systems, "opt-tiny", SETUP)
    # of both passes: H2O in bf16, which fails, and once what full-4bit-int8 and h2o-4bit-int8 share
    assert len(ran) == 3 and capsys.readouterr().out.count("not measured, too few positions") == 2
    found = quality.read(tmp_path)
    assert [line["variant"] for line in found] == ["full-4bit-int8", "h2o-4bit-int8:kv-budget=0.2"]
    assert tables.lost(tables.SMALL, CELL, found) == "0.5; 25%" and tables.lost(
        tables.H2O, CELL, found
    ).endswith("yet")
    assert tables.lost("llamacpp-q8_0", CELL, found).startswith("not measured yet")
    loaded = quality.of_cell(CELL, "llamacpp-q8_0", "llama") | loss
    assert tables.lost("llamacpp-q8_0-mmap", CELL, [loaded]) == "0.5; 25% (llama)"
    # A second model says what the first cannot.
    monkeypatch.setattr(quality, "_cells", lambda *_: {"h2o": loss | {"flips": {"value": 0.5}}})
    quality.measure(tmp_path, CELL, [systems[1], systems[3]], str(tmp_path / "llama"), SETUP)
    found = quality.read(tmp_path)
    assert tables.lost(tables.SMALL, CELL, found) == "0.5; 25%"
    assert tables.lost(tables.H2O, CELL, found) == "0.5; 50% (llama)"
    assert tables.lost(PEER.name, CELL, []) == "0; 0%"


PEER_SCRIPT = """
import sys
sys.path.append({baselines!r})
import numpy as np
from contract import main

def score(request, prompts, continuations):
    assert request.variant == "int8" and (prompts, continuations) == ([[1, 2]] * 2, [[3, 4, 5]] * 2)
    return np.zeros((2, 3, 11), np.float32)

knows = score if "int8" in sys.argv else None
sys.exit(main(None, ("int8", "int4"), (), framework="json", devices=("cpu",), score=knows))
"""


def test_quality_of_a_peer_with_bits_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that takes every token for as likely, one that cannot be given tokens, and one that is
    exact."""
    rows = [TextRow((1, 2), (3, 4, 5))] * 2
    logits = torch.randn(2, 3, 11)
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub" / "run.py").write_text(PEER_SCRIPT.format(baselines=str(BASELINES)))
    monkeypatch.setattr(runner, "BASELINES", tmp_path)
    monkeypatch.setattr(Setup, "python", lambda *_: Path(sys.executable))
    monkeypatch.setattr(quality, "_reference", lambda *_: (rows, logits))
    systems = [System("stub", variant, ("offload",)) for variant in ("int8", "int4", "bf16")]
    for _ in range(2):
        quality.measure(tmp_path, CELL, systems, "opt-tiny", SETUP)
    (line,) = quality.read(tmp_path)
    after = logits[:, 1:].double()
    p = after.softmax(-1)
    assert line["kl"]["value"] == pytest.approx(float((p * (p * 11).log()).sum(-1).mean()))
    assert line["flips"]["value"] == pytest.approx(float((after.argmax(-1) != 0).double().mean()))
    assert (
        tables.lost("stub-int8", CELL, [line]).endswith("%")
        and tables.lost("stub-bf16", CELL, []) == "0; 0%"
    )
    said = capsys.readouterr().out
    assert (
        said.count("stub-int8: KL") == 1
        and said.count("not measured, --score: scoring is not implemented") == 2
    )


def test_figures_of_another_dtype_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "throughput.jsonl"
    key = rounds.key_of(CELL, PEER, 8, 0)
    Store(path).add(key, figures(1.0))  # from before a dtype was kept
    assert (
        Store(path, dtype="bf16").find(key) is not None
        and Store(path, dtype="fp16").find(key) is None
    )
    Store(path, dtype="fp16").add(key, figures(2.0) | {"dtype": "fp16"})
    assert [Store(path, dtype=one).find(key)["tokens_per_s"] for one in ("bf16", "fp16")] == [
        1.0,
        2.0,
    ]  # type: ignore[index]


def test_a_cell_is_searched_then_goes_round_and_its_quality_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole door with systems that are none."""
    monkeypatch.setattr(common, "commit", lambda: "abc")
    monkeypatch.setattr(door, "can_limit", lambda: False)
    monkeypatch.setattr(door, "machine_rates", lambda *_: STEADY)
    monkeypatch.setattr(door.quality, "measure", lambda *args: measured.append(args[3]))
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
    flags = [
        "--signed",
        "--cell",
        f"{OPT_TINY},8,4,none,8,8",
        "--systems",
        "ours-full",
        "hf-sdpa",
        "hf-eager",
    ]
    flags += ["--results", str(tmp_path), "--offload-dir", str(tmp_path / "o"), "--quiet-wait", "0"]
    monkeypatch.setattr(sys, "argv", ["sweep", *flags])
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
    assert measured == ["profile", *[quality.MODEL] * 2] and "opt-tiny, 8 + 4, in RAM" in written
    assert "in the search only: 4 with 8 prompts; `hf-eager` made 5 with 8 prompts there" in written
    assert all(is_of(Cell(str(OPT_TINY), 8, 4, "none", (8, 8)), line) for line in lines)
    given = list(sys.argv)
    monkeypatch.setattr(sys, "argv", [*given, "--repeats", "0", "--again"])
    assert door.main() == 0 and measured[-2:] == [quality.MODEL] * 2 and len(measured) == 4
    assert len(Store(tmp_path / "signed.jsonl").lines) == len(lines)
    monkeypatch.setattr(
        sys, "argv", [*given, "--systems", "llamacpp-bf16"]
    )  # where all refuse there is no round
    assert door.main() == 0 and Store(tmp_path / "signed.jsonl").lines[-1]["status"] == REFUSED

"""The signed grid: its cells, its rounds and how they go on, what it refuses, and the page of its lines."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import common
from bench.sweep import __main__ as door
from bench.sweep import page, quality, rounds, runner
from bench.sweep.grid import IN_RAM, OPT, SHORT, SIGNED, WITHDRAWN, Cell, System, system_of, systems_of
from bench.sweep.rounds import DISK, MEMORY, PRODUCTS, Rates, Rounds, is_of, rounds_of, valid_rounds
from bench.sweep.runner import BASELINES, Setup
from bench.sweep.store import FAILED, OK, REFUSED, Line, Store
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.evaluation.rows import TextRow
from flexgen_h2o.kvcache.eviction import mix_of
from flexgen_h2o.models.load import find_model
from tests.unit.bench.test_throughput_sweep import OPT_TINY, figures

CELL = SIGNED["signed-opt-1.3b-third"][0]
OURS, PEER = System("ours", "full", ("ram", "offload")), System("accelerate", "disk", ("offload",))
SETUP = Setup(Path("peers"), Path("offload"), threads=2, limit_s=60.0, quiet_wait=0.0)
STEADY = {PRODUCTS: 1e12, MEMORY: 2e10, DISK: 2e9}


class Sweep:
    """Rounds with systems whose speed is `speeds` and a machine whose rates are `rates`, in turn."""

    def __init__(
        self, path: Path, speeds: dict[str, float], rates: list[Rates] | None = None, cpu: str = "Xeon"
    ) -> None:
        self.store, self.speeds, self.ran = Store(path, cpu=cpu), speeds, list[str]()
        seen, clock = itertools.chain(rates or [], itertools.repeat(STEADY)), itertools.count(len(self.store.lines))
        self.prepared, self.cpu = 0, cpu
        self.rounds = Rounds(self.store, self.measure, lambda: next(seen), lambda: str(next(clock)), self.prepare)

    def prepare(self) -> None:
        self.prepared += 1

    def measure(self, system: System, rows: int) -> Line:
        self.ran.append(system.name)
        if not self.speeds[system.name]:
            raise KeyboardInterrupt
        line = figures(self.speeds[system.name] + len(self.ran) / 1000)
        facts = {"commit": "abc", "cpu": self.cpu, "date": "2026-11-23T10", "cgroup": True, "budget_bytes": 10**9}
        return line | facts

    def run(self, *systems: System, count: int = 3) -> list[str]:
        self.rounds.run(CELL, [(system, 8) for system in systems], count)
        return self.ran


def test_a_round_is_each_system_once_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "signed.jsonl"
    sweep = Sweep(path, {OURS.name: 6.0, PEER.name: 2.0})
    ran = sweep.run(OURS, PEER)
    assert sweep.prepared == 1 and ran == [OURS.name, PEER.name, PEER.name, OURS.name, OURS.name, PEER.name]
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
    assert Sweep(path, {OURS.name: 6.0, PEER.name: 2.0}).run(OURS, PEER, count=1) == [OURS.name, PEER.name]


def test_a_round_is_repeated_while_the_machine_moves_but_not_for_ever(tmp_path: Path) -> None:
    slow = STEADY | {DISK: 1e9}
    sweep = Sweep(tmp_path / "once.jsonl", {OURS.name: 6.0}, [STEADY, slow, slow, slow])
    assert len(sweep.run(OURS, count=1)) == 2
    (some,) = valid_rounds(sweep.store.lines)
    assert [line["round"]["steady"] for line in some] == [True]
    never = Sweep(tmp_path / "never.jsonl", {OURS.name: 6.0}, [STEADY, slow] * 3)
    assert len(never.run(OURS, count=1)) == 1 + rounds.MOST_EXTRA
    (some,) = valid_rounds(never.store.lines)
    assert some == [never.store.lines[-1]] and not some[0]["round"]["steady"]
    assert some[0]["round"]["moved"] == pytest.approx(1.0)


def test_a_peer_that_comes_later_gets_rounds_with_all(tmp_path: Path) -> None:
    path, speeds = tmp_path / "signed.jsonl", {OURS.name: 6.0, PEER.name: 2.0}
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
    assert len({(cell.model, cell.prompt_len, cell.gen_len, cell.budget) for cell in every}) == len(every)
    for cell in every:
        assert cell.prompt_len + cell.gen_len <= door._model(door._cut(cell.model)[0]).spec.max_positions
        for cpu, is_slow in (("Xeon with AMX", False), ("EPYC with AVX-512", False), ("EPYC with AVX2", True)):
            names = [system.name for system in systems_of("signed", cell, cpu)]
            assert len(set(names)) == len(names) and page.FULL in names and page.H2O_SMALL in names
            assert ("hf-eager" in names) == (cell.kind == IN_RAM and not is_slow)
            assert any(name.endswith("-fp32") for name in names) == (is_slow and cell.model != OPT["30b"])
            assert ("llamacpp-q4_0" in names) == (cell.model != OPT["30b"]) and "llamacpp-q4_k" not in names
    whole, cut = SIGNED["signed-opt-30b"]
    names = [{system.name for system in systems_of("signed", cell) if not system.ours} for cell in (whole, cut)]
    assert names[0] == {"accelerate-disk"} < names[1]


def test_a_model_may_be_its_first_blocks(tmp_path: Path) -> None:
    model = door._model_of("facebook/opt-125m:3", tmp_path)
    assert model.spec.num_blocks == 3 and door._cut("facebook/opt-125m:3") == ("facebook/opt-125m", 3)
    assert door._cut("facebook/opt-125m") == ("facebook/opt-125m", None)


@pytest.mark.parametrize(
    ("flags", "said"),
    [([], "--grid signed"), (["--quick"], "--quick"), (["--repeats", "2"], "--repeats 2"),
     (["--device-mem", "1GiB"], "--device-mem: "), (["--dtype", "fp16"], "--dtype: ")],
)  # fmt: skip
def test_what_could_not_be_signed_is_refused_in_a_line(
    flags: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without flags: a work tree with changes."""
    monkeypatch.setattr(door, "measure", pytest.fail)
    monkeypatch.setattr(common, "commit", lambda: "abc-dirty")
    monkeypatch.setattr(sys, "argv", ["sweep", "--grid", "signed", *flags, "--results", str(tmp_path / "r")])
    assert door.main() == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and said in err and not (tmp_path / "r").exists()


def test_results_and_pages_do_not_make_a_tree_dirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "ROOT", tmp_path)
    assert common.commit() is None
    files = ["bench/results/here/signed.jsonl", "docs/speed.svg", "README.md", "code.py"]
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


MIX = mix_of(0.2).eviction


@pytest.mark.parametrize(
    ("variant", "flags", "policy"),
    [
        ("h2o:kv-budget=0.2", "--policies h2o --budgets 0.2 --budgets-of sequence", "h2o"),
        ("h2o:0.1", "--policies h2o --budgets 0.2 --budgets-of prompt", "h2o"),
        ("full-int8", "--int8-compute --policies h2o --budgets 0.2 --budgets-of sequence", "full"),
        ("mix:kv-bytes=0.2", f"--compress-cache --cache-bits 4/3 --cache-window 16 --policies {MIX} --budgets 0.2 "
                             "--budgets-of bytes", MIX),
    ],
)  # fmt: skip
def test_quality_is_measured_with_the_flags_of_the_speed(variant: str, flags: str, policy: str) -> None:
    assert quality.flags_of(variant) == (flags.split(), policy)


def test_quality_is_made_once_and_one_run_compares_what_has_the_same_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran, loss = [], {"kl": {"value": 0.5}, "flips": {"value": 0.25}, "kv_share": 0.2, "read_share": 0.2}

    def cells(command: list[str], offload_dir: Path) -> dict[str, Any] | str:
        ran.append(command)
        return "too few positions" if "--int8-compute" not in command else {"full": loss, "h2o": loss}

    monkeypatch.setattr(quality, "_cells", cells)
    systems = [System("ours", name, ("offload",)) for name in ("full", "h2o:kv-budget=0.2", "full-4bit-int8")]
    systems.append(System("ours", "h2o-4bit-int8:kv-budget=0.2", ("offload",)))
    for _ in range(2):
        quality.measure(tmp_path, CELL, systems, "opt-tiny", SETUP)
    # of both passes: H2O in bf16, which fails, and once what full-4bit-int8 and h2o-4bit-int8 share
    assert len(ran) == 3 and capsys.readouterr().out.count("not measured, too few positions") == 2
    found = quality.read(tmp_path)
    assert [line["variant"] for line in found] == ["full-4bit-int8", "h2o-4bit-int8:kv-budget=0.2"]
    assert page.lost(page.H2O_SMALL, CELL, found) == "0.5; 25%" and page.lost(page.H2O, CELL, found).endswith("yet")
    assert page.lost("llamacpp-q8_0", CELL, found).startswith("not measured yet")
    loaded = quality.of_cell(CELL, "llamacpp-q8_0", "llama") | loss
    assert page.lost("llamacpp-q8_0-mmap", CELL, [loaded]) == "0.5; 25% (llama)"
    # A second model says what the first cannot.
    monkeypatch.setattr(quality, "_cells", lambda *_: {"h2o": loss | {"flips": {"value": 0.5}}})
    quality.measure(tmp_path, CELL, [systems[1], systems[3]], str(tmp_path / "llama"), SETUP)
    found = quality.read(tmp_path)
    assert page.lost(page.H2O_SMALL, CELL, found) == "0.5; 25%"
    assert page.lost(page.H2O, CELL, found) == "0.5; 50% (llama)"
    assert page.lost(PEER.name, CELL, []) == "0; 0%"


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
    """One that takes every token for as likely, one that cannot be given tokens, and one that is exact."""
    rows, logits = [TextRow((1, 2), (3, 4, 5))] * 2, torch.randn(2, 3, 11)
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
    assert page.lost("stub-int8", CELL, [line]).endswith("%") and page.lost("stub-bf16", CELL, []) == "0; 0%"
    said = capsys.readouterr().out
    assert said.count("stub-int8: KL") == 1 and said.count("not measured, --score: scoring is not implemented") == 2


def test_the_page_of_no_lines_says_so(tmp_path: Path) -> None:
    of_page, of_readme, drawn = page.made(tmp_path)
    assert "only begun" in of_page and "only begun" in of_readme and drawn == ""
    assert "Not run yet: OPT-1.3B" in of_page and of_page.count("OPT-6.7B") == 8 and "What the planner" not in of_page
    assert "\n+" not in of_page


def test_ratios_are_of_one_round_and_losses_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "signed.jsonl"
    sweep = Sweep(path, {OURS.name: 2.0, PEER.name: 4.0, "ours-mix:kv-bytes=0.2": 8.0})
    mix = next(system for system in systems_of("signed", CELL) if system.name == page.MIX)
    sweep.run(OURS, PEER, mix)
    lines = list(sweep.store.lines)
    for line in lines[:3]:
        line["tokens_per_s"] *= 10  # a fast hour: of this round alone
    found = page.found_of(CELL, lines)
    assert found.ratios(page.FULL) == pytest.approx([0.5] * 3, rel=0.01)
    assert found.ratios(page.MIX, "accelerate") == pytest.approx([2.0] * 3, rel=0.01) and not found.ratios(page.H2O)
    assert len(page.where_we_lose([found])) == 1 and "`accelerate-disk`" in page.where_we_lose([found])[0]
    failed = {"status": FAILED, "reason": "a | b", "cpu": "Xeon"}
    sweep.store.add(rounds.key_of(CELL, System("deepspeed", "nvme", ()), 16, 0), failed)
    of_page, of_readme, drawn = page.made(tmp_path)
    assert "| `accelerate-disk` (best peer) | 8, no others tried | 4" in of_page and "failed: a / b" in of_page
    assert "not run yet: `ours-h2o:kv-budget=0.2`" in of_page and "ran in a memory cgroup" in of_page
    assert " (aim 3)" in of_readme and "1 of " in of_readme and "‡" not in of_page
    assert "OPT-1.3B" not in of_readme and drawn.count("<rect") == 1 + 1 + len(page.BARS) + 1


def test_short_cells_have_a_part_of_their_own(tmp_path: Path) -> None:
    (cell, *others), fp32 = SIGNED[SHORT], System("accelerate", "disk", ("offload",), dtype="fp32")
    assert fp32 in systems_of(SHORT, cell, "EPYC with AVX2") and system_of(fp32.name) == system_of(PEER.name)
    sweep = Sweep(tmp_path / "signed.jsonl", {OURS.name: 2.0, PEER.name: 1.0, fp32.name: 4.0}, cpu="EPYC with AVX2")
    sweep.rounds.run(cell, [(system, 8) for system in (OURS, PEER, fp32)], 2)
    of_page, of_readme, drawn = page.made(tmp_path)
    main, _, short = " ".join(of_page.split()).partition("### Short cells")
    assert "only begun" in main and "only begun" in of_readme and drawn == ""
    assert f"1 of {1 + len(others)} cells have been run" in short and "chosen on 2026-11-27, before" in short
    assert "| `accelerate-disk-fp32` (best peer) | 8, no others tried | 4" in short and "| EPYC with AVX2 |" in short
    assert ") ‡ |" in short and "‡: of fewer than 3 rounds" in short
    assert "`deepspeed-nvme-fp32`" in short  # not run yet
    assert re.search(r"`ours-full` 0\.5\S* \(\S+ - \S+\) of `accelerate-disk-fp32`", short)


def test_predictions_stand_beside_what_was_measured(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "signed.jsonl", {OURS.name: 2.0, PEER.name: 4.0})
    sweep.run(OURS, PEER, count=3)
    for line, share in zip((line for line in sweep.store.lines if line["system"] == OURS.name), (1, 2, 4), strict=True):
        line["setting"] = {"predicted": {"prefill_s": line["prefill_s"] * share, "decode_s": line["decode_s"] / 2}}
    found = page.found_of(CELL, sweep.store.lines)
    head, _, row = page.predictions([found]).splitlines()
    assert head.count("|") == row.count("|") and "| `ours-full` | 2 (1 - 4) | 0.5 (0.5 - 0.5) |" in row
    assert PEER.name not in row and "What the planner said" in page.page([found], [])


def test_a_cell_names_its_machine(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "signed.jsonl", {OURS.name: 2.0}, [STEADY, STEADY | {DISK: 2.2e9}] * 3)
    sweep.run(OURS, count=3)
    found = page.found_of(CELL, sweep.store.lines)
    head, _, row = page.machines([found]).splitlines()
    assert head.count("|") == row.count("|") and f"| {found.title} | Xeon | 1 (1 - 1) |" in row
    assert "| 2.1 (2 - 2.2) |" in row and "### The machines" in page.page([found], [])
    for line in sweep.store.lines:  # from before the name was kept
        del line["cpu"]
    assert "| not recorded |" in page.machines([page.found_of(CELL, sweep.store.lines)])


def test_a_withdrawn_peer_has_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = Sweep(tmp_path / "signed.jsonl", {OURS.name: 2.0, PEER.name: 4.0})
    sweep.run(OURS, PEER)
    for rows, reasons in ((7, {}), (8, {PEER.name: "withdrawn: too many rows"})):
        monkeypatch.setitem(WITHDRAWN, (CELL.name, PEER.name, "Xeon", rows), "too many rows")
        found = page.found_of(CELL, sweep.store.lines)
        assert found.reasons == reasons and (PEER.name in found.entries) != bool(reasons)


def test_a_cell_is_of_one_machine(tmp_path: Path) -> None:
    """On another one all is measured again, and shown once it has as many rounds."""
    path, speeds = tmp_path / "signed.jsonl", {OURS.name: 2.0, PEER.name: 1.0}
    sweep, key = Sweep(path, speeds), rounds.key_of(CELL, PEER, 8, 0)
    sweep.store.add(key, figures(1.0) | {"cpu": "Xeon"})
    sweep.run(OURS, PEER, count=2)
    for count, shown in ((1, 2.0), (2, 6.0)):
        other = Sweep(path, {OURS.name: 6.0, PEER.name: 1.0}, cpu="EPYC")
        assert other.store.find(key) is None and len(other.run(OURS, PEER, count=count)) == 2
        found = page.found_of(CELL, Store(path).lines)
        assert found.entries[OURS.name].median("tokens_per_s") == pytest.approx(shown, rel=0.01)
        assert ("Xeon" in page.machines([found])) != ("EPYC" in page.machines([found]))
    assert Sweep(path, speeds).store.find(key) is not None and not Sweep(path, {}).run(OURS, PEER, count=2)


def test_a_refusal_of_another_machine_is_shown(tmp_path: Path) -> None:
    path, other = tmp_path / "signed.jsonl", System("llamacpp", "bf16-mmap", ("offload",))
    Sweep(path, {OURS.name: 2.0, PEER.name: 1.0}).run(OURS, PEER)
    refusal = {"status": REFUSED, "reason": "no OPT", "cpu": "EPYC"}
    Store(path).add_all([vars(rounds.key_of(CELL, system, 8, 0)) | refusal for system in (other, PEER)])
    found = page.found_of(CELL, Store(path).lines)
    assert found.reasons == {other.name: "refused: no OPT"} and PEER.name in found.entries
    opt, llama = (page.found_of(SIGNED[f"signed-{x}"][0], Store(path).lines) for x in ("opt-30b", "llama-3-8b"))
    assert opt.whys([q4 := "llamacpp-q4_0", f"{PEER.name}-eager"]) == {q4: "refused: no OPT"} and not llama.refusals
    Store(path).add_all([vars(rounds.key_of(CELL, other, 8, 0)) | figures(1.0) | {"cpu": "EPYC"}])  # it does run now
    assert page.found_of(CELL, Store(path).lines).whys([other.name]) == {}


def test_a_system_outside_the_rounds_says_what_it_made(tmp_path: Path) -> None:
    """Slower in the search than another setting; failed in the rounds; rows that no others were tried beside."""
    path, slower = tmp_path / "signed.jsonl", System("accelerate", "disk-eager", ("offload",))
    failing = System("deepspeed", "nvme", ("offload",))
    sweep = Sweep(path, {OURS.name: 2.0, PEER.name: 4.0, slower.name: 3.0})
    for system, rows, speed in ((PEER, 8, 3.0), (PEER, 4, 1.0), (slower, 8, 2.0), (failing, 8, 1.0)):
        sweep.store.add(rounds.key_of(CELL, system, rows, 0), figures(speed) | {"cpu": "Xeon", "rows": rows})
    sweep.run(OURS, PEER)
    of_round = {"status": FAILED, "cpu": "Xeon", "round": sweep.store.lines[-1]["round"]}
    sweep.store.add(rounds.key_of(CELL, failing, 8, 9), of_round)
    found = page.found_of(CELL, sweep.store.lines)
    assert found.reasons == {
        slower.name: "in the search only: 2 with 8 rows; `accelerate-disk` made 3 with 8 rows there",
        failing.name: "failed in the rounds; in the search only: 1 with 8 rows",
    }
    assert "no others tried" not in page.table([found], [])
    found = page.found_of(CELL, [line for line in sweep.store.lines if line["rows"] == 8])
    assert "| 8, no others tried |" in page.table([found], [])
    sweep.run(OURS, slower)  # takes the place of these rounds
    found = page.found_of(CELL, sweep.store.lines)
    assert found.reasons[PEER.name].endswith("3 with 8 rows; `accelerate-disk-eager` made 2 with 8 rows there")


def test_figures_of_another_dtype_are_not_kept(tmp_path: Path) -> None:
    path, key = tmp_path / "throughput.jsonl", rounds.key_of(CELL, PEER, 8, 0)
    Store(path).add(key, figures(1.0))  # from before a dtype was kept
    assert Store(path, dtype="bf16").find(key) is not None and Store(path, dtype="fp16").find(key) is None
    Store(path, dtype="fp16").add(key, figures(2.0) | {"dtype": "fp16"})
    assert [Store(path, dtype=one).find(key)["tokens_per_s"] for one in ("bf16", "fp16")] == [1.0, 2.0]  # type: ignore[index]


def test_pages_are_written_between_their_marks(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    text = f"a\n{page.START}\nold\n{page.END}\nb\n"
    for name in ("README.md", "docs/results.md"):
        (tmp_path / name).write_text(text)
    for _ in range(2):
        page.write(tmp_path, tmp_path)
    written = (tmp_path / "README.md").read_text()
    assert written.startswith("a\n") and written.endswith("\nb\n") and "old" not in written and "begun" in written
    with pytest.raises(UsageError, match="no <!--"):
        page.replaced("a", "b")


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
        return {"status": REFUSED, "reason": "no"} | facts if system.peer == "llamacpp" else figures(speed) | facts

    monkeypatch.setattr(door, "measure", run)
    monkeypatch.setattr(door, "measure_profile", lambda setup: measured.append("profile"))
    monkeypatch.setattr(door.Setup, "missing", lambda *_: None)
    flags = ["--signed", "--cell", f"{OPT_TINY},8,4,none,8,8", "--systems", "ours-full", "hf-sdpa", "hf-eager"]
    flags += ["--results", str(tmp_path), "--offload-dir", str(tmp_path / "o"), "--quiet-wait", "0"]
    monkeypatch.setattr(sys, "argv", ["sweep", *flags])
    for _ in range(2):
        assert door.main() == 0
    lines = Store(tmp_path / "signed.jsonl").lines
    assert [line["repeat"] for line in lines] == [0, 0, 1, 1, 2, 2, 3, 3] and {x["status"] for x in lines} == {OK}
    assert [line["system"] for line in lines[:4]] == ["hf-sdpa", "hf-eager", "ours-full", "hf-eager"]
    written = (tmp_path / "signed.md").read_text()
    assert measured == ["profile", *[quality.MODEL] * 2] and "opt-tiny, 8 + 4, in RAM" in written
    assert "in the search only: 4 with 8 rows; `hf-eager` made 5 with 8 rows there" in written
    assert all(is_of(Cell(str(OPT_TINY), 8, 4, "none", (8, 8)), line) for line in lines)
    given = list(sys.argv)
    monkeypatch.setattr(sys, "argv", [*given, "--repeats", "0", "--again"])
    assert door.main() == 0 and measured[-2:] == [quality.MODEL] * 2 and len(measured) == 4
    assert len(Store(tmp_path / "signed.jsonl").lines) == len(lines)
    monkeypatch.setattr(sys, "argv", [*given, "--systems", "llamacpp-bf16"])  # where all refuse there is no round
    assert door.main() == 0 and Store(tmp_path / "signed.jsonl").lines[-1]["status"] == REFUSED

"""The Results page: what it makes of stored lines, and what README.md has of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench.sweep import page, rounds
from bench.sweep.grid import SHORT, SIGNED, WITHDRAWN, System, system_of, systems_of
from bench.sweep.rounds import DISK
from bench.sweep.store import FAILED, REFUSED, Store
from flexgen_h2o.core.errors import UsageError
from tests.unit.bench.test_signed_grid import CELL, OURS, PEER, STEADY, Sweep
from tests.unit.bench.test_throughput_sweep import figures


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


def test_readme_has_both_kinds_of_cells(tmp_path: Path) -> None:
    (third, other, *_), path = (cell for cell in SIGNED[SHORT] if cell.kind == CELL.kind), tmp_path / "signed.jsonl"
    for cell, speed in ((CELL, 4.0), (third, 1.0), (other, 0.5)):
        Sweep(path, {OURS.name: speed, PEER.name: 2.0}).rounds.run(cell, [(OURS, 8), (PEER, 8)], 1)
    of_page, of_readme, _ = page.made(tmp_path)
    row = next(line for line in of_readme.splitlines() if line.startswith("| Accelerate"))
    _, cells, full, *_ = (cell.strip() for cell in row.strip("|").split("|"))
    assert cells == "1; short 2"
    assert re.fullmatch(r"\*\*2\*\* \(aim 3\); short \*\*0\.25\S*\*\* and \*\*0\.5\S*\*\*", full), full
    main, _, short = of_page.partition("### Short cells")
    assert "| 1 | **2** (aim 3) |" in main and "; short" not in of_page
    assert "**0.5" in short and page.STAND_IN in " ".join(of_readme.split())


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


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("signed.jsonl", "", "no signed.jsonl with measurements"), ("signed.jsonl", None, "no signed.jsonl with"),
        ("signed.jsonl", '{"tokens_per_s": "fast"}', "signed.jsonl: line 1 is not"),
        ("signed.jsonl", '{"tokens_per_s": 0}', "signed.jsonl: line 1 is not"),
        ("signed.jsonl", '{"rows": "8"}', "signed.jsonl: line 1 is not"),
        ("signed.jsonl", '{"status": "well"}', "signed.jsonl: line 1 is not"),
        ("quality.jsonl", "[1]\n", "quality.jsonl: line 1 does"), ("quality.jsonl", '{"kl": 3}', "quality.jsonl: line"),
        ("quality.jsonl", '{"kl"', "quality.jsonl: line 1 does"),
    ],
)  # fmt: skip
def test_lines_that_make_no_page_leave_the_pages(
    name: str, text: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["page", "--results", str(tmp_path)])
    monkeypatch.setattr(page.common, "ROOT", tmp_path)  # which has no pages to write
    Sweep(tmp_path / "signed.jsonl", {OURS.name: 2.0}).run(OURS, count=1)
    path = tmp_path / name
    if text is None:
        path.unlink()
    elif name == "signed.jsonl" and text:
        path.write_text(json.dumps(json.loads(path.read_text().splitlines()[0]) | json.loads(text)) + "\n")
    else:
        path.write_text(text)
    with pytest.raises(UsageError, match=re.escape(said)):
        page.main()


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

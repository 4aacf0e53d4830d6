"""What README, the Results page and the pages beside the lines make of stored lines."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench.sweep import page, quality, rounds, tables
from bench.sweep.grid import SHORT, SIGNED, WITHDRAWN, System, system_of, systems_of
from bench.sweep.rounds import DISK, found_of
from bench.sweep.store import FAILED, REFUSED, Store
from flexgen_h2o.core.errors import UsageError
from tests.unit.bench.test_signed_grid import CELL, OURS, PEER, STEADY, Sweep
from tests.unit.bench.test_throughput_sweep import figures


def test_the_pages_of_no_lines_say_so(tmp_path: Path) -> None:
    of_pages, beside = page.made(tmp_path)
    assert of_pages["speed"] == "No benchmark has been run yet: 45 are planned."
    assert {of_pages[name] for name in ("classes", "benchmarks", "losses")} == {"None yet."}
    text = beside["signed.md"]
    assert "0 of 23 benchmarks have been run." in text and "Not run yet: OPT-1.3B" in text
    assert " ".join(text.split()).count("OPT-6.7B, 8 of 32 layers") == 8
    assert "## Predicted" not in text and "\n+" not in text


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


def test_the_table_of_readme(tmp_path: Path) -> None:
    """A benchmark that it names, one that it does not, and one whose fastest other system is in few
    bits."""
    path = tmp_path / "signed.jsonl"
    mix, small = (
        System("ours", name.partition("-")[2], ("offload",)) for name in (tables.MIX, tables.SMALL)
    )
    q4 = System("llamacpp", "q4_0", ("ram", "offload"))
    llama = next(cell for cell in SIGNED[SHORT] if cell.name in page.SHOWN)
    for cell, speeds in (
        (CELL, {OURS: 6.0, PEER: 2.0, mix: 8.0}),
        (SIGNED[SHORT][0], {OURS: 1.0, PEER: 2.0}),
        (llama, {OURS: 5.0, q4: 50.0, PEER: 1.0, small: 60.0}),
    ):
        sweep = Sweep(path, {system.name: speed for system, speed in speeds.items()})
        sweep.rounds.run(cell, [(system, 8) for system in speeds], 1)
    loss = {"kl": {"value": 0.1}, "date": "2026-11-30"}
    lines = [
        quality.of_cell(cell, variant, "opt-tiny") | loss | {"flips": {"value": flips}}
        for cell, variant, flips in ((CELL, mix.variant, 0.07), (llama, small.variant, 0.35))
    ]
    (tmp_path / "quality.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    of_pages, _ = page.made(tmp_path)
    text = " ".join(of_pages["speed"].split())
    row = "| OPT-1.3B (8, 512 + 32) | 1/3 | Accelerate bf16: 2 | 6 (**3.0x**) | 8 (**4.0x**) [b] |"
    assert row in re.sub(r"(\d)\.00\d", r"\1", of_pages["speed"]).splitlines()
    assert "llama.cpp q4_0: 50" in text and "(**0.10x, slower**)" in text and "(1.2x) [c]" in text
    assert (
        "**[b]** KV cache in 20% of its bytes: 7%." in text
        and "matrix multiplications: 35%." in text
    )
    assert "[a]" not in text and text.count("|\n|") == 0
    assert (
        "3 benchmarks have been run" in text
        and "slower than the fastest other system in 2 of them" in text
    )
    assert (
        "slower in 1 if only systems in 16 or 32 bits count" in text
        and "42 more benchmarks" in text
    )


def test_like_is_compared_with_like(tmp_path: Path) -> None:
    path = tmp_path / "signed.jsonl"
    cell = SIGNED["signed-opt-1.3b-none"][1]
    speeds = {"ours-full": 4.0, "ours-full-int8": 6.0, "vllm-bf16": 2.0, "ctranslate2-int8": 8.0}
    systems = [System(*name.split("-", 1), ("ram",)) for name in speeds]
    Sweep(path, speeds).rounds.run(cell, [(system, 8) for system in systems], 1)
    lines = page.made(tmp_path)[0]["classes"].splitlines()[2:]
    assert [line.split(" | ")[2] for line in lines] == ["1", "0", "0"]  # 16 bits; 8 bits; any
    assert [line.split(" | ")[3][:3] for line in lines] == ["2.0", "0.7", "0.5"]


def test_benchmarks_that_are_lost_come_first(tmp_path: Path) -> None:
    path = tmp_path / "signed.jsonl"
    for cell, speed in zip(SIGNED["signed-opt-1.3b-third"][:3], (4.0, 1.0, 2.0), strict=True):
        Sweep(path, {OURS.name: speed, PEER.name: 2.0}).rounds.run(cell, [(OURS, 8), (PEER, 8)], 1)
    rows = page.made(tmp_path)[0]["benchmarks"].splitlines()[2:5]
    ratios = [float(row.split(" | ")[4].removesuffix(" ‡ |")) for row in rows]
    assert ratios == pytest.approx([0.5, 1.0, 2.0], rel=0.02)
    assert rows[0].startswith("| OPT-1.3B, 12 of 24 layers (8, 128 + 128) | 1/3 | 1")


def test_losses_are_of_the_usual_model_where_it_has_some(tmp_path: Path) -> None:
    lines = [
        {"variant": variant, "model": model, "kl": {"value": kl}, "flips": {"value": kl / 10}}
        for variant, model, kl in (
            ("full-int8", "opt-tiny", 0.1),
            ("full-int8", "opt-tiny", 0.4),
            ("full-int8", "llama", 0.9),
            ("llamacpp-q8_0-mmap", "llama", 0.2),
        )
    ]
    int8, q8 = page.losses_table(lines).splitlines()[2:]
    assert int8.endswith("| 0.1 to 0.4 | 1% to 4% |") and q8 == "| llama.cpp, q8_0 \\* | 0.2 | 2% |"


def test_short_benchmarks_have_a_page_of_their_own(tmp_path: Path) -> None:
    cell, *others = SIGNED[SHORT]
    fp32 = System("accelerate", "disk", ("offload",), dtype="fp32")
    assert fp32 in systems_of(SHORT, cell, "EPYC with AVX2") and system_of(fp32.name) == system_of(
        PEER.name
    )
    sweep = Sweep(
        tmp_path / "signed.jsonl",
        {OURS.name: 2.0, PEER.name: 1.0, fp32.name: 4.0},
        cpu="EPYC with AVX2",
    )
    sweep.rounds.run(cell, [(system, 8) for system in (OURS, PEER, fp32)], 2)
    beside = {name: " ".join(text.split()) for name, text in page.made(tmp_path)[1].items()}
    assert "0 of 23 benchmarks" in beside["signed.md"]
    short = beside["signed-short.md"]
    assert (
        f"1 of {1 + len(others)} benchmarks have been run" in short
        and "chosen on 2026-11-27, before" in short
    )
    assert "| `accelerate-disk-fp32` (fastest other) | 8, no others tried | 4" in short
    assert "| EPYC with AVX2 |" in short and ") ‡ |" in short and "‡: fewer than 3 rounds" in short
    assert "`deepspeed-nvme-fp32`" in short  # not run yet
    assert re.search(r"`ours-full` 0\.5\S* \(\S+ - \S+\) of `accelerate-disk-fp32`", short)


def test_predictions_stand_beside_what_was_measured(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "signed.jsonl", {OURS.name: 2.0, PEER.name: 4.0})
    sweep.run(OURS, PEER, count=3)
    for line, share in zip(
        (line for line in sweep.store.lines if line["system"] == OURS.name), (1, 2, 4), strict=True
    ):
        line["setting"] = {
            "predicted": {"prefill_s": line["prefill_s"] * share, "decode_s": line["decode_s"] / 2}
        }
    found = found_of(CELL, sweep.store.lines)
    head, _, row = tables.predictions([found]).splitlines()
    assert (
        head.count("|") == row.count("|") and "| `ours-full` | 2 (1 - 4) | 0.5 (0.5 - 0.5) |" in row
    )
    assert PEER.name not in row and "## Predicted and measured" in tables.details(
        [found], [], "signed"
    )


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


def test_a_withdrawn_peer_has_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = Sweep(tmp_path / "signed.jsonl", {OURS.name: 2.0, PEER.name: 4.0})
    sweep.run(OURS, PEER)
    for rows, reasons in ((7, {}), (8, {PEER.name: "withdrawn: too many rows"})):
        monkeypatch.setitem(WITHDRAWN, (CELL.name, PEER.name, "Xeon", rows), "too many rows")
        found = found_of(CELL, sweep.store.lines)
        assert found.reasons == reasons and (PEER.name in found.entries) != bool(reasons)


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


def test_a_refusal_of_another_machine_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "signed.jsonl"
    other = System("llamacpp", "bf16-mmap", ("offload",))
    Sweep(path, {OURS.name: 2.0, PEER.name: 1.0}).run(OURS, PEER)
    refusal = {"status": REFUSED, "reason": "no OPT", "cpu": "EPYC"}
    Store(path).add_all(
        [vars(rounds.key_of(CELL, system, 8, 0)) | refusal for system in (other, PEER)]
    )
    found = found_of(CELL, Store(path).lines)
    assert found.reasons == {other.name: "refused: no OPT"} and PEER.name in found.entries
    opt, llama = (
        found_of(SIGNED[f"signed-{x}"][0], Store(path).lines) for x in ("opt-30b", "llama-3-8b")
    )
    assert (
        opt.whys([q4 := "llamacpp-q4_0", f"{PEER.name}-eager"]) == {q4: "refused: no OPT"}
        and not llama.refusals
    )
    Store(path).add_all(
        [vars(rounds.key_of(CELL, other, 8, 0)) | figures(1.0) | {"cpu": "EPYC"}]
    )  # it does run now
    assert found_of(CELL, Store(path).lines).whys([other.name]) == {}


def test_a_system_outside_the_rounds_says_what_it_made(tmp_path: Path) -> None:
    """Slower in the search than another setting; failed in the rounds; rows that no others were
    tried beside."""
    path = tmp_path / "signed.jsonl"
    slower = System("accelerate", "disk-eager", ("offload",))
    failing = System("deepspeed", "nvme", ("offload",))
    sweep = Sweep(path, {OURS.name: 2.0, PEER.name: 4.0, slower.name: 3.0})
    for system, rows, speed in (
        (PEER, 8, 3.0),
        (PEER, 4, 1.0),
        (slower, 8, 2.0),
        (failing, 8, 1.0),
    ):
        sweep.store.add(
            rounds.key_of(CELL, system, rows, 0), figures(speed) | {"cpu": "Xeon", "rows": rows}
        )
    sweep.run(OURS, PEER)
    of_round = {"status": FAILED, "cpu": "Xeon", "round": sweep.store.lines[-1]["round"]}
    sweep.store.add(rounds.key_of(CELL, failing, 8, 9), of_round)
    found = found_of(CELL, sweep.store.lines)
    assert found.reasons == {
        slower.name: "in the search only: 2 with 8 prompts; `accelerate-disk` made 3 with 8 "
        "prompts there",
        failing.name: "failed in the rounds; in the search only: 1 with 8 prompts",
    }
    assert "no others tried" not in tables.table([found], [])
    found = found_of(CELL, [line for line in sweep.store.lines if line["rows"] == 8])
    assert "| 8, no others tried |" in tables.table([found], [])
    sweep.run(OURS, slower)  # takes the place of these rounds
    found = found_of(CELL, sweep.store.lines)
    assert found.reasons[PEER.name].endswith(
        "3 with 8 prompts; `accelerate-disk-eager` made 2 with 8 prompts there"
    )


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("signed.jsonl", "", "no signed.jsonl with measurements"),
        ("signed.jsonl", None, "no signed.jsonl with"),
        ("signed.jsonl", '{"tokens_per_s": "fast"}', "signed.jsonl: line 1 is not"),
        ("signed.jsonl", '{"tokens_per_s": 0}', "signed.jsonl: line 1 is not"),
        ("signed.jsonl", '{"rows": "8"}', "signed.jsonl: line 1 is not"),
        ("signed.jsonl", '{"status": "well"}', "signed.jsonl: line 1 is not"),
        ("quality.jsonl", "[1]\n", "quality.jsonl: line 1 does"),
        ("quality.jsonl", '{"kl": 3}', "quality.jsonl: line"),
        ("quality.jsonl", '{"kl"', "quality.jsonl: line 1 does"),
    ],
)
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
        path.write_text(
            json.dumps(json.loads(path.read_text().splitlines()[0]) | json.loads(text)) + "\n"
        )
    else:
        path.write_text(text)
    with pytest.raises(UsageError, match=re.escape(said)):
        page.main()


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

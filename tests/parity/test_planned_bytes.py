"""The bytes that the planner's formulas give are those that the engine moves, lane by lane.

A disk request takes whole pages, of which the formulas know nothing: they are put on here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from flexgen_h2o import LLM
from flexgen_h2o.checkpoint.formats import weight_parts
from flexgen_h2o.core.units import PAGE, SEGMENT_SLOTS, WRITE_BACK_STEPS, round_up
from flexgen_h2o.engine.loop import ATTENTION_KINDS, weight_sequence, zigzag
from flexgen_h2o.engine.memory import MemoryPlanner
from flexgen_h2o.engine.workload import Block
from flexgen_h2o.kvcache.eviction import H2O
from flexgen_h2o.planner.cost_model import (
    CostModel,
    Transfer,
    disk_read_bytes,
    hidden_moves,
    kv_load_moves,
    kv_store_moves,
    weight_moves,
)
from flexgen_h2o.tiers.disk import aligned_range
from flexgen_h2o.tiers.stream import tier_shares
from tests.parity.cases import BASE, PLACEMENTS, thinned
from tests.parity.planned import FAMILIES, ITEMSIZE, SHAPE, Run, write_aligned
from tests.parity.reference import random_model

LANES = ("disk_read", "disk_write", "h2d", "d2h")
KINDS = ("weights", "kv", "hidden")
# a key and a value of every head
LAYERS = BASE["num_hidden_layers"]
COLUMN = 2 * SHAPE["hidden_size"] * ITEMSIZE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    write_aligned(random_model(**SHAPE), found)
    return found


Moved = dict[str, dict[str, float]]  # by kind and lane


def planned(llm: LLM, run: Run) -> Moved:
    """Bytes of each kind over each lane by the cost model, in whole pages where they go to or
    come from the disk."""
    at = run.costs(llm)
    blocks = run.blocks(llm)
    read = sum(move.nbytes for _, move in moves_of(at, run, blocks) if move.lane == "disk_read")
    assert disk_read_bytes(at, [(block, 1) for block in blocks]) == pytest.approx(read)
    found: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for what, move in moves_of(at, run, blocks):
        nbytes = move.nbytes
        if what == "weights":
            assert at.memory.form.converted_by or nbytes % PAGE == 0
        elif move.lane in ("disk_read", "disk_write"):
            nbytes = move.pieces * round_up(round(nbytes / move.pieces), PAGE)
        found[what][move.lane] += nbytes
        if move.link and move.lane == "disk_read":
            found[what]["h2d"] += move.nbytes
        elif move.link:  # a KV unit leaves the device in whole pages too
            found[what]["d2h"] += nbytes if what == "kv" else move.nbytes
    if at.memory.form.converted_by:
        found["weights"]["disk_read"] += ends_of_pages(llm, at, run.new_tokens * len(blocks))
    return {kind: {lane: found[kind][lane] for lane in LANES} for kind in KINDS}


def ends_of_pages(llm: LLM, at: CostModel, sweeps: int) -> int:
    """Bytes that are read besides packed rows, because these begin and end within pages."""
    plan = at.memory.layers
    shares = tier_shares(at.policy.weight_shares, at.machine.device_is_host)
    stored = llm._find_checkpoint(at.memory.form).tensors
    total = 0
    units = tuple(layer.unit for layer in plan.layers)
    for unit in weight_sequence(sweeps, units):
        for tensor in plan.units[unit].tensors:
            for part in weight_parts(tensor.shape, shares):
                if part.tier == "disk":
                    nbytes = at.memory.form.layout(tensor).part_bytes(part)
                    offset = stored[tensor.name].rows(part.start, part.end).offset
                    total += aligned_range(offset, nbytes)[1] - nbytes
    return total


def moves_of(at: CostModel, run: Run, blocks: list[Block]) -> Iterator[tuple[str, Transfer]]:
    """Every transfer of a run, and what it brings."""
    plan = at.memory.layers
    units = tuple(layer.unit for layer in plan.layers)
    for unit in weight_sequence(run.new_tokens * len(blocks), units):
        yield from (("weights", move) for move in weight_moves(at, plan.units[unit]))
    for block in blocks:
        for step in zigzag(run.new_tokens, len(units), len(block)):
            layer = plan.layers[step.layer]
            batch = block[step.micro_batch]
            if layer.kind in ATTENTION_KINDS:
                for moves in (kv_load_moves, kv_store_moves):
                    yield from (("kv", move) for move in moves(at, layer.block, batch, step.sweep))
            for store, end in ((False, 0), (True, len(units) - 1)):
                if step.layer != end:
                    yield from (
                        ("hidden", move) for move in hidden_moves(at, batch, step.sweep, store)
                    )


def both(run: Run, placement: str, folder: Path, offload_dir: Path) -> tuple[Moved, Moved]:
    """Bytes by kind and lane: moved, and planned."""
    llm = run.go(folder, PLACEMENTS[placement], offload_dir)
    report = llm.report
    assert report is not None
    return {kind: dict(report.io_bytes_by_kind[kind]) for kind in KINDS}, planned(llm, run)


# ---- exact

H2O_6 = H2O(heavy_size=4, recent_size=2)
PACKED = {"compress_cache": True}
ON_HOST = {"cpu_cache_compute": True}
IN_ORDER = {"overlap": False, "sep_layer": False}
FEW = (2, 9, 4, 1, 5)
FALLING = (30, 20, 9, 3, 1)
RUNS: dict[str, Run] = {
    "host": Run(stand_in=False),
    "device": Run(),
    "host, sequential, joined": Run(3, 1, False, IN_ORDER),
    "device, attends on host": Run(2, 3, switches=ON_HOST),
    "device, h2o": Run(eviction=H2O_6),
    "host, h2o that fills up": Run(3, 1, False, eviction=H2O(heavy_size=6, recent_size=5)),
    "device, evicts in the prompt only": Run(
        eviction=H2O(heavy_size=4, recent_size=2, while_decoding=False)
    ),
    "host, packed KV in 8 bits, h2o": Run(3, 1, False, {**PACKED, "cache_bits": 8}, H2O_6),
    "device, packed KV, segments": Run(switches=PACKED | ON_HOST, lengths=(70,) * 5),
    "device, packed KV, h2o": Run(switches=PACKED, eviction=H2O_6),
    "device, 4 bits": Run(switches={"compress_weight": True}),
    "host, 4 bits, int8": Run(
        stand_in=False, switches={"compress_weight": True, "int8_compute": True}
    ),
    "host, a shared prefix, segments": Run(3, 1, False, header=60, lengths=FEW),
    "device, a shared prefix, packed KV": Run(switches=PACKED, header=11, lengths=FEW),
    "device, a shared prefix": Run(2, 3, switches=ON_HOST, header=70, lengths=(70, 9, 4, 1, 5)),
    "device, a shared prefix, h2o": Run(header=11, lengths=FEW, eviction=H2O_6),
    # Each micro-batch is planned by its own longest prompt, as the engine lays out its units.
    "shorter prompts": Run(1, 2, lengths=(150, 100, 70, 30, 8)),
    "shorter prompts, sizes": Run(1, 2, lengths=FALLING, new_tokens=8, eviction=H2O_6),
    "shorter prompts, ratios": Run(1, 2, lengths=FALLING, new_tokens=12, eviction=H2O(0.2)),
    # With H2O slots do not grow, and every write-back is of a whole unit.
    "written back": Run(new_tokens=40, eviction=H2O_6),
}
# Each run meets a placement that moves of each kind what it has not on the device, and another.
NAMES = [*PLACEMENTS]
PAIRS = [(NAMES[(7 * i) % len(NAMES)], run) for i, run in enumerate(RUNS)]
PAIRS += [("everything split 30/30", run) for run in RUNS]
PAIRS += [("kv on disk", "shorter prompts"), ("kv on disk", "written back")]


@pytest.mark.parametrize(("placement", "run"), thinned(PAIRS, 2))
def test_the_engine_moves_what_is_planned(
    placement: str, run: str, folder: Path, tmp_path: Path
) -> None:
    """Every kind and lane to the byte."""
    moved, expected = both(RUNS[run], placement, folder, tmp_path)
    for kind in KINDS:
        assert moved[kind] == pytest.approx(expected[kind])


# A family's run and placement.
FAMILY_RUNS: tuple[tuple[str, Run, str], ...] = (
    ("llama", RUNS["device"], "everything split 30/30"),
    ("gpt_neox", Run(3, 1, switches=IN_ORDER), "all on disk"),
    ("qwen2", Run(lengths=(5, 9, 30, 1, 12)), "kv split three ways"),
    ("qwen2", RUNS["device, packed KV, h2o"], "kv on disk"),
    ("qwen2", RUNS["device, a shared prefix"], "kv split three ways"),
    ("qwen3_moe", Run(switches={"expert_group": 16}), "weights on disk"),  # a block is one unit
)


@pytest.mark.parametrize(("family", "run", "placement"), FAMILY_RUNS)
def test_other_families(family: str, placement: str, run: Run, tmp_path: Path) -> None:
    write_aligned(random_model(model_type=family, **FAMILIES[family]), tmp_path)
    moved, expected = both(run, placement, tmp_path, tmp_path)
    assert moved == expected


@pytest.mark.parametrize(
    ("family", "stand_in", "head_rows"),
    [("qwen3_moe", False, 0), ("qwen3_moe", True, 0), ("opt", False, 48), ("llama", False, 48)],
)
def test_one_row_reads_what_its_tokens_need(
    family: str, stand_in: bool, head_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token a sweep: of each block 2 of 16 experts, whichever they are; every part of the head
    once, and of the embedding a page for the token."""
    if head_rows:
        monkeypatch.setattr(MemoryPlanner, "head_rows", lambda *_: head_rows)
    shape = SHAPE if family == "opt" else FAMILIES[family]
    write_aligned(random_model(model_type=family, **shape), tmp_path)
    run = Run(1, 1, stand_in, lengths=(1,), new_tokens=5)
    llm = run.go(tmp_path, PLACEMENTS["weights on disk"], tmp_path)
    assert llm.report is not None
    planned = disk_read_bytes(run.costs(llm, head_rows), [(run.blocks(llm)[0], 1)])
    assert llm.report.io_bytes_by_kind["weights"]["disk_read"] == pytest.approx(planned)


@pytest.mark.parametrize(("rows", "share"), [(1, 3 / 4), (5, 14 / 20)])
def test_kv_shares_are_honoured_to_a_kv_head_of_a_row(
    rows: int, share: float, folder: Path, tmp_path: Path
) -> None:
    """Of 4 kv-heads of one row 30 30 puts 1 on the device, 1 on the host, 2 on disk: 75% leave the
    device, not 70."""
    run = Run(rows, 1, lengths=(64,) * rows, new_tokens=1)
    moved = [run.go(folder, (100, 0, *kv, 100, 0), tmp_path).report for kv in ((30, 30), (0, 100))]
    split, whole = (report.io_bytes_by_kind["kv"]["d2h"] for report in moved if report is not None)
    assert split == share * whole


# ---- within a bound


def test_writing_back_is_spread_evenly(folder: Path, tmp_path: Path) -> None:
    """Every WRITE_BACK_STEPS sweeps the engine writes what a row holds then; the plan writes a
    share in every sweep.

    What they hold differs by less than a segment. Everything else is exact.
    """
    new_tokens = 2 * WRITE_BACK_STEPS + 3
    run = Run(5, 1, lengths=(60,) * 5, new_tokens=new_tokens)
    moved, expected = both(run, "kv on disk", folder, tmp_path)
    writes = LAYERS * ((new_tokens - 1) // WRITE_BACK_STEPS)
    bound = writes * len(run.lengths) * COLUMN * SEGMENT_SLOTS
    for kind, lane in product(KINDS, LANES):
        written = kind == "kv" and lane in ("disk_write", "d2h")
        assert abs(moved[kind][lane] - expected[kind][lane]) <= (bound if written else 0)

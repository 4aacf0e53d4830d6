"""What eviction saves: bytes held, planned and moved, against sums by hand; memory of the
prefill."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flexgen_h2o import MemoryBudget, Policy
from flexgen_h2o.core.units import WRITE_BACK_STEPS
from flexgen_h2o.engine.memory import MemoryPlanner
from flexgen_h2o.engine.report import RunReport
from flexgen_h2o.kvcache.eviction import H2O, Evicting, Eviction, ValueH2O
from flexgen_h2o.kvcache.eviction.policy import NO_RECORD
from flexgen_h2o.models.load import find_model
from tests.eviction.cases import LENGTHS, NEW_TOKENS, Case, Known
from tests.eviction.engine import PAIRS, STAND_IN, Wanted, generate
from tests.parity.cases import BASE, PLACEMENTS
from tests.parity.reference import random_model, random_prompts

LAYERS = BASE["num_hidden_layers"]
HEADS = BASE["num_attention_heads"]
WIDTH = 12
COLUMN = 2 * HEADS * WIDTH * 4  # bytes of a key and a value of every head in fp32

# ---- what the report says is held


def held(pair: str, n: int, step: int) -> int:
    """Columns of both layers in decode step 1, 2, ... of a prompt of n tokens: with the new one, 9
    at most."""
    kept = {
        "h2o": [8, 8],
        "h2o, ratios": [max(1, n // 2) + max(1, n // 4)] * 2,
    }[pair]
    return sum(min(min(n, columns) + step, columns + 1) for columns in kept)


@pytest.mark.parametrize(
    ("pair", "slots", "gbs", "num_batches", "blocks"),
    [
        ("h2o", 9, 2, 2, 2),
        ("h2o, ratios", 16, 1, 1, 6),
    ],
)
def test_kv_of_the_report(
    pair: str,
    slots: int,
    gbs: int,
    num_batches: int,
    blocks: int,
    known: Callable[[str], Known],
    reference: Callable[[Case], Wanted],
    tmp_path: Path,
) -> None:
    """The mean of the decode sweeps of all blocks."""
    prompts = reference(Case(pair)).prompts
    policy = Policy(gbs, num_batches)
    ran = generate(
        known("normal").folder, prompts, NEW_TOKENS, PAIRS[pair].engine, policy, tmp_path
    )
    steps = range(1, NEW_TOKENS)
    sweeps = blocks * len(steps)
    assert ran.report.kv == {
        "slots": slots,
        "bytes": COLUMN * sum(held(pair, n, s) for n in LENGTHS for s in steps) // sweeps,
        "full_bytes": COLUMN * LAYERS * sum(n + s for n in LENGTHS for s in steps) // sweeps,
    }


def test_a_plan_names_the_bytes_of_a_sequence(known: Callable[[str], Known]) -> None:
    spec = find_model(str(known("normal").folder), None).spec
    memory = MemoryPlanner(spec, Policy(), 4, device_is_host=True)
    assert memory.sequence_bytes((9,) * LAYERS, NO_RECORD) == {"kv": 9 * LAYERS * COLUMN}


# ---- what is moved and reserved

# Eight prompts of 100 tokens grow by 29: 128 columns, or with the budget 15 and the new one. All
# areas are full pages.
ROWS = 8
PROMPT = 100
GROWS = 29
SLOTS = 16
STEPS = GROWS - 1
WRITES = (GROWS - 1) // WRITE_BACK_STEPS
EVICTION = H2O(heavy_size=9, recent_size=SLOTS - 10)
SPARE = 1.2  # reserved are whole pages for any smaller unit too


def moved(
    known: Callable[[str], Known], placement: str, eviction: Eviction | None, tmp_path: Path
) -> RunReport:
    prompts = random_prompts((PROMPT,) * ROWS)
    policy = Policy(ROWS, 1, PLACEMENTS[placement])
    return generate(
        known("long").folder, prompts, GROWS, eviction, policy, tmp_path, STAND_IN
    ).report


@pytest.mark.parametrize(
    ("eviction", "slots"),
    [(None, 128), (EVICTION, SLOTS), (ValueH2O(heavy_size=9, recent_size=6), SLOTS)],
)
def test_a_unit_moves_its_slots(
    eviction: Evicting | None, slots: int, known: Callable[[str], Known], tmp_path: Path
) -> None:
    """Each step reads the unit. On disk it is written after the prefill and every WRITE_BACK_STEPS
    steps; to the host go the unit once and each new column. What the policy records never moves."""
    unit = LAYERS * ROWS * slots * COLUMN
    for placement, read, written, bytes_written in (
        ("kv on disk", "disk_read", "disk_write", (1 + WRITES) * unit),
        ("kv on host", "h2d", "d2h", unit + LAYERS * STEPS * ROWS * COLUMN),
    ):
        report = moved(known, placement, eviction, tmp_path)
        assert (report.io_bytes[read], report.io_bytes[written]) == (STEPS * unit, bytes_written)
        assert unit <= report.extra["kv_reserved_bytes"] <= SPARE * unit


# ---- memory of the prefill


def most_resident(run: Callable[[], Any]) -> int:
    """Bytes by which this process grows at most while it runs, by the kernel's count.

    What earlier tests freed goes back to the kernel first: memory of theirs that is used again
    would not be seen.
    """

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

    ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    except OSError:
        pytest.skip("this kernel does not let a process begin its peak of memory anew")
    before = status("VmRSS")
    run()
    return status("VmHWM") - before


def test_a_long_prompt_takes_memory_in_its_length(tmp_path: Path) -> None:
    """One matrix of scores of 1,900 columns is 14 MB; a layer here has 32 of them."""
    random_model(num_hidden_layers=1, max_position_embeddings=2048).save_pretrained(
        tmp_path / "model"
    )
    budget = MemoryBudget(None, "2GiB", "64MiB")
    grown = []
    planned = []

    def run(length: int) -> None:
        prompts = random_prompts((length,) * 8)
        policy = Policy(8, 1)
        ran = generate(
            tmp_path / "model", prompts, 2, ValueH2O(0.1), policy, tmp_path / "offload", budget
        )
        planned.append(ran.report.peak_bytes["host"])

    assert most_resident(lambda: torch.ones(2**24)) > 60 * 2**20, (
        "the measure sees what is freed again"
    )
    run(16)  # compiles, starts threads
    for length in (950, 1900):
        grown.append(most_resident(lambda length=length: run(length)))
    assert planned[2] < 2.2 * planned[1]
    assert grown[1] < 2.5 * grown[0] + 2**23
    assert grown[1] < planned[2] + 2**21, f"the report says {planned[2]}"

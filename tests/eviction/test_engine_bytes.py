"""What eviction saves: bytes held, planned and moved, against sums by hand; memory of the
prefill."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flexgen_h2o import LLM, MemoryBudget, Policy, SamplingParams
from flexgen_h2o.core.units import WRITE_BACK_STEPS
from flexgen_h2o.kvcache.eviction import H2O, Evicting
from tests.eviction.cases import LENGTHS, NEW_TOKENS, WINDOWS, Known
from tests.eviction.engine import PAIRS, STAND_IN, generate
from tests.parity.cases import BASE, PLACEMENTS
from tests.parity.reference import random_model, random_prompts

LAYERS = BASE["num_hidden_layers"]
HEADS = BASE["num_attention_heads"]
WIDTH = 12
COLUMN = 2 * HEADS * WIDTH * 4  # bytes of a key and a value of every head in fp32

# ---- what the report says is held


def test_kv_of_the_report(known: Callable[[str], Known], tmp_path: Path) -> None:
    """The mean of the decode sweeps of both blocks: each row holds 8 columns, and the new one."""
    prompts = random_prompts(LENGTHS)
    h2o = PAIRS["h2o"].engine
    ran = generate(known("normal").folder, prompts, NEW_TOKENS, h2o, Policy(2, 2), tmp_path)
    steps = range(1, NEW_TOKENS)
    held = sum(min(min(n, 8) + step, 9) for n in LENGTHS for step in steps)
    full = sum(n + step for n in LENGTHS for step in steps)
    mean_of = COLUMN * LAYERS / (2 * len(steps))
    assert ran.report.kv == {
        "slots": 9,
        "bytes": int(held * mean_of),
        "full_bytes": int(full * mean_of),
    }


@pytest.mark.parametrize("shape", [WINDOWS, "mistral, windows", "gpt_oss"])
def test_windows_hold_what_they_see(
    shape: str, known: Callable[[str], Known], tmp_path: Path
) -> None:
    """What a row of its own length holds is full."""
    lengths = (1, 4, 7, 8, 40)
    llm = LLM(str(known(shape).folder), Policy(2, 2), dtype="float32", offload_dir=tmp_path)
    with llm:
        llm.generate(random_prompts(lengths), SamplingParams(max_tokens=14, ignore_eos=True))
        spec = llm.model.spec
        report = llm.report
    assert report is not None and report.kv["bytes"] == report.kv["full_bytes"]
    held = sum(n + 14 if w is None else min(w, n + 14) for w in spec.windows for n in lengths)
    assert report.cache_bytes == spec.kv_bytes_per_token(4) // spec.num_blocks * held


# ---- what is moved and reserved

# Eight prompts of 100 tokens grow by 29: 128 columns, or with the budget 15 and the new one. All
# areas are full pages.
ROWS = 8
PROMPT = 100
GROWS = 29
SLOTS = 16
STEPS = GROWS - 1
WRITES = (GROWS - 1) // WRITE_BACK_STEPS
SPARE = 1.2  # reserved are whole pages for any smaller unit too


@pytest.mark.parametrize(
    ("eviction", "slots"),
    [(None, 128), (H2O(heavy_size=9, recent_size=6), SLOTS)],
)
def test_a_unit_moves_its_slots(
    eviction: Evicting | None, slots: int, known: Callable[[str], Known], tmp_path: Path
) -> None:
    """Each step reads the unit. On disk it is written after the prefill and every WRITE_BACK_STEPS
    steps; to the host go the unit once and each new column. What the policy records never moves."""
    unit = LAYERS * ROWS * slots * COLUMN
    prompts = random_prompts((PROMPT,) * ROWS)
    folder = known("long").folder
    for placement, read, written, bytes_written in (
        ("kv on disk", "disk_read", "disk_write", (1 + WRITES) * unit),
        ("kv on host", "h2d", "d2h", unit + LAYERS * STEPS * ROWS * COLUMN),
    ):
        policy = Policy(ROWS, 1, PLACEMENTS[placement])
        ran = generate(folder, prompts, GROWS, eviction, policy, tmp_path, STAND_IN)
        report = ran.report
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
    planned = []

    def run(length: int) -> None:
        prompts = random_prompts((length,) * 8)
        folders = tmp_path / "model", tmp_path / "offload"
        ran = generate(folders[0], prompts, 2, H2O(0.1), Policy(8, 1), folders[1], budget)
        planned.append(ran.report.peak_bytes["host"])

    assert most_resident(lambda: torch.ones(2**24)) > 60 * 2**20, (
        "the measure sees what is freed again"
    )
    run(16)  # compiles, starts threads
    grown = [most_resident(lambda length=length: run(length)) for length in (950, 1900)]
    assert planned[2] < 2.2 * planned[1]
    assert grown[1] < 2.5 * grown[0] + 2**23
    assert grown[1] < planned[2] + 2**21, f"the report says {planned[2]}"

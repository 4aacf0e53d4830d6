"""Eviction on every tier: homes of the KV cache, batches and blocks, rows that leave, disk
overlays, long prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flexgen_h2o import LLM, MemoryBudget, Policy, SamplingParams
from flexgen_h2o.core.units import SEGMENT_SLOTS, WRITE_BACK_STEPS
from flexgen_h2o.engine.memory import MemoryPlanner
from flexgen_h2o.engine.memory_plan import SEQUENTIAL, BlockShape
from flexgen_h2o.kvcache.eviction import H2O, Tova
from flexgen_h2o.kvcache.eviction.policy import record_of
from flexgen_h2o.models.load import find_model
from tests.eviction import policies as plain
from tests.eviction.conftest import LENGTHS, NEW_TOKENS, Known
from tests.eviction.engine import (
    PAIRS,
    STAND_IN,
    Pair,
    Ran,
    Wanted,
    assert_equal,
    assert_same,
    cut,
    generate,
    run_with,
    wanted,
)
from tests.eviction.policies import Budget
from tests.parity.cases import BASE, CONFIGURATIONS, PLACEMENTS, thinned
from tests.parity.reference import LONG, folder_with_eos, token_that_ends

HERE = (
    "all on device",
    "all on host",
    "all on disk",
    "everything split 30/30",
    "kv on host",
    "kv on disk",
)
KV_PLACEMENTS = (
    *HERE,
    "kv split three ways",
    "kv on host and disk",
    "device and disk in halves",
    "each kind elsewhere",
)
BUDGETS = {"host": MemoryBudget(), "stand-in": STAND_IN}
# What the decode kernel ranks, what the policy ranks itself, no scores, more slots than needed.
TURNS = (
    "h2o",
    "h2o-norm, one sink",
    "tova",
    "h2o, prompt only",
    "h2o-v",
    "random",
    "h2o, ratios",
    "snapkv",
    "local",
)


def some_of_each() -> Iterator[tuple[str, str, str]]:
    """(placement, configuration, pair): each placement in two configurations, all of these in turn
    with all pairs."""
    names = list(CONFIGURATIONS)
    turn = 0
    for p, placement in enumerate(KV_PLACEMENTS):
        for step in (0, 5):
            yield placement, names[(p + step) % len(names)], TURNS[turn % len(TURNS)]
            turn += 1


@pytest.mark.parametrize(("placement", "configuration", "pair"), thinned(some_of_each(), 3))
def test_placement_by_configuration(
    placement: str,
    configuration: str,
    pair: str,
    known: Callable[[str], Known],
    reference: Callable[..., Wanted],
    tmp_path: Path,
) -> None:
    """Six rows: no block but "one batch" is filled evenly, and most configurations need several."""
    chosen = CONFIGURATIONS[configuration]
    want = reference("normal", pair)
    policy = chosen.policy(PLACEMENTS[placement])
    assert_equal(known("normal").folder, want, PAIRS[pair], policy, tmp_path, chosen.budget)


def test_one_llm_for_all_workloads(
    known: Callable[[str], Known], reference: Callable[..., Wanted], tmp_path: Path
) -> None:
    """Small, then larger than the open buffers, then small again in the large ones; each over
    several blocks."""
    want = reference("normal", "h2o")
    policy = Policy(2, 1, PLACEMENTS["everything split 30/30"])
    with LLM(
        str(known("normal").folder),
        policy,
        PAIRS["h2o"].engine,
        dtype="float32",
        budget=STAND_IN,
        offload_dir=tmp_path,
    ) as llm:
        for count, most in ((3, 5), (6, 12), (5, 12), (2, 3)):
            ran = run_with(llm, want.prompts[:count], SamplingParams(max_tokens=most))
            assert_same(cut(Wanted(want.prompts[:count], want.rows[:count]), [most] * count), ran)


@pytest.mark.parametrize("stand_in", [False, True], ids=["host", "stand-in"])
def test_a_chosen_policy_keeps_to_its_budget(
    stand_in: bool, known: Callable[[str], Known], reference: Callable[..., Wanted], tmp_path: Path
) -> None:
    """Room for one row at a time with everything on disk: whatever is chosen, the columns are the
    same."""
    folder = known("normal").folder
    want = reference("normal", "h2o")
    eviction = PAIRS["h2o"].engine
    spec = find_model(str(folder), None).spec
    shape = BlockShape(1, 1, max(LENGTHS), (9,) * spec.num_blocks, record_of(eviction))
    plan = MemoryPlanner(spec, Policy(1, 1, (0,) * 6), 4, not stand_in).plan(shape, SEQUENTIAL)
    device = plan.bytes_on("device")
    host = plan.bytes_on("host")
    allowed = MemoryBudget(device, host, "64MiB") if stand_in else MemoryBudget(None, host, "64MiB")
    ran = generate(folder, want.prompts, NEW_TOKENS, eviction, "auto", tmp_path, allowed)
    assert_same(want, ran)
    assert ran.report.peak_bytes["host"] <= host and ran.report.peak_bytes["device"] <= device


# ---- rows that end at an end-of-sequence token


ENDING_LENGTHS = (17, 3, 9, 9, 1, 12, 5, 9, 2)


@pytest.mark.parametrize(
    ("pair", "placement", "gbs", "num_batches", "budget", "on_host"),
    thinned(
        [
            ("h2o", "kv split three ways", 3, 3, "stand-in", False),
            ("tova", "kv on host and disk", 3, 2, "stand-in", True),
            ("h2o-norm, one sink", "kv split three ways", 9, 1, "stand-in", False),
            ("h2o-v", "kv on disk", 5, 2, "stand-in", True),
            ("h2o", "kv split three ways", 4, 2, "stand-in", False),
            ("h2o, prompt only", "everything split 30/30", 4, 2, "stand-in", False),
            ("h2o, ratios", "all on disk", 9, 1, "host", True),
        ],
        2,
    ),
)
def test_rows_that_end_leave_a_block(
    pair: str,
    placement: str,
    gbs: int,
    num_batches: int,
    budget: str,
    on_host: bool,
    known: Callable[[str], Known],
    reference: Callable[..., Wanted],
    tmp_path: Path,
) -> None:
    """The rows behind them take their places, with scores, positions, victims and columns that wait
    for the disk."""
    whole = reference("normal", pair, ENDING_LENGTHS, LONG)
    eos = token_that_ends(whole.tokens)
    want = cut(whole, [row.index(eos) + 1 if eos in row else len(row) for row in whole.tokens])
    assert len({len(row) for row in want.tokens}) >= 4
    folder = folder_with_eos(known("normal").folder, tmp_path / "model", eos)
    policy = Policy(
        gbs, num_batches, PLACEMENTS[placement], cpu_cache_compute=on_host, overlap=not on_host
    )
    assert_equal(folder, want, PAIRS[pair], policy, tmp_path, BUDGETS[budget])


# ---- columns that wait in memory for the disk


@pytest.mark.parametrize(
    ("pair", "placement", "budget"),
    [
        ("h2o", "kv split three ways", "stand-in"),
        ("h2o, prompt only", "kv on disk", "stand-in"),
        ("tova", "all on disk", "host"),
    ],
)
def test_the_overlay_is_written_back_many_times(
    pair: str,
    placement: str,
    budget: str,
    known: Callable[[str], Known],
    reference: Callable[..., Wanted],
    tmp_path: Path,
) -> None:
    """With fewer slots than steps between two writes, a slot is overwritten while it waits."""
    new = 2 * WRITE_BACK_STEPS + 5
    want = reference("normal", pair, (5, 1, 20), new)
    policy = Policy(2, 2, PLACEMENTS[placement])
    ran = assert_equal(known("normal").folder, want, PAIRS[pair], policy, tmp_path, BUDGETS[budget])
    assert ran.report.kv["slots"] < WRITE_BACK_STEPS or pair == "h2o, prompt only"


# ---- long prompts


FAR = {
    "h2o": Pair(
        H2O(heavy_size=90, recent_size=45), plain.h2o(Budget(heavy_size=90, recent_size=45))
    ),
    "tova": Pair(
        Tova(heavy_size=60, recent_size=10), plain.tova(Budget(heavy_size=60, recent_size=10))
    ),
}


def run_far(
    model: Known,
    pair: Pair,
    lengths: tuple[int, ...],
    new: int,
    policy: Policy,
    offload: Path,
    budget: MemoryBudget,
) -> Ran:
    last = (256 if max(lengths) > 64 else 64) + 1
    want = wanted(model.plain, pair, lengths, [min(new, last - n) for n in lengths])
    return assert_equal(model.folder, want, pair, policy, offload, budget)


@pytest.mark.parametrize(
    ("name", "policy", "budget"),
    [
        ("h2o", Policy(5, 1, PLACEMENTS["kv on disk"]), "host"),
        ("tova", Policy(2, 2, PLACEMENTS["kv split three ways"]), "stand-in"),
    ],
    ids=["h2o", "tova"],
)
def test_more_slots_than_a_segment(
    name: str, policy: Policy, budget: str, known: Callable[[str], Known], tmp_path: Path
) -> None:
    """Prompts and budgets of several segments; rows whose budget fills in a later segment while
    decoding."""
    ran = run_far(
        known("long"), FAR[name], (133, 60, 150, 150, 3), 9, policy, tmp_path, BUDGETS[budget]
    )
    assert ran.report.kv["slots"] > SEGMENT_SLOTS


@pytest.mark.parametrize(
    ("pair", "budget"),
    [("h2o, ratios", "stand-in"), ("snapkv", "host")],
)
def test_the_last_position_ends_a_row(
    pair: str, budget: str, known: Callable[[str], Known], tmp_path: Path
) -> None:
    """A prompt that fills all positions gets one token."""
    lengths = tuple(BASE["max_position_embeddings"] - n for n in (0, 1, 3, 4, 6, 54))
    placement = "all on device" if budget == "host" else "kv split three ways"
    policy = Policy(4, 1, PLACEMENTS[placement])
    ran = run_far(
        known("normal"), PAIRS[pair], lengths, NEW_TOKENS, policy, tmp_path, BUDGETS[budget]
    )
    assert [len(row) for row in ran.tokens] == [1, 2, 4, 5, 7, 12]

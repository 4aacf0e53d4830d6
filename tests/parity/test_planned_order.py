"""The simulator starts the same transfers as the engine, in the same order and between the same
steps of compute.

Both run engine/loop.py; what may differ is which units are ready, what they take of the rings, and
what is moved. Both are noted where the thread that computes hands an operation to its lane, so no
clock decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o import LLM
from flexgen_h2o.core.timeline import Timeline
from flexgen_h2o.engine.loop import weight_sequence
from flexgen_h2o.engine.memory import MemoryPlanner
from flexgen_h2o.engine.memory_plan import OVERLAPPED, SEQUENTIAL, Depth
from flexgen_h2o.engine.workload import shape_of
from flexgen_h2o.kvcache.eviction import H2O
from flexgen_h2o.planner.cost_model import LANES, CostModel, weight_moves
from flexgen_h2o.planner.predict import predict
from flexgen_h2o.tiers.transfers import Lanes
from tests.parity.cases import PLACEMENTS
from tests.parity.planned import FAMILIES, SHAPE, Run, write_aligned
from tests.parity.reference import random_model

Operations = list[tuple[str, str]]  # lane and name
COMPUTE = "compute"


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Operations:
    """What the engine hands to its lanes from the first block on, and its steps of compute."""
    found: Operations = []
    submit = Lanes.submit
    record = Timeline.record
    reset = Timeline.reset

    def note_transfer(lanes: Lanes, lane: str, name: str, *args: Any, **more: Any) -> Any:
        found.append((lane, name))
        return submit(lanes, lane, name, *args, **more)

    def note_compute(timeline: Timeline, lane: str, name: str, *args: Any, **more: Any) -> None:
        if lane == COMPUTE:
            found.append((lane, name))
        record(timeline, lane, name, *args, **more)

    def note_start(timeline: Timeline) -> None:
        found.clear()
        reset(timeline)

    monkeypatch.setattr(Lanes, "submit", note_transfer)
    monkeypatch.setattr(Timeline, "record", note_compute)
    monkeypatch.setattr(Timeline, "reset", note_start)
    return found


def simulated(llm: LLM, run: Run, depth: Depth) -> Operations:
    """The first block. A unit's weights are one operation there, and one a tensor in the engine."""
    at = run.costs(llm)
    plan = at.memory.plan(shape_of(at.policy, at.need), depth)
    by_tensor = run.costs(llm, plan.head_rows)
    tensors = {lane: tensors_of(by_tensor, run.new_tokens, lane) for lane in ("disk_read", "h2d")}
    found: Operations = []

    def on_span(lane: str, name: str, start: float, end: float) -> None:
        if lane != "wait":
            found.extend([(lane, name)] * (next(tensors[lane]) if name == "load_weight" else 1))

    predict(at, plan, [(run.blocks(llm)[0], 1)], on_span)
    return found


def tensors_of(at: CostModel, sweeps: int, lane: str) -> Iterator[int]:
    """Of each weight unit that comes over the lane, in the order of loads."""
    plan = at.memory.layers
    for unit in weight_sequence(sweeps + 1, tuple(layer.unit for layer in plan.layers)):
        moves = weight_moves(at, plan.units[unit])
        yield from (int(move.pieces) for move in moves if move.lane == lane)


def by_lane(operations: Operations, steps: int) -> dict[str, Operations]:
    """Each lane's operations among the steps of compute, up to the last step of the first block."""
    ends = [i for i, (_, name) in enumerate(operations) if name.startswith("compute_layer")]
    block = operations[: ends[steps - 1] + 1]
    return {lane: [pair for pair in block if pair[0] in (lane, COMPUTE)] for lane in LANES}


H2O_6 = H2O(heavy_size=4, recent_size=2)
OF_8 = (9,) * 8
DEEP = OVERLAPPED[3]
DISK = "weights on disk"
OPT = {**SHAPE, "num_hidden_layers": 4}  # more units than are loaded ahead
LLAMA = {**FAMILIES["llama"], "model_type": "llama", "num_hidden_layers": 3}
MOE = {**FAMILIES["qwen3_moe"], "model_type": "qwen3_moe", "num_hidden_layers": 3}
# (model, placement, run, look-ahead, rows of a part of the head)
CASES: dict[str, tuple[dict[str, Any], str, Run, Depth, int]] = {
    "in order": (OPT, "all on disk", Run(lengths=OF_8, switches={"overlap": False}), SEQUENTIAL, 0),
    "h2o": (OPT, "all on disk", Run(2, 3, lengths=(9,) * 12, eviction=H2O_6), DEEP, 0),
    "packed, split": (
        OPT,
        "everything split 30/30",
        Run(lengths=OF_8, switches={"compress_cache": True}),
        Depth(1, 2, 3),
        0,
    ),
    "4 bits": (OPT, DISK, Run(lengths=OF_8, switches={"compress_weight": True}), OVERLAPPED[0], 0),
    "attends on host": (
        OPT,
        "kv on disk",
        Run(1, 3, lengths=(9,) * 6, switches={"cpu_cache_compute": True}),
        DEEP,
        0,
    ),
    "host, joined": (
        OPT,
        "all on disk",
        Run(1, 3, False, lengths=(9,) * 4, switches={"sep_layer": False}),
        OVERLAPPED[0],
        0,
    ),
    "hidden": (OPT, "hidden on disk", Run(lengths=(9,) * 7), DEEP, 0),
    # So many rows that there is no expert that no token chooses.
    "experts in halves": (
        MOE,
        DISK,
        Run(16, 1, lengths=(9,) * 32, switches={"expert_group": 8}),
        DEEP,
        0,
    ),
    "parts of a tied head": (OPT, DISK, Run(2, 2, False, lengths=OF_8), DEEP, 48),
    "parts of a head": (LLAMA, DISK, Run(2, 2, False, lengths=OF_8), DEEP, 48),
}


@pytest.mark.parametrize("case", CASES)
def test_the_order_is_the_engines(case: str, tmp_path: Path, noted: Operations) -> None:
    shape, placement, run, depth, head_rows = CASES[case]
    write_aligned(random_model(**shape), tmp_path)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("flexgen_h2o.engine.memory.OVERLAPPED", (depth,))
        if head_rows:
            patched.setattr(MemoryPlanner, "head_rows", lambda *_: head_rows)
        llm = run.go(tmp_path, PLACEMENTS[placement], tmp_path)
        whole = simulated(llm, run, depth)
    steps = sum(name.startswith("compute_layer") for _, name in whole)
    layers = run.costs(llm, head_rows).memory.layers.layers
    sweeps = run.new_tokens * len(layers)
    assert sweeps <= steps <= sweeps * len(run.blocks(llm)[0]), "some micro-batches are joined"
    found = by_lane(whole, steps)
    assert max(map(len, found.values())) > steps
    # What is looked up is not simulated.
    assert found == by_lane([one for one in noted if one[1] != "look_up_weight"], steps)

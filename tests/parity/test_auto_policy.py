"""`policy="auto"` under budgets cut to the model: the right tokens, and within every budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexgen_h2o import LLM, MemoryBudget, Policy, SamplingParams
from flexgen_h2o.core.config import TIERS
from flexgen_h2o.engine.memory import MemoryPlanner
from flexgen_h2o.engine.memory_plan import OVERLAPPED, SEQUENTIAL, BlockShape, Depth
from flexgen_h2o.models.load import find_model
from tests.parity.reference import (
    Reference,
    make_reference,
    random_model,
    random_prompts,
    tokens_of,
)

LENGTHS = (5, 9, 9, 1, 12)
NEW_TOKENS = 5


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Six blocks: more weights than a look-ahead ring holds, so that a part of them can be left on
    disk."""
    model = random_model(num_hidden_layers=6)
    return make_reference(
        model, tmp_path_factory.mktemp("model"), random_prompts(LENGTHS), NEW_TOKENS
    )


def budget(known: Reference, stand_in: bool, depth: Depth, weight_share: float) -> MemoryBudget:
    """What one row at a time takes with everything on disk, and on the computing tier a share of
    the weights more."""
    spec = find_model(str(known.folder), None).spec
    shape = BlockShape(1, 1, max(LENGTHS), (max(LENGTHS) + NEW_TOKENS - 1,) * spec.num_blocks)
    plan = MemoryPlanner(spec, Policy(1, 1, (0,) * 6), 4, not stand_in).plan(shape, depth)
    more = int(weight_share * spec.num_weights * 4)
    host = plan.bytes_on("host")
    device = plan.bytes_on("device")
    return (
        MemoryBudget(device + more, host, "64MiB")
        if stand_in
        else MemoryBudget(None, host + more, "64MiB")
    )


def check(
    known: Reference, allowed: MemoryBudget, offload_dir: Path, rows: int = len(LENGTHS)
) -> Policy:
    """The last `rows` prompts, the longest among them."""
    with LLM(
        str(known.folder), "auto", dtype="float32", budget=allowed, offload_dir=offload_dir
    ) as llm:
        found = tokens_of(
            llm.generate(known.prompts[-rows:], SamplingParams(max_tokens=NEW_TOKENS))
        )
        assert found == known.tokens[-rows:]
        assert llm.policy is not None and llm.report is not None
        for tier in TIERS:
            assert llm.report.peak_bytes[tier] <= (getattr(allowed, tier) or 0)
        return llm.policy


@pytest.mark.parametrize("stand_in", [False, True], ids=["host", "stand-in"])
def test_room_for_a_part_of_the_weights(stand_in: bool, deep: Reference, tmp_path: Path) -> None:
    policy = check(deep, budget(deep, stand_in, OVERLAPPED[1], 0.25), tmp_path, rows=1)
    assert 0 < policy.weight_shares[0] < 1


@pytest.mark.parametrize("stand_in", [False, True], ids=["host", "stand-in"])
def test_room_for_everything(stand_in: bool, deep: Reference, tmp_path: Path) -> None:
    policy = check(deep, budget(deep, stand_in, OVERLAPPED[0], 4), tmp_path)
    assert policy.weight_shares[0] == 1


@pytest.mark.parametrize("stand_in", [False, True], ids=["host", "stand-in"])
def test_room_for_one_layer_at_a_time(stand_in: bool, deep: Reference, tmp_path: Path) -> None:
    allowed = budget(deep, stand_in, SEQUENTIAL, 0)
    params = SamplingParams(max_tokens=NEW_TOKENS)
    with LLM(
        str(deep.folder),
        Policy(1, 1, (0,) * 6),
        dtype="float32",
        budget=allowed,
        offload_dir=tmp_path,
    ) as by_hand:
        assert tokens_of(by_hand.generate(deep.prompts, params)) == deep.tokens
    check(deep, allowed, tmp_path)

"""`policy="auto"` under budgets cut to the model: the right tokens, and within every budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexgen_h2o import MemoryBudget, Policy, SamplingParams
from flexgen_h2o.core.config import TIERS
from flexgen_h2o.engine.memory import MemoryPlanner
from flexgen_h2o.engine.memory_plan import OVERLAPPED, SEQUENTIAL, BlockShape, Depth
from flexgen_h2o.models.load import find_model
from tests.parity.reference import (
    Reference,
    make_reference,
    opened,
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


@pytest.mark.parametrize("stand_in", [False, True], ids=["host", "stand-in"])
@pytest.mark.parametrize(
    ("depth", "more", "rows", "share"),
    [
        (OVERLAPPED[1], 0.25, 1, (0, 1)),  # room for a part of the weights
        (OVERLAPPED[0], 4, 5, (1, 1)),  # room for everything
        (SEQUENTIAL, 0, 5, (0, 0)),  # room for one layer at a time
    ],
)
def test_tokens_within_budgets(
    depth: Depth,
    more: float,
    rows: int,
    share: tuple[int, int],
    stand_in: bool,
    deep: Reference,
    tmp_path: Path,
) -> None:
    """The last `rows` prompts, the longest among them. share: bounds of the weights' share on the
    computing tier."""
    allowed = budget(deep, stand_in, depth, more)
    params = SamplingParams(max_tokens=NEW_TOKENS)
    with opened(deep.folder, "auto", tmp_path, budget=allowed) as llm:
        assert tokens_of(llm.generate(deep.prompts[-rows:], params)) == deep.tokens[-rows:]
        assert llm.policy is not None and llm.report is not None
    low, high = share
    assert low <= llm.policy.weight_shares[0] <= high
    assert low == high or 0 < llm.policy.weight_shares[0] < 1
    for tier in TIERS:
        assert llm.report.peak_bytes[tier] <= (getattr(allowed, tier) or 0)

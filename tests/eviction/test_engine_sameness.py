"""What must not change a bit: a budget for everything, and the other rows of a batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flexgen_h2o import Policy
from flexgen_h2o.kvcache.eviction import EVICTING, H2O, Evicting
from tests.eviction.conftest import NEW_TOKENS, Known
from tests.eviction.engine import PAIRS, STAND_IN, Ran, Wanted, generate
from tests.parity.cases import PLACEMENTS
from tests.parity.reference import random_prompts

LENGTHS = (1, 9, 9, 21)
PROMPTS = random_prompts(LENGTHS)
MOST = max(LENGTHS) + NEW_TOKENS


def bits(ran: Ran) -> list[torch.Tensor]:
    return [torch.stack(ran.logits[i]) for i in range(len(ran.tokens))]


def assert_same_bits(one: Ran, other: Ran) -> None:
    assert one.tokens == other.tokens
    assert all(torch.equal(a, b) for a, b in zip(bits(one), bits(other), strict=True))


# ---- a budget for everything is the full cache


@pytest.mark.parametrize(("shape", "dtype"), [("odd sizes", "float32"), ("normal", "bfloat16")])
def test_a_budget_for_everything_gives_the_full_caches_bits(
    shape: str, dtype: str, known: Callable[[str], Known], tmp_path: Path
) -> None:
    folder = known(shape).folder
    full = generate(folder, PROMPTS, NEW_TOKENS, None, Policy(4, 1), tmp_path, dtype=dtype)
    assert full.report.kv["slots"] == MOST - 1
    for policy in EVICTING.values():
        eviction = policy(heavy_size=MOST // 2, recent_size=MOST - MOST // 2)
        ran = generate(folder, PROMPTS, NEW_TOKENS, eviction, Policy(4, 1), tmp_path, dtype=dtype)
        assert_same_bits(ran, full)
        assert ran.report.kv == full.report.kv


@pytest.mark.parametrize(
    "policy",
    [
        Policy(2, 2, PLACEMENTS["kv split three ways"]),
        Policy(3, 1, PLACEMENTS["kv on host"], cpu_cache_compute=True),
    ],
    ids=["split", "attends on host"],
)
def test_a_budget_for_everything_on_all_tiers(policy: Policy, known: Callable[[str], Known], tmp_path: Path) -> None:
    folder = known("normal").folder
    full = generate(folder, PROMPTS, NEW_TOKENS, None, policy, tmp_path, STAND_IN)
    for eviction in (
        H2O(heavy_size=MOST, recent_size=1),
        H2O(heavy_size=20, recent_size=20, layer_schedule="pyramid"),
        EVICTING["tova"](heavy_size=20, recent_size=20, while_decoding=False),
        EVICTING["h2o-v"](heavy_size=20, recent_size=20),
    ):
        ran = generate(folder, PROMPTS, NEW_TOKENS, eviction, policy, tmp_path, STAND_IN)
        assert_same_bits(ran, full)
        assert ran.report.io_bytes == full.report.io_bytes


@pytest.mark.parametrize("policy", EVICTING.values(), ids=EVICTING)
def test_the_least_budget_for_everything(policy: type[Evicting], known: Callable[[str], Known], tmp_path: Path) -> None:
    """The newest column is never read again: a column for all tokens but two is enough, one less is not."""
    folder, prompt, past = known("normal").folder, PROMPTS[3:], LENGTHS[3] + NEW_TOKENS - 2
    full = generate(folder, prompt, NEW_TOKENS, None, Policy(1, 1), tmp_path)
    enough, short = (
        generate(folder, prompt, NEW_TOKENS, policy(heavy_size=n - 9, recent_size=9), Policy(1, 1), tmp_path)
        for n in (past, past - 1)
    )
    assert_same_bits(enough, full)
    assert not torch.equal(bits(short)[0][-1], bits(full)[0][-1])
    assert all(torch.equal(a, b) for a, b in zip(bits(short)[0][:-1], bits(full)[0][:-1], strict=True))


# ---- a row is alone in its batch


@pytest.mark.parametrize("pair", ["h2o, ratios", "tova", "h2o-v"])
def test_a_batch_is_so_many_batches_of_one(
    pair: str, known: Callable[[str], Known], reference: Callable[..., Wanted], tmp_path: Path
) -> None:
    want, eviction, folder = reference("normal", pair), PAIRS[pair].engine, known("normal").folder
    together = generate(folder, want.prompts, NEW_TOKENS, eviction, Policy(6, 1), tmp_path)
    for i, prompt in enumerate(want.prompts):
        alone = generate(folder, [prompt], NEW_TOKENS, eviction, Policy(1, 1), tmp_path)
        assert alone.tokens == [together.tokens[i]]
        assert [alone.seen[0, block] for block in (0, 1)] == [together.seen[i, block] for block in (0, 1)]

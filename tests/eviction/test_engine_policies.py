"""Every policy and model shape in the engine against the slow reference: tokens, logits and held columns, in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flexgen_h2o import Policy
from flexgen_h2o.kvcache.eviction import EVICTING, H2O
from tests.eviction import policies as plain
from tests.eviction.conftest import OTHER_SHAPES, Known
from tests.eviction.engine import PAIRS, STAND_IN, Pair, Wanted, assert_equal, pyramid, wanted
from tests.eviction.policies import Budget
from tests.parity.cases import CONFIGURATIONS, FAMILY_SHAPES, PLACEMENTS, SHAPES

PLACES = ("all on device", "kv split three ways", "kv on disk", "kv on host")


def test_every_policy_has_a_row() -> None:
    missing = [name for name in EVICTING if name not in {pair.engine.name for pair in PAIRS.values()}]
    assert not missing, f"{missing}: add a pair to PAIRS in tests/eviction/engine.py, with a scorer in policies.py"


@pytest.mark.parametrize("pair", PAIRS)
def test_policy(pair: str, known: Callable[[str], Known], reference: Callable[..., Wanted], tmp_path: Path) -> None:
    """On several batches whose KV lies in three places."""
    policy = Policy(2, 2, PLACEMENTS["kv split three ways"])
    assert_equal(known("normal").folder, reference("normal", pair), PAIRS[pair], policy, tmp_path, STAND_IN)


def cases_of_shapes() -> Iterator[tuple[str, str, str, str]]:
    """(shape, pair, placement, configuration)"""
    shapes, configurations = [*list(SHAPES)[1:], *OTHER_SHAPES], list(CONFIGURATIONS)
    shapes.remove("long")
    for i, shape in enumerate(shapes):
        pair = ("h2o", "h2o-v", "snapkv, narrow", "tova")[i % 4]
        yield shape, pair, PLACES[(i + i // 4) % 4], configurations[(5 * i) % len(configurations)]


@pytest.mark.parametrize(("shape", "pair", "placement", "configuration"), cases_of_shapes())
def test_shape(
    shape: str, pair: str, placement: str, configuration: str, known: Callable[[str], Known],
    reference: Callable[..., Wanted], tmp_path: Path,
) -> None:  # fmt: skip
    chosen = CONFIGURATIONS[configuration]
    policy = chosen.policy(PLACEMENTS[placement])
    assert_equal(known(shape).folder, reference(shape, pair), PAIRS[pair], policy, tmp_path, chosen.budget)


# ---- the other families


@pytest.mark.parametrize(
    ("shape", "pair"),
    [
        *(("llama", p) for p in ("h2o", "h2o-norm, decayed", "tova", "snapkv", "h2o-v", "local", "random")),
        *(("gpt_neox", p) for p in ("h2o, pyramid", "tova", "h2o-v")),
    ],
)
def test_family(
    shape: str, pair: str, known: Callable[[str], Known], reference: Callable[..., Wanted], tmp_path: Path
) -> None:
    """llama: three query heads of a kv-head, whose scores are summed."""
    folder, want = known(shape).folder, reference(shape, pair)
    policy = Policy(2, 2, PLACEMENTS["kv split three ways"])
    assert_equal(folder, want, PAIRS[pair], policy, tmp_path, STAND_IN)


@pytest.mark.parametrize("shape", [shape for shape, config in FAMILY_SHAPES.items() if shape != config["model_type"]])
def test_shape_of_a_family(
    shape: str, known: Callable[[str], Known], reference: Callable[..., Wanted], tmp_path: Path
) -> None:
    want = reference(shape, "h2o", (9, 4), 6)
    policy = Policy(2, 1, PLACEMENTS["kv on disk"])
    assert_equal(known(shape).folder, want, PAIRS["h2o"], policy, tmp_path, STAND_IN)


# ---- a budget for each layer


@pytest.mark.parametrize(
    ("prompt_len", "heavy"),
    [(21, [12, 6, 0]), (12, [9, 6, 3]), (5, [6, 6, 6])],  # 5: no more than the prompt has anywhere
)
def test_pyramid_over_three_layers(
    prompt_len: int, heavy: list[int], known: Callable[[str], Known], tmp_path: Path
) -> None:
    model, sizes = known("three layers"), {"heavy_size": 6, "recent_size": 3}
    pair = Pair(H2O(**sizes, layer_schedule="pyramid"), pyramid(plain.h2o(Budget(**sizes)), 3))
    assert [pair.plain.sizes(prompt_len, i).heavy for i in range(3)] == heavy
    want = wanted(model.plain, pair, (prompt_len, prompt_len, 9), 12)
    policy = Policy(2, 2, PLACEMENTS["kv split three ways"])
    ran = assert_equal(model.folder, want, pair, policy, tmp_path, STAND_IN)
    for block, columns in enumerate(heavy):
        assert len(ran.seen[0, block][-1][0]) == min(columns + 3, prompt_len + 10) + 1
    assert ran.report.kv["slots"] == max(heavy[0] + 4, 10)  # the row of 9 keeps 6, 6, 6

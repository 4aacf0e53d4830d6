"""Every policy and model shape in the engine against the slow reference: tokens, logits and held columns, in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest

from flexgen_h2o import Policy
from flexgen_h2o.kvcache.eviction import H2O
from tests.eviction import policies as plain
from tests.eviction.conftest import LENGTHS, OTHER_SHAPES, Known
from tests.eviction.engine import PAIRS, STAND_IN, Pair, Wanted, assert_equal, pyramid, wanted
from tests.eviction.gqa_family import CONFIG, PlainGQA, random_weights, register, save
from tests.eviction.policies import Budget
from tests.parity.cases import CONFIGURATIONS, FAMILY_SHAPES, PLACEMENTS, SHAPES

PLACES = ("all on device", "kv split three ways", "kv on disk", "kv on host")


@pytest.mark.parametrize("pair", PAIRS)
def test_policy(pair: str, known: Callable[[str], Known], reference: Callable[..., Wanted], tmp_path: Path) -> None:
    """On one batch, then on several whose KV lies in three places."""
    folder, want = known("normal").folder, reference("normal", pair)
    for name, placement in (("one batch, sequential", "all on device"), ("device, 2x2", "kv split three ways")):
        chosen = CONFIGURATIONS[name]
        assert_equal(folder, want, PAIRS[pair], chosen.policy(PLACEMENTS[placement]), tmp_path, chosen.budget)


def cases_of_shapes() -> Iterator[tuple[str, str, str, str]]:
    """(shape, pair, placement, configuration): each shape with two of the policies."""
    shapes, configurations = [*list(SHAPES)[1:], *OTHER_SHAPES], list(CONFIGURATIONS)
    shapes.remove("long")
    for i, (shape, turn) in enumerate(product(shapes, (0, 1))):
        pair = ("h2o", "h2o-v", "snapkv, narrow", "tova")[(i + turn * (i // 2)) % 4]
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


@pytest.mark.parametrize("pair", ["h2o", "h2o, pyramid", "h2o-norm, decayed", "tova", "snapkv", "h2o-v", "local"])
@pytest.mark.parametrize("shape", ["llama", "gpt_neox"])
def test_family(
    shape: str, pair: str, known: Callable[[str], Known], reference: Callable[..., Wanted], tmp_path: Path
) -> None:
    folder, want = known(shape).folder, reference(shape, pair)
    for name, placement in (("3x1, joined", "all on device"), ("device, 2x2", "kv split three ways")):
        chosen = CONFIGURATIONS[name]
        assert_equal(folder, want, PAIRS[pair], chosen.policy(PLACEMENTS[placement]), tmp_path, chosen.budget)


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


# ---- grouped kv-heads


@pytest.mark.parametrize(
    ("pair", "heads", "kv_heads", "width"),
    [
        ("h2o", 6, 2, 8), ("h2o", 10, 2, 20), ("h2o", 4, 1, 15), ("h2o, pyramid", 4, 1, 15), ("tova", 6, 2, 8),
        ("h2o-norm, decayed", 10, 2, 20), ("h2o-v", 6, 2, 8), ("snapkv", 4, 1, 15), ("random", 10, 2, 20),
    ],
)  # fmt: skip
def test_grouped_kv_heads(
    pair: str, heads: int, kv_heads: int, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores of a kv-head's queries are summed, and the KV rows of a sequence are split over three tiers."""
    register(monkeypatch)
    for name, value in (("num_attention_heads", heads), ("num_key_value_heads", kv_heads), ("head_dim", width)):
        monkeypatch.setitem(CONFIG, name, value)
    weights = random_weights()
    want = wanted(PlainGQA(weights), PAIRS[pair], LENGTHS, 10)
    folder = save(weights, tmp_path / "model")
    assert_equal(folder, want, PAIRS[pair], Policy(6, 1), tmp_path)
    assert_equal(folder, want, PAIRS[pair], Policy(2, 2, PLACEMENTS["kv split three ways"]), tmp_path, STAND_IN)

"""Every policy and model shape in the engine against the slow reference, tokens, logits and held
columns, in fp32; and what must not change a bit: a budget for everything, and the other rows of a
batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from flexgen_h2o import Policy
from flexgen_h2o.kvcache.eviction import EVICTING, Evicting
from tests.eviction.conftest import NEW_TOKENS, OTHER_SHAPES, Known
from tests.eviction.engine import PAIRS, STAND_IN, Ran, Wanted, assert_equal, generate
from tests.parity.cases import CONFIGURATIONS, FAMILY_SHAPES, PLACEMENTS, SHAPES, thinned
from tests.parity.reference import random_prompts

PLACES = ("all on device", "kv split three ways", "kv on disk", "kv on host")


def test_every_policy_has_a_row() -> None:
    missing = [
        name for name in EVICTING if name not in {pair.engine.name for pair in PAIRS.values()}
    ]
    assert not missing, (
        f"{missing}: add a pair to PAIRS in tests/eviction/engine.py, with a scorer in policies.py"
    )


@pytest.mark.parametrize("pair", thinned(PAIRS, 2))
def test_policy(
    pair: str, known: Callable[[str], Known], reference: Callable[..., Wanted], tmp_path: Path
) -> None:
    """On several batches whose KV lies in three places."""
    policy = Policy(2, 2, PLACEMENTS["kv split three ways"])
    assert_equal(
        known("normal").folder, reference("normal", pair), PAIRS[pair], policy, tmp_path, STAND_IN
    )


def cases_of_shapes() -> Iterator[tuple[str, str, str, str]]:
    """(shape, pair, placement, configuration)"""
    shapes = [*list(SHAPES)[1:], *OTHER_SHAPES]
    configurations = list(CONFIGURATIONS)
    shapes = [shape for shape in shapes if shape not in ("long", "llama, 16 positions")]
    for i, shape in enumerate(shapes):
        pair = ("h2o", "h2o-v", "snapkv, narrow", "tova")[i % 4]
        yield shape, pair, PLACES[(i + i // 4) % 4], configurations[(5 * i) % len(configurations)]


@pytest.mark.parametrize(("shape", "pair", "placement", "configuration"), cases_of_shapes())
def test_shape(
    shape: str,
    pair: str,
    placement: str,
    configuration: str,
    known: Callable[[str], Known],
    reference: Callable[..., Wanted],
    tmp_path: Path,
) -> None:
    chosen = CONFIGURATIONS[configuration]
    policy = chosen.policy(PLACEMENTS[placement])
    assert_equal(
        known(shape).folder, reference(shape, pair), PAIRS[pair], policy, tmp_path, chosen.budget
    )


# ---- the other families


@pytest.mark.parametrize(
    ("shape", "pair"),
    thinned(
        [
            *(
                ("llama", p)
                for p in ("h2o", "h2o-norm, one sink", "tova", "snapkv", "h2o-v", "random")
            ),
            *(("qwen3", "h2o"), ("mixtral", "h2o")),
            *(("gpt_oss", p) for p in ("h2o", "h2o-norm, one sink")),
            ("gpt_neox", "h2o"),
        ],
        2,
    ),
)
def test_family(
    shape: str,
    pair: str,
    known: Callable[[str], Known],
    reference: Callable[..., Wanted],
    tmp_path: Path,
) -> None:
    """llama: three query heads of a kv-head, whose scores are summed."""
    folder = known(shape).folder
    want = reference(shape, pair)
    policy = Policy(2, 2, PLACEMENTS["kv split three ways"])
    assert_equal(folder, want, PAIRS[pair], policy, tmp_path, STAND_IN)


# All layers of these have windows, which leave nothing to a policy.
IN_WINDOWS = (
    "mistral, windows",
    "qwen3, one layer, window filled",
    "gpt_oss, one layer, one expert a token, odd sizes",
)
OF_FAMILIES = [
    shape for shape, of in FAMILY_SHAPES.items() if shape not in (of["model_type"], *IN_WINDOWS)
]


@pytest.mark.parametrize("shape", OF_FAMILIES)
def test_shape_of_a_family(
    shape: str, known: Callable[[str], Known], reference: Callable[..., Wanted], tmp_path: Path
) -> None:
    want = reference(shape, "h2o", (9, 4), 6)
    policy = Policy(2, 1, PLACEMENTS["kv on disk"])
    assert_equal(known(shape).folder, want, PAIRS["h2o"], policy, tmp_path, STAND_IN)


# ---- a budget for everything is the full cache

LENGTHS = (1, 9, 9, 21)
PROMPTS = random_prompts(LENGTHS)
MOST = max(LENGTHS) + NEW_TOKENS


def bits(ran: Ran) -> list[torch.Tensor]:
    return [torch.stack(ran.logits[i]) for i in range(len(ran.tokens))]


def assert_same_bits(one: Ran, other: Ran) -> None:
    assert one.tokens == other.tokens
    assert all(torch.equal(a, b) for a, b in zip(bits(one), bits(other), strict=True))


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


@pytest.mark.parametrize("policy", EVICTING.values(), ids=EVICTING)
def test_the_least_budget_for_everything(
    policy: type[Evicting], known: Callable[[str], Known], tmp_path: Path
) -> None:
    """The newest column is never read again: a column for all tokens but two is enough, one less is
    not."""
    folder = known("normal").folder
    prompt = PROMPTS[3:]
    past = LENGTHS[3] + NEW_TOKENS - 2
    full = generate(folder, prompt, NEW_TOKENS, None, Policy(1, 1), tmp_path)
    enough, short = (
        generate(
            folder,
            prompt,
            NEW_TOKENS,
            policy(heavy_size=n - 9, recent_size=9),
            Policy(1, 1),
            tmp_path,
        )
        for n in (past, past - 1)
    )
    assert_same_bits(enough, full)
    assert not torch.equal(bits(short)[0][-1], bits(full)[0][-1])
    assert all(
        torch.equal(a, b) for a, b in zip(bits(short)[0][:-1], bits(full)[0][:-1], strict=True)
    )


# ---- a row is alone in its batch


@pytest.mark.parametrize("pair", ["h2o, ratios", "tova"])
def test_a_batch_is_so_many_batches_of_one(
    pair: str, known: Callable[[str], Known], reference: Callable[..., Wanted], tmp_path: Path
) -> None:
    want = reference("normal", pair)
    eviction = PAIRS[pair].engine
    folder = known("normal").folder
    together = generate(folder, want.prompts, NEW_TOKENS, eviction, Policy(6, 1), tmp_path)
    for i, prompt in enumerate(want.prompts):
        alone = generate(folder, [prompt], NEW_TOKENS, eviction, Policy(1, 1), tmp_path)
        assert alone.tokens == [together.tokens[i]]
        assert [alone.seen[0, block] for block in (0, 1)] == [
            together.seen[i, block] for block in (0, 1)
        ]

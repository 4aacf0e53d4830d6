"""`generate` with eviction against the slow reference and the engine: tokens and held columns, in
fp32.

A family that the engine knows is also run by the engine; the others join as soon as it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o import Policy
from flexgen_h2o.integrations import disable_eviction, enable_eviction
from flexgen_h2o.models import FAMILIES
from tests.eviction.engine import PAIRS, Wanted, generate, wanted
from tests.integrations.models import MODELS, Known, generated, new_tokens_of
from tests.parity.cases import thinned

LENGTHS = (
    4,
    9,
    9,
    21,
    1,
    8,
)  # filled while decoding; by the prompt, neighbours of one length; longer; one token
NEW_TOKENS = 12
MODES = ("drop", "mask")


def held(cache: Any, block: int, sequence: int) -> list[list[int]]:
    """Positions by kv-head, ascending."""
    layer = cache.layers[block]
    positions = layer.record["positions"].view(
        len(layer.past), -1, layer.record["positions"].shape[1]
    )[sequence]
    return [sorted(p for p in row if p >= 0) for row in positions.tolist()]


def assert_held(cache: Any, want: Wanted, mode: str) -> None:
    """A dropping layer only names the column that goes next; a masking layer has masked it."""
    for i, (prompt, row) in enumerate(zip(want.prompts, want.rows, strict=True)):
        newest = len(prompt) + NEW_TOKENS - 2
        for block in range(len(cache.layers)):
            before = [[*heads, newest] for heads in row.kept[-2][block]]
            expected = before if mode == "drop" else row.kept[-1][block]
            assert held(cache, block, i) == expected, f"row {i}, block {block}"


# Every policy, and what changes budgets.
PAIRS_OF_ALL = (
    "h2o",
    "h2o, ratios",
    "h2o, no heavy",
    "h2o, prompt only",
    "local",
    "h2o-norm",
    "h2o-norm, one sink",
    "tova",
    "snapkv, narrow",
    "random",
    "h2o, of the sequence",
    "h2o, of the sequence, prompt only",
    "local, of the sequence",
    "h2o, protected",
)
OTHERS = ("h2o, ratios", "tova", "random", "h2o-norm, one sink", "snapkv")


def cases() -> Iterator[tuple[str, str]]:
    """Every policy with one model, every other model with a policy."""
    yield from (("llama, grouped", pair) for pair in PAIRS_OF_ALL)
    for i, name in enumerate(name for name in MODELS if name != "llama, grouped"):
        yield name, OTHERS[i % len(OTHERS)]


@pytest.mark.parametrize(("name", "pair"), thinned(cases(), 4))
def test_equal_to_the_reference_and_the_engine(
    name: str, pair: str, known: Callable[[str], Known], tmp_path: Path
) -> None:
    model = known(name).model
    eviction = PAIRS[pair].engine
    want = wanted(known(name).plain, PAIRS[pair], LENGTHS, NEW_TOKENS)
    promised = None if eviction.kv_budget is None else NEW_TOKENS
    for mode in MODES:
        enable_eviction(model, eviction, mode, promised)
        out = generated(model, want.prompts, NEW_TOKENS)
        disable_eviction(model)
        assert new_tokens_of(out, want.prompts) == want.tokens, mode
        assert_held(out.past_key_values, want, mode)
    if model.config.model_type in FAMILIES:
        model.save_pretrained(tmp_path / "model")
        ran = generate(
            tmp_path / "model", want.prompts, NEW_TOKENS, eviction, Policy(8, 1), tmp_path
        )
        assert ran.tokens == want.tokens


@pytest.mark.parametrize("mode", MODES)
def test_a_share_of_what_the_model_has_positions_for(
    mode: str, known: Callable[[str], Known]
) -> None:
    """As in the engine: a prompt of 60 in a model of 64 positions grows by 5, whatever is asked
    for."""
    model = known("opt").model
    pair = PAIRS["local, of the sequence"]
    want = wanted(known("opt").plain, pair, (60,), (5,))
    enable_eviction(model, pair.engine, mode, max_new_tokens=40)
    try:
        out = generated(model, want.prompts, 5)
        assert new_tokens_of(out, want.prompts) == want.tokens
        assert out.past_key_values.layers[0].budgets.slots.tolist() == [int(0.35 * 65) + 1]
    finally:
        disable_eviction(model)

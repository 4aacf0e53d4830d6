"""Eviction policies: how much is kept, and what is refused.

tests/eviction has what each policy ranks by.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.packing import KVPacking, KVSizes
from flexgen_h2o.kvcache.eviction import (
    EVICTING,
    H2O,
    Evicting,
    Full,
    H2ONorm,
    Local,
    Random,
    SnapKV,
    Tova,
    make_eviction,
)
from flexgen_h2o.kvcache.eviction.policy import RowBudget, with_sizes
from flexgen_h2o.kvcache.layout import UnitLayout

any_policy = pytest.mark.parametrize("policy", EVICTING.values(), ids=EVICTING)


@pytest.mark.parametrize(
    ("policy", "field", "values"),
    [
        (H2O, "heavy_ratio", (0, 1.5, "0.2", 10**400)),
        (Tova, "heavy_size", (0,)),
        (Local, "protect", ("some", "-3", 0, 1.5, True)),
        (SnapKV, "kernel", (0, 2)),
    ],
)
def test_settings_that_are_refused(
    policy: type[Evicting], field: str, values: tuple[Any, ...]
) -> None:
    """tests/unit/test_arguments.py has wrong types and ranges of them all."""
    for value in values:
        with pytest.raises(UsageError, match=f"^{field}: "):
            policy(**{field: value})


def test_a_removed_policy_says_which_one_to_use() -> None:
    for name in ("vase", "triattention:interval=4", "h2o-v"):
        with pytest.raises(UsageError, match=r"use h2o$"):
            make_eviction(name)


@any_policy
def test_sizes_are_given_in_one_way_and_reported(policy: type[Evicting]) -> None:
    """A share of the prompt, a number of columns, or a share of the sequence."""
    for kind in ("heavy", "recent"):
        with pytest.raises(UsageError, match=f"^{kind}_size: "):
            policy(**{f"{kind}_ratio": 0.1, f"{kind}_size": 4})  # type: ignore[arg-type]
    for other in ("heavy_ratio", "recent_ratio", "heavy_size", "recent_size"):
        with pytest.raises(UsageError, match=f"^kv_budget: .*{other}"):
            policy(kv_budget=0.5, **{other: 1})  # type: ignore[arg-type]
    prompt: dict[str, Any] = {"heavy_ratio": 0.25, "recent_size": 8, "while_decoding": False}
    sequence: dict[str, Any] = {"kv_budget": 0.5, "while_decoding": False}
    for settings, others in ((prompt, {"recent_ratio"}), (sequence, {*prompt} - {*sequence})):
        found = policy(**settings).to_json()
        assert found.pop("name") == policy.name and found.items() >= settings.items()
        assert not others & set(found) and policy(**found) == policy(**settings)


# ---- budgets


lengths = st.integers(1, 200)


@any_policy
@given(
    st.one_of(st.floats(0.01, 1), st.integers(1, 30)),
    st.booleans(),
    lengths,
    lengths,
    st.booleans(),
)
def test_every_policy_keeps_as_many_columns(
    policy: type[Evicting], size: float, of_all: bool, prompt: int, gen: int, decoding: bool
) -> None:
    """So that what is compared is their choice, not their budget; grace and sinks come out of it.
    A share of the sequence is of prompt and new tokens, whatever is which. Slots are enough for
    both, and no more than those of the full cache."""
    settings: dict[str, Any] = {"heavy_ratio" if isinstance(size, float) else "heavy_size": size}
    settings["recent_size"] = 7
    if of_all and isinstance(size, float):
        settings = {"kv_budget": size}
        of_sequence = policy(**settings).budget(prompt, gen, 1)
        assert of_sequence == policy(**settings).budget(gen, prompt, 1)
        assert of_sequence.columns == max(1, int(size * (prompt + gen)))
    one = policy(**settings, while_decoding=decoding)
    found = one.budget(prompt, gen, 2)
    assert found.columns == H2O(**settings).budget(prompt, gen, 0).columns
    assert min(found.sinks, found.heavy) >= 0 and found.recent >= 1
    slots = one.slots(prompt, gen, 2)
    assert min(prompt, found.columns) <= slots <= Full().slots(prompt, gen)
    assert decoding is False or slots <= found.columns + 1


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Local(recent_size=6, sinks=2), (2, 0, 4)),  # a window alone is not widened by a default
        (Tova(heavy_size=4, recent_size=3), (0, 6, 1)),
        (H2ONorm(heavy_size=20, recent_size=10), (4, 10, 16)),
        # Grace leaves half to the heavy hitters.
        (H2ONorm(heavy_size=20, recent_size=2), (4, 8, 10)),
        (H2ONorm(heavy_size=3, recent_size=2), (3, 0, 2)),
        (H2O(kv_budget=0.25), (0, 17, 18)),
        (H2O(kv_budget=1e-9), (0, 0, 1)),
        (Local(kv_budget=0.1), (4, 0, 10)),
        # The others share 21 as they would share 30.
        (H2O(heavy_size=20, recent_size=10, protect=9), (9, 14, 7)),
        # Its sinks are protected among them.
        (Local(heavy_size=20, recent_size=10, protect=2), (4, 2, 24)),
        (Tova(heavy_size=60, recent_size=60, protect="prompt"), (100, 19, 1)),
        (H2O(kv_budget=0.8, protect="prompt"), (100, 6, 6)),
    ],
)
def test_how_a_policy_uses_its_budget(policy: Evicting, expected: tuple[int, int, int]) -> None:
    assert policy.budget(100, 40, 0) == RowBudget(*expected)


@pytest.mark.parametrize(
    ("sizes", "protect", "columns", "give"),
    [
        ({"heavy_size": 50, "recent_size": 50}, "prompt", 100, "--hh-ratio or --hh-size"),
        ({"kv_budget": 0.1}, 20, 14, "--kv-budget"),
    ],
)
def test_a_budget_that_protected_columns_fill_is_refused(
    sizes: dict[str, Any], protect: str | int, columns: int, give: str
) -> None:
    policy = Random(**sizes, protect=protect)
    says = rf"^--protect {protect}: .*100 tokens, and a sequence keeps {columns} in all; .* {give}"
    with pytest.raises(UsageError, match=says):
        policy.budget(100, 40, 0)
    assert policy.budget(10, 140, 0).columns >= columns  # all of a shorter prompt has room


packings = st.sampled_from([None, *(KVPacking.of(64, bits) for bits in (3, 4, 8, "4/3"))])


@given(
    share=st.floats(0.02, 1),
    prompt=st.integers(1, 600),
    gen=st.integers(1, 600),
    packing=packings,
    window=st.sampled_from([0, 4, 16]),
)
def test_bytes_are_no_more_than_their_share_and_a_column_more_would_be(
    share: float, prompt: int, gen: int, packing: KVPacking | None, window: int
) -> None:
    """By the bytes that a unit's layout has."""
    tokens = prompt + gen
    sizes = KVSizes(64, packing, window)
    policy = with_sizes(H2O(kv_bytes=share), sizes)
    record = policy.needs.record

    def held(more: int = 0) -> float:
        slots = min(policy.slots(prompt, gen, 0) + more, tokens)
        layout = UnitLayout(1, 1, slots, 64, 2, (0.0, 1.0, 0.0), record, False, packing, window)
        return layout.sequence_bytes / (tokens * 4 * 64)

    try:
        found = held()
    except UsageError:  # no column has room
        assume(False)
    assert found <= share * (1 + 1e-9)
    kept = policy.budget(prompt, gen, 0).columns
    if kept < min(prompt, tokens - 5):
        assert held(more=4) > share  # windows grow by fours

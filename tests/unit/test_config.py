"""The data of a run: ranges are checked where values enter, layers and shares follow from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import OPTConfig

from flexgen_h2o.core.config import (
    COMPRESSION_OF,
    MemoryBudget,
    Policy,
    check_bits_used,
    without_unused_bits,
)
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.units import GIB, check_int
from flexgen_h2o.models import spec_from_config

# ---- policy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gpu_batch_size", 0),
        ("num_gpu_batches", "2"),
        ("percent", (0, 0, 0, 0, 0)),
        ("percent", (0, 0, 0, 0, 60, 41)),
        ("percent", (0.5, 0, 0, 0, 0, 0)),
        ("weight_bits", 5),
        ("cache_bits", True),
        ("cache_bits", "4/5"),
        ("cache_bits", "4/"),
        ("cache_bits", None),
    ],
)
def test_policy_refuses_by_the_name_of_the_field(field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=rf"^{field}: "):
        Policy(**{field: value})


@given(st.lists(st.integers(0, 100), min_size=6, max_size=6))
def test_shares_are_what_percent_says(six: list[int]) -> None:
    pairs = list(zip(six[::2], six[1::2], strict=True))
    if any(a + b > 100 for a, b in pairs):
        with pytest.raises(UsageError, match="> 100"):
            Policy(percent=six)  # type: ignore[arg-type]
        return
    policy = Policy(percent=six)  # type: ignore[arg-type]
    found = [policy.weight_shares, policy.cache_shares, policy.hidden_shares]
    assert found == [(a / 100, b / 100, (100 - a - b) / 100) for a, b in pairs]


@pytest.mark.parametrize(("bits", "switch"), COMPRESSION_OF.items())
def test_bits_are_of_what_is_compressed(bits: str, switch: str) -> None:
    """A search may begin with bits that it need not use; what runs has none that mean nothing."""
    usual = getattr(Policy, bits)
    other = True if isinstance(usual, bool) else 8
    policy = Policy(**{bits: other})  # type: ignore[arg-type]
    with pytest.raises(
        UsageError, match=f"^{bits}: {other} goes with {switch}, which is off; give both$"
    ):
        check_bits_used(policy)
    assert without_unused_bits(policy) == Policy()
    for fine in (Policy(**{bits: usual}), replace(policy, **{switch: True})):  # type: ignore[arg-type]
        assert check_bits_used(fine) is fine and without_unused_bits(fine) == fine


# ---- numbers, budget


@pytest.mark.parametrize(
    ("value", "says"), [(0, "between 1 and 9"), (True, "whole"), (1.0, "whole"), (None, "whole")]
)
def test_check_int(value: object, says: str) -> None:
    with pytest.raises(UsageError, match=f"^rows: .*{says}"):
        check_int("rows", value, 1, 9)


def test_budget_reads_sizes_and_names_the_flag() -> None:
    budget = MemoryBudget(device="1GiB", host=2 * GIB)
    assert (budget.device, budget.host, budget.disk) == (GIB, 2 * GIB, None)
    assert budget == MemoryBudget(2**30, "2g") and budget != MemoryBudget()
    for tier in ("device", "host", "disk"):
        with pytest.raises(UsageError, match=f"^--{tier}-mem: "):
            MemoryBudget(**{tier: "much"})  # type: ignore[arg-type]


# ---- layers


@pytest.mark.parametrize(
    ("tied", "sep_layer", "kinds", "units"),
    [
        (True, True, ["attention", "mlp", "attention", "mlp"], [0, 1, 2, 3, 4, 0]),
        (False, False, ["block", "block"], [0, 1, 2, 3]),
        (True, False, ["block", "block"], [0, 1, 2, 0]),
    ],
)
def test_each_tensor_is_in_one_unit_and_each_unit_is_used(
    tied: bool, sep_layer: bool, kinds: list[str], units: list[int]
) -> None:
    """A tied head reads the embedding's unit; another one is a unit of its own."""
    config = OPTConfig(
        hidden_size=8,
        ffn_dim=8,
        num_attention_heads=2,
        num_hidden_layers=2,
        tie_word_embeddings=tied,
    )
    spec = spec_from_config("small", config.to_dict(), "here")
    plan = spec.layers(sep_layer)
    assert [layer.kind for layer in plan.layers] == ["embedding", *kinds, "head"]
    assert [layer.unit for layer in plan.layers] == units
    names = [t.name for unit in plan.units for t in unit.tensors]
    parts = (*spec.embedding, *sum(spec.attention, ()), *sum(spec.mlp, ()), *spec.head)
    assert len(names) == len(set(names)) and set(names) == {t.name for t in parts}
    assert sum(unit.numel for unit in plan.units) == spec.num_weights

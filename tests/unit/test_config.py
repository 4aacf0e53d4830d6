"""The data of a run: ranges are checked where values enter, layers and shares follow from them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.core.config import (
    COMPRESSION_OF,
    MemoryBudget,
    Policy,
    check_bits_used,
    check_percent,
    without_unused_bits,
)
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.model import ModelSpec, TensorSpec
from flexgen_h2o.core.units import GIB, check_int


def small_spec(tied: bool) -> ModelSpec:
    """Two blocks; the head has a norm of its own and, when tied, the embedding's table."""
    table = TensorSpec("table", "table", (10, 4))
    head_table = table if tied else TensorSpec("head_table", "head_table", (10, 4))
    return ModelSpec(
        name="small",
        family="any",
        num_blocks=2,
        hidden_size=4,
        num_heads=2,
        num_kv_heads=1,
        head_dim=2,
        ffn_size=8,
        vocab_size=10,
        max_positions=6,
        embedding=(table, TensorSpec("positions", "positions", (6, 4))),
        attention=tuple((TensorSpec("q", f"q{i}", (4, 4)),) for i in range(2)),
        mlp=tuple(
            (TensorSpec("up", f"up{i}", (8, 4)), TensorSpec("bias", f"bias{i}", (8,)))
            for i in range(2)
        ),
        head=(TensorSpec("norm", "norm", (4,)), head_table),
        tied=tied,
        options=(("activation", "relu"),),
    )


# ---- policy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gpu_batch_size", 0),
        ("gpu_batch_size", True),
        ("num_gpu_batches", "2"),
        ("percent", (0, 0, 0, 0, 0)),
        ("percent", (0, 0, 0, 0, 60, 41)),
        ("percent", (0.5, 0, 0, 0, 0, 0)),
        ("sep_layer", None),
        ("compress_weight", 0),
        ("weight_bits", 5),
        ("cache_bits", True),
        ("attn_sparsity", 1.01),
        ("cache_bits", "4/5"),
        ("cache_bits", "4/"),
        ("cache_bits", None),
        ("cache_bits", "a"),
        ("attn_sparsity", math.nan),
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
            check_percent(six)
        return
    policy = Policy(percent=six)  # type: ignore[arg-type]
    assert policy.percent == tuple(six)
    for (a, b), shares in zip(
        pairs, (policy.weight_shares, policy.cache_shares, policy.hidden_shares), strict=True
    ):
        assert shares == (a / 100, b / 100, (100 - a - b) / 100)
        assert math.isclose(sum(shares), 1)


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


def test_tied_head_reads_the_embedding_unit() -> None:
    plan = small_spec(tied=True).layers(sep_layer=True)
    assert [(layer.kind, layer.block, layer.unit) for layer in plan.layers] == [
        ("embedding", -1, 0),
        ("attention", 0, 1),
        ("mlp", 0, 2),
        ("attention", 1, 3),
        ("mlp", 1, 4),
        ("head", -1, 0),
    ]
    assert [t.name for t in plan.units[0].tensors] == ["table", "positions", "norm"]


def test_untied_head_is_a_unit_of_its_own() -> None:
    plan = small_spec(tied=False).layers(sep_layer=False)
    assert [(layer.kind, layer.block, layer.unit) for layer in plan.layers] == [
        ("embedding", -1, 0),
        ("block", 0, 1),
        ("block", 1, 2),
        ("head", -1, 3),
    ]
    assert [t.name for t in plan.units[3].tensors] == ["norm", "head_table"]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("sep_layer", [True, False])
def test_each_tensor_is_in_one_unit_and_each_unit_is_used(tied: bool, sep_layer: bool) -> None:
    spec = small_spec(tied)
    plan = spec.layers(sep_layer)
    names = [t.name for unit in plan.units for t in unit.tensors]
    every = {
        t.name for t in (*spec.embedding, *sum(spec.attention, ()), *sum(spec.mlp, ()), *spec.head)
    }
    assert len(names) == len(set(names)) and set(names) == every
    assert {layer.unit for layer in plan.layers} == set(range(len(plan.units)))
    assert (
        sum(unit.numel for unit in plan.units)
        == spec.num_weights
        == 40 + 24 + 2 * (16 + 40) + 4 + 40 * (not tied)
    )

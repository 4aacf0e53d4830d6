"""The data of a run: shares, bits and budgets are checked where they enter."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.core.config import (
    COMPRESSION_OF,
    MemoryBudget,
    Policy,
    check_bits_used,
    without_unused_bits,
)
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.units import GIB

# ---- policy


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


def test_budget_reads_sizes_and_names_the_flag() -> None:
    budget = MemoryBudget(device="1GiB", host=2 * GIB)
    assert (budget.device, budget.host, budget.disk) == (GIB, 2 * GIB, None)
    assert budget == MemoryBudget(2**30, "2g") and budget != MemoryBudget()
    for tier in ("device", "host", "disk"):
        with pytest.raises(UsageError, match=f"^--{tier}-mem: "):
            MemoryBudget(**{tier: "much"})  # type: ignore[arg-type]

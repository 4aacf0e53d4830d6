"""Host buffers and the ledger: aligned, whole, and never over budget."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.core.errors import DoesNotFitError
from flexgen_h2o.core.units import PAGE
from flexgen_h2o.tiers.device import HUGE_PAGE, Ledger, host_buffer


@pytest.mark.parametrize("nbytes", [0, 1, PAGE, PAGE + 1, HUGE_PAGE - 1, HUGE_PAGE, HUGE_PAGE + 1, 2 * HUGE_PAGE + 5])
def test_a_buffer_is_aligned_zero_and_all_its_own(nbytes: int) -> None:
    buffer = host_buffer(nbytes)
    align = HUGE_PAGE if nbytes >= HUGE_PAGE else PAGE
    assert (buffer.dtype, buffer.shape, buffer.is_contiguous()) == (torch.uint8, (nbytes,), True)
    assert nbytes == 0 or buffer.data_ptr() % align == 0
    assert not bool(buffer.any())
    buffer.fill_(255)
    assert int(buffer.sum(dtype=torch.int64)) == 255 * nbytes


def test_memory_outlives_the_name_of_the_buffer() -> None:
    view = host_buffer(HUGE_PAGE + PAGE)[PAGE:].view(torch.float32)
    view.fill_(1.5)
    others = [host_buffer(HUGE_PAGE) for _ in range(4)]
    assert bool((view == 1.5).all()) and len(others) == 4


charges = st.lists(st.tuples(st.sampled_from(["device", "host", "disk"]), st.integers(-60, 60)), max_size=40)


@given(charges)
def test_the_ledger_holds_every_tier_within_its_budget(history: list[tuple[str, int]]) -> None:
    budgets = {"device": 100, "host": 50, "disk": None}
    ledger, used, peak = Ledger(budgets), dict.fromkeys(budgets, 0), dict.fromkeys(budgets, 0)
    for tier, nbytes in history:
        budget = budgets[tier]
        if nbytes < 0:
            returned = min(-nbytes, used[tier])
            ledger.release(tier, returned)
            used[tier] -= returned
        elif budget is not None and used[tier] + nbytes > budget:
            with pytest.raises(DoesNotFitError):
                ledger.charge(tier, nbytes, "x")
        else:
            ledger.charge(tier, nbytes, "x")
            used[tier] += nbytes
        peak[tier] = max(peak[tier], used[tier])
        assert all(ledger.used[t] == used[t] and ledger.peak[t] == peak[t] for t in budgets)


def test_a_refusal_says_what_how_much_and_which_flag() -> None:
    ledger = Ledger({"host": 3 * 2**20})
    ledger.charge("host", 2**20, "weights")
    with pytest.raises(DoesNotFitError) as caught:
        ledger.charge("host", 5 * 2**20, "cache")
    text = str(caught.value)
    for part in ("cache needs 5.00 MiB", "host tier", "3.00 MiB over", "budget of 3.00 MiB", "--host-mem", "--percent"):
        assert part in text
    ledger.charge("nowhere", 10**15, "a tier without a budget is free")

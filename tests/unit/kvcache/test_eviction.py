"""The full cache: one slot a column, and clear ends for what is not run yet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.errors import UsageError
from flexgen_h2o.kvcache.eviction import H2O, POLICIES, Full, Local, check_eviction


@given(st.integers(1, 100), st.integers(1, 100))
def test_full_has_a_slot_for_every_column_that_is_read(prompt_len: int, gen_len: int) -> None:
    """The columns of the prompt, and of each new token but the last, which is never fed."""
    columns = prompt_len + (gen_len - 1)
    assert Full().slots(prompt_len, gen_len) == columns


def test_what_the_engine_runs() -> None:
    full = Full()
    assert check_eviction(full) is full and check_eviction(None) == full
    assert full.to_json() == {"name": "full"} and POLICIES["full"] is Full


@pytest.mark.parametrize(
    ("given_one", "says"),
    [(H2O(), "H2O is not in this version"), (Local(), "Local is not in"), ("full", "'full'"), (0, "0 is not")],
)
def test_anything_else_is_refused(given_one: object, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_eviction(given_one)

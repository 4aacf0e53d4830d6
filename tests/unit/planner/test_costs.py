"""Rates that are the planner's own: those of products in int8."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexgen_h2o.config import Policy
from flexgen_h2o.planner.costs import INT8_SPEEDUP
from flexgen_h2o.planner.need import Need
from flexgen_h2o.planner.work import Product, Work
from tests.unit.planner.made_up import BLOCKS, costs_of, machine


@pytest.mark.parametrize("compress_weight", [False, True])
@pytest.mark.parametrize(
    ("is_host", "dtype", "faster"), [(True, "bfloat16", INT8_SPEEDUP), (True, "float32", 1.0), (False, "bfloat16", 1.0)]
)
def test_products_in_int8_are_faster_where_that_is_measured(
    is_host: bool, dtype: str, faster: float, compress_weight: bool
) -> None:
    """On a CPU, over bf16: not beside fp32, nor on a card."""
    where, need = replace(machine(is_host), dtype=dtype), Need.full(4, 10, 4, BLOCKS)
    work = Work(products=(Product(4, 128, 512),))
    plain, int8 = (
        costs_of(Policy(4, compress_weight=compress_weight, int8_compute=on), need, where).compute_seconds(work)[0]
        for on in (False, True)
    )
    assert plain == pytest.approx(int8 * faster)

"""Products in int8, and unpacking for them, at the rates that the profile has over those of the dtype."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.core.config import Policy
from flexgen_h2o.engine.workload import Batch, WorkloadShape
from flexgen_h2o.planner.predict import Machine
from flexgen_h2o.planner.profile import Curve
from flexgen_h2o.planner.work import Product, Work
from tests.unit.planner.made_up import BLOCKS, DTYPE, costs_of, machine

NEED = WorkloadShape.full(4, 10, 4, BLOCKS)
TIMES = Curve(((1.0, 4.0), (64.0, 2.0)))


def measured(int8: Curve, requantise: float = 1.0, is_host: bool = True) -> Machine:
    """Those rates in the dtype of the other tests; no fixed costs."""
    where = machine(is_host)
    rates = replace(where.profile.rates(DTYPE), int8_speedup=int8, requantise_speedup=requantise)
    return replace(where, profile=replace(where.profile, compute={DTYPE: rates}))


def product_seconds(policy: Policy, where: Machine, rows: int, is_blocked: bool = False) -> float:
    work = Work(products=(Product(rows, 128, 512, is_blocked),))
    return costs_of(policy, NEED, where).compute_seconds(work)[0]


@pytest.mark.parametrize("compress_weight", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 64, 200])
def test_products_in_int8_are_faster_by_rows(rows: int, compress_weight: bool) -> None:
    plain, int8 = (
        product_seconds(Policy(4, compress_weight=compress_weight, int8_compute=on), measured(TIMES), rows)
        for on in (False, True)
    )
    assert plain == pytest.approx(int8 * TIMES.at(rows))


def test_gains_of_int8_and_of_blocked_matrices_are_both_over_matrices_in_order() -> None:
    where = measured(TIMES)
    rates = replace(where.profile.rates(DTYPE), blocked_speedup=Curve.flat(1.5))
    where = replace(where, profile=replace(where.profile, compute={DTYPE: rates}))
    in_order, blocked = (product_seconds(Policy(4), where, 1, is_blocked) for is_blocked in (False, True))
    assert in_order == pytest.approx(1.5 * blocked)
    assert in_order == pytest.approx(4 * product_seconds(Policy(4, int8_compute=True), where, 1))


@pytest.mark.parametrize("is_host", [True, False])
def test_where_int8_gains_nothing_it_costs_as_much(is_host: bool) -> None:
    """A card, whose profile says 1."""
    where = measured(Curve.flat(1.0), is_host=is_host)
    for packed in (False, True):
        plain, int8 = (Policy(4, compress_weight=packed, int8_compute=on) for on in (False, True))
        assert product_seconds(plain, where, 8) == product_seconds(int8, where, 8)
        assert costs_of(plain, NEED, where).dequantise_s(1) == costs_of(int8, NEED, where).dequantise_s(1)


def test_unpacking_to_int8_has_its_own_rate() -> None:
    where = measured(TIMES, requantise=1.25)
    to_dtype, to_int8 = (
        costs_of(Policy(4, compress_weight=True, int8_compute=on), NEED, where).dequantise_s(1) for on in (False, True)
    )
    assert to_dtype == pytest.approx(1.25 * to_int8)
    assert costs_of(Policy(4, int8_compute=True), NEED, where).dequantise_s(1) == 0.0


@given(st.integers(1, 300), st.floats(0.5, 8.0), st.floats(1.0, 3.0), st.booleans())
def test_a_layer_is_never_slower_with_faster_products(rows: int, times: float, more: float, packed: bool) -> None:
    policy, need = Policy(rows, compress_weight=packed, int8_compute=True), WorkloadShape.full(rows, 10, 4, BLOCKS)
    slow, fast = (costs_of(policy, need, measured(Curve.flat(gain), gain)) for gain in (times, times * more))
    for sweep in (0, 1):
        assert fast.step(1, Batch.even(rows, 10), sweep).device_s <= slow.step(1, Batch.even(rows, 10), sweep).device_s
    assert fast.dequantise_s(1) <= slow.dequantise_s(1)

"""Hardware profiles: JSON there and back, one clear line for every kind of bad field, curves
between their points."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.planner.profile import (
    MAX_RATE,
    Curve,
    HardwareProfile,
    find_profile,
    nominal_profile,
    profile_from_json,
    read_profile,
    write_profile,
)

NOMINAL = nominal_profile(True)
RATES = replace(
    NOMINAL.rates("float32"),
    matmul_flops_per_s=(
        (
            0.5,
            ((64.0, Curve(((1.0, 1e9), (16.0, 2e9)))), (1024.0, Curve(((1.0, 3e9), (16.0, 4e9))))),
        ),
    ),
    prefill_attention_flops_per_s=Curve(((64.0, 5e9), (2048.0, 6e9))),
    decode_speedup={"mxfp4": 0.7, "awq_int8": 0.2},
)
PROFILE = replace(
    NOMINAL,
    machine="test",
    compute={"float32": RATES, "bfloat16": RATES},
    notes={"step_s": "a guess"},
)


def test_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "p.json"
    write_profile(path, PROFILE)
    assert read_profile(path) == PROFILE
    body = json.loads(path.read_text())
    assert body["compute"]["float32"]["matmul_flops_per_s"]["0.5"]["1024"]["16"] == 4e9
    del body["notes"]
    assert profile_from_json(body) == replace(PROFILE, notes={})


# What files of schema 1 lack: by field, what it is then. A dtype has no speedups.
SINCE_1 = {
    "overlay_bytes_per_s": MAX_RATE,
    "short_read_compute_s": 0.0,
    "cache_load_step_s": 0.0,
    "link_both_ways": 1.0,
    "graph_step_s": 1.0,
}
SPEEDUPS = ("blocked_speedup", "int8_speedup", "int4_speedup")


def test_a_file_of_schema_1_knows_nothing_of_what_came_later() -> None:
    body = {**PROFILE.to_json(), "schema": 1, "device_is_host": False}
    for name in SINCE_1:
        del body[name]
    for rates in body["compute"].values():
        for name in (*SPEEDUPS, "decode_speedup"):
            del rates[name]
    plain = replace(RATES, decode_speedup={}, **dict.fromkeys(SPEEDUPS, Curve.flat(1.0)))
    compute = {"float32": plain.requantising(4, 1.0), "bfloat16": plain.requantising(2, 1.0)}
    want = replace(PROFILE, device_is_host=False, compute=compute, **SINCE_1)
    assert profile_from_json(body) == want


GONE = object()


def _set(*keys: str, to: Any = GONE) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        for key in keys[:-1]:
            body = body[key]
        body[keys[-1]] = to
        if to is GONE:
            del body[keys[-1]]

    return change


F32 = ("compute", "float32")
# (what is done to a good profile, what the error names)
BAD = [
    (_set("schema", to=10), "schema"),
    (_set("kernel_s"), "kernel_s"),
    (_set("speed", to=1), "speed"),
    (_set("device_is_host", to="yes"), "device_is_host"),
    (_set("disk_read_bytes_per_s", to=0), "disk_read_bytes_per_s"),
    (_set("disk_read_bytes_per_s", to=math.nan), "disk_read_bytes_per_s"),
    (_set("step_s", to=-1e-9), "step_s"),
    (_set("disk_read_beside_compute", to=0.0), "disk_read_beside_compute"),
    (_set("compute", "int4", to={}), "int4"),
    (_set(*F32, "more", to=1), "compute.float32"),
    (_set(*F32, "column_sums_flops_per_s", to={"0": 1e9}), "column_sums_flops_per_s"),
]


@pytest.mark.parametrize(("change", "says"), BAD)
def test_bad_field_gives_one_line_that_names_it(
    change: Callable[[dict[str, Any]], None], says: str, tmp_path: Path
) -> None:
    body = copy.deepcopy(PROFILE.to_json())
    change(body)
    path = tmp_path / "p.json"
    path.write_text(json.dumps(body))
    with pytest.raises(UsageError) as caught:
        read_profile(path)
    message = str(caught.value)
    assert says in message and str(path) in message and "\n" not in message and len(message) < 300


@settings(max_examples=10)
@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists))
def test_nothing_but_usage_errors_come_of_strange_values(value: Any) -> None:
    body = PROFILE.to_json()
    for name in body:
        try:
            assert isinstance(profile_from_json({**body, name: value}), HardwareProfile)
        except UsageError:
            pass


CURVES = st.lists(
    st.tuples(st.floats(1, 1e6), st.floats(1.0, 1e15)),
    min_size=1,
    max_size=6,
    unique_by=lambda point: point[0],
).map(lambda points: Curve(tuple(sorted(points))))


@given(CURVES, st.floats(1e-3, 1e9))
def test_curve_hits_its_points_and_lies_between_neighbours(curve: Curve, size: float) -> None:
    for at, rate in curve.points:
        assert curve.at(at) == pytest.approx(rate)
    below = [rate for at, rate in curve.points if at <= size][-1:]
    above = [rate for at, rate in curve.points if at >= size][:1]
    near = below + above
    assert min(near) * (1 - 1e-9) <= curve.at(size) <= max(near) * (1 + 1e-9)
    if not below or not above:  # outside, the nearest point holds
        assert curve.at(size) == near[0]


def test_product_rate_goes_over_rows_and_width() -> None:
    assert RATES.matmul_rate(1, 64, 64) == 1e9
    assert RATES.matmul_rate(99, 5000, 7) == 4e9
    shares = (
        (1e9, 0.04),
        (2e9, 0.16),
        (3e9, 0.16),
        (4e9, 0.64),
    )  # the lower point counts a fifth, of rows and width
    assert 1 / RATES.matmul_rate(4, 256, 256) == pytest.approx(
        sum(share / rate for rate, share in shares)
    )


def test_profile_is_found_by_path_and_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flexgen_h2o.planner.profile.SHIPPED", tmp_path / "shipped")
    for path in (tmp_path / "shipped" / "t4.json", tmp_path / "mine.json", tmp_path / "t4"):
        write_profile(path, PROFILE)
    assert find_profile("mine.json").resolve() == tmp_path / "mine.json"
    assert find_profile("t4").resolve() == tmp_path / "t4"  # a file of that name comes first
    (tmp_path / "t4").unlink()
    assert find_profile("t4") == tmp_path / "shipped" / "t4.json"
    for name in ("h100", "../shipped/t4", "", "x\0"):
        with pytest.raises(UsageError, match="--hardware"):
            find_profile(name)
    with pytest.raises(UsageError, match="t4"):
        find_profile("h100")

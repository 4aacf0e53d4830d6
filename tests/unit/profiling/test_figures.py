"""Each measuring function on tiny sizes: positive and finite; nothing about how fast this machine
is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flexgen_h2o.checkpoint.formats import IN_PRODUCTS
from flexgen_h2o.core.packing import SlotPacking, int8_row_bytes
from flexgen_h2o.core.timeline import Timeline
from flexgen_h2o.kernels import int8
from flexgen_h2o.kernels import products as loops
from flexgen_h2o.kernels.int8 import Int8Rows, RequantisedRows
from flexgen_h2o.kernels.linear import BlockedRows, block_rows
from flexgen_h2o.kvcache.eviction import Full
from flexgen_h2o.models import spec_from_config
from flexgen_h2o.planner.measure import bench as compute
from flexgen_h2o.planner.measure import compute as whole
from flexgen_h2o.planner.measure import engine as steps
from flexgen_h2o.planner.measure import run as measure
from flexgen_h2o.planner.measure.bench import CARD, CARD_HOST, HOST, Bench, Sizes
from flexgen_h2o.planner.measure.engine import DiskProbe
from flexgen_h2o.planner.profile import AS_FAST, Curve, nominal_profile, profile_from_json
from flexgen_h2o.tiers.device import HostDevice, StandInDevice
from flexgen_h2o.tiers.disk import Scratch
from flexgen_h2o.tiers.transfers import Lanes, Mover
from tests.unit.profiling.tiny import TINY
from tests.unit.test_profile import RATES


@pytest.fixture(autouse=True)
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """No second of warming up."""
    monkeypatch.setattr(compute, "WARM_S", 0.0)


@pytest.fixture
def bench() -> Bench:
    return Bench(HostDevice(), TINY)


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Scratch]:
    made = Scratch(tmp_path)
    yield made
    made.close()


def mover_of(device: HostDevice | StandInDevice) -> Mover:
    return Mover(device, Lanes(measure.LANE_THREADS, Timeline()))


def check(*figures: float | Curve) -> None:
    for figure in figures:
        values = [rate for _, rate in figure.points] if isinstance(figure, Curve) else [figure]
        assert values and all(0 < value < math.inf for value in values)


def sizes_of(curve: Curve) -> tuple[float, ...]:
    return tuple(size for size, _ in curve.points)


def test_less_work_is_not_slower_than_more() -> None:
    """A neighbour that took the cores from the shortest prompts alone."""
    assert compute.no_longer_than_next([8e-3, 1e-3, 2e-3, 5e-3]) == [1e-3, 1e-3, 2e-3, 5e-3]
    assert compute.no_longer_than_next([1.0, 2.0, 2.0]) == [1.0, 2.0, 2.0]


def test_slow_attention_is_measured_on_a_smaller_cache(bench: Bench) -> None:
    check(*compute.decode_rates(replace(bench, sizes=replace(TINY, longest_s=0.0)), torch.float32))


def test_product_that_takes_too_long_has_the_rate_of_the_next_smaller_one(bench: Bench) -> None:
    sizes = replace(TINY, widths=(16, 64, 256), rows=(1, 512), longest_s=1e-9)
    found = compute.matmul_rates(replace(bench, sizes=sizes), torch.float32)
    (_, narrow), *wider = dict(found)[1.0]
    assert [curve for _, curve in wider] == [narrow, narrow]


def test_a_device_of_its_own_gains_nothing_by_int8() -> None:
    bench = Bench(StandInDevice(), TINY)
    with torch.inference_mode():
        assert set(compute.speedups(bench, torch.float16).values()) == {AS_FAST}
        assert set(whole.weight_rates(bench, torch.float16)[1]) == set(whole.CHECKPOINTS)


@pytest.mark.skipif(
    not loops.has_loop(torch.bfloat16), reason="this CPU has no loop for products in bf16"
)
def test_a_cpu_decodes_in_products_in_bf16_alone(bench: Bench) -> None:
    with torch.inference_mode():
        found, plain = (
            set(whole.weight_rates(bench, dtype)[1]) for dtype in (torch.bfloat16, torch.float32)
        )
    assert found - plain == set(IN_PRODUCTS) and plain < found


@pytest.mark.parametrize(
    ("held", "kind", "row_bytes", "atol"),
    [
        ("int8", Int8Rows, int8_row_bytes(128), 0.6),
        ("int4", RequantisedRows, SlotPacking(128, 4).slot_bytes, 8.0),
    ],
)
def test_products_in_int8_are_right_and_of_other_rows_each_time(
    held: Any,
    kind: type,
    row_bytes: int,
    atol: float,
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    products = compute.Products(bench, torch.float32)
    seen = []
    in_order, in_int8 = (products.call(8, 128, 64, way) for way in ("in order", held))
    with torch.inference_mode():
        want = in_order().clone()
        found = in_int8().clone()
    assert torch.allclose(found, want, atol=atol)  # sums of 128 products, some 11 large
    monkeypatch.setattr(compute, "linear", lambda x, weight, bias, out: seen.append(weight[0]))
    count = TINY.weight_bytes // 2 // (64 * row_bytes)
    for _ in range(2 * count):
        in_int8()
    assert all(isinstance(rows, kind) and len(rows) == 64 for rows in seen)
    assert len({id(rows) for rows in seen}) == count


def test_a_cpu_without_avx2_has_products_in_int8_too(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (int8, loops):
        monkeypatch.setattr(module, "cpu_has", lambda flag: False)
    with torch.inference_mode():
        found = compute.speedups(bench, torch.float32)
    assert sizes_of(found["int4_speedup"]) == TINY.rows


def test_products_take_another_matrix_each_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(
        compute, "linear", lambda x, weight, bias, out: seen.append(weight[0].rows.data_ptr())
    )
    call = compute.Products(bench, torch.float32).call(4, 64, 64)
    for _ in range(2 * TINY.weight_bytes // (64 * 64 * 4)):
        call()
    assert len(set(seen)) == TINY.weight_bytes // (64 * 64 * 4)
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]


def test_both_ways_of_the_link_are_timed_together(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the buffers each way, of which the slower one would take 2 s alone."""
    mover = mover_of(bench.device)
    queued = list[list[tuple[str, int, int]]]()
    copy = mover.copy

    def watched(lane: str, name: str, target: torch.Tensor, source: torch.Tensor) -> Any:
        queued[-1].append((lane, target.data_ptr(), len(target)))
        return copy(lane, name, target, source)

    def seconds_of(_: Bench, *calls: Any) -> list[float]:
        for call in calls:
            queued.append([])
            call()
        return [4.0, 3.0, 5.0, 5.0, 2.5, 1e-5]

    monkeypatch.setattr(mover, "copy", watched)
    monkeypatch.setattr(Bench, "seconds_of", seconds_of)
    try:
        found = steps.link_rates(bench, mover)
    finally:
        mover.lanes.close()
    assert (
        found["link_both_ways"] == 2.0 / 2.5 and found["h2d_bytes_per_s"] == TINY.link_bytes / 4.0
    )
    *alone, both, _ = queued
    assert [{lane for lane, *_ in one} for one in (*alone, both)] == [{"h2d"}, {"d2h"}] * 2 + [
        {"h2d", "d2h"}
    ]
    assert all(sum(n for *_, n in one) == TINY.link_bytes for one in queued[:-1])


def test_slow_disk_gets_a_smaller_file(
    bench: Bench, scratch: Scratch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexgen_h2o.planner.measure.engine.LOAD_PIECE", TINY.disk_bytes // 4)
    mover = mover_of(bench.device)
    try:
        probe = DiskProbe(replace(bench, sizes=replace(TINY, disk_s=0.0)), mover, scratch)
    finally:
        mover.lanes.close()
    assert probe.nbytes == TINY.disk_bytes // 4
    probe.close()


def test_fixed_costs_are_what_the_planner_leaves() -> None:
    found = steps.fixed_costs([(50e-6, 30e-6), (90e-6, 50e-6), (55e-6, 30e-6)], 5, 15)
    row_s = 60e-6 / 2 / 10
    expected = {
        "step_s": 30e-6 - 5 * row_s,
        "attention_step_s": 20e-6,
        "eviction_step_s": 5e-6,
        "row_s": row_s,
    }
    assert found == pytest.approx(expected)
    assert min(steps.fixed_costs([(50e-6, 30e-6)] * 3, 0, 0).values()) > 0


def test_loads_cost_what_runs_that_read_take_more() -> None:
    """Six parts of matrices in a transformer block, of a tenth each; one KV unit, whose request is
    not long either."""
    spec = spec_from_config("small", steps.config_of(HOST.step_width), "profiling")
    places = (steps.IN_MEMORY, steps.SOME_WEIGHTS, steps.NO_CACHE)
    runs = [steps._Run(8, 16, 49, Full(), place) for place in places]
    alone, weights, cache = (run.costs(spec, nominal_profile(True), "bfloat16") for run in runs)
    reads = steps.short_requests(weights)
    whole = steps.short_requests(cache)
    assert steps.short_requests(alone) == 0 < whole < 1 and 5.5 < reads < 6
    found = steps.load_costs(weights, cache, 6e-4, 5e-4)
    assert found["short_read_compute_s"] == pytest.approx(6e-4 / reads)
    assert found["cache_load_step_s"] == pytest.approx(5e-4 - whole * 6e-4 / reads)
    assert set(steps.load_costs(weights, cache, -1e-4, -1e-4).values()) == {0.0}


def test_ratios_of_disturbed_timings_can_be_read_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kept profile that cannot be read would be measured anew at each run."""
    faster = {
        "blocked_speedup": Curve.flat(1e5),
        "int8_speedup": Curve.flat(1e-5),
        "int4_speedup": Curve.flat(1e3),
    }
    monkeypatch.setattr(whole, "weight_rates", lambda *_: (1e9, {"mxfp4": 1e-5, "awq_int8": 1e5}))
    monkeypatch.setattr(whole, "speedups", lambda *_: faster)
    profile = replace(
        nominal_profile(True), compute={"float32": whole.compute_rates(bench, bench, "float32")}
    )
    assert profile_from_json(profile.to_json()) == profile


@pytest.mark.slow
def test_whole_profile_is_one_that_can_be_read_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    profile = measure.measure("cpu", tmp_path / "offload", said.append, TINY)
    assert profile_from_json(profile.to_json()) == profile
    assert (
        profile.device_is_host
        and not profile.device_is_asynchronous
        and profile.device_mem_bytes == 0
    )
    assert set(profile.compute) == {"bfloat16", "float32"}
    assert len(said) >= 5 and list((tmp_path / "offload").iterdir()) == []
    for dtype, rates in profile.compute.items():
        blocks = isinstance(
            block_rows(torch.ones(64, 64, dtype=getattr(torch, dtype)))[0], BlockedRows
        )
        sizes = {
            "prefill_attention_flops_per_s": TINY.prompt_lengths,
            "column_sums_flops_per_s": TINY.prompt_lengths,
            "device_attention_bytes_per_s": TINY.head_widths,
            "host_scored_attention_bytes_per_s": TINY.head_widths,
            "int8_speedup": TINY.rows,
            "int4_speedup": TINY.rows,
            "blocked_speedup": TINY.rows if blocks else (1.0,),
        }
        assert {name: sizes_of(getattr(rates, name)) for name in sizes} == sizes
        assert [shape for shape, _ in rates.matmul_flops_per_s] == [0.25, 1, 4, 16]
        assert tuple(inner for inner, _ in dict(rates.matmul_flops_per_s)[1.0]) == TINY.widths
        assert all(
            sizes_of(curve) == TINY.rows
            for _, by_inner in rates.matmul_flops_per_s
            for _, curve in by_inner
        )


class QueueingStandIn(StandInDevice):
    """A device of its own that says of itself what a card says."""

    is_asynchronous = True
    dtypes = ("float16", "float32")

    def card(self) -> tuple[str, int]:
        return "NVIDIA Test 1", 2**30


def test_card_and_its_host_are_measured_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "open_device", lambda name, separate_budget: QueueingStandIn())
    profile = measure.measure("auto", tmp_path, lambda line: None, TINY, ("float16",))
    assert profile_from_json(profile.to_json()) == profile
    assert not profile.device_is_host and profile.device_is_asynchronous
    assert profile.machine == "nvidia-test-1" and profile.device_mem_bytes == 2**30
    rates = profile.rates("float16")
    assert rates.host_attention_bytes_per_s != rates.device_attention_bytes_per_s


def test_nothing_is_left_behind_when_measuring_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "compute_rates", lambda *_: RATES)
    monkeypatch.setattr(
        measure, "contention", fail
    )  # the last one: file, lanes and engine have all been there
    with pytest.raises(KeyboardInterrupt):
        measure.measure("cpu", tmp_path, lambda line: None, TINY)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sizes", [HOST, CARD, CARD_HOST, TINY])
def test_sizes_go_together(sizes: Sizes) -> None:
    for rising in (
        sizes.widths,
        sizes.hidden,
        sizes.heads,
        sizes.rows,
        sizes.prompt_lengths,
        sizes.head_widths,
    ):
        assert list(rising) == sorted(set(rising))
    assert sizes.prompt_tokens >= sizes.prompt_lengths[-1] and sizes.prompt_width % 64 == 0
    assert sizes.cache_bytes >= 2 * sizes.slots * sizes.head_widths[-1] * 4

"""Each measuring function on tiny sizes: positive and finite; nothing about how fast this machine is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flexgen_h2o import LLM, MemoryBudget, Policy
from flexgen_h2o.core.errors import DoesNotFitError, UsageError
from flexgen_h2o.core.packing import int8_row_bytes
from flexgen_h2o.core.timeline import Timeline
from flexgen_h2o.core.units import MIB
from flexgen_h2o.engine.report import Peak
from flexgen_h2o.kernels.blocked import BlockedRows, block_rows
from flexgen_h2o.kernels.int8 import Int8Rows
from flexgen_h2o.kvcache.eviction import Full
from flexgen_h2o.models import spec_from_config
from flexgen_h2o.planner.measure import compute, steps
from flexgen_h2o.planner.measure import compute as matmul
from flexgen_h2o.planner.measure import compute as memory
from flexgen_h2o.planner.measure import run as measure
from flexgen_h2o.planner.measure.bench import CARD, CARD_HOST, HOST, TINY, Bench, Sizes
from flexgen_h2o.planner.measure.compute import (
    decode_rates,
    kernel_seconds,
    memory_rate,
    no_longer_than_next,
    other_rates,
    prefill_rates,
)
from flexgen_h2o.planner.measure.links import DiskProbe, beside_shares, check_space, link_rates, overlay_rate
from flexgen_h2o.planner.measure.machine import PeakProbe, nominal_profile, peak_bytes
from flexgen_h2o.planner.profile import AS_FAST, Curve, profile_from_json
from flexgen_h2o.tiers.device import HostDevice, StandInDevice
from flexgen_h2o.tiers.disk import Scratch
from flexgen_h2o.tiers.transfers import Lanes, Mover

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(bench: Bench, dtype: torch.dtype) -> None:
    with torch.inference_mode():
        prefill, decode = prefill_rates(bench, dtype), decode_rates(bench, dtype)
    check(*prefill, *decode)
    assert {sizes_of(curve) for curve in prefill} == {TINY.prompt_lengths}
    assert {sizes_of(curve) for curve in decode} == {TINY.head_widths}


def test_less_work_is_not_slower_than_more() -> None:
    """A neighbour that took the cores from the shortest prompts alone."""
    assert no_longer_than_next([8e-3, 1e-3, 2e-3, 5e-3]) == [1e-3, 1e-3, 2e-3, 5e-3]
    assert no_longer_than_next([1.0, 2.0, 2.0]) == [1.0, 2.0, 2.0]


def test_slow_attention_is_measured_on_a_smaller_cache(bench: Bench) -> None:
    check(*decode_rates(replace(bench, sizes=replace(TINY, longest_s=0.0)), torch.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_work_of_a_layer(bench: Bench, dtype: torch.dtype) -> None:
    with torch.inference_mode():
        others = other_rates(bench, dtype)
    check(others.elementwise, others.dequantise, others.logits, others.requantise_speedup)


def test_memory_and_kernel(bench: Bench) -> None:
    with torch.inference_mode():
        check(memory_rate(bench), kernel_seconds(bench))


def test_products(bench: Bench) -> None:
    with torch.inference_mode():
        found = matmul.matmul_rates(bench, torch.float32)
    assert [shape for shape, _ in found] == [0.25, 1, 4, 16]
    assert tuple(inner for inner, _ in dict(found)[1.0]) == TINY.widths
    curves = [curve for _, by_inner in found for _, curve in by_inner]
    assert all(sizes_of(curve) == TINY.rows for curve in curves)
    check(*curves)


def test_product_that_takes_too_long_has_the_rate_of_the_next_smaller_one(bench: Bench) -> None:
    sizes = replace(TINY, widths=(16, 64, 256), rows=(1, 512), longest_s=1e-9)
    found = matmul.matmul_rates(replace(bench, sizes=sizes), torch.float32)
    (_, narrow), *wider = dict(found)[1.0]
    assert [curve for _, curve in wider] == [narrow, narrow]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gains_of_blocked_matrices_and_of_int8(bench: Bench, dtype: torch.dtype) -> None:
    blocks = isinstance(block_rows(torch.ones(64, 64, dtype=dtype))[0], BlockedRows)
    with torch.inference_mode():
        found = matmul.speedups(bench, dtype)
    check(*found.values())
    assert sizes_of(found["int8"]) == TINY.rows
    assert sizes_of(found["blocked"]) == (TINY.rows if blocks else (1.0,))


def test_a_device_of_its_own_gains_nothing_by_int8() -> None:
    bench = Bench(StandInDevice(), TINY)
    with torch.inference_mode():
        assert matmul.speedups(bench, torch.float16) == {"blocked": AS_FAST, "int8": AS_FAST}
        assert other_rates(bench, torch.float16).requantise_speedup == 1.0


def test_products_in_int8_are_right_and_of_other_rows_each_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    products, seen = matmul.Products(bench, torch.float32), []
    in_order, in_int8 = (products.call(8, 128, 64, held) for held in ("in order", "int8"))
    with torch.inference_mode():
        want, found = in_order().clone(), in_int8().clone()
    assert torch.allclose(found, want, atol=0.6)  # sums of 128 products, some 11 large
    monkeypatch.setattr(matmul, "linear", lambda x, weight, bias, out: seen.append(weight[0]))
    count = TINY.weight_bytes // 2 // (64 * int8_row_bytes(128))
    for _ in range(2 * count):
        in_int8()
    assert all(isinstance(rows, Int8Rows) and len(rows) == 64 for rows in seen)
    assert len({id(rows) for rows in seen}) == count


def test_products_take_another_matrix_each_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(matmul, "linear", lambda x, weight, bias, out: seen.append(weight[0].rows.data_ptr()))
    call = matmul.Products(bench, torch.float32).call(4, 64, 64)
    for _ in range(2 * TINY.weight_bytes // (64 * 64 * 4)):
        call()
    assert len(set(seen)) == TINY.weight_bytes // (64 * 64 * 4)
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]


def test_link() -> None:
    device = StandInDevice()
    mover = mover_of(device)
    try:
        rates = link_rates(Bench(device, TINY), mover)
    finally:
        mover.lanes.close()
    check(rates.h2d, rates.d2h, rates.h2d_unpinned, rates.d2h_unpinned, rates.transfer_s)
    assert min(mover.lanes.bytes_moved[lane] for lane in ("h2d", "d2h")) >= 4 * TINY.link_bytes


def test_disk_alone_and_beside_compute(bench: Bench, scratch: Scratch) -> None:
    mover = mover_of(bench.device)
    try:
        probe = DiskProbe(bench, mover, scratch)
        rates = probe.rates()
        shares = beside_shares(bench, mover, probe, torch.float32)
        assert (scratch.folder / "profile.bin").stat().st_size == TINY.disk_bytes == probe.nbytes
    finally:
        mover.lanes.close()
        probe.close()
    check(rates.read, rates.write, rates.request_s)
    assert all(0.01 <= share <= 1 for share in shares)


def test_columns_that_wait_for_the_disk(bench: Bench) -> None:
    check(overlay_rate(bench, torch.bfloat16))


def test_slow_disk_gets_a_smaller_file(bench: Bench, scratch: Scratch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexgen_h2o.planner.measure.links.LOAD_PIECE", TINY.disk_bytes // 4)
    mover = mover_of(bench.device)
    try:
        probe = DiskProbe(replace(bench, sizes=replace(TINY, disk_s=0.0)), mover, scratch)
    finally:
        mover.lanes.close()
    assert probe.nbytes == TINY.disk_bytes // 4
    probe.close()


def test_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_space(tmp_path / "not" / "there")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 200 * 2**20})())
    with pytest.raises(DoesNotFitError, match=r"--offload-dir .*: 200.00 MiB are free.*256.00 MiB"):
        measure.measure("cpu", tmp_path / "not" / "there", lambda line: None, TINY)
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fixed_costs_of_the_loop(bench: Bench, dtype: str, tmp_path: Path) -> None:
    with torch.inference_mode():
        costs = steps.step_costs(bench, nominal_profile(True), dtype, tmp_path)
    check(costs.step_s, costs.attention_step_s, costs.eviction_step_s, costs.row_s, costs.elementwise_bytes_per_s)
    assert 0 <= costs.short_read_compute_s < math.inf and 0 <= costs.cache_load_step_s < math.inf


def test_fixed_costs_are_what_the_planner_leaves() -> None:
    few, many, evicting = steps._Steps(50e-6, 30e-6), steps._Steps(90e-6, 50e-6), steps._Steps(55e-6, 30e-6)
    found = steps._solve([few, many, evicting], 5, 15, 1e9)
    assert found.row_s == pytest.approx(60e-6 / 2 / 10)
    assert found.step_s == pytest.approx(30e-6 - 5 * found.row_s)
    assert found.attention_step_s == pytest.approx(20e-6)
    assert found.eviction_step_s == pytest.approx(5e-6)
    nothing = steps._solve([few, few, few], 0, 0, 1e9)
    assert min(nothing.step_s, nothing.eviction_step_s, nothing.row_s) > 0


def test_loads_cost_what_runs_that_read_take_more() -> None:
    """Six parts of matrices in a transformer block, of a tenth each; one KV unit, whose request is not long either."""
    spec = spec_from_config("small", steps.config_of(HOST.step_width), "profiling")

    def run(percent: steps.Percent, left_s: float) -> steps._Loading:
        policy = steps._Run(8, 16, 49, Full(), percent)
        return steps._Loading(steps._costs(spec, nominal_profile(True), "bfloat16", policy), left_s)

    alone, weights, cache = run(steps.IN_MEMORY, 1e-3), run(steps.SOME_WEIGHTS, 1.6e-3), run(steps.NO_CACHE, 1.5e-3)
    reads, whole = weights.short_requests(), cache.short_requests()
    assert alone.short_requests() == 0 < whole < 1 and 5.5 < reads < 6
    found = steps._load_costs(alone, weights, cache)
    assert found["short_read_compute_s"] == pytest.approx(6e-4 / reads)
    assert found["cache_load_step_s"] == pytest.approx(5e-4 - whole * 6e-4 / reads)
    faster = steps._load_costs(alone, run(steps.SOME_WEIGHTS, 9e-4), run(steps.NO_CACHE, 9e-4))
    assert set(faster.values()) == {0.0}


def test_whole_profile_is_one_that_can_be_read_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    profile = measure.measure("cpu", tmp_path / "offload", said.append, TINY)
    assert profile_from_json(profile.to_json()) == profile
    assert profile.device_is_host and not profile.device_is_asynchronous and profile.device_mem_bytes == 0
    assert set(profile.compute) == {"bfloat16", "float32"}
    assert len(said) >= 5 and list((tmp_path / "offload").iterdir()) == []


def test_ratios_of_disturbed_timings_can_be_read_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept profile that cannot be read would be measured anew at each run."""
    monkeypatch.setattr(compute, "other_rates", lambda *_: memory.OtherRates(1e9, 1e9, 1e9, 1e-3))
    monkeypatch.setattr(compute, "speedups", lambda *_: {"blocked": Curve.flat(1e5), "int8": Curve.flat(1e-5)})
    rates = compute.compute_rates(bench, bench, "float32")
    profile = replace(nominal_profile(True), compute={"float32": rates})
    assert profile_from_json(profile.to_json()) == profile


class QueueingStandIn(StandInDevice):
    """A device of its own that says of itself what a card says."""

    is_asynchronous = True
    dtypes = ("float16", "float32")

    def card(self) -> tuple[str, int]:
        return "NVIDIA Test 1", 2**30


def test_card_and_its_host_are_measured_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "open_device", lambda name, separate_budget: QueueingStandIn())
    profile = measure.measure("auto", tmp_path, lambda line: None, TINY)
    assert profile_from_json(profile.to_json()) == profile
    assert not profile.device_is_host and profile.device_is_asynchronous
    assert profile.machine == "nvidia-test-1" and profile.device_mem_bytes == 2**30
    for rates in profile.compute.values():
        assert rates.host_attention_bytes_per_s != rates.device_attention_bytes_per_s
    assert set(profile.compute) == {"float16", "float32"}


def test_nothing_is_left_behind_when_measuring_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "beside_shares", fail)  # the last one: file, lanes and engine have all been there
    with pytest.raises(KeyboardInterrupt):
        measure.measure("cpu", tmp_path, lambda line: None, TINY)
    assert list(tmp_path.iterdir()) == []


def test_device_that_is_not_there(tmp_path: Path, plain_cpu: None) -> None:
    for device in ("cuda", "tpu"):
        with pytest.raises(UsageError, match="--device"):
            measure.measure(device, tmp_path, lambda line: None, TINY)


@pytest.mark.parametrize("sizes", [HOST, CARD, CARD_HOST, TINY])
def test_sizes_go_together(sizes: Sizes) -> None:
    for rising in (sizes.widths, sizes.hidden, sizes.heads, sizes.rows, sizes.prompt_lengths, sizes.head_widths):
        assert list(rising) == sorted(set(rising))
    assert sizes.prompt_tokens >= sizes.prompt_lengths[-1] and sizes.prompt_width % 64 == 0
    assert sizes.cache_bytes >= 2 * sizes.slots * sizes.head_widths[-1] * 4


def test_the_peak_is_measured_only_where_the_budget_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Peak(1.0, 1.0)
    monkeypatch.setattr("flexgen_h2o.llm.measure_peak", lambda device, dtype: seen)
    need = peak_bytes(HostDevice(), torch.float32)
    assert need > 2 * 128 * MIB
    for host, found in ((need, seen), (need - 1, None)):
        with LLM("opt-tiny", Policy(1, 1), dtype="float32", budget=MemoryBudget(host=host)) as llm:
            assert llm.measure_peak() is found


@pytest.mark.parametrize("dtype", DTYPES)
def test_peak(dtype: torch.dtype) -> None:
    probe = PeakProbe(HostDevice(), dtype, TINY)
    for peak in (probe.best(), probe.now()):
        check(peak.flops_per_s, peak.memory_bytes_per_s)

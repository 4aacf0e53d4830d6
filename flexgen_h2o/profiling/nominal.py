"""Speeds of a small machine, for plans that are made before this one has been measured."""

from __future__ import annotations

from dataclasses import replace

from flexgen_h2o.profile import UNKNOWN_INT8_SPEEDUP, ComputeRates, Curve, HardwareProfile
from flexgen_h2o.units import GIB

NOMINAL = "nominal"


def nominal_profile(device_is_host: bool) -> HardwareProfile:
    """Two CPU cores with an NVMe disk, or the same with a card of 16 GB: round figures, none of them measured."""
    in_bf16 = replace(_host_rates(3e11), int8_speedup=Curve.flat(UNKNOWN_INT8_SPEEDUP))
    compute = {"float32": _host_rates(1e11), "bfloat16": in_bf16}
    if not device_is_host:
        compute = {dtype: _card_rates(2e13) for dtype in ("float32", "bfloat16", "float16")}
    return HardwareProfile(
        machine=NOMINAL,
        description="round figures of a small machine",
        date="",
        source="nominal: nothing was measured",
        device_is_host=device_is_host,
        device_is_asynchronous=not device_is_host,
        device_mem_bytes=0 if device_is_host else 16 * GIB,
        host_mem_bytes=32 * GIB,
        disk_mem_bytes=500 * GIB,
        disk_read_bytes_per_s=2e9,
        disk_write_bytes_per_s=1e9,
        h2d_bytes_per_s=1e10,
        d2h_bytes_per_s=1e10,
        h2d_unpinned_bytes_per_s=4e9,
        d2h_unpinned_bytes_per_s=4e9,
        host_memory_bytes_per_s=2e10,
        device_memory_bytes_per_s=2e10 if device_is_host else 3e11,
        disk_read_beside_compute=0.9,
        compute_beside_disk_read=0.95,
        kernel_s=1e-5,
        transfer_s=5e-5,
        disk_request_s=1e-4,
        overlay_bytes_per_s=2e9,
        step_s=1e-4,
        attention_step_s=2e-4,
        eviction_step_s=2e-4,
        row_s=2e-6,
        short_read_compute_s=5e-5 if device_is_host else 0.0,
        cache_load_step_s=2e-4 if device_is_host else 0.0,
        compute=compute,
    )


def _host_rates(flops_per_s: float) -> ComputeRates:
    flat, attention = Curve.flat, Curve.flat(1.5e10)
    over_rows = Curve(((1, 1e10), (32, flops_per_s / 2), (128, flops_per_s)))
    return ComputeRates(
        ((1.0, ((4096.0, over_rows),)),), flat(flops_per_s / 3), flat(flops_per_s / 4), attention, attention, attention,
        attention, 2e10, 5e9, 5e9, 1e9,
    )  # fmt: skip


def _card_rates(flops_per_s: float) -> ComputeRates:
    flat, here, there = Curve.flat, Curve.flat(2e11), Curve.flat(1e10)
    over_rows = Curve(((1, 2.5e11), (128, flops_per_s)))
    return ComputeRates(
        ((1.0, ((4096.0, over_rows),)),), flat(flops_per_s / 3), flat(flops_per_s / 4), here, here, there, there,
        2e11, 5e10, 5e9, 1e11,
    )  # fmt: skip

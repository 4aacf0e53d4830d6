"""A hardware profile as text for people: GB/s (10^9), GFLOP/s, microseconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flexgen_h2o.core.tables import aligned
from flexgen_h2o.core.units import format_bytes
from flexgen_h2o.planner.profile import ComputeRates, Curve, HardwareProfile

GIGA, MICRO = 1e9, 1e-6
RATES = {
    "disk_read_bytes_per_s": "disk, read",
    "disk_write_bytes_per_s": "disk, write",
    "h2d_bytes_per_s": "host to device, pinned",
    "d2h_bytes_per_s": "device to host, pinned",
    "h2d_unpinned_bytes_per_s": "host to device",
    "d2h_unpinned_bytes_per_s": "device to host",
    "host_memory_bytes_per_s": "host memory",
    "device_memory_bytes_per_s": "device memory",
    "overlay_bytes_per_s": "KV columns laid over units from disk",
}
SECONDS = {
    "kernel_s": "kernel",
    "transfer_s": "copy between host and device",
    "disk_request_s": "disk request",
    "step_s": "step of a layer and micro-batch",
    "attention_step_s": "more, with attention",
    "eviction_step_s": "more, with eviction",
    "row_s": "more, for each row",
    "short_read_compute_s": "more, for each short disk read",
    "cache_load_step_s": "more, with a KV unit from another tier",
}
SHARES = {
    "disk_read_beside_compute": "disk read beside compute",
    "compute_beside_disk_read": "compute beside disk read",
}


def table(profile: HardwareProfile) -> str:
    """The whole profile, a figure or a curve a line."""
    lines = [f"{profile.machine}: {profile.description}", f"{profile.source}, {profile.date}"]
    sizes = [("device", profile.device_mem_bytes), ("host", profile.host_mem_bytes), ("disk", profile.disk_mem_bytes)]
    lines += ["", "memory", *_aligned([(name, format_bytes(size)) for name, size in sizes if size])]
    groups = (("GB/s", RATES, GIGA), ("us", SECONDS, MICRO), ("share left", SHARES, 1.0))
    for unit, names, scale in groups:
        figures = [(what, _number(getattr(profile, field) / scale)) for field, what in names.items()]
        lines += ["", unit, *_aligned(figures)]
    for dtype, rates in profile.compute.items():
        lines += ["", *_compute(dtype, rates)]
    if profile.notes:
        lines += ["", "notes", *(f"  {name}: {note}" for name, note in profile.notes.items())]
    return "\n".join(lines)


def _compute(dtype: str, rates: ComputeRates) -> Iterator[str]:
    products = [(shape, i, c) for shape, by_inner in rates.matmul_flops_per_s for i, c in by_inner]
    rows = [rows for rows, _ in products[0][2].points]
    head = ["rows", *(f"{r:g}" for r in rows)]
    body = [[f"{i:g} to {i * shape:g}", *(_number(c.at(r) / GIGA) for r in rows)] for shape, i, c in products]
    yield f"{dtype}: products, GFLOP/s"
    yield from _columns([head, *body])
    yield from _curves(
        {"times faster, blocked": rates.blocked_speedup, "times faster, int8": rates.int8_speedup}, scale=1.0
    )
    yield f"{dtype}: GFLOP/s by tokens of a prompt"
    yield from _curves(
        {"attention of prompts": rates.prefill_attention_flops_per_s, "column sums": rates.column_sums_flops_per_s}
    )
    yield f"{dtype}: GB/s of decode attention by head width"
    yield from _curves(
        {
            "device": rates.device_attention_bytes_per_s,
            "device, scored": rates.device_scored_attention_bytes_per_s,
            "host": rates.host_attention_bytes_per_s,
            "host, scored": rates.host_scored_attention_bytes_per_s,
        }
    )
    others = {
        "norms and activations, GB/s": rates.elementwise_bytes_per_s,
        "int4 to dtype on the device, GB/s": rates.device_dequantise_bytes_per_s,
        "int4 to dtype on the host, GB/s": rates.host_dequantise_bytes_per_s,
        "logits looked at, G/s": rates.logits_per_s,
    }
    yield f"{dtype}: others"
    faster = "int4 to int8 on the device, times faster", _number(rates.requantise_speedup)
    yield from _aligned([*((what, _number(rate / GIGA)) for what, rate in others.items()), faster])


def _curves(curves: dict[str, Curve], scale: float = GIGA) -> list[str]:
    """A line a curve; those of a profile share their sizes or have one point each."""
    return _columns(
        [[what, *(f"{size:g}: {_number(rate / scale)}" for size, rate in c.points)] for what, c in curves.items()]
    )


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"  {line}" for line in aligned(rows, right=True)]


def _aligned(figures: Sequence[tuple[str, str]]) -> list[str]:
    return _columns([list(figure) for figure in figures])


def _number(value: float) -> str:
    """Three significant digits, never an exponent."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"

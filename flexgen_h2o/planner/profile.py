"""A hardware profile: the measured rates and fixed costs of one machine, JSON in and out. No torch, measures nothing.

A rate is bytes or FLOPs a second; where it depends on a size it is a curve of a few points. Compute rates belong to
the dtype that is computed in. Written by `flexgen_h2o.hardware` and scripts/fit_profile.py, read by the planner.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

from flexgen_h2o.checkpoint.formats import IN_PRODUCTS, QUANTISED
from flexgen_h2o.core.config import DTYPE_BYTES
from flexgen_h2o.core.errors import FlexgenError, UsageError
from flexgen_h2o.core.files import policies_folder, read_object, usable_path, write_whole
from flexgen_h2o.core.units import GIB

PROFILE_SCHEMA = 9
# Products in int8 over those in bf16 on a CPU whose profile is older than schema 3 and does not tell: what a 2-core AMD
# EPYC with VNNI reached (build-2core) in 128 rows and a layer around them.
UNKNOWN_INT8_SPEEDUP = 1.6
MOST_RATE = 1e18
MOST_SECONDS = 10.0
MOST_SPEEDUP = 100.0
MOST_BYTES = 2**63
# How a note begins where other processes took enough of the cores to be seen in the figures.
BUSY_NOTE = "measured while other processes took"
# Of quantised checkpoints, into the dtype and into int8 rows (WeightFormat.decoder), and what decodes in products.
DECODERS = frozenset((*IN_PRODUCTS, *(name + kind for name in QUANTISED for kind in ("", "_int8"))))
LEAST_SHAPE = 2**-10  # out / in of a matrix
SHIPPED = policies_folder() / "profiles"


@dataclass(frozen=True)
class Curve:
    """A rate as a function of a size, by points of rising size; outside them the nearest point holds.

    Between two points size / rate is interpolated over the size. Work that takes a time of its own and a time for each
    row lies on that line: a product of few rows takes as long as reading its matrix takes.
    """

    points: tuple[tuple[float, float], ...]

    @classmethod
    def flat(cls, rate: float) -> Curve:
        return cls(((1.0, rate),))

    def at(self, size: float) -> float:
        i = bisect_left(self.points, size, key=itemgetter(0))
        if i == 0 or i == len(self.points):
            return self.points[min(i, len(self.points) - 1)][1]
        (a, slow), (b, fast) = self.points[i - 1], self.points[i]
        near, far = (b - size) * a, (size - a) * b
        return (near + far) / (near / slow + far / fast)

    def scaled(self, factor: float) -> Curve:
        return Curve(tuple((size, rate * factor) for size, rate in self.points))


AS_FAST = Curve.flat(1.0)
# (out / in, ((in, FLOPs a second over rows), ...)) of linear maps, both rising
Products = tuple[tuple[float, tuple[tuple[float, Curve], ...]], ...]


@dataclass(frozen=True)
class ComputeRates:
    """What one dtype computes at. Curves are over the size in brackets.

    matmul_flops_per_s: products of (rows, in) with (out, in) matrices that are not in a cache: by out / in, by in, and
    for each over [rows]. prefill_attention_flops_per_s: causal attention over [prompt tokens],
    2 n^2 x (heads x d) FLOPs a prompt (half of the n x n pairs, two products). column_sums_flops_per_s: the second
    pass of an eviction policy, n^2 x (heads x d) FLOPs. device_ and host_attention_bytes_per_s: decode attention over
    [head width], bytes of the keys and values that it reads; scored_...: the same with scores and victims.
    elementwise_bytes_per_s: norms and activations, bytes read and written. dequantise_bytes_per_s: packed weights in
    4 bits to the dtype, bytes of the result. logits_per_s: choosing a token, logits looked at. blocked_speedup: how
    many times faster products are with matrices in RAM that are held blocked (kernels/linear.py), over [rows];
    int8_speedup: the same of products in int8 (kernels/int8.py), inputs and results included; int4_speedup: of those
    with rows in 4 bits, which become int8 rows as they are multiplied. decode_speedup: by DECODERS, how many times
    faster than 4 bits become the dtype matrices of quantised checkpoints do (`mxfp4`), or become int8 rows
    (`mxfp4_int8`); one that is not there takes as long. Of IN_PRODUCTS by what a product of few rows takes longer.
    """

    matmul_flops_per_s: Products
    prefill_attention_flops_per_s: Curve
    column_sums_flops_per_s: Curve
    device_attention_bytes_per_s: Curve
    device_scored_attention_bytes_per_s: Curve
    host_attention_bytes_per_s: Curve
    host_scored_attention_bytes_per_s: Curve
    elementwise_bytes_per_s: float
    device_dequantise_bytes_per_s: float
    host_dequantise_bytes_per_s: float
    logits_per_s: float
    blocked_speedup: Curve = AS_FAST
    int8_speedup: Curve = AS_FAST
    int4_speedup: Curve = AS_FAST
    decode_speedup: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def _product_rates(self) -> dict[tuple[float, float, float], float]:
        return {}

    def matmul_rate(self, rows: float, inner: float, outer: float) -> float:
        """FLOPs a second of (rows, inner) x (inner, outer)."""
        key = rows, inner, outer
        if key not in self._product_rates:  # a sweep has a handful, and a search asks for them thousands of times
            by_shape = tuple(
                (shape, Curve(tuple((width, over_rows.at(rows)) for width, over_rows in by_inner)).at(inner))
                for shape, by_inner in self.matmul_flops_per_s
            )
            self._product_rates[key] = Curve(by_shape).at(outer / inner)
        return self._product_rates[key]

    def requantising(self, itemsize: int, faster: float = 1.0) -> ComputeRates:
        """With the int4_speedup of square matrices whose 4 bits become int8 rows first, `faster` times as fast as they
        become the dtype, and are multiplied then."""
        ((width, over_rows), *_), points = self.matmul_flops_per_s[0][1], []
        becoming_s = itemsize / (self.device_dequantise_bytes_per_s * faster)  # of a number of the matrix
        for rows, _ in over_rows.points:
            in_order_s = 2 * rows / self.matmul_rate(rows, width, width)
            in_int8_s = in_order_s / self.int8_speedup.at(rows)
            points.append((rows, max(1 / MOST_SPEEDUP, in_order_s / (in_int8_s + becoming_s))))
        return replace(self, int4_speedup=Curve(tuple(points)))


@dataclass(frozen=True)
class HardwareProfile:
    """One machine. Rates in bytes a second, times in seconds, sizes in bytes.

    machine: a short name. device_is_host: there is no card, the host computes. device_is_asynchronous: compute is
    queued on the device and the thread that issues it goes on. *_mem_bytes: what the tiers have in all. h2d, d2h: the
    link with pinned host memory, ..._unpinned without. disk_read_beside_compute: what is left of the disk's read rate
    while all cores compute, a share; compute_beside_disk_read: what is left of the compute rate while the disk is
    read; link_both_ways: of each way's rate, a share, while both are busy. *_memory_bytes_per_s: of a copy, bytes read
    and written. kernel_s: of one operation with next to nothing to do; where compute is asynchronous also what a
    launch takes the thread that issues it. transfer_s, disk_request_s: from handing a small copy, a small read to its
    lane until the bytes are there. overlay_bytes_per_s: new columns of KV units on disk that wait in RAM to be written
    back, bytes of keys and values read and written when they are laid over a unit and another one is taken up.
    step_s: of one (layer, micro-batch) step of a decode sweep beside its products and kernel_s for each of them; where
    compute is asynchronous, with the seconds that issuing them takes. attention_step_s: more in an attention layer;
    eviction_step_s: more where columns are dropped; row_s: for each further row of a step that the host computes, and
    beside a card for each row whose columns the host drops. short_read_compute_s: that a disk request of next to no
    bytes takes from the steps beside it; the longer a request, the less (planner.work.Transfer.short_requests), and its
    bytes take what compute_beside_disk_read says. cache_load_step_s: more where a KV unit is brought from another tier.
    graph_step_s: of a step that is a graph of a card (engine/graphs.py), of the thread that issues it. compute: rates
    by dtype. source: where the numbers are from; notes: the same for single fields.
    """

    machine: str
    description: str
    date: str
    source: str
    device_is_host: bool
    device_is_asynchronous: bool
    device_mem_bytes: int
    host_mem_bytes: int
    disk_mem_bytes: int
    disk_read_bytes_per_s: float
    disk_write_bytes_per_s: float
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    h2d_unpinned_bytes_per_s: float
    d2h_unpinned_bytes_per_s: float
    host_memory_bytes_per_s: float
    device_memory_bytes_per_s: float
    disk_read_beside_compute: float
    compute_beside_disk_read: float
    link_both_ways: float
    kernel_s: float
    transfer_s: float
    disk_request_s: float
    overlay_bytes_per_s: float
    step_s: float
    attention_step_s: float
    eviction_step_s: float
    row_s: float
    short_read_compute_s: float
    cache_load_step_s: float
    graph_step_s: float
    compute: Mapping[str, ComputeRates]
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def was_disturbed(self) -> bool:
        """Whether other processes were busy while it was measured."""
        return any(note.startswith(BUSY_NOTE) for note in self.notes.values())

    def rates(self, dtype: str) -> ComputeRates:
        """UsageError for a dtype that was not measured."""
        if dtype not in self.compute:
            raise UsageError(
                f"profile of {self.machine}: has no compute rates of {dtype}, only {', '.join(self.compute)}; give "
                "one of these with --dtype"
            )
        return self.compute[dtype]

    def to_json(self) -> dict[str, Any]:
        return {"schema": PROFILE_SCHEMA, **{f.name: _plain(getattr(self, f.name)) for f in fields(self)}}


NOMINAL = "nominal"


def nominal_profile(device_is_host: bool) -> HardwareProfile:
    """Two CPU cores with an NVMe disk, or the same with a card of 16 GB: round figures, none of them measured."""
    dtypes = ("float32", "bfloat16", *(() if device_is_host else ("float16",)))
    compute = {dtype: _nominal_rates(dtype, device_is_host) for dtype in dtypes}
    return HardwareProfile(
        machine=NOMINAL, description="round figures of a small machine", date="",
        source="nominal: nothing was measured", device_is_host=device_is_host,
        device_is_asynchronous=not device_is_host, device_mem_bytes=0 if device_is_host else 16 * GIB,
        host_mem_bytes=32 * GIB, disk_mem_bytes=500 * GIB, disk_read_bytes_per_s=2e9, disk_write_bytes_per_s=1e9,
        h2d_bytes_per_s=1e10, d2h_bytes_per_s=1e10, h2d_unpinned_bytes_per_s=4e9, d2h_unpinned_bytes_per_s=4e9,
        host_memory_bytes_per_s=2e10, device_memory_bytes_per_s=2e10 if device_is_host else 3e11,
        disk_read_beside_compute=0.9, compute_beside_disk_read=0.95, link_both_ways=0.9,
        kernel_s=1e-5, transfer_s=5e-5, disk_request_s=1e-4, overlay_bytes_per_s=2e9, step_s=1e-4,
        attention_step_s=2e-4, eviction_step_s=2e-4, row_s=2e-6, short_read_compute_s=5e-5 * device_is_host,
        cache_load_step_s=2e-4 * device_is_host, graph_step_s=5e-5 * (not device_is_host), compute=compute,
    )  # fmt: skip


def _nominal_rates(dtype: str, is_host: bool) -> ComputeRates:
    peak = 2e13 if not is_host else 1e11 if dtype == "float32" else 3e11
    over_rows = Curve(((1, 1e10), (32, peak / 2), (128, peak)) if is_host else ((1, 2.5e11), (128, peak)))
    flat, here, there = Curve.flat, Curve.flat(1.5e10 if is_host else 2e11), Curve.flat(1.5e10 if is_host else 1e10)
    others = (2e10, 5e9, 5e9, 1e9) if is_host else (2e11, 5e10, 5e9, 1e11)
    prompts = flat(peak / 3), flat(peak / 4)
    rates = ComputeRates(((1.0, ((4096.0, over_rows),)),), *prompts, here, here, there, there, *others)
    in_int8 = flat(UNKNOWN_INT8_SPEEDUP if is_host and dtype == "bfloat16" else 1.0)
    return replace(rates, int8_speedup=in_int8).requantising(DTYPE_BYTES[dtype])


def write_profile(path: Path, profile: HardwareProfile) -> None:
    """Write a profile file (docs/reference/files.md), whole or not at all. Raises FlexgenError naming the file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(profile.to_json(), indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise FlexgenError(f"profile {path}: {error.strerror or error}") from error


def find_profile(name_or_path: str | Path, flag: str = "--hardware") -> Path:
    """A profile file, or the name of a shipped one (`t4`). UsageError naming `flag` for neither."""
    path = usable_path(name_or_path, flag)
    if path.is_file():
        return path
    shipped = SHIPPED / f"{name_or_path}.json"
    if str(name_or_path) == path.name and shipped.is_file():
        return shipped
    names = ", ".join(sorted(p.stem for p in SHIPPED.glob("*.json")))
    raise UsageError(f"{flag} {name_or_path}: no such file, and not a shipped profile ({names or 'none is here'})")


def read_profile(path: Path, flag: str = "--hardware") -> HardwareProfile:
    """Read and validate a profile file; UsageError names the file and the unknown, missing or bad field."""
    body = read_object(path, f"{flag} {path}")
    try:
        return profile_from_json(body)
    except UsageError as error:
        raise UsageError(f"{flag} {path}: {error}") from error


def profile_from_json(body: object) -> HardwareProfile:
    """UsageError names the unknown, missing or bad field."""
    if not isinstance(body, dict):
        raise UsageError("a JSON object is expected")
    schema = body.get("schema")
    if isinstance(schema, bool) or not isinstance(schema, int) or not 1 <= schema <= PROFILE_SCHEMA:
        raise UsageError(f"schema is {schema!r}, this version reads 1 to {PROFILE_SCHEMA}")
    given = {"notes": {}} | {name: value for name, value in body.items() if name != "schema"}
    if schema < PROFILE_SCHEMA:
        given = _with_what_is_new(schema, given)
    profile = HardwareProfile(**_read_fields("", given, HardwareProfile))
    rates = {d: r.requantising(DTYPE_BYTES[d], r.int4_speedup.at(1)) for d, r in profile.compute.items()}
    return profile if schema > 5 else replace(profile, compute=rates)


def _with_what_is_new(schema: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of an older schema, and those that came later as if nothing were known of them."""
    since_4 = {"overlay_bytes_per_s": MOST_RATE, "short_read_compute_s": 0.0, "cache_load_step_s": 0.0}
    found = {"link_both_ways": 1.0, "graph_step_s": 1.0, **({} if schema > 3 else since_4), **given}
    if not isinstance(compute := given.get("compute"), dict):
        return found

    def renewed(dtype: str, rates: object) -> object:
        if not isinstance(rates, dict):
            return rates
        on_cpu = given.get("device_is_host") is True and dtype == "bfloat16"
        requantise = _number(f"compute.{dtype}: requantise_speedup", rates.get("requantise_speedup", 1.0))
        since: dict[int, dict[str, Any]] = {
            2: {"blocked_speedup": {"1": 1.0}},
            3: {"int8_speedup": {"1": UNKNOWN_INT8_SPEEDUP if on_cpu else 1.0}},
            5: {"decode_speedup": {}},
            # Until then a number: how many times faster 4 bits become int8 rows than the dtype.
            6: {"int4_speedup": {"1": requantise}},
        }
        later = {name: value for came, new in since.items() if came > schema for name, value in new.items()}
        return {**later, **{name: value for name, value in rates.items() if name != "requantise_speedup"}}

    return {**found, "compute": {dtype: renewed(dtype, rates) for dtype, rates in compute.items()}}


def _read_fields(where: str, given: Mapping[str, object], kind: type) -> dict[str, Any]:
    """The fields of a dataclass, each read as its annotation says."""
    types = {f.name: str(f.type) for f in fields(kind)}
    unknown, missing = sorted(set(given) - set(types)), sorted(set(types) - set(given))
    if unknown or missing:
        problem = f"unknown field {unknown[0]!r}" if unknown else f"field {missing[0]!r} is missing"
        raise UsageError(f"{where}{problem}")
    return {name: _READERS[types[name]](name, value) for name, value in given.items()}


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{name}: {value!r} is not a text")
    return value


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{name}: {value!r} is not true or false")
    return value


def _size(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_BYTES:
        raise UsageError(f"{name}: {value!r:.40} is not a number of bytes")
    return value


# By the ending of a number's name: the least, the most, and what it is.
RANGES = {
    "per_s": (1.0, MOST_RATE, "a rate"),
    "_s": (0.0, MOST_SECONDS, "a time in seconds"),
    "_speedup": (1 / MOST_SPEEDUP, MOST_SPEEDUP, "how many times faster"),
    "": (0.01, 1.0, "a share"),
}


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{name}: {value!r} is not a number")
    low, high, what = next(bounds for ending, bounds in RANGES.items() if name.endswith(ending))
    if not low <= value <= high:
        raise UsageError(f"{name}: {value!r:.40} is out of range; {what} is between {low:g} and {high:g}")
    return float(value)


def _points(name: str, value: object, least: float = 1.0) -> list[tuple[float, Any]]:
    """The (size, anything) pairs of a curve's object, by size."""
    if not isinstance(value, dict) or not value:
        raise UsageError(f"{name}: an object of sizes and rates is expected, not {value!r}")
    found: dict[float, Any] = {}
    for key, entry in value.items():
        try:
            size = float(key)
        except ValueError:
            size = 0.0
        if not least <= size <= MOST_BYTES:
            raise UsageError(f"{name}: {key!r} is not a size of at least {least:g}")
        if size in found:
            raise UsageError(f"{name}: size {size:g} is there twice")
        found[size] = entry
    return sorted(found.items(), key=lambda pair: pair[0])


def _curve(name: str, value: object) -> Curve:
    return Curve(tuple((size, _number(name, rate)) for size, rate in _points(name, value)))


def _products(name: str, value: object) -> Products:
    return tuple(
        (shape, tuple((inner, _curve(name, curve)) for inner, curve in _points(name, by_inner)))
        for shape, by_inner in _points(name, value, LEAST_SHAPE)
    )


def _compute(name: str, value: object) -> dict[str, ComputeRates]:
    if not isinstance(value, dict) or not value:
        raise UsageError(f"{name}: an object of dtypes is expected, not {value!r}")
    found = {}
    for dtype, rates in value.items():
        if dtype not in DTYPE_BYTES:
            raise UsageError(f"{name}: {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        if not isinstance(rates, dict):
            raise UsageError(f"{name}.{dtype}: a JSON object is expected")
        found[dtype] = ComputeRates(**_read_fields(f"{name}.{dtype}: ", rates, ComputeRates))
    return found


def _ratios(name: str, value: object) -> dict[str, float]:
    if not isinstance(value, dict):
        raise UsageError(f"{name}: a JSON object is expected")
    if unknown := sorted(set(value) - DECODERS):
        raise UsageError(f"{name}: {unknown[0]!r} is not one of {', '.join(sorted(DECODERS))}")
    return {key: _number(name, ratio) for key, ratio in value.items()}


def _notes(name: str, value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise UsageError(f"{name}: a JSON object is expected")
    return {key: _text(f"{name}.{key}", text) for key, text in value.items()}


# By the field's annotation, as it is written above.
_READERS: dict[str, Any] = {
    "str": _text,
    "bool": _flag,
    "int": _size,
    "float": _number,
    "Curve": _curve,
    "Products": _products,
    "Mapping[str, ComputeRates]": _compute,
    "Mapping[str, float]": _ratios,
    "Mapping[str, str]": _notes,
}


def _plain(value: Any) -> Any:
    """A field as JSON."""
    if isinstance(value, ComputeRates):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    points = value.points if isinstance(value, Curve) else value
    return {f"{size:g}": _plain(entry) for size, entry in points} if isinstance(points, tuple) else value

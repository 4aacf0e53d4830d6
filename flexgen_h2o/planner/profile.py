"""A hardware profile: the measured rates and fixed costs of one machine, as a class and as JSON.

A rate is bytes or FLOPs per second. If it depends on a size, it is a curve of a few points. Compute
rates belong to the dtype that is computed in. `flexgen_h2o.hardware` and scripts/fit_profile.py
write profiles, and the planner reads them. The module imports no torch and measures nothing.
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

from flexgen_h2o.checkpoint.formats import FORMATS
from flexgen_h2o.core.config import DTYPE_BYTES
from flexgen_h2o.core.errors import FlexgenError, UsageError
from flexgen_h2o.core.files import policies_folder, read_object, usable_path, write_whole
from flexgen_h2o.core.units import GIB

PROFILE_SCHEMA = 9
# How many times faster products in int8 are than in bf16, for a CPU whose profile is older than
# schema 3 and does not tell. A 2-core AMD EPYC with VNNI (build-2core) reached it with 128 rows,
# including the rest of the layer.
UNKNOWN_INT8_SPEEDUP = 1.6
MAX_RATE = 1e18
MAX_SECONDS = 10.0
MAX_SPEEDUP = 100.0
MAX_BYTES = 2**63
# The beginning of a note that says that other processes disturbed a measurement.
BUSY_NOTE = "measured while other processes took"
# Decoders that work within products (Codec.decoder_in_products).
IN_PRODUCTS = "mxfp4_in_products", "4bit_in_products"
# These, and decoders of quantised checkpoints, into the dtype and into int8 rows (Codec.decoder).
DECODERS = frozenset((*IN_PRODUCTS, *(name + kind for name in FORMATS for kind in ("", "_int8"))))
MIN_SHAPE = 2**-10  # the least out / in of a matrix
SHIPPED = policies_folder() / "profiles"


@dataclass(frozen=True)
class Curve:
    """A rate as a function of a size.

    Outside the points, the nearest point counts. Between two points, size / rate is interpolated
    linearly over the size. That is exact for work with a fixed time and a time per row. For
    example, a product of few rows takes as long as reading its matrix.
    """

    # (size, rate) by rising size.
    points: tuple[tuple[float, float], ...]

    @classmethod
    def flat(cls, rate: float) -> Curve:
        """Return a curve that has the same rate at all sizes."""
        return cls(((1.0, rate),))

    def at(self, size: float) -> float:
        """Return the rate at a size."""
        i = bisect_left(self.points, size, key=itemgetter(0))
        if i == 0 or i == len(self.points):
            return self.points[min(i, len(self.points) - 1)][1]
        a, slow = self.points[i - 1]
        b, fast = self.points[i]
        near = (b - size) * a
        far = (size - a) * b
        return (near + far) / (near / slow + far / fast)

    def scaled(self, factor: float) -> Curve:
        """Return the curve with all rates multiplied by a factor."""
        return Curve(tuple((size, rate * factor) for size, rate in self.points))


AS_FAST = Curve.flat(1.0)
# FLOPs per second of linear maps: ((out / in, ((in, curve over rows), ...)), ...). Both `out / in`
# and `in` rise.
Products = tuple[tuple[float, tuple[tuple[float, Curve], ...]], ...]


@dataclass(frozen=True)
class ComputeRates:
    """The rates of computation in one dtype. measure/compute.compute_rates makes it.

    The comment of a curve gives its size in brackets.
    """

    # Products of [rows], (rows, in), with (out, in) matrices that are not in a CPU or GPU cache.
    matmul_flops_per_s: Products
    # Causal attention over [prompt tokens], with 2 n^2 x (heads x d) FLOPs per prompt: half of the
    # n x n pairs, two products.
    prefill_attention_flops_per_s: Curve
    # The second pass of an eviction policy over [prompt tokens]: n^2 x (heads x d) FLOPs.
    column_sums_flops_per_s: Curve
    # Decode attention over [head width] on the device: bytes of the keys and values that it reads.
    device_attention_bytes_per_s: Curve
    # The same with scores and the choice of victims.
    device_scored_attention_bytes_per_s: Curve
    # Decode attention over [head width] on the host: bytes of the keys and values that it reads.
    host_attention_bytes_per_s: Curve
    # The same with scores and the choice of victims.
    host_scored_attention_bytes_per_s: Curve
    # Norms and activations: bytes read and written.
    elementwise_bytes_per_s: float
    # Unpacking of packed 4-bit weights into the dtype on the device: bytes of the result.
    device_dequantise_bytes_per_s: float
    # Unpacking of packed 4-bit weights into the dtype on the host: bytes of the result.
    host_dequantise_bytes_per_s: float
    # Choosing tokens: logits that are read.
    logits_per_s: float
    # How many times faster products of [rows] are with matrices in RAM that are held blocked
    # (kernels/linear.py).
    blocked_speedup: Curve = AS_FAST
    # How many times faster products of [rows] are in int8 (kernels/int8.py). It includes the
    # conversion of inputs and results.
    int8_speedup: Curve = AS_FAST
    # The same for matrix rows in 4 bits, which become int8 rows while they are multiplied.
    int4_speedup: Curve = AS_FAST
    # By name of DECODERS, how many times faster matrices of quantised checkpoints become the dtype
    # (`mxfp4`) or int8 rows (`mxfp4_int8`) than packed 4-bit weights become the dtype. A missing
    # name counts as equally fast. For IN_PRODUCTS, the time of decoding is the time that a product
    # of few rows takes longer.
    decode_speedup: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def _product_rates(self) -> dict[tuple[float, float, float], float]:
        """Cache of `matmul_rate`, by (rows, inner, outer)."""
        return {}

    def matmul_rate(self, rows: float, inner: float, outer: float) -> float:
        """Return the FLOPs per second of (rows, inner) x (inner, outer)."""
        key = rows, inner, outer
        # A sweep has a handful of shapes, and a search asks for them thousands of times.
        if key not in self._product_rates:
            by_shape = tuple(
                (
                    shape,
                    Curve(tuple((width, over_rows.at(rows)) for width, over_rows in by_inner)).at(
                        inner
                    ),
                )
                for shape, by_inner in self.matmul_flops_per_s
            )
            self._product_rates[key] = Curve(by_shape).at(outer / inner)
        return self._product_rates[key]

    def requantising(self, itemsize: int, faster: float = 1.0) -> ComputeRates:
        """Return the rates with int4_speedup computed from the other rates.

        The computation assumes square matrices whose 4-bit rows first become int8 rows and are then
        multiplied.

        itemsize: bytes of one number of the dtype.
        faster: how many times faster 4-bit rows become int8 rows than they become the dtype.
        """
        (width, over_rows), *_ = self.matmul_flops_per_s[0][1]
        points = []
        # Seconds per number of the matrix.
        becoming_s = itemsize / (self.device_dequantise_bytes_per_s * faster)
        for rows, _ in over_rows.points:
            in_order_s = 2 * rows / self.matmul_rate(rows, width, width)
            in_int8_s = in_order_s / self.int8_speedup.at(rows)
            points.append((rows, max(1 / MAX_SPEEDUP, in_order_s / (in_int8_s + becoming_s))))
        return replace(self, int4_speedup=Curve(tuple(points)))


@dataclass(frozen=True)
class HardwareProfile:
    """The profile of one machine. measure/run.measure makes it, or read_profile reads it.

    Rates are in bytes per second, times in seconds, sizes in bytes.
    """

    # A short name.
    machine: str
    description: str
    # ISO date of the measurement; "" if nothing was measured.
    date: str
    # Where the numbers are from.
    source: str
    # True if there is no card and the host computes.
    device_is_host: bool
    # True if compute is queued on the device while the thread that issues it continues.
    device_is_asynchronous: bool
    # Total bytes of each tier.
    device_mem_bytes: int
    host_mem_bytes: int
    disk_mem_bytes: int
    disk_read_bytes_per_s: float
    disk_write_bytes_per_s: float
    # The link from host to device (h2d) and back (d2h), with pinned host memory.
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    # The same link with host memory that is not pinned.
    h2d_unpinned_bytes_per_s: float
    d2h_unpinned_bytes_per_s: float
    # A copy within host memory, or within device memory: bytes read and written.
    host_memory_bytes_per_s: float
    device_memory_bytes_per_s: float
    # Share of the disk's read rate that is left while all cores compute.
    disk_read_beside_compute: float
    # Share of the compute rate that is left while the disk is read.
    compute_beside_disk_read: float
    # Share of each direction's rate that is left while both directions of the link are busy.
    link_both_ways: float
    # One operation with almost nothing to do. If compute is asynchronous, it is also the time that
    # a launch takes on the thread that issues it.
    kernel_s: float
    # From handing a small copy to its lane until the bytes are there.
    transfer_s: float
    # From handing a small read to its lane until the bytes are there.
    disk_request_s: float
    # New KV entries of units on disk that wait in RAM to be written back. The rate counts bytes of
    # keys and values, read and written, when they are laid over a unit and another one is added.
    overlay_bytes_per_s: float
    # One (layer, micro-batch) step of a decode sweep, in addition to its products and kernel_s for
    # each of them. If compute is asynchronous, it includes the seconds of issuing them.
    step_s: float
    # Additional seconds of a step in an attention layer.
    attention_step_s: float
    # Additional seconds of a step that evicts KV entries.
    eviction_step_s: float
    # Additional seconds per sequence of a step that the host computes. With a card, it is per
    # sequence whose KV entries the host evicts.
    row_s: float
    # Seconds that a disk request of almost no bytes takes from the steps that run meanwhile. A
    # longer request takes less (planner.cost_model.Transfer.short_requests). Its bytes take what
    # compute_beside_disk_read gives.
    short_read_compute_s: float
    # Additional seconds of a step whose KV unit is loaded from another tier.
    cache_load_step_s: float
    # Seconds of the issuing thread for a step that is a graph of a card (engine/graphs.py).
    graph_step_s: float
    # Compute rates by dtype.
    compute: Mapping[str, ComputeRates]
    # Where numbers are from, by field or part. A note may say what disturbed a measurement.
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def was_disturbed(self) -> bool:
        """Whether other processes were busy during the measurement."""
        return any(note.startswith(BUSY_NOTE) for note in self.notes.values())

    @property
    def is_nominal(self) -> bool:
        """Whether figures are round ones or those of data sheets, and not measured."""
        return self.source.startswith(NOMINAL)

    def rates(self, dtype: str) -> ComputeRates:
        """Return the rates of a dtype. Raise UsageError if it was not measured."""
        if dtype not in self.compute:
            raise UsageError(
                f"profile of {self.machine}: has no compute rates of {dtype}, only "
                f"{', '.join(self.compute)}; give "
                "one of these with --dtype"
            )
        return self.compute[dtype]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the profile file."""
        return {
            "schema": PROFILE_SCHEMA,
            **{f.name: _plain(getattr(self, f.name)) for f in fields(self)},
        }


NOMINAL = "nominal"


def nominal_profile(device_is_host: bool) -> HardwareProfile:
    """Return round figures, none of them measured, of two CPU cores with an NVMe disk.

    If not device_is_host, the machine also has a card of 16 GB.
    """
    dtypes = ("float32", "bfloat16", *(() if device_is_host else ("float16",)))
    compute = {dtype: _nominal_rates(dtype, device_is_host) for dtype in dtypes}
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
        link_both_ways=0.9,
        kernel_s=1e-5,
        transfer_s=5e-5,
        disk_request_s=1e-4,
        overlay_bytes_per_s=2e9,
        step_s=1e-4,
        attention_step_s=2e-4,
        eviction_step_s=2e-4,
        row_s=2e-6,
        short_read_compute_s=5e-5 * device_is_host,
        cache_load_step_s=2e-4 * device_is_host,
        graph_step_s=5e-5 * (not device_is_host),
        compute=compute,
    )


def _nominal_rates(dtype: str, is_host: bool) -> ComputeRates:
    """Return the compute rates of `nominal_profile` for one dtype."""
    peak = 2e13 if not is_host else 1e11 if dtype == "float32" else 3e11
    over_rows = Curve(
        ((1, 1e10), (32, peak / 2), (128, peak)) if is_host else ((1, 2.5e11), (128, peak))
    )
    flat = Curve.flat
    here = Curve.flat(1.5e10 if is_host else 2e11)
    there = Curve.flat(1.5e10 if is_host else 1e10)
    others = (2e10, 5e9, 5e9, 1e9) if is_host else (2e11, 5e10, 5e9, 1e11)
    prompts = flat(peak / 3), flat(peak / 4)
    rates = ComputeRates(
        ((1.0, ((4096.0, over_rows),)),), *prompts, here, here, there, there, *others
    )
    in_int8 = flat(UNKNOWN_INT8_SPEEDUP if is_host and dtype == "bfloat16" else 1.0)
    return replace(rates, int8_speedup=in_int8).requantising(DTYPE_BYTES[dtype])


def write_profile(path: Path, profile: HardwareProfile) -> None:
    """Write a profile file (docs/reference/files.md), whole or not at all.

    Raise FlexgenError, which names the file, if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(profile.to_json(), indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise FlexgenError(f"profile {path}: {error.strerror or error}") from error


def find_profile(name_or_path: str | Path, flag: str = "--hardware") -> Path:
    """Return the path of a profile file, given as a path or as the name of a shipped one (`t4`).

    Raise UsageError, which names `flag`, if it is neither.
    """
    path = usable_path(name_or_path, flag)
    if path.is_file():
        return path
    shipped = SHIPPED / f"{name_or_path}.json"
    if str(name_or_path) == path.name and shipped.is_file():
        return shipped
    names = ", ".join(sorted(p.stem for p in SHIPPED.glob("*.json")))
    raise UsageError(
        f"{flag} {name_or_path}: no such file, and not a shipped profile "
        f"({names or 'none is here'}); parts of a machine are written as gpu=rtx-4090,cores=16"
    )


def read_profile(path: Path, flag: str = "--hardware") -> HardwareProfile:
    """Read and validate a profile file.

    Raise UsageError, which names the file and the field, if a field is unknown, missing or bad.
    """
    body = read_object(path, f"{flag} {path}")
    try:
        return profile_from_json(body)
    except UsageError as error:
        raise UsageError(f"{flag} {path}: {error}") from error


def profile_from_json(body: object) -> HardwareProfile:
    """Return the profile of a JSON object.

    Raise UsageError, which names the field, if a field is unknown, missing or bad.
    """
    schema = _object("profile", body).get("schema")
    if isinstance(schema, bool) or not isinstance(schema, int) or not 1 <= schema <= PROFILE_SCHEMA:
        raise UsageError(f"schema is {schema!r}, this version reads 1 to {PROFILE_SCHEMA}")
    given = {"notes": {}, **_object("profile", body)}
    del given["schema"]
    if schema < PROFILE_SCHEMA:
        given = _with_what_is_new(given)
    profile = HardwareProfile(**_read_fields("", given, HardwareProfile))
    rates = {
        d: r.requantising(DTYPE_BYTES[d], r.int4_speedup.at(1)) for d, r in profile.compute.items()
    }
    return profile if schema > 5 else replace(profile, compute=rates)


def _with_what_is_new(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an older schema, with those that came later added.

    The added values are those of a machine of which nothing is known.
    """
    on_cpu = given.get("device_is_host") is True

    def renewed(dtype: str, rates: object) -> dict[str, Any]:
        kept = dict(_object(f"compute.{dtype}", rates))
        # A number: how many times faster 4 bits become int8 than they become the dtype.
        name = "requantise_speedup"
        requantise = _number(f"compute.{dtype}: {name}", kept.pop(name, 1.0))
        return {
            "blocked_speedup": {"1": 1.0},
            "int8_speedup": {"1": UNKNOWN_INT8_SPEEDUP if on_cpu and dtype == "bfloat16" else 1.0},
            "decode_speedup": {},
            "int4_speedup": {"1": requantise},
            **kept,
        }

    compute = _object("compute", given.get("compute"))
    return {
        "overlay_bytes_per_s": MAX_RATE,
        "short_read_compute_s": 0.0,
        "cache_load_step_s": 0.0,
        "link_both_ways": 1.0,
        "graph_step_s": 1.0,
        **given,
        "compute": {dtype: renewed(dtype, rates) for dtype, rates in compute.items()},
    }


def _read_fields(where: str, given: Mapping[str, object], kind: type) -> dict[str, Any]:
    """Return the fields of a dataclass, each read as its annotation says.

    where: the beginning of an error message.
    """
    types = {f.name: str(f.type) for f in fields(kind)}
    unknown = sorted(set(given) - set(types))
    missing = sorted(set(types) - set(given))
    if unknown or missing:
        problem = f"unknown field {unknown[0]!r}" if unknown else f"field {missing[0]!r} is missing"
        raise UsageError(f"{where}{problem}")
    return {name: _READERS[types[name]](name, value) for name, value in given.items()}


def _object(name: str, value: object) -> dict[str, Any]:
    """Return a JSON object; raise UsageError for anything else."""
    if not isinstance(value, dict):
        raise UsageError(f"{name}: a JSON object is expected, not {value!r:.60}")
    return value


def _text(name: str, value: object) -> str:
    """Return a JSON string of one line; raise UsageError for anything else."""
    if not isinstance(value, str) or not value.isprintable():
        raise UsageError(f"{name}: {value!r} is not a text of one line")
    return value


def _flag(name: str, value: object) -> bool:
    """Return a JSON boolean; raise UsageError for anything else."""
    if not isinstance(value, bool):
        raise UsageError(f"{name}: {value!r} is not true or false")
    return value


def _size(name: str, value: object) -> int:
    """Return a number of bytes; raise UsageError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_BYTES:
        raise UsageError(f"{name}: {value!r:.40} is not a number of bytes")
    return value


# By the ending of a number's name: its least value, its greatest value, and a description.
RANGES = {
    "per_s": (1.0, MAX_RATE, "a rate"),
    "_s": (0.0, MAX_SECONDS, "a time in seconds"),
    "_speedup": (1 / MAX_SPEEDUP, MAX_SPEEDUP, "how many times faster"),
    "": (0.01, 1.0, "a share"),
}


def _number(name: str, value: object) -> float:
    """Return a number; raise UsageError if it is none or out of the range of its name (RANGES)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{name}: {value!r} is not a number")
    low, high, what = next(bounds for ending, bounds in RANGES.items() if name.endswith(ending))
    if not low <= value <= high:
        raise UsageError(
            f"{name}: {value!r:.40} is out of range; {what} is between {low:g} and {high:g}"
        )
    return float(value)


def _points(name: str, value: object, least: float = 1.0) -> list[tuple[float, Any]]:
    """Return the (size, unread value) pairs of a curve's JSON object by rising size."""
    found: dict[float, Any] = {}
    for key, entry in _object(name, value).items():
        try:
            size = float(key)
        except ValueError:
            size = 0.0
        if not least <= size <= MAX_BYTES:
            raise UsageError(f"{name}: {key!r} is not a size of at least {least:g}")
        if size in found:
            raise UsageError(f"{name}: size {size:g} is there twice")
        found[size] = entry
    if not found:
        raise UsageError(f"{name}: no size is there")
    return sorted(found.items(), key=lambda pair: pair[0])


def _curve(name: str, value: object) -> Curve:
    """Return the curve of a JSON object {size: rate}."""
    return Curve(tuple((size, _number(name, rate)) for size, rate in _points(name, value)))


def _products(name: str, value: object) -> Products:
    """Return the rates of linear maps of a JSON object {out / in: {in: {rows: rate}}}."""
    return tuple(
        (shape, tuple((inner, _curve(name, curve)) for inner, curve in _points(name, by_inner)))
        for shape, by_inner in _points(name, value, MIN_SHAPE)
    )


def _compute(name: str, value: object) -> dict[str, ComputeRates]:
    """Return the compute rates by dtype of a JSON object."""
    found = {}
    for dtype, rates in _object(name, value).items():
        if dtype not in DTYPE_BYTES:
            raise UsageError(f"{name}: {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        where = f"{name}.{dtype}"
        read = _read_fields(f"{where}: ", _object(where, rates), ComputeRates)
        found[dtype] = ComputeRates(**read)
    if not found:
        raise UsageError(f"{name}: no dtype is there")
    return found


def _ratios(name: str, value: object) -> dict[str, float]:
    """Return the speedups by decoder of a JSON object; raise UsageError for an unknown decoder."""
    if unknown := sorted(set(_object(name, value)) - DECODERS):
        raise UsageError(f"{name}: {unknown[0]!r} is not one of {', '.join(sorted(DECODERS))}")
    return {key: _number(name, ratio) for key, ratio in _object(name, value).items()}


def _notes(name: str, value: object) -> dict[str, str]:
    """Return the notes of a JSON object."""
    return {key: _text(f"{name}.{key}", text) for key, text in _object(name, value).items()}


# The reader of a field by its annotation, as it is written above.
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
    """Return a field's value as JSON."""
    if isinstance(value, ComputeRates):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    points = value.points if isinstance(value, Curve) else value
    return (
        {f"{size:g}": _plain(entry) for size, entry in points}
        if isinstance(points, tuple)
        else value
    )

"""Put together the profile of a machine from the names and data sheets of its parts.

`gpu=rtx-4090,cores=16,ram-gbps=80,disk-gbps=7` is such a machine. A data sheet promises more than a
run reaches, so its figures are multiplied by the shares that were measured or fitted on machines
with a shipped profile. What is not named is taken from a measured profile.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flexgen_h2o.core.config import DTYPE_BYTES
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.units import GIB, MIB, format_bytes, parse_bytes
from flexgen_h2o.planner.profile import (
    NOMINAL,
    SHIPPED,
    ComputeRates,
    Curve,
    HardwareProfile,
    find_profile,
    read_profile,
)

# Profiles whose measured shares of the data sheets are used: of cards with and without bfloat16,
# and of a CPU if this machine was not measured.
NEW_CARD = "a100-80"
OLD_CARD = "t4"
MEASURED_CPU = "build-2core"
# Shares of the data sheets in the shipped profiles (their notes): of RAM and of a disk.
RAM_SHARE = 0.773
DISK_SHARE = 0.978
WRITE_SHARE = 0.53  # a disk's writes, as a share of its reads
LANE_BYTES_PER_S = {3: 15.75e9 / 16, 4: 31.5e9 / 16, 5: 63e9 / 16}  # by generation of PCIe
ASSUMED_DISK = 10**12  # bytes that are free, if nothing else is said
STATED = "stated by the user"
MAX_CORES = 4096
MAX_GBPS = 1e5
MIN_PART_BYTES = 16 * MIB  # a smaller RAM or disk lacks its unit
NO_CARD = "none"
_CORES = re.compile(r"(\d+) cores")


@dataclass(frozen=True)
class Card:
    """The data sheet of a card."""

    gib: float  # memory
    gbps: float  # 1e9 bytes per second of its memory
    # Dense products of tensor cores in float16 with sums in float32, in 1e12 FLOPs per second.
    tflops: float
    pcie: int = 4  # generation
    lanes: int = 16
    has_bfloat16: bool = True  # since Ampere


CARDS = {
    "t4": Card(15, 320, 65, 3, has_bfloat16=False),
    "v100-16": Card(16, 900, 125, 3, has_bfloat16=False),
    "v100-32": Card(32, 900, 125, 3, has_bfloat16=False),
    "rtx-2080-ti": Card(11, 616, 53.8, 3, has_bfloat16=False),
    "rtx-3060": Card(12, 360, 25.5),
    "rtx-3080": Card(10, 760, 59.5),
    "rtx-3090": Card(24, 936, 71),
    "rtx-4060": Card(8, 272, 30.2, lanes=8),
    "rtx-4060-ti-16": Card(16, 288, 44.1, lanes=8),
    "rtx-4070": Card(12, 504, 58.3),
    "rtx-4080": Card(16, 717, 97.5),
    "rtx-4090": Card(24, 1008, 165.2),
    "rtx-5070-ti": Card(16, 896, 87.9, 5),
    "rtx-5080": Card(16, 960, 112.6, 5),
    "rtx-5090": Card(32, 1792, 209.5, 5),
    "rtx-a4000": Card(16, 448, 76.7),
    "rtx-a6000": Card(48, 768, 154.8),
    "a10": Card(24, 600, 125),
    "l4": Card(24, 300, 121),
    "l40s": Card(48, 864, 362),
    "a100-40": Card(40, 1555, 312),
    "a100-80": Card(80, 2039, 312),
    "h100": Card(80, 3350, 989, 5),
    "h200": Card(141, 4800, 989, 5),
}


def _number(most: float) -> Callable[[str], float]:
    """Return a reader of numbers above 0 and up to `most`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value <= most:
            raise UsageError(f"{text!r:.40} is not a number above 0 and up to {most:g}")
        return value

    return read


def _card_name(text: str) -> str:
    name = text.lower().replace(" ", "-").replace("_", "-")
    if name != NO_CARD and name not in CARDS:
        raise UsageError(f"{text!r:.40} is not one of {NO_CARD}, {', '.join(CARDS)}")
    return name


def _size(text: str) -> int:
    """Return the bytes of a part of a machine, whose unit must not be forgotten."""
    size = parse_bytes(text)
    if size < MIN_PART_BYTES:
        raise UsageError(f"{text!r:.40} is {format_bytes(size)}; write for example 16GiB")
    return size


@dataclass(frozen=True)
class Parts:
    """The parts that --hardware names; None for those that it does not. `_read` makes it.

    Speeds are those of data sheets, in 1e9 bytes per second.
    """

    gpu: str | None = None  # a name of CARDS, or NO_CARD
    cores: float | None = None
    ram: int | None = None  # bytes
    ram_gbps: float | None = None
    disk: int | None = None  # bytes that are free
    disk_gbps: float | None = None
    pcie_gbps: float | None = None  # of the link to the card
    like: str | None = None  # a file or a shipped profile that has the rest


# Readers of the values, by the names that a user writes.
READERS: dict[str, Callable[[str], Any]] = {
    "gpu": _card_name,
    "cores": _number(MAX_CORES),
    "ram": _size,
    "ram-gbps": _number(MAX_GBPS),
    "disk": _size,
    "disk-gbps": _number(MAX_GBPS),
    "pcie-gbps": _number(MAX_GBPS),
    "like": str,
}


def is_parts(text: str | Path) -> bool:
    """Return whether the text of --hardware names parts, and is not the name of a file."""
    return "=" in str(text) and not Path(text).is_file()


def find_hardware(
    text: str | Path, here: Callable[[], HardwareProfile | None], flag: str = "--hardware"
) -> HardwareProfile:
    """Return the profile that --hardware names: a file, a shipped profile, or parts.

    here: returns this machine's measured profile, if there is one. Raise UsageError that names the
    flag and the part.
    """
    if not is_parts(text):
        return read_profile(find_profile(text, flag), flag)
    parts = _read(str(text), flag)
    if parts.like is None:
        base = here() or read_profile(SHIPPED / f"{MEASURED_CPU}.json")
    else:
        base = read_profile(find_profile(parts.like, f"{flag} like"), flag)
    return _assembled(str(text), parts, base)


def _read(text: str, flag: str) -> Parts:
    """Return the parts. Raise UsageError for an unknown or repeated one, or a wrong value."""
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if name not in READERS or not equals:
            raise UsageError(
                f"{flag} {text}: {part.strip()!r:.40} is no part; write NAME=VALUE with a name of "
                f"{', '.join(READERS)}"
            )
        if name in found:
            raise UsageError(f"{flag} {text}: {name} is there twice; leave one of them out")
        try:
            found[name] = READERS[name](value.strip())
        except UsageError as error:
            raise UsageError(f"{flag} {text}: {name}: {error}") from error
    return Parts(**{name.replace("-", "_"): value for name, value in found.items()})


def _assembled(text: str, parts: Parts, base: HardwareProfile) -> HardwareProfile:
    """Return the profile of a machine of these parts; `base` has what they do not say."""
    profile = _with_host(parts, base)
    if parts.gpu in CARDS:
        profile = _with_card(CARDS[parts.gpu], profile)
    elif parts.gpu is not None:
        profile = _without_card(profile)
    if parts.pcie_gbps is not None:
        profile = _with_link(profile, parts.pcie_gbps * 1e9)
    rest = f"the rest is that of {base.machine}"
    return replace(
        profile,
        machine=text,
        description=f"{text}; {rest}",
        date="",
        source=f"{NOMINAL}, from data sheets; {rest}",
        notes={} if parts.disk is None else {"disk_mem_bytes": STATED},
    )


def _with_host(parts: Parts, base: HardwareProfile) -> HardwareProfile:
    """Return the base with another CPU, RAM and disk."""
    found = _CORES.search(base.description)
    known = int(found[1]) if found else 2
    per_core = 1.0 if parts.cores is None else parts.cores / known
    memory = base.host_memory_bytes_per_s
    if parts.ram_gbps is not None:
        memory = parts.ram_gbps * 1e9 * RAM_SHARE
    is_host = base.device_is_host
    compute = base.compute
    if parts.cores is not None or parts.ram_gbps is not None:
        # Without a figure for RAM it is as fast as in the base, whose rates it has reached.
        least = 0.0 if parts.ram_gbps is not None else 1.0
        compute = {
            dtype: _on_cores(rates, per_core, memory, least, DTYPE_BYTES[dtype], is_host)
            for dtype, rates in base.compute.items()
        }
    read = base.disk_read_bytes_per_s
    write = base.disk_write_bytes_per_s
    if parts.disk_gbps is not None:
        read = parts.disk_gbps * 1e9 * DISK_SHARE
        write = read * WRITE_SHARE
    return replace(
        base,
        host_mem_bytes=base.host_mem_bytes if parts.ram is None else parts.ram,
        disk_mem_bytes=ASSUMED_DISK if parts.disk is None else parts.disk,
        disk_read_bytes_per_s=read,
        disk_write_bytes_per_s=write,
        host_memory_bytes_per_s=memory,
        device_memory_bytes_per_s=memory if is_host else base.device_memory_bytes_per_s,
        compute=compute,
    )


def _on_cores(
    rates: ComputeRates,
    per_core: float,
    memory: float,
    least: float,
    itemsize: int,
    is_host: bool,
) -> ComputeRates:
    """Return rates with more cores, which read RAM at most at its speed.

    per_core: how many times as many cores. memory: bytes per second of RAM. least: share of the
    given rates that RAM delivers in any case. is_host: the device is this CPU as well.
    """

    def limited(rate: float, most: float) -> float:
        return min(rate * per_core, max(most, least * rate))

    def read(curve: Curve) -> Curve:
        return Curve(tuple((size, limited(rate, memory)) for size, rate in curve.points))

    def multiplied(curve: Curve) -> Curve:
        """A product of few rows takes as long as reading its matrix."""
        return Curve(
            tuple(
                (rows, limited(rate, 2 * rows / itemsize * memory)) for rows, rate in curve.points
            )
        )

    on_host = replace(
        rates,
        host_attention_bytes_per_s=read(rates.host_attention_bytes_per_s),
        host_scored_attention_bytes_per_s=read(rates.host_scored_attention_bytes_per_s),
        host_dequantise_bytes_per_s=limited(rates.host_dequantise_bytes_per_s, memory),
    )
    if not is_host:
        return on_host
    return replace(
        on_host,
        matmul_flops_per_s=tuple(
            (shape, tuple((inner, multiplied(curve)) for inner, curve in by_inner))
            for shape, by_inner in rates.matmul_flops_per_s
        ),
        prefill_attention_flops_per_s=rates.prefill_attention_flops_per_s.scaled(per_core),
        column_sums_flops_per_s=rates.column_sums_flops_per_s.scaled(per_core),
        device_attention_bytes_per_s=read(rates.device_attention_bytes_per_s),
        device_scored_attention_bytes_per_s=read(rates.device_scored_attention_bytes_per_s),
        elementwise_bytes_per_s=limited(rates.elementwise_bytes_per_s, memory),
        device_dequantise_bytes_per_s=limited(rates.device_dequantise_bytes_per_s, memory),
        logits_per_s=rates.logits_per_s * per_core,
    )


def _with_card(card: Card, host: HardwareProfile) -> HardwareProfile:
    """Return the profile of a host with a card.

    Everything of the card scales with its data sheet from the shipped profile of a similar card.
    """
    name = NEW_CARD if card.has_bfloat16 else OLD_CARD
    fitted = read_profile(SHIPPED / f"{name}.json")
    known = CARDS[name]
    faster = card.gbps / known.gbps
    rates = fitted.compute["float16"]
    peak = rates.matmul_rate(1024, 4096, 4096) * card.tflops / known.tflops
    # A matrix is read once, and a number of two bytes is two FLOPs per row.
    memory = fitted.device_memory_bytes_per_s * faster
    sizes = sorted({float(2**n) for n in range(11)} | {max(1.0, peak / memory)})
    over_rows = Curve(tuple((rows, min(rows * memory, peak)) for rows in sizes))
    of_host = next(iter(host.compute.values()))
    on_card = replace(
        rates,
        matmul_flops_per_s=((1.0, ((4096.0, over_rows),)),),
        prefill_attention_flops_per_s=rates.prefill_attention_flops_per_s.scaled(faster),
        column_sums_flops_per_s=rates.column_sums_flops_per_s.scaled(faster),
        device_attention_bytes_per_s=rates.device_attention_bytes_per_s.scaled(faster),
        device_scored_attention_bytes_per_s=rates.device_scored_attention_bytes_per_s.scaled(
            faster
        ),
        host_attention_bytes_per_s=of_host.host_attention_bytes_per_s,
        host_scored_attention_bytes_per_s=of_host.host_scored_attention_bytes_per_s,
        elementwise_bytes_per_s=rates.elementwise_bytes_per_s * faster,
        device_dequantise_bytes_per_s=rates.device_dequantise_bytes_per_s * faster,
        host_dequantise_bytes_per_s=of_host.host_dequantise_bytes_per_s,
        logits_per_s=rates.logits_per_s * faster,
    ).requantising(2)
    dtypes = ("bfloat16", "float16") if card.has_bfloat16 else ("float16",)
    profile = replace(
        fitted,
        device_mem_bytes=int(card.gib * GIB),
        host_mem_bytes=host.host_mem_bytes,
        disk_mem_bytes=host.disk_mem_bytes,
        disk_read_bytes_per_s=host.disk_read_bytes_per_s,
        disk_write_bytes_per_s=host.disk_write_bytes_per_s,
        host_memory_bytes_per_s=host.host_memory_bytes_per_s,
        device_memory_bytes_per_s=memory,
        compute=dict.fromkeys(dtypes, on_card),
    )
    return _with_link(profile, LANE_BYTES_PER_S[card.pcie] * card.lanes)


def _with_link(profile: HardwareProfile, bytes_per_s: float) -> HardwareProfile:
    """Return the profile with another link to the card, of this nominal speed.

    It is not faster than RAM. Memory that is not pinned is copied once more.
    """
    known = CARDS[NEW_CARD]
    fitted = read_profile(SHIPPED / f"{NEW_CARD}.json")
    share = fitted.h2d_bytes_per_s / (LANE_BYTES_PER_S[known.pcie] * known.lanes)
    pinned = min(bytes_per_s * share, profile.host_memory_bytes_per_s)
    copying = 1 / fitted.h2d_unpinned_bytes_per_s - 1 / fitted.h2d_bytes_per_s
    unpinned = 1 / (1 / pinned + copying)
    return replace(
        profile,
        h2d_bytes_per_s=pinned,
        d2h_bytes_per_s=pinned,
        h2d_unpinned_bytes_per_s=unpinned,
        d2h_unpinned_bytes_per_s=unpinned,
    )


def _without_card(host: HardwareProfile) -> HardwareProfile:
    """Return the profile if it is one without a card. Otherwise raise UsageError."""
    if not host.device_is_host:
        raise UsageError(
            f"--hardware gpu={NO_CARD}: {host.machine} was measured with its GPU; add "
            f"like={MEASURED_CPU}"
        )
    return host

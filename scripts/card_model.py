"""From a data sheet and a few fitted shares to a hardware profile: what is fitted, what is not, and
why.

Nearly every rate is a share in (0, 1] of a data-sheet limit. The free parameters are PARAMETERS;
each has an expected value and a width (in log units) that says how far from it the recorded runs
may draw it. Parameters without a machine's name hold on every machine: they belong to FlexGen's
kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flexgen_h2o.planner.profile import MAX_RATE, ComputeRates, Curve, HardwareProfile

DTYPE = "float16"
ITEMSIZE = 2
HEAD_DIM = 128  # of OPT-6.7B and larger
GB = 1e9
GIB = 2**30
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
# Of the link's raw rate with pinned memory: FlexGen's cost model has 12.89 GB/s for its T4's PCIe 3
# x16 (experimental/cost_model.py, ctog_bdw), 82% of 15.75.
LINK_SHARE = 0.818
MEMCPY_BYTES_PER_S = (
    8e9  # one thread filling a pinned buffer; unpinned copies go through one, one after the other
)
KERNEL_S = 5e-6
TRANSFER_S = 1e-5
DISK_REQUEST_S = 1e-4
# FlexGen's Python issues some 10 kernels and moves in any step, 15 more in attention and 20 more
# where H2O drops a column (its source), at about 10 microseconds each.
STEP_S = 1e-4
ATTENTION_STEP_S = 1.5e-4
EVICTION_STEP_S = 2e-4


@dataclass(frozen=True)
class Card:
    """Data-sheet limits of a machine: FLOPs a second of fp16 tensor cores, bytes a second,
    bytes."""

    name: str
    description: str
    peak_flops: float
    memory: float
    link: float
    host_memory: float
    disk_read: float
    disk_write: float
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    sources: str


CARDS = {
    "t4": Card(
        "t4",
        "NVIDIA T4 16 GB, GCP n1-highmem-32: 208 GB of DRAM, 4 local SSDs of 375 GB, PCIe 3 x16",
        65e12,
        320 * GB,
        15.75 * GB,
        128 * GB,
        2.65 * GB,
        1.4 * GB,
        15 * GIB,
        208 * GIB,
        1_500_000_000_000,
        "NVIDIA T4 data sheet (65 TFLOP/s fp16 tensor, 320 GB/s); PCIe 3 x16 15.75 GB/s; GCP local "
        "SSD limits of four "
        "NVMe disks (2650 MB/s read, 1400 MB/s write); host DRAM: six channels of DDR4-2666 of a "
        "Skylake socket, "
        "128 GB/s",
    ),
    "a100-80": Card(
        "a100-80",
        "NVIDIA A100 80 GB SXM; host taken as GCP a2-ultragpu-1g: 170 GB of DRAM, one local SSD of "
        "375 GB",
        312e12,
        2039 * GB,
        31.5 * GB,
        140.8 * GB,
        0.66 * GB,
        0.35 * GB,
        80 * GIB,
        170 * GIB,
        375_000_000_000,
        "NVIDIA A100 80 GB data sheet (312 TFLOP/s fp16 tensor, 2039 GB/s); PCIe 4 x16 31.5 GB/s; "
        "GCP local SSD "
        "limits of one NVMe disk (660 MB/s read, 350 MB/s write); host DRAM: six channels of "
        "DDR4-2933 of a Cascade "
        "Lake socket, 140.8 GB/s. No recorded run on this machine touches host or disk",
    ),
}


@dataclass(frozen=True)
class Parameter:
    """A free parameter. expected: a guess from public measurements and from counting what FlexGen's
    kernels read and write (made with the recorded totals in view); width: its uncertainty in log
    units. low, high: what physics allows.
    """

    name: str
    expected: float
    width: float
    low: float
    high: float
    meaning: str


def share(name: str, expected: float, width: float, meaning: str) -> Parameter:
    return Parameter(name, expected, width, 0.001, 1.0, meaning)


PARAMETERS = (
    share(
        "matmul.t4",
        0.35,
        0.15,
        "of the T4's tensor peak, in products of many rows (70 W hold it to 20-25 TFLOP/s)",
    ),
    share("matmul.a100-80", 0.75, 0.15, "of the A100's tensor peak, in products of many rows"),
    share("memory", 0.80, 0.10, "of device memory bandwidth, streaming weights and activations"),
    Parameter(
        "score_bytes",
        16.0,
        0.4,
        6.0,
        60.0,
        "bytes moved for each score of the n x n matrices of prefill",
    ),
    share(
        "attention",
        0.50,
        0.4,
        "of device memory bandwidth, fp16 bytes of K and V in decode attention",
    ),
    share("scored_attention", 0.40, 0.4, "the same where H2O sums scores and drops columns"),
    share(
        "dequantise", 0.08, 0.5, "of device memory bandwidth, bytes of fp16 unpacked from 4 bits"
    ),
    share(
        "host_attention",
        0.096,
        0.3,
        "of host DRAM bandwidth, fp16 bytes of K and V (FlexGen's model: 12.3 GB/s)",
    ),
    Parameter(
        "host_row_s",
        1e-4,
        1.0,
        1e-6,
        1e-2,
        "seconds of a row of a layer whose column is dropped on the host",
    ),
    share("disk", 0.90, 0.1, "of the local SSDs' limits"),
)
T4_ONLY = frozenset(
    {"dequantise", "host_attention", "host_row_s", "disk"}
)  # only the T4's runs tell of them


def roofline(card: Card, values: Mapping[str, float]) -> Curve:
    """fp16 products over rows: 2 FLOPs for each 2-byte weight read, up to the sustained peak."""
    peak = card.peak_flops * values[f"matmul.{card.name}"]
    streaming = card.memory * values["memory"]
    knee = peak / streaming
    points = sorted({*(float(rows) for rows in ROWS), knee})
    return Curve(tuple((rows, min(peak, rows * streaming)) for rows in points))


def rates_of(card: Card, values: Mapping[str, float]) -> ComputeRates:
    """fp16 compute rates; sizes are those that ComputeRates names."""
    streaming = card.memory * values["memory"]
    host = card.host_memory * values["host_attention"]
    # 2 d FLOPs are counted for each of the n x n scores of a head (half of them are masked, all are
    # computed).
    per_score = values["score_bytes"] / streaming + 4 * HEAD_DIM / (
        card.peak_flops * values[f"matmul.{card.name}"]
    )
    rates = ComputeRates(
        matmul_flops_per_s=((1.0, ((4096.0, roofline(card, values)),)),),
        prefill_attention_flops_per_s=Curve.flat(2 * HEAD_DIM / per_score),
        column_sums_flops_per_s=Curve.flat(HEAD_DIM / (ITEMSIZE / streaming)),
        device_attention_bytes_per_s=Curve.flat(card.memory * values["attention"]),
        device_scored_attention_bytes_per_s=Curve.flat(card.memory * values["scored_attention"]),
        host_attention_bytes_per_s=Curve.flat(host),
        host_scored_attention_bytes_per_s=Curve.flat(host),
        elementwise_bytes_per_s=streaming,
        device_dequantise_bytes_per_s=card.memory * values["dequantise"],
        host_dequantise_bytes_per_s=host,
        logits_per_s=streaming / 8,
    )
    return rates.requantising(ITEMSIZE)


def profile_of(
    card: Card, values: Mapping[str, float], date: str = "", source: str = ""
) -> HardwareProfile:
    """The card's profile under the given parameter values."""
    link = card.link * LINK_SHARE  # both ways
    unpinned = 1 / (1 / link + 1 / MEMCPY_BYTES_PER_S)
    return HardwareProfile(
        machine=card.name,
        description=card.description,
        date=date,
        source=source,
        device_is_host=False,
        device_is_asynchronous=True,
        device_mem_bytes=card.device_bytes,
        host_mem_bytes=card.host_bytes,
        disk_mem_bytes=card.disk_bytes,
        disk_read_bytes_per_s=card.disk_read * values["disk"],
        disk_write_bytes_per_s=card.disk_write * values["disk"],
        h2d_bytes_per_s=link,
        d2h_bytes_per_s=link,
        h2d_unpinned_bytes_per_s=unpinned,
        d2h_unpinned_bytes_per_s=unpinned,
        host_memory_bytes_per_s=card.host_memory * values["memory"],
        device_memory_bytes_per_s=card.memory * values["memory"],
        disk_read_beside_compute=1.0,
        compute_beside_disk_read=1.0,
        link_both_ways=1.0,
        kernel_s=KERNEL_S,
        transfer_s=TRANSFER_S,
        disk_request_s=DISK_REQUEST_S,
        overlay_bytes_per_s=MAX_RATE,
        short_read_compute_s=0.0,
        cache_load_step_s=0.0,
        graph_step_s=1.0,
        step_s=STEP_S,
        attention_step_s=ATTENTION_STEP_S,
        eviction_step_s=EVICTION_STEP_S,
        row_s=values["host_row_s"],
        compute={DTYPE: rates_of(card, values)},
        notes=notes_of(card, values),
    )


def source_of(runs: int) -> str:
    """Return where a fitted profile is from."""
    return (
        f"scripts/fit_profile.py: {len(PARAMETERS)} parameters for all machines together, fitted "
        f"to {runs} recorded "
        "runs of FlexGen and H2O; everything else is from data sheets or assumed, see notes. It "
        "tells what FlexGen "
        "reached on this machine, its overheads included"
    )


def notes_of(card: Card, values: Mapping[str, float]) -> dict[str, str]:
    """For each field whether it is fitted, from a data sheet or assumed, and how it is made."""

    def part(name: str, limit: float, unit: str = "GB/s") -> str:
        fitted_on = (
            ""
            if card.name == "t4" or name not in T4_ONLY
            else " (on the T4; no run of this machine tells)"
        )
        return f"fitted{fitted_on}: {name} {values[name]:g} of {limit:g} {unit}"

    memory = card.memory / GB
    streaming = part("memory", card.memory / GB)
    host = part("host_attention", card.host_memory / GB)
    link = (
        f"{LINK_SHARE:g} of {card.link / GB:g} GB/s: the share that FlexGen's cost model has "
        "for its T4 (ctog_bdw)"
    )
    unpinned = (
        f"assumed: the pinned link after one thread's copy at {MEMCPY_BYTES_PER_S / GB:g} GB/s"
    )
    issued = "assumed: kernels and moves that FlexGen's Python issues, 10 microseconds each"
    f16 = f"compute.{DTYPE}."
    by_fields = {
        "limits": card.sources,
        "device_mem_bytes, host_mem_bytes, disk_mem_bytes": "data sheet",
        "disk_read_bytes_per_s": part("disk", card.disk_read / GB),
        "disk_write_bytes_per_s": part("disk", card.disk_write / GB),
        "h2d_bytes_per_s, d2h_bytes_per_s": link,
        "h2d_unpinned_bytes_per_s, d2h_unpinned_bytes_per_s": unpinned,
        "host_memory_bytes_per_s": f"assumed: the same share of {card.host_memory / GB:g} GB/s as "
        "of device memory",
        "device_memory_bytes_per_s": streaming,
        "disk_read_beside_compute, compute_beside_disk_read": "assumed: a card computes beside the "
        "disk undisturbed",
        "link_both_ways": "assumed: each way as fast as alone; no run of FlexGen's tells",
        "kernel_s, transfer_s, disk_request_s": "assumed",
        "overlay_bytes_per_s, short_read_compute_s, cache_load_step_s": "not fitted: counted as "
        "nothing",
        "step_s, attention_step_s, eviction_step_s": issued,
        "graph_step_s": "not known: FlexGen makes no CUDA graphs, and none are counted on",
        "row_s": f"fitted on the T4: host_row_s {values['host_row_s']:g}; where columns are "
        "dropped on the host",
        f16 + "matmul_flops_per_s": (
            f"the lower of rows x memory bandwidth ({streaming}) and the sustained peak "
            f"({part(f'matmul.{card.name}', card.peak_flops / 1e12, 'TFLOP/s')})"
        ),
        f16 + "prefill_attention_flops_per_s": (
            f"fitted: score_bytes {values['score_bytes']:g} bytes moved at the memory rate for "
            "each score of the full "
            "n x n matrices, and its products at the sustained peak"
        ),
        f16 + "column_sums_flops_per_s": "2 bytes a score at the memory rate",
        f16 + "device_attention_bytes_per_s": part("attention", memory),
        f16 + "device_scored_attention_bytes_per_s": part("scored_attention", memory),
        f"{f16}host_attention_bytes_per_s, {f16}host_scored_attention_bytes_per_s": host,
        f16 + "elementwise_bytes_per_s": "the memory rate",
        f16 + "device_dequantise_bytes_per_s": part("dequantise", memory),
        f16 + "host_dequantise_bytes_per_s": "assumed: as host attention; no run tells",
        f16 + "logits_per_s": "assumed: 8 bytes a logit at the memory rate",
        f16 + "blocked_speedup": "1: a card's matrices are held in order",
        f16 + "int8_speedup": "1: no card has run products in int8",
        f16 + "int4_speedup": "what products in the dtype and unpacking take together",
    }
    return {name: note for names, note in by_fields.items() for name in names.split(", ")}

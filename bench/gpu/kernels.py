"""Time of each kernel for cards beside the card's own copy, and the rates of the card.

    python -m bench.gpu.kernels --output kernels.json           a card, half a minute
    python -m bench.gpu.kernels --device cpu                    the same cases in small, without figures

Claim: unpacking and decode attention move their bytes at 0.7 of the bandwidth of a copy within the
card. Shapes are those of OPT-6.7B with 32 rows of 544 columns, and of LLaMA-3-8B with 8 rows of
2,048. Counted are the bytes that a kernel cannot leave out: KV columns, packed numbers, what it
writes. tests/unit/kernels/test_triton*.py compare the kernels with their references, on a card too.
"""  # noqa: E501

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch

from bench import common
from bench.common import GB
from flexgen_h2o.core.packing import KVPacking
from flexgen_h2o.core.units import FEW_ROWS
from flexgen_h2o.kernels.coded import (
    groupwise_codes,
    multiply_coded,
    mxfp4_codes,
)
from flexgen_h2o.kernels.decode_step import (
    GAIN,
    PLACE,
    StepSlots,
    attend_step,
)
from flexgen_h2o.kernels.elementwise import rms_norm, silu_gated
from flexgen_h2o.kernels.linear import DenseRows, grouped_linear, linear
from flexgen_h2o.kernels.packed import pack_columns, pack_rows, unpack_rows
from flexgen_h2o.kernels.prefill_attention import causal_attention_lse, column_sums
from flexgen_h2o.kernels.prompt_columns import PromptSlots, choose_kept, put_prompts
from flexgen_h2o.kernels.quantised import unpack_mxfp4
from flexgen_h2o.kernels.slot_form import WHOLE, SlotForm, WholeColumns

COPIED = 2**30  # bytes
CACHE = 2**28  # bytes, more than a card's cache holds
ASLEEP = 2**21  # cycles of the card, more than a millisecond: a launch takes less of the host
RUNS = 20
GATED = ("unpack", "decode")  # kernels that a gate is for
DECODED = ", decoded first"  # behind the name of a product: the same by its reference
EXPERTS = 8  # of a group
WINDOW = 16  # newest columns that stay whole
SIZES = (
    (16_384, 4_096, 32, 544, 512),
    (64, 128, 2, 24, 16),
)  # rows and columns of a matrix, rows, columns, prompt


@dataclass(frozen=True)
class Case:
    """nbytes: what a run reads and writes at least."""

    name: str
    run: Callable[[], object]
    nbytes: int


def main() -> None:
    parser = common.own_parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    device = torch.device(args.device)
    with torch.inference_mode():
        rates = card_rates(device)
        found = [_timed(case, rates.get("copy")) for case in cases(device)]
    common.table(
        "Kernels, share of the bandwidth of a copy", [(f["kernel"], _said(f)) for f in found]
    )
    common.finish({"benchmark": "gpu_kernels", "rates": rates, "kernels": found}, args.output)


def card_rates(device: torch.device) -> dict[str, float]:
    """Bytes a second: of a copy within the card, read and written; of pinned memory over the link,
    each way. Nothing of a CPU."""
    if device.type == "cpu":
        return {}
    there, other = (torch.zeros(COPIED, dtype=torch.uint8, device=device) for _ in range(2))
    here = torch.zeros(COPIED, dtype=torch.uint8).pin_memory()
    copies = {"copy": (2, other, there), "h2d": (1, there, here), "d2h": (1, here, there)}
    return {
        name: times * COPIED / _seconds(partial(dst.copy_, src, non_blocking=True))[0]
        for name, (times, dst, src) in copies.items()
    }


def _seconds(run: Callable[[], object]) -> tuple[float, float]:
    """Medians of a run: on the card, its cache cleared before, and of the thread that launches it.
    The card sleeps meanwhile, so that it never waits for that thread."""
    cache = torch.empty(CACHE, dtype=torch.uint8, device="cuda")
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(RUNS)]
    issued = []
    for start, end in marks:
        cache.zero_()
        torch.cuda._sleep(ASLEEP)
        start.record()
        begun = time.perf_counter()
        run()
        issued.append(time.perf_counter() - begun)
        end.record()
        torch.cuda.synchronize()
    return median(start.elapsed_time(end) / 1e3 for start, end in marks), median(issued)


def _timed(case: Case, copy: float | None) -> dict[str, Any]:
    case.run()
    if copy is None:
        return {"kernel": case.name, "bytes": case.nbytes}
    seconds, issued = _seconds(case.run)
    share = case.nbytes / seconds / copy
    timed = {"seconds": seconds, "share_of_copy": share, "issue_seconds": issued}
    return {"kernel": case.name, "bytes": case.nbytes, **timed}


def _said(found: dict[str, Any]) -> str:
    if "seconds" not in found:
        return "not timed"
    return (
        f"{found['share_of_copy']:.2f}, {found['seconds'] * 1e6:.0f} us, "
        f"{found['bytes'] / GB:.3f} GB"
    )


def cases(device: torch.device) -> Iterator[Case]:
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    height, width, rows, columns, prompt = SIZES[device.type == "cpu"]
    some = partial(torch.randn, device=device, dtype=dtype)
    for bits in (4, 8):
        packed = pack_rows(torch.randn(height, width), bits).to(device)
        out = some(height, width)
        yield Case(
            f"unpack, {bits} bits",
            partial(unpack_rows, packed, bits, out),
            packed.nbytes + out.nbytes,
        )
    yield from coded_cases(device, dtype, height, width)
    yield from expert_cases(device, dtype, height // EXPERTS, width)
    for name, heads, kv_heads, count, of_row in (
        ("OPT", 32, 32, rows, columns),
        ("LLaMA", 32, 8, max(1, rows // 4), 2048 if rows > 2 else columns),
    ):
        for records in (False, True):
            for bits in (16, 4):
                qkv = [some(count, each, 128) for each in (heads, kv_heads, kv_heads)]
                slots = step_slots(qkv[1], of_row, records, bits)
                attend = attend_step if device.type == "cuda" else attend_step.torch
                run = partial(attend, *qkv, slots, 128**-0.5, torch.empty_like(qkv[0]))
                scored = (
                    3 * slots.scores.nbytes if slots.scores is not None else 0
                )  # and positions; written again
                whole = f"decode, {name}, {bits} bits{', scores' if records else ''}"
                yield Case(whole, run, slots.keys.nbytes + slots.values.nbytes + scored)
    q, k, v = (some(4, prompt, 32, 128).transpose(1, 2) for _ in range(3))
    yield Case("prefill attention", partial(causal_attention_lse, q, k, v, 128**-0.5), 4 * q.nbytes)
    lse = causal_attention_lse(q, k, v, 128**-0.5)[1]
    yield Case("column sums", partial(column_sums, q, k, lse, 128**-0.5), 2 * q.nbytes)
    yield from prompt_cases(k, v)
    x = some(rows * prompt, width)
    weight = some(width)
    yield Case("RMS norm", partial(rms_norm, x, weight, 1e-6, torch.empty_like(x)), 2 * x.nbytes)
    yield Case("gate", partial(silu_gated, x, torch.ones_like(x)), 3 * x.nbytes)


def prompt_cases(k: torch.Tensor, v: torch.Tensor) -> Iterator[Case]:
    """A fifth of the columns of prompts, (b, heads, n, d), chosen and put into slots, or all of
    them, packed."""
    prompts, heads, n = k.shape[:3]
    where = k.device
    rank = torch.rand(prompts, heads, n, device=where)
    count = max(2, n // 5)
    chosen = partial(choose_kept, rank, 0, n - count // 2, count)
    yield Case("columns chosen", chosen, rank.nbytes + rank.nbytes * 2 * count // n)
    columns = k.transpose(1, 2), v.transpose(1, 2)
    for name, bits, kept in (
        ("some", 16, chosen()),
        ("all", 4, torch.arange(n, device=where).expand(rank.shape)),
    ):
        held = step_slots(columns[0][:, 0], kept.shape[2], False, bits)
        slots = PromptSlots(held.keys, held.values, 0, held.form, WINDOW if bits < 16 else 0)
        nbytes = 2 * k.nbytes
        run = partial(put_prompts, *columns, kept, None, slots)
        yield Case(
            f"columns put, {name}, {bits} bits",
            run,
            nbytes * kept.shape[2] // n + 2 * held.keys.nbytes,
        )


def coded_cases(
    device: torch.device, dtype: torch.dtype, height: int, width: int
) -> Iterator[Case]:
    """Products of few rows with weights in 4 and 8 bits and in MXFP4, which is unpacked, too; each
    also with the weight decoded first, which is written then and read again."""
    blocks = torch.randint(0, 256, (height, width // 32, 16), dtype=torch.uint8, device=device)
    scales = torch.randint(118, 120, (height, width // 32), dtype=torch.uint8, device=device)
    out = torch.empty(height, width, device=device, dtype=dtype)
    nbytes = blocks.nbytes + scales.nbytes + out.nbytes
    yield Case("unpack, MXFP4", partial(unpack_mxfp4, blocks, scales, out), nbytes)
    kinds = {"MXFP4": mxfp4_codes(blocks, scales)}
    for bits in (4, 8):
        packed = pack_rows(torch.randn(height, width), bits).to(device)
        kinds[f"{bits} bits"] = groupwise_codes(packed, bits, width)
    multiply = multiply_coded if device.type == "cuda" else multiply_coded.torch
    for (kind, codes), tokens in product(kinds.items(), (1, FEW_ROWS)):
        x, y = (torch.randn(tokens, n, device=device, dtype=dtype) for n in (width, height))
        nbytes = (
            codes.words.shape[0] * width * codes.bits // 8
            + codes.group_params.nbytes
            + x.nbytes
            + y.nbytes
        )
        name = f"product, {kind}, {tokens} rows"
        first = partial(multiply_coded.torch, x, codes, None, y)
        yield Case(name, partial(multiply, x, codes, None, y), nbytes)
        yield Case(name + DECODED, first, nbytes + 2 * height * width * x.element_size())


def expert_cases(
    device: torch.device, dtype: torch.dtype, height: int, width: int
) -> Iterator[Case]:
    """Products of EXPERTS matrices with a few rows each, in one launch and one after another."""
    weights = torch.randn(EXPERTS, height, width, device=device, dtype=dtype)
    parts = [(DenseRows(weight),) for weight in weights]
    for tokens in (1, FEW_ROWS):
        x, y = (
            torch.randn(EXPERTS * tokens, n, device=device, dtype=dtype) for n in (width, height)
        )
        each = zip(x.split(tokens), parts, y.split(tokens), strict=True)
        alone = [partial(linear, own, part, None, out) for own, part, out in each]
        together = partial(grouped_linear, x, [tokens] * EXPERTS, ((parts, None, y),))
        nbytes = sum(t.nbytes for t in (weights, x, y))
        name = f"experts, {tokens} rows each"
        yield Case(name, together, nbytes)
        yield Case(f"{name}, one after another", partial(_call_each, alone), nbytes)


def _call_each(functions: Sequence[Callable[[], object]]) -> None:
    for function in functions:
        function()


def step_slots(k: torch.Tensor, columns: int, records: bool, bits: int) -> StepSlots:
    """Rows of so many columns, all filled, whose newest one goes to the last slot. k: (sequences,
    kv_heads, d)."""
    sequences, kv_heads, width = k.shape
    where = k.device
    rows = sequences * kv_heads
    keys, values = (
        torch.randn(1, rows, columns, width, device=where, dtype=k.dtype) for _ in range(2)
    )
    state = torch.full((7, sequences), columns, dtype=torch.int32, device=where)
    state[1] = columns - 1
    state[PLACE] = -1
    state[GAIN] = 0
    form = WHOLE
    if bits < 16:
        packing = KVPacking.of(width, bits)
        areas = [pack_columns.torch(t.float(), packing.keys) for t in (keys, values)]
        newest = torch.arange(columns - WINDOW, columns, dtype=torch.int32, device=where).repeat(
            rows, 1
        )
        centres, ranges = (
            torch.ones(rows, width, dtype=torch.bfloat16, device=where) for _ in range(2)
        )
        kept = [t[0, :, columns - WINDOW :].contiguous() for t in (keys, values)]
        form = SlotForm(packing, whole=WholeColumns(centres, ranges, kept[0], kept[1], newest))
        keys, values = areas
    scores = torch.rand(rows, columns, device=where) if records else None
    positions = (
        torch.arange(columns, dtype=torch.int32, device=where).repeat(rows, 1) if records else None
    )
    victims = torch.zeros(rows, dtype=torch.int32, device=where) if records else None
    taken = torch.empty(rows, dtype=torch.int64, device=where)
    return StepSlots(keys, values, 0, kv_heads, state, taken, scores, positions, victims, form=form)


if __name__ == "__main__":
    sys.exit(common.door(main))

"""Claim: decode attention over slots runs at >= 0.7 of the memory's speed, >= 3x torch's SDPA;
scoring costs little; over slots packed in 4 bits it is >= 1.5x as fast a column.

Method: KV caches of some layers' heads, larger than the last cache, all slots filled; in turn, in
one process and with the same threads: a plain sum over the same bytes (torch.sum of int64: the
probe of the memory), `attend`, the same with scores, `attend.torch` (torch: bmm, softmax, bmm)
and SDPA with one query, on the better of two layouts (heads apart, tokens apart), `attend` over the
same columns in 3, 4 and 8 bits, keys smoothed and the newest 16 whole. All in bytes of keys and
values per second, those beside the slots among them; for packed slots also in values per second.
Medians of the ratios of each round.

Then `column_sums` of a prefill, as a share of the matrix products and the attention of one layer
(measured on 1,024 tokens, scaled to the micro-batch), in turn in each round.

    python -m bench.kernels.decode_kernel [--repeats 9] [--dtype bf16] [--mib 256] [--output FILE]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.common import (
    GB,
    BackgroundLoad,
    Spread,
    door,
    finish,
    own_parser,
    ratio_of,
    table,
    wait_for_quiet,
)

# isort: split
import torch

from flexgen_h2o.cli_common import positive
from flexgen_h2o.core.packing import KVPacking
from flexgen_h2o.kernels.packed import pack_columns
from flexgen_h2o.kernels.prefill_attention import (
    causal_attention,
    causal_attention_lse,
    column_sums,
)
from flexgen_h2o.kernels.slot_form import SlotForm, WholeColumns
from flexgen_h2o.kernels.slots import ScoreState, attend

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
HEADS = {"opt-1.3b": (32, 64), "opt-6.7b": (32, 128), "opt-30b": (56, 128)}  # heads, width
SLOTS = (103, 1100)
LAYERS = {
    "opt-1.3b": (32, 64, 8192, 8192),
    "opt-6.7b": (32, 128, 16384, 4096),
}  # heads, width, ffn, tokens
PROMPTS = (512, 1024)
WINDOW = 16  # newest columns that are whole
CHUNK = 1024  # tokens whose matrix products are timed
Seconds = dict[str, list[float]]


def main() -> None:
    args = _parse()
    wait_for_quiet(args.quiet_wait)
    dtype = DTYPES[args.dtype]
    decode = []
    prefill = []
    with torch.inference_mode(), BackgroundLoad() as seen:
        for model in args.models:
            for slots in args.slots:
                decode.append(_decode(model, slots, dtype, args.mib * 2**20, args.repeats))
        for model in () if args.no_prefill else LAYERS:
            for prompt in PROMPTS:
                prefill.append(_prefill(model, prompt, dtype, args.repeats))
    print(f"\n# other processes took {seen.others:.0%} of the cores")
    result = {
        "benchmark": "decode_kernel",
        "dtype": args.dtype,
        "decode": decode,
        "prefill": prefill,
    }
    finish({**result, "neighbours": seen.others}, args.output)


def _parse() -> argparse.Namespace:
    parser = own_parser(__doc__)
    parser.add_argument("--repeats", type=positive, default=9)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument(
        "--models", nargs="+", choices=HEADS, default=list(HEADS), help="of decode attention (all)"
    )
    parser.add_argument(
        "--slots", nargs="+", type=positive, default=SLOTS, help="of a row (103 1100)"
    )
    parser.add_argument("--no-prefill", action="store_true", help="only decode attention")
    parser.add_argument("--mib", type=positive, default=256, help="MiB of keys and values (256)")
    return parser.parse_args()


def _in_turn(repeats: int, parts: dict[str, Callable[[], object]]) -> Seconds:
    """Seconds of each part, one value a round; a first round is not counted."""
    seconds: Seconds = {name: [] for name in parts}
    for i in range(repeats + 1):
        order = list(parts) if i % 2 else list(reversed(parts))
        for name in order:
            start = time.perf_counter()
            parts[name]()
            if i:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _ratio(seconds: Seconds, fast: str, slow: str) -> Spread:
    """How many times faster `fast` was, round by round."""
    return ratio_of(seconds[slow], seconds[fast])


def _decode(
    model: str, slots: int, dtype: torch.dtype, nbytes: int, repeats: int
) -> dict[str, Any]:
    heads, width = HEADS[model]
    batch = max(1, nbytes // (2 * heads * slots * width * dtype.itemsize))
    rows = batch * heads
    scale = width**-0.5
    keys, values = (torch.randn(1, rows, slots, width, dtype=dtype) for _ in range(2))
    q = torch.randn(rows, 1, width, dtype=dtype)
    filled = torch.full((rows,), slots, dtype=torch.int32)
    book = _book(rows, slots)
    apart = [t.view(batch, heads, -1, width) for t in (q, keys, values)]
    tokens = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in apart]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    packings = {f"packed_{bits}": KVPacking.of(width, bits) for bits in (3, 4, 8)}
    packed = {
        name: [pack_columns(keys, p.keys), pack_columns(values, p.values)]
        for name, p in packings.items()
    }
    whole = _whole_columns(rows, slots, width, dtype)
    one = [t[0, :, 0].contiguous() for t in (keys, values)]  # what a decode step packs

    def attend_over(name: str, book: ScoreState | None = None) -> Callable[[], object]:
        return lambda: attend(
            q, *packed[name], filled, scale, book, SlotForm(packings[name], whole)
        )

    seconds = _in_turn(
        repeats,
        {
            **{name: attend_over(name) for name in packings},
            **{f"{name}_scored": attend_over(name, book) for name in packings},
            "pack_4": lambda: [pack_columns(t, packings["packed_4"].keys) for t in one],
            "memory": lambda: [t.view(torch.int64).sum() for t in (keys, values)],
            "attend": lambda: attend(q, keys, values, filled, scale),
            "attend_scored": lambda: attend(q, keys, values, filled, scale, book),
            "torch": lambda: attend.torch(q, keys, values, filled, scale),
            "sdpa_heads": lambda: sdpa(*apart, scale=scale),
            "sdpa_tokens": lambda: sdpa(*tokens, scale=scale),
        },
    )
    seconds["sdpa"] = min(
        seconds["sdpa_heads"], seconds["sdpa_tokens"], key=lambda s: Spread(s).median
    )
    moved = keys.numel() * 2 * dtype.itemsize
    speeds = {
        name: Spread([_bytes_of(name, moved, dtype, packings, whole) / s for s in values])
        for name, values in seconds.items()
        if name != "pack_4"
    }
    per_s = {
        name: Spread([moved / dtype.itemsize / s for s in seconds[name]])
        for name in ("attend", *packings)
    }
    per_s["pack_4"] = Spread([2 * rows * width / s for s in seconds["pack_4"]])
    ratios = _ratios(seconds, speeds, list(packings))
    _show_decode(
        f"{model}: {batch} x {heads} heads, {slots} slots, {moved / 2**20:.0f} MiB",
        speeds,
        per_s,
        ratios,
    )
    facts = {"model": model, "slots": slots, "batch": batch}
    return {**facts, "bytes_per_s": speeds, "values_per_s": per_s, "ratios": ratios}


def _ratios(seconds: Seconds, speeds: dict[str, Spread], packings: list[str]) -> dict[str, Spread]:
    """Return ratios of seconds round by round; of packed slots also of bytes a second."""
    return {
        "attend_of_memory": _ratio(seconds, "attend", "memory"),
        "attend_over_sdpa": _ratio(seconds, "attend", "sdpa"),
        "attend_over_torch": _ratio(seconds, "attend", "torch"),
        "scored_time_over_unscored": _ratio(seconds, "attend", "attend_scored"),
        **{f"{n}_of_memory": ratio_of(speeds[n].values, speeds["memory"].values) for n in packings},
        **{f"{name}_over_attend": _ratio(seconds, name, "attend") for name in packings},
        **{
            f"{n}_scored_over_attend_scored": _ratio(seconds, f"{n}_scored", "attend_scored")
            for n in packings
        },
    }


def _whole_columns(rows: int, slots: int, width: int, dtype: torch.dtype) -> WholeColumns:
    """The newest columns."""
    ranges = torch.ones(rows, width, dtype=torch.bfloat16)
    newest = torch.randn(rows, WINDOW, width, dtype=dtype)
    taken = torch.arange(slots - WINDOW, slots, dtype=torch.int32).repeat(rows, 1)
    return WholeColumns(ranges, ranges, newest, newest, taken)


def _book(rows: int, slots: int) -> ScoreState:
    ends = (
        torch.zeros(rows, dtype=torch.int32),
        torch.full((rows,), slots * 9 // 10, dtype=torch.int32),
    )
    positions = torch.arange(slots, dtype=torch.int32).repeat(rows, 1)
    return ScoreState(
        torch.rand(rows, slots),
        positions,
        *ends,
        1.0,
        torch.ones(rows),
        torch.empty(rows, dtype=torch.int32),
    )


def _show_decode(
    title: str, speeds: dict[str, Spread], per_s: dict[str, Spread], ratios: dict[str, Spread]
) -> None:
    table(
        title,
        [(name, speed.show("GB/s", 1, GB)) for name, speed in speeds.items()]
        + [(f"{name}, values", speed.show("G/s", 2, 1e9)) for name, speed in per_s.items()]
        + [(name, ratio.show("", 3)) for name, ratio in ratios.items()],
    )


def _bytes_of(
    name: str, moved: int, dtype: torch.dtype, packings: dict[str, KVPacking], whole: WholeColumns
) -> float:
    """Return the bytes that a call reads; moved: bytes of the cache that is not packed."""
    packing = packings.get(name.removesuffix("_scored"))
    if packing is not None:
        return (
            moved
            * (packing.keys.slot_bytes + packing.values.slot_bytes)
            / (2 * packing.width * dtype.itemsize)
            + 2 * whole.keys.nbytes
        )
    return moved


def _prefill(model: str, prompt: int, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    heads, width, ffn, tokens = LAYERS[model]
    hidden = heads * width
    batch = tokens // prompt
    scale = width**-0.5
    q, k, v = (
        torch.randn(batch, prompt, heads, width, dtype=dtype).transpose(1, 2) for _ in range(3)
    )
    lse = causal_attention_lse(q, k, v, scale)[1]
    x = torch.randn(CHUNK, hidden, dtype=dtype)
    wide = torch.randn(CHUNK, ffn, dtype=dtype)
    square, up, down = (
        torch.randn(a, b, dtype=dtype) for a, b in ((hidden, hidden), (ffn, hidden), (hidden, ffn))
    )

    def products() -> None:
        for inputs, weight in (
            (x, square),
            (x, square),
            (x, square),
            (x, square),
            (x, up),
            (wide, down),
        ):
            torch.nn.functional.linear(inputs, weight)

    seconds = _in_turn(
        repeats,
        {
            "products": products,
            "attention": lambda: causal_attention(q, k, v, scale),
            "attention_lse": lambda: causal_attention_lse(q, k, v, scale),
            "column_sums": lambda: column_sums(q, k, lse, scale),
        },
    )
    rounds = zip(seconds["products"], seconds["attention"], seconds["column_sums"], strict=True)
    share = Spread([sums / (gemm * tokens / CHUNK + attention) for gemm, attention, sums in rounds])
    table(
        f"{model}: prefill of {batch} x {prompt} tokens, one layer",
        [(name, Spread(values).show("ms", 1, 1e-3)) for name, values in seconds.items()]
        + [(f"column_sums / (products x {tokens // CHUNK} + attention)", share.show("", 4))],
    )
    spreads = {name: Spread(values) for name, values in seconds.items()}
    return {"model": model, "prompt": prompt, "batch": batch, "seconds": spreads, "share": share}


if __name__ == "__main__":
    sys.exit(door(main))

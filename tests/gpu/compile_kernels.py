"""Compile every Triton kernel ahead of time for cards that are not here: python -m
tests.gpu.compile_kernels [sm ...].

Every kernel for every card, in all its variants in the 16 bits in which the card computes. In fp32
each kernel once, in the variant that takes most shared memory, on sm75 and sm90: from sm80 on
Triton 3.6 lays fp32 out alike, so that sm90's is held to what sm86 and sm89 have. sm89 gets the PTX
of sm86, made into its own machine code: Triton writes the same for both, but for the name of the
target; one variant is compiled for both to see that. Prints a line for each card: variants, and the
bytes of shared memory that the hungriest takes.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from flexgen_h2o.core.packing import KVPacking
from flexgen_h2o.kernels.coded import ROWS_AT_A_TIME
from flexgen_h2o.kernels.decode_step import columns_at_a_time, packing_constants
from flexgen_h2o.kernels.prefill_attention import _tile
from flexgen_h2o.kernels.triton import power_of_two, products, prompts, rows, slots

# Bytes of shared memory that a block may take, by compute capability: Turing (T4), Ampere (3090),
# Ada (4090), Hopper.
CARDS = {75: 65536, 86: 101376, 89: 101376, 90: 232448}
FP32 = {75: CARDS[75], 90: CARDS[86]}  # and that a kernel may take in fp32
NONE = "constexpr"  # type of an argument that is None
PTX_OF = {89: 86}  # cards that are given the PTX of another
NUMBERS = {"fp32": "*fp32", "fp16": "*fp16", "bf16": "*bf16"}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Integers that are no multiples of 16; all others that a launch has compiled in are, as pointers
# are.
COUNTS = {
    "heads",
    "kv_heads",
    "group",
    "pairs",
    "lse_token",
    "k_low",
    "k_codes",
    "k_words",
    "v_low",
    "v_codes",
    "v_words",
}


class Case(NamedTuple):
    """A kernel with the types of its arguments in order, and its constants."""

    kernel: Any
    types: tuple[str, ...]
    constants: dict[str, Any]


def cases(card: int) -> list[tuple[Case, int]]:
    """With the bytes of shared memory that each may take. In 16 bits as the card computes in them:
    bf16 where it does in that; of FP32 the last variant of each kernel, too."""
    found = [(case, CARDS[card]) for case in variants("bf16" if card >= 80 else "fp16")]
    once = {case.kernel.__name__: case for case in variants("fp32")} if card in FP32 else {}
    return found + [(case, FP32[card]) for case in once.values()]


def variants(*kinds: str) -> Iterator[Case]:
    """Of a kernel the last takes most shared memory."""
    for kind in kinds:
        t = NUMBERS[kind]
        dtype = DTYPES[kind]
        for bits in (4, 8):
            yield Case(
                rows.unpack, ("*i32", t, "i32", "i32", "i32", "i32"), {"BITS": bits, "BLOCK": 1024}
            )
        for once in (False, True):
            sizes = "i32", "i32", "i32", "fp32"
            yield Case(rows.rms_norm, (t, t, t, *sizes), {"ONCE": once, "BLOCK": 4096})
        yield Case(rows.silu_gated, (t, t, "i32"), {"BLOCK": 1024})
        yield Case(
            rows.add_weighted, (t, "*i32", "*fp32", t, "i32", "i32"), {"ROWS": 256, "BLOCK": 256}
        )
        yield Case(rows.clamped_gate, (t, t, "fp32", "fp32", "i32"), {"BLOCK": 1024})
        yield from coded_cases(t)
        sizes = "i32", "i32", "i32", "i32", "i32"
        yield Case(rows.rotate, (t, t, "*i64", "*fp32", "fp32", *sizes), {"BLOCK": 64})
        for size in (64, 128):
            yield Case(rows.hadamard, (t, "i32", "fp32"), {"SIZE": size})
        yield from packed_cases(t, dtype)
        yield Case(prompts.choose, ("*fp32", "*i64", "*i32", *["i32"] * 5), {"BLOCK": 1024})
        for width in (256, 128):
            for records in (False, True):
                block = {"D": width, "WIDTH": width, "BLOCK": 64}
                yield put_case(t, None, records, block)
            tile = _tile(torch.empty(1, 1, 1, width, dtype=dtype, device="meta"))
            yield Case(prompts.attend, (*[t] * 4, "*fp32", "*i32", *["i32"] * 17, "fp32"), tile)
            yield Case(
                prompts.column_sums, (t, t, "*fp32", "*fp32", "*i32", *["i32"] * 14, "fp32"), tile
            )
        for records, group, width, before in (
            (False, 1, 64, 0),
            (False, 1, 128, 2),
            (True, 4, 128, 0),
            (True, 8, 80, 0),
            (True, 8, 256, 1),
        ):
            yield step_case(t, dtype, None, records, group, width, before, records and group == 8)


def step_case(
    t: str,
    dtype: torch.dtype,
    packing: KVPacking | None,
    records: bool,
    group: int,
    width: int,
    before: int,
    per_query: bool,
) -> Case:
    # What a kernel that records nothing gets in place of scores, positions, victims and products.
    scores = ("*fp32", "*i32", "*i32", "*fp32") if records else ("*i32",) * 4
    in_front = t if before > 1 else "*i32", "*fp32" if before else "*i32"
    area = t if packing is None else "*i32"
    whole, sizes = of_packed_slots(t, packing)
    areas = *[t] * 4, area, area, "*i32", "*fp32"
    numbers = *["i32"] * 10, "fp32", "fp32"
    return Case(
        slots.attend_step,
        (*areas, *scores, "*i64", *in_front, *whole, *numbers, *sizes),
        {
            "G": group,
            "GROUP": 16,
            "D": width,
            "WIDTH": power_of_two(width),
            "BEFORE": before,
            "BLOCK": columns_at_a_time(dtype, width),
            "RECORDS": records,
            "PER_QUERY": per_query,
            "WINDOW": 16,
            **packing_constants(packing),
        },
    )


def put_case(t: str, packing: KVPacking | None, records: bool, block: dict[str, Any]) -> Case:
    scores = ("*fp32", "*fp32", "*i32") if records else ("*i64",) * 3
    area = t if packing is None else "*i32"
    whole, sizes = of_packed_slots(t, packing)
    types = t, t, "*i64", area, area, *scores, "*i32", *whole, *["i32"] * 15, *sizes
    return Case(prompts.put, types, block | {"RECORDS": records} | packing_constants(packing))


def of_packed_slots(t: str, packing: KVPacking | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the types of whole columns, and of the sizes of packed slots."""
    if packing is None:
        return (NONE,) * 5, (NONE,) * 8
    return ("*bf16", "*bf16", t, t, "*i32"), ("i32",) * 8


def coded_cases(t: str) -> Iterator[Case]:
    """Of weights in 4 or 8 bits and in MXFP4, and of experts."""
    yield Case(products.unpack_mxfp4, ("*i32", "*u8", t, "i32", "i32", "i32"), {"BLOCK": 1024})
    for bits, mx, whole, tokens, grouped in (
        (4, False, True, 16, False),
        (4, False, False, 32, False),
        (8, False, True, 32, False),
        (4, True, True, 32, False),
        (4, False, False, 16, True),
        (4, True, True, 32, True),
        (0, False, True, 32, True),
    ):
        words = "*i32" if bits else t
        yield Case(
            products.few_rows,
            (t, words, "*u8" if mx else words, t, t, "*i64" if grouped else words, *["i32"] * 8),
            {
                "BITS": bits,
                "MX": mx,
                "BIASED": whole,
                "ADDS": whole and not grouped,
                "TABLE": grouped,
                "ALIGNED": grouped,
                "TOKENS": tokens,
                "ROWS": ROWS_AT_A_TIME,
                "WORDS": 4 * (bits or 32),
            },
        )


def packed_cases(t: str, dtype: torch.dtype) -> Iterator[Case]:
    """Of slots in few bits."""
    for records, bits, width in ((False, "4/3", 128), (True, 3, 64), (True, 8, 80), (True, 4, 256)):
        packing = KVPacking.of(width, bits)
        wide = power_of_two(width)
        yield step_case(t, dtype, packing, records, 4, width, int(bits == 8), bits == 8)
        block = {"D": width, "WIDTH": wide, "BLOCK": max(1, 2048 // wide)}
        for smooths in (False, True):
            yield Case(
                prompts.begin_whole,
                (t, "*i32", *of_packed_slots(t, packing)[0], *["i32"] * 6, "fp32"),
                {**block, "SMOOTHS": smooths},
            )
        yield put_case(t, packing, records, block)


def known_of(kernel: Any, types: Sequence[str]) -> dict[tuple[int], list[list[object]]]:
    """What a launch tells the compiler of the arguments."""
    found: dict[tuple[int], list[list[object]]] = {}
    for one, kind in zip(kernel.params, types, strict=False):
        is_free = (
            one.do_not_specialize_on_alignment
            if kind[0] == "*"
            else one.do_not_specialize or one.name in COUNTS
        )
        if kind not in ("fp32", NONE) and not is_free:
            found[(one.num,)] = [["tt.divisibility", 16]]
    return found


def compiled(case: Case, card: int) -> Any:
    kernel, types, constants = case
    names = kernel.arg_names
    assert len(types) + len(constants) == len(names), kernel
    signature = dict(zip(names, types, strict=False)) | dict.fromkeys(constants, "constexpr")
    # What is not there is told to the compiled kernel, as a launch does.
    values = {name: None for name, kind in signature.items() if kind == NONE} | constants
    source = ASTSource(kernel, signature, values, known_of(kernel, types))
    is_packed = kernel is slots.attend_step and constants["K_BITS"]
    options = {"num_stages": 1} if is_packed else {}  # as it is launched
    made = triton.compile(source, target=GPUTarget("cuda", card, 32), options=options)
    assert "cubin" in made.asm, kernel
    return made


def shared_memory(card: int, number: int) -> int:
    """Compile one of the card's cases. Returns the bytes that a block takes."""
    case, most = cases(card)[number]
    made = compiled(case, PTX_OF.get(card, card))
    if card in PTX_OF:
        backend = make_backend(GPUTarget("cuda", card, 32))
        assert backend.make_cubin(made.asm["ptx"], {}, backend.parse_options({}), card)
        if number + 1 == len(cases(card)):
            texts = [
                re.sub(r"\.target sm_\d+", "", each.asm["ptx"])
                for each in (made, compiled(case, card))
            ]
            assert texts[0] == texts[1], f"sm{card} has PTX of its own: take it out of PTX_OF"
    shared = int(made.metadata.shared)
    assert shared <= most, f"{case}: {shared} bytes of shared memory on sm{card}, at most {most}"
    return shared


def main() -> None:
    chosen = [int(card) for card in sys.argv[1:]] or [*CARDS]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        made = {
            card: [pool.submit(shared_memory, card, i) for i in range(len(cases(card)))]
            for card in chosen
        }
        for card, of_card in made.items():
            shared = [each.result() for each in of_card]
            print(
                f"sm{card}: {len(shared)} variants, at most {max(shared)} bytes of shared memory",
                flush=True,
            )


if __name__ == "__main__":
    main()

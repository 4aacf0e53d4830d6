"""Compile every Triton kernel ahead of time for cards that are not here: python -m tests.gpu.compile_kernels [sm ...].

Prints a line for each card: kernels, and the bytes of shared memory that the hungriest takes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flexgen_h2o.core.packing import KVPacking
from flexgen_h2o.kernels.coded import ROWS_AT_A_TIME
from flexgen_h2o.kernels.decode_step import columns_at_a_time, packing_constants
from flexgen_h2o.kernels.prefill_attention import _tile
from flexgen_h2o.kernels.triton import power_of_two, products, prompts, rows, slots

# Bytes of shared memory that a block may take, by compute capability: Turing (T4), Ampere (3090), Ada (4090), Hopper.
CARDS = {75: 65536, 86: 101376, 89: 101376, 90: 232448}
NUMBERS = {"fp32": "*fp32", "fp16": "*fp16", "bf16": "*bf16"}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Integers that are no multiples of 16; all others that a launch has compiled in are, as pointers are.
COUNTS = {
    "heads", "kv_heads", "group", "pairs", "lse_token", "k_low", "k_codes", "k_words", "v_low", "v_codes", "v_words",
}  # fmt: skip


class Case(NamedTuple):
    """A kernel with the types of its arguments in order, and its constants."""

    kernel: Any
    types: tuple[str, ...]
    constants: dict[str, Any]


def cases(card: int) -> Iterator[Case]:
    """In fp32, and in 16 bits as the card computes in them: bf16 where it does in that."""
    for kind in ("fp32", "bf16" if card >= 80 else "fp16"):
        t, dtype = NUMBERS[kind], DTYPES[kind]
        for bits in (4, 8):
            yield Case(rows.unpack, ("*i32", t, "i32", "i32", "i32", "i32"), {"BITS": bits, "BLOCK": 1024})
        for once in (False, True):
            sizes = "i32", "i32", "i32", "fp32"
            yield Case(rows.rms_norm, (t, t, t, *sizes), {"ONCE": once, "BLOCK": 4096})
        yield Case(rows.silu_gated, (t, t, "i32"), {"BLOCK": 1024})
        yield Case(rows.clamped_gate, (t, t, "fp32", "fp32", "i32"), {"BLOCK": 1024})
        yield from coded_cases(t)
        sizes = "i32", "i32", "i32", "i32", "i32"
        yield Case(rows.rotate, (t, t, "*i64", "*fp32", "fp32", *sizes), {"BLOCK": 64})
        yield from packed_cases(t, dtype)
        yield Case(prompts.choose, ("*fp32", "*i64", *["i32"] * 4), {"BLOCK": 1024})
        for width in (128, 256):
            block = {"D": width, "WIDTH": width, "BLOCK": 64}
            for records in (False, True):
                scores = ("*fp32", "*fp32", "*i32") if records else ("*i64",) * 3
                block |= {"RECORDS": records}
                yield Case(prompts.put, (t, t, "*i64", t, t, *scores, *["i32"] * 15), dict(block))
            tile = _tile(torch.empty(1, 1, 1, width, dtype=dtype, device="meta"))
            yield Case(prompts.attend, (*[t] * 4, "*fp32", *["i32"] * 17, "fp32"), tile)
            yield Case(prompts.column_sums, (t, t, "*fp32", "*fp32", *["i32"] * 14, "fp32"), tile)
        for records, group, width, before in (
            (False, 1, 64, 0), (False, 1, 128, 2), (True, 4, 128, 0), (True, 8, 80, 0), (True, 8, 256, 1),
        ):  # fmt: skip
            # What a kernel that records nothing gets in place of scores, positions, victims, weights and products.
            scores = ("*fp32", "*i32", "*i32", "*fp32", "*fp32") if records else ("*i32",) * 5
            yield Case(
                slots.attend_step,
                (*[t] * 6, "*i32", "*fp32", *scores, "*i64", t if before > 1 else "*i32", "*fp32" if before else "*i32",
                 *["i32"] * 10, "fp32", "fp32"),
                {"G": group, "GROUP": 16, "D": width, "WIDTH": power_of_two(width), "BEFORE": before,
                 "BLOCK": columns_at_a_time(dtype, width), "RECORDS": records, "PER_QUERY": records and group == 8},
            )  # fmt: skip


def coded_cases(t: str) -> Iterator[Case]:
    """Of weights in 4 or 8 bits and in MXFP4, and of experts."""
    yield Case(products.unpack_mxfp4, ("*i32", "*u8", t, "i32", "i32", "i32"), {"BLOCK": 1024})
    for bits, mx, whole, tokens, grouped in (
        (4, False, True, 16, False), (4, False, False, 32, False), (8, False, True, 32, False),
        (4, True, True, 32, False), (4, False, False, 16, True), (4, True, True, 32, True), (0, False, True, 32, True),
    ):  # fmt: skip
        words = "*i32" if bits else t
        yield Case(
            products.few_rows,
            (t, words, "*u8" if mx else words, t, t, "*i64" if grouped else words, *["i32"] * 8),
            {"BITS": bits, "MX": mx, "BIASED": whole, "ADDS": whole and not grouped, "TABLE": grouped,
             "ALIGNED": grouped, "TOKENS": tokens, "ROWS": ROWS_AT_A_TIME, "WORDS": 4 * (bits or 32)},
        )  # fmt: skip


def packed_cases(t: str, dtype: torch.dtype) -> Iterator[Case]:
    """Of slots in few bits."""
    for records, bits, width in ((False, "4/2", 128), (True, 3, 64), (True, 8, 80), (True, 4, 256)):
        scores = ("*fp32", "*i32", "*i32", "*fp32", "*fp32") if records else ("*i32",) * 5
        packing, wide = KVPacking.of(width, bits), power_of_two(width)
        beside = "*bf16", "*bf16", t, t, "*i32"
        yield Case(
            slots.attend_packed_step,
            (*[t] * 4, "*i32", "*i32", "*i32", "*fp32", *scores, "*i64", "*i32", "*fp32" if bits == 8 else "*i32",
             *beside, *["i32"] * 10, "fp32", "fp32", *["i32"] * 8),
            {"G": 4, "GROUP": 16, "D": width, "WIDTH": wide, "BLOCK": columns_at_a_time(dtype, width),
             "RECORDS": records, "PER_QUERY": bits == 8, "BEFORE": int(bits == 8), "WINDOW": 16,
             **packing_constants(packing)},
        )  # fmt: skip
        block = {"D": width, "WIDTH": wide, "BLOCK": max(1, 2048 // wide)}
        yield Case(prompts.begin_whole, (t, *beside, *["i32"] * 7, "fp32"), block)
        scores = ("*fp32", "*fp32", "*i32") if records else ("*i64",) * 3
        yield Case(
            prompts.put_packed, (t, t, "*i64", "*i32", "*i32", *scores, *beside, *["i32"] * 24),
            {**block, "RECORDS": records, **packing_constants(packing)},
        )  # fmt: skip


def known_of(kernel: Any, types: Sequence[str]) -> dict[tuple[int], list[list[object]]]:
    """What a launch tells the compiler of the arguments."""
    found: dict[tuple[int], list[list[object]]] = {}
    for one, kind in zip(kernel.params, types, strict=False):
        is_free = one.do_not_specialize_on_alignment if kind[0] == "*" else one.do_not_specialize or one.name in COUNTS
        if kind != "fp32" and not is_free:
            found[(one.num,)] = [["tt.divisibility", 16]]
    return found


PARTS = 8  # of a card's kernels, so that all cores have some until the end


def compile_part(card: int, part: int) -> list[int]:
    """Every eighth of a card's kernels. Returns the bytes of shared memory of each."""
    found = []
    every = {repr(case): case for case in cases(card)}  # some do not depend on the type of numbers
    for kernel, types, constants in [*every.values()][part::PARTS]:
        names = kernel.arg_names
        signature = dict(zip(names, types, strict=False)) | dict.fromkeys(constants, "constexpr")
        assert len(types) + len(constants) == len(names), kernel
        options = {"num_stages": 1} if kernel is slots.attend_packed_step else {}  # as it is launched
        source = ASTSource(kernel, signature, constants, known_of(kernel, types))
        made = triton.compile(source, target=GPUTarget("cuda", card, 32), options=options)
        assert "cubin" in made.asm, kernel
        shared = made.metadata.shared
        assert shared <= CARDS[card], f"{kernel} {types} {constants}: {shared} bytes of shared memory on sm{card}"
        found.append(shared)
    return found


def main() -> None:
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        chosen = [int(card) for card in sys.argv[1:]] or [*CARDS]
        parts = {card: [pool.submit(compile_part, card, part) for part in range(PARTS)] for card in chosen}
        for card, of_card in parts.items():
            shared = [each for part in of_card for each in part.result()]
            print(f"sm{card}: {len(shared)} kernels, at most {max(shared)} bytes of shared memory", flush=True)


if __name__ == "__main__":
    main()

"""Compiled decoding of quantised matrices against torch operations, bit for bit, at odd sizes and
extremes."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from flexgen_h2o.core.packing import int8_row_bytes
from flexgen_h2o.kernels import quantised, workspace
from flexgen_h2o.kernels.int8 import blank_int8_rows, block_int8_rows, pack_int8_rows
from flexgen_h2o.kernels.quantised import Groups, stored_groups
from flexgen_h2o.kernels.workspace import cpu_has
from tests.unit.weight_room import int8_workspace

DTYPES = (torch.float32, torch.bfloat16)


def any_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """NaN may be any."""
    kind = torch.int16 if one.element_size() == 2 else torch.int32
    return bool(((one.view(kind) == other.view(kind)) | (one.isnan() & other.isnan())).all())


def both(
    name: str, shape: tuple[int, int], dtype: torch.dtype, *arguments: Any, **more: Any
) -> torch.Tensor:
    """What compiled loops and torch operations give, which is the same; into rows that lie apart,
    some at a time."""
    found = torch.full((shape[0], shape[1] + 6), 7.0, dtype=dtype)[:, : shape[1]]
    want = torch.full(shape, 7.0, dtype=dtype)
    getattr(quantised, name)(*arguments, found, **more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workspace, "UNPACK_CHUNK", 3 * shape[1])
        getattr(quantised, name).torch(*arguments, want, **more)
    assert same_bits(found.contiguous(), want)
    return want


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4(dtype: torch.dtype) -> None:
    """As transformers decodes it, with every scale: the smallest, those that overflow, and 255."""
    blocks = any_bytes(1, 64, 4, 16)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 64, 4)
    found = both("unpack_mxfp4", (64, 128), dtype, blocks[0], scales[0])
    want = convert_moe_packed_tensors(blocks, scales, dtype=dtype)[0].t().contiguous()
    assert same_bits(found, want) and found.isinf().any() and (found != 0).sum() > 6000


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns", "block", "first"),
    [(5, 9, (3, 4), 2), (1, 1, (128, 128), 127), (40, 57, (16, 24), 5)],
)
def test_fp8(
    dtype: torch.dtype, rows: int, columns: int, block: tuple[int, int], first: int
) -> None:
    codes = any_bytes(rows, columns)
    scales = torch.randn(-(-(first + rows) // block[0]), -(-columns // block[1]))
    found = both("unpack_fp8", (rows, columns), dtype, codes, scales, block, first)
    assert torch.equal(found.isnan(), (codes & 127) == 127)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("bits", "shape", "groups", "signed"),
    [
        (4, (3, 64), Groups(32), False),
        (4, (1, 33), Groups(8), False),
        (8, (5, 31), Groups(31), True),
        (8, (2, 100), Groups(32), False),
        (4, (3, 48), Groups(24, 40), False),  # a first group that is cut off
        (8, (3, 48), Groups(24, 0, torch.arange(48, dtype=torch.int32) % 5), False),
    ],
    ids=str,
)
@pytest.mark.parametrize("with_zeros", [True, False])
def test_integers(
    dtype: torch.dtype,
    bits: int,
    shape: tuple[int, int],
    groups: Groups,
    signed: bool,
    with_zeros: bool,
) -> None:
    """By their definition they are tested in tests/parity/test_formats.py."""
    codes = any_bytes(shape[0], 4 * -(-shape[1] * bits // 32))
    scales = torch.randn(shape[0], 5)
    scales[0] = torch.tensor(0x7FFFE000, dtype=torch.int32).view(torch.float32)  # a float16's NaN
    zeros = torch.randint(0, 2**bits, scales.shape).float()
    zeros = zeros if with_zeros or groups.index is not None else None  # GPTQ has zeros
    given = codes, bits, scales, zeros, groups
    found = both("unpack_integers", shape, dtype, *given, signed=signed)
    assert found[0].isnan().all() and not found[1:].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_awq(dtype: torch.dtype) -> None:
    words = torch.randint(-(2**31), 2**31 - 1, (3, 32), dtype=torch.int32)
    scales = torch.randn(14, 2)
    zeros = torch.randint(0, 16, (14, 2)).float()
    found = both("unpack_awq_rows", (14, 32), dtype, words, 3, scales, zeros, Groups(16))
    assert found.isfinite().all()


@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_of_a_single_row_of_words(bits: int) -> None:
    """All that a part may have of a matrix: 8 or 4 columns."""
    columns = 32 // bits
    rows = 8
    words = torch.randint(-(2**31), 2**31 - 1, (1, rows), dtype=torch.int32)
    scales = torch.randn(1, rows)
    zeros = torch.randint(0, 16, (1, rows)).float()
    out = torch.zeros(rows, columns)
    codes = torch.stack(
        [(words[0] >> (bits * i)) & (2**bits - 1) for i in range(columns)], 1
    ).float()
    want = (codes - zeros.t()) * scales.t()
    assert torch.equal(
        quantised.unpack_gptq(words, bits, scales, zeros, Groups(columns), out), want
    )


def test_stored_groups_are_looked_at_once_for_as_long_as_they_are_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = torch.zeros(256, dtype=torch.uint8)
    found = torch.aminmax(torch.zeros(1))
    looks = MagicMock(return_value=found)
    monkeypatch.setattr(torch, "aminmax", looks)
    for some in (held[:128], held[128:]):
        assert stored_groups(some, 1, 64, 0) is stored_groups(some, 1, 64, 0)
    assert looks.call_count == 2


@pytest.mark.parametrize("index", [[0, 1, 2, 0], [0, 0, 0, 0], [0, 0, -1, 1]])
def test_groups_that_no_writer_means_are_refused(index: list[int]) -> None:
    """A group that does not exist, and zeros where columns are in order."""
    stored = torch.tensor(index, dtype=torch.int32).view(torch.uint8)
    with pytest.raises(ValueError, match="columns"):
        stored_groups(stored, 2, 2, 0)


@pytest.mark.skipif(not cpu_has("avx2"), reason="the loop is made of instructions of AVX2")
@pytest.mark.parametrize("columns", [64, 192, 2880])
def test_mxfp4_becomes_int8_rows_in_one_pass(columns: int) -> None:
    """With the bits that decoding into float32 and quantising give: any scale, codes that are all
    small, and rows of zeros, in pieces."""
    rows = 128
    groups = columns // 32
    blocks = torch.randint(0, 256, (rows, groups, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (rows, groups), dtype=torch.uint8)
    blocks[:20] &= 0x99  # 0 and 0.5
    blocks[3] = 0
    blocks[4] = 0x88
    scales[5] = 0
    scales[6] = 1
    scales[7, 0] = 254
    scales[8] = 60
    memories = [torch.full((rows, int8_row_bytes(columns)), 9, dtype=torch.uint8) for _ in range(2)]
    (one,), want = (blank_int8_rows(memory, columns, int8_workspace()) for memory in memories)
    assert one.blocked
    quantised.fill_int8_rows(
        quantised.unpack_mxfp4(blocks, scales, torch.empty(rows, columns)), 0, want
    )
    for some in (slice(0, 48), slice(48, 128)):
        assert quantised.fill_blocks_from_mxfp4(blocks[some], scales[some], some.start, one)
    assert torch.equal(*memories)
    assert not quantised.fill_blocks_from_mxfp4(blocks[:8], scales[:8], 0, one)
    assert not quantised.fill_blocks_from_mxfp4(blocks[:16], scales[:16], 8, one)


@pytest.mark.parametrize(("rows", "columns"), [(192, 128), (130, 64), (5, 30)])
def test_int8_rows(rows: int, columns: int) -> None:
    """Filled in pieces they are as packed at once; blocked or in order, with sums."""
    values = torch.randn(rows, columns) * torch.logspace(-35, 30, rows).unsqueeze(1)
    values[1] = 0
    memory = torch.full((rows, int8_row_bytes(columns)), 9, dtype=torch.uint8)
    parts = blank_int8_rows(memory, columns, int8_workspace())
    for some in (slice(0, 64), slice(64, 128), slice(128, rows)):
        if len(values[some]):
            quantised.fill_int8_rows(values[some].contiguous(), some.start, parts)
    at_once = block_int8_rows(pack_int8_rows(values), columns, int8_workspace())
    for part, other in zip(parts, at_once, strict=True):
        assert part.blocked == other.blocked and torch.equal(part.packed, other.packed)

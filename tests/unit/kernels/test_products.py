"""Products with every form of a weight, on every instruction set, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.core.packing import INT8_ROW_BYTES, int8_row_bytes
from flexgen_h2o.kernels import int8, products, workspace
from flexgen_h2o.kernels import linear as linear_kernels
from flexgen_h2o.kernels.coded import CodedRows, groupwise_codes, mxfp4_codes
from flexgen_h2o.kernels.int8 import (
    BUFFERS,
    Int8Rows,
    RequantisedRows,
    block_int8_rows,
    pack_int8_rows,
    quantise_rows,
    requantise_rows,
)
from flexgen_h2o.kernels.linear import (
    DenseRows,
    RowParts,
    Table,
    add_linear,
    block_rows,
    grouped_linear,
    linear,
    linear_relu,
    linear_shared_input,
    lookup,
)
from flexgen_h2o.kernels.packed import pack_rows, unpack_rows
from flexgen_h2o.kernels.workspace import Workspace, cpu_has

BF16 = torch.bfloat16
EPS = {torch.float32: 1e-6, BF16: 2.0**-8, torch.float16: 2.0**-11}
FEATURES = {
    "AVX2": ("avx2", "fma"),
    "AVX-512": ("avx512bf16", "avx512vnni"),
    "AMX": ("amx-bf16", "amx-int8"),
}
HAS_AMX = products.has_amx()
HERE = [
    name
    for name, features in FEATURES.items()
    if (HAS_AMX if name == "AMX" else all(map(cpu_has, features)))
]


def use(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply by these instructions, even if others are preferred, or by torch operations."""
    if name != "torch" and name not in HERE:
        pytest.skip("this CPU has no such instructions for products")
    loops = () if name == "torch" else (BF16, torch.uint8)
    monkeypatch.setattr(products, "has_loop", lambda dtype, in_order=False: dtype in loops)
    monkeypatch.setattr(products, "has_amx", lambda: name == "AMX")
    hidden = FEATURES["AVX-512"] if name == "AVX2" else ()
    monkeypatch.setattr(products, "cpu_has", lambda one: cpu_has(one) and one not in hidden)


@pytest.fixture(params=["torch", *FEATURES])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use(request.param, monkeypatch)
    return str(request.param)


LOOPS = pytest.mark.parametrize("instructions", FEATURES, indirect=True)


def room(nbytes: int = 2**21) -> Workspace:
    memory = torch.full((nbytes * len(BUFFERS),), 77, dtype=torch.uint8)
    return Workspace(memory, dict.fromkeys(BUFFERS, nbytes), BF16)


class Weight:
    """Hold a matrix (n, columns) in one form, and the numbers that it stands for."""

    def __init__(self, kind: str, n: int, columns: int, dtype: torch.dtype = BF16) -> None:
        self.kind = kind
        self.dtype = dtype
        self.workspace = room()
        rows = torch.randn(n, columns).to(dtype)
        self.twin: RowParts = (DenseRows(rows),)  # multiplies the same numbers, decoded before
        self.stored = rows
        if kind == "int8":
            self.stored = pack_int8_rows(rows)
        elif kind == "mxfp4":
            blocks = torch.randint(0, 256, (n, columns // 32, 16), dtype=torch.uint8)
            self.codes = mxfp4_codes(blocks, torch.randint(115, 130, (n, columns // 32)).byte())
        elif kind != "dense":
            self.stored = pack_rows(rows, 4)
            self.codes = groupwise_codes(self.stored, 4, columns)
        self.values = rows.double()
        if kind in ("4 bits", "mxfp4"):
            self.twin = (DenseRows(self.codes.decode(torch.empty_like(rows))),)
        elif self.is_int8:
            packed = self.stored
            if kind != "int8":
                packed = torch.full((n, int8_row_bytes(columns)), 55, dtype=torch.uint8)
                requantise_rows(self.stored, packed, columns)
            self.twin = (Int8Rows(packed, columns, self.workspace),)
        found = torch.empty(n, columns, dtype=torch.float32 if self.is_int8 else dtype)
        self.values = lookup(torch.arange(n), self.twin, found).double()

    @property
    def is_int8(self) -> bool:
        return self.kind in ("int8", "4 bits in int8")

    def parts(self, cuts: Sequence[int] = (), blocks: bool = False) -> RowParts:
        """Return the matrix cut at these rows, as tiers hold it: each part in its own memory."""
        n, columns = self.values.shape
        if self.kind in ("4 bits", "mxfp4"):
            return (CodedRows(self.codes, DenseRows(torch.zeros(n, columns, dtype=self.dtype))),)
        found: list[Any] = []
        for a, b in zip([0, *cuts], [*cuts, n], strict=True):
            part = self.stored[a:b].clone()
            if self.kind == "dense":
                found += block_rows(part) if blocks else [DenseRows(part)]
            elif self.kind == "int8":
                found += (
                    block_int8_rows(part, columns, self.workspace)
                    if blocks
                    else [Int8Rows(part, columns, self.workspace)]
                )
            else:
                found.append(RequantisedRows(part, columns, self.workspace))
        return tuple(part for part in found if len(part))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        x64 = x.double()
        if self.is_int8:
            codes = torch.empty(x.shape, dtype=torch.int8)
            scales = torch.empty(len(x))
            quantise_rows(x, codes, scales)
            x64 = codes.double() * scales.double().unsqueeze(1)
        return x64 @ self.values.t()


def near(found: torch.Tensor, want: torch.Tensor, *added: Any, times: int = 0) -> None:
    """Compare sums in fp32, rounded once, and once more for a second number that is added."""
    times = times or max(1, len(added))
    size = want.abs() + sum(t.double().abs() for t in added)
    want = want + sum(t.double() for t in added)
    off = (found.double() - want).abs()
    assert bool((off <= times * EPS[found.dtype] * size + 1e-4 * size.max()).all())


def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def apart(rows: torch.Tensor, more: int = 6) -> torch.Tensor:
    """Return the same rows, with others between them."""
    return torch.cat([rows, rows[:, :1].expand(-1, more)], dim=1)[:, :-more]


KINDS = ["dense", "int8", "4 bits in int8", "4 bits", "mxfp4"]
# Input rows, rows and columns of the weight: a vector more than a panel, chunks of words that do
# not divide, one row, more than a chunk, columns that loops do not take.
SHAPES = [
    (1, 1, 64),
    (2, 80, 128),
    (33, 130, 2112),
    (600, 70, 64),
    (1, 5, 1),
    (3, 40, 65),
    (13, 130, 200),
    (7, 70, 2044),
    (5, 16, 30),
]


@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_products(
    kind: str, shape: tuple[int, int, int], dtype: torch.dtype, instructions: str
) -> None:
    n, rows, columns = shape
    if kind in ("4 bits", "mxfp4") and columns % 64:
        pytest.skip("codes of other columns are decoded first")
    held = Weight(kind, rows, columns, dtype)
    x = apart(normal(n, columns, dtype=dtype))
    bias = normal(rows, dtype=dtype)
    before = normal(n, rows, dtype=dtype)
    want = held.product(x)
    wide = torch.full((n, rows + 5), torch.nan, dtype=dtype)
    out = wide[:, 2:-3]
    blocks = dtype != torch.float16  # in which no loop writes results
    for parts in (held.parts(), held.parts([rows // 3]), held.parts(blocks=blocks)):
        near(linear(x, parts, None, out), want)
        near(linear(x, parts, bias, out), want, bias)
        assert bool(wide[:, [0, 1, -3, -2, -1]].isnan().all()), "wrote beside its rows"
        relu = linear_relu(x, parts, bias, torch.empty_like(before))
        assert torch.equal(relu, torch.relu(out))
        add_linear(total := before.clone(), x, parts, bias)
        near(total, want, bias, before)


cuts = st.lists(st.integers(0, 12), min_size=2, max_size=2).map(sorted)


@pytest.mark.parametrize("slowly", [False, True])
@given(st.integers(1, 9), st.integers(1, 20), cuts, st.booleans(), st.sampled_from(list(EPS)[:2]))
def test_rows_of_inputs(
    slowly: bool, n: int, out_width: int, at: list[int], biased: bool, dtype: Any
) -> None:
    """A matrix that is stored transposed is cut between inputs; each part's sum is rounded.

    Torch may multiply bf16 number by number (slowly). Then some inputs and some outputs are
    converted at a time.
    """
    x = normal(n, 12, dtype=dtype)
    weight = normal(12, out_width, dtype=dtype)
    bias = normal(out_width, dtype=dtype) if biased else None
    sizes = [at[0], at[1] - at[0], 12 - at[1]]
    parts = tuple(DenseRows(part.clone().t()) for part in weight.split(sizes) if len(part))
    want = x.double() @ weight.double()
    added = [] if bias is None else [bias]
    size = x.double().abs() @ weight.double().abs()
    before = normal(n, out_width, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_kernels, "multiplies_slowly", lambda *_: slowly)
        patch.setattr(linear_kernels, "_INPUTS", 36)
        patch.setattr(workspace, "UNPACK_CHUNK", 30)
        out = linear(x, parts, bias, torch.empty(n, out_width, dtype=dtype))
        add_linear(total := before.clone(), x, parts, bias)
    near(out, want, *added, size, -size, times=4)
    near(total, want, *added, before, size, -size, times=4)


@pytest.mark.parametrize("kind", ["4 bits in int8", "4 bits", "mxfp4"])
@pytest.mark.parametrize("shape", [(1, 64, 64), (33, 130, 2112), (600, 70, 1088)], ids=str)
def test_codes_give_the_bits_of_the_decoded_matrix(
    kind: str, shape: tuple[int, int, int], instructions: str
) -> None:
    """They are decoded a panel and a chunk at a time."""
    n, rows, columns = shape
    held = Weight(kind, rows, columns)
    x = apart(normal(n, columns))
    bias = normal(rows)
    for adds in (False, True):
        outs = [torch.ones(n, rows, dtype=BF16) for _ in range(2)]
        for parts, out in zip((held.twin, held.parts()), outs, strict=True):
            linear_shared_input(x, [(parts, bias, out)], adds)
        assert torch.equal(*outs)


@pytest.mark.skipif(len(HERE) < 2, reason="this CPU has nothing to compare with")
@pytest.mark.parametrize("n", [1, 16, 33])
def test_all_instructions_give_the_same_bits_in_int8(n: int, monkeypatch: Any) -> None:
    """Codes are the largest there are, too, and torch's exact sums are among the results."""
    held = Weight("int8", 192, 2304)
    four = Weight("4 bits in int8", 192, 2304)
    x = normal(n, 2304)
    x[0] = held.stored[0, :2304].view(torch.int8).bfloat16().sign()
    outs = []
    for name in ("torch", *HERE):
        use(name, monkeypatch)
        every = (held.parts(), held.parts(blocks=True), four.parts())
        outs.append([linear(x, parts, None, torch.empty(n, 192)) for parts in every])
        assert torch.equal(outs[-1][0], outs[-1][1])
    for others in outs[1:]:
        assert all(map(torch.equal, others, outs[0]))


@pytest.mark.parametrize("kind", ["dense", "int8"])
@LOOPS
def test_no_bit_depends_on_parts_or_on_other_rows(kind: str, instructions: str) -> None:
    """A matrix may be split, parts may be blocked, and rows multiplied together or alone."""
    held = Weight(kind, 336, 1152)
    x = normal(29, 1152)
    bias = normal(336)
    want = linear(x, held.parts(), bias, torch.empty(29, 336, dtype=BF16))
    added = normal(29, 336)
    add_linear(total := added.clone(), x, held.parts(), bias)
    for at in ([], [64], [16, 207], [320]):
        for blocks in (False, True):
            parts = held.parts(at, blocks)
            assert torch.equal(linear(x, parts, bias, torch.empty_like(want)), want)
            add_linear(again := added.clone(), x, parts, bias)
            assert torch.equal(again, total)
    parts = held.parts([64], True)
    alone = [linear(row, parts, bias, torch.empty(1, 336, dtype=BF16)) for row in x.split(1)]
    assert torch.equal(torch.cat(alone), want)
    for order in ((False, True), (True, False)):
        outs = [torch.empty_like(want) for _ in order]
        maps = zip(order, outs, strict=True)
        linear_shared_input(x, [(held.parts([16], blocks), bias, out) for blocks, out in maps])
        assert all(torch.equal(out, want) for out in outs)


def test_bf16_rounds_as_torch_does(instructions: str) -> None:
    """It rounds once, and once more for a bias that is added to sums. Both add whole numbers."""
    if instructions == "torch" and "AVX-512" not in HERE:
        pytest.skip("torch itself rounds elsewhere without instructions for bf16")
    weight, x = (torch.randint(-3, 4, shape).to(BF16) for shape in ((70, 64), (9, 64)))
    bias = normal(70)
    before = normal(9, 70) * 100
    for adds in (False, True):
        once = before.addmm(x, weight.t()).add(bias)
        by_torch = once if adds else torch.addmm(bias, x, weight.t())
        linear_shared_input(x, [((DenseRows(weight),), bias, out := before.clone())], adds)
        assert torch.equal(out, by_torch)


@pytest.mark.parametrize("kind", ["dense", "int8"])
def test_what_is_not_finite_shows(kind: str, instructions: str) -> None:
    held = Weight(kind, 70, 64)
    x = normal(3, 64)
    x[0, 5] = torch.nan
    x[2, 5] = -torch.inf
    if kind == "dense":
        held.stored[66, 63] = torch.inf
    out = linear(x, held.parts(), None, torch.empty(3, 70, dtype=BF16))
    assert not out[[0, 2]].isfinite().any()
    assert out[1].isfinite().tolist() == [i != 66 or kind == "int8" for i in range(70)]
    assert bool(linear_relu(x, held.parts(), None, out)[0].isnan().all()) or kind == "int8"


@pytest.mark.parametrize("kinds", [["dense"], ["int8"], ["dense", "int8"]], ids=str)
@pytest.mark.parametrize("biased", [True, False])
def test_experts_in_one_pass(
    kinds: Sequence[str], biased: bool, instructions: str, monkeypatch: Any
) -> None:
    """Some experts have no rows, and some are int8, as a quantised checkpoint may have them."""
    monkeypatch.setattr(int8, "TOKEN_CHUNK", 16)  # chunks end within an expert's rows
    counts = [3, 0, 1, 70, 0, 2]
    x = apart(normal(sum(counts), 128))
    maps: list[tuple[list[RowParts], list[torch.Tensor] | None, torch.Tensor]] = []
    held = [[Weight(kinds[i % len(kinds)], rows, 128) for i in range(6)] for rows in (192, 80)]
    for weights in held:
        rows = len(weights[0].values)
        at = [[16 * (i % 3)] if i % 3 else [] for i in range(6)]
        parts = [one.parts(at[i], blocks=i % 2 == 0) for i, one in enumerate(weights)]
        out = torch.full((len(x), rows + 1), torch.nan, dtype=BF16)[:, 1:]
        maps.append((parts, [normal(rows) for _ in counts] if biased else None, out))
    grouped_linear(x, counts, maps)
    for weights, (parts, biases, out) in zip(held, maps, strict=True):
        for expert, (own, found) in enumerate(zip(x.split(counts), out.split(counts), strict=True)):
            bias = None if biases is None else biases[expert]
            if len(own):
                added = [] if bias is None else [bias]
                near(found, weights[expert].product(own), *added)
                alone = linear(own, parts[expert], bias, torch.empty_like(found))
                assert instructions == "torch" or torch.equal(found, alone)


def test_int8_in_little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some inputs are quantised, and some sums computed, at a time: the result is the same."""
    use("torch", monkeypatch)
    x = normal(50, 33, dtype=torch.float32)
    held = Weight("int8", 70, 33)
    whole = linear(x, held.parts(), None, torch.empty(50, 70))
    monkeypatch.setattr(int8, "TOKEN_CHUNK", 16)
    monkeypatch.setattr(int8, "INT8_TILE", 16 * 9)
    held.workspace = room(16 * 9 * 4)  # a larger slice would not be found
    assert torch.equal(linear(x, held.parts(), None, torch.empty(50, 70)), whole)


@pytest.mark.parametrize("other", ["none", "refuses", "cuts"])
def test_int8_without_torchs_int_mm(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is private, and instructions of older CPUs cut sums of large products. Sums are exact:
    also of the largest codes."""
    use("torch", monkeypatch)
    held = Weight("int8", 5, 5000)
    x = normal(3, 5000)
    x[0] = held.stored[0, :5000].view(torch.int8).sign()
    want = linear(x, held.parts(), None, torch.empty(3, 5, dtype=BF16))

    def int_mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        if other == "refuses":
            raise RuntimeError("not here")
        out.copy_((a.float() @ b.float()).clamp(-(2**15), 2**15))

    monkeypatch.setattr(torch, "_int_mm", int_mm)
    if other == "none":
        monkeypatch.delattr(torch, "_int_mm")
    int8._int_mm_works.cache_clear()
    assert torch.equal(linear(x, held.parts(), None, torch.empty_like(want)), want)
    near(want, held.product(x))
    int8._int_mm_works.cache_clear()


# ---- rows that are looked up, and rows that are blocked


def in_int8(packed: torch.Tensor) -> tuple[Int8Rows, ...]:
    return block_int8_rows(packed, packed.shape[1] - INT8_ROW_BYTES, room())


def memory_of(part: DenseRows | Int8Rows) -> torch.Tensor:
    return part.rows if isinstance(part, DenseRows) else part.packed


needs_loop = pytest.mark.skipif(
    not (products.has_loop(BF16) and products.has_loop(torch.uint8)), reason="nothing is blocked"
)


@pytest.mark.parametrize("chunk", [100, 2**20])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_looked_up(kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("linear.BLOCK_CHUNK", "packed.UNPACK_CHUNK", "workspace.UNPACK_CHUNK"):
        monkeypatch.setattr(f"flexgen_h2o.kernels.{name}", chunk * 256)
    held = Weight(kind, 208, 128)
    tables = [held.parts(), held.parts([9, 130]), held.parts([64], blocks=True)]
    if kind == "4 bits":
        tables.append((Table(208, lambda ids, out: unpack_rows(held.stored[ids], 4, out)),))
    for table in tables:
        for ids in ([*range(208)], [207, 0, 63, 64, 64, 191, 192], []):
            index = torch.tensor(ids, dtype=torch.int64)
            wide = torch.zeros(len(ids), 134, dtype=BF16)
            out = wide if isinstance(table[0], Table) else wide[:, 2:-4]
            out = torch.zeros(len(ids), 128, dtype=BF16) if out is wide else out
            lookup(index, table, out)
            assert torch.equal(out, held.values[index].to(BF16))
            assert not wide[:, :2].any() and not wide[:, -4:].any()


@needs_loop
@pytest.mark.parametrize("kind", ["dense", "int8"])
@torch.inference_mode()
def test_rows_are_blocked_where_they_lie(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take as many bytes in another order, some at a time, and nothing around them changes.

    Rows beyond a whole block stay in order.
    """
    held = Weight(kind, 336, 128)
    arena = torch.stack([held.stored] * 3)
    block = block_rows if kind == "dense" else in_int8
    blocked, rest = block(arena[1])
    assert blocked.blocked and not rest.blocked and len(blocked) == 320
    left = memory_of(rest)
    assert left.data_ptr() == arena[1, 320:].data_ptr() and torch.equal(left, held.stored[320:])
    assert memory_of(blocked).data_ptr() == arena[1].data_ptr()
    assert torch.equal(arena[0], held.stored) and torch.equal(arena[2], held.stored)
    assert not torch.equal(arena[1, :320], held.stored[:320])
    for chunk in (2 * 64 * 64 * 4 + 100, 64):
        monkeypatch.setattr(linear_kernels, "BLOCK_CHUNK", chunk)
        block(again := held.stored.clone())
        assert torch.equal(again, arena[1])


ODD = {
    "columns": torch.zeros(64, 72, dtype=BF16),
    "few rows": torch.zeros(48, 64, dtype=BF16),
    "fp32": torch.zeros(64, 64),
    "apart": torch.zeros(64, 128, dtype=BF16)[:, :64],
    "int8 columns": pack_int8_rows(torch.randn(64, 72)),
    "int8 apart": pack_int8_rows(torch.randn(128, 64))[::2],
}


@pytest.mark.parametrize("rows", ODD.values(), ids=ODD)
def test_what_stays_in_order(rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other rows are not blocked, and none is if this CPU has no loop."""
    block = in_int8 if rows.dtype == torch.uint8 else block_rows
    monkeypatch.setattr(linear_kernels, "BLOCK_CHUNK", 64)
    before = rows.clone()
    (part,) = block(rows)
    held = memory_of(part)
    assert not part.blocked and held.data_ptr() == rows.data_ptr() and torch.equal(held, before)
    use("torch", monkeypatch)
    good = pack_int8_rows(torch.randn(64, 64)) if rows.dtype == torch.uint8 else normal(64, 64)
    before = good.clone()
    assert len(block(good)) == 1 and torch.equal(good, before)


@pytest.mark.parametrize(
    ("features", "linux", "found"),  # has_amx; loops for bf16, for bf16 in order, and for int8
    [
        ("", True, "0000"),
        ("avx2 fma", True, "0111"),
        ("avx2 fma avx512bw", True, "0001"),
        ("avx2 fma avx512bw avx512bf16 avx512vnni", True, "0111"),
        ("avx512bf16 avx512vnni amx-bf16", True, "0001"),
        ("avx512bf16 avx512vnni amx-bf16 amx-int8", False, "0001"),
        ("avx512bf16 avx512vnni amx-bf16 amx-int8", True, "1101"),
    ],
)
def test_loops_are_chosen_for_the_instructions(
    features: str, linux: bool, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU may lack the instructions, or have faster ones; Linux may refuse AMX's registers."""
    for module in (products, workspace):
        monkeypatch.setattr(module, "cpu_has", features.split().__contains__)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: linux, raising=False)
    has_amx = products.has_amx.__wrapped__()
    monkeypatch.setattr(products, "has_amx", lambda: has_amx)
    kinds = (BF16, False), (BF16, True), (torch.uint8, False)
    loops = [products.has_loop.__wrapped__(*kind) for kind in kinds]
    assert "".join(str(int(one)) for one in (has_amx, *loops)) == found

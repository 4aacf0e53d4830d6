"""The compiled loop of products, against float64: shapes, strides, row parts, experts; to the bit
where it must be."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from flexgen_h2o.core.units import ALIGN, round_up
from flexgen_h2o.kernels import products, workspace
from flexgen_h2o.kernels.coded import CodedRows, can_multiply_codes, groupwise_codes, mxfp4_codes
from flexgen_h2o.kernels.int8 import (
    BUFFERS,
    Int8Rows,
    RequantisedRows,
    block_int8_rows,
    codes_of,
    pack_int8_rows,
    quantise_rows,
    scales_of,
)
from flexgen_h2o.kernels.linear import (
    DenseRows,
    RowParts,
    add_linear,
    block_rows,
    grouped_linear,
    linear,
    linear_relu,
    linear_shared_input,
)
from flexgen_h2o.kernels.packed import pack_rows
from flexgen_h2o.kernels.workspace import Workspace, cpu_has

BF16 = torch.bfloat16
ROUNDING = 2.0**-8  # of bf16, relative
KINDS = ["bf16", "int8"]
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
    """Multiply by these instructions, also where others are preferred."""
    monkeypatch.setattr(products, "has_amx", lambda: name == "AMX")
    hidden = FEATURES["AVX-512"] if name == "AVX2" else ()
    monkeypatch.setattr(
        products, "cpu_has", lambda feature: cpu_has(feature) and feature not in hidden
    )


@pytest.fixture(autouse=True, params=FEATURES)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param not in HERE:
        pytest.skip("this CPU has no such instructions for products")
    monkeypatch.setattr(
        products, "has_loop", lambda dtype, in_order=False: dtype in (BF16, torch.uint8)
    )
    use(request.param, monkeypatch)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(BF16)


class Held:
    """A weight (n, columns), in parts of all forms that there are, and its products in float64."""

    def __init__(self, kind: str, n: int, columns: int, rows: int = 700) -> None:
        self.kind = kind
        self.weight = normal(n, columns)
        sizes = {
            "int8 inputs": rows * columns,
            "int8 input scales": 4 * rows,
            "int8 weight scales": 4 * n,
            "int8 sums": 4 * rows * n,
        }
        sizes = {name: round_up(size, ALIGN) for name, size in sizes.items()}
        self.workspace = Workspace(torch.empty(sum(sizes.values()), dtype=torch.uint8), sizes, BF16)
        self.packed = pack_int8_rows(self.weight)

    def parts(self, cuts: Sequence[int] = (), blocks: bool = False) -> RowParts:
        """Cut at these rows."""
        found: list[RowParts] = []
        for a, b in zip([0, *cuts], [*cuts, len(self.weight)], strict=True):
            if self.kind == "int8":
                packed = self.packed[a:b].clone()
                columns = self.weight.shape[1]
                found.append(
                    block_int8_rows(packed, columns, self.workspace)
                    if blocks
                    else (Int8Rows(packed, columns, self.workspace),)
                )
            else:
                rows = self.weight[a:b].clone()
                found.append(block_rows(rows) if blocks else (DenseRows(rows),))
        return tuple(part for some in found for part in some)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "bf16":
            return x.double() @ self.weight.double().t()
        codes = torch.empty(x.shape, dtype=torch.int8)
        scales = torch.empty(len(x))
        quantise_rows(x, codes, scales)
        sums = codes.double() @ codes_of(self.packed, x.shape[1]).double().t()
        return sums * scales.double().unsqueeze(1) * scales_of(self.packed).double()


def check(found: torch.Tensor, want: torch.Tensor, before: torch.Tensor | float = 0.0) -> None:
    """Sums in fp32, rounded once, or twice where `before` was what the second number was added
    to."""
    assert found.dtype == BF16
    size = want.abs() + (before.abs() if isinstance(before, torch.Tensor) else before)
    assert torch.all((found.double() - want).abs() <= ROUNDING * size + 1e-4 * want.abs().max())


def apart(rows: torch.Tensor, more: int = 6) -> torch.Tensor:
    """The same rows, others between them."""
    return torch.cat([rows, normal(len(rows), more)], dim=1)[:, :-more]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("n", "rows", "columns"),
    [
        (1, 64, 64),
        (1, 1, 64),
        (2, 80, 128),
        (6, 65, 68),
        (7, 63, 96),
        (13, 130, 200),
        (5, 192, 1028),
        (64, 96, 2112),
        (600, 70, 64),
        (17, 130, 2112),
        (33, 64, 1024),
        (530, 192, 128),
        (7, 70, 2044),
    ],
)
def test_products_of_all_shapes(kind: str, n: int, rows: int, columns: int) -> None:
    """Less than a panel and a vector more than one, chunks of words that do not divide, one row,
    more than a chunk."""
    held = Held(kind, rows, columns)
    x = apart(normal(n, columns))
    bias = normal(rows)
    want = held.product(x)
    for parts in (held.parts(), held.parts(blocks=True)):
        wide = torch.full((n, rows + 5), torch.nan, dtype=BF16)
        check(linear(x, parts, bias, wide[:, 2:-3]), want + bias.double())
        assert bool(wide[:, :2].isnan().all() and wide[:, -3:].isnan().all()), (
            "wrote beside its rows"
        )
        check(linear(x, parts, None, wide[:, 2:-3]), want)
        before = normal(n, rows)
        add_linear(total := before.clone(), x, parts, bias)
        check(total, want + before.double() + bias.double(), want + before.double())
        found = linear_relu(x, parts, bias, torch.empty(n, rows, dtype=BF16))
        assert torch.equal(
            found, torch.relu(linear(x, parts, bias, torch.empty(n, rows, dtype=BF16)))
        )


@pytest.mark.parametrize("bits", ["mxfp4", "4 bits"])
@pytest.mark.parametrize(
    ("n", "rows", "columns"),
    [(1, 64, 64), (1, 1, 64), (7, 63, 192), (33, 130, 2112), (600, 70, 1088), (5, 192, 1152)],
)
def test_codes_give_the_bits_of_the_decoded_matrix(
    bits: str, n: int, rows: int, columns: int
) -> None:
    """Decoded a panel and a chunk at a time, never whole."""
    if bits == "mxfp4":
        blocks, scales = (
            torch.randint(0, most, shape, dtype=torch.uint8)
            for most, shape in ((256, (rows, columns // 32, 16)), (255, (rows, columns // 32)))
        )
        codes = mxfp4_codes(blocks, scales // 8 + 100)
    else:
        codes = groupwise_codes(pack_rows(normal(rows, columns), 4), 4, columns)
    weight = torch.empty(rows, columns, dtype=BF16)
    other = torch.zeros(rows, columns, dtype=BF16)
    parts = (DenseRows(codes.decode(weight)),), (CodedRows(codes, DenseRows(other)),)
    assert can_multiply_codes(codes, other)
    x = apart(normal(n, columns))
    bias = normal(rows)
    before = apart(normal(n, rows))
    for multiply in (
        linear,
        linear_relu,
        lambda x, part, bias, out: add_linear(out, x, part, bias),
    ):
        whole = before.clone()
        coded = before.clone()
        for part, out in zip(parts, (whole, coded), strict=True):
            multiply(x, part, bias, out)
        assert torch.equal(whole, coded)
    assert not other.any()


@pytest.mark.skipif(len(HERE) < 2, reason="this CPU has nothing to compare with")
def test_all_instructions_give_the_same_bits_in_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in 4 bits too. Registers with one row and with all, and tiles that are not whole."""
    for n in (1, 15, 16, 17, 31, 32, 33, 64, 100):
        held = Held("int8", 192, 2304, n)
        x = normal(n, 2304)
        bias = normal(192)
        held.workspace = Workspace(
            torch.empty(2**21, dtype=torch.uint8), dict.fromkeys(BUFFERS, 2**18), BF16
        )
        packed = RequantisedRows(pack_rows(held.weight, 4), 2304, held.workspace)
        for parts in (held.parts(), held.parts(blocks=True), (packed,)):
            outs = []
            for name in HERE:
                use(name, monkeypatch)
                outs.append(linear(x, parts, bias, torch.empty(n, 192, dtype=BF16)))
            assert all(torch.equal(out, outs[0]) for out in outs[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_depends_on_parts_or_on_other_rows(kind: str) -> None:
    """How a matrix is split, which parts are blocked, which rows are multiplied together, and in
    which call."""
    held = Held(kind, 336, 1152)
    x = normal(29, 1152)
    bias = normal(336)
    want = linear(x, held.parts(), bias, torch.empty(29, 336, dtype=BF16))
    added = normal(29, 336)
    add_linear(total := added.clone(), x, held.parts(), bias)
    for cuts in ((), (64,), (16, 207), (320,)):
        for blocks in (False, True):
            parts = held.parts(cuts, blocks)
            assert torch.equal(linear(x, parts, bias, torch.empty(29, 336, dtype=BF16)), want)
            add_linear(again := added.clone(), x, parts, bias)
            assert torch.equal(again, total)
    alone = [
        linear(row, held.parts((64,), True), bias, torch.empty(1, 336, dtype=BF16))
        for row in x.split(1)
    ]
    assert torch.equal(torch.cat(alone), want)
    outs = [torch.empty(29, 336, dtype=BF16) for _ in range(2)]
    linear_shared_input(
        x,
        [
            (held.parts((16,), blocks), bias, out)
            for blocks, out in zip((False, True), outs, strict=True)
        ],
    )
    assert all(torch.equal(out, want) for out in outs)


def test_bf16_rounds_as_torch_does() -> None:
    """Once, and where it adds once more for the bias: whole numbers, which both add exactly."""
    weight, x = (torch.randint(-3, 4, shape).to(BF16) for shape in ((70, 64), (9, 64)))
    bias = normal(70)
    before = normal(9, 70) * 100
    for adds in (False, True):
        by_torch = (
            before.addmm(x, weight.t()).add(bias) if adds else torch.addmm(bias, x, weight.t())
        )
        linear_shared_input(x, [((DenseRows(weight),), bias, out := before.clone())], adds)
        assert torch.equal(out, by_torch)


def test_what_is_not_finite_shows() -> None:
    weight = normal(70, 64)
    x = normal(3, 64)
    x[0, 5] = torch.nan
    weight[66, 63] = torch.inf
    out = linear(x, (DenseRows(weight),), None, torch.empty(3, 70, dtype=BF16))
    assert bool(out[0].isnan().all()) and not out[1:, 66].isfinite().any()
    assert bool(out[1:, torch.arange(70) != 66].isfinite().all())
    assert bool(linear_relu(x, (DenseRows(weight),), None, out)[0].isnan().all())


@pytest.mark.parametrize("kinds", [*([kind] for kind in KINDS), KINDS])
@pytest.mark.parametrize("has_bias", [True, False])
def test_experts_in_one_pass(kinds: Sequence[str], has_bias: bool) -> None:
    """What each gives alone, to the bit: none of some, many of one, two matrices of the same
    inputs; some experts int8 and some plain, as a quantised checkpoint may have them."""
    counts = [3, 0, 1, 70, 0, 2]
    n = 76
    gates, ups = (
        [Held(kinds[i % len(kinds)], rows, 128, n) for i in range(6)] for rows in (192, 80)
    )
    x = apart(normal(n, 128))
    biases = [[normal(rows) for _ in counts] for rows in (192, 80)]
    outs = [torch.full((n, rows + 1), torch.nan, dtype=BF16)[:, 1:] for rows in (192, 80)]
    maps = []
    for held, bias, out in zip((gates, ups), biases, outs, strict=True):
        parts = [
            h.parts((16 * (i % 3),) if i % 3 else (), blocks=i % 2 == 0) for i, h in enumerate(held)
        ]
        maps.append((parts, bias if has_bias else None, out))
    grouped_linear(x, counts, maps)
    for parts, bias, out in maps:
        for expert, rows in enumerate(x.split(counts)):
            first = sum(counts[:expert])
            want = torch.empty(len(rows), out.shape[1], dtype=BF16)
            if len(rows):
                linear(rows, parts[expert], bias[expert] if bias else None, want)
            assert torch.equal(out[first : first + len(rows)], want)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_without_the_loop(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch operations, two matrices of the same inputs, chunks of these that end within an
    expert's rows; in float32 too."""
    monkeypatch.setattr(products, "has_loop", lambda *_: False)
    monkeypatch.setattr("flexgen_h2o.kernels.int8.TOKEN_CHUNK", 16)
    counts = [3, 0, 20, 14]
    n = 37
    matrices = [[Held(kind, 70, 128, n) for _ in counts] for _ in range(2)]
    x = normal(n, 128)
    outs = [torch.empty(n, 70, dtype=BF16) for _ in matrices]
    found = list(zip(matrices, outs, strict=True))
    grouped_linear(x, counts, [([h.parts() for h in held], None, out) for held, out in found])
    for held, out in found:
        check(
            out, torch.cat([h.product(rows) for h, rows in zip(held, x.split(counts), strict=True)])
        )
    if kind == "bf16":
        wide = torch.empty(n, 70)
        grouped_linear(
            x.float(), counts, [([(DenseRows(h.weight.float()),) for h in matrices[0]], None, wide)]
        )
        assert torch.allclose(wide.double(), outs[0].double(), atol=0.3)


def test_int8_in_dtypes_that_the_loop_does_not_write() -> None:
    held = Held("int8", 70, 128)
    x = normal(5, 128).half()
    want = held.product(x)
    out = torch.empty(5, 70, dtype=torch.float16)
    linear(x, held.parts(), torch.ones(70).half(), out)
    add_linear(out, x, held.parts(), None)
    assert torch.allclose(out.double(), 2 * want + 1, rtol=2**-9, atol=2e-2)


def test_what_the_loop_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd columns, fewer than a vector, other dtypes; a CPU without the instructions, or with
    faster ones; registers of AMX that Linux does not give."""
    for x, columns in (
        (normal(1, 65), 65),
        (normal(1, 30), 30),
        (torch.zeros(1, 64), 64),
        (normal(1, 64).half(), 64),
    ):
        assert not products.supports(x, columns)
        out = torch.empty(1, 5, dtype=x.dtype)
        weight = torch.ones(5, columns, dtype=x.dtype)
        assert torch.allclose(
            linear(x, (DenseRows(weight),), None, out).float(),
            x.float().sum().expand(1, 5),
            rtol=0.02,
            atol=0.1,
        )
    monkeypatch.undo()
    old, vectors, tiles = FEATURES.values()
    sets = ((), old, vectors, vectors[:1] + tiles[:1], vectors[1:] + tiles[1:], vectors + tiles)
    for features in (*sets, (*old, "avx512bw"), (*old, "avx512bw", *vectors)):
        for module in (products, workspace):
            monkeypatch.setattr(
                module, "cpu_has", lambda feature, features=features: feature in features
            )
        for found in (None, lambda: False, lambda: True):
            with monkeypatch.context() as inner:
                inner.setattr(torch.cpu, "_init_amx", found, raising=False)
                has_amx = products.has_amx.__wrapped__()
                assert has_amx == (set(tiles) <= set(features) and found is not None and found())
                inner.setattr(products, "has_amx", lambda has_amx=has_amx: has_amx)
                for in_order in (False, True):
                    is_torch = "amx-bf16" in features and (in_order or not has_amx)
                    by_vectors = "avx512bf16" in features and not is_torch
                    by_avx2 = features == old
                    assert products.has_loop.__wrapped__(BF16, in_order) == (by_vectors or by_avx2)
                    is_int8 = "avx512vnni" in features or "avx2" in features
                    assert products.has_loop.__wrapped__(torch.uint8, in_order) == is_int8

"""The Hadamard transform of heads: the matrix by its definition, in fp64, and what it must leave as
it is."""

from __future__ import annotations

import pytest
import torch

from flexgen_h2o.kernels.hadamard import block_width, hadamard
from tests.eviction.reference import hadamard_matrix

WIDTHS = (64, 128, 80, 96, 12, 15, 256)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_multiplies_by_the_matrix(width: int, dtype: torch.dtype) -> None:
    """Rounded once; the compiled loop gives the bits of torch operations; other heads stay as they
    are."""
    given = torch.randn(300, 5, width).to(dtype)
    want = given.clone()
    exact = given[:, 1:4].double() @ hadamard_matrix(width)
    hadamard.torch(want[:, 1:4])
    hadamard(given[:, 1:4])
    assert torch.equal(given, want)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(given[:, 1:4].double(), exact, rtol=step, atol=2e-6)


@pytest.mark.parametrize("width", WIDTHS)
def test_products_stay_and_a_second_transform_restores(width: int) -> None:
    q, k = torch.randn(2, 7, 3, width).unbind(0)
    q = q.contiguous()
    k = k.contiguous()
    before = q.clone()
    products = (q * k).sum(-1)
    hadamard(q)
    hadamard(k)
    torch.testing.assert_close((q * k).sum(-1), products, rtol=1e-5, atol=1e-5)
    hadamard(q)
    torch.testing.assert_close(q, before, rtol=1e-6, atol=1e-6)


def test_a_token_is_transformed_as_it_is_among_others() -> None:
    many = torch.randn(300, 3, 64).bfloat16()
    one = many[17:18].clone()
    hadamard(many)
    hadamard(one)
    assert torch.equal(one[0], many[17])


def test_blocks() -> None:
    assert [block_width(width) for width in WIDTHS] == [64, 128, 16, 32, 4, 1, 256]


def test_heads_that_do_not_lie_side_by_side_are_refused() -> None:
    with pytest.raises(ValueError, match="hadamard: "):
        hadamard(torch.zeros(3, 2, 128)[:, :, ::2])

"""Step buffers: named slices of one buffer that keep to themselves."""

from __future__ import annotations

import pytest
import torch

from flexgen_h2o.kernels.workspace import Workspace

SIZES = {"a": 128, "b": 64, "c": 192}


def test_slices_do_not_overlap_and_keep_their_content() -> None:
    ws = Workspace(torch.zeros(sum(SIZES.values()), dtype=torch.uint8), SIZES, torch.float32)
    for i, (name, nbytes) in enumerate(SIZES.items()):
        ws.get(name, nbytes // 4).fill_(i)
    for i, (name, nbytes) in enumerate(SIZES.items()):
        assert ws.get(name, nbytes // 4).tolist() == [i] * (nbytes // 4)


def test_a_slice_is_a_view_of_any_shape_that_fits() -> None:
    buffer = torch.zeros(sum(SIZES.values()), dtype=torch.uint8)
    ws = Workspace(buffer, SIZES, torch.bfloat16)
    found = ws.get("b", 4, 2, 3)
    assert (found.shape, found.dtype, found.is_contiguous()) == ((4, 2, 3), torch.bfloat16, True)
    assert found.data_ptr() == buffer.data_ptr() + 128 == ws.get("b", 32).data_ptr()


def test_more_than_the_slice_is_an_error_not_the_next_slice() -> None:
    ws = Workspace(torch.zeros(sum(SIZES.values()), dtype=torch.uint8), SIZES, torch.float32)
    with pytest.raises(RuntimeError):
        ws.get("b", 17)
    with pytest.raises(KeyError):
        ws.get("d", 1)

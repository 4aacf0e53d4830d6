"""Workspace and values of int8 rows, for tests."""

from __future__ import annotations

import torch

from flexgen_h2o.kernels.int8 import BUFFERS, Int8Rows
from flexgen_h2o.kernels.linear import RowParts
from flexgen_h2o.kernels.workspace import Workspace


def int8_workspace(dtype: torch.dtype = torch.bfloat16) -> Workspace:
    """Room for products in int8 of the shapes here."""
    return Workspace(
        torch.empty(len(BUFFERS) * 2**16, dtype=torch.uint8), dict.fromkeys(BUFFERS, 2**16), dtype
    )


def int8_values(parts: RowParts) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers (n, columns) that int8 rows stand for, and their scales (n, 1)."""
    numbers = []
    scales = []
    for part in parts:
        assert isinstance(part, Int8Rows)
        numbers.append(torch.empty(len(part), part.columns))
        part.look_up(torch.arange(len(part)), numbers[-1])
        scales.append(part.scales)
    return torch.cat(numbers), torch.cat(scales).unsqueeze(1)

"""Named step buffers, taken once and reused by every layer and micro-batch: no allocation in the loop."""

from __future__ import annotations

import math

import torch


class Workspace:
    """Views of one buffer. `sizes`: bytes of each named slice; `buffer`: uint8 of at least their sum, 64-aligned."""

    def __init__(self, buffer: torch.Tensor, sizes: dict[str, int], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._slices: dict[str, torch.Tensor] = {}
        start = 0
        for name, nbytes in sizes.items():
            self._slices[name] = buffer[start : start + nbytes]
            start += nbytes

    def get(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The slice `name` as a tensor of `shape`, in the compute dtype by default; its last content is still there."""
        dtype = dtype or self.dtype
        nbytes = math.prod(shape) * dtype.itemsize
        return self._slices[name][:nbytes].view(dtype).view(shape)

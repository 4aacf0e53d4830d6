"""Activations by the name that configs give them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from flexgen_h2o.errors import UsageError
from flexgen_h2o.kernels.gated import silu_gated
from flexgen_h2o.kernels.linear import RowParts, linear, linear_relu

Activation = Callable[[torch.Tensor], torch.Tensor]

_TANH_GELU = partial(F.gelu, approximate="tanh")
# They may change their argument in place. gelu_new and gelu_fast write the same tanh formula in other words.
ACTIVATIONS: dict[str, Activation] = {
    "relu": torch.relu_, "gelu": F.gelu, "gelu_new": _TANH_GELU, "gelu_fast": _TANH_GELU,
    "gelu_pytorch_tanh": _TANH_GELU, "silu": partial(F.silu, inplace=True),
}  # fmt: skip


def activated(
    name: str, x: torch.Tensor, weight: RowParts, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """activation(x W^T + bias), (rows, sum out_i), in `out` or elsewhere; the shapes as of kernels.linear.linear."""
    if name == "relu":
        return linear_relu(x, weight, bias, out)
    return ACTIVATIONS[name](linear(x, weight, bias, out))


def gated(name: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """activation(gate) x up, in the memory of `gate`. gate, up: (rows, width), contiguous."""
    return silu_gated(gate, up) if name == "silu" else ACTIVATIONS[name](gate).mul_(up)


def check_activation(field: str, name: object) -> str:
    """`name` if it is known; UsageError names the field."""
    if name not in ACTIVATIONS:
        raise UsageError(f"{field} {name!r} is not one of {sorted(ACTIVATIONS)}")
    return str(name)

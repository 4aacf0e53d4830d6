"""Choose between an operator's versions: in torch operations, a compiled loop, and a kernel.

An operator is written as a function in torch operations, which says what it computes and runs on
any device:

    @op
    def silu_gated(gate, up): ...

Functions with the same parameters are added to it. One calls a loop of `compiled/` that computes
the same on the CPU. Another launches a kernel of `triton/` on a card. A third checks the tensors
that these two get:

    @silu_gated.requires
    def _are_gates(gate, up): ...         # whether shapes, dtypes and strides go together

    @silu_gated.loop
    def _silu_rows(gate, up): ...         # calls `run_loop`

    @silu_gated.kernel
    def _silu_kernel(gate, up): ...       # calls `triton.launch`

    @silu_gated.example
    def _silu_calls(layers): ...          # arguments with which a model of these layers calls it

A call chooses by its first tensor, or by the one that `op_on` names: the kernel on a card with
Triton, the loop for fp32 and bf16 on the CPU, and torch operations for everything else. An operator
that is added with `kernel_if` or `loop_if` has a rule of its own, which replaces this one.

If the check of `requires` returns False for a loop or a kernel, the call raises ValueError. It does
not fall back to torch operations.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial, update_wrapper
from importlib import import_module
from types import MethodType
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from flexgen_h2o.core.packing import KVPacking
from flexgen_h2o.kernels import triton
from flexgen_h2o.kernels.workspace import element_of, mismatch, parallel_rows

P = ParamSpec("P")
R = TypeVar("R")
OPERATORS: list[Any] = []  # all that are imported, in the order of their definition
LOOP_DTYPES = (torch.float32, torch.bfloat16)  # as in workspace.is_compiled, without its call


@dataclass(frozen=True)
class Layers:
    """Describe the layers of a model whose operators are warmed up (warm_up.py)."""

    device: torch.device
    dtype: torch.dtype
    hidden: int = 64
    heads: int = 1
    kv_heads: int = 1
    width: int = 64  # numbers of a head
    pairs: int = 0  # of rotary embeddings, which come with RMS norms and gated MLPs; 0: none
    scored: bool = False  # columns have scores
    per_query: bool = False  # scores are compared over the number of queries that saw their columns
    packing: KVPacking | None = None  # of the KV slots; None: slots are not packed
    rolling: bool = False  # keys are rotated when they are read
    # What queries attend to in front of slots (StepSlots.before): 0 nothing, 1 a sink without
    # values, 2 a prefix with values.
    before: Sequence[int] = (0,)

    @property
    def is_on_cpu(self) -> bool:
        return self.device.type == "cpu"

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return zeros on the device, by default in the layers' dtype."""
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)


class Operator(Generic[P, R]):
    """Compute by the version that supports the arguments.

    version: the version in torch operations. It is also the attribute `torch`.
    on: name of the parameter whose device and dtype decide. By default it is the first parameter
        that is annotated `torch.Tensor`. It must not be keyword-only.
    """

    def __init__(self, version: Callable[P, R], on: str | None = None) -> None:
        self.torch = version
        self._signature = inspect.signature(version)
        kinds = {name: one.annotation for name, one in self._signature.parameters.items()}
        self._on = on or next((name for name in kinds if kinds[name] == "torch.Tensor"), "")
        self._place = list(kinds).index(self._on) if self._on else 0
        self._loop: Callable[P, R] | None = None
        self._kernel: Callable[P, R] | None = None
        self._has_loop: Callable[..., bool] | None = None
        self._has_kernel: Callable[..., bool] | None = None
        self._fits: Callable[P, bool] | None = None
        self._calls: Callable[[Layers], Iterable[tuple[Any, ...]]] = lambda layers: ()
        update_wrapper(self, version)
        OPERATORS.append(self)

    def requires(self, fits: Callable[P, bool]) -> Callable[P, bool]:
        """Add a check of the tensors that a loop or a kernel gets. If it fails, a call raises.

        Loops and kernels read and write memory by address, without checks of bounds.
        """
        self._fits = fits
        return fits

    def loop(self, version: Callable[P, R]) -> Callable[P, R]:
        """Add the version that calls a compiled loop."""
        self._loop = version
        return version

    def loop_if(self, has_loop: Callable[..., bool]) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Add a compiled loop that is used if `has_loop` returns True for the arguments."""
        self._has_loop = has_loop
        return self.loop

    def kernel(self, version: Callable[P, R]) -> Callable[P, R]:
        """Add the version that launches kernels."""
        self._kernel = version
        return version

    def kernel_if(
        self, has_kernel: Callable[..., bool]
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Add kernels that are launched if `has_kernel` returns True for the arguments."""
        self._has_kernel = has_kernel
        return self.kernel

    def example(
        self, calls: Callable[[Layers], Iterable[tuple[Any, ...]]]
    ) -> Callable[[Layers], Iterable[tuple[Any, ...]]]:
        """Add a function that yields the arguments of calls, for `warm_up`."""
        self._calls = calls
        return calls

    def calls(self, layers: Layers) -> Iterable[tuple[Any, ...]]:
        """Yield the arguments of example calls, if there is a version that must be compiled."""
        is_compiled = (self._loop if layers.is_on_cpu else self._kernel) is not None
        return self._calls(layers) if is_compiled else ()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        tensor: Any = args[self._place] if self._place < len(args) else kwargs[self._on]
        if self._kernel is not None and (
            triton.supports(tensor)
            if self._has_kernel is None
            else self._has_kernel(*args, **kwargs)
        ):
            version = self.on_card
        elif self._loop is not None and (
            tensor.is_cpu and tensor.dtype in LOOP_DTYPES
            if self._has_loop is None
            else self._has_loop(*args, **kwargs)
        ):
            version = self._loop
        else:
            return self.torch(*args, **kwargs)
        if self._fits is not None and not self._fits(*args, **kwargs):
            given = self._signature.bind(*args, **kwargs).arguments
            tensors = {name: t for name, t in given.items() if isinstance(t, torch.Tensor)}
            raise mismatch(f"{self.torch.__name__}: {', '.join(tensors)}", *tensors.values())
        return version(*args, **kwargs)

    def on_card(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Launch the operator's kernels."""
        assert self._kernel is not None
        return self._kernel(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Make an operator in a class a method."""
        return self if instance is None else MethodType(self, instance)

    def __reduce__(self) -> str:
        """Pickle an operator as the function that it is, by name."""
        return self.torch.__qualname__


def op(version: Callable[P, R]) -> Operator[P, R]:
    """Make a function in torch operations an operator."""
    return Operator(version)


def op_on(name: str) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Return `op` for a function whose parameter `name` decides which version computes."""
    return partial(Operator, on=name)


def run_loop(name: str, dtype: torch.dtype, rows: int, row_bytes: int, *numbers: Any) -> None:
    """Run a compiled loop, FILE.FUNCTION of `compiled/`, over rows on several threads.

    The loop is called as function(element, *numbers, first, end). dtype: of its elements;
    row_bytes: see `parallel_rows`.
    """
    parallel_rows(partial(_compiled(name), element_of(dtype), *numbers), rows, row_bytes)


@cache
def _compiled(name: str) -> Callable[..., object]:
    file, _, function = name.partition(".")
    found: Callable[..., object] = getattr(
        import_module(f"flexgen_h2o.kernels.compiled.{file}"), function
    )
    return found

"""How numba compiles here, memory by address, and 2**x. Importing it imports numba (0.2 s): do so lazily.

Loops get addresses, whose tensors the caller keeps alive: no array has to be made of a bf16 tensor, and numba compiles
each loop once. They hold no lock and start no threads: `threads.parallel_rows` runs them side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

# numba's own annotations cover some of it only, and not in all versions.
_njit: Any = numba.njit
_types: Any = numba.types

# Sums may be reordered and products fused, or nothing vectorises. 'nnan' and 'ninf' are left out on purpose: they let
# the compiler assume that there is no NaN and no infinity, and a broken model must show, not turn into numbers.
FASTMATH = ("reassoc", "contract", "nsz", "arcp", "afn")
_OPTIONS = {"nogil": True, "error_model": "numpy", "fastmath": set(FASTMATH)}
_STAMP = tuple((f.name, f.stat().st_mtime_ns, f.stat().st_size) for f in sorted(Path(__file__).parent.rglob("*.py")))


def jit(function: Callable[..., Any]) -> Any:
    """numba.njit for a loop over addresses. What it compiles stays on disk where numba finds a folder to write to."""
    try:
        compiled = _njit(function, cache=True, **_OPTIONS)
    except RuntimeError:  # neither beside the source nor in the user's cache folder
        return _njit(function, **_OPTIONS)
    # By itself numba would look only at the function's own file to see whether what it kept is out of date.
    with suppress(AttributeError):
        compiled._cache._cache_file._source_stamp = _STAMP
        compiled._cache.save_overload = _saving_if_possible(compiled._cache.save_overload)
    return compiled


def _saving_if_possible(save: Callable[..., None]) -> Callable[..., None]:
    """A full disk costs the next run its time to compile, and this one nothing."""

    def saved(*arguments: Any) -> None:
        with suppress(OSError):
            save(*arguments)

    return saved


def _cast(to: Any, source: Any, emit: Callable[[Any, Any], Any]) -> Any:
    """An intrinsic that turns a value of numba type `source` into one of type `to`."""

    @intrinsic
    def cast(_context: Any, _value: Any) -> Any:
        return to(source), lambda _context, builder, _signature, arguments: emit(builder, arguments[0])

    return cast


_F32, _I32 = ir.FloatType(), ir.IntType(32)
# Memory at an address, by its elements.
floats_at = _cast(_types.CPointer(_types.float32), _types.int64, lambda b, x: b.inttoptr(x, _F32.as_pointer()))
ints_at = _cast(_types.CPointer(_types.int32), _types.int64, lambda b, x: b.inttoptr(x, _I32.as_pointer()))
bytes_at = _cast(_types.CPointer(_types.uint8), _types.int64, lambda b, x: b.inttoptr(x, ir.IntType(8).as_pointer()))
shorts_at = _cast(_types.CPointer(_types.uint16), _types.int64, lambda b, x: b.inttoptr(x, ir.IntType(16).as_pointer()))
longs_at = _cast(_types.CPointer(_types.int64), _types.int64, lambda b, x: b.inttoptr(x, ir.IntType(64).as_pointer()))
words_at = _cast(_types.CPointer(_types.uint32), _types.int64, lambda b, x: b.inttoptr(x, _I32.as_pointer()))
# The same bits, read as another type.
bits_to_float = _cast(_types.float32, _types.uint32, lambda b, x: b.bitcast(x, _F32))
float_to_bits = _cast(_types.int32, _types.float32, lambda b, x: b.bitcast(x, _I32))


def _is_float(_context: Any, number: Any) -> Any:
    """Is the type of this number a float? Known when compiled, so that a loop has one of two bodies."""
    constant = ir.Constant(ir.IntType(1), isinstance(number, _types.Float))
    return _types.boolean(number), lambda *_: constant


is_float: Any = intrinsic(_is_float)


# 2**f for |f| <= 1/2 to one part in 10**7, lowest power first; the first is 1, so that 2**0 is.
_C0, _C1, _C2, _C3, _C4, _C5 = (
    np.float32(c) for c in (1.0, 0.69314698, 0.24022242, 0.05550734, 0.00967151, 0.00132647)
)


@jit
def exp2(x):  # type: ignore[no-untyped-def]
    """2**x in fp32, to one part in 10**7. Below 2**-126 it gives 2**-126; NaN stays NaN."""
    x = np.float32(-126) if x < np.float32(-126) else x
    x = np.float32(127) if x > np.float32(127) else x
    whole = np.rint(x)
    f = x - whole
    fraction = _C0 + f * (_C1 + f * (_C2 + f * (_C3 + f * (_C4 + f * _C5))))
    return fraction * bits_to_float(np.uint32((np.int32(whole) + np.int32(127)) << np.int32(23)))


@jit
def ordered(bits):  # type: ignore[no-untyped-def]
    """Turn the bits of a float into an int32 that sorts as the float does, positive NaN last; and back again.

    The largest or smallest of integers vectorises; that of floats only if the compiler may forget about NaN.
    """
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


def is_kept() -> bool:
    """Does what is compiled stay on disk, for other processes and later ones?"""
    return getattr(getattr(exp2, "_cache", None), "cache_path", None) is not None

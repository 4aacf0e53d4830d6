"""Compile loops with numba, and define the scalar helpers of all loops.

The module imports numba (0.2 s), so import it lazily.

Loops get addresses, and the caller keeps the tensors alive. So no array has to be made of a bf16
tensor, and numba compiles each loop once. Loops hold no lock and start no threads:
`workspace.parallel_rows` runs them in parallel.

Numba compiles a function for each combination of argument types. A literal 0, as an argument or as
the value of a variable before a loop, has a type of its own; `np.int64(0)` does not. int32 and
uint64 are other types than int64.

`element` is a number whose type says what is stored at an address: uint16 stands for bf16, int16
for fp16, float32 for fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from platform import machine
from typing import Any

import numpy as np
from llvmlite import ir

from flexgen_h2o.kernels.numba_guard import numba  # import this before anything else of numba

# isort: split
from numba.extending import intrinsic

# numba annotates only a part of its functions, and not in all versions.
_njit: Any = numba.njit
_types: Any = numba.types

# Without these, sums may not be reordered and products not fused, so nothing vectorises. 'nnan' and
# 'ninf' are left out on purpose. They let the compiler assume that there is no NaN and no infinity,
# but a broken model must show and not turn into numbers.
FASTMATH = ("reassoc", "contract", "nsz", "arcp", "afn")
# No wrapper for callers in C, because there are none: it takes 5% of the compile time.
_OPTIONS = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
_ROOM = Path(__file__).parent
_SOURCES = (
    *sorted(_ROOM.rglob("*.py")),
    *(_ROOM.parent / "core" / name for name in ("packing.py", "units.py")),
)
_STAMP = tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in _SOURCES)


def jit(function: Callable[..., Any]) -> Any:
    """Compile a loop over addresses with numba.njit.

    The compiled code is cached on disk if numba finds a writable folder.
    """
    return _jitted(function, fastmath=set(FASTMATH))


def jit_rounded(function: Callable[..., Any]) -> Any:
    """Compile a function whose result must have the same bits in every loop.

    Each operation is rounded, in the order in which it is written.
    """
    return _jitted(function, fastmath=False)


def _jitted(function: Callable[..., Any], **options: Any) -> Any:
    options |= _OPTIONS
    try:
        compiled = _njit(function, cache=True, **options)
    except RuntimeError:  # no folder is writable
        return _njit(function, **options)
    # Numba compares only the function's own file with the cache. A loop also depends on the other
    # files of this folder and of core, so the stamp covers them all. A numba that keeps its stamp
    # elsewhere (core/libraries.py) would run old loops, so it gets no cache.
    file: Any = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if not hasattr(file, "_source_stamp") or not hasattr(compiled._cache, "save_overload"):
        return _njit(function, **options)
    file._source_stamp = _STAMP
    compiled._cache.save_overload = _ignoring_full_disk(compiled._cache.save_overload)
    return compiled


def _ignoring_full_disk(save: Callable[..., None]) -> Callable[..., None]:
    """Make `save` fail silently if the disk is full; the next run compiles again."""

    def saved(*arguments: Any) -> None:
        with suppress(OSError):
            save(*arguments)

    return saved


def _cast(to: Any, source: Any, emit: Callable[[Any, Any], Any]) -> Any:
    """Return an intrinsic that converts a value of numba type `source` to type `to`."""

    @intrinsic
    def cast(_context: Any, _value: Any) -> Any:
        return to(source), lambda _context, builder, _signature, arguments: emit(
            builder, arguments[0]
        )

    return cast


_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_HALF = ir.HalfType()
_I16 = ir.IntType(16)


def _pointer(to: Any, kind: Any) -> Any:
    """Return an intrinsic that makes an array of the memory at an address."""
    return _cast(_types.CPointer(to), _types.int64, lambda b, x: b.inttoptr(x, kind.as_pointer()))


def records_at(record: type) -> Any:
    """Return an intrinsic that makes an array of the records at an address.

    record: a NamedTuple of ints, each stored as int64. A loop reads its fields by name.
    """
    count = len(record._fields)  # type: ignore[attr-defined]
    kind = _types.NamedUniTuple(_types.int64, count, record)
    return _pointer(kind, ir.ArrayType(_I64, count))


floats_at = _pointer(_types.float32, _F32)
ints_at = _pointer(_types.int32, _I32)
longs_at = _pointer(_types.int64, _I64)
bytes_at = _pointer(_types.uint8, ir.IntType(8))
shorts_at = _pointer(_types.uint16, ir.IntType(16))
words_at = _pointer(_types.uint32, _I32)
# Read the same bits as another type.
bits_to_float = _cast(_types.float32, _types.uint32, lambda b, x: b.bitcast(x, _F32))
float_to_bits = _cast(_types.int32, _types.float32, lambda b, x: b.bitcast(x, _I32))
half_to_float = _cast(
    _types.float32, _types.uint16, lambda b, x: b.fpext(b.bitcast(x, _HALF), _F32)
)
float_to_half = _cast(
    _types.uint16, _types.float32, lambda b, x: b.bitcast(b.fptrunc(x, _HALF), _I16)
)


def num_planes(element: Any) -> int:
    """Return how many numbers a 4-byte word holds, for the numba type of an element."""
    return 2 if element in (_types.uint16, _types.int16) else 1


def known(meaning: Callable[[Any], bool | int]) -> Any:
    """Return an intrinsic that returns `meaning` of the type of a number.

    The result is known at compile time, so a loop is compiled with only one of two bodies.
    """

    def run(_context: Any, kind: Any) -> Any:
        value = meaning(kind)
        is_bool = isinstance(value, bool)
        constant = ir.Constant(ir.IntType(1) if is_bool else _I64, value)
        return (_types.boolean if is_bool else _types.int64)(kind), lambda *_: constant

    return intrinsic(run)


planes: Any = known(num_planes)
is_half: Any = known(lambda element: bool(element == _types.int16))

LOG2_E = np.float32(1.4426950408889634)
LN_2 = np.float32(0.6931471805599453)
HIGH = np.uint32(0xFFFF0000)  # mask of the upper half of a word
_QUIET = np.uint32(0x400000)  # a bit of a NaN; if it is set, the upper half alone is a NaN too
# Coefficients of 2**f for |f| <= 1/2, exact to one part in 10**7, lowest power first. The first is
# 1, so that 2**0 is exactly 1.
_C0, _C1, _C2, _C3, _C4, _C5 = (
    np.float32(c) for c in (1.0, 0.69314698, 0.24022242, 0.05550734, 0.00967151, 0.00132647)
)


@jit
def keep(array):  # type: ignore[no-untyped-def]
    """Keep an array alive up to this call.

    Use it if only the array's address is used: numba frees an array after its last use by name.
    """


@jit
def exp2(x):  # type: ignore[no-untyped-def]
    """Return 2**x in fp32, to one part in 10**7.

    Below 2**-126 the result is 2**-126; NaN stays NaN.
    """
    x = np.float32(-126) if x < np.float32(-126) else x
    x = np.float32(127) if x > np.float32(127) else x
    whole = np.rint(x)
    f = x - whole
    fraction = _C0 + f * (_C1 + f * (_C2 + f * (_C3 + f * (_C4 + f * _C5))))
    return fraction * bits_to_float(np.uint32((np.int32(whole) + np.int32(127)) << np.int32(23)))


@jit
def ordered(bits):  # type: ignore[no-untyped-def]
    """Map the bits of a float to an int32 that sorts as the float does, and back again.

    A positive NaN sorts last. The compiler vectorises the maximum or minimum of integers. It
    vectorises that of floats only if it may ignore NaN.
    """
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@jit
def to_bf16(x):  # type: ignore[no-untyped-def]
    """Return x rounded to bf16 (half to even) as bits in the upper half of a word.

    The lower half has no meaning.
    """
    bits = np.uint32(float_to_bits(x))
    return (
        bits | _QUIET
        if x != x
        else bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    )


@jit
def to_bf16_towards(x, up):  # type: ignore[no-untyped-def]
    """Return the nearest bf16 number that is not below x (`up`) or not above x, with lower half 0.

    NaN stays NaN.
    """
    bits = np.uint32(float_to_bits(x))
    if x != x:
        bits |= _QUIET
    elif (x < np.float32(0)) != up:  # round away from zero
        bits += np.uint32(0xFFFF)
    return np.uint32(bits & HIGH)


@jit
def number_at(element, at, i):  # type: ignore[no-untyped-def]
    """Return number i at address `at`, in fp32."""
    if is_half(element):
        return half_to_float(shorts_at(at)[i])
    if planes(element) == 2:
        return bits_to_float(np.uint32(shorts_at(at)[i]) << np.uint32(16))
    return floats_at(at)[i]


@jit
def set_number(element, at, i, x):  # type: ignore[no-untyped-def]
    """Write x, rounded to the element type, as number i at address `at`."""
    if is_half(element):
        shorts_at(at)[i] = float_to_half(x)
    elif planes(element) == 2:
        shorts_at(at)[i] = np.uint16(to_bf16(x) >> np.uint32(16))
    else:
        floats_at(at)[i] = x


@jit
def rounded(element, x):  # type: ignore[no-untyped-def]
    """Return x as it would be read back after it was stored.

    It is rounded to bf16 or fp16 if elements are.
    """
    if is_half(element):
        return half_to_float(float_to_half(x))
    return bits_to_float(to_bf16(x) & HIGH) if planes(element) == 2 else x


@jit
def decoded(code, ends):  # type: ignore[no-untyped-def]
    """Return the number that a code stands for.

    ends: of the code's group; the scale is in the lower half, and the least value in the upper
    half.
    """
    scale = bits_to_float(np.uint32(ends << np.uint32(16)))
    least = bits_to_float(np.uint32(ends & HIGH))
    return np.float32(np.int32(code)) * scale + least


# ---- Threads that wait for each other awake, because sleeping and waking take as long as a small
# loop


def _emit_look(builder: Any, at: Any) -> Any:
    # the pause leaves the core to its other hardware thread for some tens of cycles
    if machine() in ("x86_64", "AMD64"):
        pause = builder.module.declare_intrinsic(
            "llvm.x86.sse2.pause", (), ir.FunctionType(ir.VoidType(), ())
        )
        builder.call(pause, ())
    return builder.load_atomic(builder.inttoptr(at, _I64.as_pointer()), "acquire", 8)


def _tell(_context: Any, at: Any, number: Any) -> Any:
    """Store the number at the address, so that its readers see all earlier writes too."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        address, value = arguments
        builder.store_atomic(value, builder.inttoptr(address, _I64.as_pointer()), "release", 8)
        return value

    return _types.int64(_types.int64, _types.int64), emit


_look = _cast(_types.int64, _types.int64, _emit_look)
_tell_number: Any = intrinsic(_tell)


@jit
def wait_for_change(at, number, looks):  # type: ignore[no-untyped-def]
    """Wait until another number is at the address.

    Another thread writes it with `signal_and_wait`.

    Returns False if the number has not changed after `looks` looks.
    """
    looked = 0
    while looked < looks and _look(at) == number:
        looked += 1
    return looked < looks


@jit
def signal_and_wait(to, at, number, looks):  # type: ignore[no-untyped-def]
    """Write the number to the address `to`, then `wait_for_change` it at the address `at`.

    Meanwhile the interpreter's lock is not held. Otherwise a thread that finds the number would
    sleep until it gets the lock.
    """
    _tell_number(to, number)
    return wait_for_change(at, number, looks)


def cache_folder() -> Path | None:
    """Return the folder in which compiled code is cached for other processes and later runs.

    Returns None if there is no such folder.
    """
    folder = getattr(getattr(exp2, "_cache", None), "cache_path", None)
    return None if folder is None else Path(folder)

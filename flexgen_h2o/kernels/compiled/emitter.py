"""Emit LLVM vector code as arithmetic on values, in intrinsics that numba's loops call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils as _cgutils
from numba.extending import intrinsic

from flexgen_h2o.kernels.jit import num_planes

cgutils: Any = _cgutils  # the module, without type annotations
F32 = ir.FloatType()
I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
LANES = 16
INTS = ir.VectorType(I32, LANES)
FLOATS = ir.VectorType(F32, LANES)
SHORTS = ir.VectorType(I16, LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)
# As in jit.FASTMATH, the compiler may not assume that there is no NaN.
_FLAGS = ("contract", "reassoc", "nsz")


def _operator(of_integers: str, of_floats: str = "") -> Callable[[Value, Any], Value]:
    def emit(self: Value, other: Any) -> Value:
        is_float = getattr(self.type, "element", self.type) == F32
        return self.emit(of_floats if is_float else of_integers, other)

    return emit


def _comparison(sign: str) -> Callable[[Value, Any], Value]:
    def emit(self: Value, other: Any) -> Value:
        is_float = getattr(self.type, "element", self.type) == F32
        compare = self.builder.fcmp_ordered if is_float else self.builder.icmp_signed
        return Value(self.builder, compare(sign, self.ir, self.like(other)))

    return emit


class Value:
    """Stand for an LLVM value. Operators emit instructions.

    Addresses and counts are int64. Integers are signed, but >> fills with zeros. Sums and products
    of floats are rounded one by one. A Python number stands for a constant, in all lanes of a
    vector. Other methods are the instructions of llvmlite's IRBuilder: `x.bitcast(kind)`.
    """

    def __init__(self, builder: Any, value: Any) -> None:
        self.builder = builder  # llvmlite.ir.IRBuilder of the function in which code is emitted
        self.ir = value
        self.type = value.type

    def like(self, other: Any) -> Any:
        """Return what the IRBuilder takes for a Value, a type, or a number of this type."""
        if isinstance(other, int | float):
            return constant(self.type, other)
        return getattr(other, "ir", other)

    def emit(self, instruction: str, *others: Any) -> Value:
        found = getattr(self.builder, instruction)(self.ir, *map(self.like, others))
        return Value(self.builder, found)

    def __getattr__(self, instruction: str) -> Callable[..., Value]:
        return lambda *others: self.emit(instruction, *others)

    __add__ = __radd__ = _operator("add", "fadd")
    __sub__ = _operator("sub", "fsub")
    __mul__ = __rmul__ = _operator("mul", "fmul")
    __floordiv__ = _operator("sdiv")
    __and__ = _operator("and_")
    __or__ = _operator("or_")
    __lshift__ = _operator("shl")
    __rshift__ = _operator("lshr")
    __lt__ = _comparison("<")
    __gt__ = _comparison(">")
    __ge__ = _comparison(">=")
    __eq__ = _comparison("==")  # type: ignore[assignment]
    __ne__ = _comparison("!=")  # type: ignore[assignment]

    def shuffle(self, other: Value, lanes: list[int]) -> Value:
        """Return these lanes of the two vectors, which are counted through both."""
        places = ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
        return Value(self.builder, self.builder.shuffle_vector(self.ir, other.ir, places))

    def take(self, lanes: list[int]) -> Value:
        """Return these lanes of the vector."""
        return self.shuffle(self, lanes)


def constant(kind: Any, number: Any) -> Any:
    """Return an LLVM constant; in a vector all lanes are equal."""
    return ir.Constant(kind, [number] * kind.count if hasattr(kind, "count") else number)


class Variable:
    """Hold a value that changes in a loop. LLVM keeps it in a register if there is one."""

    def __init__(self, start: Value) -> None:
        self.type = start.type
        self._builder = start.builder
        self._place = cgutils.alloca_once(self._builder, start.type)
        self.value = start

    @property
    def value(self) -> Value:
        return Value(self._builder, self._builder.load(self._place))

    @value.setter
    def value(self, value: Value) -> None:
        self._builder.store(value.ir, self._place)


@dataclass(frozen=True)
class Emitter:
    """Emit loops, loads, stores, and the common instructions of vector code."""

    builder: Any

    def constant(self, kind: Any, number: Any) -> Value:
        return Value(self.builder, constant(kind, number))

    def vector(self, element: Any, numbers: list[Any]) -> Value:
        """Return a vector of constants."""
        return Value(self.builder, ir.Constant(ir.VectorType(element, len(numbers)), numbers))

    def pointer(self, address: Value, kind: Any) -> Any:
        """Return a pointer to an address, which may be an offset from 0.

        Numba optimises a function that others call twice. The second time, it gets what LLVM's code
        generator has left, where addresses are offsets from one of their terms. If that term is
        known to be 0, as the first index of a loop is, LLVM takes it for a null pointer. It then
        drops the loads and stores there. The attribute forbids that.
        """
        # llvmlite does not list this attribute
        set.add(self.builder.function.attributes, "null_pointer_is_valid")
        return self.builder.inttoptr(address.ir, kind.as_pointer())

    def load(self, address: Value, kind: Any, align: int = 4) -> Value:
        return Value(self.builder, self.builder.load(self.pointer(address, kind), align=align))

    def store(self, value: Value, address: Value, align: int = 4) -> None:
        self.builder.store(value.ir, self.pointer(address, value.type), align=align)

    def once_more(self, address: Value) -> Value:
        """Return the address as a value that LLVM takes for another address.

        So the content is loaded again and not kept in registers. If registers are full of sums,
        keeping the content would spill them to the stack.
        """
        kind = ir.FunctionType(I64, [I64])
        return Value(self.builder, self.builder.asm(kind, "", "=r,0", [address.ir], False))

    def room(self, nbytes: int) -> Value:
        """Return the address of `nbytes` bytes of the function's stack, at a multiple of 64."""
        # numba's own helper would fill the memory with zeros, word by word
        with self.builder.goto_entry_block():
            memory = self.builder.alloca(ir.ArrayType(I8, nbytes))
            memory.align = 64
        return Value(self.builder, self.builder.ptrtoint(memory, I64))

    def add(self, a: Value, b: Value) -> Value:
        """Add floats that the compiler may reorder and fuse with products."""
        return Value(self.builder, self.builder.fadd(a.ir, b.ir, flags=_FLAGS))

    def multiply(self, a: Value, b: Value) -> Value:
        return Value(self.builder, self.builder.fmul(a.ir, b.ir, flags=_FLAGS))

    def multiply_add(self, a: Value, b: Value, to: Value) -> Value:
        return self.add(to, self.multiply(a, b))

    def spread(self, values: list[Value], lanes: int) -> Value:
        """Return a vector in which each of the values fills `lanes` adjacent lanes."""
        few = ir.Constant(ir.VectorType(values[0].type, len(values)), ir.Undefined)
        for i, value in enumerate(values):
            few = self.builder.insert_element(few, value.ir, ir.Constant(I32, i))
        return Value(self.builder, few).take([i // lanes for i in range(lanes * len(values))])

    def call(self, name: str, result: Any, *arguments: Any) -> Value:
        """Emit the LLVM intrinsic of this name (without "llvm.")."""
        given = [getattr(argument, "ir", argument) for argument in arguments]
        kind = ir.FunctionType(result, [argument.type for argument in given])
        function = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.{name}")
        return Value(self.builder, self.builder.call(function, given))

    def call_by_halves(self, name: str, result: Any, *vectors: Value) -> Value:
        """Emit an intrinsic on both halves of the vectors, and join the results.

        result: type of a half.
        """
        size = vectors[0].type.count // 2
        halves = (list(range(size)), list(range(size, 2 * size)))
        return join([self.call(name, result, *(v.take(half) for v in vectors)) for half in halves])

    def prefetch(self, address: Value, keep: int = 3) -> None:
        """Prefetch the cache line at `address`, which need not exist.

        keep: 3 for the nearest cache, 2 for the next one.
        """
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        function = self.builder.module.declare_intrinsic("llvm.prefetch", [I8.as_pointer()], kind)
        # for reading (0), and the data cache (1)
        numbers = [ir.Constant(I32, x) for x in (0, keep, 1)]
        self.builder.call(function, [self.pointer(address, I8), *numbers])

    @contextmanager
    def loop(self, count: Any) -> Iterator[Value]:
        """Emit a loop. The context manager's value is the number of the iteration."""
        times = ir.Constant(I64, count) if isinstance(count, int) else count.ir
        with cgutils.for_range(self.builder, times, intp=I64) as loop:
            yield Value(self.builder, loop.index)

    def unrolled(self, first: Value, count: Value, times: int) -> Iterator[Value]:
        """Emit a loop from `first` on, unrolled `times` times, and a loop over the rest.

        Yields each iteration for which the caller emits code.
        """
        whole = count // times
        with self.loop(whole) as index:
            begin = first + index * times
            for i in range(times):
                yield begin + i
        done = whole * times
        with self.loop(count - done) as index:
            yield first + done + index

    def when(self, condition: Value) -> Any:
        """Return a context manager that emits code that runs if the condition is true."""
        return self.builder.if_then(condition.ir)

    def choose(
        self, condition: Value, values: tuple[int, int], emit: Callable[[int], None]
    ) -> None:
        """Emit code for both values.

        The code for the first runs if the condition is true, that for the second otherwise.
        """
        with self.builder.if_else(condition.ir) as branches:
            for branch, value in zip(branches, values, strict=True):
                with branch:
                    emit(value)

    def variables(self, kind: Any, rows: int, columns: int) -> list[list[Variable]]:
        """Return rows x columns variables that begin as zero."""
        zero = self.constant(kind, 0)
        return [[Variable(zero) for _ in range(columns)] for _ in range(rows)]

    def load_each(self, totals: list[list[Variable]], places: list[list[Value]]) -> None:
        """Load variables from their places."""
        for total, place in _pairs(totals, places):
            total.value = self.load(place, total.type)

    def store_each(self, totals: list[list[Variable]], places: list[list[Value]]) -> None:
        for total, place in _pairs(totals, places):
            self.store(total.value, place)


def _pairs(totals: list[list[Variable]], places: list[list[Value]]) -> Iterator[Any]:
    for of_row in zip(totals, places, strict=True):
        yield from zip(*of_row, strict=True)


def least(a: Value, b: Value) -> Value:
    """Return the smaller one of two counts."""
    return (a < b).select(a, b)


def parts(count: Value, size: int) -> Value:
    """Return how many parts of this size a count has; the last part may be incomplete."""
    return (count + (size - 1)) // size


def join(vectors: list[Value]) -> Value:
    """Concatenate vectors; their number must be a power of two."""
    while len(vectors) > 1:
        lanes = list(range(2 * vectors[0].type.count))
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [a.shuffle(b, lanes) for a, b in pairs]
    return vectors[0]


def transposed(lines: list[Value]) -> list[Value]:
    """Transpose 16 vectors of 16 words: word i of line j becomes word j of line i."""
    even, odd = (
        [q + i for q in firsts for i in range(4)] for firsts in ((0, 8, 16, 24), (4, 12, 20, 28))
    )
    found: list[list[Value]] = [[], [], [], []]
    for i in range(4):
        for quarter, half in enumerate((even, odd, even, odd)):
            near, far = (lines[i + j].shuffle(lines[i + j + 4], half) for j in (0, 8))
            found[quarter].append(near.shuffle(far, odd if quarter > 1 else even))
    return [column for quarter in found for column in across(quarter)]


def across(lines: list[Value]) -> list[Value]:
    """Transpose each quarter of four vectors of 4 x 4 words.

    Word i of each quarter of line j becomes word j of that quarter of line i.
    """
    low, high, near, far = (
        [quarter + i for quarter in range(0, LANES, 4) for i in some]
        for some in ((0, 16, 1, 17), (2, 18, 3, 19), (0, 1, 16, 17), (2, 3, 18, 19))
    )
    found = []
    for half in (low, high):
        first, second = (lines[i].shuffle(lines[i + 1], half) for i in (0, 2))
        found += [first.shuffle(second, near), first.shuffle(second, far)]
    return found


# ---- numbers as they are stored (element: the numba type of jit.py), and vectors of fp32


def bf16_pairs(words: Value) -> tuple[Value, Value]:
    """Split a vector of words with two bf16 each into two fp32 vectors.

    The first has the lower halves, the second the upper halves.
    """
    floats = ir.VectorType(F32, words.type.count)
    return (words << 16).bitcast(floats), (words & 0xFFFF0000).bitcast(floats)


def load_numbers(e: Emitter, element: Any, at: Value) -> Value:
    """Load a vector of numbers at an address, in fp32 (as jit.number_at)."""
    if num_planes(element) == 1:
        return e.load(at, FLOATS)
    return widened(element, e.load(at, SHORTS, align=2))


def widened(element: Any, kept: Value) -> Value:
    if num_planes(element) == 1:
        return kept
    if element == types.int16:
        return kept.bitcast(_HALVES).fpext(FLOATS)
    return (kept.zext(INTS) << 16).bitcast(FLOATS)


def rounded(element: Any, value: Value) -> Value:
    """Round a vector of fp32 to its stored form: fp32, or 16 bits each (as jit.set_number)."""
    if num_planes(element) == 1:
        return value
    if element == types.int16:
        return value.fptrunc(_HALVES).bitcast(SHORTS)
    bits = value.bitcast(INTS)
    is_nan = Value(value.builder, value.builder.fcmp_unordered("uno", value.ir, value.ir))
    return (is_nan.select(bits | 0x400000, near_bf16(bits)) >> 16).trunc(SHORTS)


def near_bf16(bits: Value) -> Value:
    """Return the bits of floats rounded to bf16 in the upper halves; not for NaN."""
    return bits + 0x7FFF + ((bits >> 16) & 1)


# ---- intrinsics


def _checked(numbers: Any) -> Any:
    """Return the types of a tuple of numbers, or raise TypeError if one has not 64 bits.

    The numbers are not converted, so they must have 64 bits already.
    """
    if not all(
        getattr(kind, "bitwidth", 0) == 64 and isinstance(kind, types.Integer) for kind in numbers
    ):
        raise TypeError(f"vector code takes numbers of 64 bits, not {numbers}")
    return numbers


def _generator(emit: Callable[..., None]) -> Callable[..., Any]:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        numbers = cgutils.unpack_tuple(builder, arguments[-1])
        emit(Emitter(builder), *(Value(builder, number) for number in numbers))
        return cgutils.get_null_value(I64)

    return generate


def room(nbytes: int) -> Any:
    """Return an intrinsic that gives the address of `nbytes` bytes of the loop's own stack."""

    @intrinsic
    def run(_context: Any) -> Any:
        return types.int64(), lambda _context, builder, *_: Emitter(builder).room(nbytes).ir

    return run


def emitted(emit: Callable[..., None]) -> Any:
    """Return an intrinsic with one argument, a tuple of numbers.

    It runs the code that emit(emitter, *numbers) emits.
    """

    @intrinsic
    def run(_context: Any, numbers: Any) -> Any:
        return types.int64(_checked(numbers)), _generator(emit)

    return run


def emitted_by_type(emit: Callable[..., None]) -> Any:
    """Return an intrinsic of a number whose type has a meaning, and of a tuple of numbers.

    It runs the code that emit(emitter, type, *numbers) emits.
    """

    @intrinsic
    def run(_context: Any, kind: Any, numbers: Any) -> Any:
        generator = _generator(lambda e, *values: emit(e, kind, *values))
        return types.int64(kind, _checked(numbers)), generator

    return run


prefetch = emitted(Emitter.prefetch)

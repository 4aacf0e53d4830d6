"""Emit LLVM vector code for compiled loops: instructions, and intrinsics for numba's loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils as _cgutils
from numba.extending import intrinsic

cgutils: Any = _cgutils  # the module, without type annotations
F32 = ir.FloatType()
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
# As in jit.FASTMATH, the compiler may not assume that there is no NaN.
_FLAGS = ("contract", "reassoc", "nsz")


@dataclass(frozen=True)
class Emitter:
    """Emit the common instructions of vector code. Addresses and counts are int64."""

    builder: Any  # llvmlite.ir.IRBuilder of the function in which code is emitted

    def number(self, value: int) -> Any:
        return ir.Constant(I64, value)

    def constant(self, kind: Any, value: Any) -> Any:
        """Return a vector with `value` in all lanes."""
        return ir.Constant(kind, [value] * kind.count)

    def onward(self, address: Any, words: Any) -> Any:
        """Return `address` moved forward by a number of 4-byte words."""
        return self.builder.add(address, self.builder.mul(words, self.number(4)))

    def pointer(self, address: Any, kind: Any) -> Any:
        """Return a pointer to an address, which may be an offset from 0.

        Numba optimises a function that others call twice. The second time, it gets what LLVM's code
        generator has left, where addresses are offsets from one of their terms. If that term is
        known to be 0, as the first index of a loop is, LLVM takes it for a null pointer. It then
        drops the loads and stores there. The attribute forbids that.
        """
        # llvmlite does not list this attribute
        set.add(self.builder.function.attributes, "null_pointer_is_valid")
        return self.builder.inttoptr(address, kind.as_pointer())

    def load(self, address: Any, kind: Any, align: int = 4) -> Any:
        return self.builder.load(self.pointer(address, kind), align=align)

    def once_more(self, address: Any) -> Any:
        """Return the address as a value that LLVM takes for another address.

        So the content is loaded again and not kept in registers. If registers are full of sums,
        keeping the content would spill them to the stack.
        """
        return self.builder.asm(ir.FunctionType(I64, [I64]), "", "=r,0", [address], False)

    def join(self, vectors: list[Any]) -> Any:
        """Concatenate vectors; their number must be a power of two."""
        while len(vectors) > 1:
            size = list(range(2 * vectors[0].type.count))
            vectors = [
                self.shuffle(a, b, size) for a, b in zip(vectors[::2], vectors[1::2], strict=True)
            ]
        return vectors[0]

    def store(self, value: Any, address: Any, align: int = 4) -> None:
        self.builder.store(value, self.pointer(address, value.type), align=align)

    def least(self, a: Any, b: Any) -> Any:
        """Return the smaller one of two counts."""
        return self.builder.select(self.builder.icmp_signed("<", a, b), a, b)

    def parts(self, count: Any, size: int) -> Any:
        """Return how many parts of this size a count has; the last part may be incomplete."""
        return self.builder.sdiv(self.builder.add(count, self.number(size - 1)), self.number(size))

    def bf16_pairs(self, words: Any) -> tuple[Any, Any]:
        """Split a vector of words with two bf16 each into two fp32 vectors.

        The first has the lower halves, the second the upper halves.
        """
        b = self.builder
        floats = ir.VectorType(F32, words.type.count)
        low = b.shl(words, self.constant(words.type, 16))
        high = b.and_(words, self.constant(words.type, 0xFFFF0000))
        return b.bitcast(low, floats), b.bitcast(high, floats)

    def add(self, a: Any, b: Any) -> Any:
        return self.builder.fadd(a, b, flags=_FLAGS)

    def multiply(self, a: Any, b: Any) -> Any:
        return self.builder.fmul(a, b, flags=_FLAGS)

    def multiply_add(self, a: Any, b: Any, to: Any) -> Any:
        return self.add(to, self.multiply(a, b))

    def shuffle(self, a: Any, b: Any, lanes: list[int]) -> Any:
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))

    def spread(self, values: list[Any], lanes: int) -> Any:
        """Return a vector in which each of the values fills `lanes` adjacent lanes."""
        few = ir.Constant(ir.VectorType(values[0].type, len(values)), ir.Undefined)
        for i, value in enumerate(values):
            few = self.builder.insert_element(few, value, ir.Constant(I32, i))
        return self.shuffle(few, few, [lane // lanes for lane in range(lanes * len(values))])

    def call(self, name: str, result: Any, *arguments: Any) -> Any:
        """Emit the LLVM intrinsic of this name (without "llvm.")."""
        kind = ir.FunctionType(result, [value.type for value in arguments])
        return self.builder.call(
            cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.{name}"), arguments
        )

    def call_by_halves(self, name: str, result: Any, *vectors: Any) -> Any:
        """Emit an intrinsic on both halves of the vectors, and join the results.

        result: type of a half.
        """
        size = vectors[0].type.count // 2
        halves = (list(range(size)), list(range(size, 2 * size)))
        return self.join(
            [
                self.call(name, result, *(self.shuffle(v, v, half) for v in vectors))
                for half in halves
            ]
        )

    def loop(self, count: Any) -> Any:
        """Return a context manager that emits a loop. The `index` of its value is the iteration."""
        return cgutils.for_range(self.builder, count, intp=I64)

    def unrolled(self, first: Any, count: Any, times: int) -> Iterator[Any]:
        """Emit a loop from `first` on, unrolled `times` times, and a loop over the rest.

        Yields each iteration for which the caller emits code.
        """
        b = self.builder
        whole = b.sdiv(count, self.number(times))
        with self.loop(whole) as loop:
            begin = b.add(first, b.mul(loop.index, self.number(times)))
            for i in range(times):
                yield b.add(begin, self.number(i))
        done = b.mul(whole, self.number(times))
        with self.loop(b.sub(count, done)) as loop:
            yield b.add(b.add(first, done), loop.index)

    def variables(self, kind: Any, rows: int, columns: int) -> list[list[Any]]:
        """Return rows x columns vectors that stay in registers during a loop and begin as zero."""
        found = [
            [cgutils.alloca_once(self.builder, kind) for _ in range(columns)] for _ in range(rows)
        ]
        for row in found:
            for variable in row:
                self.builder.store(self.constant(kind, 0), variable)
        return found

    def room(self, nbytes: int) -> Any:
        """Return the address of `nbytes` bytes of the function's stack, at a multiple of 64."""
        # numba's own helper would fill the memory with zeros, word by word
        with self.builder.goto_entry_block():
            memory = self.builder.alloca(ir.ArrayType(ir.IntType(8), nbytes))
            memory.align = 64
        return self.builder.ptrtoint(memory, I64)

    def transposed(self, lines: list[Any]) -> list[Any]:
        """Transpose 16 vectors of 16 words: word i of line j becomes word j of line i."""
        even, odd = (
            [q + i for q in firsts for i in range(4)]
            for firsts in ((0, 8, 16, 24), (4, 12, 20, 28))
        )
        found: list[list[Any]] = [[], [], [], []]
        for i in range(4):
            for quarter, half in enumerate((even, odd, even, odd)):
                near, far = (self.shuffle(lines[i + j], lines[i + j + 4], half) for j in (0, 8))
                found[quarter].append(self.shuffle(near, far, odd if quarter > 1 else even))
        return [column for quarter in found for column in self.across(quarter)]

    def across(self, lines: list[Any]) -> list[Any]:
        """Transpose each quarter of four vectors of 4 x 4 words.

        Word i of each quarter of line j becomes word j of that quarter of line i.
        """
        quarters = range(0, 16, 4)
        low, high = (
            [q + i for q in quarters for i in some] for some in ((0, 16, 1, 17), (2, 18, 3, 19))
        )
        near, far = (
            [q + i for q in quarters for i in some] for some in ((0, 1, 16, 17), (2, 3, 18, 19))
        )
        found = []
        for half in (low, high):
            first, second = (self.shuffle(lines[i], lines[i + 1], half) for i in (0, 2))
            found += [self.shuffle(first, second, near), self.shuffle(first, second, far)]
        return found

    def prefetch(self, address: Any, keep: int = 3) -> None:
        """Prefetch the cache line at `address`, which need not exist.

        keep: 3 for the nearest cache, 2 for the next one.
        """
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
        function = self.builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        # for reading (0), and the data cache (1)
        numbers = [ir.Constant(I32, x) for x in (0, keep, 1)]
        self.builder.call(function, [self.pointer(address, ir.IntType(8)), *numbers])

    def choose(self, condition: Any, values: tuple[int, int], emit: Callable[[int], None]) -> None:
        """Emit code for both values.

        The code for the first runs if the condition is true, that for the second otherwise.
        """
        with self.builder.if_else(condition) as branches:
            for branch, value in zip(branches, values, strict=True):
                with branch:
                    emit(value)


def each(totals: list[list[Any]], places: list[list[Any]]) -> list[tuple[Any, Any]]:
    """Return pairs of a tile's variable and its place, row by row."""
    return [
        pair for of_row in zip(totals, places, strict=True) for pair in zip(*of_row, strict=True)
    ]


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
        emit(Emitter(builder), *cgutils.unpack_tuple(builder, arguments[-1]))
        return cgutils.get_null_value(I64)

    return generate


def room(nbytes: int) -> Any:
    """Return an intrinsic that gives the address of `nbytes` bytes of the loop's own stack."""

    @intrinsic
    def run(_context: Any) -> Any:
        return types.int64(), lambda _context, builder, _signature, _arguments: Emitter(
            builder
        ).room(nbytes)

    return run


def emitted(emit: Callable[..., None]) -> Any:
    """Return an intrinsic with one argument, a tuple of numbers.

    It runs the code that emit(emitter, *numbers) emits.
    """

    @intrinsic
    def run(_context: Any, numbers: Any) -> Any:
        return types.int64(_checked(numbers)), _generator(emit)

    return run


def emitted_by_type(meaning: Callable[[Any], Any], emit: Callable[..., None]) -> Any:
    """Return an intrinsic of a number whose type has a meaning, and of a tuple of numbers.

    It runs the code that emit(emitter, meaning of the type, *numbers) emits.
    """

    @intrinsic
    def run(_context: Any, kind: Any, numbers: Any) -> Any:
        found = meaning(kind)
        return types.int64(kind, _checked(numbers)), _generator(
            lambda e, *values: emit(e, found, *values)
        )

    return run


prefetch = emitted(Emitter.prefetch)

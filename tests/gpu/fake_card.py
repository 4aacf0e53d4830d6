"""A card made of the CPU's memory: what a run does on a card, counted and checked where there is
none.

Tensors of device type `card` wrap CPU tensors, on torch's backend for devices that are written in
Python. An operation on one is a launch; a value that the host reads back, and a copy that it waits
for, is a sync. Whether two accesses to the same bytes are ordered is told by vector clocks (Fidge
1988, Mattern 1988) over streams and threads: what a stream has been given is ordered, and so is
what a thread does after it has waited for a fence or a `Done`. An access that is not ordered behind
an earlier one to the same bytes, and one of them writes, is a race. A stream that waits for an
event joins its clock; the thread that makes it wait does not. What a thread does to pinned memory
itself is checked, too.

Operations are carried out at once by the thread that issues them, where a race corrupts nothing:
only clocks tell. A worker's copy is put off: it is carried out before the first operation that is
ordered behind it, on its stream, on one that waits for it or of a thread that did. What is not
ordered finds other bytes. Bytes of a view count from its first to its last.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

NAME = "card"
COMPUTE = "compute"  # the stream of the thread that computes
_MAX_ACCESSES = 64  # that are remembered of a storage
_ALLOCATES = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
_READS_BACK = {"nonzero", "_local_scalar_dense", "_unique2", "masked_select", "equal", "is_nonzero"}
_INDEXES = {"index", "index_put", "index_put_", "_index_put_impl_"}

Clock = dict[str, int]


def merge(into: Clock, other: Clock) -> None:
    for name, time in other.items():
        into[name] = max(into.get(name, 0), time)


class Access(NamedTuple):
    """Of the bytes [start, end) of a storage, by the operation that a stream had as its
    `time`-th."""

    start: int
    end: int
    writes: bool
    stream: str
    time: int
    where: str


@dataclass
class Card:
    """What has been done. counts: by (step, what), of what the computing thread did; a step is a
    phase and a layer's kind. places: the same by line of code. recorded: what a graph does, while
    one is made. races: by the two places. late: copies that are put off, each with its stream and
    time."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    places: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    races: Counter[tuple[str, str]] = field(default_factory=Counter)
    step: str = "before"
    late: list[tuple[str, int, Callable[[], object]]] = field(default_factory=list)
    recorded: list[Callable[[], object]] | None = None
    # Host memory that is or was pinned, by its address, whose accesses are ordered too; and what of
    # it is unpinned.
    staging: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    unpinned: set[int] = field(default_factory=set)
    _streams: dict[str, Clock] = field(default_factory=lambda: defaultdict(dict))
    _accesses: dict[int, list[Access]] = field(default_factory=lambda: defaultdict(list))
    _local: threading.local = field(default_factory=threading.local)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def per_step(self, step: str, what: str) -> float:
        """How many of `what` (launch, copy, sync, fence) a step of this kind took, on average."""
        return self.counts[step, what] / self.counts[step, "steps"]

    @property
    def clock(self) -> Clock:
        """Of this thread: what has happened before it goes on."""
        if not hasattr(self._local, "clock"):
            self._local.clock = {}
        found: Clock = self._local.clock
        return found

    @property
    def stream(self) -> str:
        return getattr(self._local, "stream", COMPUTE)

    @contextmanager
    def own_stream(self) -> Iterator[None]:
        """What this thread issues within goes to a stream of its own."""
        before = self.stream
        self._local.stream = threading.current_thread().name
        try:
            yield
        finally:
            self._local.stream = before

    def now(self) -> Clock:
        """What has been issued to the thread's stream."""
        return dict(self._streams[self.stream])

    def join(self, clock: Clock) -> None:
        """The thread's stream waits for what has that clock."""
        merge(self._streams[self.stream], clock)

    def go_on(self, clock: Clock) -> None:
        """This thread has waited for what has that clock."""
        merge(self.clock, clock)
        self._carry_out(self.clock)

    def before(self) -> None:
        """What comes before the next operation of the thread's stream is carried out."""
        if self.late:
            clock = self.now()
            merge(clock, self.clock)
            self._carry_out(clock)

    def _carry_out(self, clock: Clock) -> None:
        ready = [one for one in self.late if clock.get(one[0], 0) >= one[1]]
        self.late = [one for one in self.late if one not in ready]
        for _, _, copy in ready:
            copy()

    def put_off(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """A copy between the card and pinned memory, at the last moment."""
        sides = [
            ([_raw(t)] if isinstance(t, CardTensor) or self.is_pinned(t) else [])
            for t in (src, dst)
        ]
        self.launch("copy", "copy_", *sides)
        self.late.append(
            (self.stream, self.now()[self.stream], partial(_copy, _raw(dst), _raw(src)))
        )

    def pin(self, memory: torch.Tensor) -> None:
        """Until there is no reference to `memory` any more, as tiers.device.CudaDevice does it:
        views do not count."""
        storage = memory.untyped_storage()  # is kept, so that no other memory gets its address
        self.staging[storage._cdata] = storage
        weakref.finalize(memory, self.unpinned.add, storage._cdata)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        address = tensor.untyped_storage()._cdata
        assert address not in self.unpinned, "host memory is used after it was unpinned"
        return address in self.staging

    def launch(
        self, what: str, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        clock = self._streams[self.stream]
        where = _place()
        merge(clock, self.clock)
        clock[self.stream] = clock.get(self.stream, 0) + 1
        for tensor in reads:
            self._access(tensor, False, clock, where)
        for tensor in writes:
            self._access(tensor, True, clock, where)
        self.count(what, name)

    def touch(self, tensor: torch.Tensor, writes: bool) -> None:
        """Memory in `staging` is read or written by this thread itself."""
        name = f"host of {threading.current_thread().name}"
        clock = self.clock
        if self.is_pinned(tensor):
            clock[name] = clock.get(name, 0) + 1
            self._access(tensor, writes, clock, _place(), name)

    def sync(self, name: str) -> None:
        self.go_on(self._streams[self.stream])
        self.count("sync", name)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What this thread does within is part of one launch."""
        before = getattr(self._local, "uncounted", False)
        self._local.uncounted = True
        try:
            yield
        finally:
            self._local.uncounted = before

    @property
    def _counts_here(self) -> bool:
        counted = not getattr(self._local, "uncounted", False)
        return counted and threading.current_thread() is threading.main_thread()

    def count(self, what: str, name: str) -> None:
        if self._counts_here:
            self.counts[self.step, what] += 1
            self.places[self.step, what, f"{name} at {_place()}"] += 1

    def forget(self, tensor: torch.Tensor) -> None:
        """A storage is new, whatever had its address before."""
        self._accesses.pop(tensor.untyped_storage()._cdata, None)

    def _access(
        self,
        tensor: torch.Tensor,
        writes: bool,
        clock: Clock,
        where: str,
        stream: str | None = None,
    ) -> None:
        if not tensor.numel():
            return
        start = tensor.storage_offset() * tensor.itemsize
        last = sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        end = start + (last + 1) * tensor.itemsize
        stream = stream or self.stream
        kept = []
        found = self._accesses[tensor.untyped_storage()._cdata]
        for old in found:
            ordered = old.stream == stream or clock.get(old.stream, 0) >= old.time
            if not ordered and old.start < end and start < old.end and (old.writes or writes):
                sides = ("writes" if old.writes else "reads"), ("writes" if writes else "reads")
                self.races[
                    f"{old.where} {sides[0]} on {old.stream}", f"{where} {sides[1]} on {stream}"
                ] += 1
            if not (ordered and writes and start <= old.start and old.end <= end):
                kept.append(old)
        found[:] = [*kept, Access(start, end, writes, stream, clock[stream], where)][
            -_MAX_ACCESSES:
        ]


def _place() -> str:
    """The two innermost lines of the package that are being run."""
    frame = sys._getframe(1)
    found = list[str]()
    while frame is not None and len(found) < 2:
        name = frame.f_code.co_filename
        if "/flexgen_h2o/" in name and "site-packages" not in name:
            found.append(f"{name.rpartition('/flexgen_h2o/')[2]}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found)


class CardTensor(torch.Tensor):
    """raw: the CPU tensor that it wraps."""

    card: ClassVar[Card]  # that is in use
    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> CardTensor:
        found: CardTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
        )
        found.raw = raw
        return found

    def tolist(self) -> Any:
        with self.card.lock:
            self.card.sync("tolist")
        return self.raw.tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"CardTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _Operation(cls.card, func, args, kwargs or {}).run()


class Mode(TorchDispatchMode):
    """Sees operations without a tensor of the card too: those that make one."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self._card = card

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _Operation(self._card, func, args, kwargs or {}).run()


class _Operation:
    """One operation of torch, carried out on the CPU tensors that are wrapped."""

    def __init__(self, card: Card, func: Any, args: Any, kwargs: Any) -> None:
        self._card = card
        self._func = func
        self._args = args
        self._kwargs = kwargs
        self._name = func._schema.name.split("::")[1]
        self._given = [t for t in _leaves_of((args, kwargs)) if isinstance(t, torch.Tensor)]
        self._cards = [t for t in self._given if isinstance(t, CardTensor)]
        device = kwargs.get("device")
        self._target = None if device is None else torch.device(device).type

    def run(self) -> Any:
        if not self._cards and self._target != NAME:
            self._touch()
            return self._func(*self._args, **self._kwargs)
        assert not self._mixes, f"{self._name} of tensors of the card and of the host"
        args = _mapped(_raw, self._args)
        kwargs = _mapped(_raw, self._kwargs)
        if self._target == NAME:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        if not self._is_view:
            with self._card.lock:
                self._card.before()
        out = self._func(*args, **kwargs)
        with self._card.lock:
            if not self._is_view:
                self._record(out)
                self._keep(args, kwargs, out)
        if self._name == "copy_":
            return self._args[0]
        if self._name == "_local_scalar_dense":
            return out
        wrapped = {id(t.raw): t for t in self._cards}
        stays = self._target == NAME or (bool(self._cards) and not self._leaves)

        def wrap(value: Any) -> Any:
            if not _is_tensor(value):
                return value
            return (
                wrapped[id(value)]
                if id(value) in wrapped
                else CardTensor(value)
                if stays
                else value
            )

        return _mapped(wrap, out)

    def _touch(self) -> None:
        """The thread itself reads and writes pinned memory."""
        if not self._is_view and any(map(self._card.is_pinned, self._given)):
            written = self._written()
            with self._card.lock:
                for tensor in self._given:
                    self._card.touch(tensor, any(tensor is one for one in written))

    def _written(self) -> list[torch.Tensor]:
        found = list[torch.Tensor]()
        for i, argument in enumerate(self._func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = self._args[i] if i < len(self._args) else self._kwargs.get(argument.name)
                found += [t for t in _leaves_of(value) if _is_tensor(t)]
        return found

    @property
    def _is_view(self) -> bool:
        arguments = self._func._schema.arguments
        return self._name == "_unsafe_view" or any(
            a.alias_info and not a.alias_info.is_write for a in arguments
        )

    @property
    def _mixes(self) -> bool:
        """Would torch refuse it? Indices may be the host's, and single numbers."""
        others = [t for t in self._given if not isinstance(t, CardTensor) and t.dim()]
        return bool(self._cards and others) and self._name not in {"copy_", "_to_copy", *_INDEXES}

    @property
    def _leaves(self) -> bool:
        """For the host's memory."""
        return self._name == "_to_copy" and self._target is not None and self._target != NAME

    @property
    def _crosses(self) -> bool:
        """Between the card and the host."""
        if self._name == "copy_":
            return len(self._cards) < len(self._given)
        return self._name == "_to_copy" and (self._leaves or not self._cards)

    def _record(self, out: Any) -> None:
        card = self._card
        written = [t for t in self._written() if isinstance(t, CardTensor)]
        is_copy = self._name == "copy_"
        made = (
            []
            if written or is_copy or self._leaves
            else [t for t in _leaves_of(out) if _is_tensor(t)]
        )
        for tensor in made:
            card.forget(tensor)
        if self._name in _ALLOCATES:
            return
        reads = [t.raw for t in self._cards if not any(t is one for one in written)]
        if is_copy:  # between the card and memory in `staging`
            for side, tensor in zip((made, reads), self._given, strict=True):
                if not isinstance(tensor, CardTensor) and card.is_pinned(tensor):
                    side.append(tensor)
        writes = [*(t.raw for t in written), *made]
        card.launch("copy" if self._crosses else "launch", self._name, reads, writes)
        if self._waits:
            card.sync(self._name)

    def _keep(self, args: Any, kwargs: Any, out: Any) -> None:
        """The operation is part of a graph, which does it to the same bytes."""
        if self._card.recorded is None:
            return
        assert not self._crosses and not self._waits, f"{self._name} in a graph"
        reads = [t.raw for t in self._cards]
        writes = [t for t in _leaves_of(out) if _is_tensor(t)]

        def again() -> None:
            self._card.launch("launch", self._name, reads, writes)
            made = [t for t in _leaves_of(self._func(*args, **kwargs)) if _is_tensor(t)]
            for there, new in zip(writes, made, strict=True):
                if there is not new:
                    there.copy_(new)

        self._card.recorded.append(again)

    @property
    def _waits(self) -> bool:
        """Does the host wait for the operation?"""
        if self._crosses:
            given = self._args[2] if self._name == "copy_" and len(self._args) > 2 else False
            return not (given or self._kwargs.get("non_blocking", False))
        by_mask = self._name in _INDEXES and any(
            t.dtype in (torch.bool, torch.uint8) for t in _leaves_of(self._args[1]) if _is_tensor(t)
        )
        counts = self._name == "repeat_interleave" and len(self._cards) > 0
        return self._name in _READS_BACK or by_mask or counts


def _leaves_of(value: Any) -> Iterator[Any]:
    """What is not a list, tuple or dictionary in it. torch's own, for all kinds of containers,
    takes ten times as long, which is a third of a run."""
    if isinstance(value, list | tuple | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _leaves_of(one)
    else:
        yield value


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(function, one) for key, one in value.items()}
    return (
        type(value)(_mapped(function, one) for one in value)
        if type(value) in (list, tuple)
        else function(value)
    )


def _raw(value: Any) -> Any:
    return value.raw if isinstance(value, CardTensor) else value


def _copy(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Carry out a copy, whichever thread comes to it."""
    with torch.utils._python_dispatch._disable_current_modes():
        dst.copy_(src)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)

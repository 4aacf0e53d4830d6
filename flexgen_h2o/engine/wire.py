"""Messages between the ranks of a pipeline. They form a ring: each hears from the one before, and tells the one behind.

A message is about one micro-batch: the tokens that its rows have got in the last sweep, how many of the rows go on, and
their hidden states. Two threads send and receive beside compute, a few messages ahead; torch.distributed carries them
(gloo between hosts, NCCL between cards). Knows rows and bytes, not layers, prompts or schedules.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from flexgen_h2o.core import interrupts
from flexgen_h2o.core.errors import TransferError
from flexgen_h2o.core.units import WIRE_BUFFERS
from flexgen_h2o.tiers.device import Device
from flexgen_h2o.tiers.stream import NOTHING, Waitable

_NAME = "wire"  # of the threads
_POLL_S = 1.0  # between looks at whether a signal or a failure has come
_JOIN_S = 5.0  # an idle thread ends at once; one that waits for a neighbour cannot be ended
_FIELDS = 4  # of a header before the tokens: micro-batch, rows left, bytes of hidden states, number of tokens
_Item = TypeVar("_Item")


def is_waiting() -> bool:
    """Is a thread of this process left that waits for a neighbour? gloo does not let it go: the process must end."""
    return any(thread.name.startswith(_NAME) for thread in threading.enumerate())


def meet(others: Callable[[], object]) -> None:
    """Call what waits for the other ranks in a thread beside: a signal ends the wait, and not only what comes after."""
    failures, met = list[Exception](), threading.Event()

    def wait() -> None:
        try:
            others()
        except Exception as error:  # torch.distributed raises many kinds
            failures.append(error)
        met.set()

    thread = threading.Thread(target=wait, name=f"{_NAME} meeting", daemon=True)
    thread.start()
    while not met.wait(_POLL_S):  # a signal in the middle of a join would leave the thread marked as ended
        interrupts.check()
    thread.join()
    if failures:
        raise failures[0]


@dataclass(frozen=True)
class Peers:
    """Who this process is in a ring of `ranks`. local_ranks: how many of them share this machine."""

    rank: int
    ranks: int
    local_ranks: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.ranks - 1

    @property
    def before(self) -> int:
        return (self.rank - 1) % self.ranks

    @property
    def behind(self) -> int:
        return (self.rank + 1) % self.ranks


@dataclass(frozen=True)
class Message:
    """What the rank before says of a micro-batch.

    tokens: chosen for its rows in the sweep before this one; left: how many of the rows go on. hidden: uint8, of the
    rows that go on; None where none does, and from the last rank to the first.
    """

    micro_batch: int
    left: int
    tokens: tuple[int, ...]
    hidden: torch.Tensor | None = None
    buffer: int = -1


@dataclass(frozen=True)
class _Outgoing:
    header: torch.Tensor
    hidden: torch.Tensor | None
    issued: Waitable
    buffer: int


class Wire:
    """Both ends of a rank. `memory`: uint8, a number of equal buffers for messages that come and for those that go."""

    def __init__(self, peers: Peers, device: Device, memory: torch.Tensor) -> None:
        self.peers, self._device = peers, device
        receives, sends = not peers.is_first, not peers.is_last  # hidden states; every rank does both with tokens
        size = memory.numel() // ((receives + sends) * WIRE_BUFFERS)
        self._buffers = [memory[i * size : (i + 1) * size] for i in range((receives + sends) * WIRE_BUFFERS)]
        self._to_fill: queue.SimpleQueue[tuple[int, Waitable]] = queue.SimpleQueue()
        self._to_send: queue.SimpleQueue[int] = queue.SimpleQueue()
        for i in range(len(self._buffers)):
            if receives and i < WIRE_BUFFERS:
                self._to_fill.put((i, NOTHING))
            else:
                self._to_send.put(i)
        self._blocks: queue.SimpleQueue[tuple[int, ...] | None] = queue.SimpleQueue()
        self._arrived: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._outgoing: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self.bytes_sent = 0
        self._rows: tuple[int, ...] = ()
        self._over: list[bool] = []
        self._early: dict[int, Message] = {}  # by micro-batch
        self._threads = [
            threading.Thread(target=self._guarded, args=(work, other), name=f"{_NAME} {name}", daemon=True)
            for work, other, name in (
                (self._receive_blocks, peers.before, "in"), (self._send_all, peers.behind, "out")
            )
        ]  # fmt: skip
        for thread in self._threads:
            thread.start()

    # Compute side

    def begin_block(self, rows: Sequence[int]) -> None:
        """A block of micro-batches with so many rows each. Every one of them ends with a message that leaves no row."""
        self._rows, self._over, self._early = tuple(rows), [False] * len(rows), {}
        self._blocks.put(self._rows)

    @property
    def is_over(self) -> bool:
        """Has every micro-batch of the block ended?"""
        return all(self._over)

    def receive(self, sweep: int, micro_batch: int) -> Message | None:
        """What the rank before says of a micro-batch; None where it says nothing: it is over, or this rank begins it.

        Called for all micro-batches of a sweep in turn. TransferError where a neighbour is lost.
        """
        if self._over[micro_batch] or (self.peers.is_first and sweep == 0):
            return None
        # That a micro-batch is over is said before the others of its group have been computed.
        while micro_batch not in self._early:
            message: Message = self._get(self._arrived)
            self._early[message.micro_batch] = message
        found = self._early.pop(micro_batch)
        self._over[micro_batch] = not found.left
        return found

    def release(self, message: Message, read: Waitable) -> None:
        """The message's hidden states are not needed any more, once `read` is done."""
        self._to_fill.put((message.buffer, read))

    def send(self, micro_batch: int, left: int, tokens: Sequence[int], hidden: torch.Tensor | None = None) -> None:
        """Tell the rank behind; `hidden`, contiguous, is copied. Waits while too many messages are on their way."""
        header = torch.zeros(_FIELDS + max(self._rows), dtype=torch.int64)
        nbytes = 0 if hidden is None else hidden.numel() * hidden.element_size()
        header[: _FIELDS + len(tokens)] = torch.tensor([micro_batch, left, nbytes, len(tokens), *tokens])
        self.bytes_sent += nbytes + header.numel() * header.element_size()
        if hidden is None:
            self._outgoing.put(_Outgoing(header, None, NOTHING, -1))
            return
        number = self._get(self._to_send)
        data = self._buffers[number][:nbytes]
        data.copy_(hidden.reshape(-1).view(torch.uint8))
        self._outgoing.put(_Outgoing(header, data, self._device.fence(), number))

    def close(self) -> None:
        """End the threads. One that waits for a neighbour in the middle of a block is left behind (`is_waiting`)."""
        self._blocks.put(None)
        self._outgoing.put(None)
        for thread in self._threads:
            thread.join(_JOIN_S if self.is_over else 0)

    def _get(self, source: queue.SimpleQueue[_Item]) -> _Item:
        """The next item; what a thread failed with is raised."""
        while True:
            if self._failure is not None:
                raise self._failure
            try:
                return source.get(timeout=_POLL_S)
            except queue.Empty:
                interrupts.check()

    # Worker side

    @torch.inference_mode()  # as the compute thread, whose buffers they are
    def _guarded(self, work: Callable[[], None], other: int) -> None:
        try:
            work()
        except Exception as error:  # torch.distributed raises many kinds
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            self._failure = TransferError(f"--pipeline: lost rank {other}; what ended it is said there ({reason})")

    def _receive_blocks(self) -> None:
        while (rows := self._blocks.get()) is not None:
            going_on = set(range(len(rows)))
            while going_on:
                message = self._receive_one(max(rows))
                if not message.left:
                    going_on.discard(message.micro_batch)
                self._arrived.put(message)

    def _receive_one(self, rows: int) -> Message:
        """rows: of the largest micro-batch."""
        header = torch.zeros(_FIELDS + rows, dtype=torch.int64)
        dist.recv(header, self.peers.before)
        micro_batch, left, nbytes, count = header[:_FIELDS].tolist()
        tokens = tuple(header[_FIELDS : _FIELDS + count].tolist())
        if not nbytes:
            return Message(micro_batch, left, tokens)
        number, read = self._to_fill.get()
        read.wait()
        hidden = self._buffers[number][:nbytes]
        with self._device.beside_compute():
            dist.recv(hidden, self.peers.before)
            self._device.fence().wait()
        return Message(micro_batch, left, tokens, hidden, number)

    def _send_all(self) -> None:
        while (message := self._outgoing.get()) is not None:
            dist.send(message.header, self.peers.behind)
            if message.hidden is None:
                continue
            message.issued.wait()
            with self._device.beside_compute():
                dist.send(message.hidden, self.peers.behind)
                self._device.fence().wait()
            self._to_send.put(message.buffer)

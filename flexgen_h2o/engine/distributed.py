"""A run as one of several processes that share a model's layers (FlexGen's dist_flex_opt), started by torchrun.

Layers are split evenly: the first rank has the embedding, the last one the head. Every rank reads the same prompts and
goes through the same sweeps; the first one reports. The ranks form a ring: hidden states go from rank to rank, tokens
from the last one to all others.

A message is about one micro-batch: the tokens of its last sweep, how many of its rows go on, and their hidden states.
So every rank ends the same rows before it goes on. A micro-batch whose rows have all ended is announced to every rank
once. Two threads send and receive while the rank computes; torch.distributed carries the messages (gloo between hosts,
NCCL between cards).
"""

from __future__ import annotations

import hashlib
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from flexgen_h2o.core import interrupts
from flexgen_h2o.core.errors import FlexgenError, TransferError, UsageError, first_line
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.core.units import WIRE_BUFFERS
from flexgen_h2o.engine.generation import Row
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.kvcache.eviction.of_model import OfStage
from flexgen_h2o.tiers.device import Device, take_card
from flexgen_h2o.tiers.stream import NOTHING, Waitable

HOW = "torchrun --nproc-per-node 2 -m flexgen_h2o.flex_opt --pipeline ..."
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# A slow rank is no failure: a stage may stream its layers from disk. A rank that ends closes its connections at once.
_PATIENCE = timedelta(days=7)
_NAME = "wire"  # of the threads
_POLL_S = 1.0  # between looks at whether a signal or a failure has come
_JOIN_S = 5.0  # an idle thread ends at once; one that waits for a neighbour cannot be ended
_FIELDS = 4  # of a header before the tokens: micro-batch, rows left, bytes of hidden states, number of tokens
_Item = TypeVar("_Item")


def is_waiting() -> bool:
    """Is a thread of this process left that waits for a neighbour? gloo does not let it go: the process must end."""
    return any(thread.name.startswith(_NAME) for thread in threading.enumerate())


def meet(others: Callable[[], object]) -> None:
    """Call `others`, which waits for the other ranks, in a thread, so that a signal ends the wait."""
    failures, met = list[Exception](), threading.Event()

    def wait() -> None:
        try:
            others()
        except Exception as error:  # torch.distributed raises many kinds
            failures.append(error)
        met.set()

    thread = threading.Thread(target=wait, name=f"{_NAME} meeting", daemon=True)
    interrupts.start(thread)
    interrupts.wait_for(met)  # a signal in the middle of a join would leave the thread marked as ended
    thread.join()
    if failures:
        raise failures[0]


@dataclass(frozen=True)
class Pipeline:
    """Who this process is in a ring of `ranks`.

    in_flight: blocks of num_gpu_batches micro-batches on their way at a time (FlexGen's inner iterations). local_ranks:
    how many ranks share this machine.
    """

    rank: int
    ranks: int
    in_flight: int
    local_ranks: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.ranks - 1


@dataclass(frozen=True)
class Message:
    """What the rank before says of a micro-batch.

    left: rows that go on. tokens: of its rows, from the sweep before. hidden: uint8, of the rows that go on; None where
    none does, and from the last rank to the first. buffer: the one that holds it; -1 for none.
    """

    micro_batch: int
    left: int
    tokens: tuple[int, ...]
    hidden: torch.Tensor | None = None
    buffer: int = -1


class Wire:
    """Sends to the next rank and receives from the one before, micro-batch by micro-batch of a block.

    memory: uint8, equal buffers for messages that come and for those that go.
    """

    def __init__(self, pipeline: Pipeline, device: Device, memory: torch.Tensor) -> None:
        self._pipeline, self._device = pipeline, device
        self._before, self._next = (pipeline.rank - 1) % pipeline.ranks, (pipeline.rank + 1) % pipeline.ranks
        receives, sends = not pipeline.is_first, not pipeline.is_last  # hidden states; every rank does both with tokens
        count = (receives + sends) * WIRE_BUFFERS
        size = memory.numel() // count
        self._buffers = [memory[i * size : (i + 1) * size] for i in range(count)]
        self._to_fill: queue.SimpleQueue[tuple[int, Waitable]] = queue.SimpleQueue()
        self._to_send: queue.SimpleQueue[int] = queue.SimpleQueue()
        for i in range(count):
            if receives and i < WIRE_BUFFERS:
                self._to_fill.put((i, NOTHING))
            else:
                self._to_send.put(i)
        self._blocks: queue.SimpleQueue[tuple[int, ...] | None] = queue.SimpleQueue()
        self._arrived: queue.SimpleQueue[Message] = queue.SimpleQueue()
        # Headers, each with hidden states, what they wait for, and the buffer that holds them.
        self._outgoing: queue.SimpleQueue[tuple[torch.Tensor, torch.Tensor | None, Waitable, int] | None]
        self._outgoing = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self.bytes_sent = 0
        self._rows: tuple[int, ...] = ()
        self._over: list[bool] = []
        self._early: dict[int, Message] = {}  # by micro-batch, as the next one
        self._received: dict[int, Message] = {}
        self._threads = [
            threading.Thread(target=self._guarded, args=(work, other), name=f"{_NAME} {name}", daemon=True)
            for work, other, name in ((self._receive_blocks, self._before, "in"), (self._send_all, self._next, "out"))
        ]
        for thread in self._threads:
            interrupts.start(thread)

    # Compute side

    def begin_block(self, rows: Sequence[int]) -> None:
        """rows: of each micro-batch. Each of them ends with a message that leaves no row."""
        self._rows, self._over = tuple(rows), [False] * len(rows)
        self._early, self._received = {}, {}
        self._blocks.put(self._rows)

    @property
    def is_over(self) -> bool:
        """Does every rank before this one know that all rows of the block have ended?"""
        return all(self._over)

    def recv_tokens(self, sweep: int, micro_batch: int) -> tuple[int, ...]:
        """Wait for the tokens that a micro-batch's rows got in the last sweep; () where there are none, and in the last
        rank, which has chosen them.

        Called for all micro-batches of a sweep in turn. TransferError where a neighbour is lost.
        """
        if self._over[micro_batch] or (self._pipeline.is_first and sweep == 0):
            return ()  # nothing is sent
        # That a micro-batch is over is said before the others of its group have been computed.
        while micro_batch not in self._early:
            message: Message = self._get(self._arrived)
            self._early[message.micro_batch] = message
        found = self._received[micro_batch] = self._early.pop(micro_batch)
        self._over[micro_batch] = not found.left
        return () if self._pipeline.is_last else found.tokens

    def check(self, micro_batch: int, left: int) -> None:
        """left: rows of the micro-batch that go on; passed on where none does. FlexgenError if the rank before said
        otherwise."""
        message = self._received.get(micro_batch)
        if message is None:
            return
        if message.left != left:
            raise FlexgenError(
                f"--pipeline: rank {self._before} goes on with {message.left} sequences, and this rank with {left}"
                "; give every rank the same model"
            )
        if not left:
            del self._received[micro_batch]
            if not self._pipeline.is_last:
                self._send(micro_batch, 0, message.tokens)

    def recv_hidden(self, micro_batch: int, x: torch.Tensor) -> None:
        """Fill `x`, (tokens, width), with the hidden states of the rank before."""
        message = self._received[micro_batch]
        assert message.hidden is not None
        x.copy_(message.hidden.view(x.dtype).view(x.shape))
        self._to_fill.put((message.buffer, self._device.fence()))

    def send_hidden(self, micro_batch: int, left: int, x: torch.Tensor) -> None:
        """Send a copy of the hidden states `x`, (tokens, width), of the rows that are left to the next rank."""
        message = self._received.get(micro_batch)
        self._send(micro_batch, left, () if message is None else message.tokens, x)

    def send_tokens(self, micro_batch: int, left: int, tokens: Sequence[int]) -> None:
        """Send the chosen tokens to the first rank, with how many rows go on with them."""
        self._send(micro_batch, left, tokens)

    def _send(self, micro_batch: int, left: int, tokens: Sequence[int], hidden: torch.Tensor | None = None) -> None:
        """Waits while too many messages are on their way."""
        header = torch.zeros(_FIELDS + max(self._rows), dtype=torch.int64, device="cpu")
        nbytes = 0 if hidden is None else hidden.nbytes
        header[: _FIELDS + len(tokens)] = torch.tensor([micro_batch, left, nbytes, len(tokens), *tokens], device="cpu")
        self.bytes_sent += nbytes + header.nbytes
        data, number, ready = None, -1, cast(Waitable, NOTHING)
        if hidden is not None:
            number = self._get(self._to_send)
            data = self._buffers[number][:nbytes]
            data.copy_(hidden.reshape(-1).view(torch.uint8))
            ready = self._device.fence()
        self._outgoing.put((header, data, ready, number))

    def gather(self, mine: Any) -> list[Any]:
        """What every rank has, in their order; FlexgenError where one is lost."""
        return _gather(self._pipeline, mine)

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
            self._failure = TransferError(
                f"--pipeline: lost rank {other}; what ended it is said there ({first_line(error)})"
            )

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
        header = torch.zeros(_FIELDS + rows, dtype=torch.int64, device="cpu")
        dist.recv(header, self._before)
        micro_batch, left, nbytes, count = header[:_FIELDS].tolist()
        tokens = tuple(header[_FIELDS : _FIELDS + count].tolist())
        if not nbytes:
            return Message(micro_batch, left, tokens)
        number, read = self._to_fill.get()
        read.wait()
        hidden = self._buffers[number][:nbytes]
        with self._device.beside_compute():
            dist.recv(hidden, self._before)
            self._device.fence().wait()
        return Message(micro_batch, left, tokens, hidden, number)

    def _send_all(self) -> None:
        while (message := self._outgoing.get()) is not None:
            header, hidden, ready, buffer = message
            dist.send(header, self._next)
            if hidden is None:
                continue
            ready.wait()
            with self._device.beside_compute():
                dist.send(hidden, self._next)
                self._device.fence().wait()
            self._to_send.put(buffer)


@dataclass(frozen=True)
class ModelPart:
    """What of a model this process runs: all of it, or the transformer blocks of a rank from `first` on."""

    spec: ModelSpec
    eviction: Eviction
    first: int = 0
    pipeline: Pipeline | None = None

    @property
    def in_flight(self) -> int:
        return 1 if self.pipeline is None else self.pipeline.in_flight

    @property
    def blocks(self) -> list[int]:
        """The first transformer block, and one past the last."""
        return [self.first, self.first + self.spec.num_blocks]

    @property
    def processes(self) -> int:
        """That share this machine's memory."""
        return 1 if self.pipeline is None else self.pipeline.local_ranks


def part_of(pipeline: Pipeline, spec: ModelSpec, eviction: Eviction) -> ModelPart:
    """The rank's part of a model. UsageError where there are fewer transformer blocks than ranks."""
    blocks = split_blocks(spec.num_blocks, pipeline.ranks, spec.name)[pipeline.rank]
    return ModelPart(spec.stage(blocks), OfStage(eviction, blocks.start), blocks.start, pipeline)


def split_blocks(num_blocks: int, ranks: int, name: str) -> list[range]:
    """Transformer blocks of each rank, the first ones one more if they cannot be even. UsageError if some have none."""
    if ranks > num_blocks:
        raise UsageError(
            f"--pipeline: {name} has {num_blocks} transformer blocks, and torchrun started {ranks} processes; start "
            f"at most {num_blocks}"
        )
    each, more = divmod(num_blocks, ranks)
    ends = [rank * each + min(rank, more) for rank in range(ranks + 1)]
    return [range(a, b) for a, b in pairwise(ends)]


def join_pipeline(in_flight: int | None) -> Pipeline:
    """Meet the other processes. in_flight: None takes as many as there are ranks.

    UsageError outside torchrun, FlexgenError where the others do not come.
    """
    missing = [name for name in _VARIABLES if not os.environ.get(name)]
    if missing:
        raise UsageError(f"--pipeline: {missing[0]} is not set; start the processes with torchrun: {HOW}")
    try:
        rank, ranks, local_rank, local_ranks = (int(os.environ[name]) for name in _VARIABLES[:4])
    except ValueError as error:
        raise UsageError(f"--pipeline: RANK, WORLD_SIZE, ... are not numbers ({error}); {HOW}") from error
    if ranks < 2:
        raise UsageError("--pipeline: torchrun started 1 process; start at least 2, or leave --pipeline out")
    try:
        backend = take_card(local_rank)
        meet(lambda: dist.init_process_group(backend, timeout=_PATIENCE))
    except (RuntimeError, ValueError, OSError) as error:
        raise FlexgenError(f"--pipeline: the {ranks} processes did not meet ({first_line(error)})") from error
    return Pipeline(rank, ranks, in_flight or ranks, local_ranks)


def check_same(pipeline: Pipeline, given: Sequence[object], rows: Iterable[Row]) -> None:
    """UsageError where ranks were given different work: a model of another config, flags, or prompts.

    given: the model's config, dtype, policy, eviction, sampling, sharing of prefixes.
    """
    names = ("model", "dtype", "policy", "eviction", "--gen-len or sampling flag", "--share-prefix")
    mine = {
        **dict(zip(names, given, strict=True)),
        "--num-inner-iterations": pipeline.in_flight,
        "set of prompts": _digest((row.prompt.index, row.max_new, row.prompt.token_ids) for row in rows),
    }  # fmt: skip
    everyone: list[Any] = _gather(pipeline, {name: _digest([value]) for name, value in mine.items()})
    for rank, theirs in enumerate(everyone):
        for name, value in everyone[0].items():
            if theirs[name] != value:
                raise UsageError(f"--pipeline: rank {rank} has another {name} than rank 0; give all ranks the same")


def leave(code: int) -> int:
    """End this process's part. Where a thread may wait for a neighbour that will not speak again, the process ends
    here: gloo does not let such a thread go."""
    if not dist.is_initialized() and not is_waiting():
        return code
    if is_waiting() or code:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(code)
    dist.destroy_process_group()
    return code


def _digest(values: Iterable[object]) -> str:
    """Of what they look like; ranks compare no more than that."""
    digest = hashlib.blake2b(digest_size=16)
    for value in values:
        digest.update(repr(value).encode())
    return digest.hexdigest()


def _gather(pipeline: Pipeline, mine: Any) -> list[Any]:
    """What every rank has, in their order; FlexgenError where one is lost."""
    found: list[Any] = [None] * pipeline.ranks
    try:
        dist.all_gather_object(found, mine)
    except RuntimeError as error:
        raise FlexgenError(
            f"--pipeline: another process ended; its own output shows why ({first_line(error)})"
        ) from error
    return found

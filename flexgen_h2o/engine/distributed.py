"""A run as one of several processes that share a model's layers.

This is FlexGen's dist_flex_opt. torchrun starts the processes.

Layers are split evenly: the first rank has the embedding, the last one the head. Every rank reads
the same prompts and runs the same sweeps. The first rank reports. The ranks form a ring: hidden
states travel from rank to rank, and tokens from the last rank to all others.

A message is about one micro-batch: the tokens of its last sweep, how many of its sequences
continue, and their hidden states. So every rank ends the same sequences before it continues. When
all sequences of a micro-batch have ended, every rank is told once. Two threads send and receive
while the rank computes. torch.distributed carries the messages (gloo between hosts, NCCL between
GPUs).
"""

from __future__ import annotations

import hashlib
import os
import queue
import sys
import threading
from collections import abc
from collections.abc import Callable, Iterable
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
from flexgen_h2o.engine.sequence import Sequence
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.kvcache.eviction.of_model import OfModel
from flexgen_h2o.tiers.device import Device, take_card
from flexgen_h2o.tiers.stream import NOTHING, Waitable

HOW = "torchrun --nproc-per-node 2 -m flexgen_h2o.flex_opt --pipeline ..."
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# A slow rank is no failure: a stage may stream its layers from disk. A rank that ends closes its
# connections at once.
_PATIENCE = timedelta(days=7)
_NAME = "wire"  # the names of the threads begin with it
_POLL_S = 1.0  # seconds between checks for a signal or a failure
_JOIN_S = 5.0  # seconds. An idle thread ends at once; one that waits for a neighbour does not.
# Fields of a header before the tokens: micro-batch, sequences left, bytes of hidden states, and
# number of tokens.
_FIELDS = 4
_Item = TypeVar("_Item")


def is_waiting() -> bool:
    """Return whether a thread of this process still waits for a neighbour.

    gloo does not let such a thread go, so the process must end.
    """
    return any(thread.name.startswith(_NAME) for thread in threading.enumerate())


def meet(others: Callable[[], object]) -> None:
    """Call `others`, which waits for the other ranks, in a thread.

    So a signal ends the wait.
    """
    failures = list[Exception]()
    met = threading.Event()

    def wait() -> None:
        try:
            others()
        except Exception as error:  # torch.distributed raises many kinds
            failures.append(error)
        met.set()

    thread = threading.Thread(target=wait, name=f"{_NAME} meeting", daemon=True)
    interrupts.start(thread)
    # A signal in the middle of a join would leave the thread marked as ended.
    interrupts.wait_for(met)
    thread.join()
    if failures:
        raise failures[0]


@dataclass(frozen=True)
class Pipeline:
    """The place of this process in a ring of ranks. `join_pipeline` makes it."""

    rank: int
    # The number of processes.
    ranks: int
    # Blocks of num_gpu_batches micro-batches that are on their way at a time (FlexGen's inner
    # iterations).
    in_flight: int
    # How many ranks share this machine.
    local_ranks: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.ranks - 1


@dataclass(frozen=True)
class Message:
    """A message of the rank before about a micro-batch. The receiving thread makes it."""

    micro_batch: int
    # Sequences that continue.
    left: int
    # One for each sequence that took part in the sweep before.
    tokens: tuple[int, ...]
    # uint8, the hidden states of the sequences that continue. None if no sequence continues, and in
    # messages from the last rank to the first.
    hidden: torch.Tensor | None = None
    # The buffer that holds `hidden`; -1 for none.
    buffer: int = -1


class Wire:
    """Sends to the next rank and receives from the one before.

    Micro-batches of a block travel one after another.

    memory: uint8, cut into equal buffers for incoming and outgoing messages.
    """

    def __init__(self, pipeline: Pipeline, device: Device, memory: torch.Tensor) -> None:
        self._pipeline = pipeline
        self._device = device
        self._previous_rank = (pipeline.rank - 1) % pipeline.ranks
        self._next_rank = (pipeline.rank + 1) % pipeline.ranks
        # These are about hidden states. Every rank sends and receives tokens.
        receives = not pipeline.is_first
        sends = not pipeline.is_last
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
        # (header, hidden states, event to wait for before sending, buffer that holds them); None
        # ends the thread.
        self._outgoing: queue.SimpleQueue[
            tuple[torch.Tensor, torch.Tensor | None, Waitable, int] | None
        ]
        self._outgoing = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self.bytes_sent = 0
        self._num_sequences: tuple[int, ...] = ()
        self._has_ended: list[bool] = []
        # Both by micro-batch: messages not asked for yet, and the newest ones in use.
        self._early: dict[int, Message] = {}
        self._received: dict[int, Message] = {}
        self._threads = [
            threading.Thread(
                target=self._guarded, args=(work, other), name=f"{_NAME} {name}", daemon=True
            )
            for work, other, name in (
                (self._receive_blocks, self._previous_rank, "in"),
                (self._send_all, self._next_rank, "out"),
            )
        ]
        for thread in self._threads:
            interrupts.start(thread)

    # Compute side

    def begin_block(self, rows: abc.Sequence[int]) -> None:
        """Begin a block. Each of its micro-batches ends with a message that leaves no sequence.

        rows: sequences of each micro-batch.
        """
        self._num_sequences = tuple(rows)
        self._has_ended = [False] * len(rows)
        self._early = {}
        self._received = {}
        self._blocks.put(self._num_sequences)

    @property
    def is_over(self) -> bool:
        """Whether every rank before this one knows that all sequences of the block have ended."""
        return all(self._has_ended)

    def recv_tokens(self, sweep: int, micro_batch: int) -> tuple[int, ...]:
        """Wait for the tokens that a micro-batch's sequences got in the last sweep.

        Return () if there are none, and in the last rank, which has chosen them itself. Call this
        for all micro-batches of a sweep in turn.

        Raise TransferError if a neighbour is lost.
        """
        if self._has_ended[micro_batch] or (self._pipeline.is_first and sweep == 0):
            return ()  # nothing is sent
        # The end of a micro-batch is announced before the others of its group have been computed.
        while micro_batch not in self._early:
            message: Message = self._get(self._arrived)
            self._early[message.micro_batch] = message
        found = self._received[micro_batch] = self._early.pop(micro_batch)
        self._has_ended[micro_batch] = not found.left
        return () if self._pipeline.is_last else found.tokens

    def check(self, micro_batch: int, left: int) -> None:
        """Compare the sequences that continue in the micro-batch with those of the rank before.

        If none continues, the end is announced to the next rank. Raise FlexgenError if the numbers
        differ.

        left: sequences that continue in this rank.
        """
        message = self._received.get(micro_batch)
        if message is None:
            return
        if message.left != left:
            raise FlexgenError(
                f"--pipeline: rank {self._previous_rank} goes on with {message.left} sequences, "
                "and this "
                f"rank with {left}; give every rank the same model"
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
        """Send a copy of the remaining sequences' hidden states to the next rank.

        x: (tokens, width).
        """
        message = self._received.get(micro_batch)
        self._send(micro_batch, left, () if message is None else message.tokens, x)

    def send_tokens(self, micro_batch: int, left: int, tokens: abc.Sequence[int]) -> None:
        """Send the chosen tokens, and how many sequences continue, to the first rank."""
        self._send(micro_batch, left, tokens)

    def _send(
        self,
        micro_batch: int,
        left: int,
        tokens: abc.Sequence[int],
        hidden: torch.Tensor | None = None,
    ) -> None:
        """Queue a message. Wait while too many messages are on their way."""
        header = torch.zeros(_FIELDS + max(self._num_sequences), dtype=torch.int64, device="cpu")
        nbytes = 0 if hidden is None else hidden.nbytes
        header[: _FIELDS + len(tokens)] = torch.tensor(
            [micro_batch, left, nbytes, len(tokens), *tokens], device="cpu"
        )
        self.bytes_sent += nbytes + header.nbytes
        data = None
        number = -1
        ready = cast(Waitable, NOTHING)
        if hidden is not None:
            number = self._get(self._to_send)
            data = self._buffers[number][:nbytes]
            data.copy_(hidden.reshape(-1).view(torch.uint8))
            ready = self._device.fence()
        self._outgoing.put((header, data, ready, number))

    def gather(self, mine: Any) -> list[Any]:
        """Return what every rank has, in rank order. Raise FlexgenError if a rank is lost."""
        return _gather(self._pipeline, mine)

    def close(self) -> None:
        """End the threads.

        A thread that waits for a neighbour in the middle of a block is left behind (`is_waiting`).
        """
        self._blocks.put(None)
        self._outgoing.put(None)
        for thread in self._threads:
            thread.join(_JOIN_S if self.is_over else 0)

    def _get(self, source: queue.SimpleQueue[_Item]) -> _Item:
        """Return the next item. Raise what a thread failed with."""
        while True:
            if self._failure is not None:
                raise self._failure
            try:
                return source.get(timeout=_POLL_S)
            except queue.Empty:
                interrupts.check()

    # Worker side

    @torch.inference_mode()  # as in the compute thread, which owns the buffers
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
        """Receive one message. rows: sequences of the largest micro-batch."""
        header = torch.zeros(_FIELDS + rows, dtype=torch.int64, device="cpu")
        dist.recv(header, self._previous_rank)
        micro_batch, left, nbytes, count = header[:_FIELDS].tolist()
        tokens = tuple(header[_FIELDS : _FIELDS + count].tolist())
        if not nbytes:
            return Message(micro_batch, left, tokens)
        number, read = self._to_fill.get()
        read.wait()
        hidden = self._buffers[number][:nbytes]
        with self._device.copy_stream():
            dist.recv(hidden, self._previous_rank)
            self._device.fence().wait()
        return Message(micro_batch, left, tokens, hidden, number)

    def _send_all(self) -> None:
        while (message := self._outgoing.get()) is not None:
            header, hidden, ready, buffer = message
            dist.send(header, self._next_rank)
            if hidden is None:
                continue
            ready.wait()
            with self._device.copy_stream():
                dist.send(hidden, self._next_rank)
                self._device.fence().wait()
            self._to_send.put(buffer)


@dataclass(frozen=True)
class ModelPart:
    """The part of a model that this process runs: all of it, or one rank's transformer blocks."""

    # The spec of the part alone.
    spec: ModelSpec
    eviction: Eviction
    # The first transformer block of the part, counted in the whole model.
    first: int = 0
    # None if the process runs the whole model.
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
        """The number of processes that share this machine's memory."""
        return 1 if self.pipeline is None else self.pipeline.local_ranks


def part_of(pipeline: Pipeline, spec: ModelSpec, eviction: Eviction) -> ModelPart:
    """Return the rank's part of a model.

    Raise UsageError if there are fewer transformer blocks than ranks.
    """
    blocks = split_blocks(spec.num_blocks, pipeline.ranks, spec.name)[pipeline.rank]
    return ModelPart(
        spec.stage(blocks), OfModel(eviction, first=blocks.start), blocks.start, pipeline
    )


def split_blocks(num_blocks: int, ranks: int, name: str) -> list[range]:
    """Return the transformer blocks of each rank.

    If they cannot be even, the first ranks have one more. Raise UsageError if a rank would have
    none.

    name: the model's name, for the error.
    """
    if ranks > num_blocks:
        raise UsageError(
            f"--pipeline: {name} has {num_blocks} transformer blocks, and torchrun started {ranks} "
            "processes; start "
            f"at most {num_blocks}"
        )
    each, more = divmod(num_blocks, ranks)
    ends = [rank * each + min(rank, more) for rank in range(ranks + 1)]
    return [range(a, b) for a, b in pairwise(ends)]


def join_pipeline(in_flight: int | None) -> Pipeline:
    """Meet the other processes and return this one's place among them.

    Raise UsageError outside torchrun, and FlexgenError if the other processes do not come.

    in_flight: see Pipeline; None: as many as there are ranks.
    """
    missing = [name for name in _VARIABLES if not os.environ.get(name)]
    if missing:
        raise UsageError(
            f"--pipeline: {missing[0]} is not set; start the processes with torchrun: {HOW}"
        )
    try:
        rank, ranks, local_rank, local_ranks = (int(os.environ[name]) for name in _VARIABLES[:4])
    except ValueError as error:
        raise UsageError(
            f"--pipeline: RANK, WORLD_SIZE, ... are not numbers ({error}); {HOW}"
        ) from error
    if ranks < 2:
        raise UsageError(
            "--pipeline: torchrun started 1 process; start at least 2, or leave --pipeline out"
        )
    try:
        backend = take_card(local_rank)
        meet(lambda: dist.init_process_group(backend, timeout=_PATIENCE))
    except (RuntimeError, ValueError, OSError) as error:
        raise FlexgenError(
            f"--pipeline: the {ranks} processes did not meet ({first_line(error)})"
        ) from error
    return Pipeline(rank, ranks, in_flight or ranks, local_ranks)


def check_same(
    pipeline: Pipeline, work: abc.Mapping[str, object], rows: Iterable[Sequence]
) -> None:
    """Raise UsageError if ranks have different work: model configs, flags or prompts.

    work: what must be the same besides the prompts, by the name that the error has for it.
    """
    mine = {
        **work,
        "--num-inner-iterations": pipeline.in_flight,
        "set of prompts": _digest((row.index, row.max_new, row.fed_ids) for row in rows),
    }
    everyone: list[Any] = _gather(
        pipeline, {name: _digest([value]) for name, value in mine.items()}
    )
    for rank, theirs in enumerate(everyone):
        for name, value in everyone[0].items():
            if theirs[name] != value:
                raise UsageError(
                    f"--pipeline: rank {rank} has another {name} than rank 0; give all ranks the "
                    "same"
                )


def leave(code: int) -> int:
    """End this process's part of the pipeline and return `code`.

    If a thread may wait for a neighbour that will not answer, the process ends here: gloo does not
    let such a thread go.
    """
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
    """Return a hash of the values' `repr`. Ranks compare no more than that."""
    digest = hashlib.blake2b(digest_size=16)
    for value in values:
        digest.update(repr(value).encode())
    return digest.hexdigest()


def _gather(pipeline: Pipeline, mine: Any) -> list[Any]:
    """Return what every rank has, in rank order. Raise FlexgenError if a rank is lost."""
    found: list[Any] = [None] * pipeline.ranks
    try:
        dist.all_gather_object(found, mine)
    except RuntimeError as error:
        raise FlexgenError(
            f"--pipeline: another process ended; its own output shows why ({first_line(error)})"
        ) from error
    return found

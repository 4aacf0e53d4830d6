"""A stage of a pipeline and its neighbours: hidden states go from rank to rank, tokens from the last one to all others.

Each message names the tokens of a micro-batch's last sweep, so every rank ends the same rows before it goes on. A
micro-batch whose rows have all ended is told so to every rank, and then no more of it is said.

A run as one of several processes that share a model's layers (FlexGen's dist_flex_opt), started by torchrun.

Layers are split evenly: the first rank has the embedding, the last one the head. Every rank reads the same prompts and
goes through the same sweeps; the first one reports.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from flexgen_h2o.core.config import ModelSpec
from flexgen_h2o.core.errors import FlexgenError, UsageError
from flexgen_h2o.engine.generation import Row
from flexgen_h2o.engine.report import PhaseReport, RunReport
from flexgen_h2o.engine.wire import Message, Peers, Wire, is_waiting, meet
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.kvcache.eviction.policy import OfStage
from flexgen_h2o.tiers.device import take_card
from flexgen_h2o.tiers.stream import Waitable


class Handoff:
    """What a rank hears and says of the micro-batches of a block. fence: done when all compute issued so far is."""

    def __init__(self, wire: Wire, fence: Callable[[], Waitable]) -> None:
        self._wire, self._fence = wire, fence
        self._messages: dict[int, Message] = {}

    def begin_block(self, rows: Sequence[int]) -> None:
        """rows: of each micro-batch."""
        self._messages = {}
        self._wire.begin_block(rows)

    @property
    def is_over(self) -> bool:
        """Does every rank before this one know that all rows have ended?"""
        return self._wire.is_over

    def recv_tokens(self, sweep: int, micro_batch: int) -> tuple[int, ...]:
        """Wait for what the rank before says of a micro-batch in this sweep: the tokens that its rows have got in the
        last one; () where there are none, and in the last rank, which has chosen them."""
        message = self._wire.receive(sweep, micro_batch)
        if message is None:
            return ()
        self._messages[micro_batch] = message
        return () if self._wire.peers.is_last else message.tokens

    def check(self, micro_batch: int, left: int) -> None:
        """left: rows of the micro-batch that go on; passed on where none does. FlexgenError where others were heard."""
        message = self._messages.get(micro_batch)
        if message is None:
            return
        if message.left != left:
            raise FlexgenError(
                f"--pipeline: rank {self._wire.peers.before} goes on with {message.left} rows where this one has {left}"
                "; the model must be the same everywhere"
            )
        if not left:
            del self._messages[micro_batch]
            if not self._wire.peers.is_last:
                self._wire.send(micro_batch, 0, message.tokens)

    def recv_hidden(self, micro_batch: int, x: torch.Tensor) -> None:
        """Fill `x`, (tokens, width), with the hidden states of the rank before."""
        message = self._messages[micro_batch]
        assert message.hidden is not None
        x.copy_(message.hidden.view(x.dtype).view(x.shape))
        self._wire.release(message, self._fence())

    def send_hidden(self, micro_batch: int, left: int, x: torch.Tensor) -> None:
        """Give the rank behind the hidden states `x`, (tokens, width), of the rows that are left."""
        message = self._messages.get(micro_batch)
        self._wire.send(micro_batch, left, () if message is None else message.tokens, x)

    def send_tokens(self, micro_batch: int, left: int, tokens: Sequence[int]) -> None:
        """Give the first rank the tokens that were chosen, and say how many rows go on with them."""
        self._wire.send(micro_batch, left, tokens)


HOW = "torchrun --nproc-per-node 2 -m flexgen_h2o.flex_opt --pipeline ..."
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# A slow rank is no failure: a stage may stream its layers from disk. A rank that ends closes its connections at once.
_PATIENCE = timedelta(days=7)


@dataclass(frozen=True)
class Pipeline:
    """in_flight: blocks of num_gpu_batches micro-batches on their way at a time (FlexGen's inner iterations)."""

    peers: Peers
    in_flight: int


@dataclass(frozen=True)
class Part:
    """What of a model this process runs: all of it, or the transformer blocks of a rank from `first` on."""

    spec: ModelSpec
    eviction: Eviction
    first: int = 0
    pipeline: Pipeline | None = None

    @property
    def peers(self) -> Peers | None:
        return None if self.pipeline is None else self.pipeline.peers

    @property
    def in_flight(self) -> int:
        return 1 if self.pipeline is None else self.pipeline.in_flight

    @property
    def processes(self) -> int:
        """That share this machine's memory."""
        return 1 if self.pipeline is None else self.pipeline.peers.local_ranks


def part_of(pipeline: Pipeline, spec: ModelSpec, eviction: Eviction) -> Part:
    """The rank's part of a model. UsageError where there are fewer transformer blocks than ranks."""
    blocks = split_blocks(spec.num_blocks, pipeline.peers.ranks, spec.name)[pipeline.peers.rank]
    return Part(spec.stage(blocks), OfStage(eviction, blocks.start, spec.num_blocks), blocks.start, pipeline)


def split_blocks(num_blocks: int, ranks: int, name: str = "the model") -> list[range]:
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
    try:
        backend = take_card(local_rank)
        meet(lambda: dist.init_process_group(backend, timeout=_PATIENCE))
    except (RuntimeError, ValueError, OSError) as error:
        raise FlexgenError(f"--pipeline: the {ranks} processes did not meet ({_first_line(error)})") from error
    return Pipeline(Peers(rank, ranks, local_ranks), in_flight or ranks)


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


def joint_report(part: Part, report: RunReport, wire: Wire) -> RunReport:
    """The report of the whole pipeline, from every rank's own. Called by all ranks.

    Seconds are the last rank's, where a sweep ends when its tokens are chosen; bytes and work are sums. `extra.ranks`
    has each rank's own: transformer blocks (first, and one past the last), bytes, seconds of each lane.
    """
    assert part.pipeline is not None
    mine = {
        "rank": part.pipeline.peers.rank,
        "blocks": [part.first, part.first + part.spec.num_blocks],
        "peak_bytes": dict(report.peak_bytes),
        "io_bytes": dict(report.io_bytes),
        "sent_bytes": wire.bytes_sent,
        "busy_s": report.extra["busy_s"],
    }
    all_of_them = _gather(part.pipeline, (report, mine))
    reports = [one for one, _ in all_of_them]
    last = reports[-1]

    def summed(name: str) -> dict[str, int]:
        return {key: sum(getattr(one, name)[key] for one in reports) for key in getattr(report, name)}

    def summed_by_kind(name: str) -> dict[str, dict[str, int]]:
        kinds = [getattr(one, name) for one in reports]
        keys = next(iter(kinds[0].values()))
        every = dict.fromkeys(kind for one in kinds for kind in one)
        return {kind: {key: sum(one[kind][key] for one in kinds if kind in one) for key in keys} for kind in every}

    kv = {**summed("kv"), "slots": max(one.kv["slots"] for one in reports)}
    work = {key: sum(one.extra["work"][key] for one in reports) for key in report.extra["work"]}
    extra = {**report.extra, "work": work, "ranks": [facts for _, facts in all_of_them]}
    return replace(
        report,
        prefill=PhaseReport(last.prefill.seconds, report.prefill.tokens),
        decode=PhaseReport(last.decode.seconds, report.decode.tokens),
        peak_bytes=summed("peak_bytes"), io_bytes=summed("io_bytes"), kv=kv, extra=extra,
        peak_bytes_by_kind=summed_by_kind("peak_bytes_by_kind"), io_bytes_by_kind=summed_by_kind("io_bytes_by_kind"),
        model_bytes=sum(one.model_bytes for one in reports), cache_bytes=sum(one.cache_bytes for one in reports),
    )  # fmt: skip


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
    found: list[Any] = [None] * pipeline.peers.ranks
    try:
        dist.all_gather_object(found, mine)
    except RuntimeError as error:
        raise FlexgenError(f"--pipeline: lost a rank; what ended it is said there ({_first_line(error)})") from error
    return found


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

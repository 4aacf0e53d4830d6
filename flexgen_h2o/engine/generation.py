"""Who watches a run, and what is counted of it.

The module knows nothing of layers, tiers or weights.
"""

from __future__ import annotations

import sys
from collections import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType

import torch
from tqdm import tqdm

from flexgen_h2o.core import interrupts
from flexgen_h2o.core.errors import internal_reason
from flexgen_h2o.engine.sequence import CODE_INTERNAL, Sequence
from flexgen_h2o.kvcache.eviction.policy import Columns
from flexgen_h2o.kvcache.part import Prompts

LogitsWatch = Callable[[list[int], torch.Tensor], None]
SlotsWatch = Callable[[list[int], torch.Tensor, Columns], None]
PromptsWatch = Callable[[list[int], int, Prompts], None]


class Listener:
    """Functions that are called during a run, on its thread. These show nothing."""

    def sweep(self, tokens: int) -> None:
        """Called when a micro-batch has got `tokens` new tokens."""

    def finish(self, rows: abc.Sequence[Sequence]) -> None:
        """Called when these sequences are done. They are handed out next."""


class Progress(Listener):
    """The progress bar of a run, on a terminal only: tokens, tokens per second, time left.

    If a sequence stops early, the total shrinks by the tokens that it does not need.
    """

    def __init__(self, total_tokens: int) -> None:
        with interrupts.held():  # tqdm starts a thread
            self._bar = tqdm(
                total=total_tokens,
                unit="token",
                desc="generate",
                disable=not self.on_terminal(),
                file=sys.stderr,
            )

    @staticmethod
    def on_terminal() -> bool:
        return sys.stderr is not None and sys.stderr.isatty()

    def sweep(self, tokens: int) -> None:
        self._bar.update(tokens)

    def finish(self, rows: abc.Sequence[Sequence]) -> None:
        spared = sum(r.max_new - len(r.token_ids) for r in rows)
        if spared and self._bar.total is not None:
            self._bar.total -= spared

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()


@dataclass(frozen=True)
class Callbacks:
    """Functions called during a run, and how the run treats failures.

    The functions may not keep the tensors.
    """

    # Called at every step with (prompt indices, logits (sequences, vocab)).
    logits: LogitsWatch | None = None
    # Called with what attention saw in each layer of a decode sweep: (prompt indices, (sequences,)
    # filled slots, the KV entries of these sequences). Layers with windows are not shown: they hold
    # what they attend to.
    slots: SlotsWatch | None = None
    # Used instead of the progress bar.
    listener: Listener | None = None
    # Called with the attention of prompts if the eviction policy scores prompts: (prompt indices,
    # transformer block, attention). Layers with windows are not shown.
    prompts: PromptsWatch | None = None
    # Called after each generated token that does not end the sequence. If it returns False, the
    # sequence ends there with the reason "length".
    should_continue: Callable[[Sequence], bool] | None = None
    # If something raises for a sequence, or its logits are not finite, only this sequence ends with
    # an error. Otherwise the run ends with the exception. If the first logits of a whole
    # micro-batch of two or more are not finite, the run ends: the model is damaged. Sparing does
    # not work in a pipeline, because only the last rank sees logits.
    isolates_errors: bool = False


@contextmanager
def sparing(row: Sequence, isolates_errors: bool) -> Iterator[None]:
    """Turn an exception about one sequence into its error if others continue.

    See `Callbacks.isolates_errors`. A request to end the process passes through.
    """
    try:
        yield
    except BaseException as error:
        if not isolates_errors or interrupts.asks_to_end(error):
            raise
        row.fail(CODE_INTERNAL, internal_reason(error))


@dataclass
class Sweep:
    """Counts of one sweep of a block. The executor fills them.

    A KV entry is one key and one value of every KV head.
    """

    # Tokens that were fed.
    fed: int = 0
    # Those of them that came from prompts.
    prompts: int = 0
    # KV entries of all sequences and layers.
    held: int = 0
    # KV entries that the full cache would have held.
    full: int = 0
    # KV entries that decode attention read.
    read: int = 0
    # Sequences, summed over all layers with a KV cache.
    units: int = 0


@dataclass
class BlockStats:
    """Sums over the sweeps of a block, and lists of what each sweep took."""

    # Whether the lists are kept. They are not if sequences may join, because the block may then run
    # for any number of sweeps.
    keeps_lists: bool = True
    # All sweeps of the block so far.
    sweeps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    # `held`, `full` and `units` are sums of those of `Sweep` over the sweeps after the first. Until
    # the second they are those of the first.
    held: int = 0
    full: int = 0
    units: int = 0
    # Prompt tokens that were computed.
    fed_tokens: int = 0
    # Seconds of each sweep.
    sweep_seconds: list[float] = field(default_factory=list)
    # Seconds of each layer of each sweep, over all micro-batches.
    layer_seconds: list[float] = field(default_factory=list)
    # KV entries held and read in each sweep, as in `Sweep`.
    held_by_sweep: list[int] = field(default_factory=list)
    read_by_sweep: list[int] = field(default_factory=list)
    _prompt_share: float = 0.0  # share of prompt tokens in the newest sweep

    @property
    def later(self) -> int:
        """The number of sweeps after the first."""
        return max(0, self.sweeps - 1)

    def end_layer(self, seconds: float) -> None:
        """Add the seconds of a layer in a sweep, over all micro-batches."""
        if self.keeps_lists:
            self.layer_seconds.append(seconds)

    def end_sweep(self, sweep: Sweep, seconds: float) -> None:
        """Add the counts and seconds of a sweep."""
        if self.sweeps == 1:  # the first sweep counts only while it is the only one
            self.held = self.full = self.units = 0
        self.held += sweep.held
        self.full += sweep.full
        self.units += sweep.units
        self.sweeps += 1
        self._prompt_share = sweep.prompts / sweep.fed
        if self.keeps_lists:
            self.sweep_seconds.append(0.0)
            self.held_by_sweep.append(sweep.held)
            self.read_by_sweep.append(sweep.read)
        self.add_seconds(seconds)

    def add_seconds(self, seconds: float) -> None:
        """Add to the seconds of the newest sweep.

        A mixed sweep's seconds are split between prefill and decode by its tokens.
        """
        self.prefill_s += seconds * self._prompt_share
        self.decode_s += seconds * (1 - self._prompt_share)
        if self.keeps_lists:
            self.sweep_seconds[-1] += seconds

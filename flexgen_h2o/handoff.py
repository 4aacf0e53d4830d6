"""A stage of a pipeline and its neighbours: hidden states go from rank to rank, tokens from the last one to all others.

Each message names the tokens of a micro-batch's last sweep, so every rank ends the same rows before it goes on. A
micro-batch whose rows have all ended is told so to every rank, and then no more of it is said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from flexgen_h2o.errors import FlexgenError
from flexgen_h2o.tiers.events import Waitable
from flexgen_h2o.tiers.wire import Message, Wire


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

    def hear(self, sweep: int, micro_batch: int) -> tuple[int, ...]:
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

    def take_over(self, micro_batch: int, x: torch.Tensor) -> None:
        """Fill `x`, (tokens, width), with the hidden states of the rank before."""
        message = self._messages[micro_batch]
        assert message.hidden is not None
        x.copy_(message.hidden.view(x.dtype).view(x.shape))
        self._wire.release(message, self._fence())

    def pass_on(self, micro_batch: int, left: int, x: torch.Tensor) -> None:
        """Give the rank behind the hidden states `x`, (tokens, width), of the rows that are left."""
        message = self._messages.get(micro_batch)
        self._wire.send(micro_batch, left, () if message is None else message.tokens, x)

    def tell(self, micro_batch: int, left: int, tokens: Sequence[int]) -> None:
        """Give the first rank the tokens that were chosen, and say how many rows go on with them."""
        self._wire.send(micro_batch, left, tokens)

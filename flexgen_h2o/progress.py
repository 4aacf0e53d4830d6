"""The progress bar of a run: tokens, tokens per second and time left, on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from tqdm import tqdm

from flexgen_h2o.generation import Row


class Listener(Protocol):
    """Who hears of a run while it goes on, on its thread."""

    def sweep(self, tokens: int) -> None:
        """A micro-batch has got `tokens` new ones."""

    def finish(self, rows: Sequence[Row]) -> None:
        """These rows are done; they are handed out next."""


class Silent:
    """Hears of a run and shows nothing."""

    def sweep(self, tokens: int) -> None:
        pass

    def finish(self, rows: Sequence[Row]) -> None:
        pass


class Progress:
    """Counts generated tokens. A row that stops early takes the tokens it will not need off the total."""

    def __init__(self, total_tokens: int) -> None:
        self._bar = tqdm(
            total=total_tokens, unit="token", desc="generate", disable=not self.on_terminal(), file=sys.stderr
        )

    @staticmethod
    def on_terminal() -> bool:
        return sys.stderr is not None and sys.stderr.isatty()

    def sweep(self, tokens: int) -> None:
        """A micro-batch has got `tokens` new ones."""
        self._bar.update(tokens)

    def finish(self, rows: Sequence[Row]) -> None:
        spared = sum(r.max_new - len(r.token_ids) for r in rows)
        if spared and self._bar.total is not None:
            self._bar.total -= spared

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

"""A job's progress: the numbers of its status, shown on a terminal and kept in the status file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tqdm import tqdm

from flexgen_h2o.generation import Row
from flexgen_h2o.jobs.status import Status, tiers_text
from flexgen_h2o.progress import Progress

WRITE_EVERY_S = 1.0


class JobProgress:
    """Listens to the runs of a job. on_tick is called with every micro-batch; peak_bytes says what the engine holds.

    rows: of the input; done, errors: those that the output had before. others: what else it had, rows and error rows.
    """

    def __init__(
        self, output: Path, rows: int, done: int, errors: int, peak_bytes: Callable[[], dict[str, int]],
        on_tick: Callable[[], None], others: tuple[int, int] = (0, 0),
    ) -> None:  # fmt: skip
        self.status = Status(rows=rows, done=done, errors=errors, other_rows=others[0], other_errors=others[1])
        self._output, self._peak_bytes, self._on_tick = output, peak_bytes, on_tick
        self._done_before, self._began, self._written = done, time.monotonic(), 0.0
        self._bar = tqdm(
            total=rows, initial=done, unit="row", desc="batch", file=sys.stderr, disable=not Progress.on_terminal()
        )
        self._write()

    def sweep(self, tokens: int) -> None:
        """A micro-batch has got `tokens` new ones."""
        self.status.tokens += tokens
        self._on_tick()
        self._tick()

    def finish(self, rows: Sequence[Row]) -> None:
        """They are counted when they are written."""

    def prefilled(self, tokens: int, spared: int) -> None:
        """A run of prompts with so many tokens has ended; `spared` of them were not computed."""
        self.status.prompt_tokens += tokens
        self.status.spared_tokens += spared

    def wrote(self, rows: int, errors: int = 0) -> None:
        """So many rows more are in the output, `errors` of them error rows."""
        self.status.done += rows
        self.status.errors += errors
        self._bar.update(rows)
        self._tick()

    def end(self, state: str) -> None:
        """state: of the status file, for good."""
        self.status.state = state
        self._bar.close()
        self._write()

    def _tick(self) -> None:
        if time.monotonic() - self._written >= WRITE_EVERY_S:
            self._write()

    def _write(self) -> None:
        status, now = self.status, time.monotonic()
        status.seconds = now - self._began
        status.tokens_per_s = status.tokens / status.seconds if status.seconds > 0 else 0.0
        here = status.done - self._done_before
        status.eta_s = status.seconds / here * (status.rows - status.done) if here else None
        status.peak_bytes = {t: max(n, status.peak_bytes.get(t, 0)) for t, n in self._peak_bytes().items()} or (
            status.peak_bytes
        )
        self._written = now
        self._bar.set_postfix_str(f"{status.tokens_per_s:.1f} token/s, {tiers_text(status.peak_bytes)}", refresh=False)
        status.write(self._output)

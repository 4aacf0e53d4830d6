"""A window of a job's rows, run somewhere else than the output is: rows are handed out as they finish."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from flexgen_h2o.jobs.answers import error_row, success_row
from flexgen_h2o.jobs.fields import RowError
from flexgen_h2o.jobs.lines import Line
from flexgen_h2o.jobs.output import to_line
from flexgen_h2o.jobs.requests import RequestReader
from flexgen_h2o.jobs.runner import Before, Generator, Job
from flexgen_h2o.progress import Silent
from flexgen_h2o.prompts import Completion


@dataclass(frozen=True)
class Answer:
    """A row that is done. row: of the input; line: for the output, without its newline; tokens: new ones."""

    row: int
    line: bytes
    is_error: bool
    tokens: int


@dataclass(frozen=True)
class Notes:
    """What a window says at its end. other_models, first_other: as of `Job`; peak_bytes: of the engine, by tier.

    prompt_tokens, spared_tokens: as of `status.Status`.
    """

    other_models: int
    first_other: str
    peak_bytes: dict[str, int]
    prompt_tokens: int = 0
    spared_tokens: int = 0


class WindowJob(Job):
    """A job whose rows are `lines`, by row of the whole input, and whose output is whoever takes its answers.

    has_run: the engine has run another window; rows that do not fit together are run apart then.
    """

    def __init__(
        self, llm: Generator, reader: RequestReader, lines: Sequence[tuple[int, Line]], window: int | None = None,
        refill: bool = False, *, has_run: bool = False,
    ) -> None:  # fmt: skip
        self._given, self._row_of = lines, {line.number: row for row, line in lines}
        self._answers: queue.SimpleQueue[list[Answer] | BaseException | None] = queue.SimpleQueue()
        nothing = Before(np.zeros(len(lines), bool), 0, 0)
        super().__init__(llm, Path(), reader, cast(Any, None), nothing, cast(Any, Silent()), None, window, refill)
        self._has_run = has_run
        self.prompt_tokens = self.spared_tokens = 0

    def answers(self) -> Iterator[list[Answer]]:
        """Those that finish together, as they do; raises what the engine raises."""
        thread = threading.Thread(target=self._work, name="window", daemon=True)
        thread.start()
        while (found := self._answers.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            yield found
        thread.join()

    def _work(self) -> None:
        try:
            self.run()
            self._answers.put(None)
        except BaseException as error:
            self._answers.put(error)

    def _lines(self) -> Iterator[Line]:
        return (line for _, line in self._given)

    def _end(self) -> None:
        """There is no file to sync."""

    def _finish(self, done: Sequence[Completion]) -> None:
        found = []
        for one in done:
            line = to_line(success_row(self._running.pop(one.index), one, self.llm.model))
            found.append(Answer(self._row_of[one.index], line, False, len(one.token_ids)))
        self._answers.put(found)

    def _prefilled(self, tokens: int, spared: int) -> None:
        self.prompt_tokens += tokens
        self.spared_tokens += spared

    def _fail(self, custom_id: str, number: int, error: RowError) -> None:
        self._answers.put([Answer(self._row_of[number], to_line(error_row(custom_id, number, error)), True, 0)])

    def _check_errors(self) -> None:
        """Errors are counted where rows are written."""

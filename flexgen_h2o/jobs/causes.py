"""Count error rows by their cause, before a job and after it: the code, and the field if there is
one."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from flexgen_h2o.core.units import counted
from flexgen_h2o.jobs.input import Line
from flexgen_h2o.jobs.requests import Request, RequestReader, RowError

# Codes whose messages begin with the field that is at fault.
_OF_FIELDS = ("invalid_request", "unsupported", "context_length_exceeded")
# The model's name in requests of h2o_hf and of `evaluate lm-eval generate`, which name none.
NO_MODEL = "x"
# `line 6: messages[0].content: a string is expected` -> messages
_FIELD = re.compile(r"(?:line \d+: )?([A-Za-z_]\w{0,39})(?:[\w.\[\]]*): ")
MAX_CAUSES = 200  # further fields count by the code alone: a client may invent any number of them
_MOST_CHARACTERS = 600  # of the causes in one line of text


def cause_of(code: str, message: str) -> str:
    """Return the cause of an error row: `unsupported (tools)`, or the code if it names no field."""
    found = _FIELD.match(message) if code in _OF_FIELDS else None
    return code if found is None else f"{code} ({found[1]})"


def causes_text(causes: Counter[str], most: int | None = _MOST_CHARACTERS) -> str:
    """Return how often each cause occurs: `72 unsupported (tools), 11 invalid_json`.

    most: characters after which rarer causes are counted together; None names them all.
    """
    text = ""
    rest = causes.total()
    for cause, count in causes.most_common():
        one = f"{', ' if text else ''}{count} {cause}"
        if not count or (most is not None and text and len(text) + len(one) > most):
            break
        text += one
        rest -= count
    return f"{text}, {rest} with other causes (--dry-run names each)" if rest else text


class RowChecker:
    """Finds the rows of an input that will be error rows. Use one byte of memory per row.

    encodes: tokenize prompts, to find those that are too long as well.
    """

    def __init__(self, reader: RequestReader, encodes: bool) -> None:
        # It counts the columns of the rows that it reads apart from those of `reader`.
        self.reader = replace(reader, encodes=encodes, columns=Counter())
        self._encodes = encodes
        self._causes: list[str] = []
        self._of_row = bytearray()  # number of its cause, counted from 1; 0 for a row without error
        self.first = ""  # what is wrong with the first of them
        # Requests that name another model than the one that runs, with the first of them.
        self._other_models = 0
        self._first_other = ""

    def see(self, line: Line) -> Request | None:
        """Check the next row. Return its request, or None if it cannot be run."""
        request = None
        cause = 0
        try:
            request = self.reader.read(line)
            self._count_model(request)
        except RowError as error:
            self.first = self.first or f"line {line.number}: {error}"
            cause = self._number_of(cause_of(error.code, str(error)), error.code)
        self._of_row.append(cause)
        return request

    def _count_model(self, request: Request) -> None:
        if request.asked_model in (None, NO_MODEL, self.reader.model.name):
            return
        self._other_models += 1
        self._first_other = (
            self._first_other or f"{str(request.asked_model)[:100]} in line {request.index}"
        )

    def models_text(self) -> str:
        """Return a note on requests that name another model; empty if none does."""
        if not self._other_models:
            return ""
        name = "name" if self._other_models > 1 else "names"
        return (
            f"{counted(self._other_models, 'request')} {name} another model (the first: "
            f"{self._first_other}); {self.reader.model.name} answers them"
        )

    def _number_of(self, cause: str, code: str) -> int:
        if cause not in self._causes:
            cause = cause if len(self._causes) < MAX_CAUSES else code
            if cause not in self._causes:
                self._causes.append(cause)
        return self._causes.index(cause) + 1

    def fail(self, left: npt.NDArray[np.bool_]) -> int:
        """Return how many of the rows will be error rows. left: (rows,) the rows that count."""
        return int(np.count_nonzero(self._numbers(left)))

    def text(self, left: npt.NDArray[np.bool_], names_all: bool = False) -> str:
        """Return what will fail of these rows, as a sentence; empty if nothing will.

        names_all: name each cause, however many there are.
        """
        numbers = self._numbers(left)
        counts = np.bincount(numbers, minlength=1)
        causes = Counter(
            {self._causes[i - 1]: int(counts[i]) for i in np.flatnonzero(counts).tolist() if i}
        )
        if not causes:
            return ""
        least = "" if self._encodes else "at least "
        named = causes_text(causes, None) if names_all else causes_text(causes)
        lines = "an error line" if causes.total() == 1 else "error lines"
        return (
            f"{least}{causes.total():,} of {counted(len(numbers), 'prompt')} will be {lines}: "
            f"{named}; the first: {self.first}"
        )

    def _numbers(self, left: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self._of_row, np.uint8)[: len(left)][left]

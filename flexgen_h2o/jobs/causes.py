"""Count error rows by their cause, before a job and after it: the code, and the field if there is
one."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from flexgen_h2o.jobs.input import Line
from flexgen_h2o.jobs.requests import Request, RequestReader, RowError

# Codes whose messages begin with the field that is at fault.
_OF_FIELDS = ("invalid_request", "unsupported", "context_length_exceeded")
# `line 6: messages[0].content: a string is expected` -> messages
_FIELD = re.compile(r"(?:line \d+: )?([A-Za-z_]\w{0,39})(?:[\w.\[\]]*): ")
MAX_CAUSES = 200  # further fields count by the code alone: a client may invent any number of them
_SHOWN = 8  # causes that are printed


def cause_of(code: str, message: str) -> str:
    """Return the cause of an error row: `unsupported (tools)`, or the code if it names no field."""
    found = _FIELD.match(message) if code in _OF_FIELDS else None
    return code if found is None else f"{code} ({found[1]})"


def causes_text(causes: Counter[str]) -> str:
    """Return how often each cause occurs: `72 unsupported (tools), 11 invalid_json`."""
    known = [(cause, count) for cause, count in causes.most_common() if count]
    text = ", ".join(f"{count} {cause}" for cause, count in known[:_SHOWN])
    rest = sum(count for _, count in known[_SHOWN:])
    return f"{text}, {rest} others" if rest else text


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

    def see(self, line: Line) -> Request | None:
        """Check the next row. Return its request, or None if it cannot be run."""
        request = None
        cause = 0
        try:
            request = self.reader.read(line)
        except RowError as error:
            self.first = self.first or f"line {line.number}: {error}"
            cause = self._number_of(cause_of(error.code, str(error)), error.code)
        self._of_row.append(cause)
        return request

    def _number_of(self, cause: str, code: str) -> int:
        if cause not in self._causes:
            cause = cause if len(self._causes) < MAX_CAUSES else code
            if cause not in self._causes:
                self._causes.append(cause)
        return self._causes.index(cause) + 1

    def fail(self, left: npt.NDArray[np.bool_]) -> int:
        """Return how many of the rows will be error rows. left: (rows,) the rows that count."""
        return int(np.count_nonzero(self._numbers(left)))

    def text(self, left: npt.NDArray[np.bool_]) -> str:
        """Return what will fail of these rows, as a sentence; empty if nothing will."""
        numbers = self._numbers(left)
        counts = np.bincount(numbers, minlength=1)
        causes = Counter(
            {self._causes[i - 1]: int(counts[i]) for i in np.flatnonzero(counts).tolist() if i}
        )
        if not causes:
            return ""
        least = "" if self._encodes else "at least "
        return (
            f"{least}{causes.total()} of {len(numbers)} prompts will be error lines: "
            f"{causes_text(causes)}; the first: {self.first}"
        )

    def _numbers(self, left: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self._of_row, np.uint8)[: len(left)][left]

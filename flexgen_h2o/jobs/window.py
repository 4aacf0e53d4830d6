"""The look-ahead of a job: enough requests are read ahead to sort them into blocks, and no more."""

from __future__ import annotations

from collections.abc import Iterator

from flexgen_h2o.jobs.requests import Request

LEAST_ROWS = 1024
LEAST_BLOCKS = 4


def window_rows(block_size: int, asked: int | None) -> int:
    """Rows of a window, in whole blocks. asked: as --window; None: at least LEAST_BLOCKS blocks and LEAST_ROWS rows."""
    rows = max(LEAST_ROWS, LEAST_BLOCKS * block_size) if asked is None else asked
    return -(-rows // block_size) * block_size


class Window:
    """Requests that are read and not yet run, out of a stream of them."""

    def __init__(self, requests: Iterator[Request]) -> None:
        self._requests = requests
        self._ahead: list[Request] = []

    def fill(self, rows: int) -> list[Request]:
        """Read on until `rows` are ahead, or the stream ends; those that are. They stay in the window."""
        while len(self._ahead) < rows and (request := next(self._requests, None)) is not None:
            self._ahead.append(request)
        return self._ahead

    def take(self, rows: int) -> list[Request]:
        """The next `rows` requests, or those that there are, in the order of the input."""
        self.fill(rows)
        taken, self._ahead = self._ahead[:rows], self._ahead[rows:]
        return taken

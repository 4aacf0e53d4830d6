"""Refill: rows that wait for the places of those that finish, so that a block's sweeps stay full.

A row that enters prefills in the sweep in which its neighbours decode, and shares their weight load.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from flexgen_h2o.generation import Row

MoreRows = Callable[[], Sequence[Row]]


def nobody() -> Sequence[Row]:
    """No further rows."""
    return ()


class Queue:
    """Rows in the order in which they enter. more: gives further rows when all have entered; none: that was all.

    common: tokens of each prompt that are not fed again. `entered` counts the rows that have entered.
    """

    def __init__(self, rows: Sequence[Row], more: MoreRows = nobody, common: int = 0) -> None:
        self._rows, self._more, self._common = deque(rows), more, common
        self.entered = 0

    def take(self, places: int, tokens: int) -> list[Row]:
        """Those that enter now: at most `places` rows, whose prompts feed `tokens` tokens at most in all.

        A prompt that is too long for what is left of these waits, and shorter ones behind it may pass; it is the first
        to be asked next time.
        """
        taken: list[Row] = []
        waiting: list[Row] = []
        while len(taken) < places and tokens > 0 and (self._rows or (not waiting and self._read_on())):
            row = self._rows.popleft()
            length = len(row.prompt.token_ids) - self._common
            if length <= tokens:
                taken.append(row)
                tokens -= length
            else:
                waiting.append(row)
        self._rows.extendleft(reversed(waiting))
        self.entered += len(taken)
        return taken

    def _read_on(self) -> bool:
        self._rows.extend(self._more())
        return bool(self._rows)

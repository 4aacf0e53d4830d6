"""The rows of a run: in which blocks they are, and which of them enter a block that is running."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flexgen_h2o.generation import Row, in_order
from flexgen_h2o.prompts import Prompt
from flexgen_h2o.refill import Queue
from flexgen_h2o.row_rules import RowRules
from flexgen_h2o.run_facts import Tally
from flexgen_h2o.sampling import SamplingParams

More = Callable[[], tuple[Sequence[Prompt], Sequence[SamplingParams]] | None]


@dataclass(frozen=True)
class RunRows:
    """`rows` in `blocks`, or in one block and a `queue` of those that enter it. tally: counts them all."""

    rows: list[Row]
    blocks: list[list[list[Row]]]
    queue: Queue | None
    tally: Tally
    in_flight: int = 1  # of a pipeline: groups of a block's micro-batches, each of which loads the weights in a sweep

    @property
    def most_sweeps(self) -> int | None:
        """None where rows enter, which may be any number."""
        if self.queue is not None:
            return None
        return self.in_flight * sum(max(r.max_new for batch in block for r in batch) for block in self.blocks)


def run_rows(
    rules: RowRules,
    rows: list[Row],
    blocks: list[list[list[Row]]],
    refill: bool,
    more: More | None,
    in_flight: int = 1,
) -> RunRows:
    """refill, more: as of `LLM.run`. Rows that all end together gain nothing by waiting, and stay in their blocks."""
    tally = Tally()
    tally.begin(rows)
    if not refill or (more is None and (len(blocks) == 1 or not rules.may_end_apart(rows))):
        return RunRows(rows, blocks, None, tally, in_flight)

    def feed() -> list[Row]:
        found = more() if more is not None else None
        further = in_order(rules.add(*found)) if found is not None else []
        tally.begin(further)
        return further

    waiting = [row for block in blocks[1:] for batch in block for row in batch]
    return RunRows(rows, blocks[:1], Queue(waiting, feed), tally)

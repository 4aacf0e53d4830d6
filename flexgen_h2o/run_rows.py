"""The rows of a run: in which blocks they are, and which of them enter a block that is running."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from flexgen_h2o.block_facts import BlockLists, BlockSums
from flexgen_h2o.executor import Executor
from flexgen_h2o.generation import Row, in_order
from flexgen_h2o.prompts import Prompt
from flexgen_h2o.refill import Queue
from flexgen_h2o.row_rules import RowRules
from flexgen_h2o.run_facts import Tally
from flexgen_h2o.sampling import SamplingParams
from flexgen_h2o.schedule import Step

More = Callable[[], tuple[Sequence[Prompt], Sequence[SamplingParams]] | None]


@dataclass(frozen=True)
class RunRows:
    """`rows` in `blocks`, or in one block and a `queue` of those that enter it. tally: counts them all.

    common: tokens that all begin with, whose KV is held in one copy.
    """

    rows: list[Row]
    blocks: list[list[list[Row]]]
    queue: Queue | None
    tally: Tally
    common: int = 0

    def most_sweeps(self, loads: int) -> int | None:
        """How often the weights come, `loads` micro-batches sharing them; None where rows enter: any number."""
        if self.queue is not None:
            return None
        return sum(max(r.max_new for batch in block for r in batch) * -(-len(block) // loads) for block in self.blocks)


def run_blocks(
    executor: Executor, work: RunRows, order: Callable[[int], Iterator[Step]] | None, on_tokens: Callable[[int], None]
) -> None:
    """Run them one after another. order: of a block's steps by its number of micro-batches, instead of all of them."""
    for block in work.blocks:
        facts = BlockLists() if work.queue is None else BlockSums()
        with torch.inference_mode():
            executor.run_block(block, facts, order(len(block)) if order else None, on_tokens, work.queue)
        work.tally.blocks.append(facts)
        if order:  # it may have ended within a sweep: the next block's weights begin anew
            executor.restart()
    executor.finish()


def run_rows(
    rules: RowRules, rows: list[Row], blocks: list[list[list[Row]]], refill: bool, more: More | None, common: int = 0
) -> RunRows:
    """refill, more: as of `LLM.run`. Rows that all end together gain nothing by waiting, and stay in their blocks.

    common: as of `RunRows`; rows of `more` begin with the same.
    """
    tally = Tally()
    tally.begin(rows)
    if not refill or (more is None and (len(blocks) == 1 or not rules.may_end_apart(rows))):
        return RunRows(rows, blocks, None, tally, common)

    def feed() -> list[Row]:
        found = more() if more is not None else None
        further = in_order(rules.add(*found)) if found is not None else []
        tally.begin(further)
        return further

    waiting = [row for block in blocks[1:] for batch in block for row in batch]
    return RunRows(rows, blocks[:1], Queue(waiting, feed, common), tally, common)

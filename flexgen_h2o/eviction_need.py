"""What an eviction policy keeps, and what rows take, in the planner's terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flexgen_h2o.generation import Row
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.planner.memory import Shape
from flexgen_h2o.planner.need import Need
from flexgen_h2o.prefixes import PromptGroup, Sharing, common_prefix


def need_of(eviction: Eviction, rows: int, sizes: set[tuple[int, int]], num_blocks: int) -> Need:
    """The need of `rows` rows. sizes: the (prompt tokens, most new tokens) that there are among them."""
    blocks = range(num_blocks)
    lengths = {prompt for prompt, _ in sizes}
    prompt_len = max(lengths)
    return Need(
        rows=rows,
        prompt_len=prompt_len,
        gen_len=max(new for _, new in sizes),
        slots=tuple(max(eviction.slots(*size, block, num_blocks) for size in sizes) for block in blocks),
        kept=tuple(min(prompt_len, eviction.budget(prompt_len, block, num_blocks).columns) for block in blocks),
        record=eviction.needs.record,
        scored=eviction.needs.query_rows is None,
        by_length=eviction.budget(min(lengths), 0, 1) != eviction.budget(prompt_len, 0, 1),
    )


def need_of_rows(eviction: Eviction, rows: Sequence[Row], num_blocks: int, sharing: Sharing | None = None) -> Need:
    """The need of the rows of a run.

    Its prefix is one that any two of the rows share under `sharing`, so that no micro-batch of so many of them is fed
    more than the plan for equal prompts says.
    """
    sizes = {(len(row.prompt.token_ids), row.max_new) for row in rows}
    need = need_of(eviction, len(rows), sizes, num_blocks)
    prefix = common_prefix([row.prompt.token_ids for row in rows]) if sharing else 0
    if sharing is None or not sharing.pays(prefix, 2, 2 * need.prompt_len):
        return need
    return replace(need, prefix=prefix)


def shape_of_blocks(blocks: Sequence[Sequence[Sequence[PromptGroup]]], need: Need, at_once: int) -> Shape:
    """The shape that covers all these blocks of micro-batches. need: of the rows; at_once: the most tokens of a row
    that a decode sweep takes."""
    batches = [batch for block in blocks for batch in block]
    rows = max(sum(group.rows for group in batch) for batch in batches)
    return Shape(
        rows=rows,
        micro_batches=max(map(len, blocks)),
        tokens=max(rows * at_once, *(sum(group.tokens for group in batch) for batch in batches)),
        slots=need.slots,
        record=need.record,
        sharing=max((max(g.lengths) for batch in batches for g in batch if g.before and g.rows), default=0),
        common=need.common,
    )

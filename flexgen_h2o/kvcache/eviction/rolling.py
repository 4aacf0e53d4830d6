"""What rolling positions ask of a model, a policy and a row."""

from __future__ import annotations

from bisect import bisect_left

from flexgen_h2o.config import ModelSpec
from flexgen_h2o.errors import UsageError
from flexgen_h2o.kvcache.eviction.policy import RANKS, Eviction


def is_rolling(eviction: Eviction) -> bool:
    """Does a column's position follow from the columns that its row holds?"""
    return RANKS in eviction.needs.record


def check_rolling(eviction: Eviction, spec: ModelSpec, compresses_cache: bool) -> None:
    """UsageError where columns cannot take other positions than their tokens had."""
    if not is_rolling(eviction):
        return
    if spec.rotary is None:
        raise UsageError(
            f"--positions rolling: needs rotary embeddings, and {spec.name} has learned positions, which its hidden "
            "states and so its keys hold; leave it at original"
        )
    if compresses_cache:
        raise UsageError(
            "--positions rolling: turns keys as they are read, not packed ones; leave out --compress-cache"
        )


def most_new_tokens(eviction: Eviction, spec: ModelSpec, prompt_len: int, asked: int) -> int:
    """New tokens that a prompt of so many tokens may grow by: with original positions as long as there are some, with
    rolling ones as long as its columns are no more than there are positions.

    The newest token needs no position of its own, so a prompt that fills all positions still gets one.
    """
    if not is_rolling(eviction):
        return min(asked, spec.max_positions - prompt_len + 1)

    def is_too_much(new: int) -> bool:
        columns = (eviction.slots(prompt_len, new, block, spec.num_blocks) for block in range(spec.num_blocks))
        return max(columns) > spec.max_positions

    return max(1, bisect_left(range(1, asked + 1), True, key=is_too_much))

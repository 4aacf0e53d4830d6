"""What `LLM` checks of its arguments before it opens anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flexgen_h2o.config import DTYPE_BYTES, ModelSpec, Policy, read_policy
from flexgen_h2o.courses import ForcedTokens
from flexgen_h2o.errors import UsageError
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.kvcache.eviction.rolling import most_new_tokens
from flexgen_h2o.paths import usable_path
from flexgen_h2o.planner.need import AutoPolicy
from flexgen_h2o.prompts import Prompt, prompts_from_python


def read_policy_argument(policy: Policy | AutoPolicy | str | Path) -> Policy | AutoPolicy:
    """UsageError for a bad file."""
    if policy == "auto":
        return AutoPolicy()
    if isinstance(policy, AutoPolicy):
        return policy
    return policy if isinstance(policy, Policy) else read_policy(usable_path(policy, "--policy")).policy


def check_together(policy: Policy | AutoPolicy, eviction: Eviction) -> None:
    chosen = policy.base if isinstance(policy, AutoPolicy) else policy
    if chosen.attn_sparsity != 1 and eviction.needs.record:
        raise UsageError(f"attn_sparsity: is for the full cache, not for {eviction.name}; leave one of them out")


def read_continuations(
    prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]], spec: ModelSpec, eviction: Eviction,
    at_once: int,
) -> tuple[list[Prompt], ForcedTokens]:  # fmt: skip
    """The prompts of `LLM.follow`, and what they take. UsageError where they do not go together or are too long."""
    read = prompts_from_python(prompts, None, spec.vocab_size)
    after = prompts_from_python(continuations, None, spec.vocab_size)
    if len(read) != len(after):
        raise UsageError(f"continuations: {len(after)} for {len(read)} prompts")
    for prompt, more in zip(read, after, strict=True):
        length, new = len(prompt.token_ids), len(more.token_ids)
        if length > spec.max_positions or most_new_tokens(eviction, spec, length, new) < new:
            limit = spec.max_positions
            raise UsageError(f"prompts[{prompt.index}]: with its continuation longer than {limit} positions")
    return read, ForcedTokens({p.index: p.token_ids for p in after}, at_once)


def check_dtype(dtype: str) -> str | None:
    """None means auto."""
    if dtype == "auto":
        return None
    if dtype not in DTYPE_BYTES:
        raise UsageError(f"--dtype {dtype}: not one of auto, {', '.join(DTYPE_BYTES)}")
    return dtype

"""What `LLM` checks of its arguments before it opens anything."""

from __future__ import annotations

from pathlib import Path

from flexgen_h2o.config import DTYPE_BYTES, Policy, check_bits_used, read_policy
from flexgen_h2o.errors import UsageError
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.paths import usable_path
from flexgen_h2o.planner.need import AutoPolicy, base_of


def read_policy_argument(policy: Policy | AutoPolicy | str | Path) -> Policy | AutoPolicy:
    """UsageError for a bad file, and for bits of what is not compressed."""
    if policy == "auto":
        return AutoPolicy()
    if isinstance(policy, AutoPolicy | Policy):
        check_bits_used(base_of(policy))
        return policy
    return read_policy(usable_path(policy, "--policy")).policy


def check_together(policy: Policy | AutoPolicy, eviction: Eviction) -> None:
    chosen = base_of(policy)
    if chosen.attn_sparsity != 1 and eviction.needs.record:
        raise UsageError(f"attn_sparsity: is for the full cache, not for {eviction.name}; leave one of them out")


def check_dtype(dtype: str) -> str | None:
    """None means auto."""
    if dtype == "auto":
        return None
    if dtype not in DTYPE_BYTES:
        raise UsageError(f"--dtype {dtype}: not one of auto, {', '.join(DTYPE_BYTES)}")
    return dtype

"""What `LLM` checks of its arguments before it opens anything."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import overload

from flexgen_h2o.config import DTYPE_BYTES, MemoryBudget, Policy, check_bits_used, read_policy
from flexgen_h2o.errors import UsageError
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.paths import usable_path
from flexgen_h2o.planner.need import AutoPolicy, base_of
from flexgen_h2o.profile import HardwareProfile
from flexgen_h2o.sampling import SamplingParams


@overload
def check_text(name: str, value: object) -> str: ...
@overload
def check_text(name: str, value: object, or_none: bool) -> str | None: ...
def check_text(name: str, value: object, or_none: bool = False) -> str | None:
    """A name or a path as a string; UsageError that names the argument for anything else, an empty one too."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else value
    if or_none and text is None:
        return None
    if not isinstance(text, str):
        raise UsageError(f"{name}: {value!r:.60} is not a text")
    if or_none and not text:
        raise UsageError(f"--{name} '': is empty; leave --{name} out")
    return text


def check_budget(budget: object) -> MemoryBudget:
    """None: what is free. UsageError for anything but a MemoryBudget."""
    if budget is not None and not isinstance(budget, MemoryBudget):
        raise UsageError(f'budget: {budget!r:.60} is not a MemoryBudget; write for example MemoryBudget(host="16GiB")')
    return budget or MemoryBudget()


def check_hardware(hardware: object) -> HardwareProfile | str | None:
    """A profile, its file or its name; it is read when a plan is made."""
    known = hardware is None or isinstance(hardware, HardwareProfile)
    return hardware if known else check_text("hardware", hardware)  # type: ignore[return-value]


def check_params(params: object) -> SamplingParams | Sequence[SamplingParams]:
    """One SamplingParams, or a list with one for each prompt; None: the defaults. UsageError names the entry."""
    if params is None:
        return SamplingParams()
    if isinstance(params, SamplingParams):
        return params
    if not isinstance(params, Sequence) or isinstance(params, str | bytes):
        raise UsageError(f"params: {params!r:.60} is neither a SamplingParams nor a list with one for each prompt")
    for i, one in enumerate(params):
        if not isinstance(one, SamplingParams):
            raise UsageError(f"params[{i}]: {one!r:.60} is not a SamplingParams")
    return params


def check_watch(watch: object, refill: object) -> None:
    """UsageError for a watch_logits that cannot be called, and a refill that is neither true nor false."""
    if watch is not None and not callable(watch):
        raise UsageError(f"watch_logits: {watch!r:.60} is not a function")
    if not isinstance(refill, bool):
        raise UsageError(f"refill: {refill!r:.60} is not true or false")


def read_policy_argument(policy: Policy | AutoPolicy | str | Path) -> Policy | AutoPolicy:
    """UsageError for a bad file, for bits of what is not compressed, and for what is no policy at all."""
    if isinstance(policy, AutoPolicy | Policy):
        check_bits_used(base_of(policy))
        return policy
    if not isinstance(policy, str | os.PathLike):
        raise UsageError(f'policy: {policy!r:.60} is not a Policy, "auto" or a policy file')
    return AutoPolicy() if policy == "auto" else read_policy(usable_path(policy, "--policy")).policy


def check_together(policy: Policy | AutoPolicy, eviction: Eviction) -> None:
    chosen = base_of(policy)
    if chosen.attn_sparsity != 1 and eviction.needs.record:
        raise UsageError(f"attn_sparsity: is for the full cache, not for {eviction.name}; leave one of them out")


def check_dtype(dtype: str) -> str | None:
    """None means auto."""
    if dtype == "auto":
        return None
    if check_text("dtype", dtype) not in DTYPE_BYTES:
        raise UsageError(f"--dtype {dtype}: not one of auto, {', '.join(DTYPE_BYTES)}")
    return dtype

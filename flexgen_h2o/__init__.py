"""flexgen_h2o: high-throughput offloading inference with heavy-hitter KV caches."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

import flexgen_h2o.core.forks  # noqa: F401  before any fork, and before torch is imported here
from flexgen_h2o.core.cgroups import limit_threads as _limit_threads

if TYPE_CHECKING:
    from flexgen_h2o.core.config import MemoryBudget, Policy
    from flexgen_h2o.engine.sampling import SamplingParams
    from flexgen_h2o.engine.sequence import Completion
    from flexgen_h2o.kvcache.eviction import H2O, Full, Local
    from flexgen_h2o.llm import LLM


# These must be set before torch is imported. Spinning OpenMP workers take the cores from the
# transfer threads. Two caches of matmul kernels hold 0.6 MB per shape, and 1,024 shapes each by
# default: ragged prompts fill them.
for _name, _value in (
    ("OMP_WAIT_POLICY", "PASSIVE"),
    ("LRU_CACHE_CAPACITY", "128"),
    ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128"),
):
    os.environ.setdefault(_name, _value)
_limit_threads()

__version__ = "0.1.0"


__all__ = ["H2O", "LLM", "Completion", "Full", "Local", "MemoryBudget", "Policy", "SamplingParams"]

_HOMES = {
    "H2O": "kvcache.eviction",
    "Full": "kvcache.eviction",
    "Local": "kvcache.eviction",
    "LLM": "llm",
    "Completion": "engine.sequence",
    "SamplingParams": "engine.sampling",
    "MemoryBudget": "core.config",
    "Policy": "core.config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if "torch" not in sys.modules:
        importlib.import_module(f"{__name__}.core.files").check_working_folder()
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

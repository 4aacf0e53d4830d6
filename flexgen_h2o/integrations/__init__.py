"""The eviction policies inside Hugging Face transformers, without the engine: `enable_h2o(model, ...)`."""

from __future__ import annotations

from flexgen_h2o.integrations.cache import EvictingCache
from flexgen_h2o.integrations.enable import disable_eviction, enable_eviction, enable_h2o

disable_h2o = disable_eviction

__all__ = ["EvictingCache", "disable_eviction", "disable_h2o", "enable_eviction", "enable_h2o"]

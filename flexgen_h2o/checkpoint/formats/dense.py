"""Weights as most checkpoints have them: bfloat16, float16 or float32, held in the compute dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_h2o.checkpoint.formats import WeightFormat
from flexgen_h2o.core.config import Policy


def recognise(policy: Policy, quantization: Mapping[str, Any] | None, itemsize: int) -> WeightFormat | None:
    return WeightFormat(itemsize) if quantization is None else None

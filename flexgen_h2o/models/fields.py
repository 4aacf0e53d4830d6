"""Fields of a Hugging Face config that families share, checked as they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from flexgen_h2o.config import TensorSpec
from flexgen_h2o.errors import UsageError
from flexgen_h2o.units import check_int

# Far beyond any model: a damaged config must not keep the reader busy for minutes.
MOST = {
    "hidden_size": 2**18, "num_hidden_layers": 2**12, "num_attention_heads": 2**12, "num_key_value_heads": 2**12,
    "head_dim": 2**16, "ffn_dim": 2**20, "intermediate_size": 2**20, "vocab_size": 2**24,
}  # fmt: skip


def read_sizes(config: Mapping[str, Any], names: Sequence[str]) -> list[int]:
    """Positive whole numbers by name, none beyond MOST; UsageError names the field."""
    return [check_int(n, config.get(n), low=1, high=MOST[n]) for n in names]


def read_positive(config: Mapping[str, Any], name: str) -> float:
    """A finite number above 0; UsageError names the field."""
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UsageError(f"{name}: {value!r} is not a number above 0")
    return float(value)


def end_tokens(config: Mapping[str, Any]) -> tuple[int, ...]:
    """End-of-sequence ids: a config has none, one or a list."""
    eos = config.get("eos_token_id")
    return tuple(eos) if isinstance(eos, list) else (() if eos is None else (int(eos),))


def linear_tensors(role: str, name: str, rows: int, columns: int, bias: bool) -> tuple[TensorSpec, ...]:
    """`role`.weight (rows, columns), and `role`.bias (rows,) where there is one; `name` as in the checkpoint."""
    weight = TensorSpec(f"{role}.weight", f"{name}.weight", (rows, columns))
    return (weight, TensorSpec(f"{role}.bias", f"{name}.bias", (rows,))) if bias else (weight,)

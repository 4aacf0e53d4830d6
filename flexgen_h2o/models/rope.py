"""Rotary embeddings of a config: the frequencies that transformers computes for its rope type."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch

from flexgen_h2o.config import Rotary
from flexgen_h2o.errors import UsageError

# The others depend on the length of a sequence, so that keys would have to be rotated anew, or on the layer. dynamic
# does too, but not up to max_position_embeddings, and nothing goes beyond it.
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


def read_rotary(config: Mapping[str, Any]) -> Rotary:
    """The rotary embeddings of a config whose sizes are checked; UsageError names the field.

    config: with its model_type and transformers' defaults filled in.
    """
    parameters = config.get("rope_parameters")
    if not isinstance(parameters, Mapping):
        raise UsageError(f"rope_parameters: {parameters!r} is not an object")
    kind = parameters.get("rope_type")
    if kind not in ROPE_TYPES:
        raise UsageError(f"rope_parameters: rope_type {kind!r} is not supported (known: {', '.join(ROPE_TYPES)})")
    try:
        frequencies, scaling = _default(config) if kind == "default" else _scaled(config, kind)
    except Exception as error:  # transformers raises many kinds for a missing or bad value
        raise UsageError(f"rope_parameters: not usable with rope_type {kind!r} ({error!r})") from error
    if not (len(frequencies) and bool((frequencies.isfinite() & (frequencies > 0)).all()) and 0 < scaling < 1e6):
        raise UsageError(f"rope_parameters: rope_type {kind!r} with these values gives no usable frequencies")
    return Rotary(tuple(frequencies.tolist()), scaling)


def _default(config: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """theta^(-2i/d) for the pairs of the share of a head that turns (Su et al. 2021, section 3.2.2)."""
    parameters = config["rope_parameters"]
    width = int(_head_dim(config) * parameters.get("partial_rotary_factor", 1.0))
    return 1.0 / (parameters["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float) / width)), 1.0


def _scaled(config: Mapping[str, Any], kind: str) -> tuple[torch.Tensor, float]:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    known = AutoConfig.for_model(**deepcopy(dict(config)))
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](known, torch.device("cpu"))
    return frequencies.float(), float(scaling)


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])

"""Enabling is undone without a trace; what eviction cannot do is refused in one line that says
so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    PreTrainedModel,
)

from flexgen_h2o import integrations
from flexgen_h2o.core import libraries
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.integrations import disable_h2o, enable_eviction, enable_h2o
from flexgen_h2o.kvcache.eviction import Tova
from tests.integrations.models import Known, generated, known_model
from tests.parity.reference import random_prompts

PROMPTS = random_prompts((18, 11), seed=3)
SIZES = {"heavy_size": 4, "recent_size": 3}


def state(model: PreTrainedModel) -> dict[str, Any]:
    """What enabling could have left behind."""
    parts = dict(model.named_modules())
    return {
        "attributes": {name: sorted(vars(part)) for name, part in parts.items()},
        "hooks": {
            name: len(part._forward_pre_hooks) + len(part._forward_hooks)
            for name, part in parts.items()
        },
        "config": copy.deepcopy(vars(model.config)),
        "generation": model.generation_config.to_dict(),
        "methods": (type(model).generate, type(model).forward, type(model.get_decoder()).forward),
    }


@pytest.mark.parametrize(
    ("name", "attention"), [("opt", "sdpa"), ("llama, grouped", "eager"), ("neox", "sdpa")]
)
def test_disabled_model_is_as_before(name: str, attention: str) -> None:
    model = known_model(name).model
    model.set_attn_implementation(attention)
    before = state(model)
    want = generated(model, PROMPTS, 8)
    enable_h2o(model, **SIZES)
    evicted = generated(model, PROMPTS, 8)
    assert state(model) != before and not evicted.sequences.equal(want.sequences)
    enable_eviction(model, Tova(**SIZES), mode="mask")  # takes the other's place
    assert not generated(model, PROMPTS, 8).sequences.equal(evicted.sequences)
    disable_h2o(model)
    assert state(model) == before
    again = generated(model, PROMPTS, 8)
    assert again.sequences.equal(want.sequences) and type(again.past_key_values) is DynamicCache
    with pytest.raises(UsageError, match="model: eviction is not enabled"):
        disable_h2o(model)


def test_two_models_evict_apart(known: Callable[[str], Known]) -> None:
    one = known("opt").model
    other = known("neox").model
    want = generated(other, PROMPTS, 8).sequences
    enable_h2o(one, **SIZES)
    try:
        assert generated(other, PROMPTS, 8).sequences.equal(want)
        enable_h2o(other, **SIZES)
        evicted = generated(other, PROMPTS, 8).sequences
        disable_h2o(one)
        assert generated(other, PROMPTS, 8).sequences.equal(evicted) and not evicted.equal(want)
    finally:
        disable_h2o(other)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"mode": "hide"}, "mode"),
        ({"heavy_ratio": 0.1, "heavy_size": 3}, "heavy_size"),
        ({"kv_budget": 0.2}, "max_new_tokens"),
        ({"heavy_size": 3, "max_new_tokens": 8}, "max_new_tokens"),
        ({"kv_budget": 0.2, "max_new_tokens": 0}, "max_new_tokens"),
        ({"kv_budget": 20, "max_new_tokens": 8}, "kv_budget"),
    ],
)
def test_wrong_settings_are_refused(
    settings: dict[str, Any], names: str, known: Callable[[str], Known]
) -> None:
    model = known("opt").model
    before = state(model)
    with pytest.raises(UsageError, match=f"^{names}: "):
        enable_h2o(model, **settings)
    assert state(model) == before


@pytest.mark.parametrize("name", ["opt", "neox"])
def test_an_untried_transformers_is_used_only_if_tokens_are_right(
    name: str, known: Callable[[str], Known], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The self-test finds that models take their cache under a name that nobody knew."""
    model = known(name).model
    before = state(model)
    draws = torch.get_rng_state()
    monkeypatch.setattr(libraries, "is_tried", lambda _: False)
    libraries.check_library.cache_clear()
    enable_h2o(model, **SIZES)
    disable_h2o(model)
    assert torch.get_rng_state().equal(draws)
    libraries.check_library.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(integrations, "_cache_name", lambda _: "cache_of_tomorrow")
        with pytest.raises(UsageError, match=r"^transformers 5\..*pip install"):
            enable_h2o(model, **SIZES)
    assert state(model) == before


@pytest.mark.parametrize("mode", ["drop", "mask"])
def test_a_generation_beyond_what_was_promised_is_refused(
    mode: str, known: Callable[[str], Known]
) -> None:
    """Up to it nothing is; a further turn counts too."""
    model = known("llama, grouped").model
    enable_h2o(model, kv_budget=0.5, max_new_tokens=6, mode=mode)
    try:
        done = generated(model, PROMPTS, 6)
        assert done.sequences.shape[1] == 18 + 6
        with pytest.raises(UsageError, match=r"^max_new_tokens: "):
            generated(model, PROMPTS, 7)
        with torch.no_grad(), pytest.raises(UsageError, match=r"^max_new_tokens: "):
            model(done.sequences[:, -1:], past_key_values=done.past_key_values)
    finally:
        disable_h2o(model)

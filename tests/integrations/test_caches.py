"""Beside plain greedy generation: full budgets, beams, further turns, pipelines, texts that are
scored, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from flexgen_h2o.integrations import EvictingCache, disable_h2o, enable_eviction
from flexgen_h2o.kvcache.eviction import H2O, Full, H2ONorm
from flexgen_h2o.kvcache.eviction.policy import Eviction
from tests.integrations.models import Known, generated, padded
from tests.parity.reference import random_prompts

PROMPTS = random_prompts((18, 11, 5, 11), seed=3)
SMALL = H2O(heavy_size=4, recent_size=3)
FAMILIES = pytest.mark.parametrize("name", ["opt", "llama, grouped"])
Models = Callable[[str], Known]


@contextmanager
def evicting(model: PreTrainedModel, eviction: Eviction, mode: str = "drop") -> Iterator[None]:
    enable_eviction(model, eviction, mode)
    try:
        yield
    finally:
        disable_h2o(model)


@pytest.mark.parametrize(
    ("name", "beams"), [("opt", 1), ("llama, grouped", 3), ("mistral", 1), ("neox", 3)]
)
def test_budget_for_everything_changes_nothing(name: str, beams: int, known: Models) -> None:
    """And with a small one both modes choose the same tokens or beams."""
    model = known(name).model
    want = generated(model, PROMPTS, 10, num_beams=beams).sequences
    small = []
    for mode in ("drop", "mask"):
        for eviction in (H2O(heavy_size=20, recent_size=10), Full()):
            with evicting(model, eviction, mode):
                assert generated(model, PROMPTS, 10, num_beams=beams).sequences.equal(want)
        with evicting(model, SMALL, mode):
            small.append(generated(model, PROMPTS, 10, num_beams=beams).sequences)
    assert small[0].equal(small[1]) and not small[0].equal(want)


def test_memory_shrinks_to_the_slots_of_the_neediest_row(known: Models) -> None:
    """4 kv-heads of width 12 in 2 blocks, fp32, and a record of position and score."""
    model = known("opt").model
    with evicting(model, SMALL):
        kept = generated(model, PROMPTS, 16).past_key_values
    rows = len(PROMPTS) * 4
    columns = 18 + 15
    assert kept.nbytes == 2 * (rows * 8 * (2 * 12 * 4 + 4 + 4) + rows * 4)
    assert all(layer.keys.shape == (len(PROMPTS), 4, 8, 12) for layer in kept.layers)
    assert kept.get_seq_length() == columns
    kept.reset()
    assert kept.nbytes == 0 and kept.get_seq_length() == 0


def test_large_budget_takes_memory_as_it_is_needed(known: Models) -> None:
    """Slots are added while decoding, and what they hold stays."""
    model = known("opt").model
    prompt = random_prompts((4,), seed=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flexgen_h2o.integrations.cache.GROWTH", 3)
        with evicting(model, H2ONorm(heavy_size=9, recent_size=3, sinks=1, grace=0)):
            grown = generated(model, prompt, 24)
    with evicting(model, H2ONorm(heavy_size=9, recent_size=3, sinks=1, grace=0), "mask"):
        assert generated(model, prompt, 24).sequences.equal(grown.sequences)
    assert grown.past_key_values.layers[0].keys.shape[2] == 13


@FAMILIES
def test_a_further_turn_goes_on_from_what_is_left(name: str, known: Models) -> None:
    """Several tokens on a cache are as many forwards of one token, in both modes."""
    model = known(name).model
    turn = 6
    ids = torch.tensor(random_prompts((15, 15), seed=4))
    logits: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for mode in ("drop", "mask"):
            with evicting(model, SMALL, mode):
                for step in (1, turn):
                    cache: Any = DynamicCache(config=model.config)
                    cache = model(ids[:, :-turn], past_key_values=cache).past_key_values
                    parts = ids[:, -turn:].split(step, dim=1)
                    logits[f"{mode} {step}"] = torch.cat(
                        [model(p, past_key_values=cache).logits for p in parts], 1
                    )
                    assert isinstance(cache, EvictingCache) and cache.get_seq_length() == 15
    first = logits.pop("drop 1")
    assert all((first - other).abs().max() < 1e-4 for other in logits.values())


# ---- texts that are scored: one forward without a cache


@pytest.mark.parametrize(
    ("name", "padding"), [("opt", "left"), ("llama, grouped", "right"), ("neox", "right, unmasked")]
)
def test_scored_text_sees_all_columns_or_what_would_be_left(
    name: str, padding: str, known: Models
) -> None:
    """When dropping, and when masking. As if each text had been generated from its first token,
    whatever is padded and computed beside it."""
    model = known(name).model
    batch = padded(PROMPTS)
    if padding != "left":
        batch = {
            key: torch.stack([t.roll(len(p), 0) for t, p in zip(batch[key], PROMPTS, strict=True)])
            for key in batch
        }
    real = batch["attention_mask"].bool()
    if padding == "right, unmasked":  # as lm_eval gives them
        del batch["attention_mask"]
    with torch.no_grad():
        want = model(**batch).logits
        with evicting(model, SMALL, "mask"):
            got = model(**batch).logits
            scored = model(**batch, use_cache=False)
        assert scored.past_key_values is None and scored.logits.equal(got)
        with evicting(model, SMALL):
            for use_cache in (True, False):
                dropped = model(**batch, use_cache=use_cache).logits
                assert (dropped - want)[real].abs().max() < 1e-4
            for row, prompt in enumerate(PROMPTS):
                cache: Any = DynamicCache(config=model.config)
                for i, token in enumerate(prompt):
                    one = model(torch.tensor([[token]]), past_key_values=cache)
                    cache = one.past_key_values
                    assert (one.logits[0, 0] - got[row][real[row]][i]).abs().max() < 1e-4, (
                        f"row {row}, token {i}"
                    )

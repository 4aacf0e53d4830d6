"""Use the eviction policies in Hugging Face transformers, without the engine: `enable_h2o(model,
...)`.

Only public interfaces of transformers are used to switch eviction on and off. Two things are set,
and undone. The first is the attention implementation: a registered function that asks the cache.
The second is a forward pre-hook of the decoder. It passes an `EvictingCache` to a forward that has
no cache or an empty one. The cache reaches the attention function as a keyword argument of the
forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch.utils.hooks import RemovableHandle
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import CacheLayerMixin

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.libraries import check_library
from flexgen_h2o.core.packing import KVSizes
from flexgen_h2o.core.units import check_int
from flexgen_h2o.integrations.cache import MODES, EvictingCache, LimitedGrowth
from flexgen_h2o.kvcache.eviction import H2O, Eviction, check_eviction
from flexgen_h2o.kvcache.eviction.policy import POSITIONS, SCORES, is_rolling, with_sizes

ATTENTION = "flexgen_h2o"  # name of this package's attention implementation
MODEL_TYPES = ("opt", "llama", "mistral", "qwen3", "qwen3_moe", "mixtral", "olmoe", "gpt_neox")
# The oldest version that was tried. The engine itself runs with older ones.
MIN_TRANSFORMERS = "5.20"

__all__ = ["EvictingCache", "disable_eviction", "disable_h2o", "enable_eviction", "enable_h2o"]

# The pre-hook and the earlier attention implementation, for `disable_eviction` to undo.
_enabled: WeakKeyDictionary[PreTrainedModel, tuple[RemovableHandle, str]] = WeakKeyDictionary()


def enable_h2o(
    model: PreTrainedModel,
    heavy_ratio: float | None = None,
    recent_ratio: float | None = None,
    heavy_size: int | None = None,
    recent_size: int | None = None,
    mode: str = "drop",
    **more: Any,
) -> None:
    """Use H2O as published (`flexgen_h2o.H2O`) in all generations of `model`, until
    `disable_h2o(model)`.

    heavy_ratio, recent_ratio: shares of each sequence's prompt, without its padding.
    heavy_size, recent_size: numbers of KV entries.
    mode: "drop" or "mask", as in `enable_eviction`.
    more: `kv_budget` with `max_new_tokens`, and other settings of H2O.

    All else is as in `enable_eviction`. Raise UsageError as it does.
    """
    most = more.pop("max_new_tokens", None)
    enable_eviction(
        model, H2O(heavy_ratio, recent_ratio, heavy_size, recent_size, **more), mode, most
    )


def enable_eviction(
    model: PreTrainedModel,
    eviction: Eviction,
    mode: str = "drop",
    max_new_tokens: int | None = None,
) -> None:
    """Let `model.generate` keep the KV entries that `eviction` keeps.

    eviction: `H2O(...)`, `H2ONorm(...)`, `Tova(...)`, ... of flexgen_h2o.kvcache.eviction. It
    decides separately for each (sequence, kv-head), with the scores of its query heads summed.
    mode: "drop" shrinks the cache to sinks + heavy + recent + 1 slots per (sequence, kv-head).
    "mask" keeps all KV entries and masks those that would be evicted. Both give the same tokens.
    max_new_tokens: most tokens that are generated after a prompt. Only kv_budget and kv_bytes need
    it. A sequence keeps that share of its prompt and of max_new_tokens, or of as many as the
    model's positions allow, as in the engine. A generation that exceeds it is refused.

    A second call replaces the first. A forward that is given a cache (`generate` always gives one)
    treats its tokens as prompts. A forward without one is a text that is scored. "drop" evicts
    nothing before the end of the text. "mask" lets each token see what would be left if the tokens
    before it had been generated, with shares of the whole text.

    Raise UsageError if the model or the settings are not supported.
    """
    eviction = check_eviction(eviction)
    if not isinstance(mode, str) or mode not in MODES:
        raise UsageError(f"mode: {mode!r} is not one of {', '.join(MODES)}")
    if is_rolling(eviction):  # the model rotates its keys before they are cached
        raise UsageError("positions: rolling works in the engine only; leave it at original here")
    unknown = set(eviction.needs.record) - {POSITIONS, SCORES}
    if unknown:
        raise UsageError(
            f"eviction: {eviction.name} needs {', '.join(unknown)} of its KV entries, which only "
            "the engine has; "
            "choose another"
        )
    of_sequence = [
        name for name in ("kv_budget", "kv_bytes") if getattr(eviction, name, None) is not None
    ]
    if bool(of_sequence) != (max_new_tokens is not None):
        raise UsageError(
            f"max_new_tokens: {of_sequence[0]} is a share of prompt and new tokens; say how many "
            "new ones there are"
            if max_new_tokens is None
            else "max_new_tokens: only kv_budget and kv_bytes ask for it; leave it out, or give "
            "one of them"
        )
    _check_model(model)
    width = (
        getattr(model.config, "head_dim", None)
        or model.config.hidden_size // model.config.num_attention_heads
    )
    eviction = with_sizes(eviction, KVSizes(width))
    if max_new_tokens is not None:
        check_int("max_new_tokens", max_new_tokens, 1)
        positions = model.config.max_position_embeddings
        eviction = LimitedGrowth(eviction, most_new=max_new_tokens, positions=positions)
    check_library("transformers", _self_test_of(cast(Any, type(model.config))))
    if model in _enabled:
        disable_eviction(model)
    _switch_on(model, eviction, mode)


def _switch_on(model: PreTrainedModel, eviction: Eviction, mode: str) -> None:
    attention = _attention_of(model)
    AttentionInterface.register(ATTENTION, torch.compiler.disable(evicting_attention))
    model.set_attn_implementation(ATTENTION)
    give = torch.compiler.disable(lambda *forward: _give_cache(eviction, mode, *forward))
    hook = model.get_decoder().register_forward_pre_hook(give, with_kwargs=True)
    _enabled[model] = hook, attention


def disable_eviction(model: PreTrainedModel) -> None:
    """Restore the model as it was before `enable_eviction` or `enable_h2o`.

    Raise UsageError if eviction is not enabled.
    """
    if not isinstance(model, PreTrainedModel) or model not in _enabled:
        raise UsageError("model: eviction is not enabled on it; call enable_h2o(model) first")
    hook, attention = _enabled.pop(model)
    hook.remove()
    model.set_attn_implementation(attention)


disable_h2o = disable_eviction


# Sizes of the model of the self-test, by the names that the families have for them.
_TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # random weights whose tokens vary
    "sliding_window": None,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


@lru_cache
def _self_test_of(config: type[PreTrainedConfig]) -> Callable[[], bool]:
    """Return the self-test of one type of model, the same object for the same type."""
    return partial(_self_test, config)


def _self_test(config: type[PreTrainedConfig]) -> bool:
    """Return whether a tiny model gives the right tokens while eviction is enabled.

    Nothing is evicted from a large cache, so its tokens are those without eviction. Those of a
    small one are the same in both modes.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        tiny = AutoModelForCausalLM.from_config(config(**_TINY), dtype=torch.float32).eval()
        ids = torch.randint(2, _TINY["vocab_size"], (2, 12), dtype=torch.int64, device="cpu")
        mask = torch.ones_like(ids)
        mask[1, :5] = 0
        found: dict[tuple[int, str], torch.Tensor] = {}
        for size in (12, 3):
            for mode in MODES:
                _switch_on(tiny, H2O(heavy_size=size, recent_size=size), mode)
                found[size, mode] = _tokens(tiny, ids, mask)
                disable_eviction(tiny)
        full = _tokens(tiny, ids, mask)
    return all(
        found[size, mode].equal(full if size == 12 else found[size, "mask"]) for size, mode in found
    )


def _tokens(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return prompts with 8 new tokens."""
    generate: Any = model.generate
    return cast(
        torch.Tensor,
        generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0),
    )


def _attention_of(model: PreTrainedModel) -> str:
    """Return the name of the model's attention implementation. transformers has only a public
    setter.
    """
    return cast(str, model.config._attn_implementation)


def _cache_name(decoder: PreTrainedModel) -> str:
    """Return the name of the cache among a decoder's arguments.

    It is `cache` since transformers 5.24, and `past_key_values` before.

    Raise UsageError if there is neither.
    """
    known = inspect.signature(decoder.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in known:
            return name
    raise UsageError(
        f"model: {type(decoder).__name__} takes no cache that eviction could replace; "
        "use the model's own code of transformers"
    )


def _check_model(model: PreTrainedModel) -> None:
    if not isinstance(model, PreTrainedModel):
        raise UsageError(
            f"model: {type(model).__name__} is not a transformers model; enable eviction on the "
            "one inside"
        )
    if not hasattr(CacheLayerMixin, "get_max_length"):
        raise UsageError(
            f"transformers: {MIN_TRANSFORMERS} or newer is needed; pip install -U transformers"
        )
    config = model.config
    if config.model_type not in MODEL_TYPES:
        raise UsageError(f"model: type {config.model_type} is not one of {', '.join(MODEL_TYPES)}")
    _cache_name(model.get_decoder())
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if getattr(config, "sliding_window", None) is not None or kinds != {"full_attention"}:
        raise UsageError(
            "model: layers with sliding windows drop KV entries by themselves; eviction needs full "
            "attention"
        )


def evicting_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention through transformers' attention interface. Return ((b, n, heads, d), None).

    query: (b, heads, n, d).
    key, value: (b, kv_heads, n, d), the new KV entries.

    Raise UsageError for what eviction cannot do.
    """
    cache: EvictingCache | None = kwargs.get("evicting_cache")
    if cache is None:
        raise UsageError(
            f"attn_implementation: {ATTENTION} is set by enable_h2o(model), not by hand"
        )
    if attention_mask is not None:
        raise UsageError(
            "attention_mask: other masks do not work with eviction; give (sequences, tokens)"
        )
    if query.requires_grad or kwargs.get("dropout"):
        raise UsageError(
            "gradients: evicted KV entries have none; use model.eval() and torch.no_grad()"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return cache.attend(cast(int, module.layer_idx), (query, key, value), scale), None


def _give_cache(
    eviction: Eviction,
    mode: str,
    decoder: PreTrainedModel,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a forward's arguments, all by name, with an evicting cache among them.

    This is the forward pre-hook of a decoder.
    """
    given = {
        **dict(zip(inspect.signature(decoder.forward).parameters, args, strict=False)),
        **kwargs,
    }
    if _attention_of(decoder) != ATTENTION:
        raise UsageError(
            "attn_implementation: changed while eviction is enabled; call disable_h2o(model) first"
        )
    if given.get("output_attentions"):
        raise UsageError("output_attentions: attention matrices are never made; leave it out")
    inputs = (
        given["input_ids"] if given.get("input_ids") is not None else given.get("inputs_embeds")
    )
    if inputs is None:
        return args, kwargs  # the decoder reports what is missing
    name = _cache_name(decoder)
    earlier = given.pop("past_key_values", None)  # newer versions still know the earlier name
    past = given.get(name)
    if past is None:
        past = earlier
    use_cache = given.get("use_cache")
    keeps = past is not None or (decoder.config.use_cache if use_cache is None else use_cache)
    cache: Any = past
    if not isinstance(past, EvictingCache):
        if past is not None and (type(past) is not DynamicCache or past.offloading):
            raise UsageError(
                "cache_implementation: eviction brings its own cache; leave cache settings out"
            )
        if past is not None and past.get_seq_length():
            raise UsageError(
                f"{name}: filled before eviction was enabled; give none, or an empty DynamicCache"
            )
        cache = EvictingCache(eviction, decoder.config.num_hidden_layers, mode, keeps)
    sequences, tokens = inputs.shape[:2]
    cache.arrive(sequences, tokens, given.get("attention_mask"), past is None and mode == "mask")
    given[name] = cache if keeps else None
    given["evicting_cache"] = cache
    return (), given

"""Hugging Face generate with marks at every step: shared by the peers that run its models."""

from __future__ import annotations

from typing import Any

import torch
from contract import DTYPES, WARM_UP_PROMPT, WARM_UP_TOKENS, Meter, Request
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

COMPILED_WARM_UP_TOKENS = 4  # prefill and three steps: the first of them compiles


class _Marks(StoppingCriteria):
    """Never stops; asked once after each token of the batch."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        self.meter.mark()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class _WarmEnough(StoppingCriteria):
    """Ends a generation whose cache has room for all tokens after COMPILED_WARM_UP_TOKENS of
    them."""

    def __init__(self, prompt_len: int) -> None:
        self.columns = prompt_len + COMPILED_WARM_UP_TOKENS

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        rows, columns = input_ids.shape
        return torch.full((rows,), columns >= self.columns)


def torch_dtype(request: Request) -> torch.dtype:
    found: torch.dtype = getattr(torch, DTYPES[request.dtype])
    return found


def generate(
    model: Any,
    request: Request,
    meter: Meter,
    before: Any = None,
    cache: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Greedy generation of the whole batch, warmed up by one short row.

    before: runs just before the timed part. cache: generate's `cache_implementation`, without it a
    cache that grows by a column a step, and `compile_config`: the warm-up is then the first tokens
    of the batch itself, since what is compiled is for its shapes alone.

    Raises RuntimeError where something was compiled in the timed part.
    """
    cache = cache or {}
    prompts = torch.tensor(request.prompts())
    compiled = "compile_config" in cache
    if compiled:
        _generate(model, prompts, request.gen_len, [_WarmEnough(request.prompt_len)], cache)
    else:
        _generate(
            model, torch.tensor(request.prompts(1, WARM_UP_PROMPT)), WARM_UP_TOKENS, [], cache
        )
    before_graphs = _graphs()
    if before is not None:
        before()
    meter.begin()
    columns = _generate(model, prompts, request.gen_len, [_Marks(meter)], cache)
    found = meter.result(request.rows, request.gen_len)
    if columns != request.prompt_len + request.gen_len:
        raise RuntimeError(
            f"{columns - request.prompt_len} tokens a row came back, not {request.gen_len}"
        )
    if compiled and (_graphs() != before_graphs or not before_graphs):
        raise RuntimeError(
            f"{_graphs()} graphs are compiled, {before_graphs} of them before the timed part"
        )
    return found


def _graphs() -> int:
    """Graphs that torch.compile has made in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _generate(
    model: Any,
    ids: torch.Tensor,
    gen_len: int,
    criteria: list[StoppingCriteria],
    cache: dict[str, Any],
) -> int:
    """Returns the columns of prompt and new tokens."""
    config = GenerationConfig(
        max_new_tokens=gen_len,
        min_new_tokens=gen_len,
        do_sample=False,
        use_cache=True,
        eos_token_id=None,
        pad_token_id=1,
        bos_token_id=2,
        **cache,
    )
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            stopping_criteria=StoppingCriteriaList(criteria),
        )
    return int(out.shape[1])

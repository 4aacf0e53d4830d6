"""Hugging Face generate with marks at every step: shared by the peers that run its models."""

from __future__ import annotations

from typing import Any

import torch
from contract import DTYPES, WARM_UP_PROMPT, WARM_UP_TOKENS, Meter, Request
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList


class _Marks(StoppingCriteria):
    """Never stops; asked once after each token of the batch."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.meter.mark()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def torch_dtype(request: Request) -> torch.dtype:
    found: torch.dtype = getattr(torch, DTYPES[request.dtype])
    return found


def generate(
    model: Any, request: Request, meter: Meter, before: Any = None, cache: str | None = None
) -> dict[str, Any]:
    """Greedy generation of the whole batch, warmed up by one short row.

    before: runs just before the timed part. cache: generate's `cache_implementation`; None is its own choice, a cache
    that grows by a column a step.
    """
    _generate(model, request.prompts(1, WARM_UP_PROMPT), WARM_UP_TOKENS, [], request.device, cache)
    prompts = request.prompts()
    if before is not None:
        before()
    meter.begin()
    _generate(model, prompts, request.gen_len, [_Marks(meter)], request.device, cache)
    return meter.result(request.rows, request.gen_len)


def _generate(
    model: Any, prompts: list[list[int]], gen_len: int, criteria: list[StoppingCriteria], device: str, cache: str | None
) -> None:  # fmt: skip
    config = GenerationConfig(
        max_new_tokens=gen_len, min_new_tokens=gen_len, do_sample=False, use_cache=True,
        eos_token_id=None, pad_token_id=1, bos_token_id=2, cache_implementation=cache,
    )  # fmt: skip
    ids = torch.tensor(prompts, device=device)
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config,
            stopping_criteria=StoppingCriteriaList(criteria),
        )  # fmt: skip
    if out.shape[1] != ids.shape[1] + gen_len:
        raise RuntimeError(f"{out.shape[1] - ids.shape[1]} tokens a row came back, not {gen_len}")

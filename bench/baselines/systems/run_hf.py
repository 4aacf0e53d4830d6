"""Hugging Face generate, all in RAM.

Variants: sdpa, eager (its two attentions), each with -static (a KV cache allocated once instead of
one that grows: no copy of it a step, but attention also over columns that are still empty) and with
-static-compile (and its forward compiled by inductor, for the batch and lengths asked, before the
timed part; needs g++); sdpa-loop (experts one after another instead of its grouped product). The
best counts.

-static-compile has settings: prefill (compiled too, where generate
itself compiles decode alone), freezing (weights are constants, packed ahead: a second copy of
them), cpp_wrapper (C++ calls the kernels), max_autotune (inductor's own matrix products where they
win on trial).
"""

from __future__ import annotations

import shutil
from typing import Any

from contract import Meter, RefusedError, Request

SETTINGS: dict[str, int] = {"prefill": 0, "freezing": 1, "cpp_wrapper": 0, "max_autotune": 0}


def measure(request: Request, meter: Meter) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    from systems.hf_generate import generate, torch_dtype

    attention, *others = request.variant.split("-")
    experts = {"experts_implementation": "eager"} if "loop" in others else {}
    cache: dict[str, Any] = {"cache_implementation": "static"} if "static" in others else {}
    if "compile" in others and shutil.which("g++") is None:
        raise RefusedError(
            "Hugging Face's compiled forward needs a C++ compiler: apt-get install g++"
        )
    torch.set_num_threads(request.threads)
    model = AutoModelForCausalLM.from_pretrained(
        request.model_dir, dtype=torch_dtype(request), attn_implementation=attention, **experts
    ).eval()
    setting = {
        "attention": attention,
        "cache": cache.get("cache_implementation", "dynamic"),
        **experts,
    }
    if "compile" in others:
        setting |= request.chosen(SETTINGS, SETTINGS)
        cache["compile_config"] = _compiled(model, setting)
    return generate(model, request, meter, cache=cache) | {"setting": setting}


def _compiled(model: Any, setting: dict[str, Any]) -> Any:
    """Set inductor up; returns what generate is told of it."""
    import torch
    from torch._inductor import config
    from transformers import CompileConfig

    for name in ("freezing", "cpp_wrapper", "max_autotune"):
        setattr(config, name, bool(setting[name]))
    if setting[
        "freezing"
    ]:  # it takes tensors of a static address for constants: generate marks its cache so
        torch._dynamo.mark_static_address = lambda *_, **__: None
    if setting["max_autotune"]:
        config.max_autotune_gemm_backends = "CPP,ATEN"
    if setting["prefill"]:
        model.forward = torch.compile(model.forward, dynamic=False)
    told = CompileConfig(mode="default", dynamic=False)
    told._compile_all_devices = True  # also on a CPU
    return told

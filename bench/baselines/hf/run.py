"""Hugging Face generate, all in RAM or on the card.

Variants: sdpa, eager (its two attentions), each with -static (a KV cache allocated once instead of one that grows: no
copy of it a step, but attention also over columns that are still empty); sdpa-loop (experts one after another instead
of its grouped product). The best counts.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from contract import Meter, Request, main


def measure(request: Request, meter: Meter) -> dict[str, Any]:
    import torch
    from hf_generate import generate, torch_dtype
    from transformers import AutoModelForCausalLM

    attention, _, other = request.variant.partition("-")
    cache, experts = (None, {"experts_implementation": "eager"}) if other == "loop" else (other or None, {})
    torch.set_num_threads(request.threads)
    model = (
        AutoModelForCausalLM.from_pretrained(
            request.model_dir, dtype=torch_dtype(request), attn_implementation=attention, **experts
        )
        .eval()
        .to(request.device)
    )
    return generate(model, request, meter, cache=cache) | {
        "setting": {"attention": attention, "cache": cache or "dynamic", **experts}
    }


if __name__ == "__main__":
    sys.exit(main(measure, ("sdpa", "eager", "sdpa-static", "eager-static", "sdpa-loop"), ("torch", "transformers")))

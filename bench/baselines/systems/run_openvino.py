"""OpenVINO, everything in RAM. Variants: int8 (int8 weights), bf16; products of both in bf16 where
the CPU has them.

The folder is converted once into the offload dir, by OpenVINO's torch frontend. Peak memory is over
a process that has imported openvino: it does not need torch to run. Settings: kv_u8 (a KV cache in
8 bits, its own default), group (of the activations' int8 scales in products with int8 weights; 0:
not quantised).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from contract import WARM_UP_PROMPT, WARM_UP_TOKENS, Meter, Request, convert_apart

SETTINGS: dict[str, int] = {"kv_u8": 1, "group": 32}

CONVERTER = Path(__file__).with_name("convert_openvino.py")


def measure(request: Request, meter: Meter) -> dict[str, Any]:
    import openvino

    settings = request.chosen(SETTINGS, ("kv_u8",), ("group",))
    told = {
        "INFERENCE_NUM_THREADS": request.threads,
        "NUM_STREAMS": 1,
        "INFERENCE_PRECISION_HINT": "bf16",
        "PERFORMANCE_HINT": "LATENCY",
        "KV_CACHE_PRECISION": "u8" if settings["kv_u8"] else "bf16",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": settings["group"],
    }
    compiled = openvino.Core().compile_model(str(_converted(request)), "CPU", told)
    model = compiled.create_infer_request()
    _generate(model, request.prompts(1, WARM_UP_PROMPT), WARM_UP_TOKENS, lambda: None)
    prompts = request.prompts()
    meter.begin()
    _generate(model, prompts, request.gen_len, meter.mark)
    return meter.result(request.rows, request.gen_len) | {"setting": settings}


def _generate(model: Any, prompts: list[list[int]], gen_len: int, mark: Any) -> None:
    """One batch, greedy; `mark` is called when each prompt has its next token. The logits are those
    of the last token; of bf16 their bits as other numbers, of which the largest is the same."""
    import numpy as np

    model.reset_state()
    tokens = np.array(prompts, np.int64)
    beams = np.arange(len(prompts), dtype=np.int32)
    for _ in range(gen_len):
        model.infer({"input_ids": tokens, "beam_idx": beams})
        tokens = model.get_output_tensor(0).data.argmax(axis=-1)[:, None]
        mark()


def _converted(request: Request) -> Path:
    """The converted model, made once."""
    path = request.offload_dir / f"openvino-{request.model_dir.name}-{request.variant}.xml"
    if not path.exists():
        request.offload_dir.mkdir(parents=True, exist_ok=True)
        half = path.with_name(f"half-{path.name}")
        convert_apart(
            CONVERTER,
            request.model_dir,
            half,
            request.variant,
        )
        half.with_suffix(".bin").rename(path.with_suffix(".bin"))
        half.rename(path)
    return path

"""Hugging Face Accelerate. Variants: disk (as many layers in RAM as the budget holds), disk-eager (with the
eager attention for sdpa), cpu (all weights in RAM).

disk: `device_map` sends the other layers to "disk", which reads the safetensors files in place, buffered and when a
module needs them. The kernel's cache of a layer is dropped after it, so that each sweep reads the disk again.
cpu: `accelerate.cpu_offload`, hooks included; with no card to move weights to it is generate with hooks. On a card
`device_map` keeps there what --device-mem leaves beside KV cache and activations; the hooks bring the rest from RAM.
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from contract import (
    DoesNotFitError,
    Meter,
    RefusedError,
    Request,
    StoredTensor,
    drop_page_cache,
    kv_and_work_bytes,
    main,
    stored_tensors,
)

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# Where a family's modules keep their layers, and what it has besides. A head goes by either name.
LAYERS = {
    "opt": "model.decoder.layers", "llama": "model.layers", "gpt_neox": "gpt_neox.layers", "qwen3_moe": "model.layers",
    "olmoe": "model.layers",
}  # fmt: skip
OUTSIDE = {
    "opt": ("embed_tokens", "embed_positions", "project_in", "project_out", "final_layer_norm"),
    **dict.fromkeys(("llama", "qwen3_moe", "olmoe"), ("embed_tokens", "norm", "rotary_emb")),
    "gpt_neox": ("embed_in", "emb_dropout", "final_layer_norm", "rotary_emb"),
}
HEADS = ("lm_head", "embed_out")
# Layers that are in memory at a time besides the resident ones: the one computed, and what is being dropped.
LAYERS_IN_FLIGHT = 1


def resident_layers(request: Request, layers: list[list[StoredTensor]], outside: int) -> int:
    """Layers that stay in RAM: what the budget leaves after embedding, KV cache, activations and a layer in flight.

    outside: bytes of all other weights, which stay in RAM. None stays where the rest alone is more than the budget, and
    DoesNotFitError where it is more than a run may take.
    """
    if request.budget is None:
        return 0  # all from disk: how fast it is without help from RAM
    layer = max(_in_memory(tensors, request) for tensors in layers)
    needed = outside + sum(kv_and_work_bytes(request)) + LAYERS_IN_FLIGHT * layer
    free = request.budget - needed
    if not request.fits(needed):
        raise DoesNotFitError(f"{request.rows} rows need {-free} bytes more than the budget with every layer on disk")
    return min(len(layers), max(free, 0) // layer)


def card_and_host_bytes(request: Request, card: int) -> dict[int | str, int]:
    """`max_memory`: weights on the card beside KV cache, activations and the layer in flight, and on the host.

    card: bytes that it has. Raises DoesNotFitError where no weight may stay; RefusedError for a budget of RAM.
    """
    if request.variant != "cpu" or request.budget is not None:
        raise RefusedError(
            f"--device cuda: only offload to all of RAM is measured there, not {request.variant} in a budget"
        )
    layers, outside = tensors_by_layer(request)
    layer = max(_in_memory(tensors, request) for tensors in layers)
    room = min(card, request.device_mem or card)
    free = room - sum(kv_and_work_bytes(request)) - LAYERS_IN_FLIGHT * layer
    if free < 0:
        raise DoesNotFitError(f"{request.rows} rows need {-free} bytes more than the card has, with every layer in RAM")
    return {0: free, "cpu": outside + sum(_in_memory(tensors, request) for tensors in layers)}


def tensors_by_layer(request: Request) -> tuple[list[list[StoredTensor]], int]:
    """The tensors of each layer, and the bytes in memory of those outside of layers."""
    layers: dict[int, list[StoredTensor]] = {}
    outside = []
    for tensor in stored_tensors(request.weight_files):
        found = LAYER.search(tensor.name)
        (layers.setdefault(int(found[1]), []) if found else outside).append(tensor)
    return [layers[i] for i in range(len(layers))], _in_memory(outside, request)


def _in_memory(tensors: list[StoredTensor], request: Request) -> int:
    """Bytes in the dtype that is computed in, which the files need not have."""
    return sum(math.prod(t.shape) for t in tensors) * request.itemsize


def _in_files(tensors: list[StoredTensor]) -> int:
    return sum(t.end - t.start for t in tensors)


def _forget(tensors: list[StoredTensor]) -> None:
    """Only these: what the kernel has read ahead of the next layer stays."""
    for path in {t.path for t in tensors}:
        mine = [t for t in tensors if t.path == path]
        drop_page_cache(path, min(t.start for t in mine), max(t.end for t in mine))


def measure(request: Request, meter: Meter) -> dict[str, Any]:
    import torch
    from hf_generate import generate, torch_dtype
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(request.threads)
    attention = "eager" if request.variant == "disk-eager" else "sdpa"
    loading = {"dtype": torch_dtype(request), "attn_implementation": attention}
    if request.device == "cuda":
        memory = card_and_host_bytes(request, int(torch.cuda.get_device_properties(0).total_memory))
        model = AutoModelForCausalLM.from_pretrained(
            request.model_dir, device_map="sequential", max_memory=memory, **loading
        ).eval()
        places = [str(place) for place in model.hf_device_map.values()]
        return generate(model, request, meter) | {
            "setting": {"max_memory": memory[0], "modules_on_cpu": places.count("cpu")}
        }
    if request.variant == "cpu":
        from accelerate import cpu_offload

        model = AutoModelForCausalLM.from_pretrained(request.model_dir, **loading).eval()
        cpu_offload(model, execution_device=torch.device("cpu"))
        return generate(model, request, meter) | {"setting": {"offload": "cpu_offload"}}
    stored, outside = tensors_by_layer(request)
    kept = resident_layers(request, stored, outside)
    request.offload_dir.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(
        request.model_dir, device_map=_device_map(request, kept), offload_folder=str(request.offload_dir), **loading
    ).eval()
    inside = model.get_submodule(LAYERS[request.config["model_type"]])
    for layer, tensors in zip(inside[kept:], stored[kept:], strict=True):
        layer.register_forward_hook(lambda *_, tensors=tensors: _forget(tensors))

    def forget_all() -> None:
        # Experts, which transformers joins when it loads them, have been written again to the offload folder.
        for path in (*request.weight_files, *request.offload_dir.glob("model.*.safetensors")):
            drop_page_cache(path)

    return generate(model, request, meter, before=forget_all) | {
        "setting": {
            "layers_in_ram": kept,
            "layers": len(stored),
            "disk_bytes_a_sweep": sum(map(_in_files, stored[kept:])),
        }
    }


def _device_map(request: Request, kept: int) -> dict[str, str]:
    family = request.config["model_type"]
    if family not in LAYERS:
        raise RefusedError(f"model_type {family}: measured with {', '.join(LAYERS)} only")
    root, count = LAYERS[family], int(request.config["num_hidden_layers"])
    outside = [f"{root.removesuffix('.layers')}.{name}" for name in OUTSIDE[family]]
    places = {f"{root}.{i}": "cpu" if i < kept else "disk" for i in range(count)}
    return dict.fromkeys((*outside, *HEADS), "cpu") | places


if __name__ == "__main__":
    sys.exit(main(measure, ("disk", "disk-eager", "cpu"), ("torch", "transformers", "accelerate")))

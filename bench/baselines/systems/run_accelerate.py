"""Hugging Face Accelerate. Variants: disk (as many layers in RAM as the budget holds), disk-eager
(with the eager attention for sdpa).

disk: `device_map` sends the other layers to "disk", which reads the safetensors files in place,
buffered and when a module needs them. The kernel's cache of a layer is dropped after it, so that
each sweep reads the disk again.
"""

from __future__ import annotations

import math
import re
from typing import Any

from contract import (
    DoesNotFitError,
    Meter,
    RefusedError,
    Request,
    StoredTensor,
    drop_page_cache,
    kv_and_work_bytes,
    stored_tensors,
)

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# Where a family's modules keep their layers, and what it has besides.
LAYERS = {
    "opt": "model.decoder.layers",
    "llama": "model.layers",
    "qwen3_moe": "model.layers",
    "olmoe": "model.layers",
}
OUTSIDE = {
    "opt": ("embed_tokens", "embed_positions", "project_in", "project_out", "final_layer_norm"),
    **dict.fromkeys(("llama", "qwen3_moe", "olmoe"), ("embed_tokens", "norm", "rotary_emb")),
}
HEADS = ("lm_head",)
ENDS = ("embed_tokens", *HEADS)
EXPERTS = ".experts."  # transformers joins those of a layer in one module


def resident_layers(
    request: Request, layers: list[list[StoredTensor]], outside: list[StoredTensor]
) -> tuple[int, bool]:
    """Layers that stay in RAM: what the budget leaves after embedding, head, KV cache, activations
    and a module in flight; and whether embedding and head stay there.

    outside: all other weights. No layer stays where the rest alone is more than the budget, and no
    embedding or head where it is more than a run may take; DoesNotFitError where what a product of
    the largest module needs is, too.
    """
    if request.budget is None:
        return 0, True  # all from disk: how fast it is without help from RAM
    layer = max(_in_memory(tensors, request) for tensors in layers)
    beside = sum(kv_and_work_bytes(request))
    needed = _in_memory(outside, request) + beside + module_bytes(request, layers)
    if request.fits(needed):
        return min(len(layers), max(request.budget - needed, 0) // layer), True
    # Seen on CPUs with products in bf16, not looked at with AVX2 alone: oneDNN packs a matrix
    # before its product, while all of it is mapped. With room for one of the two the file is read
    # again and again.
    copies = 2 if request.itemsize == 2 else 1
    least = beside + copies * module_bytes(
        request, [*layers, [tensor for tensor in outside if _is_end(tensor)]]
    )
    if not request.fits(least):
        over = least - request.budget
        raise DoesNotFitError(
            f"{request.rows} rows need {over} bytes more than the budget with every module on disk"
        )
    return 0, False


def module_bytes(request: Request, layers: list[list[StoredTensor]]) -> int:
    """Return the bytes of the largest module of a layer. Accelerate's hooks bring one at a time,
    and drop it once it has run."""
    modules: dict[str, list[StoredTensor]] = {}
    for tensor in (tensor for tensors in layers for tensor in tensors):
        name = (
            tensor.name.partition(EXPERTS)[0]
            if EXPERTS in tensor.name
            else tensor.name.rpartition(".")[0]
        )
        modules.setdefault(name, []).append(tensor)
    return max(_in_memory(tensors, request) for tensors in modules.values())


def tensors_by_layer(request: Request) -> tuple[list[list[StoredTensor]], list[StoredTensor]]:
    """The tensors of each layer, and those outside of layers."""
    layers: dict[int, list[StoredTensor]] = {}
    outside = []
    for tensor in stored_tensors(request.weight_files):
        found = LAYER.search(tensor.name)
        (layers.setdefault(int(found[1]), []) if found else outside).append(tensor)
    return [layers[i] for i in range(len(layers))], outside


def _is_end(tensor: StoredTensor) -> bool:
    """Is it of the embedding of words, or of the head?"""
    return any(f"{name}." in tensor.name for name in ENDS)


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
    from transformers import AutoModelForCausalLM

    from systems.hf_generate import generate, torch_dtype

    torch.set_num_threads(request.threads)
    attention = "eager" if request.variant == "disk-eager" else "sdpa"
    loading = {"dtype": torch_dtype(request), "attn_implementation": attention}
    stored, outside = tensors_by_layer(request)
    kept, keeps_ends = resident_layers(request, stored, outside)
    request.offload_dir.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(
        request.model_dir,
        device_map=_device_map(request, kept, keeps_ends),
        offload_folder=str(request.offload_dir),
        **loading,
    ).eval()
    inside = model.get_submodule(LAYERS[request.config["model_type"]])
    for layer, tensors in zip(inside[kept:], stored[kept:], strict=True):
        layer.register_forward_hook(lambda *_, tensors=tensors: _forget(tensors))
    ends = [] if keeps_ends else [tensor for tensor in outside if _is_end(tensor)]
    for tensor in ends:  # one by one: layers may lie between the two
        for end in (model.get_input_embeddings(), model.get_output_embeddings()):
            end.register_forward_hook(lambda *_, tensor=tensor: _forget([tensor]))

    def forget_all() -> None:
        # Experts, which transformers joins when it loads them, have been written again to the
        # offload folder.
        for path in (*request.weight_files, *request.offload_dir.glob("model.*.safetensors")):
            drop_page_cache(path)

    return generate(model, request, meter, before=forget_all) | {
        "setting": {
            "layers_in_ram": kept,
            "layers": len(stored),
            "embedding_and_head_in_ram": keeps_ends,
            "disk_bytes_a_sweep": sum(map(_in_files, (ends, *stored[kept:]))),
        }
    }


def _device_map(request: Request, kept: int, keeps_ends: bool = True) -> dict[str, str]:
    family = request.config["model_type"]
    if family not in LAYERS:
        raise RefusedError(f"model_type {family}: measured with {', '.join(LAYERS)} only")
    root = LAYERS[family]
    count = int(request.config["num_hidden_layers"])
    outside = {f"{root.removesuffix('.layers')}.{name}": name for name in OUTSIDE[family]} | {
        n: n for n in HEADS
    }
    places = {f"{root}.{i}": "cpu" if i < kept else "disk" for i in range(count)}
    return {
        path: "cpu" if keeps_ends or name not in ENDS else "disk" for path, name in outside.items()
    } | places

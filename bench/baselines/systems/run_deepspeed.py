"""DeepSpeed ZeRO-Inference: ZeRO stage 3 around Hugging Face generate. Variants: nvme, nvme-4bit.

nvme: every matrix of a block of aio or more comes through it (O_DIRECT) from its copy in the
offload dir, for every sweep. It keeps no share of these in RAM, so that a budget goes to its
buffers, the KV cache and activations: told to keep matrices (stage3_param_ and
stage3_model_persistence_threshold), 0.19.8 ends with "Not enough buffers 0 for swapping 1".
nvme-4bit: with its own weight quantization, WEIGHT_QUANTIZATION, in which the copy is written and
read; torch unpacks a matrix each time it is used. Settings (--settings JSON): those of SETTINGS,
which were best on two cores.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from contract import (
    DTYPES,
    DoesNotFitError,
    Meter,
    RefusedError,
    Request,
    kv_and_work_bytes,
    release_freed,
    stored_tensors,
)

# aio: of one read; threads of one aio handle. buffers: matrices in flight. prefetch_matrices:
# largest matrices read ahead and kept alive at most, besides the one in use.
SETTINGS = {
    "block_mib": 8,
    "queue_depth": 8,
    "aio_threads": 2,
    "buffers": 5,
    "prefetch_matrices": 2,
}
FEWEST_BUFFERS = 2
# nvme-4bit: what is less than a block, or than 1 MiB, stays in RAM; OPT-1.3B's smallest packed
# matrix has 2.4 MB.
PACKED_BLOCK_MIB = 2
PERSISTENT = 10**5  # elements: vectors stay in RAM, as in DeepSpeed's own example
# As its authors' example for ZeRO-Inference has it. Of two kinds the one that a processor can run:
# in "post_init_quant" 0.19.8 wants fp16, which its own CUDA kernel unpacks.
WEIGHT_QUANTIZATION = {"num_bits": 4, "group_size": 64, "group_dim": 1, "symmetric": False}
ENVIRONMENT = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
}


def largest_parameter(request: Request) -> tuple[int, int]:
    """Elements of the largest matrix as it is stored, which a buffer holds, and of two copies of
    it, unpacked and as oneDNN packs it for a product; 0 without weight quantization.

    Raises RefusedError for matrices that DeepSpeed does not pack.
    """
    tensors = list(stored_tensors(request.weight_files))
    if request.variant != "nvme-4bit":
        return max(math.prod(t.shape) for t in tensors), 0
    if any(name in request.config for name in ("num_experts", "num_local_experts")):
        raise RefusedError(
            "DeepSpeed 0.19.8 packs the weights of Linear and Embedding only, which experts are not"
        )
    stored_in = {t.dtype for t in tensors}
    if request.dtype != "bf16" or stored_in != {"BF16"}:
        raise RefusedError(
            f"--variant nvme-4bit --dtype {request.dtype}: DeepSpeed 0.19.8 packs in the dtype of "
            "the checkpoint, "
            f"which is {', '.join(sorted(stored_in))}; measured in bf16 only"
        )
    group = WEIGHT_QUANTIZATION["group_size"]
    packed = []
    stored = []
    for tensor in tensors:
        matrix = (
            len(tensor.shape) == 2 and "embed_positions" not in tensor.name
        )  # OPT's is no plain Embedding
        if matrix and tensor.shape[1] % group:
            raise RefusedError(
                f"--model-dir: {tensor.name}: DeepSpeed 0.19.8 packs groups of {group} columns only"
            )
        (packed if matrix else stored).append(math.prod(tensor.shape))
    unpacked = max(packed)
    # Two numbers a byte, and in each group a scale and a minimum in the dtype.
    stored.append(unpacked // 2 // request.itemsize + 2 * unpacked // group)
    return max(stored), 2 * unpacked


def choose_settings(request: Request, largest: int, unpacked: int = 0) -> dict[str, Any]:
    """SETTINGS and --settings, with no more buffers than the budget holds beside KV cache and
    activations.

    largest, unpacked: as `largest_parameter` has them. FEWEST_BUFFERS at least; DoesNotFitError
    where these are more than a run may take.
    """
    setting = request.chosen(SETTINGS)
    if request.variant == "nvme-4bit":
        setting["block_mib"] = min(setting["block_mib"], PACKED_BLOCK_MIB)
    if request.budget is None:
        return setting
    buffer = largest * request.itemsize
    beside = sum(kv_and_work_bytes(request)) + unpacked * request.itemsize
    if not request.fits(beside + FEWEST_BUFFERS * buffer):
        raise DoesNotFitError(
            f"{request.rows} rows beside {FEWEST_BUFFERS} buffers of the largest matrix, {buffer} "
            "bytes each, "
            f"exceed the budget of {request.budget} bytes"
        )
    buffers = min(setting["buffers"], max((request.budget - beside) // buffer, FEWEST_BUFFERS))
    return setting | {
        "buffers": buffers,
        "prefetch_matrices": min(setting["prefetch_matrices"], buffers - 1),
    }


def zero_config(
    request: Request, setting: dict[str, Any], largest: int, folder: Path
) -> dict[str, Any]:
    """DeepSpeed's configuration. folder: where it puts its copy of the weights."""
    zero: dict[str, Any] = {
        "stage": 3,
        "stage3_param_persistence_threshold": PERSISTENT,
        "stage3_prefetch_bucket_size": setting["prefetch_matrices"] * largest,
        "stage3_max_live_parameters": (1 + setting["prefetch_matrices"]) * largest,
        "offload_param": {
            "device": "nvme",
            "nvme_path": str(folder),
            "pin_memory": False,
            "buffer_count": setting["buffers"],
            "buffer_size": largest + 1024,
        },
    }
    aio = {
        "block_size": setting["block_mib"] << 20,
        "queue_depth": setting["queue_depth"],
        "intra_op_parallelism": setting["aio_threads"],
        "single_submit": False,
        "overlap_events": True,
    }
    halves: dict[str, Any] = {name: {"enabled": request.dtype == name} for name in ("bf16", "fp16")}
    config = {"train_micro_batch_size_per_gpu": 1, **halves, "zero_optimization": zero, "aio": aio}
    if request.variant == "nvme-4bit":
        config["weight_quantization"] = {"quantized_initialization": WEIGHT_QUANTIZATION}
    return config


def measure(request: Request, meter: Meter) -> dict[str, Any]:
    from systems.hf_generate import generate

    with _loaded(request) as (model, setting):
        return generate(model, request, meter) | {"setting": setting}


@contextmanager
def _loaded(request: Request) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The model, which finds its weights where the variant has them, and its settings."""
    if request.dtype == "fp16":
        raise RefusedError("--dtype fp16: DeepSpeed is measured in bf16 and fp32 only")
    folder = request.offload_dir / "deepspeed"
    largest, unpacked = largest_parameter(request)
    setting = choose_settings(request, largest, unpacked)
    config = zero_config(request, setting, largest, folder)
    venv = Path(sys.prefix)
    os.environ.update(
        ENVIRONMENT | {"DS_ACCELERATOR": "cpu", "MASTER_PORT": str(20000 + os.getpid() % 20000)}
    )
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(venv / "extensions"))
    os.environ["PATH"] = (
        f"{venv / 'bin'}:{os.environ['PATH']}"  # ninja, for ops that are not compiled yet
    )
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    folder.mkdir(parents=True)
    try:
        yield _load(request, config), setting
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _load(request: Request, config: dict[str, Any]) -> Any:
    import deepspeed
    import torch
    from deepspeed.inference.quantization.utils import Quantizer
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    quantize = Quantizer.quantize

    def quantize_leanly(*args: Any) -> Any:  # else a small group ends while it loads
        found = quantize(*args)
        release_freed()
        return found

    Quantizer.quantize = quantize_leanly
    torch.set_num_threads(request.threads)
    deepspeed.init_distributed("gloo", verbose=False)
    keep = HfDeepSpeedConfig(config)  # alive while from_pretrained partitions what it loads
    model = AutoModelForCausalLM.from_pretrained(
        request.model_dir, dtype=getattr(torch, DTYPES[request.dtype]), attn_implementation="sdpa"
    ).eval()
    engine = deepspeed.initialize(model=model, config=config)[0]
    del keep
    release_freed()
    return engine.module.eval()

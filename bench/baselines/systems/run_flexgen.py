"""FlexGen 0.1.8 on a processor: its own code, with RAM where it has a card, and a policy that fits
the budget. Variants: cpu (all in RAM), disk (KV in RAM, where it fits, and of the weights the share
that the budget holds), each with -4bit. By itself the package hangs for ever on a processor, its
copy threads dead.

One device, RAM, is both the card and the host of FlexGen, so that nothing is copied between the
two. Of the package only this is replaced: streams, which do nothing; its 16-bit type, which is the
request's dtype (bf16, whose bits lie in int16 files, or fp32); the copy threads, which go from file
to RAM without a pinned buffer between; and `cuda` and `half` of tensors. Attention over the cache
runs in fp32, as FlexGen's own branch for a processor has it. Variants that end in -4bit have its
`--compress-weight --compress-cache`, in groups of 64, packed and unpacked in the dtype by its code
for a card: that for a processor packs in fp32, and unpacks KV alone.
"""

from __future__ import annotations

import os
import shutil
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from contract import (
    DTYPES,
    WARM_UP_PROMPT,
    DoesNotFitError,
    Meter,
    RefusedError,
    Request,
    drop_page_cache,
    kv_and_work_bytes,
    release_freed,
)

GROUP = 64  # of 4-bit numbers with a scale and a minimum in the dtype, as in its flex_opt.py
# FlexGen's flags and threads. micro_batches: --num-gpu-batches, all of which share one read of a
# layer's weights. kv_on_disk: the KV cache in files, as in its policy for OPT-175B; also where it
# does not fit RAM. --overlap is on: without it FlexGen does not wait for what it reads from disk,
# and computes with anything.
SETTINGS = {"micro_batches": 1, "sep_layer": 0, "copy_threads": 4, "kv_on_disk": 0}


def layer_sizes(config: dict[str, Any]) -> list[list[int]]:
    """Elements of each tensor by layer, in FlexGen's order: embedding, attention and MLP in turn,
    head.

    Raises RefusedError for what FlexGen has no code for.
    """
    width = int(config["hidden_size"])
    vocab = int(config["vocab_size"])
    plain = (
        config.get("do_layer_norm_before", True)
        and config.get("word_embed_proj_dim", width) == width
    )
    if config["model_type"] != "opt" or not plain or int(config["ffn_dim"]) != 4 * width:
        raise RefusedError(
            "FlexGen 0.1.8 has OPT only, not with the norms and projections of OPT-350m"
        )
    attention = [width * width, width] * 4 + [width, width]
    mlp = [4 * width * width, 4 * width, 4 * width * width, width, width, width]
    embedding = [vocab * width, (int(config["max_position_embeddings"]) + 2) * width]
    return [
        embedding,
        *[attention, mlp] * int(config["num_hidden_layers"]),
        [width, width, vocab * width],
    ]


def weight_elements(layers: Sequence[Sequence[int]], percent: int) -> int:
    """Elements in RAM at most with `percent` of each layer there: these, and the rest of two
    layers, read in turn.

    FlexGen gives each tensor whole to the tier in whose share its middle lies, the disk's first.
    The head and the embedding follow each other.
    """
    kept = 0
    read = []
    for sizes in layers:
        ends = list(accumulate(sizes))
        total = sum(sizes)
        resident = sum(
            size
            for size, end in zip(sizes, ends, strict=True)
            if (end - size / 2) * 100 >= (100 - percent) * total
        )
        kept += resident
        read.append(total - resident)
    return kept + max(a + b for a, b in zip(read, [*read[1:], read[0]], strict=True))


def packed_share(request: Request) -> float:
    """Return which share of the bytes of weights, vectors among them, and of KV is stored."""
    return 0.5 / request.itemsize + 2 / GROUP if is_packed(request) else 1.0


def is_packed(request: Request) -> bool:
    return request.variant.endswith("-4bit")


def work_bytes(request: Request, micro_batches: int) -> int:
    """Hidden states of all rows and the widest step of one micro-batch: attention, feed-forward or
    all its logits; in 4 bits also the largest layer's weights and a layer's KV, unpacked."""
    config = request.config
    size = request.itemsize
    width = int(config["hidden_size"])
    rows = request.rows // micro_batches
    length = request.prompt_len
    scores = 3 * int(config["num_attention_heads"]) * length * length
    a_row = max(
        scores + 8 * length * width,
        7 * length * width,
        length * (int(config["vocab_size"]) + 2 * width),
    )
    decode = (
        2 * (length + request.gen_len) * width * (size + 4)
    )  # K and V of a layer, in rows of heads and in fp32
    unpacked = 0
    if is_packed(request):  # bytes, of half of the numbers at a time, go over into the dtype
        decode += (length + request.gen_len) * width * (2 * size + 1)
        unpacked = max(map(sum, layer_sizes(config))) * (2 * size + 1) // 2
    return request.rows * length * width * size + rows * max(a_row * size, decode) + unpacked


def choose(request: Request) -> dict[str, Any]:
    """SETTINGS and --settings, with the weights' share in RAM that the budget allows, as
    `weights_in_ram` percent.

    More micro-batches than asked, or KV on disk, only where nothing fits otherwise. Where nothing
    does at all, all on disk and a row a micro-batch; DoesNotFitError where that is more than a run
    may take. RefusedError for a dtype that is not measured.
    """
    if request.dtype == "fp16":
        raise RefusedError("--dtype fp16: FlexGen on a processor is measured in bf16 and fp32 only")
    if request.dtype == "fp32" and request.variant == "disk-4bit":
        raise RefusedError(
            "--variant disk-4bit --dtype fp32: its files have scales in 16 bits; measured in bf16 "
            "only"
        )
    setting = request.chosen(SETTINGS, ("sep_layer", "kv_on_disk"))
    layers = layer_sizes(request.config)
    size = request.itemsize * packed_share(request)
    kv = int(kv_and_work_bytes(request)[0] * packed_share(request))
    least = 0 if request.budget is None and request.variant.startswith("disk") else 100
    asked = min(int(setting["micro_batches"]), request.rows)
    first = int(setting["kv_on_disk"])
    for batches in (n for n in range(asked, request.rows + 1) if request.rows % n == 0):
        # From disk comes a layer's KV of a micro-batch while that of the one before is in use.
        read = 2 * kv // (int(request.config["num_hidden_layers"]) * batches)
        for on_disk in range(first, first + 1 if request.budget is None else 2):
            beside = (read if on_disk else kv) + work_bytes(request, batches)
            for percent in range(least, -1, -1):
                if (
                    request.budget is None
                    or weight_elements(layers, percent) * size + beside <= request.budget
                ):
                    return setting | {
                        "micro_batches": batches,
                        "weights_in_ram": percent,
                        "kv_on_disk": on_disk,
                    }
    if request.fits(weight_elements(layers, 0) * size + beside):
        return setting | {"micro_batches": request.rows, "weights_in_ram": 0, "kv_on_disk": 1}
    raise DoesNotFitError(
        f"{request.rows} rows and two layers of weights at a time exceed {request.budget} bytes"
    )


class _Torch:
    """torch as FlexGen's modules see it. In bf16 all 16-bit numbers of its files, weights and KV,
    are bits of bf16."""

    def __init__(self, torch: Any, is_bf16: bool) -> None:
        self._torch = torch
        self._is_bf16 = is_bf16
        self.cuda = SimpleNamespace(
            Stream=object, stream=lambda _: nullcontext(), synchronize=lambda: None
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def from_numpy(self, array: Any) -> Any:
        found = self._torch.from_numpy(array)
        return found.view(self._torch.bfloat16) if self._is_bf16 and found.itemsize == 2 else found


def _copy_worker(queue: Any, cuda_id: int) -> None:
    """FlexGen's copy thread. The kernel forgets a file that was read: the next sweep reads the
    disk."""
    from flexgen import pytorch_backend as backend

    while (item := queue.get()) is not None:
        target, target_indices, source, source_indices = item
        try:
            mapped = backend.map_to_torch_tensor(source, source_indices)
            backend.map_to_torch_tensor(target, target_indices).copy_(mapped)
            del mapped
            if source.device.device_type == backend.DeviceType.DISK:
                drop_page_cache(Path(source.data))
        except BaseException:  # a thread that ends here leaves the others waiting for ever
            traceback.print_exc()
            os._exit(1)
        queue.task_done()
    queue.task_done()


def _without_cuda(dtype: str) -> Any:
    """Put RAM in CUDA's place in the package. Returns the device."""
    import numpy as np
    import torch
    from flexgen import compression, flex_opt, utils
    from flexgen import pytorch_backend as backend

    number = getattr(torch, DTYPES[dtype])
    utils.np_dtype_to_torch_dtype[np.float16] = number
    utils.torch_dtype_to_np_dtype[number] = np.float16
    utils.torch_dtype_to_num_bytes.setdefault(number, number.itemsize)
    stand_in: Any = _Torch(torch, number == torch.bfloat16)
    backend.torch = flex_opt.torch = stand_in
    backend.copy_worker_func = _copy_worker
    packing: Any = _Torch(torch, number == torch.bfloat16)
    packing.empty = lambda shape, dtype, device: torch.empty(shape, dtype=number, device=device)
    compression.torch = packing
    compression.DeviceType = SimpleNamespace(CPU=None, COMPRESSED=backend.DeviceType.COMPRESSED)
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self: self
    tensor.half = lambda self: self.to(number)

    class Ram(backend.TorchDevice):  # type: ignore[misc, name-defined]
        def allocate(self, shape: Any, dtype: Any, pin_memory: Any = None, name: Any = None) -> Any:
            return super().allocate(shape, dtype, pin_memory=False, name=name)

    return Ram("cpu")


def convert(request: Request, folder: Path) -> None:
    """The weights as FlexGen's files, a .npy without its ending for each tensor."""
    import numpy as np
    import torch
    from safetensors import safe_open

    folder.mkdir(parents=True)
    number = getattr(torch, DTYPES[request.dtype])
    for path in request.weight_files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                found = file.get_tensor(name).to(number)
                name = name.removeprefix("model.").replace(
                    "decoder.final_layer_norm", "decoder.layer_norm"
                )
                with (folder / name).open("wb") as out:
                    np.save(
                        out,
                        (found.view(torch.int16) if number == torch.bfloat16 else found).numpy(),
                    )


def load(request: Request, setting: dict[str, Any], scratch: Path) -> Any:
    """FlexGen's model, its weights where the setting has them. scratch: an empty folder for its
    files."""
    ram = _without_cuda(request.dtype)
    from flexgen.compression import CompressionConfig
    from flexgen.flex_opt import ExecutionEnv, OptLM, Policy
    from flexgen.opt_config import OptConfig
    from flexgen.pytorch_backend import TorchDisk, TorchMixedDevice

    given = request.config
    width = int(given["hidden_size"])
    config = OptConfig(
        name="model",
        num_hidden_layers=int(given["num_hidden_layers"]),
        n_head=int(given["num_attention_heads"]),
        max_seq_len=int(given["max_position_embeddings"]),
        hidden_size=width,
        input_dim=width,
        ffn_embed_dim=4 * width,
        vocab_size=int(given["vocab_size"]),
    )
    convert(request, scratch / "model-np")
    disk = TorchDisk(str(scratch / "disk"), num_copy_threads=int(setting["copy_threads"]))
    packing = [
        CompressionConfig(num_bits=4, group_size=GROUP, group_dim=dim, symmetric=False)
        for dim in (0, 2)
    ]
    packed = is_packed(request)
    batches = int(setting["micro_batches"])
    kv = 0 if setting["kv_on_disk"] else 100
    policy = Policy(
        request.rows // batches,
        batches,
        setting["weights_in_ram"],
        0,
        kv,
        0,
        100,
        0,
        True,
        bool(setting["sep_layer"]),
        False,
        False,
        1.0,
        packed,
        packing[0],
        packed,
        packing[1],
    )
    env = ExecutionEnv(gpu=ram, cpu=ram, disk=disk, mixed=TorchMixedDevice([ram, ram, disk]))
    model = OptLM(config, env, str(scratch), policy)
    shutil.rmtree(scratch / "model-np")
    disk.synchronize()
    release_freed()
    return model


@contextmanager
def loaded(request: Request, setting: dict[str, Any]) -> Iterator[tuple[Any, Path]]:
    """FlexGen's model and the folder of its files, which go when it is done with."""
    import torch

    torch.set_num_threads(request.threads)
    scratch = request.offload_dir / "flexgen"
    shutil.rmtree(scratch, ignore_errors=True)  # of a run that was killed
    try:
        model = load(request, setting, scratch)
        try:
            yield model, scratch
        finally:
            model.env.close_copy_threads()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def generate(request: Request, meter: Meter, setting: dict[str, Any]) -> Any:
    """Warm up, then generate before the meter. Returns token ids, (rows, prompt_len + gen_len)."""
    with loaded(request, setting) as (model, scratch):
        from flexgen.timer import timers

        model.generate(request.prompts(length=WARM_UP_PROMPT), max_new_tokens=1)
        for path in (scratch / "disk").iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
            drop_page_cache(path)
        timer = timers("generate")  # around each token of the batch
        stop = timer.stop
        timer.stop = lambda: (stop(), meter.mark())
        meter.begin()
        return model.generate(request.prompts(), max_new_tokens=request.gen_len)


def measure(request: Request, meter: Meter) -> dict[str, Any]:
    setting = choose(request)
    generate(request, meter, setting)
    return meter.result(request.rows, request.gen_len) | {"setting": setting}

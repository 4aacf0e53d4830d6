"""Formats of quantised checkpoints by their definitions: what is stored of a matrix, and what it
stands for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

from tests.parity.offset_format import OFFSET_ROWS
from tests.parity.reference import stored_tensors

# What is stored besides the name's own `base`, and the numbers in float32.
Stored = tuple[dict[str, torch.Tensor], torch.Tensor]


_LLAMA = {"model_type": "llama", "tie_word_embeddings": False, "intermediate_size": 96}
_PLAIN = ("lm_head", "mlp.gate", "block_sparse_moe.gate")
# Of which the formats below that have experts one by one can be; matrices of sizes that all their
# groups divide.
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"model_type": "qwen3_moe", "moe_intermediate_size": 48},
    "mixtral": {"model_type": "mixtral", "intermediate_size": 96},
    "olmoe": {"model_type": "olmoe", "intermediate_size": 48},
}


@dataclass(frozen=True)
class Quantiser:
    """config: the quantization_config. left_out: ends of the names of linear layers that stay plain
    besides head and routers. shape: of the
    model. dims: of what is quantised; of experts, 3, names go on with "_"."""

    config: dict[str, Any]
    quantise: Callable[[torch.Tensor], Stored]
    left_out: tuple[str, ...] = ()
    shape: Mapping[str, Any] = field(default_factory=lambda: _LLAMA)
    dims: int = 2


def fp8(block: tuple[int, int], scale_dtype: torch.dtype) -> Callable[[torch.Tensor], Stored]:
    def quantise(weight: torch.Tensor) -> Stored:
        high, wide = (-(-size // of) for size, of in zip(weight.shape, block, strict=True))
        padded = torch.zeros(high * block[0], wide * block[1])
        padded[: weight.shape[0], : weight.shape[1]] = weight
        blocks = padded.view(high, block[0], wide, block[1])
        scales = (blocks.abs().amax((1, 3)) / 448).to(scale_dtype)
        codes = (
            (blocks / scales.float()[:, None, :, None])
            .clamp(-448, 448)
            .view_as(padded)
            .to(torch.float8_e4m3fn)
        )
        numbers = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)
        inside = tuple(slice(size) for size in weight.shape)
        return {"weight": codes[inside].contiguous(), "weight_scale_inv": scales}, numbers[
            inside
        ].contiguous()

    return quantise


def integers(
    weight: torch.Tensor, bits: int, group: int, symmetric: bool
) -> tuple[torch.Tensor, ...]:
    """Codes (N, K) from 0 on, scales and zeros (N, groups) and numbers; scales in bf16."""
    groups = weight.unflatten(1, (-1, group))
    least = groups.amin(2, keepdim=True)
    most = groups.amax(2, keepdim=True)
    if symmetric:
        scales = (torch.maximum(most, -least) / (2 ** (bits - 1) - 1)).bfloat16().float()
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        scales = ((most - least) / (2**bits - 1)).bfloat16().float()
        zeros = (-least / scales).round().clamp(0, 2**bits - 1)
    codes = (groups / scales + zeros).round().clamp(0, 2**bits - 1)
    numbers = ((codes - zeros) * scales).flatten(1)
    return codes.flatten(1).int(), scales.squeeze(2), zeros.squeeze(2).int(), numbers


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """(n, m) int32 of so many bits as (n, ceil(m x bits / 32)), from the lowest bits of a word
    on."""
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % (32 // bits))).unflatten(
        1, (-1, 32 // bits)
    )
    return (codes.long() << (bits * torch.arange(32 // bits))).sum(2).to(torch.int32)


def packed(bits: int, group: int | None, symmetric: bool) -> Callable[[torch.Tensor], Stored]:
    def quantise(weight: torch.Tensor) -> Stored:
        codes, scales, zeros, numbers = integers(weight, bits, group or weight.shape[1], symmetric)
        stored = {
            "weight_packed": words(codes, bits),
            "weight_scale": scales.bfloat16(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            stored["weight_zero_point"] = words(zeros.t(), bits).t().contiguous()
        return stored, numbers

    return quantise


def int8(weight: torch.Tensor) -> Stored:
    codes, scales, _, numbers = integers(weight, 8, weight.shape[1], True)
    return {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}, numbers


def mxfp4(weight: torch.Tensor) -> Stored:
    """weight: (experts, columns, rows). Numbers are the nearest of those that transformers
    decodes."""
    groups = weight.transpose(1, 2).unflatten(2, (-1, 32))
    scales = (
        groups.abs().amax(3).log2().floor() - 2
    )  # the largest of 4 bits is 6, between 2^2 and 2^3
    values = torch.tensor(FP4_VALUES)
    codes = (
        ((groups / scales.exp2().unsqueeze(3)).unsqueeze(4) - values)
        .abs()
        .argmin(4)
        .to(torch.uint8)
    )
    stored = {
        "blocks": codes[..., ::2] | codes[..., 1::2] << 4,
        "scales": (scales + 127).to(torch.uint8),
    }
    return stored, convert_moe_packed_tensors(
        stored["blocks"], stored["scales"], dtype=torch.float32
    )


def gptq(
    bits: int, group: int, more: int, order: bool, symmetric: bool = True
) -> Callable[[torch.Tensor], Stored]:
    """order: columns are quantised by another order than theirs (desc_act). more: of zeros than
    what is stored."""

    def quantise(weight: torch.Tensor) -> Stored:
        columns = weight.shape[1]
        chosen = torch.randperm(columns) if order else torch.arange(columns)
        codes, scales, zeros, numbers = integers(weight[:, chosen], bits, group, symmetric)
        back = chosen.argsort()
        stored = {
            "qweight": words(codes[:, back], bits).t().contiguous(),
            "scales": scales.t().contiguous(),
            "qzeros": words(zeros.t().clamp_min(more) - more, bits).contiguous(),
            "g_idx": (back // group).int(),
        }
        numbers = (
            codes - zeros.clamp_min(more).repeat_interleave(group, 1)
        ) * scales.repeat_interleave(group, 1)
        return stored, numbers[:, back]

    return quantise


def gptq_whole(weight: torch.Tensor) -> Stored:
    return gptq(8, weight.shape[1], 1, False)(weight)


def awq(group: int) -> Callable[[torch.Tensor], Stored]:
    def quantise(weight: torch.Tensor) -> Stored:
        codes, scales, zeros, numbers = integers(weight, 4, group, False)
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        qweight, qzeros = (
            words(each.t().reshape(each.shape[1], -1, 8)[..., order].flatten(1), 4)
            for each in (codes, zeros)
        )
        return {
            "qweight": qweight,
            "qzeros": qzeros,
            "scales": scales.t().contiguous().half(),
        }, numbers

    return quantise


def offset(weight: torch.Tensor) -> Stored:
    offsets = torch.randn(-(-len(weight) // OFFSET_ROWS))
    each = offsets.repeat_interleave(OFFSET_ROWS)[: len(weight), None]
    return {"less": weight - each, "offset": offsets}, (weight - each) + each


def compressed(
    form: str, bits: int, group: int | None, symmetric: bool = True, **more: Any
) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if group else "channel",
        "group_size": group,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
    }
    scheme = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": scheme | more},
        "ignore": ["lm_head", r"re:.*\.gate$"],
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
    }


FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "fmt": "e4m3",
}
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 16,
    "desc_act": False,
    "sym": True,
    "damp_percent": 0.01,
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 24, "version": "gemm", "zero_point": True}
QUANTISERS: dict[str, Quantiser] = {
    "fp8": Quantiser(FP8, fp8((128, 128), torch.bfloat16)),
    "fp8, blocks that parts cut": Quantiser(
        FP8
        | {
            "weight_block_size": [24, 20],
            "modules_to_not_convert": [
                "lm_head",
                "model.layers.1.mlp.gate_proj",
                "model.layers.1.mlp.experts.2.up_proj",
            ],
        },
        fp8((24, 20), torch.float32),
        ("layers.1.mlp.gate_proj", "layers.1.mlp.experts.2.up_proj"),
    ),
    "4 bits, groups": Quantiser(compressed("pack-quantized", 4, 16), packed(4, 16, True)),
    "4 bits, groups with zeros": Quantiser(
        compressed("pack-quantized", 4, 8, False)
        | {"ignore": ["lm_head", r"re:.*\.gate$", "re:.*layers.0.*v_proj$"]},
        packed(4, 8, False),
        ("layers.0.self_attn.v_proj",),
    ),
    "8 bits, rows with zeros": Quantiser(
        compressed("pack-quantized", 8, None, False), packed(8, None, False)
    ),
    "int8": Quantiser(
        compressed(
            "int-quantized",
            8,
            None,
            input_activations={"num_bits": 8, "dynamic": True, "strategy": "token"},
        ),
        int8,
    ),
    "mxfp4": Quantiser(
        {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        },
        mxfp4,
        shape={"model_type": "gpt_oss", "hidden_size": 96, "intermediate_size": 64},
        dims=3,
    ),
    "gptq": Quantiser(GPTQ, gptq(4, 16, 1, False)),
    "gptq, in another order, with zeros": Quantiser(
        GPTQ
        | {
            "desc_act": True,
            "group_size": 24,
            "sym": False,
            "checkpoint_format": "gptq_v2",
            "dynamic": {r"-:.*layers\.0\.mlp\.up_proj": {}},
        },
        gptq(4, 24, 0, True, False),
        ("layers.0.mlp.up_proj",),
    ),
    "gptq, 8 bits, one group": Quantiser(GPTQ | {"bits": 8, "group_size": -1}, gptq_whole),
    "awq": Quantiser(AWQ, awq(24)),
    "offset": Quantiser({"quant_method": "offset"}, offset),  # tests/parity/offset_format.py
}


@torch.no_grad()
def save_quantised(model: PreTrainedModel, folder: Path, quantiser: Quantiser) -> None:
    """Save `model` quantised in `folder`, and make its parameters what that stands for."""
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    for name, value in stored_tensors(model).items():
        base = name.removesuffix(".weight")
        left_out = base.endswith((*_PLAIN, *quantiser.left_out))
        if value.dim() != quantiser.dims or "embed" in name or left_out:
            continue
        parts, numbers = quantiser.quantise(stored.pop(name))
        stored |= {
            f"{base}{'_' if quantiser.dims == 3 else '.'}{kind}": part
            for kind, part in parts.items()
        }
        value.copy_(numbers)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {
        "quantization_config": quantiser.config
    }
    (folder / "config.json").write_text(json.dumps(config))

"""quant_method "fp8" (DeepSeek-V3, Qwen3-FP8): matrices in e4m3 with a scale for each block.

A block is a run of rows by a run of columns. number = e4m3 x scale_inv. A matrix `name` (N, K) is
stored as:

    name            F8_E4M3 (N, K)
    name_scale_inv  float32 or bfloat16 (ceil(N / rows of a block), ceil(K / columns of a block))
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flexgen_h2o.checkpoint.formats import Codec, Shard, StoredRows, TensorLayout
from flexgen_h2o.checkpoint.formats.quantised import (
    Rules,
    check_keys,
    is_quantised_linear,
    patterns_of,
    whole_number,
)
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.model import TensorSpec

if TYPE_CHECKING:
    import torch

# Dynamic scales of activations are made during a run. Here products are not computed in FP8.
_RULES: Rules = {
    "activation_scheme": ("dynamic",),
    "fmt": ("e4m3", "float8_e4m3fn"),
    "weight_block_size": None,
    "modules_to_not_convert": None,
    "ignored_layers": None,
    "modules_to_convert": (None, []),
    "scale_fmt": ("float", "ue8m0", None),
    "expert_dtype": ("fp8",),
    "dequantize": None,
    # GPTQModel
    "bits": (8,),
    "group_size": None,
    "sym": (True,),
    "desc_act": (False, None),
    "method": ("fp8",),
    "format": ("float8_e4m3fn",),
    "checkpoint_format": ("float8_e4m3fn",),
    "pack_dtype": None,
    "weight_scale_method": ("block",),
    "weight_scale_semantics": ("inverse",),
    "dynamic": (None, {}),
    # AutoRound
    "data_type": ("fp", "fp8"),
}
_MAX_BLOCK = 2**16
_RANDOM_CODES = (b"\xbf", b"\0")  # numbers below 2 with a std of 0.6, and no NaN
_RANDOM_SCALES = (b"\xff\xff\0\0", struct.pack("<f", 1 / 32))


@dataclass(frozen=True)
class BlockFp8(Codec):
    """The format `fp8`."""

    left_out: tuple[str, ...] = ()  # patterns of modules that are plain
    block: tuple[int, int] = (128, 128)  # rows and columns that share a scale
    name = "fp8"
    decoded_at = "load"

    def holds(self, tensor: TensorSpec) -> bool:
        return is_quantised_linear(tensor, self.left_out)

    def stored_rows(self, tensor: TensorSpec) -> tuple[StoredRows, ...]:
        scales = tuple(
            -(-size // block_size)
            for size, block_size in zip(tensor.shape, self.block, strict=True)
        )
        return (
            StoredRows(tensor, tensor.shape, ("F8_E4M3",), random=_RANDOM_CODES),
            StoredRows(
                tensor,
                scales,
                ("float32", "bfloat16"),
                "_scale_inv",
                self.block[0],
                in_float32=True,
                random=_RANDOM_SCALES,
            ),
        )

    def decode_rows(self, layout: TensorLayout, shard: Shard, out: torch.Tensor) -> None:
        import torch

        from flexgen_h2o.kernels.quantised import unpack_fp8

        codes = shard.pieces[0].view(shard.rows, -1)
        scales = shard.pieces[1].view(torch.float32)
        wide = layout.stored[1].shape[1]
        unpack_fp8(codes, scales.view(-1, wide), self.block, shard.start % self.block[0], out)


def codec_of(config: Mapping[str, Any], itemsize: int, in_int8: bool) -> BlockFp8:
    name = BlockFp8.name
    check_keys(name, config, _RULES)
    block = config.get("weight_block_size")
    if not isinstance(block, list | tuple) or len(block) != 2:
        raise UsageError(
            f"quantization_config: fp8 with weight_block_size {block!r:.60} is not supported, only "
            "blocks of rows and"
            " columns such as [128, 128]; give a checkpoint with a scale for each block, or an "
            "unquantised one"
        )
    rows, columns = (whole_number(name, "weight_block_size", size, 1, _MAX_BLOCK) for size in block)
    key = "modules_to_not_convert"
    if config.get(key) is None:
        key = "ignored_layers"
    return BlockFp8(itemsize, patterns_of(name, config, key), (rows, columns), in_int8=in_int8)

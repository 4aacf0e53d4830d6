"""quant_method "awq": matrices in 4 bits with a scale and a zero for each group of columns.

The paper is Lin et al. 2023; the layout is AutoAWQ's version "gemm". A matrix `base`.weight (N, K)
is stored as:

    base.qweight  int32 (K, N / 8)
    base.qzeros   int32 (groups, N / 8)
    base.scales   (groups, N)

The codes of a word belong to rows 0, 2, 4, 6, 1, 3, 5, 7 of its 8, from the lowest bits upwards.
number = (code - zero) x scale. The matrix is stored by columns, so its parts are runs of columns.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flexgen_h2o.checkpoint.formats import Codec, Shard, StoredRows, TensorLayout
from flexgen_h2o.checkpoint.formats.quantised import (
    FLOAT16_FIRST,
    Rules,
    check_keys,
    is_quantised_linear,
    multiple,
    patterns_of,
    read_group,
    refused,
)
from flexgen_h2o.core.model import TensorSpec

if TYPE_CHECKING:
    import torch

# Kernels that transformers may have chosen. "llm-awq" is none: it stores another layout.
_KERNELS = (
    "auto",
    "auto_trainable",
    "autoawq",
    "exllama_v1",
    "exllama_v2",
    "gemm",
    "gemm_triton",
    "gemv",
    "gemv_fast",
    "machete",
    "marlin",
    "torch_awq",
    "torch_fused_awq",
)
_RULES: Rules = {
    "bits": (4,),
    "w_bit": (4,),
    "version": ("gemm", None),
    "format": ("gemm", None),
    "checkpoint_format": ("gemm", None),
    "method": ("awq", None),
    "pack_dtype": ("int32", None),
    "data_type": ("int", None),
    # Without zero points all stored zeros are 8. They are read in both cases.
    "zero_point": (True, False),
    "sym": None,
    "desc_act": (False, None),
    "group_size": None,
    "q_group_size": None,
    "modules_to_not_convert": None,
    "modules_in_block_to_quantize": (None,),
    "dynamic": (None, {}),
    "backend": (*_KERNELS, None),
    "do_fuse": None,
    "exllama_config": None,
    "fuse_max_seq_len": None,
    "modules_to_fuse": None,
}
_PER_WORD = 8
_RANDOM_ZEROS = (b"\0", b"\x88")
_RANDOM_SCALES = (b"\x0f\0", struct.pack("<e", 0.02 / 4.6))  # random codes have a std of 4.6


@dataclass(frozen=True)
class Awq(Codec):
    """The format `awq`."""

    left_out: tuple[str, ...] = ()  # patterns of modules that are plain
    group: int = 128  # columns that share a scale; 0: all columns
    name = "awq"
    decoded_at = "load"
    by_columns = True

    def holds(self, tensor: TensorSpec) -> bool:
        return is_quantised_linear(tensor, self.left_out, in_blocks_only=True)

    def stored_rows(self, tensor: TensorSpec) -> tuple[StoredRows, ...]:
        rows, columns = tensor.shape
        words = multiple(self.name, tensor, 0, _PER_WORD)
        group = self.group or columns
        groups = -(-columns // group)
        return (
            StoredRows(tensor, (columns, words), ("I32",), ".qweight"),
            StoredRows(tensor, (groups, words), ("I32",), ".qzeros", group, random=_RANDOM_ZEROS),
            StoredRows(
                tensor,
                (groups, rows),
                FLOAT16_FIRST,
                ".scales",
                group,
                in_float32=True,
                random=_RANDOM_SCALES,
            ),
        )

    def decode_columns(
        self, layout: TensorLayout, shard: Shard, first: int, out: torch.Tensor
    ) -> None:
        import torch

        from flexgen_h2o.kernels.quantised import Groups, awq_parted, unpack_awq

        rows, columns = layout.shape
        begin = first // _PER_WORD
        end = -(-(first + len(out)) // _PER_WORD)
        some = slice(first, first + len(out))
        words, zero_words = (
            piece.view(torch.int32).view(-1, rows // _PER_WORD)[:, begin:end]
            for piece in shard.pieces[:2]
        )
        skip = first - begin * _PER_WORD
        zeros = awq_parted(zero_words)[:, skip:][:, : len(out)]
        scales = shard.pieces[2].view(torch.float32).view(-1, rows)[:, some]
        group = self.group or columns
        unpack_awq(words, skip, scales, zeros, Groups(group, shard.start % group), out)


def codec_of(config: Mapping[str, Any], itemsize: int, in_int8: bool) -> Awq:
    check_keys(Awq.name, config, _RULES)
    if config.get("bits", config.get("w_bit")) is None:
        raise refused(Awq.name, "bits", None, (4,))
    left_out = patterns_of(Awq.name, config, "modules_to_not_convert")
    return Awq(itemsize, left_out, read_group(Awq.name, config), in_int8=in_int8)

"""quant_method "gptq": matrices in 4 or 8 bits with a scale and a zero per group of columns.

The paper is Frantar et al. 2022; the layout is that of AutoGPTQ and GPTQModel. A matrix
`base`.weight (N, K) is stored as:

    base.qweight  int32 (K x bits / 32, N)       codes of columns, from a word's lowest bits upwards
    base.qzeros   int32 (groups, N x bits / 32)
    base.scales   (groups, N)
    base.g_idx    int32 (K,)                     the group of each column

number = (code - zero) x scale. checkpoint_format "gptq" stores the zero less 1, "gptq_v2" the zero
itself. The matrix is stored by columns, so its parts are runs of columns. Each part has all scales.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
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
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.model import TensorSpec

if TYPE_CHECKING:
    import torch

# Keys that do not matter for the numbers: how the quantiser worked, and which kernels other
# programs run.
_FREE = (
    "group_size",
    "desc_act",
    "sym",
    "static_groups",
    "true_sequential",
    "damp_percent",
    "damp_auto_increment",
    "mse",
    "act_group_aware",
    "model_name_or_path",
    "model_file_base_name",
    "quantizer",
    "meta",
    "tokenizer",
    "dataset",
    "batch_size",
    "pad_token_id",
    "max_input_length",
    "model_seqlen",
    "cache_block_outputs",
    "backend",
    "use_exllama",
    "disable_exllama",
    "exllama_config",
    "use_cuda_fp16",
    "block_name_to_quantize",
    "module_name_preceding_first_block",
    "hyb_act",
    "modules_to_not_convert",
    "dynamic",
)
_RULES: Rules = {
    **dict.fromkeys(_FREE),
    "bits": (4, 8),
    "checkpoint_format": ("gptq", "gptq_v2"),
    "format": ("gptq", "gptq_v2"),
    "pack_dtype": ("int32",),
    "lm_head": (False, None),
    "is_marlin_format": (False,),
    "adapter": (None, {}),
    "awq_gemm_checkpoint": (False,),
    "modules_in_block_to_quantize": (None,),
    "rotation": (None,),
}
_WORD_BITS = 32
_LEAVES_OUT = "-:"
_RANDOM_SCALES = {4: 0.02 / 4.6, 8: 0.02 / 73.9}  # by bits; random codes have a std of 4.6 or 73.9


@dataclass(frozen=True)
class Gptq(Codec):
    """The format `gptq`."""

    left_out: tuple[str, ...] = ()  # patterns of modules that are plain
    bits: int = 4
    group: int = 128  # columns that share a scale; 0: all columns
    more: int = 1  # added to a stored zero: 1 for checkpoint_format "gptq", 0 for "gptq_v2"
    name = "gptq"
    decoded_at = "load"
    by_columns = True

    def holds(self, tensor: TensorSpec) -> bool:
        return is_quantised_linear(tensor, self.left_out, in_blocks_only=True)

    def stored_rows(self, tensor: TensorSpec) -> tuple[StoredRows, ...]:
        rows, columns = tensor.shape
        per_word = _WORD_BITS // self.bits
        group = self.group or columns
        groups = -(-columns // group)
        words = multiple(self.name, tensor, 1, per_word)
        zeros = multiple(self.name, tensor, 0, per_word)
        middle = (1 << (self.bits - 1)) - self.more
        zero = (b"\0", bytes([middle | middle << 4 if self.bits == 4 else middle]))
        scale = (b"\x0f\0", struct.pack("<e", _RANDOM_SCALES[self.bits]))
        in_order = (b"\0", _in_order(columns, group))
        return (
            StoredRows(tensor, (words, rows), ("I32",), ".qweight", per_word),
            StoredRows(tensor, (groups, zeros), ("I32",), ".qzeros", 0, random=zero),
            StoredRows(
                tensor, (groups, rows), FLOAT16_FIRST, ".scales", 0, in_float32=True, random=scale
            ),
            StoredRows(tensor, (columns,), ("I32",), ".g_idx", random=in_order),
        )

    def decode_columns(
        self, layout: TensorLayout, shard: Shard, first: int, out: torch.Tensor
    ) -> None:
        import torch

        from flexgen_h2o.kernels.packed import parted
        from flexgen_h2o.kernels.quantised import stored_groups, unpack_gptq

        rows, columns = layout.shape
        per_word = _WORD_BITS // self.bits
        words, zero_words = (piece.view(torch.int32) for piece in shard.pieces[:2])
        some = slice(first, first + len(out))
        begin = first // per_word
        zero_words = zero_words.view(-1, rows // per_word)[:, begin : -(-some.stop // per_word)]
        skip = first - begin * per_word
        zeros = parted(zero_words, self.bits)[:, skip : skip + len(out)].float().add_(self.more)
        scales = shard.pieces[2].view(torch.float32).view(-1, rows)[:, some]
        try:
            groups = stored_groups(shard.pieces[3], len(scales), self.group or columns, shard.start)
        except ValueError as error:
            raise UsageError(
                f"tensor {layout.stored[3].key!r} {error}; download the checkpoint again"
            ) from error
        unpack_gptq(words.view(-1, rows)[:, some], self.bits, scales, zeros, groups, out)


@lru_cache(maxsize=64)
def _in_order(columns: int, group: int) -> bytes:
    return struct.pack(f"<{columns}i", *(column // group for column in range(columns)))


def codec_of(config: Mapping[str, Any], itemsize: int, in_int8: bool) -> Gptq:
    name = Gptq.name
    check_keys(name, config, _RULES)
    bits = config.get("bits")
    if bits is None:
        raise refused(name, "bits", None, (4, 8))
    version = config.get("checkpoint_format", config.get("format", "gptq"))
    more = 1 if version == "gptq" else 0
    # GPTQModel's `dynamic` is a table whose keys are "-:" and a regular expression. Only such
    # rules, which leave modules out, are supported.
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping) or not all(key.startswith(_LEAVES_OUT) for key in dynamic):
        raise refused(name, "dynamic", dynamic, ("patterns that leave modules out (-:)",))
    rules = {"dynamic": [key.removeprefix(_LEAVES_OUT) for key in dynamic]}
    left_out = patterns_of(name, config, "modules_to_not_convert")
    left_out += patterns_of(name, rules, "dynamic")
    return Gptq(itemsize, left_out, bits, read_group(name, config), more, in_int8=in_int8)

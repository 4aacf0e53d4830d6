"""quant_method "mxfp4" (gpt-oss): experts in MXFP4 (OCP Microscaling Formats 1.0).

All other matrices are plain. The tensor `name` of a block's experts is stored as:

    name_blocks  uint8 (experts, rows, columns / 32, 16)
    name_scales  uint8 (experts, rows, columns / 32)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flexgen_h2o.checkpoint.formats import Codec, Shard, StoredRows, TensorLayout
from flexgen_h2o.checkpoint.formats.quantised import (
    Rules,
    check_keys,
    is_left_out,
    multiple,
    patterns_of,
)
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.model import TensorSpec

if TYPE_CHECKING:
    import torch

    from flexgen_h2o.kernels.coded import Codes
    from flexgen_h2o.kernels.int8 import Int8Rows

_BLOCK = 32  # numbers that share a scale
_RULES: Rules = {"modules_to_not_convert": None, "dequantize": None}
_RANDOM_SCALES = (b"\1", b"\x77")  # 2^-8 or 2^-7, for codes with a std of 2.9


@dataclass(frozen=True)
class Mxfp4(Codec):
    """The format `mxfp4`. A matrix is (rows, columns) of one expert, a slice of what is stored."""

    left_out: tuple[str, ...] = ()  # patterns of modules that are plain
    name = "mxfp4"
    decoded_at = "load"
    sample_name = "model.layers.0.mlp.experts.down_proj"
    sample_columns = (16 * _BLOCK,)

    def holds(self, tensor: TensorSpec) -> bool:
        module, _, kind = tensor.name.rpartition(".")
        is_experts = module.endswith(".experts") and kind in ("gate_up_proj", "down_proj")
        # Plain experts are stored for x W, quantised ones are not.
        if is_experts and is_left_out(module, self.left_out):
            raise UsageError(
                f"quantization_config: mxfp4 with modules_to_not_convert that leave {module} out "
                "is not supported; give"
                " a checkpoint with all experts in mxfp4, or none"
            )
        return len(tensor.shape) == 2 and is_experts

    def stored_rows(self, tensor: TensorSpec) -> tuple[StoredRows, ...]:
        rows = tensor.shape[0]
        groups = multiple(self.name, tensor, 1, _BLOCK)
        codes = (rows, groups, _BLOCK // 2)
        return (
            StoredRows(tensor, codes, ("uint8",), "_blocks"),
            StoredRows(tensor, (rows, groups), ("uint8",), "_scales", random=_RANDOM_SCALES),
        )

    def codes(self, layout: TensorLayout, shard: Shard) -> Codes:
        from flexgen_h2o.kernels.coded import mxfp4_codes

        return mxfp4_codes(*_shaped(shard))

    def decode_rows(self, layout: TensorLayout, shard: Shard, out: torch.Tensor) -> None:
        from flexgen_h2o.kernels.quantised import unpack_mxfp4

        unpack_mxfp4(*_shaped(shard), out)

    def fill_blocks(self, layout: TensorLayout, held: Sequence[Shard], out: Int8Rows) -> bool:
        from flexgen_h2o.kernels.quantised import fill_blocks_from_mxfp4

        for one in held:
            end = min(one.end, len(out))
            if one.start < end:
                codes = _shaped(one.cut(layout, one.start, end))
                if not fill_blocks_from_mxfp4(*codes, one.start, out):
                    return False
        return True


def _shaped(shard: Shard) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pieces of some rows as blocks and scales, with their shapes."""
    blocks, scales = shard.pieces
    return blocks.view(shard.rows, -1, _BLOCK // 2), scales.view(shard.rows, -1)


def codec_of(config: Mapping[str, Any], itemsize: int, in_int8: bool) -> Mxfp4:
    check_keys(Mxfp4.name, config, _RULES)
    left_out = patterns_of(Mxfp4.name, config, "modules_to_not_convert")
    return Mxfp4(itemsize, left_out, in_int8=in_int8)

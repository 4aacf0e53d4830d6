"""A format of checkpoints that exists for the tests: what a new file in checkpoint/formats/ looks
like.

Numbers of a matrix are stored in fp32 less an offset that OFFSET_ROWS rows share; tables of
embeddings are plain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flexgen_h2o.checkpoint.formats import (
    Codec,
    Shard,
    StoredRows,
    TensorLayout,
)
from flexgen_h2o.checkpoint.formats.quantised import is_quantised_linear
from flexgen_h2o.core.model import TensorSpec

if TYPE_CHECKING:
    import torch

OFFSET_ROWS = 24


@dataclass(frozen=True)
class Offset(Codec):
    name = "offset"
    decoded_at = "load"

    def holds(self, tensor: TensorSpec) -> bool:
        return is_quantised_linear(tensor, left_out=())

    def stored_rows(self, tensor: TensorSpec) -> tuple[StoredRows, ...]:
        rows = tensor.shape[0]
        return (
            StoredRows(tensor, tensor.shape, ("float32",), ".less"),
            StoredRows(
                tensor,
                (-(-rows // OFFSET_ROWS),),
                ("float32",),
                ".offset",
                rows_per_stored_row=OFFSET_ROWS,
            ),
        )

    def decode_rows(self, layout: TensorLayout, shard: Shard, out: torch.Tensor) -> None:
        import torch

        numbers, offsets = (piece.view(torch.float32) for piece in shard.pieces)
        rows = (
            torch.arange(shard.start, shard.end, device=out.device) // OFFSET_ROWS
            - shard.start // OFFSET_ROWS
        )
        out.copy_(numbers.view(shard.rows, -1) + offsets[rows, None])


def codec_of(config: Mapping[str, Any], itemsize: int, in_int8: bool) -> Offset:
    return Offset(itemsize)

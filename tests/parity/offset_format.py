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
from flexgen_h2o.core.config import Policy
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
        rows, columns = tensor.shape
        base = tensor.name.removesuffix(".weight")
        return (
            StoredRows((f"{base}.less",), (rows, columns), ("float32",), 4 * columns),
            StoredRows(
                (f"{base}.offset",),
                (-(-rows // OFFSET_ROWS),),
                ("float32",),
                4,
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


def recognise(
    policy: Policy, quantization: Mapping[str, Any] | None, itemsize: int
) -> Offset | None:
    return (
        Offset(itemsize)
        if quantization is not None and quantization.get("quant_method") == "offset"
        else None
    )

"""--int8-compute: matrices in int8, one scale per row (packing.int8_row_bytes).

They are multiplied in int8 as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flexgen_h2o.checkpoint.formats import (
    Codec,
    StoredRows,
    TensorLayout,
    is_converted,
    packed_rows,
)
from flexgen_h2o.core.model import TensorSpec
from flexgen_h2o.core.packing import int8_row_bytes
from flexgen_h2o.core.units import BLOCK_ROWS

if TYPE_CHECKING:
    import torch

    from flexgen_h2o.kernels.linear import RowParts
    from flexgen_h2o.kernels.workspace import Workspace

FORMAT = 2


@dataclass(frozen=True)
class Int8(Codec):
    """The format of --int8-compute."""

    in_int8: bool = field(default=True, kw_only=True)
    name = "int8"
    sample_columns = (BLOCK_ROWS, BLOCK_ROWS + 8)  # columns that AMX supports, and others
    converted_by = "--int8-compute"

    @property
    def record(self) -> dict[str, object]:
        return {"format": FORMAT, "bits": 8, "group": None}

    def holds(self, tensor: TensorSpec) -> bool:
        return is_converted(tensor)

    def stored_rows(self, tensor: TensorSpec) -> tuple[StoredRows, ...]:
        return packed_rows(tensor, int8_row_bytes(tensor.shape[1]))

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        from flexgen_h2o.kernels.int8 import pack_int8_rows

        return pack_int8_rows(rows)

    def matrix_parts(
        self,
        layout: TensorLayout,
        pieces: Sequence[torch.Tensor],
        workspace: Workspace,
        blocks: bool,
    ) -> RowParts:
        from flexgen_h2o.kernels.int8 import Int8Rows, block_int8_rows

        rows = pieces[0].view(-1, layout.stored[0].row_bytes)
        columns = layout.shape[1]
        if blocks:
            return block_int8_rows(rows, columns, workspace)
        return (Int8Rows(rows, columns, workspace),)

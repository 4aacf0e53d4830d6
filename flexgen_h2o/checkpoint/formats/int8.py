"""--int8-compute: matrices in int8, one scale per row (packing.int8_row_bytes).

They are multiplied in int8 as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flexgen_h2o.checkpoint.formats import PackedFormat, TensorLayout
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.model import TensorSpec
from flexgen_h2o.core.packing import int8_row_bytes
from flexgen_h2o.core.units import BLOCK_ROWS

if TYPE_CHECKING:
    import torch

    from flexgen_h2o.kernels.linear import RowParts
    from flexgen_h2o.kernels.workspace import Workspace

FORMAT = 2


@dataclass(frozen=True)
class Int8(PackedFormat):
    """The format of --int8-compute."""

    sample_columns = (BLOCK_ROWS, BLOCK_ROWS + 8)  # columns that AMX supports, and others
    flag = "--int8-compute"

    @property
    def name(self) -> str:
        return "int8"

    @property
    def record(self) -> dict[str, object]:
        return {"format": FORMAT, "bits": 8, "group": None}

    @property
    def in_int8(self) -> bool:
        return True

    def layout(self, tensor: TensorSpec) -> TensorLayout:
        return self.packed_layout(tensor, int8_row_bytes(tensor.shape[-1]))

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        from flexgen_h2o.kernels.int8 import pack_int8_rows

        return pack_int8_rows(rows)

    def row_parts(
        self,
        layout: TensorLayout,
        pieces: Sequence[torch.Tensor],
        workspace: Workspace,
        blocks: bool,
    ) -> RowParts:
        if layout.stored[0].is_values:
            return super().row_parts(layout, pieces, workspace, blocks)
        from flexgen_h2o.kernels.int8 import Int8Rows, block_int8_rows

        rows = pieces[0].view(-1, layout.stored[0].row_bytes)
        return tuple(
            Int8Rows(some, layout.shape[1], workspace)
            for some in (block_int8_rows(rows) if blocks else (rows,))
        )


def recognise(policy: Policy, quantization: Mapping[str, Any] | None, itemsize: int) -> Int8 | None:
    return Int8(itemsize) if policy.int8_compute and not policy.compress_weight else None

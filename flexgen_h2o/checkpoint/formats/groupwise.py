"""--compress-weight: matrices in 4 or 8 bits per value (core/packing.py).

Each group of values has a scale and a least value. Matrices are decoded into the compute dtype when
their unit is opened. A table whose rows are looked up is an exception: only those rows are decoded.
For products in int8, 4-bit values stay as they are and become int8 rows while they are multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from flexgen_h2o.checkpoint.formats import (
    Codec,
    DecodedAt,
    Shard,
    StoredRows,
    TensorLayout,
    is_converted,
    packed_rows,
)
from flexgen_h2o.core.model import TensorSpec
from flexgen_h2o.core.packing import GROUP, SlotPacking

if TYPE_CHECKING:
    import torch

    from flexgen_h2o.kernels.coded import Codes
    from flexgen_h2o.kernels.linear import RowParts
    from flexgen_h2o.kernels.workspace import Workspace

FORMAT = 3


@dataclass(frozen=True)
class Groupwise(Codec):
    """The format of --compress-weight."""

    bits: int  # per value
    sample_columns = (GROUP, GROUP + 8, 16 * GROUP)  # whole groups, others, and rows of 16 words
    converted_by = "--compress-weight"

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{self.bits}bit"

    @property
    def record(self) -> dict[str, object]:
        return {"format": FORMAT, "bits": self.bits, "group": GROUP}

    @property
    def decoded_at(self) -> DecodedAt:  # type: ignore[override]
        return "product" if self.in_int8 else "load"

    def holds(self, tensor: TensorSpec) -> bool:
        return is_converted(tensor)

    def stored_rows(self, tensor: TensorSpec) -> tuple[StoredRows, ...]:
        return packed_rows(tensor, SlotPacking(tensor.shape[1], self.bits).slot_bytes)

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        from flexgen_h2o.kernels.packed import pack_rows

        return pack_rows(rows, self.bits)

    def matrix_parts(
        self,
        layout: TensorLayout,
        pieces: Sequence[torch.Tensor],
        workspace: Workspace,
        blocks: bool,
    ) -> RowParts:
        from flexgen_h2o.kernels.int8 import RequantisedRows
        from flexgen_h2o.kernels.linear import Table
        from flexgen_h2o.kernels.packed import look_up_packed

        packed = pieces[0].view(-1, layout.stored[0].row_bytes)
        if self.in_int8:
            return (RequantisedRows(packed, layout.shape[1], workspace),)
        return (Table(len(packed), partial(look_up_packed, packed, self.bits)),)

    def codes(self, layout: TensorLayout, shard: Shard) -> Codes:
        from flexgen_h2o.kernels.coded import groupwise_codes

        return groupwise_codes(shard.pieces[0].view(shard.rows, -1), self.bits, layout.shape[1])

    def decode_rows(self, layout: TensorLayout, shard: Shard, out: torch.Tensor) -> None:
        from flexgen_h2o.kernels.packed import unpack_rows

        unpack_rows(shard.pieces[0].view(shard.rows, -1), self.bits, out)

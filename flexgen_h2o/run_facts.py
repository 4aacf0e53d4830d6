"""What a run held and read, from what its blocks counted: numbers of the run report."""

from __future__ import annotations

from collections.abc import Sequence

from flexgen_h2o.config import ModelSpec, Policy
from flexgen_h2o.executor import KvUse
from flexgen_h2o.planner.memory import packing_of
from flexgen_h2o.planner.predict import Prediction


def column_bytes(spec: ModelSpec, policy: Policy, itemsize: int) -> tuple[int, int]:
    """Bytes of one key and value of all kv-heads in one layer: as they lie in their slots, and uncompressed."""
    column, packing = spec.kv_bytes_per_token(itemsize) // spec.num_blocks, packing_of(spec, policy)
    return (2 * spec.num_kv_heads * packing.slot_bytes if packing else column), column


def kv_facts(held: int, column: int, slots: int, use: Sequence[KvUse]) -> dict[str, int]:
    """Slots of the neediest row; mean bytes of KV held in a decode sweep, and of what the full cache would hold.

    held, column: of `column_bytes`.
    """
    facts = {"slots": slots}
    for name, kind, size in (("bytes", "held", held), ("full_bytes", "full", column)):
        sweeps = [n for block in use for n in getattr(block, kind)[1:]]
        sweeps = sweeps or [n for block in use for n in getattr(block, kind)]
        facts[name] = size * sum(sweeps) // max(1, len(sweeps))
    return facts


def kv_read(held: int, use: Sequence[KvUse]) -> int:
    """Bytes of KV that decode attention read in all sweeps; held as above."""
    return held * sum(n for block in use for n in block.held[1:])


def predicted_seconds(predicted: Prediction | None) -> dict[str, float | None]:
    """The report's `predicted`."""
    if predicted is None:
        return {"prefill_s": None, "decode_s": None}
    return {"prefill_s": predicted.prefill_s, "decode_s": predicted.decode_s}

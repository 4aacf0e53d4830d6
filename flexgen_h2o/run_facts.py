"""What a run held and read, from what its blocks counted: numbers of the run report."""

from __future__ import annotations

from collections.abc import Sequence

from flexgen_h2o.executor import KvUse
from flexgen_h2o.planner.predict import Prediction


def kv_facts(column: int, slots: int, use: Sequence[KvUse]) -> dict[str, int]:
    """Slots of the neediest row; mean bytes of KV held in a decode sweep, and of what the full cache would hold.

    column: bytes of one key and value of all kv-heads in one layer.
    """
    facts = {"slots": slots}
    for name, kind in (("bytes", "held"), ("full_bytes", "full")):
        sweeps = [n for block in use for n in getattr(block, kind)[1:]]
        sweeps = sweeps or [n for block in use for n in getattr(block, kind)]
        facts[name] = column * sum(sweeps) // max(1, len(sweeps))
    return facts


def kv_read(column: int, use: Sequence[KvUse]) -> int:
    """Bytes of KV that decode attention read in all sweeps; column as above."""
    return column * sum(n for block in use for n in block.held[1:])


def predicted_seconds(predicted: Prediction | None) -> dict[str, float | None]:
    """The report's `predicted`."""
    if predicted is None:
        return {"prefill_s": None, "decode_s": None}
    return {"prefill_s": predicted.prefill_s, "decode_s": predicted.decode_s}

"""The run report, from what a run's rows and blocks counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from flexgen_h2o.config import ModelSpec, Policy
from flexgen_h2o.engine import Engine
from flexgen_h2o.eviction_need import need_of_rows
from flexgen_h2o.executor import BlockTimes, KvUse
from flexgen_h2o.generation import Row
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.planner.memory import packing_of
from flexgen_h2o.planner.predict import Prediction
from flexgen_h2o.planner.roofline import run_work
from flexgen_h2o.prefixes import PromptGroup
from flexgen_h2o.report import PhaseReport, RunReport
from flexgen_h2o.timeline import LANES


def make_report(
    model: str, engine: Engine, eviction: Eviction, rows: Sequence[Row], times: Sequence[BlockTimes],
    use: Sequence[KvUse], fed: Sequence[PromptGroup], moved: dict[str, int], predicted: Prediction | None,
    profile: Mapping[str, str | bool],
) -> RunReport:  # fmt: skip
    """The report of a finished run. times, use: of each block; fed: the prompts as they were fed; moved: bytes by lane;
    profile: facts of the profile."""
    spec, itemsize = engine.spec, engine.dtype.itemsize
    lengths = [len(r.prompt.token_ids) for r in rows]
    decoded = sum(max(0, len(r.token_ids) - 1) for r in rows)
    held, column = column_bytes(spec, engine.policy, itemsize)
    model_bytes, cache_bytes, hidden_bytes = sizes_of(spec, rows, itemsize)
    return RunReport(
        model=model,
        policy=engine.policy,
        eviction=eviction.to_json(),
        prompt_len=max(lengths),
        gen_len=max(r.max_new for r in rows),
        num_prompts=len(rows),
        prefill=PhaseReport(sum(sum(t.sweeps[:1]) for t in times), sum(lengths)),
        decode=PhaseReport(sum(sum(t.sweeps[1:]) for t in times), decoded),
        peak_bytes=engine.peak_bytes,
        io_bytes=moved,
        kv=kv_facts(held, column, max(need_of_rows(eviction, rows, spec.num_blocks).slots), use),
        predicted=predicted_seconds(predicted),
        model_bytes=model_bytes,
        cache_bytes=cache_bytes,
        hidden_bytes=hidden_bytes,
        extra={
            "dtype": str(engine.dtype).removeprefix("torch."),
            "device": str(engine.device.torch_device),
            "blocks": len(times),
            "kv_reserved_bytes": engine.plan.size("cache"),
            "look_ahead_units": asdict(engine.plan.depth),
            **profile,
            "prefill_fed_tokens": sum(group.tokens for group in fed),
            "work": asdict(run_work(spec, fed, decoded, kv_read(held, use))),
            "busy_s": {lane: engine.timeline.seconds(lane) for lane in LANES},
        },
    )


def sizes_of(spec: ModelSpec, rows: Sequence[Row], itemsize: int) -> tuple[int, int, int]:
    """Bytes of weights, of the full KV cache and of the hidden states of all rows at their longest."""
    tokens = sum(len(r.prompt.token_ids) + r.max_new for r in rows)
    return spec.num_weights * itemsize, tokens * spec.kv_bytes_per_token(itemsize), tokens * spec.hidden_size * itemsize


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

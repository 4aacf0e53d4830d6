"""The run report, from what a run's rows and blocks counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from flexgen_h2o.block_facts import BlockSums
from flexgen_h2o.config import ModelSpec, Policy
from flexgen_h2o.engine import Engine
from flexgen_h2o.eviction_need import need_of
from flexgen_h2o.generation import Row
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.planner.memory import packing_of
from flexgen_h2o.planner.predict import Prediction
from flexgen_h2o.planner.roofline import run_work
from flexgen_h2o.prefixes import FedPrompts
from flexgen_h2o.report import IO_LINKS, PhaseReport, RunReport
from flexgen_h2o.timeline import LANES


class Tally:
    """What a run's rows were: `sizes` (prompt tokens, most new tokens) of all, `decoded` tokens besides their first.

    blocks: what was measured of each. Rows themselves are not kept: a run may be
    fed as many as a job has.
    """

    def __init__(self) -> None:
        self.sizes: Counter[tuple[int, int]] = Counter()
        self.decoded = 0
        self.blocks: list[BlockSums] = []

    def begin(self, rows: Sequence[Row]) -> None:
        self.sizes.update((len(r.prompt.token_ids), r.max_new) for r in rows)

    def finish(self, rows: Sequence[Row]) -> None:
        self.decoded += sum(max(0, len(r.token_ids) - 1) for r in rows)

    @property
    def prompt_tokens(self) -> int:
        """Of all rows."""
        return sum(prompt * number for (prompt, _), number in self.sizes.items())


def make_report(
    model: str, engine: Engine, eviction: Eviction, tally: Tally, moved: Mapping[str, Mapping[str, int]],
    predicted: Prediction | None, facts: Mapping[str, str | bool | int], common: int = 0,
) -> RunReport:  # fmt: skip
    """The report of a finished run. moved: bytes by kind and lane; facts: more, of the profile; common: columns that
    all rows had in one copy."""
    blocks, fed = tally.blocks, FedPrompts()
    for block in blocks:
        fed += block.fed
    spec, itemsize = engine.spec, engine.dtype.itemsize
    need = need_of(eviction, tally.sizes.total(), set(tally.sizes), spec.num_blocks)
    held, column = column_bytes(spec, engine.policy, itemsize)
    copied = common * spec.kv_bytes_per_token(itemsize)
    model_bytes, cache_bytes, hidden_bytes = sizes_of(spec, tally.sizes, itemsize)
    return RunReport(
        model=model,
        policy=engine.policy,
        eviction=eviction.to_json(),
        prompt_len=need.prompt_len,
        gen_len=need.gen_len,
        num_prompts=need.rows,
        prefill=PhaseReport(sum(b.prefill_s for b in blocks), tally.prompt_tokens),
        decode=PhaseReport(sum(b.decode_s for b in blocks), tally.decoded),
        peak_bytes=engine.peak_bytes,
        io_bytes={link: sum(lanes[link] for lanes in moved.values()) for link in IO_LINKS},
        peak_bytes_by_kind=engine.peak_bytes_by_kind,
        io_bytes_by_kind=moved,
        kv=kv_facts(held, column, max(need.slots) - common, blocks, copied),
        predicted=predicted_seconds(predicted),
        model_bytes=model_bytes,
        cache_bytes=cache_bytes,
        hidden_bytes=hidden_bytes,
        extra={
            "dtype": str(engine.dtype).removeprefix("torch."),
            "device": str(engine.device.torch_device),
            "blocks": len(blocks),
            "sweeps": sum(b.sweeps for b in blocks),
            "kv_reserved_bytes": engine.plan.size("cache"),
            "look_ahead_units": asdict(engine.plan.depth),
            **facts,
            "prefill_fed_tokens": fed.tokens,
            "common_prefix": {"tokens": common, "kv_bytes": copied},
            "work": asdict(run_work(spec, fed, tally.decoded, held * sum(b.read for b in blocks))),
            **({"attn_sparsity_saves": "arithmetic, no traffic"} if engine.policy.attn_sparsity < 1 else {}),
            "busy_s": {lane: engine.timeline.seconds(lane) for lane in LANES},
        },
    )


def sizes_of(spec: ModelSpec, sizes: Mapping[tuple[int, int], int], itemsize: int) -> tuple[int, int, int]:
    """Bytes of weights, of the full KV cache and of the hidden states of all rows at their longest.

    sizes: how many rows there are of each (prompt tokens, most new tokens).
    """
    tokens = sum((prompt + new) * number for (prompt, new), number in sizes.items())
    return spec.num_weights * itemsize, tokens * spec.kv_bytes_per_token(itemsize), tokens * spec.hidden_size * itemsize


def column_bytes(spec: ModelSpec, policy: Policy, itemsize: int) -> tuple[int, int]:
    """Bytes of one key and value of all kv-heads in one layer: as they lie in their slots, and uncompressed."""
    column, packing = spec.kv_bytes_per_token(itemsize) // spec.num_blocks, packing_of(spec, policy)
    return (2 * spec.num_kv_heads * packing.slot_bytes if packing else column), column


def kv_facts(held: int, column: int, slots: int, blocks: Sequence[BlockSums], copied: int = 0) -> dict[str, int]:
    """Slots of the neediest row; mean bytes of KV held in a decode sweep, and of what the full cache would hold.

    held, column: of `column_bytes`. copied: bytes of KV outside of slots, the whole time.
    """
    decoding = [b for b in blocks if b.later]
    counted = decoding or [b for b in blocks if b.sweeps]
    sweeps = max(1, sum(max(1, b.later) for b in counted))
    return {
        "slots": slots,
        "bytes": copied + held * sum(b.held for b in counted) // sweeps,
        "full_bytes": column * sum(b.full for b in counted) // sweeps,
    }


def predicted_seconds(predicted: Prediction | None) -> dict[str, float | None]:
    """The report's `predicted`."""
    if predicted is None:
        return {"prefill_s": None, "decode_s": None}
    return {"prefill_s": predicted.prefill_s, "decode_s": predicted.decode_s}

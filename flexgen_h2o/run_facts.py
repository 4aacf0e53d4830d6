"""The run report, from what a run's rows and blocks counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from flexgen_h2o.config import ModelSpec, Policy
from flexgen_h2o.engine import Engine
from flexgen_h2o.eviction_need import need_of
from flexgen_h2o.executor import BlockTimes, KvUse
from flexgen_h2o.generation import Row
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.planner.memory import packing_of
from flexgen_h2o.planner.predict import Prediction
from flexgen_h2o.planner.roofline import run_work
from flexgen_h2o.prefixes import FedPrompts
from flexgen_h2o.report import PhaseReport, RunReport
from flexgen_h2o.timeline import LANES


class Tally:
    """What a run's rows were: `sizes` (prompt tokens, most new tokens) of all, `decoded` tokens besides their first.

    Of each of its blocks `times` and `kv_use`; `fed`: what was fed of all prompts.

    Rows themselves are not kept: a run may be fed as many as a job has.
    """

    def __init__(self) -> None:
        self.sizes: Counter[tuple[int, int]] = Counter()
        self.decoded = 0
        self.times: list[BlockTimes] = []
        self.kv_use: list[KvUse] = []
        self.fed = FedPrompts()

    def begin(self, rows: Sequence[Row]) -> None:
        self.sizes.update((len(r.prompt.token_ids), r.max_new) for r in rows)

    def finish(self, rows: Sequence[Row]) -> None:
        self.decoded += sum(max(0, len(r.token_ids) - 1) for r in rows)

    def end_block(self, times: BlockTimes, kv_use: KvUse, fed: FedPrompts) -> None:
        self.times.append(times)
        self.kv_use.append(kv_use)
        self.fed += fed

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt."""
        return [prompt for prompt, _ in self.sizes.elements()]


def make_report(
    model: str, engine: Engine, eviction: Eviction, tally: Tally, moved: dict[str, int],
    predicted: Prediction | None, facts: Mapping[str, str | bool | int],
) -> RunReport:  # fmt: skip
    """The report of a finished run. moved: bytes by lane; facts: more, of the profile."""
    times, use, fed = tally.times, tally.kv_use, tally.fed
    spec, itemsize, lengths = engine.spec, engine.dtype.itemsize, tally.lengths
    need = need_of(eviction, len(lengths), set(tally.sizes), spec.num_blocks)
    held, column = column_bytes(spec, engine.policy, itemsize)
    model_bytes, cache_bytes, hidden_bytes = sizes_of(spec, tally.sizes, itemsize)
    return RunReport(
        model=model,
        policy=engine.policy,
        eviction=eviction.to_json(),
        prompt_len=need.prompt_len,
        gen_len=need.gen_len,
        num_prompts=need.rows,
        prefill=PhaseReport(phase_seconds(times, lambda prompts: prompts), sum(lengths)),
        decode=PhaseReport(phase_seconds(times, lambda prompts: 1 - prompts), tally.decoded),
        peak_bytes=engine.peak_bytes,
        io_bytes=moved,
        kv=kv_facts(held, column, max(need.slots), use),
        predicted=predicted_seconds(predicted),
        model_bytes=model_bytes,
        cache_bytes=cache_bytes,
        hidden_bytes=hidden_bytes,
        extra={
            "dtype": str(engine.dtype).removeprefix("torch."),
            "device": str(engine.device.torch_device),
            "blocks": len(times),
            "sweeps": sum(len(t.sweeps) for t in times),
            "kv_reserved_bytes": engine.plan.size("cache"),
            "look_ahead_units": asdict(engine.plan.depth),
            **facts,
            "prefill_fed_tokens": fed.tokens,
            "work": asdict(run_work(spec, fed, tally.decoded, kv_read(held, use))),
            "busy_s": {lane: engine.timeline.seconds(lane) for lane in LANES},
        },
    )


def phase_seconds(times: Sequence[BlockTimes], share: Callable[[float], float]) -> float:
    """Seconds of a phase, whose share of a sweep is `share` of its prompts' share: mixed sweeps are shared out by their
    tokens."""
    return sum(s * share(prompts) for t in times for s, prompts in zip(t.sweeps, t.prompts, strict=True))


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
    return held * sum(n for block in use for n in block.read)


def predicted_seconds(predicted: Prediction | None) -> dict[str, float | None]:
    """The report's `predicted`."""
    if predicted is None:
        return {"prefill_s": None, "decode_s": None}
    return {"prefill_s": predicted.prefill_s, "decode_s": predicted.decode_s}

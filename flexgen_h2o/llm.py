"""The public face: a model that generates for any number of prompts under byte budgets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from types import TracebackType

import torch

from flexgen_h2o import interrupts
from flexgen_h2o.checkpoint import Checkpoint
from flexgen_h2o.config import DTYPE_BYTES, MemoryBudget, Policy, read_policy
from flexgen_h2o.engine import Engine
from flexgen_h2o.errors import UsageError
from flexgen_h2o.eviction_need import need_of
from flexgen_h2o.executor import BlockTimes, Executor, KvUse
from flexgen_h2o.generation import Chooser, Decoding, LogitsWatch, Row, RowEnd, SlotsWatch, Watches
from flexgen_h2o.kernels.warm_up import warm_up
from flexgen_h2o.kvcache.eviction import Eviction, check_eviction
from flexgen_h2o.packing import Packing, weight_form
from flexgen_h2o.paths import DEFAULT_OFFLOAD_DIR, usable_path
from flexgen_h2o.planner.memory import MemoryPlan, Shape, packing_of, plan_within
from flexgen_h2o.planner.need import AutoPolicy, Need
from flexgen_h2o.planner.predict import Prediction
from flexgen_h2o.planner.roofline import Peak, run_work
from flexgen_h2o.planning import Planner
from flexgen_h2o.profile import HardwareProfile
from flexgen_h2o.profiling.peak import measure_peak
from flexgen_h2o.progress import Progress
from flexgen_h2o.prompts import Completion, Prompt, make_blocks, prompts_from_python
from flexgen_h2o.report import PhaseReport, RunReport
from flexgen_h2o.run_facts import column_bytes, kv_facts, kv_read, predicted_seconds
from flexgen_h2o.sampling import ForcedTokens, SamplingParams, StopStrings, TokenChooser, decode_text
from flexgen_h2o.schedule import Step
from flexgen_h2o.source import Model, find_checkpoint, find_model
from flexgen_h2o.tiers.device import open_device
from flexgen_h2o.tiers.machine import resolve_budgets
from flexgen_h2o.timeline import LANES, Timeline

RANDOM_WEIGHTS_SEED = 0
RANDOM_DTYPE = "bfloat16"  # of random weights, unless another is asked for
Order = Callable[[int, int], Iterator[Step]]


class LLM:
    """A model under a policy and budgets.

    model: hub id, local Hugging Face folder, or `opt-tiny` (shipped). path: where checkpoints are; `_DUMMY_` asks for
    random weights at the true shape. policy: a `Policy`, "auto", a policy file, or `AutoPolicy(base)`. dtype: "auto"
    takes the checkpoint's (float16 becomes bfloat16 on a CPU). budget: bytes by tier, by default what is free less a
    margin. hardware: the profile that plans are made with, its file or the name of a shipped one; by default this
    machine's, measured by `python -m flexgen_h2o.hardware`.

    Raises UsageError (unusable input) here, DoesNotFitError here or at `generate`. Nothing big is allocated before the
    first `generate`. Close it, or use it as a context manager, to give memory and scratch files back.
    """

    def __init__(
        self, model: str = "opt-tiny", policy: Policy | AutoPolicy | str | Path = "auto", eviction: object = None,
        device: str = "auto", dtype: str = "auto", budget: MemoryBudget | None = None,
        offload_dir: str | Path | None = None, path: str | None = None, revision: str | None = None,
        hardware: HardwareProfile | str | Path | None = None,
    ) -> None:  # fmt: skip
        self.eviction = check_eviction(eviction)
        self.asked_policy = _read_policy_argument(policy)
        _check_together(self.asked_policy, self.eviction)
        self._budget = budget or MemoryBudget()
        self._device = open_device(device, separate_budget=self._budget.device is not None)
        self._device_name, self._hardware = device, hardware
        self.offload_dir = usable_path(offload_dir or DEFAULT_OFFLOAD_DIR, "--offload-dir")
        self.model: Model = find_model(model, path, revision)
        self._asked_dtype = _check_dtype(dtype)
        self.timeline = Timeline()
        self.report: RunReport | None = None
        self._policy = self.asked_policy if isinstance(self.asked_policy, Policy) else None
        self._engine: Engine | None = None
        self._planned_rows = 0
        self.predicted: Prediction | None = None
        self._running = threading.Lock()
        self.times: list[BlockTimes] = []
        self._kv_use: list[KvUse] = []

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def policy(self) -> Policy | None:
        """The policy in use; with "auto", None until the first `generate`."""
        return self._policy

    def use(self, policy: Policy | AutoPolicy) -> None:
        """Run with another policy from the next `generate` on; what was held for the old one is given back."""
        if policy != self.asked_policy:
            self.close()
            self.asked_policy = _read_policy_argument(policy)
            self._policy = policy if isinstance(policy, Policy) else None

    @property
    def dtype(self) -> str:
        """The compute dtype, which weights and KV are held in."""
        stored = RANDOM_DTYPE if self.model.random else self._checkpoint.dtype
        return self._device.compute_dtype(self._asked_dtype, stored)

    @property
    def precision_note(self) -> str | None:
        """What "auto" changed about the checkpoint's precision, for the user to know; None when nothing."""
        if self.model.random or self._asked_dtype is not None or self.dtype == self._checkpoint.dtype:
            return None
        return f"{self._checkpoint.dtype} weights are computed in {self.dtype} here; --dtype float32 loses nothing"

    @property
    def num_layers(self) -> int:
        """Layers of a sweep under the policy in use."""
        sep_layer = self._policy.sep_layer if self._policy is not None else True
        return len(self.model.spec.layers(sep_layer).layers)

    def check_plan(self) -> None:
        """UsageError where the policy is to be chosen and the given profile does not know the dtype."""
        if isinstance(self.asked_policy, AutoPolicy):
            self._planner.check_dtype()

    def sizes(self, prompts: Sequence[Prompt], params: SamplingParams) -> tuple[int, int, int]:
        """Bytes of weights, of the full KV cache and of the hidden states of all rows: FlexGen's summary."""
        spec, itemsize = self.model.spec, DTYPE_BYTES[self.dtype]
        tokens = sum(len(p.token_ids) + self._most_new_tokens(p, params) for p in prompts)
        cache_bytes = tokens * spec.kv_bytes_per_token(itemsize)
        return spec.num_weights * itemsize, cache_bytes, tokens * spec.hidden_size * itemsize

    def generate(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams | None = None,
        watch_logits: LogitsWatch | None = None,
    ) -> list[Completion]:  # fmt: skip
        """Generate for text prompts and lists of token ids, in any mix and number; results in the order of `prompts`.

        watch_logits sees every step's logits: (indices of the rows, (rows, vocab) in the compute dtype).
        """
        encode = self.model.encode if self.model.tokenizer is not None else None
        read = prompts_from_python(prompts, encode, self.model.spec.vocab_size)
        done: list[Completion] = []
        if read:
            self.run(read, params or SamplingParams(), done.extend, watch_logits=watch_logits)
        return sorted(done, key=lambda c: c.index)

    def follow(
        self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]], watch_logits: LogitsWatch,
        watch_slots: SlotsWatch | None = None,
    ) -> RunReport:  # fmt: skip
        """Teacher forcing: run `prompts` as `generate` does, but each row takes the tokens of its continuation.

        The t-th time that watch_logits sees a row, its logits are those that continuations[row][t] follows on.
        watch_slots sees what the attention of each transformer block of a decode sweep saw (generation.Decoding).
        """
        if watch_slots is not None and not self.eviction.needs.record:
            raise UsageError(f"watch_slots: nothing is recorded of slots with {self.eviction.name}")
        read = prompts_from_python(prompts, None, self.model.spec.vocab_size)
        after = prompts_from_python(continuations, None, self.model.spec.vocab_size)
        if len(read) != len(after):
            raise UsageError(f"continuations: {len(after)} for {len(read)} prompts")
        positions = self.model.spec.max_positions
        for prompt, more in zip(read, after, strict=True):
            if len(prompt.token_ids) + len(more.token_ids) - 1 > positions:
                raise UsageError(f"prompts[{prompt.index}]: with its continuation longer than {positions} positions")
        forced = {p.index: p.token_ids for p in after}
        params = SamplingParams(max_tokens=max(map(len, forced.values())), ignore_eos=True)
        return self.run(read, params, lambda done: None, watch_logits, None, forced, watch_slots)

    def run(
        self, prompts: Sequence[Prompt], params: SamplingParams, on_finished: Callable[[list[Completion]], None],
        watch_logits: LogitsWatch | None = None, order: Order | None = None,
        forced: Mapping[int, Sequence[int]] | None = None, watch_slots: SlotsWatch | None = None,
    ) -> RunReport:  # fmt: skip
        """`generate` for read prompts: completions are handed out as rows finish, the report is returned.

        forced: the tokens that rows take, by index, instead of choosing; a row ends with its last. order: the steps to
        run of a block instead of its whole schedule, from its numbers of layers and micro-batches; rows that it cuts
        short are handed out at the end, as of length.
        """
        if not self._running.acquire(blocking=False):
            raise UsageError("this LLM is generating already; a thread needs an LLM of its own")
        try:
            return self._run(prompts, params, on_finished, Watches(watch_logits, watch_slots), order, forced)
        finally:
            self._running.release()

    def _run(
        self, prompts: Sequence[Prompt], params: SamplingParams, on_finished: Callable[[list[Completion]], None],
        watches: Watches, order: Order | None, forced: Mapping[int, Sequence[int]] | None,
    ) -> RunReport:  # fmt: skip
        stop = StopStrings(self.model.tokenizer, params.stop)
        most = [self._most_new_tokens(p, params) if forced is None else len(forced[p.index]) for p in prompts]
        rows = [Row(p, new) for p, new in zip(prompts, most, strict=True)]
        engine = self._ready(rows)
        policy = engine.policy
        by_index = {row.prompt.index: row for row in rows}
        blocks = [
            [[by_index[p.index] for p in batch] for batch in block]
            for block in make_blocks(prompts, policy.gpu_batch_size, policy.num_gpu_batches)
        ]
        end = RowEnd(params, self.model.spec.eos_token_ids, stop)
        sweeps = sum(max(r.max_new for batch in block for r in batch) for block in blocks)
        before = engine.io_bytes
        with Progress(sum(r.max_new for r in rows)) as progress:

            def hand_out(finished: list[Row]) -> None:
                progress.finish(finished)
                on_finished([self._completion(row, stop) for row in finished])

            chooser: Chooser = TokenChooser(params) if forced is None else ForcedTokens(forced)
            decoding = Decoding(chooser, end, watches)
            executor = Executor(engine, self.eviction, decoding, hand_out, sweeps)
            self.times, self._kv_use = [], []
            engine.timeline.reset()
            try:
                for block in blocks:
                    steps = order(len(engine.layers.layers), len(block)) if order else None
                    with torch.inference_mode():
                        executor.run_block(block, steps, progress.sweep)
                    self.times.append(executor.times)
                    self._kv_use.append(executor.kv_use)
                    if order:  # it may end within a sweep: the next block's weights begin anew
                        executor.finish()
                        executor = Executor(engine, self.eviction, decoding, hand_out, sweeps)
                executor.finish()
            except BaseException:
                self.close()
                raise
        cut_short = [row for row in rows if row.finish_reason is None]
        for row in cut_short:
            row.finish_reason = "length"
        on_finished([self._completion(row, stop) for row in cut_short])
        moved = {lane: n - before[lane] for lane, n in engine.io_bytes.items()}
        self.report = self._make_report(rows, params, engine, moved)
        return self.report

    def close(self) -> None:
        """Give back memory, worker threads and scratch files. The LLM can be used again."""
        with interrupts.held():
            if self._engine is not None:
                self._engine.__exit__(None, None, None)
                self._engine = None

    def _ready(self, rows: Sequence[Row]) -> Engine:
        """An engine whose buffers cover these rows: the open one if it does, else a new one."""
        need = self._need(rows)
        if self._engine is not None and self._serves(self._engine, need, rows):
            self.predicted = self._predict(need, rows, self._engine.policy, self._engine.plan)
            return self._engine
        self.close()
        spec, itemsize, policy = self.model.spec, DTYPE_BYTES[self.dtype], self.asked_policy
        budgets = resolve_budgets(self._budget, self._device, self.offload_dir)
        if isinstance(policy, AutoPolicy):
            policy = self._planner.choose(need, policy.base, budgets)
        shape = self._shape(rows, policy)
        plan: MemoryPlan = plan_within(spec, policy, shape, itemsize, self._device.is_host, budgets)
        self._policy, self._planned_rows = policy, need.rows
        self.predicted = self._predict(need, rows, policy, plan)
        dtype = getattr(torch, self.dtype)
        packing, scored = weight_form(policy, itemsize).packing, bool(self.eviction.needs.record)
        warm_up(self._device.torch_device, dtype, scored, packing_of(spec, policy), packing)
        checkpoint = self._find_checkpoint(packing) if packing else self._checkpoint
        self._engine = Engine(
            spec, checkpoint, policy, plan, dtype, self._device, budgets, self.offload_dir, self.timeline
        )  # fmt: skip
        return self._engine

    def _serves(self, engine: Engine, need: Need, rows: Sequence[Row]) -> bool:
        """Do the buffers suffice, and was the policy not chosen for fewer rows?"""
        enough = engine.plan.shape.covers(self._shape(rows, engine.policy))
        return enough and (self.asked_policy == engine.policy or need.rows <= self._planned_rows)

    def _shape(self, rows: Sequence[Row], policy: Policy) -> Shape:
        blocks = make_blocks([r.prompt for r in rows], policy.gpu_batch_size, policy.num_gpu_batches)
        batches = [batch for block in blocks for batch in block]
        return Shape(
            rows=max(map(len, batches)),
            micro_batches=max(map(len, blocks)),
            tokens=max(sum(len(p.token_ids) for p in batch) for batch in batches),
            slots=self._need(rows).slots,
            record=self.eviction.needs.record,
        )

    def _need(self, rows: Sequence[Row]) -> Need:
        sizes = {(len(r.prompt.token_ids), r.max_new) for r in rows}
        return need_of(self.eviction, len(rows), sizes, self.model.spec.num_blocks)

    @cached_property
    def _planner(self) -> Planner:
        return Planner(
            self.model.spec, self._device_name, self._device.is_host, self.dtype, self.offload_dir, self._hardware
        )

    def _predict(self, need: Need, rows: Sequence[Row], policy: Policy, plan: MemoryPlan) -> Prediction | None:
        """What the run will cost if no row ends early; None where the profile does not know the dtype."""
        if not self._planner.can_predict:
            return None
        blocks = make_blocks([r.prompt for r in rows], policy.gpu_batch_size, policy.num_gpu_batches)
        lengths = [[[len(p.token_ids) for p in batch] for batch in block] for block in blocks]
        return self._planner.predict(policy, need, plan, lengths)

    @cached_property
    def _checkpoint(self) -> Checkpoint:
        return self._find_checkpoint(None)

    def _find_checkpoint(self, packing: Packing | None) -> Checkpoint:
        """Random and packed weights are written at first use: after the memory plan, since they may be many GB."""
        dtype = self.dtype if self.model.random else ""
        shown = Progress.on_terminal()
        return find_checkpoint(self.model, dtype, self.offload_dir, RANDOM_WEIGHTS_SEED, shown, packing)

    def _most_new_tokens(self, prompt: Prompt, params: SamplingParams) -> int:
        """The newest token needs no position of its own, so a prompt that fills all positions still gets one."""
        length, positions = len(prompt.token_ids), self.model.spec.max_positions
        if length > positions:
            raise UsageError(
                f"prompts[{prompt.index}]: {length} tokens, but {self.model.name} has {positions} positions; shorten it"
            )
        return min(params.max_tokens, positions - length + 1)

    def _completion(self, row: Row, stop: StopStrings) -> Completion:
        assert row.finish_reason is not None
        text = None
        if self.model.tokenizer is not None:
            text = stop.cut(decode_text(self.model.tokenizer, row.token_ids))
        return Completion(row.prompt.index, row.prompt.text, text, list(row.token_ids), row.finish_reason)

    def _make_report(
        self, rows: Sequence[Row], params: SamplingParams, engine: Engine, moved: dict[str, int]
    ) -> RunReport:
        prefill = sum(sum(t.sweeps[:1]) for t in self.times)
        decode = sum(sum(t.sweeps[1:]) for t in self.times)
        plan, spec = engine.plan, self.model.spec
        lengths = [len(r.prompt.token_ids) for r in rows]
        decoded = sum(max(0, len(r.token_ids) - 1) for r in rows)
        held, column = column_bytes(spec, engine.policy, DTYPE_BYTES[self.dtype])
        model_bytes, cache_bytes, hidden_bytes = self.sizes([r.prompt for r in rows], params)
        return RunReport(
            model=self.model.name,
            policy=engine.policy,
            eviction=self.eviction.to_json(),
            prompt_len=max(lengths),
            gen_len=max(r.max_new for r in rows),
            num_prompts=len(rows),
            prefill=PhaseReport(prefill, sum(lengths)),
            decode=PhaseReport(decode, decoded),
            peak_bytes=engine.peak_bytes,
            io_bytes=moved,
            kv=kv_facts(held, column, max(self._need(rows).slots), self._kv_use),
            predicted=predicted_seconds(self.predicted),
            model_bytes=model_bytes,
            cache_bytes=cache_bytes,
            hidden_bytes=hidden_bytes,
            extra={
                "dtype": self.dtype,
                "device": str(engine.device.torch_device),
                "blocks": len(self.times),
                "kv_reserved_bytes": plan.size("cache"),
                "look_ahead_units": asdict(plan.depth),
                "profile": self._planner.profile.machine,
                "work": asdict(run_work(spec, lengths, decoded, kv_read(held, self._kv_use))),
                "busy_s": {lane: engine.timeline.seconds(lane) for lane in LANES},
            },
        )

    def measure_peak(self) -> Peak:
        """Of matrix products and of reading memory, now and in the compute dtype; half a second."""
        return measure_peak(self._device, getattr(torch, self.dtype))


def _read_policy_argument(policy: Policy | AutoPolicy | str | Path) -> Policy | AutoPolicy:
    """UsageError for a bad file."""
    if policy == "auto":
        return AutoPolicy()
    if isinstance(policy, AutoPolicy):
        return policy
    return policy if isinstance(policy, Policy) else read_policy(usable_path(policy, "--policy")).policy


def _check_together(policy: Policy | AutoPolicy, eviction: Eviction) -> None:
    chosen = policy.base if isinstance(policy, AutoPolicy) else policy
    if chosen.attn_sparsity != 1 and eviction.needs.record:
        raise UsageError(f"attn_sparsity: is for the full cache, not for {eviction.name}; leave one of them out")


def _check_dtype(dtype: str) -> str | None:
    """None means auto."""
    if dtype == "auto":
        return None
    if dtype not in DTYPE_BYTES:
        raise UsageError(f"--dtype {dtype}: not one of auto, {', '.join(DTYPE_BYTES)}")
    return dtype

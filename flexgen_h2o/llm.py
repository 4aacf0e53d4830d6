"""The public face: a model that generates for any number of prompts under byte budgets."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType

import torch

from flexgen_h2o import interrupts
from flexgen_h2o.checkpoint import Checkpoint
from flexgen_h2o.config import DTYPE_BYTES, MemoryBudget, Policy
from flexgen_h2o.engine import Engine
from flexgen_h2o.errors import DoesNotFitError, UsageError
from flexgen_h2o.eviction_need import need_of_rows, shape_of_blocks
from flexgen_h2o.executor import BlockTimes, Executor, KvUse
from flexgen_h2o.generation import Chooser, Decoding, LogitsWatch, Row, SlotsWatch, Watches, group_rows, row_blocks
from flexgen_h2o.kernels.warm_up import warm_up
from flexgen_h2o.kvcache.eviction import check_eviction
from flexgen_h2o.kvcache.eviction.rolling import check_rolling, is_rolling
from flexgen_h2o.llm_arguments import check_dtype, check_together, read_followed, read_policy_argument
from flexgen_h2o.packing import Packing, weight_form
from flexgen_h2o.paths import DEFAULT_OFFLOAD_DIR, usable_path
from flexgen_h2o.pipeline import Part, Pipeline, check_same, joint_report, part_of
from flexgen_h2o.planner.memory import MemoryPlan, Shape, packing_of, plan_within
from flexgen_h2o.planner.need import AutoPolicy, Need
from flexgen_h2o.planner.predict import Prediction
from flexgen_h2o.planner.roofline import Peak
from flexgen_h2o.planning import Planner
from flexgen_h2o.prefixes import SHARINGS, FedPrompts, PromptGroup, Sharing, check_sharing
from flexgen_h2o.profile import HardwareProfile
from flexgen_h2o.profiling.peak import measure_peak
from flexgen_h2o.progress import Listener, Progress
from flexgen_h2o.prompts import Completion, Prompt, prompts_from_python
from flexgen_h2o.report import RunReport
from flexgen_h2o.row_rules import RowRules
from flexgen_h2o.run_facts import Tally, make_report, sizes_of
from flexgen_h2o.run_rows import More, RunRows, run_rows
from flexgen_h2o.sampling import ForcedTokens, SamplingParams
from flexgen_h2o.schedule import Step
from flexgen_h2o.source import Model, find_checkpoint, find_model
from flexgen_h2o.tiers.device import open_device
from flexgen_h2o.tiers.machine import resolve_budgets
from flexgen_h2o.timeline import Timeline

RANDOM_WEIGHTS_SEED = 0
RANDOM_DTYPE = "bfloat16"  # of random weights, unless another is asked for
Order = Callable[[int, int], Iterator[Step]]


@dataclass(frozen=True)
class _Planned:
    need: Need
    policy: Policy
    memory: MemoryPlan


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
        self.asked_policy = read_policy_argument(policy)
        check_together(self.asked_policy, self.eviction)
        self._budget = budget or MemoryBudget()
        self._device = open_device(device, separate_budget=self._budget.device is not None)
        self._device_name, self._hardware = device, hardware
        self.offload_dir = usable_path(offload_dir or DEFAULT_OFFLOAD_DIR, "--offload-dir")
        self.model: Model = find_model(model, path, revision)
        self._asked_dtype = check_dtype(dtype)
        self._part = Part(self.model.spec, self.eviction)  # all of it, but for `join`
        self.timeline = Timeline()
        self.report: RunReport | None = None
        self._policy = self.asked_policy if isinstance(self.asked_policy, Policy) else None
        self._engine: Engine | None = None
        self._planned: _Planned | None = None  # what the engine was last opened for
        self._job_rows = 0
        self.predicted: Prediction | None = None
        self._running = threading.Lock()
        self.times: list[BlockTimes] = []
        self._kv_use: list[KvUse] = []
        self._fed = FedPrompts()
        self._share_prefix = "auto"

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

    @property
    def share_prefix(self) -> str:
        """Are tokens that rows of a micro-batch begin with computed once? "auto": where it pays, "on", "off"."""
        return self._share_prefix

    @share_prefix.setter
    def share_prefix(self, name: str) -> None:
        self._share_prefix = check_sharing(name)

    def use(self, policy: Policy | AutoPolicy) -> None:
        """Run with another policy from the next `generate` on; what was held for the old one is given back."""
        if policy != self.asked_policy:
            self.close()
            self.asked_policy = read_policy_argument(policy)
            self._policy = policy if isinstance(policy, Policy) else None

    def join(self, pipeline: Pipeline) -> None:
        """From now on run this rank's part of the model: every rank calls `run` or `generate` with the same prompts.

        UsageError where the model has too few transformer blocks, or the policy is "auto".
        """
        if isinstance(self.asked_policy, AutoPolicy):
            raise UsageError("--pipeline: auto plans for one process; give --percent and batch sizes, or --policy FILE")
        self._part = part_of(pipeline, self.model.spec, self.eviction)

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
        tally = Tally()
        tally.begin(self._rules(prompts, params).rows())
        return sizes_of(self.model.spec, tally.sizes, DTYPE_BYTES[self.dtype])

    def generate(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None,
        watch_logits: LogitsWatch | None = None, refill: bool = True,
    ) -> list[Completion]:  # fmt: skip
        """Generate for text prompts and lists of token ids, in any mix and number; results in the order of `prompts`.

        params: of all prompts, or one for each; then a row draws from its own seed alone, wherever it stands.
        watch_logits sees every step's logits: (indices of the rows, (rows, vocab) in the compute dtype). refill: as of
        `run`.
        """
        encode = self.model.encode if self.model.tokenizer is not None else None
        read = prompts_from_python(prompts, encode, self.model.spec.vocab_size)
        done: list[Completion] = []
        if read:
            self.run(read, params or SamplingParams(), done.extend, watch_logits=watch_logits, refill=refill)
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
        read, forced = read_followed(prompts, continuations, self.model.spec, self.eviction)
        params = SamplingParams(max_tokens=max(map(len, forced.values())), ignore_eos=True)
        return self.run(read, params, lambda done: None, watch_logits, None, forced, watch_slots)

    def run(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams],
        on_finished: Callable[[list[Completion]], None], watch_logits: LogitsWatch | None = None,
        order: Order | None = None, forced: Mapping[int, Sequence[int]] | None = None,
        watch_slots: SlotsWatch | None = None, listener: Listener | None = None, refill: bool = False,
        more: More | None = None,
    ) -> RunReport:  # fmt: skip
        """`generate` for read prompts: completions are handed out as rows finish, the report is returned.

        forced: the tokens that rows take, by index, instead of choosing; a row ends with its last. order: the steps to
        run of a block instead of its whole schedule, from its numbers of layers and micro-batches; rows that it cuts
        short are handed out at the end, as of length. listener: hears of tokens and rows instead of the progress bar.
        refill: rows that finish give their places to the next ones while the others go on, where rows may end apart;
        nothing is predicted then. more: with refill, gives further rows that `has_room`, when all others have entered.
        """
        if not self._running.acquire(blocking=False):
            raise UsageError("this LLM is generating already; a thread needs an LLM of its own")
        try:
            rules = self._rules(prompts, params)
            rows = rules.rows(forced)
            if self._part.pipeline is not None:
                refill = False  # rows that wait would have to be the same everywhere too
                check_same(self._part.pipeline, self.model.config, self.dtype, self.asked_policy, self.eviction, rows)
            blocks = self._blocks(rows, self._ready(rows).policy)
            work = run_rows(rules, rows, blocks, refill and order is None, more, self._part.in_flight)
            chooser: Chooser = rules.chooser if forced is None else ForcedTokens(forced)
            decoding = Decoding(chooser, rules.end, Watches(watch_logits, watch_slots))
            return self._run(rules, work, decoding, on_finished, order, listener)
        finally:
            self._running.release()

    def _run(
        self, rules: RowRules, work: RunRows, decoding: Decoding, on_finished: Callable[[list[Completion]], None],
        order: Order | None, listener: Listener | None,
    ) -> RunReport:  # fmt: skip
        engine, tally, sweeps = self._engine, work.tally, work.most_sweeps
        assert engine is not None
        before = engine.io_bytes
        if work.queue is not None:
            self.predicted = None  # it is of blocks whose rows begin together
        bar = Progress(sum(r.max_new for r in work.rows)) if listener is None else contextlib.nullcontext(listener)
        with bar as progress:

            def hand_out(finished: list[Row]) -> None:
                progress.finish(finished)
                tally.finish(finished)
                on_finished([rules.completion(row) for row in finished])
                rules.forget(finished)

            executor = Executor(engine, self._part.eviction, decoding, hand_out, sweeps, self._sharing)
            self.times, self._kv_use, self._fed = [], [], FedPrompts()
            engine.timeline.reset()
            try:
                for block in work.blocks:
                    steps = order(len(engine.layers.layers), len(block)) if order else None
                    with torch.inference_mode():
                        executor.run_block(block, steps, progress.sweep, work.queue)
                    self.times.append(executor.times)
                    self._kv_use.append(executor.kv_use)
                    self._fed += executor.fed
                    if order:  # it may end within a sweep: the next block's weights begin anew
                        executor.finish()
                        executor = Executor(engine, self._part.eviction, decoding, hand_out, sweeps, self._sharing)
                executor.finish()
            except BaseException:
                self.close()
                raise
        cut_short = [row for row in work.rows if row.finish_reason is None]
        for row in cut_short:
            row.finish_reason = "length"
        tally.finish(cut_short)
        on_finished([rules.completion(row) for row in cut_short])
        moved = {lane: n - before[lane] for lane, n in engine.io_bytes.items()}
        facts = self._planner.profile_facts | ({"refilled": work.queue.entered} if work.queue else {})
        self.report = make_report(
            self.model.name, engine, self._part.eviction, tally, self.times, self._kv_use, self._fed, moved,
            self.predicted, facts,
        )  # fmt: skip
        if engine.wire is not None:
            self.report = joint_report(self._part, self.report, engine.wire)
        return self.report

    def close(self) -> None:
        """Give back memory, worker threads and scratch files. The LLM can be used again."""
        with interrupts.held():
            if self._engine is not None:
                self._engine.__exit__(None, None, None)
                self._engine = None

    def expect(self, rows: int) -> None:
        """From now on each `run` is a part of a job of `rows` rows: "auto" chooses for all of them, and an engine that
        is opened again for longer rows also serves what came before."""
        self._job_rows = rows

    def prepare(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> Policy:
        """Open the engine for these rows, as `run` does, and return the policy. DoesNotFitError: no engine is open."""
        return self._ready(self._rules(prompts, params).rows()).policy

    def check_fit(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> None:
        """DoesNotFitError where `prepare` would raise it. Opens nothing, and closes what is open."""
        self.close()
        budgets = resolve_budgets(self._budget, self._device, self.offload_dir, self._part.processes)
        self._plan_for(self._rules(prompts, params).rows(), budgets)

    def has_room(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> bool:
        """Can these rows enter the running block, as the engine is open for others?"""
        shape = self._engine.plan.shape if self._engine is not None else None
        need = self._need(self._rules(prompts, params).rows())
        return shape is not None and need.prompt_len <= max(shape.tokens, shape.rows) and shape.has_slots(need.slots)

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Bytes by tier that the open engine has charged to the budgets at most; empty without one."""
        return self._engine.peak_bytes if self._engine is not None else {}

    def _ready(self, rows: Sequence[Row]) -> Engine:
        """An engine whose buffers cover these rows: the open one if it does, else a new one."""
        need = self._need(rows)
        if self._engine is not None and self._serves(self._engine, need, rows):
            self.predicted = self._predict(need, rows, self._engine.policy, self._engine.plan)
            return self._engine
        self.close()
        asked = self.asked_policy.base if isinstance(self.asked_policy, AutoPolicy) else self.asked_policy
        check_rolling(self.eviction, self.model.spec, asked.compress_cache)
        budgets = resolve_budgets(self._budget, self._device, self.offload_dir, self._part.processes)
        self._planned = planned = self._plan_for(rows, budgets)
        policy, plan = planned.policy, planned.memory
        self._policy = policy
        self.predicted = self._predict(need, rows, policy, plan)
        dtype, spec = getattr(torch, self.dtype), self._part.spec
        packing, scored = weight_form(policy, dtype.itemsize).packing, bool(self.eviction.needs.record)
        warm_up(self._device.torch_device, dtype, scored, packing_of(spec, policy), packing, is_rolling(self.eviction))
        checkpoint = self._find_checkpoint(packing) if packing else self._checkpoint
        self._engine = Engine(
            spec, checkpoint, policy, plan, dtype, self._device, budgets, self.offload_dir, self.timeline,
            self._part.peers,
        )  # fmt: skip
        return self._engine

    def _plan_for(self, rows: Sequence[Row], budgets: dict[str, int | None]) -> _Planned:
        """Raises DoesNotFitError. In a job the buffers serve its earlier parts as well, if both fit."""
        own, before = self._need(rows), self._planned
        if not self._job_rows:
            return self._plan(rows, own, None, budgets)
        own = replace(own, rows=max(own.rows, self._job_rows))
        if before is not None:
            with contextlib.suppress(DoesNotFitError):
                return self._plan(rows, own.union(before.need), before, budgets)
        return self._plan(rows, own, None, budgets)

    def _plan(
        self, rows: Sequence[Row], need: Need, before: _Planned | None, budgets: dict[str, int | None]
    ) -> _Planned:
        policy, itemsize = self.asked_policy, DTYPE_BYTES[self.dtype]
        if isinstance(policy, AutoPolicy):
            policy = self._planner.choose(need, policy.base, budgets)
        shape = self._shape(rows, policy)
        if before is not None and before.policy == policy:
            shape = shape.union(before.memory.shape)
        memory = plan_within(self._part.spec, policy, shape, itemsize, self._device.is_host, budgets)
        return _Planned(need, policy, memory)

    def _serves(self, engine: Engine, need: Need, rows: Sequence[Row]) -> bool:
        """Do the buffers suffice, and was the policy not chosen for fewer rows?"""
        enough = engine.plan.shape.covers(self._shape(rows, engine.policy))
        for_fewer = self._planned is None or need.rows > self._planned.need.rows
        return enough and (self.asked_policy == engine.policy or not for_fewer)

    def _shape(self, rows: Sequence[Row], policy: Policy) -> Shape:
        return shape_of_blocks(self._groups(rows, policy), self._need(rows).slots, self.eviction.needs.record)

    @property
    def _sharing(self) -> Sharing | None:
        return SHARINGS[self._share_prefix]

    def _blocks(self, rows: Sequence[Row], policy: Policy) -> list[list[list[Row]]]:
        return row_blocks(rows, policy.gpu_batch_size, policy.num_gpu_batches * self._part.in_flight, self._sharing)

    def _groups(self, rows: Sequence[Row], policy: Policy) -> list[list[tuple[PromptGroup, ...]]]:
        """The prompts of each micro-batch of each block, as they will be fed."""
        return [[group_rows(batch, self._sharing) for batch in block] for block in self._blocks(rows, policy)]

    def _need(self, rows: Sequence[Row]) -> Need:
        return need_of_rows(self._part.eviction, rows, self._part.spec.num_blocks, self._sharing)

    @cached_property
    def _planner(self) -> Planner:
        return Planner(
            self.model.spec, self._device_name, self._device.is_host, self.dtype, self.offload_dir, self._hardware
        )

    def _predict(self, need: Need, rows: Sequence[Row], policy: Policy, plan: MemoryPlan) -> Prediction | None:
        """What the run will cost if no row ends early; None where the profile does not know the dtype, and in a job,
        where to simulate every ragged block of every part would take longer than it tells."""
        if self._job_rows or self._part.pipeline is not None or not self._planner.can_predict:
            return None
        return self._planner.predict(policy, need, plan, self._groups(rows, policy))

    @cached_property
    def _checkpoint(self) -> Checkpoint:
        return self._find_checkpoint(None)

    def _find_checkpoint(self, packing: Packing | None) -> Checkpoint:
        """Random and packed weights are written at first use: after the memory plan, since they may be many GB."""
        dtype = self.dtype if self.model.random else ""
        shown = Progress.on_terminal()
        return find_checkpoint(self.model, dtype, self.offload_dir, RANDOM_WEIGHTS_SEED, shown, packing)

    def _rules(self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]) -> RowRules:
        return RowRules(prompts, params, self.model.spec, self.model.tokenizer, self.eviction)

    def measure_peak(self) -> Peak:
        """Of matrix products and of reading memory, now and in the compute dtype; half a second."""
        return measure_peak(self._device, getattr(torch, self.dtype))

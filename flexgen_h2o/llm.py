"""The public face: a model that generates for any number of prompts under byte budgets."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import torch

from flexgen_h2o.checkpoint import Checkpoint, formats
from flexgen_h2o.checkpoint.formats import PackedFormat, weight_format
from flexgen_h2o.core import interrupts
from flexgen_h2o.core.config import DTYPE_BYTES, MemoryBudget, Policy
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import DEFAULT_OFFLOAD_DIR, usable_path
from flexgen_h2o.core.schedule import Step
from flexgen_h2o.core.timeline import Timeline
from flexgen_h2o.core.units import check_int
from flexgen_h2o.engine.distributed import Pipeline, check_same, joint_report, part_of
from flexgen_h2o.engine.executor import Executor
from flexgen_h2o.engine.generation import Callbacks, Decoding, LogitsWatch, Row, SlotsWatch
from flexgen_h2o.engine.memory_plan import packing_of
from flexgen_h2o.engine.metrics import (
    BlockLists,
    BlockTimes,
    KvUse,
    Listener,
    Progress,
    RunStats,
    make_report,
    sizes_of,
)
from flexgen_h2o.engine.prompts import Completion, Prompt, prompts_from_python
from flexgen_h2o.engine.report import Peak, RunReport
from flexgen_h2o.engine.requests import (
    More,
    RequestTable,
    RunRows,
    TokenSource,
    forced_rows,
    run_blocks,
    run_rows,
    steered,
)
from flexgen_h2o.engine.resources import Engine
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.engine.workload import AutoPolicy, base_of
from flexgen_h2o.kernels.warm_up import warm_up
from flexgen_h2o.kvcache.eviction import Eviction, check_eviction
from flexgen_h2o.kvcache.eviction.policy import check_rolling, is_rolling
from flexgen_h2o.kvcache.prefixes import TokenIds, check_sharing
from flexgen_h2o.models.load import Model, content_digests, find_checkpoint, find_model
from flexgen_h2o.planner import plans as llm_arguments
from flexgen_h2o.planner.measure.machine import measure_peak, peak_bytes
from flexgen_h2o.planner.plans import Planner, RowPlans
from flexgen_h2o.planner.predict import Prediction
from flexgen_h2o.planner.profile import HardwareProfile
from flexgen_h2o.tiers.device import Site, open_device, resolve_budgets

RANDOM_WEIGHTS_SEED = 0
RANDOM_DTYPE = "bfloat16"  # of random weights, unless another is asked for
NO_CALLBACKS = Callbacks()
Order = Callable[[int, int], Iterator[Step]]


class LLM:
    """A model under a policy and budgets.

    model: hub id, local Hugging Face folder, or `opt-tiny` (shipped). path: where checkpoints are; `_DUMMY_` asks for
    random weights at the true shape. policy: a `Policy`, "auto", a policy file, or `AutoPolicy(base)`. dtype: "auto"
    takes the checkpoint's (float16 becomes bfloat16 on a CPU). budget: bytes by tier, by default what is free less a
    margin. hardware: the profile that plans are made with, its file or the name of a shipped one; by default this
    machine's, measured by `python -m flexgen_h2o.hardware`.

    Raises UsageError (unusable input) here, DoesNotFitError here or at `generate`, CheckpointChangedError there, after
    which a new LLM is needed. Nothing big is allocated before the first `generate`. Close it, or use it as a context
    manager, to give memory and scratch files back at once; without that they go with its last reference, or as the
    process ends. Processes that are forked after a `generate` can run no LLM: UsageError.
    """

    def __init__(
        self, model: str | Path = "opt-tiny", policy: Policy | AutoPolicy | str | Path = "auto",
        eviction: object = None, device: str = "auto", dtype: str = "auto", budget: MemoryBudget | None = None,
        offload_dir: str | Path | None = None, path: str | Path | None = None, revision: str | None = None,
        hardware: HardwareProfile | str | Path | None = None,
    ) -> None:  # fmt: skip
        self._eviction = check_eviction(eviction)
        self.asked_policy = llm_arguments.read_policy_argument(policy)
        llm_arguments.check_together(self.asked_policy, self._eviction)
        self._budget, self._hardware = llm_arguments.check_budget(budget), llm_arguments.check_hardware(hardware)
        self._device_name = llm_arguments.check_text("device", device)
        self._device = open_device(device, separate_budget=self._budget.device is not None)
        self.offload_dir = usable_path(DEFAULT_OFFLOAD_DIR if offload_dir is None else offload_dir, "--offload-dir")
        name, where = llm_arguments.check_text("model", model), llm_arguments.check_text("path", path, True)
        self.model: Model = find_model(name, where, llm_arguments.check_text("revision", revision, True))
        self._asked_dtype = llm_arguments.check_dtype(dtype)
        self.timeline = Timeline()
        self.report: RunReport | None = None
        self._policy = self.asked_policy if isinstance(self.asked_policy, Policy) else None
        self._engine: Engine | None = None
        self.predicted: Prediction | None = None
        self._running = threading.Lock()
        self._stats = RunStats()  # of the newest run
        self._common: TokenIds = ()  # of its rows, held in one copy

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def policy(self) -> Policy | None:
        """The policy in use; with "auto", None until the first `generate`."""
        return self._policy

    @property
    def eviction(self) -> Eviction:
        """Which KV columns the next run keeps."""
        return self._eviction

    @eviction.setter
    def eviction(self, eviction: Eviction) -> None:
        kept = check_eviction(eviction)
        llm_arguments.check_together(self.asked_policy, kept)
        self._eviction = kept
        self._plans.part = replace(self._plans.part, eviction=kept)

    @property
    def share_prefix(self) -> str:
        """Are tokens that rows of a micro-batch begin with computed once? "auto": where it pays, "on", "off"."""
        return self._plans.share_prefix

    @share_prefix.setter
    def share_prefix(self, name: str) -> None:
        self._plans.share_prefix = check_sharing(name)

    @property
    def times(self) -> list[BlockTimes]:
        """Seconds of each block of the newest run; a block that rows entered has only sums, in the report."""
        return [block.times for block in self._stats.blocks if isinstance(block, BlockLists)]

    @property
    def kv_use(self) -> list[KvUse]:
        """KV columns of each block of the newest run, as of `times`."""
        return [block.kv_use for block in self._stats.blocks if isinstance(block, BlockLists)]

    def use(self, policy: Policy | AutoPolicy) -> None:
        """Run with another policy from the next `generate` on; what was held for the old one is given back."""
        if policy != self.asked_policy:
            asked = llm_arguments.read_policy_argument(policy)
            self.close()
            self.asked_policy = asked
            self._policy = asked if isinstance(asked, Policy) else None

    def join(self, pipeline: Pipeline) -> None:
        """From now on run this rank's part of the model only: every rank calls `run` with the same prompts.

        UsageError where the model has too few transformer blocks, or the policy is "auto".
        """
        if isinstance(self.asked_policy, AutoPolicy):
            raise UsageError("--pipeline: auto plans for one process; give --percent and batch sizes, or --policy FILE")
        self._plans.part = part_of(pipeline, self.model.spec, self.eviction)

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
        """UsageError for what no rows can mend: rolling positions that the model or the policy cannot have; a policy
        that is to be chosen with a profile that does not know the dtype."""
        self._check_rolling()
        if isinstance(self.asked_policy, AutoPolicy):
            self._planner.check_dtype()

    def sizes(self, prompts: Sequence[Prompt], params: SamplingParams) -> tuple[int, int, int]:
        """Bytes of weights, of the full KV cache and of the hidden states of all rows: FlexGen's summary."""
        stats = RunStats()
        stats.begin(self._rules(prompts, params).rows())
        return sizes_of(self.model.spec, stats.sizes, DTYPE_BYTES[self.dtype])

    def generate(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None,
        watch_logits: LogitsWatch | None = None, refill: bool = True,
    ) -> list[Completion]:  # fmt: skip
        """Generate for text prompts and lists of token ids, in any mix and number; results in the order of `prompts`.

        params: of all prompts, or one for each; then a row draws from its own seed alone, wherever it stands.
        watch_logits sees every step's logits: (indices of the rows, (rows, vocab) in the compute dtype). refill: as of
        `run`.
        """
        asked = llm_arguments.check_params(params)
        llm_arguments.check_watch(watch_logits, refill)
        encode = self.model.encode if self.model.tokenizer is not None else None
        spec = self.model.spec
        read = prompts_from_python(prompts, encode, spec.vocab_size, spec.max_positions)
        done: list[Completion] = []
        if not read and not isinstance(asked, SamplingParams) and asked:
            raise UsageError(f"params: {len(asked)} for 0 prompts")
        if read:
            self.run(read, asked, done.extend, Callbacks(watch_logits), refill=refill)
        return sorted(done, key=lambda c: c.index)

    def follow(
        self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]], watch_logits: LogitsWatch,
        watch_slots: SlotsWatch | None = None, max_tokens_per_sweep: int = 1,
    ) -> RunReport:  # fmt: skip
        """Teacher forcing: run `prompts` as `generate` does, but each row takes the tokens of its continuation.

        The t-th time that watch_logits sees a row, its logits are those that continuations[row][t] follows on.
        watch_slots sees what the attention of each transformer block of a decode sweep saw (generation.Decoding). Where
        nobody watches slots, a sweep takes at_once tokens of each row: the same decode steps, the weights read once.
        """
        if watch_slots is not None and not self.eviction.needs.record:
            raise UsageError(f"watch_slots: nothing is recorded of slots with {self.eviction.name}")
        check_int("at_once", max_tokens_per_sweep, low=1)
        read, forced = forced_rows(prompts, continuations, self.eviction, self.model.spec, max_tokens_per_sweep)
        watches = Callbacks(watch_logits, watch_slots)
        return self.run(read, SamplingParams(), lambda done: None, watches, token_source=forced)

    def run(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams],
        on_finished: Callable[[list[Completion]], None], watches: Callbacks = NO_CALLBACKS, order: Order | None = None,
        token_source: TokenSource | None = None, listener: Listener | None = None, refill: bool = False,
        more: More | None = None,
    ) -> RunReport:  # fmt: skip
        """`generate` for read prompts: completions are handed out as rows finish, the report is returned.

        token_source: which tokens rows take and when they are done, instead of `params`. order: the steps to run of a
        block instead of its whole schedule, from its numbers of layers and micro-batches; rows that it cuts short are
        handed out at the end, as of length. listener: hears of tokens and rows instead of the progress bar. refill:
        rows that finish give their places to the next ones while the others go on, where rows may end apart; nothing is
        predicted then. more: with refill, gives further rows that `has_room`, when all others have entered.
        """
        Engine.check_not_forked()
        if not self._running.acquire(blocking=False):
            raise UsageError("this LLM is generating already; a thread needs an LLM of its own")
        try:
            rules = self._rules(prompts, params)
            rows = rules.rows(token_source)
            pipeline = self._plans.part.pipeline
            if pipeline is not None:
                given = (self.model.config, self.dtype, self.asked_policy, self.eviction, params, self.share_prefix)
                check_same(pipeline, given, rows)
            policy = self._ready(rows).policy
            blocks, self._common = self._plans.blocks(rows, policy), self._plans.common(rows, policy)
            refills = refill and order is None and pipeline is None
            work = run_rows(rules, rows, blocks, refills, more, len(self._common))
            decoding = steered(token_source, rules.sampler, rules.end, watches)
            return self._run(rules, work, decoding, on_finished, order, listener)
        finally:
            self._running.release()

    def _run(
        self, rules: RequestTable, work: RunRows, decoding: Decoding, on_finished: Callable[[list[Completion]], None],
        order: Order | None, listener: Listener | None,
    ) -> RunReport:  # fmt: skip
        engine, stats = self._engine, work.stats
        assert engine is not None
        self._stats = stats
        before = engine.io_bytes_by_kind
        if work.queue is not None:
            self.predicted = None  # it is of blocks whose rows begin together
        bar = Progress(sum(r.max_new for r in work.rows)) if listener is None else contextlib.nullcontext(listener)
        with bar as progress:

            def hand_out(finished: list[Row]) -> None:
                progress.finish(finished)
                stats.finish(finished)
                on_finished([rules.completion(row) for row in finished])
                rules.forget(finished)

            engine.timeline.reset()
            sweeps = work.most_sweeps(engine.policy.num_gpu_batches)
            plans = self._plans
            executor = Executor(engine, plans.part.eviction, decoding, hand_out, sweeps, plans.sharing, work.common)
            try:
                run_blocks(executor, work, partial(order, len(engine.layers.layers)) if order else None, progress.sweep)
            except BaseException:
                self.close()
                raise
        cut_short = [row for row in work.rows if row.finish_reason is None]
        for row in cut_short:
            row.finish_reason = "length"
        stats.finish(cut_short)
        on_finished([rules.completion(row) for row in cut_short])
        now = engine.io_bytes_by_kind
        moved = {kind: {lane: n - before[kind][lane] for lane, n in now[kind].items()} for kind in now}
        facts = self._planner.profile_facts | ({"refilled": work.queue.entered} if work.queue else {})
        kept = self._plans.part.eviction
        self.report = make_report(self.model.name, engine, kept, stats, moved, self.predicted, facts, work.common)
        if engine.wire is not None:
            self.report = joint_report(self._plans.part, self.report, engine.wire)
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
        self._plans.job_rows = check_int("rows", rows, low=0)

    def prepare(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], by: TokenSource | None = None
    ) -> Policy:
        """Open the engine for these rows, as `run` does, and return the policy. DoesNotFitError: no engine is open."""
        return self._ready(self._rules(prompts, params).rows(by)).policy

    def check_fit(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> None:
        """DoesNotFitError where `prepare` would raise it. Opens nothing, and closes what is open."""
        self.close()
        self._plans.plan(self._rules(prompts, params).rows(), self.asked_policy, self._budgets())

    def has_room(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> bool:
        """Can these rows enter the running block, as the engine is open for others?"""
        rows = self._rules(prompts, params).rows()
        return self._engine is not None and self._plans.has_room(self._engine.plan, rows, self._common)

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Bytes by tier that the open engine has charged to the budgets at most; empty without one."""
        return self._engine.peak_bytes if self._engine is not None else {}

    def _budgets(self) -> dict[str, int | None]:
        return resolve_budgets(self._budget, self._device, self.offload_dir, self._plans.part.processes)

    def _check_rolling(self) -> None:
        check_rolling(self.eviction, self.model.spec, base_of(self.asked_policy).compress_cache)

    def _ready(self, rows: Sequence[Row]) -> Engine:
        """An engine whose buffers cover these rows: the open one if it does, else a new one."""
        open_one, plans, asked = self._engine, self._plans, self.asked_policy
        if open_one is not None and plans.serves(open_one.plan, open_one.policy, asked, rows):
            self.predicted = plans.predict(rows, open_one.policy, open_one.plan)
            return open_one
        self.close()
        self._check_rolling()
        budgets = self._budgets()
        plans.planned = planned = plans.plan(rows, asked, budgets)
        policy, plan = planned.policy, planned.memory
        self._policy = policy
        self.predicted = plans.predict(rows, policy, plan)
        dtype, spec = getattr(torch, self.dtype), plans.part.spec
        form, scored = weight_format(spec, policy, dtype.itemsize), bool(self.eviction.needs.record)
        warm_up(
            self._device.torch_device, dtype, scored, packing_of(spec, policy), is_rolling(self.eviction),
            spec.rotary is not None, partial(formats.warm_up, form),
        )  # fmt: skip
        checkpoint = self._find_checkpoint(form.packed) if form.packed else self._checkpoint
        if not self.model.random:  # what is packed now must be what was opened at first
            self._checkpoint.check_unchanged()
        site = Site(self._device, budgets, self.offload_dir)
        self._engine = Engine(spec, checkpoint, policy, plan, dtype, site, self.timeline, plans.part.peers)
        return self._engine

    @cached_property
    def _planner(self) -> Planner:
        return Planner(
            self.model.spec, self._device_name, self._device.is_host, self.dtype, self.offload_dir, self._hardware
        )

    @cached_property
    def _plans(self) -> RowPlans:
        return RowPlans(self.model.spec, self.eviction, self._planner, self.dtype, self._device.is_host)

    @cached_property
    def _checkpoint(self) -> Checkpoint:
        return self._find_checkpoint(None)

    def digests(self) -> dict[str, str | None]:
        """Of the weights and the tokenizer that this LLM has opened (source.content_digests)."""
        return content_digests(self.model, None if self.model.random else self._checkpoint)

    def _find_checkpoint(self, form: PackedFormat | None) -> Checkpoint:
        """Random and packed weights are written at first use: after the memory plan, since they may be many GB."""
        dtype, shown = self.dtype if self.model.random else "", Progress.on_terminal()
        return find_checkpoint(self.model, dtype, self.offload_dir, RANDOM_WEIGHTS_SEED, shown, form)

    def _rules(self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]) -> RequestTable:
        asked = llm_arguments.check_params(params)
        return RequestTable(prompts, asked, self.model.spec, self.model.tokenizer, self.eviction)

    def measure_peak(self) -> Peak | None:
        """Of matrix products and of reading memory, now and in the compute dtype; half a second. Call it after `close`.

        None where the budget has no room for it.
        """
        dtype, room = getattr(torch, self.dtype), self._budgets()[self._device.tier]
        has_room = room is None or room >= peak_bytes(self._device, dtype)
        return measure_peak(self._device, dtype) if has_room else None

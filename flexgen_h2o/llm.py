"""The public interface: a model that generates for any number of prompts under memory budgets."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import abc
from collections.abc import Callable, Iterator, Mapping, Sized
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NoReturn, cast

import torch

from flexgen_h2o.checkpoint import Checkpoint, formats
from flexgen_h2o.checkpoint.formats import Codec, weight_format
from flexgen_h2o.checkpoint.resolve import has_weights
from flexgen_h2o.core import forks, interrupts
from flexgen_h2o.core.config import DTYPE_BYTES, MemoryBudget, Policy
from flexgen_h2o.core.errors import FlexgenError, UsageError
from flexgen_h2o.core.files import DEFAULT_OFFLOAD_DIR, usable_path
from flexgen_h2o.core.notes import say_once
from flexgen_h2o.core.packing import bits_of_kv
from flexgen_h2o.core.settings import DECODE
from flexgen_h2o.core.timeline import Timeline
from flexgen_h2o.core.units import check_int
from flexgen_h2o.engine.decoding import Decoding
from flexgen_h2o.engine.distributed import ModelPart, Pipeline, check_same, part_of
from flexgen_h2o.engine.executor import Executor, Order
from flexgen_h2o.engine.generation import (
    BlockStats,
    Callbacks,
    Listener,
    LogitsWatch,
    Progress,
)
from flexgen_h2o.engine.memory_plan import checkpoint_bytes, kv_sizes_of, packing_of
from flexgen_h2o.engine.prompts import prompts_from_python
from flexgen_h2o.engine.report import PREDICTIONS, RunReport, make_report
from flexgen_h2o.engine.resources import Engine
from flexgen_h2o.engine.sampling import SamplingParams, check_params
from flexgen_h2o.engine.scheduler import (
    More,
    Scheduler,
    begin,
    can_differ,
    forced_sequences,
    make_blocks,
)
from flexgen_h2o.engine.self_test import (
    BLOCK_STEP_S,
    JOB_OVER_TEST,
    MAX_KL,
    PACKED,
    PASSES,
    STEPS,
    likeliest_divergence,
    sequences_of_test,
    tokens_of_test,
    warning_of,
)
from flexgen_h2o.engine.sequence import Sequence, Some, with_params
from flexgen_h2o.engine.workload import ROWS_SHARE, AutoPolicy, base_of, read_policy_argument
from flexgen_h2o.kernels.warm_up import compile_subprocess, warm_up
from flexgen_h2o.kvcache.eviction import Eviction, Full, check_eviction
from flexgen_h2o.kvcache.eviction.of_model import check_for_model, fitted
from flexgen_h2o.kvcache.eviction.policy import is_rolling
from flexgen_h2o.kvcache.prefixes import TokenIds, check_sharing
from flexgen_h2o.models.load import (
    Model,
    content_digests,
    dtype_of,
    find_checkpoint,
    find_model,
    has_safetensors,
)
from flexgen_h2o.planner.plans import Planner, new_files
from flexgen_h2o.planner.predict import Prediction
from flexgen_h2o.planner.profile import HardwareProfile
from flexgen_h2o.planner.report import SearchResult
from flexgen_h2o.planner.search import Plan
from flexgen_h2o.tiers.device import (
    NewFiles,
    less_new_files,
    may_use_card,
    open_device,
    resolve_budgets,
)

RANDOM_WEIGHTS_SEED = 0
RANDOM_DTYPE = "bfloat16"  # dtype of random weights, unless another one is asked for
NO_CALLBACKS = Callbacks()


class LLM:
    """A model that generates under a placement policy and memory budgets.

    model: hub id, local Hugging Face folder, or a name that comes with the package (`opt-tiny`); or
    a model that was found before.
    path: folder with checkpoints; `_DUMMY_` asks for random weights at the model's true shape.
    policy: a `Policy`, "auto", a policy file, or `AutoPolicy(base)`.
    dtype: "auto" uses the checkpoint's dtype (float16 becomes bfloat16 on a CPU).
    budget: most bytes per tier. By default it is what is free, less a margin.
    hardware: the profile that plans are made with: an object, its file or a shipped profile's name.
    By default it is this machine's profile, which `python -m flexgen_h2o.hardware` measures.
    on_plan: for a dry run. It is called with the plan of the first sequences when the engine would
    be opened, and ends the run by raising. Weights are neither fetched nor imported then.
    max_model_len: most tokens of a prompt and its answer. By default it is the number of the
    model's positions.
    chat_template_kwargs: variables that the chat template gets in every chat.

    Raise UsageError here if the input is unusable, and DoesNotFitError here or in `generate`.
    `generate` raises CheckpointChangedError if the weights' files changed; a new LLM is needed
    then. Nothing big is allocated before the first `generate`. Memory and scratch files are freed
    by `close`, by the end of a `with` block, with the last reference, or as the process ends.
    Processes that are forked after a `generate` cannot run an LLM: they raise UsageError.
    """

    def __init__(
        self,
        model: str | Path | Model,
        policy: Policy | AutoPolicy | str | Path = "auto",
        eviction: object = None,
        device: str = "auto",
        dtype: str = "auto",
        budget: MemoryBudget | None = None,
        offload_dir: str | Path | None = None,
        path: str | Path | None = None,
        revision: str | None = None,
        hardware: HardwareProfile | str | Path | None = None,
        on_plan: Callable[[SearchResult], NoReturn] | None = None,
        max_model_len: int | None = None,
        chat_template_kwargs: abc.Mapping[str, Any] | None = None,
    ) -> None:
        forks.check_threads()
        self._eviction = check_eviction(eviction)
        self.asked_policy = read_policy_argument(policy)
        _check_together(self.asked_policy, self._eviction)
        if budget is not None and not isinstance(budget, MemoryBudget):
            raise UsageError(
                f"budget: {budget!r:.60} is not a MemoryBudget; write for example "
                'MemoryBudget(host="16GiB")'
            )
        self._budget = budget or MemoryBudget()
        is_profile = hardware is None or isinstance(hardware, HardwareProfile)
        self._hardware = hardware if is_profile else _text("hardware", hardware)
        self._device_name = _text("device", device)
        self.device = open_device(device, separate_budget=self._budget.device is not None)
        if may_use_card(device) and self._budget.device is not None and self.device.card() is None:
            say_once(
                "there is no GPU here, so the device tier is ordinary memory with a budget of its "
                "own (device cpu says that this is meant)"
            )
        self.offload_dir = usable_path(
            DEFAULT_OFFLOAD_DIR if offload_dir is None else offload_dir, "--offload-dir"
        )
        self._on_plan = on_plan
        if isinstance(model, Model):
            self.model = model
        else:
            self.model = find_model(
                _text("model", model),
                _text_or_none("path", path),
                _text_or_none("revision", revision),
                weights=on_plan is None,
                offload_dir=self.offload_dir,
                max_model_len=max_model_len,
            )
        if chat_template_kwargs:
            self.model = self.model.with_template_options(chat_template_kwargs)
        self._asked_dtype = None if dtype == "auto" else _text("dtype", dtype)
        if self._asked_dtype is not None and self._asked_dtype not in DTYPE_BYTES:
            raise UsageError(f"--dtype {dtype}: not one of auto, {', '.join(DTYPE_BYTES)}")
        self.timeline = Timeline()
        self.report: RunReport | None = None
        self._policy = self.asked_policy if isinstance(self.asked_policy, Policy) else None
        self._engine: Engine | None = None
        self.predicted: Prediction | None = None
        self._running = threading.Lock()
        self._blocks: list[BlockStats] = []  # blocks of the newest run
        # Tokens that all its sequences begin with, of which one copy is held.
        self._common: TokenIds = ()
        # Warn once if the KV cache's bits are too few for this model and the test is cheap.
        self.tests_bits = True

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def policy(self) -> Policy | None:
        """The policy in use. It is None until the first `generate` if "auto" was asked for."""
        return self._policy

    @property
    def eviction(self) -> Eviction:
        """The eviction policy of the next run: which KV entries it keeps."""
        spec = self.model.spec
        return fitted(self._eviction, spec, kv_sizes_of(spec, base_of(self.asked_policy)))

    @eviction.setter
    def eviction(self, eviction: Eviction) -> None:
        kept = check_eviction(eviction)
        _check_together(self.asked_policy, kept)
        self._eviction = kept
        self.planner.part = replace(self.planner.part, eviction=self.eviction)

    @property
    def share_prefix(self) -> str:
        """Whether sequences of a micro-batch compute a common beginning once: "auto", "on" or
        "off".

        "auto" does so if it pays.
        """
        return self.planner.share_prefix

    @share_prefix.setter
    def share_prefix(self, name: str) -> None:
        self.planner.share_prefix = check_sharing(name)

    @property
    def times(self) -> list[BlockStats]:
        """The times of each block of the newest run, except blocks that sequences joined.

        A block that sequences joined has only sums, which are in the report.
        """
        return [block for block in self._blocks if block.keeps_lists]

    def use(self, policy: Policy | AutoPolicy) -> None:
        """Run with another policy from the next `generate` on, and free what the old one held."""
        if policy != self.asked_policy:
            asked = read_policy_argument(policy)
            _check_together(asked, self._eviction)
            self.close()
            self.asked_policy = asked
            self._policy = asked if isinstance(asked, Policy) else None
            self.planner.part = replace(self.planner.part, eviction=self.eviction)

    def join(self, pipeline: Pipeline) -> None:
        """Run only this rank's part of the model from now on.

        Every rank calls `run` with the same prompts. Raise UsageError if the model has too few
        transformer blocks, or if the policy is "auto".
        """
        if isinstance(self.asked_policy, AutoPolicy):
            raise UsageError(
                "--pipeline: auto plans for one process; give --percent and batch sizes, or "
                "--policy FILE"
            )
        self.planner.part = part_of(pipeline, self.model.spec, self.eviction)

    @property
    def dtype(self) -> str:
        """The dtype of computation, weights and KV cache."""
        return self.device.compute_dtype(
            self._asked_dtype, RANDOM_DTYPE if self.model.random else self._stored_dtype
        )

    @cached_property
    def _stored_dtype(self) -> str:
        """The dtype of the model by its config, or else by its weights."""
        assert self.model.folder is not None
        return dtype_of(self.model.folder) or self._weights_dtype or "float32"

    @property
    def _weights_dtype(self) -> str | None:
        """The dtype of the weights. None: a dry run without weights does not know it."""
        is_unknown = self._on_plan and not has_safetensors(self.model)
        return None if is_unknown else self._checkpoint.dtype

    @property
    def notes(self) -> list[str]:
        """Notes for the user on the model, and on how dtype "auto" changed its precision."""
        if self.model.random or self._asked_dtype is not None:
            return [*self.model.notes]
        stored = self._weights_dtype or self._stored_dtype
        if stored == self.dtype:
            return [*self.model.notes]
        changed = f"{stored} weights are computed in {self.dtype} here"
        if self._stored_dtype == self.dtype:
            changed += ", as config.json says"
        remedy = "--dtype float32 loses nothing"
        if self.dtype == "float32":
            remedy = f"--dtype {stored} takes half of the memory"
        return [f"{changed}; {remedy}", *self.model.notes]

    def check_plan(self) -> None:
        """Raise UsageError for errors that do not depend on the prompts.

        - rolling positions that the model or the policy cannot have
        - eviction in a model that has no layer for it
        - a --hardware file that is not a profile
        - policy "auto" with a profile that lacks the dtype
        - weights that are missing, or that are not those of config.json
        """
        self._check_eviction()
        if not self.model.random and self._weights_dtype is not None:
            self._checkpoint.check_unchanged()  # opens it
        planner = self.planner  # it reads --hardware
        if isinstance(self.asked_policy, AutoPolicy):
            planner.check_dtype()

    def generate(
        self,
        prompts: abc.Sequence[str | abc.Sequence[int]],
        params: SamplingParams | abc.Sequence[SamplingParams] | None = None,
        watch_logits: LogitsWatch | None = None,
        refill: bool = True,
    ) -> list[Sequence]:
        """Generate for text prompts and lists of token ids, in any mix.

        params: one for all prompts, or one per prompt. With one per prompt, a sequence draws from
        its own seed alone, so its place in the batch does not matter.
        watch_logits: sees the logits of every step as (indices of the sequences, (sequences, vocab)
        tensor in the compute dtype).
        refill: as in `run`.

        Results are in the order of `prompts`.
        """
        asked = check_params(params)
        if watch_logits is not None and not callable(watch_logits):
            raise UsageError(f"watch_logits: {watch_logits!r:.60} is not a function")
        if not isinstance(refill, bool):
            raise UsageError(f"refill: {refill!r:.60} is not true or false")
        encode = self.model.encode if self.model.tokenizer is not None else None
        spec = self.model.spec
        read = prompts_from_python(prompts, encode, spec.vocab_size, spec.max_positions)
        sequences = [*with_params(read, asked)]
        if sequences:
            self.run(sequences, callbacks=Callbacks(watch_logits), refill=refill)
        return sequences

    def score(
        self,
        prompts: abc.Sequence[str | abc.Sequence[int]],
        continuations: abc.Sequence[str | abc.Sequence[int]],
        mode: str = DECODE,
    ) -> list[Sequence]:
        """Return the log-probabilities of continuations, each after its prompt.

        prompts, continuations: texts and lists of token ids, in any mix. A continuation's text is
        encoded without special tokens.
        mode: as SamplingParams.score_mode.

        Results are in the order of `prompts`. `logprob` is the sum over the
        continuation's tokens, and `logprobs` has one value per token. `is_greedy` is true if each
        token was the likeliest. Prompts that begin alike are computed once (`share_prefix`).
        """
        encode = self.model.encode_plain if self.model.tokenizer is not None else None
        read = prompts_from_python(
            continuations, encode, self.model.spec.vocab_size, name="continuations"
        )
        if isinstance(prompts, Iterator):
            prompts = list(prompts)
        if isinstance(prompts, Sized) and len(read) != len(prompts):
            raise UsageError(
                f"continuations: {len(read)} for {len(prompts)} prompts; give one for each"
            )
        return self.generate(
            prompts, [SamplingParams(score=tuple(one.prompt_ids), score_mode=mode) for one in read]
        )

    def follow(
        self,
        prompts: abc.Sequence[abc.Sequence[int]],
        continuations: abc.Sequence[abc.Sequence[int]],
        watch_logits: LogitsWatch,
        max_tokens_per_sweep: int = 1,
    ) -> RunReport:
        """Run `prompts` with teacher forcing: each sequence takes the tokens of its continuation.

        watch_logits: when it sees a sequence for the t-th time, the logits are those that
        continuations[row][t] follows.
        max_tokens_per_sweep: tokens of each sequence per sweep. The decode steps are the same, but
        the weights are read once.
        """
        check_int("max_tokens_per_sweep", max_tokens_per_sweep, low=1)
        forced = forced_sequences(
            prompts, continuations, self.eviction, self.model.spec, max_tokens_per_sweep
        )
        return self.run(forced, callbacks=Callbacks(watch_logits))

    def run(
        self,
        sequences: abc.Sequence[Some],
        on_finished: Callable[[list[Some]], None] = lambda done: None,
        callbacks: Callbacks = NO_CALLBACKS,
        order: Order | None = None,
        refill: bool = False,
        more: Callable[[], abc.Sequence[Some] | None] | None = None,
    ) -> RunReport:
        """Run sequences, and return the report. They get their answers.

        on_finished: gets sequences as they finish.
        order: called with the numbers of layers and micro-batches of a block; it returns the steps
        to run instead of the whole schedule. Sequences that are cut short are handed out at the
        end, with reason "length".
        refill: continuous batching if sequences may end at different times. Nothing is predicted
        then.
        more: needs refill. It returns further sequences, for which `has_room` is true, once all
        others have joined.
        """
        Engine.check_not_forked()
        if not self._running.acquire(blocking=False):
            raise UsageError("this LLM is generating already; a thread needs an LLM of its own")
        try:
            spec = self.model.spec
            decoding = Decoding(spec.eos_token_ids, self.model.tokenizer, callbacks)
            self._begin(sequences)
            planner = self.planner
            pipeline = planner.part.pipeline
            if pipeline is not None:
                work = {
                    "model": self.model.config,
                    "dtype": self.dtype,
                    "policy": self.asked_policy,
                    "eviction": self.eviction,
                    "--gen-len or sampling flag": [one.params for one in sequences],
                    "--share-prefix": self.share_prefix,
                }
                check_same(pipeline, work, sequences)
            engine = self._ready(sequences)
            self._common = planner.common(sequences, engine.policy)
            scheduler = self._schedule(
                sequences, engine, refill and order is None and pipeline is None, more
            )
            # A prediction assumes that the sequences of a block begin together and take one token
            # per sweep. Simulating the ragged blocks of a job takes longer than it is worth.
            scores = any(one.given and one.top_logprobs is not None for one in sequences)
            is_foreseen = not scheduler.is_continuous and not scores and not planner.job_rows
            self.predicted = None
            if is_foreseen:
                self.predicted = planner.predict(
                    sequences, engine.policy, engine.plan, most=len(sequences)
                )
            before = engine.io_bytes_by_kind
            self._blocks = scheduler.stats
            engine.timeline.reset()
            with contextlib.ExitStack() as stack:
                listener = callbacks.listener or stack.enter_context(
                    Progress(sum(one.max_new for one in sequences))
                )

                def hand_out(finished: list[Sequence]) -> None:
                    listener.finish(finished)
                    scheduler.count_finished(finished)
                    decoding.finish(finished)
                    on_finished(cast(list[Some], finished))

                executor = Executor(
                    engine,
                    planner.part.eviction,
                    decoding,
                    hand_out,
                    scheduler.most_sweeps(engine.policy.num_gpu_batches),
                    planner.sharing,
                    scheduler.common,
                )
                stack.push(lambda kind, *_: self.close() if kind else None)  # after an error
                executor.run(scheduler, order, listener.sweep)
            rest = [one for one in sequences if one.finish_reason is None]
            for one in rest:
                one.finish_reason = "length"
            scheduler.count_finished(rest)
            decoding.finish(rest)
            on_finished(rest)
            profile = planner.profile
            predicted = {
                phase: None if self.predicted is None else getattr(self.predicted, phase)
                for phase in PREDICTIONS
            }
            facts = {"profile": profile.machine, "profile_disturbed": profile.was_disturbed}
            name = self.model.name
            self.report = make_report(
                engine, planner.part, name, scheduler, before, predicted, facts
            )
            return self.report
        finally:
            self._running.release()

    def _begin(self, sequences: abc.Sequence[Some]) -> abc.Sequence[Some]:
        """Make sequences ready for a run, and return them."""
        eviction = self.eviction
        for one in sequences:
            begin(one, self.model, eviction)
        return sequences

    def _asked(self, sequences: abc.Sequence[Sequence]) -> abc.Sequence[Sequence]:
        """Return copies of sequences that are ready for a run, for questions about them.

        The sequences themselves keep their answers.
        """
        return self._begin([copy(one) for one in sequences])

    def _schedule(
        self, sequences: abc.Sequence[Sequence], engine: Engine, refill: bool, more: More | None
    ) -> Scheduler:
        """Return the scheduler of these sequences and of those that `more` returns."""
        blocks = self.planner.blocks(sequences, engine.policy)
        common = len(self._common)
        if more is not None:  # sequences that join may fill micro-batches that are still empty
            blocks[0] += [[] for _ in range(engine.plan.shape.micro_batches - len(blocks[0]))]
        gains = len(blocks) > 1 and can_differ(sequences, self.model.spec)
        if not refill or (more is None and not gains):
            return Scheduler(blocks, None, common)
        return Scheduler(blocks, partial(self._further, more), common)

    def _further(self, more: More | None) -> list[Sequence]:
        """Return the sequences that `more` returns, in the order in which they are to join."""
        found = None if more is None else more()
        blocks = [] if found is None else make_blocks(self._begin(found), 1, 1)
        return [one for block in blocks for batch in block for one in batch]

    def close(self) -> None:
        """Free memory, worker threads and scratch files. The LLM can be used again."""
        with interrupts.held():
            if self._engine is not None:
                self._engine.__exit__(None, None, None)
                self._engine = None

    def prepare(self, sequences: abc.Sequence[Sequence]) -> Policy:
        """Open the engine for these sequences, as `run` does, and return the policy.

        If DoesNotFitError is raised, no engine is open.
        """
        return self._ready(self._begin(sequences)).policy

    def predict_run(self, sequences: abc.Sequence[Sequence]) -> Prediction | None:
        """Return the predicted cost of these sequences on the open engine.

        It assumes that none ends before its own limit, and that the next sequence then takes its
        place. Return None if no engine is open, or if `Planner.predict_limits` returns None.
        """
        engine = self._engine
        if engine is None:
            return None
        return self.planner.predict_limits(self._asked(sequences), engine.policy, engine.plan)

    def check_fit(self, sequences: abc.Sequence[Sequence]) -> Policy:
        """Return the policy that `prepare` would return, or raise its DoesNotFitError.

        Close the engine if it is open, and open none.
        """
        self.close()
        return self.planner.plan(self._asked(sequences), self.asked_policy, self._budgets()).policy

    def has_room(self, sequences: abc.Sequence[Sequence]) -> bool:
        """Return whether these sequences can join the running block of the open engine."""
        engine = self._engine
        return engine is not None and self.planner.has_room(
            engine.plan, self._asked(sequences), self._common
        )

    @property
    def peak_bytes(self) -> dict[str, int]:
        """The most bytes per tier that the open engine has charged to its budgets.

        Empty if none is open.
        """
        engine = self._engine  # another thread may close it meanwhile
        return {} if engine is None else engine.peak_bytes

    @property
    def budgets(self) -> Mapping[str, int | None]:
        """The bytes per tier that the open engine may hold; None is no limit.

        Empty if no engine is open.
        """
        engine = self._engine
        return {} if engine is None else engine.budgets

    @property
    def rows_budget(self) -> int:
        """The most bytes of RAM for the sequences of a job that run or wait.

        It is what the open engine's plan sets aside, or what a plan may set aside.
        """
        engine = self._engine
        planned = 0 if engine is None else engine.plan.shape.held_bytes
        return planned or (self._budgets()["host"] or sys.maxsize) // ROWS_SHARE

    def _budgets(self) -> dict[str, int | None]:
        found = resolve_budgets(
            self._budget, self.device, self.offload_dir, self.planner.part.processes
        )
        is_given = self._budget.disk is not None
        left = less_new_files(found["disk"], self.offload_dir, self._new_files(), is_given)
        return {**found, "disk": left}

    def _new_files(self) -> list[NewFiles]:
        """Return what is written to disks before the first run.

        Random weights are not among them, which are written in pieces when they are needed.
        """
        model = self.model
        if model.random:
            return []
        itemsize = DTYPE_BYTES[self.dtype]
        policy = base_of(self.asked_policy)
        # A dry run fetches no weights. Other runs have them by now.
        is_here = self._on_plan is None or model.folder is None or has_weights(model.folder)
        download = 0 if is_here else checkpoint_bytes(model.spec, DTYPE_BYTES[self._stored_dtype])
        return new_files(model.name, model.spec, policy, itemsize, self.offload_dir, download)

    def _check_eviction(self) -> None:
        check_for_model(self.eviction, self.model.spec, base_of(self.asked_policy).compress_cache)

    def _ready(self, sequences: abc.Sequence[Sequence]) -> Engine:
        """Return an engine whose buffers cover these sequences.

        It is the open one if that covers them, else a new one.
        """
        planner = self.planner
        asked = self.asked_policy
        # No other name refers to the open engine: its memory must be free before budgets are
        # measured.
        if self._engine is not None and planner.serves(
            self._engine.plan, self._engine.policy, asked, sequences
        ):
            return self._engine
        self.close()
        self._check_eviction()
        budgets = self._budgets()
        part = planner.part
        dtype = getattr(torch, self.dtype)
        planner.planned = planned = planner.plan(sequences, asked, budgets)
        if self._on_plan is not None:
            self._on_plan(planner.answer(sequences, planned, asked, budgets))
        self._policy = policy = planned.policy
        if self.tests_bits and policy.compress_cache:
            self._test_bits(sequences, planned)
        form = weight_format(part.spec, policy, dtype.itemsize)
        scored = bool(self.eviction.needs.record)
        places = {
            self.device.torch_device,
            *([torch.device("cpu")] if policy.cpu_cache_compute else []),
        }
        for place in sorted(places, key=str):
            compile_subprocess(
                warm_up,
                place,
                dtype,
                scored,
                packing_of(part.spec, policy),
                is_rolling(self.eviction),
                part.spec.rotary is not None,
                partial(formats.warm_up, form, experts=bool(part.spec.experts)),
            )
        checkpoint = self._find_checkpoint(form) if form.converted_by else self._checkpoint
        # The weights that were packed just now must be those that were opened at first.
        if not self.model.random:
            self._checkpoint.check_unchanged()
        if budgets["device"] is not None:
            self.device.limit_memory(budgets["device"])
        self._engine = Engine(
            part,
            checkpoint,
            policy,
            planned.memory,
            dtype,
            self.device,
            budgets,
            self.offload_dir,
            self.timeline,
        )
        return self._engine

    def _test_bits(self, sequences: abc.Sequence[Sequence], planned: Plan) -> None:
        """Warn, once, if the bits of the KV cache are too few for this model.

        This happens before the engine is opened for `sequences`. Nothing is tested if JOB_OVER_TEST
        such tests take longer than the job, if keys and values have 8 bits, or in a pipeline.
        """
        bits = bits_of_kv(planned.policy.cache_bits)
        if min(bits) >= 8 or self.planner.part.pipeline is not None:
            return
        with contextlib.suppress(FlexgenError), self._for_test(planned.policy) as other:
            ids = tokens_of_test(self.model)
            if not ids or not self._is_cheap(other, ids, sequences, planned):
                return
            self.tests_bits = False
            logits: list[torch.Tensor] = []

            def see(indices: list[int], of_rows: torch.Tensor) -> None:
                logits.extend(
                    of_rows[i].clone() for i, index in enumerate(indices) if index == PACKED
                )

            tested = sequences_of_test(ids)
            other.run(tested, callbacks=Callbacks(see, listener=Listener()))
            whole = tested[0].logprobs
            assert whole is not None
            # The first token follows the prompt, whose attention read no packed KV entries.
            found = [
                likeliest_divergence(*pair) for pair in zip(whole[1:], logits[1:], strict=True)
            ]
            kl = sum(found) / len(found)
            if kl > MAX_KL:
                say_once(warning_of(bits, kl))

    def _for_test(self, policy: Policy) -> LLM:
        """Return an LLM of the same model and budgets, for two sequences with a full KV cache."""
        other = LLM(
            self.model,
            replace(policy, gpu_batch_size=2, num_gpu_batches=1, attn_sparsity=1.0),
            Full(),
            device=self._device_name,
            dtype=self.dtype,
            budget=self._budget,
            offload_dir=self.offload_dir,
            hardware=self.planner.profile,
        )
        other._checkpoint = self._checkpoint
        other.tests_bits = False
        other.share_prefix = "off"
        return other

    def _is_cheap(
        self,
        other: LLM,
        ids: abc.Sequence[int],
        sequences: abc.Sequence[Sequence],
        planned: Plan,
    ) -> bool:
        """Return whether the job takes so much longer than the test of `ids` that nobody notices
        the test.
        """
        policy = base_of(other.asked_policy)
        planner = other.planner
        asked = SamplingParams(PASSES, ignore_eos=True)
        of_test = other._begin([Sequence(0, tuple(ids), params=asked)])
        test = planner.predict(
            of_test, policy, planner.plan(of_test, policy, other._budgets()).memory
        )
        job = self.planner.predict(sequences, planned.policy, planned.memory)
        if test is None or job is None:
            return False
        held = checkpoint_bytes(self.model.spec, DTYPE_BYTES[self.dtype]) * (
            1 - policy.weight_shares[2]
        )
        test_s = held / self.planner.profile.disk_read_bytes_per_s + 2 * test.total_s
        test_s += STEPS * self.model.spec.num_blocks * BLOCK_STEP_S
        job_s = job.total_s * max(1, self.planner.job_rows / len(sequences))
        return job_s > JOB_OVER_TEST * test_s

    @cached_property
    def planner(self) -> Planner:
        """The planner of all runs. Commands set its `job_rows` and read its `profile`."""
        part = ModelPart(self.model.spec, self.eviction)
        is_host = self.device.is_host
        dtype = self.dtype
        return Planner(part, self._device_name, is_host, dtype, self.offload_dir, self._hardware)

    @cached_property
    def _checkpoint(self) -> Checkpoint:
        return self._find_checkpoint(None)

    def digests(self) -> dict[str, str | None]:
        """Return digests of the opened weights and tokenizer (load.content_digests)."""
        return content_digests(self.model, None if self.model.random else self._checkpoint)

    def _find_checkpoint(self, form: Codec | None) -> Checkpoint:
        """Return the checkpoint, in `form` if it is packed.

        Random and packed weights are written at first use, after the memory plan, as they may be
        many GB.
        """
        dtype = self.dtype if self.model.random else ""
        shown = Progress.on_terminal()
        return find_checkpoint(
            self.model, dtype, self.offload_dir, RANDOM_WEIGHTS_SEED, shown, form
        )


def _check_together(policy: Policy | AutoPolicy, eviction: Eviction) -> None:
    if base_of(policy).attn_sparsity != 1 and eviction.needs.record:
        raise UsageError(
            f"attn_sparsity: reads a share of the full cache; leave it at 1 with {eviction.name}, "
            "or eviction out"
        )


def _text(name: str, value: object) -> str:
    """Return a name or a path as a string.

    Raise UsageError that names the argument for other types.
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else value
    if not isinstance(text, str):
        raise UsageError(f"{name}: {value!r:.60} is not a text")
    return text


def _text_or_none(name: str, value: object) -> str | None:
    text = None if value is None else _text(name, value)
    if text == "":
        raise UsageError(f"--{name} '': is empty; leave --{name} out")
    return text

"""Plans for the sequences that a model runs: policy if it is `auto`, memory plan, cost of a run."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter, abc
from dataclasses import replace
from pathlib import Path

from flexgen_h2o.checkpoint.formats import weight_format
from flexgen_h2o.checkpoint.packed_store import is_packed
from flexgen_h2o.checkpoint.resolve import MORE_ROOM, downloaded_bytes, hub_cache
from flexgen_h2o.core.config import DTYPE_BYTES, Policy
from flexgen_h2o.core.errors import DoesNotFitError, UsageError
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.core.units import GIB
from flexgen_h2o.engine.distributed import ModelPart
from flexgen_h2o.engine.memory import MemoryPlanner
from flexgen_h2o.engine.memory_plan import BlockShape, MemoryPlan, packed_bytes
from flexgen_h2o.engine.report import MEASURED_BUSY
from flexgen_h2o.engine.scheduler import make_blocks
from flexgen_h2o.engine.sequence import Sequence
from flexgen_h2o.engine.workload import (
    ROWS_SHARE,
    AutoPolicy,
    Block,
    JobWindow,
    MicroBatchShape,
    Workload,
    base_of,
    shape_of_blocks,
    workload_of_rows,
)
from flexgen_h2o.kvcache.prefixes import SHARINGS, Sharing, TokenIds, group_prompts
from flexgen_h2o.planner.cost_model import CostModel, Machine
from flexgen_h2o.planner.lp import Budgets, SearchProgress, SearchSpace
from flexgen_h2o.planner.measure.run import cached_profile, is_news, profile_of_this_machine
from flexgen_h2o.planner.parts import find_hardware
from flexgen_h2o.planner.predict import Prediction, predict
from flexgen_h2o.planner.profile import NOMINAL, HardwareProfile
from flexgen_h2o.planner.report import SearchResult
from flexgen_h2o.planner.search import Plan, disk_reads, search, sensitivity
from flexgen_h2o.tiers.device import NewFiles

# Measuring takes about a minute. It is worth it before a run that will take longer than this.
WORTH_MEASURING_S = 600.0
MEASURING_BYTES = 5 * GIB // 4  # RAM that measuring needs
MAX_SIMULATED = 64  # simulated blocks of a plan that is shown; each takes about 20 ms


class Planner:
    """Planner of the runs of one model. Raises UsageError for a file that is not a profile.

    part: the part of the model that this process runs.
    device: the device that the user asked for.
    hardware: a profile, its file or its shipped name; None for this machine's own profile.
    share_prefix: a key of prefixes.SHARINGS.
    job_rows: the number of sequences of the job that all runs are parts of; 0 if there is no job.
    job_window: the job's --window.
    planned: the newest plan that an engine was opened for.
    """

    def __init__(
        self,
        part: ModelPart,
        device: str,
        device_is_host: bool,
        dtype: str,
        offload_dir: Path,
        hardware: HardwareProfile | str | Path | None,
    ) -> None:
        self.part = part
        self.dtype = dtype
        self._device = device
        self._device_is_host = device_is_host
        self._offload_dir = offload_dir
        if hardware is not None and not isinstance(hardware, HardwareProfile):
            hardware = find_hardware(hardware, lambda: cached_profile(device, offload_dir))
        self._profile = hardware
        self._is_given = hardware is not None
        self.share_prefix = "auto"
        self.job_rows = 0
        self.job_window: int | None = None
        self.planned: Plan | None = None

    # The machine

    @property
    def profile(self) -> HardwareProfile:
        """Hardware profile of the run's machine; nominal speeds as long as nothing was measured."""
        if self._profile is None:
            self._profile = self._of_this_machine(measure_missing=False)
        return self._profile

    @property
    def can_predict(self) -> bool:
        """Whether the profile has rates of the dtype."""
        return self.dtype in self.profile.compute

    def doubt(self) -> str:
        """Return why predictions may be wrong, if a run has not said so of this profile before."""
        if self._is_given or not self.profile.was_disturbed:
            return ""
        return MEASURED_BUSY if is_news(self._device, self._offload_dir) else ""

    def check_dtype(self) -> None:
        """Raise UsageError if the profile is of a machine with a GPU, and this run has none.

        It is also raised if the profile has no rates of the dtype, which choosing needs.
        """
        if self._is_given and self._device_is_host and not self.profile.device_is_host:
            raise UsageError(
                f"--hardware {self.profile.machine}: is a machine with a GPU, and this run has "
                "none; leave --hardware out, or ask what that machine would do: flexgen-h2o plan"
            )
        if not self.can_predict:
            raise UsageError(
                f"--hardware {self.profile.machine}: has compute rates of "
                f"{', '.join(self.profile.compute)}, and this"
                f" run computes in {self.dtype}; leave --hardware out to plan for this machine, or "
                "give a profile with"
                f" {self.dtype}"
            )

    def choose(self, need: Workload, base: Policy, budgets: Budgets) -> Policy:
        """Return the fastest policy. Raise DoesNotFitError if none fits the budgets.

        This machine is measured first if it has no profile and if the run is long enough.
        base: the policy whose switches are kept.
        """
        self.check_dtype()
        check = SearchProgress(_say)
        space = SearchSpace(self.part.spec, need, base, self._machine, budgets, check=check)
        plan = search(space)
        is_long = self.profile.machine == NOMINAL and plan.prediction.total_s > WORTH_MEASURING_S
        if is_long and not self._is_given and _can_measure(budgets):
            try:
                self._profile = self._of_this_machine(measure_missing=True)
            # Measuring needs the disk, and the run may not need it.
            except (DoesNotFitError, UsageError) as error:
                _say(f"planned with nominal speeds, as this machine cannot be measured: {error}")
                return plan.policy
            plan = search(replace(space, machine=self._machine, check=SearchProgress(_say)))
        return plan.policy

    @property
    def _machine(self) -> Machine:
        return Machine(self.profile, self.dtype, self._device_is_host)

    def _of_this_machine(self, measure_missing: bool) -> HardwareProfile:
        return profile_of_this_machine(self._device, self._offload_dir, _say, measure_missing)

    def num_layers(self, policy: Policy) -> int:
        """Return the number of layers of a sweep."""
        head_rows = 0 if self.planned is None else self.planned.memory.head_rows
        return len(self._memory(policy).with_head_rows(head_rows).layers.layers)

    # Rows

    @property
    def sharing(self) -> Sharing | None:
        """Rule for when sequences of a micro-batch share a prefix; None if they never do."""
        return SHARINGS[self.share_prefix]

    def common(self, rows: abc.Sequence[Sequence], policy: Policy) -> TokenIds:
        """Return the tokens that all sequences begin with, if their KV entries are in one copy.

        Otherwise the result is empty.
        """
        return tuple(rows[0].fed_ids[: self._need(rows, policy).common])

    def blocks(self, rows: abc.Sequence[Sequence], policy: Policy) -> list[list[list[Sequence]]]:
        """Return blocks of micro-batches of sequences.

        Blocks of a pipeline that are in flight together are one block.
        """
        return make_blocks(
            rows, policy.gpu_batch_size, policy.num_gpu_batches * self.part.in_flight, self.sharing
        )

    def plan(
        self,
        rows: abc.Sequence[Sequence],
        asked: Policy | AutoPolicy,
        budgets: dict[str, int | None],
    ) -> Plan:
        """Return the plan for these sequences. Raise DoesNotFitError if it does not fit.

        In a job, the buffers serve its earlier parts as well, if both fit.
        """
        need = self._need(rows, base_of(asked))
        before = self.planned
        if self.job_rows:
            need = self._of_job(need, rows, budgets.get("host"))
            if before is not None:
                with contextlib.suppress(DoesNotFitError):
                    return self._plan(rows, asked, need, before, budgets)
        return self._plan(rows, asked, need, None, budgets)

    def _of_job(self, need: Workload, rows: abc.Sequence[Sequence], host: int | None) -> Workload:
        """Return the workload of the job that these sequences are a part of.

        Its blocks have no more sequences than may be in RAM at a time.

        host: the RAM budget.
        """
        held = sum(row.most_bytes for row in rows)
        row_bytes = -(-held // len(rows))
        fitting = self.job_rows if host is None else host // ROWS_SHARE // row_bytes
        most = max(len(rows), min(self.job_rows, fitting))
        return replace(need, rows=most, window=JobWindow(most, row_bytes, self.job_window))

    def serves(
        self,
        plan: MemoryPlan,
        policy: Policy,
        asked: Policy | AutoPolicy,
        rows: abc.Sequence[Sequence],
    ) -> bool:
        """Return whether an open engine can run these sequences.

        Its buffers must suffice. A policy that was chosen by a search must not have been chosen for
        fewer sequences.
        """
        enough = plan.serves(self._shape(rows, policy, self._need(rows, policy)))
        for_fewer = self.planned is None or len(rows) > self.planned.need.rows
        if self.job_rows and sum(row.most_bytes for row in rows) > plan.shape.held_bytes:
            return False
        return enough and (asked == policy or not for_fewer)

    def has_room(self, plan: MemoryPlan, rows: abc.Sequence[Sequence], common: TokenIds) -> bool:
        """Return whether these sequences can join a running block of an engine with this plan.

        common: the tokens that all sequences of the block begin with.
        """
        shape = plan.shape
        count = len(common)
        if not has_own_scores(rows, count):
            return False
        if any(len(r.fed_ids) <= count or (*r.fed_ids[:count],) != common for r in rows):
            return False
        need = self._need_of(rows, None).in_one_copy(count)
        longest = max(len(row.fed_ids) for row in rows)
        asked = replace(
            shape,
            slots=need.slots,
            record=need.record,
            sharing=longest if count else 0,
            scores=need.scores,
            needs_all_logits=need.needs_all_logits,
        )
        attending = max(longest - count, shape.rows * need.max_tokens_per_sweep)
        return plan.serves(asked) and attending <= shape.most_attending

    def predict(
        self,
        rows: abc.Sequence[Sequence],
        policy: Policy,
        plan: MemoryPlan,
        most: int = MAX_SIMULATED,
    ) -> Prediction | None:
        """Return the cost of the run if no sequence ends early.

        The result is None if the profile has no rates of the dtype, and for a stage of a pipeline.

        most: of more different blocks than this, only some are simulated.
        """
        if self.part.pipeline is not None or not self.can_predict:
            return None
        need = self._need(rows, policy)
        blocks = self._shapes(rows, policy, need.common)
        return self.predict_blocks(policy, need, plan, blocks, most)

    def predict_limits(
        self, rows: abc.Sequence[Sequence], policy: Policy, plan: MemoryPlan
    ) -> Prediction | None:
        """Return the cost of the run as `answer` counts it: by each sequence's own limit.

        The result is None as that of `predict`.
        """
        if self.part.pipeline is not None or not self.can_predict:
            return None
        return self._own_limits(rows, policy, plan)

    def answer(
        self,
        rows: abc.Sequence[Sequence],
        planned: Plan,
        asked: Policy | AutoPolicy,
        budgets: dict[str, int | None],
    ) -> SearchResult:
        """Return all that is known of a plan for these sequences before they run.

        Seconds assume that no sequence ends early, and that its place is then given to the next
        one. Of more than MAX_SIMULATED different blocks, only some are simulated. Raise UsageError
        if the profile has no rates of the dtype.
        """
        self.check_dtype()
        policy = planned.policy
        need = self._need(rows, policy)
        prediction = self._own_limits(rows, policy, planned.memory)
        # How many sequences of the job each of these stands for.
        times = max(1.0, self.job_rows / len(rows))
        new_tokens = round(times * prediction.new_tokens)
        plan = replace(planned, predicted=prediction.scaled(times, times, new_tokens))
        need = replace(need, rows=max(need.rows, self.job_rows))
        space = SearchSpace(self.part.spec, need, policy, self._machine, budgets)
        sizes = {(len(row.fed_ids), row.max_new) for row in rows}
        return SearchResult(
            space,
            self.part.eviction.to_json(),
            isinstance(asked, AutoPolicy),
            plan,
            is_even=len(sizes) == 1,
            disk_read_bytes=disk_reads(space, policy),
            s_per_gib=sensitivity(space, plan),
        )

    def _own_limits(
        self, rows: abc.Sequence[Sequence], policy: Policy, plan: MemoryPlan
    ) -> Prediction:
        """Return the cost of these sequences if a finished one gives its place to the next."""
        need = self._need(rows, policy)
        blocks = self._shapes(rows, policy, need.common)
        most = self.predict_blocks(policy, need, plan, blocks, MAX_SIMULATED)
        new_tokens = sum(row.max_new for row in rows)
        # If all sequences had the most new tokens, decoding would take all predicted sweeps.
        return most.scaled(1.0, new_tokens / (len(rows) * need.gen_len), new_tokens)

    def predict_blocks(
        self,
        policy: Policy,
        need: Workload,
        plan: MemoryPlan,
        blocks: abc.Iterable[Block],
        most: int = sys.maxsize,
    ) -> Prediction:
        """Return the cost of these blocks of micro-batches.

        Equal blocks are simulated once. Of more than `most` different blocks, every n-th is
        simulated and counts for n of them.
        """
        counted = list(Counter(blocks).items())
        step = -(-len(counted) // most)
        # Sequences are sorted by length, so neighbouring blocks are alike.
        parts = [counted[i : i + step] for i in range(0, len(counted), step)]
        middle = [(part[len(part) // 2][0], sum(count for _, count in part)) for part in parts]
        return predict(CostModel(self.part.spec, policy, need, self._machine), plan, middle)

    def _plan(
        self,
        rows: abc.Sequence[Sequence],
        asked: Policy | AutoPolicy,
        own: Workload,
        before: Plan | None,
        budgets: dict[str, int | None],
    ) -> Plan:
        """Return the plan for sequences of the workload `own`.

        before: a plan whose sequences the buffers must serve too; None if there is none.
        """
        need = own if before is None else own.union(before.need)
        policy = self.choose(need, asked.base, budgets) if isinstance(asked, AutoPolicy) else asked
        shape = self._shape(rows, policy, own)
        if before is not None and before.policy == policy:
            shape = shape.union(before.memory.shape)
        return Plan(policy, need, self._memory(policy).plan_within(shape, budgets))

    def _memory(self, policy: Policy) -> MemoryPlanner:
        itemsize = DTYPE_BYTES[self.dtype]
        return MemoryPlanner(self.part.spec, policy, itemsize, self._device_is_host)

    def _need(self, rows: abc.Sequence[Sequence], policy: Policy) -> Workload:
        """Return the workload of these sequences.

        A shared prefix is held in one copy if sequences keep all KV entries uncompressed and read
        all of them. Exceptions are stages of a pipeline and models whose layers all have windows.
        Of the policy only the switches count.
        """
        need = self._need_of(rows, self.sharing)
        windows = self.part.spec.windows
        keeps_all = (
            not self.part.eviction.needs.record
            and not policy.compress_cache
            and policy.attn_sparsity == 1
        )
        one_copy = (
            need.prefix
            and keeps_all
            and self.part.pipeline is None
            and (not windows or None in windows)
        )
        return (
            need.in_one_copy(need.prefix)
            if one_copy and has_own_scores(rows, need.prefix)
            else need
        )

    def _need_of(self, rows: abc.Sequence[Sequence], sharing: Sharing | None) -> Workload:
        spec = self.part.spec
        return workload_of_rows(self.part.eviction, rows, spec.num_blocks, spec.windows, sharing)

    def _shape(self, rows: abc.Sequence[Sequence], policy: Policy, need: Workload) -> BlockShape:
        return shape_of_blocks(self._shapes(rows, policy, need.common), need)

    def _shapes(self, rows: abc.Sequence[Sequence], policy: Policy, common: int) -> list[Block]:
        """Return each block's micro-batches, with prompts grouped as they will be fed."""
        return [
            tuple(
                MicroBatchShape.of(
                    group_prompts([r.fed_ids for r in batch], self.sharing, common, opens=k == 0)
                )
                for k, batch in enumerate(block)
            )
            for block in self.blocks(rows, policy)
        ]


def _can_measure(budgets: Budgets) -> bool:
    """Return whether the budgets leave enough RAM for measuring this machine."""
    room = budgets.get("host")
    return room is None or room >= MEASURING_BYTES


def new_files(
    model: str, spec: ModelSpec, policy: Policy, itemsize: int, offload_dir: Path, download: int
) -> list[NewFiles]:
    """Return what a run writes to disks before it begins, and keeps.

    model: the name that the user gave. policy: its switches count. itemsize: bytes of one number of
    the compute dtype. download: bytes of a checkpoint that is not downloaded yet, or 0.
    """
    files = []
    if download:
        rest = max(0, download - downloaded_bytes(model))
        files.append(NewFiles(f"--model {model}: its download", hub_cache(), rest, MORE_ROOM))
    form = weight_format(spec, policy, itemsize)
    cache = offload_dir / "weights"
    nbytes = packed_bytes(spec, policy, itemsize)
    if nbytes and not is_packed(spec, cache, form):
        what = f"--model {model}: the converted copy of its weights ({form.name})"
        files.append(NewFiles(what, cache, nbytes, "give another --offload-dir"))
    return files


def has_own_scores(rows: abc.Sequence[Sequence], common: int) -> bool:
    """Return whether the first `common` tokens are not needed for log-probabilities of prompts.

    Other sequences feed these tokens, so this sequence has no logits of them.
    """
    return all(len(r.fed_ids) - r.scored > common for r in rows if r.scored)


def _say(line: str) -> None:
    """Print a note for the user on standard error."""
    print(f"# {line}", file=sys.stderr, flush=True)

"""Plans for this machine: where its profile comes from, and what a run reports as predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from flexgen_h2o import LLM, Policy, SamplingParams
from flexgen_h2o.core.units import GIB, format_seconds
from flexgen_h2o.engine.distributed import ModelPart
from flexgen_h2o.engine.sequence import Scoring, Sequence
from flexgen_h2o.engine.workload import AutoPolicy, Workload, shape_of
from flexgen_h2o.kvcache.eviction import H2O, Eviction, Full
from flexgen_h2o.models import built_in_spec
from flexgen_h2o.opening import opening_line
from flexgen_h2o.planner.lp import SearchSpace
from flexgen_h2o.planner.plans import WORTH_MEASURING_S, Planner
from flexgen_h2o.planner.profile import NOMINAL, HardwareProfile, nominal_profile
from flexgen_h2o.planner.report import SearchResult

NO_BUDGETS: dict[str, int | None] = {"device": 0, "host": 100 * GIB, "disk": 100 * GIB}
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13, 14]]
PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)
found = built_in_spec("facebook/opt-125m")
assert found is not None
SPEC = found[0]
NEED = Workload.full(8, 16, 4, SPEC.num_blocks)


def planner(
    tmp_path: Path,
    hardware: HardwareProfile | str | Path | None = None,
    dtype: str = "float32",
    eviction: Eviction | None = None,
) -> Planner:
    return Planner(ModelPart(SPEC, eviction or Full()), "cpu", True, dtype, tmp_path, hardware)


def tiny(tmp_path: Path, policy: Policy | str, **more: object) -> LLM:
    return LLM("opt-tiny", policy, dtype="float32", offload_dir=tmp_path, **more)  # type: ignore[arg-type]


# ---- what a job holds of its rows


def test_a_block_has_no_more_rows_than_may_be_in_memory(tmp_path: Path) -> None:
    """Rows with long lists of stops: few fit a sixteenth of the RAM, and these are planned."""
    asked = SamplingParams(max_tokens=4, stop_token_ids=tuple(range(1000, 5000)))
    rows = [Sequence(i, (5,) * 8, params=asked, max_new=4) for i in range(20)]
    budgets: dict[str, int | None] = {"device": 0, "host": GIB, "disk": 100 * GIB}
    fitting = GIB // 16 // rows[0].most_bytes
    job = planner(tmp_path, nominal_profile(True))
    alone = job.plan(rows, AutoPolicy(), budgets)
    assert not alone.memory.size("prompts"), "callers hold prompts themselves"
    job.job_rows = 100_000
    found = job.plan(rows, AutoPolicy(), budgets)
    assert 32 < found.policy.block_size <= fitting
    held = found.memory.size("prompts")
    assert found.policy.block_size * rows[0].most_bytes <= held <= GIB // 16
    assert found.memory.bytes_on("host") <= GIB
    job.planned = found
    assert job.serves(found.memory, found.policy, AutoPolicy(), rows)
    others = [replace(one, prompt="x" * held) for one in rows[:1]]
    assert not job.serves(found.memory, found.policy, AutoPolicy(), others)


# ---- what a policy is chosen for


HEADERS = [[1] * 40, [2] * 40]
PILES: dict[str, tuple[list[list[int]], dict[str, Any]]] = {
    "two headers": ([[*HEADERS[i % 2], *range(3 + i, 40 + 3 * i)] for i in range(64)], {}),
    "one header, not of all": ([[*HEADERS[0], i] if i else [7] * 60 for i in range(32)], {}),
    "one header": ([[*HEADERS[0], i, i] for i in range(9)], {}),
    "given tokens": (
        [[3, 4 + i] for i in range(9)],
        {"max_tokens_per_sweep": 64},
    ),
    "scored prompts": ([[3] * 50 + [i] for i in range(9)], {"scoring": {"scored": 4}}),
}


def rows_of(pile: str) -> list[Sequence]:
    prompts, more = PILES[pile]
    rows = [Sequence(i, tuple(ids), max_new=64) for i, ids in enumerate(prompts)]
    for row in rows:
        row.max_tokens_per_sweep = more.get("max_tokens_per_sweep", 1)
        row.scoring = Scoring(row.prompt_ids, **more["scoring"]) if "scoring" in more else None
    return rows


@pytest.mark.parametrize("eviction", [Full(), H2O(0.1)], ids=["full", "h2o"])
@pytest.mark.parametrize("pile", PILES)
def test_what_a_policy_is_chosen_for_covers_what_it_runs(
    pile: str, eviction: Eviction, tmp_path: Path
) -> None:
    """Also where some rows begin alike, take many tokens a sweep, or want log-probabilities of
    their prompts; and in a job whose other windows have none of it."""
    mine = planner(tmp_path, eviction=eviction)
    rows = rows_of(pile)
    policy = Policy(8, 2)
    need = mine._need(rows, Policy())
    shape = mine._shape(rows, policy, need)
    assert shape_of(policy, need).covers(shape)
    other = mine._need([Sequence(i, (i, 7), max_new=4) for i in range(20)], Policy())
    if not need.common:  # the full cache's copy is of a window whose rows all have the prefix
        assert shape_of(policy, need.union(other)).covers(shape)


@pytest.mark.parametrize("seconds", [WORTH_MEASURING_S - 1, WORTH_MEASURING_S + 1])
@pytest.mark.parametrize("given", [False, True])
def test_only_a_long_run_is_worth_measuring_for(
    seconds: float, given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the plan is made anew with what was measured; a given profile is never measured over."""
    measured = replace(nominal_profile(True), machine="measured")
    asked: list[bool] = []

    def of_this_machine(
        device: str, folder: Path, progress: object, measure_missing: bool
    ) -> HardwareProfile:
        asked.append(measure_missing)
        return measured if measure_missing else nominal_profile(True)

    def found(space: SearchSpace) -> SimpleNamespace:
        policy = Policy(2 if space.machine.profile is measured else 1)
        return SimpleNamespace(policy=policy, prediction=SimpleNamespace(total_s=seconds))

    monkeypatch.setattr("flexgen_h2o.planner.plans.profile_of_this_machine", of_this_machine)
    monkeypatch.setattr("flexgen_h2o.planner.plans.search", found)
    plans = planner(tmp_path, nominal_profile(True) if given else None)
    is_worth_it = seconds > WORTH_MEASURING_S and not given
    assert plans.choose(NEED, Policy(), NO_BUDGETS).gpu_batch_size == (2 if is_worth_it else 1)
    assert asked == ([] if given else [False, True] if is_worth_it else [False])


@pytest.mark.parametrize(
    ("prompt_len", "max_new", "has_room"), [(20, 8, True), (21, 8, False), (20, 9, False)]
)
def test_only_rows_that_the_buffers_serve_join(
    prompt_len: int, max_new: int, has_room: bool, tmp_path: Path
) -> None:
    mine = planner(tmp_path)
    rows = [Sequence(i, (i + 3,) * 20, max_new=8) for i in range(4)]
    plan = mine.plan(rows, Policy(2, 2), dict(NO_BUDGETS)).memory
    assert mine.has_room(plan, [Sequence(9, (3,) * prompt_len, max_new=max_new)], ()) is has_room


# ---- a plan without a run


def test_a_dry_run_tells_what_the_run_then_predicts(tmp_path: Path) -> None:
    """And what it charges to the budgets; rows of few new tokens take their share of the sweeps."""
    policy = Policy(2, 1, (0, 50, 0, 100, 100, 0))
    told = list[SearchResult]()

    def stop(answer: SearchResult) -> NoReturn:
        told.append(answer)
        raise SystemExit

    for params in ([PARAMS] * 3, [PARAMS, PARAMS, replace(PARAMS, max_tokens=1)]):
        with (
            tiny(tmp_path, policy, on_plan=stop, hardware=nominal_profile(True)) as llm,
            pytest.raises(SystemExit),
        ):
            llm.generate(PROMPTS, params)
    with tiny(tmp_path, policy, hardware=nominal_profile(True)) as llm:
        llm.generate(PROMPTS, PARAMS)
        report = llm.report
    even, uneven = told
    assert even.plan is not None and uneven.plan is not None and report is not None
    assert (report.extra["profile"], report.extra["profile_disturbed"]) == (NOMINAL, False)
    assert report.predicted == {
        phase: getattr(even.plan.prediction, phase) for phase in ("prefill_s", "decode_s")
    }
    assert even.plan.prediction.new_tokens == 9 and uneven.plan.prediction.new_tokens == 7
    assert uneven.plan.prediction.decode_s == pytest.approx(
        even.plan.prediction.decode_s * 7 / 9, rel=0.05
    )
    assert even.plan.prediction.peak_bytes == report.peak_bytes
    for answer, last in ((even, PARAMS), (uneven, replace(PARAMS, max_tokens=1))):
        limits = [PARAMS, PARAMS, last]
        rows = [Sequence(i, tuple(PROMPTS[i]), params=limits[i]) for i in range(3)]
        assert answer.plan is not None
        with tiny(tmp_path, policy, hardware=nominal_profile(True)) as llm:
            llm.prepare(rows)
            assert llm.predict_run(rows) == answer.plan.prediction
            took = format_seconds(answer.plan.prediction.total_s)
            assert f"; {took} (" in opening_line(llm, rows, 3)
    assert not (tmp_path / "weights").exists()

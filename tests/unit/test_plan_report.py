"""The tables of a plan: what a person reads, and the object that programs read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.units import GIB
from flexgen_h2o.engine.workload import workload_of
from flexgen_h2o.kvcache.eviction import Eviction, Full
from flexgen_h2o.models import built_in_spec
from flexgen_h2o.planner.cost_model import Machine
from flexgen_h2o.planner.lp import SearchSpace
from flexgen_h2o.planner.profile import BUSY_NOTE, nominal_profile
from flexgen_h2o.planner.report import SearchResult, to_json, to_text
from flexgen_h2o.planner.search import Plan, evaluate

BUDGETS = {"device": 4 * GIB, "host": 8 * GIB, "disk": 50 * GIB}
STREAMED = Policy(4, 2, (0, 50, 0, 0, 100, 0))


def question(eviction: Eviction, searched: bool = False) -> SearchResult:
    found = built_in_spec("facebook/opt-125m")
    assert found is not None
    need = workload_of(eviction, 8, {(32, 4)}, 12)
    where = Machine(nominal_profile(False), "bfloat16", False)
    return SearchResult(
        SearchSpace(found[0], need, Policy(), where, BUDGETS), eviction.to_json(), searched
    )


def plan_of(asked: SearchResult, policy: Policy) -> Plan:
    return evaluate(asked.space, policy)


def lines_of(asked: SearchResult, plan: Plan, **more: object) -> list[str]:
    answer = replace(asked, plan=plan, seconds=0.5, **more)  # type: ignore[arg-type]
    return to_text(answer, "--percent ...", "run ...", "bench ...").splitlines()


def test_a_pile_that_takes_longer_than_a_night_says_what_a_night_brings() -> None:
    """And the bytes of a quantised checkpoint as it is."""
    asked = question(Full())
    plan = plan_of(asked, STREAMED)
    hours_25 = replace(plan.prediction, prefill_s=40_000.0, decode_s=50_000.0)
    lines = lines_of(asked, replace(plan, predicted=hours_25), disk_read_bytes=8 * GIB)
    assert lines[-1] == "a night of 10 hours: 3 prompts, 12 new tokens; all take 2.5 nights"
    assert "disk reads in all: 8.00 GiB, 2.00 GiB per pass (1 batch, 4 passes each)" in lines
    mxfp4 = replace(asked.space.spec, quantization={"quant_method": "mxfp4"})
    quantised = replace(asked, space=replace(asked.space, spec=mxfp4))
    assert "(mxfp4)" in lines_of(quantised, plan)[2]


def test_tables_say_what_the_plan_says() -> None:
    asked = question(Full())
    plan = plan_of(asked, STREAMED)
    lines = lines_of(asked, plan)
    assert any("4.00 GiB" in line and "weight ring" in line for line in lines)
    assert any(line.startswith("loaded ahead: 6 weight units, 4 KV units") for line in lines)


@pytest.mark.parametrize(("gain", "said"), [(0.3, "nothing"), (2.4, "2.4 s (6%)"), (39, "(98%)")])
def test_a_gain_below_a_percent_is_called_nothing(gain: float, said: str) -> None:
    asked = question(Full())
    plan = plan_of(asked, STREAMED)
    plan = replace(plan, predicted=replace(plan.prediction, prefill_s=10.0, decode_s=30.0))
    lines = lines_of(asked, plan, s_per_gib={"host": gain})
    [line] = [line for line in lines if line.startswith("1 GiB more would save: ")]
    assert said in line.partition("RAM ")[2].partition(", disk")[0]


def test_a_profile_of_a_busy_machine_is_doubted_once() -> None:
    asked = question(Full())
    machine = asked.space.machine
    notes = {"machine": f"{BUSY_NOTE} much"}
    busy = replace(machine.profile, machine="here", source="measured", notes=notes)
    asked = replace(asked, space=replace(asked.space, machine=replace(machine, profile=busy)))
    plan = plan_of(asked, STREAMED)
    assert sum("busy" in line for line in lines_of(asked, plan)) == 1
    assert to_json(replace(asked, plan=plan))["details"]["profile"]["was_disturbed"] is True


def test_object_tells_the_plan_or_why_there_is_none() -> None:
    asked = question(Full(), searched=True)
    found = to_json(replace(asked, plan=plan_of(asked, STREAMED), s_per_gib={"device": 1.5}))
    details = found["details"]
    assert details["gain_s_per_gib"] == {"device": 1.5}
    held = sum(b["nbytes"] for b in details["buffers"] if b["tier"] == "device")
    assert held == found["predicted"]["peak_bytes"]["device"]
    nothing = to_json(replace(asked, problem="too small"))
    assert (nothing["fits"], nothing["policy"], nothing["eta_s"]) == (False, None, None)
    assert nothing["details"]["problem"] == "too small"

"""The tables of a plan: what a person reads, and the object that programs read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.units import GIB
from flexgen_h2o.engine.memory_plan import Depth
from flexgen_h2o.engine.workload import need_of
from flexgen_h2o.kvcache.eviction import H2O, Eviction, Full
from flexgen_h2o.models import built_in_spec
from flexgen_h2o.planner.measure.machine import nominal_profile
from flexgen_h2o.planner.predict import Machine
from flexgen_h2o.planner.profile import BUSY_NOTE
from flexgen_h2o.planner.report import Answer, Gains, Question, columns, to_json, to_text
from flexgen_h2o.planner.search import Plan, evaluate

BUDGETS = {"device": 4 * GIB, "host": 8 * GIB, "disk": 50 * GIB}


def question(eviction: Eviction, device_is_host: bool = False, searched: bool = False) -> Question:
    machine = Machine(nominal_profile(device_is_host), "bfloat16", device_is_host)
    need = need_of(eviction, 8, {(32, 4)}, 12)
    return Question("facebook/opt-125m", need, eviction.to_json(), machine, BUDGETS, searched)


def plan_of(asked: Question, policy: Policy) -> Plan:
    found = built_in_spec(asked.model)
    assert found is not None
    return evaluate(found[0], policy, asked.need, asked.machine, asked.budgets)


def lines_of(asked: Question, plan: Plan, gains: Gains | None = None) -> list[str]:
    answer = Answer(plan.policy, plan, 0.5, gains=gains)
    return to_text(asked, answer, plan, "--percent ...", "run ...").splitlines()


def test_tables_say_what_the_plan_says() -> None:
    asked = question(Full())
    plan = plan_of(asked, Policy(4, 2, (0, 50, 0, 0, 100, 0)))
    lines = lines_of(asked, plan)
    assert "8 prompts of 32 tokens, 4 new tokens each, full KV cache" in lines[0]
    assert "nominal, device, host and disk (profile of no date: nominal)" in lines[1]
    assert lines[3:7] == ["policy, as given:", "  --percent ...", "run it:", "  run ..."]
    words = {line.split()[0]: line for line in lines if line}
    device, _, disk = lines[9:12]
    assert device.startswith("device") and "4.00 GiB" in device and "weight ring" in device
    assert disk.startswith("disk") and "cache" in disk and "50.00 GiB" in disk
    assert any(line.startswith("disk read") for line in lines) and any(line.startswith("disk write") for line in lines)
    assert words["loaded"].startswith("loaded ahead: 6 weight units, 4 KV units")
    assert words["bound:"].endswith(f"decode by {'disk read' if plan.prediction.bound_by == 'disk_read' else ''}")
    assert words["throughput:"] and words["time"]
    assert not any("would save" in line for line in lines)


def test_a_profile_of_a_busy_machine_is_named_as_one() -> None:
    asked = question(Full())
    busy = replace(asked.machine.profile, notes={"compute": f"{BUSY_NOTE} 40% of the cores"})
    told = replace(asked, machine=replace(asked.machine, profile=busy))
    plan = plan_of(asked, Policy(4, 2))
    assert "(profile measured on a busy machine: measure again with" in lines_of(told, plan)[1]
    assert "busy" not in lines_of(asked, plan)[1]


def test_one_of_a_kind_is_singular() -> None:
    asked = question(Full())
    plan = plan_of(asked, Policy(4, 2, (0, 50, 0, 0, 0, 100)))
    alone = replace(plan, memory=replace(plan.memory, depth=Depth(1, 1, 1)))
    (line,) = [line for line in lines_of(asked, alone) if line.startswith("loaded ahead")]
    assert line == "loaded ahead: 1 weight unit, 1 KV unit, 1 hidden state"


def test_one_tier_less_where_the_device_is_the_host() -> None:
    asked = question(H2O(heavy_size=3, recent_size=2), device_is_host=True)
    lines = lines_of(asked, plan_of(asked, Policy(4, 2)))
    assert "h2o, 6 KV slots a row" in lines[0]
    assert "device and host are one tier" in lines[1]
    assert not any(line.startswith(("device ", "loaded ahead", "host to device")) for line in lines if "GiB" in line)


def test_gains_are_named_where_they_count() -> None:
    asked = question(Full(), searched=True)
    plan = plan_of(asked, Policy(4, 2, (0, 50, 0, 0, 100, 0)))
    total = plan.prediction.total_s
    gains = Gains({"device": total / 4, "host": total * 0.0006, "disk": total / 1e6}, "neighbourhood")
    lines = lines_of(asked, plan, gains)
    (line,) = [line for line in lines if "would save" in line]
    assert "device" in line and "(25.0%)" in line and "(0.06%)" in line
    assert line.endswith("disk nothing (with batch sizes near these)")
    assert "policy, found in 0.5 s:" in lines


def test_object_has_the_contract_s_keys() -> None:
    asked = question(Full(), searched=True)
    plan = plan_of(asked, Policy(4, 2, (0, 50, 0, 0, 100, 0)))
    gains = Gains({"device": 1.5}, "search")
    found = to_json(asked, Answer(plan.policy, replace(plan, dual_s_per_gib={"device": -0.0}), 0.5, gains=gains))
    assert list(found) == ["policy", "fits", "predicted", "bound_by", "eta_s", "details"]
    assert set(found["predicted"]) == {"prefill_s", "decode_s", "tokens_per_s", "peak_bytes"}
    assert set(found["predicted"]["peak_bytes"]) == {"device", "host", "disk"}
    assert found["eta_s"] == pytest.approx(found["predicted"]["prefill_s"] + found["predicted"]["decode_s"])
    assert found["details"]["gain_s_per_gib"] == {"device": 1.5} and found["details"]["gain_found_by"] == "search"
    assert str(found["details"]["dual_s_per_gib"]["device"]) == "0.0"
    held = sum(b["nbytes"] for b in found["details"]["buffers"] if b["tier"] == "device")
    assert held == found["predicted"]["peak_bytes"]["device"]
    nothing = to_json(asked, Answer(None, None, 0.5, "too small"))
    assert nothing["fits"] is False and nothing["policy"] is nothing["predicted"] is nothing["eta_s"] is None
    assert nothing["details"]["problem"] == "too small"


def test_columns_are_aligned() -> None:
    assert columns([["a", "1", ""], ["bcd", "22", "x"]], left=(0, 2)) == ["a     1", "bcd  22  x"]

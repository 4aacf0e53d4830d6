"""`policy_search`: its object, its exit codes, and that what it prints and writes is what flex_opt
takes."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexgen_h2o import LLM, flex_opt, policy_search
from flexgen_h2o.core.config import TIERS, Policy, read_policy
from flexgen_h2o.core.units import GIB
from flexgen_h2o.flags import as_flags, policy_of
from flexgen_h2o.planner import lp, plans
from flexgen_h2o.planner.measure import run
from flexgen_h2o.planner.profile import HardwareProfile, nominal_profile, write_profile
from tests.doors.conftest import Answer, Door, read_json
from tests.parity.reference import random_model

KEYS = ["policy", "fits", "predicted", "bound_by", "eta_s", "details"]
SMALL = "--model facebook/opt-125m --num-prompts 4 --prompt-len 32 --gen-len 8"
GIVEN = "--percent 0 50 0 100 100 0 --gpu-batch-size 4 --num-gpu-batches 2"


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with card.json and host.json."""
    folder = tmp_path_factory.mktemp("profiles")
    for name, device_is_host in (("card", False), ("host", True)):
        write_profile(folder / f"{name}.json", nominal_profile(device_is_host))
    return folder


@pytest.fixture
def plan(call: Door, profiles: Path) -> Door:
    """The door; hardware: card or host."""

    def run(flags: str, hardware: str = "card") -> Answer:
        where = profiles / f"{hardware}.json"
        return call(policy_search.main, *flags.split(), "--hardware", where)

    return run


def object_of(answer: Answer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answer.out)
    assert list(found) == KEYS
    return found


def test_a_search_prints_the_contract_s_object(plan: Door) -> None:
    found = object_of(plan(f"{SMALL} --json"))
    predicted = found["predicted"]
    assert found["fits"] is True
    assert set(predicted) == {"prefill_s", "decode_s", "tokens_per_s", "peak_bytes"}
    assert found["eta_s"] == pytest.approx(predicted["prefill_s"] + predicted["decode_s"])
    assert predicted["tokens_per_s"] == pytest.approx(4 * 8 / found["eta_s"])
    assert found["bound_by"] in found["details"]["busy_s"]["decode"]
    assert Policy(**found["policy"]).block_size <= 4
    assert found["details"]["dtype"] == "float16"


def test_a_given_policy_is_evaluated_for_one_block(plan: Door) -> None:
    found = object_of(plan(f"--model facebook/opt-125m {GIVEN} --json"))
    assert Policy(**found["policy"]) == Policy(4, 2, (0, 50, 0, 100, 100, 0))
    assert found["details"]["workload"]["num_prompts"] == 8
    assert set(found["details"]["gain_s_per_gib"]) == set(TIERS)
    more = object_of(plan(f"--model facebook/opt-125m {GIVEN} --num-prompts 80 --json"))
    assert more["eta_s"] == pytest.approx(10 * found["eta_s"])


def test_a_saved_plan_brings_its_workload(plan: Door, tmp_path: Path) -> None:
    """Flags come first; an eviction policy is not taken, and that is said."""
    whole = object_of(plan(f"{SMALL} --hh-size 4 --output p.json --json"))
    same = plan("--model facebook/opt-125m --policy p.json --hh-size 4 --json")
    assert object_of(same)["details"]["workload"] == whole["details"]["workload"]
    taken = "--num-prompts 4, --prompt-len 32, --max-tokens 8 are those that it was found for"
    assert same.err == f"policy_search: --policy p.json: {taken}\n"
    other = plan("--model facebook/opt-125m --policy p.json --num-prompts 6 --gen-len 2 --json")
    found = object_of(other)["details"]["workload"]
    assert (found["num_prompts"], found["prompt_len"], found["gen_len"]) == (6, 32, 2)
    assert "--policy p.json: was found with h2o, and this is the full cache" in other.err


def test_printed_flags_are_flex_opt_s(plan: Door) -> None:
    flags = (
        f"{GIVEN} --cpu-cache-compute --overlap false --sep-layer 0 --pin-weight no "
        "--attn-sparsity 0.5"
    )
    switches = {
        "cpu_cache_compute": True,
        "overlap": False,
        "sep_layer": False,
        "pin_weight": False,
    }
    policy = Policy(4, 2, (0, 50, 0, 100, 100, 0), **switches, attn_sparsity=0.5)
    out = plan(f"{SMALL} {flags} --host-mem 4GiB --dtype bfloat16").out
    lines = out.splitlines()
    words = shlex.split(lines[lines.index("plan, as given:") + 1])
    assert policy_of(flex_opt._parser().parse_args(words)) == (policy, False)
    assert " ".join(words) == as_flags(policy)
    command = shlex.split(lines[lines.index("benchmark it:") + 1])
    assert command[:2] == ["flexgen-h2o", "bench"]
    args = flex_opt._parser().parse_args(command[2:])
    assert policy_of(args) == (policy, False)
    assert (args.model, args.prompt_len, args.gen_len) == ("facebook/opt-125m", 32, 8)
    assert (args.host_mem, args.dtype) == ("4GiB", "bfloat16")


def test_output_is_a_policy_file_that_flex_opt_runs(
    plan: Door, capfd: pytest.CaptureFixture[str]
) -> None:
    short = "--model opt-tiny --prompt-len 16 --gen-len 4"
    assert plan(f"{short} --num-prompts 6 --hh-ratio 0.5 --output p.json", "host").code == 0
    saved = read_policy(Path("p.json"))
    assert saved.workload is not None and saved.predicted is not None
    assert (saved.model, saved.profile) == ("opt-tiny", "nominal")
    assert saved.workload["num_prompts"] == 6 and saved.workload["eviction"]["name"] == "h2o"
    assert saved.predicted["tokens_per_s"] > 0
    argv = (
        f"{short} --policy p.json --hh-ratio 0.5 --offload-dir o --json r.json --no-log "
        "--host-mem 1GiB"
    )
    assert flex_opt.main(argv.split()) == 0, capfd.readouterr().err
    report = read_json(Path("r.json"))
    assert (
        report["policy"] == saved.policy.to_json()
        and report["peak_bytes"] == saved.predicted["peak_bytes"]
    )
    again = object_of(plan(f"{short} --policy p.json --json", "host"))
    assert again["policy"] == saved.policy.to_json()


def test_the_smallest_budget_that_would_do_does(plan: Door) -> None:
    asked = f"{SMALL} --compress-weight --compress-cache --num-prompts 1 --host-mem 1GiB"
    answer = plan(f"{asked} --device-mem 10MiB", "card")
    assert answer.code == 3 and answer.err.count("\n") == 1 and "throughput" not in answer.out
    assert " too small by " in answer.err and "--compress-weight" in answer.err
    [size] = re.findall(r"--device-mem (\d+)(?= )", answer.err.partition("would do: ")[2])
    answer = plan(f"{asked} --device-mem {size} --json", "card")
    assert answer.code == 0, answer.err
    # 0.3%: a percent of the smallest kind of bytes
    assert plan(f"{asked} --device-mem {int(int(size) * 0.997)}", "card").code == 3


# (flags, whether the model is downloaded, GiB that are free, what does not fit or "")
ON_DISK = [
    ("facebook/opt-30b", False, 50, "its download needs 55.8"),
    ("facebook/opt-6.7b --weight-bits 4", True, 3, "the converted copy of its weights"),
    ("facebook/opt-6.7b --weight-bits 4", False, 15, "the converted copy of its weights"),
    ("facebook/opt-6.7b", False, 20, ""),
    ("facebook/opt-6.7b --random-weights", False, 3, ""),
]


@pytest.mark.parametrize(("flags", "is_there", "free", "says"), ON_DISK)
def test_a_model_that_the_disk_cannot_hold_does_not_fit(
    call: Door,
    flags: str,
    is_there: bool,
    free: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is said before the machine is measured."""
    measured = []

    def profile(*args: object, **more: object) -> HardwareProfile:
        measured.append(args)
        return nominal_profile(True)

    monkeypatch.setattr(run, "profile_of_this_machine", profile)
    resolve = importlib.import_module("flexgen_h2o.checkpoint.resolve")
    monkeypatch.setattr(resolve, "is_downloaded", lambda model, revision: is_there)
    monkeypatch.setattr(plans, "downloaded_bytes", lambda model: 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free * GIB))
    more = "--host-mem 2GiB --num-prompts 1 --prompt-len 8 --gen-len 2 --device cpu --offload-dir o"
    given = "--percent 0 0 100 0 100 0 --gpu-batch-size 1 --json"
    words = f"--model {flags} {more} {given}".split()
    answer = call(policy_search.main, *words)
    if says:
        assert (answer.code, answer.out, measured) == (3, "", [])
        assert says in answer.err and "GiB are free" in answer.err
        return
    assert answer.code == 0, answer.err
    download = 0 if "random" in flags else object_of(answer)["details"]["download_bytes"]
    assert json.loads(answer.out)["details"]["budget_bytes"]["disk"] == max(
        0, (free - 2) * GIB - download
    )


def test_a_machine_of_parts_has_the_disk_that_it_is_said_to_have(call: Door) -> None:
    def ask(disk: str) -> Answer:
        parts = f"gpu=rtx-3060,cores=8,ram=16GiB,like=build-2core{disk}"
        words = f"--model facebook/opt-6.7b --num-prompts 1 --prompt-len 8 --gen-len 2 {GIVEN}"
        return call(policy_search.main, *words.split(), "--hardware", parts)

    answer = ask("")
    assert answer.code == 0 and "nominal, from data sheets" in answer.out
    assert "that machine needs this disk space besides" in answer.out
    answer = ask(",disk=10GB")
    assert answer.code == 3 and "12.40 GiB" in answer.err and "9.31 GiB are free" in answer.err
    assert ask(",disk=20GB").code == 0


def test_no_setting_is_proposed_that_no_card_has_run(plan: Door) -> None:
    words = "--model facebook/opt-6.7b --num-prompts 64 --prompt-len 512 --gen-len 2"
    assert "what makes it faster: --int8-compute" in plan(f"{words} --host-mem 16GiB", "host").out
    answer = plan(words)
    assert answer.code == 0 and "int8" not in answer.out


def test_names_are_those_of_the_pages(plan: Door) -> None:
    tight = "--model facebook/opt-6.7b --num-prompts 64 --prompt-len 512 --gen-len 32"
    answer = plan(f"{tight} --ram 3GiB", "host")
    assert answer.code == 0 and "--micro-batch " in answer.out
    assert not re.search(r"--(host-mem|device-mem|gpu-batch-size|num-gpu-batches)", answer.out)


def test_a_long_search_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time and its candidates begin with the first: the machine was measured before it."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(lp, "time", clock)
    lines: list[str] = []
    check = lp.SearchProgress(lines.append)
    clock.now = 250.0
    for _ in range(60):
        check()
        clock.now += 2
    assert "up to some minutes" in lines[0] and "4 candidates in 6 s" in lines[0]
    assert "candidates in" in lines[-1]
    assert 3 <= len(lines) <= 6, "less often, the longer it takes"


def test_trace_of_the_simulated_block(plan: Door) -> None:
    answer = plan(f"{SMALL} {GIVEN} --trace t.json")
    assert answer.code == 0, answer.err
    events = read_json(Path("t.json"))["traceEvents"]
    names = {event["name"] for event in events}
    assert {"compute_layer prefill", "compute_layer decode", "load_weight", "load_cache"} <= names
    steps = sum(event["name"] == "compute_layer decode" for event in events)
    assert steps == 7 * 26  # decode sweeps, layers


@pytest.mark.parametrize(
    ("said", "stored", "dtype", "note"),
    [
        ({"dtype": "bfloat16"}, torch.float32, "bfloat16", "as config.json says; --dtype float32"),
        ({"torch_dtype": "bfloat16"}, torch.float32, "bfloat16", "float32 weights are computed"),
        ({"dtype": "float32"}, torch.bfloat16, "float32", "--dtype bfloat16 takes half"),
        ({"dtype": "float16"}, torch.float16, "bfloat16", "float16 weights are computed in bf"),
        ({"dtype": None}, torch.float32, "float32", ""),
        ({"torch_dtype": "float64"}, torch.float32, "float32", ""),
        ({}, torch.bfloat16, "bfloat16", ""),
    ],
)
def test_a_plan_and_a_run_are_in_the_same_dtype(
    said: dict[str, Any],
    stored: torch.dtype,
    dtype: str,
    note: str,
    plan: Door,
    tmp_path: Path,
) -> None:
    """transformers' dtype: that of config.json, or else of the weights."""
    model = random_model(model_type="llama", num_hidden_layers=1).to(stored)
    model.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    body = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in body.items() if "dtype" not in k} | said))
    flags = f"--model {path.parent} --prompt-len 8 --gen-len 2 --num-prompts 1 --json"
    assert object_of(plan(flags, "host"))["details"]["dtype"] == dtype
    with LLM(str(path.parent), offload_dir=tmp_path / "offload", device="cpu") as llm:
        assert llm.dtype == dtype
        assert note in " ".join(llm.notes) if note else not llm.notes

"""`policy_search`: its object, its exit codes, and that what it prints and writes is what flex_opt
takes."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o import cli, flex_opt, policy_search
from flexgen_h2o.core.config import TIERS, Policy, read_policy
from flexgen_h2o.flags import as_flags, policy_of
from flexgen_h2o.planner import search
from flexgen_h2o.planner.profile import HardwareProfile, nominal_profile, write_profile
from tests.doors.conftest import Answer
from tests.extras import needs

Door = Callable[..., Answer]
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
def plan(
    tmp_path: Path,
    profiles: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    plain_cpu: None,
) -> Door:
    """The door in the working folder `tmp_path`; hardware: card, host or None."""
    monkeypatch.chdir(tmp_path)

    def call(flags: str, hardware: str | None = "card") -> Answer:
        capfd.readouterr()
        where = [] if hardware is None else ["--hardware", str(profiles / f"{hardware}.json")]
        code = policy_search.main([*flags.split(), *where])
        return Answer(code, *capfd.readouterr())

    return call


def object_of(answer: Answer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answer.out)
    assert list(found) == KEYS
    return found


def refused(answer: Answer, code: int, says: str) -> None:
    """One line on stderr, and no table."""
    assert answer.code == code, answer.err
    assert answer.err.startswith("policy_search: ") and answer.err.count("\n") == 1
    assert says in answer.err, answer.err
    assert "throughput" not in answer.out


def test_a_search_prints_the_contract_s_object(plan: Door) -> None:
    found = object_of(plan(f"{SMALL} --json"))
    assert found["fits"] is True
    assert set(found["predicted"]) == {"prefill_s", "decode_s", "tokens_per_s", "peak_bytes"}
    assert found["eta_s"] == pytest.approx(
        found["predicted"]["prefill_s"] + found["predicted"]["decode_s"]
    )
    assert found["predicted"]["tokens_per_s"] == pytest.approx(4 * 8 / found["eta_s"])
    assert found["bound_by"] in found["details"]["busy_s"]["decode"]
    assert Policy(**found["policy"]).block_size <= 4
    assert found["details"]["dtype"] == "float16"
    assert found["details"]["workload"]["num_prompts"] == 4


def test_the_verb_is_plan_and_a_search_is_for_1024_prompts(
    plan: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(
        search, "search", lambda space: asked.append(space.need) or pytest.skip("not reached")
    )
    with pytest.raises(pytest.skip.Exception):
        cli.main(["plan", "--model", "opt-tiny", "--hardware", "t4"])
    assert asked[0].rows == 1024


def test_a_given_policy_is_evaluated_for_one_block(plan: Door) -> None:
    found = object_of(plan(f"--model facebook/opt-125m {GIVEN} --json"))
    assert Policy(**found["policy"]) == Policy(4, 2, (0, 50, 0, 100, 100, 0))
    assert found["details"]["workload"]["num_prompts"] == 8
    assert found["details"]["search_s"] is found["details"]["dual_s_per_gib"] is None
    assert found["details"]["gain_found_by"] == "duals" and set(
        found["details"]["gain_s_per_gib"]
    ) == set(TIERS)
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


def test_a_flag_that_is_predicted_to_be_faster_is_named(plan: Door) -> None:
    """If computing binds: the search with it says how long it takes."""
    asked = "--model facebook/opt-1.3b --num-prompts 8 --prompt-len 512 --gen-len 4 --host-mem 8GiB"
    usual = object_of(plan(f"{asked} --json", "host"))
    faster = object_of(plan(f"{asked} --int8-compute --json", "host"))
    assert usual["details"]["binds"]["prefill"] == "device_compute"
    assert usual["details"]["faster"] == {
        "flag": "--int8-compute",
        "total_s": pytest.approx(faster["eta_s"]),
    }
    assert faster["details"]["faster"] is None and faster["eta_s"] < 0.9 * usual["eta_s"]
    assert "what makes it faster: --int8-compute, predicted " in plan(asked, "host").out
    on_disk = (
        "--model facebook/opt-1.3b --num-prompts 1 --prompt-len 8 --gen-len 8 --host-mem 500MiB"
    )
    assert object_of(plan(f"{on_disk} --json", "host"))["details"]["faster"] is None


def test_a_checkpoint_that_is_not_here_counts_in_the_disk_need(
    plan: Door, monkeypatch: pytest.MonkeyPatch, profiles: Path
) -> None:
    from flexgen_h2o.planner.measure import run

    resolve = importlib.import_module(
        "flexgen_h2o.checkpoint.resolve"
    )  # the room has a function of this name
    profile = nominal_profile(True)
    monkeypatch.setattr(run, "profile_of_this_machine", lambda *given, **more: profile)
    found = {}
    for is_here in (True, False):
        monkeypatch.setattr(resolve, "is_downloaded", lambda model, revision, here=is_here: here)
        found[is_here] = object_of(plan(f"{SMALL} --json", None))["details"]
    size = found[False]["download_bytes"]
    assert size > 200e6 and found[True]["download_bytes"] == 0
    less = found[True]["budget_bytes"]["disk"] - found[False]["budget_bytes"]["disk"]
    assert abs(less - size) < 64 * 2**20  # others write on that disk meanwhile
    random_weights = object_of(plan(f"{SMALL} --random-weights --json", None))
    assert random_weights["details"]["download_bytes"] == 0


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


def test_eviction_counts_and_is_printed(plan: Door) -> None:
    asked = (
        "--model facebook/opt-125m --num-prompts 8 --prompt-len 200 --gen-len 8 --percent 0 "
        "100 0 0 100 0"
    )
    full = object_of(plan(f"{asked} --json"))
    flags = "--hh-ratio 0.1 --hh-all false --eviction h2o-norm:grace=8"
    kept = object_of(plan(f"{asked} {flags} --json"))
    assert kept["predicted"]["peak_bytes"]["disk"] < full["predicted"]["peak_bytes"]["disk"] / 2
    assert kept["details"]["workload"]["eviction"]["name"] == "h2o-norm"
    lines = plan(f"{asked} {flags}").out.splitlines()
    args = flex_opt._parser().parse_args(shlex.split(lines[lines.index("benchmark it:") + 1])[2:])
    assert (args.hh_ratio, args.hh_all, args.eviction) == (0.1, False, "h2o-norm:grace=8")


def test_small_losses_are_the_fastest_way_to_have_all_columns(plan: Door) -> None:
    """It never drops a column, says what it costs, and its command runs it."""
    asked = (
        "--model facebook/opt-125m --num-prompts 16 --prompt-len 1000 --gen-len 100 --host-mem 1GiB"
    )
    for hardware in ("card", "host"):
        none, small = (
            object_of(plan(f"{asked} --kv-loss {loss} --json", hardware))
            for loss in ("none", "small")
        )
        assert (
            small["eta_s"] <= none["eta_s"]
            and small["details"]["workload"]["eviction"]["name"] == "full"
        )
        policy = Policy(**small["policy"])
        assert not none["policy"]["compress_cache"]
        assert none["details"]["kv_loss_kl"] is None and 0 <= small["details"]["kv_loss_kl"] < 0.03
        assert policy.compress_cache or small["details"]["kv_loss_kl"] == 0
    lines = plan(f"{asked} --kv-loss small", "host").out.splitlines()
    assert lines[1].startswith("quality: KL ") or policy == Policy(**none["policy"])
    args = flex_opt._parser().parse_args(shlex.split(lines[lines.index("benchmark it:") + 1])[2:])
    assert policy_of(args)[0].cache_bits == policy.cache_bits


def test_a_share_of_prompt_and_new_tokens_is_planned_and_run(
    plan: Door, capfd: pytest.CaptureFixture[str]
) -> None:
    """int(0.25 x (20 + 12)) columns and the newcomer's slot, in the plan, the command, and the run
    that follows it."""
    asked = "--model opt-tiny --prompt-len 20 --gen-len 12"
    lines = plan(
        f"{asked} --num-prompts 3 --kv-budget 0.25 --output p.json", "host"
    ).out.splitlines()
    assert "h2o, 9 KV slots per prompt" in lines[0]
    command = shlex.split(lines[lines.index("benchmark it:") + 1])[2:]
    assert command[command.index("--kv-budget") + 1] == "0.25"
    assert (read_policy(Path("p.json")).workload or {})["eviction"] == {
        "name": "h2o",
        "kv_budget": 0.25,
        "while_decoding": True,
    }
    argv = (
        f"{asked} --policy p.json --kv-budget 0.25 --offload-dir o --json r.json --no-log "
        "--host-mem 1GiB"
    )
    assert flex_opt.main(argv.split()) == 0
    report = json.loads(Path("r.json").read_text())
    assert report["kv"]["slots"] == 9 and report["eviction"]["kv_budget"] == 0.25
    assert "eviction: h2o, 9 slots a row" in capfd.readouterr().out


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
        "--verbose 0 --host-mem 1GiB"
    )
    assert flex_opt.main(argv.split()) == 0, capfd.readouterr().err
    report = json.loads(Path("r.json").read_text())
    assert (
        report["policy"] == saved.policy.to_json()
        and report["peak_bytes"] == saved.predicted["peak_bytes"]
    )
    again = object_of(plan(f"{short} --policy p.json --json", "host"))
    assert again["policy"] == saved.policy.to_json()


def test_bits_that_a_search_did_not_use_are_not_in_its_policy(plan: Door) -> None:
    """Everything fits the card: nothing is compressed, and flex_opt takes the file."""
    asked = (
        "--model facebook/opt-125m --hardware t4 --num-prompts 4 --prompt-len 16 --gen-len 4 "
        "--output p.json"
    )
    bits = "--compress-cache --cache-bits 8 --json"
    found = object_of(plan(f"{asked} {bits}", None))["policy"]
    assert (found["compress_cache"], found["cache_bits"]) == (False, 4)
    assert read_policy(Path("p.json")).policy.to_json() == found


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            "--hardware nowhere.json",
            "--hardware nowhere.json: no such file, and not a shipped profile",
        ),
        ("--hardware t4 --device cpu", "--device cpu and --hardware"),
        ("--hardware t4 --model no/such-model", "--model no/such-model: "),
        (
            "--hardware t4 --prompt-len 2040 --gen-len 10",
            "--prompt-len 2040 and --gen-len 10: facebook/opt-125m has",
        ),
        ("--hardware t4 --dtype int8", "--dtype int8: not one of"),
        (
            "--hardware host.json --dtype float16",
            "--dtype float16: the profile of nominal has only float32, bfloat16",
        ),
        (
            "--hardware t4 --policy auto --percent 0 0 0 0 0 0",
            "--policy auto and --percent: give one of them",
        ),
        ("--hardware t4 --output missing/p.json", "--output missing/p.json: the folder"),
        ("--kv-loss small --gpu-batch-size 2", "--kv-loss small: is for a search"),
        (
            "--kv-loss small --attn-sparsity 0.5",
            "--kv-loss small: says how KV is held and read, and so does",
        ),
    ],
)
def test_wrong_use_is_one_line(
    plan: Door, profiles: Path, tmp_path: Path, flags: str, says: str
) -> None:
    (tmp_path / "host.json").write_text((profiles / "host.json").read_text())
    model = "" if "--model" in flags else "--model facebook/opt-125m "
    refused(plan(model + flags, None), 2, says)


@pytest.mark.parametrize(
    ("hardware", "budgets", "switches"),
    [
        ("host", "--host-mem 20MiB --device-mem 5MiB", "--hh-size 3"),
        (
            "card",
            "--device-mem 10MiB --host-mem 1GiB",
            "--compress-weight --compress-cache --num-prompts 1",
        ),
    ],
)
def test_the_smallest_budget_that_would_do_does(
    plan: Door, hardware: str, budgets: str, switches: str
) -> None:
    answer = plan(f"{SMALL} {switches} {budgets}", hardware)
    refused(answer, 3, " too small by ")
    assert ("--compress-weight" in answer.err) is ("--compress-weight" in switches)
    smallest = dict(re.findall(r"(--\w+-mem) (\d+)(?= )", answer.err.partition("would do: ")[2]))
    assert smallest
    given = dict(zip(budgets.split()[::2], budgets.split()[1::2], strict=True))
    enough = " ".join(f"{flag} {size}" for flag, size in {**given, **smallest}.items())
    answer = plan(f"{SMALL} {switches} {enough} --json", hardware)
    assert answer.code == 0, answer.err
    for flag, size in smallest.items():  # 0.3%: a percent of the smallest kind of bytes
        less = enough.replace(f"{flag} {size}", f"{flag} {int(int(size) * 0.997)}")
        assert plan(f"{SMALL} {switches} {less}", hardware).code == 3


def test_the_smallest_budget_and_the_next_one_worth_having_are_named_with_what_they_read(
    plan: Door,
) -> None:
    """Where the largest layer leaves room for a row only, all weights are read for each row and new
    token."""
    task = "--model facebook/opt-125m --dtype float32 --num-prompts 8 --prompt-len 32 --gen-len 8"
    answer = plan(f"{task} --host-mem 30MiB", "host")
    refused(answer, 3, " too small by ")
    said = re.search(
        r"would do: --host-mem (\d+) \(.*with one prompt at a time and ([\d.]+) GiB of disk reads; "
        r"--host-mem ([\d.]+)MiB would cut disk reads to at most ([\d.]+) GiB",
        answer.err,
    )
    assert said is not None, answer.err
    least, reads, enough, fewer = (float(text) for text in said.groups())
    assert fewer < reads / 2 and enough * 2**20 <= 1.25 * least + 2**20
    two = [
        object_of(plan(f"{task} --json --host-mem {int(n)}", "host"))["details"]
        for n in (least, enough * 2**20)
    ]
    assert two[0]["disk_read_bytes"] <= 1.01 * reads * 2**30
    assert two[1]["disk_read_bytes"] <= 1.01 * fewer * 2**30 < two[0]["disk_read_bytes"] / 2
    assert two[0]["worth_more"]["budgets"]["host"] <= 1.25 * least + 2**20
    shown = plan(f"{task} --host-mem {int(least)}", "host").out
    more = r"--host-mem \d+MiB would cut disk reads to at most [\d.]+ GiB"
    assert re.search(rf"^disk reads in all: [\d.]+ GiB, .* per pass \(.*\); {more}$", shown, re.M)


@pytest.mark.parametrize(
    ("model", "mebibytes", "is_given"),
    [
        ("facebook/opt-125m", 75, False),
        ("facebook/opt-125m", 405, False),
        ("facebook/opt-350m", 75, True),
    ],
)
def test_a_budget_that_would_cut_disk_reads_does(
    plan: Door, model: str, mebibytes: int, is_given: bool
) -> None:
    """The search may take a plan that reads more and is faster: then there is no such budget."""
    rows, length = (64, 64) if model.endswith("125m") else (32, 256)
    task = (
        f"--model {model} --dtype float32 --num-prompts {rows} --prompt-len {length} --gen-len "
        "32 --json"
    )
    details = object_of(plan(f"{task} --host-mem {mebibytes}MiB", "host"))["details"]
    more = details["worth_more"]
    assert (more is not None) is is_given
    if more is not None:
        followed = object_of(plan(f"{task} --host-mem {more['budgets']['host']}", "host"))[
            "details"
        ]
        assert (
            followed["disk_read_bytes"] == more["disk_read_bytes"] < details["disk_read_bytes"] / 2
        )


def test_what_does_not_fit_is_said_in_both_ways(plan: Door) -> None:
    answer = plan(f"{SMALL} {GIVEN} --host-mem 10MiB --json")
    refused(answer, 3, "raise --host-mem")
    found = object_of(answer)
    assert (
        found["fits"] is False and found["predicted"] is found["bound_by"] is found["eta_s"] is None
    )
    assert Policy(**found["policy"]).percent == (0, 50, 0, 100, 100, 0)
    assert found["details"]["problem"] in answer.err
    answer = plan(f"{SMALL} --device-mem 10MiB --json")
    refused(answer, 3, "--device-mem")
    assert object_of(answer)["policy"] is None


def test_a_device_budget_makes_three_tiers_of_a_host(plan: Door) -> None:
    two = object_of(plan(f"{SMALL} --json", "host"))
    three = object_of(plan(f"{SMALL} --device-mem 300MiB --json", "host"))
    assert two["details"]["device_is_host"] and two["predicted"]["peak_bytes"]["device"] == 0
    assert two["details"]["dtype"] == "bfloat16"
    assert not three["details"]["device_is_host"] and three["predicted"]["peak_bytes"]["device"] > 0


def test_rolling_positions_have_no_end_however_they_are_asked_for(plan: Door) -> None:
    asked = (
        "--model TinyLlama/TinyLlama-1.1B-Chat-v1.0 --hh-size 8 --prompt-len 1000 --gen-len "
        "4000 --num-prompts 1"
    )
    for flags in ("--positions rolling", "--eviction h2o:positions=rolling"):
        assert object_of(plan(f"{asked} {flags} --json"))["fits"]
    refused(plan(asked), 2, "has 2048 positions")


def test_rows_that_balance_a_block_are_no_more_than_a_policy_may_have(plan: Door) -> None:
    """Rounded to micro-batches."""
    asked = (
        "--model facebook/opt-30b --percent 0 0 100 0 100 0 --gpu-batch-size 4 "
        "--num-gpu-batches 6 --json"
    )
    balanced = object_of(plan(f"{asked} --hardware a100-80", None))["details"]["balanced_rows"]
    assert balanced is None or balanced > 24


def test_the_command_for_a_folder_says_which_dtype_was_planned(plan: Door, ids_model: Path) -> None:
    """The folder's own may be another."""
    lines = plan(f"--model {ids_model} --num-prompts 2 --prompt-len 8 --gen-len 4").out.splitlines()
    command = lines[lines.index("benchmark it:") + 1]
    assert command.endswith("--dtype float16")


def test_this_machine_s_profile_is_asked_for(
    plan: Door, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def measured(
        device: str, folder: Path, progress: Callable[[str], None], measure_missing: bool
    ) -> HardwareProfile:
        assert (device, folder, measure_missing) == ("auto", Path("o"), True)
        progress("measuring")
        return nominal_profile(device_is_host=True)

    monkeypatch.setattr("flexgen_h2o.planner.measure.run.profile_of_this_machine", measured)
    answer = plan("--model opt-tiny --num-prompts 2 --offload-dir o --host-mem 100MiB --json", None)
    assert answer.err == "policy_search: measuring\n"
    assert object_of(answer)["details"]["budget_bytes"]["host"] == 100 * 2**20


def test_trace_of_the_simulated_block(plan: Door) -> None:
    answer = plan(f"{SMALL} {GIVEN} --trace t.json")
    assert answer.code == 0, answer.err
    events = json.loads(Path("t.json").read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert {"compute_layer prefill", "compute_layer decode", "load_weight", "load_cache"} <= names
    steps = sum(event["name"] == "compute_layer decode" for event in events)
    assert steps == 7 * 26  # decode sweeps, layers


@needs("plot")
def test_picture_of_the_simulated_block(plan: Door) -> None:
    assert plan(f"{SMALL} {GIVEN} --plot p.png").code == 0
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_needs_matplotlib(plan: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexgen_h2o.cli_common.find_spec", lambda name: None)
    refused(
        plan(f"{SMALL} --plot p.png"),
        2,
        "--plot: needs matplotlib; pip install -e '.[plot]' in a clone",
    )


@pytest.mark.slow
def test_opt_175b_without_simulating_much(plan: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = []

    def counted(*args: Any) -> Any:
        simulated.append(args[1])
        return predict(*args)

    predict = search.predict
    monkeypatch.setattr(search, "predict", counted)
    found = object_of(
        plan("--model facebook/opt-175b --num-prompts 8 --prompt-len 512 --gen-len 4 --json")
    )
    assert found["bound_by"] == "disk_read"
    assert 0 < len(simulated) <= 100


def test_the_smallest_card_for_a_model_attends_on_the_host(plan: Door) -> None:
    """With its KV cache there, a card of less memory than that for attention on it does."""
    asked = "--model facebook/opt-30b --hardware t4 --num-prompts 2"
    answer = plan(f"{asked} --device-mem 900MiB", None)
    refused(answer, 3, "with one prompt at a time, --cpu-cache-compute")
    (smallest,) = re.findall(r"would do: --device-mem (\d+) ", answer.err)
    assert int(smallest) < 920 * 2**20
    assert plan(f"{asked} --device-mem {smallest}", None).code == 0

"""The throughput sweep: search for the best batch, going on where it was stopped, tables, and the
face of a system."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flexgen_h2o.core.errors import UsageError

sys.path.append(str(Path(__file__).resolve().parents[3] / "bench" / "baselines"))

from contract import (
    DoesNotFitError,
    Meter,
    RefusedError,
    Request,
    check_length,
    kv_and_work_bytes,
    phases,
    read_rows,
)

from bench.sweep.grid import GRIDS, SYSTEMS, Cell, systems_of
from bench.sweep.search import best_rows, search
from bench.sweep.store import DOES_NOT_FIT, FAILED, OK, OVER, REFUSED, Key, Line, Store, claimed
from bench.sweep.summary import markdown, rows_of

ROOT = Path(__file__).resolve().parents[3]
OPT_TINY = ROOT / "flexgen_h2o" / "assets" / "opt-tiny"


def load(path: str) -> ModuleType:
    """A peer's script: all of them have the same few names."""
    name = path.removesuffix(".py").replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, ROOT / "bench" / "baselines" / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def by_rows(rates: dict[int, float], otherwise: str = DOES_NOT_FIT) -> Callable[[int], Line]:
    def measure(rows: int) -> Line:
        if rows in rates:
            return {"status": OK, "rows": rows, "tokens_per_s": rates[rows]}
        return {"status": otherwise, "rows": rows}

    return measure


@pytest.mark.parametrize(
    ("rates", "tried", "best"),
    [
        ({4: 1.0, 8: 2.0, 16: 3.0, 32: 4.0}, [4, 8, 16, 32], 32),  # the last that is allowed
        ({4: 1.0, 8: 2.0, 16: 2.01, 32: 2.02, 64: 9.0}, [4, 8, 16, 32], 32),  # two misses end it
        (
            {4: 1.0, 8: 0.5, 16: 3.0, 32: 2.0},
            [4, 8, 16, 32],
            16,
        ),  # one miss may be a neighbour's doing
        ({4: 1.0, 8: 2.0}, [4, 8, 16, 12, 10, 9], 8),  # 16 do not fit, nor what is between
        ({4: 1.0, 8: 2.0, 12: 3.0}, [4, 8, 16, 12, 14, 13], 12),
        ({4: 1.0, 8: 2.0, 12: 3.0, 14: 2.5, 15: 2.4}, [4, 8, 16, 12, 14, 15], 12),
        ({4: 1.0, 8: 1.0}, [4, 8, 16], 4),  # more rows had stopped gaining
        ({1: 1.0}, [4, 2, 1], 1),  # halved until it fits
        ({2: 1.0, 3: 2.0}, [4, 2, 3], 3),
        ({}, [4, 2, 1], None),
    ],
)
def test_the_search_doubles_until_nothing_is_gained(
    rates: dict[int, float], tried: list[int], best: int | None
) -> None:
    lines = search(by_rows(rates), 4, 32)
    assert [line["rows"] for line in lines] == tried
    assert best_rows(lines) == best
    over = {
        "status": OVER,
        "rows": 99,
        "tokens_per_s": 99.0,
    }  # counts only where nothing is within the budget
    assert best_rows([*lines, over]) == (best or 99)


@pytest.mark.parametrize("status", [REFUSED, FAILED])
def test_the_search_does_not_insist(status: str) -> None:
    assert len(search(by_rows({}, status), 4, 32)) == 1


def key(system: str = "ours-full", rows: int = 8, repeat: int = 0) -> Key:
    return Key(system, "facebook/opt-125m", 16, 4, "none", rows, repeat)


def figures(rate: float) -> dict[str, Any]:
    memory = {"peak_rss_bytes": 10**9, "read_bytes": 0, "others": 0.1, "budget_bytes": None}
    return {"status": OK, "reason": "", **memory, **phases(8, 4, 4 / rate, 28 / rate)}


def test_a_sweep_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    first = Store(path)
    first.add(key(), figures(5.0))
    first.add(key(rows=16), {"status": REFUSED, "reason": "not built"})
    with path.open("a") as file:
        file.write('{"system": "half a li')
    then = Store(path)
    assert then.find(key()) == first.lines[0] and path.read_text().endswith(
        "half a li"
    )  # who reads leaves it
    assert then.find(key(repeat=1)) is None
    assert then.find(key(rows=16)) is None  # another version may run it
    with claimed(path):
        then.add(key(rows=32), figures(6.0))
        with (
            pytest.raises(UsageError, match="another sweep"),
            claimed(path),
        ):  # of the file that was cut
            pass
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 3


@pytest.mark.parametrize("line", [b"{", b"[]", b'{"system": "x"}', b"\xff"])
def test_a_line_that_is_none_of_a_sweep_is_named(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    Store(path).add(key(), figures(5.0))
    before = path.read_bytes()
    path.write_bytes(before.rstrip(b"\n"))  # a last line that only lacks its end stays
    assert Store(path).find(key()) is not None
    path.write_bytes(before + line + b"\n" + before)
    with pytest.raises(UsageError, match=r"lines.jsonl: line 2 is not"):
        Store(path)


def test_of_two_sweeps_one_writes(tmp_path: Path) -> None:
    path = tmp_path / "results" / "lines.jsonl"
    with claimed(path):
        with pytest.raises(UsageError, match="another sweep"), claimed(path):
            pass
        Store(path).add(key(), figures(5.0))
    with claimed(path):
        assert len(Store(path).lines) == 1
    with (
        pytest.raises(UsageError, match=r"--results .*jsonl: cannot be written to"),
        claimed(path / "x"),
    ):
        pass


def test_again_measures_anew_but_only_once(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    Store(path).add(key(), figures(5.0))
    again = Store(path, again=True)
    assert again.find(key()) is None
    newest = again.add(key(), figures(7.0))
    assert again.find(key()) == newest
    assert again.latest() == [newest]


def test_the_table_takes_the_median_of_the_repeats() -> None:
    lines = [vars(key()) | figures(99.0)]  # of the search: not counted once there are repeats
    lines += [vars(key(repeat=i)) | figures(rate) for i, rate in enumerate((4.0, 5.0, 9.0), 1)]
    lines += [
        vars(key("hf-sdpa", 4)) | figures(2.5),
        vars(key("other")) | {"status": FAILED, "reason": "a | b"},
    ]
    rows = rows_of(lines)
    assert [row.system for row in rows] == ["ours-full", "hf-sdpa", "other"]
    assert [row.tokens_per_s for row in rows] == pytest.approx([5.0, 2.5, 0.0])
    text = markdown(lines)
    assert "| ours-full | 8 | **5.00** (4.00 - 9.00) |" in text
    assert "| 0.50 |" in text  # of ours-full
    assert "failed: a / b" in text


def test_every_system_of_a_grid_has_its_files() -> None:
    for system in SYSTEMS:
        files = ("run.py",) if system.ours else ("run.py", "setup.sh")
        assert all((ROOT / "bench" / "baselines" / system.peer / name).exists() for name in files)
    assert all(len(systems_of(name, cell)) > 2 for name, cells in GRIDS.items() for cell in cells)


def test_a_budget_may_be_a_third_of_the_weights() -> None:
    assert Cell("m", 1, 2, "third", (1, 2)).budget_bytes(3000) == 1000
    assert Cell("m", 1, 2, "2MiB", (1, 2)).budget_bytes(3000) == 2 << 20
    assert Cell("m", 1, 2, "none", (1, 2)).budget_bytes(3000) is None
    with pytest.raises(UsageError):
        Cell("m", 1, 2, "much", (1, 2)).budget_bytes(3000)


def request(tmp_path: Path, **other: Any) -> Request:
    values = {
        "variant": "full",
        "model_dir": OPT_TINY,
        "prompt_len": 6,
        "gen_len": 3,
        "rows": 4,
        "budget": None,
        "dtype": "fp32",
        "offload_dir": tmp_path,
        "threads": 1,
    }
    return Request(**(values | other))


def test_prompts_are_the_same_for_all_and_within_the_vocabulary(tmp_path: Path) -> None:
    asked = request(tmp_path)
    assert asked.prompts() == asked.prompts()
    assert [len(p) for p in asked.prompts()] == [6] * 4
    assert max(max(p) for p in asked.prompts()) < asked.config["vocab_size"]


def test_more_rows_leave_accelerate_fewer_layers_in_ram(tmp_path: Path) -> None:
    accelerate = load("accelerate/run.py")
    layers, outside = accelerate.tensors_by_layer(request(tmp_path))
    assert len(layers) == request(tmp_path).config["num_hidden_layers"]
    layer = 2 * sum(t.end - t.start for t in layers[0])  # bf16 in the file, fp32 in memory
    module = accelerate.module_bytes(request(tmp_path), layers)
    assert (
        layer / 4 < module < layer / 2
    )  # a matrix of the MLP: a third of the layer, whose vectors are small
    ends = accelerate._in_memory(outside, request(tmp_path))
    beside = sum(kv_and_work_bytes(request(tmp_path)))
    budget = ends + layer + module + beside
    kept = [
        accelerate.resident_layers(request(tmp_path, budget=budget, rows=rows), layers, outside)
        for rows in (4, 3)
    ]
    assert kept[0] == (1, True) and kept[1][0] >= 1
    little = {"budget": beside + module - 1}
    assert accelerate.resident_layers(
        request(tmp_path, room=budget, **little), layers, outside
    ) == (0, True)
    table = accelerate._in_memory(
        [t for t in outside if "embed_tokens" in t.name], request(tmp_path)
    )
    least = beside + max(module, table)
    assert accelerate.resident_layers(request(tmp_path, budget=least), layers, outside) == (
        0,
        False,
    )
    with pytest.raises(accelerate.DoesNotFitError, match="4 rows need 1 bytes more"):
        accelerate.resident_layers(request(tmp_path, budget=least - 1), layers, outside)
    in_bf16 = request(tmp_path, dtype="bf16")
    assert accelerate._in_memory(outside, in_bf16) == ends / 2
    packed = sum(kv_and_work_bytes(in_bf16)) + max(
        module, table
    )  # mapped, and packed for the product
    assert accelerate.resident_layers(replace(in_bf16, budget=packed), layers, outside)[0] == 0
    with pytest.raises(accelerate.DoesNotFitError, match="4 rows need 1 bytes more"):
        accelerate.resident_layers(replace(in_bf16, budget=packed - 1), layers, outside)


@pytest.mark.parametrize("family", ["opt", "llama", "gpt_neox"])
def test_accelerate_places_every_module_of_a_family(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 32}
    wide = (
        {"ffn_dim": 32, "word_embed_proj_dim": 16} if family == "opt" else {"intermediate_size": 32}
    )
    config = AutoConfig.for_model(family, **small, **wide)
    config.save_pretrained(tmp_path)
    accelerate = load("accelerate/run.py")
    places = accelerate._device_map(request(tmp_path, model_dir=tmp_path), kept=1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert len(model.get_submodule(accelerate.LAYERS[family])) == 3
    for name, _ in (*model.named_parameters(), *model.named_buffers()):
        assert any(name.startswith(f"{place}.") for place in places), name
    assert [place for place in places.values() if place == "disk"] == ["disk"] * 2
    on_disk = {
        name
        for name, place in accelerate._device_map(
            request(tmp_path, model_dir=tmp_path), 0, False
        ).items()
        if place == "disk"
    }
    words = [
        name for name, _ in model.named_modules() if name.endswith(("embed_tokens", "embed_in"))
    ]
    assert on_disk >= {*words, "lm_head", "embed_out"} and len(on_disk) == len(words) + 2 + 3


def test_kv_of_grouped_heads_is_narrower(tmp_path: Path) -> None:
    config = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 50,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = request(tmp_path, model_dir=tmp_path, dtype="bf16")
    assert kv_and_work_bytes(asked)[0] == 2 * 2 * (2 * 8) * 2 * 4 * (6 + 3)


def test_a_card_keeps_fewer_weights_of_accelerate_the_more_rows_it_has(tmp_path: Path) -> None:
    accelerate = load("accelerate/run.py")
    asked = {"variant": "cpu", "device": "cuda", "device_mem": 2**24}

    def on_card(rows: int) -> int:
        return int(accelerate.card_and_host_bytes(request(tmp_path, rows=rows, **asked), 2**30)[0])

    assert 0 < on_card(8) < on_card(4) < 2**24
    with pytest.raises(accelerate.DoesNotFitError, match="9000 rows"):
        on_card(9000)
    with pytest.raises(accelerate.RefusedError, match="all of RAM"):
        accelerate.card_and_host_bytes(request(tmp_path, **asked | {"variant": "disk"}), 2**30)


def test_prompts_are_where_the_model_computes(tmp_path: Path) -> None:
    """Accelerate's weights are on `meta` between their uses."""
    seen = []

    class Model:
        device = torch.device("meta")

        def generate(
            self, ids: torch.Tensor, generation_config: Any, stopping_criteria: Any, **_: Any
        ) -> torch.Tensor:
            seen.append(str(ids.device))
            for _ in range(generation_config.max_new_tokens):
                ids = torch.cat([ids, ids[:, :1]], dim=1)
                stopping_criteria(ids, ids)
            return ids

    found = load("hf_generate.py").generate(Model(), request(tmp_path), Meter(0))
    assert seen == ["cpu", "cpu"] and found["rows"] == 4


def test_flexgen_flags_and_log(tmp_path: Path) -> None:
    flexgen = load("flexgen/run.py")
    flags = flexgen.published_flags(request(tmp_path, rows=144), 30e9)
    assert flags[:9] == [
        "--gpu-batch-size",
        "48",
        "--num-gpu-batches",
        "3",
        "--percent",
        "20",
        "80",
        "0",
        "100",
    ]
    log = "prefill latency: 2.000 s\tprefill throughput: 1.0 token/s\ndecode latency: 6.000 s"
    assert flexgen.read_log(log, 4, 4)["tokens_per_s"] == 2.0
    assert (
        flexgen.flexgen_name({"hidden_size": 7168, "num_hidden_layers": 48}) == "facebook/opt-30b"
    )
    with pytest.raises(flexgen.RefusedError, match="width 64 with 2 layers"):
        flexgen.flexgen_name({"hidden_size": 64, "num_hidden_layers": 2})
    with pytest.raises(flexgen.RefusedError, match="published needs cuda"):
        flexgen.measure(request(tmp_path, variant="published"), Meter(0))


@pytest.mark.parametrize(("peer", "dtypes"), [("llamacpp", "bf16"), ("vllm", "bf16, fp32")])
def test_a_dtype_that_a_peer_is_not_measured_in_is_refused_in_a_line(
    peer: str,
    dtypes: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before the peer itself is imported."""
    path = ROOT / "bench" / "baselines" / peer / "run.py"
    flags = ["--prompt-len", "6", "--gen-len", "3", "--rows", "1", "--dtype", "fp16"]
    monkeypatch.setattr(os, "environ", dict(os.environ))  # vLLM's is changed
    monkeypatch.setattr(
        sys,
        "argv",
        [str(path), *flags, "--model-dir", str(OPT_TINY), "--offload-dir", str(tmp_path)],
    )
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(path), run_name="__main__")
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"--dtype fp16: measured in {dtypes} only\n"


def test_fp16_is_for_a_card_where_a_processor_is_not_measured_in_it(tmp_path: Path) -> None:
    for path in ("deepspeed/run.py", "flexgen/cpu.py"):
        with pytest.raises(RefusedError, match="--dtype fp16: "):
            load(path).measure(request(tmp_path, dtype="fp16"), Meter(0))
    deepspeed = load("deepspeed/run.py")
    for dtype in ("fp16", "bf16", "fp32"):
        asked = request(tmp_path, variant="cpu", device="cuda", dtype=dtype)
        config = deepspeed.zero_config(asked, deepspeed.SETTINGS, 1000, tmp_path)
        assert [name for name in ("bf16", "fp16") if config[name]["enabled"]] == [dtype] * (
            dtype != "fp32"
        )


@pytest.mark.slow
def test_ours_shows_the_face_of_a_system(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "bench/baselines/ours/run.py"),
        "--model-dir",
        str(OPT_TINY),
        "--prompt-len",
        "6",
        "--gen-len",
        "3",
        "--rows",
        "4",
        "--dtype",
        "fp32",
        "--offload-dir",
        str(tmp_path),
        "--json",
        "--variant",
        "paper-policy",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rows"] == 4
    assert found["tokens_per_s"] == pytest.approx(12 / found["total_s"])
    assert found["decode_tokens_per_s"] == pytest.approx(8 / found["decode_s"])
    assert found["read_bytes"] == 0 < found["process_read_bytes"] + found["peak_rss_bytes"]
    assert found["setting"]["policy"]["percent"] == [100, 0, 100, 0, 100, 0]


def test_the_papers_policy_spills_when_the_weights_do_not_fit() -> None:
    ours = load("ours/run.py")
    first, second = list(ours.flexgen_flags(20, fits=False))[:2]
    assert first[:4] == ["--gpu-batch-size", "3", "--num-gpu-batches", "8"]
    assert first[5:11] == ["0", "50", "0", "0", "0", "100"]
    assert second[5:11] == ["0", "40", "0", "0", "0", "100"]
    in_ram, *others = ours.flexgen_flags(20, fits=True)
    assert in_ram[5:11] == ["100", "0", "100", "0", "100", "0"]
    assert others == list(ours.flexgen_flags(20, fits=False))


def test_ours_says_why_not(tmp_path: Path) -> None:
    ours = load("ours/run.py")
    with pytest.raises(DoesNotFitError, match="flex_opt: "):
        ours.measure(request(tmp_path, budget=1000, threads=torch.get_num_threads()), Meter(0))
    assert ours.variant_flags("h2o-4bit:0.2")[:4] == ["--policy", "auto", "--hh-ratio", "0.2"]
    assert ours.variant_flags("h2o-8bit:kv-budget=0.2")[:4] == [
        "--policy",
        "auto",
        "--kv-budget",
        "0.2",
    ]
    for variant in ("h2o", "full:0.1", "h2o-3bit:0.1"):
        with pytest.raises(ours.RefusedError, match="--variant"):
            ours.variant_flags(variant)


@pytest.mark.slow
def test_the_quick_sweep_runs(tmp_path: Path) -> None:
    """With the peers that are installed here; of the others it says how to install them."""
    environment = os.environ | {"PYTHON": sys.executable}
    command = [
        "bash",
        str(ROOT / "bench/throughput_sweep.sh"),
        "--quick",
        "--results",
        str(tmp_path / "results"),
    ]
    command += ["--offload-dir", str(tmp_path / "offload")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [
        json.loads(line)
        for line in (tmp_path / "results" / "throughput.jsonl").read_text().splitlines()
    ]
    assert {
        line["status"] for line in lines if line["system"] in ("ours-full", "ours-h2o:0.1")
    } == {OK}
    assert not [line for line in lines if line["status"] == FAILED]
    missing = {
        line.split("bash ")[1]
        for line in done.stdout.splitlines()
        if ": skipped, not installed" in line
    }
    assert all((ROOT / path).exists() for path in missing)
    assert "| ours-full |" in (tmp_path / "results" / "throughput.md").read_text()


def test_what_malloc_has_kept_goes_back_to_the_kernel() -> None:
    """In a process of its own, under glibc: the last block keeps the heap from shrinking by
    itself."""
    code = f"""
import ctypes, sys
from pathlib import Path
sys.path.append({str(ROOT / "bench/baselines")!r})
from contract import release_freed
held = lambda: next(int(x.split()[1]) for x in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in x)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
blocks = [libc.malloc(50_000) for _ in range(2_000)]
for block in blocks:
    ctypes.memset(block, 1, 50_000)
for block in blocks[:-1]:
    libc.free(block)
kept = held()
release_freed()
print(kept - held())
"""  # noqa: E501
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) > 80_000  # KiB of 97,656


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "not prompts and continuations"),
        ("[", "not prompts and continuations"),
        ({"prompts": [[5]]}, "KeyError"),
        ({"prompts": 5, "continuations": 5}, "TypeError"),
        ({"prompts": [[5], [5, 6]], "continuations": [[5], [5]]}, "each as long"),
        ({"prompts": [[5], [6]], "continuations": [[5]]}, "as many"),
        ({"prompts": [], "continuations": []}, "each as"),
        ({"prompts": [[]], "continuations": [[5]]}, "each"),
        ({"prompts": [["5"]], "continuations": [[5]]}, "numbers"),
        ({"prompts": [[9999]], "continuations": [[5]]}, "from 0 to 2047"),
        (
            {"prompts": [[5] * 1000], "continuations": [[5] * 26]},
            "1026 tokens a row, and the model has 1024",
        ),
    ],
)
def test_rows_to_score_are_checked(given: object, said: str, tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    if given is not None:
        path.write_text(given if isinstance(given, str) else json.dumps(given))
    with pytest.raises(RefusedError, match=f"--score .*{said}"):
        read_rows(path, request(tmp_path).config)


def test_rows_beyond_the_positions_are_refused(tmp_path: Path) -> None:
    config = request(tmp_path).config
    check_length("--gen-len 25", 1025, config)  # the last token is not fed
    with pytest.raises(
        RefusedError, match="--gen-len 26: 1026 tokens a row, and the model has 1024 positions"
    ):
        check_length("--gen-len 26", 1026, config)

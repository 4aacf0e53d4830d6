"""`evaluate fidelity` on the shipped model, with very few rows; wrong use ends with one line and exit code 2."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flexgen_h2o import cli
from tests.doors.conftest import Answer

SMALL = (
    "--num-prompts 3 --recall-prompts 2 --depths 2 --prompt-len 128 --gen-len 12 --policies local h2o --budgets 0.2 "
    "--resamples 20 --mass-steps 2 --gpu-batch-size 4"
)  # fmt: skip
POSITIONS = 1024

Door = Callable[..., Answer]


@pytest.fixture
def evaluate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], plain_cpu: None
) -> Door:
    """The console command, in the working folder `tmp_path`."""
    monkeypatch.chdir(tmp_path)

    def call(flags: str) -> Answer:
        capfd.readouterr()
        code = cli.main(["evaluate", *flags.split()])
        return Answer(code, *capfd.readouterr())

    return call


def test_writes_json_tables_and_picture(evaluate: Door, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = evaluate(f"fidelity {SMALL} --free-run --offload-dir o --json r.json --markdown r.md --plot r.png")
    assert out.code == 0, out.err
    assert out.out.strip() == (tmp_path / "r.md").read_text().strip()
    assert (tmp_path / "r.png").stat().st_size > 10_000
    result = json.loads((tmp_path / "r.json").read_text())
    assert [(cell["policy"], cell["columns"]) for cell in result["cells"]] == [("local", 24), ("h2o", 24)]
    for cell in result["cells"]:
        assert cell["kl"]["n"] == 3 and 0 < cell["kl"]["low"] <= cell["kl"]["value"] <= cell["kl"]["high"]
        assert 0 < cell["evicted_mass"]["value"] < 1
    assert result["full"]["recall"]["inside"]["questions"] == 2
    assert result["settings"]["seed"] == 0
    assert "evaluate: recall of the full cache: " in out.err and "evaluate: recall of h2o at 20%: " in out.err
    again = evaluate(f"fidelity {SMALL} --offload-dir o --json again.json")
    assert again.code == 0
    for one, other in zip(result["cells"], json.loads((tmp_path / "again.json").read_text())["cells"], strict=True):
        assert one["kl"] == other["kl"] and one["recall"] == other["recall"]


def test_fewer_bits_of_weights_are_further_from_the_model(evaluate: Door, tmp_path: Path) -> None:
    """The runs that are compared have what the flags say, the reference has not; products in int8 lie between."""
    small, kl = SMALL.replace("local h2o", "local").replace("--recall-prompts 2", "--recall-prompts 0"), []
    for flags in ("--compress-weight --weight-bits 8", "--int8-compute", "--compress-weight"):
        out = evaluate(f"fidelity {small} --offload-dir o --json r.json {flags}")
        assert out.code == 0, out.err
        result = json.loads((tmp_path / "r.json").read_text())
        full = next(cell for cell in result["cells"] if cell["policy"] == "full")
        assert result["settings"]["compression"].startswith(flags)
        kl.append(full["kl"]["value"])
    assert 0 < kl[0] < kl[1] < kl[2] < 1


def test_follows_the_model_s_own_tokens_after_a_prompt_file(evaluate: Door, tmp_path: Path, ids_model: Path) -> None:
    rows = [{"prompt_token_ids": list(range(5, 5 + n))} for n in (30, 12, 12)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = evaluate(
        f"fidelity --model {ids_model} --offload-dir o --prompts p.jsonl --continuation greedy --prompt-len 20 "
        "--gen-len 5 --policies h2o-norm:sinks=0 --budgets 0.5 --mass-steps 0 --json r.json"
    )
    assert out.code == 0, out.err
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["recall"] is None and "evicted_mass" not in result["cells"][0]
    assert result["text"] == {"prompts": 3, "steps": 4, "mean_prompt_len": pytest.approx(44 / 3)}
    assert result["cells"][0]["eviction"]["sinks"] == 0


WRONG = [
    ("", "fidelity"),
    ("perplexity", "perplexity"),
    ("fidelity --policies nonsense", "--policies nonsense"),
    ("fidelity --policies full", "--policies full"),
    ("fidelity --policies h2o:decay=1", "--policies h2o:decay=1"),
    ("fidelity --budgets 0", "--budgets: 0.0"),
    ("fidelity --budgets 50", "--budgets: 50.0"),
    ("fidelity --budgets nan", "--budgets: nan"),
    ("fidelity --budgets half", "--budgets"),
    ("fidelity --eviction h2o", "--eviction"),
    ("fidelity --hh-ratio 0.1", "--hh-ratio"),
    ("fidelity --hh-size 3", "--hh-size"),
    ("fidelity --kv-layer-schedule pyramid", "--kv-layer-schedule"),
    ("fidelity --attn-sparsity 0.5", "--attn-sparsity"),
    ("fidelity --compress-cache --attn-sparsity 0.5", "--attn-sparsity"),
    ("fidelity --gen-len 1", "--gen-len 1"),
    (f"fidelity --prompt-len {POSITIONS} --gen-len 2", f"--prompt-len {POSITIONS}"),
    ("fidelity --prompt-len 1 --recall-prompts 0", "--prompt-len 1"),
    ("fidelity --prompt-len 30", "--prompt-len 30: too short for recall rows"),
    ("fidelity --num-prompts 0", "--num-prompts"),
    ("fidelity --num-prompts 99999", "--num-prompts 99999"),
    ("fidelity --mass-steps -1", "--mass-steps"),
    ("fidelity --keep-mem lots", "--keep-mem"),
    ("fidelity --seed x", "--seed"),
    ("fidelity --prompts none.jsonl", "--prompts none.jsonl"),
    ("fidelity --prompts short.txt", "--prompts short.txt: no row has 352 tokens"),
    ("fidelity --json /no/folder/r.json", "--json /no/folder"),
    ("fidelity --markdown /tmp", "--markdown /tmp"),
    ("fidelity --plot /no/folder/p.png", "--plot /no/folder"),
    ("fidelity --plot p.doc", "--plot p.doc: the file name must end in"),
    ("fidelity --hardware no-such-machine", "--hardware no-such-machine"),
    ("fidelity --model /no/such/model", "/no/such/model"),
    ("fidelity --model facebook/opt-125m --path _DUMMY_", "has no tokenizer; give --prompts"),
]


@pytest.mark.parametrize(("flags", "names"), WRONG, ids=[flags for flags, _ in WRONG])
def test_wrong_use_is_one_line_and_exit_code_2(flags: str, names: str, evaluate: Door, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("import os\n")
    out = evaluate(f"{flags} --offload-dir o" if flags.startswith("fidelity") else flags)
    assert out.code == 2, out
    assert out.out == ""
    assert names in out.err and len(out.err.strip().splitlines()) == 1 and "Traceback" not in out.err


def test_a_picture_without_matplotlib_names_the_extra(evaluate: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexgen_h2o.cli_common.find_spec", lambda name: None)
    out = evaluate("fidelity --plot p.png")
    assert out.code == 2 and "flexgen-h2o[plot]" in out.err

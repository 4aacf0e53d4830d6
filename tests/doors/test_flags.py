"""Flags without effect, and a disk that is full."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flexgen_h2o import batch, chat, complete, flex_opt, generate, policy_search, serve
from flexgen_h2o.checkpoint.resolve import PACKAGED
from flexgen_h2o.core.settings import SamplingParams
from flexgen_h2o.core.units import MIB, TIB
from tests.doors.conftest import Answer, Door

# ---- Flags without effect


def idle(answer: Answer) -> set[str]:
    """The flags that stderr says have none; it says nothing else, but what is kept for later runs
    (`# `)."""
    assert answer.code == 0, answer
    lines = [line for line in answer.err.splitlines() if not line.startswith("# ")]
    assert all(" no effect: " in line for line in lines), answer.err
    return {
        flag for line in lines for flag in line.partition(": ")[2].partition(" ha")[0].split(", ")
    }


NO_EFFECT = [
    ("--top-p 0.5 --top-k 3 --seed 7", {"--top-p", "--top-k", "--seed"}),
    ("--top-p 0.5 --top-k 3 --seed 7 --temperature 0.5", set()),
    ("--revision main --path .", {"--revision", "--path"}),
    ("--log-file x.log", {"--log-file"}),
    ("--ignore-eos", {"--ignore-eos"}),
    ("--debug-mode breakdown --overlap true", {"--overlap"}),
    ("--cpu-cache-compute --pin-weight 0", {"--cpu-cache-compute", "--pin-weight"}),
    ("--cpu-cache-compute --device-mem 64MiB", set()),
    ("--path _DUMMY_ --revision main", {"--revision"}),
]


@pytest.mark.parametrize(("flags", "said"), NO_EFFECT)
def test_a_flag_without_effect_is_said(flags: str, said: set[str], door: Door) -> None:
    assert idle(door("--no-log --gpu-batch-size 1", *flags.split())) == said


def test_every_door_has_one_default_of_new_tokens() -> None:
    """FlexGen's benchmark keeps FlexGen's own."""
    doors = (generate, batch, complete, serve, chat, policy_search)
    found = {door.__name__: door._parser().parse_args(["-m", "x"]).gen_len for door in doors}
    assert set(found.values()) == {SamplingParams().max_tokens}, found
    assert flex_opt._parser().parse_args([]).gen_len == 32


def test_lengths_of_prompts_in_a_file_are_their_own(
    door: Door, write_jsonl: Callable[..., Path]
) -> None:
    path = write_jsonl({"prompt_token_ids": [4, 5]})
    one = "--no-log --gpu-batch-size 1"
    assert idle(door("--prompts", path, "--prompt-len 8", one)) == {"--prompt-len"}
    assert idle(door("--prompts", path, "--ignore-eos", one)) == set()


def test_other_commands_say_so_too(command: Callable[[str], Answer], tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "max_tokens": 1}\n')
    done = (
        "batch --model opt-tiny --input in.jsonl --output out.jsonl --offload-dir o "
        "--gpu-batch-size 1"
    )
    assert idle(command(f"{done} --path . --seed 3")) == {"--path"}  # rows may draw
    assert idle(command(f"{done} --status")) == {
        "--model",
        "--input",
        "--offload-dir",
        "--gpu-batch-size",
    }
    assert idle(command("batch --output out.jsonl --status")) == set()
    assert command(f"{done} --output other.jsonl --host-mem 1KiB").code == 3
    assert idle(command("hardware --show t4 --device cpu")) == {"--device"}
    asked = (
        "plan --model facebook/opt-125m --num-prompts 16 --prompt-len 32 --gen-len 8 --hardware t4"
    )
    assert idle(command(f"{asked} --path models --revision main")) == {"--path", "--revision"}
    text = (
        "evaluate text opt-tiny --prompt x --gen-len 2 --offload-dir o --gpu-batch-size 1 "
        "--dtype float32"
    )
    assert idle(command(f"{text} --seed 3")) == {"--seed"}


# ---- One line


@pytest.mark.parametrize(("free", "budget"), [(24 * MIB, None), (24 * MIB, "1GiB"), (TIB, "1MiB")])
def test_a_full_disk_is_no_small_budget(
    free: int, budget: str | None, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": free})())
    asked = () if budget is None else ("--disk-mem", budget)
    answer = door(
        "--percent",
        *"000000",
        "--gpu-batch-size 512 --num-gpu-batches 64",
        *asked,
        model=PACKAGED["opt-tiny"],
    )
    assert answer.code == 3 and len(answer.err.splitlines()) == 1, answer.err
    assert ("free space, or give another --offload-dir" in answer.err) == (free < TIB), answer.err
    assert ("raise --disk-mem" in answer.err) == (free == TIB)

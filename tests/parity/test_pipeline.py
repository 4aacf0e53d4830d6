"""A pipeline of processes gives the tokens of one process, and of transformers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o import H2O, LLM, Full, Policy, SamplingParams
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.engine.distributed import Pipeline, check_same, join_pipeline
from flexgen_h2o.engine.sequence import Sequence
from tests.forks import Forks
from tests.parity.cases import CONFIGURATIONS, PLACEMENTS
from tests.parity.ranks import Run
from tests.parity.reference import Ended, Reference, make_reference, random_model, random_prompts

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (5, 9, 9, 1, 12, 7)
NEW_TOKENS = 5
GREEDY = SamplingParams(max_tokens=4)


@pytest.fixture(scope="module")
def three_blocks(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """OPT of three transformer blocks, which two ranks cannot share evenly; tied embeddings."""
    model = random_model(num_hidden_layers=3)
    return make_reference(
        model, tmp_path_factory.mktemp("model") / "opt-3", random_prompts(LENGTHS), NEW_TOKENS
    )


def torchrun(ranks: int, *argv: object, timeout: int = 100) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks, *argv]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=timeout,
        env=env,
        cwd=ROOT,
        check=False,
    )


# A rank, with what torchrun would set.
RANK = """
import os, sys
rank, ranks, port, *files = sys.argv[1:]
os.environ |= dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, MASTER_PORT=port)
os.environ["MASTER_ADDR"] = "127.0.0.1"
from tests.parity.ranks import main
sys.exit(main(*files))
"""  # noqa: E501


def answers_of(forks: Forks, ranks: int, runs: list[Run], folder: Path) -> list[dict[str, Any]]:
    """Ranks are forked off; torchrun, which takes seconds to start, is left to the slow tests of
    the door."""
    (folder / "runs.json").write_text(json.dumps([asdict(run) for run in runs]))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = []
    for rank in range(ranks):
        (folder / f"rank-{rank}").mkdir()
        files = folder / "runs.json", folder / "answers.json"
        started.append(forks.start(folder / f"rank-{rank}", RANK, rank, ranks, port, *files))
    for process in started:
        assert process.wait() == 0, process.err[:6000]
    found: list[dict[str, Any]] = json.loads((folder / "answers.json").read_text())
    return found


def run_of(reference: Reference, policy: Policy, **more: Any) -> Run:
    return Run(str(reference.folder), reference.prompts, NEW_TOKENS, policy.to_json(), **more)


def test_two_ranks_give_the_tokens_of_transformers_with_every_placement(
    three_blocks: Reference, forks: Forks, tmp_path: Path
) -> None:
    """And report together, each holding only its layers."""
    names = list(CONFIGURATIONS)
    runs = [run_of(three_blocks, Policy(2, 1))]
    for i, percent in enumerate(PLACEMENTS.values()):
        configuration = CONFIGURATIONS[names[i % len(names)]]
        runs.append(
            run_of(three_blocks, configuration.policy(percent), stand_in=configuration.stand_in)
        )
    answers = answers_of(forks, 2, runs, tmp_path)
    for answer, placement in zip(answers, ("all on device", *PLACEMENTS), strict=True):
        assert answer["tokens"] == three_blocks.tokens, placement
    check_joint_report(answers[0]["report"], three_blocks, [[0, 2], [2, 3]], tmp_path)


def check_joint_report(
    report: dict[str, Any], known: Reference, blocks: list[list[int]], folder: Path
) -> None:
    """Of Policy(2, 1) over as many ranks as `blocks` names. One process runs as many rows at a time
    for comparison."""
    alone = run_of(known, Policy(2, len(blocks))).do(None, str(folder / "offload"))["report"]
    ranks = report["extra"]["ranks"]
    assert [one["blocks"] for one in ranks] == blocks
    assert report["total"]["tokens"] == alone["total"]["tokens"] and report["kv"] == alone["kv"]
    assert report["peak_bytes"]["host"] == sum(one["peak_bytes"]["host"] for one in ranks)
    for name in ("io_bytes", "peak_bytes"):
        kinds = report[f"{name}_by_kind"]
        total = report[name]
        assert {key: sum(of[key] for of in kinds.values()) for key in total} == total
    # Hidden states once to each neighbour but back to the first rank: of every prompt token, then
    # of every new one.
    width = 48 * 4
    rows = len(LENGTHS)
    hidden = (sum(LENGTHS) + (NEW_TOKENS - 1) * rows) * width
    assert all(hidden < one["sent_bytes"] < hidden * 1.5 for one in ranks[:-1])
    assert ranks[-1]["sent_bytes"] < hidden / 2


@pytest.mark.slow
def test_micro_batches_families_eviction_and_compression_are_those_of_one_process(
    three_blocks: Reference,
    reference: Callable[[str], Reference],
    ended: Ended,
    forks: Forks,
    tmp_path: Path,
) -> None:
    llama = reference("llama")
    neox = reference("gpt_neox")
    disk = (30, 0, 30, 0, 30, 0)
    windows = reference("qwen2, windows of some layers")
    runs = [
        run_of(llama, Policy(2, 1)),  # one transformer block a rank
        run_of(llama, Policy(1, 3, disk), in_flight=1),
        run_of(neox, Policy(2, 3, disk), in_flight=3),
        run_of(three_blocks, Policy(1, 1), in_flight=3),
        run_of(three_blocks, Policy(2, 2, disk), eviction="h2o", keeping={"heavy_size": 2}),
        run_of(three_blocks, Policy(1, 1, disk), eviction="random", keeping={"heavy_size": 2}),
        run_of(
            llama, Policy(2, 1, disk), eviction="h2o:positions=rolling", keeping={"heavy_size": 2}
        ),
        run_of(
            three_blocks,
            Policy(2, 1, disk, compress_weight=True, compress_cache=True, cache_bits=8),
        ),
        run_of(llama, Policy(2, 1, disk, int8_compute=True)),
        run_of(reference("olmoe"), Policy(1, 3, disk), in_flight=2),
        run_of(three_blocks, Policy(2, 1), sampling={"temperature": 1.0, "seed": 3}),
        Run(str(ended.folder), ended.prompts, max(map(len, ended.tokens)), Policy(2, 1).to_json()),
        Run(
            str(ended.folder),
            ended.prompts,
            max(map(len, ended.tokens)),
            Policy(1, 3, disk).to_json(),
            in_flight=3,
        ),
        run_of(windows, Policy(2, 1, disk)),
        run_of(windows, Policy(2, 1, disk), eviction="h2o", keeping={"heavy_size": 2}),
        run_of(reference("gpt_oss, all experts chosen, no biases"), Policy(2, 2, disk)),
    ]
    found = answers_of(forks, 2, runs, tmp_path)
    for run, answer in zip(runs, found, strict=True):
        alone = run.do(None, str(tmp_path / "offload"))
        assert answer["tokens"] == alone["tokens"], run
    assert found[0]["tokens"] == llama.tokens
    assert found[11]["tokens"] == found[12]["tokens"] == ended.tokens
    assert len({len(row) for row in ended.tokens}) > 2  # rows do end in the middle


@pytest.mark.slow
def test_three_ranks_report_together(three_blocks: Reference, forks: Forks, tmp_path: Path) -> None:
    (answer,) = answers_of(forks, 3, [run_of(three_blocks, Policy(2, 1))], tmp_path)
    assert answer["tokens"] == three_blocks.tokens
    check_joint_report(answer["report"], three_blocks, [[0, 1], [1, 2], [2, 3]], tmp_path)


@pytest.mark.slow
def test_the_door_prints_and_writes_in_one_rank_only(
    three_blocks: Reference, tmp_path: Path
) -> None:
    prompts = tmp_path / "in.jsonl"
    out = tmp_path / "out.jsonl"
    report = tmp_path / "report.json"
    prompts.write_text(
        "".join(json.dumps({"prompt_token_ids": p}) + "\n" for p in three_blocks.prompts)
    )
    done = torchrun(
        2,
        "-m",
        "flexgen_h2o.flex_opt",
        "--pipeline",
        "--model",
        three_blocks.folder,
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--prompts",
        prompts,
        "--gen-len",
        NEW_TOKENS,
        "--gpu-batch-size",
        2,
        "--num-gpu-batches",
        1,
        "--num-inner-iterations",
        3,
        "--host-mem",
        "64MiB",
        "--output",
        out,
        "--json",
        report,
        "--offload-dir",
        tmp_path / "offload",
        "--no-log",
    )
    assert done.returncode == 0, done.stderr[:6000]
    assert [
        json.loads(line)["token_ids"] for line in out.read_text().splitlines()
    ] == three_blocks.tokens
    assert done.stdout.count("decode latency") == 1
    assert "ranks: 0: blocks 0 to 1, " in done.stdout
    assert len(json.loads(report.read_text())["extra"]["ranks"]) == 2


@pytest.mark.slow
def test_a_rank_that_fails_ends_all_with_its_line(three_blocks: Reference, tmp_path: Path) -> None:
    """Rank 1 alone has too small a budget; rank 0 waits for it and must not wait on."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, sys\nfrom flexgen_h2o import flex_opt\n"
        "sys.exit(flex_opt.main([*sys.argv[1:], '--host-mem', '1MiB' if os.environ['RANK'] == '1' "
        "else '64MiB']))\n"
    )
    done = torchrun(
        2,
        script,
        "--pipeline",
        "--model",
        three_blocks.folder,
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--prompt-len",
        8,
        "--gen-len",
        4,
        "--gpu-batch-size",
        2,
        "--no-log",
        "--offload-dir",
        tmp_path / "offload",
    )
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("flex_opt, rank")]
    assert any(line.startswith("flex_opt, rank 1: the plan needs ") for line in lines), done.stderr[
        :6000
    ]
    assert "latency" not in done.stdout


@pytest.mark.slow
def test_a_rank_that_never_comes_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Rank 1 is called wrongly; rank 0, which waits to meet it, ends at torchrun's SIGTERM. Else
    torchrun kills it after 30 seconds."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, sys\nfrom flexgen_h2o import flex_opt\n"
        "sys.exit(flex_opt.main([*sys.argv[1:], *['--nonsense'] * (os.environ['RANK'] == '1')]))\n"
    )
    done = torchrun(
        2, script, "--pipeline", "--device", "cpu", "--gpu-batch-size", 2, "--no-log", timeout=28
    )
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("flex_opt, rank")]
    assert sorted(lines) == [
        "flex_opt, rank 0: ended by SIGTERM",
        "flex_opt, rank 1: unrecognized arguments: --nonsense",
    ]


# ---- Bad use


def test_ranks_with_other_flags_are_told_which(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank says of its work is taken down, and given to rank 0 as another rank's."""
    said: list[Any] = []
    monkeypatch.setattr("flexgen_h2o.engine.distributed._gather", lambda _, mine: [mine, *said])
    names = ("model", "dtype", "policy", "eviction", "--gen-len or sampling flag", "--share-prefix")
    rows = [Sequence(0, (5, 6), max_new=4)]
    work = ({"layers": 3}, "float32", Policy(), Full(), GREEDY, "auto")
    check_same(Pipeline(0, 2, 2), work, rows)
    others = (
        {"layers": 4},
        "bfloat16",
        Policy(2),
        H2O(0.1),
        replace(GREEDY, temperature=0.5),
        "off",
    )
    for i, name in enumerate(names):
        with monkeypatch.context() as patched:
            patched.setattr(
                "flexgen_h2o.engine.distributed._gather",
                lambda _, mine: said.append(mine) or [mine],
            )
            check_same(Pipeline(1, 2, 2), (*work[:i], others[i], *work[i + 1 :]), rows)
        with pytest.raises(UsageError, match=f"rank 1 has another {name} than rank 0"):
            check_same(Pipeline(0, 2, 2), work, rows)
        said.clear()


def test_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(
        UsageError, match=r"--pipeline: RANK is not set; start the processes with torchrun"
    ):
        join_pipeline(None)


def test_a_single_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        monkeypatch.setenv(name, "1" if "SIZE" in name else "0")
    with pytest.raises(
        UsageError, match=r"--pipeline: torchrun started 1 process; start at least 2"
    ):
        join_pipeline(None)


def test_more_ranks_than_blocks_and_auto(three_blocks: Reference, tmp_path: Path) -> None:
    fixed = LLM(str(three_blocks.folder), Policy(), device="cpu", offload_dir=tmp_path)
    with pytest.raises(
        UsageError, match=r"has 3 transformer blocks, and torchrun started 4 processes"
    ):
        fixed.join(Pipeline(0, 4, 4))
    chosen = LLM(str(three_blocks.folder), "auto", device="cpu", offload_dir=tmp_path)
    with pytest.raises(UsageError, match=r"--pipeline: auto plans for one process"):
        chosen.join(Pipeline(0, 2, 2))

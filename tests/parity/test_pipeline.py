"""A pipeline of processes gives the tokens of one process, and of transformers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o import H2O, Full, Policy, SamplingParams
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.engine.distributed import Pipeline, check_same, join_pipeline
from flexgen_h2o.engine.sequence import Sequence
from tests.forks import Forks
from tests.parity.cases import CONFIGURATIONS, PLACEMENTS
from tests.parity.ranks import Run
from tests.parity.reference import (
    Ended,
    Reference,
    make_reference,
    opened,
    random_model,
    random_prompts,
)

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (5, 9, 9, 1, 12, 7)
NEW_TOKENS = 5


@pytest.fixture(scope="module")
def three_blocks(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """OPT of three transformer blocks, which two ranks cannot share evenly; tied embeddings."""
    model = random_model(num_hidden_layers=3)
    return make_reference(
        model, tmp_path_factory.mktemp("model") / "opt-3", random_prompts(LENGTHS), NEW_TOKENS
    )


def torchrun(
    folder: Path, rank_1: tuple[str, ...], *argv: object
) -> subprocess.CompletedProcess[str]:
    """flex_opt in two ranks. rank_1: more words for the second one."""
    script = folder / "rank.py"
    script.write_text(
        "import os, sys\nfrom flexgen_h2o import flex_opt\n"
        f"more = {list(rank_1)} if os.environ['RANK'] == '1' else []\n"
        "sys.exit(flex_opt.main([*sys.argv[1:], *more]))\n"
    )
    words = [
        "--pipeline",
        "--device",
        "cpu",
        "--no-log",
        "--offload-dir",
        folder / "offload",
        *argv,
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, script, *words]
    # torchrun kills a rank 30 seconds after another one has ended.
    return subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=28 if rank_1 else 100,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
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


@pytest.mark.parametrize(
    "blocks",
    [[[0, 2], [2, 3]], pytest.param([[0, 1], [1, 2], [2, 3]], marks=pytest.mark.slow)],
    ids=len,
)
def test_ranks_give_the_tokens_of_transformers_with_every_placement(
    blocks: list[list[int]], three_blocks: Reference, forks: Forks, tmp_path: Path
) -> None:
    """And report together, each holding only its layers."""
    runs = [run_of(three_blocks, Policy(2, 1))]
    for percent, one in zip(PLACEMENTS.values(), cycle(CONFIGURATIONS.values()), strict=False):
        runs.append(run_of(three_blocks, one.policy(percent), stand_in=one.stand_in))
    answers = answers_of(forks, len(blocks), runs, tmp_path)
    for run, answer in zip(runs, answers, strict=True):
        assert answer["tokens"] == three_blocks.tokens, run.policy
    report = answers[0]["report"]
    # One process runs as many rows at a time for comparison.
    alone = run_of(three_blocks, Policy(2, len(blocks))).do(None, str(tmp_path))["report"]
    ranks = report["extra"]["ranks"]
    assert [one["blocks"] for one in ranks] == blocks
    assert report["total"]["tokens"] == alone["total"]["tokens"] and report["kv"] == alone["kv"]
    assert report["peak_bytes"]["host"] == sum(one["peak_bytes"]["host"] for one in ranks)
    # Hidden states once to each neighbour but back to the first rank: of every prompt token, then
    # of every new one.
    width = 48 * 4
    hidden = (sum(LENGTHS) + (NEW_TOKENS - 1) * len(LENGTHS)) * width
    assert all(hidden < one["sent_bytes"] < hidden * 1.5 for one in ranks[:-1])
    assert ranks[-1]["sent_bytes"] < hidden / 2


@pytest.mark.slow
def test_runs_of_any_kind_are_those_of_one_process(
    three_blocks: Reference,
    reference: Callable[[str], Reference],
    ended: Ended,
    forks: Forks,
    tmp_path: Path,
) -> None:
    """Micro-batches, families, eviction, compression, samples and rows that end."""
    disk = (30, 0, 30, 0, 30, 0)
    windows = reference("qwen2, windows of some layers")
    packed = Policy(2, 1, disk, compress_weight=True, compress_cache=True, cache_bits=8)
    runs = [
        run_of(reference("llama"), Policy(1, 3, disk), in_flight=1),  # one transformer block a rank
        run_of(reference("llama"), Policy(2, 1), eviction="h2o:kv_budget=0.4,positions=rolling"),
        run_of(reference("gpt_neox"), Policy(2, 3, disk), in_flight=3),
        run_of(three_blocks, Policy(1, 1, disk), eviction="random:kv_budget=0.4"),
        run_of(three_blocks, packed),
        run_of(three_blocks, Policy(2, 1), sampling={"temperature": 1.0, "seed": 3}),
        run_of(reference("olmoe"), Policy(1, 3, disk), in_flight=2),
        run_of(windows, Policy(2, 1, disk), eviction="h2o:kv_budget=0.4"),
    ]
    longest = max(map(len, ended.tokens))
    of_ended = Run(str(ended.folder), ended.prompts, longest, Policy(2, 1).to_json())
    found = answers_of(forks, 2, [*runs, of_ended], tmp_path)
    for run, answer in zip(runs, found, strict=False):
        assert answer["tokens"] == run.do(None, str(tmp_path / "offload"))["tokens"], run
    assert found[-1]["tokens"] == ended.tokens
    assert len({len(row) for row in ended.tokens}) > 2  # rows do end in the middle


@pytest.mark.slow
def test_the_door_prints_and_writes_in_one_rank_only(
    three_blocks: Reference, tmp_path: Path
) -> None:
    lines = [json.dumps({"prompt_token_ids": ids}) for ids in three_blocks.prompts]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    sizes = ("--gen-len", NEW_TOKENS, "--gpu-batch-size", 2, "--num-inner-iterations", 3)
    files = ("--prompts", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl")
    model = ("--model", three_blocks.folder, "--dtype", "float32", "--host-mem", "64MiB")
    report = tmp_path / "report.json"
    done = torchrun(tmp_path, (), *model, *files, *sizes, "--json", report)
    assert done.returncode == 0, done.stderr[:6000]
    rows = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(row)["token_ids"] for row in rows] == three_blocks.tokens
    assert done.stdout.count("decode latency") == 1
    assert "ranks: 0: blocks 0 to 1, " in done.stdout
    assert len(json.loads(report.read_text())["extra"]["ranks"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank_1", "said"),
    [
        (("--host-mem", "1MiB"), ["flex_opt, rank 1: the plan needs "]),
        # Rank 0, which waits to meet it, ends at torchrun's SIGTERM.
        (
            ("--nonsense",),
            [
                "flex_opt, rank 0: ended by SIGTERM",
                "flex_opt, rank 1: unrecognized arguments: --nonsense; see --help-all",
            ],
        ),
    ],
)
def test_a_rank_that_fails_ends_all_with_its_line(
    rank_1: tuple[str, ...], said: list[str], three_blocks: Reference, tmp_path: Path
) -> None:
    model = ("--model", three_blocks.folder, "--dtype", "float32", "--host-mem", "64MiB")
    sizes = ("--gpu-batch-size", 2, "--prompt-len", 8, "--gen-len", 4)
    done = torchrun(tmp_path, rank_1, *model, *sizes)
    assert done.returncode != 0 and "latency" not in done.stdout
    for line in said:
        assert any(one.startswith(line) for one in done.stderr.splitlines()), done.stderr[:6000]


# ---- Bad use

# What ranks compare: the name in the error, what rank 0 has and what rank 1 has.
WORK: tuple[tuple[str, object, object], ...] = (
    ("model", {"layers": 3}, {"layers": 4}),
    ("dtype", "float32", "bfloat16"),
    ("policy", Policy(), Policy(2)),
    ("eviction", Full(), H2O(0.1)),
    ("--gen-len or sampling flag", SamplingParams(4), SamplingParams(4, temperature=0.5)),
    ("--share-prefix", "auto", "off"),
)


@pytest.mark.parametrize("other", range(len(WORK)))
def test_ranks_with_other_flags_are_told_which(other: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank says of its work is taken down, and given to rank 0 as another rank's."""
    said: list[Any] = []

    def gather(pipeline: Pipeline, mine: Any) -> list[Any]:
        said.append(mine)
        return said[::-1]

    monkeypatch.setattr("flexgen_h2o.engine.distributed._gather", gather)
    rows = [Sequence(0, (5, 6), max_new=4)]
    mine = {name: one for name, one, _ in WORK}
    theirs = mine | {WORK[other][0]: WORK[other][2]}
    check_same(Pipeline(1, 2, 2), theirs, rows)
    with pytest.raises(UsageError, match=f"rank 1 has another {WORK[other][0]} than rank 0"):
        check_same(Pipeline(0, 2, 2), mine, rows)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"RANK": ""}, "RANK is not set; start the processes with torchrun"),
        ({}, "torchrun started 1 process; start at least 2"),
    ],
)
def test_without_others(
    environment: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, environment.get(name, "0"))
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(UsageError, match=f"--pipeline: {says}"):
        join_pipeline(None)


@pytest.mark.parametrize(
    ("policy", "ranks", "says"),
    [
        (Policy(), 4, "has 3 transformer blocks, and torchrun started 4 processes"),
        ("auto", 2, "--pipeline: auto plans for one process"),
    ],
)
def test_what_cannot_be_a_pipeline(
    policy: Policy | str, ranks: int, says: str, three_blocks: Reference, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=says):
        opened(three_blocks.folder, policy, tmp_path).join(Pipeline(0, ranks, ranks))

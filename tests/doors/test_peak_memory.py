"""What runs hold of RAM. Random placements of OPT's shapes, each in a process of its own that may
hold just what its plan says: the kernel's peak RSS stays within the budgets of RAM + 300 MB over a
process that has only torch."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import flexgen_h2o
from flexgen_h2o import H2O, LLM, Full, Policy, SamplingParams, policy_search
from flexgen_h2o.planner.profile import write_profile
from tests.unit.test_profile import PROFILE

SEED = 18
MAX_BEYOND = 300_000_000
MODELS = {
    "facebook/opt-125m": 8,
    "facebook/opt-350m": 6,
    "facebook/opt-1.3b": 6,
}  # placements of each
PEAK = (
    "[print(int(x.split()[1]) * 1024) for x in open('/proc/self/status') if x.startswith('VmHWM')]"
)
RUN = (
    "import sys\nfrom flexgen_h2o import flex_opt\ncode = "
    f"flex_opt.main(sys.argv[1:])\n{PEAK}\nsys.exit(code)"
)


def peak_rss(*words: str) -> int:
    """Of a Python process; its last line says so."""
    env = {**os.environ, "PYTHONPATH": str(Path(flexgen_h2o.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", *words], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (words[1:], done.stderr)
    return int(done.stdout.splitlines()[-1])


def pair(generator: random.Random) -> list[int]:
    first = generator.choice([0, 0, 100, generator.randrange(101)])
    return [first, generator.choice([0, 100 - first, generator.randrange(101 - first)])]


def placement(generator: random.Random, index: int) -> str:
    """The flags of a run. Two and three tiers, H2O and the full cache, whole and compressed take
    turns."""
    percent = " ".join(str(n) for _ in range(3) for n in pair(generator))
    flags = f"--percent {percent} --gpu-batch-size {generator.choice([1, 2, 4])}"
    flags += (
        f" --num-gpu-batches {generator.choice([1, 2, 3])} --prompt-len "
        f"{generator.choice([16, 64, 128])}"
    )
    flags += f" --gen-len {generator.randint(2, 4)}"
    flags += " --hh-ratio 0.2" if index % 2 else ""
    flags += " --compress-weight" if index // 2 % 2 else ""
    flags += " --compress-cache" if generator.random() < 0.5 else ""
    flags += " --overlap false" if generator.random() < 0.25 else ""
    return flags


@pytest.fixture(scope="module")
def empty() -> int:
    return peak_rss(f"import torch\n{PEAK}")


@pytest.fixture
def offload(tmp_path: Path) -> Iterator[Path]:
    """Of all runs of a model; gigabytes, gone at once."""
    folder = tmp_path / "offload"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(2 * 3600)
@pytest.mark.parametrize("model", MODELS)
def test_peak_rss_of_random_placements(
    model: str, empty: int, offload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs that write random weights first are among them."""
    generator = random.Random(f"{SEED} {model}")
    write_profile(tmp_path / "profile.json", PROFILE)
    common = f"--model {model} --path _DUMMY_ --offload-dir {offload} --dtype bfloat16"
    measured = f"--hardware {tmp_path}/profile.json --host-mem 64GiB --disk-mem 64GiB --json"
    for index in range(MODELS[model]):
        flags = f"{common} {placement(generator, index)}"
        three_tiers = "--device-mem 64GiB" if index % 3 else ""
        capsys.readouterr()
        assert policy_search.main(f"{flags} {measured} {three_tiers}".split()) == 0
        needed = json.loads(capsys.readouterr().out)["predicted"]["peak_bytes"]
        budgets = [
            word
            for tier in ("device", "host", "disk")
            for word in (f"--{tier}-mem", str(max(1, needed[tier])))
        ]
        if not three_tiers:
            budgets = budgets[2:]
        run = [*flags.split(), *budgets, "--device", "cpu", "--no-log"]
        beyond = peak_rss(RUN, *run) - empty - needed["host"] - needed["device"]
        assert beyond <= MAX_BEYOND, f"{beyond / 1e6:.0f} MB beyond the budgets: {' '.join(run)}"


def tensor_bytes() -> int:
    """Of all tensors that live."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some modules of torch complain when they are looked at
        # By type: other tests leave proxies of what is gone, whose class cannot be asked for.
        tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    found: dict[int, int] = {}
    for one in tensors:
        with contextlib.suppress(
            RuntimeError
        ):  # torch.compile's stand-ins, which other tests leave, have no storage
            found[one.data_ptr()] = one.untyped_storage().nbytes()
    return sum(found.values())


@pytest.fixture
def before(plain_cpu: None) -> Iterator[int]:
    """Bytes of tensors before a test, during which Python does not look for circles."""
    gc.collect()
    gc.disable()
    yield tensor_bytes()
    gc.enable()


@pytest.mark.parametrize(
    ("percent", "eviction"),
    [((100, 0) * 3, Full()), ((0,) * 6, H2O(heavy_ratio=0.5, recent_ratio=0.5))],
)
def test_a_closed_llm_gives_its_memory_back_at_once(
    percent: tuple[int, ...], eviction: object, before: int, ids_model: Path, tmp_path: Path
) -> None:
    """Not when Python next looks for circles: by then another engine may hold as much again."""
    params = [SamplingParams(max_tokens=n) for n in (1, 2, 5, 3)]
    with LLM(str(ids_model), Policy(2, 1, percent), eviction, "cpu", offload_dir=tmp_path) as llm:
        llm.generate([[5, 6, 7]] * 4, params)
        held = tensor_bytes()
    assert held > before + 100_000
    assert tensor_bytes() < before + 10_000


def test_an_engine_for_longer_rows_is_planned_when_the_one_before_is_gone(
    before: int, ids_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it held counts as free then."""
    held = list[int]()
    budgets = LLM._budgets
    monkeypatch.setattr(LLM, "_budgets", lambda llm: held.append(tensor_bytes()) or budgets(llm))
    with LLM(str(ids_model), Policy(2, 1), device="cpu", offload_dir=tmp_path) as llm:
        for tokens in (2, 9):
            llm.generate([[5, 6, 7]], SamplingParams(max_tokens=tokens))
    assert len(held) == 2 and max(held) < before + 10_000

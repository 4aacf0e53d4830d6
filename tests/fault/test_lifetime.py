"""LLMs that nobody closes: dropped, in a circle, left at the end of a process, and in a child of
os.fork()."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forks import Forks, Process, environment
from tests.parity.reference import Reference

# What each script begins with. `made()` is an LLM that has generated, with weights, KV and hidden
# states on disk.
BEGIN = """
import gc, multiprocessing, os, sys, threading
import psutil
from flexgen_h2o import LLM, Policy, SamplingParams

FOLDER, OFFLOAD = sys.argv[1:]
PROMPTS, PARAMS = [[5, 6, 7], [8, 9], [10]], SamplingParams(max_tokens=3)
me = psutil.Process()

def made():
    llm = LLM(FOLDER, Policy(2, 2, (0,) * 6), device="cpu", dtype="float32", offload_dir=OFFLOAD)
    llm.generate(PROMPTS, PARAMS)
    assert [name for name in os.listdir(OFFLOAD) if name.startswith("run-")]
    return llm

def held():
    return threading.active_count(), me.num_fds(), sorted(os.listdir(OFFLOAD))
"""


@pytest.fixture
def run(
    forks: Forks, known: Reference, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Process]:
    """Runs BEGIN and a script in a process of their own, with `tmp_path` as the offload dir."""
    folder = tmp_path_factory.mktemp("run")
    return lambda script: forks.run(folder, BEGIN + script, known.folder, tmp_path)


# How processes end that hold an open LLM, and their exit codes.
ENDS = {
    "the last line": ("llm = made()", 0),
    "sys.exit": ("llm = made(); sys.exit(7)", 7),
    "an uncaught exception": ("llm = made(); raise ValueError('mine')", 1),
    "in a circle": ("llm = made(); llm.me = llm; del llm", 0),
    "an exception during generate": (
        "llm = made(); llm.generate(PROMPTS, PARAMS, lambda rows, logits: 1 / 0)",
        1,
    ),
    "made by a thread": (
        "t = threading.Thread(target=lambda: globals().update(llm=made())); t.start(); t.join()",
        0,
    ),
}


def test_nothing_is_left_when_the_process_ends(
    run: Callable[[str], Process], tmp_path: Path
) -> None:
    """Each is a child that is forked before anything has run, so that torch is imported once."""
    script = f"""
for name, (script, code) in {ENDS!r}.items():
    pid = os.fork()
    if not pid:
        exec(script)
        sys.exit()
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert (ended, os.listdir(OFFLOAD)) == (code, []), (name, ended, os.listdir(OFFLOAD))
print("all", flush=True)
"""
    done = run(script)
    assert (done.code, done.out) == (0, "all\n"), done.err
    assert "Exception ignored" not in done.err


def test_twenty_dropped_llms_leave_what_one_leaves(
    run: Callable[[str], Process], tmp_path: Path
) -> None:
    """Threads, descriptors and folders at once, or with the garbage where they are in a circle; RSS
    within 1 MiB each.

    Before they were closed, each held five threads, three descriptors and 16 MiB.
    """
    script = """
def drop(circle):
    llm = made()
    if circle:
        llm.me = llm

for i in range(3):
    drop(False)
gc.collect()
one, rss = held(), me.memory_info().rss
for i in range(20):
    drop(circle=i % 2 == 1)
    if i % 2 == 0:
        assert held()[2] == [] or i, held()
    else:
        gc.collect()
    assert held() == one, (i, held(), one)
gone = me.memory_info().rss - rss
assert gone < 20 * 2**20, gone
print("one", one)
"""
    done = run(script)
    assert done.code == 0, done.err
    assert done.out.endswith(", [])\n"), "no scratch folder while the process lives on"


# How a child of a process with an open LLM ends, and its exit code. It must not wait for threads
# that it does not have.
CHILDREN = {
    "exits": ("sys.exit(0)", 0),
    "closes": ("llm.close(); sys.exit(0)", 0),
    "drops": ("del llm; gc.collect(); sys.exit(0)", 0),
    "fails": ("raise ValueError('mine')", 1),
    "leaves a with": ("with llm: sys.exit(0)", 0),
    "of multiprocessing": ("sys.exit(0)", 0),
}


def test_a_forked_child_ends_and_leaves_its_parents_scratch(
    run: Callable[[str], Process], tmp_path: Path
) -> None:
    script = f"""
llm = made()
before, tokens = held(), [one.token_ids for one in llm.generate(PROMPTS, PARAMS)]
for name, (script, code) in {CHILDREN!r}.items():
    if "multiprocessing" in name:
        child = multiprocessing.get_context("fork").Process(target=gc.collect)
        child.start()
        child.join()
        ended = child.exitcode
        child.close()
    else:
        pid = os.fork()
        if not pid:
            exec(script)
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert (ended, held()) == (code, before), (name, ended, held(), before)
assert [one.token_ids for one in llm.generate(PROMPTS, PARAMS)] == tokens
other = made()  # a run that removes what is dead
assert set(before[2]) < set(os.listdir(OFFLOAD))
print("all", flush=True)
"""
    done = run(script)
    assert (done.code, done.out) == (0, "all\n"), done.err
    assert not list(tmp_path.iterdir())


USES = ["llm.generate(PROMPTS, PARAMS)", "llm.close(); llm.generate(PROMPTS, PARAMS)", "made()"]


def test_a_forked_child_is_told_that_it_cannot_generate(
    run: Callable[[str], Process], tmp_path: Path
) -> None:
    """With its parent's LLM or its own: it would wait without end for OpenMP's threads, which stay
    in the parent."""
    script = f"""
llm = made()
for use in {USES!r}:
    pid = os.fork()
    if not pid:
        try:
            exec(use)
        except ValueError as error:
            print(error, flush=True)
            sys.exit(5)
        sys.exit()
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert ended == 5 and held()[2], (use, ended)
"""
    done = run(script)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert len(lines) == len(USES) and all("forked" in line and "'spawn'" in line for line in lines)
    assert not list(tmp_path.iterdir())


def test_children_forked_before_the_first_generate_generate(
    run: Callable[[str], Process], tmp_path: Path
) -> None:
    """The LLM is there, and its weights' folder; nothing is open yet."""
    script = """
llm = LLM(FOLDER, Policy(2, 2, (0,) * 6), device="cpu", dtype="float32", offload_dir=OFFLOAD)
pids = []
for _ in range(2):
    pid = os.fork()
    if not pid:
        print(len(llm.generate(PROMPTS, PARAMS)), flush=True)
        sys.exit(0)
    pids.append(pid)
assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0]
"""
    done = run(script)
    assert done.code == 0, done.err
    assert done.out.split() == ["3", "3"]
    assert not list(tmp_path.iterdir())


# ---- A process that has used torch before it forks

# `use` has torch start its threads; `answer` generates. Each script ends with "done" and what the
# children printed.
FORKS = """
import multiprocessing, os, signal, sys
signal.alarm(240)

def use():
    import torch
    torch.set_num_threads(3)
    ones = torch.ones(2**20).add_(1)
    assert float((ones.view(1024, -1) @ ones.view(-1, 1024)).sum()) > 0

def answer():
    from flexgen_h2o import LLM, Policy, SamplingParams
    try:
        with LLM("opt-tiny", Policy(1, 1), device="cpu", dtype="float32", offload_dir=sys.argv[1]) as llm:
            print(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4))[0].token_ids, flush=True)
    except ValueError as error:
        print(error, flush=True)

def fork(*steps):
    pid = os.fork()
    if not pid:
        for step in steps:
            step()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
"""  # noqa: E501


def lines_of(script: str, tmp_path: Path) -> list[str]:
    env = {name: value for name, value in environment().items() if name != "OMP_NUM_THREADS"}
    words = [sys.executable, "-c", FORKS + script, str(tmp_path)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_children_of_a_process_that_had_imported_the_package_generate(tmp_path: Path) -> None:
    script = "import flexgen_h2o; use(); fork(use, lambda: fork(answer)); answer()"
    one, other = lines_of(script, tmp_path)
    assert one == other and one.startswith("[")


def test_a_child_that_imports_the_package_after_torch_was_used_is_refused(tmp_path: Path) -> None:
    lines = lines_of("use(); fork(answer, lambda: fork(answer))", tmp_path)
    assert len(lines) == 2
    assert all("import flexgen_h2o before" in line for line in lines)

"""Runs steps one after another, each under its own limit; remembers which are done, so that the
next call goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tarfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from bench import common
from bench.gpu.steps import Step
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import replacing, write_whole

# All but FINISHED are tried again by the next call. cut: the suite's own time was over.
DONE = "done"
REFUSED = "refused"
DOES_NOT_FIT = "does_not_fit"
FAILED = "failed"
TIMEOUT = "timeout"
CUT = "cut"
STATUS_OF_EXIT = {0: DONE, 2: REFUSED, 3: DOES_NOT_FIT}
FINISHED = (DONE, DOES_NOT_FIT)
MIN_S = 20.0  # with less time left no step is begun
# SIGTERM first. Tests get SIGINT before it: pytest then names what has failed, and writes its XML,
# for which it may wait 10 s for its own processes.
GRACES = ((signal.SIGTERM, 10.0),)
GRACES_OF_TESTS = ((signal.SIGINT, 20.0), *GRACES)
SAID = 300  # characters of a failure that are kept
State = dict[str, dict[str, Any]]
# What OUT gets: these files, and all others in one. A device machine gives few files back.
COPIED = ("gpu_suite.md", "gpu_suite.json", "steps.json")
ARCHIVE = "results.tar.gz"


class Suite:
    """The state of all steps, in `steps.json` beside the results. copy_to: gets COPIED and ARCHIVE
    as well, from which alone, as its results, another suite goes on."""

    def __init__(
        self, results: Path, limit: float, copy_to: Path | None = None, again: bool = False
    ) -> None:
        self.results = results
        self._copy_to = copy_to
        self._end = time.monotonic() + limit
        with common.writing("--results", results, "give another folder"):
            (results / "runs").mkdir(parents=True, exist_ok=True)
            _unpack(results)
        if copy_to is not None:
            with common.writing("OUT", copy_to, "give another folder"):
                copy_to.mkdir(parents=True, exist_ok=True)
        self._file = results / "steps.json"
        self.state: State = {} if again or not self._file.exists() else _read_state(self._file)

    def run(self, steps: Sequence[Step], report: Callable[[State], None]) -> None:
        """Run what is not finished yet; `report` is called after each step, so that a killed suite
        has one too."""
        report(self.state)
        for step in steps:
            known = self.state.get(step.name, {})
            if known.get("status") in FINISHED:
                print(f"== {step.name}: {known['status']} (kept)", flush=True)
                continue
            left = self._end - time.monotonic()
            if left < MIN_S:
                print(f"== {step.name}: left out, {max(0.0, left):.0f} s are left", flush=True)
                continue
            print(f"== {step.name} (at most {min(step.limit, left):.0f} s)", flush=True)
            self.state[step.name] = self._run(step, left) | {
                "kind": step.kind,
                "command": list(step.command),
            }
            print(f"== {step.name}: {describe(self.state[step.name])}", flush=True)
            self._save(report)

    def _run(self, step: Step, left: float) -> dict[str, Any]:
        start = time.monotonic()
        limit = min(step.limit, left)
        graces = GRACES_OF_TESTS if step.kind == "tests" else GRACES
        code, _, text = common.run_limited(
            step.command, os.environ | step.environment, limit, graces, show=True
        )
        lines = [line for line in text.strip().splitlines() if line.strip()]
        if code:
            print("\n".join(lines[-20:]), flush=True)
        said = lines[-1][:SAID] if lines else f"exit code {code}"
        facts = {"seconds": time.monotonic() - start, "code": code, "date": common.date()}
        if code is None and left < step.limit:
            return facts | {"status": CUT, "reason": "the time of the suite was over"}
        if code is None:
            return facts | {"status": TIMEOUT, "reason": f"not done after {step.limit:.0f} s"}
        status = STATUS_OF_EXIT.get(code, FAILED)
        if step.kind == "tests" and code:
            status = FAILED  # pytest's 2 and 3 mean other things
        return facts | {"status": status, "reason": said if code else ""}

    def _save(self, report: Callable[[State], None]) -> None:
        write_whole(self._file, json.dumps(self.state, indent=1) + "\n")
        report(self.state)
        if self._copy_to is not None:
            with common.writing("OUT", self._copy_to, f"the results are in {self.results}"):
                _pack(self.results, self._copy_to)


def _pack(results: Path, target: Path) -> None:
    for name in COPIED:
        if (results / name).exists():
            shutil.copyfile(results / name, target / name)
    own = {results / name for name in COPIED}
    with (
        replacing(target / ARCHIVE) as file,
        tarfile.open(fileobj=file.buffer, mode="w:gz") as archive,
    ):
        for path in sorted(set(results.rglob("*")) - own):
            if path.is_file() and target not in path.parents:
                archive.add(path, path.relative_to(results).as_posix())


def _unpack(results: Path) -> None:
    """ARCHIVE, where an earlier suite's OUT is given back as the results. UsageError: it is
    none."""
    archive = results / ARCHIVE
    if not archive.exists():
        return
    try:
        with tarfile.open(archive) as packed:
            packed.extractall(results, filter="data")
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise UsageError(f"{archive}: is damaged ({error}); remove it") from error
    archive.unlink()


def _read_state(path: Path) -> State:
    try:
        return cast(State, json.loads(path.read_bytes()))
    except ValueError as error:
        advice = "remove it, or begin anew with --again"
        raise UsageError(f"{path}: is damaged ({error}); {advice}") from error


def describe(found: dict[str, Any]) -> str:
    why = f": {found['reason']}" if found.get("reason") else ""
    return f"{found['status']}, {found['seconds']:.0f} s{why}"

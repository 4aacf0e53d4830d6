"""Context managers around calls of lm-eval.

They keep it off the network unless --download is given, keep its results, and turn its errors into
one line.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import logging
import subprocess
import traceback
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flexgen_h2o.core.errors import FlexgenError, UsageError, first_line
from flexgen_h2o.engine.prompts import lines_of, object_of_json

INSTALL = "pip install -e '.[eval]' in a clone"
# The tasks of the H2O paper's figures 4 and 8, with the data sets that lm-eval 0.4.13 reads them
# from.
H2O_PAPER = {
    "copa": "aps/super_glue",
    "mathqa": "regisss/math_qa",
    "openbookqa": "allenai/openbookqa",
    "piqa": "baber/piqa",
    "rte": "nyu-mll/glue",
    "winogrande": "allenai/winogrande",
}
HUB = "https://huggingface.co/datasets"


@contextlib.contextmanager
def lm_eval_here(args: argparse.Namespace, names: list[str]) -> Iterator[None]:
    """Run lm-eval in here: nothing is fetched without --download, and its errors become one line.

    All calls of lm-eval are inside of this context. names: the tasks, for messages.
    """
    try:
        with _offline(args.download), _quiet_git(), _checked_lines(names):
            from lm_eval.utils import setup_logging

            setup_logging("ERROR")  # LMEVAL_LOG_LEVEL=INFO shows more
            if not args.download:
                _import_quietly(names)
            yield
    except FlexgenError:
        raise
    except ImportError as error:
        raise UsageError(f"--tasks {','.join(names)}: {first_line(error)}; {INSTALL}") from error
    except (ConnectionError, FileNotFoundError) as error:  # errors of `datasets` are of these kinds
        raise UsageError(_where_data_is(names, error)) from error
    except Exception as error:
        if not _is_of_tasks(error):
            raise
        raise UsageError(_what_failed(names, error)) from error


def _is_of_tasks(error: Exception) -> bool:
    """Return whether an error comes from lm-eval, its tasks or their data.

    An error that the engine raises below them does not.
    """
    folder = Path(__file__).parent
    callers = {
        folder / name
        for name in ("lm_eval.py", "lm_eval_errors.py", "lm_eval_grid.py", "lm_eval_records.py")
    }
    files = [Path(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [file for file in files if folder.parent in file.parents]
    return files[-1] not in callers and own[-1] in callers and not isinstance(error, MemoryError)


def _what_failed(names: list[str], error: Exception) -> str:
    """Return the message for an error of lm-eval, in one line with its remedy."""
    said = str(error)
    if "Tasks not found" in said or "No tasks" in said:
        unknown = said.rpartition(": ")[2] if "not found" in said else ",".join(names)
        return (
            f"--tasks {unknown}: no task of lm-eval; `lm-eval ls tasks` lists them, "
            "--include-path DIR adds your own"
        )
    task = _failed_task(error)
    cause = _cause_of(error)
    name = (task and task.task) or ",".join(names)
    if "Sample larger than population" in said:
        return f"--num-fewshot: asks for more solved examples than {name} has; give fewer"
    said = " ".join(dict.fromkeys((first_line(error), first_line(cause))))
    return (
        f"--tasks {name}: lm-eval cannot run it ({type(cause).__name__}: {said}); mend the task "
        "file, its data or "
        "--metadata"
    )


def _cause_of(error: BaseException) -> BaseException:
    """Return the first error of the chain that led to `error`."""
    before = error.__cause__ or error.__context__
    return error if before is None else _cause_of(before)


@contextlib.contextmanager
def writing_is_checked(path: Path | None) -> Iterator[None]:
    """Raise FlexgenError at the end if lm-eval could not write its results.

    lm-eval itself only logs that and carries on. path: its --output-path.
    """
    logger = logging.getLogger("lm_eval.loggers.evaluation_tracker")
    said = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before
    for i, text in enumerate(said):
        if text.startswith("Could not save"):
            raise FlexgenError(
                f"--output-path {path}: lm-eval could not write all of its results "
                f"({' '.join(said[i + 1 : i + 2])})"
            )


@contextlib.contextmanager
def kept_results() -> Iterator[dict[str, Any]]:
    """Yield a dict for the results of lm-eval's command line, with their samples.

    It is filled when the command line has run in here. The command line itself only prints and
    writes its results.
    """
    import lm_eval

    found: dict[str, Any] = {}
    inner = lm_eval.simple_evaluate

    def evaluate(*args: Any, log_samples: bool = True, **more: Any) -> Any:
        results = inner(*args, log_samples=True, **more)
        if results:  # copies: samples are changed in place when written
            found.update(
                results
                | {"samples": {t: [dict(s) for s in own] for t, own in results["samples"].items()}}
            )
        return (
            results
            if log_samples or not results
            else {k: v for k, v in results.items() if k != "samples"}
        )

    lm_eval.simple_evaluate = evaluate
    try:
        yield found
    finally:
        lm_eval.simple_evaluate = inner


@contextlib.contextmanager
def _checked_lines(names: list[str]) -> Iterator[None]:
    """Check the .jsonl files of tasks as they are read in here (`check_lines`)."""
    import datasets

    inner = datasets.load_dataset

    def load(path: str, *args: Any, data_files: Any = None, **more: Any) -> Any:
        for file in _paths(data_files) if path == "json" else ():
            if file.suffix == ".jsonl" and file.is_file():
                check_lines(file, f"--tasks {','.join(names)}:")
        return inner(path, *args, data_files=data_files, **more)

    datasets.load_dataset = load
    try:
        yield
    finally:
        datasets.load_dataset = inner


def _paths(data_files: Any) -> Iterator[Path]:
    """Yield the paths in `data_files` as `datasets` takes them.

    It is one name, a list of names, or a dict of either by split.
    """
    if isinstance(data_files, str | Path):
        yield Path(data_files)
    elif data_files:
        for one in data_files.values() if isinstance(data_files, dict) else data_files:
            yield from _paths(one)


def check_lines(file: Path, flag: str) -> None:
    """Raise UsageError naming the first line that lacks a key which most lines have.

    `datasets` would read None there, and lm-eval would score that as text. flag: begins the
    message.
    """
    found = []
    for place, line in lines_of(file, flag):
        try:
            found.append((place, object_of_json(line).keys()))
        except UsageError as error:
            raise UsageError(f"{place}: {error}") from error
    counts = Counter(key for _, keys in found for key in keys)
    usual = [key for key, count in counts.items() if 2 * count > len(found)]
    for place, keys in found:
        missing = [key for key in usual if key not in keys]
        others = [key for key in keys if key not in usual]
        if missing:
            has = f", but {others[0]!r}" if others else ""
            raise UsageError(
                f"{place}: has no {missing[0]!r}, as other lines have{has}; name it so, with null "
                "if there is none"
            )


@contextlib.contextmanager
def _quiet_git() -> Iterator[None]:
    """Keep git from complaining when lm-eval looks for a commit outside of a repository."""
    from lm_eval import evaluator

    before = evaluator.get_git_commit_hash
    evaluator.get_git_commit_hash = _commit_here
    try:
        yield
    finally:
        evaluator.get_git_commit_hash = before


def _commit_here() -> str | None:
    """Return the commit of the current folder, which lm-eval records.

    The result is None outside of a repository.
    """
    try:
        found = subprocess.run(
            ["git", "describe", "--always"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def _import_quietly(names: list[str]) -> None:
    """Import the module of RULER's tasks without its output.

    It prints that it has fetched nltk's files whether it has or not.
    """
    if any(name.startswith(("niah", "ruler", "longcxt")) or "*" in name for name in names):
        with contextlib.suppress(ImportError), contextlib.redirect_stdout(io.StringIO()):
            importlib.import_module("lm_eval.tasks.ruler.prepare_niah")


@contextlib.contextmanager
def _offline(download: bool) -> Iterator[None]:
    """Keep data sets and nltk's files from being fetched in here, unless `download`."""
    from datasets import config
    from huggingface_hub import constants

    places: list[tuple[Any, str, object]] = [
        (config, "HF_HUB_OFFLINE", True),
        (config, "HF_DATASETS_OFFLINE", True),
        (constants, "HF_HUB_OFFLINE", True),
    ]
    if find_spec("nltk") is not None:
        places.append((importlib.import_module("nltk"), "download", lambda *names, **more: False))
    before = [(place, name, getattr(place, name)) for place, name, _ in places]
    try:
        for place, name, value in () if download else places:
            setattr(place, name, value)
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)


def _where_data_is(names: list[str], error: Exception) -> str:
    """Return the message for missing data, in one line.

    It says which tasks lack data, where the data can be fetched, and where the layout is described.
    """
    from datasets import config

    task = _failed_task(error)
    found = {}
    if task is not None:
        found = {task.task or ",".join(names): task.dataset_path or ""}
    found |= {
        name: H2O_PAPER[name]
        for name in names
        if name in H2O_PAPER and not _has_data(H2O_PAPER[name])
    }
    missing = ", ".join(f"{name} ({path})" for name, path in found.items()) or ",".join(names)
    if task is not None and (
        not task.dataset_path or Path(task.dataset_path).suffix or "/" not in task.dataset_path
    ):
        said = first_line(error)
        return (
            f"--tasks {missing}: {said}; name the task's files in dataset_kwargs "
            "(docs/reference/lm-eval.md)"
        )
    return (
        f"--tasks {missing}: the data are not in {config.HF_DATASETS_CACHE}; add --download to "
        f"fetch them from {HUB}, "
        "copy that folder from a machine that has them, or name JSON lines of your own in a task "
        "file with "
        "--include-path (docs/reference/lm-eval.md has the layout)"
    )


def _failed_task(error: Exception) -> Any | None:
    """Return the configuration of the task that lm-eval was working on when `error` was raised.

    The result is None if there was none.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        config = getattr(frame.f_locals.get("self"), "config", None)
        if hasattr(config, "dataset_path"):
            return config
    return None


def _has_data(path: str) -> bool:
    """Return whether the cache of `datasets` has a data set. path: its hub id."""
    from datasets import config

    return (Path(config.HF_DATASETS_CACHE) / path.replace("/", "___")).is_dir()

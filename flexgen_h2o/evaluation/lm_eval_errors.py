"""Context managers around calls of lm-eval.

They keep it off the network unless --download is given, keep its results, and turn its errors into
one line.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flexgen_h2o.core.errors import FlexgenError, UsageError, first_line
from flexgen_h2o.core.libraries import check_library
from flexgen_h2o.evaluation.rows import objects_of

INSTALL = "pip install -e '.[eval]' in a clone"
# The tasks of the H2O paper's figures 4 and 8.
H2O_PAPER = ("copa", "mathqa", "openbookqa", "piqa", "rte", "winogrande")
# Modules that call lm-eval.
CALLERS = ("lm_eval.py", "lm_eval_errors.py", "lm_eval_grid.py", "lm_eval_records.py")
# What lm-eval's errors mean: words in the error, and the message with its remedy.
UNKNOWN = (
    "{tasks}: no task of lm-eval; `lm-eval ls tasks` lists them, --include-path DIR adds your own"
)
KNOWN = {
    "Sample larger than population": "--num-fewshot: asks for more solved examples than a task "
    "has; give fewer",
    "Tasks not found": UNKNOWN,
    "is not a registered task": UNKNOWN,
}


@contextlib.contextmanager
def lm_eval_here(args: argparse.Namespace, names: list[str]) -> Iterator[None]:
    """Run lm-eval in here: nothing is fetched without --download, and its errors become one line.

    All calls of lm-eval are inside of this context. names: the tasks, for messages.
    """
    check_library("lm-eval")
    tasks = f"--tasks {','.join(names)}"
    try:
        with _replaced([*_stubs(args.download), _checked_lines(tasks)]):
            from lm_eval.utils import setup_logging

            setup_logging("ERROR")  # LMEVAL_LOG_LEVEL=INFO shows more
            if any(name.startswith(("niah", "ruler", "longcxt")) or "*" in name for name in names):
                # It prints that it has fetched nltk's files whether it has or not.
                with contextlib.suppress(ImportError), contextlib.redirect_stdout(io.StringIO()):
                    importlib.import_module("lm_eval.tasks.ruler.prepare_niah")
            yield
    except FlexgenError:
        raise
    except ImportError as error:
        raise UsageError(f"{tasks}: {first_line(error)}; {INSTALL}") from error
    except (ConnectionError, FileNotFoundError) as error:  # errors of `datasets` are of these kinds
        raise UsageError(
            f"{tasks}: {first_line(error)}; add --download to fetch data sets, or name JSON lines "
            "of your own in a task file with --include-path (docs/reference/lm-eval.md)"
        ) from error
    except Exception as error:
        if not _is_of_tasks(error):
            raise
        said = " ".join(dict.fromkeys((first_line(error), first_line(_cause_of(error)))))
        for words, message in KNOWN.items():
            if words in said:
                raise UsageError(message.format(tasks=tasks)) from error
        raise UsageError(
            f"{tasks}: lm-eval cannot run it ({type(error).__name__}: {said}); mend the task file, "
            "its data or --metadata"
        ) from error


def _is_of_tasks(error: Exception) -> bool:
    """Return whether an error comes from lm-eval, its tasks or their data.

    An error that the engine raises below them does not.
    """
    files = [Path(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__)]
    callers = [Path(__file__).with_name(name) for name in CALLERS]
    own = [file for file in files if callers[0].parents[1] in file.parents]
    return files[-1] not in callers and own[-1] in callers and not isinstance(error, MemoryError)


def _cause_of(error: BaseException) -> BaseException:
    """Return the first error of the chain that led to `error`."""
    before = error.__cause__ or error.__context__
    return error if before is None else _cause_of(before)


@contextlib.contextmanager
def writing_is_checked(path: Path | None) -> Iterator[None]:
    """Raise FlexgenError at the end if lm-eval has written no results to --output-path.

    lm-eval itself only logs that and carries on.
    """
    folder = None if path is None else path.parent if path.suffix == ".json" else path
    before = set() if folder is None else {*folder.rglob("*.json")}
    yield
    if folder is not None and before.issuperset(folder.rglob("*.json")):
        raise FlexgenError(f"--output-path {path}: lm-eval could not write its results")


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
            samples = {task: [*map(dict, own)] for task, own in results["samples"].items()}
            found.update(results | {"samples": samples})
            if not log_samples:
                del results["samples"]
        return results

    with _replaced([(lm_eval, "simple_evaluate", evaluate)]):
        yield found


def _stubs(download: bool) -> list[tuple[Any, str, object]]:
    """Return (module, name, value) of what lm-eval must not do in here.

    It must not fetch data sets and nltk's files, unless `download`, nor look for a commit outside
    of a repository, about which git complains.
    """
    from datasets import config
    from huggingface_hub import constants
    from lm_eval import evaluator

    stubs: list[tuple[Any, str, object]] = [(evaluator, "get_git_commit_hash", lambda: None)]
    if download:
        return stubs
    stubs += [
        (config, "HF_HUB_OFFLINE", True),
        (config, "HF_DATASETS_OFFLINE", True),
        (constants, "HF_HUB_OFFLINE", True),
    ]
    if find_spec("nltk") is not None:
        stubs.append((importlib.import_module("nltk"), "download", lambda *names, **more: False))
    return stubs


def _checked_lines(flag: str) -> tuple[Any, str, object]:
    """Return the (module, name, value) that refuses a line without a key that most lines have.

    `datasets` would read None there, and lm-eval would score that as text. flag: begins the
    message.
    """
    import datasets

    inner = datasets.load_dataset

    def load(path: str, *args: Any, data_files: Any = None, **more: Any) -> Any:
        of_splits: Iterable[Any] = [data_files or ()] if path == "json" else []
        if path == "json" and isinstance(data_files, dict):
            of_splits = data_files.values()
        for some in of_splits:
            for file in map(Path, [some] if isinstance(some, str) else some):
                if file.suffix == ".jsonl" and file.is_file():
                    check_keys(file, flag)
        return inner(path, *args, data_files=data_files, **more)

    return datasets, "load_dataset", load


def check_keys(file: Path, flag: str) -> None:
    """Raise UsageError naming the first line that lacks a key which most lines have."""
    lines = [*objects_of(file, flag)]
    counts = Counter(key for _, line in lines for key in line)
    for key in [key for key, count in counts.items() if 2 * count > len(lines)]:
        place = next((place for place, line in lines if key not in line), None)
        if place is not None:
            raise UsageError(
                f"{place}: has no {key!r}, as other lines have; name it so, with null if there is "
                "none"
            )


@contextlib.contextmanager
def _replaced(values: list[tuple[Any, str, object]]) -> Iterator[None]:
    """Set attributes of modules in here. values: (module, name, value) of each."""
    before = [(place, name, getattr(place, name)) for place, name, _ in values]
    try:
        for place, name, value in values:
            setattr(place, name, value)
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)

"""Results in the layout of NVIDIA's kvpress, so that they can be kept beside kvpress's own.

The layout is that of evaluation/evaluate.py in kvpress:

    DIR/DATASET[__DATA_DIR]__MODEL__PRESS__RATIO[__fractionF]/predictions.csv, metrics.json, config.yaml

RATIO is kvpress's compression_ratio with two decimal places: the share of KV entries that are
dropped. In kvpress it is a share of the context; here `settings` says what it is a share of.
predictions.csv has one row per question, with all columns of kvpress's data except the context:
question, answer_prefix, answer, max_new_tokens, predicted_answer, compression_ratio. This module
imports no torch.
"""  # noqa: E501

from __future__ import annotations

import argparse
import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexgen_h2o.cli_common import file_name
from flexgen_h2o.core.errors import FlexgenError, UsageError
from flexgen_h2o.core.files import check_folder, read_bounded, replacing, write_whole
from flexgen_h2o.engine.memory_plan import kv_sizes_of
from flexgen_h2o.kvcache.eviction import Full
from flexgen_h2o.kvcache.eviction.of_model import fitted
from flexgen_h2o.parser import OneLineParser

if TYPE_CHECKING:
    from flexgen_h2o.core.config import Policy
    from flexgen_h2o.core.model import ModelSpec
    from flexgen_h2o.kvcache.eviction import Eviction

COLUMNS = ("question", "answer_prefix", "answer", "max_new_tokens", "predicted_answer")
FLAG = "--kvpress-dir"
RATIO_OF = "KV columns of prompt + new tokens, all rows and transformer blocks"


@dataclass(frozen=True)
class PressRun:
    """The facts about a run that name its folder of results and are written to its config.yaml."""

    dataset: str
    model: str
    press: str  # the eviction policy
    compression_ratio: float  # 1 - kept share of the KV entries; 0: the full cache
    data_dir: str = ""  # part of the data set, such as RULER's length
    fraction: float = 1.0  # share of the data set that was run
    # Further lines of config.yaml; JSON values.
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folder_name(self) -> str:
        """Name of the run's folder, as kvpress makes it."""
        parts = [self.dataset, self.data_dir, self.model.replace("/", "--"), self.press]
        parts = [file_label(part) for part in parts if part] + [f"{self.compression_ratio:.2f}"]
        return "__".join([*parts, *([f"fraction{self.fraction:.3f}"] if self.fraction < 1 else [])])

    @property
    def config(self) -> str:
        """Text of config.yaml, one line per setting. JSON values are valid in YAML."""
        values = {
            "dataset": self.dataset,
            "data_dir": self.data_dir or None,
            "model": self.model,
            "press_name": self.press,
            "compression_ratio": self.compression_ratio,
            "fraction": self.fraction,
            **self.settings,
        }
        return "".join(f"{name}: {json.dumps(value)}\n" for name, value in values.items())


def check_press_folder(args: argparse.Namespace) -> None:
    """Expand --kvpress-dir. Raise UsageError if no folders could be made in it."""
    if args.kvpress_dir is not None:
        args.kvpress_dir = check_folder(args.kvpress_dir, FLAG)
        if args.kvpress_dir.exists() and not args.kvpress_dir.is_dir():
            raise UsageError(f"{FLAG} {args.kvpress_dir}: is a file; name a folder")


def add_press_flag(parser: OneLineParser) -> None:
    """Add --kvpress-dir."""
    parser.add_argument(
        FLAG,
        type=file_name,
        metavar="DIR",
        help="write predictions and metrics in kvpress's layout too",
    )


def kv_entries_held(
    eviction: Eviction, spec: ModelSpec, policy: Policy, lengths: Sequence[tuple[int, int]]
) -> int:
    """Return the KV entries of all rows in all transformer blocks, each row at its longest.

    eviction: not yet fitted to the model. lengths: (prompt tokens, most new tokens) of each row.
    """
    eviction = fitted(eviction, spec, kv_sizes_of(spec, policy))
    return sum(eviction.slots(*one, block) for one in lengths for block in range(spec.num_blocks))


def kept_share(
    eviction: Eviction, spec: ModelSpec, policy: Policy, lengths: Sequence[tuple[int, int]]
) -> float:
    """Return `kv_entries_held` as a share of the full cache's; 1 without rows."""
    full = kv_entries_held(Full(), spec, policy, lengths)
    return kv_entries_held(eviction, spec, policy, lengths) / full if full else 1.0


def file_label(text: str) -> str:
    """Return a name as a part of a file name: other characters become `-`."""
    return re.sub(r"[^\w.+=,-]+", "-", text)


def write_press_run(
    folder: Path, run: PressRun, rows: Iterable[Mapping[str, Any]], metrics: Mapping[str, Any]
) -> Path:
    """Write a folder of results in `folder`, which is created, and return its path.

    rows: one per question, with COLUMNS and any others (`task`, ...), the same in all rows. A
    `context` is left out, as in kvpress. metrics: JSON values. A folder of the same run with equal
    settings is written again. If another run has the name, kvpress's own runs included, the results
    go into the first free of its folders 1, 2, ..., as in kvpress. Raise FlexgenError naming
    --kvpress-dir if the folder cannot be written.
    """
    try:
        target = _free_folder(folder / run.folder_name, run.config)
        target.mkdir(parents=True, exist_ok=True)
        write_whole(target / "config.yaml", run.config)
        write_whole(target / "metrics.json", json.dumps(metrics, indent=4) + "\n")
        with replacing(target / "predictions.csv") as file:
            out = csv.writer(file, lineterminator="\n")
            names: list[str] = []
            for row in rows:
                if not names:
                    names = [name for name in row if name not in ("context", "compression_ratio")]
                    out.writerow([*names, "compression_ratio"])
                out.writerow([*(row[name] for name in names), run.compression_ratio])
            if not names:
                out.writerow([*COLUMNS, "compression_ratio"])
    except OSError as error:
        raise FlexgenError(
            f"{FLAG} {folder}: {error.filename or ''} {error.strerror or error}"
        ) from error
    return target


def _free_folder(folder: Path, config: str) -> Path:
    """Return the first of `folder` and its folders 1, 2, ... that this run may write.

    Such a folder has no results, or has those of a run with the same `config`.
    """
    for number in count():
        candidate = folder / str(number) if number else folder
        if not (candidate / "predictions.csv").exists():
            return candidate
        try:
            if read_bounded(candidate / "config.yaml").decode(errors="replace") == config:
                return candidate
        except OSError:
            continue
    raise AssertionError("count() has no end")

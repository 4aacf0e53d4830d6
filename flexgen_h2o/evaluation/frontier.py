"""`evaluate frontier`: quality lost and memory saved by ways to shrink the KV cache or the weights.

Each setting is an eviction policy at a size, with a precision of KV cache and weights. It follows
the same continuations as the full cache does in the precision of --dtype (teacher forcing).
Three losses are measured: the KL divergence of the next token, the share of steps whose likeliest
token changes, and the negative log-likelihood of the text. They are compared with the bytes of
the KV cache that the setting holds, and with tokens/s.

Every figure is a mean over prompts. Its 95% interval is that of a percentile bootstrap (Efron and
Tibshirani 1993, chapter 13). The values of each prompt are appended to FILE.rows.jsonl beside
--json FILE. The same command measures only what is missing there, after a kill or with more
settings.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flexgen_h2o.cli_common import positive, say, share, write_results
from flexgen_h2o.core.config import BITS, CACHE_BITS, Policy, without_unused_bits
from flexgen_h2o.core.errors import EXIT_DONE, FlexgenError, UsageError
from flexgen_h2o.core.files import try_lock, usable_path
from flexgen_h2o.engine.workload import AutoPolicy
from flexgen_h2o.evaluation import long_context
from flexgen_h2o.evaluation.rows import (
    Case,
    TextRow,
    add_continuation_flag,
    add_row_flags,
    check_distinct,
    check_given,
    check_rows,
    eviction_named,
)
from flexgen_h2o.flags import (
    add_engine_flags,
    check_positions,
    model_of,
    naming_flags,
    open_llm,
    policy_of,
    say_notes,
)
from flexgen_h2o.kvcache.eviction import H2O, POLICIES, Full, check_name, says_budget
from flexgen_h2o.kvcache.eviction.mixes import SCHEMA as TABLE_SCHEMA
from flexgen_h2o.kvcache.eviction.mixes import (
    SHIPPED,
    WHOLE,
    Mix,
    read_table,
    table_file,
    table_for,
)
from flexgen_h2o.parser import OneLineParser

if TYPE_CHECKING:
    from flexgen_h2o.evaluation.fidelity import FidelityRunner
    from flexgen_h2o.evaluation.figures import Bootstrap, Column, Figures
    from flexgen_h2o.models.load import Model

SCHEMA = 2
INT8 = "int8"  # value of --weight-bits that sets int8_compute
DEFAULT_POLICIES = (Full.name, "h2o", "local", "random")
DEFAULT_BUDGETS = (0.5, 0.2)
SMALL = 0.03  # nats of KL that --kv-loss calls small
# Bytes held may exceed a share by this factor and still count as fitting: only whole entries fit.
ROUNDED = 1.02
CHANGED = "changed"  # name of the share of changed tokens in the JSON
ROUGE = ("rouge1", "rouge2", "rougeL")
# Settings of `Policy` that the grid sets.
GRID_FIELDS = (
    "compress_cache",
    "cache_bits",
    "cache_window",
    "cache_rotation",
    "compress_weight",
    "weight_bits",
    "int8_compute",
    "attn_sparsity",
)


@dataclass(frozen=True)
class Setting:
    """One way to have a smaller KV cache or weights; made by `grid` from the flags."""

    # Name of the eviction policy; its own settings may follow after a colon.
    policy: str = Full.name
    # Share of the KV entries of prompt and answer that stay.
    kv_budget: float | None = None
    # Share of the bytes of the full bf16 cache that may be used; given instead of `kv_budget`.
    kv_bytes: float | None = None
    # Bits per number of keys and values; 16: not packed; "4/3": keys in 4 bits, values in 3.
    kv_bits: int | str = WHOLE
    # Number of newest entries that are not packed; None: the default of `Policy`.
    kv_window: int | None = None
    # Are keys and values rotated before they are packed?
    kv_rotation: bool = False
    # Bits per weight ("16": as computed), or INT8.
    weights: str = str(WHOLE)
    # The flag that has chosen policy and bits (`--kv-size 0.2`), "" if there is none.
    chosen_by: str = ""

    @property
    def name(self) -> str:
        """Name of the setting in tables and progress lines."""
        parts = [f"{self.chosen_by}: {self.policy}" if self.chosen_by else self.policy]
        if self.kv_budget is not None:
            parts.append(f"{self.kv_budget:.3g} of the entries")
        if self.kv_bytes is not None and not self.chosen_by:
            parts.append(f"{self.kv_bytes:.3g} of the bytes")
        if self.kv_bits != WHOLE:
            window = "" if self.kv_window is None else f" but for the newest {self.kv_window}"
            rotated = ", rotated" if self.kv_rotation else ""
            parts.append(f"KV in {self.kv_bits} bits{window}{rotated}")
        if self.weights != str(WHOLE):
            parts.append(f"weights in {self.weights}" + (" bits" if self.weights != INT8 else ""))
        return ", ".join(parts)

    def case(self, base: Policy, is_auto: bool) -> Case:
        """Return the setting as the runner's `Case`. Raise UsageError naming --policies.

        base: the policy of the flags, which the setting's fields change. is_auto: the placement is
        searched for.
        """
        changes: dict[str, Any] = {}
        if self.kv_bits != WHOLE:
            changes |= {
                "compress_cache": True,
                "cache_bits": self.kv_bits,
                "cache_rotation": self.kv_rotation,
            }
            if self.kv_window is not None:
                changes["cache_window"] = self.kv_window
        if self.weights == INT8:
            changes["int8_compute"] = True
        elif self.weights != str(WHOLE):
            changes |= {"compress_weight": True, "weight_bits": int(self.weights)}
        policy = without_unused_bits(replace(base, **changes))
        placement = AutoPolicy(policy) if is_auto else policy
        if self.policy == Full.name:
            return Case(self.name, Full(), policy=placement)
        size = (
            {"kv_budget": self.kv_budget} if self.kv_bytes is None else {"kv_bytes": self.kv_bytes}
        )
        if says_budget(self.policy):
            raise UsageError(
                f"--policies {self.policy}: --kv-budget and --kv-bytes set the size; leave it out "
                "there"
            )
        with naming_flags():
            H2O(**size)  # a share out of range is an error of its flag, not of the policy
        return Case(self.name, eviction_named(self.policy, size), policy=placement)


REFERENCE = Setting()


def add_flags(parser: OneLineParser) -> None:
    """Add all flags of `evaluate frontier`."""
    add_engine_flags(parser, without=GRID_FIELDS)
    parser.set_defaults(dtype="float32", run=run, **dict.fromkeys(GRID_FIELDS))
    add = parser.add_argument
    lines = (
        ".txt or .jsonl as `generate -i` takes them; articles with `summary_gt` are summarised too"
    )
    add_row_flags(parser, lines, "the first N of them only", (448, 64), "1GiB")
    add_continuation_flag(parser)
    add("--join", action="store_true", help="join prompts of the file until they are long enough")
    add(
        "--chat",
        action="store_true",
        help="prompts are messages in the model's chat template; follow its answer",
    )
    names = ", ".join(POLICIES)
    add("--policies", nargs="+", metavar="NAME", help=f"{names} ({' '.join(DEFAULT_POLICIES)})")
    budgets = f"shares of the KV entries that stay ({' '.join(map(str, DEFAULT_BUDGETS))})"
    add("--kv-budget", type=share, nargs="+", metavar="SHARE", help=budgets)
    bits = (
        "bits of keys and values, one setting each; 16: not packed; 4/3: keys in 4, values in 3 "
        "(16 8 4)"
    )
    add("--kv-bits", nargs="+", metavar="N", help=bits)
    kv_bytes = (
        "shares of the KV cache's bytes: what --kv-size chooses; with --learn every policy and bits"
    )
    add(
        "--kv-bytes",
        "--kv-size",
        dest="kv_sizes",
        type=share,
        nargs="+",
        metavar="SHARE",
        help=kv_bytes,
    )
    add(
        "--kv-rotation",
        action="store_true",
        help="rotate keys and values before --kv-bits packs them",
    )
    weights = (
        f"weights in {', '.join(map(str, BITS))} bits or {INT8}, with all KV entries and "
        "each --kv-bits"
    )
    add("--weight-bits", nargs="+", metavar="N", help=weights)
    tasks = f"also score long-context tasks of --prompt-len tokens: {', '.join(long_context.TASKS)}"
    add("--tasks", nargs="+", metavar="NAME", help=tasks)
    add("--num-questions", type=positive, default=24, metavar="N", help="questions of a task (24)")
    add("--no-answers", action="store_true", help="do not generate: no tokens/s and no ROUGE")
    learn = (
        "keep what loses least at each --kv-bytes: --kv-size of this model chooses by it from "
        "now on"
    )
    add("--learn", action="store_true", help=learn)


def run(args: argparse.Namespace) -> int:
    """Measure what is missing, print and write the result, and return the exit code.

    Flags are checked before torch is imported.
    """
    settings = _check(args)
    model = model_of(args)
    base, is_auto = policy_of(args)
    cases = {setting: setting.case(base, is_auto) for setting in settings}
    from flexgen_h2o.evaluation.fidelity import FidelityRunner

    began = time.perf_counter()
    with open_llm(args, base, is_auto, Full()) as llm:
        check_positions(args, llm.model.name, llm.model.spec.max_positions)
        runner = FidelityRunner(llm, args.keep_mem)
        runner.check(list(cases.values()))
        prompts = read_prompts(args, llm.model)
        say_notes("evaluate frontier", args, llm)
        facts = {**_facts(args, llm.model, llm.dtype, prompts), "weights": llm.digests()["weights"]}
        kept = None if args.json is None else args.json.with_name(args.json.name + ".rows.jsonl")
        with contextlib.closing(Measurements(kept, facts)) as measured:
            for setting in measured.settings:  # settings of earlier runs are rows of the table too
                try:
                    cases.setdefault(setting, setting.case(base, is_auto))
                except UsageError as error:
                    raise UsageError(
                        f"--json: {kept} has a setting that is none here ({error}); remove it"
                    ) from error
            study = Study(args, runner, prompts, cases, measured)
            if args.learn:
                _check_learns(study)
            study.measure()
        result = {**facts, "cells": study.cells()}
    result["seconds"] = time.perf_counter() - began
    write_results(args, result, markdown(result), draw)
    if args.learn:
        _keep_table(table_file(model, args.offload_dir), learned(result))
    return EXIT_DONE


def _check_learns(study: Study) -> None:
    """Raise UsageError if no setting is as small as one of the shares of --kv-bytes."""
    smallest = min(
        study.kv_share(setting) for setting in study.cases if _may_be_chosen(asdict(setting))
    )
    if smallest > max(study.args.kv_sizes) * ROUNDED:
        raise UsageError(
            f"--learn: the smallest setting needs {smallest:.1%} of the KV cache's bytes, more "
            "than the shares of --kv-bytes; give more --policies or fewer --kv-bits"
        )


def _may_be_chosen(setting: Figures) -> bool:
    """Return whether --learn may choose a setting, or the setting of a cell."""
    return (
        setting["weights"] == str(WHOLE) and not setting["chosen_by"] and not setting["kv_rotation"]
    )


def _keep_table(path: Path, table: Figures) -> None:
    from flexgen_h2o.core.files import write_whole

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(table, indent=1) + "\n")
    except OSError as error:
        raise UsageError(
            f"--offload-dir: {path} cannot be written ({error.strerror or error})"
        ) from error
    for mix in table["mixes"]:
        say(
            "evaluate",
            f"--kv-size {mix['least']:.0%}: {mix['eviction']}, KV in {mix['cache_bits']} bits, "
            f"KL {mix['kl']['value']:.4f} [{mix['kl']['low']:.4f}, {mix['kl']['high']:.4f}]",
        )
    say("evaluate", f"--kv-size of this model chooses by {path} from now on; remove it to undo")


# ---- What is compared


def _check(args: argparse.Namespace) -> list[Setting]:
    """Return the settings, the full cache first. Raise UsageError if flags or files are wrong."""
    check_given(args, "prompts", "name a .txt or .jsonl file of prompts")
    check_rows(args, None)
    if not args.prompts.is_file():
        raise UsageError(
            f"--prompts {args.prompts}: there is no such file; name a .txt or .jsonl file of "
            "prompts"
        )
    for task in args.tasks or ():
        if task not in long_context.TASKS:
            raise UsageError(f"--tasks {task}: is not one of {', '.join(long_context.TASKS)}")
    if args.learn and not args.kv_sizes:
        raise UsageError(
            "--learn: chooses among settings of equal bytes; say with --kv-bytes which shares"
        )
    for flag, given in (
        ("--policies", args.policies),
        ("--kv-budget", args.kv_budget),
        ("--kv-bits", args.kv_bits),
        ("--kv-bytes", args.kv_sizes),
        ("--weight-bits", args.weight_bits),
        ("--tasks", args.tasks),
    ):
        check_distinct(flag, given or ())
    settings = grid(args)
    if args.plot is not None and len(settings) == 1:
        raise UsageError(
            "--plot: nothing is compared with the full cache; name a policy or --kv-bits too"
        )
    for setting in settings:
        setting.case(Policy(), False)  # raises its errors before torch is imported
    for name in GRID_FIELDS:
        setattr(args, name, None)
    return settings


def grid(args: argparse.Namespace) -> list[Setting]:
    """Return every setting that the flags ask for, once each, the full cache first.

    Raise UsageError naming the flag.
    """
    bits = [_kv_bits(text) for text in args.kv_bits or ("16", "8", "4")]
    chosen = bool(args.kv_sizes or args.weight_bits)
    policies = args.policies or (
        () if chosen and not args.kv_budget and not args.learn else DEFAULT_POLICIES
    )
    budgets = args.kv_budget or (() if chosen else DEFAULT_BUDGETS)
    evicting = [policy for policy in policies if policy != Full.name]
    # --learn replaces the model's own table, so a damaged one must not stop it.
    table = read_table(SHIPPED) if args.learn else table_for(args.model, args.offload_dir)
    for policy in evicting:
        check_name(policy, f"--policies {policy}")
    found = [REFERENCE]
    if Full.name in policies or args.kv_bits:
        found += [Setting(kv_bits=one) for one in bits]
    packed = bits if args.kv_bits else [WHOLE]
    found += [
        Setting(policy, budget, kv_bits=one)
        for policy in evicting
        for budget in budgets
        for one in packed
    ]
    for size in args.kv_sizes or ():
        found.append(setting_of_mix(size, table.mix_of(size)))
        if args.learn:
            found += [Setting(kv_bits=one) for one in bits]
            found += [
                Setting(policy, kv_bytes=size, kv_bits=one, kv_window=window)
                for policy in evicting
                for one in bits
                for window in ((None,) if one == WHOLE else (Policy.cache_window, 0))
            ]
    for weights in args.weight_bits or ():
        if weights != INT8 and weights not in map(str, BITS):
            raise UsageError(
                f"--weight-bits {weights}: is not one of {', '.join(map(str, BITS))}, {INT8}"
            )
        found += [Setting(kv_bits=one, weights=weights) for one in dict.fromkeys([WHOLE, *packed])]
    if args.kv_rotation:
        found = [
            one if one.kv_bits == WHOLE or one.chosen_by else replace(one, kv_rotation=True)
            for one in found
        ]
    return list(dict.fromkeys(found))


def setting_of_mix(size: float, mix: Mix) -> Setting:
    """Return the setting that `--kv-size` chooses. size: share of the full cache's bytes."""
    return Setting(
        mix.eviction,
        kv_bytes=size,
        kv_bits=mix.cache_bits,
        kv_window=mix.cache_window if mix.cache_bits != WHOLE else None,
        chosen_by=f"--kv-size {size:.3g}",
    )


def _kv_bits(text: str) -> int | str:
    keys, _, values = text.partition("/")
    known = [str(one) for one in CACHE_BITS]
    if keys not in known or (values or keys) not in known:
        if text == str(WHOLE):
            return WHOLE
        raise UsageError(
            f"--kv-bits {text}: is not one of {WHOLE}, {', '.join(known)}, nor two of them as 4/3"
        )
    return int(keys) if values in ("", keys) else text


# ---- What it is measured on


@dataclass(frozen=True)
class FrontierPrompts:
    """The prompts that every setting is measured on; made by `read_prompts`."""

    # Prompts with their continuations, all equally long; () if the model writes its own.
    rows: list[TextRow]
    # Token ids of the prompts that are answered: articles to summarise, else the rows' prompts.
    asked: list[tuple[int, ...]]
    # Summaries that people wrote, one per prompt of `asked`; empty if there are none.
    references: list[str]
    # Questions of the long-context tasks, by name of the task.
    questions: Mapping[str, list[long_context.TaskQuestion]]

    @property
    def digest(self) -> str:
        """SHA-256 of all fields, so that measurements of other prompts are not reused."""
        found = hashlib.sha256()
        for row in self.rows:
            found.update(json.dumps([row.prompt, row.continuation]).encode())
        found.update(json.dumps([self.asked, self.references]).encode())
        for task, questions in self.questions.items():
            found.update(
                json.dumps([task, [[one.prompt, one.answers] for one in questions]]).encode()
            )
        return found.hexdigest()


def read_prompts(args: argparse.Namespace, model: Model) -> FrontierPrompts:
    """Return the prompts that the flags ask for.

    Continuations that the model itself writes are still (). Raise UsageError if no prompt is long
    enough.
    """
    if args.chat:
        model.check_chat()
    answers_itself = args.chat or args.continuation == "greedy"
    length = args.prompt_len + (0 if answers_itself else args.gen_len)
    ids: list[tuple[int, ...]] = []
    articles: list[Article] = []
    for tokens, article in _lines(args, model, length):
        ids.append(tokens)
        if article is not None:
            articles.append(article)
    if args.join:
        ids = list(_joined(ids, length))
    elif not answers_itself:
        ids = [tokens for tokens in ids if len(tokens) >= length]
    ids = ids[: args.num_prompts]
    if not ids:
        raise UsageError(
            f"--prompts {args.prompts}: no prompt has {length} tokens (--prompt-len + --gen-len); "
            "lower them, give "
            "--join, or follow the model's own answers with --continuation greedy"
        )
    cut = [tokens[:length] for tokens in ids]
    rows = [TextRow(tokens[: args.prompt_len], tokens[args.prompt_len :]) for tokens in cut]
    # Cutting an article to its length encodes it several times, so no more are cut than are used.
    summaries = list(islice(_summaries(args, model, articles), len(rows)))
    asked = [row.prompt for row in rows]
    references: list[str] = []
    if len(summaries) == len(rows):
        asked = [prompt for prompt, _ in summaries]
        references = [reference for _, reference in summaries]
    questions = {
        task: long_context.questions(task, model, args.prompt_len, args.num_questions, args.seed)
        for task in args.tasks or ()
    }
    return FrontierPrompts(rows, asked, references, questions)


Article = tuple[str, str]  # a text that asks for a summary, and a person's summary


def _lines(
    args: argparse.Namespace, model: Model, length: int
) -> Iterator[tuple[tuple[int, ...], Article | None]]:
    """Yield the token ids of each line, and its article if it has a reference summary.

    A line of more than `length` tokens yields at least `length` of them. Raise UsageError naming
    the line.
    """
    from flexgen_h2o.engine.sampling import SamplingParams
    from flexgen_h2o.jobs.input import read_lines
    from flexgen_h2o.jobs.requests import RequestReader, RowError

    reader = RequestReader(model, SamplingParams(args.gen_len), chat=args.chat)
    for line in read_lines(args.prompts, "--prompts"):
        try:
            value = line.parse()
        except ValueError as error:
            raise UsageError(f"--prompts {args.prompts}:{line.number}: {error}") from error
        text = next(
            (
                value[name]
                for name in ("article", "prompt", "text")
                if isinstance(value.get(name), str)
            ),
            None,
        )
        if text is not None and not args.chat and model.tokenizer is not None:
            ids = tuple(model.encode_prefix(text, length))
        else:
            try:
                ids = tuple(reader.read(line).prompt_ids)
            except RowError as error:
                raise UsageError(f"--prompts {args.prompts}:{line.number}: {error}") from error
        article = value.get("article")
        reference = value.get("summary_gt")
        yield (
            ids,
            (article, reference)
            if isinstance(article, str) and isinstance(reference, str)
            else None,
        )


def _summaries(
    args: argparse.Namespace, model: Model, articles: Iterable[Article]
) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield (token ids of the prompt, reference summary) of each article.

    Articles are cut to at most --prompt-len tokens; those that cannot be cut so far are left out.
    """
    from flexgen_h2o.evaluation.articles import shortened

    encode = model.encode_message if args.chat else model.encode

    def fits(text: str) -> bool:
        return bool(len(encode(text)) <= args.prompt_len)

    for article, reference in articles:
        whole = shortened(article, fits)
        if whole is not None:
            yield tuple(encode(whole)), reference


def _joined(ids: Iterable[tuple[int, ...]], length: int) -> Iterator[tuple[int, ...]]:
    """Join neighbouring prompts and yield each joined one once it has `length` tokens or more.

    Prompts at the end that together are too short are dropped.
    """
    found: tuple[int, ...] = ()
    for tokens in ids:
        found += tokens
        if len(found) >= length:
            yield found
            found = ()


def _facts(args: argparse.Namespace, model: Model, dtype: str, prompts: FrontierPrompts) -> Figures:
    """Return the facts about the run for the JSON result.

    Measurements of runs with equal facts may be in one table.
    """
    continuation = "the model's own" if args.chat or args.continuation == "greedy" else "the text's"
    return {
        "measure": "frontier",
        "schema": SCHEMA,
        "model": model.name,
        "dtype": dtype,
        "prompts": str(args.prompts.name),
        "num_prompts": len(prompts.rows),
        "prompt_len": args.prompt_len,
        "gen_len": args.gen_len,
        "continuation": continuation,
        "chat": args.chat,
        "tasks": {task: len(questions) for task, questions in prompts.questions.items()},
        "digest": prompts.digest,
    }


def _with_folder(facts: Figures) -> Figures:
    """Return facts in which a model's folder has one name, however it was spelled."""
    folder = usable_path(str(facts["model"]), "--model")
    return {**facts, "model": str(folder.resolve() if folder.is_dir() else facts["model"])}


# ---- Measuring


class Measurements:
    """The value of each prompt, by setting and kind, appended to a file as it is measured.

    path: the file; None: nothing is kept on disk. facts: those of the run (`_facts`), which must
    equal the file's. Raise UsageError if the file belongs to another run, or another process
    measures into it.
    """

    def __init__(self, path: Path | None, facts: Figures) -> None:
        self._path = path
        self._found: dict[tuple[Setting, str], dict[int, Any]] = {}
        if path is None:
            return
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise UsageError(f"--json: {path}: {error.strerror or error}") from error
        try:
            self._load(facts)
        except BaseException:
            self.close()
            raise

    def _load(self, facts: Figures) -> None:
        if not try_lock(self._file.fileno()):
            raise UsageError(
                f"--json: another run measures into {self._path}; wait for it, or name another file"
            )
        self._file.seek(0)
        lines = self._file.read().split(b"\n")
        # A new file, or one whose first line was cut by a kill.
        if len(lines) == 1 and b'{"facts": '.startswith(lines[0][:10]):
            self._file.truncate(0)
            self._append({"facts": facts})
            return
        self._read(lines[:-1], facts)
        if lines[-1]:  # a kill has cut the last line
            self._file.truncate(sum(len(line) + 1 for line in lines[:-1]))

    def _read(self, lines: Sequence[bytes], facts: Figures) -> None:
        number = 1
        try:
            first = json.loads(lines[0])
            is_old = first["facts"]["schema"] != SCHEMA
            same = _with_folder(first["facts"]) == _with_folder(facts)
            # Settings of an older version may be named as today's and mean something else.
            for text in () if is_old else lines[1:]:
                number += 1
                line = json.loads(text)
                if line["kind"] == LOSSES and any(len(value) != 3 for value in line["values"]):
                    raise ValueError("three losses a prompt are expected")
                self._keep(Setting(**line["setting"]), line["kind"], line["values"], line["start"])
        except (IndexError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"--json: line {number} of {self._path} is not what this command has written; "
                "remove the line, or the file"
            ) from error
        if is_old:
            raise UsageError(
                f"--json: {self._path} has measurements of another version; remove it, or name "
                "another file"
            )
        if not same:
            raise UsageError(
                f"--json: {self._path} has measurements of other prompts or lengths; remove it, or "
                "name another file"
            )

    def close(self) -> None:
        """Let other processes measure into the file."""
        if self._path is not None:
            self._file.close()

    @property
    def settings(self) -> list[Setting]:
        """Settings that have measurements, those of the file included."""
        return list(dict.fromkeys(setting for setting, _ in self._found))

    def __getitem__(self, key: tuple[Setting, str]) -> list[Any]:
        """Return the values of a (setting, kind), in the order of the prompts."""
        found = self._found.get(key, {})
        return [found[number] for number in sorted(found)]

    def lacks(self, setting: Setting, kind: str, numbers: range = range(1)) -> bool:
        """Return whether a value is missing for a prompt of `numbers`, which count from 0."""
        return not self._found.get((setting, kind), {}).keys() >= set(numbers)

    def add(self, setting: Setting, kind: str, values: Sequence[Any], start: int = 0) -> None:
        """Keep one value per prompt. Raise FlexgenError if the file cannot be written.

        start: the number of the first prompt.
        """
        self._keep(setting, kind, values, start)
        self._append(
            {"setting": asdict(setting), "kind": kind, "start": start, "values": list(values)}
        )

    def _keep(self, setting: Setting, kind: str, values: Sequence[Any], start: int) -> None:
        self._found.setdefault((setting, kind), {}).update(enumerate(values, start))

    def _append(self, line: Figures) -> None:
        if self._path is None:
            return
        try:
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise FlexgenError(f"--json: {self._path}: {error.strerror or error}") from error


# The kinds of measurements; a task's name is a kind too.
LOSSES = "losses"  # [KL, share of changed tokens, negative log-likelihood] per prompt
ANSWERS = "answers"  # [ROUGE-1, -2, -L] per prompt
SPEED = "tokens_per_s"  # one value for all prompts together


@dataclass(frozen=True)
class Study:
    """One run of the command; made by `run`."""

    args: argparse.Namespace  # the flags
    runner: FidelityRunner  # runs the open LLM with one setting after another
    prompts: FrontierPrompts  # what every setting is measured on
    cases: Mapping[Setting, Case]  # the settings, each as the runner takes it
    measured: Measurements  # what is known already; grows while measuring

    def measure(self) -> None:
        """Measure everything that `measured` lacks."""
        self._measure_losses()
        for setting in self.cases:
            if not self.args.no_answers and self.measured.lacks(setting, SPEED):
                self._measure_answers(setting)
            for task, questions in self.prompts.questions.items():
                if self.measured.lacks(setting, task):
                    self._measure_task(setting, task, questions)

    def _measure_losses(self) -> None:
        """Follow the rows with each setting.

        Rows are followed in chunks, whose full-cache reference fits in --keep-mem.
        """
        gen_len = self.args.gen_len
        for start, chunk in self.runner.chunks(self.prompts.rows, gen_len):
            numbers = range(start, start + len(chunk))
            missing = [one for one in self.cases if self.measured.lacks(one, LOSSES, numbers)]
            if not missing:
                continue
            rows = chunk if chunk[0].continuation else self.runner.greedy(chunk, gen_len)
            logits, of_full = self.runner.reference(rows)
            for setting in missing:
                losses = of_full
                if setting != REFERENCE:
                    losses = self.runner.compare(rows, logits, self.cases[setting])
                    which = f"prompts {start + 1} to {numbers.stop}"
                    say("evaluate", f"{setting.name}: {which}, KL {losses[:, 0].mean():.4f}")
                self.measured.add(setting, LOSSES, losses.tolist(), start)

    def _measure_answers(self, setting: Setting) -> None:
        references = self.prompts.references
        texts = self.runner.answers(
            self.cases[setting], self.prompts.asked, self.args.gen_len, ignore_eos=not references
        )
        assert self.runner.llm.report is not None
        speed = self.runner.llm.report.total.tokens_per_s
        if references:
            from flexgen_h2o.evaluation.articles import rouge_of

            scores = [
                rouge_of(text, wanted)[: len(ROUGE)]
                for text, wanted in zip(texts, references, strict=True)
            ]
            self.measured.add(setting, ANSWERS, scores)
        self.measured.add(setting, SPEED, [speed])
        say("evaluate", f"{setting.name}: {speed:.1f} tokens/s")

    def _measure_task(
        self, setting: Setting, task: str, questions: Sequence[long_context.TaskQuestion]
    ) -> None:
        longest = max(one.max_tokens for one in questions)
        texts = self.runner.answers(self.cases[setting], [one.prompt for one in questions], longest)
        scores = [one.score(text) for one, text in zip(questions, texts, strict=True)]
        self.measured.add(setting, task, scores)
        say("evaluate", f"{setting.name}: {task} {np.mean(scores):.0%}")

    def cells(self) -> list[Figures]:
        """Return the figures of each setting, those of the full cache first."""
        return [self._cell(setting) for setting in self.cases]

    def kv_share(self, setting: Setting) -> float:
        """Return the mean share of the full cache's bytes over the prompts."""
        if replace(setting, weights=REFERENCE.weights) == REFERENCE:
            return 1.0
        lengths = [(len(row.prompt), self.args.gen_len) for row in self.prompts.rows]
        return self.runner.share(self.cases[setting], lengths)

    def _cell(self, setting: Setting) -> Figures:
        from flexgen_h2o.evaluation.figures import losses_of

        losses = np.array(self.measured[setting, LOSSES])
        full = np.array(self.measured[REFERENCE, LOSSES])
        kv_share = self.kv_share(setting)
        speeds = self.measured[setting, SPEED]
        rouge = self.measured[setting, ANSWERS]
        return {
            "name": setting.name,
            **asdict(setting),
            "eviction": self.cases[setting].eviction.to_json(),
            "kv_share": kv_share,
            "read_share": kv_share,  # a step reads all that is held
            **losses_of(losses, full, self._bootstrap(len(losses)), CHANGED),
            "tokens_per_s": speeds[0] if speeds else None,
            "rouge": {
                name: self._mean([one[i] for one in rouge]) for i, name in enumerate(ROUGE) if rouge
            },
            "tasks": {
                task: self._mean(self.measured[setting, task]) for task in self.prompts.questions
            },
        }

    def _bootstrap(self, count: int) -> Bootstrap:
        from flexgen_h2o.evaluation.figures import Bootstrap

        return Bootstrap(count, self.args.resamples, self.args.seed)

    def _mean(self, values: Sequence[float]) -> Figures:
        """Return the mean of one value per prompt, with its interval."""
        return self._bootstrap(len(values)).mean(np.array(values, dtype=float))


# ---- Tables and pictures


def learned(result: Figures) -> Figures:
    """Return the table of `--kv-size` for this model, in the layout of kvcache/eviction/mixes.py.

    For each share of --kv-bytes the table has the setting with the lowest KL among those that need
    no more than these bytes. It also lists the settings that keep every entry with a KL of at most
    SMALL.
    """
    cells = [cell for cell in result["cells"] if _may_be_chosen(cell)]
    mixes = []
    for size in sorted({cell["kv_bytes"] for cell in cells if cell["kv_bytes"]}, reverse=True):
        fitting = [cell for cell in cells if cell["kv_share"] <= size * ROUNDED]
        if not fitting:
            continue
        best = min(fitting, key=lambda cell: cell["kl"]["value"])
        window = Policy.cache_window if best["kv_window"] is None else best["kv_window"]
        mixes.append(
            {
                "least": size,
                # If all entries fit, nothing is dropped. In longer sequences the policy keeps the
                # cache within its bytes.
                "eviction": H2O.name if best["policy"] == Full.name else best["policy"],
                "cache_bits": best["kv_bits"],
                "cache_window": window,
                "kl": best["kl"],
                "changed": best["changed"],
            }
        )
    whole = [cell for cell in cells if cell["policy"] == Full.name and cell["kl"]["value"] <= SMALL]
    about = ("model", "dtype", "prompts", "num_prompts", "prompt_len", "gen_len", "continuation")
    return {
        "schema": TABLE_SCHEMA,
        **{name: result[name] for name in about},
        "mixes": mixes,
        "small_losses": [{"settings": _of_policy(cell), "kl": cell["kl"]} for cell in whole],
    }


def _of_policy(cell: Figures) -> dict[str, Any]:
    """Return the fields of `Policy` for a cell that keeps every entry."""
    if cell["kv_bits"] == WHOLE:
        return {}
    return {"compress_cache": True, "cache_bits": cell["kv_bits"]}


def markdown(result: Figures) -> str:
    """Return the table, one line per setting, the largest KV cache first."""
    head = (
        f"Model `{result['model']}` in {result['dtype']}; {result['num_prompts']} prompts of "
        f"{result['prompt_len']} "
        f"tokens from {result['prompts']}, {result['gen_len']} tokens followed "
        f"({result['continuation']}). "
        "In brackets: 95% bootstrap intervals over prompts. *: no smaller setting loses less, "
        "beyond the intervals."
    )
    from flexgen_h2o.evaluation.figures import (
        LEGEND,
        loss_columns,
        on_frontier,
        percent,
        table_of,
    )

    best = {cell["name"] for cell in on_frontier(result["cells"])}
    columns: list[Column] = [
        ("setting", lambda cell: cell["name"] + (" *" if cell["name"] in best else "")),
        *loss_columns(CHANGED),
    ]
    if any(cell["rouge"] for cell in result["cells"]):
        columns.append(
            ("ROUGE-2", lambda cell: percent(cell["rouge"]["rouge2"]) if cell["rouge"] else "")
        )
    for task in result["tasks"]:
        columns.append((task, lambda cell, task=task: percent(cell["tasks"][task])))  # type: ignore[misc]
    if any(cell["tokens_per_s"] for cell in result["cells"]):
        columns.append(
            ("tokens/s", lambda cell: f"{cell['tokens_per_s']:.1f}" if cell["tokens_per_s"] else "")
        )
    ordered = sorted(result["cells"], key=lambda cell: -cell["kv_share"])
    return f"{head}\n\n{table_of(columns, ordered)}\n\n{LEGEND}\n"


def draw(result: Figures, path: Path) -> None:
    """Draw KL against the bytes held, one line per policy and bits (`draw_losses`)."""
    from flexgen_h2o.evaluation.figures import draw_losses

    def kind_of(cell: Figures) -> str:
        weights = cell["weights"]
        kind: str = cell["policy"] if weights == str(WHOLE) else f"weights in {weights}"
        return kind if cell["kv_bits"] == WHOLE else f"{kind}, KV in {cell['kv_bits']} bits"

    lengths = f"{result['prompt_len']} + {result['gen_len']}"
    title = f"{result['model']}: {result['num_prompts']} prompts, {lengths}"
    draw_losses(result["cells"], title, path, kind_of)

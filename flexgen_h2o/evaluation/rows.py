"""Texts, recall prompts and policies of given sizes that quality is measured with.

Rows are made of held-out text, of prompt files, or for recall; streams are long texts. Without a
file the text is the source files of Python's standard library, which every machine has. The shipped
model was trained on all but the held-out ones (scripts/train_tiny_opt.py). Recall rows state pairs
early and ask for them later, so that entries far back in the KV cache matter.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import string
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexgen_h2o.cli_common import (
    add_result_flags,
    check_results,
    count,
    file_name,
    flag_of,
    positive,
)
from flexgen_h2o.core.errors import FlexgenError, UsageError
from flexgen_h2o.core.files import read_bounded, write_whole
from flexgen_h2o.core.settings import ORIGINAL, ROLLING, SIZES
from flexgen_h2o.core.units import parse_bytes
from flexgen_h2o.engine.prompts import lines_of, object_of_json, read_prompts
from flexgen_h2o.kvcache.eviction import (
    EVICTING,
    Eviction,
    Full,
    check_name,
    make_eviction,
    says_budget,
)
from flexgen_h2o.kvcache.eviction.policy import is_rolling
from flexgen_h2o.parser import OneLineParser

if TYPE_CHECKING:
    from flexgen_h2o.core.config import Policy
    from flexgen_h2o.engine.workload import AutoPolicy
    from flexgen_h2o.llm import LLM
    from flexgen_h2o.models.load import Model

OUR_TEXT = (
    ".txt (a prompt per line) or .jsonl (prompt or prompt_token_ids); without it "
    "Python's own sources"
)
_NOT_OURS = frozenset({"site-packages", "dist-packages", "__pycache__", "lib2to3"})
_MIN_BYTES = 200
_HELD_OUT_OF = 40


def stdlib_files() -> list[Path]:
    """Return all Python sources of the standard library in name order, without packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = set(below) - _NOT_OURS
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(p for p in found if p.stat().st_size > _MIN_BYTES)


def is_held_out(path: Path) -> bool:
    """Return whether a file was kept out of training.

    One file in 40 is, chosen by a hash of its name, so that every machine holds out the same files.
    """
    return hashlib.sha256(path.name.encode()).digest()[0] % _HELD_OUT_OF == 0


def read_text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", errors="ignore").replace("\r\n", "\n")


Encode = Callable[[str], list[int]]
Pair = tuple[str, str]

MAX_TEXT_BYTES = 16 * 2**20  # read from a text file at most; longer than any stream
PAIRS = 10  # pairs that a recall prompt states
DEPTHS = 5  # places where recall prompts state them, one per row in turn


@dataclass(frozen=True)
class TextRow:
    """A prompt and the continuation that is followed after it, as token ids."""

    prompt: tuple[int, ...]
    # () if the model's own continuation is still to be generated.
    continuation: tuple[int, ...]
    # Recall rows only: for each question the indices of its answer's tokens in the continuation.
    # The prompt ends with the first question; the others come after it.
    questions: tuple[tuple[int, ...], ...] = ()

    @property
    def lengths(self) -> tuple[int, int]:
        """Number of tokens of the prompt and of the continuation."""
        return len(self.prompt), len(self.continuation)


@dataclass(frozen=True)
class HeldOutText:
    """A long text as token ids of a model's tokenizer; made by `text_of`."""

    encode: Encode  # returns the token ids of more text, without special tokens
    start: tuple[int, ...]  # token ids that every prompt begins with (BOS)
    tokens: list[int]  # token ids of the text


def draw_pairs(rng: random.Random, count: int) -> list[Pair]:
    """Return pairs of a name of two letters and a number of two digits, in random order.

    There are `count` pairs, or fewer if a name is drawn twice.
    """
    names = {"".join(rng.choices(string.ascii_lowercase, k=2)) for _ in range(count)}
    pairs = [(name, f"{rng.randint(0, 99):02d}") for name in sorted(names)]
    rng.shuffle(pairs)
    return pairs


def statement(pair: Pair) -> str:
    """Return the line of code that states a pair."""
    return f"let {pair[0]} = {pair[1]}\n"


def recall_rows(
    text: HeldOutText, count: int, prompt_len: int, gen_len: int, seed: int
) -> list[TextRow]:
    """Return `count` recall rows of exactly `prompt_len` and at most `gen_len` tokens.

    The rows state their pairs at DEPTHS places of the prompt, evenly apart, one place per row in
    turn. Raise UsageError if a prompt has no room for the pairs, or a continuation none for an
    answer.
    """
    rng = random.Random(seed)
    rows = [_recall_row(rng, text, prompt_len, gen_len, i % DEPTHS) for i in range(count)]
    if not all(row.questions for row in rows):
        raise UsageError(
            f"--gen-len {gen_len}: too short for the answer of a recall prompt; give more, or "
            "--recall-prompts 0"
        )
    return rows


def _recall_row(
    rng: random.Random, text: HeldOutText, prompt_len: int, gen_len: int, depth: int
) -> TextRow:
    """Return one recall row.

    The prompt has code, the pairs, more code and a question. The continuation has its answer, and
    then asks for all other pairs in another order. The pairs are stated together, as in training:
    if they are stated separately, the shipped model misses one in ten.
    """
    encode = text.encode
    names = dict[str, str]()
    while len(names) < PAIRS:
        names.update(draw_pairs(rng, PAIRS - len(names)))
    pairs = list(names.items())
    first, *others = rng.sample(pairs, len(pairs))
    newline = encode("\n")
    asked = encode(f"ask {first[0]}")
    stated = {pair: encode(statement(pair)) for pair in pairs}
    taken = len(text.start) + len(asked) + sum(map(len, stated.values())) + 2 * len(newline)
    room = prompt_len - taken
    if room < 0:
        raise UsageError(
            f"--prompt-len {prompt_len}: too short for recall prompts, which take {taken} or more "
            "tokens; give more"
        )
    before = room * depth // (DEPTHS - 1)
    prompt = [*text.start, *stretch(rng, text.tokens, before), *newline]
    for tokens in stated.values():
        prompt += tokens
    prompt += [*stretch(rng, text.tokens, room - before), *newline, *asked]
    continuation: list[int] = []
    questions = []
    for pair in (first, *others):
        continuation += encode(" =") if pair == first else encode(f"ask {pair[0]} =")
        answer = encode(f" {pair[1]}")
        steps = range(len(continuation), len(continuation) + len(answer))
        continuation += [*answer, *newline]
        if steps.stop <= gen_len:
            questions.append(tuple(steps))
    return TextRow(tuple(prompt), tuple(continuation[:gen_len]), tuple(questions))


def stretch(rng: random.Random, code: Sequence[int], length: int) -> list[int]:
    """Return `length` consecutive token ids from a random place of `code`.

    Raise UsageError if `code` is too short.
    """
    if len(code) < length + 2:
        raise UsageError(
            f"--prompt-len: a prompt takes {length} tokens of the held-out text, which has "
            f"{len(code)}; lower it"
        )
    start = rng.randrange(len(code) - length - 1)
    return [int(i) for i in code[start : start + length]]


def text_of(path: Path | None, model: Model, without_tokenizer: str) -> HeldOutText:
    """Return the text of a file as token ids.

    path: None for the sources that the shipped model has not seen. without_tokenizer: the end of
    the message if the model has no tokenizer. Raise UsageError then, or if the file cannot be read.
    """
    check_tokenizer(model, without_tokenizer)
    tokens: list[int] = []
    if path is None:
        eos = getattr(model.tokenizer, "eos_token_id", None)
        end = [] if eos is None else [int(eos)]
        for source in filter(is_held_out, stdlib_files()):
            tokens += [*model.encode_plain(read_text(source)), *end]
    else:
        try:
            tokens = model.encode_plain_long(
                read_bounded(path, MAX_TEXT_BYTES).decode("utf-8").replace("\r\n", "\n")
            )
        except UnicodeDecodeError as error:
            raise UsageError(f"--text {path}: not UTF-8 text; save the file as UTF-8") from error
        except OSError as error:
            raise UsageError(f"--text {path}: {error.strerror or error}") from error
    return HeldOutText(model.encode_plain, tuple(model.encode("")), tokens)


def held_out_rows(
    text: HeldOutText, count: int, prompt_len: int, gen_len: int, seed: int
) -> list[TextRow]:
    """Return `count` rows of text drawn at random that do not overlap.

    Raise UsageError if the text has fewer of them.
    """
    if prompt_len <= len(text.start):
        raise UsageError(
            f"--prompt-len {prompt_len}: a prompt begins with {len(text.start)} special token(s); "
            "give more"
        )
    size = prompt_len + gen_len - len(text.start)
    stretches = len(text.tokens) // size
    if count > stretches:
        raise UsageError(
            f"--num-prompts {count}: Python's own sources give {stretches} held-out prompts of "
            f"{prompt_len + gen_len} "
            "tokens; ask for fewer or give --prompts"
        )
    starts = [size * i for i in random.Random(seed).sample(range(stretches), count)]
    rows = [(*text.start, *text.tokens[at : at + size]) for at in starts]
    return [TextRow(row[:prompt_len], row[prompt_len:]) for row in rows]


def rows_of_file(
    path: Path,
    model: Model,
    prompt_len: int,
    gen_len: int,
    greedy: bool,
    most: int | None,
    or_else: str = "",
) -> list[TextRow]:
    """Return at most `most` rows of a prompt file, in its order. Raise UsageError if none is left.

    Each prompt of the file is cut into prompt and continuation. Prompts that are too short for both
    are left out. greedy: the model's own continuation will be followed, so rows are prompts only
    and are cut to `prompt_len` if they are longer. or_else: the end of the error if all prompts are
    too short.
    """
    both = prompt_len + gen_len
    encode = partial(model.encode_prefix, tokens=both) if model.tokenizer is not None else None
    found = [p.prompt_ids for p in read_prompts(path, encode, model.spec.vocab_size)]
    long_enough = found if greedy else [ids for ids in found if len(ids) >= both]
    if not long_enough:
        raise UsageError(
            f"--prompts {path}: no prompt has {both} tokens (--prompt-len + --gen-len), the "
            "longest has "
            f"{max(map(len, found))}; lower them{or_else}"
        )
    end = prompt_len if greedy else both
    return [
        TextRow(tuple(ids[:prompt_len]), tuple(ids[prompt_len:end])) for ids in long_enough[:most]
    ]


def streams_of(text: HeldOutText, count: int, length: int | None) -> list[tuple[int, ...]]:
    """Return `count` streams of the text that begin evenly apart, as token ids.

    Each begins with the tokens that start a prompt. length: tokens of a stream; None: all of the
    text is used. Raise UsageError if the text is too short.
    """
    have = len(text.tokens)
    size = have // count if length is None else length - len(text.start)
    if size + len(text.start) < 2 or count * size > have:
        raise UsageError(
            f"--stream-len {'(all of the text)' if length is None else length}, --streams {count}: "
            f"the text has {have} "
            "tokens, and a stream takes at least 2; ask for fewer, shorter or longer ones"
        )
    return [
        (*text.start, *text.tokens[at : at + size])
        for at in (i * have // count for i in range(count))
    ]


# ---- What every measure checks


def check_given(args: argparse.Namespace, field: str, remedy: str) -> None:
    """Raise UsageError if a flag is missing. remedy: the end of the message."""
    if getattr(args, field) is None:
        raise UsageError(f"{flag_of(field)}: is missing; {remedy}")


def check_tokenizer(model: Model, remedy: str) -> None:
    """Raise UsageError if a model has no tokenizer. remedy: the end of the message."""
    if model.tokenizer is None:
        raise UsageError(f"--model {model.name}: has no tokenizer{remedy}")


# ---- Files of lines


@contextlib.contextmanager
def at_line(place: str, remedy: str = "") -> Iterator[None]:
    """Let a UsageError begin with the place of a line, `FLAG FILE:LINE`. remedy: its end."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{place}: {error}{remedy}") from error


def objects_of(path: Path, flag: str, remedy: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, object) of each line of a .jsonl file.

    place: `FLAG FILE:LINE`, for errors. remedy: the end of the UsageError for a line that is no
    JSON object.
    """
    for place, line in lines_of(path, flag):
        with at_line(place, remedy):
            found = object_of_json(line)
        yield place, found


def write_requests(path: Path, lines: Sequence[str], what: str, remedy: str) -> None:
    """Write the input of jobs, to which lines may be added later.

    Raise UsageError if the file has other lines. what, remedy: of its message.
    """
    try:
        older = path.read_text(encoding="utf-8").splitlines(True) if path.exists() else []
        if list(lines[: len(older)]) != older:
            raise UsageError(
                f"{path}: has requests of other {what}, or was made with other flags; {remedy}"
            )
        write_whole(path, "".join(lines))
    except OSError as error:
        raise FlexgenError(f"{path}: {error.strerror or error}") from error


# ---- The policies that are compared

# A budget is a share of the prompt's KV entries, of the whole sequence's, or of its bytes in bf16.
PROMPT = "prompt"
BYTES = "bytes"


@dataclass(frozen=True)
class Case:
    """One eviction policy of a given size."""

    # Name of the policy in tables.
    label: str
    eviction: Eviction
    # Share that is kept; 1.0 if the size was not given as a share.
    budget: float = 1.0
    # Placement and compression of the case's runs; None: those of the other cases.
    policy: Policy | AutoPolicy | None = None
    # The size as people write it ("32+32", "0.2", "at 20%"); "" for the full cache.
    size: str = ""
    # Output of the case's job, for commands that run jobs.
    output: Path = Path()

    @property
    def positions(self) -> str:
        """Position scheme of the policy, ROLLING or ORIGINAL."""
        return ROLLING if is_rolling(self.eviction) else ORIGINAL

    @property
    def title(self) -> str:
        """Label and size, by which summary.json knows a case that is a job."""
        return f"{self.label} {self.size}".strip()


def make_cells(
    policies: Sequence[str], budgets: Sequence[float], whole: bool = False, budgets_of: str = PROMPT
) -> list[Case]:
    """Return a case for each policy at each budget, ordered by budget.

    policies: names, or names with settings of their own: `h2o-norm:grace=8,sinks=0`. whole: the
    full cache is the first case. budgets_of: what budgets are shares of, PROMPT, BYTES or
    "sequence". Raise UsageError naming --policies or --budgets.
    """
    for name, given in (("--policies", policies), ("--budgets", budgets)):
        check_distinct(name, given)
    for budget in budgets:
        if not 0 < budget <= 1:
            of = "bytes" if budgets_of == BYTES else f"{budgets_of}'s KV entries"
            raise UsageError(f"--budgets: {budget} is not in (0, 1]; 0.2 keeps a fifth of the {of}")
    for policy in filter(says_budget, policies):
        raise UsageError(
            f"--policies {policy}: --budgets sets the size; leave kv_budget and kv_bytes out, and "
            "give --budgets-of"
        )
    found = [Case(Full.name, Full())] if whole else []
    for budget in budgets:
        half = budget / 2
        ratios = {"heavy_ratio": half, "recent_ratio": half}
        if budgets_of != PROMPT:
            ratios = {"kv_bytes" if budgets_of == BYTES else "kv_budget": budget}
        size = "" if budget == 1 else f"at {budget:.0%}"
        found += [
            Case(policy, eviction_named(policy, ratios), budget, size=size) for policy in policies
        ]
    return found


def make_cases(
    policies: Sequence[str], settings: Mapping[str, Any], sinks: int | None
) -> list[Case]:
    """Return a case for each policy. A name may have settings of its own (`h2o:positions=rolling`).

    settings: those of all policies except the full cache. Sizes among them are not passed to
    policies that have a kv_budget of their own. sinks: setting of the policies that have sinks.
    Raise UsageError naming --policies.
    """
    check_distinct("--policies", policies)
    cases = []
    for policy in policies:
        own = {k: v for k, v in settings.items() if k not in SIZES or not says_budget(policy)}
        name = policy.partition(":")[0]
        check_name(policy, f"--policies {policy}")
        kind = EVICTING.get(name)
        if (
            sinks is not None
            and kind is not None
            and "sinks" in {field.name for field in fields(kind)}
        ):
            own["sinks"] = sinks
        cases.append(Case(policy, Full() if policy == Full.name else eviction_named(policy, own)))
    return cases


def check_cases(llm: LLM, cases: Sequence[Case]) -> None:
    """Raise the errors of all cases, a wrong dtype's too, before anything is run or shown."""
    for case in cases:
        llm.eviction = case.eviction
        llm.check_plan()


# Fields of the flags that say how many KV entries stay, those of the papers' scripts among them.
SIZE_FIELDS = (
    "hh_size",
    "recent_size",
    "kv_budget",
    "window_size",
    "heavy_of_window",
    "script_size",
)


def given_sizes(args: argparse.Namespace) -> list[str]:
    """Return the fields of the size flags that were given."""
    return [name for name in SIZE_FIELDS if vars(args).get(name) is not None]


def check_sizes(args: argparse.Namespace, policies: Sequence[str]) -> None:
    """Raise UsageError if sizes or positions are given, and none of the policies takes them."""
    given = [args.given.get(name, flag_of(name)) for name in given_sizes(args)]
    others = [name for name in policies if name != Full.name]
    flags = [*given, *(["--positions"] if args.positions == ROLLING else [])]
    if flags and not others:
        raise UsageError(
            f"{flags[0]}: has no effect on the full cache; name another policy in --policies too"
        )
    if given and all(map(says_budget, others)):
        raise UsageError(
            f"{given[0]}: each of --policies has a budget of its own; leave one of them out"
        )


def window_sizes(args: argparse.Namespace, usual: int = -1) -> list[tuple[int, int]]:
    """Return the heavy and the recent KV entries of each window of llama-recipes' flags.

    A window contains both; -1 heavy ones are half of it. The result is [] without these flags.
    usual: heavy ones if only windows are given.
    """
    windows = vars(args).get("window_size")
    heavy = vars(args).get("heavy_of_window")
    if windows is None and heavy is None:
        return []
    if args.hh_size is not None or args.recent_size is not None:
        raise UsageError(
            "--num_window_length: --hh-size and --recent-size say the same; give one kind of them"
        )
    pairs = paired(
        "--num_heavy_hitter_tokens", heavy or [usual], "--num_window_length", windows or [256]
    )
    found = []
    for many, window in pairs:
        high = window // 2 if many == -1 else many
        if not 0 <= high < window:
            raise UsageError(
                f"--num_heavy_hitter_tokens {many}: must be from 0 to less than "
                f"--num_window_length {window}, which the recent KV entries are in too; or -1, "
                "half of it"
            )
        found.append((high, window - high))
    return found


def paired(
    flag: str, values: Sequence[int], other_flag: str, others: Sequence[int]
) -> list[tuple[int, int]]:
    """Return pairs of a value and an other value, in order.

    A single one is paired with all others.
    """
    most = max(len(values), len(others))
    both = [list(some) * most if len(some) == 1 else list(some) for some in (values, others)]
    if len(both[0]) != len(both[1]):
        raise UsageError(
            f"{flag} has {len(values)} sizes, {other_flag} {len(others)}; give as many of both, or "
            "one"
        )
    return list(zip(*both, strict=True))


def check_distinct(flag: str, given: Sequence[object]) -> None:
    """Raise UsageError naming `flag` if a value is given twice."""
    twice = next((one for i, one in enumerate(given) if one in given[:i]), None)
    if twice is not None:
        raise UsageError(f"{flag}: {twice} is given twice")


def eviction_named(policy: str, settings: Mapping[str, Any]) -> Eviction:
    """Return an eviction policy. Raise UsageError naming --policies."""
    try:
        return make_eviction(policy, **settings)
    except UsageError as error:
        raise UsageError(f"--policies {policy}: {str(error).removeprefix('eviction: ')}") from error


# ---- Flags of commands that follow rows


def add_row_flags(
    parser: OneLineParser, prompts: str, texts: str, lengths: tuple[int, int], keep_mem: str
) -> None:
    """Add the flags that choose the rows, and those of the bootstrap and of results.

    prompts, texts: help of --prompts and --num-prompts. lengths: default --prompt-len and
    --gen-len. keep_mem: default of --keep-mem.
    """
    prompt_len, gen_len = lengths
    add = parser.add_argument
    add("--prompts", type=file_name, metavar="FILE", help=prompts)
    add("--num-prompts", type=positive, metavar="N", help=texts)
    add(
        "--prompt-len",
        type=positive,
        default=prompt_len,
        metavar="N",
        help=f"tokens of a prompt ({prompt_len})",
    )
    add(
        "--gen-len",
        type=positive,
        default=gen_len,
        metavar="N",
        help=f"tokens that are followed after it ({gen_len})",
    )
    add_resamples_flag(parser)
    add("--seed", type=count, default=0, metavar="N", help="random seed of all that is drawn (0)")
    add(
        "--keep-mem",
        default=keep_mem,
        metavar="SIZE",
        help=f"RAM for what is kept of the full cache's run, beside --ram ({keep_mem})",
    )
    add_result_flags(parser)


def add_resamples_flag(parser: OneLineParser) -> None:
    """Add --resamples."""
    text = "number of bootstrap resamples (1000)"
    parser.add_argument("--resamples", type=positive, default=1000, metavar="N", help=text)


def add_continuation_flag(parser: OneLineParser) -> None:
    """Add --continuation."""
    text = "follow the text itself, or the model's own greedy answer (text)"
    parser.add_argument("--continuation", choices=("text", "greedy"), default="text", help=text)


def check_rows(args: argparse.Namespace, texts: int | None) -> None:
    """Check the flags of `add_row_flags`. Raise UsageError if one is wrong.

    texts: default --num-prompts if there is no --prompts.
    """
    if args.gen_len < 2:
        raise UsageError(
            f"--gen-len {args.gen_len}: the first token comes from the prefill; at least 2 are "
            "needed"
        )
    args.keep_mem = parse_bytes(args.keep_mem, "--keep-mem")
    check_results(args, ("prompts",))
    if args.num_prompts is None and args.prompts is None:
        args.num_prompts = texts


def refuse_sparse(
    policy: Policy, why: str = "works with the full cache alone, and others are compared here"
) -> None:
    """Raise UsageError if a policy reads a share of the KV cache."""
    if policy.attn_sparsity != 1:
        raise UsageError(f"--attn-sparsity: {why}; leave it out")


def add_rolling_flag(parser: OneLineParser) -> None:
    """Add --positions, and the name that llama-recipes has for one of its values."""
    text = "position scheme of every policy except full (original)"
    parser.add_argument("--positions", choices=(ORIGINAL, ROLLING), help=text)
    parser.add_argument(
        "--enable-position-rolling",
        dest="positions",
        action="store_const",
        const=ROLLING,
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )

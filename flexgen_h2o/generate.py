"""Answer prompts: print the answers, or write them to a file as a job that can be killed and
resumed."""

from __future__ import annotations

import argparse
import json
import sys
from collections import abc, deque
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexgen_h2o.cli_common import (
    check_separate,
    check_words,
    count,
    file_name,
    note,
    positive,
    results_are_in,
    run_cli,
)
from flexgen_h2o.core.errors import EXIT_DONE, UsageError
from flexgen_h2o.core.files import MAX_LINE_BYTES, open_regular, usable_path, write_whole
from flexgen_h2o.core.foreign_files import HEAD_BYTES, kind_of, where_else
from flexgen_h2o.core.settings import NEW_TOKENS
from flexgen_h2o.core.units import shortened
from flexgen_h2o.engine.prompts import check_output_path
from flexgen_h2o.flags import (
    SHOWN_OF_ENGINE,
    SHOWN_OF_SAMPLING,
    add_engine_flags,
    add_eviction_flags,
    add_max_tokens_flag,
    add_sampling_flags,
    add_template_flags,
    eviction_of,
    open_llm,
    policy_of,
    sampling_of,
    say_idle_flags,
    say_notes,
)
from flexgen_h2o.kvcache.prefixes import SHARINGS
from flexgen_h2o.parser import FILES, JOB, OneLineParser

if TYPE_CHECKING:
    from flexgen_h2o.core.settings import SamplingParams
    from flexgen_h2o.engine.sequence import Sequence
    from flexgen_h2o.jobs.requests import Request
    from flexgen_h2o.llm import LLM

RULE = "-" * 70
SYNOPSIS = "MODEL (-p TEXT ... | -i FILE [-o OUT.jsonl]) [flags]"
SHOWN = (
    *SHOWN_OF_ENGINE,
    *SHOWN_OF_SAMPLING,
    "--prompt",
    "--input",
    "--output",
    "--status",
    "--system",
    "--no-thinking",
    "--chat-template-kwargs",
    "--dry-run",
)
EXAMPLES = (
    'flexgen-h2o generate smollm2-135m -p "What is the capital of France?"',
    "flexgen-h2o generate Qwen/Qwen3-8B -i prompts.txt -o answers.jsonl --ram 8GiB",
    "flexgen-h2o generate Qwen/Qwen3-8B -i prompts.txt -o answers.jsonl --ram 8GiB --dry-run",
)


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return the exit code."""
    return run_cli("generate", _run, argv)


def _parser() -> OneLineParser:
    return job_parser("flexgen-h2o generate", __doc__)


def _run(argv: list[str] | None) -> int:
    return answer(_parser().parse_args(argv))


def job_parser(prog: str, doc: str | None) -> OneLineParser:
    """Return the parser of `generate` and its older names."""
    parser = OneLineParser(
        prog=prog, synopsis=SYNOPSIS, description=doc, shown=SHOWN, examples=EXAMPLES
    )
    add_engine_flags(parser)
    add = parser.section(FILES).add_argument
    add(
        "-p",
        "--prompt",
        action="append",
        metavar="TEXT",
        help="a prompt; may be repeated; one alone is streamed",
    )
    lines = ".txt, one prompt per line; .jsonl, one request per line"
    add("-i", "--input", type=file_name, metavar="FILE", help=lines)
    output = "write answers here (.jsonl); the same command resumes"
    add("-o", "--output", type=file_name, metavar="OUT", help=output)
    add("--system", metavar="TEXT", help="a system message before each text")
    add(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help='texts are messages in the model\'s chat template (if it has one; of {"prompt"} lines '
        "no)",
    )
    add(
        "--status",
        action="store_true",
        help="print how far the job that writes --output is, and end",
    )
    add_max_tokens_flag(parser, NEW_TOKENS, "most new tokens of an answer")
    add_sampling_flags(parser)
    add_template_flags(parser)
    _add_job_flags(parser)
    add_eviction_flags(parser)
    return parser


def _add_job_flags(parser: OneLineParser) -> None:
    add = parser.section(JOB).add_argument
    add("--force", action="store_true", help="resume an output that was begun with other settings")
    add(
        "--max-errors",
        type=count,
        metavar="N",
        help="end when more than N lines are errors (no limit)",
    )
    add(
        "--window",
        type=positive,
        metavar="N",
        help="prompts that are read ahead and sorted (1024, or 4 batches)",
    )
    add(
        "--refill",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a prompt that is done gives its place in the batch to the next one (on)",
    )
    add(
        "--share-prefix",
        choices=tuple(SHARINGS),
        default="auto",
        help="compute a common beginning once (auto)",
    )
    add(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="run on the Ray cluster at ADDRESS (or auto), one engine per actor; without ADDRESS "
        "on a Ray of its own",
    )
    add(
        "--ray-actors",
        type=positive,
        metavar="N",
        help="engines on Ray, each with the memory limits",
    )


# ---- The choice of what to do


def answer(args: argparse.Namespace, needs_output: bool = False) -> int:
    """Do what the flags of `job_parser` ask for. Return the exit code.

    needs_output: answers are never printed.
    """
    args.output = args.output and usable_path(args.output, "--output")
    if args.output is None and (args.status or (needs_output and not args.dry_run)):
        raise UsageError("--output: is missing; name the .jsonl file that the job writes")
    if args.status:
        return _show_status(args)
    if args.prompt and args.input is not None:
        raise UsageError("--prompt and --input: give one of them")
    check_words(prompt="".join(args.prompt or ()), system=args.system)
    if args.input is not None:
        args.input = _checked_input(args.input)
    elif needs_output and not args.prompt:
        raise UsageError("--input: is missing; name the .jsonl or .txt file with the prompts")
    if (args.input if args.dry_run else args.output) is not None:
        return _run_job(args)
    if args.output is None:
        _refuse_job_flags(args)
    return print_answers(args)  # or the plan of the prompts of the command line


def _show_status(args: argparse.Namespace) -> int:
    from flexgen_h2o.jobs.sidecar import read_status, status_lines

    if args.dry_run:
        raise UsageError("--status and --dry-run: give one of them")
    print("\n".join(status_lines(read_status(args.output))))
    say_idle_flags("batch --status", args)
    return EXIT_DONE


def _checked_input(path: Path) -> Path:
    elsewhere = where_else(str(path))
    path = usable_path(path, "--input")
    if elsewhere and not path.is_file():
        raise UsageError(f"--input {path}: {elsewhere}")
    if not path.exists():
        raise UsageError(f"--input {path}: does not exist; name a .jsonl or .txt file")
    if not path.is_file():
        raise UsageError(
            f"--input {path}: is not a file, and it is read more than once; save the prompts to a "
            "file"
        )
    try:
        with open_regular(path) as file:
            kind = kind_of(path, file.read(HEAD_BYTES))
    except OSError as error:
        raise UsageError(f"--input {path}: {error.strerror or error}") from error
    if kind is not None:
        raise UsageError(f"--input {path}: {kind}")
    return path


def _refuse_job_flags(args: argparse.Namespace) -> None:
    for field in ("force", "max_errors", "window", "ray", "ray_actors"):
        if field in args.given:
            raise UsageError(
                f"{args.given[field]}: is for answers that are written to a file; give --output "
                "OUT.jsonl"
            )


# ---- A job


def _run_job(args: argparse.Namespace) -> int:
    """Answer the prompts of --input, or of --prompt, in the file --output.

    The same command resumes it.
    """
    if args.ray_actors and args.ray is None:
        raise UsageError("--ray-actors: goes with --ray; give both")
    if args.ray is not None and (find_spec("ray") is None or find_spec("pyarrow") is None):
        raise UsageError("--ray: needs Ray Data; pip install -e '.[ray]' in a clone")
    if not args.dry_run:
        check_output_path(args.output)
        if args.input is None:
            args.input = _kept_prompts(_texts(args), args.output)
        results_are_in(args.output)
        _check_output(args)
    policy, is_auto = policy_of(args)
    defaults = sampling_of(args)
    eviction = eviction_of(args, policy)
    from flexgen_h2o.jobs.job import run_job

    return run_job(
        args, args.input, args.output, policy, is_auto, eviction, defaults, tests_bits=True
    )


def _kept_prompts(texts: abc.Sequence[str], output: Path) -> Path:
    """Write the prompts of the command line beside the output, where a resumed job finds them.

    Raise UsageError if other prompts, or something else, are there already.
    """
    path = output.with_name(f"{output.name}.prompts.jsonl")
    body = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    try:
        if not path.exists():
            write_whole(path, body, follow=False)
        elif path.read_bytes() != body.encode():
            raise UsageError(
                f"--prompt: {path} has other prompts, of another job; remove it, or give another "
                "--output"
            )
    except OSError as error:
        raise UsageError(f"--output {output}: {path}: {error.strerror or error}") from error
    return path


def _check_output(args: argparse.Namespace) -> None:
    from flexgen_h2o.jobs.sidecar import sidecar_path, status_path

    check_separate(args, ("input", "policy", "hardware"), ("output",))
    if args.input.resolve() in (
        path(args.output).resolve() for path in (sidecar_path, status_path)
    ):
        raise UsageError(
            f"--input {args.input}: is a file that the job writes beside --output; give another "
            "name"
        )


# ---- Printed answers


def print_answers(args: argparse.Namespace) -> int:
    """Print the answers in the order of the prompts. A single one is streamed."""
    policy, is_auto = policy_of(args)
    defaults = sampling_of(args)
    eviction = eviction_of(args, policy)
    texts = [] if args.input is not None else _texts(args)
    with open_llm(args, policy, is_auto, eviction) as llm:
        llm.share_prefix = args.share_prefix
        llm.check_plan()
        titles, requests = zip(*_titles_and_requests(args, llm, texts, defaults), strict=True)
        say_notes("generate", args, llm)
        for i, request in enumerate(requests):
            request.index = i
        chats = [one.kind == "chat" for one in requests]
        print_completions(llm, requests, titles, chats)
    return EXIT_DONE


def _texts(args: argparse.Namespace) -> list[str]:
    """Return the prompts of the command line or, if there are none, what is piped in as one."""
    return args.prompt or [standard_input("give -p TEXT, or -i FILE")]


def standard_input(advice: str) -> str:
    """Return what is piped in, as one prompt.

    advice: other ways to give a prompt, for the error.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError(f"--prompt: is missing; {advice}")
    data = sys.stdin.buffer.read(MAX_LINE_BYTES + 1)
    if len(data) > MAX_LINE_BYTES:
        raise UsageError(
            f"standard input: is longer than {MAX_LINE_BYTES // 2**20} MiB; shorten it"
        )
    try:
        text = data.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError("standard input: is not UTF-8 text; convert it to UTF-8") from error
    if not text:
        raise UsageError(f"standard input: is empty, and there is no other prompt; {advice}")
    return text


def _titles_and_requests(
    args: argparse.Namespace, llm: LLM, texts: abc.Sequence[str], defaults: SamplingParams
) -> Iterator[tuple[str, Request]]:
    """Yield the title and the request of each prompt.

    Raise UsageError naming the flag, or the file and its line, of one that cannot be run.
    """
    from flexgen_h2o.jobs.input import read_lines
    from flexgen_h2o.jobs.job import reader_of
    from flexgen_h2o.jobs.requests import RowError

    reader = reader_of(args, llm, defaults)
    place = ""
    try:
        for i, text in enumerate(texts, start=1):
            place = "--prompt" if args.prompt else "standard input"
            yield _title_of({"text": text}, i), reader.request({"text": text}, i, f"line-{i}")
        if args.input is not None:
            for line in read_lines(args.input):
                place = f"--input {args.input}:{line.number}"
                request = reader.read(line)
                yield _title_of(line.parse(), line.row + 1), request
    except RowError as error:
        raise UsageError(f"{place}: {error}") from error
    columns = reader.columns_text()
    if columns is not None:
        note("generate", columns)
    if not place:
        raise UsageError(f"--input {args.input}: no prompt in it, only blank lines or nothing")


def _title_of(value: Any, number: int) -> str:
    """Return the question that a line asks, on one line; `prompt NUMBER` if it has no text."""
    body = value.get("body", value)
    messages = body.get("messages") or [{}]
    texts = (body.get("text"), body.get("prompt"), messages[-1].get("content"))
    found = next((text for text in texts if isinstance(text, str)), f"prompt {number}")
    return shortened(" ".join(found.split()), len(RULE))


def print_completions(
    llm: LLM,
    sequences: abc.Sequence[Sequence],
    titles: abc.Sequence[str],
    chats: abc.Sequence[bool],
    echo: bool = False,
) -> list[Sequence]:
    """Print what will happen, then the answers in the order of the prompts, and return them.

    chats: whether each prompt is a chat's. An answer in a chat is printed as `chat` prints it, and
    returned without its reasoning.
    echo: each answer follows its prompt, in a chat after a blank line.

    A single answer is streamed. Of several, each has its title above it.
    """
    from flexgen_h2o.opening import opening_line

    llm.tests_bits = True
    llm.prepare(sequences)
    print(f"# {opening_line(llm, sequences, len(sequences))}", file=sys.stderr, flush=True)
    if len(sequences) == 1:
        _print_streamed(llm, sequences[0], chats[0], echo)
    else:
        _print_in_order(llm, sequences, titles, chats, echo)
    return list(sequences)


def _print_streamed(llm: LLM, sequence: Sequence, is_chat: bool, echo: bool) -> None:
    """Print the answer to a single prompt as it comes."""
    from flexgen_h2o.engine.channels import ChatText, keep_content
    from flexgen_h2o.engine.conversation import AnswerText
    from flexgen_h2o.engine.generation import Callbacks, Listener

    tokenizer = llm.model.tokenizer
    params = sequence.params
    ids = sequence.prompt_ids
    text = AnswerText(tokenizer, params.stop, ids, params.stop_token_ids)
    more = ChatText(tokenizer, params, ids).shown if is_chat else text.more

    def show(one: Sequence, is_over: bool = False) -> bool:
        print(more(one.token_ids, is_over), end="", flush=True)
        return True

    if echo:
        print(_echoed(sequence, is_chat), end="", flush=True)
    llm.run([sequence], callbacks=Callbacks(listener=Listener(), should_continue=show))
    show(sequence, is_over=True)
    print()
    if is_chat:
        keep_content(sequence, tokenizer)


def _print_in_order(
    llm: LLM,
    sequences: abc.Sequence[Sequence],
    titles: abc.Sequence[str],
    chats: abc.Sequence[bool],
    echo: bool,
) -> None:
    """Print each answer below its title as soon as those before it are printed."""
    from flexgen_h2o.engine.channels import ChatText, keep_content

    tokenizer = llm.model.tokenizer
    waiting = deque(enumerate(sequences))
    finished: set[int] = set()

    def show(done: list[Sequence]) -> None:
        finished.update(one.index for one in done)
        while waiting and waiting[0][1].index in finished:
            i, one = waiting.popleft()
            ids = one.prompt_ids
            sizes = f"{len(ids)} + {len(one.token_ids)} tokens, {one.finish_reason}"
            before = _echoed(one, chats[i]) if echo else ""
            text = _text_of(one.text, one.token_ids)
            if chats[i]:
                text = ChatText(tokenizer, one.params, ids).shown(one.token_ids, True)
                keep_content(one, tokenizer)
            print(f"{RULE}\n{titles[i]}: {sizes}\n{RULE}", flush=True)
            print(before + text, flush=True)

    llm.run(sequences, show, refill=True)


def _echoed(sequence: Sequence, is_chat: bool) -> str:
    """Return the prompt as it is printed before its answer: a message has a blank line after it."""
    text = _text_of(sequence.prompt, sequence.prompt_ids)
    return f"{text}\n\n" if is_chat else text


def _text_of(text: str | None, token_ids: abc.Sequence[int]) -> str:
    return "".join(f"{token} " for token in token_ids) if text is None else text


if __name__ == "__main__":
    sys.exit(main())

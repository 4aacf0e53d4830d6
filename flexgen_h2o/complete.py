"""Print prompts, each with what the model writes after it: an older name of `generate`, with raw
text by default."""

from __future__ import annotations

import sys
from typing import Any

from flexgen_h2o.cli_common import check_files, file_name, own_name, results_are_in, run_cli
from flexgen_h2o.core.errors import EXIT_DONE, UsageError
from flexgen_h2o.core.files import write_result
from flexgen_h2o.core.settings import NEW_TOKENS
from flexgen_h2o.engine.prompts import output_row
from flexgen_h2o.engine.sequence import with_params
from flexgen_h2o.flags import (
    SHOWN_OF_ENGINE,
    SHOWN_OF_SAMPLING,
    add_engine_flags,
    add_eviction_flags,
    add_max_tokens_flag,
    add_prompt_flags,
    add_sampling_flags,
    add_template_flags,
    eviction_of,
    naming_flags,
    open_llm,
    policy_of,
    prompts_of,
    sampling_of,
    say_notes,
)
from flexgen_h2o.generate import print_completions, standard_input
from flexgen_h2o.parser import FILES, OneLineParser

SHOWN = (
    *SHOWN_OF_ENGINE,
    *SHOWN_OF_SAMPLING,
    "--prompt",
    "--prompts",
    "--chat",
    "--no-thinking",
    "--report",
    "--dry-run",
)
EXAMPLES = (
    'flexgen-h2o complete -m smollm2-135m "The capital of France is"',
    'flexgen-h2o complete -m smollm2-135m --chat "What is the capital of France?"',
    "flexgen-h2o complete -m smollm2-135m --prompts prompts.txt --max-tokens 32",
)


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return the exit code."""
    return run_cli("complete", _run, argv)


def _parser() -> OneLineParser:
    prog = f"flexgen-h2o {own_name('complete')}"
    synopsis = "-m MODEL [PROMPT ...] [flags]"
    parser = OneLineParser(
        prog=prog, synopsis=synopsis, description=__doc__, shown=SHOWN, examples=EXAMPLES
    )
    add = parser.section(FILES).add_argument
    add(
        "texts",
        nargs="*",
        metavar="PROMPT",
        help="a prompt; without any, all of standard input is one",
    )
    add_prompt_flags(parser, "as PROMPT")
    add(
        "--chat",
        action="store_true",
        help="each prompt is a user's message, put into the model's chat template",
    )
    add(
        "--report",
        dest="json",
        type=file_name,
        metavar="FILE",
        help="write prompts, texts and tokens",
    )
    add_max_tokens_flag(parser, NEW_TOKENS, "most new tokens of an answer")
    add_sampling_flags(parser)
    add_template_flags(parser)
    add_engine_flags(parser, positional=False)
    add_eviction_flags(parser)
    return parser


def _run(argv: list[str] | None) -> int:
    args = _parser().parse_args(argv)
    texts = [*args.texts, *(args.prompt or [])]
    if texts and args.prompts is not None:
        raise UsageError("--prompts and prompts on the command line: give one of them")
    check_files(args, ("prompts",), ("json",))
    results_are_in(args.json)
    policy, is_auto = policy_of(args)
    params = sampling_of(args)
    eviction = eviction_of(args, policy)
    if not texts and args.prompts is None:
        texts = [standard_input("give PROMPT, or --prompts FILE")]
    with open_llm(args, policy, is_auto, eviction) as llm:
        llm.check_plan()
        prompts = prompts_of(args, llm.model, texts)
        if args.chat:
            params = llm.model.for_chat(params)
        say_notes("complete", args, llm)
        titles = [f"prompt {one.index}" for one in prompts]
        # Name the flag if a prompt is longer than the model's positions.
        with naming_flags(**{f"prompts[{i}]": "--prompt" for i in range(len(texts))}):
            n = len(prompts)
            sequences = with_params(prompts, [params] * n)
            done = print_completions(llm, sequences, titles, [args.chat] * n, echo=True)
        facts: dict[str, Any] = {
            "model": llm.model.name,
            "dtype": llm.dtype,
            "eviction": eviction.to_json(),
        }
    if args.json is not None:
        write_result(args.json, {**facts, "rows": [output_row(one) for one in done]}, "--json")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())

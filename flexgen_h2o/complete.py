"""`python -m flexgen_h2o.complete`: one's own prompts, each with what the model writes after it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flexgen_h2o.cli_common import (
    OneLineParser,
    check_files,
    file_name,
    own_name,
    positive,
    results_are_in,
    run_cli,
    say,
)
from flexgen_h2o.core.errors import EXIT_DONE, UsageError
from flexgen_h2o.core.files import MOST_LINE_BYTES, write_result
from flexgen_h2o.engine.prompts import Completion, Prompt, output_row
from flexgen_h2o.flags import (
    add_engine_flags,
    add_eviction_flags,
    add_prompt_flags,
    add_sampling_flags,
    eviction_of,
    naming_flags,
    open_llm,
    policy_of,
    prompts_of,
    sampling_of,
    say_notes,
)
from flexgen_h2o.kvcache.eviction.policy import most_new_tokens

if TYPE_CHECKING:
    import torch

    from flexgen_h2o.core.settings import SamplingParams
    from flexgen_h2o.engine.conversation import AnswerText
    from flexgen_h2o.llm import LLM

RULE = "-" * 70
GEN_LEN = 64


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return run_cli("complete", _run, argv)


def _parser() -> OneLineParser:
    parser = OneLineParser(prog=own_name("complete"), description=__doc__)
    add = parser.add_argument
    add("texts", nargs="*", metavar="PROMPT", help="a prompt; without any, all of standard input is one")
    add_prompt_flags(parser, "as PROMPT")
    add("--chat", action="store_true", help="each prompt is a user's message, put into the model's chat template")
    add("--gen-len", type=positive, default=GEN_LEN, help=f"most new tokens of a prompt ({GEN_LEN})")
    add("--json", type=file_name, help="write prompts, texts and tokens")
    add_sampling_flags(parser)
    add_engine_flags(parser)
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
    params, eviction = sampling_of(args), eviction_of(args, policy)
    if not texts and args.prompts is None:
        texts = [_standard_input()]
    with open_llm(args, policy, is_auto, eviction) as llm:
        llm.check_plan()
        prompts = prompts_of(args, llm.model, texts)
        say_notes("complete", args, llm)
        with naming_flags(**{f"prompts[{i}]": "--prompt" for i in range(len(texts))}):  # longer than the positions
            llm.prepare(prompts, [params] * len(prompts))
            done = (_one if len(prompts) == 1 else _several)(llm, prompts, params)
        facts: dict[str, Any] = {"model": llm.model.name, "dtype": llm.dtype, "eviction": eviction.to_json()}
    if args.json is not None:
        write_result(args.json, {**facts, "rows": [output_row(one) for one in done]}, "--json")
    return EXIT_DONE


def _standard_input() -> str:
    if sys.stdin is None:
        raise UsageError("PROMPT: is missing, and standard input is closed; give one")
    if sys.stdin.isatty():
        say("complete", "reads a prompt from standard input, up to Ctrl-D")
    data = sys.stdin.buffer.read(MOST_LINE_BYTES + 1)
    if len(data) > MOST_LINE_BYTES:
        raise UsageError(f"standard input: is longer than {MOST_LINE_BYTES // 2**20} MiB; shorten it")
    try:
        text = data.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError("standard input: not UTF-8 text") from error
    if not text:
        raise UsageError("standard input: is empty; give a prompt there, as PROMPT, or in --prompts FILE")
    return text


class _Printed:
    """An audience that prints the answer as it comes. reason: why it ended."""

    def __init__(self, text: AnswerText) -> None:
        self.token_ids: list[int] = []
        self.reason: str | None = None
        self._text = text

    def given(self, token: int, logits: torch.Tensor) -> None:
        pass

    def said(self, token: int, reason: str | None) -> None:
        self.token_ids.append(token)
        self.reason = reason
        print(self._text.more(self.token_ids, reason is not None), end="", flush=True)


def _one(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
    """The completion of the one prompt, printed behind it as it comes: a conversation of one turn."""
    from flexgen_h2o.engine.conversation import AnswerText, Conversation
    from flexgen_h2o.engine.decoding import StopCriteria
    from flexgen_h2o.engine.generation import Callbacks, Silent

    [prompt], model = prompts, llm.model
    ends = StopCriteria(params.stop, () if params.ignore_eos else model.spec.eos_token_ids, model.tokenizer)
    printed = _Printed(AnswerText(model.tokenizer, params.stop))
    room = most_new_tokens(llm.eviction, model.spec, len(prompt.token_ids), params.max_tokens)
    asked = replace(params, max_tokens=room)
    talk = Conversation(prompt.token_ids, iter(()), asked, ends, printed, room, max_tokens_per_sweep=1)
    print(_text_of(prompt.text, prompt.token_ids), end="", flush=True)
    llm.run([talk.prompt], talk, lambda done: None, Callbacks(listener=Silent()))
    print()
    text, reason = ends.text(printed.token_ids), printed.reason or "length"
    return [Completion(0, prompt.text, text, printed.token_ids, reason)]


def _several(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
    """All completions in the order of the prompts, each printed behind its own as soon as those before it are."""
    done: dict[int, Completion] = {}
    shown: list[Completion] = []

    def show(found: list[Completion]) -> None:
        done.update({one.index: one for one in found})
        while len(shown) in done:
            one, prompt = done[len(shown)], prompts[len(shown)]
            head = f"prompt {one.index}: {len(prompt.token_ids)} + {len(one.token_ids)} tokens, {one.finish_reason}"
            text = _text_of(prompt.text, prompt.token_ids) + _text_of(one.text, one.token_ids)
            print(f"{RULE}\n{head}\n{RULE}\n{text}", flush=True)
            shown.append(one)

    llm.run(prompts, params, show, refill=True)
    return shown


def _text_of(text: str | None, token_ids: Sequence[int]) -> str:
    return "".join(f"{token} " for token in token_ids) if text is None else text


if __name__ == "__main__":
    sys.exit(main())

"""Talk to a model. Its KV cache is kept from turn to turn.

A turn is a line of standard input, typed or piped. Answers go to standard output, everything else
to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections import abc
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flexgen_h2o.cli_common import check_files, check_words, own_name, positive, run_cli, say
from flexgen_h2o.core import interrupts
from flexgen_h2o.core.config import DTYPE_BYTES
from flexgen_h2o.core.errors import EXIT_DONE, EXIT_USAGE, DoesNotFitError, FlexgenError, UsageError
from flexgen_h2o.core.files import MAX_LINE_BYTES, write_result
from flexgen_h2o.core.settings import NEW_TOKENS, ORIGINAL, EvictionSettings
from flexgen_h2o.core.units import aligned, format_bytes, format_seconds
from flexgen_h2o.flags import (
    EVICTION_FLAGS,
    SHOWN_OF_ENGINE,
    SHOWN_OF_SAMPLING,
    add_engine_flags,
    add_eviction_flags,
    add_max_tokens_flag,
    add_sampling_flags,
    add_template_flags,
    compression_flags,
    eviction_of,
    open_llm,
    policy_of,
    sampling_of,
    say_notes,
    turn_format,
    value_of,
)
from flexgen_h2o.kvcache.eviction.policy import is_rolling, most_new_tokens
from flexgen_h2o.parser import FILES, OneLineParser

if TYPE_CHECKING:
    from flexgen_h2o.core.config import Policy
    from flexgen_h2o.core.settings import SamplingParams
    from flexgen_h2o.engine.conversation import Conversation
    from flexgen_h2o.evaluation.conversation import Turn
    from flexgen_h2o.kvcache.eviction import Eviction
    from flexgen_h2o.llm import LLM

SHOWN = (
    *SHOWN_OF_ENGINE,
    *SHOWN_OF_SAMPLING,
    "--system",
    "--no-thinking",
    "--chat-template-kwargs",
    "--max-len",
    "--eviction",
    "--dry-run",
)
EXAMPLES = (
    "flexgen-h2o chat smollm2-135m",
    'flexgen-h2o chat Qwen/Qwen3-8B --ram 8GiB --system "You answer in one sentence."',
    "flexgen-h2o chat smollm2-135m --eviction h2o --positions rolling < turns.txt",
)
# Heavy KV entries if an eviction policy is given without a size, as in `evaluate streaming`.
SIZE = 128
# The engine opens for a first turn of this many tokens. A longer one opens it again.
FIRST_TURN = 512
# Tokens of a conversation without end, as rolling positions allow it, and tokens that an engine is
# opened for.
ENDLESS = 2**30
PLANNED = 4096
SAVED = (".txt", ".json", ".jsonl")
COMMANDS = (
    ("/reset", "begin anew: nothing is kept of what was said"),
    (
        "/save FILE",
        "write the conversation: .txt to be read, .json with all figures, .jsonl as --turns takes "
        "it",
    ),
    ("/memory", "what the conversation holds"),
    ("/help", "these lines"),
    ("/quit", "end, as Ctrl-D does"),
)
HELP = "\n".join([*aligned(COMMANDS), "//TEXT says /TEXT; Ctrl-C ends an answer"])


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return the exit code, which is 2 if a piped line was not answered."""
    return run_cli("chat", _run, argv)


def _parser() -> OneLineParser:
    prog = f"flexgen-h2o {own_name('chat')}"
    parser = OneLineParser(
        prog=prog, synopsis="MODEL [flags]", description=__doc__, shown=SHOWN, examples=EXAMPLES
    )
    add_engine_flags(parser)
    add_eviction_flags(parser)
    add_sampling_flags(parser)
    add_template_flags(parser)
    add_max_tokens_flag(parser, NEW_TOKENS, "most tokens of an answer")
    add = parser.section(FILES).add_argument
    add("--system", metavar="TEXT", help="what the conversation begins with, before the first turn")
    add(
        "--turn-format",
        type=turn_format,
        metavar="TEXT",
        help=r"what a turn becomes, at {turn} (the model's chat template; without one "
        r"'\n{turn}\n'); \n is a newline",
    )
    add(
        "--max-len",
        type=positive,
        metavar="N",
        help="most tokens of a conversation (the model's positions; with --positions rolling no "
        "limit)",
    )
    return parser


def _run(argv: list[str] | None) -> int:
    args = _parser().parse_args(argv)
    check_words(system=args.system, turn_format=args.turn_format)
    policy, is_auto = policy_of(args)
    params = sampling_of(args)
    eviction = _eviction(args, policy)
    with open_llm(args, policy, is_auto, eviction) as llm:
        if llm.model.tokenizer is None:
            raise UsageError(
                f"--model {llm.model.name}: has no tokenizer, which a conversation needs; give a "
                "folder with one"
            )
        params = llm.model.generation.for_drawing(params)
        llm.check_plan()
        say_notes("chat", args, llm)
        return Chat(args, llm, params).run()


def _eviction(args: argparse.Namespace, policy: Policy) -> Eviction:
    """Do what `eviction_of` does, but in numbers of KV entries.

    A conversation has no prompt to take a share of.
    """
    given = [
        f
        for f in fields(EvictionSettings)
        if value_of(args, EVICTION_FLAGS[f.name]) not in (None, ORIGINAL)
    ]
    share = next((EVICTION_FLAGS[f.name] for f in given if f.metadata.get("share")), None)
    if share is not None:
        raise UsageError(
            f"{share} {value_of(args, share)}: the length of a conversation is not known; give "
            "numbers of KV entries, with --hh-size and --recent-size"
        )
    if args.hh_size is None and (given if args.eviction is None else args.eviction != "full"):
        args.hh_size = SIZE
    return eviction_of(args, policy)


class Reader:
    """Reads lines of standard input.

    `is_terminal` says whether lines are typed after a prompt; otherwise they come through a pipe.
    `is_waiting` says whether a typed line is awaited.
    """

    def __init__(self) -> None:
        self.is_terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
        self.number = 0
        self.is_waiting = False
        if self.is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - lines can be edited then

    def line(self) -> str | None:
        """Return the next line without its end, or None after the last.

        Raise UsageError if it is not UTF-8 text.
        """
        self.number += 1
        try:
            return self._typed() if self.is_terminal else self._piped()
        except UnicodeDecodeError as error:
            raise UsageError("is not UTF-8 text; write it in UTF-8") from error

    def _typed(self) -> str | None:
        while True:
            self.is_waiting = True
            try:
                return input("> ")
            except EOFError:
                print()
                return None
            except KeyboardInterrupt:  # what was typed is dropped
                print()
            finally:
                self.is_waiting = False

    def _piped(self) -> str | None:
        if sys.stdin is None:
            return None
        lines = sys.stdin.buffer
        line = piece = lines.readline(MAX_LINE_BYTES + 1)
        if len(line) > MAX_LINE_BYTES:
            while piece and not piece.endswith(b"\n"):
                piece = lines.readline(MAX_LINE_BYTES)
            raise UsageError(f"is longer than {MAX_LINE_BYTES // 2**20} MiB")
        return line.decode("utf-8").rstrip("\r\n") if line else None


class Chat:
    """Conversations one after the other.

    Each is a run of the engine that waits for every next turn.
    """

    def __init__(self, args: argparse.Namespace, llm: LLM, params: SamplingParams) -> None:
        self._args = args
        self._llm = llm
        self._chat = args.turn_format is None and llm.model.has_chat_template
        self._params = llm.model.for_chat(params) if self._chat else params
        self._reader = Reader()
        self._turns: list[Turn] = []
        self._answered: list[Turn] = []
        self._left = 0  # tokens that the next turn and its answer have room for
        self._is_over = self._is_reset = self._answers = self._stops = False
        self._refused = 0

    def run(self) -> int:
        """Hold conversations up to the last line, and return the exit code."""
        # A prediction of such a long run would take longer than it is worth.
        self._llm.planner.job_rows = 1
        self._open([0] * min(FIRST_TURN, self._most_first))
        if self._reader.is_terminal:
            self._say(f"{self._title()}; /help lists what else can be typed")
        with interrupts.asking_first(self._is_taken):
            while not self._is_over:
                self._turns = []
                self._answered = []
                self._is_reset = False
                self._left = self._most_first + 1
                first = self._next_turn()
                if first is not None:
                    self._converse(first)
        return EXIT_USAGE if self._refused and not self._reader.is_terminal else EXIT_DONE

    def _is_taken(self) -> bool:
        """Handle SIGINT: drop a line that is being typed, or end an answer.

        Return whether that was done. Sent again, it ends the chat.
        """
        if self._reader.is_waiting:
            raise KeyboardInterrupt
        taken = self._answers and not self._stops
        self._stops = True
        return taken

    # A conversation

    @property
    def _most_first(self) -> int:
        """The most tokens of a first turn, which is attended to as a whole even with rolling
        positions.
        """
        return min(self._llm.model.spec.max_positions, self._args.max_len or ENDLESS)

    def _talk(self, first: abc.Sequence[int], most: int) -> Conversation:
        """Return a conversation of at most `most` tokens."""
        from flexgen_h2o.engine.conversation import Conversation
        from flexgen_h2o.engine.decoding import stop_criteria
        from flexgen_h2o.engine.penalties import penalties_of
        from flexgen_h2o.evaluation.conversation import Shown

        params = self._params
        model = self._llm.model
        ends = stop_criteria(model, params)
        self._shown = Shown(self._llm, first, params, _write, self._show_figures)
        asked = max(1, min(most, self._args.max_len or most) - len(first) + 1)
        room = most_new_tokens(self._llm.eviction, model.spec, len(first), asked)
        penalties = partial(penalties_of, model, params)
        talk = Conversation(
            first, self._later(), params, ends, self._shown, room, penalties=penalties
        )
        talk.is_stopped = lambda: self._stops
        return talk

    def _open(self, first: abc.Sequence[int]) -> None:
        """Open the engine for a first turn, if it is not open for one. Raise DoesNotFitError."""
        most = max(PLANNED, self._llm.model.spec.max_positions)
        talk = self._talk(first, most)
        try:
            self._llm.prepare([talk.sequence])
        except DoesNotFitError as error:
            if self._llm.eviction.needs.record:  # the KV cache does not grow
                raise
            raise DoesNotFitError(
                f"{error}; or give --max-len, below {len(first) + talk.room - 1}"
            ) from error

    def _converse(self, first: abc.Sequence[int]) -> None:
        """Answer a first turn, and all that follow."""
        from flexgen_h2o.engine.generation import Callbacks, Listener

        try:
            self._open(first)
        except DoesNotFitError as error:
            self._refuse(error)
            return
        self._now = talk = self._talk(first, ENDLESS)
        self._answered = self._shown.turns
        self._shown.begin(self._turns[0])
        self._llm.run([talk.sequence], callbacks=Callbacks(listener=Listener()))
        if not (self._is_over or self._is_reset):
            self._shown.break_off()
            self._left = 0
            say("chat", self._no_room(0))
            self._next_turn()  # only commands work now

    def _later(self) -> Iterator[abc.Sequence[int]]:
        """Yield the turns after the first. Each is read when the answer before it is over."""
        while True:
            self._left = self._now.left
            turn = self._next_turn()
            if turn is None:
                return
            self._shown.begin(self._turns[-1])
            yield turn

    # Lines

    def _next_turn(self) -> abc.Sequence[int] | None:
        """Return the next line that is a turn with room for it, as token ids.

        None if the conversation ends.
        """
        self._answers = self._stops = False
        while not (self._is_over or self._is_reset):
            try:
                line = self._reader.line()
                if line is None:
                    self._is_over = True
                elif line.startswith("/") and not line.startswith("//"):
                    self._do(*line.partition(" ")[::2])
                elif line.strip():
                    self._answers = True
                    return self._encoded(line[1:] if line.startswith("//") else line)
            except (FlexgenError, ValueError) as error:  # ValueError: the chat template refuses it
                self._answers = self._stops = False
                self._refuse(error)
        return None

    def _encoded(self, line: str) -> abc.Sequence[int]:
        from flexgen_h2o.evaluation.conversation import Turn, encoded_turn

        args = self._args
        turns = [*self._turns, Turn(line)]
        turn = encoded_turn(turns, self._llm.model, args.turn_format, self._chat, args.system)
        if len(turn) >= self._left:  # a token of the answer needs room too
            raise UsageError(self._no_room(len(turn)))
        self._turns = turns
        return turn

    def _no_room(self, tokens: int) -> str:
        """Return why a turn of `tokens` tokens is refused, and what to do.

        tokens: 0 if an answer ended because there is no more room.
        """
        spec = self._llm.model.spec
        most = self._args.max_len
        rolls = is_rolling(self._llm.eviction)
        is_asked = most is not None and (most <= spec.max_positions or (rolls and self._turns))
        limit = (
            f"the {most} tokens of --max-len"
            if is_asked
            else f"the {spec.max_positions} positions of {spec.name}"
        )
        if not self._turns:
            return f"a turn of {tokens} tokens is longer than {limit}; shorten it"
        ways = "/reset begins anew, /save FILE keeps what was said"
        if spec.rotary is not None and not is_asked and not rolls:
            ways += "; a chat with --positions rolling goes on"
        if not self._left:
            return f"{limit} are used up: {ways}"
        return (
            f"a turn of {tokens} tokens has no room in the {self._left} that are left of "
            f"{limit}: {ways}"
        )

    def _refuse(self, error: Exception) -> None:
        """Print what was wrong with a line. The conversation is as it was before."""
        where = (
            "" if self._reader.is_terminal else f"line {self._reader.number} of standard input: "
        )
        say("chat", f"{where}{error}".replace("\n", " "))
        self._refused += 1

    # Commands

    def _do(self, command: str, rest: str) -> None:
        """Run a command. Raise UsageError if there is no such command."""
        if command == "/save":
            self._save(rest.strip())
        elif rest.strip() or command not in dict(COMMANDS):
            raise UsageError(
                f"{command} {rest}".strip() + ": is not a command; /help lists the commands"
            )
        elif command == "/help":
            self._say(HELP)
        elif command == "/memory":
            self._say(self._memory())
        else:
            self._is_over = command == "/quit"
            self._is_reset = command == "/reset"
            if self._is_reset:
                self._say("[begun anew]")

    def _save(self, name: str) -> None:
        if not name or not self._answered:
            raise UsageError(
                "/save: " + ("nothing was said yet" if name else "name a file: /save FILE")
            )
        asked = argparse.Namespace(**{**vars(self._args), "save": Path(name)})
        if asked.save.suffix not in SAVED:
            raise UsageError(f"/save {name}: the file name must end in one of {', '.join(SAVED)}")
        try:
            check_files(asked, (), ("save",))
        except UsageError as error:
            raise UsageError(str(error).replace("--save", "/save", 1)) from error
        llm = self._llm
        turns = [one.figures(llm.model, self._params) for one in self._answered]
        facts = {"model": llm.model.name, "dtype": llm.dtype, "eviction": llm.eviction.to_json()}
        content: object = {**facts, "system": self._args.system, "turns": turns}
        if asked.save.suffix == ".txt":
            content = "\n".join(f"> {one['prompt']}\n{one['text']}\n" for one in turns)
        elif asked.save.suffix == ".jsonl":
            texts = {
                "turns": [one["prompt"] for one in turns],
                "answers": [one["text"] for one in turns],
            }
            content = json.dumps({**facts, "system": self._args.system, **texts}) + "\n"
        write_result(asked.save, content, "/save")
        self._say(f"{len(turns)} turns are in {asked.save}")

    # Output

    def _memory(self) -> str:
        llm = self._llm
        tokens = sum(one.tokens + len(one.answer) for one in self._answered)
        now = self._answered[-1] if self._answered else None
        held = f"{now.columns:.4g} KV entries, {format_bytes(now.kv_bytes)}" if now else "nothing"
        tiers = ", ".join(f"{tier} {format_bytes(n)}" for tier, n in llm.peak_bytes.items())
        return (
            f"{self._title()}\nturns: {len(self._answered)}, of {tokens} tokens; KV cache: "
            f"{held}, of "
            f"{format_bytes(tokens * llm.model.spec.kv_bytes_per_token(DTYPE_BYTES[llm.dtype]))} "
            "for all tokens "
            f"in {llm.dtype}; the engine holds {tiers}"
        )

    def _title(self) -> str:
        from flexgen_h2o.evaluation.rows import Case
        from flexgen_h2o.evaluation.streaming import title

        eviction = self._llm.eviction
        policy = self._llm.policy
        assert policy is not None
        return (
            f"{self._llm.model.name}, "
            f"{title(Case(eviction.name, eviction), compression_flags(policy))}"
        )

    def _show_figures(self, now: Turn) -> None:
        """Print the figures of an answer that is over."""
        _write("\n")
        speed = (
            f"{len(now.answer)} tokens in {format_seconds(now.seconds)}, "
            f"{len(now.answer) / now.seconds:.1f} a second"
        )
        held = f"KV {now.columns:.4g} entries, {format_bytes(now.kv_bytes)}"
        self._say(f"[{held}; {speed}; {now.reason or 'broken off'}]")

    @staticmethod
    def _say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def _write(text: str) -> None:
    print(text, end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())

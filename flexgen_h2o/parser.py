"""Parse every command line: errors of one line, flags in sections, a short and a long help.

This module imports nothing heavy, so that `--help` and errors in flags appear at once.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NoReturn

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.units import shortened
from flexgen_h2o.synonyms import ADVICE, SAME, SWITCHED_BY

MODEL = "Model"
FILES = "Input and output"
SAMPLING = "Sampling"
MEMORY = "Memory"
KV = "Smaller KV cache"
JOB = "Job, expert"
PLACEMENT_FLAGS = "Placement, expert"
EVICTION = "Eviction, expert"
OWN = ("positional arguments", "options")  # argparse's titles for what is in no other section
WORKLOAD = "Workload"
BENCHMARK = "Benchmark"
HELP = "Help"
HELP_ALL = "--help-all"
SECTIONS = (
    MODEL,
    *OWN,
    WORKLOAD,
    FILES,
    BENCHMARK,
    SAMPLING,
    MEMORY,
    KV,
    JOB,
    PLACEMENT_FLAGS,
    EVICTION,
    HELP,
)

_MAX_QUOTED = 60  # characters that are quoted of a word of the command line
_HELP_COLUMN = 24  # column in which the explanations begin

_NO_VALUE = re.compile(r"argument (\S+): expected (?:one|at least one) argument")
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
# Flags of the running command, as messages have them -> as the user knows them.
_spelled: dict[str, str] = {}


def as_typed(message: str) -> str:
    """Return the message with each flag as it was typed, or else as the command's help has it."""
    return _FLAG.sub(lambda found: _spelled.get(found[0], found[0]), message)


def forget_spellings() -> None:
    """Forget how flags were spelled, because another command begins."""
    _spelled.clear()


def _main_name(action: argparse.Action) -> str:
    """Return the flag's first long name."""
    return next(
        (name for name in action.option_strings if name.startswith("--")), action.option_strings[0]
    )


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Shows a flag once, with one value: `-o, --output FILE`."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=_HELP_COLUMN)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = ", ".join(action.option_strings)
        if action.nargs == 0:
            return names
        return f"{names} {self._format_args(action, action.dest.upper())}"


class OneLineParser(argparse.ArgumentParser):
    """Parses a command's flags. Wrong ones end with one line on stderr and exit code 2.

    The namespace also has `given`: the flags that were on the command line, by field. Flags cannot
    be abbreviated.

    synopsis: what follows the command's name in its usage line.
    shown: the flags that `--help` shows; `--help-all` shows the others too. Empty: all are shown.
    examples: command lines for the end of the help.
    """

    def __init__(
        self,
        *args: Any,
        synopsis: str = "[flags]",
        shown: Sequence[str] = (),
        examples: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        kwargs = {"allow_abbrev": False, "add_help": False, "formatter_class": _Formatter, **kwargs}
        super().__init__(*args, **kwargs)
        self.synopsis = synopsis
        self.shown = frozenset(shown)
        self.examples = tuple(examples)
        self._sections: dict[str, argparse._ArgumentGroup] = {}
        self._model_is_positional = False
        self._given: dict[str, str] = {}
        # Words of the command line that are too long to be quoted whole.
        self._words: set[str] = set()
        self._line: list[str] = []  # all words of the command line
        self._model: str | None = None  # the model that a flag names
        self._negative_number_matcher = re.compile(r"-\.?\d")  # -5GiB is a wrong value, not a flag
        add = self.section(HELP).add_argument
        add("-h", "--help", action="help", help="show this help")
        if shown:
            add(HELP_ALL, action="help", help="show every flag")

    # ---- Flags

    def section(self, title: str) -> argparse._ArgumentGroup:
        """Return the group of flags with this title; its first use makes it."""
        if title not in self._sections:
            self._sections[title] = self.add_argument_group(title)
        return self._sections[title]

    @property
    def spellings(self) -> dict[str, argparse.Action]:
        """The flags by every name that is accepted, those of SAME among them."""
        table = self._option_string_actions
        for action in self._actions:
            for name in action.option_strings:
                for other in SAME.get(name, ()):
                    table.setdefault(other, action)
        return table

    def take_positional_model(self) -> None:
        """Accept the one word that belongs to no flag as --model."""
        self._model_is_positional = True

    # ---- Help

    def format_usage(self) -> str:
        return f"usage: {self.prog} {self.synopsis}\n"

    def format_help(self) -> str:
        """Return the help of the `shown` flags, or of every flag if --help-all asks for it."""
        shown = frozenset() if HELP_ALL in self._line else self.shown
        formatter = self._get_formatter()
        formatter.add_usage(f"{self.prog} {self.synopsis}", self._actions, [])
        formatter.add_text(self.description)
        order = {title: i for i, title in enumerate(SECTIONS)}
        groups = sorted(
            self._action_groups, key=lambda group: order.get(str(group.title), len(order))
        )
        for group in groups:
            actions = [
                a
                for a in group._group_actions
                if not shown or group.title == HELP or not shown.isdisjoint(a.option_strings)
            ]
            if any(a.help is not argparse.SUPPRESS for a in actions):
                formatter.start_section(group.title)
                formatter.add_text(group.description)
                formatter.add_arguments(actions)
                formatter.end_section()
        if self.examples:
            formatter.add_text("\n".join(["Examples:", *(f"  {line}" for line in self.examples)]))
        formatter.add_text(self.epilog)
        return formatter.format_help()

    # ---- Parsing

    def error(self, message: str) -> NoReturn:
        message += self._remedy(message)
        for word in sorted(self._words, key=len, reverse=True):
            for quoted in (word, repr(word)[1:-1]):
                message = message.replace(quoted, shortened(quoted, _MAX_QUOTED))
        raise UsageError(message)

    def _remedy(self, message: str) -> str:
        """Return how to give a value that was read as a flag. Empty for other errors."""
        found = _NO_VALUE.fullmatch(message)
        if found is None:
            return ""
        table = self._option_string_actions
        for word, value in pairwise(self._line):
            action = table.get(word)
            if (
                action is None
                or "/".join(action.option_strings) != found[1]
                or value.partition("=")[0] in table
            ):
                continue
            if value.startswith("-"):
                return (
                    "; a value that begins with a hyphen stands behind an equals sign: "
                    f"{_main_name(action)}={value}"
                )
        return ""

    # Also called for the parser of a sub-command.
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        table = self.spellings
        words = [self._known_spelling(word) for word in (sys.argv[1:] if args is None else args)]
        if self._begins_with_model(words):
            words.insert(0, "--model")
        self._line = words
        self._given = {}
        self._model = None
        given = [part for word in words for part in (word, word.partition("=")[2])]
        self._words = {part for part in given if len(part) > _MAX_QUOTED}
        self._note_spellings(words)
        if self._subparsers is None:  # otherwise the flags are a sub-command's
            for word in words:  # before argparse reads `-ot` as `-o t`
                if word in ADVICE and word not in table:
                    self.error(self._advice(word))
        found, unknown = super().parse_known_args(words, namespace)
        if self._model_is_positional:
            self._take_positional_model(found, unknown)
        if unknown:
            self.error(
                self._advice(next((word for word in unknown if word.startswith("-")), unknown[0]))
            )
        found.given = {**getattr(found, "given", {}), **self._given}
        return found, unknown

    def _begins_with_model(self, words: Sequence[str]) -> bool:
        """Return whether the first word is MODEL, where argparse would look for a sub-command.

        The sub-command may be left out.
        """
        if (
            self._subparsers is None
            or not self._model_is_positional
            or not words
            or words[0].startswith("-")
        ):
            return False
        return all(
            words[0] not in (action.choices or ()) for action in self._subparsers._group_actions
        )

    def _known_spelling(self, word: str) -> str:
        """Return the word with hyphens for the underscores of an unknown flag."""
        flag, equals, value = word.partition("=")
        hyphenated = flag.replace("_", "-")
        table = self._option_string_actions
        is_known = flag in table or hyphenated not in table
        return word if is_known else f"{hyphenated}{equals}{value}"

    def _note_spellings(self, words: Sequence[str]) -> None:
        """Remember how each flag is spelled on this command line, for `as_typed`."""
        table = self._option_string_actions
        typed = {word.partition("=")[0] for word in words}
        for action in self._actions:
            if not action.option_strings:
                continue
            main = _main_name(action)
            others = [name for name, other in table.items() if other is action]
            names = [main, *(name for name in others if name not in action.option_strings)]
            shown = next((name for name in names if name in typed), main)
            _spelled.update(dict.fromkeys(names, shown))
        for switch, setters in SWITCHED_BY.items():
            given = [_spelled[name] for name in setters if _spelled.get(name) in typed]
            if given and _spelled.get(switch) not in typed:
                _spelled[switch] = given[0]
        if self._model_is_positional and typed.isdisjoint(("-m", "--model")):
            _spelled["--model"] = "MODEL"

    def _take_positional_model(self, found: argparse.Namespace, unknown: list[str]) -> None:
        words = [word for word in unknown if not word.startswith("-")]
        if not words or len(words) < len(unknown):
            return
        if len(words) > 1:
            self.error(
                f"unrecognized arguments: {words[1]}; one MODEL is taken, and {words[0]} is before "
                "it"
            )
        if found.model is not None:
            self.error(
                f"unrecognized arguments: {words[0]}; --model {found.model} names the model already"
            )
        found.model = words[0]
        unknown.clear()

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Return a flag's value, also of `--flag=--`.

        Some Python versions take that `--` as the end of the flags, and give the flag an empty
        list.
        """
        if not action.option_strings:
            return super()._get_values(action, arg_strings)
        self._given[action.dest] = _main_name(action)
        if action.dest == "model" and arg_strings:
            if self._model not in (None, arg_strings[0]):
                self.error(
                    f"{_main_name(action)} {arg_strings[0]}: {self._model} is named before it; "
                    "name one model"
                )
            self._model = arg_strings[0]
        # A shell variable that is not set, not a flag without a value.
        if arg_strings == [""] and action.const == "":
            raise argparse.ArgumentError(action, "'' is empty; leave it out")
        if arg_strings != ["--"]:
            return super()._get_values(action, arg_strings)
        value = self._get_value(action, "--")
        self._check_value(action, value)
        return value if action.nargs in (None, argparse.OPTIONAL) else [value]

    def _advice(self, word: str) -> str:
        """Return what to do about a word that is not a flag of this command."""
        flag = word.partition("=")[0].replace("_", "-")
        if flag in ADVICE:
            return f"{word}: is not a flag here; {ADVICE[flag]}"
        if any(flag in others for others in SAME.values()):
            return f"{word}: is not a flag here; leave it out"
        known = [o for a in self._actions if a.help != argparse.SUPPRESS for o in a.option_strings]
        near = difflib.get_close_matches(flag, known, n=1, cutoff=0.75)
        more = HELP_ALL if self.shown else "--help"
        return (
            f"unrecognized arguments: {word}; "
            f"{f'did you mean {near[0]}?' if near else f'see {more}'}"
        )

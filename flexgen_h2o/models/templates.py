"""Bounds on what a chat template computes: a model's folder may come from anybody.

jinja2 is imported here, so this module is imported where a template is rendered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import wraps
from io import StringIO
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from flexgen_h2o.core.errors import TooLongError

MOST_RENDERED_CHARACTERS = 8 * 2**20  # of a chat template's text: beyond any model's positions
_MOST_LOOPS = 2**21  # items of all ranges of a rendering
_MOST_BITS = 2**20  # of a whole number
# Widths in a format: large ones, and those that an argument gives.
_WIDTH = re.compile(r"%[^a-zA-Z%]*(\d{5,}|\*)|\{[^}]*:[^}]*(\d{5,}|\{)")


def _check(size: int) -> None:
    if size > MOST_RENDERED_CHARACTERS:
        raise TooLongError(f"the chat template makes more than {MOST_RENDERED_CHARACTERS} characters of it; shorten it")


def joined(pieces: Iterable[object]) -> str:
    """One text of all pieces. TooLongError as soon as it is too long."""
    found, size = StringIO(), 0
    for piece in pieces:
        text = str(piece)
        size += len(text)
        _check(size)
        found.write(text)
    return found.getvalue()


def _size(value: object) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _check_binop(operator: str, left: Any, right: Any) -> None:
    """TooLongError where the result would be too large."""
    if operator == "+":
        _check(_size(left) + _size(right))
    elif operator == "%":
        _check_format(left)
    elif isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        _check(MOST_RENDERED_CHARACTERS + 1 if bits > _MOST_BITS else 0)
    elif operator == "*":
        _check(max(_size(left) * right if isinstance(right, int) else 0, _size(right) * left if _size(right) else 0))


def _check_format(text: object) -> None:
    if isinstance(text, str) and _WIDTH.search(text):
        _check(MOST_RENDERED_CHARACTERS + 1)


def _check_call(name: str, args: tuple[Any, ...]) -> None:
    """TooLongError where a method of a text, the first of `args`, or the filter of that name makes too much."""
    for arg in args:
        if isinstance(arg, int):
            _check(abs(arg))
    text = args[0] if args else None
    if name in ("format", "format_map"):
        _check_format(text)
    elif name == "replace" and isinstance(text, str) and len(args) > 2:
        _check(len(text) + text.count(str(args[1])) * len(str(args[2])))
    elif name == "join" and len(args) > 1:
        separator, items = (text, args[1]) if isinstance(text, str) else (str(args[1]), text)
        _check(_size(separator) * _size(items))
    elif name == "expandtabs" and isinstance(text, str):
        _check(len(text) + text.count("\t") * (args[1] if len(args) > 1 else 8))


class _Generator(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for arg in node.nodes:
            self.visit(arg, frame)
            self.write(", ")
        self.write("))")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment that transformers renders in, with bounds on the size of what is computed."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _Generator
    concat = staticmethod(joined)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loops = 0
        unbounded: Callable[..., range] = self.globals["range"]  # type: ignore[assignment]

        def bounded_range(*args: int) -> range:
            found = unbounded(*args)
            self.loops += 1 + len(found)
            if self.loops > _MOST_LOOPS:
                raise TooLongError(f"the chat template makes more than {_MOST_LOOPS} steps; shorten it")
            return found

        self.globals["range"] = bounded_range
        for name in ("center", "format", "indent", "join", "replace", "wordwrap"):
            self.filters[name] = self._bounded(name, self.filters[name])

    @staticmethod
    def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        skipped = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context, or what stands for it

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            _check_call(name, (*args[skipped:], *kwargs.values()))
            return function(*args, **kwargs)

        return bounded

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_binop(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _check_call(__obj.__name__, (owner, *args, *kwargs.values()))
        return super().call(__context, __obj, *args, **kwargs)

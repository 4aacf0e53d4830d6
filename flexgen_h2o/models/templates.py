"""Bounds on what a chat template computes: a model's folder may come from anybody.

What an operator, a call or a filter makes is measured, before it is made where that can be told, so that no text, list
or number is too large. All that a rendering does is counted in steps, of which long values take many: it ends soon, and
what it keeps is not too large either. jinja2 is imported here, so this module is imported where a template is rendered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from functools import wraps
from io import StringIO
from string import Formatter
from typing import Any

from jinja2 import Template, nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_eval_context

from flexgen_h2o.core.errors import TooLongError

MOST_RENDERED_CHARACTERS = 8 * 2**20  # of a chat template's text: beyond any model's positions
_TOO_LONG = MOST_RENDERED_CHARACTERS + 1
_MOST_STEPS = 2**22  # of a rendering
_STEP_CHARACTERS = 64  # that are made, read or compared in a step
_ITEM_CHARACTERS = 8  # which an item of a list counts as: its bytes
_LOOK_CHARACTERS = 64  # which a look at an item, or what is nested in it, counts as: its time
_CALL_CHARACTERS = 4 * _STEP_CHARACTERS  # which a call counts as, beside what it makes
_MOST_BITS = 2**15  # of a whole number
_MOST_INDENT, _MOST_PRECISION = 64, 1000
_DATE_CHARACTERS = 256  # that Python may take for each of a date's format
_WIDEST = 10_000  # characters of a format's field beside its value: widths have four digits
_WIDE = re.compile(r"\d{5,}|%[-+ #.\d]*\*")  # widths in a format of more, and those that an argument gives
# jinja's own that chat templates have no use for; and methods: of bytes nothing is measured.
_NO_GLOBALS, _NO_FILTERS = ("lipsum", "cycler", "joiner"), ("striptags", "urlize", "xmlattr")
_NO_METHODS = ("encode", "to_bytes", "translate")


def _check(size: int) -> None:
    if size > MOST_RENDERED_CHARACTERS:
        raise TooLongError(f"the chat template makes more than {MOST_RENDERED_CHARACTERS} characters of it; shorten it")


def _within(items: Iterable[Any], between: int) -> Iterator[Any]:
    """The items. TooLongError as soon as they are too long, with so many characters between them."""
    size = 0
    for item in items:
        size += between + (len(item) if isinstance(item, str) else _written(item))
        _check(size)
        yield item


# ---- How large things are, or would be: functions that take what jinja's and Python's own take


def _size(value: object) -> int:
    """Characters of a text, or as many as a list's items count as; too many for a number that is too large."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list | tuple | dict):
        return len(value) * _ITEM_CHARACTERS
    return _TOO_LONG if isinstance(value, int) and value.bit_length() > _MOST_BITS else 0


def _inside(value: object) -> Iterator[object] | None:
    """What is written where a value is; None: nothing but itself."""
    if isinstance(value, Namespace):
        value = value._Namespace__attrs
    if isinstance(value, dict):
        value = value.items()
    return iter(value) if isinstance(value, list | tuple | ItemsView | KeysView | ValuesView) else None


def _written(value: object, indent: int = 0) -> int:
    """Characters, about, that a value is written with, whatever is nested in it; a few too many end the count.

    indent: before an item, for each list that it is in.
    """
    size, open_ones = 0, [iter((value,))]
    while open_ones and size < _TOO_LONG:
        for one in open_ones[-1]:
            own = one.bit_length() // 3 if isinstance(one, int) else len(one) if isinstance(one, str) else 0
            size += own + _LOOK_CHARACTERS + indent * len(open_ones)
            inside = _inside(one)
            if inside is not None:
                open_ones.append(inside)
            if inside is not None or size >= _TOO_LONG:
                break
        else:
            open_ones.pop()
    return size


def _of_binop(operator: str, left: Any, right: Any) -> int:
    if operator == "%":
        return _of_percent(left, right) if isinstance(left, str) else 0
    if operator == "+":
        return _size(left) + _size(right)
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        return _TOO_LONG if bits > _MOST_BITS else 0
    lengths = ((left, right), (right, left)) if operator == "*" else ()
    return max((_size(one) * times for one, times in lengths if isinstance(times, int)), default=0)


def _of_percent(text: str, given: object) -> int:
    """Of a format in C's manner; each field may be the longest of what is given."""
    return _TOO_LONG if _WIDE.search(text) else len(text) + text.count("%") * (_written(given) + _WIDEST)


def _of_braces(text: str, /, *args: Any, **kwargs: Any) -> int:
    """Of a format in Python's manner."""
    fields = 0
    for _, _, width, _ in Formatter().parse(text):
        fields += 1
        if width and ("{" in width or _WIDE.search(width)):
            return _TOO_LONG
    return len(text) + fields * (_written((args, kwargs)) + _WIDEST)


def _of_replaced(text: object, old: object, new: object, count: int | None = None) -> int:
    return _size(text) + str(text).count(str(old)) * len(str(new))


def _of_tabs(text: str, tabsize: int = 8) -> int:
    return len(text) + text.count("\t") * abs(int(tabsize))


def _of_width(text: object, width: int = 80, fill: str = " ") -> int:
    return _size(text) + abs(int(width))


def _of_indented(text: object, width: int | str = 4, first: bool = False, blank: bool = False) -> int:
    return _size(text) + (len(str(text).splitlines()) + 1) * (len(width) if isinstance(width, str) else abs(width))


def _of_wrapped(
    text: object, width: int = 79, break_long_words: bool = True, wrapstring: str | None = None, **kwargs: object
) -> int:  # fmt: skip
    return _size(text) * (1 + _size(wrapstring))


def _of_batch(items: object, linecount: int, fill_with: object = None) -> int:
    return abs(int(linecount)) * _ITEM_CHARACTERS


def _of_slices(items: object, slices: int, fill_with: object = None) -> int:
    return abs(int(slices)) * 8 * _ITEM_CHARACTERS  # each is a list


def _of_json(value: object, /, *args: Any, **kwargs: Any) -> int:
    """The longest option counts as the indent, whichever it is."""
    options = [part for one in (*args, *kwargs.values()) for part in (one if isinstance(one, list | tuple) else (one,))]
    wide = max((abs(one) if isinstance(one, int) else _size(one) for one in options), default=0)
    return _TOO_LONG if wide > _MOST_INDENT else _written(value, wide)


def _of_sum(items: object, attribute: object = None, start: object = 0) -> int:
    return 0 if isinstance(start, int | float) else _TOO_LONG


def _of_rounded(value: object, precision: int = 0, method: str = "") -> int:
    return _TOO_LONG if abs(int(precision)) > _MOST_PRECISION else 0


def _of_all(*args: object) -> int:
    return _written(args)


def _of_first(value: object, /, *args: object, **kwargs: object) -> int:
    return _size(value)


def _of_whole(value: object, /, *args: object, **kwargs: object) -> int:
    return _written(value)


def _of_test(*args: object, **kwargs: object) -> int:
    return _written(args) if len(args) > 1 else 0


def _join_within(join: Callable[..., str]) -> Callable[..., str]:
    """The filter `join`, which looks at its items one by one."""

    @pass_eval_context
    def joined(eval_ctx: Any, items: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            items = map(make_attrgetter(eval_ctx.environment, attribute), items)
        return join(eval_ctx, _within(items, len(str(d))), d)

    return joined


_METHODS: dict[str, Callable[..., int]] = {
    "center": _of_width, "ljust": _of_width, "rjust": _of_width, "zfill": _of_width, "expandtabs": _of_tabs,
    "format": _of_braces, "format_map": _of_braces, "replace": _of_replaced,
    "changed": _of_all, "index": _of_all, "count": _of_all,
}  # fmt: skip
_FILTERS: dict[str, Callable[..., int]] = {
    "batch": _of_batch, "center": _of_width, "indent": _of_indented, "replace": _of_replaced, "round": _of_rounded,
    "slice": _of_slices, "sum": _of_sum, "tojson": _of_json, "wordwrap": _of_wrapped,
    "format": lambda text, /, *args, **kwargs: _of_percent(str(text), kwargs or args),
    **dict.fromkeys(("groupby", "max", "min", "pprint", "sort", "string", "unique"), _of_whole),
}  # fmt: skip


# ---- jinja's classes


class _Generator(CodeGenerator):
    """Code that asks the environment at `~`, loops, comparisons and slices too, which jinja leaves to Python."""

    def blockvisit(self, body: Iterable[nodes.Node], frame: Frame) -> None:
        """A long body of a loop, a macro or the like takes steps beside those of what it calls."""
        size = sum(1 for node in body for _ in node.find_all(nodes.Node))
        if size > _STEP_CHARACTERS:
            self.writeline(f"environment.spend({size})")
        super().blockvisit(body, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for arg in node.nodes:
            self.visit(arg, frame)
            self.write(", ")
        self.write("))")

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        node.iter = nodes.Call(nodes.EnvironmentAttribute("counted"), [node.iter], [], None, None, lineno=node.lineno)
        super().visit_For(node, frame)

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:
        self.write(f" {operators[node.op]} environment.compared(")
        self.visit(node.expr, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        is_slice = isinstance(node.arg, nodes.Slice)
        self.write("environment.made(" if is_slice else "")
        super().visit_Getitem(node, frame)
        self.write(")" if is_slice else "")


class _Template(Template):
    """Each rendering has all steps before it."""

    def render(self, *args: Any, **kwargs: Any) -> str:
        self.environment.loops = 0  # type: ignore[attr-defined]
        return super().render(*args, **kwargs)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment that transformers renders in, with bounds on what is computed. loops: steps of a rendering."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _Generator
    template_class = _Template

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loops = 0
        self.finalize = self.shown
        for name in _NO_GLOBALS:
            del self.globals[name]
        for name in _NO_FILTERS:
            del self.filters[name]
        filters: dict[str, Any] = {**self.filters, "join": _join_within(self.filters["join"])}
        tests: dict[str, Any] = {**self.tests}
        self.filters = {name: self._bounded(own, _FILTERS.get(name, _of_first)) for name, own in filters.items()}
        self.tests = {name: self._bounded(own, _of_test) for name, own in tests.items()}

    def from_string(self, *args: Any, **kwargs: Any) -> Template:
        self.filters["tojson"] = self._bounded(self.filters["tojson"], _of_json)  # transformers has set its own
        return super().from_string(*args, **kwargs)

    def spend(self, size: int = 0) -> None:
        """Count a step and the characters that are made in it. TooLongError where they, or all steps, are too many."""
        _check(size)
        self.loops += 1 + max(0, size) // _STEP_CHARACTERS
        if self.loops > _MOST_STEPS:
            raise TooLongError(f"the chat template makes more than {_MOST_STEPS} steps; shorten it")

    def made(self, value: Any) -> Any:
        self.spend(_size(value))
        return value

    def compared(self, value: Any) -> Any:
        self.spend(_size(value) if _inside(value) is None else _written(value))
        return value

    @staticmethod
    def shown(value: Any) -> Any:
        """What is written out."""
        if not isinstance(value, str):
            _check(_written(value))
        return value

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.spend()
            yield item

    def concat(self, pieces: Iterable[object]) -> str:
        """One text of all pieces. TooLongError as soon as it is too long."""
        found, size = StringIO(), 0
        for piece in pieces:
            text = str(self.shown(piece))
            size += len(text)
            _check(size)
            found.write(text)
        self.spend(size)
        return found.getvalue()

    def _bounded(self, function: Callable[..., Any], size_of: Callable[..., int]) -> Callable[..., Any]:
        """A filter or test. size_of: what it makes, or reads, of the same arguments."""
        skipped = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context, or what stands for it

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self.spend(size_of(*args[skipped:], **kwargs))
            return self.made(function(*args, **kwargs))

        return bounded

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.spend(_of_binop(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _NO_METHODS and super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(__obj, "__wrapped__", __obj)  # as jinja has `format`
        owner, name, size = getattr(method, "__self__", None), getattr(method, "__name__", ""), 0
        if isinstance(__obj, LoopContext):  # a recursive loop
            args = tuple(map(__self.counted, args))
            kwargs = {key: __self.counted(value) if key == "iterable" else value for key, value in kwargs.items()}
        elif isinstance(owner, str) and name == "join":
            args = tuple(_within(items, len(owner)) for items in args)
        elif isinstance(owner, str | list | tuple | LoopContext) and name in _METHODS:
            own = {key: value for key, value in kwargs.items() if key not in ("_loop_vars", "_block_vars")}
            size = _METHODS[name](owner, *args, **own)
        elif name in ("raise_exception", "strftime_now"):
            size = _written(args) * (_DATE_CHARACTERS if name == "strftime_now" else 1)
        __self.spend(size)
        __self.spend(_CALL_CHARACTERS)
        return __self.made(super().call(__context, __obj, *args, **kwargs))

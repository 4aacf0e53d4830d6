"""Common parts of the formats of quantised checkpoints.

These are the checks of their config's keys, and the modules that are left plain. A tensor that a
format has not quantised is plain numbers: vectors, embeddings, the head, routers, and what its
config leaves out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.model import TensorSpec

# Values that a key may have. None: any value, because the decoded numbers do not depend on it.
Rules = Mapping[str, tuple[Any, ...] | None]
_OTHER = "give a checkpoint without it, or an unquantised one"
_PLAIN_MODULES = ("lm_head", "embed_out", "gate", "router")  # quantisers leave them out by default
_EMBEDDING = "embed"  # part of the names of embeddings
# Dtypes of scales. Random ones are in float16.
FLOAT16_FIRST = ("float16", "bfloat16", "float32")
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"  # boundary in a module's name
# A reference to a group by its number or name. It would break, because several patterns become one.
_REFERENCE = re.compile(r"\\[1-9]|\(\?(?:P[<=]|\()")


def is_quantised_linear(
    tensor: TensorSpec, left_out: tuple[str, ...], in_blocks_only: bool = False
) -> bool:
    """Return whether most quantisers convert the tensor.

    left_out: patterns of modules that are plain, as transformers matches them. in_blocks_only: the
    quantiser converts only modules of transformer blocks.
    """
    module = tensor.name.removesuffix(".weight")
    is_linear = len(tensor.shape) == 2 and module != tensor.name and _EMBEDDING not in module
    if in_blocks_only:
        is_linear = is_linear and any(part.isdecimal() for part in module.split("."))
    return (
        is_linear
        and module.split(".")[-1] not in _PLAIN_MODULES
        and not is_left_out(module, left_out)
    )


def multiple(name: str, tensor: TensorSpec, axis: int, of: int) -> int:
    """Return a matrix's size along `axis`, divided by `of`.

    Raises UsageError that names the format if it is no multiple.
    """
    if tensor.shape[axis] % of:
        what = ("rows", "columns")[axis]
        raise UsageError(
            f"quantization_config: {name} takes matrices whose {what} are a multiple of {of}, and"
            f" {tensor.key!r} has {tensor.shape[axis]}; give an unquantised checkpoint"
        )
    return tensor.shape[axis] // of


def check_keys(where: str, found: Mapping[str, Any], rules: Rules) -> None:
    """Raise UsageError that names a key that is unknown or has an unsupported value."""
    for key, value in found.items():
        if key == "quant_method":
            continue
        if key not in rules:
            raise UsageError(
                f"quantization_config: {where} with {key} ({value!r:.60}) is not known, so that "
                f"weights could be read wrongly; {_OTHER}"
            )
        allowed = rules[key]
        if allowed is not None and not any(
            type(value) is type(one) and value == one for one in allowed
        ):
            raise refused(where, key, value, allowed)


def refused(where: str, key: str, value: Any, allowed: Sequence[Any]) -> UsageError:
    known = " or ".join(
        dict.fromkeys(repr(one.lower() if isinstance(one, str) else one) for one in allowed)
    )
    return UsageError(
        f"quantization_config: {where} with {key} {value!r:.60} is not supported, only {known}; "
        "give such a checkpoint,"
        " or an unquantised one"
    )


def whole_number(where: str, key: str, value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise UsageError(
            f"quantization_config: {where} with {key} {value!r:.60} is not a whole number from "
            f"{low} to {high}; "
            f"{_OTHER}"
        )
    return value


def read_group(where: str, found: Mapping[str, Any]) -> int:
    """Return the group_size of a config: columns that share a scale, a multiple of 8.

    0: all columns, which is -1 in the config.
    """
    size = found.get("group_size", found.get("q_group_size"))
    if size == -1 and type(size) is int:
        return 0
    if whole_number(where, "group_size", size, 8, 2**20) % 8:
        raise refused(where, "group_size", size, (-1, "multiples of 8"))
    return int(size)


def patterns_of(where: str, found: Mapping[str, Any], key: str, mark: str = "") -> tuple[str, ...]:
    """Return a config's list of modules; () if it has none.

    Its items are names or regular expressions, as `is_left_out` matches them. mark: a prefix of
    regular expressions. If there is one, expressions are matched as they are, and names are only
    names. Raises UsageError for an expression that is invalid or cannot be joined with others.
    """
    value = found.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise UsageError(
            f"quantization_config: {where} with {key} {value!r:.60} is not a list of names; "
            f"{_OTHER}"
        )
    for pattern in value:
        expression = pattern.removeprefix(mark) if mark else f"(?:{pattern}){_BOUNDARY}"
        if pattern.startswith(mark) and (reason := _unusable(expression)):
            raise UsageError(
                f"quantization_config: {where}: {key} has {pattern!r:.60}{reason}; {_OTHER}"
            )
    return tuple(value)


@lru_cache(maxsize=2**14)  # plans ask for the format of a model again and again
def _unusable(expression: str) -> str:
    """Return why a regular expression cannot be used; "" if it can."""
    try:
        re.compile(expression)
    except re.error as error:
        return f" ({error})"
    if _REFERENCE.search(expression):
        return ", which refers to a group, and that is not supported"
    return ""


@lru_cache(maxsize=2**16)
def is_left_out(module: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a module is left out, as transformers' should_convert_module decides.

    A pattern is a module's name, which includes all modules below it, or a regular expression that
    matches such a name, or the end of a name.
    """
    return module.endswith(patterns) or _begins(patterns).match(module) is not None


@lru_cache(maxsize=64)
def _begins(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """Return an expression that matches a name if a pattern names that module or one above it."""
    return re.compile(f"(?:{'|'.join(f'(?:{pattern})' for pattern in patterns)}){_BOUNDARY}")

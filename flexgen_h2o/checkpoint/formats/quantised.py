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

from flexgen_h2o.checkpoint.formats import StoredRows
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.model import TensorSpec

# Values that a key may have. None: any value, because the decoded numbers do not depend on it.
Rules = Mapping[str, tuple[Any, ...] | None]
_OTHER = "give a checkpoint without it, or an unquantised one"
_PLAIN_MODULES = ("lm_head", "embed_out", "gate", "router")  # quantisers leave them out by default
_EMBEDDING = "embed"  # part of the names of embeddings
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"  # boundary in a module's name
# A regular expression that may take minutes to match: a repeated group, or many open repetitions.
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_OPEN = re.compile(r"[*+]")
_MAX_OPEN = 6
# Limits of a list of modules. A longer one would take long to compile and to match.
_MAX_PATTERNS = 4096
_MAX_CHARACTERS = 2**19
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


def names_of(tensor: TensorSpec, kind: str) -> tuple[str, ...]:
    """Return the names under which `base`.kind of a matrix `base`.weight may be stored."""
    return tuple(
        f"{name.removesuffix('.weight')}.{kind}" for name in (tensor.name, *tensor.aliases)
    )


def scales_of_groups(
    tensor: TensorSpec, groups: int, columns_per_row: int, random: tuple[bytes, bytes]
) -> StoredRows:
    """Return the stored tensor `base`.scales (groups, N) of a matrix `base`.weight (N, K).

    columns_per_row: columns of the matrix that share a row of scales; 0: parts need all scales.
    random: as StoredRows.random.
    """
    rows = tensor.shape[0]
    return StoredRows(
        names_of(tensor, "scales"),
        (groups, rows),
        ("float16", "bfloat16", "float32"),
        4 * rows,
        columns_per_row,
        in_float32=True,
        index=tensor.index,
        random=random,
    )


def settings_of(
    quantization: Mapping[str, Any] | None, method: str, rules: Rules
) -> Mapping[str, Any] | None:
    """Return the config if it has this quant_method, otherwise None.

    Raises UsageError that names a key that is unknown or has an unsupported value.
    """
    if quantization is None or quantization.get("quant_method") != method:
        return None
    for key, value in quantization.items():
        if key != "quant_method":
            check_key(method, key, value, rules)
    return quantization


def check_key(where: str, key: str, value: Any, rules: Rules) -> None:
    if key not in rules:
        raise UsageError(
            f"quantization_config: {where} with {key} ({value!r:.60}) is not known, so that "
            "weights could be read"
            f" wrongly; {_OTHER}"
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


def patterns_of(where: str, key: str, value: Any, mark: str = "") -> tuple[str, ...]:
    """Return a config's list of modules.

    Its items are names or regular expressions, as `is_left_out` matches them. mark: a prefix of
    regular expressions. If there is one, expressions are matched as they are, and names are only
    names.
    """
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise UsageError(
            f"quantization_config: {where} with {key} {value!r:.60} is not a list of names; "
            f"{_OTHER}"
        )
    characters = sum(map(len, value))
    if len(value) > _MAX_PATTERNS or characters > _MAX_CHARACTERS:
        raise UsageError(
            f"quantization_config: {where}: {key} has {len(value)} names of {characters} "
            "characters in all, and at most"
            f" {_MAX_PATTERNS} of {_MAX_CHARACTERS} are matched; {_OTHER}"
        )
    patterns = tuple(value)
    _check_patterns(f"{where}: {key}", patterns, mark)
    return patterns


@lru_cache(maxsize=64)  # plans ask for the format of a model again and again
def _check_patterns(where: str, patterns: tuple[str, ...], mark: str) -> None:
    """Raise UsageError for a regular expression that is invalid or may take long to match."""
    for pattern in patterns:
        if not pattern.startswith(mark):
            continue
        try:
            re.compile(pattern.removeprefix(mark) if mark else f"(?:{pattern}){_BOUNDARY}")
        except re.error as error:
            raise UsageError(
                f"quantization_config: {where} has {pattern!r:.60} ({error})"
            ) from error
        if _REPEATED_GROUP.search(pattern) or len(_OPEN.findall(pattern)) > _MAX_OPEN:
            raise UsageError(
                f"quantization_config: {where} has {pattern!r:.60}, which may take minutes to "
                f"match; {_OTHER}"
            )
        if _REFERENCE.search(pattern):
            raise UsageError(
                f"quantization_config: {where} has {pattern!r:.60}, which refers to a group, and "
                "that is not supported;"
                f" {_OTHER}"
            )


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

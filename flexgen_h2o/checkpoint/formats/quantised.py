"""Common parts of the formats of quantised checkpoints.

These are the checks of their config's keys, the modules that are left plain, and decoding into the
compute dtype or into int8 rows. A tensor that a format has not quantised is plain numbers: vectors,
embeddings, the head, routers, and what its config leaves out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from flexgen_h2o.checkpoint.formats import (
    Shard,
    StoredRows,
    TensorLayout,
    WeightFormat,
    plain_layout,
)
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.model import TensorSpec
from flexgen_h2o.core.packing import int8_row_bytes

if TYPE_CHECKING:
    import torch

    from flexgen_h2o.kernels.int8 import BlockedInt8
    from flexgen_h2o.kernels.linear import RowParts

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


@dataclass(frozen=True)
class Quantised(WeightFormat):
    """The base of these formats.

    Subclasses say how a matrix is stored (`stored_rows`) and decode it.
    """

    # Patterns of modules that are plain, as transformers matches them.
    left_out: tuple[str, ...] = ()
    # Rows are decoded into int8.
    to_int8: bool = False
    decoded_at = "load"
    by_columns: ClassVar[bool] = False
    # Quantisers of this format convert only modules of transformer blocks.
    in_blocks_only: ClassVar[bool] = False
    name: ClassVar[str]
    sample_name: ClassVar[str] = "model.layers.0.mlp.up_proj.weight"

    @property
    def in_int8(self) -> bool:
        return self.to_int8

    @property
    def decoder(self) -> str:
        return f"{self.name}_int8" if self.to_int8 else self.name

    def holds(self, tensor: TensorSpec) -> bool:
        """Return whether the tensor is quantised."""
        module = tensor.name.removesuffix(".weight")
        is_linear = len(tensor.shape) == 2 and module != tensor.name and _EMBEDDING not in module
        if self.in_blocks_only:
            is_linear = is_linear and any(part.isdecimal() for part in module.split("."))
        return (
            is_linear
            and module.split(".")[-1] not in _PLAIN_MODULES
            and not is_left_out(module, self.left_out)
        )

    def stored_rows(self, tensor: TensorSpec) -> tuple[StoredRows, ...]:
        """Return the stored tensors of a quantised matrix."""
        raise NotImplementedError

    def layout(self, tensor: TensorSpec) -> TensorLayout:
        if not self.holds(tensor):
            return plain_layout(tensor, self.itemsize)
        columns = tensor.shape[1]
        decoded = int8_row_bytes(columns) if self.to_int8 else columns * self.itemsize
        return TensorLayout(tensor.shape, self.stored_rows(tensor), decoded, self.by_columns)

    def decode_range(
        self, layout: TensorLayout, held: Sequence[Shard], first: int, out: torch.Tensor
    ) -> torch.Tensor:
        if not self.by_columns:
            return super().decode_range(layout, held, first, out)
        from flexgen_h2o.kernels.workspace import row_slices

        for some in row_slices(len(out), layout.shape[1]):  # slices keep temporary memory small
            for one in held:
                self.decode_columns(layout, one, first + some.start, out[some, one.start : one.end])
        return out

    def decode_columns(
        self, layout: TensorLayout, shard: Shard, first: int, out: torch.Tensor
    ) -> None:
        """Fill `out` from a shard of a matrix that is stored by columns.

        out: (rows from `first` on, columns of the shard), a float dtype.
        """
        raise NotImplementedError

    def multiple(self, tensor: TensorSpec, axis: int, of: int) -> int:
        """Return a matrix's size along `axis`, divided by `of`.

        Raises UsageError if it is no multiple.
        """
        if tensor.shape[axis] % of:
            what = ("rows", "columns")[axis]
            raise UsageError(
                f"quantization_config: {self.name} takes matrices whose {what} are a multiple of "
                f"{of}, and"
                f" {tensor.key!r} has {tensor.shape[axis]}; give an unquantised checkpoint"
            )
        return tensor.shape[axis] // of

    def decode(self, layout: TensorLayout, held: Sequence[Shard], out: RowParts) -> None:
        if not self.to_int8:
            super().decode(layout, held, out)
            return
        import torch

        from flexgen_h2o.core.units import BLOCK_ROWS
        from flexgen_h2o.kernels.int8 import BlockedInt8, Int8Rows
        from flexgen_h2o.kernels.quantised import fill_int8_rows
        from flexgen_h2o.kernels.workspace import row_slices

        rows, columns = layout.shape
        parts = [some.packed for some in out if isinstance(some, Int8Rows)]
        done = (
            len(parts[0])
            if isinstance(parts[0], BlockedInt8) and self.fill_blocks(layout, held, parts[0])
            else 0
        )
        some_rows = list(row_slices(rows - done, columns, BLOCK_ROWS))
        max_rows = some_rows[0].stop if some_rows else 0
        values = torch.empty(
            max_rows, columns, device=held[0].pieces[0].device, dtype=torch.float32
        )
        for some in some_rows:
            here = self.decode_range(
                layout, held, done + some.start, values[: some.stop - some.start]
            )
            fill_int8_rows(here, done + some.start, parts)

    def fill_blocks(self, layout: TensorLayout, held: Sequence[Shard], out: BlockedInt8) -> bool:
        """Fill the first rows of a matrix as int8 rows in one pass.

        Returns False if no loop does that.
        """
        return False


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


def asks_for_int8(policy: Policy) -> bool:
    return policy.int8_compute and not policy.compress_weight

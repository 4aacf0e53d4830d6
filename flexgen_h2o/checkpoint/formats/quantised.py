"""What the formats of quantised checkpoints share: their config's keys checked, the modules that are left plain, and
decoding into the compute dtype or into int8 rows.

A tensor that a format has not quantised is plain numbers: vectors, embeddings, the head, routers, and what its config
leaves out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from flexgen_h2o.checkpoint.formats import Held, StoredRows, TensorLayout, WeightFormat, plain_layout
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.model import TensorSpec
from flexgen_h2o.core.packing import int8_row_bytes
from flexgen_h2o.tiers.stream import Part

if TYPE_CHECKING:
    import torch

    from flexgen_h2o.kernels.int8 import BlockedInt8
    from flexgen_h2o.kernels.linear import RowParts

# Values that a key may have; None: any, because nothing of how numbers are decoded depends on it.
Rules = Mapping[str, tuple[Any, ...] | None]
_OTHER = "give a checkpoint without it, or an unquantised one"
_PLAIN_MODULES = ("lm_head", "embed_out", "gate", "router")  # no quantiser converts them unless it is told to
_EMBEDDING = "embed"  # in the names of embeddings
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"  # of a module's name
# A regular expression whose matching may take minutes: a repeated group, or many open repetitions.
_REPEATED_GROUP, _OPEN, _MOST_OPEN = re.compile(r"\)[*+{]"), re.compile(r"[*+]"), 6
_MOST_PATTERNS, _MOST_CHARACTERS = 4096, 2**19  # of a list of modules; more take long to compile and to match
_REFERENCE = re.compile(r"\\[1-9]|\(\?(?:P[<=]|\()")  # to a group by its number or name: several patterns become one


@dataclass(frozen=True)
class Quantised(WeightFormat):
    """Subclasses say what is stored of a matrix (`stored_rows`) and decode it.

    left_out: patterns of modules that are plain, as transformers matches them. to_int8: rows are decoded into int8.
    """

    left_out: tuple[str, ...] = ()
    to_int8: bool = False
    decodes = True
    by_columns: ClassVar[bool] = False
    in_blocks_only: ClassVar[bool] = False  # what its quantisers convert: modules of transformer blocks
    name: ClassVar[str]
    sample_name: ClassVar[str] = "model.layers.0.mlp.up_proj.weight"

    @property
    def in_int8(self) -> bool:
        return self.to_int8

    @property
    def decodes_in_place(self) -> bool:
        return not self.to_int8 and not self.by_columns

    @property
    def decoder(self) -> str:
        return f"{self.name}_int8" if self.to_int8 else self.name

    def holds(self, tensor: TensorSpec) -> bool:
        """Is it quantised?"""
        module = tensor.name.removesuffix(".weight")
        is_linear = len(tensor.shape) == 2 and module != tensor.name and _EMBEDDING not in module
        if self.in_blocks_only:
            is_linear = is_linear and any(part.isdecimal() for part in module.split("."))
        return is_linear and module.split(".")[-1] not in _PLAIN_MODULES and not is_left_out(module, self.left_out)

    def stored_rows(self, tensor: TensorSpec) -> tuple[StoredRows, ...]:
        """Of a quantised matrix."""
        raise NotImplementedError

    def layout(self, tensor: TensorSpec) -> TensorLayout:
        if not self.holds(tensor):
            return plain_layout(tensor, self.itemsize)
        columns = tensor.shape[1]
        decoded = int8_row_bytes(columns) if self.to_int8 else columns * self.itemsize
        return TensorLayout(tensor.shape, self.stored_rows(tensor), decoded, self.by_columns)

    def decode_range(self, layout: TensorLayout, held: Sequence[Held], first: int, out: torch.Tensor) -> torch.Tensor:
        if not self.by_columns:
            return super().decode_range(layout, held, first, out)
        from flexgen_h2o.kernels.workspace import row_slices

        for some in row_slices(len(out), layout.shape[1]):  # what is made on the way takes little memory
            for part, pieces in held:
                self.decode_columns(layout, part, pieces, first + some.start, out[some, part.start : part.end])
        return out

    def decode_columns(
        self, layout: TensorLayout, part: Part, pieces: Sequence[torch.Tensor], first: int, out: torch.Tensor
    ) -> None:
        """Fill out (rows from `first` on, columns of the part), in a float dtype, of a matrix stored by columns."""
        raise NotImplementedError

    def multiple(self, tensor: TensorSpec, axis: int, of: int) -> int:
        """How many times `of` a size of a matrix is."""
        if tensor.shape[axis] % of:
            what = ("rows", "columns")[axis]
            raise UsageError(
                f"quantization_config: {self.name} takes matrices whose {what} are a multiple of {of}, and"
                f" {tensor.key!r} has {tensor.shape[axis]}; give an unquantised checkpoint"
            )
        return tensor.shape[axis] // of

    def decode(self, layout: TensorLayout, held: Sequence[Held], out: RowParts) -> None:
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
        done = len(parts[0]) if isinstance(parts[0], BlockedInt8) and self.fill_blocks(layout, held, parts[0]) else 0
        some_rows = list(row_slices(rows - done, columns, BLOCK_ROWS))
        most = some_rows[0].stop if some_rows else 0
        values = torch.empty(most, columns, device=held[0].pieces[0].device, dtype=torch.float32)
        for some in some_rows:
            here = self.decode_range(layout, held, done + some.start, values[: some.stop - some.start])
            fill_int8_rows(here, done + some.start, parts)

    def fill_blocks(self, layout: TensorLayout, held: Sequence[Held], out: BlockedInt8) -> bool:
        """The first rows of a matrix as int8 rows in one pass, where there is a loop for that. False: there is none."""
        return False


def names_of(tensor: TensorSpec, kind: str) -> tuple[str, ...]:
    """What is stored of a matrix `base`.weight as `base`.kind."""
    return tuple(f"{name.removesuffix('.weight')}.{kind}" for name in (tensor.name, *tensor.aliases))


def settings_of(quantization: Mapping[str, Any] | None, method: str, rules: Rules) -> Mapping[str, Any] | None:
    """A config of this quant_method whose keys are all known and allowed; None: it is of another one. UsageError names
    the key."""
    if quantization is None or quantization.get("quant_method") != method:
        return None
    for key, value in quantization.items():
        if key != "quant_method":
            check_key(method, key, value, rules)
    return quantization


def check_key(where: str, key: str, value: Any, rules: Rules) -> None:
    if key not in rules:
        raise UsageError(
            f"quantization_config: {where} with {key} ({value!r:.60}) is not known, so that weights could be read"
            f" wrongly; {_OTHER}"
        )
    allowed = rules[key]
    if allowed is not None and not any(type(value) is type(one) and value == one for one in allowed):
        raise refused(where, key, value, allowed)


def refused(where: str, key: str, value: Any, allowed: Sequence[Any]) -> UsageError:
    known = " or ".join(dict.fromkeys(repr(one.lower() if isinstance(one, str) else one) for one in allowed))
    return UsageError(
        f"quantization_config: {where} with {key} {value!r:.60} is not supported, only {known}; give such a checkpoint,"
        " or an unquantised one"
    )


def whole_number(where: str, key: str, value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise UsageError(
            f"quantization_config: {where} with {key} {value!r:.60} is not a whole number from {low} to {high}; "
            f"{_OTHER}"
        )
    return value


def read_group(where: str, found: Mapping[str, Any]) -> int:
    """The group_size of a config: columns that share a scale, a multiple of 8; 0 for all (-1 there)."""
    size = found.get("group_size", found.get("q_group_size"))
    if size == -1 and type(size) is int:
        return 0
    if whole_number(where, "group_size", size, 8, 2**20) % 8:
        raise refused(where, "group_size", size, (-1, "multiples of 8"))
    return int(size)


def patterns_of(where: str, key: str, value: Any, mark: str = "") -> tuple[str, ...]:
    """A list of modules: names, or regular expressions as is_left_out matches them. mark: what regular expressions
    begin with, which are matched as they are, where names are nothing else."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise UsageError(f"quantization_config: {where} with {key} {value!r:.60} is not a list of names; {_OTHER}")
    characters = sum(map(len, value))
    if len(value) > _MOST_PATTERNS or characters > _MOST_CHARACTERS:
        raise UsageError(
            f"quantization_config: {where}: {key} has {len(value)} names of {characters} characters in all, and at most"
            f" {_MOST_PATTERNS} of {_MOST_CHARACTERS} are matched; {_OTHER}"
        )
    patterns = tuple(value)
    _check_patterns(f"{where}: {key}", patterns, mark)
    return patterns


@lru_cache(maxsize=64)  # plans ask for the format of a model again and again
def _check_patterns(where: str, patterns: tuple[str, ...], mark: str) -> None:
    """UsageError for a regular expression that cannot be read, or that may take long."""
    for pattern in patterns:
        if not pattern.startswith(mark):
            continue
        try:
            re.compile(pattern.removeprefix(mark) if mark else f"(?:{pattern}){_BOUNDARY}")
        except re.error as error:
            raise UsageError(f"quantization_config: {where} has {pattern!r:.60} ({error})") from error
        if _REPEATED_GROUP.search(pattern) or len(_OPEN.findall(pattern)) > _MOST_OPEN:
            raise UsageError(
                f"quantization_config: {where} has {pattern!r:.60}, which may take minutes to match; {_OTHER}"
            )
        if _REFERENCE.search(pattern):
            raise UsageError(
                f"quantization_config: {where} has {pattern!r:.60}, which refers to a group, and that is not supported;"
                f" {_OTHER}"
            )


@lru_cache(maxsize=2**16)
def is_left_out(module: str, patterns: tuple[str, ...]) -> bool:
    """As transformers' should_convert_module: a pattern names a module and all below it, is a regular expression that
    does, or is the end of a name."""
    return module.endswith(patterns) or _begins(patterns).match(module) is not None


@lru_cache(maxsize=64)
def _begins(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """What a module's name begins with where a pattern names it, or one above it."""
    return re.compile(f"(?:{'|'.join(f'(?:{pattern})' for pattern in patterns)}){_BOUNDARY}")


def asks_for_int8(policy: Policy) -> bool:
    return policy.int8_compute and not policy.compress_weight

"""quant_method "gptq": matrices in 4 or 8 bits with a scale and a zero per group of columns.

The paper is Frantar et al. 2022; the layout is that of AutoGPTQ and GPTQModel. A matrix
`base`.weight (N, K) is stored as:

    base.qweight  int32 (K x bits / 32, N)       codes of columns, from a word's lowest bits upwards
    base.qzeros   int32 (groups, N x bits / 32)
    base.scales   (groups, N)
    base.g_idx    int32 (K,)                     the group of each column

number = (code - zero) x scale. checkpoint_format "gptq_v2" stores the zero itself. "gptq" stores it
less 1: 0x11111111 (8 bits: 0x01010101) is subtracted from whole words, so that a zero of 0 borrows
from its neighbour. AutoRound adds the zeros less 1 up, which gives the same words.

Symmetric matrices have the zero 2^(bits - 1). Kernels for them (Marlin) do not read the stored
zeros, and writers disagree: "gptq" is found with 7 and with 8. AutoRound may leave out g_idx.
The matrix is stored by columns, so its parts are runs of columns. Each part has all scales.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from flexgen_h2o.checkpoint.formats import Codec, Shard, StoredRows, TensorLayout
from flexgen_h2o.checkpoint.formats.quantised import (
    FLOAT16_FIRST,
    G_IDX,
    Rules,
    check_keys,
    is_quantised_linear,
    multiple,
    patterns_of,
    read_group,
    refused,
)
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.model import TensorSpec

if TYPE_CHECKING:
    import torch

_RULES: Rules = {
    "bits": (4, 8),
    "group_size": None,
    "desc_act": None,  # g_idx says it
    "sym": (True, False, None),
    "checkpoint_format": ("gptq", "gptq_v2", None),
    "format": ("gptq", "gptq_v2", None),
    "method": ("gptq", None),
    "pack_dtype": ("int32", None),
    "data_type": ("int", None),
    "is_marlin_format": (False,),
    "awq_gemm_checkpoint": (False,),
    "backend": None,
    "modules_to_not_convert": None,
    "modules_in_block_to_quantize": None,
    "dynamic": None,
    G_IDX: (True, False),
}
_WORD_BITS = 32
_LEAVES_OUT = "-:"
# Fields of a rule of `dynamic` that matter, with the defaults of the whole config.
_OF_MODULES = {"bits": None, "group_size": None, "sym": None, "desc_act": False}
_RANDOM_SCALES = {4: 0.02 / 4.6, 8: 0.02 / 73.9}  # by bits; random codes have a std of 4.6 or 73.9


@dataclass(frozen=True)
class Gptq(Codec):
    """The format `gptq`."""

    left_out: tuple[str, ...] = ()  # patterns of modules that are plain
    bits: int = 4
    group: int = 128  # columns that share a scale; 0: all columns
    more: int = 1  # added to a stored zero: 1 for checkpoint_format "gptq", 0 for "gptq_v2"
    # All zeros are 2^(bits - 1). None: the config does not say, and the stored zeros do.
    symmetric: bool | None = None
    # Ends of the names of quantised modules; (): all modules that are not left out.
    only: tuple[str, ...] = ()
    has_index: bool = True  # g_idx is stored; otherwise columns are in order
    name = "gptq"
    decoded_at = "load"
    by_columns = True

    def holds(self, tensor: TensorSpec) -> bool:
        module = tensor.name.removesuffix(".weight")
        is_meant = not self.only or module.endswith(self.only)
        return is_meant and is_quantised_linear(tensor, self.left_out, in_blocks_only=True)

    def stored_rows(self, tensor: TensorSpec) -> tuple[StoredRows, ...]:
        rows, columns = tensor.shape
        per_word = _WORD_BITS // self.bits
        group = self.group or columns
        groups = -(-columns // group)
        words = multiple(self.name, tensor, 1, per_word)
        zeros = multiple(self.name, tensor, 0, per_word)
        middle = (1 << (self.bits - 1)) - self.more
        zero = (b"\0", bytes([middle | middle << 4 if self.bits == 4 else middle]))
        scale = (b"\x0f\0", struct.pack("<e", _RANDOM_SCALES[self.bits]))
        in_order = (b"\0", _in_order(columns, group))
        stored = (
            StoredRows(tensor, (words, rows), ("I32",), ".qweight", per_word),
            StoredRows(tensor, (groups, zeros), ("I32",), ".qzeros", 0, random=zero),
            StoredRows(
                tensor, (groups, rows), FLOAT16_FIRST, ".scales", 0, in_float32=True, random=scale
            ),
        )
        if not self.has_index:
            return stored
        return (*stored, StoredRows(tensor, (columns,), ("I32",), ".g_idx", random=in_order))

    def decode_columns(
        self, layout: TensorLayout, shard: Shard, first: int, out: torch.Tensor
    ) -> None:
        import torch

        from flexgen_h2o.kernels.quantised import Groups, stored_groups, unpack_gptq

        rows, columns = layout.shape
        some = slice(first, first + len(out))
        words = shard.pieces[0].view(torch.int32).view(-1, rows)[:, some]
        scales = shard.pieces[2].view(torch.float32).view(-1, rows)[:, some]
        groups = Groups(self.group or columns, shard.start)
        if self.has_index:
            try:
                groups = stored_groups(shard.pieces[3], len(scales), groups.size, groups.at)
            except ValueError as error:
                raise UsageError(
                    f"tensor {layout.stored[3].key!r} {error}; download the checkpoint again"
                ) from error
        zeros = None
        if not self._is_symmetric(layout, shard):
            zeros = self._zeros(layout, shard, some)
        elif groups.index is not None:
            zeros = torch.full_like(scales, 1 << (self.bits - 1))
        unpack_gptq(words, self.bits, scales, zeros, groups, out)

    def _is_symmetric(self, layout: TensorLayout, shard: Shard) -> bool:
        """Return whether all zeros of a matrix are 2^(bits - 1), however they are stored.

        Raises UsageError if the config says so and the stored zeros differ among themselves.
        """
        from flexgen_h2o.kernels.quantised import the_one_word

        if self.symmetric is False:
            return False
        middle = 1 << (self.bits - 1)
        word = the_one_word(shard.pieces[1])
        if self.symmetric and word is not None:
            return True  # kernels for symmetric matrices do not read them
        if word in (middle * _ones(self.bits), (middle - 1) * _ones(self.bits)):
            return True
        if self.symmetric:
            raise UsageError(
                f"tensor {layout.stored[1].key!r} has different zeros, and the "
                "quantization_config says sym true, so that programs read it differently; set sym "
                "to false in config.json if it was quantised without symmetry, or give another "
                "checkpoint"
            )
        return False

    def _zeros(self, layout: TensorLayout, shard: Shard, some: slice) -> torch.Tensor:
        """Return the zeros of some rows of a matrix, (groups, rows) float32."""
        import torch

        from flexgen_h2o.kernels.packed import parted

        per_word = _WORD_BITS // self.bits
        begin = some.start // per_word
        words = shard.pieces[1].view(torch.int32).view(-1, layout.shape[0] // per_word)
        words = words[:, begin : -(-some.stop // per_word)]
        if self.more:
            words = words + _ones(self.bits)  # carries from one zero to the next, as GPTQModel's
        skip = some.start - begin * per_word
        return parted(words, self.bits)[:, skip : skip + some.stop - some.start].float()


def _ones(bits: int) -> int:
    """Return a word whose codes are all 1."""
    return sum(1 << shift for shift in range(0, _WORD_BITS, bits))


@lru_cache(maxsize=64)
def _in_order(columns: int, group: int) -> bytes:
    return struct.pack(f"<{columns}i", *(column // group for column in range(columns)))


def codec_of(config: Mapping[str, Any], itemsize: int, in_int8: bool) -> Gptq:
    name = Gptq.name
    check_keys(name, config, _RULES)
    bits = config.get("bits")
    if bits is None:
        raise refused(name, "bits", None, (4, 8))
    has_index = config.get(G_IDX, True)
    if config.get("desc_act") and not has_index:
        raise refused(f"{name} without tensors g_idx", "desc_act", True, (False,))
    left_out = patterns_of(name, config, "modules_to_not_convert")
    return Gptq(
        itemsize,
        left_out + _dynamic(config),
        bits,
        read_group(name, config),
        0 if _version(config) == "gptq_v2" else 1,
        config.get("sym"),
        _only(config),
        has_index,
        in_int8=in_int8,
    )


def _version(config: Mapping[str, Any]) -> str:
    """Return the version of a config, "gptq" or "gptq_v2", which two fields may give."""
    found = {
        str(config[key]).lower()
        for key in ("checkpoint_format", "format")
        if config.get(key) is not None
    }
    if len(found) > 1:
        raise refused(Gptq.name, "format", config["format"], (config["checkpoint_format"],))
    return found.pop() if found else "gptq"


def _dynamic(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return patterns of the modules that GPTQModel's `dynamic` leaves plain.

    It is a table whose keys are "-:" and a regular expression that begins a module's name, for
    modules that are left out, or "+:" (or nothing) and an expression, for modules with settings of
    their own. These must be those of all modules.
    """
    found = config.get("dynamic") or {}
    if not isinstance(found, Mapping):
        raise refused(Gptq.name, "dynamic", found, ("a table of patterns",))
    for pattern, settings in found.items():
        if pattern.startswith(_LEAVES_OUT):
            continue
        if not isinstance(settings, Mapping):
            raise refused(Gptq.name, "dynamic", settings, ("a table of settings",))
        if "lm_head" in pattern:
            raise refused(Gptq.name, "dynamic for the module", pattern, ("modules in blocks",))
        check_keys(f"{Gptq.name} dynamic {pattern!r:.60}", settings, _RULES)
        for key, value in settings.items():
            usual = config.get(key, _OF_MODULES.get(key, value))
            if key in _OF_MODULES and value is not None and value != usual:
                raise refused(f"{Gptq.name} dynamic {pattern!r:.60}", key, value, (usual,))
    left_out = [f"{key.removeprefix(_LEAVES_OUT)}.*" for key in found if key[:2] == _LEAVES_OUT]
    return patterns_of(Gptq.name, {"dynamic": left_out}, "dynamic")


def _only(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the ends of names that optimum's `modules_in_block_to_quantize` lists.

    It is a list of names, or of lists of names; () if there is none.
    """
    key = "modules_in_block_to_quantize"
    found = config.get(key) or ()
    names = tuple(
        name for one in found for name in (one if isinstance(one, list | tuple) else (one,))
    )
    if not isinstance(found, list | tuple) or not all(isinstance(name, str) for name in names):
        raise refused(Gptq.name, key, found, ("a list of names",))
    return names

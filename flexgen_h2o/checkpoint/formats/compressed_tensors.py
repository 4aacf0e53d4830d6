"""quant_method "compressed-tensors" (llm-compressor): matrices in integers of 4 or 8 bits.

There is one scale for each group of columns or for each row. number = (code - zero) x scale.

A matrix `base`.weight (N, K) in format pack-quantized is stored as:

    base.weight_packed      int32 (N, ceil(K x bits / 32))
    base.weight_scale       (N, groups)
    base.weight_zero_point  int32 (ceil(N x bits / 32), groups), unless it is symmetric

Packed codes begin at the lowest bits of a word. Zeros are packed along the rows of the matrix.
Codes and zeros are stored with 2^(bits - 1) added.

In format int-quantized the matrix is stored as `base`.weight, int8 of (N, K), and
`base`.weight_scale.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from flexgen_h2o.checkpoint.formats import Codec, Shard, StoredRows, TensorLayout
from flexgen_h2o.checkpoint.formats.quantised import (
    Rules,
    check_keys,
    patterns_of,
    read_group,
    refused,
)
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.model import TensorSpec

if TYPE_CHECKING:
    import torch

_PACKED = "pack-quantized"
_INTEGERS = "int-quantized"
_DENSE = "dense"  # a sparsity that is not used for storing
_RULES: Rules = {
    "format": (_PACKED, _INTEGERS),
    "config_groups": None,
    "ignore": None,
    "kv_cache_scheme": (None,),
    "quantization_status": ("compressed", "frozen"),
    "global_compression_ratio": None,
    "version": None,
    "sparsity_config": None,  # checked below
    "run_compressed": None,
    "transform_config": (None, {}),
    "moe_sparsity_config": (None,),
}
# Dynamic scales of activations are made during a run. Here the inputs of products are not
# quantised.
_GROUP_RULES: Rules = {
    "targets": None,
    "weights": None,
    "input_activations": None,
    "output_activations": (None,),
    "format": (None, _PACKED, _INTEGERS),
}
_WEIGHT_RULES: Rules = {
    "num_bits": (4, 8),
    "type": ("int",),
    "symmetric": (True, False),
    "strategy": ("group", "channel"),
    "group_size": None,
    "block_structure": (None,),
    "dynamic": (False,),
    "actorder": (None, False, "weight", "static"),
    "scale_dtype": None,
    "zp_dtype": None,
    "observer": None,
    "observer_kwargs": None,
}
_LINEAR = "Linear"
_REGEX = "re:"
# Names that families give to embeddings. embed_out is a Linear.
_EMBEDDINGS = ("embed_tokens", "embed_positions", "embed_in")
_WORD_BITS = 32
_RANDOM_STD = {4: 4.6, 8: 73.9}  # std of random codes, by bits


@dataclass(frozen=True)
class CompressedTensors(Codec):
    """The format `compressed-tensors`."""

    left_out: tuple[str, ...] = ()  # the config's `ignore`
    bits: int = 4
    group: int = 0  # columns that share a scale; 0: all of a row
    symmetric: bool = True
    whole: bool = False  # the stored bytes are the integers themselves (int-quantized)
    targets: tuple[str, ...] = (_LINEAR,)  # patterns like those of `ignore`, or "Linear"
    name = "compressed-tensors"
    decoded_at = "load"

    def holds(self, tensor: TensorSpec) -> bool:
        module = tensor.name.removesuffix(".weight")
        is_linear = (
            len(tensor.shape) == 2 and module != tensor.name and not module.endswith(_EMBEDDINGS)
        )
        is_meant = _LINEAR in self.targets or _is_named(module, self.targets)
        return is_linear and is_meant and not _is_named(module, self.left_out)

    def stored_rows(self, tensor: TensorSpec) -> tuple[StoredRows, ...]:
        rows, columns = tensor.shape
        groups = -(-columns // (self.group or columns))
        words = -(-columns * self.bits // _WORD_BITS)
        codes = StoredRows(tensor, (rows, words), ("I32",), ".weight_packed")
        if self.whole:
            codes = StoredRows(tensor, tensor.shape, ("I8",))
        bits = struct.unpack("<I", struct.pack("<f", 0.02 / _RANDOM_STD[self.bits]))[0]
        scale = (b"\x0f\0", struct.pack("<H", bits >> 16))  # in bf16
        scales = StoredRows(
            tensor,
            (rows, groups),
            ("bfloat16", "float32", "float16"),
            ".weight_scale",
            in_float32=True,
            random=scale,
        )
        if self.symmetric:
            return codes, scales
        per_word = _WORD_BITS // self.bits
        middle = (b"\0", b"\x88" if self.bits == 4 else b"\x80")
        shape = (-(-rows // per_word), groups)
        zeros = StoredRows(tensor, shape, ("I32",), ".weight_zero_point", per_word, random=middle)
        return codes, scales, zeros

    def decode_rows(self, layout: TensorLayout, shard: Shard, out: torch.Tensor) -> None:
        import torch

        from flexgen_h2o.kernels.quantised import Groups, unpack_integers
        from flexgen_h2o.kernels.workspace import row_slices

        columns = layout.shape[1]
        groups = layout.stored[1].shape[1]
        codes = shard.pieces[0].view(shard.rows, -1)
        scales = shard.pieces[1].view(torch.float32).view(-1, groups)
        of_columns = Groups(self.group or columns)
        per_word = _WORD_BITS // self.bits
        if self.symmetric:
            unpack_integers(codes, self.bits, scales, None, of_columns, out, self.whole)
            return
        words = shard.pieces[2].view(torch.int32).view(-1, groups)
        for some in row_slices(shard.rows, columns):
            first = shard.start + some.start
            rows = torch.arange(first, shard.start + some.stop, device=out.device)
            shifts = (self.bits * (rows % per_word)).unsqueeze(1)
            zeros = (words[rows // per_word - shard.start // per_word] >> shifts).bitwise_and_(
                (1 << self.bits) - 1
            )
            unpack_integers(
                codes[some], self.bits, scales[some], zeros.float(), of_columns, out[some]
            )


@lru_cache(maxsize=2**16)
def _is_named(module: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a module matches a pattern, as compressed-tensors does it.

    A pattern is a name, or a regular expression behind "re:".
    """
    return module in patterns or any(
        expression.match(module) for expression in _expressions(patterns)
    )


@lru_cache(maxsize=64)
def _expressions(patterns: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    """Return the regular expressions among the patterns, joined into one.

    Expressions that may begin with flags stay alone, because flags apply to a whole expression.
    """
    found = [pattern.removeprefix(_REGEX) for pattern in patterns if pattern.startswith(_REGEX)]
    alone = [pattern for pattern in found if pattern.startswith("(?")]
    others = [f"(?:{pattern})" for pattern in found if not pattern.startswith("(?")]
    return tuple(map(re.compile, [*alone, "|".join(others)] if others else alone))


def codec_of(config: Mapping[str, Any], itemsize: int, in_int8: bool) -> CompressedTensors:
    name = CompressedTensors.name
    check_keys(name, config, _RULES)
    sparsity = config.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", _DENSE) != _DENSE:
        raise refused(name, "sparsity_config", sparsity, ("format 'dense'",))
    form = config.get("format")
    if form is None:
        raise refused(name, "format", None, (_PACKED, _INTEGERS))
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise refused(name, "config_groups", groups, ("one group",))
    (scheme,) = groups.values()
    weights = _weights_of(scheme, form)
    bits = weights.get("num_bits", 8)
    symmetric = weights.get("symmetric", True)
    group = read_group(name, weights) if weights["strategy"] == "group" else 0
    whole = form == _INTEGERS
    if whole and (bits, symmetric, group) != (8, True, 0):
        raise UsageError(
            f"quantization_config: {name} with format {_INTEGERS!r} is supported in 8 bits, "
            "symmetric, with a scale a"
            " row (strategy 'channel'); give such a checkpoint, or an unquantised one"
        )
    left_out = patterns_of(name, config, "ignore", _REGEX)
    targets = patterns_of(name, scheme, "targets", _REGEX)
    return CompressedTensors(
        itemsize, left_out, bits, group, symmetric, whole, targets, in_int8=in_int8
    )


def _weights_of(scheme: Any, form: str) -> Mapping[str, Any]:
    """Return the `weights` of a group of config_groups.

    Both the group and its weights are checked.
    """
    name = CompressedTensors.name
    if (
        not isinstance(scheme, Mapping)
        or not isinstance(scheme.get("weights"), Mapping)
        or not scheme.get("targets")
    ):
        raise refused(name, "config_groups", scheme, ("a group of targets and weights",))
    check_keys(name, scheme, _GROUP_RULES)
    if scheme.get("format") not in (None, form):
        raise refused(name, "format", scheme["format"], (form,))
    activations = scheme.get("input_activations")
    if activations is not None and (
        not isinstance(activations, Mapping) or activations.get("dynamic") is not True
    ):
        raise refused(name, "input_activations", activations, ("none", "dynamic ones"))
    weights: Mapping[str, Any] = scheme["weights"]
    check_keys(f"{name} weights", weights, _WEIGHT_RULES)
    if weights.get("strategy") is None:
        raise refused(f"{name} weights", "strategy", None, ("group", "channel"))
    return weights

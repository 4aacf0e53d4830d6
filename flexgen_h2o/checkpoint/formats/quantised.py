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
# Strings are compared in lower case, as transformers and GPTQModel do.
Rules = Mapping[str, tuple[Any, ...] | None]
# Fields with which quantisers note how they worked, and which kernels other programs run. Numbers
# in a file do not depend on them, in any format.
_NOTES = (
    # GPTQModel, AutoGPTQ, optimum, and transformers, whose AwqConfig has all fields of GPTQConfig
    "act_group_aware",
    "auto_forward_data_parallel",
    "batch_size",
    "block_name_to_quantize",
    "cache_block_outputs",
    "damp_auto_increment",
    "damp_percent",
    "dataset",
    "device",
    "disable_exllama",
    "exllama_config",
    "fail_safe",
    "failsafe",
    "fallback",
    "foem",
    "gc_mode",
    "gptaq",
    "hessian",
    "hyb_act",
    "max_input_length",
    "meta",
    "mock_quantization",
    "model_file_base_name",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "moe",
    "mse",
    "offload_to_disk",
    "offload_to_disk_path",
    "pack_impl",
    "pad_token_id",
    "parallel_packing",
    "quantizer",
    "static_groups",
    "tokenizer",
    "true_sequential",
    "uri",
    "use_cuda_fp16",
    "use_exllama",
    "v2",
    "v2_alpha",
    "v2_memory_device",
    # AutoRound
    "amp",
    "autoround_version",
    "enable_minmax_tuning",
    "enable_norm_bias_tuning",
    "enable_quanted_input",
    "gradient_accumulate_steps",
    "iters",
    "low_cpu_mem_usage",
    "low_gpu_mem_usage",
    "lr",
    "minmax_lr",
    "not_use_best_mse",
    "nsamples",
    "provider",
    "quant_block_list",
    "scale_dtype",
    "seqlen",
    "static_attention_granularity",
    "static_kv_granularity",
    "to_quant_block_names",
    # activations of 16 bits, which the rules below ask for
    "act_data_type",
    "act_dynamic",
    "act_group_size",
    "act_sym",
)
# Fields of several quantisers that change numbers, with the values that do not.
_IDLE: Rules = {
    "act_bits": (None, 16, 32),
    "adapter": (None, {}),
    "lm_head": (False, None),
    "rotation": (None,),
    "rotation_config": (None, {}),
    "rotation_configs": (None, []),
    "static_attention_dtype": (None,),
    "static_kv_dtype": (None,),
    "super_bits": (None,),
    "super_group_size": (None,),
}
_COMMON: Rules = {**dict.fromkeys(_NOTES), **_IDLE}
_OTHER = "give a checkpoint without it, or an unquantised one"
_PLAIN_MODULES = ("lm_head", "embed_out", "gate", "router")  # quantisers leave them out by default
_EMBEDDING = "embed"  # part of the names of embeddings
# A key that `side_files.quantization_of` adds to GPTQ's settings: whether g_idx is stored.
G_IDX = "has_g_idx"
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
    """Raise UsageError that names a key that is unknown or has an unsupported value.

    rules: of the format. The fields that quantisers write in any format are known besides.
    """
    rules = {**_COMMON, **rules}
    for key, value in found.items():
        if key == "quant_method":
            continue
        if key not in rules:
            raise UsageError(
                f"quantization_config: {where} with {key} ({value!r:.60}) is not known, so that "
                f"weights could be read wrongly; {_OTHER}"
            )
        allowed = rules[key]
        plain = value.lower() if isinstance(value, str) else value
        if allowed is not None and not any(
            type(plain) is type(one) and plain == one for one in allowed
        ):
            raise refused(where, key, value, allowed)


def refused(where: str, key: str, value: Any, allowed: Sequence[Any]) -> UsageError:
    known = " or ".join(map(repr, allowed))
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

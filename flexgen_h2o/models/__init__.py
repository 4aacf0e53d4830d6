"""Model families, one file each.

`FAMILIES` maps a Hugging Face `model_type` to the module of its family. Types with the same network
share one.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch

from flexgen_h2o.checkpoint.formats import checkpoint_codec
from flexgen_h2o.checkpoint.side_files import quantization_of
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import read_object
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.core.units import check_int, shortened
from flexgen_h2o.kernels.linear import RowParts
from flexgen_h2o.kernels.workspace import Workspace

FAMILIES = {
    "opt": "flexgen_h2o.models.opt",
    "llama": "flexgen_h2o.models.llama",
    "mistral": "flexgen_h2o.models.llama",
    "qwen2": "flexgen_h2o.models.llama",
    "qwen3": "flexgen_h2o.models.llama",
    "gpt_neox": "flexgen_h2o.models.gpt_neox",
    "qwen3_moe": "flexgen_h2o.models.moe",
    "mixtral": "flexgen_h2o.models.moe",
    "olmoe": "flexgen_h2o.models.moe",
    "gpt_oss": "flexgen_h2o.models.gpt_oss",
}

# Families that do not run, by a pattern of their models' names in lower case.
NOT_SUPPORTED = {
    r"qwen3\.[5-9]|qwen3-?next|qwen[4-9]": "Qwen3.5 or Qwen3-Next",
    r"(^|-)vl(-|$)|vision|omni|multimodal|llava|pixtral": "vision-language",
    r"embedding|reranker|(^|-)bge(-|$)|(^|-)e5(-|$)": "embedding",
    r"gemma": "Gemma",
    r"^deepseek-(v[2-9]|r1$|r1-zero|r1-\d|coder-v2|moe|ocr)": "DeepSeek MoE",
    r"^phi-": "Phi",
    r"llama-?4": "Llama 4",
    r"^glm-|chatglm": "GLM",
    r"^kimi-": "Kimi",
    r"^minimax-": "MiniMax",
    r"^falcon-": "Falcon",
    r"mamba|jamba|rwkv|^lfm": "recurrent",
    r"^granite-": "Granite",
    r"command-[ar]|^c4ai|^aya-": "Cohere",
    r"^gpt-?2|distilgpt2|^gpt-j|gpt-neo-": "GPT-2, GPT-J or GPT-Neo",
    r"^bloom": "BLOOM",
    r"bert|(^|-)t5(-|$)|bart|whisper": "encoder",
    r"^olmo-|^olmo[23]": "OLMo",
    r"^smollm3": "SmolLM3",
    r"starcoder": "StarCoder",
    r"^nemotron": "Nemotron",
    r"^ernie": "ERNIE",
    r"^hunyuan": "Hunyuan",
    r"^exaone": "EXAONE",
}

# Far beyond any model: a damaged config must not lead to sizes that no float can represent.
MAX_POSITIONS = 2**30
MAX_QUOTED = 300  # characters of a message of transformers that are quoted
_BUILT_IN = Path(__file__).with_name("built_in.json")
GENERATION_CONFIG = "generation_config.json"
# Fields that may hold the config of the text model (GenerationConfig.from_model_config).
TEXT_CONFIGS = ("decoder", "generator", "text_config")
# Fields of classifiers. transformers would make a table of as many entries as the config says.
_LABELS = ("num_labels", "id2label", "label2id")

Weights = Mapping[str, RowParts]


class Hidden(NamedTuple):
    """The hidden states of a micro-batch, changed in place.

    All fields except x are for mixtures of experts.
    """

    # (tokens, width), the residual stream.
    x: torch.Tensor
    # (tokens, width): sum of the experts' outputs for each token so far. It is added to x after the
    # last expert.
    mixed: torch.Tensor | None = None
    # (tokens, per_token) int32: the experts of each token, set by the block's router.
    # `sort_choices` then replaces them by their sorted places.
    chosen: torch.Tensor | None = None
    # (tokens, per_token) fp32: the weights of those experts, in the same order.
    weights: torch.Tensor | None = None
    # For each expert, the number of tokens that have chosen it.
    counts: Sequence[int] = ()


class Queries(NamedTuple):
    """The queries, keys and values of some tokens, before any rotary embedding.

    A family's `attention` makes them.
    """

    q: torch.Tensor  # (tokens, heads, d)
    k: torch.Tensor  # (tokens, kv heads, d)
    v: torch.Tensor  # (tokens, kv heads, d)
    # (heads,): learned logits. Each joins the softmax of its head's queries and has no value.
    sinks: torch.Tensor | None = None


Attention = Generator[Queries, torch.Tensor, None]


def end_attention(attention: Attention, attended: torch.Tensor) -> None:
    """Send the attention's output, (tokens, heads x d), to a layer, which then runs to its end."""
    with suppress(StopIteration):
        attention.send(attended)


class Family(Protocol):
    """The functions that each file in this folder has.

    They are pure, except for tensors that they are told to fill.

    Weights map a TensorSpec's role to the row parts of that tensor (a vector has one part). `x` is
    (tokens, width), the residual stream, changed in place.

    `attention` computes the whole of a block that has no tensors for `mlp`. It yields its queries
    and is sent the attention's output (`end_attention`), so several micro-batches, each with its
    own KV, can be computed as one. A block with experts runs `route` after `attention`, with the
    same tensors. Once choices are sorted, it runs `experts` for each group. `head` fills the logits
    (rows, n) of n rows of its table for some positions, x (rows, hidden), which it does not change.
    """

    def read_spec(self, name: str, config: Mapping[str, Any]) -> ModelSpec: ...

    def embed(
        self,
        spec: ModelSpec,
        w: Weights,
        ids: torch.Tensor,
        positions: torch.Tensor,
        x: torch.Tensor,
        ws: Workspace,
    ) -> None: ...

    def attention(
        self, spec: ModelSpec, w: Weights, x: torch.Tensor, ws: Workspace
    ) -> Attention: ...

    def mlp(self, spec: ModelSpec, w: Weights, x: torch.Tensor, ws: Workspace) -> None: ...

    def route(self, spec: ModelSpec, w: Weights, hidden: Hidden, ws: Workspace) -> None: ...

    def experts(
        self, spec: ModelSpec, w: Weights, group: range, hidden: Hidden, ws: Workspace
    ) -> None: ...

    def head(
        self, spec: ModelSpec, w: Weights, x: torch.Tensor, logits: torch.Tensor, ws: Workspace
    ) -> None: ...


def family_of(spec: ModelSpec) -> Family:
    return _load(spec.family)


def check_family(spec: ModelSpec, name: str, flag: str) -> None:
    """Raise UsageError if a model does not belong to the family that the user names."""
    if spec.family != name:
        raise UsageError(f"{flag} {name}: {spec.name} is {spec.family}; leave the flag out")


def spec_from_config(name: str, config: Mapping[str, Any], where: str) -> ModelSpec:
    """Return the shape of the model that a Hugging Face config describes.

    `where` names its file in errors.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UsageError(
            f"{where}: model_type {model_type!r} is not supported (known: "
            f"{', '.join(sorted(FAMILIES))})"
        )
    try:
        checkpoint_codec(config.get("quantization_config"))
        spec = replace(
            _load(model_type).read_spec(name, config),
            quantization=config.get("quantization_config"),
        )
        check_int("max_position_embeddings", spec.max_positions, low=1, high=MAX_POSITIONS)
        return _known(spec)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


@lru_cache(maxsize=16)
def _known(spec: ModelSpec) -> ModelSpec:
    """Return the same object for equal specs.

    The planner's tables would otherwise compare thousands of tensors at each look-up.
    """
    return spec


def spec_from_folder(name: str, folder: Path) -> tuple[ModelSpec, dict[str, Any]]:
    """Return the shape and the config of a checkpoint folder.

    transformers fills in the config's defaults. The spec's ends of a sequence are those of
    transformers' generate.
    """
    path = folder / "config.json"
    raw = {key: value for key, value in read_object(path, str(path)).items() if key not in _LABELS}
    quantization = quantization_of(folder, raw.get("quantization_config"))
    if quantization is not None:
        raw["quantization_config"] = quantization
    known = isinstance(raw.get("model_type"), str) and raw["model_type"] in FAMILIES
    config = _with_defaults(raw, str(path)) if known else raw
    spec = spec_from_config(name, config, str(path))
    ends = _generation_ends(folder, raw)
    if ends != spec.eos_token_ids:
        spec = _known(replace(spec, eos_token_ids=ends))
        config = {**config, "eos_token_id": list(ends)}
    return spec, config


def _generation_ends(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids that end a sequence, as transformers' generate finds them.

    They are those of generation_config.json. Without the file they are those that config.json
    itself has, or else the config of its text model. Defaults of transformers' config classes are
    not used.
    """
    path = folder / GENERATION_CONFIG
    if not path.exists():
        inner = next((config[key] for key in TEXT_CONFIGS if config.get(key)), None)
        found = config.get("eos_token_id")
        if found is None and isinstance(inner, Mapping):
            found = inner.get("eos_token_id")
        return read_ends(found)
    try:
        return read_ends(read_object(path, str(path)).get("eos_token_id"))
    except UsageError as error:
        raise UsageError(f"{path}: {error}; correct it, or remove the file") from error


def read_ends(value: object) -> tuple[int, ...]:
    """Return the ids of an `eos_token_id`, which is null, one id or a list.

    An id that is not in the vocabulary ends no sequence. Raises UsageError for anything but whole
    numbers.
    """
    ends = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(check_int("eos_token_id", one, low=-1, high=2**31 - 1) for one in ends)


def built_in_spec(name: str) -> tuple[ModelSpec, dict[str, Any]] | None:
    """Return spec and config of a public model by its hub id, or None.

    The id may be given without the organisation.
    """
    for known, raw in _built_in_configs().items():
        if name.lower() in (known.lower(), known.lower().split("/")[-1]):
            config = _with_defaults(raw, known)
            return spec_from_config(known, config, known), config
    return None


def built_in_names() -> list[str]:
    return list(_built_in_configs())


@cache
def _built_in_configs() -> dict[str, dict[str, Any]]:
    """Return the configs of public models by hub id. Defaults of transformers are left out."""
    found: dict[str, dict[str, Any]] = json.loads(_BUILT_IN.read_bytes())
    return found


def _load(family: str) -> Family:
    return cast(Family, importlib.import_module(FAMILIES[family]))


def _with_defaults(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    from transformers import AutoConfig

    try:
        return dict(AutoConfig.for_model(**deepcopy(dict(raw))).to_dict())
    except Exception as error:  # transformers raises many kinds for a bad field
        raise UsageError(
            f"{where}: transformers cannot read this config ({one_line(error)})"
        ) from error


def one_line(error: Exception) -> str:
    """Return the first two lines of a message of transformers, which say what is wrong.

    The whole message may quote a whole config.
    """
    return shortened(" ".join(line.strip() for line in str(error).splitlines()[:2]), MAX_QUOTED)

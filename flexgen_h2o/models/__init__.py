"""Model families: one file each. `FAMILIES` maps a Hugging Face `model_type` to the module that knows it; types that
are the same network share one.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch

from flexgen_h2o.checkpoint.formats import check_quantization
from flexgen_h2o.checkpoint.side_files import quantization_beside
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

MOST_POSITIONS = 2**30  # far beyond any model: a damaged config must not become sizes that no float holds
MOST_QUOTED = 300  # characters of a message of transformers
GENERATION_CONFIG = "generation_config.json"
# Of classifiers; transformers makes a table of as many entries as the config says.
_LABELS = ("num_labels", "id2label", "label2id")

Weights = Mapping[str, RowParts]


class Hidden(NamedTuple):
    """The hidden states of a micro-batch, changed in place. x: (tokens, width), the residual stream.

    Of a mixture of experts also: mixed, (tokens, width): the sum up to now of what experts give for each token, which
    is added to x after the last of them; chosen (int32) and weights (fp32), (tokens, per_token): the experts of each
    token and their weights, as the block's router has them, and then as `sort_choices` orders them; counts: how many
    tokens have chosen each expert.
    """

    x: torch.Tensor
    mixed: torch.Tensor | None = None
    chosen: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    counts: Sequence[int] = ()


class Queries(NamedTuple):
    """What tokens attend with: q, k, v, each (tokens, heads, d), before any rotary embedding.

    sinks: (heads,), learned logits, each of which joins the softmax of its head's queries and has no value.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None = None


Attention = Generator[Queries, torch.Tensor, None]


def end_attention(attention: Attention, attended: torch.Tensor) -> None:
    """Send what the queries have attended to, (tokens, heads x d): the layer goes on to its end."""
    with suppress(StopIteration):
        attention.send(attended)


class Family(Protocol):
    """What a file in this folder offers. All functions are pure but for the tensors they are told to fill.

    Weights map a TensorSpec's role to the row parts of that tensor (a vector has one part). `x` is (tokens, width),
    the residual stream, changed in place. `attention` computes the whole of a block that has no tensors for `mlp`; it
    yields its queries and is sent what they have attended to (`end_attention`), so that several micro-batches, each
    with KV of its own, may be computed as one.
    A block with experts has `route` after `attention`, with the same tensors, and, once choices are sorted, `experts`
    for each group.
    `head` fills the logits (rows, n) that n rows of its table give for some positions, x (rows, hidden), left as it is.
    """

    BUILT_IN: dict[str, dict[str, Any]]  # public config by model id, with its model_type

    def read_spec(self, name: str, config: Mapping[str, Any]) -> ModelSpec: ...

    def embed(
        self, spec: ModelSpec, w: Weights, ids: torch.Tensor, positions: torch.Tensor, x: torch.Tensor, ws: Workspace
    ) -> None: ...

    def attention(self, spec: ModelSpec, w: Weights, x: torch.Tensor, ws: Workspace) -> Attention: ...

    def mlp(self, spec: ModelSpec, w: Weights, x: torch.Tensor, ws: Workspace) -> None: ...

    def route(self, spec: ModelSpec, w: Weights, hidden: Hidden, ws: Workspace) -> None: ...

    def experts(self, spec: ModelSpec, w: Weights, group: range, hidden: Hidden, ws: Workspace) -> None: ...

    def head(self, spec: ModelSpec, w: Weights, x: torch.Tensor, logits: torch.Tensor, ws: Workspace) -> None: ...


def family_of(spec: ModelSpec) -> Family:
    return _load(spec.family)


def check_family(spec: ModelSpec, name: str, flag: str) -> None:
    """UsageError where a model is not of the family that somebody names."""
    if spec.family != name:
        raise UsageError(f"{flag} {name}: {spec.name} is {spec.family}; leave the flag out")


def spec_from_config(name: str, config: Mapping[str, Any], where: str) -> ModelSpec:
    """The shape of the model that a Hugging Face config describes; `where` names its file in errors."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UsageError(f"{where}: model_type {model_type!r} is not supported (known: {', '.join(sorted(FAMILIES))})")
    try:
        check_quantization(config.get("quantization_config"))
        spec = replace(_load(model_type).read_spec(name, config), quantization=config.get("quantization_config"))
        check_int("max_position_embeddings", spec.max_positions, low=1, high=MOST_POSITIONS)
        return _known(spec)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


@lru_cache(maxsize=16)
def _known(spec: ModelSpec) -> ModelSpec:
    """The same object for equal ones: the planner's tables would compare thousands of tensors at each look-up."""
    return spec


def spec_from_folder(name: str, folder: Path) -> tuple[ModelSpec, dict[str, Any]]:
    """Read `config.json` of a checkpoint folder, its defaults filled in by transformers.

    The end-of-sequence ids are those of its `generation_config.json`, where it has some, as in transformers' generate.
    """
    path = folder / "config.json"
    raw = {key: value for key, value in read_object(path, str(path)).items() if key not in _LABELS}
    if raw.get("quantization_config") is None and (beside := quantization_beside(folder)) is not None:
        raw["quantization_config"] = beside
    known = isinstance(raw.get("model_type"), str) and raw["model_type"] in FAMILIES
    config = _with_defaults(raw, str(path)) if known else raw
    spec = spec_from_config(name, config, str(path))
    ends = _generation_ends(folder / GENERATION_CONFIG)
    if ends is not None and ends != spec.eos_token_ids:
        spec, config = _known(replace(spec, eos_token_ids=ends)), {**config, "eos_token_id": list(ends)}
    return spec, config


def _generation_ends(path: Path) -> tuple[int, ...] | None:
    """None: there is no such file, or none in it."""
    if not path.exists():
        return None
    found = read_object(path, str(path)).get("eos_token_id")
    try:
        return None if found is None else read_ends(found)
    except UsageError as error:
        raise UsageError(f"{path}: {error}; correct it, or remove the file") from error


def read_ends(value: object) -> tuple[int, ...]:
    """The ids of an `eos_token_id`: none, one or a list; what is not in the vocabulary ends no row. UsageError: others
    than whole numbers."""
    ends = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(check_int("eos_token_id", one, low=-1, high=2**31 - 1) for one in ends)


def built_in_spec(name: str) -> tuple[ModelSpec, dict[str, Any]] | None:
    """Spec and config of a public model by its hub id (with or without the organisation), or None."""
    for known, raw in _built_in().items():
        if name.lower() in (known.lower(), known.lower().split("/")[-1]):
            config = _with_defaults(raw, known)
            return spec_from_config(known, config, known), config
    return None


def built_in_names() -> list[str]:
    return list(_built_in())


def _built_in() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for family in FAMILIES:
        found |= _load(family).BUILT_IN
    return found


def _load(family: str) -> Family:
    return cast(Family, importlib.import_module(FAMILIES[family]))


def _with_defaults(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    from transformers import AutoConfig

    try:
        return dict(AutoConfig.for_model(**deepcopy(dict(raw))).to_dict())
    except Exception as error:  # transformers raises many kinds for a bad field
        raise UsageError(f"{where}: transformers cannot read this config ({one_line(error)})") from error


def one_line(error: Exception) -> str:
    """The first two lines of a message, where transformers says what is wrong; it may quote a whole config."""
    return shortened(" ".join(line.strip() for line in str(error).splitlines()[:2]), MOST_QUOTED)

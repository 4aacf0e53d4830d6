"""Holds a model's spec against a checkpoint: every tensor there, of the right shape, in a dtype we compute in.

Knows names only as strings: which tensors a model has is the spec's business, where bytes lie the index's.
"""

from __future__ import annotations

from pathlib import Path

from flexgen_h2o.checkpoint.stored import Checkpoint, StoredTensor
from flexgen_h2o.config import DTYPE_BYTES, ModelSpec, TensorSpec
from flexgen_h2o.errors import UsageError

# Checkpoints of the bare model, saved without its head, have names without it.
_PREFIX = "model."


def match(spec: ModelSpec, stored: dict[str, StoredTensor], folder: Path) -> Checkpoint:
    """The tensors of `spec`, keyed by `TensorSpec.name`; what the files hold besides is ignored.

    A name (or one of its aliases) is found as it is, or with a leading "model." added or removed. Raises UsageError
    that names the tensor and the folder (missing) or the file (shape or dtype).
    """
    tensors: dict[str, StoredTensor] = {}
    for unit in spec.layers(sep_layer=False).units:
        for tensor in unit.tensors:
            found = _find(tensor, stored)
            if found is None:
                raise UsageError(
                    f"{folder}: tensor {tensor.name!r} is not in this checkpoint; give a folder whose weights belong"
                    " to its config.json"
                )
            _check(tensor, found)
            tensors[tensor.name] = found
    return Checkpoint(folder, tensors)


def _find(tensor: TensorSpec, stored: dict[str, StoredTensor]) -> StoredTensor | None:
    names = (tensor.name, *tensor.aliases)
    return next((stored[n] for name in names for n in (name, _other_name(name)) if n in stored), None)


def _other_name(name: str) -> str:
    return name[len(_PREFIX) :] if name.startswith(_PREFIX) else _PREFIX + name


def _check(tensor: TensorSpec, found: StoredTensor) -> None:
    if found.shape != tensor.shape:
        raise UsageError(
            f"{found.path}: tensor {tensor.name!r} has shape {found.shape}, config.json asks for {tensor.shape};"
            " give a folder whose weights belong to its config.json"
        )
    if found.dtype not in DTYPE_BYTES:
        raise UsageError(
            f"{found.path}: tensor {tensor.name!r} is stored as {found.dtype}; only {', '.join(DTYPE_BYTES)} can be"
            " streamed, give an unquantised checkpoint"
        )

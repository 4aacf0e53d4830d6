"""Find the tensors of a model's spec in a checkpoint, by every name that transformers accepts.

No weights are read. The user is told once which tensors are not used.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from flexgen_h2o.checkpoint.formats import StoredRows, checkpoint_format, layouts_of
from flexgen_h2o.checkpoint.names import HEADS, find, variants
from flexgen_h2o.checkpoint.safetensors import (
    AGAIN,
    BIN,
    SAFETENSORS,
    Checkpoint,
    StoredTensor,
    names_in,
    read_weight_map,
)
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import open_regular
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.core.notes import say_once
from flexgen_h2o.core.units import MIB

# Buffers of older versions of transformers. Its own report on unused tensors leaves them out.
_BUFFERS = re.compile(r"(rotary_emb\.inv_freq|attention\.(bias|masked_bias)|(^|\.)position_ids)$")
_OTHER_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".gguf",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".onnx",
    ".npz",
)
_SHARD = re.compile(r"-\d+-of-\d+\.(safetensors|bin)$")
_MAX_BIAS_BYTES = MIB  # largest bias that is read: one that is all zeros changes nothing
_BELONGS = "give a folder whose weights belong to its config.json"
# Names of tensors that quantisers store instead of a module's `weight`, and the quantisers that do.
_QUANTISERS = {
    "qweight": "GPTQ or AWQ",
    "weight_packed": "compressed-tensors",
    "weight_blocks": "MXFP4",
    "W_q": "HQQ",
    "weight.absmax": "bitsandbytes",
    "SCB": "bitsandbytes",
}


def match(spec: ModelSpec, stored: Mapping[str, StoredTensor], folder: Path) -> Checkpoint:
    """Return the stored tensors of `spec`, by their keys.

    Other tensors in the files are not used, which the user is told once. Raises UsageError that
    names the folder and a missing tensor, or the file and a tensor with a wrong shape or dtype. A
    head that is tied is a copy of the table (`tied.has_other_head`).
    """
    tensors: dict[str, StoredTensor] = {}
    used: list[StoredTensor | None] = []
    form = checkpoint_format(spec)
    units = [layouts_of(form, unit.tensors) for unit in spec.layers(sep_layer=False).units]
    wanted = [rows for layouts in units for layout in layouts for rows in layout.stored]
    slices = Counter(rows.name for rows in wanted if rows.index is not None)
    for rows in wanted:
        found = find(rows.names, spec.prefix, stored)
        if found is not None:
            used.append(found)
            _check(
                rows,
                rows.shape if rows.index is None else (slices[rows.name], *rows.shape),
                found,
                stored,
            )
            tensors[rows.key] = found if rows.index is None else found.item(rows.index)
            continue
        place = rows.tensor.stacked if rows.is_values else None
        stack = None if place is None else find(place.names, spec.prefix, stored)
        if place is None or stack is None:
            raise _missing(spec, rows, stored, folder)
        used.append(stack)
        _check(rows, place.shape, stack, stored)
        slice_rows = stack.item(place.index)
        tensors[rows.key] = slice_rows.rows(place.first, place.first + rows.shape[0])
    if spec.tied and spec.head:
        used += (find((name,), spec.prefix, stored) for name in HEADS)  # copies of the table
    _say_unused(spec, stored, {(one.path, one.offset) for one in used if one is not None}, folder)
    return Checkpoint(folder, tensors)


def _check(
    wanted: StoredRows,
    shape: tuple[int, ...],
    found: StoredTensor,
    stored: Mapping[str, StoredTensor],
) -> None:
    kind = _quantiser_of(wanted.name, stored)
    if kind is not None and (found.shape != shape or found.dtype not in wanted.dtypes):
        raise UsageError(
            f"{found.path}: tensor {wanted.name!r} is quantised by {kind}, and config.json says "
            "nothing of it; give an"
            " unquantised checkpoint, or one in a format that docs/reference/models.md lists"
        )
    if found.shape != shape:
        raise UsageError(
            f"{found.path}: tensor {wanted.name!r} has shape {found.shape}, config.json asks for "
            f"{shape}; {_BELONGS}"
        )
    if found.dtype not in wanted.dtypes:
        raise UsageError(
            f"{found.path}: tensor {wanted.name!r} is stored as {found.dtype}, and is read as"
            f" {' or '.join(wanted.dtypes)}; give a checkpoint in one of the formats that"
            " docs/reference/models.md lists"
        )


def _quantiser_of(name: str, stored: Mapping[str, StoredTensor]) -> str | None:
    """Return who has quantised the matrix `name`, by the names of its module's tensors.

    The matrix is expected as plain numbers. None: no quantiser is recognised.
    """
    base = name.removesuffix("weight")
    return next(
        (kind for end, kind in _QUANTISERS.items() if base != name and base + end in stored), None
    )


def _missing(
    spec: ModelSpec, rows: StoredRows, stored: Mapping[str, StoredTensor], folder: Path
) -> UsageError:
    """Return the error for a missing tensor, with the advice that fits its cause."""
    what = f"{folder}: tensor {rows.name!r} is not in this checkpoint"
    known = [variant for name in rows.names for variant in variants(name, spec.prefix)]
    kind = next(filter(None, (_quantiser_of(name, stored) for name in known)), None)
    if kind is not None and spec.quantization is None:
        return UsageError(
            f"{folder}: its matrices are quantised ({kind}), and config.json has no "
            "quantization_config; copy the"
            " quantiser's settings into it under that name, or give an unquantised checkpoint"
        )
    module = rows.name.rpartition(".")[0]
    if spec.quantization is not None and find((f"{module}.weight",), spec.prefix, stored):
        return UsageError(
            f"{what}, which has {module + '.weight'!r}: this matrix is not quantised, and the "
            "quantization_config of"
            " config.json says that it is; name it there under modules_to_not_convert, or give a "
            "folder whose weights"
            " belong to its config.json"
        )
    in_index = _listed(folder)
    for name in known:
        if name in in_index:
            index, shard = in_index[name]
            return UsageError(
                f"{folder / shard}: {index} says that tensor {name!r} is in it, but it is not; "
                f"{AGAIN}"
            )
    if rows.name in HEADS and not spec.tied:
        return UsageError(
            f"{what}, and config.json does not tie the head to the embedding; if the model was "
            "trained with them tied,"
            " set tie_word_embeddings to true in config.json"
        )
    if any(".lora_A." in name for name in stored):
        return UsageError(
            f"{folder}: holds a LoRA adapter, not a model; merge it into its base model (peft's "
            "merge_and_unload), and"
            " give the folder that this makes"
        )
    longer = next((name for name in stored for one in known if name.endswith(f".{one}")), None)
    if longer is not None:
        return UsageError(
            f"{what}, which has {longer!r}: its names begin with something that transformers does "
            "not know of"
            f" {spec.family} models either; rename the tensors, or save the language model alone"
        )
    return UsageError(f"{what}; {_BELONGS}")


def no_weights(folder: Path) -> UsageError:
    """Return the error for a folder without a checkpoint under one of the usual names."""
    what = (
        f"--model {folder}: no weights there (no {SAFETENSORS[0]}, no {BIN[0]}, no index of either)"
    )
    others = sorted(path.name for path in folder.iterdir() if path.suffix in _OTHER_WEIGHTS)
    if not others:
        return UsageError(what)
    whole = [
        name
        for name in others
        if name.endswith((".safetensors", ".bin")) and not name.startswith("adapter_")
    ]
    if len(whole) == 1:
        kind = SAFETENSORS[0] if whole[0].endswith(".safetensors") else BIN[0]
        return UsageError(f"{what}; there is {whole[0]}: if it is the whole model, name it {kind}")
    if _SHARD.search(others[0]):
        return UsageError(f"{what}; there is {others[0]}, but no index of its shards; {AGAIN}")
    return UsageError(
        f"{what}; there is {others[0]}, which is not read; give the Hugging Face folder of the "
        "model"
    )


def _listed(folder: Path) -> dict[str, tuple[str, str]]:
    """Return, by tensor name, the (index, shard) file names of a checkpoint with an index."""
    names = names_in(folder)
    if names is None or (folder / names[0]).is_file():
        return {}
    return {name: (names[1], shard) for name, shard in read_weight_map(folder / names[1]).items()}


# ---- Tensors that are not used


def _say_unused(
    spec: ModelSpec,
    stored: Mapping[str, StoredTensor],
    used: set[tuple[Path, int]],
    folder: Path,
) -> None:
    """Tell the user which tensors no layer of the model reads, except those that change nothing.

    used: path and offset of tensors that are read. The exceptions are further names of these,
    empty tensors, buffers, biases of zeros, and shapes of packed matrices, which config.json gives
    too.
    """
    unused = [
        name
        for name, one in stored.items()
        if (one.path, one.offset) not in used
        and one.nbytes
        and not _BUFFERS.search(name)
        and not (name.endswith(".bias") and _is_zero(one))
        and not (name.endswith(".weight_shape") and name.removesuffix("shape") + "packed" in stored)
    ]
    if unused:
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        say_once(
            f"{folder}: {unused[0]!r}{more} in the checkpoint: not used, because the model that "
            "config.json describes"
            " has no such tensor"
        )


def _is_zero(bias: StoredTensor) -> bool:
    """Return whether all bytes of the bias are 0.

    Quantisers write such biases for layers that have none.
    """
    if bias.nbytes > _MAX_BIAS_BYTES:
        return False
    try:
        with open_regular(bias.path) as file:
            file.seek(bias.offset)
            return not any(file.read(bias.nbytes))
    except OSError:
        return False

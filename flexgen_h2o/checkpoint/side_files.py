"""Files beside config.json that matter for it: settings of older quantisers, and adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexgen_h2o.checkpoint.formats.quantised import G_IDX
from flexgen_h2o.checkpoint.names import names_of_tensors
from flexgen_h2o.core.files import read_object
from flexgen_h2o.core.notes import say_once

ADAPTER = "adapter_config.json"
# AutoGPTQ's and AutoAWQ's file names, in the order in which vLLM looks for them.
_SETTINGS = ("quantize_config.json", "quant_config.json")
# Settings of both files that decide how weights are read, with what config.json means without
# them. None: nothing.
_DECIDING = {
    "bits": None,
    "group_size": None,
    "sym": None,
    "desc_act": None,
    "checkpoint_format": "gptq",
}
# Values of quant_method in which columns may be out of order.
_WITH_G_IDX = ("gptq", "auto-round", "intel/auto-round")
_OF_AWQ = ("w_bit", "q_group_size", "zero_point")


def quantization_of(folder: Path, found: Any) -> Any:
    """Return the quantization_config of a checkpoint; None if it is not quantised.

    found: that of config.json. GPTQ's settings also say whether g_idx is stored, as far as the
    names of tensors can be read.
    """
    if found is None:
        found = _quantization_beside(folder)
    elif isinstance(found, dict):
        _say_differences(folder, found)
    method = found.get("quant_method") if isinstance(found, dict) else None
    if method not in _WITH_G_IDX:
        return found
    names = names_of_tensors(folder)
    if any(name.endswith(".qweight") for name in names):
        return {**found, G_IDX: any(name.endswith(".g_idx") for name in names)}
    return found


def _quantization_beside(folder: Path) -> dict[str, Any] | None:
    """Return the quantization_config that a quantiser wrote into a file of its own.

    Returns None if there is no such file, or if the checkpoint's tensor names show that it is not
    quantised in that way. Raises UsageError for a file that is no JSON object.
    """
    path = next((path for name in _SETTINGS if (path := folder / name).is_file()), None)
    if path is None:
        return None
    names = names_of_tensors(folder)
    if names and not any(name.endswith(".qweight") for name in names):
        return None
    found = read_object(path, str(path))
    method = "awq" if any(key in found for key in _OF_AWQ) else "gptq"
    say_once(f"{path}: read as quantization_config, which config.json does not have")
    return {"quant_method": method, **found}


def _say_differences(folder: Path, found: dict[str, Any]) -> None:
    """Tell the user of settings that a quantiser's own file has otherwise than config.json.

    Only config.json counts, as in transformers.
    """
    for path in (folder / name for name in _SETTINGS):
        if not path.is_file():
            continue
        beside = read_object(path, str(path))
        counts = {**_DECIDING, **found}
        differing = [
            f"{key} {beside[key]!r:.20} and not {counts[key]!r:.20}"
            for key in _DECIDING
            if counts[key] is not None and beside.get(key) not in (None, counts[key])
        ]
        if differing:
            say_once(
                f"{path}: has {', '.join(differing)}, as config.json has, which counts; if answers "
                "are wrong, mend config.json"
            )


def say_adapter(folder: Path) -> None:
    """Tell the user that an adapter beside a model is not used."""
    if (folder / ADAPTER).is_file():
        say_once(
            f"{folder / ADAPTER}: this adapter is not used, the base model answers; merge it into "
            "the model (peft's"
            " merge_and_unload), and give the folder that this makes"
        )

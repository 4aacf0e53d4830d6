"""quant_method "auto-round": matrices that AutoRound stores in the layout of GPTQ or of AWQ.

Its `packing_format` says which. Names with "gptq" store each zero less 1, as GPTQ's first version
does. "auto_round" alone and "gptqmodel" store the zero itself, as its second version does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flexgen_h2o.checkpoint.formats import Codec, awq, gptq
from flexgen_h2o.checkpoint.formats.quantised import G_IDX, Rules, check_keys, refused

_NAME = "auto-round"
_GPTQ_V1 = {"quant_method": "gptq", "checkpoint_format": "gptq"}
_GPTQ_V2 = {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}
_AWQ = {"quant_method": "awq"}
# The layout's own settings, by packing_format.
_PACKINGS = {
    "auto": _GPTQ_V1,
    "auto_round:auto_gptq": _GPTQ_V1,
    "auto_round:auto_gptq:exllamav2": _GPTQ_V1,
    "auto_round:gptq": _GPTQ_V1,
    "auto_round:gptq:exllamav2": _GPTQ_V1,
    "auto_round": _GPTQ_V2,
    "auto_round:exllamav2": _GPTQ_V2,
    "auto_round:gptqmodel": _GPTQ_V2,
    "auto_round:auto_awq": _AWQ,
    "auto_round:awq": _AWQ,
}
_DEFAULT_PACKING = "auto_round:gptq"
_RULES: Rules = {
    "bits": (4, 8),
    "group_size": None,
    "sym": (True, False),
    "data_type": ("int",),
    "packing_format": tuple(_PACKINGS),
    "backend": None,
    "desc_act": (False, None),
    "modules_in_block_to_quantize": None,
    "modules_to_not_convert": None,
    "extra_config": None,
    G_IDX: (True, False),
}
_PLAIN_BITS = 16  # of a module that is left plain
_A_NAME = re.compile(r"[\w.]+")


def codec_of(config: Mapping[str, Any], itemsize: int, in_int8: bool) -> Codec:
    check_keys(_NAME, config, _RULES)
    # Older versions wrote the packing format as `backend`, which otherwise names a kernel.
    packing = config.get("packing_format")
    backend = str(config.get("backend") or "").lower()
    if packing is None and backend in _PACKINGS:
        packing = backend
    if packing is None and ":" in backend:
        raise refused(_NAME, "backend", backend, tuple(_PACKINGS))
    settings: dict[str, Any] = {
        "bits": config.get("bits", 4),
        "group_size": config.get("group_size", 128),
        "modules_to_not_convert": config.get("modules_to_not_convert"),
        **_PACKINGS[str(packing or _DEFAULT_PACKING).lower()],
    }
    if settings["quant_method"] == "awq":
        plain = [*(settings["modules_to_not_convert"] or ()), *_plain_modules(config)]
        settings["modules_to_not_convert"] = plain or None
        return awq.codec_of(settings, itemsize, in_int8)
    settings |= {
        "sym": config.get("sym", True),
        "modules_in_block_to_quantize": config.get("modules_in_block_to_quantize"),
        "dynamic": {f"-:{pattern}": {} for pattern in _plain_modules(config)},
        G_IDX: config.get(G_IDX, True),
    }
    return gptq.codec_of(settings, itemsize, in_int8)


def _plain_modules(config: Mapping[str, Any]) -> list[str]:
    """Return patterns of the modules that `extra_config` leaves plain.

    It is a table of names, or of regular expressions that are found anywhere in a name, and of
    settings. Raises UsageError for modules that are quantised with settings of their own.
    """
    extra = config.get("extra_config") or {}
    if not isinstance(extra, Mapping):
        raise refused(_NAME, "extra_config", extra, ("a table of modules",))
    found = []
    for pattern, settings in extra.items():
        if not isinstance(settings, Mapping):
            raise refused(_NAME, "extra_config", settings, ("a table of settings",))
        bits = settings.get("bits", config.get("bits", 4))
        if isinstance(bits, int) and bits >= _PLAIN_BITS:
            found.append(re.escape(pattern) if _A_NAME.fullmatch(pattern) else f".*(?:{pattern}).*")
            continue
        if "lm_head" in pattern:
            raise refused(_NAME, "extra_config for the module", pattern, ("modules in blocks",))
        check_keys(f"{_NAME} extra_config {pattern!r:.60}", settings, _RULES)
        for key in ("bits", "group_size", "sym"):
            value = settings.get(key)
            if value is not None and value != config.get(key, value):
                where = f"{_NAME} extra_config {pattern!r:.60}"
                raise refused(where, key, value, (config[key],))
    return found

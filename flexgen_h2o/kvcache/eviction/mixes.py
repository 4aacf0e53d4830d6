"""The tables from which `--kv-size` and `plan --kv-loss small` choose a setting.

`evaluate frontier --learn` makes them. The table that comes with the package was made on the model
that it names. A table of the user's own model, in the offload folder, takes precedence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import DEFAULT_OFFLOAD_DIR, read_object, usable_path
from flexgen_h2o.kvcache.eviction import make_eviction

SHIPPED = Path(__file__).with_name("kv_size.json")
FOLDER = "kv-size"  # in the offload folder; it has one table per model
SCHEMA = 2  # 2: h2o-norm has no decay
WHOLE = 16  # bits of keys and values that are not packed
_NO_FILE_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_CHARACTERS = 200  # most characters of a model's name in a file name


@dataclass(frozen=True)
class Mix:
    """The settings with the smallest loss that fit into a share of the KV cache's bytes.

    `read_table` makes it.
    """

    least: float  # the smallest share of the bytes that it is for
    eviction: str  # as in `make_eviction`
    cache_bits: int | str  # as in `Policy`; 16: not packed
    cache_window: int  # as in `Policy`
    kl: float  # measured KL divergence from the full cache, in nats


@dataclass(frozen=True)
class KeptWhole:
    """Settings that keep every KV entry and have a small loss. `read_table` makes it."""

    settings: dict[str, Any]  # fields of `Policy`
    kl: float  # KL divergence from the full cache, in nats, measured on `model`
    model: str


@dataclass(frozen=True)
class MixTable:
    """The results of `evaluate frontier --learn` on one model. `read_table` makes it."""

    model: str
    mixes: tuple[Mix, ...]  # largest share first
    small_losses: tuple[KeptWhole, ...]  # the first one packs nothing

    def mix_of(self, share: float) -> Mix:
        """Return the mix for a share of the bytes. The last mix is for all smaller shares too."""
        return next((mix for mix in self.mixes if share >= mix.least), self.mixes[-1])


def table_file(model: str, offload_dir: str | Path | None) -> Path:
    """Return the path of a model's own table. model: the name that commands use."""
    folder = usable_path(
        DEFAULT_OFFLOAD_DIR if offload_dir is None else offload_dir, "--offload-dir"
    )
    name = _NO_FILE_NAME.sub("--", model.strip("/"))
    return folder / FOLDER / f"{name[-_MAX_CHARACTERS:]}.json"


def table_for(model: str | None = None, offload_dir: str | Path | None = None) -> MixTable:
    """Return the table of a model, or the shipped one if the model has none.

    Raise UsageError, which names the file, if the file is not such a table.
    """
    own = None if model is None else table_file(model, offload_dir)
    return read_table(own if own is not None and own.exists() else SHIPPED)


def read_table(path: Path) -> MixTable:
    """Return the table in a file.

    Raise UsageError if `evaluate frontier --learn` does not write such a file.
    """
    try:
        body = read_object(path, f"{path}")
        if body["schema"] != SCHEMA:
            raise ValueError(f"schema is {body['schema']!r}, and this version reads {SCHEMA}")
        mixes = [
            Mix(
                float(one["least"]),
                str(one["eviction"]),
                one["cache_bits"],
                int(one["cache_window"]),
                float(one["kl"]["value"]),
            )
            for one in body["mixes"]
        ]
        model = str(body["model"])
        small = [
            KeptWhole(dict(one["settings"]), float(one["kl"]["value"]), model)
            for one in body["small_losses"]
        ]
        for mix in mixes:
            make_eviction(mix.eviction, kv_bytes=mix.least)
            packed: dict[str, Any] = (
                {} if mix.cache_bits == WHOLE else {"cache_bits": mix.cache_bits}
            )
            Policy(compress_cache=bool(packed), cache_window=mix.cache_window, **packed)
        for one in small:
            Policy(**one.settings)
        if not mixes or not small:
            raise ValueError("there is nothing to choose from")
    except (KeyError, TypeError, ValueError, UsageError) as error:
        raise UsageError(
            f"--kv-size: {path} is no table of `evaluate frontier --learn` ({error}); remove it, "
            "or make it again"
        ) from error
    ordered = tuple(sorted(mixes, key=lambda mix: -mix.least))
    return MixTable(model, ordered, tuple(small))

"""What `--kv-size` and `plan --kv-loss small` choose: tables that `evaluate frontier --learn` made.

The table beside this file was made on the model that it names. A table of one's own model, in the offload folder, is
taken before it.
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
FOLDER = "kv-size"  # in the offload folder: a table for each model
SCHEMA = 1
WHOLE = 16  # bits of keys and values that are not packed
_NO_FILE_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_MOST_CHARACTERS = 200  # of a file's name


@dataclass(frozen=True)
class Mix:
    """What loses least of all that fits into so small a share of the KV cache's bytes.

    least: the smallest share that it is for. eviction: as of `make_eviction`. cache_bits, cache_window: as
    of `Policy`; cache_bits 16: not packed. kl: nats to the full cache, where it was measured.
    """

    least: float
    eviction: str
    cache_bits: int | str
    cache_window: int
    kl: float


@dataclass(frozen=True)
class KeptWhole:
    """A way to keep every KV entry whose loss is small.

    settings: of `Policy`. kl: nats to the full cache, measured on `model`.
    """

    settings: dict[str, Any]
    kl: float
    model: str


@dataclass(frozen=True)
class MixTable:
    """What was found on one model. mixes: the largest share first. small_losses: nothing packed is the first."""

    model: str
    mixes: tuple[Mix, ...]
    small_losses: tuple[KeptWhole, ...]

    def mix_of(self, share: float) -> Mix:
        """Return the mix for a share of the bytes; the last one is for all that are smaller."""
        return next((mix for mix in self.mixes if share >= mix.least), self.mixes[-1])


def table_file(model: str, offload_dir: str | Path | None) -> Path:
    """Return where a model's own table is kept. model: as commands name it."""
    folder = usable_path(DEFAULT_OFFLOAD_DIR if offload_dir is None else offload_dir, "--offload-dir")
    name = _NO_FILE_NAME.sub("--", model.strip("/"))
    return folder / FOLDER / f"{name[-_MOST_CHARACTERS:]}.json"


def table_for(model: str | None = None, offload_dir: str | Path | None = None) -> MixTable:
    """Return the table of a model, or the shipped one where it has none. UsageError names a file that is none."""
    own = None if model is None else table_file(model, offload_dir)
    return read_table(own if own is not None and own.exists() else SHIPPED)


def read_table(path: Path) -> MixTable:
    """Return the table of a file. UsageError where it is not what `evaluate frontier --learn` writes."""
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
            if "attn_sparsity" not in one["settings"]  # of older tables: it saves nothing any more
        ]
        for mix in mixes:
            make_eviction(mix.eviction, kv_bytes=mix.least)
            packed: dict[str, Any] = {} if mix.cache_bits == WHOLE else {"cache_bits": mix.cache_bits}
            Policy(compress_cache=bool(packed), cache_window=mix.cache_window, **packed)
        for one in small:
            Policy(**one.settings)
        if not mixes or not small:
            raise ValueError("there is nothing to choose from")
    except (KeyError, TypeError, ValueError, UsageError) as error:
        raise UsageError(
            f"--kv-size: {path} is no table of `evaluate frontier --learn` ({error}); remove it, or make it again"
        ) from error
    ordered = tuple(sorted(mixes, key=lambda mix: -mix.least))
    return MixTable(model, ordered, tuple(small))

"""Find a model's folder: packaged, local, under --path, or on the hub. No weights are read."""

from __future__ import annotations

import contextlib
import errno
import shutil
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from flexgen_h2o.checkpoint.safetensors import SAFETENSORS, weight_files
from flexgen_h2o.core.errors import DoesNotFitError, FlexgenError, UsageError
from flexgen_h2o.core.files import existing_folder, usable_path
from flexgen_h2o.core.units import format_bytes, format_free

DUMMY = "_DUMMY_"
CONFIG_NAME = "config.json"
# Folders of models that come with the package, by name.
PACKAGED = {"opt-tiny": Path(__file__).resolve().parent.parent / "assets" / "opt-tiny"}

_ORIGINAL = "give the Hugging Face folder or hub id it was made from"
_PAGE = "docs/reference/not-supported.md"
# Endings of weights in formats that are not read, with the remedy.
FOREIGN_WEIGHTS = {
    ".gguf": f"GGUF is not read; {_ORIGINAL}, or convert it ({_PAGE}, GGUF)",
    ".ggml": f"GGML is not read; {_ORIGINAL}",
    ".onnx": f"ONNX is not read; {_ORIGINAL}",
    ".npz": f"MLX's older format is not read; {_ORIGINAL}",
    ".h5": f"TensorFlow's format is not read; {_ORIGINAL}",
    ".msgpack": f"Flax's format is not read; {_ORIGINAL}",
    ".pth": "PyTorch's .pth is not read; give the same model in Hugging Face's format",
    ".pt": "PyTorch's .pt is not read; give the same model in Hugging Face's format",
}

# Files besides weights that the package or transformers' tokenizers read.
_SMALL_FILES = [
    "*.model",
    "tokenizer*",
    "vocab.*",
    "config.json",
    "*_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "merges.txt",
    "chat_template*",
    "tekken.json",
    "random_weights.json",
    ".flexgen_h2o",
]
_SAFETENSORS_FILES = ["*.safetensors", "*.safetensors.index.json"]
_BIN_FILES = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]
# Subfolders, and Mistral's second copy of its weights, which is not read.
_NOT_FETCHED = ["*/*", "consolidated*"]
_HUB_SECONDS = 5.0
# What to do if a download does not fit.
MORE_ROOM = "set HF_HOME to a folder on a larger disk"


class NotOnHubError(UsageError):
    """The model is not in the hub's cache and cannot be fetched from the hub."""


def asks_random(path: str | None) -> bool:
    """Return whether --path asks for random weights."""
    return path is not None and DUMMY in path


def resolve(
    model: str,
    path: str | None,
    revision: str | None = None,
    weights: bool = True,
    made: Path | None = None,
) -> Path | None:
    """Return the folder of `model` (--model) given `path` (--path).

    None: random weights are asked for, and no folder has the model. `model` is a local folder, a
    packaged name or a hub id. A hub id is looked for as `path`, `path`/org/name and `path`/name,
    then in the hub's cache, then on the hub. HF_HUB_OFFLINE and HF_HOME count. A `path` with
    "_DUMMY_" in it asks for random weights, with the config of `model` if that is a folder.
    revision: a branch, tag or commit. weights=False: fetch only config and tokenizer from the hub.
    made: the model's folder if neither `model` nor `path` names one. The hub is then not asked.

    Raises UsageError, with the remedy, if the folder or `path` does not exist or has no
    config.json. Raises NotOnHubError if the model is not cached and cannot be fetched. Raises
    DoesNotFitError if the disk filled up during the download.
    """
    folder = find_folder(model, path) or made
    if asks_random(path):
        return folder
    if path is not None and not usable_path(path, "--path").is_dir():
        raise UsageError(
            f"--path {path}: there is no such folder; name the one with checkpoints, or {DUMMY}"
        )
    return folder or _from_hub(model, revision, weights)


def find_folder(model: str, path: str | None) -> Path | None:
    """Return the folder of `model` without asking the hub or its cache.

    None: only they may know the model. Raises UsageError.
    """
    if not model:
        raise UsageError(
            "--model: a name is missing; give a hub id like org/name or a local folder"
        )
    folder = _local(model)
    if folder is None and path is not None and not asks_random(path):
        parent = usable_path(path, "--path")
        folders = (parent, parent / model, parent / model.rpartition("/")[2])
        folder = next((one for one in folders if _is_there(one / CONFIG_NAME)), None)
    if folder is not None:
        check_links(folder)
    return folder


def _is_there(path: Path) -> bool:
    """Return whether the path is a file, or a link, which may lead nowhere."""
    return path.is_file() or path.is_symlink()


def check_links(folder: Path) -> None:
    """Raise UsageError that names a file of the model that is a link to a missing file.

    Files in a snapshot of the hub's cache are links to its `blobs`.
    """
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and not path.exists() and is_model_file(path.name):
            raise _dangling(path)


def _dangling(path: Path) -> UsageError:
    return UsageError(
        f"{path}: this is a link to {path.readlink()}, which is missing; download the model again "
        "(hf download OWNER/NAME), or copy it with the files that its links lead to (cp -rL)"
    )


def is_model_file(name: str, weights: bool = True) -> bool:
    """Return whether a file with this name in a model's folder is read with the model.

    weights=False: and is no file of weights, nor an index of such files.
    """
    patterns = [*_SMALL_FILES]
    if weights:
        patterns += [*_SAFETENSORS_FILES, "*.bin", "*.bin.index.json"]
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _local(model: str) -> Path | None:
    """Return the folder that `model` itself names, local first, packaged second.

    None: the model must be a hub id.
    """
    folder = usable_path(model, "--model")
    if folder.is_symlink() and not folder.exists():
        raise _dangling(folder)
    if folder.is_dir():
        return _with_config(folder, f"--model {model}")
    for suffix, what in FOREIGN_WEIGHTS.items():
        if model.lower().endswith(suffix):
            raise UsageError(f"--model {model}: {what}")
    if folder.is_file():
        raise UsageError(
            f"--model {model}: is a file; give the folder that it is in, with its {CONFIG_NAME}"
        )
    if model in PACKAGED:
        if not PACKAGED[model].is_dir():
            raise UsageError(
                f"--model {model}: {PACKAGED[model]} is missing; install the package again"
            )
        return _with_config(PACKAGED[model], f"--model {model}")
    if model.startswith(("/", ".", "~")) or folder.exists():
        raise UsageError(
            f"--model {model}: there is no such folder; give a folder with {CONFIG_NAME} or a hub "
            "id"
        )
    return None


def _with_config(folder: Path, what: str) -> Path:
    check_links(folder)
    if not (folder / CONFIG_NAME).is_file():
        snapshots = sorted(path.parent for path in folder.glob(f"snapshots/*/{CONFIG_NAME}"))
        if snapshots:
            raise UsageError(
                f"{what}: this is a model's folder of the hub's cache, and its files are in "
                f"snapshots; give {snapshots[-1]}"
            )
        if (folder / "adapter_config.json").is_file():
            raise UsageError(
                f"{what}: holds an adapter (adapter_config.json), not a model; merge it into its "
                "base model (peft's"
                " merge_and_unload), and give the folder that this makes"
            )
        raise UsageError(f"{what}: there is no {CONFIG_NAME} in this folder; {_instead(folder)}")
    return folder


def _instead(folder: Path) -> str:
    """Return what to give in place of a folder without config.json, by the files in it."""
    try:
        names = {path.name for path in folder.iterdir()}
    except OSError:
        names = set()
    for suffix, what in FOREIGN_WEIGHTS.items():
        found = sorted(name for name in names if name.lower().endswith(suffix))
        if found:
            return f"{found[0]}: {what}"
    if any(name.endswith((".safetensors", ".bin")) for name in names):
        return (
            "it has weights alone; put the model's config.json and tokenizer files beside them, or "
            "give the hub id"
        )
    inner = sorted(path.parent for path in folder.glob(f"*/{CONFIG_NAME}"))
    inner += sorted(path.parent for path in folder.glob(f"snapshots/*/{CONFIG_NAME}"))
    if inner:
        return f"give {inner[-1]}, which has one"
    return "give a Hugging Face model folder"


def _from_hub(model: str, revision: str | None, weights: bool) -> Path:
    try:
        return _cached(model, revision, weights) or _downloaded(model, revision, weights)
    except FlexgenError:
        raise
    # Errors of the hub, of its HTTP library and of the system have no common base.
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DoesNotFitError(
                f"--model {model}: the disk is full, the download stopped; set HF_HOME to a folder "
                "with more room"
            ) from error
        raise NotOnHubError(
            f"--model {model}: not complete in the local cache, and not to be had from the hub "
            f"({_reason(error)});"
            " give a folder that has it, set HF_HOME to a cache that has it, or measure speed "
            "with --random-weights"
            f"{'' if '/' in model else '; a hub id has the form OWNER/NAME'}"
        ) from error


def _reason(error: Exception) -> str:
    # The library's messages have several lines of advice. The cause says what happened.
    while isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def _cached(model: str, revision: str | None, weights: bool) -> Path | None:
    """Return the folder in the hub's cache if it has all that is needed.

    The network is not used.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns = [*_SMALL_FILES, *(_SAFETENSORS_FILES if weights else ())]
    try:
        found = snapshot_download(
            model,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=_NOT_FETCHED,
            local_files_only=True,
        )
    except LocalEntryNotFoundError:
        return None
    folder = Path(found)
    complete = (folder / CONFIG_NAME).is_file() and (not weights or has_weights(folder))
    return folder if complete else None


def is_downloaded(model: str, revision: str | None) -> bool:
    """Return whether the local hub cache has all of a model."""
    # The name may be one that no hub has, or the cache may be unreadable.
    with contextlib.suppress(ValueError, OSError):
        return _cached(model, revision, True) is not None
    return False


def has_weights(folder: Path) -> bool:
    """Return whether every file of a checkpoint is there. A download may have stopped halfway."""
    try:
        return bool(weight_files(folder))
    except UsageError:
        return False


def _downloaded(model: str, revision: str | None, weights: bool) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    # This call has a timeout, so it is first: snapshot_download would wait for a silent network
    # forever.
    info: Any = HfApi().model_info(
        model, revision=revision, timeout=_HUB_SECONDS, files_metadata=True
    )
    siblings = list(info.siblings or ())
    files = {sibling.rfilename for sibling in siblings}
    has_safe = not files.isdisjoint(SAFETENSORS)
    patterns = [*_SMALL_FILES]
    if weights:
        patterns += _SAFETENSORS_FILES if has_safe else _BIN_FILES
    wanted = filter_repo_objects(
        siblings, allow_patterns=patterns, ignore_patterns=_NOT_FETCHED, key=_name_in_repo
    )
    _check_room(model, sum(getattr(one, "size", None) or 0 for one in wanted))
    found = snapshot_download(
        model,
        revision=revision,
        allow_patterns=patterns,
        ignore_patterns=_NOT_FETCHED,
        etag_timeout=_HUB_SECONDS,
    )
    return _with_config(Path(found), f"--model {model}")


def _name_in_repo(sibling: Any) -> str:
    return str(sibling.rfilename)


def hub_cache() -> Path:
    """Return the folder to which the hub's library downloads."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def downloaded_bytes(model: str) -> int:
    """Return the bytes of a model's files in the hub's cache, also of unfinished ones."""
    blobs = hub_cache() / f"models--{model.replace('/', '--')}" / "blobs"
    with contextlib.suppress(OSError):
        return sum(path.stat().st_size for path in blobs.iterdir())
    return 0


def _check_room(model: str, nbytes: int) -> None:
    """Raise DoesNotFitError if a download of this many bytes does not fit the cache's disk."""
    needed = nbytes - downloaded_bytes(model)
    cache = hub_cache()
    free = shutil.disk_usage(existing_folder(cache)).free
    if needed > free:
        raise DoesNotFitError(
            f"--model {model}: its download needs {format_bytes(needed)} of the disk of {cache}, "
            f"{format_free(free, needed)}; free space, or {MORE_ROOM}"
        )

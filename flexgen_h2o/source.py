"""A model as it is found: its shape, its checkpoint folder and its tokenizer."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexgen_h2o.checkpoint import (
    Checkpoint,
    ModelSource,
    open_checkpoint,
    pack_checkpoint,
    pack_random,
    resolve,
    weight_files,
    write_random_checkpoint,
)
from flexgen_h2o.checkpoint.fingerprint import label, sample_digest
from flexgen_h2o.checkpoint.resolve import DUMMY, find_folder
from flexgen_h2o.config import ModelSpec
from flexgen_h2o.errors import UsageError
from flexgen_h2o.locks import MARK, lock_folder, read_mark
from flexgen_h2o.models import built_in_names, built_in_spec, one_line, spec_from_folder
from flexgen_h2o.packing import Packing

_SOME_ANSWER = "\u241fanswer\u241f"  # stands for an answer in a conversation that is still to be had
_LOCK_TRIES, _LOCK_WAIT_S = 5, 0.1
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model", "tokenizer_config.json")
_BESIDE_TOKENIZERS = ("merges.txt", "added_tokens.json", "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True)
class Model:
    """`folder` is None for random weights of a built-in shape that no folder describes."""

    name: str
    spec: ModelSpec
    config: dict[str, Any]
    folder: Path | None
    random: bool
    tokenizer: Any | None

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt with the tokenizer's own special tokens; prompts that are too long are found later."""
        assert self.tokenizer is not None
        return list(self.tokenizer(text, verbose=False)["input_ids"])

    def encode_message(self, text: str) -> list[int]:
        """Token ids of a user's message, up to where the answer begins, by the tokenizer's chat template.

        UsageError where the template does not take the message; it is there (`check_chat`).
        """
        try:
            return self.encode_chat([{"role": "user", "content": text}])
        except ValueError as error:
            raise UsageError(f"the chat template of {self.name} cannot take the prompt ({error})") from error

    def check_chat(self) -> None:
        """UsageError where there is no tokenizer with a chat template."""
        if not self.has_chat_template:
            raise UsageError(
                f"--chat: {self.name} has no chat template; leave it out, or give a chat or instruct model"
            )

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, up to where the answer begins. ValueError if the template does not take it."""
        return self.encode_more(self._chat_text(messages))

    def encode_turn(self, users: Sequence[str]) -> list[int]:
        """Token ids of the last of a user's messages, by the chat template, up to where its answer begins.

        They begin where the answer before it ends, whatever that says. ValueError if the template does not take
        messages and answers one after the other.
        """
        messages: list[dict[str, str]] = []
        for text in users:
            messages += [{"role": "user", "content": text}, {"role": "assistant", "content": _SOME_ANSWER}]
        head, answer, turn = self._chat_text(messages[:-1]).rpartition(_SOME_ANSWER)
        if bool(answer) != (len(users) > 1) or head.count(_SOME_ANSWER) != max(0, len(users) - 2):
            raise ValueError("it leaves out answers that came before")
        return self.encode_more(turn)

    def _chat_text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        assert self.tokenizer is not None
        try:
            return str(self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))
        except Exception as error:  # of the template's language: many kinds
            raise ValueError(one_line(error) or type(error).__name__) from error

    def encode_more(self, text: str) -> list[int]:
        """Token ids of text that has its special tokens in it, or that others stand before."""
        assert self.tokenizer is not None
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def find_model(model: str, path: str | None, revision: str | None = None) -> Model:
    """Locate a model and read its shape; no weights are read. UsageError says what is wrong and the way out."""
    source: ModelSource = resolve(model, path, revision)
    if source.folder is not None:
        spec, config = spec_from_folder(source.name, source.folder)
        return Model(source.name, spec, config, source.folder, source.random, _load_tokenizer(source.folder))
    built_in = built_in_spec(source.name)
    if built_in is None:
        raise UsageError(
            f"--model {model}: random weights (--path _DUMMY_) need a local model folder or one of the built-in "
            f"shapes: {', '.join(built_in_names())}"
        )
    return Model(built_in[0].name, *built_in, None, True, None)


def find_spec(model: str, path: str | None, revision: str | None = None) -> ModelSpec:
    """A model's shape, for plans: as `find_model`, but weights are never fetched, and a built-in shape needs no hub."""
    folder = find_folder(model, path)
    if folder is None and (known := built_in_spec(model)) is not None:
        return known[0]
    if folder is None and path is not None and DUMMY in path:
        return find_model(model, path).spec  # says which shapes there are
    folder = folder or resolve(model, path, revision, weights=False).folder
    assert folder is not None
    return spec_from_folder(model, folder)[0]


def find_checkpoint(
    model: Model, dtype: str, offload_dir: Path, seed: int, progress: bool, packing: Packing | None = None
) -> Checkpoint:
    """The checkpoint on disk: in place, imported from .bin, or written with seeded random weights of `dtype`.

    packing: with its matrices packed, once (checkpoint/packed_store.py); random weights are never written whole.
    """
    cache, spec = offload_dir / "weights", model.spec
    if not model.random:
        assert model.folder is not None
        found = _in_use(open_checkpoint(spec, model.folder, cache))
        return _in_use(pack_checkpoint(spec, found, cache, packing, progress)) if packing else found
    name = f"{label(model.name.replace('/', '--'))}-{dtype}-seed{seed}-{shape_fingerprint(model.config)}"
    if packing:
        folder = cache / "packed" / f"random-{name}"
        return _in_use(pack_random(spec, model.config, folder, dtype, seed, packing, progress))
    folder = write_random_checkpoint(spec, model.config, cache / "random" / name, dtype, seed, progress)
    return _in_use(open_checkpoint(spec, folder, cache))


def _in_use(checkpoint: Checkpoint) -> Checkpoint:
    """Keep `flexgen-h2o cache` from removing it, if it is the package's own, as long as the object is there."""
    folder = checkpoint.folder
    if read_mark(folder) is not None:
        try:
            lock = lock_folder(folder, shared=True)
            for _ in range(_LOCK_TRIES):  # somebody may only be looking whether it is in use
                if lock is None:
                    time.sleep(_LOCK_WAIT_S)
                    lock = lock_folder(folder, shared=True)
        except OSError:  # no locks there
            return checkpoint
        if lock is None:
            raise UsageError(f"{folder}: another process is removing it; run again")
        weakref.finalize(checkpoint, os.close, lock)
        with contextlib.suppress(OSError):
            os.utime(folder / MARK)  # when it was last used
    return checkpoint


def content_digests(model: Model) -> dict[str, str | None]:
    """`weights` and `tokenizer` of a model, by their contents (checkpoint/fingerprint.py), however the folder is
    called; None where it has none of its own. UsageError for a file that cannot be read."""
    if model.folder is None:
        return {"weights": None, "tokenizer": None}
    names = (*TOKENIZER_FILES, *_BESIDE_TOKENIZERS)
    found = {
        "weights": [] if model.random else weight_files(model.folder),
        "tokenizer": [path for name in names if (path := model.folder / name).is_file()],
    }
    try:
        return {what: sample_digest(paths) if paths else None for what, paths in found.items()}
    except OSError as error:
        raise UsageError(f"--model {model.name}: {error.filename}: {error.strerror or error}") from error


def shape_fingerprint(config: dict[str, Any]) -> str:
    """Short hash of a config, so that random weights made for another shape are never reused."""
    import hashlib
    import json

    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:8]


def _load_tokenizer(folder: Path) -> Any | None:
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # transformers and tokenizers raise many kinds for a bad file
        raise UsageError(f"{folder}: its tokenizer cannot be read ({str(error).splitlines()[0]})") from error

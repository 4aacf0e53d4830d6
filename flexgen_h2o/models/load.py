"""Finds a model: its shape, its checkpoint folder and its tokenizer."""

from __future__ import annotations

import codecs
import contextlib
import difflib
import importlib
import logging
import os
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from flexgen_h2o.checkpoint.atomic_folder import States, check_unchanged, label, sample_digest, states_of
from flexgen_h2o.checkpoint.formats import PackedFormat
from flexgen_h2o.checkpoint.resolve import DUMMY, PACKAGED, find_folder, has_weights
from flexgen_h2o.checkpoint.safetensors import SAFETENSORS, names_in
from flexgen_h2o.core import interrupts
from flexgen_h2o.core.config import DTYPE_BYTES
from flexgen_h2o.core.errors import TokenizerError, TooLongError, UsageError, first_line
from flexgen_h2o.core.files import MARK, lock_folder, open_regular, read_mark
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.core.units import MIB, check_text
from flexgen_h2o.models import GENERATION_CONFIG, built_in_names, built_in_spec, one_line, spec_from_folder

_ANSWER_MARK = "\u241fanswer\u241f"  # stands for an answer that is not known yet
_LOCK_TRIES, _LOCK_WAIT_S = 5, 0.1
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model", "tokenizer_config.json")
_LOGGING_LIBRARIES = ("transformers", "huggingface_hub")  # libraries that log to stderr while they read files
_logging_lock = threading.RLock()
_compiling = threading.Lock()
_TOKENIZER_EXTRAS = ("merges.txt", "added_tokens.json", "special_tokens_map.json", "chat_template.jinja")
# What transformers also reads.
_OTHER_TOKENIZER_FILES = (
    "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json", "chat_template.json", "processor_config.json"
)  # fmt: skip
_MOST_TOKENIZER_BYTES = 64 * MIB  # of a file; the largest known have 35 MB
# A tokenizer takes some 300 bytes a character: long texts are measured, and cut, in pieces.
PIECE_CHARACTERS = 2**16
LONG_PIECE_CHARACTERS = 2**18
# Tokens that a piece may have more because it was cut off. The whole may have half as many as its pieces and no less.
_CUT_TOKENS, _CUT_SHARE = 256, 2


@dataclass(frozen=True)
class Model:
    """`folder` is None for random weights of a built-in shape that no folder describes.

    files: configs and tokenizer, as they were before they were read.
    """

    name: str
    spec: ModelSpec
    config: dict[str, Any]
    folder: Path | None
    random: bool
    tokenizer: Any | None
    files: States = field(default_factory=dict)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt with the tokenizer's own special tokens. TooLongError as of `check_fits`; prompts that
        are a little too long are found later."""
        self.check_fits(text)
        return self.tokens_of(text)

    def tokens_of(self, text: str, **options: Any) -> list[int]:
        """The only door to the tokenizer. UsageError for a string that is no text, TokenizerError for whatever the
        tokenizer raises: a panic in Rust is not even an `Exception`."""
        assert self.tokenizer is not None
        check_text("the text", text)
        try:
            return list(self.tokenizer(text, verbose=False, **options)["input_ids"])
        except BaseException as error:
            if interrupts.asks_to_end(error):
                raise
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise TokenizerError(f"the tokenizer of {self.name} fails on the text ({reason})") from error

    def check_fits(self, text: str) -> None:
        """TooLongError for a text of far more tokens than there are positions, in little memory: the tokens of its
        pieces are counted until they are too many."""
        tokens, positions = 0, self.spec.max_positions
        if len(text) <= PIECE_CHARACTERS:
            return
        for at in range(0, len(text), PIECE_CHARACTERS):
            tokens += max(0, len(self.encode_more(text[at : at + PIECE_CHARACTERS])) - _CUT_TOKENS)
            if tokens > _CUT_SHARE * positions:
                raise TooLongError(
                    f"{len(text)} characters, too many for the {positions} positions of {self.name}; shorten it"
                )

    def encode_beginning(self, text: str, tokens: int) -> list[int]:
        """As `encode`, of a beginning of the text that has at least so many tokens; of the whole where it has fewer."""
        size = PIECE_CHARACTERS
        while True:
            ids = self.tokens_of(text[:size])
            if size >= len(text) or len(ids) >= tokens + _CUT_TOKENS:
                return ids
            size *= 2

    def encode_message(self, text: str) -> list[int]:
        """Token ids of a user's message, up to where the answer begins, by the tokenizer's chat template.

        UsageError where the template does not take the message; it is there (`check_chat`).
        """
        try:
            return self.encode_chat([{"role": "user", "content": text}])
        except TooLongError:
            raise
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
        """Token ids of a conversation, up to where the answer begins. ValueError if the template does not take it,
        TooLongError where it is too long."""
        text = self.chat_text(messages)
        self.check_fits(text)
        return self.encode_more(text)

    def encode_turn(self, users: Sequence[str], system: str | None = None) -> list[int]:
        """Token ids of the last of a user's messages, by the chat template, up to where its answer begins.

        They begin where the answer before it ends, whatever that says. system: a message before them all. ValueError if
        the template does not take messages and answers one after the other.
        """
        messages = [] if system is None else [{"role": "system", "content": system}]
        for text in users:
            messages += [{"role": "user", "content": text}, {"role": "assistant", "content": _ANSWER_MARK}]
        head, answer, turn = self.chat_text(messages[:-1]).rpartition(_ANSWER_MARK)
        if bool(answer) != (len(users) > 1) or head.count(_ANSWER_MARK) != max(0, len(users) - 2):
            raise ValueError("it leaves out answers that came before")
        self.check_fits(turn)
        return self.encode_more(turn)

    def chat_text(self, messages: Sequence[Mapping[str, Any]], answers: bool = True) -> str:
        """A conversation by the chat template, up to where an answer begins, or, without `answers`, to the end of its
        last message, which goes on. ValueError and TooLongError as of `encode_chat`."""
        assert self.tokenizer is not None
        try:
            _bound_template(self.tokenizer)
            with _quiet():
                text = self.tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=answers, continue_final_message=not answers
                )
        except TooLongError:
            raise
        except Exception as error:  # of the template's language: many kinds
            raise ValueError(one_line(error) or type(error).__name__) from error
        return str(text)

    def encode_more(self, text: str) -> list[int]:
        """Token ids of text that has its special tokens in it, or that others stand before."""
        return self.tokens_of(text, add_special_tokens=False)

    def encode_long(self, text: str) -> list[int]:
        """As `encode_more`, of a text of any length: a longer one in pieces, cut behind an end of line if it can be."""
        found, at = [], 0
        while at < len(text):
            end = at + LONG_PIECE_CHARACTERS
            if end < len(text):
                end = text.rfind("\n", at, end) + 1 or end
            found += self.encode_more(text[at:end])
            at = end
        return found


def find_model(model: str, path: str | None, revision: str | None = None, weights: bool = True) -> Model:
    """Locate a model and read its shape; no weights are read. UsageError says what is wrong and the way out.

    weights: False fetches none either.
    """
    with _suggesting(model):
        source: ModelSource = resolve(model, path, revision, weights)
    if source.folder is not None:
        names = ("config.json", GENERATION_CONFIG, *TOKENIZER_FILES, *_TOKENIZER_EXTRAS)
        files = states_of(source.folder / name for name in names)
        with _quiet():
            spec, config = spec_from_folder(source.name, source.folder)
            return Model(source.name, spec, config, source.folder, source.random, _load_tokenizer(source.folder), files)
    built_in = built_in_spec(source.name)
    if built_in is None:
        near = difflib.get_close_matches(model, built_in_names(), n=3)
        raise UsageError(
            f"--model {model}: random weights (--path {DUMMY}) need a built-in shape"
            f"{' such as ' + ', '.join(near) if near else ''} (docs/reference/cli.md lists them), or a local folder"
            " with a config.json; with a quantization_config in it they are in that format"
        )
    return Model(built_in[0].name, *built_in, None, True, None)


def has_safetensors(model: Model) -> bool:
    """Are its weights all there, to be read in place?"""
    return model.folder is not None and names_in(model.folder) == SAFETENSORS and has_weights(model.folder)


def said_dtype(model: Model) -> str:
    """The float dtype of its weights as its config has it; transformers takes float32 where it says none."""
    said = str(model.config.get("dtype") or model.config.get("torch_dtype")).removeprefix("torch.")
    return said if said in DTYPE_BYTES else "float32"


def find_spec(model: str, path: str | None, revision: str | None = None) -> ModelSpec:
    """A model's shape, for plans: as `find_model`, but weights are never fetched, and a built-in shape needs no hub."""
    folder = find_folder(model, path)
    if folder is None and (known := built_in_spec(model)) is not None:
        return known[0]
    if folder is None and path is not None and DUMMY in path:
        return find_model(model, path).spec  # says which shapes there are
    with _suggesting(model):
        folder = folder or resolve(model, path, revision, weights=False).folder
    assert folder is not None
    with _quiet():
        return spec_from_folder(model, folder)[0]


@contextlib.contextmanager
def _suggesting(model: str) -> Iterator[None]:
    """A UsageError about a mistyped name ends with the name that may be meant."""
    try:
        yield
    except UsageError as error:
        near = difflib.get_close_matches(model, [*PACKAGED, *built_in_names()], n=1, cutoff=0.8)
        if not near or near[0] == model:
            raise
        raise UsageError(f"{error}; did you mean {near[0]}?") from error


def find_checkpoint(
    model: Model, dtype: str, offload_dir: Path, seed: int, progress: bool, form: PackedFormat | None = None
) -> Checkpoint:
    """The checkpoint on disk: in place, imported from .bin, or written with seeded random weights of `dtype`.

    form: with its matrices in that format, made once; random weights are never written whole.
    """
    cache, spec = offload_dir / "weights", model.spec
    if not model.random:
        assert model.folder is not None
        found = _in_use(open_checkpoint(spec, model.folder, cache))
        return _in_use(pack_checkpoint(spec, found, cache, form, progress)) if form else found
    name = f"{label(model.name.replace('/', '--'))}-{dtype}-seed{seed}-{shape_fingerprint(model.config)}"
    if form:
        folder = cache / "packed" / f"random-{name}"
        return _in_use(pack_random(spec, model.config, folder, dtype, seed, form, progress))
    folder = write_random_checkpoint(spec, model.config, cache / "random" / name, dtype, seed, progress)
    return _in_use(open_checkpoint(spec, folder, cache))


def _in_use(checkpoint: Checkpoint) -> Checkpoint:
    """Keep `flexgen-h2o cache` from removing the package's own folders while the object is alive."""
    folder = checkpoint.folder
    if read_mark(folder) is not None:
        try:
            lock = lock_folder(folder, shared=True)
            for _ in range(_LOCK_TRIES):  # another process may be checking whether it is in use
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


def content_digests(model: Model, checkpoint: Checkpoint | None) -> dict[str, str | None]:
    """`weights` and `tokenizer` of a model, by their contents (atomic_folder.sample_digest), however the folder is
    called; None where it has none of its own. checkpoint: of the model, opened before.

    UsageError for a file that cannot be read, CheckpointChangedError where one has changed since it was opened.
    """
    if model.folder is None:
        return {"weights": None, "tokenizer": None}
    names = (*TOKENIZER_FILES, *_TOKENIZER_EXTRAS)
    found = {
        "weights": [] if model.random else weight_files(model.folder),
        "tokenizer": [path for name in names if (path := model.folder / name).is_file()],
    }
    try:
        digests = {what: sample_digest(paths) if paths else None for what, paths in found.items()}
    except OSError as error:
        raise UsageError(f"--model {model.name}: {error.filename}: {error.strerror or error}") from error
    check_unchanged(model.files)
    if checkpoint is not None:
        checkpoint.check_unchanged()
    return digests


def shape_fingerprint(config: dict[str, Any]) -> str:
    """Short hash of a config, so that random weights made for another shape are never reused."""
    import hashlib
    import json

    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:8]


class _LogCollector(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[logging.Logger, logging.LogRecord]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append((logging.getLogger(record.name.partition(".")[0]), record))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Collect what libraries log and warn while files are read. If no error is raised, each message is shown once, in a
    line; otherwise none is, because the error says what is wrong with the file."""
    collector, shown = _LogCollector(), set[str]()
    with _logging_lock, warnings.catch_warnings(record=True) as warned:
        for name in _LOGGING_LIBRARIES:
            importlib.import_module(f"{name}.utils.logging").get_logger()  # which adds its handlers
        loggers = [logging.getLogger(name) for name in _LOGGING_LIBRARIES]
        before = [logger.handlers[:] for logger in loggers]
        for logger in loggers:
            logger.handlers[:] = [collector]
        try:
            yield
        finally:
            for logger, handlers in zip(loggers, before, strict=True):
                logger.handlers[:] = handlers
    for logger, record in collector.records:
        record.msg, record.args = " ".join(record.getMessage().split()), None
        if record.msg not in shown:
            shown.add(record.msg)
            for handler in logger.handlers:
                handler.handle(record)
    for one in warned:
        warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


def _load_tokenizer(folder: Path) -> Any | None:
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        return None
    for name in ("config.json", *TOKENIZER_FILES, *_TOKENIZER_EXTRAS, *_OTHER_TOKENIZER_FILES):
        _check_tokenizer_file(folder / name)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        tokenizer.decode(tokenizer("a", verbose=False)["input_ids"])  # a setting of a wrong type is found at first use
        return tokenizer
    except BaseException as error:  # transformers and tokenizers raise many kinds for a bad file
        if interrupts.asks_to_end(error):
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UsageError(f"{folder}: its tokenizer cannot be read ({reason})") from error


def _check_tokenizer_file(path: Path) -> None:
    """UsageError for what transformers must not or cannot read: no regular file, too large, a byte order mark."""
    try:
        with open_regular(path) as file:
            if file.seek(0, 2) > _MOST_TOKENIZER_BYTES:
                raise UsageError(f"{path}: is larger than {_MOST_TOKENIZER_BYTES // MIB} MiB, and so no tokenizer")
            file.seek(0)
            if path.suffix == ".json" and file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
                raise UsageError(f"{path}: begins with a byte order mark; save it as UTF-8 without one")
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error


def _bound_template(tokenizer: Any) -> None:
    """Make the chat template raise TooLongError when it writes or computes too much.

    transformers caches compiled templates in a private function; in a version without it the text has no bound.
    """
    from flexgen_h2o.models.templates import BoundedEnvironment

    chat_template_utils: Any = importlib.import_module("transformers.utils.chat_template_utils")
    compiled, text = getattr(chat_template_utils, "_compile_jinja_template", None), tokenizer.get_chat_template()
    if compiled is None:
        return
    with _compiling:
        before = getattr(chat_template_utils, "ImmutableSandboxedEnvironment", None)
        chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment
        try:
            if not isinstance(compiled(text).environment, BoundedEnvironment):  # compiled by somebody else before
                compiled.cache_clear()
                compiled(text)
        finally:
            chat_template_utils.ImmutableSandboxedEnvironment = before

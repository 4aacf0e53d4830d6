"""Finds a model: its shape, its checkpoint folder and its tokenizer."""

from __future__ import annotations

import codecs
import contextlib
import difflib
import importlib
import importlib.util
import inspect
import logging
import os
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
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
from flexgen_h2o.checkpoint.resolve import (
    CONFIG_NAME,
    DUMMY,
    PACKAGED,
    NotOnHubError,
    find_folder,
    has_weights,
)
from flexgen_h2o.checkpoint.safetensors import SAFETENSORS, names_in
from flexgen_h2o.checkpoint.side_files import say_adapter
from flexgen_h2o.checkpoint.tied import has_other_head
from flexgen_h2o.core import interrupts
from flexgen_h2o.core.config import DTYPE_BYTES
from flexgen_h2o.core.errors import TokenizerError, TooLongError, UsageError, first_line
from flexgen_h2o.core.files import MARK, lock_folder, open_regular, read_mark
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.core.notes import say_once
from flexgen_h2o.core.settings import SamplingParams
from flexgen_h2o.core.units import check_int, check_text
from flexgen_h2o.models import (
    GENERATION_CONFIG,
    built_in_names,
    built_in_spec,
    one_line,
    spec_from_config,
    spec_from_folder,
)
from flexgen_h2o.models.generation_config import GenerationConfig, read_generation_config
from flexgen_h2o.models.named import BY_HUB_ID, NAMED, fetch_command, fetched_folder, folder_of, is_fetched

_ANSWER_MARK = "\u241fanswer\u241f"  # stands for an answer that is not known yet
_LOCK_TRIES, _LOCK_WAIT_S = 5, 0.1
_SENTENCEPIECE = "tokenizer.model"
_DRAWN = ("dropout", "alpha", "nbest_size")  # settings by which a tokenizer draws one of several ways to cut a text
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", _SENTENCEPIECE, "tokenizer_config.json")
_LOGGING_LIBRARIES = ("transformers", "huggingface_hub")  # libraries that log to stderr while they read files
_logging_lock = threading.RLock()
_TOKENIZER_EXTRAS = ("merges.txt", "added_tokens.json", "special_tokens_map.json", "chat_template.jinja")
# What transformers also reads.
_OTHER_TOKENIZER_FILES = (
    "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json", "chat_template.json", "processor_config.json"
)  # fmt: skip
# A tokenizer takes some 300 bytes a character: long texts are measured, and cut, in pieces.
PIECE_CHARACTERS = 2**16
LONG_PIECE_CHARACTERS = 2**18
# Tokens that a piece may have more because it was cut off. The whole may have half as many as its pieces and no less.
_CUT_TOKENS, _CUT_SHARE = 256, 2


@dataclass(frozen=True)
class Model:
    """`folder` is None for random weights of a built-in shape that no folder describes.

    files: configs and tokenizer, as they were before they were read. note: what its user should know of where it comes
    from; empty if it is what was asked for.
    generation: what generation_config.json asks for.
    """

    name: str
    spec: ModelSpec
    config: dict[str, Any]
    folder: Path | None
    random: bool
    tokenizer: Any | None
    files: States = field(default_factory=dict)
    note: str = ""
    generation: GenerationConfig = field(default_factory=GenerationConfig)

    @property
    def notes(self) -> list[str]:
        """What one may not expect of the model's files, a line for each."""
        found = [self.note] if self.note else []
        if self.generation.not_applied:
            names = ", ".join(self.generation.not_applied)
            found.append(
                f"generation_config.json has settings that transformers applies and this package does not: {names}"
            )
        return found

    @property
    def turn_ends(self) -> tuple[int, ...]:
        """Tokens that end an answer in a chat: the ends of a sequence by the tokenizer, config.json and
        generation_config.json together, as in vLLM. A tokenizer's is often the end of a turn, and the only place that
        names it."""
        own = getattr(self.tokenizer, "eos_token_id", None)
        ends = [*self.spec.eos_token_ids, *self.generation.ends, *([own] if isinstance(own, int) else [])]
        return tuple(dict.fromkeys(ends))

    def for_chat(self, params: SamplingParams) -> SamplingParams:
        """Parameters of an answer in a chat: it also ends where the turn does."""
        if params.ignore_eos:
            return params
        ends = (*params.stop_token_ids, *(token for token in self.turn_ends if token not in self.spec.eos_token_ids))
        return replace(params, stop_token_ids=tuple(dict.fromkeys(ends)))

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

    @cached_property
    def least_parts(self) -> int | None:
        """How many texts of a content the chat template gets as parts, rather than as lines of one text.

        None: it would write a list of parts as Python does. 2: it makes of a text in a part what it makes of the text.
        1: it reads parts only.
        """
        if not self.has_chat_template:
            return None
        texts = []
        for content in (_ANSWER_MARK, _as_parts(_ANSWER_MARK)):
            try:
                texts.append(self._render([{"role": "user", "content": content}], True, {}))
            except ValueError:
                texts.append("")
        of_text, of_parts = texts
        if of_parts and of_parts == of_text:
            return 2
        reads_parts = _ANSWER_MARK in of_parts and str(_as_parts(_ANSWER_MARK)) not in of_parts
        return 1 if reads_parts and _ANSWER_MARK not in of_text else None

    @property
    def reserved_options(self) -> frozenset[str]:
        """Names that say how the chat template is called: they can be no options of its own."""
        own = inspect.signature(self.tokenizer.apply_chat_template).parameters if self.tokenizer is not None else ()
        return frozenset({"messages", *own})

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None = None
    ) -> list[int]:  # fmt: skip
        """Token ids of a conversation, up to where the answer begins. options: what the template gets besides.

        ValueError if the template does not take it, TooLongError where it is too long.
        """
        text = self.chat_text(messages, options=options)
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

    def chat_text(
        self, messages: Sequence[Mapping[str, Any]], answers: bool = True, options: Mapping[str, Any] | None = None
    ) -> str:  # fmt: skip
        """A conversation by the chat template, up to where an answer begins, or, without `answers`, to the end of its
        last message, which goes on. options, ValueError: as of `encode_chat`."""
        if self.least_parts == 1:
            messages = [
                {**message, "content": _as_parts(text)} if isinstance(text := message.get("content"), str) else message
                for message in messages
            ]
        return self._render(messages, answers, options or {})

    def _render(self, messages: Sequence[Mapping[str, Any]], answers: bool, options: Mapping[str, Any]) -> str:
        """Call the template, in transformers' sandbox: it can run no code and write no files, and may be slow."""
        assert self.tokenizer is not None
        try:
            with _quiet():
                text = self.tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=answers, continue_final_message=not answers,
                    **options,
                )  # fmt: skip
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


def find_model(
    model: str,
    path: str | None,
    revision: str | None = None,
    weights: bool = True,
    offload_dir: str | Path | None = None,
    max_model_len: int | None = None,
) -> Model:
    """Locate a model and read its shape; no weights are read. UsageError says what is wrong and the way out.

    weights: False fetches none either. offload_dir: where named models are; None is the default one. max_model_len: as
    of `with_max_len`.
    """
    with _suggesting(model):
        source, note = _find_source(model, path, revision, weights, offload_dir)
    if source.folder is not None:
        names = ("config.json", GENERATION_CONFIG, *TOKENIZER_FILES, *_TOKENIZER_EXTRAS)
        files = states_of(source.folder / name for name in names)
        with _quiet():
            spec, config = _read_shape(source.name, source.folder, max_model_len)
            generation = read_generation_config(source.folder, spec.vocab_size)
            if generation.settings:  # a job that was begun with others does not go on
                config = {**config, "generation_config": generation.settings}
            tokenizer = _load_tokenizer(source.folder)
            return Model(
                source.name,
                spec,
                config,
                source.folder,
                source.random,
                tokenizer,
                files,
                note,
                generation,
            )
    built_in = built_in_spec(source.name)
    if built_in is None:
        near = difflib.get_close_matches(model, built_in_names(), n=3)
        raise UsageError(
            f"--model {model}: random weights (--path {DUMMY}) need a built-in shape"
            f"{' such as ' + ', '.join(near) if near else ''} (docs/reference/models.md lists them), or a local folder"
            " with a config.json; with a quantization_config in it they are in that format"
        )
    spec, config = built_in
    return Model(spec.name, with_max_len(spec, max_model_len), config, None, True, None)


def _find_source(
    model: str, path: str | None, revision: str | None, weights: bool, offload_dir: str | Path | None
) -> tuple[ModelSource, str]:
    """Return where a model comes from, and a note if it comes from elsewhere than its name says."""
    if model in NAMED and find_folder(model, path) is None:
        return resolve(model, path, made=fetched_folder(NAMED[model], offload_dir)), ""
    try:
        return resolve(model, path, revision, weights), ""
    except NotOnHubError as error:
        same = BY_HUB_ID.get(model)
        if same is None or revision is not None:
            raise
        if not is_fetched(same, offload_dir):
            raise NotOnHubError(
                f"{error}; no hub is needed for {same.name}: {fetch_command(same, offload_dir)}"
            ) from error
        folder = folder_of(same, offload_dir)
    note = f"--model {model}: the hub does not answer; {folder} is used, which was made of {same.bits}-bit weights"
    return ModelSource(model, folder, random=False), note


def has_safetensors(model: Model) -> bool:
    """Are its weights all there, to be read in place?"""
    return model.folder is not None and names_in(model.folder) == SAFETENSORS and has_weights(model.folder)


def said_dtype(model: Model) -> str:
    """The float dtype of its weights as its config has it; transformers takes float32 where it says none."""
    said = str(model.config.get("dtype") or model.config.get("torch_dtype")).removeprefix("torch.")
    return said if said in DTYPE_BYTES else "float32"


def find_spec(
    model: str,
    path: str | None,
    revision: str | None = None,
    offload_dir: str | Path | None = None,
    max_model_len: int | None = None,
) -> ModelSpec:
    """A model's shape, for plans: as `find_model`, but weights are never fetched, and a built-in shape needs no hub."""
    folder = find_folder(model, path)
    if folder is None and (known := built_in_spec(model)) is not None:
        return with_max_len(known[0], max_model_len)
    if folder is None and path is not None and DUMMY in path:
        found = find_model(model, path, offload_dir=offload_dir, max_model_len=max_model_len)
        return found.spec  # says which shapes there are
    with _suggesting(model):
        folder = folder or _find_source(model, path, revision, False, offload_dir)[0].folder
    assert folder is not None
    with _quiet():
        return _read_shape(model, folder, max_model_len)[0]


def _read_shape(name: str, folder: Path, max_model_len: int | None) -> tuple[ModelSpec, dict[str, Any]]:
    """The shape of the model in `folder` and its config, both as its files have it."""
    spec, config = spec_from_folder(name, folder)
    if has_other_head(spec, folder):
        config = {**config, "tie_word_embeddings": False}
        spec = spec_from_config(name, config, str(folder / CONFIG_NAME))
        say_once(
            f"{folder}: has a head with other numbers than the embedding that config.json ties it to; the head is used,"
            " as in transformers"
        )
    say_adapter(folder)
    return with_max_len(spec, max_model_len), config


def with_max_len(spec: ModelSpec, max_model_len: int | None) -> ModelSpec:
    """The model with at most so many tokens per sequence. None: as many as it has positions.

    UsageError for more than it has positions.
    """
    if max_model_len is None:
        return spec
    most = check_int("--max-model-len", max_model_len, low=1)
    if most > spec.max_positions:
        way = (
            "lower it"
            if spec.rotary is None
            else f"lower it, or stretch the positions by rope_scaling in {CONFIG_NAME}"
        )
        raise UsageError(f"--max-model-len {most}: {spec.name} has {spec.max_positions} positions; {way}")
    return replace(spec, max_positions=most)


@contextlib.contextmanager
def _suggesting(model: str) -> Iterator[None]:
    """A UsageError about a mistyped name ends with the name that may be meant."""
    try:
        yield
    except UsageError as error:
        known = {name.lower(): name for name in (*PACKAGED, *NAMED, *built_in_names())}
        known |= {hub_id.rpartition("/")[2].lower(): one.name for hub_id, one in BY_HUB_ID.items()}
        near = [known[name] for name in difflib.get_close_matches(model.lower(), known, n=1, cutoff=0.8)]
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
        _drop_dropout(tokenizer, folder)
        return tokenizer
    except BaseException as error:  # transformers and tokenizers raise many kinds for a bad file
        if interrupts.asks_to_end(error):
            raise
        missing = _missing_for_sentencepiece(folder)
        if missing:
            raise UsageError(
                f"{folder}: its tokenizer is {_SENTENCEPIECE} alone, and packages that read it are not installed; run"
                f" pip install {' '.join(missing)}, or give a folder with a tokenizer.json"
            ) from error
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UsageError(f"{folder}: its tokenizer cannot be read ({reason})") from error


def _drop_dropout(tokenizer: Any, folder: Path) -> None:
    """Have the same text give the same tokens: a tokenizer may say that it draws one of several ways to cut a text."""
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    found = [name for name in _DRAWN if getattr(model, name, None)]
    for name in found:
        setattr(model, name, None)
    if found:
        say_once(f"{folder}: its tokenizer's {' and '.join(found)} is for training, and is not applied")


def _missing_for_sentencepiece(folder: Path) -> list[str]:
    """What is to be installed to read a folder that has a SentencePiece model and no tokenizer.json."""
    if (folder / "tokenizer.json").exists() or not (folder / _SENTENCEPIECE).exists():
        return []
    modules = {"sentencepiece": "sentencepiece", "google.protobuf": "protobuf"}
    return [package for module, package in modules.items() if not _is_installed(module)]


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # of the package that it would be in
        return False


def _check_tokenizer_file(path: Path) -> None:
    """UsageError for what transformers would wait for or cannot read: no regular file, or a byte order mark."""
    try:
        with open_regular(path) as file:
            if path.suffix == ".json" and file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
                raise UsageError(f"{path}: begins with a byte order mark; save it as UTF-8 without one")
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error


def _as_parts(text: str) -> list[dict[str, str]]:
    """A text as the parts of a message's content."""
    return [{"type": "text", "text": text}]

"""Find a model: its shape, its checkpoint folder and its tokenizer."""

from __future__ import annotations

import codecs
import contextlib
import difflib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

from flexgen_h2o.checkpoint import (
    Checkpoint,
    open_checkpoint,
    pack_checkpoint,
    pack_random,
    resolve,
    weight_files,
    write_random_checkpoint,
)
from flexgen_h2o.checkpoint.atomic_folder import (
    States,
    check_unchanged,
    label,
    sample_digest,
    states_of,
)
from flexgen_h2o.checkpoint.formats import Codec
from flexgen_h2o.checkpoint.resolve import (
    CONFIG_NAME,
    DUMMY,
    PACKAGED,
    NotOnHubError,
    asks_random,
    find_folder,
    has_weights,
)
from flexgen_h2o.checkpoint.safetensors import SAFETENSORS, names_in, read_index
from flexgen_h2o.checkpoint.side_files import say_adapter
from flexgen_h2o.checkpoint.tied import has_other_head
from flexgen_h2o.core import interrupts
from flexgen_h2o.core.config import DTYPE_BYTES, WIDE
from flexgen_h2o.core.errors import FlexgenError, TooLongError, UsageError, first_line
from flexgen_h2o.core.files import MARK, lock_folder, open_regular, read_mark, read_object
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.core.notes import say_once
from flexgen_h2o.core.settings import SamplingParams
from flexgen_h2o.core.units import check_int, check_text
from flexgen_h2o.models import (
    GENERATION_CONFIG,
    NOT_SUPPORTED,
    TEXT_CONFIGS,
    built_in_names,
    built_in_spec,
    one_line,
    spec_from_config,
    spec_from_folder,
)
from flexgen_h2o.models.generation_config import GenerationConfig, read_generation_config
from flexgen_h2o.models.named import (
    BY_HUB_ID,
    NAMED,
    fetch_command,
    fetched_folder,
    folder_of,
    is_fetched,
)

MODELS_PAGE = "docs/reference/models.md"
_TEMPLATE_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_ANSWER_MARK = "\u241fanswer\u241f"  # stands for an answer that is not yet known
_SENTENCEPIECE = "tokenizer.model"
# Settings by which a tokenizer draws one of several ways to cut a text.
_DRAWN = ("dropout", "alpha", "nbest_size")
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", _SENTENCEPIECE, "tokenizer_config.json")
# Libraries that log to stderr while they read files.
_LOGGING_LIBRARIES = ("transformers", "huggingface_hub")
_logging_lock = threading.RLock()
_TOKENIZER_EXTRAS = (
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
# Files that transformers also reads.
_OTHER_TOKENIZER_FILES = (
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "chat_template.json",
    "processor_config.json",
)
# A tokenizer needs about 300 bytes per character, so long texts are measured and cut in pieces.
PIECE_CHARACTERS = 2**16
LONG_PIECE_CHARACTERS = 2**18
# A piece may have up to _CUT_TOKENS more tokens because it was cut. The whole text has at least
# 1 / _CUT_SHARE as many tokens as its pieces together.
_CUT_TOKENS = 256
_CUT_SHARE = 2


@dataclass(frozen=True)
class Model:
    """A model as `find_model` found it: names, shape, config and tokenizer, but no weights."""

    name: str
    spec: ModelSpec
    config: dict[str, Any]
    # None for random weights of a built-in shape that no folder describes.
    folder: Path | None
    random: bool
    tokenizer: Any | None
    # States of configs and tokenizer files, taken before they were read.
    files: States = field(default_factory=dict)
    # Text for the user about where the model comes from. Empty if it is what was asked for.
    note: str = ""
    # Settings of generation_config.json.
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    # Variables that the chat template gets in every chat, unless a request has its own.
    template_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """Warnings about the model's files, one line each.

        They name what a user might expect and does not get.
        """
        found = [self.note] if self.note else []
        if self.generation.not_applied:
            names = ", ".join(self.generation.not_applied)
            found.append(
                "generation_config.json has settings that transformers applies and this package "
                f"does not: {names}"
            )
        if self.generation.drawing_note:
            found.append(self.generation.drawing_note)
        return found

    @property
    def turn_ends(self) -> tuple[int, ...]:
        """Tokens that end an answer in a chat.

        These are the end tokens of the tokenizer, config.json and generation_config.json together,
        as in vLLM. The tokenizer's end token is often the end of a turn, and often no other file
        names it.
        """
        own = getattr(self.tokenizer, "eos_token_id", None)
        ends = [
            *self.spec.eos_token_ids,
            *self.generation.ends,
            *([own] if isinstance(own, int) else []),
        ]
        return tuple(dict.fromkeys(ends))

    def for_chat(self, params: SamplingParams) -> SamplingParams:
        """Return parameters of an answer in a chat, which also ends at the end of the turn."""
        params = replace(params, is_chat=True)
        if params.ignore_eos:
            return params
        ends = (
            *params.stop_token_ids,
            *(token for token in self.turn_ends if token not in self.spec.eos_token_ids),
        )
        return params.changed(stop_token_ids=tuple(dict.fromkeys(ends)))

    def encode(
        self, text: str, add_special_tokens: bool = True, keep: int | None = None
    ) -> list[int]:
        """Return the token ids of a prompt.

        add_special_tokens: whether the tokenizer adds its own special tokens.
        keep: most tokens, the last ones of the text between the special tokens, as in vLLM. None:
            all tokens, and TooLongError is raised like by `check_fits`. Prompts that are only a
            little too long are found later.
        """
        if keep is not None:
            return self._encode_end(text, add_special_tokens, keep)
        self.check_fits(text)
        return self.tokens_of(text) if add_special_tokens else self.encode_plain(text)

    def _encode_end(self, text: str, add_special_tokens: bool, keep: int) -> list[int]:
        """Return `encode` with at most `keep` tokens. A beginning that is cut off is not read."""
        size = PIECE_CHARACTERS
        plain = self.encode_plain(text[-size:])
        while size < len(text) and len(plain) < keep + _CUT_TOKENS:
            size *= 2
            plain = self.encode_plain(text[-size:])
        whole = self.tokens_of(text[-size:]) if add_special_tokens else plain
        if len(whole) <= keep and size >= len(text):
            return whole
        added = len(whole) - len(plain)
        for at in range(added + 1):
            if whole[at : at + len(plain)] == plain and added < keep:
                last = plain[len(plain) - (keep - added) :]
                return [*whole[:at], *last, *whole[at + len(plain) :]]
        return whole[-keep:]

    def tokens_of(self, text: str, **options: Any) -> list[int]:
        """Return the token ids of a text. Every call of the tokenizer goes through this method.

        Raises UsageError if the string is not valid text. Raises FlexgenError for whatever the
        tokenizer raises: a panic in Rust is not even an `Exception`.
        """
        assert self.tokenizer is not None
        check_text("the text", text)
        try:
            return list(self.tokenizer(text, verbose=False, **options)["input_ids"])
        except BaseException as error:
            if interrupts.asks_to_end(error):
                raise
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise FlexgenError(
                f"the tokenizer of {self.name} fails on the text ({reason})"
            ) from error

    def check_fits(self, text: str) -> None:
        """Raise TooLongError if a text has far more tokens than the model has positions.

        This needs little memory: the tokens of pieces are counted until they are too many.
        """
        tokens = 0
        positions = self.spec.max_positions
        if len(text) <= PIECE_CHARACTERS:
            return
        for at in range(0, len(text), PIECE_CHARACTERS):
            tokens += max(0, len(self.encode_plain(text[at : at + PIECE_CHARACTERS])) - _CUT_TOKENS)
            if tokens > _CUT_SHARE * positions:
                raise TooLongError(
                    f"{len(text)} characters, too many for the {positions} positions of "
                    f"{self.name}; shorten it"
                )

    def encode_prefix(self, text: str, tokens: int) -> list[int]:
        """Return `encode` of a beginning of the text that has at least `tokens` tokens.

        A text with fewer tokens is encoded whole.
        """
        size = PIECE_CHARACTERS
        while True:
            ids = self.tokens_of(text[:size])
            if size >= len(text) or len(ids) >= tokens + _CUT_TOKENS:
                return ids
            size *= 2

    def encode_message(self, text: str) -> list[int]:
        """Return the token ids of a user's message by the chat template.

        They end where the answer begins. Raises UsageError if the template rejects the message.
        `check_chat` must have found a template.
        """
        try:
            return self.encode_chat([{"role": "user", "content": text}])
        except TooLongError:
            raise
        except ValueError as error:
            raise UsageError(
                f"the chat template of {self.name} cannot take the prompt ({error})"
            ) from error

    def check_chat(self) -> None:
        """Raise UsageError if there is no tokenizer with a chat template."""
        if not self.has_chat_template:
            raise UsageError(
                f"--chat: {self.name} has no chat template; leave it out, or give a chat or "
                "instruct model"
            )

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    @cached_property
    def min_content_parts(self) -> int | None:
        """Fewest texts of a message that the chat template gets as a list of parts.

        With fewer texts, they are passed as lines of one text. None: never as parts, because the
        template would write the list as Python does. 2: the template renders a text in a part like
        a plain text. 1: the template reads only parts.
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

    def with_template_options(self, options: Mapping[str, Any]) -> Model:
        """Return the model with variables for its chat template.

        Raises UsageError for the name of a parameter of the template's call.
        """
        for name in options:
            if name in self.reserved_options:
                raise UsageError(
                    f"--chat-template-kwargs: {name} cannot be set for the chat template; leave "
                    "it out"
                )
        return replace(self, template_options=dict(options))

    @property
    def reserved_options(self) -> frozenset[str]:
        """Names of the parameters of the chat template's call.

        They cannot be the template's own options.
        """
        own = (
            inspect.signature(self.tokenizer.apply_chat_template).parameters
            if self.tokenizer is not None
            else ()
        )
        return frozenset({"messages", *own})

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
        keep: int | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, up to where the answer begins.

        options: further variables for the template, and arguments of its call. The others are as
        for `encode`. Raises ValueError if the template rejects the conversation, and TooLongError
        if it is too long.
        """
        text = self.chat_text(messages, options=options)
        return self.encode(text, add_special_tokens, keep)

    def encode_turn(self, users: Sequence[str], system: str | None = None) -> list[int]:
        """Return the token ids of the last of a user's messages, by the chat template.

        They begin where the answer before it ends, whatever that answer says, and go up to where
        the next answer begins. system: a message before all others. Raises ValueError if the
        template does not accept messages and answers in turn.
        """
        messages = [] if system is None else [{"role": "system", "content": system}]
        for text in users:
            messages += [
                {"role": "user", "content": text},
                {"role": "assistant", "content": _ANSWER_MARK},
            ]
        head, answer, turn = self.chat_text(messages[:-1]).rpartition(_ANSWER_MARK)
        if bool(answer) != (len(users) > 1) or head.count(_ANSWER_MARK) != max(0, len(users) - 2):
            raise ValueError("it leaves out answers that came before")
        self.check_fits(turn)
        return self.encode_plain(turn)

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        answers: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a conversation as the chat template writes it.

        It ends where an answer begins. Without `answers` it ends with the last message, which is to
        be continued. options and ValueError: as for `encode_chat`.
        """
        text = self._render(self._for_template(messages), answers, options or {})
        for i, message in enumerate(messages):
            content = message.get("content") or ""
            parts = _as_parts(content) if isinstance(content, str) else content
            is_read = all(part["text"].strip() in text for part in parts)
            if message.get("role") not in ("user", "assistant") and not is_read:
                raise ValueError(
                    f"it leaves out message {i}, whose role is {message.get('role')}; give it "
                    "another role"
                )
        return text

    def _for_template(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return messages in the form that the chat template reads.

        OpenAI's newer name for a system message is "developer". A template that does not know the
        name gets "system", as from OpenAI and vLLM.
        """
        is_developer = [message.get("role") == "developer" for message in messages]
        if any(is_developer) and not self.reads_in_template("developer"):
            messages = [
                {**message, "role": "system"} if of_developer else message
                for message, of_developer in zip(messages, is_developer, strict=True)
            ]
        if self.min_content_parts == 1:
            messages = [
                {**message, "content": _as_parts(text)}
                if isinstance(text := message.get("content"), str)
                else message
                for message in messages
            ]
        return list(messages)

    def reads_in_template(self, name: str) -> bool:
        """Return whether the chat template has a name in it: a variable or a role."""
        template = _TEMPLATE_COMMENT.sub("", str(getattr(self.tokenizer, "chat_template", "")))
        return re.search(rf"\b{re.escape(name)}\b", template) is not None

    def _render(
        self, messages: Sequence[Mapping[str, Any]], answers: bool, options: Mapping[str, Any]
    ) -> str:
        """Call the template in transformers' sandbox.

        It can run no code and write no files, but it may be slow.
        """
        assert self.tokenizer is not None
        try:
            with _quiet():
                text = self.tokenizer.apply_chat_template(
                    list(messages),
                    **{
                        "tokenize": False,
                        "add_generation_prompt": answers,
                        "continue_final_message": not answers,
                        **self.template_options,
                        **options,
                    },
                )
        except Exception as error:  # the template language raises many kinds
            raise ValueError(one_line(error) or type(error).__name__) from error
        return str(text)

    def encode_plain(self, text: str) -> list[int]:
        """Return token ids without adding special tokens.

        The text contains them already, or it continues other text.
        """
        return self.tokens_of(text, add_special_tokens=False)

    def encode_plain_long(self, text: str) -> list[int]:
        """Return `encode_plain` of a text of any length.

        A long text is encoded in pieces, which end behind a newline if there is one.
        """
        found = []
        at = 0
        while at < len(text):
            end = at + LONG_PIECE_CHARACTERS
            if end < len(text):
                end = text.rfind("\n", at, end) + 1 or end
            found += self.encode_plain(text[at:end])
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
    """Locate a model and read its shape. No weights are read.

    weights: False also fetches none. offload_dir: folder of named models; None: the default one.
    max_model_len: as for `with_max_len`. Raises UsageError with what is wrong and the remedy.
    """
    with _suggesting(model):
        folder, note = _find_folder(model, path, revision, weights, offload_dir)
    if folder is not None:
        names = ("config.json", GENERATION_CONFIG, *TOKENIZER_FILES, *_TOKENIZER_EXTRAS)
        files = states_of(folder / name for name in names)
        with _quiet():
            spec, config = _read_shape(model, folder, max_model_len)
            generation = read_generation_config(folder, spec.vocab_size)
            counts = {**generation.settings, **generation.drawing}
            if counts:  # a job that was begun with other settings must not resume
                config = {**config, "generation_config": counts}
            tokenizer = _load_tokenizer(folder)
            return Model(
                model, spec, config, folder, asks_random(path), tokenizer, files, note, generation
            )
    built_in = built_in_spec(model)
    if built_in is None:
        near = difflib.get_close_matches(model, built_in_names(), n=3)
        raise UsageError(
            f"--model {model}: random weights (--path {DUMMY}) need a built-in shape"
            f"{' such as ' + ', '.join(near) if near else ''} (docs/reference/models.md lists "
            "them), or a local folder"
            " with a config.json; with a quantization_config in it they are in that format"
        )
    spec, config = built_in
    return Model(spec.name, with_max_len(spec, max_model_len), config, None, True, None)


def _find_folder(
    model: str,
    path: str | None,
    revision: str | None,
    weights: bool,
    offload_dir: str | Path | None,
) -> tuple[Path | None, str]:
    """Return the folder of a model, as `resolve`, with a note if its name means another source."""
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
    note = (
        f"--model {model}: the hub does not answer; {folder} is used, which was made of "
        f"{same.bits}-bit weights"
    )
    return folder, note


def has_safetensors(model: Model) -> bool:
    """Return whether all weights of the model are safetensors files, which can be read in place."""
    return (
        model.folder is not None
        and names_in(model.folder) == SAFETENSORS
        and has_weights(model.folder)
    )


def dtype_of(folder: Path) -> str | None:
    """Return the float dtype of a model in plans and runs, which is that of transformers.

    It is the `dtype` (older: `torch_dtype`) of config.json, or of the config of its text model.
    Without a float dtype there, it is that of most bytes of the weights. None: these are not
    safetensors, or are not there.
    """
    config = read_object(folder / "config.json", str(folder / "config.json"))
    inner = [config[name] for name in TEXT_CONFIGS if isinstance(config.get(name), dict)]
    for body in (config, *inner):
        for name in ("dtype", "torch_dtype"):
            said = str(body.get(name)).removeprefix("torch.")
            if said in DTYPE_BYTES:
                return said
    if names_in(folder) != SAFETENSORS or not has_weights(folder):
        return None
    stored = read_index(folder)
    is_float = any(one.dtype in (*DTYPE_BYTES, WIDE) for one in stored.values())
    return Checkpoint(folder, stored).dtype if is_float else None


def find_dtype(
    model: str, path: str | None, revision: str | None, offload_dir: str | Path | None
) -> str | None:
    """Return `dtype_of` the model that `find_spec` finds with these arguments.

    None: no folder has it, or random weights are asked for.
    """
    if asks_random(path):
        return None
    folder = find_folder(model, path)
    if folder is None and built_in_spec(model) is not None:
        return None
    folder = folder or _find_folder(model, path, revision, False, offload_dir)[0]
    return None if folder is None else dtype_of(folder)


def find_spec(
    model: str,
    path: str | None,
    revision: str | None = None,
    offload_dir: str | Path | None = None,
    max_model_len: int | None = None,
) -> ModelSpec:
    """Return a model's shape, for plans.

    This is `find_model`, except that weights are never fetched and a built-in shape needs no hub.
    """
    folder = find_folder(model, path)
    if folder is None and (known := built_in_spec(model)) is not None:
        return with_max_len(known[0], max_model_len)
    if folder is None and asks_random(path):
        found = find_model(model, path, offload_dir=offload_dir, max_model_len=max_model_len)
        return found.spec  # find_model raised an error that lists the shapes if there is none
    with _suggesting(model):
        folder = folder or _find_folder(model, path, revision, False, offload_dir)[0]
    assert folder is not None
    with _quiet():
        return _read_shape(model, folder, max_model_len)[0]


def _read_shape(
    name: str, folder: Path, max_model_len: int | None
) -> tuple[ModelSpec, dict[str, Any]]:
    """Return the shape of the model in `folder` and its config, both as its files have them."""
    spec, config = spec_from_folder(name, folder)
    if has_other_head(spec, folder):
        config = {**config, "tie_word_embeddings": False}
        spec = spec_from_config(name, config, str(folder / CONFIG_NAME))
        say_once(
            f"{folder}: has a head with other numbers than the embedding that config.json ties it "
            "to; the head is used,"
            " as in transformers"
        )
    say_adapter(folder)
    return with_max_len(spec, max_model_len), config


def with_max_len(spec: ModelSpec, max_model_len: int | None) -> ModelSpec:
    """Return the model with at most `max_model_len` tokens per sequence.

    None: as many as it has positions.

    Raises UsageError if that is more than it has positions.
    """
    if max_model_len is None:
        return spec
    max_len = check_int("--max-model-len", max_model_len, low=1)
    if max_len > spec.max_positions:
        way = (
            "lower it"
            if spec.rotary is None
            else f"lower it, or stretch the positions by rope_scaling in {CONFIG_NAME}"
        )
        raise UsageError(
            f"--max-model-len {max_len}: {spec.name} has {spec.max_positions} positions; {way}"
        )
    return replace(spec, max_positions=max_len)


@contextlib.contextmanager
def _suggesting(model: str) -> Iterator[None]:
    """Add the name that may be meant to a UsageError about a mistyped name."""
    try:
        yield
    except UsageError as error:
        if isinstance(error, NotOnHubError) and built_in_spec(model) is None:
            error = NotOnHubError(_with_family(str(error), model))
        known = {name.lower(): name for name in (*PACKAGED, *NAMED, *built_in_names())}
        known |= {hub_id.rpartition("/")[2].lower(): one.name for hub_id, one in BY_HUB_ID.items()}
        near = [
            known[name] for name in difflib.get_close_matches(model.lower(), known, n=1, cutoff=0.8)
        ]
        # Other numbers are another model: Qwen3.5-35B is no mistyped Qwen3-30B.
        if near and near[0] != model and _numbers(near[0]) == _numbers(model):
            raise UsageError(f"{error}; did you mean {near[0]}?") from error
        raise error


def _numbers(name: str) -> list[str]:
    return re.findall(r"\d+(?:\.\d+)*", name.rpartition("/")[2])


def _with_family(reason: str, model: str) -> str:
    """Return why a model of the hub was not found, with its family as far as its name shows it."""
    name = model.rpartition("/")[2].lower()
    lists = f"{MODELS_PAGE} lists those that do"
    for pattern, family in NOT_SUPPORTED.items():
        if re.search(pattern, name):
            start = f"--model {model}: "
            found = f"by its name it is of a family that does not run here ({family}; {lists}); "
            return f"{start}{found}{reason.removeprefix(start)}"
    return f"{reason}; whether its family runs here could not be looked up ({lists})"


def find_checkpoint(
    model: Model,
    dtype: str,
    offload_dir: Path,
    seed: int,
    progress: bool,
    form: Codec | None = None,
) -> Checkpoint:
    """Return the checkpoint on disk.

    It is read in place, imported from .bin, or written with seeded random weights.

    dtype: of random weights. form: convert the matrices to that format, once. Random weights in a
    packed format are never written unpacked.
    """
    cache = offload_dir / "weights"
    spec = model.spec
    if not model.random:
        assert model.folder is not None
        found = _in_use(open_checkpoint(spec, model.folder, cache))
        return _in_use(pack_checkpoint(spec, found, cache, form, progress)) if form else found
    shape = shape_fingerprint(model.config)
    name = f"{label(model.name.replace('/', '--'))}-{dtype}-seed{seed}-{shape}"
    if form:
        folder = cache / "packed" / f"random-{name}"
        return _in_use(pack_random(spec, model.config, folder, dtype, seed, form, progress))
    folder = write_random_checkpoint(
        spec, model.config, cache / "random" / name, dtype, seed, progress
    )
    return _in_use(open_checkpoint(spec, folder, cache))


def _in_use(checkpoint: Checkpoint) -> Checkpoint:
    """Keep `flexgen-h2o cache` from removing the checkpoint's folder while the object is alive.

    This matters only for folders that the package has made.
    """
    folder = checkpoint.folder
    if read_mark(folder) is not None:
        try:
            # Another process may be checking whether the folder is in use.
            lock = lock_folder(folder, shared=True, waits=True)
        except OSError:  # the file system has no locks
            return checkpoint
        if lock is None:
            raise UsageError(f"{folder}: another process is removing it; run again")
        weakref.finalize(checkpoint, os.close, lock)
        with contextlib.suppress(OSError):
            os.utime(folder / MARK)  # when it was last used
    return checkpoint


def content_digests(model: Model, checkpoint: Checkpoint | None) -> dict[str, str | None]:
    """Return digests of the model's `weights` and `tokenizer` (atomic_folder.sample_digest).

    They depend on contents only, not on the folder's name. None: the model has none of its own.
    checkpoint: the model's checkpoint, opened before. Raises UsageError if a file cannot be read,
    and FlexgenError if one has changed since it was opened.
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
        raise UsageError(
            f"--model {model.name}: {error.filename}: {error.strerror or error}"
        ) from error
    check_unchanged(model.files)
    if checkpoint is not None:
        checkpoint.check_unchanged()
    return digests


def shape_fingerprint(config: dict[str, Any]) -> str:
    """Return a short hash of a config.

    By it, random weights made for another shape are never reused.
    """
    import hashlib
    import json

    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:8]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Collect what libraries log and warn while files are read.

    If no error is raised, each message is shown once, on one line. Otherwise none is shown, because
    the error says what is wrong with the file.
    """
    collector = BufferingHandler(sys.maxsize)
    with _logging_lock, warnings.catch_warnings(record=True) as warned:
        modules = [importlib.import_module(f"{name}.utils.logging") for name in _LOGGING_LIBRARIES]
        loggers = [module.get_logger() for module in modules]
        before = [logger.handlers[:] for logger in loggers]
        for logger in loggers:
            logger.handlers[:] = [collector]
        try:
            yield
        finally:
            for logger, handlers in zip(loggers, before, strict=True):
                logger.handlers[:] = handlers
    logged = [record.getMessage() for record in collector.buffer]
    for text in (*logged, *(str(one.message) for one in warned)):
        say_once(" ".join(text.split()))


def _load_tokenizer(folder: Path) -> Any | None:
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        return None
    for name in ("config.json", *TOKENIZER_FILES, *_TOKENIZER_EXTRAS, *_OTHER_TOKENIZER_FILES):
        _check_tokenizer_file(folder / name)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        # A setting with a wrong type is only found at the first use.
        tokenizer.decode(tokenizer("a", verbose=False)["input_ids"])
        _drop_dropout(tokenizer, folder)
        return tokenizer
    except BaseException as error:  # transformers and tokenizers raise many kinds for a bad file
        if interrupts.asks_to_end(error):
            raise
        missing = _missing_for_sentencepiece(folder)
        if missing:
            raise UsageError(
                f"{folder}: its tokenizer is {_SENTENCEPIECE} alone, and packages that read it are "
                "not installed; run"
                f" pip install {' '.join(missing)}, or give a folder with a tokenizer.json"
            ) from error
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UsageError(f"{folder}: its tokenizer cannot be read ({reason})") from error


def _check_tokenizer_file(path: Path) -> None:
    """Raise UsageError for a file that transformers cannot read or would wait for.

    Such a file is not a regular file, or begins with a byte order mark.
    """
    try:
        with open_regular(path) as file:
            if path.suffix == ".json" and file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
                raise UsageError(
                    f"{path}: begins with a byte order mark; save it as UTF-8 without one"
                )
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error


def _drop_dropout(tokenizer: Any, folder: Path) -> None:
    """Switch off a tokenizer's random choice between several ways to cut a text.

    The same text then always gives the same tokens.
    """
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    found = [name for name in _DRAWN if getattr(model, name, None)]
    for name in found:
        setattr(model, name, None)
    if found:
        say_once(
            f"{folder}: its tokenizer's {' and '.join(found)} is for training, and is not applied"
        )


def _missing_for_sentencepiece(folder: Path) -> list[str]:
    """Return the packages to install for a SentencePiece model without a tokenizer.json."""
    if (folder / "tokenizer.json").exists() or not (folder / _SENTENCEPIECE).exists():
        return []
    modules = {"sentencepiece": "sentencepiece", "google.protobuf": "protobuf"}
    return [package for module, package in modules.items() if not _is_installed(module)]


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # the package that would contain it is missing
        return False


def _as_parts(text: str) -> list[dict[str, str]]:
    """Return a text as the parts of a message's content."""
    return [{"type": "text", "text": text}]

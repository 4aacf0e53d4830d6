"""Settings of `generation_config.json`, applied as by transformers' greedy `generate`.

The file's ends of a sequence become the model's (`spec_from_folder`). Its penalties and forbidden
tokens change logits before a token is chosen, by transformers' own classes. Other settings that
would change greedy tokens are not applied, and the user is told so.

Answers are greedy unless a request or a flag gives a temperature. Such answers are drawn with the
file's top_k and top_p if the request has none, as in vLLM. The user is told what the file asks of
drawing. How many tokens an answer has never depends on this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from flexgen_h2o.core.errors import UsageError, first_line
from flexgen_h2o.core.files import read_object
from flexgen_h2o.core.settings import SamplingParams
from flexgen_h2o.models import GENERATION_CONFIG, read_ends

# A processor of transformers: (1, tokens) ids and (1, vocab) logits in, logits out.
Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class AnswerContext:
    """The answer for which processors are made."""

    prompt: Sequence[int]  # tokens that the answer follows
    ends: Sequence[int]  # tokens that end the answer
    most: int  # most new tokens
    device: torch.device | str = "cpu"  # device of the logits
    # The first token is forced, after a prompt of one token. Set by `GenerationConfig.processors`.
    is_forced: bool = False

    @property
    def prompt_tensor(self) -> torch.Tensor:
        return torch.tensor([list(self.prompt)], device=self.device)

    @property
    def end_tensor(self) -> torch.Tensor:
        return torch.tensor(list(self.ends), device=self.device)


def _made(name: str, *args: Any, **kwargs: Any) -> Any:
    """Return an object of one of transformers' classes."""
    from transformers.generation import logits_process

    return getattr(logits_process, f"{name}LogitsProcessor")(*args, **kwargs)


def _decay(value: Any, answer: AnswerContext) -> Any:
    from transformers.generation.logits_process import ExponentialDecayLengthPenalty

    return ExponentialDecayLengthPenalty(tuple(value), answer.end_tensor, len(answer.prompt))


# Makers of processors, in the order in which transformers applies them
# (GenerationMixin._get_logits_processor).
_MAKERS: dict[str, Callable[[Any, AnswerContext], Any]] = {
    "sequence_bias": lambda value, answer: _made("SequenceBias", value),
    "encoder_repetition_penalty": lambda value, answer: _made(
        "EncoderRepetitionPenalty", penalty=float(value), encoder_input_ids=answer.prompt_tensor
    ),
    "repetition_penalty": lambda value, answer: _made("RepetitionPenalty", float(value)),
    "no_repeat_ngram_size": lambda value, answer: _made("NoRepeatNGram", value),
    "encoder_no_repeat_ngram_size": lambda value, answer: _made(
        "EncoderNoRepeatNGram", value, answer.prompt_tensor
    ),
    "bad_words_ids": lambda value, answer: _made("NoBadWords", value, answer.end_tensor),
    "min_length": lambda value, answer: _made("MinLength", value, answer.end_tensor),
    "min_new_tokens": lambda value, answer: _made(
        "MinNewTokensLength", len(answer.prompt), value, answer.end_tensor
    ),
    "forced_bos_token_id": lambda value, answer: _made("ForcedBOSToken", value),
    "forced_eos_token_id": lambda value, answer: _made(
        "ForcedEOSToken", len(answer.prompt) + answer.most, value, device=answer.device
    ),
    "remove_invalid_values": lambda value, answer: _made("InfNanRemove"),
    "exponential_decay_length_penalty": _decay,
    "suppress_tokens": lambda value, answer: _made("SuppressTokens", value, device=answer.device),
    "begin_suppress_tokens": lambda value, answer: _made(
        "SuppressTokensAtBegin", value, len(answer.prompt) + answer.is_forced, device=answer.device
    ),
}
# Settings that forbid end tokens, and so do nothing without them.
_NEED_ENDS = ("min_length", "min_new_tokens", "exponential_decay_length_penalty")
# Values with which a setting changes nothing. null is such a value for every setting.
_IDLE: dict[str, tuple[Any, ...]] = {
    "encoder_repetition_penalty": (1,),
    "repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "remove_invalid_values": (False,),
}
# Settings that would change greedy tokens and are not applied, each with the values that would not.
_NOT_APPLIED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0,),
    "guidance_scale": (1,),
    "watermarking_config": (),
    "stop_strings": ([],),
    "max_time": (),
    "token_healing": (False,),
    "constraints": (),
    "force_words_ids": (),
    "forced_decoder_ids": (),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "cache_implementation": (
        "dynamic",
        "static",
        "hybrid",
        "offloaded",
        "offloaded_static",
        "sliding_window",
    ),
}
# Settings that hold for answers that are drawn, each with its values that change nothing.
_DRAWING: dict[str, tuple[Any, ...]] = {"top_k": (0, -1), "top_p": (1,)}
# Settings of drawing that are not applied.
_OF_DRAWING: dict[str, tuple[Any, ...]] = {
    "do_sample": (False,),
    "temperature": (0,),
    "min_p": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
}


@dataclass(frozen=True)
class GenerationConfig:
    """The settings of a generation_config.json. `read_generation_config` makes it."""

    # Settings that are applied, by name.
    settings: Mapping[str, Any] = field(default_factory=dict)
    # Names of settings that are not applied.
    not_applied: tuple[str, ...] = ()
    # Ends of a sequence by config.json. In text completions those of generation_config.json replace
    # them.
    ends: tuple[int, ...] = ()
    # Settings of answers that are drawn, by name: fields of SamplingParams.
    drawing: Mapping[str, Any] = field(default_factory=dict)
    # Settings of drawing that are not applied, by name.
    not_drawn: Mapping[str, Any] = field(default_factory=dict)

    @property
    def drawing_note(self) -> str:
        """A line on what the file asks of drawing, and what is done. Empty if it asks nothing."""
        found = {**self.not_drawn, **self.drawing}
        if not found:
            return ""
        asked = ", ".join(f"{name} {value!r:.20}" for name, value in found.items())
        some = self.not_drawn.get("temperature")
        # Others are not among the temperatures that the flag has.
        shown = some if isinstance(some, int | float) and 0 < some <= 2 else 1.0
        line = (
            f"{GENERATION_CONFIG} asks for {asked}: answers are greedy unless you give a "
            f"temperature (--temperature {shown})"
        )
        if self.drawing:
            line += f", and then use its {' and '.join(self.drawing)}"
        never = [name for name in self.not_drawn if name not in ("do_sample", "temperature")]
        return line + (f"; {', '.join(never)} never count here" if never else "")

    def for_drawing(self, params: SamplingParams) -> SamplingParams:
        """Return parameters of an answer, with this file's settings that it does not give."""
        if params.greedy:
            return params
        missing = {
            name: value for name, value in self.drawing.items() if getattr(params, name) is None
        }
        return replace(params, **missing) if missing else params

    def with_penalty(self, repetition_penalty: float | None) -> GenerationConfig:
        """Return this config with another repetition penalty. None keeps the present one."""
        if repetition_penalty is None:
            return self
        settings = {**self.settings, "repetition_penalty": repetition_penalty}
        return replace(self, settings=_that_matter(settings))

    def processors(self, answer: AnswerContext) -> list[Processor]:
        """Return the processors that change the logits of an answer, in order."""
        names = (name for name in self.settings if answer.ends or name not in _NEED_ENDS)
        answer = replace(
            answer, is_forced=len(answer.prompt) == 1 and "forced_bos_token_id" in self.settings
        )
        return [_MAKERS[name](self.settings[name], answer) for name in names]


def read_generation_config(folder: Path, vocab_size: int) -> GenerationConfig:
    """Read the settings from a model's folder.

    Without the file they come from config.json, as in transformers.

    Raises UsageError that names the file for a setting that transformers could not apply either.
    """
    config = read_object(folder / "config.json", str(folder / "config.json"))
    path = folder / GENERATION_CONFIG
    body = read_object(path, str(path)) if path.exists() else config
    found = GenerationConfig(
        _that_matter({name: body.get(name) for name in _MAKERS}),
        tuple(_asked(body, _NOT_APPLIED)),
        read_ends(config.get("eos_token_id")),
        _asked(body, _DRAWING),
        _asked(body, _OF_DRAWING) if body.get("do_sample") is not False else {},
    )
    try:
        SamplingParams(**found.drawing)
    except UsageError as error:
        where = path if path.exists() else folder / "config.json"
        raise UsageError(f"{where}: {error}; correct it, or take it out") from error
    answer = AnswerContext([0], [0], 1)
    for name in found.settings:
        try:
            for processor in replace(found, settings={name: found.settings[name]}).processors(
                answer
            ):
                processor(
                    answer.prompt_tensor,
                    torch.zeros(1, vocab_size, dtype=torch.float32, device="cpu"),
                )
        except Exception as error:  # transformers raises many kinds for a wrong value
            where = path if path.exists() else folder / "config.json"
            raise UsageError(
                f"{where}: {name}: {found.settings[name]!r:.60} is of no use "
                f"({first_line(error)}); correct it, or "
                "take it out"
            ) from error
    return found


def _asked(body: Mapping[str, Any], known: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return the known settings of a file that have another value than those that change nothing.

    known: such values, by name.
    """
    return {
        name: body[name]
        for name, idle in known.items()
        if body.get(name) is not None and body[name] not in idle
    }


def _that_matter(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that change something, in the order of application.

    min_new_tokens replaces min_length.
    """
    settings = {
        **settings,
        **({"min_length": None} if settings.get("min_new_tokens") is not None else {}),
    }
    return {
        name: settings[name]
        for name in _MAKERS
        if settings.get(name) is not None and settings[name] not in _IDLE.get(name, ())
    }

"""Tiny models with tokenizers of each kind, and one whose greedy answer is a script."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from flexgen_h2o.engine.sampling import SamplingParams, TokenLogprobs
from flexgen_h2o.jobs.requests import Request, RequestReader
from flexgen_h2o.models.load import Model
from flexgen_h2o.serving.answers import StreamEvents, read_asked

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if "
    "add_generation_prompt %}>{% endif %}"
)
VOCAB = 320
POSITIONS = 256


def write_bytes_tokenizer(
    folder: Path, specials: Sequence[str] = ("<|end|>",), template: str = TEMPLATE
) -> dict[str, int]:
    """A token for each byte, as GPT-2 writes them, and special ones from 256 on; the first of them
    ends a sequence. Returns the special tokens' ids."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain} | {
        byte: chr(256 + i) for i, byte in enumerate(others)
    }
    made = Tokenizer(models.BPE({letters[byte]: byte for byte in range(256)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in specials])
    _save(made, folder, template, eos_token=specials[0])
    return {text: 256 + i for i, text in enumerate(specials)}


def write_pieces_tokenizer(
    folder: Path, pieces: Sequence[str], template: str = TEMPLATE
) -> dict[str, int]:
    """As LLaMA 2 has it: pieces with ▁ for a space, bytes for what no piece has. Returns the ids of
    all pieces."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    made = Tokenizer(models.Unigram([(name, -1.0) for name in names], 0, True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    _save(made, folder, template, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    return {name: i for i, name in enumerate(names)}


def _save(made: Tokenizer, folder: Path, template: str, **names: str) -> None:
    fast = PreTrainedTokenizerFast(tokenizer_object=made, **names)
    fast.chat_template = template
    fast.save_pretrained(folder)


def write_llama(folder: Path, **more: Any) -> None:
    """Random weights."""
    torch.manual_seed(0)
    config = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    LlamaForCausalLM(_config(**config, **more)).save_pretrained(folder)


def write_script(
    folder: Path, script: Iterable[int], likely: dict[int, float] | None = None, **more: Any
) -> None:
    """Behind each token of a script comes the next one. likely: logits of other tokens behind the
    first; the next one has 8."""
    chain = [*script]
    assert len(set(chain)) == len(chain) <= 63
    one_head = {
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    model = LlamaForCausalLM(_config(**one_head, **more))
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.fill_(1.0 if "norm" in name else 0.0)
        for i, (token, after) in enumerate(itertools.pairwise(chain)):
            model.model.embed_tokens.weight[token, i] = 1
            model.lm_head.weight[after, i] = 1
        for token, logit in (likely or {}).items():
            model.lm_head.weight[token, 0] = logit / 8
    model.save_pretrained(folder)


def _config(**more: Any) -> LlamaConfig:
    given: dict[str, Any] = {
        "intermediate_size": 128,
        "vocab_size": VOCAB,
        "max_position_embeddings": POSITIONS,
        "bos_token_id": None,
        "eos_token_id": 256,
        "pad_token_id": None,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**{**given, **more})


def edit_json(path: Path, **changes: Any) -> None:
    """Change members of a JSON object; None takes one out."""
    body = json.loads(path.read_text()) if path.exists() else {}
    for name, value in changes.items():
        if value is None:
            body.pop(name, None)
        else:
            body[name] = value
    path.write_text(json.dumps(body))


def chat_line(name: str, content: Any, **body: Any) -> dict[str, Any]:
    """A line of a batch with one user's message."""
    messages = [{"role": "user", "content": content}]
    body = {"max_tokens": 40, "messages": messages, **body}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def text_line(name: str, prompt: Any, **body: Any) -> dict[str, Any]:
    body = {"max_tokens": 40, "prompt": prompt, **body}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


def streamed(
    model: Model,
    line: dict[str, Any],
    ids: list[int],
    logprobs: list[TokenLogprobs],
) -> tuple[Request, list[dict[str, Any]]]:
    """A request of a line's url and body that has got these tokens, and the choices of its
    stream."""
    body = {**line["body"], "stream": True}
    asked = read_asked(RequestReader(model, SamplingParams()), line["url"], body, 8, 200)
    [request] = asked.requests
    stream = StreamEvents(asked, model)
    events = list(stream.first())
    for token, one in zip(ids[:-1], logprobs[:-1], strict=True):
        events += stream.token(0, token, one)
    request.token_ids = ids
    request.logprobs = logprobs
    request.finish_reason = "stop"
    events.append(stream.end(0))
    return request, [json.loads(e.removeprefix(b"data: "))["choices"][0] for e in events]

"""llama.cpp. Variants: bf16 (the weights as they are) and its own formats q8_0, q4_0, q4_k
(Q4_K_M), all in RAM; with -mmap behind it mapped from the file, of which the kernel reads again
what its page cache does not keep.

Prompts as one batch of many sequences, then a token of each a step (its batched decode), chosen by
numpy's argmax. The folder is converted once into the offload dir. Peak memory is over a process
that has imported llama_cpp. Settings: flash_attn, kv_unified
(one KV buffer for all sequences), ubatch (tokens computed together).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from contract import (
    WARM_UP_PROMPT,
    WARM_UP_TOKENS,
    Meter,
    RefusedError,
    Request,
    convert_apart,
    drop_page_cache,
)

SETTINGS: dict[str, int] = {"flash_attn": 1, "kv_unified": 0, "ubatch": 512}
SWITCHES = ("flash_attn", "kv_unified")
FTYPES = {"q4_0": 2, "q4_k": 15}  # LLAMA_FTYPE_MOSTLY_Q4_0, _Q4_K_M
QUANTISE = """
import sys, llama_cpp
params = llama_cpp.llama_model_quantize_default_params()
params.ftype = int(sys.argv[3])
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), params))
"""
MAX_ROWS = 256  # sequences of a context: LLAMA_MAX_SEQ

CONVERTER = Path(__file__).with_name("convert_llamacpp.py")


def measure(request: Request, meter: Meter) -> dict[str, Any]:
    if request.rows > MAX_ROWS:
        raise RefusedError(
            f"llama.cpp: {request.rows} rows are more than the {MAX_ROWS} sequences of a context"
        )
    settings = request.chosen(SETTINGS, SWITCHES)
    path = _converted(request)
    with _context(path, request, settings) as session:
        session.generate(request.prompts(1, WARM_UP_PROMPT), WARM_UP_TOKENS, lambda: None)
        prompts = request.prompts()
        meter.begin()
        session.generate(prompts, request.gen_len, meter.mark)
        return meter.result(request.rows, request.gen_len) | {"setting": settings}


class Session:
    """A context of llama.cpp and a batch with room for all prompts."""

    def __init__(self, context: Any, batch: Any, vocab: int) -> None:
        self._context = context
        self._batch = batch
        self._vocab = vocab

    def generate(self, prompts: Sequence[Sequence[int]], gen_len: int, mark: Any) -> None:
        """Greedily, `gen_len` tokens a prompt; `mark` is called when each prompt has its next
        one."""
        import llama_cpp

        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        lengths = [0] * len(prompts)  # tokens of each sequence in the KV cache
        tokens = prompts
        for _ in range(gen_len):
            logits = self._decode(tokens, lengths)
            lengths = [n + len(some) for n, some in zip(lengths, tokens, strict=True)]
            tokens = logits.argmax(axis=1)[:, None].tolist()
            mark()

    def _decode(self, tokens: Sequence[Sequence[int]], lengths: Sequence[int]) -> Any:
        """Return the logits of what follows each sequence: (sequences, vocabulary) in float32, a
        view until the next call. tokens: what each goes on with behind `lengths` tokens."""
        import llama_cpp
        import numpy as np

        batch = self._batch
        count = 0
        for row, some in enumerate(tokens):
            for at, token in enumerate(some, lengths[row]):
                batch.token[count] = token
                batch.pos[count] = at
                batch.n_seq_id[count] = 1
                batch.seq_id[count][0] = row
                batch.logits[count] = False
                count += 1
            batch.logits[count - 1] = True
        batch.n_tokens = count
        code = llama_cpp.llama_decode(self._context, batch)
        if code:
            raise RuntimeError(f"llama_decode ended with {code}")
        return np.ctypeslib.as_array(
            llama_cpp.llama_get_logits(self._context), (len(tokens), self._vocab)
        )


@contextmanager
def _context(path: Path, request: Request, settings: dict[str, int]) -> Iterator[Session]:
    import llama_cpp

    quiet = llama_cpp.llama_log_callback(_say_nothing)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p())
    llama_cpp.llama_backend_init()
    loading = llama_cpp.llama_model_default_params()
    loading.use_mmap = request.variant.endswith("-mmap")
    loading.use_extra_bufts = (
        not loading.use_mmap
    )  # repacked weights would take RAM beside the mapped file
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), loading)
    if model is None:
        raise RuntimeError(f"llama.cpp cannot load {path}")
    params = llama_cpp.llama_context_default_params()
    tokens = request.rows * request.prompt_len
    columns = (
        -(-(request.prompt_len + request.gen_len) // 256) * 256
        if not settings["kv_unified"]
        else (request.prompt_len + request.gen_len)
    )
    params.n_ctx = request.rows * columns
    params.n_batch = max(512, tokens)
    params.n_ubatch = settings["ubatch"]
    params.n_seq_max = request.rows
    params.kv_unified = bool(settings["kv_unified"])
    params.n_threads = params.n_threads_batch = request.threads
    params.flash_attn_type = settings["flash_attn"]
    params.no_perf = True
    context = llama_cpp.llama_init_from_model(model, params)
    if context is None:
        raise RuntimeError("llama.cpp makes no context")
    batch = llama_cpp.llama_batch_init(max(512, tokens), 0, 1)
    try:
        yield Session(context, batch, int(request.config["vocab_size"]))
    finally:
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)


def _say_nothing(level: int, text: bytes, data: Any) -> None:
    """Its log would be some hundred lines."""


def _converted(request: Request) -> Path:
    """The GGUF file, converted once."""
    kind = request.variant.removesuffix("-mmap")
    path = _gguf(request, kind)
    if path.exists():
        return path
    request.offload_dir.mkdir(parents=True, exist_ok=True)
    first = kind if kind in ("bf16", "q8_0") else "bf16"
    whole = _gguf(request, first)
    if not whole.exists():
        convert_apart(CONVERTER, request.model_dir, whole, first)
    if whole != path:
        half = path.with_suffix(".part")
        convert_apart("-c", QUANTISE, whole, half, str(FTYPES[kind]))
        half.rename(path)
    drop_page_cache(
        path
    )  # the converter's pages are outside the group that holds this run, which maps them
    return path


def _gguf(request: Request, kind: str) -> Path:
    return request.offload_dir / f"llamacpp-{request.model_dir.name}-{kind}.gguf"

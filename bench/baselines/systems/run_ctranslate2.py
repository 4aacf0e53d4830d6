"""CTranslate2, everything in RAM: int8, with float32 activations around int8 products.

It refuses bfloat16 on a CPU. The folder is converted once into the offload dir, with made-up words
for the token ids of random weights. Peak memory is over a process that has imported ctranslate2: it
does not need torch to run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from contract import WARM_UP_PROMPT, WARM_UP_TOKENS, Meter, Request, convert_apart

CONVERTER = Path(__file__).with_name("convert_ctranslate2.py")


def measure(request: Request, meter: Meter) -> dict[str, Any]:
    import ctranslate2

    folder = _converted(request)
    model = ctranslate2.Generator(
        str(folder),
        device="cpu",
        compute_type=request.variant,
        inter_threads=1,
        intra_threads=request.threads,
    )
    words = (folder / "words.txt").read_text().splitlines()  # they stand for token ids
    _generate(model, request.prompts(1, WARM_UP_PROMPT), words, WARM_UP_TOKENS, lambda: None)
    prompts = request.prompts()
    meter.begin()
    _generate(model, prompts, words, request.gen_len, meter.mark)
    return meter.result(request.rows, request.gen_len) | {
        "setting": {"compute_type": model.compute_type}
    }


def _generate(
    model: Any, prompts: list[list[int]], words: list[str], gen_len: int, mark: Any
) -> None:
    """One batch, greedy. CTranslate2 tells of each row's token; the last row's ends a step."""
    rows = len(prompts)
    seen = 0

    def on_token(step: Any) -> bool:
        nonlocal seen
        seen += 1
        if seen % rows == 0:
            mark()
        return False

    results = model.generate_batch(
        [[words[i] for i in row] for row in prompts],
        beam_size=1,
        min_length=gen_len,
        max_length=gen_len,
        include_prompt_in_result=False,
        max_batch_size=0,
        callback=on_token,
    )
    if any(len(result.sequences_ids[0]) != gen_len for result in results):
        raise RuntimeError("a row ended early")


def _converted(request: Request) -> Path:
    """The converted folder, made once."""
    folder = request.offload_dir / f"ctranslate2-{request.model_dir.name}-{request.variant}"
    if not (folder / "words.txt").exists():
        convert_apart(
            CONVERTER,
            request.model_dir,
            folder,
            request.variant,
        )
    return folder

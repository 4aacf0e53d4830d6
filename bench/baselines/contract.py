"""The face that every system shows the sweep: one command line, one JSON object, exit codes.

    <venv python> bench/baselines/<peer>/run.py --variant V --model-dir DIR --prompt-len S --gen-len N --rows B

Exit codes: 0 measured, 2 refused (cannot run here, or wrong use), 3 does not fit the budget, 1 anything else; but for 0
the last line of stderr says why. A batch is `rows` prompts of random token ids, the same for every system; every row
runs to its last token, greedily. Imports neither torch nor this project's package: a peer's
environment has neither, or its own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
EXIT_FAILED, EXIT_REFUSED, EXIT_DOES_NOT_FIT = 1, 2, 3
WARM_UP_PROMPT, WARM_UP_TOKENS = 8, 2


class RefusedError(Exception):
    """The system cannot run this here, or not at all; the message says why in one line."""

    exit_code = EXIT_REFUSED


class DoesNotFitError(RefusedError):
    """The system's own needs exceed the budget."""

    exit_code = EXIT_DOES_NOT_FIT


@dataclass(frozen=True)
class Request:
    """What to measure. budget: bytes of RAM, None when the whole machine is free to use."""

    variant: str
    model_dir: Path
    prompt_len: int
    gen_len: int
    rows: int
    budget: int | None
    dtype: str
    offload_dir: Path
    threads: int
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.model_dir / "config.json").read_text())
        return found

    @property
    def weight_files(self) -> list[Path]:
        return sorted(self.model_dir.glob("*.safetensors"))

    def prompts(self, rows: int | None = None, length: int | None = None) -> list[list[int]]:
        """Random token ids, (rows, prompt_len), the same for every system."""
        source = random.Random(0)
        vocab = int(self.config["vocab_size"])
        shape = (rows or self.rows, length or self.prompt_len)
        return [[source.randrange(4, vocab) for _ in range(shape[1])] for _ in range(shape[0])]


class Meter:
    """Times, memory and storage reads of one generation. Call `begin` when the model is loaded and warm."""

    def __init__(self, empty_bytes: int) -> None:
        self.empty_bytes = empty_bytes
        self.marks: list[float] = []
        self.peak_before = self._read_before = 0

    def begin(self) -> None:
        """The timed part starts; peak memory is counted anew where the kernel allows it."""
        self.peak_before = peak_bytes()
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self._read_before = storage_read_bytes()
        self.marks = [time.perf_counter()]

    def mark(self) -> None:
        """Every row has its next token: the first mark ends prefill, the last ends decode."""
        self.marks.append(time.perf_counter())

    def result(self, rows: int, gen_len: int) -> dict[str, Any]:
        if len(self.marks) != gen_len + 1:
            raise RuntimeError(f"{len(self.marks) - 1} tokens a row were generated, not {gen_len}")
        return phases(rows, gen_len, self.marks[1] - self.marks[0], self.marks[-1] - self.marks[1]) | self.memory()

    def memory(self) -> dict[str, Any]:
        """Peaks are VmHWM less that of a process which has imported torch, or what the system computes with, alone."""
        peak = peak_bytes()
        return {
            "peak_rss_bytes": peak - self.empty_bytes,
            "peak_rss_loading_bytes": max(self.peak_before, peak) - self.empty_bytes,
            "empty_rss_bytes": self.empty_bytes,
            "read_bytes": storage_read_bytes() - self._read_before,
        }


def phases(rows: int, gen_len: int, prefill_s: float, decode_s: float) -> dict[str, Any]:
    """Rates as in the run report: prefill gives each row its first token, total counts generated tokens over both."""
    total = prefill_s + decode_s
    return {
        "rows": rows,
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "total_s": total,
        "decode_tokens_per_s": rows * (gen_len - 1) / decode_s if decode_s > 0 else 0.0,
        "tokens_per_s": rows * gen_len / total,
    }


Measure = Callable[[Request, Meter], dict[str, Any]]


def main(measure: Measure, variants: Sequence[str], packages: Sequence[str], framework: str = "torch") -> int:
    """Parse, measure, print. `measure` returns rates and memory, and under `setting` what the peer was set to."""
    request = _parse(variants)
    try:
        if not (request.model_dir / "config.json").exists() or not request.weight_files:
            raise RefusedError(f"--model-dir {request.model_dir}: needs config.json and *.safetensors")
        importlib.import_module(framework)
        found = measure(request, Meter(peak_bytes()))
    except RefusedError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return error.exit_code
    sys.stderr.flush()
    print(json.dumps({**found, "versions": _versions(packages)}), flush=True)
    return 0


def _parse(variants: Sequence[str]) -> Request:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--variant", default=variants[0], help=f"one of {', '.join(variants)}")
    add("--model-dir", type=Path, required=True, help="a Hugging Face folder: config.json and safetensors")
    add("--prompt-len", type=int, required=True)
    add("--gen-len", type=int, required=True)
    add("--rows", type=int, required=True, help="prompts, as one batch where the system does not choose its own")
    add("--budget", type=int, metavar="BYTES", help="of RAM (the whole machine)")
    add("--dtype", choices=sorted(DTYPES), default="bf16")
    add("--offload-dir", type=Path, required=True, help="where the system may write")
    add("--threads", type=int, default=os.cpu_count())
    add("--settings", type=json.loads, default={}, metavar="JSON", help="the system's own knobs, by name")
    add("--json", action="store_true", help="print one JSON object (the only form there is)")
    args = vars(parser.parse_args())
    del args["json"]
    known = {v.split(":")[0] for v in variants}
    if args["variant"].split(":")[0] not in known:
        parser.error(f"--variant {args['variant']}: not one of {', '.join(sorted(known))}")
    if min(args["prompt_len"], args["rows"]) < 1 or args["gen_len"] < 2:
        parser.error("--prompt-len and --rows are at least 1, --gen-len at least 2")
    return Request(**args)


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def peak_bytes() -> int:
    """VmHWM of this process."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def storage_read_bytes() -> int:
    """Bytes that this process made the kernel fetch from storage: page cache hits do not count."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith("read_bytes"))


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: bytes [start, end) of a file."""

    name: str
    shape: list[int]
    path: Path
    start: int
    end: int


def stored_tensors(files: Sequence[Path]) -> Iterator[StoredTensor]:
    """Every tensor of safetensors files, from the headers alone."""
    for path in files:
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                first, end = entry["data_offsets"]
                yield StoredTensor(name, entry["shape"], path, 8 + length + first, 8 + length + end)


def drop_page_cache(path: Path, start: int = 0, end: int = 0) -> None:
    """Tell the kernel to forget what it caches of bytes [start, end) (0: to the end); mapped pages stay."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, start, max(0, end - start), os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def kv_and_work_bytes(request: Request) -> tuple[int, int]:
    """Bytes that a batch needs besides weights, for peers that do not plan: KV cache, and activations at their widest.

    Activations: prefill's feed-forward width and four hidden states in the dtype, and logits of the last positions in
    the dtype and in float32.
    """
    config, itemsize = request.config, 4 if request.dtype == "fp32" else 2
    hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    tokens = request.rows * (request.prompt_len + request.gen_len)
    wide = int(config.get("ffn_dim") or config["intermediate_size"]) + 4 * hidden
    work = request.rows * (request.prompt_len * wide * itemsize + int(config["vocab_size"]) * (itemsize + 4))
    return 2 * layers * hidden * itemsize * tokens, work

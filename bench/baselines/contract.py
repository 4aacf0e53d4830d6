"""The face that every system shows the sweep: one command line, one JSON object, exit codes.

    <venv python> bench/baselines/run.py SYSTEM --variant V --model-dir DIR --prompt-len S --gen-len N --rows B

Exit codes: 0 measured, 2 refused (cannot run here, or wrong use), 3 does not fit the budget, 1
anything else; but for 0 the last line of stderr says why. A batch is `rows` prompts of random token
ids, the same for every system; every row runs to its last token, greedily. Imports neither torch
nor this project's package: a peer's environment has neither, or its own.
"""  # noqa: E501

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_DOES_NOT_FIT = 3
WARM_UP_PROMPT = 8
WARM_UP_TOKENS = 2
# names the file in which a process leaves the memory group that holds a run
OUTSIDE_GROUP = "FLEXGEN_OUTSIDE_GROUP"


class RefusedError(Exception):
    """The system cannot run this here, or not at all; the message says why in one line."""

    exit_code = EXIT_REFUSED


class DoesNotFitError(RefusedError):
    """The system's own needs exceed the budget."""

    exit_code = EXIT_DOES_NOT_FIT


@dataclass(frozen=True)
class Request:
    """A measurement that is asked for. budget: bytes of RAM, None when the whole machine is free to
    use. room: most bytes that a run may take, in a memory cgroup more than the budget, by which a
    peer places weights. It tries, at its leanest, all that fits it.
    """

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
    room: int | None = None

    def fits(self, nbytes: int) -> bool:
        """May a run take so much besides an empty process?"""
        allowed = [most for most in (self.budget, self.room) if most is not None]
        return not allowed or nbytes <= max(allowed)

    def chosen(
        self, defaults: dict[str, int], switches: Container[str] = (), may_be_0: Container[str] = ()
    ) -> dict[str, Any]:
        """A system's settings: its defaults, and --settings over them. switches: those that are 0
        or 1.

        RefusedError for a name that it has not, and a value that cannot be.
        """
        if unknown := sorted(self.settings.keys() - defaults):
            raise RefusedError(
                f"--settings: no {', '.join(unknown)}; the names are {', '.join(defaults)}"
            )
        for name, value in self.settings.items():
            least, most = (0, 1) if name in switches else (0 if name in may_be_0 else 1, 2**20)
            if not least <= value <= most:
                raise RefusedError(f"--settings: {name} is from {least} to {most}, not {value}")
        return defaults | self.settings

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the dtype that is computed in."""
        return 4 if self.dtype == "fp32" else 2

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
    """Times, memory and storage reads of one generation. Call `begin` when the model is loaded and
    warm."""

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
        return (
            phases(rows, gen_len, self.marks[1] - self.marks[0], self.marks[-1] - self.marks[1])
            | self.memory()
        )

    def memory(self) -> dict[str, Any]:
        """Peaks are VmHWM less that of a process which has imported torch, or what the system
        computes with, alone."""
        peak = peak_bytes()
        return {
            "peak_rss_bytes": peak - self.empty_bytes,
            "peak_rss_loading_bytes": max(self.peak_before, peak) - self.empty_bytes,
            "empty_rss_bytes": self.empty_bytes,
            "read_bytes": storage_read_bytes() - self._read_before,
        }


def phases(rows: int, gen_len: int, prefill_s: float, decode_s: float) -> dict[str, Any]:
    """Rates as in the run report: prefill gives each row its first token, total counts generated
    tokens over both."""
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


def main(
    measure: Measure,
    variants: Sequence[str],
    packages: Sequence[str],
    framework: str = "torch",
    dtypes: Sequence[str] = tuple(DTYPES),
) -> int:
    """Parse, measure, print. `measure` returns rates and memory, and under `setting` what the peer
    was set to.
    dtypes: those that `measure` knows how to use.
    """
    request = _parse(variants)
    try:
        if request.dtype not in dtypes:
            raise RefusedError(f"--dtype {request.dtype}: measured in {', '.join(dtypes)} only")
        if not (request.model_dir / "config.json").exists() or not request.weight_files:
            raise RefusedError(
                f"--model-dir {request.model_dir}: needs config.json and *.safetensors"
            )
        tokens = request.prompt_len + request.gen_len
        most = request.config.get("max_position_embeddings")
        if most is not None and tokens - 1 > int(most):  # the last token is not fed
            raise RefusedError(
                f"--gen-len: {tokens} tokens a row, and the model has {most} positions"
            )
        importlib.import_module(framework)
        found = measure(request, Meter(peak_bytes()))
    except RefusedError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return error.exit_code
    sys.stderr.flush()
    print(json.dumps({**found, "versions": _versions(packages)}), flush=True)
    return 0


def convert_apart(*arguments: str | Path) -> None:
    """Run a converter in a process of its own, outside the run's memory group, so that its memory
    is not counted: a script, or `-c` and code, and what it is given. What it makes is written to
    disk then. Raises RefusedError with its last line for exit code 2, DoesNotFitError where the
    kernel has killed it, which had no memory left, RuntimeError for anything else."""
    outside = os.environ.get(OUTSIDE_GROUP)
    # Where it may not leave, it is held too.
    leave = (
        ["sh", "-c", f'{{ echo $$ > {outside}; }} 2>/dev/null; exec "$@"', "sh"] if outside else []
    )
    done = subprocess.run(
        [*leave, sys.executable, *arguments], capture_output=True, text=True, check=False
    )
    said = done.stderr.strip()
    if done.returncode == EXIT_REFUSED:
        raise RefusedError(said.splitlines()[-1])
    if done.returncode == -signal.SIGKILL:
        raise DoesNotFitError("the converter was killed: no memory left")
    if done.returncode:
        raise RuntimeError(f"the converter ended with exit code {done.returncode}: {said[-500:]}")
    os.sync()


def _parse(variants: Sequence[str]) -> Request:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--variant", default=variants[0], help=f"one of {', '.join(variants)}")
    add(
        "--model-dir",
        type=Path,
        required=True,
        help="a Hugging Face folder: config.json and safetensors",
    )
    add("--prompt-len", type=int, required=True)
    add("--gen-len", type=int, required=True)
    add(
        "--rows",
        type=int,
        required=True,
        help="prompts, as one batch where the system does not choose its own",
    )
    add("--budget", type=int, metavar="BYTES", help="of RAM (the whole machine)")
    add("--room", type=int, metavar="BYTES", help="a run may take, where that is more (the budget)")
    add("--dtype", choices=sorted(DTYPES), default="bf16")
    add("--offload-dir", type=Path, required=True, help="where the system may write")
    add("--threads", type=int, default=os.cpu_count())
    add(
        "--settings",
        type=_settings_flag,
        default={},
        metavar="JSON",
        help="the system's own knobs, by name",
    )
    args = vars(parser.parse_args())
    known = {v.split(":")[0] for v in variants}
    if args["variant"].split(":")[0] not in known:
        parser.error(f"--variant {args['variant']}: not one of {', '.join(sorted(known))}")
    if min(args["prompt_len"], args["rows"], args["threads"]) < 1 or args["gen_len"] < 2:
        parser.error("--prompt-len, --rows and --threads are at least 1, --gen-len at least 2")
    for name in ("budget", "room"):
        if args[name] is not None and args[name] < 1:
            parser.error(
                f"--{name.replace('_', '-')} {args[name]}: is a number of bytes, at least 1"
            )
    return Request(**args)


def words_of(**flags: object) -> list[str]:
    """Words of a command line: `--name value` of each, a switch for True, nothing for None."""
    words = []
    for name, value in flags.items():
        if value is not None:
            words.append("--" + name.replace("_", "-"))
            words += [] if value is True else [str(value)]
    return words


def _settings_flag(text: str) -> dict[str, int]:
    """Read a system's settings, by name; one that is on or off is 1 or 0."""
    with suppress(ValueError):
        found = json.loads(text)
        if isinstance(found, dict) and all(type(value) is int for value in found.values()):
            return found
    raise argparse.ArgumentTypeError(f"{text}: not a JSON object of names and whole numbers")


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def peak_bytes() -> int:
    """VmHWM of this process."""
    line = next(
        x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM")
    )
    return int(line.split()[1]) * 1024


def storage_read_bytes() -> int:
    """Bytes that this process made the kernel fetch from storage: page cache hits do not count."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith("read_bytes"))


@dataclass(frozen=True)
class StoredTensor:
    """Place of a tensor in a file: bytes [start, end) of a file. dtype: as safetensors has it,
    BF16."""

    name: str
    dtype: str
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
                yield StoredTensor(
                    name, entry["dtype"], entry["shape"], path, 8 + length + first, 8 + length + end
                )


def drop_page_cache(path: Path, start: int = 0, end: int = 0) -> None:
    """Tell the kernel to forget what it caches of bytes [start, end) (0: to the end); mapped pages
    stay."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, start, max(0, end - start), os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def release_freed() -> None:
    """Give the kernel back what malloc has kept of freed memory: loading, which packs or converts,
    frees more than a generation takes, and a memory cgroup counts it."""
    process = ctypes.CDLL(None)
    for name, arguments in (
        ("MallocExtension_ReleaseFreeMemory", ()),
        ("malloc_trim", (0,)),
    ):  # tcmalloc's, glibc's
        with suppress(AttributeError):
            getattr(process, name)(*arguments)


def kv_and_work_bytes(request: Request) -> tuple[int, int]:
    """Bytes that a batch needs besides weights, for peers that do not plan: KV cache, and
    activations at their widest.

    Activations: prefill's feed-forward width (of each of a token's experts) and four hidden states
    in the dtype, and logits of the last positions in the dtype and in float32.
    """
    config = request.config
    itemsize = request.itemsize
    hidden, layers, heads = (
        int(config[name]) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    kv_width = int(config.get("num_key_value_heads") or heads) * int(
        config.get("head_dim") or hidden // heads
    )
    tokens = request.rows * (request.prompt_len + request.gen_len)
    wide = int(config.get("ffn_dim") or config["intermediate_size"]) + 4 * hidden
    if (
        "num_experts_per_tok" in config
    ):  # of each expert of a token its inputs, gate, up, their product and its results
        ffn = int(config.get("moe_intermediate_size") or config["intermediate_size"])
        wide = int(config["num_experts_per_tok"]) * (3 * ffn + 2 * hidden) + 4 * hidden
    work = request.rows * (
        request.prompt_len * wide * itemsize + int(config["vocab_size"]) * (itemsize + 4)
    )
    return 2 * layers * kv_width * itemsize * tokens, work

"""Claim: O_DIRECT reads into huge pages are faster than into ordinary pages, because the device sees whole requests.

Method: the largest weight file of a model is read from its start, 4 MiB a request, one thread, into a reused buffer
of 64 MiB that has been touched before: once as the engine allocates it, once on pages of 4 KiB. Alternating, in one
process.

Good: a ratio well above 1; near 1 where transparent huge pages are off (`huge_pages` in the JSON says).

    python -m bench.engine.huge_pages [--model facebook/opt-1.3b] [--output FILE]
"""

from __future__ import annotations

import argparse
import mmap
import sys
import time
from collections.abc import Callable

from bench import common
from bench.common import GB, BackgroundLoad, Spread

# isort: split
import torch

from flexgen_h2o.cli_common import positive
from flexgen_h2o.core.units import TRANSFER_CHUNK
from flexgen_h2o.llm import RANDOM_WEIGHTS_SEED
from flexgen_h2o.models.load import find_checkpoint, find_model
from flexgen_h2o.tiers.device import host_buffer
from flexgen_h2o.tiers.disk import DirectFile

BUFFER_BYTES = 64 * 2**20
MOST_BYTES = 2 * GB


def main() -> None:
    args = _parse()
    model = find_model(args.model, args.path)
    checkpoint = find_checkpoint(model, "bfloat16", args.offload_dir, RANDOM_WEIGHTS_SEED, True)
    path = max({t.path for t in checkpoint.tensors.values()}, key=lambda p: p.stat().st_size)
    nbytes = min(path.stat().st_size, MOST_BYTES) // BUFFER_BYTES * BUFFER_BYTES
    kinds: dict[str, Callable[[int], torch.Tensor]] = {"huge pages": host_buffer, "ordinary pages": _ordinary_buffer}
    common.wait_for_quiet(args.quiet_wait)
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    with BackgroundLoad() as seen:
        for _ in range(args.repeats):
            for kind, allocate in kinds.items():
                rates[kind].append(_read(DirectFile(path), allocate(BUFFER_BYTES), nbytes))
    spreads = {kind: Spread(found) for kind, found in rates.items()}
    ratio = common.ratio_of(*rates.values())
    common.table(
        f"{nbytes / GB:.1f} GB of {path.name}, one thread, {args.repeats} repeats",
        [(f"into {kind}", spread.show("GB/s", 2, GB)) for kind, spread in spreads.items()]
        + [("ratio", ratio.show("", 2)), ("other processes took", f"{seen.others:.0%} of the cores")],
    )
    result = {"benchmark": "huge_pages", "bytes_per_s": spreads, "ratio": ratio, "neighbours": seen.others}
    common.finish(result, args.output)


def _parse() -> argparse.Namespace:
    parser = common.model_parser(__doc__, "facebook/opt-1.3b")
    parser.add_argument("--repeats", type=positive, default=5)
    return parser.parse_args()


def _ordinary_buffer(nbytes: int) -> torch.Tensor:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()


def _read(file: DirectFile, buffer: torch.Tensor, nbytes: int) -> float:
    """Bytes per second."""
    start = time.perf_counter()
    for offset in range(0, nbytes, TRANSFER_CHUNK):
        at = offset % BUFFER_BYTES
        file.read(buffer[at : at + TRANSFER_CHUNK], offset, TRANSFER_CHUNK)
    seconds = time.perf_counter() - start
    file.close()
    return nbytes / seconds


if __name__ == "__main__":
    sys.exit(common.door(main))

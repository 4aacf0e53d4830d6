"""How near runs in RAM come to the roofline: matrix FLOPs / measured peak + KV bytes / measured
bandwidth.

Random weights at the true shape, all in RAM, one large block. Neighbours make this machine twice as
fast or slow within a minute, so the peak is measured all through the run: after each second of it,
between two layers, one large product of each of two shapes (the faster counts) and one read of 128
MB; these seconds are taken off the run's. A phase's peak is that of the mean seconds of its probes.
Claim: decode and prefill each reach at least 0.85.

    python -m bench.engine.roofline                                          OPT-1.3B and OPT-6.7B, about 15 minutes
    python -m bench.engine.roofline --model facebook/opt-125m --rows 16 --prompt-len 8 --gen-len 4 --repeats 1
"""  # noqa: E501

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench import common
from flexgen_h2o.cli_common import positive
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.core.units import MIB
from flexgen_h2o.engine.loop import Step, zigzag
from flexgen_h2o.engine.report import RunReport, column_bytes
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.engine.sequence import with_params
from flexgen_h2o.flags import as_flags, check_positions
from flexgen_h2o.llm import LLM
from flexgen_h2o.planner.measure.bench import HOST, Bench, Call, Held, Products
from flexgen_h2o.tiers.device import HostDevice

PROBE_EVERY_S = 1.0
PHASES = ("prefill", "decode")
# The shapes of a block's MLP, at the rows that it sees in prefill; matrices, in order and blocked,
# and KV larger than the caches.
SIZES = replace(
    HOST, widths=(2048,), hidden=(2048,), heads=(), weight_bytes=128 * MIB, cache_bytes=128 * MIB
)


@dataclass(frozen=True)
class Peak:
    """Measured: FLOPs a second of large matrix products with the faster layout, bytes a second of
    reading memory."""

    flops_per_s: float
    memory_bytes_per_s: float


# Model, rows of a micro-batch, micro-batches: as many as RAM holds the KV cache of.
CASES = (("facebook/opt-1.3b", 256, 2), ("facebook/opt-6.7b", 128, 1))


def main() -> int:
    args = _parse()
    cases = CASES if args.model is None else ((args.model, args.rows, args.num_gpu_batches),)
    found = [_measure(args, *case) for case in cases]
    common.finish({"benchmark": "roofline", "runs": found}, args.output)
    return 0


def _parse() -> argparse.Namespace:
    parser = common.model_parser(__doc__, None)
    add = parser.add_argument
    add("--dtype", default="bfloat16")
    add("--rows", type=positive, default=256, help="of a micro-batch, with --model (256)")
    add("--num-gpu-batches", type=positive, default=1, help="with --model (1)")
    add("--prompt-len", type=positive, default=64)
    add("--gen-len", type=common.decoded, default=64)
    add("--repeats", type=positive, default=2)
    return parser.parse_args()


class PeakProbe:
    """Calls that show the peak; their buffers are taken once."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._bench = Bench(HostDevice(), SIZES)
        rows = self._bench.sizes.rows[-1]
        width = self._bench.sizes.hidden[-1]
        products = Products(self._bench, dtype)
        self._flops = 2.0 * rows * width * 4 * width
        cache = self._bench.normal(dtype, self._bench.sizes.cache_bytes // dtype.itemsize).view(
            torch.int64
        )
        self._cache_bytes = cache.numel() * cache.itemsize
        pairs = ((width, 4 * width), (4 * width, width))
        ways: tuple[Held, ...] = ("in order", "blocked")
        self._calls: list[Call] = [
            products.call(rows, *pair, held) for held in ways for pair in pairs
        ]
        self._calls.append(cache.sum)

    def now(self) -> Peak:
        """Return the rates of one call each."""
        with torch.inference_mode():
            *products, read = [self._bench.timed(call) for call in self._calls]
        return Peak(self._flops / min(products), self._cache_bytes / read)


class Probed:
    """The steps of a run with probes of the peak between them, and the seconds that these took."""

    def __init__(self, llm: LLM, gen_len: int) -> None:
        self._probe = PeakProbe(getattr(torch, llm.dtype))
        self._gen_len = gen_len
        self.peaks: dict[str, list[Peak]] = {"prefill": [], "decode": []}
        self.seconds = {"prefill": 0.0, "decode": 0.0}

    def order(self, layers: int, batches: int) -> Iterator[Step]:
        last = 0.0
        for step in zigzag(self._gen_len, layers, batches):
            phase = "prefill" if step.sweep == 0 else "decode"
            if not step.micro_batch and (
                time.perf_counter() - last > PROBE_EVERY_S or not self.peaks[phase]
            ):
                start = time.perf_counter()
                self.peaks[phase].append(self._probe.now())
                last = time.perf_counter()
                self.seconds[phase] += last - start
            yield step

    def peak(self, phase: str) -> Peak:
        """Return the rate that follows from the mean seconds of the phase's probes."""
        return Peak(
            statistics.harmonic_mean([p.flops_per_s for p in self.peaks[phase]]),
            statistics.harmonic_mean([p.memory_bytes_per_s for p in self.peaks[phase]]),
        )


def _measure(args: argparse.Namespace, model: str, rows: int, batches: int) -> dict[str, Any]:
    policy = Policy(rows, batches)
    runs = []
    with common.open_llm(args, policy, model=model) as llm:
        check_positions(
            args, llm.model.name, llm.model.spec.max_positions
        )  # before it waits for quiet cores
        prompts = common.benchmark_rows(llm, policy.block_size, args.prompt_len)
        for _ in range(args.repeats):
            common.wait_for_quiet(args.quiet_wait)
            probed = Probed(llm, args.gen_len)
            with common.BackgroundLoad() as neighbours:
                asked = with_params(prompts, SamplingParams(args.gen_len, ignore_eos=True))
                report = llm.run(asked, lambda done: None, order=probed.order)
            runs.append(
                _facts(llm, report, probed, args.prompt_len) | {"others": neighbours.others}
            )
    spread = {name: common.Spread([run[name] for run in runs]) for name in runs[0]}
    common.table(
        f"{model}, {as_flags(policy)}, {args.prompt_len} + {args.gen_len} tokens, {args.dtype}",
        [
            *(
                (f"{phase}, of the roofline", spread[f"{phase}_of_roofline"].show(""))
                for phase in PHASES
            ),
            *(
                (f"{phase} tokens/s", spread[f"{phase}_tokens_per_s"].show("", 1))
                for phase in PHASES
            ),
            *(
                (f"{phase} peak TFLOP/s", spread[f"{phase}_flops_per_s"].show("", 2, 1e12))
                for phase in PHASES
            ),
            ("decode memory GB/s", spread["decode_memory_bytes_per_s"].show("", 0, common.GB)),
            ("taken by others", spread["others"].show("")),
        ],
    )
    return {
        "model": model,
        "policy": policy.to_json(),
        "prompt_len": args.prompt_len,
        "gen_len": args.gen_len,
        **spread,
    }


def token_flops(spec: ModelSpec) -> tuple[float, float]:
    """Return the FLOPs of the matrices that a token goes through: of all transformer blocks, and of
    the head."""
    blocks = [*spec.attention, *spec.mlp]
    for experts in spec.experts.tensors if spec.experts else ():
        assert spec.experts is not None
        blocks += experts[: spec.experts.per_token]  # they are alike
    block, head = (
        2.0 * sum(t.numel for some in of for t in some if len(t.shape) == 2)
        for of in (blocks, [spec.head])
    )
    return block, head


def _seconds_at_peak(llm: LLM, prompt_len: int, report: RunReport, phase: str, peak: Peak) -> float:
    """Return the seconds of all matrix products, causal attention with them, and of the KV that
    decode reads, at a phase's peak.

    Prompts are equal and share nothing; the head sees one token of each.
    """
    spec = llm.model.spec
    itemsize = getattr(torch, llm.dtype).itemsize
    rows = report.num_prompts
    block, head = token_flops(spec)
    if phase == "decode":
        column, _ = column_bytes(spec, report.policy, itemsize)
        read = column * sum(sum(block.read_by_sweep) for block in llm.times)
        return (
            report.decode.tokens * (block + head) / peak.flops_per_s
            + read / peak.memory_bytes_per_s
        )
    # n^2 / 2 pairs of a query and a key, two products of 2 FLOPs each
    causal = 2.0 * rows * prompt_len**2 * spec.num_heads * spec.head_dim * spec.num_blocks
    return (rows * (prompt_len * block + head) + causal) / peak.flops_per_s


def _facts(llm: LLM, report: RunReport, probed: Probed, prompt_len: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for phase, measured in (("prefill", report.prefill), ("decode", report.decode)):
        peak = probed.peak(phase)
        seconds = measured.seconds - probed.seconds[phase]
        at_peak = _seconds_at_peak(llm, prompt_len, report, phase, peak)
        found |= {
            f"{phase}_s": seconds,
            f"{phase}_tokens_per_s": measured.tokens / seconds,
            f"{phase}_of_roofline": at_peak / seconds,
            f"{phase}_probes": len(probed.peaks[phase]),
            f"{phase}_flops_per_s": peak.flops_per_s,
            f"{phase}_memory_bytes_per_s": peak.memory_bytes_per_s,
        }
    return found


if __name__ == "__main__":
    sys.exit(common.door(main))

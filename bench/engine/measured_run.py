"""One run in a process of its own, its memory watched: what memory_budget.py and scale.py start.

The first sweeps of benchmark prompts (`--sweeps`, prefill first). Peak resident bytes are the kernel's VmHWM of this
process, also at stages on the way: after the imports, after opening the model, at the end of each sweep. The last line
of stdout is JSON. Exit codes are those of the package's command lines.

    python -m bench.engine.measured_run --model facebook/opt-1.3b --host-mem 1GiB --percent 0 0 0 100 0 100
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from bench import common
from flexgen_h2o.cli_common import positive
from flexgen_h2o.core.config import MemoryBudget, Policy
from flexgen_h2o.engine.workload import AutoPolicy
from flexgen_h2o.llm import LLM


def main() -> int:
    args = _parse()
    stages = {"imported": common.memory_status()}
    rows = args.gpu_batch_size * args.num_gpu_batches
    if args.percent is None:
        policy: Policy | AutoPolicy = AutoPolicy(Policy(overlap=args.overlap))
    else:
        policy = Policy(args.gpu_batch_size, args.num_gpu_batches, percent=tuple(args.percent), overlap=args.overlap)
    with common.open_llm(args, policy, device=args.device, budget=MemoryBudget(args.device_mem, args.host_mem)) as llm:
        stages["opened"] = common.memory_status()
        marks = common.run_sweeps(llm, rows, args.prompt_len, args.sweeps)
        stages["finished"] = common.memory_status()
        result = _result(llm, rows, marks)
    stages["closed"] = common.memory_status()
    print(json.dumps({**result, "memory": stages}), flush=True)
    return 0


def _parse() -> argparse.Namespace:
    parser = common.model_parser(__doc__, "facebook/opt-1.3b", "1GiB")
    add = parser.add_argument
    add("--device", default="cpu")
    add("--dtype", default="bfloat16")
    add("--device-mem")
    add("--percent", type=int, nargs=6, help="placement (the automatic policy chooses it, and the batch sizes)")
    add("--gpu-batch-size", type=positive, default=4)
    add("--num-gpu-batches", type=positive, default=2)
    add("--overlap", type=int, choices=(0, 1), default=1)
    add("--prompt-len", type=positive, default=128)
    add("--sweeps", type=positive, default=8, help="prefill and decode sweeps to run (8)")
    args = parser.parse_args()
    args.overlap = bool(args.overlap)
    return args


def _result(llm: LLM, rows: int, marks: list[common.Mark]) -> dict[str, Any]:
    """Steady figures leave out prefill and the first decode sweep, which has weights that were loaded ahead."""
    assert llm.report is not None
    found, policy = common.steady(marks), llm.report.policy
    rows = min(rows, policy.block_size)
    return {
        "rows_of_block": rows,
        "report": llm.report.to_json(),
        "sweep_seconds": llm.times[0].sweeps,
        "steady": {
            "seconds": found.seconds, "read_bytes": found.read_bytes, "bytes_per_s": found.bytes_per_s,
            "tokens_per_s": rows / found.seconds_a_sweep,
        },
        "weight_bytes_on_disk": common.disk_weight_bytes(llm.model.spec, policy, llm.dtype, device_is_host=True),
        "memory_by_sweep": [{key: m.memory[key] for key in ("hwm", "anon")} for m in marks],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(common.door(main))

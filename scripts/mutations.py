"""Show that the tests catch seeded mistakes: change one line of the package, and run the tests.

    python scripts/mutations.py --list
    python scripts/mutations.py [--only NAME ...] [--room ROOM ...]

Each mutation is a mistake that somebody could make. The tests that are named with it must fail.
They run in a copy of the repository, so the working tree stays as it is. The script ends with 1 if
a mutation is missed, or if the line that it changes is no longer found.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("flexgen_h2o", "tests", "scripts", "bench", "docs", "policies")
TIMEOUT_S = 900
# What pytest's exit status says about the mutation: its tests failed, or none of them noticed it.
RESULTS = {1: "caught", 2: "caught", 0: "missed"}


@dataclass(frozen=True)
class Mutation:
    """One mistake, and the tests that must fail with it."""

    # The room of the package, a dot, and what goes wrong.
    name: str
    # Path of the changed file below flexgen_h2o/.
    file: str
    # Text of the file. Its first occurrence is replaced.
    old: str
    # The text that takes its place.
    new: str
    # Paths of tests, and options of pytest, with spaces between them.
    tests: str


MUTATIONS = (
    # The schedule
    Mutation(
        "engine.zigzag-order",
        "engine/loop.py",
        "            for layer in range(num_layers):\n"
        "                for micro_batch in range(first, min(first + size, num_micro_batches)):\n",
        "            for micro_batch in range(first, min(first + size, num_micro_batches)):\n"
        "                for layer in range(num_layers):\n",
        "tests/parity/test_planned_order.py tests/unit/test_loop.py",
    ),
    Mutation(
        "engine.weights-loaded-twice",
        "engine/loop.py",
        "            if unit != last:\n                yield unit\n",
        "            if True:\n                yield unit\n",
        "tests/unit/test_loop.py tests/parity/test_planned_order.py",
    ),
    Mutation(
        "engine.sequential-does-not-wait",
        "engine/loop.py",
        "        if not self._overlap:\n            wait_all(",
        "        if False:\n            wait_all(",
        "tests/unit/test_loop.py tests/unit/planner/test_simulator.py tests/parity/test_timing.py",
    ),
    Mutation(
        "tiers.ring-reused-too-early",
        "tiers/stream.py",
        "            if old.start < end and start < old.end:\n                after += old.users\n",
        "            if False:\n                after += old.users\n",
        "tests/unit/tiers/test_stream.py",
    ),
    Mutation(
        "tiers.ring-overlaps",
        "tiers/stream.py",
        "            return head if tail - head >= size else None\n",
        "            return head\n",
        "tests/unit/tiers/test_stream.py",
    ),
    Mutation(
        "tiers.short-read-passes",
        "tiers/disk.py",
        "            if count == 0:\n",
        "            if count == 0:\n                break\n            if count < 0:\n",
        "tests/unit/tiers/test_disk.py tests/fault/test_changed_checkpoints.py",
    ),
    Mutation(
        "tiers.partial-write-ends",
        "tiers/disk.py",
        "            put += self._move(os.pwritev, view[put:], offset + put)\n",
        "            put = self._move(os.pwritev, view[put:], offset + put) and len(view)\n",
        "tests/unit/tiers/test_disk.py",
    ),
    Mutation(
        "tiers.other-runs-scratch-removed",
        "tiers/disk.py",
        "    if lock is None:\n        return False\n",
        "    if lock is None:\n        return _clear(folder)\n",
        "tests/fault/test_offload_dir.py tests/unit/tiers/test_disk.py",
    ),
    # The planner
    Mutation(
        "planner.lp-ignores-memory",
        "planner/lp.py",
        "            problem += program.gib_on(tier) <= budget / GIB,",
        "            problem += program.gib_on(tier) <= 100 * budget / GIB,",
        "tests/unit/planner/test_lp.py tests/unit/planner/test_search.py",
    ),
    Mutation(
        "planner.lp-forgets-compute",
        "planner/lp.py",
        "enumerate([compute, *lanes] if overlap",
        "enumerate([*lanes] if overlap",
        "tests/unit/planner/test_lp.py tests/unit/planner/test_search.py",
    ),
    Mutation(
        "engine.cache-bytes-forgotten",
        "engine/memory.py",
        "            units = blocks * shape.micro_batches\n",
        "            units = blocks\n",
        "tests/parity/test_planned_bytes.py tests/unit/planner/test_memory.py",
    ),
    Mutation(
        "engine.too-large-plan-passes",
        "engine/memory_plan.py",
        "            if (over := self.bytes_on(tier) - budget) > 0\n",
        "            if (over := self.bytes_on(tier) - 2 * budget) > 0\n",
        "tests/unit/planner/test_memory.py tests/doors/test_endings.py",
    ),
    Mutation(
        "planner.simulated-lanes-never-queue",
        "planner/predict.py",
        "            start = max(ready, free[lane])\n",
        "            start = ready\n",
        "tests/unit/planner/test_simulator.py tests/unit/planner/test_predict.py",
    ),
    # The KV cache
    Mutation(
        "kvcache.scores-not-accumulated",
        "kernels/compiled/slots.py",
        "        score = decay * scores[j] + gain * ranks[j]\n",
        "        score = gain * ranks[j]\n",
        "tests/unit/kernels/test_slots.py tests/eviction/test_algorithm1.py",
    ),
    Mutation(
        "kvcache.recent-window-leaves",
        "kernels/compiled/slots.py",
        "        allowed = (oldest <= positions[j]) & (positions[j] <= newest)\n        lowest",
        "        allowed = oldest <= positions[j]\n        lowest",
        "tests/unit/kernels/test_slots.py tests/eviction/test_algorithm1.py",
    ),
    Mutation(
        "kvcache.wrong-victim",
        "kvcache/part.py",
        "torch.where(numbers.free < 0, part.victims, numbers.free)",
        "torch.where(numbers.free < 0, 0 * part.victims, numbers.free)",
        "tests/eviction/test_algorithm1.py tests/unit/kvcache",
    ),
    Mutation(
        "kvcache.sinks-leave",
        "kvcache/eviction/local.py",
        "        return RowBudget(sinks, 0, heavy + recent - sinks)\n",
        "        return RowBudget(0, 0, heavy + recent)\n",
        "tests/eviction/test_sinks.py tests/unit/kvcache/test_eviction.py",
    ),
    Mutation(
        "kvcache.prompt-keeps-the-wrong-end",
        "kvcache/prefill.py",
        "        ends = (range(sinks), range(n - kept + sinks, n))\n",
        "        ends = (range(sinks), range(sinks, kept))\n",
        "tests/eviction/test_windows.py tests/eviction/test_sinks.py",
    ),
    Mutation(
        "kvcache.budget-of-the-prompt-alone",
        "kvcache/eviction/policy.py",
        "            columns = self._columns_of(prompt_len + gen_len)\n",
        "            columns = self._columns_of(prompt_len)\n",
        "tests/unit/kvcache/test_eviction.py tests/eviction/test_kv_budget.py",
    ),
    # Kernels and models
    Mutation(
        "kernels.packing-scale-too-small",
        "core/packing.py",
        "        return (1 << self.bits) - 1\n",
        "        return (1 << self.bits) - 2\n",
        "tests/unit/kernels/test_packed.py",
    ),
    Mutation(
        "kernels.int8-scales-by-128",
        "kernels/int8.py",
        "        scales[some] = largest / _LEVELS\n",
        "        scales[some] = largest / 128\n",
        "tests/unit/kernels/test_int8.py",
    ),
    Mutation(
        "kernels.rotary-turns-backwards",
        "kernels/elementwise.py",
        "    rotated = (first * cos).sub_(second * sin)\n"
        "    out[..., pairs : 2 * pairs] = (second * cos).add_(first * sin)\n",
        "    rotated = (first * cos).add_(second * sin)\n"
        "    out[..., pairs : 2 * pairs] = (second * cos).sub_(first * sin)\n",
        "tests/unit/kernels/test_operators.py tests/parity/test_layouts.py",
    ),
    Mutation(
        "kernels.kv-heads-mixed-up",
        "kernels/prefill_attention.py",
        "    job = prompt_loops.PromptsJob(\n        kv_heads,\n        group,\n",
        "    job = prompt_loops.PromptsJob(\n        group,\n        kv_heads,\n",
        "tests/unit/kernels/test_prefill_attention.py",
    ),
    Mutation(
        "kernels.norm-of-adjacent-rows-alone",
        "kernels/elementwise.py",
        "    steps = (item * (t.stride(0) if t.dim() == 2 else width) for t in (x, out))\n",
        "    steps = (item * width for t in (x, out))\n",
        "tests/unit/kernels/test_operators.py",
    ),
    Mutation(
        "kernels.window-off-by-one",
        "kernels/prefill_attention.py",
        "        keys if window is None else window,\n",
        "        keys if window is None else window + 1,\n",
        "tests/unit/kernels/test_prefill_attention.py",
    ),
    Mutation(
        "kernels.values-at-the-strides-of-keys",
        "kernels/slots.py",
        "segment_words=values.stride(0))",
        "segment_words=keys.stride(0))",
        "tests/unit/kernels/test_slots.py",
    ),
    Mutation(
        "kernels.largest-newer-of-equals",
        "kernels/slots.py",
        "    return (ranks < counts) | (places == newest)\n",
        "    return (ranks <= counts) | (places == newest)\n",
        "tests/unit/kernels/test_slots.py",
    ),
    Mutation(
        "kernels.put-any-slots",
        "kernels/slots.py",
        "        or slots.dtype != torch.int64\n",
        "        or slots.dtype == torch.float32\n",
        "tests/unit/kernels/test_slots.py",
    ),
    Mutation(
        "kernels.card-keeps-no-whole-column-at-0",
        "kernels/triton/slots.py",
        "        if goes >= 0:\n",
        "        if goes > 0:\n",
        "tests/unit/kernels/test_triton.py",
    ),
    Mutation(
        "kernels.card-puts-the-prompts-first-tokens",
        "kernels/triton/prompts.py",
        "        goes = here & (token >= tokens - window)\n",
        "        goes = here & (token < window)\n",
        "tests/unit/kernels/test_triton_prompts.py",
    ),
    Mutation(
        "kvcache.decode-heads-mixed-up",
        "kvcache/decode.py",
        "    q = q.view(count, group, width)\n",
        "    q = q.view(group, count, width).transpose(0, 1).contiguous()\n",
        "tests/parity/test_layouts.py tests/unit/kvcache/test_decode.py",
    ),
    Mutation(
        "models.moe-weights-not-normalised",
        "models/moe.py",
        '        if spec.option("normalised"):\n',
        '        if not spec.option("normalised"):\n',
        "tests/unit/models tests/parity/test_experts.py",
    ),
    Mutation(
        "models.moe-one-expert-too-few",
        "models/moe.py",
        ".topk(spec.experts.per_token)\n",
        ".topk(max(1, spec.experts.per_token - 1))\n",
        "tests/unit/models tests/parity/test_experts.py",
    ),
    Mutation(
        "models.template-without-answer-mark",
        "models/load.py",
        "                    add_generation_prompt=answers,\n"
        "                    continue_final_message=not answers,\n",
        "                    add_generation_prompt=False,\n",
        "tests/text/test_fields.py tests/doors/test_talk.py tests/unit/jobs/test_requests.py",
    ),
    Mutation(
        "checkpoint.gptq-zero-off-by-one",
        "checkpoint/formats/gptq.py",
        '    more = 1 if version == "gptq" else 0\n',
        "    more = 0\n",
        "tests/parity/test_quantised_checkpoints.py",
    ),
    Mutation(
        "checkpoint.float16-read-as-bfloat16",
        "checkpoint/safetensors.py",
        '"F16": "float16"',
        '"F16": "bfloat16"',
        "tests/unit/checkpoint/test_safetensors_index.py tests/parity/test_checkpoints.py",
    ),
    Mutation(
        "checkpoint.truncated-file-passes",
        "checkpoint/safetensors.py",
        "    if size != end:\n",
        "    if size > end:\n",
        "tests/unit/checkpoint/test_safetensors_index.py tests/fault/test_damaged_checkpoints.py",
    ),
    # Sampling and texts
    Mutation(
        "engine.top-p-keeps-one-too-few",
        "engine/sampling.py",
        ".sum(-1, keepdim=True).add(1).clamp(",
        ".sum(-1, keepdim=True).clamp(min=1, ",
        "tests/unit/test_sampling.py",
    ),
    Mutation(
        "engine.every-prompt-draws-alike",
        "engine/sampling.py",
        "    key = np.array([seed, row], dtype=np.uint64)\n",
        "    key = np.array([seed, 0], dtype=np.uint64)\n",
        "tests/unit/test_sampling.py",
    ),
    Mutation(
        "engine.stop-string-stays",
        "engine/decoding.py",
        "        if starts:\n            return min(starts)\n",
        "        if starts:\n            return max(starts)\n",
        "tests/unit/test_sampling.py tests/text/test_ends.py",
    ),
    Mutation(
        "engine.end-token-ignored",
        "engine/decoding.py",
        "        if not is_given and (own[-1] in self._ends or",
        "        if not is_given and (False or",
        "tests/text/test_ends.py tests/unit/test_generation.py",
    ),
    # Jobs
    Mutation(
        "jobs.torn-line-kept",
        "jobs/output.py",
        "            self._cut(good, self._end)\n",
        "            pass\n",
        "tests/unit/jobs/test_output.py tests/fault/test_jobs.py",
    ),
    Mutation(
        "jobs.output-not-synced",
        "jobs/output.py",
        "            os.fsync(self._fd)\n        except",
        "            pass\n        except",
        "tests/unit/jobs/test_output.py",
    ),
    Mutation(
        "jobs.other-settings-resume",
        "jobs/job.py",
        "        found = differences(before, settings, scan)\n",
        "        found = []\n",
        "tests/doors/test_job_files.py tests/doors/test_batch.py tests/unit/jobs",
    ),
    Mutation(
        "jobs.all-errors-exit-0",
        "jobs/job.py",
        "    return EXIT_ALL_ROWS_FAILED if status.errors == status.rows else EXIT_DONE\n",
        "    return EXIT_DONE\n",
        "tests/doors/test_batch.py tests/doors/test_endings.py",
    ),
    Mutation(
        "core.files-not-synced",
        "core/files.py",
        "            if sync:\n                os.fsync(fd)\n",
        "",
        "tests/unit/test_files.py",
    ),
    # The front door
    Mutation(
        "doors.wrong-exit-code",
        "cli_common.py",
        "        return error.exit_code\n",
        "        return EXIT_FAILED\n",
        "tests/doors/test_endings.py tests/doors/test_refusals.py",
    ),
    Mutation(
        "doors.two-placements-accepted",
        "flags.py",
        '        raise UsageError(f"--policy auto and {flag_of(placed[0])}: give one of them")\n',
        "        pass\n",
        "tests/doors/test_refusals.py tests/doors/test_flags.py",
    ),
    Mutation(
        "doors.range-not-checked",
        "core/units.py",
        "    if whole < low or (high is not None and whole > high):\n",
        "    if high is not None and whole > high:\n",
        "tests/doors/test_bad_values.py",
    ),
    # The server
    Mutation(
        "serving.key-not-checked",
        "serving/guard.py",
        '            if kind.lower() != "bearer" or',
        '            if kind.lower() != "bearer" and',
        "tests/serving/test_openai.py tests/serving/test_hostile_clients.py",
    ),
    Mutation(
        "serving.fault-closes-connection",
        "serving/guard.py",
        "            if not is_fault(error):\n                raise\n",
        "            raise\n",
        "tests/serving/test_faults.py tests/serving/test_hostile_clients.py",
    ),
    # Evaluation
    Mutation(
        "evaluation.intervals-too-narrow",
        "evaluation/figures.py",
        "        low, high = np.percentile(resampled, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])\n",
        "        low, high = np.percentile(resampled, [40, 60])\n",
        "tests/unit/evaluation/test_figures.py",
    ),
    Mutation(
        "evaluation.bits-instead-of-nats",
        "evaluation/figures.py",
        "    return -logits.double().log_softmax(",
        "    return -1.4426950408889634 * logits.double().log_softmax(",
        "tests/unit/evaluation/test_figures.py tests/doors/test_evaluate.py",
    ),
)


def run(mutation: Mutation, tree: Path) -> str:
    """Return what becomes of one mutation in a copy of the repository: caught, missed or lost.

    Lost means that the old text is not in the file any more.
    """
    path = tree / "flexgen_h2o" / mutation.file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if mutation.old not in text:
        return "lost"
    path.write_text(text.replace(mutation.old, mutation.new, 1), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", *mutation.tests.split()]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    try:
        ended = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return "caught"  # the tests hang
    finally:
        path.write_text(text, encoding="utf-8")
    if ended.returncode < 0:
        return "caught"  # a signal ended the tests: the mistake wrote where nothing may be written
    # 2: collection failed, which a missing file of tests does, too.
    if ended.returncode in RESULTS and "file or directory not found" not in ended.stderr:
        return RESULTS[ended.returncode]
    return f"not run: {(ended.stderr or ended.stdout).strip()[-300:]}"


def copy_tree(tree: Path) -> None:
    """Copy what the tests need of the repository into an empty folder."""
    for name in COPIED:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("*.pyc"))
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy2(file, tree)


def chosen(names: Sequence[str], rooms: Sequence[str]) -> list[Mutation]:
    """Return the mutations with one of the names, or of one of the rooms; all if none is named."""
    unknown = set(names) - {mutation.name for mutation in MUTATIONS}
    if unknown:
        raise SystemExit(f"no such mutation: {', '.join(sorted(unknown))}; see --list")
    if not names and not rooms:
        return list(MUTATIONS)
    return [m for m in MUTATIONS if m.name in names or m.name.partition(".")[0] in rooms]


def main() -> int:
    """Run the mutations that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="list the mutations, and end")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="run these only")
    parser.add_argument("--room", nargs="+", default=[], help="run those of these rooms only")
    args = parser.parse_args()
    mutations = chosen(args.only, args.room)
    if args.list:
        for mutation in mutations:
            print(f"{mutation.name:40} {mutation.file:30} {mutation.tests}")
        return 0
    results = []
    with tempfile.TemporaryDirectory(prefix="flexgen-mutations-") as folder:
        copy_tree(Path(folder))
        for mutation in mutations:
            began = time.monotonic()
            results.append(run(mutation, Path(folder)))
            print(
                f"{mutation.name:40} {time.monotonic() - began:5.0f} s  {results[-1]}", flush=True
            )
    print(f"{results.count('caught')} of {len(results)} mutations are caught")
    return 0 if set(results) <= {"caught"} else 1


if __name__ == "__main__":
    sys.exit(main())

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
        "tests/gpu/test_fake_card.py -k overlap",
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
    Mutation(
        "tiers.read-ends-within-a-page",
        "tiers/disk.py",
        "    return start, round_up(offset + nbytes, PAGE) - start\n",
        "    return start, round_up(nbytes, PAGE)\n",
        "tests/unit/tiers/test_transfers.py",
    ),
    Mutation(
        "tiers.lost-unit-blocks-the-stream",
        "tiers/stream.py",
        "        if self._pending is not None and not self._source.is_needed(self._pending):\n",
        "        if False:\n",
        "tests/unit/tiers/test_stream.py",
    ),
    Mutation(
        "tiers.copies-pass-without-pinning",
        "tiers/transfers.py",
        "            if self._pins:\n                self.lanes.begin(copy, is_all=True)\n",
        "            if True:\n                self.lanes.begin(copy, is_all=True)\n",
        "tests/unit/tiers/test_under_way.py",
    ),
    Mutation(
        "tiers.compute-takes-what-is-still-coming",
        "tiers/stream.py",
        "                wait_all_on_card(loads)\n                return region\n",
        "                return region\n",
        "tests/gpu/test_fake_card.py -k at_the_last_moment",
    ),
    Mutation(
        "tiers.staging-read-into-too-early",
        "tiers/transfers.py",
        "        self._readers[self._at] = copy, source\n",
        "        pass\n",
        "tests/gpu/test_fake_card_parts.py",
    ),
    Mutation(
        "engine.weights-freed-before-compute-ends",
        "engine/loop.py",
        "                self._stream.give_back(self._region, [fence()])\n",
        "                self._stream.give_back(self._region)\n",
        "tests/gpu/test_fake_card.py -m slow -k pinned",
    ),
    Mutation(
        "engine.hidden-states-stored-before-compute-ends",
        "engine/stores.py",
        "[] if region is None else [fence()]\n",
        "[]\n",
        "tests/gpu/test_fake_card.py -m slow -k hidden",
    ),
    Mutation(
        "engine.too-many-tokens-joined",
        "engine/loop.py",
        "        if fed > room or not most:\n",
        "        if not found or not most:\n",
        "tests/unit/test_hidden.py tests/parity/test_experts.py",
    ),
    # The planner
    Mutation(
        "planner.lp-ignores-memory",
        "planner/lp.py",
        "        problem += program.interpolated(HELD, tier) <= budget / GIB",
        "        problem += program.interpolated(HELD, tier) <= 100 * budget / GIB",
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
        "tests/unit/planner/test_simulator.py",
    ),
    Mutation(
        "planner.attention-reads-no-cache",
        "planner/cost_model.py",
        "        columns = float(batch.rows * self.need.columns(block, sweep, batch.mean_len))\n",
        "        columns = float(batch.rows)\n",
        "tests/unit/planner/test_costs.py",
    ),
    Mutation(
        "planner.waiting-entries-cost-nothing",
        "planner/cost_model.py",
        "        device_s += overlay / p.overlay_bytes_per_s\n",
        "",
        "tests/unit/planner/test_costs.py",
    ),
    Mutation(
        "planner.streamed-matrices-are-blocked",
        "planner/cost_model.py",
        'blocks and part.tier != "disk" and columns',
        "blocks and columns",
        "tests/unit/planner/test_costs.py",
    ),
    Mutation(
        "planner.a-sweep-is-left-out",
        "planner/predict.py",
        "    for sweep in range(2, walked[-1] + 1):\n",
        "    for sweep in range(2, walked[-1]):\n",
        "tests/unit/planner/test_simulator.py",
    ),
    Mutation(
        "planner.busy-machine-not-noted",
        "planner/measure/run.py",
        "    others = taken(False) or others\n",
        '    others = ""\n',
        "tests/unit/profiling/test_cache.py",
    ),
    Mutation(
        "engine.common-prefix-in-every-slot",
        "engine/workload.py",
        "(n, m) if window else (n - common, m - common)",
        "(n, m)",
        "tests/unit/planner/test_workload.py",
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
        "torch.where(slots < 0, part.victims, slots)",
        "torch.where(slots < 0, 0 * part.victims, slots)",
        "tests/eviction/test_engine.py -k rolling",
    ),
    Mutation(
        "kvcache.newest-of-equal-ranks-leaves",
        "kvcache/part.py",
        "masked_fill(~candidates, last).argmin(dim=1)",
        "masked_fill(~candidates, -1).argmax(dim=1)",
        "tests/unit/kvcache/test_decode.py",
    ),
    Mutation(
        "kvcache.sinks-leave",
        "kvcache/eviction/local.py",
        "        return RowBudget(sinks, 0, heavy + recent - sinks)\n",
        "        return RowBudget(0, 0, heavy + recent)\n",
        "tests/unit/kvcache/test_eviction.py",
    ),
    Mutation(
        "kvcache.prompt-keeps-the-wrong-end",
        "kvcache/prefill.py",
        "        ends = (range(sinks), range(n - kept + sinks, n))\n",
        "        ends = (range(sinks), range(sinks, kept))\n",
        "tests/eviction/test_engine.py -k local",
    ),
    Mutation(
        "kvcache.budget-of-the-prompt-alone",
        "kvcache/eviction/policy.py",
        "            columns = self._columns_of(prompt_len + gen_len)\n",
        "            columns = self._columns_of(prompt_len)\n",
        "tests/unit/kvcache/test_eviction.py",
    ),
    Mutation(
        "kvcache.overlay-forgets-the-newest",
        "kvcache/store.py",
        "                t[:rows, : self._used].to(where) for t in",
        "                t[:rows, : self._used - 1].to(where) for t in",
        "tests/parity/test_refill.py",
    ),
    Mutation(
        "kvcache.entering-rows-come-first",
        "kvcache/budgets.py",
        "        self._table = torch.cat([self._table, self._entries(rows)], dim=1)\n",
        "        self._table = torch.cat([self._entries(rows), self._table], dim=1)\n",
        "tests/eviction/test_engine.py -k refill",
    ),
    Mutation(
        "kvcache.ranks-do-not-fall",
        "kvcache/part.py",
        "            self.ranks[rows, slots] = table[FILLED] - 1\n",
        "            self.ranks[rows, slots] = table[POSITION]\n",
        "tests/eviction/test_engine.py -k rolling",
    ),
    Mutation(
        "kvcache.prefix-is-not-scored",
        "kvcache/prefill.py",
        "    if prompts.prefix_sums is not None and query_rows > own:\n",
        "    if prompts.prefix_sums is not None and query_rows > n:\n",
        "tests/eviction/test_engine.py -k header",
    ),
    Mutation(
        "kvcache.learned-sinks-of-other-rows",
        "kvcache/decode.py",
        "unit.sinks.float().view(unit.kv_heads, -1).repeat(unit.decoding, 1)",
        "unit.sinks.float().view(unit.kv_heads, -1).repeat_interleave(unit.decoding, dim=0)",
        "tests/eviction/test_engine.py -k gpt_oss",
    ),
    Mutation(
        "kvcache.whole-columns-in-the-wrong-place",
        "kvcache/budgets.py",
        "self.positions % windows.clamp(min=1), places",
        "(self.positions + 1) % windows.clamp(min=1), places",
        "tests/eviction/test_engine.py -k bits",
    ),
    Mutation(
        "kvcache.windows-forget-the-common-prefix",
        "engine/attention.py",
        "past if window is None else past + fed.common",
        "past",
        "tests/eviction/test_engine.py -k header",
    ),
    Mutation(
        "kvcache.state-of-rows-that-join-is-old",
        "kvcache/store.py",
        "        if unit.layout.is_state and (is_new or has_changed):\n",
        "        if unit.layout.is_state and is_new:\n",
        "tests/unit/kvcache/test_state.py",
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
        "            t.stride(0) * t.itemsize // WORD,",
        "            keys.stride(0) * keys.itemsize // WORD,",
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
        "        and slots.dtype == torch.int64\n",
        "        and slots.dtype != torch.float32\n",
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
        '                        "add_generation_prompt": answers,\n'
        '                        "continue_final_message": not answers,\n',
        '                        "add_generation_prompt": False,\n',
        "tests/text/test_fields.py tests/doors/test_talk.py tests/unit/jobs/test_requests.py",
    ),
    Mutation(
        "checkpoint.gptq-zero-off-by-one",
        "checkpoint/formats/gptq.py",
        '    more = 1 if version == "gptq" else 0\n',
        "    more = 0\n",
        "tests/parity/test_formats.py",
    ),
    Mutation(
        "checkpoint.float16-read-as-bfloat16",
        "checkpoint/safetensors.py",
        '"F16": "float16"',
        '"F16": "bfloat16"',
        "tests/unit/checkpoint/test_safetensors_index.py tests/parity/test_layouts.py",
    ),
    Mutation(
        "checkpoint.truncated-file-passes",
        "checkpoint/safetensors.py",
        '            with safe_open(path, framework="np"):\n',
        "            with open_regular(path):\n",
        "tests/unit/checkpoint/test_safetensors_index.py",
    ),
    Mutation(
        "checkpoint.integer-may-be-a-truth-value",
        "checkpoint/formats/quantised.py",
        "    if type(value) is not int or not low <= value <= high:\n",
        "    if not isinstance(value, int) or not low <= value <= high:\n",
        "tests/unit/checkpoint/test_quantised_configs.py",
    ),
    Mutation(
        "checkpoint.store-of-another-version-is-used",
        "checkpoint/packed_store.py",
        "        if not form.record.items() <= about.items():\n",
        "        if not about:\n",
        "tests/unit/checkpoint/test_packed_store.py",
    ),
    Mutation(
        "checkpoint.tied-bin-tensors-written-twice",
        "checkpoint/bin_import.py",
        "        if first != own:\n",
        "        if False:\n",
        "tests/unit/checkpoint/test_bin_import.py",
    ),
    Mutation(
        "checkpoint.last-rows-of-a-tied-head-not-compared",
        "checkpoint/tied.py",
        "            for first in range(0, table.shape[0], _PIECE_ROWS):\n",
        "            for first in range(0, table.shape[0] - _PIECE_ROWS, _PIECE_ROWS):\n",
        "tests/unit/checkpoint/test_match.py",
    ),
    Mutation(
        "checkpoint.slices-not-counted",
        "checkpoint/matching.py",
        "                rows.shape if rows.index is None else (slices[rows.name], *rows.shape),\n",
        "                rows.shape if rows.index is None else (found.shape[0], *rows.shape),\n",
        "tests/unit/checkpoint/test_slices.py",
    ),
    Mutation(
        "checkpoint.rows-of-an-offset-cut-wrong",
        "checkpoint/formats/__init__.py",
        "        return first // self.rows_per_stored_row, -(-end // self.rows_per_stored_row)\n",
        "        return first // self.rows_per_stored_row, end // self.rows_per_stored_row\n",
        "tests/parity/test_formats.py -k offset",
    ),
    Mutation(
        "engine.direct-read-forgets-the-page",
        "engine/stores.py",
        "source.offset % PAGE if self._is_direct(stored, source, shard) else 0\n",
        "0\n",
        "tests/parity/test_placements.py",
    ),
    Mutation(
        "kernels.bias-added-by-every-part",
        "kernels/linear.py",
        "None if start else bias",
        "bias",
        "tests/unit/kernels/test_products.py",
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
        "tests/text/test_ends.py",
    ),
    Mutation(
        "engine.end-token-ignored",
        "engine/decoding.py",
        "            else own[-1] in self._ends or self.found(own, row.before)\n",
        "            else self.found(own, row.before)\n",
        "tests/text/test_ends.py",
    ),
    Mutation(
        "engine.stop-string-ends-reasoning",
        "engine/harmony.py",
        "            return self.messages[-1] if self.messages[-1].is_final else None\n",
        "            return self.messages[-1]\n",
        "tests/text/test_ends.py -k channels",
    ),
    Mutation(
        "engine.scored-token-is-the-one-before",
        "engine/decoding.py",
        "scoring, scoring.fed_ids[at + 1]))\n",
        "scoring, scoring.fed_ids[at]))\n",
        "tests/parity/test_score.py",
    ),
    Mutation(
        "engine.other-flags-of-a-rank-pass",
        "engine/distributed.py",
        "            if theirs[name] != value:\n",
        "            if False:\n",
        "tests/parity/test_pipeline.py -k told",
    ),
    Mutation(
        "engine.reasoning-shown-as-content",
        "engine/harmony.py",
        '            self._is_final = self._channel() in ("", FINAL)\n',
        "            self._is_final = True\n",
        "tests/text/test_ends.py -k channels",
    ),
    Mutation(
        "models.own-head-ignored",
        "models/load.py",
        "    if has_other_head(spec, folder):\n",
        "    if False:\n",
        "tests/unit/models/test_families.py",
    ),
    Mutation(
        "models.ends-of-the-generation-config-ignored",
        "models/__init__.py",
        "    if ends is not None and ends != spec.eos_token_ids:\n",
        "    if False:\n",
        "tests/unit/models/test_families.py tests/parity/test_rows.py",
    ),
    Mutation(
        "models.turn-goes-on",
        "models/load.py",
        "            *(token for token in self.turn_ends if",
        "            *(token for token in () if",
        "tests/text/test_ends.py",
    ),
    Mutation(
        "models.penalty-of-the-model-stays",
        "models/generation_config.py",
        '        settings = {**self.settings, "repetition_penalty": repetition_penalty}\n',
        "        settings = self.settings\n",
        "tests/text/test_generation_config.py",
    ),
    # Jobs
    Mutation(
        "jobs.torn-line-kept",
        "jobs/output.py",
        "                self._cut(good, self._end)\n",
        "                pass\n",
        "tests/unit/jobs/test_output.py tests/fault/test_jobs.py",
    ),
    Mutation(
        "jobs.output-not-synced",
        "jobs/output.py",
        "                os.fsync(self._fd)\n            except",
        "                pass\n            except",
        "tests/unit/jobs/test_output.py",
    ),
    Mutation(
        "jobs.other-settings-resume",
        "jobs/job.py",
        "        found = differences(before, settings, source)\n",
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
        "jobs.duplicates-accepted",
        "jobs/input.py",
        "    if not pairs:\n",
        "    if pairs:\n",
        "tests/unit/jobs/test_input.py",
    ),
    Mutation(
        "jobs.rows-of-ray-written-twice",
        "jobs/on_ray.py",
        "new = [one for one in found if not done[one.row]]",
        "new = list(found)",
        "tests/unit/jobs/test_on_ray.py",
    ),
    Mutation(
        "jobs.row-that-fits-fails",
        "jobs/runner.py",
        "why |= {other: said for other in left if _covers(other, need)} | {need: str(error)}",
        "why |= {other: said for other in left} | {need: str(error)}",
        "tests/unit/jobs/test_runner.py",
    ),
    Mutation(
        "core.files-not-synced",
        "core/files.py",
        "            if sync:\n                os.fsync(fd)\n",
        "",
        "tests/unit/test_files.py",
    ),
    Mutation(
        "core.link-replaced",
        "core/files.py",
        "    target = Path(os.path.realpath(path)) if follow else path.absolute()\n",
        "    target = path.absolute()\n",
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
        "doors.damaged-sidecar-is-a-traceback",
        "jobs/sidecar.py",
        "    except (ValueError, KeyError, TypeError, RecursionError) as error:\n",
        "    except KeyError as error:\n",
        "tests/doors/test_fuzz.py tests/doors/test_job_files.py",
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
    Mutation(
        "jobs.mistyped-field-is-a-column",
        "jobs/requests.py",
        "    if remedy or among_settings:\n",
        "    if among_settings:\n",
        "tests/text/test_fields.py",
    ),
    Mutation(
        "serving.other-endpoint-answered",
        "jobs/requests.py",
        "if self.endpoint is not None and kind != URLS[self.endpoint]:",
        "if False:",
        "tests/serving/test_batches.py",
    ),
    Mutation(
        "serving.error-rows-cost-nothing",
        "serving/batches.py",
        "rests=True, charge=charge))",
        "rests=True))",
        "tests/serving/test_batches.py",
    ),
    Mutation(
        "serving.deaths-not-counted",
        "serving/held.py",
        "                if len(held) == 1:\n",
        "                if False:\n",
        "tests/serving/test_batches.py",
    ),
    Mutation(
        "serving.deaths-count-against-all",
        "serving/held.py",
        "                if len(held) == 1:\n",
        "                if True:\n",
        "tests/serving/test_batches.py",
    ),
    Mutation(
        "serving.odd-records-listed",
        "serving/records.py",
        "        if not is_sound(record[name]):\n",
        "        if False:\n",
        "tests/serving/test_odd_records.py",
    ),
    Mutation(
        "serving.failed-row-counts-as-answer",
        "serving/block.py",
        '            self.tell(("error", refused(RowError(request.error_code, request.error))))\n',
        '            self.tell(("done", request))\n',
        "tests/serving/test_block.py",
    ),
    Mutation(
        "serving.descriptors-held",
        "jobs/output.py",
        "            if self._rests:\n",
        "            if False:\n",
        "tests/serving/test_batches.py",
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
        "evaluation.lm-eval-scores-without-eviction",
        "evaluation/lm_eval_model.py",
        "            not self.llm.eviction.needs.record\n            and not policy",
        "            not policy",
        "tests/parity/test_lm_eval.py -k mode_follows",
    ),
    Mutation(
        "evaluation.lines-without-a-key-are-scored",
        "evaluation/lm_eval_errors.py",
        "                    check_keys(file, flag)\n",
        "                    pass\n",
        "tests/doors/test_lm_eval.py -k without_a_key",
    ),
    Mutation(
        "evaluation.answers-without-logprobs",
        "evaluation/lm_eval_records.py",
        "        except (KeyError, TypeError, IndexError, AttributeError) as error:\n",
        "        except (TypeError, IndexError, AttributeError) as error:\n",
        "tests/doors/test_lm_eval.py -k other_tools",
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

"""Report the server's state: `/status` for pages and people, `/metrics` for Prometheus."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import asdict
from itertools import accumulate
from typing import Any

from flexgen_h2o.core.config import TIERS
from flexgen_h2o.serving.batches import Batches
from flexgen_h2o.serving.block import LATENCIES, Service
from flexgen_h2o.serving.records import ACTIVE

STARTED = time.time()
MAX_JOBS = 100  # most jobs that are shown
# Counts of `Service.counts` that only grow, each with the name and the help of its metric.
TOTALS = {
    "rows": ("rows_total", "Rows that are done."),
    "tokens": ("tokens_total", "New tokens."),
    "prompt_tokens": ("prompt_tokens_total", "Prompt tokens."),
    "sweeps": ("sweeps_total", "Micro-batches that went through all layers."),
    "given_up": ("rows_given_up_total", "Rows whose client went away."),
    "failed": ("rows_failed_total", "Rows that could not be run."),
    "refused": ("requests_refused_total", "Requests that found the queue full."),
}


def status_of(service: Service, batches: Batches) -> dict[str, Any]:
    """Return the fields of `/status` as JSON values; docs/reference/server.md describes them."""
    llm = service.llm
    counts = service.counts
    clients, of_batches = service.running
    policy = llm.policy
    return {
        "model": {
            "id": llm.model.name,
            "dtype": llm.dtype,
            "max_model_len": service.length,
            "chat": llm.model.has_chat_template,
            "device_is_host": llm.device.is_host,
        },
        "policy": None if policy is None else policy.to_json(),
        "eviction": llm.eviction.to_json(),
        "memory": memory_of(service),
        "block": {
            "rows": service.capacity,
            "running": clients + of_batches,
            "clients": clients,
            "batches": of_batches,
        },
        "queue": {"rows": service.queued, "most": service.most_queued},
        "tokens_per_s": counts.tokens_per_s,
        "predicted_tokens_per_s": service.predicted,
        "totals": {field: getattr(counts, field) for field in TOTALS},
        "jobs": [
            _job(batches, one) for one in list(batches.store.batches.values())[: -MAX_JOBS - 1 : -1]
        ],
        "timeline": [asdict(span) for span in service.watch()],
        "sweep": service.last_sweep,
        "uptime_s": time.time() - STARTED,
    }


def memory_of(service: Service) -> dict[str, dict[str, int | None]]:
    """Return bytes by tier: what the engine has used of its budget."""
    used = service.llm.peak_bytes
    budgets = service.llm.budgets
    return {tier: {"used": used.get(tier, 0), "budget": budgets.get(tier)} for tier in TIERS}


def _job(batches: Batches, batch: dict[str, Any]) -> dict[str, Any]:
    found = {name: batch[name] for name in ("id", "status", "created_at", "endpoint", "metadata")}
    running = batches.running.get(batch["id"])
    shown = batches.shown(batch)["request_counts"]
    found |= {**shown, "tokens_per_s": None, "eta_s": None}
    if running is not None:
        status = running.writer.status
        found |= {"tokens_per_s": status.tokens_per_s, "eta_s": status.eta_s}
    return found


def metrics_text(service: Service, batches: Batches) -> str:
    """Return the metrics in Prometheus' text format 0.0.4."""
    counts = service.counts
    clients, of_batches = service.running
    lines: list[str] = []

    def add(name: str, kind: str, help: str, *samples: tuple[str, float]) -> None:
        lines.extend((f"# HELP flexgen_{name} {help}", f"# TYPE flexgen_{name} {kind}"))
        lines.extend(f"flexgen_{name}{labels} {value!r}" for labels, value in samples)

    both = ('{kind="client"}', clients), ('{kind="batch"}', of_batches)
    add("rows_running", "gauge", "Rows in the block.", *both)
    add("rows_capacity", "gauge", "Rows that the block has places for.", ("", service.capacity))
    add("rows_queued", "gauge", "Rows of clients that wait.", ("", service.queued))
    for field, (name, help) in TOTALS.items():
        add(name, "counter", help, ("", getattr(counts, field)))
    active = sum(batch["status"] in ACTIVE for batch in list(batches.store.batches.values()))
    add("batches_active", "gauge", "Batches that are not over.", ("", active))
    name = "request_seconds"
    total = 0
    lines.extend(
        (f"# HELP flexgen_{name} Seconds of a client's row.", f"# TYPE flexgen_{name} histogram")
    )
    for end, total in zip(
        [*map(str, LATENCIES), "+Inf"], accumulate(counts.latencies), strict=True
    ):
        lines.append(f'flexgen_{name}_bucket{{le="{end}"}} {total}')
    lines.extend((f"flexgen_{name}_sum {counts.latency_sum:g}", f"flexgen_{name}_count {total}"))
    memory = memory_of(service)
    for field in ("used", "budget"):
        values = [
            (f'{{tier="{tier}"}}', float(of[field] or 0))
            for tier, of in memory.items()
            if of[field] is not None
        ]
        add(f"memory_{field}_bytes", "gauge", f"Memory by tier, {field}.", *values)
    add("resident_bytes", "gauge", "Memory of the process.", ("", _resident()))
    return "\n".join(lines) + "\n"


def _resident() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

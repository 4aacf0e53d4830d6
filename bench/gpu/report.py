"""The report of the suite, from whatever results there are: gpu_suite.md and gpu_suite.json.

A decode that was cut short is projected, as flex_opt does (a star). `device GB`: the plan's bytes,
and in brackets what the card's tensors held at most, by torch's own count.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from typing import Any

import torch

from bench import common
from bench.common import GB
from bench.gpu.gates import gates
from bench.gpu.kernels import DECODED
from bench.gpu.runner import State
from bench.gpu.steps import Setting, Step, runs_of
from flexgen_h2o.core.units import markdown_table

MAX_NAMED = 30  # tests that failed
STEP_HEAD = ("step", "status", "s", "why")
GATE_HEAD = ("gate", "found", "aim", "")
KERNEL_HEAD = (
    "kernel",
    "us",
    "share of a copy",
    "us of the host",
    "us, weight decoded first",
    "times as fast",
)
RUN_HEAD = (
    "run",
    "rows",
    "prefill s",
    "s a decode sweep",
    "decode tok/s",
    "total tok/s",
    "h2d GB",
    "disk GB",
    "device GB",
    "RSS GB",
    "wall s",
)


def write_report(setting: Setting, steps: Sequence[Step], state: State) -> None:
    """Both files, anew, into the results."""
    runs = runs_of(steps, "placement")
    figures = runs_of(steps, "figures")
    texts = [run_texts(step.name, runs[step.name]) for step in steps if step.name in runs]
    facts = common.machine_facts() | {"card": _card()}
    parts = [
        "# GPU suite"
        + (" (tiny: a device tier of ordinary memory, no card)" if setting.tiny else ""),
        "",
        "Made by `scripts/gpu_suite.sh`; `docs/lab/gpu.md` says how to read it.",
        ", ".join(
            f"{name}: {facts[name]}" for name in ("date", "commit", "card", "cpu", "cores", "torch")
        ),
        f"`--device {setting.device} --device-mem {setting.device_mem}`",
        "",
        "## Gates",
        "",
        *markdown_table(GATE_HEAD, list(gates(runs, figures))),
        "",
        "## Steps",
        "",
        *markdown_table(STEP_HEAD, [_step_texts(step, state) for step in steps]),
        "",
        *(line for step in steps if step.kind == "tests" for line in _tests(step)),
        "",
        "## Placements",
        "",
        f"{setting.model}, {setting.prompt_len} + {setting.gen_len} tokens, "
        f"{setting.dtype}{_others(setting, steps)}.",
        "",
        *markdown_table(RUN_HEAD, texts),
        "",
        "## Kernels",
        "",
        *markdown_table(KERNEL_HEAD, kernel_texts(figures.get("kernels", {}).get("kernels", []))),
    ]
    text = "\n".join(parts) + "\n"
    (setting.results / "gpu_suite.md").write_text(text)
    whole = {
        "benchmark": "gpu_suite",
        "tiny": setting.tiny,
        "machine": facts,
        "steps": state,
        "runs": runs,
    }
    whole |= {"figures": figures}
    (setting.results / "gpu_suite.json").write_text(json.dumps(whole, indent=1) + "\n")


def run_texts(name: str, run: dict[str, Any]) -> list[str]:
    """A placement as cells of the table; one that gave no report has its exit code."""
    report = run["report"]
    card = run["card"]
    if report is None:
        return [name, f"exit code {run['exit_code']}", *[""] * (len(RUN_HEAD) - 2)]
    sweeps = max(1, report["gen_len"] - 1)
    io = report["io_bytes"]
    really = f" ({card['allocated'] / GB:.2f})" if card and card["allocated"] else ""
    return [
        name,
        str(report["num_prompts"]),
        f"{report['prefill']['seconds']:.2f}",
        f"{report['decode']['seconds'] / sweeps:.3f}" + "*" * report["projected"],
        f"{report['decode']['tokens_per_s']:.1f}",
        f"{report['total']['tokens_per_s']:.1f}",
        f"{io['h2d'] / GB:.1f}",
        f"{io['disk_read'] / GB:.1f}",
        f"{report['peak_bytes']['device'] / GB:.2f}{really}",
        f"{run['peak_rss_bytes'] / GB:.2f}",
        f"{run['seconds']:.0f}",
    ]


def kernel_texts(kernels: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Timed kernels as cells of the table; of a product also how long it takes with the weight
    decoded first."""
    timed = {found["kernel"]: found for found in kernels if "seconds" in found}
    texts = []
    for name, found in timed.items():
        first = timed.get(name + DECODED)
        beside = (
            ["", ""]
            if first is None
            else [_us(first["seconds"]), f"{first['seconds'] / found['seconds']:.2f}"]
        )
        if not name.endswith(DECODED):
            share = f"{found['share_of_copy']:.2f}"
            host = _us(found["issue_seconds"])
            texts.append([name, _us(found["seconds"]), share, host, *beside])
    return texts


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f}"


def _tests(step: Step) -> list[str]:
    """Return what pytest counted, and what has failed, from its XML file."""
    try:
        suite = ElementTree.parse(step.output).getroot()[0]
    except (
        FileNotFoundError,
        ElementTree.ParseError,
    ):  # not there, or pytest was killed while it wrote
        return []
    counts = ", ".join(
        f"{suite.attrib[name]} {name}" for name in ("tests", "failures", "errors", "skipped")
    )
    cases = suite.iter("testcase")
    failed = [case for case in cases if {"failure", "error"} & {found.tag for found in case}]
    names = [f"- `{case.get('classname')}: {case.get('name')}`" for case in failed[:MAX_NAMED]]
    more = [f"- {len(failed) - MAX_NAMED} more"] if len(failed) > MAX_NAMED else []
    return [f"{step.name}: {counts}.", "", *names, *more, ""]


def _others(setting: Setting, steps: Sequence[Step]) -> str:
    """Placements of another model than the setting's."""
    models = {
        s.name: s.command[s.command.index("--model") + 1] for s in steps if s.kind == "placement"
    }
    return "".join(f"; {name}: {model}" for name, model in models.items() if model != setting.model)


def _step_texts(step: Step, state: State) -> list[str]:
    found = state.get(step.name)
    if found is None:
        return [step.name, "left out", "", ""]
    return [
        step.name,
        found["status"],
        f"{found['seconds']:.0f}",
        found["reason"].replace("|", "/"),
    ]


def _card() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None

"""flexgen_h2o behind the face of the peers: its own command line, `flex_opt`, in this process.

Variants: full, h2o:R (--hh-ratio R; 0.1 keeps 20% of the prompt's columns) and h2o:kv-budget=R
(--kv-budget R; 0.2 keeps 20% of the columns of prompt and new tokens), each with -4bit (weights and
KV in 4 bits), with -int8 (weights and products in int8), and with -4bit-int8 (-4bit,
products in int8); mix:kv-bytes=R (--kv-bytes R, which chooses columns and bits). All run `--policy
auto`, which plans rows a block and placement for the budget. Nothing is warmed up but what the
package does itself.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from contract import (
    DTYPES,
    EXIT_DOES_NOT_FIT,
    EXIT_REFUSED,
    DoesNotFitError,
    Meter,
    RefusedError,
    Request,
    words_of,
)
from contract import phases as rates

FORMS = ("", "4bit", "int8", "4bit-int8")


def variant_flags(variant: str) -> list[str]:
    """Flags of flex_opt for a variant that plans automatically. Raises RefusedError for one that it
    does not know."""
    name, _, share = variant.partition(":")
    kind, _, form = name.partition("-")
    what, _, number = share.rpartition("=")
    flag = {
        ("full", ""): "",
        ("h2o", ""): "--hh-ratio",
        ("h2o", "kv-budget"): "--kv-budget",
        ("mix", "kv-bytes"): "--kv-bytes",
    }.get((kind, what))
    if (
        flag is None
        or bool(flag) != bool(number)
        or form not in (("",) if kind == "mix" else FORMS)
    ):
        raise RefusedError(f"--variant {variant}: such as full-4bit, h2o:kv-budget=0.2")
    flags = ["--policy", "auto", *([flag, number] if flag else [])]
    stored, _, products = form.partition("-")
    if "int8" in (stored, products):
        flags += ["--int8-compute"]
    if stored == "4bit":
        flags += words_of(compress_weight=True, weight_bits=4, compress_cache=True, cache_bits=4)
    return flags


def measure(request: Request, meter: Meter) -> dict[str, Any]:
    import numba
    import torch

    torch.set_num_threads(request.threads)
    numba.set_num_threads(min(request.threads, numba.config.NUMBA_NUM_THREADS))
    meter.begin()
    report = _run(request, variant_flags(request.variant))
    phases = rates(
        request.rows, request.gen_len, report["prefill"]["seconds"], report["decode"]["seconds"]
    )
    facts = {name: report[name] for name in ("peak_bytes", "io_bytes", "kv", "predicted")}
    memory = meter.memory()
    # Loading is within flex_opt: what the run itself read is in its report, which tests hold to
    # /proc/self/io.
    reads = {
        "process_read_bytes": memory["read_bytes"],
        "read_bytes": report["io_bytes"]["disk_read"],
    }
    return phases | memory | reads | {"setting": {"policy": report["policy"]} | facts}


def _run(request: Request, flags: list[str]) -> dict[str, Any]:
    from flexgen_h2o import flex_opt

    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        report = Path(folder) / "report.json"
        prompts.write_text(
            "".join(json.dumps({"prompt_token_ids": p}) + "\n" for p in request.prompts())
        )
        asked = words_of(
            model=request.model_dir,
            device="cpu",
            dtype=DTYPES[request.dtype],
            offload_dir=request.offload_dir,
            prompts=prompts,
            gen_len=request.gen_len,
            ignore_eos=True,
            no_log=True,
            verbose=0,
            json=report,
            host_mem=request.budget,
        )
        said = io.StringIO()
        with contextlib.redirect_stdout(sys.stderr), contextlib.redirect_stderr(said):
            code = flex_opt.main([*asked, *flags])
        sys.stderr.write(said.getvalue())
        if code in (EXIT_REFUSED, EXIT_DOES_NOT_FIT):
            kind = DoesNotFitError if code == EXIT_DOES_NOT_FIT else RefusedError
            raise kind(said.getvalue().strip().splitlines()[-1])
        if code:
            raise RuntimeError(f"flex_opt ended with exit code {code}")
        found: dict[str, Any] = json.loads(report.read_text())
        return found

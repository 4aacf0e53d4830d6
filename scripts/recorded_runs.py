"""Recorded runs of FlexGen and H2O: read from JSON, turned into our policies and needs, and
predicted on a profile.

One run is one JSON object: `machine model prompt_len gen_len percent gbs num_gpu_batches` and what
was recorded (`tokens_per_s`, `prefill_s`, `decode_s`), and FlexGen's other flags where they are not
its defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from flexgen_h2o.core.config import DTYPE_BYTES, Policy
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import read_json
from flexgen_h2o.core.model import ModelSpec, TensorSpec
from flexgen_h2o.engine.memory_plan import kv_sizes_of
from flexgen_h2o.engine.workload import Workload, even_blocks, shape_of
from flexgen_h2o.kvcache.eviction import H2O
from flexgen_h2o.models import built_in_spec
from flexgen_h2o.planner.cost_model import CostModel, Machine
from flexgen_h2o.planner.predict import predict
from flexgen_h2o.planner.profile import HardwareProfile

QUANTITIES = ("tokens_per_s", "prefill_s", "decode_s")
DTYPE = "float16"
NO_BUDGETS: dict[str, int | None] = {"device": None, "host": None, "disk": None}
SHORT = (3, 6)  # blocks of the models that stand for a long one


@dataclass(frozen=True)
class Run:
    """A recorded run. Lengths in tokens, seconds of whole phases; tokens_per_s are generated tokens
    over both phases.

    percent: weights, KV cache and hidden states on GPU and CPU, as given to FlexGen. hh_ratio:
    H2O's, 0 for the full cache. source and note are for the reader; peak_gpu_gb is not predicted
    here.
    """

    machine: str
    model: str
    prompt_len: int
    gen_len: int
    percent: tuple[int, int, int, int, int, int]
    gbs: int
    num_gpu_batches: int
    tokens_per_s: float
    prefill_s: float | None = None
    decode_s: float | None = None
    peak_gpu_gb: float | None = None
    overlap: bool = True
    pin_weight: bool = True
    cpu_cache_compute: bool = False
    compress_weight: bool = False
    compress_cache: bool = False
    sep_layer: bool = True
    attn_sparsity: float = 1.0
    hh_ratio: float = 0.0
    source: str = ""
    note: str = ""

    @property
    def rows(self) -> int:
        return self.gbs * self.num_gpu_batches

    @property
    def name(self) -> str:
        """Model, prompt + generated tokens, gbs x micro-batches, and what is unusual."""
        flags = [f"h2o {self.hh_ratio:g}"] if self.hh_ratio else []
        flags += ["4-bit w"] if self.compress_weight else []
        flags += ["4-bit kv"] if self.compress_cache else []
        shares = "/".join(str(share) for share in self.percent[:4])
        size = f"{self.prompt_len}+{self.gen_len} {self.gbs}x{self.num_gpu_batches}"
        return " ".join([self.machine, self.model.split("/")[-1], size, shares, *flags])

    @property
    def recorded(self) -> dict[str, float]:
        """Return what was measured, by name."""
        values = {name: getattr(self, name) for name in QUANTITIES}
        return {name: value for name, value in values.items() if value is not None}


def read_runs(path: Path) -> tuple[Run, ...]:
    """The runs of a file. UsageError names the file, the run and the unknown, missing or bad
    field."""
    try:
        body = read_json(path)
    except OSError as error:
        raise UsageError(f"--runs {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"--runs {path}: not a JSON file ({error})") from error
    if not isinstance(body, dict) or not isinstance(body.get("runs"), list) or not body["runs"]:
        raise UsageError(f"--runs {path}: an object with a list `runs` is expected")
    found = []
    for i, entry in enumerate(body["runs"]):
        try:
            found.append(_run(entry))
        except UsageError as error:
            raise UsageError(f"--runs {path}: run {i + 1}: {error}") from error
    return tuple(found)


def _run(entry: object) -> Run:
    if not isinstance(entry, dict):
        raise UsageError("an object is expected")
    known = {f.name: f for f in fields(Run)}
    missing = [f.name for f in known.values() if f.default is MISSING and f.name not in entry]
    unknown = sorted(set(entry) - set(known))
    if unknown or missing:
        raise UsageError(
            f"unknown field {unknown[0]!r}" if unknown else f"field {missing[0]!r} is missing"
        )
    run = Run(
        **{name: _checked(name, str(known[name].type), value) for name, value in entry.items()}
    )
    if built_in_spec(run.model) is None:
        raise UsageError(f"model: {run.model!r} is not in the built-in table")
    if run.hh_ratio and int(run.hh_ratio * run.prompt_len) < 1:
        raise UsageError(f"hh_ratio: {run.hh_ratio!r} of {run.prompt_len} tokens keeps none")
    return run


def _checked(name: str, kind: str, value: Any) -> Any:
    """The value if it is of its field's kind."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "str":
        good = isinstance(value, str)
    elif kind == "bool":
        good = isinstance(value, bool)
    elif kind == "int":
        good = number and isinstance(value, int) and value >= 1
    elif kind.startswith("tuple"):
        good = (
            isinstance(value, list)
            and len(value) == 6
            and all(type(v) is int and 0 <= v <= 100 for v in value)
        )
        good = good and all(value[i] + value[i + 1] <= 100 for i in (0, 2, 4))
        value = tuple(value) if good else value
    else:
        least = 0 if name == "hh_ratio" else 1e-9
        most = 1 if name in ("hh_ratio", "attn_sparsity") else 1e12
        good = (number and least <= value <= most) or (value is None and "None" in kind)
    if not good:
        raise UsageError(f"{name}: {value!r} is not usable")
    return value


def whole_tensor_percent(spec: ModelSpec, gpu: int, cpu: int) -> tuple[int, int]:
    """Return what FlexGen makes of `percent gpu cpu` for weights, as percent of a block's bytes on
    GPU and CPU.

    It places whole tensors: going through a layer's list in the order disk, CPU, GPU, a tensor goes
    where the middle of its bytes falls. `20 80` puts 8 percent of the bytes of an OPT block on the
    GPU, `0 50` half on disk.
    """
    totals = {"disk": 0, "cpu": 0, "gpu": 0}
    for tensors in (spec.attention[0], spec.mlp[0]):
        for where, nbytes in _placed(tensors, gpu, cpu):
            totals[where] += nbytes
    on_gpu = round(100 * totals["gpu"] / sum(totals.values()))
    on_cpu = round(100 * totals["cpu"] / sum(totals.values()))
    return on_gpu, min(on_cpu, 100 - on_gpu)


def _placed(tensors: Sequence[TensorSpec], gpu: int, cpu: int) -> list[tuple[str, int]]:
    """(tier, elements) of each matrix of a list; vectors are too small to count."""
    sizes = [t.numel for t in tensors if len(t.shape) == 2]
    found = []
    before = 0
    for size in sizes:
        middle = (before + size / 2) / sum(sizes) * 100
        before += size
        found.append(
            ("disk" if middle < 100 - gpu - cpu else "cpu" if middle < 100 - gpu else "gpu", size)
        )
    return found


def policy_of(run: Run, spec: ModelSpec) -> Policy:
    """The policy of ours that places and moves what FlexGen placed and moved.

    FlexGen's KV cache on the host is not pinned: where the device attends to it, the thread that
    issues compute first copies each piece into pinned memory (pytorch_backend.general_copy), so
    that loading and computing take turns.
    """
    percent = (*whole_tensor_percent(spec, *run.percent[:2]), *run.percent[2:])
    overlap = run.overlap and (run.percent[2] == 100 or run.cpu_cache_compute)
    return Policy(
        run.gbs,
        run.num_gpu_batches,
        percent,
        compress_weight=run.compress_weight,
        compress_cache=run.compress_cache,
        cpu_cache_compute=run.cpu_cache_compute,
        overlap=overlap,
        sep_layer=run.sep_layer,
        pin_weight=run.pin_weight,
        attn_sparsity=run.attn_sparsity,
    )


def need_of(run: Run, num_blocks: int) -> Workload:
    """The need; H2O keeps twice int(ratio x prompt) slots, the newcomer's among them."""
    heavy = int(run.hh_ratio * run.prompt_len)
    if not heavy:
        return Workload.full(run.rows, run.prompt_len, run.gen_len, num_blocks)
    slots = min(2 * heavy, run.prompt_len + run.gen_len - 1)
    kept = min(2 * heavy - 1, run.prompt_len)
    return Workload(
        run.rows,
        run.prompt_len,
        run.gen_len,
        (slots,) * num_blocks,
        (kept,) * num_blocks,
        H2O().needs,
    )


@lru_cache(maxsize=64)
def _spec(model: str, num_blocks: int) -> ModelSpec:
    """The model, or one of only so many blocks."""
    known = built_in_spec(model)
    assert known is not None  # read_runs has looked
    spec = known[0]
    if not num_blocks:
        return spec
    return replace(
        spec,
        num_blocks=num_blocks,
        attention=spec.attention[:num_blocks],
        mlp=spec.mlp[:num_blocks],
    )


def predicted(run: Run, profile: HardwareProfile, num_blocks: int = 0) -> dict[str, float]:
    """Prefill and decode seconds and tokens a second. num_blocks: of a shortened model, 0 for the
    true one."""
    spec = _spec(run.model, num_blocks)
    policy = policy_of(run, spec)
    need = need_of(run, spec.num_blocks)
    costs = CostModel(spec, policy, need, Machine(profile, DTYPE, False))
    plan = costs.memory.plan_within(shape_of(policy, need), NO_BUDGETS)
    found = predict(costs, plan, even_blocks(policy, need))
    again = unpacked_again_s(run, spec, profile)
    decode = again + unpacked_cache_s(run, spec, profile)
    seconds = {
        "prefill_s": found.prefill_s + again,
        "decode_s": found.decode_s + (run.gen_len - 1) * decode,
    }
    return {"tokens_per_s": run.rows * run.gen_len / sum(seconds.values()), **seconds}


def unpacked_again_s(run: Run, spec: ModelSpec, profile: HardwareProfile) -> float:
    """Seconds of a sweep in which FlexGen unpacks 4-bit weights that our engine has unpacked
    already: it does so for every micro-batch, we for every block."""
    if not run.compress_weight:
        return 0.0
    elements = sum(
        t.numel for tensors in (*spec.attention, *spec.mlp) for t in tensors if len(t.shape) == 2
    )
    rates = profile.rates(DTYPE)
    return (
        (run.num_gpu_batches - 1)
        * elements
        * DTYPE_BYTES[DTYPE]
        / rates.device_dequantise_bytes_per_s
    )


def unpacked_cache_s(run: Run, spec: ModelSpec, profile: HardwareProfile) -> float:
    """Seconds of a decode sweep, on average, in which FlexGen unpacks 4-bit KV on the device and
    attends to what it became: our engine reads it packed."""
    if not run.compress_cache:
        return 0.0
    columns = run.rows * (run.prompt_len + run.gen_len / 2)
    rates = profile.rates(DTYPE)
    unpacked = columns * spec.kv_bytes_per_token(DTYPE_BYTES[DTYPE])
    packed = (
        columns
        * spec.num_blocks
        * spec.num_kv_heads
        * kv_sizes_of(spec, policy_of(run, spec)).column_bytes
    )
    more = (unpacked - packed) / rates.device_attention_bytes_per_s.at(spec.head_dim)
    return unpacked / rates.device_dequantise_bytes_per_s + more


def predicted_quickly(run: Run, profile: HardwareProfile) -> dict[str, float]:
    """The same within a percent or so: every block costs the same, so two short models tell of the
    long one."""
    few, more = (predicted(run, profile, count) for count in SHORT)
    total = _spec(run.model, 0).num_blocks
    seconds = {
        name: few[name] + (more[name] - few[name]) * (total - SHORT[0]) / (SHORT[1] - SHORT[0])
        for name in ("prefill_s", "decode_s")
    }
    return {"tokens_per_s": run.rows * run.gen_len / sum(seconds.values()), **seconds}


def errors_of(run: Run, found: Mapping[str, float]) -> dict[str, float]:
    """Predicted over recorded, less one, of all that was recorded."""
    return {name: found[name] / value - 1 for name, value in run.recorded.items()}

"""Grids of what is measured: systems, cells (model, workload, budget), and the named grids of them.
Data, no measuring."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from flexgen_h2o.core.units import parse_bytes
from flexgen_h2o.models import built_in_spec

IN_RAM = "ram"
OFFLOAD = "offload"


@dataclass(frozen=True)
class System:
    """A system of bench/baselines/run.py and its variant. kinds: where it belongs, IN_RAM,
    OFFLOAD or both. dtype: that it computes in, of contract.DTYPES; empty: bf16. It reads bf16
    files either way."""

    peer: str
    variant: str
    kinds: tuple[str, ...]
    dtype: str = ""

    @property
    def name(self) -> str:
        return "-".join(part for part in (self.peer, self.variant, self.dtype) if part)

    @property
    def ours(self) -> bool:
        return self.peer == "ours"

    def misfit(self, kind: str) -> str | None:
        """Why it is not compared in a cell of this kind; None when it is."""
        if kind in self.kinds:
            return None
        return "it runs all in RAM only" if self.kinds == (IN_RAM,) else "it is for a budget"


BOTH = (IN_RAM, OFFLOAD)
SYSTEMS = (
    System("ours", "full", BOTH),
    System("ours", "h2o:0.1", BOTH),
    System("ours", "full-4bit", BOTH),
    System("ours", "h2o-4bit:0.1", BOTH),
    System("ours", "full-int8", BOTH),
    System("ours", "h2o-int8:0.1", BOTH),
    System("ours", "full-4bit-int8", BOTH),
    System("ours", "h2o-4bit-int8:0.1", BOTH),
    System("hf", "sdpa", (IN_RAM,)),
    System("hf", "eager", (IN_RAM,)),
    System("hf", "sdpa-static", (IN_RAM,)),
    System("hf", "eager-static", (IN_RAM,)),
    System("hf", "sdpa-static-compile", (IN_RAM,)),
    System("hf", "eager-static-compile", (IN_RAM,)),
    System("hf", "sdpa-loop", (IN_RAM,)),
    System("accelerate", "disk", (OFFLOAD,)),
    System("accelerate", "disk-eager", (OFFLOAD,)),
    System("deepspeed", "nvme", (OFFLOAD,)),
    System("deepspeed", "nvme-4bit", (OFFLOAD,)),
    System("ctranslate2", "int8", (IN_RAM,)),
    System("openvino", "int8", (IN_RAM,)),
    System("openvino", "bf16", (IN_RAM,)),
    System("vllm", "bf16", (IN_RAM,)),
    System("vllm", "bf16-eager", (IN_RAM,)),
    System("llamacpp", "bf16", (IN_RAM,)),
    System("llamacpp", "q8_0", (IN_RAM,)),
    System("llamacpp", "q4_0", BOTH),
    System("llamacpp", "q4_k", (IN_RAM,)),
    System("llamacpp", "bf16-mmap", (OFFLOAD,)),
    System("llamacpp", "q8_0-mmap", (OFFLOAD,)),
    System("llamacpp", "q4_0-mmap", (OFFLOAD,)),
    System("llamacpp", "q4_k-mmap", (OFFLOAD,)),
    System("flexgen", "cpu", (IN_RAM,)),
    System("flexgen", "cpu-4bit", (IN_RAM,)),
    System("flexgen", "disk", (OFFLOAD,)),
    System("flexgen", "disk-4bit", (OFFLOAD,)),
)
# For CPUs without products in bf16, which torch makes number by number there: what it computes is
# faster in fp32.
FP32_SYSTEMS = tuple(
    System(peer, variant, (kind,), dtype="fp32")
    for peer, kind, variants in (
        (
            "hf",
            IN_RAM,
            (
                "sdpa",
                "eager",
                "sdpa-static",
                "eager-static",
                "sdpa-static-compile",
                "eager-static-compile",
                "sdpa-loop",
            ),
        ),
        ("flexgen", IN_RAM, ("cpu", "cpu-4bit")),
        ("vllm", IN_RAM, ("compiled", "eager")),
        ("accelerate", OFFLOAD, ("disk", "disk-eager")),
        ("deepspeed", OFFLOAD, ("nvme",)),
        ("flexgen", OFFLOAD, ("disk",)),
    )
    for variant in variants
)
# quick has 10 minutes: one number of rows a cell, without a cache that is allocated once, which
# pays with long rows, what is compiled first, and peers' own 4 bits.
NOT_QUICK = ("vllm-bf16", "deepspeed-nvme-4bit", "flexgen-cpu-4bit", "flexgen-disk-4bit")
QUICK_SYSTEMS = tuple(s for s in SYSTEMS if "-static" not in s.variant and s.name not in NOT_QUICK)


@dataclass(frozen=True)
class Cell:
    """Systems are compared within a cell. budget: as --host-mem takes it, `third` of the weights,
    or `none`.

    model: a built-in shape, also its first transformer blocks alone (`facebook/opt-30b:12`), or a
    folder. rows: where the search for the best batch starts, and where it ends at the latest.
    """

    model: str
    prompt_len: int
    gen_len: int
    budget: str
    rows: tuple[int, int]

    @property
    def kind(self) -> str:
        return IN_RAM if self.budget == "none" else OFFLOAD

    @property
    def name(self) -> str:
        return f"{self.model} {self.prompt_len}+{self.gen_len} budget {self.budget}"

    def budget_bytes(self, weight_bytes: int) -> int | None:
        if self.budget == "none":
            return None
        return weight_bytes // 3 if self.budget == "third" else parse_bytes(self.budget)


def cut_model(model: str, layers: int, offload_dir: Path) -> Path:
    """Write the config of a built-in shape with `layers` transformer blocks below `offload_dir`.
    Returns its folder. All blocks are alike, and a whole model takes hours to prefill here."""
    built_in = built_in_spec(model)
    assert built_in is not None
    folder = offload_dir / "cut" / f"{model.split('/')[-1]}-{layers}-layers"
    folder.mkdir(parents=True, exist_ok=True)
    config = {**built_in[1], "model_type": built_in[0].family, "num_hidden_layers": layers}
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:layers]
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return folder


LLAMA_1B = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
OPT = {size: f"facebook/opt-{size}" for size in ("125m", "350m", "1.3b", "6.7b", "30b")}


# The signed grid: cells and systems chosen on this day, before any of them was run; all are shown,
# whatever they say. Rows and blocks are fewer, for everybody, so that no cell takes longer than
# about three hours of two cores; those of OPT-1.3B 128 + 128 were cut again that evening, those of
# 64 + 256 on 2026-11-28, those of OPT-30B on 2026-11-29, all before they were run, for a machine
# half as fast. vLLM joined the systems on 2026-11-25, when it could be installed: rounds that a
# cell had before are then run again with it. llama.cpp's q4_0 joined on 2026-11-28, for a peer in 4
# bits, the 4 bits that DeepSpeed and FlexGen have themselves on 2026-11-30.
SIGNED_ON = "2026-11-23"
LLAMA_8B = "meta-llama/Meta-Llama-3-8B"
QWEN_30B = "Qwen/Qwen3-30B-A3B"
OLMOE = "allenai/OLMoE-1B-7B-0924"
Lengths = dict[
    tuple[int, int], tuple[str, tuple[int, int]]
]  # prompt and new tokens: the cut of the model, rows
LENGTHS_1_3B: Lengths = {
    (512, 32): ("", (16, 64)),
    (128, 128): (":12", (32, 64)),
    (64, 256): (":12", (32, 64)),
    (512, 512): (":12", (8, 32)),
}
LENGTHS_6_7B: Lengths = {
    (512, 32): (":8", (8, 32)),
    (128, 128): (":8", (16, 64)),
    (64, 256): (":8", (16, 64)),
    (512, 512): (":8", (4, 16)),
}


def _signed(size: str, budget: str, lengths: Lengths) -> tuple[Cell, ...]:
    return tuple(
        Cell(OPT[size] + cut, *both, budget, rows) for both, (cut, rows) in lengths.items()
    )


SIGNED: dict[str, tuple[Cell, ...]] = {
    "signed-opt-1.3b-third": _signed("1.3b", "third", LENGTHS_1_3B),
    "signed-opt-1.3b-none": _signed("1.3b", "none", LENGTHS_1_3B),
    "signed-opt-6.7b-third": _signed("6.7b", "third", LENGTHS_6_7B),
    "signed-opt-6.7b-none": _signed("6.7b", "none", LENGTHS_6_7B),
    # All blocks for what reads the checkpoint in place; 6 of 48 for all, with those that write a
    # copy.
    "signed-opt-30b": (
        Cell(OPT["30b"], 512, 32, "third", (4, 4)),
        Cell(f"{OPT['30b']}:6", 512, 32, "third", (8, 32)),
    ),
    "signed-llama-3-8b": (
        Cell(LLAMA_8B, 512, 32, "third", (8, 16)),
        Cell(f"{LLAMA_8B}:16", 128, 128, "third", (8, 32)),
        Cell(f"{LLAMA_8B}:16", 128, 128, "none", (8, 32)),
    ),
    "signed-experts": (
        Cell(f"{QWEN_30B}:6", 128, 128, "third", (16, 128)),
        Cell(OLMOE, 128, 128, "none", (16, 64)),
    ),
}
SIGNED["signed"] = tuple(cell for cells in list(SIGNED.values()) for cell in cells)
# For a CPU with AVX2 alone, which would take most of a day for each of these, and for sittings of a
# few hours: the same models, lengths and budgets, so many blocks and rows, for everybody, that a
# cell takes about an hour. Chosen on this day, before any was run; the last four on 2026-11-29,
# before any of these was run, in place of signed cells that would take a day: so each model that
# the grid names has all its lengths in one of the two.
SHORT_ON = "2026-11-27"
SHORT = "signed-short"
OPT_6 = f"{OPT['1.3b']}:6"
SIGNED[SHORT] = (
    Cell(OPT_6, 128, 128, "third", (4, 8)),
    Cell(OPT_6, 128, 128, "none", (4, 8)),
    Cell(f"{LLAMA_1B}:6", 128, 128, "third", (4, 8)),
    Cell(f"{LLAMA_1B}:6", 128, 128, "none", (4, 8)),
    Cell(f"{OPT['1.3b']}:18", 512, 32, "third", (4, 4)),
    Cell(OPT_6, 512, 32, "none", (16, 16)),
    Cell(OPT_6, 64, 256, "third", (8, 8)),
    Cell(OPT_6, 64, 256, "none", (16, 16)),
    Cell(f"{OPT['1.3b']}:3", 512, 512, "third", (8, 8)),
    Cell(OPT_6, 512, 512, "none", (16, 16)),
    Cell(f"{OPT['6.7b']}:4", 512, 32, "third", (4, 4)),
    Cell(f"{OPT['30b']}:2", 512, 32, "third", (4, 4)),
    Cell(f"{OPT['6.7b']}:4", 128, 128, "third", (4, 4)),
    Cell(f"{OPT['6.7b']}:4", 128, 128, "none", (16, 16)),
    Cell(f"{LLAMA_8B}:4", 128, 128, "third", (4, 4)),
    Cell(f"{LLAMA_8B}:4", 128, 128, "none", (16, 16)),
    Cell(f"{QWEN_30B}:2", 128, 128, "third", (8, 8)),
    Cell(f"{OLMOE}:4", 128, 128, "none", (16, 16)),
    Cell(f"{OPT['6.7b']}:4", 64, 256, "third", (4, 4)),
    Cell(f"{OPT['6.7b']}:4", 64, 256, "none", (16, 16)),
    Cell(f"{OPT['6.7b']}:4", 512, 512, "third", (4, 4)),
    Cell(f"{OPT['6.7b']}:4", 512, 512, "none", (8, 8)),
)
# What joined after that day, of each of the two, as the pages of all figures say it.
JOINED_LATER = {
    SIGNED_ON: (
        "some were cut later, before their runs; vLLM, llama.cpp's loaded q4_0 and, in one short "
        "benchmark, other "
        "systems' own 4 bits joined later"
    ),
    SHORT_ON: (
        "OPT-1.3B, 512 + 32, a third, was cut to 18 blocks that day, before it was run; 64 + 256 "
        "and 512 + 512 of "
        "OPT-6.7B joined on 2026-11-29, after the others and before they were run; the 4 bits of "
        "DeepSpeed and FlexGen "
        "on 2026-11-30"
    ),
}

# Grids by name. quick: ten minutes. signed*: hours each, days in all.
GRIDS: dict[str, tuple[Cell, ...]] = {
    "quick": (
        Cell(OPT["125m"], 32, 16, "none", (16, 16)),
        Cell(OPT["350m"], 32, 8, "third", (8, 8)),
    ),
    **SIGNED,
}


def systems_of(grid: str, cell: Cell, cpu: str = "") -> tuple[System, ...]:
    """The systems that a cell of a grid compares on a processor, by its name in stored lines."""
    if grid in SIGNED:
        return _systems_of_signed(cell, cpu)
    chosen = QUICK_SYSTEMS if grid == "quick" else SYSTEMS
    return tuple(system for system in chosen if cell.kind in system.kinds)


# Of ours: 20% of the columns of prompt and new tokens, or 20% of the bytes that these take in bf16.
SIGNED_OURS = tuple(
    System("ours", variant, kinds)
    for variant, kinds in (
        ("full", BOTH),
        ("h2o:kv-budget=0.2", BOTH),
        ("h2o-4bit-int8:kv-budget=0.2", BOTH),
        ("full-int8", (IN_RAM,)),
        ("mix:kv-bytes=0.2", (OFFLOAD,)),
    )
)
UNSIGNED = ("llamacpp-q4_k",)  # that a signed cell leaves out: it is there in a faster precision
# Peers whose variants are settings of one system: the fastest in the search goes round.
SETTINGS = (
    "hf-",
    "accelerate-disk",
    "vllm-",
    "deepspeed-nvme-4bit",
    "deepspeed-nvme",
    "flexgen-disk-4bit",
    "flexgen-disk",
    "flexgen-cpu-4bit",
    "flexgen-cpu",
)
IN_PLACE = ("accelerate-disk",)  # peers that read a checkpoint as it is
ONLY_AVX2 = "with AVX2"  # so ends the name of a CPU that has nothing wider
AVX512 = "with AVX-512"  # and products in bf16
AMX = "with AMX"
# What was found best of a peer, by how the CPU's name ends: what differs from its defaults
# (docs/lab/method.md).
TUNED: dict[str, dict[str, dict[str, int]]] = {
    "hf": {ONLY_AVX2: {"max_autotune": 1}, AVX512: {"cpp_wrapper": 1}, AMX: {}},
    "openvino": {ONLY_AVX2: {"group": 0}, AVX512: {"group": 512}, AMX: {"group": 0}},
    "llamacpp": {ONLY_AVX2: {"ubatch": 2048}, AVX512: {}},
}


# Runs that say less of a peer than it can, which the page leaves out: by the cell's name, the
# system, the CPU's name and rows, and why.
WITHDRAWN: dict[tuple[str, str, str, int], str] = {
    (
        f"{OPT['6.7b']}:8 512+32 budget third",
        "deepspeed-nvme",
        "AMD EPYC (25/17) with AVX-512",
        6,
    ): (
        "its 6 rows, found on another machine, read their own code again and again at the group's "
        "limit; 5 made 1.67 "
        "and 1.78 outside the rounds"
    ),
}


def _systems_of_signed(cell: Cell, cpu: str) -> tuple[System, ...]:
    """Ours, and every peer of the cell's kind that SYSTEMS has; a peer that cannot run the family
    says so itself."""
    peers = [system for system in SYSTEMS if not system.ours and system.name not in UNSIGNED]
    # There torch multiplies bf16 number by number: Hugging Face computes as long or longer in it,
    # and vLLM 2.5 times as long (OPT_6 in RAM, 8 rows).
    if cpu.endswith(ONLY_AVX2):
        peers = [*FP32_SYSTEMS, *(system for system in peers if system.peer not in ("hf", "vllm"))]
    if cell.model == OPT["30b"]:
        peers = [system for system in peers if system.name in IN_PLACE]
    if cell.model.partition(":")[0] not in (
        QWEN_30B,
        OLMOE,
    ):  # without experts it is the same as without `-loop`
        peers = [system for system in peers if not system.variant.endswith("-loop")]
    return tuple(system for system in (*SIGNED_OURS, *peers) if cell.kind in system.kinds)


def system_of(name: str) -> str:
    """Return the name of the system that this is a setting of: the names of one system in one
    precision are the same."""
    return next((begins for begins in SETTINGS if name.startswith(begins)), name)


def tuned_settings(peer: str, cpu: str) -> dict[str, int] | None:
    """A peer's best settings on a processor, as far as they are not its defaults; None where nobody
    looked for them."""
    if peer not in TUNED:
        return {}
    return next((settings for ends, settings in TUNED[peer].items() if cpu.endswith(ends)), None)

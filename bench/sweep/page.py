"""README and the Results page from the stored lines of the benchmarks, and the pages of all figures
beside the lines.

    python -m bench.sweep.page [--results FOLDER]

Rewrites what stands between the marks of README.md and docs/results.md, and signed.md and
signed-short.md in FOLDER. Ratios are of systems of one round, then the median over rounds.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import common
from bench.sweep import quality
from bench.sweep.grid import (
    IN_RAM,
    JOINED_LATER,
    LLAMA_8B,
    OLMOE,
    OPT,
    SHORT,
    SHORT_ON,
    SIGNED,
    SIGNED_ON,
)
from bench.sweep.rounds import FEWEST, MOVED, Found, found_of
from bench.sweep.store import Store
from bench.sweep.tables import (
    FULL,
    INT8,
    MIX,
    NAME,
    SMALL,
    details,
    three_figures,
    wrapped,
)
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import write_whole
from flexgen_h2o.core.units import markdown_table
from flexgen_h2o.parser import OneLineParser

RESULTS = common.ROOT / "bench" / "results" / "build-2core"
PAGES = ("README.md", "docs/results.md")
MARKS = "<!-- {name}: made by python -m bench.sweep.page -->", "<!-- end of {name} -->"

# The benchmarks that README shows, and the setting with fewer bits that Results shows of each.
SHOWN = {
    f"{OPT['1.3b']} 512+32 budget third": MIX,
    f"{LLAMA_8B} 512+32 budget third": SMALL,
    f"{OPT['30b']} 512+32 budget third": SMALL,
    f"{OLMOE} 128+128 budget none": INT8,
    f"{OPT['6.7b']}:8 512+32 budget none": INT8,
    f"{LLAMA_8B}:4 128+128 budget third": SMALL,
}
# A setting with fewer bits, as its flags.
FEWER_BITS = {
    INT8: "`--int8-compute`",
    MIX: "`--kv-size 20%`",
    SMALL: "`--weight-bits 4 --int8-compute --kv-bits 4 --kv-budget 0.2`",
}
PEERS = {
    "accelerate": "Accelerate",
    "ctranslate2": "CTranslate2",
    "deepspeed": "DeepSpeed",
    "flexgen": "FlexGen",
    "hf": "Hugging Face",
    "llamacpp": "llama.cpp",
    "openvino": "OpenVINO",
    "vllm": "vLLM",
}
PRECISION = re.compile(r"int8|q\d_\d|\dbit|fp32")
EIGHT_BITS = re.compile(r"int8|q8")


@dataclass(frozen=True)
class Class:
    """Comparison of a setting of ours with the fastest other system that `takes` says
    yes to."""

    words: str
    ours: str
    takes: Callable[[str], bool]


CLASSES = (
    Class("bf16 with others in 16 or 32 bits", FULL, lambda name: not quality.LOSSY.search(name)),
    Class("int8 with others in 8 bits", INT8, lambda name: bool(EIGHT_BITS.search(name))),
    Class("bf16 with others in any precision", FULL, lambda name: True),
)
# What answers lose: what a line of the table says, and the variants of quality.jsonl that it
# covers.
LOSSES = (
    ("flexgen_h2o, int8 weights and matrix multiplications", r"full-int8"),
    ("flexgen_h2o, KV cache in 20% of its bytes", r"mix:kv-bytes=0\.2"),
    ("flexgen_h2o, 20% of the KV entries, chosen by H2O", r"h2o:kv-budget=0\.2"),
    ("flexgen_h2o, the same with 4-bit weights and KV", r"h2o-4bit-int8:kv-budget=0\.2"),
    ("OpenVINO, int8 weights, 8-bit KV", r"openvino-int8"),
    ("CTranslate2, int8", r"ctranslate2-int8"),
    ("DeepSpeed, 4-bit weights", r"deepspeed-nvme-4bit"),
    ("FlexGen, 4-bit weights and KV", r"flexgen-disk-4bit"),
    ("llama.cpp, q8_0", r"llamacpp-q8_0(-mmap)?"),
    ("llama.cpp, q4_0", r"llamacpp-q4_0(-mmap)?"),
)


def system_words(name: str) -> str:
    """`CTranslate2 int8` for ctranslate2-int8; bf16 unless the name has another precision."""
    peer, _, variant = name.partition("-")
    precision = PRECISION.search(variant)
    return (
        f"{PEERS.get(peer, peer)} {precision[0].replace('4bit', '4-bit') if precision else 'bf16'}"
    )


def benchmark_words(found: Found) -> str:
    """The model, prompts, and tokens in + out."""
    return f"{found.model} ({_prompts(found)}, {found.cell.prompt_len} + {found.cell.gen_len})"


def _prompts(found: Found) -> int:
    ours = found.entries[FULL]
    return int(next(iter(ours.lines.values()))["rows"])


def _ram(found: Found) -> str:
    if found.cell.kind == IN_RAM:
        return "fits"
    return "1/3" if found.cell.budget == "third" else found.cell.budget


def ratio_of(
    found: Found, ours: str, takes: Callable[[str], bool] = lambda name: True
) -> float | None:
    """Median ratio of one of ours over the fastest other system that `takes` says yes to; None if
    there is none."""
    other = next((peer for peer in found.peers if takes(peer.system)), None)
    if other is None or ours not in found.entries:
        return None
    over = found.entries[ours].over(other)
    return statistics.median(over) if over else None


def two_figures(value: float) -> str:
    """1.0 and 0.90, where `.2g` has 1 and 0.9."""
    return f"{value:#.2g}".rstrip(".")


# ---- the parts of the pages


def speed(cells: Sequence[Found]) -> str:
    """The table of README: six benchmarks, those that we lose first, and in how many of all
    flexgen_h2o is slower."""
    head = (
        "Model (prompts, tokens in + out)",
        "RAM",
        "Fastest other system",
        "flexgen_h2o, bf16",
        "Ratio",
    )
    rows = list[tuple[float, list[str]]]()
    for found in _shown(cells):
        ratio = ratio_of(found, FULL)
        best = found.best()
        if ratio is not None and best is not None:
            line = [
                benchmark_words(found),
                _ram(found),
                f"{system_words(best.system)}: {three_figures(best.median('tokens_per_s'))}",
                three_figures(found.entries[FULL].median("tokens_per_s")),
                f"{two_figures(ratio)}x",
            ]
            rows.append((ratio, line))
    lines = [line for _, line in sorted(rows, key=lambda pair: pair[0])]
    return "\n\n".join(["\n".join(markdown_table(head, lines))] * bool(lines) + [_count(cells)])


def _shown(cells: Sequence[Found]) -> list[Found]:
    run = {found.cell.name: found for found in cells if _is_compared(found)}
    return [run[name] for name in SHOWN if name in run]


def _is_compared(found: Found) -> bool:
    return FULL in found.entries and found.best() is not None


def fewer(cells: Sequence[Found]) -> str:
    """The same six benchmarks with fewer bits, by setting."""
    head = (
        "Model (prompts, tokens in + out)",
        "RAM",
        "Setting",
        "tokens/s",
        "Over flexgen_h2o in bf16",
        "Over the fastest other system",
    )
    rows = []
    for found in _shown(cells):
        setting = SHOWN[found.cell.name]
        if setting in found.entries:
            speed = found.entries[setting].median("tokens_per_s")
            gain = statistics.median(found.entries[setting].over(found.entries[FULL]))
            ratio = ratio_of(found, setting)
            assert ratio is not None
            rows.append(
                [
                    benchmark_words(found),
                    _ram(found),
                    FEWER_BITS[setting],
                    three_figures(speed),
                    f"{two_figures(gain)}x",
                    f"{two_figures(ratio)}x",
                ]
            )
    return "\n".join(markdown_table(head, rows)) if rows else "None yet."


def _count(cells: Sequence[Found]) -> str:
    run = [found for found in cells if _is_compared(found)]
    over = [ratio_of(found, FULL) for found in run]
    alike = [ratio_of(found, FULL, CLASSES[0].takes) for found in run]
    return wrapped(
        f"flexgen_h2o is slower than the fastest other system in {_losses_of(over)} of "
        f"{len(run)} benchmarks, and in {_losses_of(alike)} if only other systems in 16 or 32 bits "
        "count."
    )


def _losses_of(ratios: Sequence[float | None]) -> int:
    return sum(ratio is not None and ratio < 1 for ratio in ratios)


def classes(cells: Sequence[Found]) -> str:
    """Ratios by precision: like is compared with like, and the last line with whatever is
    fastest."""
    head = ("Compared", "Benchmarks", "flexgen_h2o is faster in", "Median ratio", "Lowest")
    rows = []
    for one in CLASSES:
        ratios = [x for found in cells if (x := ratio_of(found, one.ours, one.takes)) is not None]
        if ratios:
            faster = len(ratios) - _losses_of(ratios)
            middle = f"{two_figures(statistics.median(ratios))}x"
            least = f"{two_figures(min(ratios))}x"
            rows.append([one.words, str(len(ratios)), str(faster), middle, least])
    return "\n".join(markdown_table(head, rows)) if rows else "None yet."


def benchmarks(cells: Sequence[Found]) -> str:
    """A line for each benchmark that was run, those that we lose first."""
    head = (
        "Model (prompts, tokens in + out)",
        "RAM",
        "flexgen_h2o, tokens/s",
        "Fastest other system",
        "Ratio",
    )
    rows = list[tuple[float, list[str]]]()
    for found in cells:
        best = found.best()
        ratio = ratio_of(found, FULL)
        if best is None or ratio is None:
            continue
        line = [
            benchmark_words(found),
            _ram(found),
            three_figures(found.entries[FULL].median("tokens_per_s")),
            f"{system_words(best.system)}: {three_figures(best.median('tokens_per_s'))}",
            two_figures(ratio) + found.mark(found.entries[FULL]),
        ]
        rows.append((ratio, line))
    if not rows:
        return "None yet."
    table = "\n".join(
        markdown_table(head, [row for _, row in sorted(rows, key=lambda pair: pair[0])])
    )
    waiting = len(cells) - len(rows)
    tried = [len(found.tried[peer.system]) for found in cells for peer in found.peers]
    marks = (
        f"† The speed of the machine itself changed by more than {MOVED:.0%} in at least one "
        "round. "
        f"‡ Fewer than {FEWEST} rounds. In {tried.count(1)} of {len(tried)} cases only one batch "
        "size of the other "
        "system was tried. "
        f"{f'{waiting} more benchmarks are planned and have not been run.' if waiting else ''}"
    )
    return f"{table}\n\n{wrapped(marks.strip())}"


def losses_table(losses: Sequence[quality.Line]) -> str:
    """KL and changed tokens of each setting, least and most over the lengths of the benchmarks."""
    rows = []
    for words, variants in LOSSES:
        found = [line for line in losses if re.fullmatch(variants, line["variant"])]
        usual = [line for line in found if line["model"] == quality.MODEL]
        if found:
            kl = [line["kl"]["value"] for line in usual or found]
            changed = [line["flips"]["value"] for line in usual or found]
            rows.append([words + " \\*" * (not usual), _range(kl, ".2g"), _range(changed, ".0%")])
    if not rows:
        return "None yet."
    return "\n".join(markdown_table(("Setting", "KL, nats", "Tokens that change"), rows))


def _range(values: Sequence[float], form: str) -> str:
    ends = dict.fromkeys((format(min(values), form), format(max(values), form)))
    return " to ".join(ends)


# ---- writing


def parts(cells: Sequence[Found], losses: Sequence[quality.Line]) -> dict[str, str]:
    """Return what the pages have between their marks, by the name of the mark."""
    return {
        "speed": speed(cells),
        "fewer": fewer(cells),
        "classes": classes(cells),
        "benchmarks": benchmarks(cells),
        "losses": losses_table(losses),
    }


def replaced(text: str, made: dict[str, str]) -> str:
    """A page with what stands between its marks made anew. UsageError if it has none."""
    found = False
    for name, part in made.items():
        start, end = (mark.format(name=name) for mark in MARKS)
        before, has_start, rest = text.partition(start)
        _, has_end, after = rest.partition(end)
        if has_start and has_end:
            text = f"{before}{start}\n\n{part}\n\n{end}{after}"
            found = True
    if not found:
        start, end = (mark.format(name="speed") for mark in MARKS)
        raise UsageError(f"no {start} and {end} in the page")
    return text


def made(results: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The parts of the pages, and the pages beside the lines by their names."""
    lines = Store(results / f"{NAME}.jsonl").lines
    losses = quality.read(results)
    signed = [found_of(cell, lines) for cell in SIGNED[NAME]]
    short = [found_of(cell, lines) for cell in SIGNED[SHORT]]
    chosen = (
        "Benchmarks and systems were chosen on {}, before any of them was run ({}); all are shown."
    )
    beside = {
        f"{NAME}.md": details(
            signed, losses, NAME, chosen.format(SIGNED_ON, JOINED_LATER[SIGNED_ON])
        ),
        f"{SHORT}.md": details(
            short, losses, SHORT, chosen.format(SHORT_ON, JOINED_LATER[SHORT_ON])
        ),
    }
    return parts([*signed, *short], losses), beside


def write(results: Path, root: Path = common.ROOT) -> None:
    """Write the pages below `root`, and those beside the lines."""
    of_pages, beside = made(results)
    for name in PAGES:
        write_whole(root / name, replaced((root / name).read_text(), of_pages))
    for name, text in beside.items():
        write_whole(results / name, text)


def main() -> None:
    parser = OneLineParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder with the lines of the signed grid"
    )
    results = parser.parse_args().results
    if not Store(results / f"{NAME}.jsonl").lines:
        raise UsageError(
            f"--results {results}: no {NAME}.jsonl with measurements; give a folder of the signed "
            "grid's"
        )
    write(results)


if __name__ == "__main__":
    sys.exit(common.door(main))

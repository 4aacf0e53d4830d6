"""What eviction is checked over, as data: policies, model shapes, placements, and all other ways to
keep the KV cache small, each run against the slow reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from flexgen_h2o import LLM, SamplingParams
from flexgen_h2o.core.settings import ROLLING
from flexgen_h2o.core.units import WRITE_BACK_STEPS
from flexgen_h2o.kvcache.eviction import Eviction
from tests.eviction import policies as plain
from tests.eviction.engine import PAIRS, Pair, Ran, Wanted, assert_same, cut, run_with, wanted
from tests.eviction.reference import PlainModel
from tests.eviction.rounding import Rotated, Rounded
from tests.parity.cases import CONFIGURATIONS, FAMILY_SHAPES, PLACEMENTS, SHAPES, thinned
from tests.parity.reference import LONG, folder_with_eos, random_prompts, token_that_ends

# One token; a budget of 8 reached only while decoding; filled by the prompt; neighbours of one
# length; longer.
LENGTHS = (1, 4, 8, 9, 9, 21)
NEW_TOKENS = 12
# Three times these six prompts, cut to so many tokens, where rows enter a block that runs; a block
# holds eight at most.
ASKED = (3, 12, 1, 5, 2, 9, 12, 1, 4, 2, 8, 3, 1, 6, 12, 2, 7, 11)
FULL = "full"  # every column stays
KEEPS_ALL = plain.h2o(plain.Budget(heavy_size=200, recent_size=50))

OTHER_SHAPES: dict[str, dict[str, Any]] = {
    "heads of 64": {"hidden_size": 128, "word_embed_proj_dim": 128, "num_attention_heads": 2},
    **{
        f"llama, heads of {width}": {"model_type": "llama", "head_dim": width}
        for width in (64, 80, 96, 128)
    },
    "head width 15": {"hidden_size": 60, "word_embed_proj_dim": 60},
    "three layers": {"num_hidden_layers": 3},
    "long": {"max_position_embeddings": 256},
    "llama, 16 positions": {"model_type": "llama", "max_position_embeddings": 16},
    "qwen2, windows": {
        "model_type": "qwen2",
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}
WINDOWS = "qwen2, windows"
# All layers of these have windows, which leave nothing to a policy.
IN_WINDOWS = (
    "mistral, windows",
    "qwen3, one layer, window filled",
    "gpt_oss, one layer, one expert a token, odd sizes",
)


@dataclass(frozen=True)
class Known:
    """A saved model."""

    folder: Path
    plain: PlainModel
    model: Any  # of transformers


@dataclass(frozen=True)
class Case:
    """One run of the engine, and the run of the reference that it must equal."""

    pair: str = "h2o"  # of PAIRS, or FULL
    shape: str = "normal"
    placement: str = "kv split three ways"
    configuration: str = "device, 2x2"
    lengths: tuple[int, ...] = LENGTHS  # of the prompts
    new: int | tuple[int, ...] = NEW_TOKENS  # of all prompts, or of each
    asked: int | None = None  # new tokens asked for, if the model has fewer positions
    header: int = 0  # tokens that all prompts begin with, fed once
    rolling: bool = False
    bits: int | str | None = None  # of packed columns
    window: int = 16  # the most columns that are whole beside packed ones
    rotated: bool = False
    share: float = 1.0  # of the columns whose values count
    refill: bool = False  # rows enter where others have left
    ends: bool = False  # rows end at an end-of-sequence token

    def __str__(self) -> str:
        return " ".join(
            f"{field.name}={value}".replace(" ", "-")
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        )

    @property
    def both(self) -> Pair:
        """The policy for the engine and for the reference."""
        if self.pair == FULL:
            return Pair(PAIRS["local"].engine, replace(KEEPS_ALL, share=self.share))
        one = PAIRS[self.pair]
        return Pair(replace(one.engine, positions=ROLLING), one.plain) if self.rolling else one

    @property
    def eviction(self) -> Eviction | None:
        return None if self.pair == FULL else self.both.engine

    @property
    def of_reference(self) -> Case:
        """What the reference depends on."""
        return replace(self, placement="", configuration="", asked=None, refill=False, ends=False)

    @property
    def switches(self) -> dict[str, Any]:
        found: dict[str, Any] = {"attn_sparsity": self.share}
        if self.bits is not None:
            found |= {"compress_cache": True, "cache_bits": self.bits}
            found |= {"cache_window": self.window, "cache_rotation": self.rotated}
        return found


def reference_of(case: Case, known: Known) -> Wanted:
    """What the slow reference generates."""
    model: Any = known.plain
    turn = None
    if case.rolling:
        model = type(known.plain)(known.model, rolling=True)  # type: ignore[call-arg]
        turn = model.turn
    kind = Rotated if case.rotated else Rounded
    stored = (lambda: kind(case.bits, case.window)) if case.bits is not None else None  # type: ignore[arg-type]
    for seed in range(77, 90):
        header = random_prompts((case.header,), seed)[0]
        try:
            want = wanted(model, case.both, case.lengths, case.new, stored, turn, header)
        except AssertionError:  # it could not tell right from wrong
            if not case.header:
                raise
            continue
        if case.pair == FULL:  # nothing is recorded of its slots
            return Wanted(want.prompts, [row.without_kept() for row in want.rows])
        return want
    raise AssertionError(f"{case}: no header of these will do")


def run_case(case: Case, want: Wanted, known: Known, folder: Path) -> Ran:
    """Run the engine, and compare tokens, logits and held columns with the reference."""
    model = known.folder
    asked = [case.asked or len(row.tokens) for row in want.rows]
    if case.refill and isinstance(case.new, int):
        want = cut(Wanted(want.prompts * 3, want.rows * 3), ASKED)
        asked = list(ASKED)
    if case.ends:
        eos = token_that_ends(want.tokens)
        ends = [row.index(eos) + 1 if eos in row else len(row) for row in want.tokens]
        assert len(set(ends)) >= 3
        want = cut(want, ends)
        model = folder_with_eos(model, folder / "model", eos)
    chosen = CONFIGURATIONS[case.configuration]
    policy = chosen.policy(PLACEMENTS[case.placement], **case.switches)
    params = [SamplingParams(max_tokens=n) for n in asked]
    with LLM(
        str(model), policy, case.eviction, dtype="float32", budget=chosen.budget, offload_dir=folder
    ) as llm:
        llm.share_prefix = "on" if case.header else "auto"
        ran = run_with(llm, want.prompts, params, case.refill)
    assert_same(want, ran)
    entered = len(want.prompts) - policy.block_size if case.refill else 0
    assert ran.report.extra.get("refilled", 0) == entered
    if case.header:
        one_copy = case.pair == FULL and case.bits is None and case.shape not in IN_WINDOWS
        copied = case.header if one_copy else 0
        assert ran.report.extra["common_prefix"]["tokens"] == copied
        assert ran.report.spared_tokens >= case.header
    return ran


# ---- policies, shapes and placements

KV_PLACEMENTS = [name for name in PLACEMENTS if not name.startswith(("weights", "hidden"))]
# What the decode kernel ranks, what the policy ranks itself, no scores, more slots than needed.
TURNS = (
    "h2o",
    "h2o-norm, one sink",
    "tova",
    "h2o, prompt only",
    "random",
    "h2o, ratios",
    "snapkv",
    "local",
)
NAMES = tuple(CONFIGURATIONS)


def by_shape() -> Iterator[Case]:
    """Every shape with a policy at a place, each in turn."""
    skipped = ("normal", "long", "llama, 16 positions", *IN_WINDOWS)
    shapes = [s for s in (*SHAPES, *OTHER_SHAPES, *FAMILY_SHAPES) if s not in skipped]
    places = ("all on device", "kv split three ways", "kv on disk", "kv on host")
    for i, shape in enumerate(shapes):
        place = places[(i + i // 4) % 4]
        configuration = NAMES[5 * i % len(NAMES)]
        if shape in FAMILY_SHAPES:
            yield Case("h2o", shape, place, configuration, (9, 4), 6)
        else:
            pair = ("h2o", "h2o-norm, one sink", "snapkv, narrow", "tova")[i % 4]
            yield Case(pair, shape, place, configuration)


def by_placement(refill: bool = False) -> Iterator[Case]:
    """Each placement in two configurations, all of these in turn with all pairs.

    Six rows: no block but "one batch" is filled evenly, and most configurations need several.
    """
    for p, placement in enumerate(KV_PLACEMENTS):
        for turn, step in enumerate((1,) if refill else (0, 5)):
            configuration = NAMES[((5 if refill else 1) * p + step) % len(NAMES)]
            pair = TURNS[(p if refill else 2 * p + turn) % len(TURNS)]
            yield Case(pair, placement=placement, configuration=configuration, refill=refill)


ENDING = (17, 3, 9, 9, 1, 12, 5, 9, 2)
FAR = (133, 60, 150, 150, 3)
FAR_PAIRS = ("h2o, many",)  # needs prompts of its own
LAST = tuple(64 - n for n in (0, 1, 3, 4, 6, 54))
LAST_NEW = (1, 2, 4, 5, 7, 12)
SHARES = (1, 4, 8, 9, 9, 21, 2, 5)
# So that equal prompts keep different numbers of columns.
SHARES_NEW = (12, 12, 3, 7, 12, 1, 14, 9)
ON_HOST = "device, 2x3, attends on host"
TWICE_BACK = 2 * WRITE_BACK_STEPS + 5  # fewer slots than steps between two writes to disk

PLACED = [
    # Rows that end: those behind them take their places, with scores, positions, victims and
    # columns that wait for the disk.
    Case("h2o", lengths=ENDING, new=LONG, ends=True),
    Case("tova", "normal", "kv on host and disk", ON_HOST, ENDING, LONG, ends=True),
    Case("random", "llama", "kv on host and disk", new=LONG, ends=True),
    # A slot is overwritten while it waits for the disk.
    Case("h2o", lengths=(5, 1, 20), new=TWICE_BACK),
    Case("h2o, prompt only", "normal", "kv on disk", lengths=(5, 1, 20), new=TWICE_BACK),
    # More slots than a segment, and rows whose budget fills in a later segment.
    Case("h2o, many", "long", "kv on disk", "3x1, joined", FAR, 9),
    # The last position ends a row.
    Case("h2o, ratios", "normal", lengths=LAST, new=LAST_NEW, asked=NEW_TOKENS),
    # Budgets of prompt and new tokens; those beyond the positions do not count.
    Case("h2o, of the sequence", lengths=SHARES, new=SHARES_NEW, refill=True),
    Case("h2o, of the sequence", lengths=(60, 64, 40), new=(5, 1, 25), asked=40),
    # The policy of layers without windows.
    *(Case(pair, WINDOWS) for pair in ("h2o-norm, of the sequence", "local")),
    Case("snapkv", WINDOWS, "kv on disk", refill=True),
    # What windows see, of rows that enter and of rows that begin alike.
    *(Case(FULL, shape, refill=True) for shape in (WINDOWS, "mistral, windows", "gpt_oss")),
    Case(FULL, WINDOWS, "kv on host and disk", header=19, refill=True),
    Case(FULL, "mistral, windows", "kv on host and disk", header=19),
    Case(FULL, "gpt_oss", "kv on disk", header=3, refill=True),
]

# ---- columns that are packed, rolled, not all read, or begin alike

PACKED = [
    Case("h2o", bits=4, lengths=(5, 12, 2, 20, 9), new=2 * WRITE_BACK_STEPS + 3, ends=True),
    Case(FULL, "normal", "kv on disk", lengths=(5, 12, 20), new=WRITE_BACK_STEPS + 3, bits=4),
    Case(FULL, lengths=(5, 4, 8, 9, 12), new=(12, 3, 7, 9, 5), bits=4, refill=True),
    Case("local", "normal", "kv on host", "2x3, attends on host", bits=4),
    Case("snapkv", "normal", "everything split 30/30", "device, 1x4", bits=8),
    Case("random", "normal", "each kind elsewhere", "3x1, joined", bits="4/3", window=8),
    Case("h2o", "llama", "kv on disk", bits="4/3", window=0),
    Case("h2o", "llama", lengths=(9, 4, 8, 9, 21), new=(12, 3, 7, 9, 5), bits=4, refill=True),
    Case(FULL, "head width 15", lengths=(9, 4, 21), bits=4),
    Case(FULL, "long", "kv on disk", lengths=(133, 62), new=5, bits=8),
    Case(FULL, "normal", "kv on host", lengths=(9, 4, 30), bits=3, window=8),
    # A window that is larger than what is recent loses columns that are evicted.
    Case("h2o, one recent", "normal", "kv on host", lengths=(9, 4, 21, 30), bits=3, window=4),
]
ROTATED = [
    Case("h2o", "llama, heads of 64", "kv on host", lengths=(30, 9, 25), bits=4),
    Case("tova", "llama, heads of 80", lengths=(9, 4, 21), bits=4, window=4),
    Case("h2o-norm", "llama, heads of 128", lengths=(13,), bits="4/3", window=8),
    Case(FULL, "head width 15", lengths=(9, 4, 21), bits=4),
    Case("random", "normal", lengths=(1, 4, 9, 9, 3, 14), new=10, bits=8, header=11),
]
ROLLING_CASES = [
    Case("h2o", "llama", "kv on host and disk", ON_HOST, refill=True),
    Case("h2o-norm, one sink", "llama, one kv-head, odd sizes", "kv on host", NAMES[7]),
    Case("h2o", "gpt_neox", "each kind elsewhere"),
    Case("h2o", WINDOWS, "kv on host and disk"),
    Case("snapkv", "llama", header=11),
    Case("local", "gpt_neox", "kv on disk", header=11),
    Case("h2o", "gpt_oss", "kv on disk"),
]
SELECTION = [
    Case(share=0.3, placement="kv on disk", configuration=ON_HOST),
    Case(share=0.5, placement="kv split three ways", refill=True),
    Case(shape="llama", share=0.3, lengths=(9, 1, 14), new=7),
    Case(shape="one layer", share=0.01, lengths=(9, 1, 14), new=7),
    Case(shape="long", placement="kv on disk", share=0.2, lengths=(133, 62), new=4),
    Case(shape=WINDOWS, placement="kv on host", share=0.3, lengths=(9, 14), new=8),
    Case(shape="gpt_oss", placement="kv on host", share=0.3, lengths=(4, 9, 21), new=10),
    Case(share=0.25, lengths=(9, 17), new=8, bits=3, window=4),
]
# Fewer own tokens than the last rows that a policy looks at, and more; neighbours of one length;
# more than the header.
OWN = (1, 4, 9, 9, 3, 14)
HEADED = [
    Case("h2o", "normal", "all on device", lengths=OWN, new=10, header=11),
    Case("snapkv, narrow", "normal", lengths=OWN, new=10, header=11),
    Case("tova", "normal", "everything split 30/30", lengths=OWN, new=10, header=11),
    Case("random", "normal", "kv on host and disk", "3x1, joined", OWN, 10, header=11),
    Case("h2o-norm, one sink", "normal", lengths=OWN, new=10, header=11, bits=8),
    Case("local", "normal", "kv on disk", lengths=OWN, new=10, header=11, bits=8),
]
LEARNED_SINKS = [
    Case("h2o", "gpt_oss", bits=8, lengths=(4, 9, 9, 21), new=10),
    Case("snapkv", "gpt_oss", "all on device", lengths=(4, 9, 21), new=10, header=11),
]

CASES: dict[str, list[Any]] = {
    "every policy": thinned([Case(pair) for pair in PAIRS if pair not in FAR_PAIRS], 2),
    "every shape": list(by_shape()),
    "placements": thinned(by_placement(), 3),
    "rows that enter": thinned(by_placement(refill=True), 4),
    "placed": PLACED,
    "packed": PACKED,
    "rotated": [replace(case, rotated=True) for case in ROTATED],
    "rolling": [replace(case, rolling=True) for case in ROLLING_CASES],
    "selection": [replace(case, pair=FULL) for case in SELECTION],
    "headers": HEADED,
    "learned sinks": LEARNED_SINKS,
}

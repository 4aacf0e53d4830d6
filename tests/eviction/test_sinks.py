"""Learned sinks: a logit of each query head that joins the softmax and has no value, everywhere
that rows attend.

The engine's LLaMA is given them, and the slow reference the same; tests/parity compares gpt-oss
with transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from flexgen_h2o import MemoryBudget, Policy
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.kernels.linear import DenseRows, vector
from flexgen_h2o.kernels.workspace import Workspace
from flexgen_h2o.models import Attention, Weights, llama
from tests.eviction import policies as plain
from tests.eviction.conftest import Known
from tests.eviction.engine import PAIRS, STAND_IN, Pair, Wanted, assert_same, generate, wanted
from tests.eviction.plain_models import PlainLlama
from tests.eviction.reference import evicted_greedy
from tests.eviction.test_packed_cache import FULL, Rounded
from tests.eviction.test_rolling import rolling
from tests.eviction.test_selection import reading
from tests.parity.cases import PLACEMENTS
from tests.parity.reference import random_prompts

LLAMA = "llama"
WINDOWS = "qwen2, windows"
# a norm's weights are 1 +- 0.2: some sinks take most of a row's attention, some next to none
OFTEN = 10.0
LENGTHS = (4, 9, 9, 21)
NEW_TOKENS = 10
EVERY = Pair(
    PAIRS["local"].engine, plain.h2o(plain.Budget(heavy_size=99, recent_size=9))
)  # keeps all


def sinks_of(norm: torch.Tensor, heads: int) -> torch.Tensor:
    """(heads,), of the weights of the norm before attention."""
    return OFTEN * (norm[:heads] - 1)


class WithSinks(PlainLlama):
    def sinks(self, layer: int) -> torch.Tensor:
        norm = self._decoder.layers[layer].input_layernorm.weight
        return sinks_of(norm, self._model.config.num_attention_heads).view(self.kv_heads, -1)


@pytest.fixture(autouse=True)
def _engine_has_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    own = llama.attention

    def attention(spec: ModelSpec, w: Weights, x: torch.Tensor, ws: Workspace) -> Attention:
        sinks = sinks_of(vector(w["input_norm.weight"]), spec.num_heads)
        return own(spec, {**w, "sinks": (DenseRows(sinks),)}, x, ws)

    monkeypatch.setattr(llama, "attention", attention)


@pytest.fixture(scope="module")
def made(known: Callable[[str], Known]) -> Callable[..., Wanted]:
    """What the slow reference generates, by shape, pair and what becomes of columns."""

    @cache
    def reference(shape: str, pair: str, how: str = "", header: int = 0) -> Wanted:
        model = WithSinks(known(shape).model, rolling=how == "rolling")
        pairs = {**PAIRS, FULL: EVERY, "selection": reading(0.3)}
        stored = (lambda: Rounded(8)) if how == "packed" else None
        turn = model.turn if how == "rolling" else None
        for seed in range(78, 90):
            before = random_prompts((header,), seed)[0] if header else ()
            try:
                want = wanted(model, pairs[pair], LENGTHS, NEW_TOKENS, stored, turn, before)
            except AssertionError:  # it could not tell right from wrong
                continue
            return (
                want
                if pair in PAIRS
                else Wanted(want.prompts, [row.without_kept() for row in want.rows])
            )
        raise AssertionError(f"{shape}, {pair}: no header of these will do")

    return reference


def test_sinks_take_their_share(known: Callable[[str], Known], made: Callable[..., Wanted]) -> None:
    """Without them the reference says something else."""
    want = made(LLAMA, FULL)
    without = evicted_greedy(known(LLAMA).plain, want.prompts[1], 1, EVERY.plain)
    assert (without.logits[0] - want.rows[1].logits[0]).abs().max() > 0.5


@pytest.mark.parametrize(
    ("shape", "placement", "switches", "budget"),
    [
        (LLAMA, "all on device", {}, None),
        (LLAMA, "kv split three ways", {"cpu_cache_compute": True}, STAND_IN),
        (LLAMA, "kv on disk", {"overlap": False}, STAND_IN),
        (WINDOWS, "kv split three ways", {}, STAND_IN),
    ],
)
def test_the_full_cache(
    shape: str,
    placement: str,
    switches: dict[str, bool],
    budget: MemoryBudget | None,
    made: Callable[..., Wanted],
    known: Callable[[str], Known],
    tmp_path: Path,
) -> None:
    want = made(shape, FULL)
    policy = Policy(2, 2, PLACEMENTS[placement], **switches)
    assert_same(
        want,
        generate(known(shape).folder, want.prompts, NEW_TOKENS, None, policy, tmp_path, budget),
    )


@pytest.mark.parametrize(
    ("shape", "pair", "placement"),
    [
        (LLAMA, "h2o", "kv split three ways"),
        (LLAMA, "h2o-norm", "kv on disk"),
        (LLAMA, "snapkv", "all on device"),
        (LLAMA, "tova", "kv on host"),
        (LLAMA, "vase", "kv on host and disk"),
        (LLAMA, "h2o-v", "all on device"),
        (WINDOWS, "h2o", "kv on disk"),
        (WINDOWS, "h2o-norm", "kv split three ways"),
    ],
)
def test_policies(
    shape: str,
    pair: str,
    placement: str,
    made: Callable[..., Wanted],
    known: Callable[[str], Known],
    tmp_path: Path,
) -> None:
    """Scores are probabilities that the sinks have taken their share of."""
    want = made(shape, pair)
    policy = Policy(2, 2, PLACEMENTS[placement])
    ran = generate(
        known(shape).folder,
        want.prompts,
        NEW_TOKENS,
        PAIRS[pair].engine,
        policy,
        tmp_path,
        STAND_IN,
    )
    assert_same(want, ran)


@pytest.mark.parametrize("pair", [FULL, "h2o-norm, one sink", "snapkv"])
@pytest.mark.parametrize("shape", [LLAMA, WINDOWS])
def test_rows_that_begin_alike(
    shape: str,
    pair: str,
    made: Callable[..., Wanted],
    known: Callable[[str], Known],
    tmp_path: Path,
) -> None:
    """The full cache holds what all begin with in one copy: a sink counts once, beside both
    parts."""
    want = made(shape, pair, header=11)
    policy = Policy(3, 2, PLACEMENTS["kv on host and disk"])
    eviction = PAIRS[pair].engine if pair in PAIRS else None
    ran = generate(
        known(shape).folder,
        want.prompts,
        NEW_TOKENS,
        eviction,
        policy,
        tmp_path,
        STAND_IN,
        share_prefix="on",
    )
    assert_same(want, ran)
    copied = ran.report.extra["common_prefix"]["tokens"]
    assert copied == (11 if pair == FULL else 0) and ran.report.spared_tokens >= 11


@pytest.mark.parametrize("pair", [FULL, "h2o"])
def test_packed_columns(
    pair: str, made: Callable[..., Wanted], known: Callable[[str], Known], tmp_path: Path
) -> None:
    """The centres of keys are in the products again before a sink joins them."""
    want = made(LLAMA, pair, "packed")
    policy = Policy(2, 2, PLACEMENTS["kv split three ways"], compress_cache=True, cache_bits=8)
    eviction = PAIRS[pair].engine if pair in PAIRS else None
    assert_same(
        want,
        generate(
            known(LLAMA).folder, want.prompts, NEW_TOKENS, eviction, policy, tmp_path, STAND_IN
        ),
    )


def test_rolling_positions(
    made: Callable[..., Wanted], known: Callable[[str], Known], tmp_path: Path
) -> None:
    want = made(LLAMA, "h2o", "rolling")
    policy = Policy(2, 2, PLACEMENTS["kv on disk"])
    ran = generate(
        known(LLAMA).folder,
        want.prompts,
        NEW_TOKENS,
        rolling("h2o").engine,
        policy,
        tmp_path,
        STAND_IN,
    )
    assert_same(want, ran)


def test_selection(
    made: Callable[..., Wanted], known: Callable[[str], Known], tmp_path: Path
) -> None:
    want = made(LLAMA, "selection")
    policy = Policy(2, 2, PLACEMENTS["kv on host"], attn_sparsity=0.3)
    assert_same(
        want,
        generate(known(LLAMA).folder, want.prompts, NEW_TOKENS, None, policy, tmp_path, STAND_IN),
    )

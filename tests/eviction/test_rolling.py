"""Rolling positions: a column's position is its rank among those that its row holds, and rows
outgrow the model's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from flexgen_h2o import LLM, Policy, SamplingParams
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.kvcache.eviction import H2O, Eviction
from flexgen_h2o.kvcache.eviction.policy import ROLLING
from tests.eviction.conftest import Known
from tests.eviction.engine import PAIRS, STAND_IN, Pair, Wanted, assert_same, generate, wanted
from tests.eviction.plain_models import PlainLlama, PlainNeoX
from tests.parity.cases import CONFIGURATIONS, PLACEMENTS
from tests.parity.reference import LOGIT_TOLERANCE, LogitsByRow, random_prompts

LENGTHS = (1, 4, 9, 9, 14)
NEW_TOKENS = 10


def rolling(pair: str) -> Pair:
    return Pair(replace(PAIRS[pair].engine, positions=ROLLING), PAIRS[pair].plain)


@pytest.fixture(scope="module")
def rolled(known: Callable[[str], Known]) -> Callable[..., Wanted]:
    """What the slow reference generates with rolling positions."""

    @cache
    def made(
        shape: str, pair: str, lengths: tuple[int, ...] = LENGTHS, new: int = NEW_TOKENS
    ) -> Wanted:
        kind = PlainNeoX if shape == "gpt_neox" else PlainLlama
        plain = kind(known(shape).model, rolling=True)
        return wanted(plain, PAIRS[pair], lengths, new, turn=plain.turn)

    return made


@pytest.mark.parametrize(
    ("shape", "pair", "configuration", "placement"),
    [
        ("llama", "h2o", "device, 2x2", "kv split three ways"),
        ("llama", "h2o", "device, 2x3, attends on host", "kv on host and disk"),
        ("llama", "local", "one batch, sequential", "kv on disk"),
        ("llama", "h2o, of the sequence", "device, 2x2", "kv on host"),
        (
            "llama, one kv-head, odd sizes",
            "h2o-norm, one sink",
            "device, 2x3, sequential",
            "kv on host",
        ),
        ("llama, rope yarn", "tova", "3x1, joined", "kv on disk"),
        ("qwen3", "h2o", "2x2", "kv on disk"),
        ("gpt_neox", "h2o", "device, 2x2", "each kind elsewhere"),
    ],
)
def test_equal_to_the_reference(
    shape: str,
    pair: str,
    configuration: str,
    placement: str,
    known: Callable[[str], Known],
    rolled: Callable[..., Wanted],
    tmp_path: Path,
) -> None:
    want = rolled(shape, pair)
    chosen = CONFIGURATIONS[configuration]
    how = rolling(pair)
    policy = chosen.policy(PLACEMENTS[placement])
    ran = generate(
        known(shape).folder, want.prompts, NEW_TOKENS, how.engine, policy, tmp_path, chosen.budget
    )
    assert_same(want, ran)


def test_keys_of_many_rows_are_turned_some_at_a_time(
    known: Callable[[str], Known],
    rolled: Callable[..., Wanted],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "flexgen_h2o.kvcache.decode.ROLLING_CHUNK", 3 * 9 * 24
    )  # three rows of nine slots
    want = rolled("llama", "h2o")
    ran = generate(
        known("llama").folder, want.prompts, NEW_TOKENS, rolling("h2o").engine, Policy(5), tmp_path
    )
    assert_same(want, ran)


# 16 positions
SHORT = "llama, 16 positions"
LONG = (12, 9, 5)


def test_rows_outgrow_the_positions(
    known: Callable[[str], Known], rolled: Callable[..., Wanted], tmp_path: Path
) -> None:
    """24 tokens after 12, 9 and 5, with 16 positions; with original ones a row ends when they are
    used up."""
    want = rolled(SHORT, "h2o", LONG, 24)
    policy = Policy(2, 1, PLACEMENTS["kv on disk"])
    ran = generate(
        known(SHORT).folder, want.prompts, 24, rolling("h2o").engine, policy, tmp_path, STAND_IN
    )
    assert_same(want, ran)
    original = generate(
        known(SHORT).folder, want.prompts, 24, PAIRS["h2o"].engine, policy, tmp_path, STAND_IN
    )
    assert [len(row) for row in original.tokens] == [5, 8, 12]


@pytest.mark.parametrize(
    "keeps", [{"heavy_size": 10, "recent_size": 8}, {"heavy_size": 2, "while_decoding": False}]
)
def test_a_row_that_holds_as_many_columns_as_there_are_positions_ends(
    keeps: dict[str, int], known: Callable[[str], Known], tmp_path: Path
) -> None:
    """Nobody else's rows end with it."""
    eviction = H2O(**keeps, positions=ROLLING)
    prompts = random_prompts((5, 3))
    kept = 5 if keeps["heavy_size"] == 10 else 4
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (60, 4)]
    with LLM(
        str(known(SHORT).folder), Policy(2), eviction, dtype="float32", offload_dir=tmp_path
    ) as llm:
        found = llm.generate(prompts, params)
    assert [len(row.token_ids) for row in found] == [16 - kept + 1, 4]
    assert [row.finish_reason for row in found] == ["length", "length"]


def test_teacher_forcing_outgrows_the_positions_too(
    known: Callable[[str], Known], rolled: Callable[..., Wanted], tmp_path: Path
) -> None:
    want = rolled(SHORT, "h2o", LONG, 24)
    watch = LogitsByRow()
    model = str(known(SHORT).folder)
    with LLM(model, Policy(1), rolling("h2o").engine, dtype="float32", offload_dir=tmp_path) as llm:
        llm.follow(want.prompts, want.tokens, watch)
    for i, row in enumerate(want.rows):
        assert (torch.stack(watch.rows[i]) - row.logits).abs().max() <= LOGIT_TOLERANCE


@pytest.mark.parametrize(
    ("shape", "eviction", "policy", "says"),
    [
        (
            "normal",
            H2O(positions=ROLLING),
            Policy(1),
            "needs rotary embeddings, and .* has learned positions",
        ),
        (
            "llama",
            H2O(positions=ROLLING),
            Policy(1, compress_cache=True),
            "leave out --compress-cache",
        ),
    ],
)
def test_what_cannot_roll(
    shape: str,
    eviction: Eviction,
    policy: Policy,
    says: str,
    known: Callable[[str], Known],
    tmp_path: Path,
) -> None:
    llm = LLM(str(known(shape).folder), policy, eviction, offload_dir=tmp_path)
    with llm, pytest.raises(UsageError, match=f"--positions rolling: .*{says}"):
        llm.generate(random_prompts((5,)), SamplingParams(max_tokens=30))

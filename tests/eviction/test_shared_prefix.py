"""Eviction where rows share a prefix: scores, kept columns and victims are those of whole
prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.eviction.conftest import Known
from tests.eviction.engine import PAIRS, Pair, Ran, Wanted, assert_same, generate, wanted
from tests.eviction.plain_models import PlainLlama, PlainNeoX
from tests.eviction.test_packed_cache import Rotated, Rounded
from tests.eviction.test_rolling import rolling
from tests.parity.cases import CONFIGURATIONS, PLACEMENTS, thinned
from tests.parity.reference import random_prompts

HEADER = 11
# Fewer own tokens than the last rows that a policy looks at, and more; neighbours of one length;
# more than the header.
OWN = (1, 4, 9, 9, 3, 14)
NEW_TOKENS = 10
WHERE = (
    "all on device",
    "kv split three ways",
    "kv on disk",
    "everything split 30/30",
    "kv on host and disk",
)


@pytest.fixture(scope="module")
def headed(known: Callable[[str], Known]) -> Callable[..., Wanted]:
    """What the slow reference generates on prompts that begin alike, by shape, pair, and what
    becomes of columns."""

    @cache
    def made(shape: str, pair: str, how: str = "") -> Wanted:
        plain = known(shape).plain
        if how == "rolling":
            plain = (PlainNeoX if shape == "gpt_neox" else PlainLlama)(
                known(shape).model, rolling=True
            )
        stored = {"packed": lambda: Rounded(8), "rotated": lambda: Rotated(8)}.get(how)
        turn = plain.turn if how == "rolling" else None
        for seed in range(77, 90):
            header = random_prompts((HEADER,), seed)[0]
            try:
                return wanted(plain, PAIRS[pair], OWN, NEW_TOKENS, stored, turn, header)
            except AssertionError:  # it could not tell right from wrong
                continue
        raise AssertionError(f"{shape}, {pair}: no header of these will do")

    return made


def check(
    want: Wanted,
    pair: Pair,
    folder: Path,
    where: tuple[str, str],
    offload_dir: Path,
    **switches: object,
) -> Ran:
    placement, configuration = where
    chosen = CONFIGURATIONS[configuration]
    policy = chosen.policy(PLACEMENTS[placement], **switches)
    ran = generate(
        folder,
        want.prompts,
        NEW_TOKENS,
        pair.engine,
        policy,
        offload_dir,
        chosen.budget,
        share_prefix="on",
    )
    assert_same(want, ran)
    return ran


def places() -> Iterator[tuple[str, str]]:
    """(placement, configuration) in turn; micro-batches of at least two rows."""
    names = [name for name, one in CONFIGURATIONS.items() if one.gbs > 1]
    turn = 0
    while True:
        yield WHERE[turn % len(WHERE)], names[turn % len(names)]
        turn += 1


PLACES = places()
# Of each policy, and with prefixes shorter and longer than the rows that are scored.
SCORED = (
    "h2o",
    "h2o, ratios",
    "h2o, prompt only",
    "local",
    "h2o-norm, one sink",
    "tova",
    "snapkv",
    "snapkv, narrow",
    "h2o-v, two sinks",
    "random",
    "h2o, of the sequence",
    "h2o-norm",
    "vase",
    "triattention",
)


@pytest.mark.parametrize(("pair", "where"), thinned([(pair, next(PLACES)) for pair in SCORED], 2))
def test_every_policy(
    pair: str,
    where: tuple[str, str],
    known: Callable[[str], Known],
    headed: Callable[..., Wanted],
    tmp_path: Path,
) -> None:
    ran = check(headed("normal", pair), PAIRS[pair], known("normal").folder, where, tmp_path)
    saved = len(OWN) * HEADER + sum(OWN) - ran.report.extra["prefill_fed_tokens"]
    assert saved >= HEADER


@pytest.mark.parametrize(
    ("shape", "pair", "where"),
    [
        (shape, pair, next(PLACES))
        for shape, pair in (
            ("post-norm, narrow embedding (350m)", "snapkv"),
            ("llama", "h2o-norm, one sink"),
            ("gpt_neox", "snapkv"),
            ("llama", "triattention"),
        )
    ],
)
def test_other_families(
    shape: str,
    pair: str,
    where: tuple[str, str],
    known: Callable[[str], Known],
    headed: Callable[..., Wanted],
    tmp_path: Path,
) -> None:
    check(headed(shape, pair), PAIRS[pair], known(shape).folder, where, tmp_path)


@pytest.mark.parametrize(
    ("shape", "pair", "where"),
    [
        (shape, pair, next(PLACES))
        for shape, pair in (("llama", "h2o"), ("llama", "snapkv"), ("gpt_neox", "local"))
    ],
)
def test_rolling_positions(
    shape: str,
    pair: str,
    where: tuple[str, str],
    known: Callable[[str], Known],
    headed: Callable[..., Wanted],
    tmp_path: Path,
) -> None:
    """Keys of the prefix are kept as they were before they turned."""
    check(headed(shape, pair, "rolling"), rolling(pair), known(shape).folder, where, tmp_path)


@pytest.mark.parametrize(
    ("pair", "where", "how"),
    [
        (pair, next(PLACES), how)
        for pair, how in (("h2o-v", "packed"), ("local", "packed"), ("h2o-v", "rotated"))
    ],
)
def test_a_compressed_cache(
    pair: str,
    where: tuple[str, str],
    how: str,
    known: Callable[[str], Known],
    headed: Callable[..., Wanted],
    tmp_path: Path,
) -> None:
    switches = {"compress_cache": True, "cache_bits": 8, "cache_rotation": how == "rotated"}
    check(
        headed("normal", pair, how),
        PAIRS[pair],
        known("normal").folder,
        where,
        tmp_path,
        **switches,
    )

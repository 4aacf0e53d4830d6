"""--attn-sparsity against the slow reference, in fp32: placements, families, packed KV,
segments."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from flexgen_h2o import MemoryBudget, Policy
from tests.eviction import policies as plain
from tests.eviction.conftest import LENGTHS, NEW_TOKENS, Known
from tests.eviction.engine import PAIRS, STAND_IN, Pair, Wanted, assert_same, generate, wanted
from tests.eviction.test_packed_cache import FAR, Rounded
from tests.parity.cases import CONFIGURATIONS, PLACEMENTS, thinned
from tests.parity.reference import LOGIT_TOLERANCE


def reading(share: float) -> Pair:
    """All columns, of which this share counts; the engine's policy is not used."""
    return Pair(PAIRS["local"].engine, plain.replace(plain.h2o(FAR), share=share))


@pytest.fixture(scope="module")
def selected(known: Callable[[str], Known]) -> Callable[..., Wanted]:
    @cache
    def made(
        shape: str,
        share: float,
        lengths: tuple[int, ...] = LENGTHS,
        bits: int | str = 0,
        window: int = 16,
        new: int = NEW_TOKENS,
    ) -> Wanted:
        stored = (lambda: Rounded(bits, window)) if bits else None
        want = wanted(known(shape).plain, reading(share), lengths, new, stored)
        return Wanted(want.prompts, [row.without_kept() for row in want.rows])

    return made


def check(
    want: Wanted, folder: Path, policy: Policy, offload: Path, budget: MemoryBudget | None
) -> None:
    assert_same(
        want,
        generate(folder, want.prompts, max(map(len, want.tokens)), None, policy, offload, budget),
    )


NAMES = list(CONFIGURATIONS)
PLANE = [(placement, NAMES[(5 * p + 2) % len(NAMES)]) for p, placement in enumerate(PLACEMENTS)]


@pytest.mark.parametrize(("placement", "configuration"), thinned(PLANE, 3))
def test_every_placement(
    placement: str,
    configuration: str,
    known: Callable[[str], Known],
    selected: Callable[..., Wanted],
    tmp_path: Path,
) -> None:
    chosen = CONFIGURATIONS[configuration]
    policy = chosen.policy(PLACEMENTS[placement], attn_sparsity=0.3)
    check(selected("normal", 0.3), known("normal").folder, policy, tmp_path, chosen.budget)


@pytest.mark.parametrize(
    ("shape", "share", "placement"),
    [
        ("llama", 0.3, "kv split three ways"),
        ("llama, one kv-head, odd sizes", 0.5, "kv on host"),
        ("gpt_neox", 0.2, "kv on disk"),
        ("head width 15", 0.4, "kv split three ways"),
        ("post-norm, narrow embedding (350m)", 0.3, "kv on host"),
        ("one layer", 0.01, "all on device"),
    ],
)
def test_shapes(
    shape: str,
    share: float,
    placement: str,
    known: Callable[[str], Known],
    selected: Callable[..., Wanted],
    tmp_path: Path,
) -> None:
    policy = Policy(2, 2, PLACEMENTS[placement], attn_sparsity=share)
    check(
        selected(shape, share, (9, 1, 14), new=7), known(shape).folder, policy, tmp_path, STAND_IN
    )


@pytest.mark.parametrize(
    ("bits", "window", "placement"),
    [
        (3, 4, "kv split three ways"),
        (3, 0, "kv on disk"),
        pytest.param("4/3", 4, "kv split three ways", marks=pytest.mark.slow),
        pytest.param(
            4, 16, "kv on host", marks=pytest.mark.slow
        ),  # loops of their own, as in tests/unit/kernels
        pytest.param(8, 0, "kv on disk", marks=pytest.mark.slow),
    ],
)
def test_packed_columns(
    bits: int | str,
    window: int,
    placement: str,
    known: Callable[[str], Known],
    selected: Callable[..., Wanted],
    tmp_path: Path,
) -> None:
    switches = {"compress_cache": True, "cache_bits": bits, "cache_window": window}
    policy = Policy(2, 2, PLACEMENTS[placement], attn_sparsity=0.25, **switches)
    check(
        selected("normal", 0.25, (9, 17), bits, window, 8),
        known("normal").folder,
        policy,
        tmp_path,
        STAND_IN,
    )


@pytest.mark.parametrize(("placement", "budget"), [("kv on host", None), ("kv on disk", STAND_IN)])
def test_more_columns_than_a_block(
    placement: str,
    budget: MemoryBudget | None,
    known: Callable[[str], Known],
    selected: Callable[..., Wanted],
    tmp_path: Path,
) -> None:
    """And than a segment, where they are brought from another tier."""
    policy = Policy(2, 1, PLACEMENTS[placement], attn_sparsity=0.2)
    check(selected("long", 0.2, (133, 62), new=4), known("long").folder, policy, tmp_path, budget)


def test_a_share_of_almost_all_leaves_one_out(
    known: Callable[[str], Known], tmp_path: Path
) -> None:
    """Of each query: less than the least probability is lost."""
    found = []
    for share in (1.0, 0.999):
        policy = Policy(2, 2, PLACEMENTS["kv split three ways"], attn_sparsity=share)
        ran = generate(
            known("normal").folder, [[5, 9, 11, 7], [8]], 6, None, policy, tmp_path, STAND_IN
        )
        found.append(torch.stack(ran.logits[0]))
    assert (found[0][0] - found[1][0]).abs().max() <= LOGIT_TOLERANCE  # of the prompt
    assert (found[0] - found[1]).abs().max() > LOGIT_TOLERANCE

"""Compressed KV: the engine against full attention over columns that were rounded as they were
written, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from flexgen_h2o import Policy
from flexgen_h2o.core.config import MemoryBudget
from flexgen_h2o.core.units import WRITE_BACK_STEPS
from flexgen_h2o.kvcache.eviction import Eviction
from tests.eviction import policies as plain
from tests.eviction.conftest import LENGTHS, NEW_TOKENS, Known
from tests.eviction.engine import PAIRS, STAND_IN, Pair, Wanted, assert_same, cut, generate, wanted
from tests.eviction.reference import hadamard_matrix
from tests.parity.cases import CONFIGURATIONS, PLACEMENTS, Configuration, thinned
from tests.parity.reference import LOGIT_TOLERANCE, folder_with_eos, random_prompts, token_that_ends

FAR = plain.Budget(heavy_size=200, recent_size=50)
FULL = "full"
ALL = {
    **PAIRS,
    FULL: Pair(PAIRS["local"].engine, plain.h2o(FAR)),
}  # of a budget that nothing reaches
GROUP = 64
# How far the engine's columns may be from the reference's, in parts of the largest number: in the
# first layer, and more in each further one. Of all models here the standard deviation is at most a
# 2.6th of that, mostly a 4th (if both are off from fp64 on their own, as much as the reference is).
FIRST_OFF = 2e-7
MORE_OFF = 4.5e-7
OWN_OFF = 2.0**-23  # of the arithmetic of rounding itself, in parts of each number
HARMLESS = LOGIT_TOLERANCE / 2  # that numbers move by


class Rounded:
    """Columns as a cache of `bits` bits ("4/3": keys in 4, values in 3) gives them back, by the
    format's words: in groups along the width, each with its least and its step in bf16, rounded
    outwards; keys less the middle of their channel in the prompt and over its range, both in bf16.
    The newest are whole: `most` of them, or as many fours as half of the slots has.

    is_near: what differs by no more than products of matrices do elsewhere may be rounded
    otherwise, and move a column that is read. edges: how many times as far.
    """

    def __init__(self, bits: int | str, most: int = 16, edges: float = 1.0) -> None:
        keys, _, values = str(bits).partition("/")
        self.key_bits = int(keys)
        self.value_bits = int(values or keys)
        self.most = most
        self.is_near = False
        self.edges = edges

    def window(self, slots: int) -> int:
        return min(self.most, slots // 2) // 4 * 4

    def columns(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, prompt_len: int, read: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        off = self.edges * (FIRST_OFF + layer * MORE_OFF)
        of_keys = float(k.abs().max()) * off
        of_values = float(v.abs().max()) * off
        read = read[..., None]
        values = self._groups(
            v, torch.full_like(v, of_values), torch.ones_like(v), self.value_bits, read
        )
        return self._keys(k, of_keys, prompt_len, read), values

    def _keys(
        self, k: torch.Tensor, off: float, prompt_len: int, read: torch.Tensor
    ) -> torch.Tensor:
        most = k[:, :prompt_len].amax(1, keepdim=True)
        least = k[:, :prompt_len].amin(1, keepdim=True)
        sizes = most - least
        sizes = torch.maximum(sizes, sizes.mean(-1, keepdim=True) / 16)
        sizes = torch.where(sizes > 0, sizes, 1.0)
        # of two numbers, each off on its own
        of_heads = read.any(1, keepdim=True)
        of_two = off * 2**0.5
        middle, moves = self._rounded(nearest, (most + least) / 2, of_two / 2, of_heads)
        sizes, _ = self._rounded(nearest, sizes, of_two * (prompt_len > 1), of_heads)
        every = sizes.expand_as(k)
        return (
            self._groups((k - middle) / sizes, (off + moves) / every, every, self.key_bits, read)
            * sizes
            + middle
        )

    def _groups(
        self, x: torch.Tensor, off: torch.Tensor, sizes: torch.Tensor, bits: int, read: torch.Tensor
    ) -> torch.Tensor:
        count = -(-x.shape[-1] // GROUP)
        parts = zip(
            x.chunk(count, dim=-1),
            off.chunk(count, dim=-1),
            sizes.chunk(count, dim=-1),
            strict=True,
        )
        return torch.cat([self._group(a, b, c, bits, read) for a, b, c in parts], dim=-1)

    def _group(
        self, x: torch.Tensor, off: torch.Tensor, sizes: torch.Tensor, bits: int, read: torch.Tensor
    ) -> torch.Tensor:
        levels = 2**bits - 1
        largest = sizes.amax(-1, keepdim=True)

        def least_of(y: torch.Tensor) -> torch.Tensor:
            return outwards(y.amin(-1, keepdim=True), down=True)

        def step_of(y: torch.Tensor) -> torch.Tensor:
            return outwards((y.amax(-1, keepdim=True) - least) / levels, down=False)

        least, moves = self._rounded(least_of, x, off, read, largest)
        off = off + moves
        step, moves = self._rounded(step_of, x, off, read, levels * largest)
        off = off + levels * moves
        codes, _ = self._rounded(
            lambda y: ((y - least) / step + 0.5).floor(), x, off, read, step * sizes
        )
        return least + step * codes

    def _rounded(
        self,
        how: Callable[[torch.Tensor], torch.Tensor],
        x: torch.Tensor,
        off: torch.Tensor | float,
        read: torch.Tensor,
        size: torch.Tensor | float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What x is rounded to, and how much higher that is for the highest than for the lowest
        that x may be; by `how`, which never falls where numbers rise. size: of one, in a column."""
        off = off + x.abs() * OWN_OFF
        moves = how(x + off) - how(x - off)
        self.is_near |= bool(((moves * size > HARMLESS) & read).any())
        return how(x), moves


class Rotated(Rounded):
    """Columns that are multiplied by the Hadamard matrix, rounded as they are then, and multiplied
    back."""

    def columns(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, prompt_len: int, read: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        matrix = hadamard_matrix(k.shape[-1])
        rotated = ((x.double() @ matrix).float() for x in (k, v))
        keys, values = super().columns(layer, *rotated, prompt_len, read)
        return tuple((x.double() @ matrix.T).float() for x in (keys, values))  # type: ignore[return-value]

    def _keys(
        self, k: torch.Tensor, off: float, prompt_len: int, read: torch.Tensor
    ) -> torch.Tensor:
        return self._groups(k, torch.full_like(k, off), torch.ones_like(k), self.key_bits, read)


def nearest(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def outwards(x: torch.Tensor, down: bool) -> torch.Tensor:
    """The next bf16 number that is not above x, or not below it."""
    near = x.bfloat16().float()
    bits = near.view(torch.int32)
    away = (near < 0) == down  # one bf16 number further that way
    beyond = (near > x) if down else (near < x)
    return torch.where(beyond, bits + torch.where(away, 65536, -65536).int(), bits).view(
        torch.float32
    )


@pytest.fixture(scope="module")
def packed(known: Callable[[str], Known]) -> Callable[..., Wanted]:
    @cache
    def made(
        shape: str,
        pair: str,
        bits: int | str,
        lengths: tuple[int, ...] = LENGTHS,
        new: int = NEW_TOKENS,
        most: int = 16,
        rotated: bool = False,
    ) -> Wanted:
        kind = Rotated if rotated else Rounded
        return wanted(known(shape).plain, ALL[pair], lengths, new, lambda: kind(bits, most))

    return made


def eviction(pair: str) -> Eviction | None:
    return None if pair == FULL else ALL[pair].engine


def check(
    want: Wanted,
    pair: str,
    folder: Path,
    policy: Policy,
    offload: Path,
    budget: MemoryBudget | None,
) -> None:
    ran = generate(
        folder, want.prompts, max(map(len, want.tokens)), eviction(pair), policy, offload, budget
    )
    if pair == FULL:  # nothing is recorded of its slots
        want = Wanted(want.prompts, [r.without_kept() for r in want.rows])
    assert_same(want, ran)


NAMES = list(CONFIGURATIONS)
PLANE = [
    (pair, placement, NAMES[(p + 3 * i) % len(NAMES)])
    for i, pair in enumerate((FULL, "h2o", "tova", "local", "snapkv", "h2o-v"))
    for p, placement in enumerate(PLACEMENTS)
    if p % 6 == i
]


@pytest.mark.parametrize(("pair", "placement", "configuration"), thinned(PLANE, 2))
def test_four_bits_on_every_placement(
    pair: str,
    placement: str,
    configuration: str,
    known: Callable[[str], Known],
    packed: Callable[..., Wanted],
    tmp_path: Path,
) -> None:
    chosen: Configuration = CONFIGURATIONS[configuration]
    policy = chosen.policy(PLACEMENTS[placement], compress_cache=True)
    check(packed("normal", pair, 4), pair, known("normal").folder, policy, tmp_path, chosen.budget)


@pytest.mark.parametrize(
    ("shape", "pair", "bits", "placement"),
    thinned(
        [
            ("one layer", "h2o", 8, "kv on host"),
            ("head width 15", FULL, 4, "kv split three ways"),
            ("llama, one kv-head, odd sizes", FULL, 4, "kv split three ways"),
            ("llama", "h2o", "4/3", "kv on disk"),
            ("qwen3", "h2o", 4, "kv split three ways"),
            ("qwen3_moe", "h2o", 4, "kv on disk"),
            ("gpt_oss", FULL, 8, "kv split three ways"),
            ("gpt_oss", "h2o", 4, "kv on disk"),
            ("gpt_oss", "h2o-norm", 8, "kv on host"),
            ("llama", "triattention", 4, "kv split three ways"),
        ],
        2,
    ),
)
def test_other_shapes_and_bits(
    shape: str,
    pair: str,
    bits: int | str,
    placement: str,
    known: Callable[[str], Known],
    packed: Callable[..., Wanted],
    tmp_path: Path,
) -> None:
    policy = Policy(2, 2, PLACEMENTS[placement], compress_cache=True, cache_bits=bits)
    check(
        packed(shape, pair, bits, (9, 4, 21)), pair, known(shape).folder, policy, tmp_path, STAND_IN
    )


@pytest.mark.parametrize(
    ("pair", "bits", "window", "placement"),
    thinned(
        [
            ("h2o", "4/3", 0, "kv on disk"),
            ("h2o", 3, 4, "kv split three ways"),
            (FULL, 3, 8, "kv on host"),
            (FULL, 3, 16, "kv split three ways"),
            ("h2o-norm", 3, 4, "kv on disk"),
            ("h2o, one recent", 4, 4, "kv on host"),
            ("h2o-norm", "4/3", 8, "kv split three ways"),
            ("h2o", 4, 4, "kv on disk"),
            ("h2o-norm", "4/3", 0, "kv on host"),
        ],
        2,
    ),
)
def test_windows_and_few_bits(
    pair: str,
    bits: int | str,
    window: int,
    placement: str,
    known: Callable[[str], Known],
    packed: Callable[..., Wanted],
    tmp_path: Path,
) -> None:
    """A window that is larger than what is recent loses columns that are evicted."""
    policy = Policy(
        2, 2, PLACEMENTS[placement], compress_cache=True, cache_bits=bits, cache_window=window
    )
    want = packed("normal", pair, bits, (9, 4, 21, 30), NEW_TOKENS, window)
    check(want, pair, known("normal").folder, policy, tmp_path, STAND_IN)


@pytest.mark.parametrize(
    ("shape", "pair", "bits", "window", "lengths", "placement"),
    [
        ("heads of 64", FULL, 4, 16, (9, 4, 21), "kv split three ways"),
        ("heads of 64", "h2o", 3, 4, (9, 4, 21), "kv on disk"),
        ("llama, heads of 64", "h2o", 4, 16, (30, 9, 25), "kv on host"),
        ("llama, heads of 128", FULL, 8, 0, (9, 4, 21), "kv on disk"),
        ("llama, heads of 128", "h2o-norm", "4/3", 8, (13,), "all on device"),
        ("llama, heads of 80", "tova", 4, 4, (9, 4, 21), "kv split three ways"),
        ("llama, heads of 96", "snapkv", 3, 8, (30, 5), "kv on disk"),
        ("llama, heads of 96", FULL, "4/3", 16, (30, 5), "kv on host"),
        ("normal", "h2o-v", 4, 4, (9, 4, 21), "kv on host"),
        ("llama, heads of 64", "vase", 4, 4, (9, 4, 21), "kv on disk"),
        ("normal", "h2o-norm", "4/3", 8, (9, 4, 21, 30), "kv split three ways"),
        ("head width 15", FULL, 4, 16, (9, 4, 21), "kv split three ways"),
        ("gpt_oss", "h2o", 4, 16, (9, 4, 21), "kv on disk"),
        ("qwen3_moe", "h2o", 4, 16, (9, 4, 21), "kv on disk"),
    ],
)
def test_rotated_columns(
    shape: str,
    pair: str,
    bits: int | str,
    window: int,
    lengths: tuple[int, ...],
    placement: str,
    known: Callable[[str], Known],
    packed: Callable[..., Wanted],
    tmp_path: Path,
) -> None:
    policy = Policy(
        2,
        2,
        PLACEMENTS[placement],
        compress_cache=True,
        cache_bits=bits,
        cache_window=window,
        cache_rotation=True,
    )
    want = packed(shape, pair, bits, lengths, NEW_TOKENS, window, True)
    check(want, pair, known(shape).folder, policy, tmp_path, STAND_IN)


@pytest.mark.parametrize(("pair", "budget"), thinned([("h2o", None), (FULL, STAND_IN)], 2))
def test_rows_that_end_while_columns_wait_for_the_disk(
    pair: str,
    budget: MemoryBudget | None,
    known: Callable[[str], Known],
    packed: Callable[..., Wanted],
    tmp_path: Path,
) -> None:
    """Compaction, the overlay, and more than one write-back."""
    whole = packed("normal", pair, 4, (5, 12, 2, 20, 9), 2 * WRITE_BACK_STEPS + 3)
    eos = token_that_ends(whole.tokens)
    want = cut(whole, [row.index(eos) + 1 if eos in row else len(row) for row in whole.tokens])
    assert len({len(row) for row in want.tokens}) >= 3
    folder = folder_with_eos(known("normal").folder, tmp_path / "model", eos)
    for name in ("kv on disk", "kv split three ways"):
        check(
            want,
            pair,
            folder,
            Policy(3, 2, PLACEMENTS[name], compress_cache=True),
            tmp_path,
            budget,
        )


def test_more_slots_than_a_segment(
    known: Callable[[str], Known], packed: Callable[..., Wanted], tmp_path: Path
) -> None:
    policy = Policy(2, 1, PLACEMENTS["kv on disk"], compress_cache=True, cache_bits=8)
    check(
        packed("long", FULL, 8, (133, 62), 5),
        FULL,
        known("long").folder,
        policy,
        tmp_path,
        STAND_IN,
    )


@pytest.mark.parametrize(("bits", "pair"), [(8, None), (4, "h2o")])
def test_bytes_held_are_those_of_packed_slots(
    bits: int, pair: str | None, known: Callable[[str], Known], tmp_path: Path
) -> None:
    """Heads of 12: 2 or 3 words and one for the group, in place of 12."""
    facts = []
    for policy in (Policy(3, 1), Policy(3, 1, compress_cache=True, cache_bits=bits)):
        engine = None if pair is None else PAIRS[pair].engine
        ran = generate(
            known("normal").folder, random_prompts((20, 5, 9)), 6, engine, policy, tmp_path
        )
        facts.append((ran.report.kv, ran.report.extra["kv_reserved_bytes"]))
    (whole, reserved), (small, packed_reserved) = facts
    words = {4: 2 + 1, 8: 3 + 1}[bits]
    assert small["slots"] == whole["slots"] and small["full_bytes"] == whole["full_bytes"]
    assert small["bytes"] > whole["bytes"] * words // 12  # by windows, centres and ranges
    assert packed_reserved < reserved


def test_bf16_runs(known: Callable[[str], Known], tmp_path: Path) -> None:
    """On every tier the same tokens as in one place."""
    found = []
    for name in ("all on device", "kv on disk", "kv split three ways"):
        policy = Policy(2, 2, PLACEMENTS[name], compress_cache=True)
        ran = generate(
            known("normal").folder,
            random_prompts(LENGTHS),
            9,
            None,
            policy,
            tmp_path,
            STAND_IN,
            "bfloat16",
        )
        found.append(ran.tokens)
    assert found[0] == found[1] == found[2]

"""Rows that begin alike give what they give alone: transformers' tokens and logits, wherever they
lie. What only some share is fed once a micro-batch, and what all share has its KV in one copy."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterator
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from flexgen_h2o import LLM, Policy, SamplingParams
from flexgen_h2o.core.config import DTYPE_BYTES
from flexgen_h2o.engine.sequence import Sequence, with_params
from flexgen_h2o.kvcache.eviction import H2O
from tests.parity.cases import (
    BASE,
    CONFIGURATIONS,
    FAMILY_SHAPES,
    PLACEMENTS,
    SHAPES,
    thinned,
)
from tests.parity.conftest import NEW_TOKENS, SEEDS
from tests.parity.reference import (
    LOGIT_TOLERANCE,
    LONG,
    LogitsByRow,
    Reference,
    greedy,
    make_reference,
    opened,
    random_model,
    random_prompts,
    token_that_ends,
    tokens_of,
)

HEADER = 13
# Two headers that begin with the same three tokens, a prompt with neither, two that are equal, one
# that another begins with, and one of a single token.
HEADERS = (13, 10)
OTHERS = (4, 6)


def all_alike(seed: int) -> list[list[int]]:
    """A header; two equal prompts, three that share more than the header, one that is the beginning
    of another."""
    header, more = random_prompts((HEADER, 4), seed)
    owns = random_prompts((3, 1, 6, 2, 9, 1, 5), seed + 1)
    owns[3:6] = [[*more, *own] for own in owns[3:6]]
    for i in range(3):  # they share nothing behind the header
        owns[i][0] = 5 + i
    prompts = [[*header, *own] for own in owns]
    return [*prompts, prompts[0], prompts[2][:-2]]


def some_alike(seed: int) -> list[list[int]]:
    first, second = random_prompts(HEADERS, seed)
    second[:3] = first[:3]
    owns = random_prompts((3, 1, 3, 6, 2, 9, 1, 2), seed + 1)
    rows = [[*(first if i % 2 else second), *own] for i, own in enumerate(owns)]
    return [*rows, rows[0], rows[3][:-2], *random_prompts((*OTHERS, 1), seed + 2)]


Alike = Callable[..., Reference]


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> Alike:
    """A shape's reference for prompts of a seed: the first that leads to no near tie."""

    @cache
    def made(shape: str, prompts: Callable[[int], list[list[int]]]) -> Reference:
        model = random_model(SEEDS.get(shape, 0), **(SHAPES | FAMILY_SHAPES)[shape])
        for seed in range(5, 30):
            folder = tmp_path_factory.mktemp("model")
            try:
                return make_reference(model, folder, prompts(seed), NEW_TOKENS)
            except AssertionError:
                continue
        raise AssertionError(f"{shape}: no prompts without near ties")

    return made


OTHER_SHAPES = (
    "post-norm, narrow embedding (350m)",
    "odd sizes",
    "llama",
    "llama, one kv-head, odd sizes",
    "llama, rope yarn",
    "qwen2",
    "gpt_neox",
    "gpt_neox, one after the other",
)


def cases() -> Iterator[tuple[str, str, str]]:
    """(shape, placement, configuration): every placement with the normal shape, each configuration
    in turn; each of the other shapes at one placement."""
    pairs = [("normal", placement) for placement in PLACEMENTS]
    pairs += zip(OTHER_SHAPES, list(PLACEMENTS)[::2], strict=True)
    for (shape, placement), name in zip(pairs, cycle(CONFIGURATIONS), strict=False):
        yield shape, placement, name


def open_llm(
    folder: Path, policy: Policy | str, offload_dir: Path, how: str = "on", **more: Any
) -> LLM:
    llm = opened(folder, policy, offload_dir, **more)
    llm.share_prefix = how
    return llm


def held_in_one_copy(llm: LLM) -> int:
    """Tokens, as the report of the newest run says."""
    assert llm.report is not None
    found = llm.report.extra["common_prefix"]
    assert found["kv_bytes"] == found["tokens"] * llm.model.spec.kv_bytes_per_token(
        DTYPE_BYTES[llm.dtype]
    )
    return int(found["tokens"])


@pytest.mark.parametrize(("shape", "placement", "configuration"), thinned(cases(), 2))
def test_tokens_and_logits(
    shape: str, placement: str, configuration: str, alike: Alike, tmp_path: Path
) -> None:
    chosen = CONFIGURATIONS[configuration]
    policy = chosen.policy(PLACEMENTS[placement])
    for prompts in (some_alike, all_alike):
        known = alike(shape, prompts)
        watch = LogitsByRow()
        params = SamplingParams(max_tokens=NEW_TOKENS)
        with open_llm(known.folder, policy, tmp_path, budget=chosen.budget) as llm:
            out = llm.generate(known.prompts, params, watch_logits=watch)
        assert tokens_of(out) == known.tokens
        watch.check(known.logits)
        assert llm.report is not None
        given = sum(map(len, known.prompts))
        fed = llm.report.extra["prefill_fed_tokens"]
        assert llm.report.prefill.tokens == given
        if prompts is some_alike:
            assert (fed < given) is (chosen.gbs > 1)
            continue
        assert held_in_one_copy(llm) == HEADER
        # The header is fed once a block, and each row's slots are for the others.
        assert fed <= given + (llm.report.extra["blocks"] - len(known.prompts)) * HEADER
        assert llm.report.kv["slots"] == max(map(len, known.prompts)) - HEADER + NEW_TOKENS - 1


@pytest.mark.parametrize(
    ("placement", "refill"), [("all on device", False), ("kv split three ways", True)]
)
def test_rows_that_end_at_different_steps(
    refill: bool, placement: str, alike: Alike, tmp_path: Path
) -> None:
    """An end-of-sequence token in the middle; places are filled by rows that read the same copy."""
    known = alike("normal", all_alike)
    prompts = [*known.prompts, *([*p[:HEADER], 9, *p[HEADER:]] for p in known.prompts)]
    whole = [greedy(known.model, p, LONG) for p in prompts]
    eos = token_that_ends(whole)
    want = [greedy(known.model, p, LONG, eos) for p in prompts]
    params = [SamplingParams(max_tokens=len(row), ignore_eos=True) for row in want]
    with open_llm(known.folder, Policy(3, 2, PLACEMENTS[placement]), tmp_path) as llm:
        assert tokens_of(llm.generate(prompts, params, refill=refill)) == want
    assert held_in_one_copy(llm) == HEADER
    assert llm.report is not None and ("refilled" in llm.report.extra) is refill
    assert len({len(row) for row in want}) >= 3


def test_more_rows_enter_only_with_the_same_header(alike: Alike, tmp_path: Path) -> None:
    """As the batch door asks: what begins otherwise, or is no longer than the header, has no
    room."""
    known = alike("normal", all_alike)
    further = [[*p[:HEADER], 8, *p[HEADER + 1 :]] for p in known.prompts[:4]]
    others = ([[5, *known.prompts[0][1:]]], [known.prompts[0][:HEADER]], further)
    asked = [SamplingParams(max_tokens=n) for n in (5, 2, 4, 1, 3, 5, 2, 4, 5)]
    rooms: list[bool] = []

    def sequences(rows: list[list[int]], start: int) -> abc.Sequence[Sequence]:
        made = [Sequence(start + i, tuple(ids)) for i, ids in enumerate(rows)]
        return with_params(made, asked[: len(rows)])

    def more() -> abc.Sequence[Sequence] | None:
        if rooms:
            return None
        rooms.extend(llm.has_room(sequences(rows, 9)) for rows in others)
        return sequences(further, 9)

    done: list[Sequence] = []
    with open_llm(known.folder, Policy(2, 2), tmp_path) as llm:
        llm.run(sequences(known.prompts, 0), done.extend, refill=True, more=more)
    assert rooms == [False, False, True] and len(done) == 13
    for one in done:
        assert one.token_ids == greedy(known.model, one.prompt_ids, one.params.max_tokens)


def test_equal_prompts_one_row_and_others_in_turn(alike: Alike, tmp_path: Path) -> None:
    """An engine that is open for one header serves shorter ones, and is opened again for what it
    has no room for."""
    known = alike("llama", all_alike)
    params = SamplingParams(max_tokens=NEW_TOKENS)
    first = known.prompts[0]
    last = known.prompts[4]
    with open_llm(known.folder, Policy(4, 1), tmp_path) as llm:
        for prompts, common in (
            ([first] * 6, len(first) - 1),  # all but the last token
            (known.prompts, HEADER),
            ([last], 0),
            ([first[:4], last], 3),
        ):
            want = [greedy(known.model, p, NEW_TOKENS) for p in prompts]
            assert tokens_of(llm.generate(prompts, params)) == want
            assert held_in_one_copy(llm) == common


@pytest.mark.parametrize(
    ("more", "common", "tolerance"),
    [
        ({"policy": Policy(4, 2, int8_compute=True)}, HEADER, 0.2),
        ({"policy": Policy(4, 2, compress_cache=True)}, 0, LOGIT_TOLERANCE),
        ({"policy": Policy(4, 2, attn_sparsity=0.3)}, 0, LOGIT_TOLERANCE),
        (
            {"policy": Policy(4, 2), "eviction": H2O(heavy_size=4, recent_size=3)},
            0,
            LOGIT_TOLERANCE,
        ),
        ({"policy": Policy(4, 2), "dtype": "bfloat16"}, HEADER, 0.2),
    ],
    ids=["int8", "packed KV", "sparse", "h2o", "bf16"],
)
def test_with_and_without_are_the_same(
    more: dict[str, Any],
    common: int,
    tolerance: float,
    alike: Alike,
    tmp_path: Path,
) -> None:
    """Where tokens are not transformers' own. Packed and sparse columns stay with their rows."""
    known = alike("llama", all_alike)
    found = []
    for how in ("off", "on"):
        watch = LogitsByRow()
        with open_llm(known.folder, offload_dir=tmp_path, how=how, **more) as llm:
            llm.follow(known.prompts, known.tokens, watch, max_tokens_per_sweep=1)
        found.append(torch.stack(watch.of_rows))
        assert held_in_one_copy(llm) == (common if how == "on" else 0)
    assert (found[0] - found[1]).abs().max() <= tolerance


# ---- bytes


@pytest.mark.parametrize("placement", ["all on device", "kv split three ways"])
def test_the_plan_holds_one_copy(placement: str, tmp_path: Path) -> None:
    """Homes of units are for rows' own columns, exactly; step buffers for the tokens that are fed;
    peak bytes are the plan's, with the copy in it."""
    random_model(max_position_embeddings=512).save_pretrained(tmp_path / "model")
    prompts = [[*random_prompts((300,), 8)[0], *own] for own in random_prompts((5,) * 8, 9)]
    column = 2 * BASE["num_hidden_layers"] * BASE["hidden_size"] * 4
    for how, slots, common, fed in (("off", 307, 0, 4 * 305), ("on", 7, 300, 300 + 4 * 5)):
        policy = Policy(4, 2, PLACEMENTS[placement])
        with open_llm(tmp_path / "model", policy, tmp_path, how) as llm:
            llm.generate(prompts, SamplingParams(max_tokens=3, ignore_eos=True))
            assert llm._engine is not None and llm.report is not None
            plan = llm._engine.plan
        assert plan.shape.slots[0] == llm.report.kv["slots"] == slots
        assert (plan.shape.common, plan.shape.tokens) == (common, fed)
        assert sum(llm.report.peak_bytes.values()) == sum(b.nbytes for b in plan.buffers)
    assert plan.size("common prefix") == 300 * column
    assert llm.report.kv["bytes"] == (300 + 8 * 6) * column + 8 * column // 2
    assert llm.report.kv["full_bytes"] == 8 * 306 * column + 8 * column // 2

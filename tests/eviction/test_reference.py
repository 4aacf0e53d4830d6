"""The slow reference itself: transformers' OPT when nothing is evicted, a real cache when something
is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, cycle, pairwise

import pytest
import torch

from tests.eviction.cases import WINDOWS, Known
from tests.eviction.engine import PAIRS
from tests.eviction.plain_models import plain_model
from tests.eviction.policies import Budget, Policy, Sizes, choose, h2o, local
from tests.eviction.reference import Kept, PlainModel, evicted_greedy, forward
from tests.parity.cases import SHAPES
from tests.parity.reference import (
    LOGIT_TOLERANCE,
    greedy,
    random_model,
    random_prompts,
    teacher_forced,
)

NEW_TOKENS = 9
PROMPT = random_prompts((21,))[0]
SMALL = Budget(heavy_size=5, recent_size=3)

POLICIES: dict[str, Policy] = {
    **{name: PAIRS[name].plain for name in ("h2o", "h2o, ratios", "h2o, no heavy", "local")},
    **{name: PAIRS[name].plain for name in ("h2o-norm, one sink", "tova", "snapkv", "random")},
    **{name: PAIRS[name].plain for name in ("h2o-v, two sinks", "vase", "triattention")},
    "h2o, sinks": h2o(SMALL, sinks=2),
    "h2o, no recent": h2o(Budget(heavy_size=5, recent_size=0)),
}


KEEP_ALL = [replace(pair.plain, sizes=lambda n, new: Sizes(1, 99, 99)) for pair in PAIRS.values()]


@pytest.mark.parametrize(
    ("shape", "policy"),
    zip(
        (*SHAPES, "llama", "gpt_neox", WINDOWS, "mistral, windows", "gpt_oss"), cycle(KEEP_ALL[::3])
    ),
)
def test_a_budget_for_everything_gives_transformers_logits(
    shape: str, policy: Policy, known: Callable[[str], Known]
) -> None:
    model = known(shape).model
    plain = known(shape).plain
    got = evicted_greedy(plain, PROMPT, NEW_TOKENS, policy)
    assert got.tokens == greedy(model, PROMPT, NEW_TOKENS)
    apart = (got.logits - teacher_forced(model, PROMPT, got.tokens)).abs().max()
    assert apart <= LOGIT_TOLERANCE / 10 and got.least_gap == math.inf
    for step, kept in enumerate(got.kept):
        for heads, window in zip(kept, plain.windows, strict=True):
            whole = list(range(len(PROMPT) + step))
            assert heads == ([whole] * plain.kv_heads if window is None else [])


@torch.no_grad()
def test_the_prefill_keeps_what_transformers_own_attention_says() -> None:
    model = random_model()
    got = evicted_greedy(plain_model(model), PROMPT, 1, h2o(SMALL))
    model.set_attn_implementation("eager")
    attentions = model(torch.tensor([PROMPT]), output_attentions=True).attentions
    for heads, attention in zip(got.kept[0], attentions, strict=True):
        heavy = attention[0].sum(1)[:, :-3].topk(5).indices
        assert [[*sorted(row), 18, 19, 20] for row in heavy.tolist()] == heads


@torch.no_grad()
def cached_logits(
    model: PlainModel, prompt: Sequence[int], tokens: Sequence[int], kept: Sequence[Kept]
) -> torch.Tensor:
    """(tokens, vocab) by one query at a time over a real cache from which columns are dropped. Told
    which, not why.

    For models whose positions are in the embedding.
    """
    n = len(prompt)
    masks = [torch.ones(model.kv_heads, n, n).tril().bool()] * model.num_layers
    newest, seen = forward(model, prompt, masks)
    cache = [
        [(a.k[h, held], a.v[h, held]) for h, held in enumerate(kept[0][i])]
        for i, a in enumerate(seen)
    ]
    logits = [newest]
    held_before = kept[0]
    for step, token in enumerate(tokens[:-1]):
        x = model.embed(torch.tensor([0] * (n + step) + [token]))[-1:]
        for layer in range(model.num_layers):
            q, k, v = model.project(layer, x)
            mixed = []
            for h in range(model.kv_heads):
                keys, values = (
                    torch.cat([old, new[h]])
                    for old, new in zip(cache[layer][h], (k, v), strict=True)
                )
                queries = q.view(model.kv_heads, -1, q.shape[-1])[h]
                mixed.append((queries @ keys.T * q.shape[-1] ** -0.5).softmax(-1) @ values)
                held = [*held_before[layer][h], n + step]
                stay = [held.index(j) for j in kept[step + 1][layer][h]]
                cache[layer][h] = keys[stay], values[stay]
            x = model.finish(layer, x, torch.cat(mixed).view(1, -1))
        held_before = kept[step + 1]
        logits.append(model.logits(x)[0])
    return torch.stack(logits)


@pytest.mark.parametrize(
    ("shape", "name"),
    zip(cycle(("normal", "post-norm, narrow embedding (350m)", "llama")), POLICIES),
)
def test_what_every_policy_keeps_and_that_masking_is_dropping_from_a_cache(
    shape: str, name: str, known: Callable[[str], Known]
) -> None:
    plain = known(shape).plain
    n = len(PROMPT)
    sizes = POLICIES[name].sizes(len(PROMPT), NEW_TOKENS)
    got = evicted_greedy(plain, PROMPT, NEW_TOKENS, POLICIES[name])
    if shape != "llama":
        again = cached_logits(plain, PROMPT, got.tokens, got.kept)
        assert (got.logits - again).abs().max() <= LOGIT_TOLERANCE / 10
    before: list[list[set[int]]] = [[set(range(n))] * plain.kv_heads] * plain.num_layers
    for step, kept in enumerate(got.kept):
        newest = set(range(n + step)[n + step - sizes.recent :])
        for layer, heads in enumerate(kept):
            for head, held in enumerate(map(set, heads)):
                assert len(held) == sizes.total
                assert held >= newest | set(range(sizes.sinks))
                assert held <= before[layer][head] | ({n + step - 1} if step else set())
        before = [[set(held) for held in heads] for heads in kept]
    if sizes.heavy and name != "tova":
        assert len({tuple(held) for heads in got.kept[-1] for held in heads}) > 1, (
            "all heads alike: a poor test"
        )


@pytest.mark.parametrize("recent", [0, 3])
def test_promotions_are_evictions_of_older_columns(
    recent: int, known: Callable[[str], Known]
) -> None:
    prompt = random_prompts((6,))[0]
    plain = known("normal").plain
    got = evicted_greedy(plain, prompt, 20, h2o(Budget(heavy_size=5, recent_size=recent)))
    expected = 0
    for step, (before, after) in enumerate(pairwise(got.kept), start=len(prompt)):
        for was, now in zip(chain(*before), chain(*after), strict=True):
            expected += any(j < step - recent for j in {*was, step} - {*now})
    assert got.promotions == expected > 0
    assert evicted_greedy(plain, prompt, 20, local(SMALL)).promotions == 0


# Those score by what prompts alone have.
@pytest.mark.parametrize(
    "name", [name for name in POLICIES if name not in ("snapkv", "vase", "triattention")]
)
def test_a_decode_step_is_one_more_row_of_the_prompt(name: str) -> None:
    torch.manual_seed(0)
    scores = torch.randn(2, 3, 9, 9).masked_fill(~torch.ones(9, 9).tril().bool(), -math.inf)
    p = scores.double().softmax(-1)
    v = torch.randn(2, 9, 4)
    whole, stepped = (POLICIES[name].scorer(1, Sizes(1, 4, 2)) for _ in range(2))
    whole.see_prompt(p, v)
    stepped.see_prompt(p[:, :, :7, :7], v[:, :7])
    for n in (8, 9):
        stepped.see_token(p[:, :, n - 1, :n], v[:, :n])
    for (count, score), (other_count, other) in zip(whole.turns(), stepped.turns(), strict=True):
        assert count == other_count
        torch.testing.assert_close(score, other)


@pytest.mark.parametrize(
    ("sizes", "score", "stay", "gap"),
    [
        (Sizes(0, 2, 2), [5, 1, 3, 2, 9, 9], [0, 2, 4, 5], 1),
        (
            Sizes(0, 1, 2),
            [3, 1, 3, 3, 0, 0],
            [3, 4, 5],
            0,
        ),  # a tie: the newest of the equal ones stays
        (Sizes(1, 1, 2), [0, 1, 3, 7, 0, 0], [0, 3, 4, 5], 4),
        (Sizes(0, 3, 0), [5, 1, 3, 2, 9, 0], [0, 2, 4], 1),  # nothing protects the newest
        (Sizes(0, 0, 2), [5, 1, 3, 2, 9, 9], [4, 5], math.inf),
        (Sizes(2, 0, 2), [5, 1, 3, 2, 9, 9], [0, 1, 4, 5], math.inf),
        (Sizes(0, 4, 2), [5, 1, 3, 2, 9, 9], [0, 1, 2, 3, 4, 5], math.inf),
    ],
)
def test_what_stays(sizes: Sizes, score: list[float], stay: list[int], gap: float) -> None:
    assert choose(range(6), sizes, [(sizes.heavy, torch.tensor(score).double())]) == (stay, gap)

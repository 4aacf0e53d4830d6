"""Layers compute neighbouring micro-batches together: what they see, and that answers are those of
each alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o import LLM, Policy, SamplingParams
from flexgen_h2o.models import opt

NEW = 4


def seen_by(
    policy: Policy,
    lengths: list[int],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    **settings: Any,
) -> tuple[Counter[int], Counter[int], list[list[int]]]:
    """How many tokens each call of attention and of an MLP saw, how often; and what was
    generated."""
    attention = Counter[int]()
    mlp = Counter[int]()
    own = opt.attention, opt.mlp

    def watched_attention(spec: Any, w: Any, x: Any, ws: Any) -> Any:
        attention[len(x)] += 1
        return own[0](spec, w, x, ws)

    def watched_mlp(spec: Any, w: Any, x: Any, ws: Any) -> None:
        mlp[len(x)] += 1
        own[1](spec, w, x, ws)

    with monkeypatch.context() as patched:
        patched.setattr(opt, "attention", watched_attention)
        patched.setattr(opt, "mlp", watched_mlp)
        with LLM(
            "opt-tiny", policy, dtype="float32", device="cpu", offload_dir=folder, **settings
        ) as llm:
            prompts = [[20 + 7 * i + j for j in range(n)] for i, n in enumerate(lengths)]
            done = llm.generate(prompts, SamplingParams(max_tokens=NEW, ignore_eos=True))
            blocks = llm.model.spec.num_blocks
    return (
        Counter({tokens: n // blocks for tokens, n in attention.items()}),
        Counter({tokens: n // blocks for tokens, n in mlp.items()}),
        [one.token_ids for one in done],
    )


@pytest.mark.parametrize(
    "percent", [(100, 0, 100, 0, 100, 0), (0, 0, 0, 0, 100, 0), (30, 0, 40, 0, 100, 0)]
)
def test_decode_steps_of_a_block_are_one_product(
    percent: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as their tokens are no more than those of a micro-batch's prompts."""
    alone = seen_by(Policy(8, 1), [5] * 8, tmp_path, monkeypatch)
    attention, mlp, tokens = seen_by(Policy(2, 4, percent), [5] * 8, tmp_path, monkeypatch)
    assert attention == mlp == {2 * 5: 4, 8: NEW - 1} and tokens == alone[2]
    attention, mlp, _ = seen_by(Policy(2, 4, percent), [3] * 8, tmp_path, monkeypatch)
    assert attention == mlp == {2 * 3: 4 + NEW - 1, 2: NEW - 1}

"""Rows that enter a running block: the tokens that each gets alone, on every tier and with every
eviction policy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flexgen_h2o import Policy, SamplingParams
from flexgen_h2o.engine.generation import Callbacks, Listener
from flexgen_h2o.engine.sequence import Sequence, with_params
from tests.parity.cases import CONFIGURATIONS, PLACEMENTS, thinned
from tests.parity.reference import LONG, Reference, greedy, opened, random_prompts, tokens_of

# In the order of the input; a block holds 4 to 8 of them. The longest answer goes on while all
# others come and go.
LENGTHS = (5, 9, 9, 1, 12, 3, 17, 2, 9, 4, 6, 21, 8, 1, 5, 7, 11)
ASKED = (3, 8, 1, 5, 2, LONG, 4, 9, 1, 2, 13, 3, 6, 1, 20, 2, 7)

# A model's folder, prompts, and what transformers makes of them.
Known = tuple[Path, list[list[int]], list[list[int]]]


@pytest.fixture(scope="module")
def known(reference: Callable[[str], Reference]) -> Known:
    model = reference("normal")
    prompts = random_prompts(LENGTHS, seed=5)
    tokens = [greedy(model.model, p, n) for p, n in zip(prompts, ASKED, strict=True)]
    return model.folder, prompts, tokens


PARAMS = [SamplingParams(max_tokens=n) for n in ASKED]
# Every configuration, and every placement but those of weights alone, which rows that enter do not
# move.
NAMES = [name for name in PLACEMENTS if not name.startswith("weights")]
CASES = [
    (placement, list(CONFIGURATIONS)[i % len(CONFIGURATIONS)]) for i, placement in enumerate(NAMES)
]


@pytest.mark.parametrize(("placement", "configuration"), thinned(CASES, 2))
def test_placement_by_configuration(
    placement: str,
    configuration: str,
    known: Known,
    tmp_path: Path,
) -> None:
    folder, prompts, tokens = known
    chosen = CONFIGURATIONS[configuration]
    policy = chosen.policy(PLACEMENTS[placement])
    with opened(folder, policy, tmp_path, budget=chosen.budget) as llm:
        assert tokens_of(llm.generate(prompts, PARAMS)) == tokens
        assert llm.report is not None
        refilled = llm.report.extra["refilled"]
        sweeps = llm.report.extra["sweeps"]
        assert refilled == len(prompts) - policy.block_size and llm.report.extra["blocks"] == 1
        assert tokens_of(llm.generate(prompts, PARAMS, refill=False)) == tokens
        assert llm.report.extra["blocks"] > 1 and "refilled" not in llm.report.extra
        assert sweeps < llm.report.extra["sweeps"]


class Arriving(Listener):
    """Rows that come one by one as the block gets tokens, so that micro-batches stand empty
    before."""

    def __init__(self, rows: list[Sequence]) -> None:
        self.rows = rows
        self.tokens = 0

    def more(self) -> list[Sequence] | None:
        if not self.rows or self.tokens < 2:
            return None
        self.tokens = 0
        return [self.rows.pop(0)]

    def sweep(self, tokens: int) -> None:
        self.tokens += tokens


@pytest.mark.parametrize(("placement", "configuration"), thinned(CASES, 3))
def test_rows_enter_micro_batches_that_have_none(
    placement: str,
    configuration: str,
    known: Known,
    tmp_path: Path,
) -> None:
    folder, prompts, tokens = known
    chosen = CONFIGURATIONS[configuration]
    policy = chosen.policy(PLACEMENTS[placement])
    done = list[Sequence]()
    every = [*with_params([Sequence(i, tuple(p)) for i, p in enumerate(prompts)], PARAMS)]
    longest = every.pop(ASKED.index(LONG))
    with opened(folder, policy, tmp_path, budget=chosen.budget) as llm:
        llm.share_prefix = "off"
        coming = Arriving(every[:10])
        asked = SamplingParams(max_tokens=LONG)
        llm.prepare([Sequence(i, (i + 1,) * 21, params=asked) for i in range(policy.block_size)])
        llm.run([longest], done.extend, Callbacks(listener=coming), refill=True, more=coming.more)
        assert llm.report is not None and llm.report.extra["blocks"] == 1
    want = {one.index: tokens[one.index] for one in [longest, *every[: 10 - len(coming.rows)]]}
    assert {c.index: c.token_ids for c in done} == want and len(want) > policy.block_size / 2


def test_a_row_ends_where_nobody_waits_for_it(known: Known, tmp_path: Path) -> None:
    folder, prompts, tokens = known
    read = [Sequence(i, tuple(p)) for i, p in enumerate(prompts)]
    done = list[Sequence]()
    callbacks = Callbacks(should_continue=lambda row: row.index != 5 or len(row.token_ids) < 3)
    with opened(folder, Policy(2, 2), tmp_path) as llm:
        llm.run(with_params(read, PARAMS), done.extend, callbacks, refill=True)
    want = [ids[:3] if i == 5 else ids for i, ids in enumerate(tokens)]
    assert [one.token_ids for one in sorted(done, key=lambda c: c.index)] == want

"""The engine against the slow reference, tokens, logits and held columns, in fp32: every policy, model
shape, placement and way to keep the KV cache small. And what must not change a bit: a budget for
everything, and the other rows of a batch."""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flexgen_h2o import LLM, MemoryBudget, Policy, SamplingParams
from flexgen_h2o.engine.memory import MemoryPlanner
from flexgen_h2o.engine.memory_plan import SEQUENTIAL, BlockShape
from flexgen_h2o.kvcache.eviction import EVICTING, Evicting, Local, Tova
from flexgen_h2o.models.load import find_model
from tests.eviction.cases import CASES, LENGTHS, NEW_TOKENS, Case, Known, run_case
from tests.eviction.engine import PAIRS, STAND_IN, Ran, Wanted, assert_same, cut, generate, run_with
from tests.parity.cases import PLACEMENTS
from tests.parity.reference import random_model, random_prompts
from tests.parity.test_large import split_parts

KnownModels = Callable[[str], Known]
Reference = Callable[[Case], Wanted]


def test_every_policy_has_a_row() -> None:
    missing = set(EVICTING) - {pair.engine.name for pair in PAIRS.values()}
    assert not missing, (
        f"{missing}: add a pair to PAIRS in tests/eviction/engine.py, with a scorer in policies.py"
    )


@pytest.mark.parametrize("case", [case for cases in CASES.values() for case in cases], ids=str)
def test_case(case: Case, known: KnownModels, reference: Reference, tmp_path: Path) -> None:
    run_case(case, reference(case), known(case.shape), tmp_path)


@pytest.mark.parametrize(
    "case",
    [
        Case("h2o", configuration="device, 4x1, joined", refill=True),
        Case("tova", "llama", configuration="device, 4x1, joined"),
        Case("h2o", "llama", rolling=True, configuration="one batch, sequential"),
    ],
    ids=str,
)
def test_rows_in_parts(
    case: Case,
    known: KnownModels,
    reference: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a micro-batch's prompts, behind rows that decode or alone, some attend at a time; and keys
    of three rows are turned at a time."""
    monkeypatch.setattr("flexgen_h2o.kvcache.decode.ROLLING_CHUNK", 3 * 9 * 24)
    parts = split_parts(monkeypatch)
    run_case(case, reference(case), known(case.shape), tmp_path)
    assert max(parts) > 1


def test_one_llm_for_all_workloads(
    known: KnownModels, reference: Reference, tmp_path: Path
) -> None:
    """Small, then larger than the open buffers, then small again in the large ones; each over
    several blocks."""
    want = reference(Case())
    policy = Policy(2, 1, PLACEMENTS["everything split 30/30"])
    folder = str(known("normal").folder)
    with LLM(folder, policy, Case().eviction, "auto", "float32", STAND_IN, tmp_path) as llm:
        for count, most in ((3, 5), (6, 12), (5, 12), (2, 3)):
            ran = run_with(llm, want.prompts[:count], SamplingParams(max_tokens=most))
            assert_same(cut(Wanted(want.prompts[:count], want.rows[:count]), [most] * count), ran)


@pytest.mark.parametrize("stand_in", [False, True], ids=["host", "stand-in"])
def test_a_chosen_policy_keeps_to_its_budget(
    stand_in: bool, known: KnownModels, reference: Reference, tmp_path: Path
) -> None:
    """Room for one row at a time with everything on disk: whatever is chosen, the columns are the
    same."""
    folder = known("normal").folder
    want = reference(Case())
    eviction = PAIRS["h2o"].engine
    spec = find_model(str(folder), None).spec
    shape = BlockShape(1, 1, max(LENGTHS), (9,) * spec.num_blocks, eviction.needs.record)
    plan = MemoryPlanner(spec, Policy(1, 1, (0,) * 6), 4, not stand_in).plan(shape, SEQUENTIAL)
    device = plan.bytes_on("device")
    host = plan.bytes_on("host")
    allowed = MemoryBudget(device if stand_in else None, host, "64MiB")
    ran = generate(folder, want.prompts, NEW_TOKENS, eviction, "auto", tmp_path, allowed)
    assert_same(want, ran)
    assert ran.report.peak_bytes["host"] <= host and ran.report.peak_bytes["device"] <= device


# ---- a budget for everything is the full cache

PROMPTS = random_prompts((1, 9, 9, 21))
MOST = 21 + NEW_TOKENS


def bits(ran: Ran) -> torch.Tensor:
    """(rows, tokens, vocab) logits."""
    return torch.stack([torch.stack(ran.logits[i]) for i in range(len(ran.tokens))])


@pytest.mark.parametrize(("shape", "dtype"), [("odd sizes", "float32"), ("normal", "bfloat16")])
def test_a_budget_for_everything_gives_the_full_caches_bits(
    shape: str, dtype: str, known: KnownModels, tmp_path: Path
) -> None:
    folder = known(shape).folder
    full = generate(folder, PROMPTS, NEW_TOKENS, None, Policy(4, 1), tmp_path, dtype=dtype)
    assert full.report.kv["slots"] == MOST - 1
    for policy in EVICTING.values():
        eviction = policy(heavy_size=MOST // 2, recent_size=MOST - MOST // 2)
        ran = generate(folder, PROMPTS, NEW_TOKENS, eviction, Policy(4, 1), tmp_path, dtype=dtype)
        assert torch.equal(bits(ran), bits(full)) and ran.tokens == full.tokens
        assert ran.report.kv == full.report.kv


@pytest.mark.parametrize("policy", EVICTING.values(), ids=EVICTING)
def test_the_least_budget_for_everything(
    policy: type[Evicting], known: KnownModels, tmp_path: Path
) -> None:
    """The newest column is never read again: a column for all tokens but two is enough, one less is
    not."""

    def run(eviction: Evicting | None) -> Ran:
        folder = known("normal").folder
        return generate(folder, PROMPTS[3:], NEW_TOKENS, eviction, Policy(1, 1), tmp_path)

    full = bits(run(None))
    assert torch.equal(bits(run(policy(heavy_size=MOST - 2 - 9, recent_size=9))), full)
    short = bits(run(policy(heavy_size=MOST - 3 - 9, recent_size=9)))
    assert torch.equal(short[0, :-1], full[0, :-1])
    assert not torch.equal(short[0, -1], full[0, -1])


@pytest.fixture(scope="module", params=["opt", "llama"])
def uniform(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose queries are zero, so that all columns that a query sees are attended to
    alike."""
    model = random_model(model_type=request.param)
    for name, weights in model.named_parameters():
        if "q_proj" in name:
            weights.data.zero_()
    folder = tmp_path_factory.mktemp("uniform")
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("policy", EVICTING.values(), ids=EVICTING)
def test_equal_scores_do_not_depend_on_the_batch(
    policy: type[Evicting], uniform: Path, tmp_path: Path
) -> None:
    prompts = random_prompts((9, 30, 21, 9, 17))
    eviction = policy(heavy_size=6, recent_size=2)

    def held(some: list[list[int]], size: int) -> list[list[list[list[int]]]]:
        ran = generate(uniform, some, 14, eviction, Policy(size, 1), tmp_path)
        return [ran.seen[key] for key in sorted(ran.seen)]

    assert held(prompts, len(prompts)) == [one for prompt in prompts for one in held([prompt], 1)]


def test_of_equal_scores_the_oldest_leaves(uniform: Path, tmp_path: Path) -> None:
    """Of uniform attention TOVA keeps the newest columns, as a window does."""
    prompts = random_prompts((9, 30, 21))
    tova, window = (
        generate(uniform, prompts, 14, eviction, Policy(3, 1), tmp_path)
        for eviction in (Tova(heavy_size=6, recent_size=2), Local(recent_size=8, sinks=0))
    )
    assert tova.seen and tova.seen == window.seen
    assert tova.tokens == window.tokens


def test_tiers_do_not_change_tokens_in_bf16(known: KnownModels, tmp_path: Path) -> None:
    found = []
    for name in ("all on device", "kv split three ways"):
        policy = Policy(2, 2, PLACEMENTS[name], compress_cache=True)
        folder = known("normal").folder
        prompts = random_prompts(LENGTHS)
        ran = generate(folder, prompts, 9, None, policy, tmp_path, STAND_IN, "bfloat16")
        found.append(ran.tokens)
    assert found[0] == found[1]

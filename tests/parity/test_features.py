"""Where attention runs, how long the overlay lives, how tokens are drawn: under every policy the
same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, OPTForCausalLM

from flexgen_h2o import LLM, MemoryBudget, Policy, SamplingParams
from flexgen_h2o.checkpoint.resolve import PACKAGED
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.units import WRITE_BACK_STEPS
from tests.parity.cases import PLACEMENTS
from tests.parity.reference import (
    ByShape,
    assert_equal,
    greedy,
    opened,
    random_model,
    random_prompts,
    run,
    tokens_of,
)

STAND_IN = MemoryBudget("64MiB", "64MiB", "64MiB")


@pytest.mark.parametrize(
    ("placement", "budget"), [("kv on disk", MemoryBudget()), ("kv split three ways", STAND_IN)]
)
def test_the_overlay_is_written_back_many_times(
    placement: str, budget: MemoryBudget, reference: ByShape, tmp_path: Path
) -> None:
    known = reference("normal")
    new = 2 * WRITE_BACK_STEPS + 5
    prompts = random_prompts([5, 1, 11], seed=7)
    policy = Policy(2, 2, PLACEMENTS[placement])
    out = run(known.folder, prompts, policy, tmp_path, SamplingParams(max_tokens=new), budget)
    assert tokens_of(out) == [greedy(known.model, p, new) for p in prompts]


@pytest.mark.parametrize("switches", [{}, {"cpu_cache_compute": True}], ids=str)
def test_a_last_micro_batch_whose_split_rounds_otherwise(
    switches: dict[str, bool], reference: ByShape, tmp_path: Path
) -> None:
    """Of 12 KV rows none falls to the host at 30/5, of 8 one does: the plan must hold room for
    both."""
    known = reference("normal")
    policy = Policy(3, 2, (30, 5, 30, 5, 30, 5), **switches)
    assert_equal(known, policy, STAND_IN, tmp_path)


def test_one_run_at_a_time(reference: ByShape, tmp_path: Path) -> None:
    """A second run on the same engine would overwrite the first one's slots: it is refused, and the
    first goes on."""
    known = reference("normal")
    refused = []
    params = SamplingParams(max_tokens=len(known.tokens[0]))
    with opened(known.folder, Policy(2, 1), tmp_path) as llm:

        def second(rows: list[int], logits: torch.Tensor) -> None:
            with pytest.raises(UsageError, match="generating already") as caught:
                llm.generate(known.prompts[:1])
            refused.append(caught)

        for watch in (second, None):
            out = llm.generate(known.prompts, params, watch_logits=watch)
            assert refused and tokens_of(out) == known.tokens


TEXTS = [
    "def main(argv=None):\n    ",
    "import",
    "class Queue:\n    def put(self, item):\n        self.",
]


def test_the_shipped_model(tmp_path: Path) -> None:
    folder = PACKAGED["opt-tiny"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = OPTForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with opened(Path("opt-tiny"), Policy(2, 2, (20, 0, 0, 50, 100, 0)), tmp_path) as llm:
        out = llm.generate(TEXTS, SamplingParams(max_tokens=10))
    for text, one in zip(TEXTS, out, strict=True):
        want = greedy(model, tokenizer(text)["input_ids"], 10, model.config.eos_token_id)
        assert one.token_ids == want
        assert one.text == tokenizer.decode(want, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["gpt_oss", "mistral"])
def test_a_window_of_one_token(kind: str, tmp_path: Path) -> None:
    """Each token sees itself alone, as in transformers without a cache.

    With one, transformers 5 keeps all keys of such a window (`keys[:, :, -1 + 1 :]`), and its
    tokens differ.
    """
    model = random_model(3, model_type=kind, sliding_window=1, eos_token_id=None)
    model.save_pretrained(tmp_path / "model")
    ids = torch.tensor([[5, 6, 7]])
    more = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "use_cache": False}
    told = model.generate(ids, attention_mask=torch.ones_like(ids), **more)
    with LLM(str(tmp_path / "model"), dtype="float32", offload_dir=tmp_path / "offload") as llm:
        [done] = llm.generate(ids.tolist(), SamplingParams(max_tokens=12))
    assert done.token_ids == told[0, 3:].tolist()

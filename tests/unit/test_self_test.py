"""The test of a packed KV cache's bits: one warning where they are too few, and a run that is
otherwise the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flexgen_h2o import LLM, SamplingParams
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.notes import say_once
from flexgen_h2o.engine import self_test
from flexgen_h2o.engine.sampling import token_logprobs
from flexgen_h2o.kvcache.eviction import H2O

PARAMS = SamplingParams(4, ignore_eos=True)
PROMPTS = [list(range(5, 25)), list(range(30, 40))]
LONGER = [list(range(5, 205))]
FLAG = "--kv-bits 3"


@pytest.fixture(autouse=True)
def _said_anew() -> Iterator[None]:
    say_once.cache_clear()
    yield
    say_once.cache_clear()


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every job is long enough for the test, and every loss is too large."""
    monkeypatch.setattr("flexgen_h2o.llm.JOB_OVER_TEST", 0)
    monkeypatch.setattr("flexgen_h2o.llm.MAX_KL", 0.0)


@pytest.mark.usefixtures("strict", "plain_cpu")
def test_one_warning_and_the_same_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    eviction = H2O(heavy_ratio=0.3, recent_ratio=0.3)
    found = []
    for tests_bits in (False, True):
        with LLM(
            "opt-tiny",
            Policy(2, compress_cache=True, cache_bits=3),
            eviction,
            device="cpu",
            offload_dir=tmp_path,
        ) as llm:
            llm.tests_bits = tests_bits
            tokens = [one.token_ids for one in llm.generate(PROMPTS, PARAMS)]
            report = llm.report
            assert report is not None
            found.append(
                (tokens, report.io_bytes, report.peak_bytes, report.kv, report.prefill.tokens)
            )
            assert capfd.readouterr().err.count(FLAG) == tests_bits
            llm.generate(LONGER, PARAMS)  # needs larger buffers, so the engine is opened again
            assert FLAG not in capfd.readouterr().err
    assert found[0] == found[1]


def test_divergence_of_the_likeliest() -> None:
    """0 for equal logits; otherwise at most the divergence over all tokens, and equal to it where
    all are likeliest."""
    for vocab, scale in ((20, 0.5), (500, 0.5), (500, 3.0)):
        whole = torch.randn(vocab)
        packed = whole + scale * torch.randn(vocab)
        (likeliest,) = token_logprobs(whole[None], [0], [20])
        p = whole.double().log_softmax(-1)
        exact = (p.exp() * (p - packed.double().log_softmax(-1))).sum().item()
        found = self_test.likeliest_divergence(likeliest, packed)
        assert self_test.likeliest_divergence(likeliest, whole) == pytest.approx(0, abs=1e-6)
        assert 0.2 * exact < found <= exact + 1e-6
        assert vocab > 20 or found == pytest.approx(exact, abs=1e-5)

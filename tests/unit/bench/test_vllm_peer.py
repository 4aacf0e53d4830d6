"""The vLLM peer: when its prefill ends, and that every row runs to its last token."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.unit.bench.test_throughput_sweep import load


class Engine:
    """Each row starts `delay` steps after the one before it and gets a token a step, `tokens` of
    them."""

    def __init__(self, delay: int, tokens: int) -> None:
        self.delay = delay
        self.tokens = tokens
        self.steps = 0
        self.rows: list[str] = []

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
        assert prompt["prompt_token_ids"] and params == {
            "temperature": 0.0,
            "max_tokens": 3,
            "ignore_eos": True,
        }
        self.rows.append(name)

    def _has(self, row: int) -> int:
        return min(self.tokens, self.steps - row * self.delay)

    def has_unfinished_requests(self) -> bool:
        return any(self._has(row) < self.tokens for row in range(len(self.rows)))

    def step(self) -> list[SimpleNamespace]:
        self.steps += 1
        return [
            SimpleNamespace(
                request_id=name,
                finished=self._has(row) == self.tokens,
                outputs=[SimpleNamespace(token_ids=[0] * self._has(row))],
            )
            for row, name in enumerate(self.rows)
            if self._has(row) > 0 and self.steps - row * self.delay <= self.tokens
        ]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    vllm: Any = ModuleType("vllm")
    vllm.SamplingParams = lambda detokenize, **settings: settings
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    return load("vllm/run.py")


def test_prefill_ends_when_each_row_has_a_token(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock of steps: the last of three rows starts in the fifth, and two more end it."""
    engine = Engine(delay=2, tokens=3)
    monkeypatch.setattr(run, "time", SimpleNamespace(perf_counter=lambda: engine.steps))
    assert run._generate(engine, [[5, 6]] * 3, 3) == (5, 2)

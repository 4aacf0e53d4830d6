"""However the transfers are delayed against compute and each other, the tokens stay: order is kept
by events."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o import MemoryBudget, Policy, SamplingParams
from flexgen_h2o.tiers.device import StandInDevice
from flexgen_h2o.tiers.disk import DirectFile
from tests.parity.reference import LONG, Ended, run, tokens_of

WORK = {"read": DirectFile, "write": DirectFile, "copy": StandInDevice}
SECONDS = 0.004


def delay(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, share: float) -> None:
    """That share of the calls of `owner.name` takes longer, which ones by chance; before and after
    the work."""
    whole = getattr(owner, name)
    chance = random.Random(name)

    def slow(*args: Any, **kwargs: Any) -> Any:
        if chance.random() < share:
            time.sleep(SECONDS)
        found = whole(*args, **kwargs)
        if chance.random() < share:
            time.sleep(SECONDS)
        return found

    monkeypatch.setattr(owner, name, slow)


@pytest.mark.parametrize(
    ("percent", "slow"),
    [
        ((0, 0, 0, 0, 0, 0), ("read",)),
        ((0, 0, 0, 0, 0, 0), ("write",)),
        ((0, 100, 0, 100, 0, 100), ("copy",)),
        ((30, 30, 30, 30, 30, 30), ("read", "write", "copy")),
    ],
    ids=str,
)
def test_slow_transfers(
    percent: tuple[int, int, int, int, int, int],
    slow: tuple[str, ...],
    ended: Ended,
    tmp_path: Path,
    monkeypatch,
) -> None:
    for name in slow:
        delay(monkeypatch, WORK[name], name, 0.05)
    budget = MemoryBudget("64MiB", "64MiB", "64MiB")
    params = SamplingParams(max_tokens=LONG)
    out = run(ended.folder, ended.prompts, Policy(3, 3, percent), tmp_path, params, budget)
    assert tokens_of(out) == ended.tokens

"""Wrong types and values in Python: one UsageError that begins with the argument's name; numpy's
numbers are taken."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexgen_h2o import H2O, LLM, Full, Local, MemoryBudget, Policy, SamplingParams
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.integrations import disable_h2o, enable_h2o
from flexgen_h2o.kvcache.eviction import H2ONorm, Random, SnapKV

NAN = math.nan
INF = math.inf
WRONG: list[tuple[type | Callable[..., Any], dict[str, Any], str]] = [
    (LLM, {"budget": "1GiB"}, "budget"),
    (LLM, {"budget": {}}, "budget"),
    (LLM, {"budget": 5}, "budget"),
    (LLM, {"policy": None}, "policy"),
    (LLM, {"policy": 5}, "policy"),
    (LLM, {"policy": ""}, "--policy"),
    (LLM, {"model": 5}, "model"),
    (LLM, {"model": None}, "model"),
    (LLM, {"model": ""}, "--model"),
    (LLM, {"device": 5}, "device"),
    (LLM, {"dtype": {}}, "dtype"),
    (LLM, {"hardware": 5}, "hardware"),
    (LLM, {"path": 5}, "path"),
    (LLM, {"path": ""}, "--path"),
    (LLM, {"path": "no/such"}, "--path"),
    (LLM, {"revision": 5}, "revision"),
    (LLM, {"offload_dir": 5}, "--offload-dir"),
    (LLM, {"offload_dir": ""}, "--offload-dir"),
    (LLM, {"eviction": "h2o"}, "eviction"),
    (LLM, {"eviction": H2O}, "e"),
    (MemoryBudget, {"host": 1.5}, "--host-mem"),
    (MemoryBudget, {"disk": NAN}, "--disk-mem"),
    (MemoryBudget, {"host": b"1GiB"}, "--host-mem"),
    (MemoryBudget, {"host": np.float64(5.5)}, "--host-mem"),
    (Policy, {"gpu_batch_size": 2.0}, "gpu_batch_size"),
    (Policy, {"percent": 5}, "percent"),
    (Policy, {"weight_bits": "4"}, "weight_bits"),
    (SamplingParams, {"temperature": INF}, "temperature"),
    (H2O, {"heavy_ratio": "x"}, "heavy_ratio"),
    (H2O, {"heavy_ratio": NAN}, "heavy_ratio"),
    (H2O, {"recent_ratio": True}, "recent_ratio"),
    (H2O, {"heavy_size": 4.0}, "heavy_size"),
    (H2O, {"positions": []}, "positions"),
    (Local, {"sinks": -1}, "sinks"),
    (Local, {"sinks": "4"}, "sinks"),
    (H2ONorm, {"grace": NAN}, "grace"),
    (SnapKV, {"kernel": 4}, "kernel"),
    (Random, {"seed": -1}, "seed"),
    (enable_h2o, {"model": 5}, "model"),
    (enable_h2o, {"model": 5, "mode": []}, "mode"),
    (enable_h2o, {"model": 5, "heavy_ratio": "x"}, "heavy_ratio"),
    (disable_h2o, {"model": 5}, "model"),
]


def refused(name: str, call: Callable[[], object]) -> None:
    with pytest.raises(UsageError) as raised:
        call()
    assert (
        str(raised.value).startswith(name)
        and len(str(raised.value)) < 300
        and "\n" not in str(raised.value)
    )


def test_a_wrong_argument_is_named() -> None:
    for made, given, name in WRONG:
        named = {"model": "opt-tiny", **given} if made is LLM else given
        refused(name, partial(made, **named))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(
        Path("opt-tiny"), Policy(1, 1), device="cpu", offload_dir=tmp_path_factory.mktemp("offload")
    ) as made:
        yield made


ONE = SamplingParams(max_tokens=1)
CALLS: list[tuple[str, Callable[[Any], object]]] = [
    ("params[0]", lambda llm: llm.generate(["a"], [1, 2])),
    ("params: 0", lambda llm: llm.generate(["a"], [])),
    ("params: 1", lambda llm: llm.generate([], [ONE])),
    ("params", lambda llm: llm.generate(["a"], {"max_tokens": 3})),
    ("params", lambda llm: llm.generate(["a"], 5)),
    ("params[1]", lambda llm: llm.generate(["a", "b"], [ONE, None])),
    ("prompts", lambda llm: llm.generate(None)),
    ("prompts", lambda llm: llm.generate({"a": 1})),
    ("prompts[0]", lambda llm: llm.generate([1, 2])),
    ("watch_logits", lambda llm: llm.generate(["a"], ONE, watch_logits=5)),
    ("refill", lambda llm: llm.generate(["a"], ONE, refill="no")),
    ("max_tokens_per_sweep", lambda llm: llm.follow([[5]], [[5]], print, max_tokens_per_sweep=0)),
    ("policy", lambda llm: llm.use(None)),
    ("rows", lambda llm: llm.expect("x")),
    ("eviction", lambda llm: setattr(llm, "eviction", "h2o")),
    ("share_prefix", lambda llm: setattr(llm, "share_prefix", 5)),
]


def test_a_wrong_argument_of_a_call_is_named(llm: LLM) -> None:
    for name, call in CALLS:
        refused(name, partial(call, llm))
    assert len(llm.generate([[5]], ONE)) == 1, "an LLM that refused something goes on"


def test_numbers_of_numpy_are_numbers(llm: LLM) -> None:
    """And become plain ones, which JSON takes."""
    policy = Policy(
        np.int64(2),
        np.int32(1),
        tuple(np.array([100, 0, 100, 0, 100, 0])),
        attn_sparsity=np.float32(1),
    )
    assert policy == Policy(2, 1) and json.loads(json.dumps(policy.to_json())) == policy.to_json()
    budget = MemoryBudget(np.int64(5), 4e9, np.float64(7))
    assert (budget.device, budget.host, budget.disk) == (5, 4 * 10**9, 7) and type(
        budget.device
    ) is int
    params = SamplingParams(
        np.int64(1), np.float32(0.5), np.float64(0.5), np.uint8(3), np.int64(7), logprobs=np.int8(2)
    )
    assert params == SamplingParams(1, 0.5, 0.5, 3, 7, logprobs=2) and type(params.seed) is int
    kept = H2O(heavy_size=np.int64(4), recent_ratio=np.float32(0.5))
    assert kept == H2O(heavy_size=4, recent_ratio=0.5) and json.dumps(kept.to_json())
    assert llm.generate([np.array([5, 6]), [np.int64(5)]], [params, ONE])[1].token_ids
    assert llm.generate([], []) == [] and Full() == Full()

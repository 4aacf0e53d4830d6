"""Wrong types and values in Python: one UsageError that begins with the argument's name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexgen_h2o import H2O, LLM, MemoryBudget, Policy, SamplingParams
from flexgen_h2o.cli_common import flag_of
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.integrations import disable_h2o, enable_h2o
from flexgen_h2o.kvcache.eviction import EVICTING

# Wrong values by argument; the message begins with the argument or its flag.
WRONG: dict[Callable[..., Any], dict[str, tuple[object, ...]]] = {
    partial(LLM, "opt-tiny"): {
        "budget": ("1GiB", {}, 5),
        "policy": (None, 5, ""),
        "device": (5,),
        "dtype": ({},),
        "hardware": (5,),
        "path": (5, "", "no/such"),
        "revision": (5,),
        "offload_dir": (5, ""),
        "eviction": ("h2o", H2O),
    },
    LLM: {"model": (5, None, "")},
    MemoryBudget: {"host": (1.5, b"1GiB", np.float64(5.5)), "disk": (math.nan,)},
    Policy: {"percent": (5,)},
    enable_h2o: {"model": (5,)},
    partial(enable_h2o, 5): {"mode": ([],), "heavy_ratio": ("x",)},
    disable_h2o: {"model": (5,)},
}
# Values of another type, or out of range, by the type of a setting.
WRONG_SETTINGS: dict[str, tuple[object, ...]] = {
    "int": (4.5, 4.0, "4", True, math.nan),
    "float": ("x", math.nan, math.inf, -1, True),
    "bool": ("yes", 1),
    "str": ([], "sideways"),
}


def refused(name: str, call: Callable[[], object]) -> None:
    with pytest.raises(UsageError) as raised:
        call()
    text = str(raised.value)
    assert text.startswith((name, flag_of(name))) and len(text) < 300 and "\n" not in text


def test_a_wrong_argument_is_named() -> None:
    for made, arguments in WRONG.items():
        for name, values in arguments.items():
            for value in values:
                refused(name, partial(made, **{name: value}))


@pytest.mark.parametrize("kind", [Policy, SamplingParams, H2O, *EVICTING.values()])
def test_a_wrong_setting_is_named(kind: type[Policy]) -> None:
    ruled = [f for f in fields(kind) if f.metadata.keys() - {"help"}]
    assert ruled
    for f in ruled:
        rules = f.metadata
        name, _, _ = str(f.type).partition(" | ")
        values = list(WRONG_SETTINGS.get(name, ()) if name != "str" or "choices" in rules else ())
        values += [rules["low"] - 1] if "low" in rules else []
        values += [rules["high"] + 1] if rules.get("high") else []
        for value in values:
            refused(f.name, partial(kind, **{f.name: value}))


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
    ("params", lambda llm: llm.generate(["a"], {"max_tokens": 3})),
    ("params[1]", lambda llm: llm.generate(["a", "b"], [ONE, None])),
    ("prompts", lambda llm: llm.generate(None)),
    ("prompts[0]", lambda llm: llm.generate([1, 2])),
    ("watch_logits", lambda llm: llm.generate(["a"], ONE, watch_logits=5)),
    ("max_tokens_per_sweep", lambda llm: llm.follow([[5]], [[5]], print, max_tokens_per_sweep=0)),
    ("policy", lambda llm: llm.use(None)),
    ("eviction", lambda llm: setattr(llm, "eviction", "h2o")),
]


def test_a_wrong_argument_of_a_call_is_named(llm: LLM) -> None:
    for name, call in CALLS:
        refused(name, partial(call, llm))
    assert len(llm.generate([[5]], ONE)) == 1, "an LLM that refused something goes on"

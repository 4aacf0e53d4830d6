"""torch's default dtype and device, as a caller may have set them, reach nothing of the package."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import flexgen_h2o
from flexgen_h2o import H2O, Policy, SamplingParams
from flexgen_h2o.kvcache.eviction import Eviction
from tests.parity.reference import ByShape, opened, tokens_of

PACKAGE = Path(flexgen_h2o.__file__).parent
# torch's functions that make tensors: of these all take the default device, and of the first the
# default dtype.
WITH_DTYPE = {"empty", "zeros", "ones", "eye", "rand", "randn", "linspace", "logspace"}
WITH_DEVICE = WITH_DTYPE | {
    "full",
    "tensor",
    "arange",
    "as_tensor",
    "asarray",
    "scalar_tensor",
    "randint",
    "randperm",
    "empty_strided",
}


@pytest.mark.parametrize(
    ("shape", "policy", "eviction", "dtype"),
    [
        ("normal", Policy(2, 2, (30,) * 6), None, torch.float64),
        ("llama, rope yarn", Policy(2, 2, (0,) * 6), H2O(kv_budget=0.5), torch.bfloat16),
        ("qwen3_moe", Policy(2, 1, compress_cache=True), H2O(kv_budget=0.5), torch.float64),
    ],
)
def test_tokens_are_the_same(
    shape: str,
    policy: Policy,
    eviction: Eviction | None,
    dtype: torch.dtype,
    reference: ByShape,
    tmp_path: Path,
) -> None:
    known = reference(shape)

    def tokens() -> list[list[int]]:
        with opened(known.folder, policy, tmp_path, eviction=eviction) as llm:
            return tokens_of(llm.generate(known.prompts, SamplingParams(max_tokens=8)))

    want = tokens()
    try:
        torch.set_default_dtype(dtype)
        torch.set_default_device("meta")
        assert tokens() == want
        assert torch.get_default_dtype() == dtype and torch.empty(1).device.type == "meta"
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def test_whatever_makes_a_tensor_says_its_dtype_and_its_device() -> None:
    """But for numbers that are whole: their dtype depends on no default."""
    problems = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            name = call.func.attr
            given = {keyword.arg for keyword in call.keywords}
            if ast.unparse(call.func.value) != "torch" or None in given:
                continue
            for argument, names in (("dtype", WITH_DTYPE), ("device", WITH_DEVICE)):
                if name in names and argument not in given:
                    problems.append(f"{path.name}:{call.lineno}: {ast.unparse(call)}")
    assert not problems

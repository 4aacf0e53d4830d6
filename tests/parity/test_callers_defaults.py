"""torch's default dtype and device, as a caller may have set them, reach nothing of the package."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import flexgen_h2o
from flexgen_h2o import H2O, LLM, Policy, SamplingParams
from flexgen_h2o.kvcache.eviction import Eviction
from tests.parity.cases import PLACEMENTS
from tests.parity.reference import Reference, tokens_of

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


@contextmanager
def defaults(dtype: torch.dtype, device: str, by_context: bool) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        if by_context:
            with torch.device(device):
                yield
        else:
            torch.set_default_device(device)
            yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("by_context", [True, False])
@pytest.mark.parametrize(
    ("shape", "policy", "eviction"),
    [
        ("normal", Policy(2, 2, PLACEMENTS["everything split 30/30"]), None),
        (
            "llama, rope yarn",
            Policy(2, 2, PLACEMENTS["all on disk"]),
            H2O(heavy_size=3, recent_size=3),
        ),
        ("qwen3_moe", Policy(2, 1, compress_cache=True, cache_window=4), H2O(kv_budget=0.5)),
    ],
)
def test_tokens_are_the_same(
    shape: str,
    policy: Policy,
    eviction: Eviction | None,
    dtype: torch.dtype,
    by_context: bool,
    reference: Callable[[str], Reference],
    tmp_path: Path,
) -> None:
    known = reference(shape)

    def tokens() -> list[list[int]]:
        with LLM(str(known.folder), policy, eviction, dtype="float32", offload_dir=tmp_path) as llm:
            return tokens_of(llm.generate(known.prompts, SamplingParams(max_tokens=8)))

    want = tokens()
    with defaults(dtype, "meta", by_context):
        assert tokens() == want
        assert torch.get_default_dtype() == dtype and torch.empty(1).device.type == "meta"


def test_whatever_makes_a_tensor_says_its_dtype_and_its_device() -> None:
    """But for numbers that are whole: their dtype depends on no default."""
    problems = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            name = call.func.attr
            given = {keyword.arg for keyword in call.keywords}
            if (
                not (isinstance(call.func.value, ast.Name) and call.func.value.id == "torch")
                or None in given
            ):
                continue
            wanted = ({"dtype"} if name in WITH_DTYPE else set()) | (
                {"device"} if name in WITH_DEVICE else set()
            )
            problems += [
                f"{path.name}:{call.lineno}: {ast.unparse(call)} lacks {lack}"
                for lack in wanted - given
            ]
    assert not problems

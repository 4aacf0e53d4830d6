"""lm-eval's questions through the engine: its own Hugging Face backend with the full cache, the
reference with H2O."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extras import why_not

pytest.importorskip("lm_eval", reason=why_not("eval"))
pytest.importorskip("accelerate", reason=why_not("bench"))  # for lm-eval's Hugging Face backend

from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook
from lm_eval.models.huggingface import HFLM

from flexgen_h2o import H2O, LLM, Policy
from flexgen_h2o.checkpoint.resolve import PACKAGED
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.units import FORCED_CHUNK
from flexgen_h2o.evaluation.lm_eval_model import EngineLM
from tests.eviction import policies as plain
from tests.eviction.plain_models import plain_model
from tests.eviction.policies import Budget
from tests.eviction.reference import evicted_greedy
from tests.parity.reference import random_model

TOLERANCE = 1e-4
POSITIONS = 96
LONG = "def read(path):\n    return open(path)\n" * 12  # more tokens than there are positions
FOLDERS = {
    "opt": {},
    "llama": {"model_type": "llama"},  # three query heads a kv-head
    "gpt_neox": {"model_type": "gpt_neox"},
}
PAIRS = [
    ("import os\ndef f(x):\n    return", " x"),
    ("import os\ndef f(x):\n    return", " y"),  # the last token differs
    ("import os\ndef f(x):\n    return", " x + 1"),
    ("import os\ndef f(x):\n    return", " x + 2"),
    ("import os\ndef f(x):\n    return", " x"),  # asked twice
    ("class A: ", "pass"),  # the space goes to the continuation
    ("", "import sys\nimport os"),
    ("a", " = 1"),
    ("x = [", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]"),
    (LONG, "for"),
    (LONG, " a in b:\n        pass"),
]
TEXTS = ["import os", LONG, "x"]
GENERATE: list[tuple[str, dict[str, Any]]] = [
    ("import os\n", {"until": ["\n\n"], "max_gen_toks": 12}),
    ("def f(x):\n    return", {"until": [], "max_gen_toks": 9, "do_sample": False}),
    (LONG, {"until": "zz", "max_gen_toks": 20, "temperature": 0.0}),
    ("class", {"until": ["e", "a", "i"], "max_gen_toks": 30}),
]


def requests(kind: str, given: Sequence[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, args, i) for i, args in enumerate(given)]


ROLLING = requests("loglikelihood_rolling", [(text,) for text in TEXTS])


def save(folder: Path, **shape: Any) -> Any:
    """Write a random model with the shipped tokenizer and few positions, and return it."""
    sizes = {"vocab_size": 2048, "max_position_embeddings": POSITIONS}
    model = random_model(**{**sizes, "eos_token_id": 2, "bos_token_id": 0, **shape})
    model.save_pretrained(folder)
    for path in PACKAGED["opt-tiny"].glob("tokenizer*"):
        shutil.copy(path, folder)
    return model


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model, unless a test asks for one of a family."""
    name = getattr(request, "param", "opt-tiny")
    if name not in FOLDERS:
        return PACKAGED["opt-tiny"]
    made = tmp_path_factory.mktemp("model")
    save(made, **FOLDERS[name])
    return made


@pytest.fixture(scope="module")
def theirs(folder: Path) -> HFLM:
    return HFLM(str(folder), device="cpu", dtype="float32", batch_size=1)


@pytest.fixture
def ours(folder: Path, tmp_path: Path) -> Any:
    with LLM(folder, Policy(4, 2), dtype="float32", device="cpu", offload_dir=tmp_path) as llm:
        yield EngineLM(llm)


def assert_close(found: Sequence[tuple[float, bool]], want: Sequence[tuple[float, bool]]) -> None:
    assert [greedy for _, greedy in found] == [greedy for _, greedy in want]
    for (own, _), (other, _) in zip(found, want, strict=True):
        assert own == pytest.approx(other, abs=TOLERANCE, rel=1e-5)


class Hook(CacheHook):
    """lm-eval's cache of answers."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], Any] = {}

    def add_partial(self, attr: str, req: Any, res: Any) -> None:
        self.kept[attr, repr(req)] = res


@pytest.mark.parametrize("folder", ["opt-tiny", *FOLDERS], indirect=True)
def test_answers_are_lm_evals_own(theirs: HFLM, ours: EngineLM) -> None:
    """Log-likelihoods, also of the greedy continuation, those of whole texts, and texts. Each goes
    to the cache."""
    ours.set_cache_hook(hook := Hook())
    context = "def f(x):\n    return"
    asked = requests("generate_until", [(context, {"until": [], "max_gen_toks": 5})])
    [text] = theirs.generate_until(asked, disable_tqdm=True)
    pairs = requests("loglikelihood", [*PAIRS, (context, text), (context, text + "q")])
    found = ours.loglikelihood(pairs, disable_tqdm=True)
    assert_close(found, theirs.loglikelihood(pairs, disable_tqdm=True))
    assert found[0] == found[4]
    rolling = ours.loglikelihood_rolling(ROLLING, disable_tqdm=True)
    want = theirs.loglikelihood_rolling(ROLLING, disable_tqdm=True)
    for text, own, other in zip(TEXTS, rolling, want, strict=True):
        most = TOLERANCE * (1 + len(theirs.tok_encode(text)) / 100)
        assert own == pytest.approx(other, abs=most), text[:20]
    if ours.max_length == POSITIONS:
        assert len(ours.tok_encode(LONG)) > POSITIONS, "nothing is cut"
    asked = requests("generate_until", GENERATE)
    texts = ours.generate_until(asked)
    assert texts == theirs.generate_until(asked, disable_tqdm=True)
    for given, answers in ((pairs, found), (ROLLING, rolling), (asked, texts)):
        for one, answer in zip(given, answers, strict=True):
            keys = ((one.request_type, repr(part)) for part in (one.args, one.args[0]))
            assert answer in [hook.kept.get(key) for key in keys]


@pytest.mark.parametrize(
    ("shape", "together"), [("opt", True), ("llama", False), ("gpt_neox", True)]
)
def test_h2o_forces_the_continuation_through_decode(
    shape: str, together: bool, tmp_path: Path
) -> None:
    """The reference keeps the columns of its own full attention matrix; a continuation is taken
    token by token."""
    model = save(tmp_path / "model", **FOLDERS[shape])
    generator = torch.Generator().manual_seed(3)
    context = torch.randint(4, 2048, (21,), generator=generator).tolist()
    more = torch.randint(4, 2048, (FORCED_CHUNK + 4,), generator=generator).tolist()
    rows = [(context, more), (context, [*more[:-1], 7]), (context, [9]), (context[:9], more[:6])]
    asked = [(("a", str(i)), list(c), list(m)) for i, (c, m) in enumerate(rows)]
    sizes = {"heavy_size": 5, "recent_size": 3}
    with LLM(tmp_path / "model", Policy(2, 2), H2O(**sizes), "cpu", "float32") as llm:  # type: ignore[arg-type]
        own = EngineLM(llm)
        parts = [asked] if together else [[one] for one in asked]
        found = [answer for part in parts for answer in own._loglikelihood_tokens(part)]
        llm.eviction = H2O(heavy_size=40, recent_size=40)
        whole = own._loglikelihood_tokens(asked)
    want = []
    reference = plain_model(model)
    policy = plain.h2o(Budget(**sizes))
    for prompt, ids in rows:
        given = dict(enumerate(ids))
        logits = evicted_greedy(reference, prompt, len(ids), policy, given=given).logits
        each = logits.double().log_softmax(-1)[range(len(ids)), ids]
        want.append((float(each.sum()), logits.argmax(-1).tolist() == ids))
    assert_close(found, want)
    assert abs(found[0][0] - whole[0][0]) > 0.01, "nothing was evicted"


@pytest.mark.parametrize(
    ("policy", "eviction", "mode"),
    [
        (Policy(1, 1), None, "prefill"),
        (Policy(1, 1), H2O(), "decode"),
        (Policy(1, 1, compress_cache=True), None, "decode"),
        (Policy(1, 1, attn_sparsity=0.5), None, "decode"),
    ],
)
def test_the_mode_follows_what_stays_in_the_cache(
    policy: Policy, eviction: H2O | None, mode: str, tmp_path: Path
) -> None:
    with LLM("opt-tiny", policy, eviction, "cpu", offload_dir=tmp_path) as llm:
        assert EngineLM(llm).score_mode == mode


def test_choices_of_one_token_are_one_row(ours: EngineLM, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    run = ours.llm.run

    def counted(prompts: Sequence[Any], *more: Any, **names: Any) -> Any:
        rows.append(len(prompts))
        return run(prompts, *more)

    monkeypatch.setattr(ours.llm, "run", counted)
    for choices in ([[8], [9], [10]], [[4, 8], [4, 9], [4, 10]], [[8, 4], [9, 4]]):
        ours._loglikelihood_tokens([(None, [5, 6, 7], choice) for choice in choices])
    assert rows == [1, 1, 2]
    assert ours.loglikelihood([]) == ours.generate_until([]) == ours.loglikelihood_rolling([]) == []


def test_draws_are_repeatable_and_differ(ours: EngineLM) -> None:
    drawn = ("import", {"do_sample": True, "temperature": 1.5, "max_gen_toks": 12, "until": []})
    asked = requests("generate_until", [drawn, drawn, GENERATE[0]])
    first, second, _ = ours.generate_until(asked)
    assert first != second and ours.generate_until(asked)[:2] == [first, second]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"max_gen_toks": 5000}, "max_gen_toks=5000"),
        ({"do_sample": True, "temperature": -1.0, "max_gen_toks": 5}, "--gen-kwargs temperature"),
    ],
)
def test_what_cannot_be_generated_is_refused(
    ours: EngineLM, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        ours.generate_until(requests("generate_until", [("x", given)]))


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    random_model(0).save_pretrained(tmp_path)
    with (
        LLM(tmp_path, Policy(1, 1), device="cpu") as llm,
        pytest.raises(UsageError, match="no tokenizer"),
    ):
        EngineLM(llm)


def test_chat_templates(ours: EngineLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes no system's message, as HFLM has it, and one that takes nothing."""
    history = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    refuse = "{{ raise_exception('not that') }}"
    template = (
        "{% if messages[0].role == 'system' %}" + refuse + "{% endif %}{{ messages[0].content }}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    monkeypatch.setattr(ours.tokenizer, "chat_template", template)
    assert ours.apply_chat_template(history) == "hi>"
    assert ours.apply_chat_template(history, False) == "hi"
    monkeypatch.setattr(ours.tokenizer, "chat_template", refuse)
    with pytest.raises(UsageError, match="template refuses: not that"):
        ours.apply_chat_template(history)

"""`evaluate lm-eval` run to its end over tasks of local JSON lines: tables, files, h2o_hf's steps,
kills, refusals."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.extras import why_not

pytest.importorskip("lm_eval", reason=why_not("eval"))

from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from flexgen_h2o import LLM, Policy
from flexgen_h2o.checkpoint.resolve import PACKAGED
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.evaluation.lm_eval_model import EngineLM
from flexgen_h2o.evaluation.lm_eval_records import read_answers
from tests.doors.conftest import Answer, Door, read_json, read_lines
from tests.forks import Forks
from tests.parity.reference import random_model

FLAGS = (
    "--include_path tasks --dtype float32 --offload-dir o --gpu-batch-size 4 --num-gpu-batches 2"
)
QUESTIONS = 12
CHOICES = [" x", " y", " x + 1", " self.x"]
CHOICE = """
task: choice
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choice.jsonl}}
test_split: test
fewshot_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
TEXT = """
task: text
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choice.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 6}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""
ROLLING = """
task: rolling
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choice.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
"""
# Reading lm-eval's own 10,000 task files takes as long as all tests here.
QUICK = """
import functools, sys
from lm_eval.tasks import TaskManager
TaskManager.__init__ = functools.partialmethod(TaskManager.__init__, include_defaults=False)
from flexgen_h2o.evaluate import main
"""


@pytest.fixture(autouse=True)
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with task files; lm-eval's own tasks are not read."""
    quick = functools.partialmethod(TaskManager.__init__, include_defaults=False)
    monkeypatch.setattr(TaskManager, "__init__", quick)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [
        {"question": f"def f{i}(self, x):\n    return", "choices": CHOICES, "answer": i % 4}
        for i in range(QUESTIONS)
    ]
    (folder / "choice.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("choice", CHOICE), ("text", TEXT), ("rolling", ROLLING)):
        (folder / f"{name}.yaml").write_text(text.replace("FOLDER", str(folder)))
    return folder


@pytest.fixture
def lm_eval(command: Door) -> Door:
    """The command with its flags, which ends with `code`."""

    def run(flags: str, code: int = 0) -> Answer:
        named = (
            flags
            if "--model" in flags or flags.startswith("generate")
            else f"{flags} --model opt-tiny"
        )
        out = command(f"evaluate lm-eval {named}")
        assert out.code == code, out.err
        return out

    return run


def results(folder: Path) -> dict[str, Any]:
    [path] = folder.rglob("results*.json")
    return read_json(path)


def samples(folder: Path, task: str = "choice") -> list[Any]:
    [path] = folder.rglob(f"samples_{task}*.jsonl")
    return [json.loads(line)["resps"] for line in path.read_text().splitlines()]


def test_tasks_of_all_kinds_in_one_command(lm_eval: Door, tmp_path: Path) -> None:
    out = lm_eval(
        f"{FLAGS} --tasks choice,text rolling --num-fewshot 1 --limit 6 --output_path out "
        "--log_samples"
    )
    assert "|choice" in out.out and "acc_norm" in out.out and "exact_match" in out.out
    found = results(tmp_path / "out")
    assert set(found["results"]) == {"choice", "text", "rolling"} and found["n-shot"]["choice"] == 1
    assert (
        found["config"]["model"] == "flexgen-h2o"
        and found["config"]["model_args"]["model"] == "opt-tiny"
    )
    assert (
        found["config"]["eviction"]["name"] == "full"
        and found["config"]["model_dtype"] == "float32"
    )
    assert found["results"]["rolling"]["word_perplexity,none"] > 1
    assert len(samples(tmp_path / "out")) == 6


def test_h2o_hf_in_three_steps(
    lm_eval: Door, tmp_path: Path, write_jsonl: Callable[..., Path]
) -> None:
    out = lm_eval("generate --tasks choice --include_path tasks --limit 5 --output requests.jsonl")
    lines = (tmp_path / "requests.jsonl").read_text().splitlines()
    assert out.out == "20 requests in requests.jsonl, 20 of them different\n" and len(lines) == 20
    text = json.dumps("def f0(self, x):\n    return x")
    assert lines[0] == (
        '{"best_of": 1, "echo": true, "logprobs": 1, "max_tokens": 0, "model": "x", "n": 1, '
        '"prompt": ' + text + ", "
        '"request_type": "language-model-inference", "stop": null, "temperature": 0, "top_p": 1}'
    )
    lm_eval(f"run --input requests.jsonl --output answers.jsonl {FLAGS.partition('tasks ')[2]}")
    out = lm_eval(
        "score --input answers.jsonl --tasks choice --include_path tasks --limit 5 --json "
        "scored.json"
    )
    assert out.out.startswith("20 items in the cache\n{\n")
    scored = read_json(tmp_path / "scored.json")
    assert json.loads(out.out.partition("\n")[2]) == scored
    lm_eval(f"{FLAGS} --tasks choice --limit 5 --output_path out")
    direct = results(tmp_path / "out")["results"]["choice"]
    for name in ("acc,none", "acc_norm,none"):
        assert scored["results"]["choice"][name] == direct[name]
    # h2o_hf's own rows: the request beside the result.
    bodies = [row["response"]["body"] for row in read_lines(tmp_path / "answers.jsonl")]
    by_prompt = {body["choices"][0]["text"]: {"choices": body["choices"]} for body in bodies}
    asked = map(json.loads, lines)
    write_jsonl(
        *({"request": one, "result": by_prompt[one["prompt"]]} for one in asked),
        name="theirs.jsonl",
    )
    flags = "--tasks choice --include_path tasks --limit 5"
    again = lm_eval(f"score --result-file theirs.jsonl {flags}")
    assert again.out == out.out
    mean = lm_eval(f"score --input theirs.jsonl {flags} --loglikelihood mean")
    assert mean.out.startswith("20 items in the cache")
    assert (
        "has no answer to"
        in lm_eval("score --input theirs.jsonl --tasks choice --include_path tasks", code=2).err
    )


def test_a_line_without_a_key_that_others_have_is_refused(lm_eval: Door, tasks: Path) -> None:
    lines = (tasks / "choice.jsonl").read_text().splitlines(keepends=True)
    lines[6] = lines[6].replace("question", "questoin")
    (tasks / "choice.jsonl").write_text("".join(lines))
    out = lm_eval(f"{FLAGS} --tasks choice", 2)
    assert "choice.jsonl:7: has no 'question', as other lines have" in out.err


SINGLE = CHOICE.replace("task: choice", "task: single").replace('"{{choices}}"', "[' x', ' y']")
SINGLE = SINGLE.replace("doc_to_target: answer", 'doc_to_target: "{{answer % 2}}"')


def test_a_grid_of_policies_and_budgets(lm_eval: Door, tasks: Path, tmp_path: Path) -> None:
    """It evicts inside the context: choices of one token change too. A second run has nothing to
    do."""
    (tasks / "single.yaml").write_text(SINGLE.replace("FOLDER", str(tasks)))
    grid = f"grid {FLAGS} --output-dir grid"
    flags = f"{grid} --tasks single,choice --limit 2 --policies full h2o --kv-budget 0.2"
    first = lm_eval(f"{flags} --json grid.json --markdown grid.md")
    found = read_json(tmp_path / "grid.json")
    assert [cell["title"] for cell in found["cells"]] == ["full", "h2o 0.2"]
    assert found["cells"][0]["kv_share"] == 1 and found["cells"][1]["kv_share"] < 0.4
    full, evicted = (_last_logprobs(tmp_path / cell["output"]) for cell in found["cells"])
    assert full != pytest.approx(evicted, abs=0.01)
    assert (tmp_path / "grid.md").read_text().strip() in first.out
    lm_eval(f"{flags} --json again.json")
    assert read_json(tmp_path / "again.json") == found
    answers = (tmp_path / found["cells"][0]["output"]).read_text().splitlines()
    assert len(answers) == len(set(answers)) == 12
    other = lm_eval(f"{flags} --num-fewshot 1", code=2)
    assert "has requests of other tasks, or was made with other flags" in other.err


def _last_logprobs(answers: Path) -> list[float]:
    return [one["token_logprobs"][-1] for _, one in sorted(read_answers(answers).items())]


def test_the_lines_of_h2o_hfs_readme(command: Door, tmp_path: Path) -> None:
    """Its steps 1 to 3, with their flags as written and another model."""
    step = "evaluate lm-eval"
    task = "--task-name choice --num-fewshot 1 --include_path tasks --limit 3"
    assert command(f"{step} generate --output-file choice-1.jsonl {task}").code == 0
    model = "--input-path choice-1.jsonl --model-name opt-tiny --model-type opt --offload-dir o"
    answers = {}
    for name, more in (
        ("local", "--enable_small_cache --heavy_ratio 0 --recent_ratio 0.2"),
        ("h2o", "--enable_small_cache --heavy_ratio 0.1 --recent_ratio 0.1"),
        ("usual", "--enable_small_cache"),
    ):
        assert command(f"{step} run --output-path {name}.jsonl {model} {more}").code == 0
        answers[name] = tuple(_last_logprobs(tmp_path / f"{name}.jsonl"))
    assert answers["h2o"] == answers["usual"] != answers["local"]
    scored = command(f"{step} score --result-file h2o.jsonl {task} --model-type opt")
    assert scored.code == 0 and '"acc,none"' in scored.out, scored.err


KILLED = (
    QUICK
    + """
import os, signal, sqlite3, time
from pathlib import Path
from lm_eval.api.model import CacheHook
kept, keep = [0], CacheHook.add_partial
def add_partial(self, *given):
    keep(self, *given)
    kept[0] += 1
    if kept[0] == 16:
        while True:
            [path] = Path().glob("answers-*.db")
            with sqlite3.connect(path) as db:
                if db.execute("select count(*) from unnamed").fetchone()[0] >= 8:
                    os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)
CacheHook.add_partial = add_partial
sys.exit(main(sys.argv[1:]))
"""
)
COUNTED = (
    QUICK
    + """
from lm_eval.api.model import CacheHook
kept, keep = [], CacheHook.add_partial
CacheHook.add_partial = lambda self, *given: (kept.append(given), keep(self, *given))
code = main(sys.argv[1:])
print("computed", len(kept))
sys.exit(code)
"""
)


@pytest.mark.slow
def test_a_killed_run_goes_on(forks: Forks, tmp_path: Path) -> None:
    line = f"lm-eval {FLAGS} --model opt-tiny --tasks choice --log_samples --device cpu --hh-size 6"
    flags = line.split()
    whole = forks.run(tmp_path, COUNTED, *flags, "--output_path", "whole")
    assert whole.code == 0 and f"computed {QUESTIONS * len(CHOICES)}" in whole.out, whole.err
    cached = [*flags, "--use_cache", "answers", "--output_path", "killed"]
    killed = forks.run(tmp_path, KILLED, *cached)
    assert killed.code == -9 and not (tmp_path / "killed").exists()
    again = forks.run(tmp_path, COUNTED, *cached)
    assert again.code == 0, again.err
    computed = int(again.out.rpartition("computed ")[2])
    assert 0 < computed <= QUESTIONS * len(CHOICES) - 8
    assert results(tmp_path / "killed")["results"] == results(tmp_path / "whole")["results"]
    for one, other in zip(samples(tmp_path / "killed"), samples(tmp_path / "whole"), strict=True):
        assert [float(value[0][0]) for value in one] == pytest.approx(
            [float(v[0][0]) for v in other], abs=1e-4
        )
    # Other settings have a cache of their own.
    other = forks.run(tmp_path, COUNTED, *cached[:-1], "other", "--recent-size", "2")
    assert (
        f"computed {QUESTIONS * len(CHOICES)}" in other.out
        and len(list(tmp_path.glob("answers-*.db"))) == 2
    )


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("", "--tasks: is missing"),
        ("--tasks nothing", "--tasks nothing: no task of lm-eval"),
        ("--tasks choice --limit 0", "--limit"),
        ("--tasks choice --num-fewshot 500", "--num-fewshot: asks for more solved examples"),
        ("--tasks choice --apply_chat_template", "has no chat template"),
        ("--tasks text --gen_kwargs num_beams=3", "--gen-kwargs num_beams=3: is not supported"),
        ("--tasks choice --batch_size 3", "--batch_size: is not a flag here"),
        ("generate --include_path tasks --tasks text --output x.jsonl", "a task generates text"),
        ("run --input none.jsonl --output x.jsonl", "--input none.jsonl: is no file"),
        ("score --include_path tasks --tasks choice", "--input: is missing"),
    ],
)
def test_refusals(lm_eval: Door, tmp_path: Path, flags: str, says: str) -> None:
    is_step = flags.startswith(("generate", "run", "score"))
    out = lm_eval(flags if is_step else f"--include_path tasks {flags}", code=2)
    assert says in out.err.splitlines()[-1] and not (tmp_path / "x.jsonl").exists()


def answer_of(prompt: object, values: object, tops: object) -> dict[str, Any]:
    """A row of h2o_hf's."""
    logprobs = {"token_logprobs": values, "top_logprobs": tops}
    return {"request": {"prompt": prompt}, "result": {"choices": [{"logprobs": logprobs}]}}


TOPS = [None, {"a": -1.0}]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"error": "timeout"}, r"is an error \(timeout\)"),
        ({"request": {"prompt": "a"}, "result": {"choices": [{}]}}, "has no request with its"),
        (answer_of([1, 2], [None, -1.0], TOPS), "has no request with its result"),
        (answer_of("a", [None, -1.0], [None, "a"]), "has no request with its result"),
        (answer_of("a", [None, -1.0], [None, {}]), "the logprobs are not those of an echo"),
        (answer_of("a", [None, "-1"], TOPS), "the logprobs are not those of an echo"),
    ],
)
def test_answers_of_other_tools_are_refused_by_line(
    tmp_path: Path, row: dict[str, Any], says: str
) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(UsageError, match=rf"--input .*:1: {says}"):
        read_answers(path)


def test_tokens_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    """A tokenizer may have more than a model."""
    random_model(0, vocab_size=2000).save_pretrained(tmp_path)
    for path in PACKAGED["opt-tiny"].glob("tokenizer*"):
        shutil.copy(path, tmp_path)
    with LLM(tmp_path, Policy(1, 1), device="cpu") as llm:
        own = EngineLM(llm)
        texts = map(own.tokenizer.decode, range(2000, 2048))
        text = next(t for t in texts if max(own.tok_encode(t)) >= 2000)
        for method, *args in (
            (own.loglikelihood, "x", f" x{text}"),
            (own.loglikelihood_rolling, text),
            (own.generate_until, text, {"until": [], "max_gen_toks": 2}),
        ):
            asked = [Instance(method.__name__, {}, tuple(args), 0)]
            with pytest.raises(UsageError, match="is outside the model's vocabulary"):
                method(asked, disable_tqdm=True)

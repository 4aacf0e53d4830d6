"""`evaluate summarize` run to its end on articles of its own: the grid, its files, and a
restart."""

from __future__ import annotations

import csv
import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o import H2O, LLM, Full, Policy, SamplingParams
from flexgen_h2o.evaluation import articles, summarize, summary
from tests.doors.conftest import POSITIONS, Answer
from tests.extras import needs

Door = Callable[..., Answer]
INSTRUCTION = "Sum up:\n"
NEW = 5
GRID = "--output-dir d --hh-size 3 6 --recent-size 4 --greedy"


class Unigrams:
    """In place of ROUGE, which is an extra: the share of a summary's letters that the reference
    has, six times."""

    def __call__(self, text: str, reference: str) -> list[float]:
        return [len(set(text) & set(reference)) / max(1, len(set(text)))] * len(articles.METRICS)


@pytest.fixture(autouse=True)
def _scorer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summarize, "Rouge", Unigrams)
    monkeypatch.setattr(summarize, "NEEDED", {})


@pytest.fixture
def records(write_jsonl: Callable[..., Path]) -> list[dict[str, Any]]:
    """Three articles of h2o_hf's form in in.jsonl; the last is too long for the model's
    positions."""
    sampling = {
        "temperature": 0.3,
        "stop": ["###"],
        "max_tokens": NEW,
        "top_p": 1.0,
        "n": 1,
        "logprobs": 1,
    }
    texts = ["def read(path):", "import os", "x = 1\n" * POSITIONS]
    made = [
        {"article": f"{text}\n\n{INSTRUCTION}", "summary_gt": f"the reference {i}", **sampling}
        for i, text in enumerate(texts)
    ]
    write_jsonl(*made, name="in.jsonl")
    return made


@pytest.fixture
def run(command: Door, words_model: Path, records: object) -> Door:
    def run(flags: str, code: int = 0) -> Answer:
        named = "" if "--model" in flags else f"--model {shlex.quote(str(words_model))}"
        engine = f"{named} --dtype float32 --offload-dir o --gpu-batch-size 2"
        source = "" if "--input" in flags else "--input in.jsonl"
        out = command(f"evaluate summarize {source} {engine} --resamples 20 {flags}")
        assert out.code == code, out.err
        return out

    return run


def figures(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().split("\n") if line]
    return sorted(rows, key=lambda row: int(row["custom_id"].removeprefix("line-")))


def test_a_grid(
    run: Door, records: list[dict[str, Any]], words_model: Path, tmp_path: Path
) -> None:
    out = run(f"{GRID} --policies full h2o --json r.json --markdown r.md --kvpress-dir kp")
    result = figures(tmp_path / "r.json")
    assert out.out.rstrip().endswith((tmp_path / "r.md").read_text().rstrip())
    assert result == figures(tmp_path / "d" / "summary.json")
    assert (result["articles"], result["cut"], result["skipped"], result["fields"]) == (
        3,
        1,
        0,
        {"temperature": 0.0},
    )
    assert "evaluate: 1 articles were cut to the 64 positions" in out.err
    assert [cell["title"] for cell in result["cells"]] == ["full", "h2o 3+4", "h2o 6+4"]
    outputs = [rows_of(tmp_path / "d" / f"{name}.jsonl") for name in ("full", "h2o-3+4", "h2o-6+4")]
    requests = [row["request"] for row in outputs[0]]
    assert requests[:2] == [{**one, "temperature": 0.0} for one in records[:2]]
    assert requests[2]["article"].startswith("x = 1\nx = 1") and requests[2]["article"].endswith(
        f"\n\n{INSTRUCTION}"
    )
    assert all([row["request"] for row in rows] == requests for rows in outputs)

    # the summaries are those that the policy writes; the scores, the KV and the layout say the same
    # of them
    prompts = [one["article"] for one in requests]
    params = SamplingParams(NEW, stop=("###",))
    for rows, eviction, cell in zip(
        outputs,
        (Full(), H2O(None, None, 3, 4), H2O(None, None, 6, 4)),
        result["cells"],
        strict=True,
    ):
        with LLM(
            words_model, Policy(2, 2), eviction, dtype="float32", offload_dir=tmp_path / "o"
        ) as llm:
            texts = [one.text for one in llm.generate(prompts, params)]
            lengths = [len(llm.model.encode(prompt)) for prompt in prompts]
            assert (
                max(lengths) <= POSITIONS - NEW < max(lengths) + 8
            )  # cut by no more than a word, or a few
        assert [row["result"]["choices"][0]["text"] for row in rows] == texts
        scores = [
            Unigrams()(text or "", one["summary_gt"])[0]
            for text, one in zip(texts, requests, strict=True)
        ]
        assert cell["scores"]["rouge2"]["value"] == pytest.approx(sum(scores) / 3)
        assert f"rouge-1: {sum(scores) / 3:.6f}, rouge-2: " in out.out
        most = 10**9 if eviction == Full() else eviction.heavy_size + eviction.recent_size + 1
        columns = [min(most, n + NEW - 1) for n in lengths]
        assert cell["kv_columns"] == pytest.approx(sum(columns) / 3)
        assert cell["kv_share"] == pytest.approx(sum(columns) / sum(n + NEW - 1 for n in lengths))
        assert cell["kv_bytes"] == pytest.approx(
            sum(columns) / 3 * 2 * 2 * 32 * 4
        )  # keys, values; layers; width; fp32
        assert cell["tokens_per_s"] > 0 and cell["articles"] == 3
        (folder,) = tmp_path.glob(f"kp/in__*__{cell['policy']}__{1 - cell['kv_share']:.2f}")
        with (folder / "predictions.csv").open(newline="") as file:
            read = list(csv.DictReader(file))
        assert [one["predicted_answer"] for one in read] == texts and read[0][
            "question"
        ] == INSTRUCTION
        assert figures(folder / "metrics.json")["rouge2"] == cell["scores"]["rouge2"]["value"]
    assert result["cells"][0]["less_first"] is None
    gap = (
        result["cells"][1]["scores"]["rouge1"]["value"]
        - result["cells"][0]["scores"]["rouge1"]["value"]
    )
    assert result["cells"][1]["less_first"]["rouge1"]["value"] == pytest.approx(gap)


def test_articles_as_messages(
    run: Door, words_model: Path, tmp_path: Path, write_jsonl: Callable[..., Path]
) -> None:
    """Each prompt is a message, with an instruction behind it if it has none; scores are of the
    contents."""
    folder = shutil.copytree(words_model, tmp_path / "chat")
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
    (folder / "chat_template.jinja").write_text(template)
    write_jsonl(
        {"article": f"import os\n\n{INSTRUCTION}", "summary_gt": "one", "logprobs": 1},
        {"article": "x = 1", "summary_gt": "two"},
        {"article": "x = 1\n" * POSITIONS, "summary_gt": "three"},
        name="in.jsonl",
    )
    flags = f"--output-dir d --policies full --gen-len {NEW} --greedy --chat --json r.json"
    out = run(f"--model {folder} {flags}")
    result = figures(tmp_path / "r.json")
    assert (result["chat"], result["articles"], result["cut"]) == (True, 3, 1), out.err
    asked = [
        json.loads(line) for line in (tmp_path / "d" / "requests.jsonl").read_text().splitlines()
    ]
    said = [one["messages"][0]["content"] for one in asked]
    assert said[:2] == [f"import os\n\n{INSTRUCTION.strip()}", f"x = 1\n\n{articles.INSTRUCTION}"]
    assert said[2].startswith("x = 1\nx = 1") and said[2].endswith(f"\n\n{articles.INSTRUCTION}")
    with LLM(folder, Policy(2, 2), dtype="float32", offload_dir=tmp_path / "o") as llm:
        prompts = [llm.model.encode_plain(f"<user>{one}\n<assistant>") for one in said]
        texts = [one.text for one in llm.generate(prompts, SamplingParams(NEW))]
    choices = [
        row["response"]["body"]["choices"][0] for row in rows_of(tmp_path / "d" / "full.jsonl")
    ]
    assert [choice["message"]["content"] for choice in choices] == texts
    wanted = ("one", "two", "three")
    scores = [Unigrams()(text or "", want)[0] for text, want in zip(texts, wanted, strict=True)]
    assert result["cells"][0]["scores"]["rouge2"]["value"] == pytest.approx(sum(scores) / 3)
    run(
        f"--model {folder} {flags.replace('--chat', '')}", code=2
    )  # other requests are in the folder


@needs("plot")
def test_a_picture_of_a_grid(run: Door, tmp_path: Path) -> None:
    run(f"{GRID} --policies full h2o --sample-num 1 --plot r.png")
    assert (tmp_path / "r.png").stat().st_size > 10_000


def test_a_restart_does_what_is_missing(run: Door, tmp_path: Path) -> None:
    run(f"{GRID} --policies local h2o --json whole.json")
    torn = tmp_path / "d" / "h2o-3+4.jsonl"
    before = {path: path.read_text() for path in (tmp_path / "d").glob("*+*.jsonl")}
    torn.write_text(before[torn][: len(before[torn]) // 2])  # as a kill leaves it
    out = run(f"{GRID} --policies local h2o --json again.json")
    assert out.out.count("nothing was left to do") == 3
    whole, again = (figures(tmp_path / f"{name}.json")["cells"] for name in ("whole", "again"))
    for one, other in zip(whole, again, strict=True):
        if one["title"] != "h2o 3+4":
            assert (
                one == other and one["tokens_per_s"] > 0
            )  # the speed is of the run that did the rows
        assert one["scores"] == other["scores"]
    assert {path: sorted(map(_tokens, rows_of(path))) for path in before} == {
        path: sorted(_tokens(json.loads(line)) for line in text.split("\n") if line)
        for path, text in before.items()
    }
    run(f"{GRID} --policies h2o-norm --json more.json")  # another policy goes into the same folder
    assert len(figures(tmp_path / "d" / "summary.json")["cells"]) == 6
    out = run(f"{GRID} --policies h2o --gen-len 3", code=2)
    assert "requests.jsonl: is of other articles, or was made with other flags" in out.err
    out = run(f"{GRID} --policies h2o --seed 7", code=2)  # the job's own sidecar
    assert "--seed was 0 and is 7" in out.err


def _tokens(row: dict[str, Any]) -> tuple[str, list[int]]:
    return row["custom_id"], row["response"]["body"]["choices"][0]["token_ids"]


def test_more_articles_go_on(run: Door, tmp_path: Path) -> None:
    run("--output-dir d --policies full --sample-num 1")
    out = run("--output-dir d --policies full --sample_num 2")
    assert "2 prompts, 1 of them done before" in out.out
    assert (
        "has more articles than 1, which are asked for"
        in run("--output-dir d --policies full --sample-num 1", code=2).err
    )
    out = run("--output-dir e --policies full --too-long skip")
    assert "0 articles were cut" in out.err and "1 left out" in out.err
    assert [row["custom_id"] for row in rows_of(tmp_path / "e" / "full.jsonl")] == [
        "line-1",
        "line-2",
    ]


def test_the_flags_of_the_scripts(run: Door, records: list[dict[str, Any]], tmp_path: Path) -> None:
    """h2o_hf's run_summarization.py, then llama-recipes'."""
    flags = "--input in.jsonl --sample_num 1 --cache_dir nowhere --no_cuda"
    run(
        f"--input_path in.jsonl {flags} --output_path one.jsonl --enable_h2o_cache --hh_size 3 "
        "--recent_size 4 --k 0"
    )
    (row,) = rows_of(tmp_path / "one.jsonl")
    assert (
        row["request"] == {**records[0], "top_k": 0}
        and row["result"]["choices"][0]["logprobs"]["tokens"]
    )
    (cell,) = figures(tmp_path / "one.jsonl.summary.json")["cells"]
    assert (cell["policy"], cell["size"]) == ("h2o", "3+4")
    sizes = "--enable_h2o_generation --num_window_length 8 10 --num_heavy_hitter_tokens -1"
    run(f"--input_path in.jsonl {flags} --output-dir two {sizes}")
    assert sorted(path.name for path in (tmp_path / "two").glob("h2o*.jsonl")) == [
        "h2o-4+4.jsonl",
        "h2o-5+5.jsonl",
    ]


@pytest.mark.parametrize(
    ("flags", "titles"),
    [
        ("--policies h2o", ["h2o 32+32", "h2o 64+64", "h2o 128+128", "h2o 256+256", "h2o 512+512"]),
        (
            "--hh-size 0 --recent-size 8 16",
            ["full", "local 0+8", "h2o 0+8", "local 0+16", "h2o 0+16"],
        ),
        ("--policies full h2o:kv_bytes=0.3", ["full", "h2o:kv_bytes=0.3"]),
        ("--output one.jsonl", ["full"]),
        ("--output one.jsonl --enable_h2o_cache", ["h2o 1024+1024"]),
        ("--output one.jsonl --enable_h2o_generation", ["h2o 128+128"]),
        ("--num_window_length 64 --enable_h2o_generation", ["h2o 32+32"]),
        (
            "--num_heavy_hitter_tokens 24 --num_window_length 64 --policies h2o-norm:sinks=1",
            ["h2o-norm:sinks=1 24+40"],
        ),
    ],
)
def test_cells(flags: str, titles: list[str], tmp_path: Path) -> None:
    args = parsed(flags, tmp_path)
    assert [cell.title for cell in summarize.cells_of(args)] == titles
    outputs = [cell.output.name for cell in summarize.cells_of(args)]
    assert len(set(outputs)) == len(outputs) and all(
        re.fullmatch(r"[\w.+=,-]+\.jsonl", name) for name in outputs
    )


def test_shares_of_the_whole_sequence(tmp_path: Path) -> None:
    args = parsed("--policies full h2o --kv-budget 0.5 0.2", tmp_path)
    cells = summarize.cells_of(args)
    assert [cell.title for cell in cells] == ["full", "h2o 0.5", "h2o 0.2"]
    assert (
        cells[1].case.eviction.to_json()["kv_budget"] == 0.5
        and cells[1].output.name == "h2o-0.5.jsonl"
    )
    both = summarize.cells_of(parsed("--policies h2o --kv-budget 0.5 --hh-size 4", tmp_path))
    assert [cell.title for cell in both] == ["h2o 4+4", "h2o 0.5"]
    own = summarize.cells_of(
        parsed("--policies h2o h2o:kv_budget=0.3 --hh-size 4 8", tmp_path)
    )  # a size of its own
    assert [cell.title for cell in own] == ["h2o:kv_budget=0.3", "h2o 4+4", "h2o 8+8"]


@pytest.mark.parametrize(
    ("flags", "name", "newcomer"),
    [("h2o --kv-budget 0.5", "h2o-0.5", 1), ("h2o:kv_bytes=0.5", "h2o-kv_bytes=0.5", 0)],
)
def test_a_share_of_the_whole_sequence_is_kept(
    flags: str, name: str, newcomer: int, run: Door, tmp_path: Path
) -> None:
    """newcomer: columns beside the share; bytes count the newest one's too."""
    run(f"--output-dir d --policies {flags} --json r.json")
    (cell,) = figures(tmp_path / "r.json")["cells"]
    usage = [
        row["response"]["body"]["usage"]["prompt_tokens"]
        for row in rows_of(tmp_path / "d" / f"{name}.jsonl")
    ]
    assert cell["kv_columns"] == pytest.approx(
        sum(int(0.5 * (n + NEW)) + newcomer for n in usage) / 3
    )


def test_gaps_are_to_the_first_cell_alone(
    run: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its rows may be errors."""
    read = summary.read_answers
    monkeypatch.setattr(
        summary,
        "read_answers",
        lambda output, requests: [] if output.name == "full.jsonl" else read(output, requests),
    )
    run(f"{GRID} --policies full h2o --json r.json")
    assert [cell["less_first"] for cell in figures(tmp_path / "r.json")["cells"]] == [None] * 3


def test_a_dry_run_plans_the_largest_cell(run: Door) -> None:
    assert (
        "h2o, 25 KV slots per prompt"
        in run("--output-dir d --policies h2o --hh-size 3 20 --recent-size 4 --dry-run").out
    )


def parsed(flags: str, tmp_path: Path) -> Any:
    from flexgen_h2o.evaluate import _parser

    where = "" if "--output" in flags else f"--output-dir {shlex.quote(str(tmp_path))}"
    return _parser().parse_args(["summarize", *shlex.split(f"{where} {flags}")])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--input nowhere.jsonl --output-dir d",
            "--input nowhere.jsonl: no such file; one JSON object a line",
        ),
        ("--input bad.jsonl --output-dir d", "--input bad.jsonl:1: summary_gt: a text is expected"),
        ("--input empty.jsonl --output-dir d", "--input empty.jsonl: no record in it"),
        ("", "--output-dir: is missing; name a folder for the answers"),
        ("--output-dir d --output one.jsonl", "--output-dir: is missing"),
        (
            "--output one.jsonl --policies full h2o",
            "--output one.jsonl: holds one setting, and there are 6",
        ),
        ("--output one.txt", "--output one.txt: the file name must end in .jsonl"),
        ("--output-dir no/where", "--output-dir no/where: No such file or directory"),
        ("--output-dir d --policies h3", "--policies h3: h3 is not one of"),
        ("--output-dir d --policies h2o h2o", "--policies: h2o is given twice"),
        ("--output-dir d --policies full --hh-size 4", "--policies full: keeps every KV entry"),
        (
            "--output-dir d --policies full h2o:kv_bytes=0.3 --hh-size 4",
            "--hh-size: each of --policies has a budget",
        ),
        ("--output-dir d --hh-size 4 4", "a size is given twice"),
        ("--output-dir d --kv-budget 0.2 nan", "--kv-budget nan: is not in (0, 1]"),
        (
            "--output-dir d --hh-size 4 5 6 --recent-size 1 2",
            "--hh-size has 3 sizes, --recent-size 2",
        ),
        ("--output-dir d --recent-size 4", "--recent-size 4: goes with --hh-size"),
        ("--output-dir d --hh-size 0", "--hh-size 0"),
        (
            "--output-dir d --hh-size 4 --num_window_length 8",
            "--num_window_length: --hh-size and --recent-size say",
        ),
        (
            "--output-dir d --num_window_length 8 --num_heavy_hitter_tokens 8",
            "--num_heavy_hitter_tokens 8: must be from",
        ),
        ("--output-dir d --top-p 2", "--top-p: 2.0 is not a number in [0, 1]"),
        ("--output-dir d --gen-len 0", "--gen-len"),
        ("--output-dir d --plot r.txt", "--plot r.txt: the file name must end in"),
        ("--output-dir d --json no/r.json", "--json no/r.json: the folder"),
        ("--output-dir d --attn-sparsity 0.5", "--attn-sparsity: works with the full cache alone"),
        ("--output-dir d --positions rolling --policies h2o --hh-size 4", "rolling"),
        ("--output-dir d --policies full --gen-len 60", "record 1 asks for 60 new tokens"),
        (
            "--output-dir d --policies full --gen-len 63 --too-long skip",
            "--too-long skip: all 3 articles",
        ),
    ],
)
def test_refusals(
    run: Door, write_jsonl: Callable[..., Path], tmp_path: Path, flags: str, said: str
) -> None:
    write_jsonl({"article": "a"}, name="bad.jsonl")
    write_jsonl(name="empty.jsonl")
    out = run(flags, code=2)
    assert said in out.err and len(out.err.splitlines()) == 1, out.err
    assert not list(tmp_path.glob("d/*.jsonl"))


def test_needs(run: Door, monkeypatch: pytest.MonkeyPatch, ids_model: Path) -> None:
    said = run(f"--output-dir d --policies full --model {shlex.quote(str(ids_model))}", code=2).err
    assert "has no tokenizer" in said
    monkeypatch.setattr(summarize, "NEEDED", {"no_such_module": "no-such-package"})
    said = run("--output-dir d --policies full", code=2).err
    assert "summarize: needs no-such-package; pip install -e '.[eval]'" in said

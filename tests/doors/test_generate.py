"""`generate`: prompts from flags, files and pipes, printed or written as a job; and what its help
and advice say."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import re
import shutil
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flexgen_h2o import cli, flags, generate, synonyms
from flexgen_h2o.core.errors import EXIT_DONE, EXIT_USAGE, UsageError
from flexgen_h2o.core.settings import SamplingParams
from flexgen_h2o.llm import LLM
from tests.doors.conftest import Answer, Door, read_lines

TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[assistant]"
PROMPTS = ["import os", "def main(argv):", "class Shape:"]


@pytest.fixture(scope="module")
def chat_model(words_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with words, and a chat template."""
    folder = shutil.copytree(words_model, tmp_path_factory.mktemp("chat") / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def run(call: Door) -> Door:
    """generate with short answers in fp32."""

    def answered(*words: object) -> Answer:
        flags = "--max-tokens 5 --dtype float32 --offload-dir offload"
        return call(cli.main, "generate", *words, *flags.split())

    return answered


def texts_of(model: Path, prompts: list[Any]) -> list[str | None]:
    """The answers to texts, and to lists of messages."""
    with LLM(model, dtype="float32", device="cpu", offload_dir=model.parent / "offload") as llm:
        given = [one if isinstance(one, str) else llm.model.encode_chat(one) for one in prompts]
        return [one.text for one in llm.generate(given, SamplingParams(max_tokens=5))]


def messages(text: str, system: str = "") -> list[dict[str, str]]:
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": text}]


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of an output by custom id."""
    return {row["custom_id"]: row for row in read_lines(path)}


def answers_of(path: Path) -> list[str]:
    """The answers of an output in the order of its prompts."""
    rows = rows_of(path)
    found = []
    for name in sorted(rows, key=lambda one: int(one.rpartition("-")[2])):
        [choice] = rows[name]["response"]["body"]["choices"]
        found.append(choice["message"]["content"] if "message" in choice else choice["text"])
    return found


# ---- Printed


def test_one_prompt_is_printed_alone_behind_a_line_on_stderr(run: Door, words_model: Path) -> None:
    answer = run(words_model, "-p", PROMPTS[0])
    [text] = texts_of(words_model, PROMPTS[:1])
    assert (answer.code, answer.out) == (EXIT_DONE, f"{text}\n")
    [line] = [line for line in answer.err.splitlines() if "compiling" not in line]
    assert "weights in RAM; KV cache in RAM; 1 prompt" in line and "tokens/s" in line


def test_a_piped_text_is_one_prompt(
    run: Door, words_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"import os\n"), isatty=lambda: False)
    )
    assert run(words_model).out == f"{texts_of(words_model, PROMPTS[:1])[0]}\n"


def test_the_lines_of_a_file_are_printed(run: Door, words_model: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("\n\n".join(PROMPTS))
    answer = run("-m", words_model, "-i", "p.txt")
    for text in texts_of(words_model, PROMPTS):
        assert f"\n{text}\n" in answer.out


# ---- Chat templates


def test_texts_are_messages_if_the_model_has_a_template(
    run: Door, chat_model: Path, tmp_path: Path
) -> None:
    message, raw = texts_of(chat_model, [messages("import os"), "import os"])
    assert run(chat_model, "-p", "import os").out == f"{message}\n"
    assert run(chat_model, "-p", "import os", "--no-chat").out == f"{raw}\n"
    [told] = texts_of(chat_model, [messages("import os", "Be brief.")])
    assert run(chat_model, "-p", "import os", "--system", "Be brief.").out == f"{told}\n"
    (tmp_path / "p.txt").write_text("import os\n")
    run(chat_model, "-i", "p.txt", "-o", "texts.jsonl")
    assert answers_of(tmp_path / "texts.jsonl") == [message]
    other = run(chat_model, "-i", "p.txt", "-o", "texts.jsonl", "--system", "Be brief.")
    assert other.code == EXIT_USAGE and "system" in other.err and other.err.count("\n") == 1


def test_lines_of_json_say_themselves_what_they_are(
    run: Door, chat_model: Path, tmp_path: Path
) -> None:
    chat = {"messages": [{"role": "user", "content": "import os"}]}
    batch = {"custom_id": "line-3", "method": "POST", "url": "/v1/chat/completions", "body": chat}
    lines = [{"prompt": "import os"}, chat, batch, {"text": "import os"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    message, raw = texts_of(chat_model, [messages("import os"), "import os"])
    assert run(chat_model, "-i", "in.jsonl", "-o", "out.jsonl").code == EXIT_DONE
    assert answers_of(tmp_path / "out.jsonl") == [raw, message, message, message]
    assert run(chat_model, "-i", "in.jsonl", "-o", "chat.jsonl", "--chat").code == EXIT_DONE
    assert answers_of(tmp_path / "chat.jsonl") == [message] * 4


THINKING = (
    "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}class{% else %}def{% endif %}"
)


def test_thinking_is_switched_off_for_every_chat(
    run: Door, words_model: Path, tmp_path: Path, call: Door
) -> None:
    """Of a line without its own `chat_template_kwargs`, at every door. A job does not mix."""
    model = shutil.copytree(words_model, tmp_path / "model")
    (model / "chat_template.jinja").write_text(THINKING)
    other = shutil.copytree(words_model, tmp_path / "other")
    (other / "chat_template.jinja").write_text("{{ messages[0]['content'] }} class")
    [on] = texts_of(model, [messages("import")])
    [off] = texts_of(other, [messages("import")])
    assert on is not None and off is not None and on != off
    kwargs = '{"enable_thinking": false}'
    for given, text in (
        ([], on),
        (["--no-thinking"], off),
        (["--chat-template-kwargs", kwargs], off),
    ):
        assert run(model, "-p", "import", *given).out == f"{text}\n", given
    flags = f"--chat --no-thinking --max-tokens 5 --dtype float32 --offload-dir {tmp_path / 'off'}"
    assert off in call(cli.main, "complete", "-m", model, "import", *flags.split()).out
    asked = {"messages": messages("import")}
    own = {**asked, "chat_template_kwargs": {"enable_thinking": True}}
    (tmp_path / "in.jsonl").write_text(f"{json.dumps(asked)}\n{json.dumps(own)}\n")
    job = (model, "-i", "in.jsonl", "-o", "out.jsonl")
    assert run(*job, "--no-thinking").code == EXIT_DONE
    assert answers_of(tmp_path / "out.jsonl") == [off, on]
    mixed = run(*job)
    assert mixed.code == EXIT_USAGE and "--no-thinking was given and is not given" in mixed.err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--no-thinking",), "does not read enable_thinking"),
        (("--no-thinking", "--no-chat"), "are not put into the chat template"),
        (("--chat-template-kwargs", '{"a": 1}'), "does not read a"),
    ],
)
def test_a_template_flag_without_effect_is_named(
    flags: tuple[str, ...], says: str, run: Door, chat_model: Path
) -> None:
    [line] = [line for line in run(chat_model, "-p", "a", *flags).err.splitlines() if says in line]
    assert f"{flags[0]} has no effect" in line


def test_columns_that_are_not_read_are_named_once(
    run: Door, words_model: Path, tmp_path: Path
) -> None:
    lines = [{"prompt": "import os", "label": 1, "max_new_tokens": 1, f"c{i}": 1} for i in range(9)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for more in ((), ("-o", "out.jsonl"), ("--dry-run",)):
        err = run(words_model, "-i", "in.jsonl", *more).err
        [note] = [line for line in err.splitlines() if "not read" in line]
        assert "label, c0" in note and "and 2 more" in note and "max_new_tokens" not in note


# ---- Jobs


def test_a_job_of_a_text_file_is_resumed(run: Door, words_model: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("\n".join(PROMPTS))
    line = (words_model, "-i", "p.txt", "-o", "out.jsonl")
    first = run(*line)
    assert first.code == EXIT_DONE and first.out.startswith("3 prompts")
    assert "3 prompts in batches of" in first.out and "tokens/s" in first.out
    assert answers_of(tmp_path / "out.jsonl") == texts_of(words_model, PROMPTS)
    rows = (tmp_path / "out.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_text("".join(rows[:1]))
    assert "1 of them done before" in run(*line).out
    assert (tmp_path / "out.jsonl").read_text().startswith(rows[0])
    assert answers_of(tmp_path / "out.jsonl") == texts_of(words_model, PROMPTS)
    assert "3 of them done before" in run(*line).out
    assert "state: done" in run("-o", "out.jsonl", "--status").out


def test_prompts_of_the_command_line_are_kept_beside_an_output(
    run: Door, words_model: Path, tmp_path: Path
) -> None:
    line = (words_model, "-p", "import os\n", "-p", "class Shape:", "-o", "out.jsonl")
    assert run(*line).code == EXIT_DONE
    assert answers_of(tmp_path / "out.jsonl") == texts_of(
        words_model, ["import os\n", "class Shape:"]
    )
    assert "2 of them done before" in run(*line).out
    kept = (tmp_path / "out.jsonl.prompts.jsonl").read_bytes()
    other = run(words_model, "-p", "other", "-o", "out.jsonl")
    assert (
        other.code == EXIT_USAGE and "--prompt: " in other.err and "has other prompts" in other.err
    )
    assert (tmp_path / "out.jsonl.prompts.jsonl").read_bytes() == kept


# ---- Flags and help


def test_help_is_one_screen_in_sections_with_three_examples(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for verb in ("generate", "chat", "serve", "plan", "bench", "batch"):
        assert cli.main([verb, "--help"]) == EXIT_DONE
        short = capsys.readouterr().out
        assert cli.main([verb, "--help-all"]) == EXIT_DONE
        full = capsys.readouterr().out
        assert len(short.splitlines()) <= 60 and len(short) < len(full)
        assert short.count("flexgen-h2o") >= 4 and "Model:" in short and "Memory:" in short
        assert "--eviction NAME" in full


def test_the_examples_of_each_help_are_taken_by_their_parsers() -> None:
    import importlib
    import shlex

    for verb, (module, _) in cli.VERBS.items():
        parser = importlib.import_module(module)._parser()
        for line in getattr(parser, "examples", ()):
            command, *words = shlex.split(line.partition(" < ")[0])
            assert command == "flexgen-h2o" and words[0] in cli.VERBS, line
            importlib.import_module(cli.VERBS[words[0]][0])._parser().parse_args(words[1:]), verb


def test_what_a_flag_stands_for_is_set_too() -> None:
    def read(line: str) -> tuple[Any, ...]:
        args = generate._parser().parse_args([*line.split(), "-p", "a"])
        policy, is_auto = flags.policy_of(args)
        return args.path, policy, is_auto, flags.eviction_of(args, policy).to_json()

    for short, whole in (
        ("m --weight-bits 8", "m --compress-weight --weight-bits 8"),
        ("m --kv-bits 4/3", "m --compress-cache --kv-bits 4/3"),
        ("m --kv-size 20%", "m --kv-size 0.2"),
        ("m --attn-sparsity 10%", "m --attn-sparsity 0.1"),
        ("m --random-weights", "m --path _DUMMY_"),
    ):
        assert read(short) == read(whole), short


def test_flags_of_other_programs_are_taken_or_answered() -> None:
    parser = generate._parser()
    known = parser.spellings

    def read(flag: str) -> dict[str, Any]:
        action = known[flag]
        values = {"dtype": "float32", "chat_template_kwargs": "{}"}
        value = [] if action.nargs == 0 else [values.get(action.dest, "1")]
        model = [] if action.dest == "model" else ["m"]
        return {**vars(parser.parse_args([*model, flag, *value])), "given": None}

    for ours in synonyms.SAME.keys() & known:
        for theirs in synonyms.SAME[ours]:
            assert read(theirs) == read(ours), theirs
    for theirs, advice in synonyms.ADVICE.items():
        if theirs not in known:
            with pytest.raises(UsageError) as raised:
                parser.parse_args(["m", theirs, "1"])
            assert advice in str(raised.value)
        for named in [word.strip(",;()") for word in advice.split() if word.startswith("--")]:
            assert named in known or named in ("--pipeline", "--prompts"), (theirs, named)


# ---- The page on data of one's own

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "your-data.md"
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SOURCE = re.compile(r"(pyarrow|datasets)\b")  # a package that a block of the page needs
TICKETS = [
    {"id": "b", "text": "x = 1"},
    {"id": "07", "text": 'y, "z"\nü'},
    {"id": "a", "text": "import os " * 50},
]


def write_tickets(has_pyarrow: bool) -> None:
    """Write the table that the page reads, in each of its formats."""
    with open("tickets.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["id", "text"])
        writer.writeheader()
        writer.writerows(TICKETS)
    Path("tickets.jsonl").write_text("".join(json.dumps(one) + "\n" for one in TICKETS))
    if has_pyarrow:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(TICKETS), "tickets.parquet")


def test_the_page_on_your_data_leads_from_a_table_to_a_table(
    run: Door, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every block of the page is run, those whose package is not installed excepted."""
    monkeypatch.chdir(tmp_path)
    there = {name for name in ("pyarrow", "datasets") if importlib.util.find_spec(name)}
    write_tickets("pyarrow" in there)
    if "datasets" in there:
        import datasets

        data = datasets.Dataset.from_list(TICKETS)
        monkeypatch.setattr(datasets, "load_dataset", lambda name, split: data)
    requests = tmp_path / "requests.jsonl"
    names = dict[str, object]()
    seen = set[bytes]()
    ran = 0
    for language, body in BLOCK.findall(PAGE.read_text()):
        if language == "python" and {*SOURCE.findall(body)} <= there:
            exec(textwrap.dedent(body), names)
            if "tickets." in body and requests.exists():
                seen.add(requests.read_bytes())
            elif "load_dataset" in body:
                assert [row["custom_id"] for row in read_lines(requests)] == ["0", "1", "2"]
        elif language == "bash" and "smollm2-135m" in body:
            [wanted] = seen  # CSV, JSON lines and parquet give the same requests
            requests.write_bytes(wanted)
            for line in body.splitlines():
                words = line.split()
                assert words[:3] == ["flexgen-h2o", "generate", "smollm2-135m"]
                answer = run(chat_model, *words[3:])
                assert answer.code == EXIT_DONE, answer.err
                ran += 1
    assert ran == 2
    with open("answered.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [{"id": row["id"], "text": row["text"]} for row in rows] == TICKETS
    assert [bool(row["error"]) for row in rows] == [False, False, True]
    assert rows[0]["answer"] and rows[1]["answer"] and not rows[2]["answer"]
    assert [row["custom_id"] for row in read_lines(tmp_path / "again.jsonl")] == ["a"]


def test_the_page_on_your_data_finds_the_lines_with_errors(
    run: Door, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those without an id of their own, which are named by their numbers."""
    monkeypatch.chdir(tmp_path)
    good = b'{"custom_id": "good", "messages": [{"role": "user", "content": "x"}]}\n'
    bad = [
        b'\xef\xbb\xbf{"custom_id": "mark", "messages": 1}\n',
        b'{"custom_id": "half", "mess\n',
        b'{"messages": 1}\n',
        b'{"custom_id": 7, "prompt": "x"}\n',
        b'{"custom_id": ["list"], "messages": 1}\n',
        b'{"custom_id": "%s", "messages": 1}\n' % (b"x" * 1025),
        b'{"custom_id": "twice", "prompt": "x", "prompt": "y"}\n',
        b'{"custom_id": "\xff", "prompt": "x"}\n',
        b'{"custom_id": "\x85\xff"}\n',
        b"[1]\r\n",
        b"7\n",
        b"[" * 100_000 + b"\n",
        b'{"custom_id": "end"}',
    ]
    Path("requests.jsonl").write_bytes(b"\n" + good + b"\n".join(bad))
    answer = run(chat_model, "-i", "requests.jsonl", "-o", "answers.jsonl")
    assert answer.code == EXIT_DONE, answer.err
    names = dict[str, object](json=json)
    for _, body in BLOCK.findall(PAGE.read_text()):
        if body.startswith("answers =") or "again" in body:
            exec(body, names)
    assert Path("again.jsonl").read_bytes() == b"".join(bad)

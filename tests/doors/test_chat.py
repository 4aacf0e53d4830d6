"""--chat: each text prompt is a user's message in the model's own chat template."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.doors.conftest import Answer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if "
    "add_generation_prompt %}<me>{% endif %}"
)
# As of models that think: of a variable that nobody gives, and of answers whose thoughts are cut
# off.
THINKING = (
    "{% set last = namespace(user=0) %}{% for m in messages[::-1] %}{% if m.role == 'user' and not "
    "last.user %}"
    "{% set last.user = messages | length - loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1].lstrip('\n') }}\n{% "
    "endfor %}"
    "{% if add_generation_prompt and last.user %}<me>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% "
    "endif %}"
)


@pytest.fixture
def with_template(words_model: Path, tmp_path: Path) -> Callable[[str | None], Path]:
    """The model with words, with another chat template."""

    def made(template: str | None) -> Path:
        folder = tmp_path / "chat"
        shutil.copytree(words_model, folder)
        path = folder / "tokenizer_config.json"
        config = {k: v for k, v in json.loads(path.read_text()).items() if k != "chat_template"}
        path.write_text(
            json.dumps(config if template is None else {**config, "chat_template": template})
        )
        return folder

    return made


def outputs(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("template", [TEMPLATE, THINKING], ids=["plain", "thinking"])
def test_prompts_become_messages(
    template: str,
    door: Callable[..., Answer],
    with_template: Callable[[str | None], Path],
    write_jsonl: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """The same tokens as for the text that the template makes; token ids are taken as they are."""
    folder = with_template(template)
    asked = write_jsonl(
        {"prompt": "import os"}, {"prompt_token_ids": [5, 6, 7]}, name="asked.jsonl"
    )
    assert door("--prompts", asked, "--output", "a.jsonl", "--chat", model=folder).code == 0
    ids = AutoTokenizer.from_pretrained(folder)("<user>import os\n<me>", add_special_tokens=False)[
        "input_ids"
    ]
    plain = write_jsonl(
        {"prompt_token_ids": ids}, {"prompt_token_ids": [5, 6, 7]}, name="plain.jsonl"
    )
    assert door("--prompts", plain, "--output", "b.jsonl", model=folder).code == 0
    chat = outputs(tmp_path / "a.jsonl")
    known = outputs(tmp_path / "b.jsonl")
    assert [row["token_ids"] for row in chat] == [row["token_ids"] for row in known]
    assert chat[0]["prompt"] == "import os"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, "^flex_opt: --chat: .*chat has no chat template; leave it out"),
        ("{{ raise_exception('only in pairs') }}", "cannot take the prompt .only in pairs"),
        ("{% for %}", "cannot take the prompt"),
    ],
)
def test_a_template_that_does_not_serve(
    template: str | None,
    says: str,
    door: Callable[..., Answer],
    with_template: Callable[[str | None], Path],
    write_jsonl: Callable[..., Path],
) -> None:
    answer = door(
        "--prompts", write_jsonl({"prompt": "hello"}), "--chat", model=with_template(template)
    )
    assert answer.code == 2 and answer.err.count("\n") == 1
    assert re.search(says, answer.err), answer.err


def test_a_model_without_a_tokenizer(
    door: Callable[..., Answer], write_jsonl: Callable[..., Path]
) -> None:
    answer = door("--prompts", write_jsonl({"prompt": "hello"}), "--chat")
    assert answer.code == 2 and "no chat template" in answer.err


def test_without_prompts(door: Callable[..., Answer]) -> None:
    answer = door("--chat")
    assert (
        answer.code == 2
        and "--chat: is for the prompts of a file; give one with --prompts" in answer.err
    )

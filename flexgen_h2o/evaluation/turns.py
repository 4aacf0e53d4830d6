"""The turns of a conversation: read from a file as MT-bench has them, and as token ids of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexgen_h2o.errors import UsageError
from flexgen_h2o.prompts import lines_of, make_prompt, object_of_json, prompt_of_json
from flexgen_h2o.source import Model

PLACE = "{turn}"
FORMAT = "\n{turn}\n"  # apart from the answer before it, which may have been cut anywhere
# Without --turns: what the shipped model, which knows Python sources, can go on with.
TURNS = (
    "import os\nimport sys\n\ndef read_lines(path):",
    "class Shape:\n    def __init__(self, name):",
    "    def area(self):",
    "for name in os.listdir(path):",
    "try:\n    import json\nexcept ImportError:",
    "class TestShape(unittest.TestCase):\n    def test_area(self):",
    'if __name__ == "__main__":',
    "def main(argv=None):",
)


@dataclass(frozen=True)
class Turn:
    """What is said to the model: a text, or token ids. place: where it stands, for errors. labels: what the file says
    of it (`question_id`, `category`)."""

    content: object
    place: str
    labels: dict[str, Any]


def default_turns() -> list[Turn]:
    return [Turn(text, "--turns", {}) for text in TURNS]


def read_turns(path: Path) -> list[Turn]:
    """All turns of a file, in its order.

    `.txt`: one a line. `.jsonl`: a line is a question of MT-bench, `{"question_id", "category", "turns": [...]}`, with
    texts or lists of token ids as turns; or one turn, as `prompt` or `prompt_token_ids`. Raises UsageError naming
    `--turns FILE:LINE`.
    """
    if path.suffix.lower() not in (".txt", ".jsonl"):
        raise UsageError(f"--turns {path}: the file name must end in .txt (a turn a line) or .jsonl")
    is_text, turns = path.suffix.lower() == ".txt", []
    for place, line in lines_of(path, "--turns"):
        try:
            turns += [Turn(line, place, {})] if is_text else _turns_of_json(line, place)
        except UsageError as error:
            raise UsageError(f"{place}: {error}") from error
    if not turns:
        raise UsageError(f"--turns {path}: no turn in it, only blank lines or nothing")
    return turns


def _turns_of_json(line: str, place: str) -> list[Turn]:
    body = object_of_json(line)
    labels = {key: body[key] for key in ("question_id", "category") if body.get(key) is not None}
    if body.get("turns") is None:
        return [Turn(prompt_of_json(line), place, labels)]
    turns = body["turns"]
    if not isinstance(turns, list) or not turns:
        raise UsageError("turns must be a list of at least one text or list of token ids")
    for turn in turns:
        if not isinstance(turn, str | list):
            raise UsageError(f"a turn is a text or a list of token ids, not {type(turn).__name__}")
    return [Turn(turn, place, labels) for turn in turns]


def encoded(turns: Sequence[Turn], model: Model, form: str | None, chat: bool) -> list[tuple[int, ...]]:
    """The turns as token ids; those that are ids stay as they are.

    form: what a text is put into, at PLACE; only the first turn gets the tokenizer's special tokens. chat: by the
    model's chat template instead. Raises UsageError naming the turn's place.
    """
    if chat:
        model.check_chat()
    found, said = [], []
    for i, turn in enumerate(turns):
        said += [turn.content] if isinstance(turn.content, str) else []
        if chat and len(said) != i + 1:
            raise UsageError(f"{turn.place}: a chat template takes texts, not token ids; leave --chat out")
        try:
            found.append(_ids(turn.content, model, (form or FORMAT), said if chat else None, first=not i))
        except (UsageError, ValueError) as error:
            raise UsageError(f"{turn.place}: {error}") from error
    return found


def _ids(content: object, model: Model, form: str, said: list[str] | None, first: bool) -> tuple[int, ...]:
    def encode(text: str) -> list[int]:
        if said is not None:
            return model.encode_turn(said)
        text = form.replace(PLACE, text)
        if first:
            return model.encode(text)
        model.check_fits(text)
        return model.encode_more(text)

    given = encode if model.tokenizer is not None else None
    return make_prompt(0, content, given, model.spec.vocab_size).token_ids

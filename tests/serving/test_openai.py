"""OpenAI's own client: completions, chat, streams, files and batches; answers are those of
`batch`."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx2
import openai
import pytest
from transformers import AutoTokenizer

from flexgen_h2o import LLM, Policy, SamplingParams
from flexgen_h2o.serving.store import ACTIVE
from tests.serving.conftest import Running

PROMPTS = [
    "def f(x):",
    "class Tree:\n    def",
    "import os\n",
    "for i in range(10):\n    print",
    "x = [1, 2",
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], tuple[list[int], str]]:
    """Token ids and texts of prompts, each with so many new tokens, without a server."""
    asked = [(p, n) for p in PROMPTS for n in (1, 5, 24)]
    with LLM(
        "opt-tiny",
        Policy(4, 2),
        dtype="float32",
        device="cpu",
        offload_dir=tmp_path_factory.mktemp("o"),
    ) as llm:
        done = llm.generate([p for p, _ in asked], [SamplingParams(max_tokens=n) for _, n in asked])
    return {
        one: (found.token_ids, found.text or "") for one, found in zip(asked, done, strict=True)
    }


def test_models(client: openai.OpenAI) -> None:
    [model] = client.models.list()
    assert client.models.retrieve(model.id) == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_completions_are_those_of_the_engine(client: openai.OpenAI, alone: dict[Any, Any]) -> None:
    for n in (1, 5, 24):
        found = client.completions.create(model="opt-tiny", prompt=PROMPTS, max_tokens=n)
        for i, (prompt, choice) in enumerate(zip(PROMPTS, found.choices, strict=True)):
            ids, text = alone[prompt, n]
            assert (choice.index, choice.text, choice.token_ids) == (i, text, ids)  # type: ignore[attr-defined]
        assert found.usage is not None and found.usage.completion_tokens == sum(
            len(alone[p, n][0]) for p in PROMPTS
        )


@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_stream_is_the_answer_in_pieces(
    client: openai.OpenAI, alone: dict[Any, Any], logprobs: int | None
) -> None:
    pieces = list(
        client.completions.create(
            model="m",
            prompt=PROMPTS,
            max_tokens=24,
            stream=True,
            logprobs=logprobs,
            n=1,
            stream_options={"include_usage": True},
        )
    )
    whole = client.completions.create(model="m", prompt=PROMPTS, max_tokens=24, logprobs=logprobs)
    *pieces, last = pieces
    assert last.usage == whole.usage and not last.choices
    for i, prompt in enumerate(PROMPTS):
        mine = [choice for piece in pieces for choice in piece.choices if choice.index == i]
        assert "".join(one.text for one in mine) == alone[prompt, 24][1]
        assert [t for one in mine for t in one.token_ids] == alone[prompt, 24][0]  # type: ignore[attr-defined]
        assert [one.finish_reason for one in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == whole.choices[i].finish_reason
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset") if logprobs else ():
            parts = [x for one in mine for x in getattr(one.logprobs, name) or []]
            for one, other in zip(parts, getattr(whole.choices[i].logprobs, name), strict=True):
                # Which rows share a block decides the last bits of their numbers.
                assert one == (other if name == "tokens" else pytest.approx(other, abs=1e-4))


def test_stop_strings_seeds_and_choices(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "m", "prompt": "def f(x):", "max_tokens": 16}

    def ask(**fields: Any) -> list[str]:
        return [one.text for one in client.completions.create(**asked, **fields).choices]

    text = ask()[0]
    stop = text[6:8]
    assert ask(stop=[stop]) == [text[: text.index(stop)]]
    streamed = client.completions.create(**asked, stop=stop, stream=True)
    assert "".join(piece.choices[0].text for piece in streamed) == text[: text.index(stop)]
    drawn = ask(n=3, seed=5, temperature=1.0, top_p=0.95)
    assert drawn == ask(n=3, seed=5, temperature=1.0, top_p=0.95) and len(set(drawn)) == 3
    assert drawn[:1] == ask(seed=5, temperature=1.0, top_p=0.95)
    assert len({ask(temperature=1.0)[0] for _ in range(4)}) > 1, (
        "without a seed each request draws anew"
    )


def test_what_lm_eval_asks(client: openai.OpenAI, web: httpx2.Client) -> None:
    """Token ids with `echo`, `logprobs` and one new token, whose sum behind the context it
    takes."""
    rows = [[5, 6, 7, 8, 9], [11, 12, 13], [5, 6, 7]]
    body = {
        "model": "m",
        "prompt": rows,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    found = web.post("/v1/completions", json=body).json()
    with LLM("opt-tiny", Policy(4, 2), dtype="float32", device="cpu") as llm:
        scored = llm.score([r[:2] for r in rows], [r[2:] for r in rows], mode="prefill")
    for row, choice, want in zip(rows, found["choices"], scored, strict=True):
        logprobs = choice["logprobs"]
        assert (
            len(logprobs["token_logprobs"]) == len(row) + 1
            and logprobs["token_logprobs"][0] is None
        )
        assert sum(logprobs["token_logprobs"][2:-1]) == pytest.approx(want.logprob, abs=1e-4)
        tops = [max(top.values()) for top in logprobs["top_logprobs"][2:-1]]
        assert (tops == logprobs["token_logprobs"][2:-1]) == want.is_greedy
    nothing = web.post("/v1/completions", json={**body, "max_tokens": 0}).json()["choices"]
    assert [len(c["logprobs"]["tokens"]) for c in nothing] == [5, 3, 3]
    assert [c["token_ids"] for c in nothing] == [[], [], []]


def test_chat(client: openai.OpenAI, server: Running) -> None:
    """The answer to the text that the template makes, whole and in pieces."""
    messages: Any = [{"role": "user", "content": "def f(x):"}]
    tokenizer = AutoTokenizer.from_pretrained(server.folder / "opt-chat")
    ids = tokenizer("# user: def f(x):\n", add_special_tokens=False)["input_ids"]
    plain = client.completions.create(model="m", prompt=ids, max_tokens=12).choices[0]
    asked: dict[str, Any] = {"model": "m", "messages": messages, "max_completion_tokens": 12}
    found = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    choice = found.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", plain.text)
    assert choice.logprobs is not None and len(choice.logprobs.content or ()) == 12
    pieces = [
        piece.choices[0]
        for piece in client.chat.completions.create(**asked, stream=True, logprobs=True)
    ]
    assert pieces[0].delta.role == "assistant" and pieces[-1].finish_reason == choice.finish_reason
    assert "".join(piece.delta.content or "" for piece in pieces) == plain.text
    parts = [
        one.logprob for piece in pieces if piece.logprobs for one in piece.logprobs.content or ()
    ]
    assert parts == [one.logprob for one in choice.logprobs.content or ()]
    with pytest.raises(openai.BadRequestError, match="echo"):
        client.chat.completions.create(**asked, extra_body={"echo": True})


# ---- Files and batches


def lines_of(count: int, bad: bool = False) -> bytes:
    rows: list[dict[str, Any]] = [
        {
            "custom_id": f"r{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": PROMPTS[i % 5], "max_tokens": (1, 5, 24)[i % 3]},
        }
        for i in range(count)
    ]
    if bad:
        rows[3]["body"] = {"prompt": "a", "max_tokens": -1}
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def upload(client: openai.OpenAI, content: bytes, **more: Any) -> Any:
    return client.files.create(file=("rows.jsonl", content), purpose="batch", **more)


def start_batch(client: openai.OpenAI, content: bytes, **more: Any) -> Any:
    asked = {"endpoint": "/v1/completions", "completion_window": "24h"}
    asked["input_file_id"] = upload(client, content).id
    return client.batches.create(**{**asked, **more})  # type: ignore[arg-type]


def wait_for(client: openai.OpenAI, batch_id: str) -> Any:
    while (batch := client.batches.retrieve(batch_id)).status in ACTIVE:
        time.sleep(0.02)
    return batch


def wait_for_rows(client: openai.OpenAI, batch_id: str, count: int) -> None:
    while client.batches.retrieve(batch_id).request_counts.completed < count:  # type: ignore[union-attr]
        time.sleep(0.01)


def rows_of(client: openai.OpenAI, file_id: str) -> dict[str, dict[str, Any]]:
    rows = list(map(json.loads, client.files.content(file_id).text.splitlines()))
    found = {row["custom_id"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def test_a_batch(client: openai.OpenAI, alone: dict[Any, Any], server: Running) -> None:
    content = lines_of(30, bad=True)
    batch = start_batch(client, content, metadata={"a": "b"})
    assert client.files.content(batch.input_file_id).read() == content
    while_it_runs = client.completions.create(model="m", prompt=PROMPTS[0], max_tokens=5)
    assert while_it_runs.choices[0].text == alone[PROMPTS[0], 5][1]
    batch = wait_for(client, batch.id)
    assert batch.status == "completed" and batch.metadata == {"a": "b"} and batch.errors is None
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (30, 29, 1)
    rows = rows_of(client, batch.output_file_id)
    assert rows.keys() == {f"r{i}" for i in range(30) if i != 3}
    for i in set(range(30)) - {3}:
        choice = rows[f"r{i}"]["response"]["body"]["choices"][0]
        assert choice["token_ids"] == alone[PROMPTS[i % 5], (1, 5, 24)[i % 3]][0]
    [error] = rows_of(client, batch.error_file_id).values()
    assert error["custom_id"] == "r3" and error["error"]["code"] == "invalid_request"
    assert client.batches.list(limit=1).data[0].id == batch.id
    files = {batch.input_file_id, batch.output_file_id, batch.error_file_id}
    assert {one.id for one in client.files.list()} >= files
    assert client.files.delete(batch.input_file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(batch.input_file_id)
    left = (server.folder / "state" / "batches").iterdir()
    assert not [path.name for path in left if not path.name.endswith(".json")]


def test_lists_of_files_and_batches(client: openai.OpenAI) -> None:
    """All files are on a page, the newest first, or the other way round; pages of one hold each
    once."""
    made = [upload(client, lines_of(1)).id for _ in range(25)]
    first = client.files.list()
    assert [one.id for one in first.data][:25] == made[::-1] and not first.has_more
    assert [one.id for one in client.files.list(order="asc") if one.id in made] == made
    newest = client.files.list(order="desc", limit=7)
    assert [one.id for one in newest if one.id in made] == made[::-1]
    found = client.files.list(order="asc", after=made[3], limit=2)
    assert [one.id for one in found.data] == made[4:6] and found.has_more
    for name in made:
        client.files.delete(name)


def test_a_file_that_expires(client: openai.OpenAI) -> None:
    after = {"anchor": "created_at", "seconds": 3600}
    file = upload(client, lines_of(1), expires_after=after)
    assert file.expires_at == file.created_at + 3600
    assert client.files.retrieve(file.id).expires_at == file.expires_at
    for seconds in (0, 3599, 2592001):
        with pytest.raises(openai.BadRequestError, match="expires_after: "):
            upload(client, lines_of(1), expires_after={**after, "seconds": seconds})


def test_a_batch_that_is_cancelled_keeps_what_is_done(client: openai.OpenAI) -> None:
    batch = start_batch(client, lines_of(600))
    wait_for_rows(client, batch.id, 5)
    with pytest.raises(openai.BadRequestError, match="reads it"):
        client.files.delete(batch.input_file_id)
    client.batches.cancel(batch.id)
    batch = wait_for(client, batch.id)
    done = rows_of(client, batch.output_file_id)
    assert batch.status == "cancelled" and 5 <= len(done) == batch.request_counts.completed < 600
    with pytest.raises(openai.BadRequestError, match="is cancelled"):
        client.batches.cancel(batch.id)


@pytest.mark.parametrize(
    "fields",
    [{"endpoint": "/v1/embeddings"}, {"input_file_id": "file-x"}, {"completion_window": "1h"}],
    ids=str,
)
def test_batches_that_are_refused(client: openai.OpenAI, fields: dict[str, str]) -> None:
    with pytest.raises(openai.BadRequestError, match=next(iter(fields))):
        start_batch(client, lines_of(1), **fields)

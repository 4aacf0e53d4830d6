"""The pages' files and headers, and the questions that the planner's page asks. No browser: that is
test_browser.py."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from flexgen_h2o import H2O, LLM, Policy, SamplingParams, policy_search
from flexgen_h2o.core.errors import EXIT_DOES_NOT_FIT
from flexgen_h2o.core.units import GIB
from flexgen_h2o.planner.profile import SHIPPED, nominal_profile, profile_from_json
from flexgen_h2o.serving import pages
from flexgen_h2o.serving.guard import Bounds, Guard
from flexgen_h2o.serving.pages import STATIC, PageRoutes
from tests.forks import Forks
from tests.serving.conftest import KEY, RUN, Running, Start

MACHINES = {
    "t4": profile_from_json(json.loads((SHIPPED / "t4.json").read_text())),
    "cpu": nominal_profile(True),
}
SMALL: dict[str, Any] = {
    "model": "facebook/opt-125m",
    "num_prompts": 4,
    "prompt_len": 16,
    "gen_len": 4,
}
BOUNDS = Bounds(2**20, 2**20, 10, 30, KEY, False)


@pytest.fixture(scope="module")
def web() -> Iterator[TestClient]:
    found = PageRoutes(
        MACHINES, profile_from_json, policy_search.ask, ["opt-tiny"], has_engine=False
    )
    yield TestClient(Guard(found.app(), BOUNDS), headers={"authorization": f"Bearer {KEY}"})  # type: ignore[arg-type]
    found.close()


def test_files_need_no_key_and_load_nothing_from_elsewhere(web: TestClient) -> None:
    names = {path.name for path in STATIC.iterdir()}
    for path in ("/plan", *(f"/static/{name}" for name in names)):
        answer = web.get(path, headers={"authorization": ""})
        assert answer.status_code == 200 and answer.headers["content-security-policy"].startswith(
            "default-src 'self';"
        )
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert not re.search(
            r"https?://(?!www\.w3\.org/2000/svg)|innerHTML|<style|style=| on\w+=", answer.text
        )
        for name in re.findall(r'["(]/static/([\w.]+)', answer.text):
            assert name in names
    assert web.get("/static/page.css").headers["content-type"].startswith("text/css")
    assert web.get("/", follow_redirects=False).headers["location"] == "/plan"
    for path in ("/static/none.js", "/static/..%2Fpages.py", "/static/../pages.py"):
        assert web.get(path).status_code in (401, 404)


def test_what_is_shown_needs_the_key(web: TestClient) -> None:
    for answer in (
        web.get("/api/plan", headers={"authorization": ""}),
        web.post("/api/plan", headers={"authorization": "Bearer x"}),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


def test_choices(web: TestClient) -> None:
    found = web.get("/api/plan").json()
    assert (
        found["models"][0] == "opt-tiny"
        and "facebook/opt-30b" in found["models"]
        and found["has_engine"] is False
    )
    assert [one["name"] for one in found["machines"]] == ["t4", "cpu"]
    assert [one["device_is_host"] for one in found["machines"]] == [False, True]
    assert found["machines"][0]["memory"]["host"] == MACHINES["t4"].host_mem_bytes


def test_the_machine_that_is_most_like_this_one_comes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own profile if it was measured, else one with or without a GPU as it is, of the most
    similar memory."""
    from flexgen_h2o.tiers import device

    class Card:
        is_host = False

        def free_bytes(self) -> int:
            return 15 * GIB

    known = policy_search.machines(None)
    known = {name: one for name, one in known.items() if name != "this machine"}
    monkeypatch.setattr(device, "whole_host_bytes", lambda: 200 * GIB)
    monkeypatch.setattr(device, "open_device", lambda name, separate_budget: Card())
    assert policy_search.nearest_machine(known) == "t4"
    monkeypatch.setattr(device, "open_device", lambda name, separate_budget: device.HostDevice())
    nearest = policy_search.nearest_machine(known)
    assert known[nearest].device_is_host and nearest != "some CPU"
    assert (
        policy_search.nearest_machine({**known, "this machine": MACHINES["t4"]}) == "this machine"
    )


def said(capsys: pytest.CaptureFixture[str], words: Sequence[str]) -> dict[str, Any]:
    assert policy_search.main([*words, "--json"]) in (0, EXIT_DOES_NOT_FIT)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("machine", ["t4", "profile"])
def test_a_plan_is_that_of_the_command_line(
    web: TestClient, capsys: pytest.CaptureFixture[str], machine: str
) -> None:
    where = {"machine": "t4"} if machine == "t4" else {"profile": MACHINES["t4"].to_json()}
    asked = {
        **SMALL,
        **where,
        "eviction": "h2o",
        "kv_budget": "0.5",
        "host_mem": "1GiB",
        "compress_weight": True,
    }
    found = web.post("/api/plan", json=asked).json()
    words = (
        "--model facebook/opt-125m --num-prompts 4 --prompt-len 16 --gen-len 4 --hardware t4 "
        "--host-mem 1GiB"
    )
    wanted = said(capsys, f"{words} --eviction h2o --kv-budget 0.5 --compress-weight".split())
    for one in (found, wanted):
        one["details"].pop("search_s")
    text = found.pop("text")
    command = found.pop("command")
    assert found == wanted and found["fits"] and "time for all prompts" in text
    assert command.startswith("flexgen-h2o generate facebook/opt-125m -i requests.jsonl ")
    assert "--kv-budget 0.5" in command and "--ram 1GiB" in command and "--max-tokens 4" in command


def test_no_folder_is_read_that_a_client_names(
    web: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even one with the name of a model whose shape is known."""
    plan = web.post("/api/plan", json={**SMALL, "machine": "t4"}).json()["policy"]
    monkeypatch.chdir(tmp_path)
    for name in ("facebook/opt-125m", "models/private"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text('{"model_type": "opt", "hidden_size": "seen"}')
    for name in ("facebook/opt-125m", "opt-125m"):
        found = web.post("/api/plan", json={**SMALL, "machine": "t4", "model": name})
        assert found.status_code == 200 and found.json()["policy"] == plan
    for name in ("models/private", "models", "."):
        answer = web.post("/api/plan", json={**SMALL, "machine": "t4", "model": name})
        assert answer.status_code == 400 and "seen" not in answer.text


def test_what_does_not_fit(web: TestClient) -> None:
    small = {"machine": "cpu", "host_mem": "1MiB", "disk_mem": "1MiB"}
    found = web.post("/api/plan", json=SMALL | small).json()
    assert not found["fits"] and "--host-mem" in found["details"]["problem"]
    assert "command" not in found


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt_len": 0}, "--prompt-len"),
        ({"host_mem": "lots"}, "--host-mem"),
        ({"eviction": "x" * 101}, "eviction: is no field"),
        ({"output": "plan.json"}, "output: is no field"),
        ({"model": "/etc/passwd"}, "model: '/etc/passwd' is not a hub id"),
        ({"model": "--help"}, "model: "),
        ({"machine": "none"}, "machine: 'none' is none of t4, cpu"),
        ({"profile": {}}, "machine: give it"),
        ({"machine": None, "profile": {"schema": 5, "machine": 1}}, "profile: "),
        ({"machine": None, "profile": []}, "profile: a JSON object"),
    ],
    ids=str,
)
def test_bad_questions(web: TestClient, fields: dict[str, Any], says: str) -> None:
    asked = {
        name: value
        for name, value in {**SMALL, "machine": "t4", **fields}.items()
        if value is not None or name == "model"
    }
    answer = web.post("/api/plan", json=asked)
    message = answer.json()["error"]["message"]
    assert (
        answer.status_code == 400 and says in message and "\n" not in message and len(message) < 500
    )


def test_a_search_is_ended_in_time_and_gives_back_its_place(
    monkeypatch: pytest.MonkeyPatch, web: TestClient
) -> None:
    monkeypatch.setattr(pages, "MAX_SEARCH_S", -1.0)
    for _ in range(pages.MAX_SEARCHES + 1):
        answer = web.post("/api/plan", json={**SMALL, "machine": "t4"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "too_long")
    monkeypatch.setattr(pages, "MAX_SEARCHES", 0)
    answer = web.post("/api/plan", json={**SMALL, "machine": "t4"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "busy") and answer.headers[
        "retry-after"
    ]


def test_two_eviction_policies_side_by_side(start: Start, tmp_path: Path) -> None:
    """The second engine answers as one alone does, within its share of the budgets."""
    server = start(
        tmp_path, "--compare", "h2o:kv_budget=0.3", "--compare-share", "0.2", "--host-mem", "1GiB"
    )
    body = {"prompt": "class Tree:\n    def", "max_tokens": 24}
    with server.web as web:
        one, other = (
            web.post(f"{path}/v1/completions", json=body).json() for path in ("", "/compare")
        )
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        assert web.post("/compare/v1/chat/completions", json=chat).status_code == 200
        status = web.get("/status").json()
        assert web.get("/").text == (STATIC / "index.html").read_text()
        assert web.get("/static/status.js", headers={"authorization": ""}).status_code == 200
    server.send(15)
    assert server.wait() == 143
    with LLM("opt-tiny", Policy(2, 1), H2O(kv_budget=0.3), dtype="float32", device="cpu") as llm:
        alone = llm.generate([body["prompt"]], SamplingParams(max_tokens=24))[0]
    ids = one["choices"][0]["token_ids"]
    others = other["choices"][0]["token_ids"]
    assert others == alone.token_ids != ids
    budgets = [of["memory"]["host"]["budget"] for of in (status, status["compare"])]
    assert budgets == [int(0.8 * 2**30), int(0.2 * 2**30)]
    assert status["compare"]["eviction"]["kv_budget"] == 0.3
    assert status["model"]["chat"] and status["model"]["device_is_host"]
    assert status["sweep"]["end"] > status["sweep"]["start"]


def test_the_planner_alone(forks: Forks, tmp_path: Path) -> None:
    server = forks.start(tmp_path, RUN, "--plan-only", "--port", "0", kind=Running)
    with server.web as web:
        assert web.get("/plan").status_code == 200 and web.get("/health").json() == {"status": "ok"}
        machines = {one["name"] for one in web.get("/api/plan").json()["machines"]}
        assert machines >= {"t4", "some card", "some CPU"}
        assert web.post("/api/plan", json={**SMALL, "machine": "some CPU"}).json()["fits"]
        assert web.get("/v1/models").status_code == 404
    server.send(2)
    assert server.wait() == 130

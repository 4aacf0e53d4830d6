"""The command itself: what it refuses before it serves, and how it ends."""

from __future__ import annotations

import argparse
import json
import resource
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from flexgen_h2o import serve
from flexgen_h2o.core.descriptors import descriptor_limits, raise_descriptor_limit
from flexgen_h2o.core.errors import EXIT_DOES_NOT_FIT, EXIT_DONE, EXIT_USAGE, UsageError
from flexgen_h2o.flags import budget_of
from flexgen_h2o.serving.guard import Bounds
from flexgen_h2o.tiers import device
from tests.serving.conftest import Start

ENGINE = "--model opt-tiny --device cpu --dtype float32 --max-len 64 --percent 0 100 0 100 0 100"
REFUSED = {
    "--host 0.0.0.0": "--api-key",
    "--api-key=": "--api-key",
    "--host no.such.host.invalid --api-key k": "--host no.such.host.invalid --port 0",
    "--batch-share 1.5": "--batch-share",
    "--compare full --compare-share 0": "--compare-share 0: ",
    "--compare full --compare-share 1.5": "--compare-share",
    "--compare none": "--compare: none",
    "--max-body lots": "--max-body",
    "--state-dir a-file": "--state-dir a-file",
    "--max-len 5000": "--max-len 5000",
    "--port 70000": "--port 70000",
    "--plan-only": "--device: ",
    "--compare full --host-mem 150MiB --compare-share 0.01": "--compare-share",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a-file").touch()
    code = serve.main([*ENGINE.split(), "--port", "0", "--state-dir", "s", *words.split()])
    [line] = capfd.readouterr().err.splitlines()
    assert code == (EXIT_DOES_NOT_FIT if "--host-mem" in words else EXIT_USAGE)
    assert line.startswith("serve: ") and REFUSED[words] in line


def test_a_port_that_is_taken(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A dry run, which says what another server would need, does not need it."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert serve.main(["opt-tiny", "--port", port, "--state-dir", str(tmp_path)]) == EXIT_USAGE
        assert f"--port {port}: cannot listen there" in capfd.readouterr().err
        assert (
            serve.main(["opt-tiny", "--port", port, "--state-dir", str(tmp_path), "--dry-run"])
            == EXIT_DONE
        )
    assert not list(tmp_path.iterdir())


def test_a_tier_without_room_is_cut_in_two_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk's share of nothing is the least budget that there is."""
    monkeypatch.setattr(
        device, "resolve_budgets", lambda *asked: {"device": 0, "host": 1000, "disk": 0}
    )
    args = serve._parser().parse_args(
        ["--compare", "full", "--device", "cpu", "--compare-share", "0.3"]
    )
    budgets = [budget_of(one) for one in serve._shares(args) if one is not None]
    assert [(budget.host, budget.disk) for budget in budgets] == [(700, 1), (300, 1)]


def test_connections_are_as_many_as_descriptors_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = Bounds(1, 1, 512, 30, None, True)
    monkeypatch.setattr(serve, "descriptors_in_use", lambda: 10)
    for limit, connections in ((2000, 512), (1024, 330), (128, 31), (37, 1)):
        monkeypatch.setattr(serve, "descriptor_limits", lambda limit=limit: (limit, limit))
        assert serve._within_descriptors(bounds).connections == connections
    monkeypatch.setattr(serve, "descriptor_limits", lambda: (36, 36))
    with pytest.raises(
        UsageError, match="ulimit -n is 36, and a server needs at least 37; raise it"
    ):
        serve._within_descriptors(bounds)


def test_the_soft_limit_of_descriptors_is_raised() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
        assert raise_descriptor_limit(300) == 300 == descriptor_limits()[0]
        assert raise_descriptor_limit(100) == 300
        assert raise_descriptor_limit(2**40) == min(before[1], 2**20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_without_the_extra(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(serve.NEEDED, "no_such_module", "no-such-package")
    assert serve.main([]) == EXIT_USAGE
    assert (
        capfd.readouterr().err
        == "serve: needs no-such-package; pip install -e '.[serve]' in a clone\n"
    )


def test_a_signal_ends_it_while_clients_wait(start: Start, tmp_path: Path) -> None:
    """They get a status, or the end of their stream; a second server may not have the folder
    meanwhile."""
    server = start(tmp_path)
    found = dict[bool, Any]()
    body = {"prompt": ["a"] * 20, "max_tokens": 250, "ignore_eos": True}

    def ask(stream: bool) -> None:
        with server.web as web:
            found[stream] = web.post("/v1/completions", json={**body, "stream": stream})

    clients = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
    with server.web as web:
        for client in clients:
            client.start()
        while web.get("/status").json()["queue"]["rows"] < 20:
            time.sleep(0.01)
        second = start(tmp_path / ".", "--port", "0")
        assert second.wait() == EXIT_USAGE and "another server uses it" in second.err
        server.send(2)
    assert server.wait() == 130
    for client in clients:
        client.join()
    assert found[False].status_code == 503 and found[False].headers["retry-after"]
    assert found[False].json()["error"]["code"] == "shutting_down"
    assert json.loads(events(found[True])[-1])["error"]["code"] == "shutting_down"


def events(answer: httpx2.Response) -> list[str]:
    return [one.removeprefix("data: ") for one in answer.text.split("\n\n") if one]


def test_an_answer_does_not_wait_for_the_acknowledgement_of_its_head() -> None:
    args = argparse.Namespace(host="127.0.0.1", port=0, max_connections=1, dry_run=False)
    with serve._listening(args) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

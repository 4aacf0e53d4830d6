"""A server in a process of its own, and OpenAI's client of it."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import openai
import pytest

from flexgen_h2o.checkpoint.resolve import PACKAGED
from tests.forks import Forks, Process

RUN = """
import os, sys
from flexgen_h2o import serve
code = serve.main(sys.argv[1:])
sys.stdout.flush()
os._exit(code)
"""
LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0}))
"""
FLAGS = (
    "--model opt-chat --device cpu --dtype float32 --offload-dir offload "
    "--percent 0 100 0 100 0 100 --gpu-batch-size 4 --num-gpu-batches 2 "
    "--port 0 --state-dir state --max-len 256"
)
KEY = "a-key"
TEMPLATE = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"


class Panic(BaseException):
    """Stands for the panic of a library in Rust, which is no `Exception` in Python."""


@dataclass
class Running(Process):
    """A server that was started, and answers."""

    @property
    def base(self) -> str:
        """Its address, once it has said where it listens."""
        while not (self.folder / "stdout").exists() or not (
            found := re.search(r"(http://\S+)/(v1|plan)\n", self.out)
        ):
            assert not self.has_ended(), self.err
            time.sleep(0.01)
        return found[1]

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(api_key=KEY, base_url=f"{self.base}/v1", max_retries=0, timeout=120)

    @property
    def web(self) -> httpx2.Client:
        headers = {"authorization": f"Bearer {KEY}"}
        return httpx2.Client(base_url=self.base, headers=headers, timeout=120)


def write_model(folder: Path) -> None:
    """The shipped model, with a chat template."""
    shutil.copytree(PACKAGED["opt-tiny"], folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))


Start = Callable[..., Running]


@pytest.fixture(scope="session")
def start(forks: Forks) -> Iterator[Start]:
    """Starts a server in a folder, with further flags; all end with the tests. descriptors: at
    most. patch: runs before it."""
    started: list[Running] = []

    def begin(folder: Path, *flags: str, descriptors: int = 0, patch: str = "") -> Running:
        if not (folder / "opt-chat").exists():
            write_model(folder / "opt-chat")
        (folder / "stdout").unlink(missing_ok=True)  # of an earlier one
        script = (LIMITED.format(descriptors) if descriptors else "") + patch + RUN
        server = forks.start(folder, script, *FLAGS.split(), "--api-key", KEY, *flags, kind=Running)
        started.append(server)
        return server

    yield begin
    for server in started:
        if server.code is None:
            server.send(15)
            server.wait()


@pytest.fixture(scope="session")
def server(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Running:
    """One for all tests that need no other, with little room and little patience."""
    flags = ("--max-queue", "64", "--max-body", "256KiB", "--max-file", "1MiB", "--timeout", "2")
    return start(tmp_path_factory.mktemp("server"), *flags, "--max-connections", "40")


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client as found:
        yield found


@pytest.fixture(scope="module")
def web(server: Running) -> Iterator[httpx2.Client]:
    with server.web as found:
        yield found

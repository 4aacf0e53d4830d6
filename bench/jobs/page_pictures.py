"""Pictures of the server's pages for the documents, by a headless browser at a real server with opt-tiny.

Needs selenium (the extra `browser`) and Debian's chromium and chromium-driver. The browser alone is what
tests/serving/test_browser.py uses too.

    python -m bench.jobs.page_pictures [--folder docs/assets]
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2

from bench import common
from bench.jobs.server_load import Server
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import check_folder
from flexgen_h2o.parser import OneLineParser

PATIENCE_S = 120.0  # a busy machine fails nothing
FLAGS = (
    *("--percent", "0", "50", "0", "100", "0", "100", "--max-len", "512", "--host-mem", "512MiB"),
    *("--compare", "h2o:kv_budget=0.2", "--hardware", "build-2core"),
)
PROMPT = "class Tree:\n    def __init__(self, root):\n        self.root = root\n\n    def"
JOBS = {"docstrings of the library": 24, "summaries, May": 400, "labels for the test set": 300}


def why_no_browser() -> str:
    """What is missing; empty where nothing is."""
    programs = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    missing = [*programs, *([] if find_spec("selenium") else ["selenium"])]
    if not missing:
        return ""
    return f"no {' and no '.join(missing)} here (apt-get install chromium chromium-driver; pip install -e '.[browser]')"


class Browser:
    """A headless one. driver: selenium's."""

    def __init__(self, driver: Any, width: int) -> None:
        self.driver, self._width = driver, width

    def resize(self, height: int) -> None:
        size = {"width": self._width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def find(self, css: str) -> Any:
        return self.driver.find_element("css selector", css)

    def run(self, script: str, *values: Any) -> Any:
        return self.driver.execute_script(script, *values)

    def fill(self, css: str, text: str) -> None:
        self.find(css).clear()
        self.find(css).send_keys(text)

    def wait(self, script: str) -> Any:
        """Until the script's value is true."""
        ends = time.monotonic() + PATIENCE_S
        while not (found := self.run(f"return {script}")):
            if time.monotonic() > ends:
                raise TimeoutError(f"{script}; the page says: {self.find('body').text}")
            time.sleep(0.05)
        return found

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings of the console, as of the content security policy; not a key that is asked for."""
        return [one["message"] for one in self.driver.get_log("browser") if "401 (Unauthorized)" not in one["message"]]

    def picture(self, first: str, last: str) -> bytes:
        """A PNG from the top of one element to the bottom of another one."""
        self.run("window.scrollTo(0, 0)")
        self.resize(self.run("return document.documentElement.scrollHeight"))
        script = "return Math.round(document.querySelector(arguments[0]).getBoundingClientRect()[arguments[1]])"
        top, bottom = self.run(script, first, "top"), self.run(script, last, "bottom")
        space = min(16, top)
        clip = {"x": 0, "y": top - space, "width": self._width, "height": bottom - top + space + 16, "scale": 1}
        found = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "clip": clip})
        return base64.b64decode(found["data"])


@contextmanager
def browsing(width: int = 1100, dark: bool = False) -> Iterator[Browser]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", *["--no-sandbox"] * (os.geteuid() == 0)):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    try:
        found = Browser(driver, width)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        found.resize(900)
        yield found
    finally:
        driver.quit()


def start_batch(url: str, name: str, rows: int, key: str | None = None) -> str:
    """A batch of short functions to be completed; its id. url: with `/v1`."""
    body = {"max_tokens": 96, "ignore_eos": True}
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": {**body, "prompt": f"def f{i}(x):"}}
        for i in range(rows)
    ]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    with httpx2.Client(base_url=url, headers=headers, timeout=PATIENCE_S) as web:
        file = web.post("/files", files={"file": ("rows.jsonl", data)}, data={"purpose": "batch"}).json()
        asked = {"endpoint": "/v1/completions", "completion_window": "24h", "metadata": {"name": name}}
        found: str = web.post("/batches", json={**asked, "input_file_id": file["id"]}).json()["id"]
    return found


def main() -> None:
    parser = OneLineParser(prog="bench.jobs.page_pictures", description=__doc__)
    parser.add_argument("--folder", type=Path, default=common.ROOT / "docs" / "assets")
    args = parser.parse_args()
    if why_no_browser():
        raise UsageError(why_no_browser())
    folder = check_folder(args.folder, "--folder")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        server = Server(Path(work), argparse.Namespace(gpu_batch_size=8, serve_flags=FLAGS))
        try:
            found = pictures(server.url)
        finally:
            server.end()
    for name, data in found.items():
        (folder / f"{name}.png").write_bytes(data)
        print(f"{folder / name}.png: {len(data) / 1000:.0f} kB")


def pictures(url: str) -> dict[str, bytes]:
    top, found = url.removesuffix("v1"), dict[str, bytes]()
    with browsing() as browser:
        browser.driver.get(top)
        for name, rows in JOBS.items():
            start_batch(url, name, rows)
        browser.wait("document.querySelectorAll('.tag.good').length === 1 && document.querySelectorAll('.lane').length")
        browser.wait("document.querySelector('.spark path.area').getAttribute('d').split('L').length > 25")
        found["page-jobs"] = browser.picture("header", "section:has(#timeline)")
        browser.fill("#prompt", PROMPT)
        browser.find("#run").click()
        browser.wait("document.querySelectorAll('mark').length === 2")
        found["page-prompt"] = browser.picture("section:has(#try)", "section:has(#try)")
        browser.driver.get(f"{top}plan")
        browser.wait("document.querySelector('#machine').value")
        browser.fill("#model", "facebook/opt-30b")
        browser.run("machine.value = 't4'; machine.dispatchEvent(new Event('change'))")
        browser.find("#plan").click()
        browser.wait("!document.querySelector('#answer').hidden")
        found["page-plan"] = browser.picture("header", "section:has(#answer)")
    return found


if __name__ == "__main__":
    sys.exit(common.door(main))

"""A headless browser at the server's pages. Needs selenium (the extra `browser`), Debian's chromium
and its driver."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import httpx2

PATIENCE_S = 120.0  # a busy machine fails nothing


def why_no_browser() -> str:
    """What is missing; empty where nothing is."""
    programs = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    missing = [*programs, *([] if find_spec("selenium") else ["selenium"])]
    if not missing:
        return ""
    return (
        f"no {' and no '.join(missing)} here (apt-get install chromium chromium-driver; pip "
        "install -e '.[browser]')"
    )


class Browser:
    """A headless one. driver: selenium's."""

    def __init__(self, driver: Any, width: int) -> None:
        self.driver = driver
        self._width = width

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
        """Errors and warnings of the console, as of the content security policy; not a key that is
        asked for."""
        return [
            one["message"]
            for one in self.driver.get_log("browser")
            if "401 (Unauthorized)" not in one["message"]
        ]


@contextmanager
def browsing(width: int = 1100, dark: bool = False) -> Iterator[Browser]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (
        "--headless=new",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        *["--no-sandbox"] * (os.geteuid() == 0),
    ):
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
        {
            "custom_id": f"r{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {**body, "prompt": f"def f{i}(x):"},
        }
        for i in range(rows)
    ]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    with httpx2.Client(base_url=url, headers=headers, timeout=PATIENCE_S) as web:
        file = web.post(
            "/files", files={"file": ("rows.jsonl", data)}, data={"purpose": "batch"}
        ).json()
        asked = {
            "endpoint": "/v1/completions",
            "completion_window": "24h",
            "metadata": {"name": name},
        }
        found: str = web.post("/batches", json={**asked, "input_file_id": file["id"]}).json()["id"]
    return found

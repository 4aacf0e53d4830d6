"""The pages in a real browser, against a real server: what a reader sees, with a key, in both
schemes, at 400 px.

Needs selenium (the extra `browser`), Debian's chromium and its driver.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.extras import needs
from tests.serving.conftest import KEY, Running, Start
from tests.serving.test_many_batches import send

PATIENCE_S = 120.0  # a busy machine fails nothing


class Browser:
    """A headless one. driver: selenium's."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

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
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        yield Browser(driver)
    finally:
        driver.quit()


pytestmark = [
    pytest.mark.slow,
    needs("browser"),
    pytest.mark.skipif(
        not (shutil.which("chromium") and shutil.which("chromedriver")),
        reason="no chromium and its driver here (apt-get install chromium chromium-driver)",
    ),
]
HOSTILE = "<img src=x onerror=document.title='taken'>"
CONTRAST = """
const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => {
  const [x, y, z] = [r, g, b].map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * x + 0.7152 * y + 0.0722 * z;
};
const behind = (node) => {
  for (; node; node = node.parentElement) {
    const found = rgb(getComputedStyle(node).backgroundColor);
    if (found.length < 4 || found[3] > 0) return found;
  }
  return [255, 255, 255];
};
const poor = [];
for (const node of document.querySelectorAll("main *, header *")) {
  const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
  if (!own || node.closest("svg, [hidden], option, datalist") || !node.offsetParent) continue;
  const [a, b] = [light(rgb(getComputedStyle(node).color)), light(behind(node))].sort((x, y) => y - x);
  const contrast = (a + 0.05) / (b + 0.05);
  if (contrast < 4.5) poor.push(`${node.tagName} ${node.textContent.slice(0, 30)} ${contrast}`);
}
return poor;
"""  # noqa: E501
UNNAMED = """
return [...document.querySelectorAll("input, select, textarea, button, [role=meter], svg[role=img], a")]
  .filter((one) => !(one.labels?.length || one.textContent.trim() || one.getAttribute("aria-label")))
  .map((one) => one.outerHTML);
"""  # noqa: E501


@pytest.fixture(scope="module")
def server(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Running:
    return start(
        tmp_path_factory.mktemp("browser"), "--compare", "h2o:kv_budget=0.3", "--host-mem", "1GiB"
    )


@pytest.fixture(params=[(1100, False), (400, True)], ids=["wide and light", "narrow and dark"])
def browser(request: pytest.FixtureRequest) -> Iterator[Browser]:
    with browsing(*request.param) as found:
        yield found


def enter(browser: Browser, server: Running, path: str) -> None:
    browser.driver.get(server.base + path)
    browser.wait("document.querySelector('#ask-key')")
    browser.fill("#key", KEY)
    browser.find("#ask-key button").click()
    browser.wait("document.querySelector('#state').className === 'good'")


def check(browser: Browser) -> None:
    """Nothing runs over the side, everything can be read and has a name, and the console is
    empty."""
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    assert browser.run(CONTRAST) == [] and browser.run(UNNAMED) == [] and browser.complaints == []


def test_a_wrong_key_is_asked_for_again(browser: Browser, server: Running) -> None:
    browser.driver.get(server.base)
    browser.wait("document.querySelector('#ask-key')")
    browser.fill("#key", "wrong")
    browser.find("#ask-key button").click()
    browser.wait("document.querySelector('#ask-key .error')?.textContent")
    browser.fill("#key", KEY)
    browser.find("#ask-key button").click()
    browser.wait("document.querySelector('#state').className === 'good'")
    assert KEY in browser.run("return Object.values(sessionStorage)")
    assert browser.run("return localStorage.length + document.cookie.length") == 0


def test_jobs_memory_and_timeline(browser: Browser, server: Running) -> None:
    enter(browser, server, "/")
    body = {"max_tokens": 96, "ignore_eos": True}
    lines = [
        {
            "custom_id": f"r{i}",
            "url": "/v1/completions",
            "body": {**body, "prompt": f"def f{i}(x):"},
        }
        for i in range(30)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    with server.web as web:
        batch = send(web, content, metadata={"name": HOSTILE})
    browser.wait("document.querySelectorAll('.lane').length >= 2")
    browser.wait(
        "[...document.querySelectorAll('#jobs tr')].find((row) => "
        f"row.textContent.includes('{batch}') "
        "&& row.querySelector('.tag.good') && row.textContent.includes('30 / 30'))"
    )
    assert (
        HOSTILE in browser.find("#jobs").text
        and browser.run("return document.title") == "flexgen-h2o"
    )
    assert "of 768 MiB" in browser.find("#memory").text
    assert (
        "compute" in browser.find("#timeline").text
        and "100% in RAM" in browser.find("#engine").text
    )
    assert float(browser.find("#speed").text) >= 0
    check(browser)


def test_a_prompt_side_by_side(browser: Browser, server: Running) -> None:
    enter(browser, server, "/")
    assert browser.find("#prompt").get_attribute("value").endswith("?")  # a question: it chats
    browser.fill("#prompt", "class Tree:\n    def")
    browser.fill("#max-tokens", "24")
    browser.find("#run").click()
    browser.wait("document.querySelector('#sides').textContent.includes('same')")
    messages = [{"role": "user", "content": "class Tree:\n    def"}]
    body = {"messages": messages, "max_tokens": 24, "temperature": 0}
    with server.web as web:
        found = [web.post(f"{to}/v1/chat/completions", json=body) for to in ("", "/compare")]
        texts = [one.json()["choices"][0]["message"]["content"] for one in found]
    assert (
        browser.run(
            "return [...document.querySelectorAll('#sides pre')].map((one) => one.textContent)"
        )
        == texts
    )
    check(browser)
    browser.fill("#prompt", "a " * 3000)
    browser.find("#run").click()
    browser.wait("document.querySelector('#try-error').textContent.includes('prompt')")


def test_a_plan(browser: Browser, server: Running, tmp_path: Path) -> None:
    enter(browser, server, "/plan")
    browser.fill("#model", "facebook/opt-125m")
    browser.fill("#num_prompts", "8")
    browser.run("machine.value = 't4'; machine.dispatchEvent(new Event('change'))")
    browser.find("#plan").click()
    browser.wait("!document.querySelector('#answer').hidden")
    assert "flexgen-h2o generate facebook/opt-125m" in browser.find("#command").text
    assert "new tokens (decode): " in browser.find("#bound").text
    check(browser)
    browser.fill("#host_mem", "lots")
    browser.find("#plan").click()
    assert "--host-mem" in browser.wait("document.querySelector('#error').textContent")
    browser.fill("#host_mem", "1MiB")
    browser.fill("#disk_mem", "1MiB")
    browser.find("#plan").click()
    browser.wait("document.querySelector('#error').textContent.includes('too small by')")
    (tmp_path / "profile.json").write_text('{"schema": 5}')
    browser.run(
        "machine.value = machine.lastChild.value; machine.dispatchEvent(new Event('change'))"
    )
    browser.find("#profile").send_keys(str(tmp_path / "profile.json"))
    browser.find("#plan").click()
    browser.wait("document.querySelector('#error').textContent.includes('profile: ')")

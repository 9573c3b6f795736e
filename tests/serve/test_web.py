"""The page of --web in a real browser without a screen."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megakernel.errors import MegakernelError
from megakernel.serve.options import WEB_STEPS
from megakernel.serve.strip import MOST_WORKERS, strip_of
from megakernel.tasks.record import Role
from tests.serve.server import Running

pytestmark = pytest.mark.timeout(180)
EVENT = np.dtype([("worker", "u2"), ("role", "u1"), ("step", "u4"), ("node", "u4"), ("ready", "u8"), ("end", "u8")])


@dataclass
class Recorded:
    """A timeline as the server sees it: two steps of some workers, each with a long and a short record."""

    workers: int = 3
    role: Role = Role.WORKER

    @property
    def tasks(self) -> Any:
        rows = [
            (w, self.role, step, node, 1000 * step + at, 1000 * step + at + length)
            for step in (7, 8) for w in range(self.workers) for node, at, length in ((0, 100 + w, 300), (1, 500, 100))
        ]  # fmt: skip
        return np.array(rows, EVENT)

    @property
    def complete_steps(self) -> tuple[int, ...]:
        return (7, 8)

    @property
    def nodes(self) -> Any:
        return (SimpleNamespace(operator="mlp.down"), SimpleNamespace(operator="attention"))


def test_a_strip_is_the_last_whole_step() -> None:
    made = strip_of(Recorded())
    assert made["step"] == 8 and made["workers"] == [0, 1, 2] and made["operators"] == ["mlp.down", "attention"]
    assert made["rows"] == [[[w, 300 + w, 0], [400, 500, 1]] for w in range(3)]
    assert made["span_ns"] == 500 and made["busy"] == pytest.approx(0.8)
    many = strip_of(Recorded(132, Role.CONSUMER))
    assert len(many["rows"]) == MOST_WORKERS and many["workers"][0] == 0 and many["workers"][-1] == 131
    json.dumps(many)


def test_a_model_that_records_nothing_says_so(tiny: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.wait(tiny.idle)
    assert tiny.client.get("/timeline").status_code == 204  # nothing ran

    def refuse(_: int) -> None:
        raise MegakernelError("built without the timeline")

    monkeypatch.setattr(tiny.host.model, "start_recording", refuse)
    answer = tiny.client.get("/timeline")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "no_timeline"
    assert "built without the timeline" in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    own = next((found for name in names if (found := shutil.which(name))), None)
    with playwright.sync_playwright() as running:
        try:
            made = running.chromium.launch(executable_path=own, args=["--no-sandbox"])
        except playwright.Error as why:
            pytest.skip(f"no browser: apt-get install chromium, or playwright install chromium ({str(why)[:80]})")
        yield made
        made.close()


INKED = """() => {
  const c = document.getElementById("lanes"), all = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
  return all.some((value, i) => i % 4 === 3 && value > 0);
}"""


@pytest.mark.usefixtures("unhurried")
def test_a_conversation_in_a_browser(browser: Any, tiny: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens come with their rate and the time of the first; the kernel's own timeline is drawn; nothing breaks the
    page's rules."""
    from playwright.sync_api import expect

    engine = tiny.host.model.engine  # type: ignore[union-attr]
    monkeypatch.setattr(engine, "steps_per_launch", WEB_STEPS)
    page = browser.new_page()
    said: list[str] = []
    page.on("console", lambda message: message.type in ("error", "warning") and said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(tiny.url)
    expect(page.locator("#model")).to_have_text("talking")
    expect(page.locator("#strip")).to_be_hidden()
    page.locator("summary").click()
    page.fill("#limit", "300")
    page.fill("#temperature", "0")
    page.fill("#text", "Hello <b>you</b>")
    page.keyboard.press("Enter")
    expect(page.locator(".assistant small")).to_be_visible(timeout=60_000)
    assert page.locator(".user").inner_text() == "Hello <b>you</b>"
    assert float(page.locator("#first").inner_text()) > 0 and float(page.locator("#rate").inner_text()) > 0
    assert 1 < int(page.locator("#count").inner_text()) <= 300
    expect(page.locator("#legend")).to_contain_text(re.compile(r"step \d+: \d+ us, \d+% busy.*attention"))
    assert page.evaluate(INKED)
    gate = threading.Event()
    held = threading.Thread(target=engine.exclusive, args=(lambda _: gate.wait(120),))
    held.start()  # the next answers wait
    tiny.wait(tiny.idle)
    page.click("#clear")
    assert page.locator(".message").count() == 0
    for end in ("#send", "#clear", "#send"):  # what was not answered is not asked again
        page.fill("#text", "and on")
        with page.expect_request("**/v1/chat/completions") as asked:
            page.click("#send")
        assert asked.value.post_data_json["messages"] == [{"role": "user", "content": "and on"}]
        expect(page.locator("#send")).to_have_text("Stop")
        tiny.wait(lambda: tiny.host.outstanding == 1)
        page.click(end)
        expect(page.locator("#send")).to_have_text("Send")
        tiny.wait(lambda: tiny.host.outstanding == 0)
    gate.set()
    held.join()
    page.close()
    assert said == []


def test_a_page_that_needs_a_key(browser: Any, tiny: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    from playwright.sync_api import expect

    monkeypatch.setitem(tiny.host.options.__dict__, "api_keys", ("secret",))
    page = browser.new_page()
    page.goto(tiny.url)
    expect(page.locator("#model")).to_contain_text("API key")
    page.locator("summary").click()
    page.fill("#key", "secret")
    expect(page.locator("#model")).to_have_text("talking")
    page.close()

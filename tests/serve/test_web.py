"""The page of --web in a real browser without a screen."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megakernel.errors import MegakernelError
from megakernel.llm import LLM
from megakernel.serve.strip import MOST_WORKERS, strip_of
from megakernel.tasks.record import Role
from tests.serve.server import serving

pytestmark = pytest.mark.timeout(180)
EVENT = np.dtype([("worker", "u2"), ("role", "u1"), ("step", "u4"), ("node", "u4"), ("ready", "u8"), ("end", "u8")])


@dataclass
class Recorded:
    """A timeline as the server sees it: two steps of some workers, each with a long and a short record."""

    workers: int = 3
    role: Role = Role.WORKER
    empty: bool = False

    @property
    def tasks(self) -> Any:
        rows = [
            (w, self.role, step, node, 1000 * step + at, 1000 * step + at + length)
            for step in (7, 8) for w in range(self.workers) for node, at, length in ((0, 100 + w, 300), (1, 500, 100))
        ]  # fmt: skip
        return np.array(rows, EVENT)

    @property
    def complete_steps(self) -> tuple[int, ...]:
        return () if self.empty else (7, 8)

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


def test_a_model_that_records_nothing_says_so(open_tiny: Callable[..., LLM]) -> None:
    with serving(open_tiny, web=True) as server:
        model: Any = server.host.model
        model.start_recording = lambda steps: None
        model.stop_recording = lambda: Recorded(empty=True)
        for _ in range(2):
            answer = server.client.get("/timeline")
            assert answer.status_code == 404 and answer.json()["error"]["code"] == "no_timeline"

        def refuse(_: int) -> None:
            raise MegakernelError("built without the timeline")

        model.start_recording = refuse
        assert "built without the timeline" in server.client.get("/timeline").json()["error"]["message"]


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


def test_a_conversation_in_a_browser(browser: Any, open_tiny: Callable[..., LLM]) -> None:
    """Tokens come with their rate and the time of the first; the strip is drawn; nothing breaks the page's rules."""
    from playwright.sync_api import expect

    with serving(open_tiny, web=True) as server:
        model: Any = server.host.model
        model.start_recording = lambda steps: None
        model.stop_recording = lambda: Recorded(8)
        page = browser.new_page()
        said: list[str] = []
        page.on("console", lambda message: message.type in ("error", "warning") and said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(server.url)
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
        expect(page.locator("#legend")).to_contain_text("step 8")
        expect(page.locator("#legend")).to_contain_text("mlp.down")
        assert page.evaluate(INKED)
        page.click("#clear")
        assert page.locator(".message").count() == 0
        gate = threading.Event()
        held = threading.Thread(target=model.engine.exclusive, args=(lambda _: gate.wait(10),))
        held.start()  # the next answer waits
        page.fill("#text", "and on")
        page.click("#send")
        expect(page.locator("#send")).to_have_text("Stop")
        server.wait(lambda: server.host.outstanding == 1)
        page.click("#send")
        expect(page.locator("#send")).to_have_text("Send")
        server.wait(lambda: server.host.outstanding == 0)
        gate.set()
        held.join()
        page.close()
        assert said == []


def test_a_page_that_needs_a_key(browser: Any, open_tiny: Callable[..., LLM]) -> None:
    from playwright.sync_api import expect

    with serving(open_tiny, web=True, api_keys=("secret",)) as server:
        page = browser.new_page()
        page.goto(server.url)
        expect(page.locator("#model")).to_contain_text("API key")
        page.locator("summary").click()
        page.fill("#key", "secret")
        expect(page.locator("#model")).to_have_text("talking")
        page.close()

"""A headless browser for tests of pages; without one they are skipped, saying why."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def started() -> Iterator[Any]:
    """A browser. Skips the test when there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="no browser driver: pip install playwright")
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on the PATH (apt-get install chromium)")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, path: Path, width: int = 1280, height: int = 900) -> Iterator[Any]:
    """The page of a file, without a network. Fails for anything that the page asked for and for any error in it."""
    asked: list[str] = []
    wrong: list[str] = []
    context = browser.new_context(viewport={"width": width, "height": height}, offline=True)
    page = context.new_page()
    page.on("request", lambda r: asked.append(r.url))
    page.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: wrong.append(str(e)))
    page.on("dialog", lambda d: (wrong.append(f"dialog {d.message}"), d.dismiss()))
    page.goto(path.as_uri())
    try:
        yield page
    finally:
        context.close()
    assert asked == [path.as_uri()], f"the page asked for more than itself: {asked[1:]}"
    assert not wrong, wrong

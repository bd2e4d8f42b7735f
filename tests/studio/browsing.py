"""A studio and a browser for the tests: Debian's chromium, driven by Playwright, against a page on this machine."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pellucid.studio.app import start
from pellucid.studio.form import Shelf
from pellucid.studio.server import Studio
from pellucid.studio.visitors import Sessions

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE = 90_000  # milliseconds, on a busy machine
SHOTS = Path("out/studio")  # where a run of the tests leaves what it saw


def chromium() -> str | None:
    """The browser: as CHROMIUM names it, or one that is on the path."""
    return os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


def marks() -> list[pytest.MarkDecorator]:
    """Of a file whose tests need the browser."""
    return [
        pytest.mark.browser,
        pytest.mark.filterwarnings("default"),  # of gradio and what it stands on
        pytest.mark.skipif(chromium() is None, reason="chromium is not installed: make browser"),
    ]


@contextmanager
def served(*models: str, host: str = "127.0.0.1") -> Iterator[tuple[Studio, Sessions]]:
    """A studio, built in a loop of another thread: where gradio finds no loop it leaves one open."""

    async def begin() -> Studio:
        return start(Shelf(models, "cpu"), sessions, port=0, host=host)

    sessions = Sessions()
    with ThreadPoolExecutor(1) as aside:
        found = aside.submit(asyncio.run, begin()).result()
    try:
        yield found, sessions
    finally:
        found.close()
        sessions.end_all()


@contextmanager
def browser(*flags: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium(), args=[*FLAGS, *flags])
        try:
            yield found
        finally:
            found.close()


def opened(context: Any, address: str, shown: str = "#generate") -> Any:
    """The studio's page, once its first tab is shown; errors of its scripts are in `troubles`."""
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    page.troubles, page.requests = [], set()
    page.on("pageerror", lambda error: page.troubles.append(str(error)))
    page.on("request", lambda request: page.requests.add(request))
    page.on("requestfinished", lambda request: page.requests.discard(request))
    page.on("requestfailed", lambda request: page.requests.discard(request))
    page.goto(address)
    page.wait_for_selector(shown)
    return page


def settle(page: Any) -> None:
    """Waits until the page has had every answer. gradio 6.31 loses the answer to what is asked while it closes the
    stream of the answers before: the client still takes the stream for open, and opens no other."""
    quiet = 0
    for _ in range(PATIENCE // 50):
        page.wait_for_timeout(50)
        quiet = 0 if any("/queue/" in request.url for request in page.requests) else quiet + 1
        if quiet == 4:
            return
    raise AssertionError("the page waits for answers for ever")


def shoot(page: Any, name: str) -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}.png", full_page=True)

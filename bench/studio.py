"""How long people wait for the studio, as a browser sees it: until it is ready, until a first preview, beside another.

    .venv/bin/python bench/studio.py            (--rounds 5; it needs chromium: make browser)

`pellucid studio scenes-128` is started anew and a page opened. Ready: from the command until the page is answered.
Drawn: until the browser, which was running, shows its button. First preview: from the press of the button until a first
image of the run is shown. Beside another: while a second person's run of 100 steps goes on. Longest gap: between two
previews of a run of 100 steps while the other draws one image after the other; a request that blocked another would
show there. Promised are 5 s until ready, 1 s until a first preview and gaps of 2 s at most, on two cores.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
LIMIT = 120_000  # milliseconds
# Writes down when the button was pressed and when each new image was shown, by the page's own clock.
WATCH = """() => {
  window.shown = []; window.pressed = null;
  document.querySelector('#generate').addEventListener('click', () => {
    window.shown = []; window.pressed = performance.now(); window.last = image(); }, true);
  const image = () => document.querySelector('#image img')?.src;
  const look = () => {
    const now = image();
    if (now && now !== window.last) { window.last = now; window.shown.push(performance.now() - window.pressed); }
    requestAnimationFrame(look);
  };
  look();
}"""
DONE = "document.querySelector('#status').innerText.includes('done in')"


@contextmanager
def studio() -> Iterator[tuple[str, float]]:
    """A fresh one: the address that it prints; and when its command was given."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
    began = time.perf_counter()
    command = [sys.executable, "-m", "pellucid.cli", "studio", "scenes-128", "--no-open", "--port", "0"]
    with subprocess.Popen(command, env=clean, stdout=subprocess.PIPE, text=True) as process:
        try:
            found = re.search(r"http://\S+", process.stdout.readline() if process.stdout else "")
            if found is None:
                raise SystemExit("the studio did not open")
            yield found[0], began
        finally:
            process.terminate()


def answered(address: str) -> None:
    httpx.get(address, timeout=60, follow_redirects=True).raise_for_status()


def opened(browser: Any, address: str) -> Any:
    page = browser.new_context().new_page()
    page.set_default_timeout(LIMIT)
    page.goto(address)
    page.wait_for_selector("#generate")
    return page


def press(page: Any, steps: int, seed: int) -> None:
    page.fill("#prompt textarea", "a red star above a small blue circle")
    page.fill("#steps input", str(steps))
    page.fill("#seed textarea, #seed input", str(seed))
    page.click("#generate")


def first_preview(page: Any, seed: int, wait: bool = True) -> float:
    press(page, 20, seed)
    page.wait_for_function("window.shown.length > 0")
    found = page.evaluate("window.shown[0]") / 1000
    if wait:
        page.wait_for_function(DONE)
    return found


def gaps(page: Any, other: Any, seed: int) -> float:
    """The longest time without a new preview in a run of 100 steps, while the other draws."""
    press(page, 100, seed)
    page.wait_for_function("window.shown.length > 0")
    for k in range(3):
        first_preview(other, 1000 + seed + k)
    page.wait_for_function(DONE)
    shown = page.evaluate("window.shown")
    return max(b - a for a, b in zip([0.0, *shown], shown, strict=False)) / 1000


def main() -> None:
    from playwright.sync_api import sync_playwright

    words = argparse.ArgumentParser(description="How long people wait for the studio.")
    words.add_argument("--rounds", type=int, default=5)
    rounds = words.parse_args().rounds
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise SystemExit("chromium must be installed: make browser")
    found: dict[str, list[float]] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        for turn in range(rounds):
            with studio() as (address, began):
                answered(address)
                found.setdefault("ready", []).append(time.perf_counter() - began)
                page = opened(browser, address)
                found.setdefault("drawn", []).append(time.perf_counter() - began)
                page.evaluate(WATCH)
                found.setdefault("first preview, first run", []).append(first_preview(page, 1))
                found.setdefault("first preview", []).append(first_preview(page, 2))
                other = opened(browser, address)
                other.evaluate(WATCH)
                press(other, 100, 5)
                other.wait_for_function("window.shown.length > 0")
                found.setdefault("first preview beside another", []).append(first_preview(page, 3))
                other.wait_for_function(DONE)
                found.setdefault("longest gap beside another", []).append(gaps(page, other, 7))
            print(f"round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
        browser.close()
    print(f"seconds, {os.cpu_count()} cores            median   least    most")
    for name, took in found.items():
        print(f"{name:30} {statistics.median(took):7.2f} {min(took):7.2f} {max(took):7.2f}")


if __name__ == "__main__":
    main()

"""The tab Labs in a real browser: a lab is read, run, cancelled, begun and checked; wide and narrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import marks, opened, shoot

from pellucid.labs.catalog import find
from pellucid.studio.app import start
from pellucid.studio.form import Shelf
from pellucid.studio.visitors import Sessions

pytestmark = marks()
ANSWERS = Path(__file__).parents[1] / "labs" / "answers"


@pytest.fixture(scope="module")
def address(small: Path) -> Iterator[str]:
    sessions = Sessions()
    studio = start(Shelf([str(small)], "cpu"), sessions, port=0, lab=find("01"))
    yield studio.address
    studio.close()
    sessions.end_all()


@pytest.fixture(scope="module")
def window(chrome: Any) -> Iterator[Any]:
    """What the pages of all tests share, so that the browser reads gradio's scripts once."""
    with chrome.new_context(viewport={"width": 1280, "height": 900}) as context:
        yield context


@pytest.fixture
def page(window: Any, address: str) -> Iterator[Any]:
    with opened(window, address, "#labs-run") as found:
        yield found


def told(page: Any, place: str, words: str) -> None:
    page.wait_for_function(
        "([place, words]) => document.querySelector(place).innerText.includes(words)", arg=[place, words]
    )


def answered(page: Any, text: str) -> None:
    """Puts a text into the editor, in the place of what is there."""
    page.click("#labs-answer .cm-content")
    page.keyboard.press("Control+A")
    page.keyboard.insert_text(text)


def test_a_lab_is_read_and_run_with_its_figures(page: Any) -> None:
    told(page, "#labs-page", "Lab 01: Forward noise")
    page.wait_for_selector("#labs-page .katex")
    page.check("#labs-smoke input")
    page.click("#labs-run")
    page.wait_for_selector("#labs-page img")  # before all is done
    told(page, "#labs-status", "done in")
    assert page.locator("#labs-page img").count() == 3
    assert "largest difference over all times" in page.inner_text("#labs-page")
    shoot(page, "labs")
    page.set_viewport_size({"width": 400, "height": 800})
    page.wait_for_timeout(300)
    shoot(page, "narrow-labs-run")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert page.troubles == []


def test_another_lab_keeps_what_was_written(page: Any) -> None:
    answered(page, "# mine")
    page.click("#labs-choice input")
    page.get_by_role("option", name="03 Reading a scheduler").click()
    told(page, "#labs-page", "Lab 03: Reading a scheduler")
    told(page, "#labs-answer", "def trailing")
    page.click("#labs-choice input")
    page.get_by_role("option", name="01 Forward noise").click()
    told(page, "#labs-answer", "# mine")


def test_cancel_ends_a_run(page: Any) -> None:
    page.click("#labs-run")
    told(page, "#labs-status", "block")
    page.click("#labs-cancel")
    told(page, "#labs-status", "cancelled")


def test_a_starter_is_not_written_yet_and_an_answer_passes(page: Any) -> None:
    page.click("#labs-check")
    page.wait_for_selector("#labs-results .outcome-not-written-yet")
    answered(page, (ANSWERS / "lab_01_forward_noise.py").read_text("utf-8"))
    page.click("#labs-check")
    told(page, "#labs-check-status", "4 of 4 checks passed")
    shoot(page, "labs-check")


def test_a_file_that_is_sent_is_checked_and_a_wrong_one_gets_a_hint(page: Any, tmp_path: Path) -> None:
    right = (ANSWERS / "lab_01_forward_noise.py").read_text("utf-8")
    (tmp_path / "mine.py").write_text(right.replace("(1 - betas).cumprod(0)", "1 - betas"), "utf-8")
    page.set_input_files("input[type=file][accept='.py']", tmp_path / "mine.py")
    told(page, "#labs-answer", "return 1 - betas")
    page.click("#labs-check")
    told(page, "#labs-results", "take the product of all up to it")
    assert page.locator("#labs-results .outcome-wrong").count() == 1


def test_what_is_not_python_is_said(page: Any) -> None:
    answered(page, "def alpha_bar(:")
    page.click("#labs-check")
    page.get_by_text("answer must be Python").first.wait_for()


def test_the_starter_can_be_downloaded(page: Any) -> None:
    with page.expect_download() as held:
        page.click("#labs-starter")
    assert Path(held.value.path()).read_text("utf-8") == find("01").starter.read_text("utf-8")


def test_a_narrow_page_does_not_scroll_sideways(chrome: Any, address: str) -> None:
    with chrome.new_context(viewport={"width": 400, "height": 800}) as context:
        page = opened(context, address, "#labs-run")
        told(page, "#labs-page", "Lab 01: Forward noise")
        assert page.evaluate("document.documentElement.scrollWidth") <= 400

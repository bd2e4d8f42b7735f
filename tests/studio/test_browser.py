"""The studio in a real browser: each tab's main path, cancelling, bad input, two people at once, wide and narrow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import marks, opened, settle, shoot
from PIL import Image

from pellucid.studio.app import TABS, start
from pellucid.studio.form import Shelf
from pellucid.studio.visitors import Sessions

pytestmark = marks()


@pytest.fixture(scope="module")
def sessions() -> Iterator[Sessions]:
    held = Sessions()
    yield held
    held.end_all()


@pytest.fixture(scope="module")
def address(sessions: Sessions, small: Path) -> Iterator[str]:
    studio = start(Shelf([str(small)], "cpu"), sessions, port=0)
    yield studio.address
    studio.close()


@pytest.fixture(scope="module")
def window(chrome: Any) -> Iterator[Any]:
    """What the pages of most tests share, so that the browser reads gradio's scripts once."""
    with chrome.new_context(viewport={"width": 1280, "height": 900}) as context:
        yield context


@pytest.fixture
def page(window: Any, address: str) -> Iterator[Any]:
    with opened(window, address) as found:
        yield found


def ask(page: Any, prompt: str = "a red star", steps: int = 4, seed: str = "7") -> None:
    page.fill("#prompt textarea", prompt)
    page.fill("#steps input", str(steps))
    page.fill("#seed textarea, #seed input", seed)
    page.click("#generate")


def said(page: Any, words: str) -> None:
    page.wait_for_function("words => document.querySelector('#status').innerText.includes(words)", arg=words)


def tab(page: Any, name: str) -> None:
    """Opens a tab; on a narrow page the last ones are in a menu."""
    shown = page.get_by_role("tab", name=name, exact=True)
    if shown.count() == 0:
        page.get_by_label("More tabs").first.click()
        shown = page.locator(".overflow-menu button:visible", has_text=name)
    shown.click()


def image(page: Any) -> str:
    return page.get_attribute("#image img", "src")


def test_generate_shows_steps_then_a_image_to_download(page: Any) -> None:
    ask(page)
    page.wait_for_selector("#image img")
    said(page, "done in")
    shoot(page, "generate")
    with page.expect_download() as held:
        page.click("#download")
    with Image.open(held.value.path()) as found:
        assert "pellucid" in " ".join(found.info)
    assert page.troubles == []


def test_a_page_that_is_closed_leaves_nothing(chrome: Any, address: str, sessions: Sessions) -> None:
    before = set(sessions.held)
    with chrome.new_context() as context:
        page = opened(context, address)
        ask(page)
        said(page, "done in")
        (mark,) = set(sessions.held) - before
        folder = sessions.held[mark].folder
        assert {path.suffix for path in folder.iterdir()} == {".png", ".safetensors"}
    for _ in range(100):
        if not folder.exists():
            break
        time.sleep(0.1)
    assert not folder.exists()
    if mark in sessions.held:  # a request that the page had sent before it closed was answered after it
        late = sessions.held[mark]
        assert (late.runs, late.jobs, list(late.folder.iterdir())) == ({}, {}, [])
        sessions.end_idle(idle=0)
    assert mark not in sessions.held


def test_the_last_run_can_be_scrubbed_in_trace(page: Any) -> None:
    ask(page)
    said(page, "done in")
    tab(page, "Trace")
    page.wait_for_selector("#trace-frames img")
    assert page.locator("#trace-frames img").count() == 4
    last = page.get_attribute("#trace-frames img >> nth=1", "src")
    page.fill("#trace-step input[type=number]", "1")
    page.keyboard.press("Enter")
    page.wait_for_function("last => document.querySelectorAll('#trace-frames img')[1].src !== last", arg=last)
    assert "step 1" in page.inner_text("#trace-numbers")
    shoot(page, "trace")


def test_cancel_stops_a_long_run_and_the_page_goes_on(page: Any, sessions: Sessions) -> None:
    ask(page, steps=900)
    page.wait_for_selector("#image img")
    page.click("#cancel")
    said(page, "cancelled")
    settle(page)
    ask(page)
    said(page, "done in")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"prompt": ""}, "prompt must not be empty"),
        ({"steps": 0}, "steps must be a whole number from 1 to 1,000; got 0"),
        ({"steps": 10_000}, "got 10000"),
        ({"seed": "seven"}, "seed must be a whole number"),
    ],
)
def test_bad_input_is_said_and_nothing_is_lost(page: Any, asked: dict[str, Any], words: str) -> None:
    ask(page)
    said(page, "done in")
    settle(page)
    before = image(page)
    ask(page, **asked)
    page.get_by_text(words).first.wait_for()
    assert image(page) == before
    if "prompt" in asked:
        shoot(page, "error")


def test_what_is_no_model_is_said(page: Any) -> None:
    page.fill("#model input", "no such model")
    page.keyboard.press("Enter")
    ask(page)
    page.get_by_text("model must be a folder").first.wait_for()


def test_a_huge_upload_is_refused(page: Any, tmp_path: Path) -> None:
    Image.new("1", (10_000, 5_000)).save(tmp_path / "large.png")
    page.get_by_text("From an image").click()
    page.set_input_files("input[type=file] >> nth=0", tmp_path / "large.png")
    page.get_by_text("image must be at most 16 megapixels").first.wait_for()


def test_two_people_do_not_disturb_each_other(chrome: Any, address: str) -> None:
    with chrome.new_context() as one, chrome.new_context() as two:
        first, second = opened(one, address), opened(two, address)
        ask(first, steps=900, seed="1")
        first.wait_for_selector("#image img")
        began = time.monotonic()
        ask(second, steps=4, seed="2")
        said(second, "done in")
        assert time.monotonic() - began < 30  # the long run has not ended
        before = image(first)
        first.wait_for_function("before => document.querySelector('#image img').src !== before", arg=before)
        assert "2" not in first.input_value("#seed textarea, #seed input")
        first.click("#cancel")
        said(first, "cancelled")


def test_a_narrow_page_does_not_scroll_sideways(chrome: Any, address: str) -> None:
    with chrome.new_context(viewport={"width": 400, "height": 800}) as context:
        page = opened(context, address)
        ask(page)
        said(page, "done in")
        for name in TABS:
            tab(page, name)
            page.wait_for_timeout(300)
            wide = page.evaluate("document.documentElement.scrollWidth")
            shoot(page, f"narrow-{name.lower()}")
            assert wide <= 400, name


def test_the_main_path_needs_no_mouse(page: Any) -> None:
    page.focus("#prompt textarea")
    page.keyboard.type("a red star")
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id || document.activeElement.closest('[id]').id") == "generate":
            break
    page.keyboard.press("Enter")
    page.wait_for_selector("#image img")


# The other tabs


def told(page: Any, place: str, words: str) -> None:
    page.wait_for_function(
        "([place, words]) => document.querySelector(place).innerText.includes(words)", arg=[place, words]
    )


def test_schedules_are_drawn_with_their_grid(page: Any) -> None:
    tab(page, "Schedules")
    page.wait_for_selector("#schedules-charts svg circle")
    page.wait_for_selector("#schedules-noised img")
    assert not page.query_selector_all(".panels [data-entry]")  # one key for all is enough
    shoot(page, "schedules")


def test_compare_says_where_two_runs_part(page: Any) -> None:
    tab(page, "Compare")
    page.fill("#compare-prompt textarea, #compare-prompt input", "a red star")
    page.click("#compare-run")
    told(page, "#compare-verdict", "step")
    shoot(page, "compare")


def test_the_pipeline_is_drawn_when_its_tab_is_opened(page: Any) -> None:
    tab(page, "Pipeline")
    page.wait_for_selector("#pipeline-graph img")
    told(page, "#pipeline-components", "unet")
    shoot(page, "pipeline")


def test_the_doctor_finds_what_is_wrong_in_a_config(page: Any) -> None:
    tab(page, "Doctor")
    page.get_by_label("a config, pasted or uploaded").check()
    config = '{"_class_name": "DDIMScheduler", "prediction_type": "epsilon", "rescale_betas_zero_snr": true}'
    page.fill("#doctor-config textarea", config)
    page.click("#doctor-go")
    page.wait_for_selector("#doctor-findings .finding-error")
    shoot(page, "doctor")


def test_a_study_fills_while_one_watches(page: Any) -> None:
    tab(page, "Study")
    page.fill("#study-steps textarea, #study-steps input", "2,3")
    page.click("#study-start")
    page.wait_for_selector("#study-chart svg circle")
    page.frame_locator("#study-report iframe").locator("svg circle").first.wait_for()
    shoot(page, "study")

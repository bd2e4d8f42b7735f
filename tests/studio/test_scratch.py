"""What the studio leaves on disk: in a folder that others cannot read, and gone with its page and its process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from browsing import served

from pellucid.labs.catalog import find
from pellucid.studio import scratch, server, visitors
from pellucid.studio.visitors import IDLE, Sessions

SCRATCH = Path(scratch.__file__)
# The file alone, so that gradio is not imported; it says where its folder is and stays.
HOLD = f"""
import importlib.util, time
spec = importlib.util.spec_from_file_location("scratch", {str(SCRATCH)!r})
scratch = importlib.util.module_from_spec(spec)
spec.loader.exec_module(scratch)
print(scratch.folder(), flush=True)
"""


def mode(path: Path) -> str:
    return oct(path.stat().st_mode & 0o777)


def until(true: Callable[[], Any], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder of its own, for processes that are started here."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("GRADIO_TEMP_DIR", raising=False)  # ours
    return tmp_path


@contextmanager
def holding(code: str = "time.sleep(60)") -> Iterator[tuple[subprocess.Popen[str], Path]]:
    with subprocess.Popen([sys.executable, "-c", HOLD + code], stdout=subprocess.PIPE, text=True) as found:
        assert found.stdout is not None
        yield found, Path(found.stdout.readline().strip())
        found.kill()


# The process


def test_the_folder_is_for_its_owner_alone_and_gradio_s_too() -> None:
    assert mode(scratch.folder()) == "0o700"
    assert os.environ["GRADIO_TEMP_DIR"] == str(scratch.folder())
    session = Sessions().of("me")
    assert session.folder.parent == scratch.folder()
    assert mode(session.folder) == "0o700"


def test_a_folder_goes_with_its_process(place: Path) -> None:
    with holding("") as (process, _):
        assert process.wait(20) == 0
    assert list(place.iterdir()) == []


def test_what_a_killed_process_left_goes_at_the_next_start_and_what_a_live_one_has_stays(place: Path) -> None:
    with holding() as (_, kept):
        with holding() as (_, left):  # killed in the end
            for folder in (left, kept):
                (folder / "image.png").write_bytes(b"x")
        (place / "pellucid-studio-linked").symlink_to(kept)
        (place / "other").mkdir()
        assert (left / "image.png").exists()
        with holding("") as (after, _):
            assert after.wait(20) == 0
        assert {path.name for path in place.iterdir()} == {kept.name, "pellucid-studio-linked", "other"}
        assert (kept / "image.png").exists()


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 0)])
def test_a_studio_that_is_told_to_end_leaves_nothing(place: Path, name: str, code: int) -> None:
    program = "import pellucid.cli as c, sys; sys.argv = ['pellucid', 'studio', '--no-open', '--port', '0']; c.main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        address = re.findall(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{43}", process.stdout.readline())[0]
        person = Person(address, "me")  # whose page is open to the end
        person.client.post("/gradio_api/upload", files={"files": ("mine.png", b"x")})
        person.client.post("/gradio_api/call/choose_1", json={"data": [find("03").stem, ""], "session_hash": "me"})
        until(lambda: list(place.glob("pellucid-studio-*/session-*/labs/*")))
        assert mode(next(place.glob("pellucid-studio-*"))) == "0o700"
        assert list(place.glob("pellucid-studio-*/*/mine.png"))
        process.send_signal(getattr(signal, name))
        assert process.wait(20) == code
        person.leave()
    finally:
        process.kill()
        errors = process.communicate()[1]
    assert list(place.iterdir()) == []
    assert errors == ""


# The session


@pytest.fixture(scope="module")
def studio(small: Path) -> Iterator[tuple[str, Sessions]]:
    with served(str(small)) as (found, sessions):
        yield found.address, sessions


class Person:
    """A page that is open: its heartbeat, and what it sends."""

    def __init__(self, address: str, mark: str) -> None:
        self.client = httpx.Client(base_url=address.partition("?")[0], timeout=60)
        self.client.get(address)
        self.mark = mark
        self.heart = self.client.stream("GET", f"/gradio_api/heartbeat/{mark}")
        self.beats = self.heart.__enter__().iter_lines()
        next(self.beats)

    def send(self, content: bytes, ends: str = "complete") -> Path:
        path = self.client.post("/gradio_api/upload", files={"files": ("mine.py", content)}).json()[0]
        data = [{"path": path, "meta": {"_type": "gradio.FileData"}}]
        begun = self.client.post("/gradio_api/call/receive", json={"data": data, "session_hash": self.mark}).json()
        assert f"event: {ends}" in self.client.get(f"/gradio_api/call/receive/{begun['event_id']}").text
        return Path(path)

    def leave(self) -> None:
        self.heart.__exit__(None, None, None)
        self.client.close()


@pytest.mark.filterwarnings("default")  # of gradio
def test_a_page_that_is_closed_leaves_nothing_and_others_keep_theirs(studio: tuple[str, Sessions]) -> None:
    address, sessions = studio
    one, two = Person(address, "one"), Person(address, "two")
    try:
        mine, both, theirs = one.send(b"mine = 1"), one.send(b"both = 1"), two.send(b"theirs = 1")
        assert two.send(b"both = 1") == both  # gradio keeps one file of one content
        folder = sessions.of("one").folder
        assert mine.exists()
        one.leave()
        until(lambda: not folder.exists() and not mine.exists())
        assert theirs.exists()
        assert both.exists()
        assert sessions.of("two").folder.exists()
    finally:
        two.leave()
    until(lambda: not theirs.exists() and not both.exists())
    with httpx.Client(base_url=address.partition("?")[0]) as later:  # what is the page's own is still there
        later.get(address)
        config = later.get("/config").json()
        starter = next(one for one in config["components"] if one["props"].get("elem_id") == "labs-starter")
        assert later.get(f"/gradio_api/file={starter['props']['value']['path']}").status_code == 200


def test_an_upload_that_nobody_used_goes_when_the_last_page_does(studio: tuple[str, Sessions]) -> None:
    address, sessions = studio
    one = Person(address, "one")
    sent = Path(one.client.post("/gradio_api/upload", files={"files": ("mine.png", b"unused")}).json()[0])
    sessions.of("one")
    assert sent.exists()
    one.leave()
    until(lambda: not sent.exists())


@pytest.mark.filterwarnings("default")  # of gradio
def test_what_was_sent_for_an_event_that_failed_goes_with_its_page(studio: tuple[str, Sessions]) -> None:
    older, one = Person(studio[0], "older"), Person(studio[0], "one")
    try:
        sent = one.send(b"def f(:", ends="error")
        assert sent.exists()
        one.leave()
        until(lambda: not sent.exists())
    finally:
        older.leave()
        until(lambda: not studio[1].held)  # the last page takes all files with it: not those of the next test


def test_what_an_open_page_sent_and_has_not_used_yet_stays_when_another_is_closed() -> None:
    sessions = Sessions()
    sessions.opened("one")
    sent = scratch.folder() / "upload.png"
    sent.touch()
    sessions.opened("two")
    sessions.of("two")
    sessions.closed("two")
    assert sent.exists()
    sessions.closed("one")
    assert not sent.exists()


def test_a_file_that_gradio_moves_meanwhile_does_not_keep_a_session_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sessions = Sessions()
    sessions.of("stays")
    place = sessions.of("me").folder
    monkeypatch.setattr(visitors, "files", lambda: {scratch.folder() / "moved.png"})
    assert sessions.end("me") == []
    assert not place.exists()
    sessions.end_all()


def test_the_cleaner_outlives_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    class Failing(Sessions):
        def end_idle(self, idle: float = IDLE) -> None:
            calls.append(1)
            raise RuntimeError("dictionary changed size during iteration")

    monkeypatch.setattr(server, "IDLE", 0.08)
    alive = threading.Thread(target=time.sleep, args=(1,))
    alive.start()
    server._end_idle(Failing(), alive)
    assert len(calls) > 1


def test_a_session_without_a_heartbeat_is_freed() -> None:
    sessions = Sessions()
    gone, working, shown, fresh = (sessions.of(mark) for mark in ("gone", "working", "shown", "fresh"))
    job = working.begin("generate", lambda job: job.stop.wait(20))
    sessions.opened("shown")
    for old in (gone, working, shown):
        old.seen -= IDLE + 1
    sessions.end_idle()
    assert set(sessions.held) == {"working", "shown", "fresh"}
    assert not gone.folder.exists()
    job.cancel()
    until(lambda: job.ended)
    sessions.end_idle()
    assert set(sessions.held) == {"shown", "fresh"}
    sessions.closed("shown")
    assert set(sessions.held) == {"fresh"}
    sessions.end_all()
    assert not any(one.folder.exists() for one in (gone, working, shown, fresh))

"""`pellucid top`: one frame, many, and none of a server that is not there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from fake_server import FakeServer, ask, refused

from pellucid.cli import output, top
from pellucid.serve.client import Remote


@pytest.fixture(autouse=True)
def _without_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PELLUCID_API_KEY", raising=False)
    monkeypatch.setenv("COLUMNS", "120")


def printed(state: dict, note: str = "") -> str:
    screen = output.console()
    with screen.capture() as held:
        screen.print(top.frame(state, "http://a", note))
    return " ".join(held.get().split())


def test_one_frame_shows_the_state() -> None:
    with FakeServer() as server:
        answer = ask("top", server.url, "--once")
    assert (answer.code, answer.err) == (0, "")
    assert f"{server.url} · pellucid 0.1.0 · toy · ready" in answer.words
    assert "3 of 8 unanswered · 2.50 images/s · engine restarts: 0" in answer.words
    assert f"4×16×16 2 of 4 {12 * '█'}{12 * '·'} 12.5" in answer.words  # what a step of two images takes
    assert "encode 1 0.5 denoise 2 1.2 decode 0 0.0" in answer.words
    assert "wait 0.100 0.200 0.300" in answer.words
    assert "total – – –" in answer.words


def test_as_json_it_is_the_status() -> None:
    with FakeServer() as server:
        assert ask("top", server.url, "--once", "--json").json == server.state


def test_a_server_without_an_engine_has_a_frame() -> None:
    state = {"ready": False, "why": "the engine is starting.", "engine": {}, "images_per_second": None}
    assert "not ready (the engine is starting.)" in printed(state)
    assert "– images/s" in printed(state)
    assert "draining" in printed({**state, "draining": True})


@pytest.mark.parametrize(("share", "blocks"), [(-1, 0), (0, 0), (0.5, 12), (1, 24), (9, 24)])
def test_a_bar_is_as_long_as_its_share(share: float, blocks: int) -> None:
    assert top.bar(share) == blocks * "█" + (24 - blocks) * "·"


def test_a_server_that_is_not_there_is_one_line() -> None:
    with FakeServer() as server:
        server.key = "of-the-server"
        assert refused("top", server.url).startswith("error[api-key]: --api-key must be one of the server's keys")
        assert ask("top", server.url, "--once", "--api-key", server.key).code == 0
    line = refused("top", server.url)
    assert line == f"error[no-server]: URL must be of a server that answers; got {server.url!r}. Connection refused."


def test_a_server_that_goes_away_is_a_note_and_comes_back() -> None:
    with FakeServer() as server:
        found = top.looks(Remote.of(server.url), 0.01, {"ready": True})
        assert next(found) == ({"ready": True}, "")
        state, note = next(found)
        assert (state["queue"], note) == (8, "")
        server.key = "new"  # it answers, but not this client
        state, note = next(found)
        assert state["queue"] == 8
        assert note.startswith("--api-key must be")
        assert "note: --api-key must be" in printed(state, note)
        server.key = ""
        assert next(found)[1] == ""
    assert "Connection refused." in next(found)[1]


def test_ctrl_c_ends_it_well() -> None:
    """In a terminal of its own, as a person sees it."""
    with FakeServer() as server:
        ours, theirs = os.openpty()
        command = [sys.executable, "-m", "pellucid.cli", "top", server.url, "--interval", "0.1"]
        process = subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
        os.close(theirs)
        seen = b""
        while seen.count(b"unanswered") < 3:  # it is drawn again and again
            seen += os.read(ours, 1 << 16)
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=10)[1]
        os.close(ours)
    assert (process.returncode, errors) == (0, b"")

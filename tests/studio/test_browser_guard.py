"""Attacks on the studio in a real browser: a rebound host name, and a page on another port of this machine."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import browser, marks, opened

from pellucid.labs.catalog import find
from pellucid.studio.app import start
from pellucid.studio.form import Shelf
from pellucid.studio.server import Studio
from pellucid.studio.visitors import Sessions

pytestmark = marks()
LAB = find("01")
REBOUND = "evil.example"
# Asks for code to be run, as JSON and as forms do (without a preflight), then for what the studio holds and streams.
ATTACK = """async ([base, data]) => {
  const said = [];
  const body = JSON.stringify({data});
  const ask = async (path, how) => {
    try { const answer = await fetch(base + path, {credentials: 'include', ...how}); said.push(answer.status); }
    catch (error) { said.push('blocked'); }
  };
  await ask('gradio_api/call/check', {method: 'POST', headers: {'Content-Type': 'application/json'}, body});
  await ask('gradio_api/call/check', {method: 'POST', headers: {'Content-Type': 'text/plain'}, body});
  await ask('gradio_api/call/check', {method: 'POST', mode: 'no-cors', body});
  await ask('config', {});
  await ask('', {});
  said.push(await new Promise(resolve => {
    const stream = new EventSource(base + 'gradio_api/heartbeat/x', {withCredentials: true});
    stream.onopen = () => resolve('open'); stream.onerror = () => { stream.close(); resolve('blocked'); };
  }));
  said.push(await new Promise(resolve => {
    const socket = new WebSocket(base.replace('http', 'ws') + 'gradio_api/queue/join');
    socket.onopen = () => resolve('open'); socket.onerror = () => resolve('blocked');
  }));
  return said;
}"""


@pytest.fixture(scope="module")
def chrome() -> Iterator[Any]:
    with browser(f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1") as found:
        yield found


@pytest.fixture(scope="module")
def studio(chrome: Any, small: Path) -> Iterator[Studio]:
    sessions = Sessions()
    found = start(Shelf([str(small)], "cpu"), sessions, port=0)
    yield found
    found.close()
    sessions.end_all()


@pytest.fixture(scope="module")
def address(studio: Studio) -> str:
    return studio.address


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[int]:
    """The port of another server of this machine, whose pages the browser shows too."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<p>another page</p>")

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def answer(marker: Path) -> list[str]:
    return [LAB.stem, f"open({str(marker)!r}, 'w')"]


def test_a_rebound_name_reaches_nothing(chrome: Any, address: str, tmp_path: Path) -> None:
    port = address.partition("/?")[0].rpartition(":")[2]
    base, token = f"http://{REBOUND}:{port}/", address.partition("?")[2]
    with chrome.new_context() as context:
        page = context.new_page()
        for path in ("", f"?{token}"):  # even for who knows the token
            shown = page.goto(base + path)
            assert shown.status == 403
            assert page.inner_text("body").startswith("refused: ")
        said = page.evaluate(ATTACK, [base, answer(tmp_path / "ran")])
        assert said == [403, 403, 403, 403, 403, "blocked", "blocked"]
        assert context.cookies() == []
        page.wait_for_timeout(1000)
    assert not (tmp_path / "ran").exists()


def test_a_page_of_another_port_reaches_nothing_though_the_cookie_is_there(
    chrome: Any, address: str, elsewhere: int, tmp_path: Path
) -> None:
    base = address.partition("?")[0]
    with chrome.new_context() as context:
        opened(context, address)
        assert len(context.cookies()) == 1
        page = context.new_page()
        page.goto(f"http://127.0.0.1:{elsewhere}/")
        said = page.evaluate(ATTACK, [base, answer(tmp_path / "ran")])
        assert said == ["blocked", "blocked", 0, "blocked", "blocked", "blocked", "blocked"]  # 0: an opaque answer
        framed = page.evaluate(
            "base => new Promise(resolve => { const frame = document.createElement('iframe'); frame.src = base;"
            " frame.onload = () => resolve(true); document.body.append(frame); })",
            base,
        )
        assert framed
        assert "refused: " in page.frames[1].inner_text("body")
        page.wait_for_timeout(1000)
        assert not (tmp_path / "ran").exists()


def test_the_studio_s_own_page_is_answered(chrome: Any, address: str, tmp_path: Path) -> None:
    """So that the tests above can fail."""
    with chrome.new_context() as context:
        page = opened(context, address)
        assert page.url == address.partition("?")[0]  # the token does not stay
        said = page.evaluate(ATTACK, [page.url, answer(tmp_path / "ran")])
        assert said[:1] + said[3:6] == [200, 200, 200, "open"]
        for _ in range(100):
            if (tmp_path / "ran").exists():
                break
            page.wait_for_timeout(200)
        assert (tmp_path / "ran").exists()


def test_the_file_that_the_studio_opens_leads_to_its_page(
    chrome: Any, studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr("webbrowser.open", told.append)
    studio.open_browser()
    with chrome.new_context() as context:
        assert opened(context, told[0]).url == studio.url

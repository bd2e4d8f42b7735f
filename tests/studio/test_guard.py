"""Who reaches the studio: nobody without its token, under another name, or from another site's page."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import httpx
import pytest
from browsing import served

from pellucid.labs.catalog import find
from pellucid.studio import server
from pellucid.studio.server import Guard, Studio

pytestmark = pytest.mark.filterwarnings("default")  # of gradio and what it stands on
LAB = find("01")


@pytest.fixture(scope="module")
def studio(small: Path) -> Iterator[Studio]:
    with served(str(small)) as (found, _):
        yield found


def people(studio: Studio) -> httpx.Client:
    return httpx.Client(base_url=studio.address.partition("?")[0], timeout=60)


@pytest.fixture
def stranger(studio: Studio) -> Iterator[httpx.Client]:
    """Somebody who reaches the port."""
    with people(studio) as found:
        yield found


@pytest.fixture
def friend(studio: Studio, stranger: httpx.Client) -> httpx.Client:
    """Somebody who opened the address that was printed."""
    assert stranger.get(studio.address).status_code == 303
    return stranger


def port_of(client: httpx.Client) -> int:
    return client.base_url.port or 0


def routes(app: Any) -> Iterator[tuple[str, str]]:
    """Every path that gradio answers, with the names in it filled in."""
    for route in app.routes:
        inner = getattr(route, "original_router", getattr(route, "app", None))
        if hasattr(inner, "routes"):
            yield from routes(inner)
        elif hasattr(route, "methods"):
            yield from ((method, re.sub(r"\{[^}]*\}", "x", route.path)) for method in route.methods or ())


def test_no_route_answers_without_the_token(studio: Studio, stranger: httpx.Client) -> None:
    app = studio.server.config.app.app.app  # type: ignore[union-attr]  # behind the guard and the heartbeats
    found = sorted(set(routes(app)))
    assert len(found) > 50
    for path in ("/", "/gradio_api/upload", "/gradio_api/queue/data", "/gradio_api/heartbeat/x", "/gradio_api/file=x"):
        assert path in {one for _, one in found}
    for method, path in found:
        answer = stranger.request(method, path)
        assert (answer.status_code, answer.headers.get("set-cookie")) == (403, None), (method, path)
        assert method == "HEAD" or answer.text == server.NO_TOKEN + "\n"


def test_what_is_nearly_the_token_is_none(studio: Studio, stranger: httpx.Client) -> None:
    token = studio.address.partition("token=")[2]
    name = f"pellucid-studio-{port_of(stranger)}"
    for wrong in ("", token[:-1], token.swapcase(), token + "x", "ä"):
        assert stranger.get("/", params={"token": wrong}).status_code == 403
        assert stranger.get("/", headers={"cookie": f"{name}={wrong}".encode()}).status_code == 403
    assert stranger.get("/", headers={"cookie": f"pellucid-studio-1={token}"}).status_code == 403  # another studio's


def test_the_token_becomes_a_cookie_and_leaves_the_address(studio: Studio, stranger: httpx.Client) -> None:
    answer = stranger.get(studio.address + "&__theme=dark")
    assert (answer.status_code, answer.headers["location"]) == (303, "/?__theme=dark")
    cookie = answer.headers["set-cookie"].lower()
    assert cookie.startswith(f"pellucid-studio-{port_of(stranger)}=")
    for word in ("httponly", "samesite=strict", "path=/"):
        assert word in cookie
    assert "gradio" in stranger.get("/").text
    token = studio.address.partition("?")[2]
    assert httpx.get(f"{stranger.base_url}config?{token}").status_code == 200  # a program may send it each time


def test_what_a_browser_is_started_with_opens_nothing_for_others(
    studio: Studio, stranger: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody on the machine can read a process's arguments, and then the file only if its mode lets them."""
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    studio.open_browser()
    assert opened[0].startswith("file://")
    assert "token" not in opened[0]
    file = Path(url2pathname(urlsplit(opened[0]).path))
    assert [oct(path.stat().st_mode & 0o777) for path in (file, file.parent)] == ["0o600", "0o700"]
    assert studio.address in file.read_text("utf-8")


def test_the_token_from_a_file_is_answered_by_a_page_of_the_studio_s_own(
    studio: Studio, stranger: httpx.Client
) -> None:
    """A redirect would not carry the strict cookie: for the browser, the file began all of it."""
    headers = {"sec-fetch-site": "cross-site", "sec-fetch-dest": "document", "sec-fetch-mode": "navigate"}
    answer = stranger.get(studio.address, headers=headers)
    assert (answer.status_code, "samesite=strict" in answer.headers["set-cookie"].lower()) == (200, True)
    assert 'content="0; url=/"' in answer.text
    assert studio.guard.token not in answer.text


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "", "0.0.0.0:{port}"]
)
def test_another_name_is_refused(friend: httpx.Client, host: str) -> None:
    answer = friend.get("/", headers={"host": host.format(port=port_of(friend))})
    assert (answer.status_code, answer.text) == (403, server.OTHER_NAME + "\n")


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "[::1]", "LOCALHOST"])
def test_its_own_names_are_answered(friend: httpx.Client, name: str) -> None:
    assert friend.get("/config", headers={"host": f"{name}:{port_of(friend)}"}).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "http://127.0.0.1:1", "http://localhost:{port}", "null", ""])
def test_another_origin_is_refused(friend: httpx.Client, origin: str) -> None:
    headers = {"origin": origin.format(port=port_of(friend))}
    for answer in (friend.get("/config", headers=headers), friend.options("/config", headers=headers)):
        assert (answer.status_code, answer.text) == (403, server.OTHER_SITE + "\n")
        assert "access-control-allow-origin" not in answer.headers


def test_its_own_origin_is_answered(friend: httpx.Client) -> None:
    assert friend.get("/config", headers={"origin": f"http://127.0.0.1:{port_of(friend)}"}).status_code == 200


def test_a_page_of_another_port_cannot_embed_it_but_may_link_to_it(friend: httpx.Client) -> None:
    for dest, mode, expected in (
        ("image", "no-cors", 403),
        ("iframe", "navigate", 403),
        ("empty", "cors", 403),
        ("document", "navigate", 200),
    ):
        headers = {"sec-fetch-site": "same-site", "sec-fetch-dest": dest, "sec-fetch-mode": mode}
        assert friend.get("/", headers=headers).status_code == expected, dest


# Web sockets


def test_a_web_socket_is_asked_the_same() -> None:
    async def accept(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})

    def answered(**headers: str) -> str:
        sent: list[dict[str, Any]] = []

        async def send(message: Any) -> None:
            sent.append(message)

        asked = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "websocket", "path": "/", "query_string": b"", "headers": asked}
        guarded = Guard(accept, host="127.0.0.1", port=7, token="secret")
        with contextlib.suppress(StopIteration):
            guarded(scope, None, send).send(None)  # type: ignore[arg-type]
        return str(sent[0]["type"])

    known = "pellucid-studio-7=secret"
    assert answered(host="127.0.0.1:7", cookie=known) == "websocket.accept"
    assert answered(host="127.0.0.1:7", cookie=known, origin="http://127.0.0.1:7") == "websocket.accept"
    assert answered(host="127.0.0.1:7") == "websocket.close"
    assert answered(host="evil.example:7", cookie=known) == "websocket.close"
    assert answered(host="127.0.0.1:7", cookie=known, origin="http://127.0.0.1:8") == "websocket.close"


def test_an_upgrade_is_refused_too(stranger: httpx.Client) -> None:
    headers = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    assert stranger.get("/gradio_api/queue/join", headers=headers).status_code == 403


# Code


def asked(client: httpx.Client, name: str, data: list[Any]) -> str:
    """The last event of a call."""
    begun = client.post(f"/gradio_api/call/{name}", json={"data": data})
    if begun.status_code != 200:
        return begun.text
    return client.get(f"/gradio_api/call/{name}/{begun.json()['event_id']}").text


def test_only_who_has_the_token_runs_code(studio: Studio, stranger: httpx.Client, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    data = [LAB.stem, f"open({str(marker)!r}, 'w')"]
    assert asked(stranger, "check", data) == server.NO_TOKEN + "\n"
    joined = {"data": data, "fn_index": 0, "session_hash": "x"}
    assert stranger.post("/gradio_api/queue/join", json=joined).status_code == 403
    assert not marker.exists()
    stranger.get(studio.address)
    assert "checks passed" in asked(stranger, "check", data)
    assert marker.exists()  # so that this test can fail


def test_where_the_port_is_not_loopback_no_answer_is_run(small: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    with served(str(small), host="0.0.0.0") as (studio, _), people(studio) as client:
        client.get(studio.address)
        assert "Checks run code" in client.get("/config").text
        assert client.get("/", headers={"host": f"localhost:{port_of(client)}"}).status_code == 403
        assert "event: error" in asked(client, "check", [LAB.stem, f"open({str(marker)!r}, 'w')"])
    assert not marker.exists()


def test_no_file_but_an_upload_is_read(friend: httpx.Client, tmp_path: Path) -> None:
    secret = tmp_path / "secret.py"
    secret.write_text("hidden = 1", "utf-8")
    said = asked(friend, "receive", [{"path": str(secret), "meta": {"_type": "gradio.FileData"}}])
    assert "event: error" in said
    assert "hidden" not in said
    assert friend.get(f"/gradio_api/file={secret}").status_code == 403
    sent = friend.post("/gradio_api/upload", files={"files": ("mine.py", b"open = 1")}).json()
    assert json.dumps(["open = 1"]) in asked(
        friend, "receive", [{"path": sent[0], "meta": {"_type": "gradio.FileData"}}]
    )


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("localhost", True), ("[::1]", True), ("0.0.0.0", False), ("::", False), ("my.box", False)],
)
def test_what_is_loopback(host: str, expected: bool) -> None:
    assert server.is_loopback(host) is expected

"""Serves the page on a port of this machine, behind a guard that requires its token."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
import webbrowser
from dataclasses import dataclass
from html import escape
from typing import Any
from urllib.parse import urlencode

import gradio as gr
import uvicorn
from fastapi import FastAPI
from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pellucid.core.errors import PellucidError, rule
from pellucid.serve.settings import is_loopback
from pellucid.studio import scratch
from pellucid.studio.visitors import IDLE, Sessions

# --- Guard ----------------------------------------------------------------------------------------------------------

_POLICY_VIOLATION = 1008  # RFC 6455, 7.4.1
NO_TOKEN = "refused: the studio must be opened at the address that it printed, with the token in it."
OTHER_NAME = "refused: the studio must be opened under the host and port that it printed."
OTHER_SITE = "refused: a page of another site or port must not use the studio."


def _leading_to(address: str) -> str:
    """A page that redirects to the address at once."""
    return f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={escape(address)}">\n'


class Guard:
    """Stands around the whole app, so that no route, stream or web socket of it is reached without the token.

    The token comes once, in the address; the browser then keeps it as a cookie, whose name holds the port since
    browsers share cookies between the ports of a host. The Host must be one that the studio is bound to: a name that
    somebody else points at this machine (DNS rebinding) is none. Origin and Sec-Fetch-Site, where a browser sends
    them, must be the studio's own.
    """

    def __init__(self, app: ASGIApp, *, host: str, port: int, token: str) -> None:
        self.app, self.token, self.cookie = app, token, f"pellucid-studio-{port}"
        names = {"localhost", "127.0.0.1", "[::1]", host} if is_loopback(host) else {host}
        self.hosts = {f"{name}:{port}".lower() for name in names} | (names if port == 80 else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        asked = HTTPConnection(scope)
        why = self._refusal(asked)
        if why and scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": why})
        elif why:
            await PlainTextResponse(why + "\n", 403)(scope, receive, send)
        elif scope["type"] == "http" and scope["path"] == "/" and "token" in asked.query_params:
            await self._welcome(asked)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _refusal(self, asked: HTTPConnection) -> str:
        hosts = [host.lower() for host in asked.headers.getlist("host")]
        if len(hosts) != 1 or hosts[0] not in self.hosts:
            return OTHER_NAME
        if any(origin.lower() != f"http://{hosts[0]}" for origin in asked.headers.getlist("origin")):
            return OTHER_SITE
        if asked.headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not _clicked(asked):
            return OTHER_SITE
        return "" if self._is_known(asked) else NO_TOKEN

    def _is_known(self, asked: HTTPConnection) -> bool:
        cookie, token = asked.cookies.get(self.cookie, ""), asked.query_params.get("token", "")
        return _same(cookie, self.token) or _same(token, self.token)

    def _welcome(self, asked: HTTPConnection) -> Response:
        """The token for a cookie; it does not stay in the address bar.

        Browsers keep a strict cookie from a redirect that another site's page or a file began, so there a page of ours
        leads on.
        """
        rest = urlencode([(name, value) for name, value in asked.query_params.multi_items() if name != "token"])
        place = "/" + (f"?{rest}" if rest else "")
        own = asked.headers.get("sec-fetch-site", "none") in ("none", "same-origin")
        answer = RedirectResponse(place, 303) if own else HTMLResponse(_leading_to(place))
        answer.set_cookie(self.cookie, self.token, httponly=True, samesite="strict")
        return answer


def _same(given: str, secret: str) -> bool:
    return secrets.compare_digest(given.encode(), secret.encode())


def _clicked(asked: HTTPConnection) -> bool:
    """Whether this is a followed link to the page, whose content the linking site cannot read."""
    whole = asked.headers.get("sec-fetch-mode") == "navigate" and asked.headers.get("sec-fetch-dest") == "document"
    return whole and asked.scope.get("method") == "GET"


# --- Server ---------------------------------------------------------------------------------------------------------

_HEARTBEAT = "/gradio_api/heartbeat/"
_PATIENCE = 30.0  # seconds until the server listens


class _Presence:
    """Hears the heartbeats of open pages: a stream that ends when its page is closed."""

    def __init__(self, app: ASGIApp, sessions: Sessions) -> None:
        self.app, self.sessions = app, sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(_HEARTBEAT):
            await self.app(scope, receive, send)
            return
        mark = scope["path"].removeprefix(_HEARTBEAT)
        self.sessions.opened(mark)
        try:
            await self.app(scope, receive, send)
        finally:
            self.sessions.closed(mark)


class _Server(uvicorn.Server):
    """Streams end as soon as it does."""

    def __init__(self, config: uvicorn.Config, page: gr.Blocks) -> None:
        super().__init__(config)
        self.page = page

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # each stream that is cut would be a traceback
        self.page.is_running = False
        self.page._queue.close()
        for task in list(self.server_state.tasks):
            task.cancel()
        await super().shutdown(sockets)


@dataclass(frozen=True)
class Studio:
    """A page that is served at `url`."""

    url: str
    guard: Guard
    server: _Server
    thread: threading.Thread

    @property
    def address(self) -> str:
        """With the token in it: for its owner alone."""
        return f"{self.url}?token={self.guard.token}"

    def open_browser(self) -> None:
        """By a file of the owner's that leads to the address: everybody sees what a process is started with."""
        page = scratch.folder() / "open.html"
        page.touch(0o600)
        page.write_text(_leading_to(self.address), "utf-8")
        webbrowser.open(page.as_uri())

    def wait(self) -> None:
        while self.thread.is_alive():
            time.sleep(0.1)

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(timeout=5)


def start(page: gr.Blocks, sessions: Sessions, *, host: str, port: int, **looks: Any) -> Studio:
    """Serves the page in a thread; port 0 takes a free one. The guard sees every request first."""
    listening = _bound(host, port)
    port = listening.getsockname()[1]
    host = f"[{host}]" if ":" in host else host
    app = gr.mount_gradio_app(
        FastAPI(openapi_url=None),
        page,
        "/",
        server_name=host,
        server_port=port,
        footer_links=[],
        run_history=False,
        show_error=False,
        enable_monitoring=False,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        **looks,
    )
    page.has_launched = True  # or gradio takes any path of this machine for an upload
    guard = Guard(_Presence(app, sessions), host=host, port=port, token=secrets.token_urlsafe(32))
    config = uvicorn.Config(guard, log_level="warning", proxy_headers=False, ws="none", timeout_graceful_shutdown=2)
    server = _Server(config, page)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    until = time.monotonic() + _PATIENCE
    while not server.started and thread.is_alive() and time.monotonic() < until:
        time.sleep(0.01)
    if not server.started:
        raise PellucidError(f"studio must listen within {_PATIENCE:g} s; it did not. Try again.", "studio-start")
    threading.Thread(target=_end_idle, args=(sessions, thread), daemon=True).start()
    return Studio(f"http://{host}:{port}/", guard, server, thread)


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except OSError:
        found.close()
        advice = "Another program listens there; --port 0 takes a free one."
        raise PellucidError(rule("port", "a free one", port, advice), "studio-port") from None
    return found


def _end_idle(sessions: Sessions, while_alive: threading.Thread) -> None:
    while while_alive.is_alive():
        time.sleep(IDLE / 8)
        try:
            sessions.end_idle()
        except Exception:  # a defect; what it left is removed at the next turn, or at the end
            logging.getLogger(__name__).exception("idle sessions could not be ended")

"""The page on a port of this machine, behind its guard."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
import webbrowser
from dataclasses import dataclass
from typing import Any

import gradio as gr
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from pellucid.core.errors import PellucidError, rule
from pellucid.studio import scratch
from pellucid.studio.guard import Guard, leading_to
from pellucid.studio.session import IDLE, Sessions

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
        page.write_text(leading_to(self.address), "utf-8")
        webbrowser.open(page.as_uri())

    def wait(self) -> None:
        while self.thread.is_alive():
            time.sleep(0.1)

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(timeout=5)


def start(page: gr.Blocks, sessions: Sessions, *, host: str, port: int, **looks: Any) -> Studio:
    """Serves the page in a thread; port 0 takes a free one. Whatever is asked, the guard is asked first."""
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

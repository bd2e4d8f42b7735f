"""Who may speak to the studio: whoever has its token, under its own name, and no other site's page."""

from __future__ import annotations

import ipaddress
import secrets
from html import escape
from urllib.parse import urlencode

from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

_POLICY_VIOLATION = 1008  # RFC 6455, 7.4.1
NO_TOKEN = "refused: the studio must be opened at the address that it printed, with the token in it."
OTHER_NAME = "refused: the studio must be opened under the host and port that it printed."
OTHER_SITE = "refused: a page of another site or port must not use the studio."


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what is bound to the host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def leading_to(address: str) -> str:
    """A page that goes on to the address at once."""
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
        answer = RedirectResponse(place, 303) if own else HTMLResponse(leading_to(place))
        answer.set_cookie(self.cookie, self.token, httponly=True, samesite="strict")
        return answer


def _same(given: str, secret: str) -> bool:
    return secrets.compare_digest(given.encode(), secret.encode())


def _clicked(asked: HTTPConnection) -> bool:
    """Whether somebody follows a link to the page, which the site with the link cannot read."""
    whole = asked.headers.get("sec-fetch-mode") == "navigate" and asked.headers.get("sec-fetch-dest") == "document"
    return whole and asked.scope.get("method") == "GET"

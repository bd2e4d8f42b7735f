"""A client of a server, in the standard library alone: one request of HTTP/1.1 on a connection of its own."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from pellucid.core.errors import PellucidError, rule

_MOST_BYTES = 256 * 2**20  # of a reply's body
_MOST_HEADERS = 200
_PATIENCE = 5.0  # seconds for an answer about the server's state


@dataclass(frozen=True)
class Reply:
    """What a server answered; the names of the headers are in small letters."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        """The body's object; an empty one where there is none."""
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class Remote:
    """A server by its address, and the key that it is shown."""

    url: str
    host: str
    port: int
    secure: bool = False
    prefix: str = ""  # of every path, behind a proxy
    key: str | None = field(default=None, repr=False)

    @staticmethod
    def of(url: str, key: str | None = None) -> Remote:
        """Reads `http://host:port`, also without the `http://`, and with the `/v1` that OpenAI's client is given."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if host is None or parts.scheme not in ("http", "https") or parts.username or parts.query or not plain(url):
            raise PellucidError(rule("URL", "as http://127.0.0.1:8000", url), "url")
        if key is not None and not plain(key):
            raise PellucidError("--api-key must be of printable ASCII without blanks; got something else.", "api-key")
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        shown = f"{parts.scheme}://{parts.netloc}{prefix}"
        secure = parts.scheme == "https"
        return Remote(shown, host, port or (443 if secure else 80), secure, prefix, key or None)

    @cached_property
    def tls(self) -> ssl.SSLContext | None:
        return ssl.create_default_context() if self.secure else None

    def message(self, path: str, body: bytes | None) -> bytes:
        """A GET, or with a body a POST of JSON."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{'GET' if body is None else 'POST'} {self.prefix}{path} HTTP/1.1", f"host: {host}:{self.port}"]
        lines += ["connection: close", "accept: application/json", "user-agent: pellucid"]
        if self.key is not None:
            lines.append(f"authorization: Bearer {self.key}")
        if body is not None:
            lines += ["content-type: application/json", f"content-length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + (body or b"")

    async def fetch(self, path: str, body: bytes | None = None) -> Reply:
        """The reply; an OSError, EOFError or ValueError where there is none."""
        reader, writer = await asyncio.open_connection(self.host, self.port, ssl=self.tls)
        try:
            writer.write(self.message(path, body))
            await writer.drain()
            return await read_reply(reader)
        finally:
            writer.transport.abort()  # closes at once; all that was wanted is read

    async def status(self) -> dict[str, Any]:
        """The server's state, or an error of one line that says why there is none."""
        try:
            async with asyncio.timeout(_PATIENCE):
                reply = await self.fetch("/v1/status")
        except (OSError, EOFError, ValueError) as error:
            why = reason_of(error)
            advice = f"{why[:1].upper()}{why[1:]}."
            raise PellucidError(rule("URL", "of a server that answers", self.url, advice), "no-server") from None
        if reply.status in (401, 403):
            got = "none" if self.key is None else "another"
            must = f"one of the server's keys; got {got} (HTTP {reply.status})"
            raise PellucidError(f"--api-key must be {must}. It is also read from PELLUCID_API_KEY.", "api-key")
        if reply.status != 200 or "ready" not in reply.json:
            got = f"HTTP {reply.status} at {self.url}/v1/status"
            raise PellucidError(rule("URL", "of a Pellucid server", got), "no-server")
        return reply.json


def plain(text: str) -> bool:
    """Whether a text can stand in a header as it is."""
    return text.isascii() and text.isprintable() and " " not in text


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    """Reads a reply whose length is given, comes in chunks, or lasts until the connection ends."""
    status, headers = await read_head(reader)
    while 100 <= status < 200:
        status, headers = await read_head(reader)
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = b""
        while size := int((await reader.readline()).partition(b";")[0], 16):
            body += await reader.readexactly(within(len(body) + size) - len(body))
            await reader.readline()
    elif "content-length" in headers:
        body = await reader.readexactly(within(int(headers["content-length"])))
    else:
        body = b""
        while part := await reader.read(1 << 20):
            body += part
            within(len(body))
    return Reply(status, headers, body)


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """The status and the headers of a reply."""
    first = (await reader.readline()).decode("latin-1")
    if not first:
        raise EOFError
    if not first.startswith("HTTP/1."):
        raise ValueError(first)
    headers: dict[str, str] = {}
    for _ in range(_MOST_HEADERS):
        line = (await reader.readline()).decode("latin-1")
        if not line.endswith("\n"):
            raise EOFError
        if not line.strip():
            return int(first.split()[1]), headers
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    raise ValueError("headers without end")


def within(size: int) -> int:
    if not 0 <= size <= _MOST_BYTES:
        raise ValueError(f"a body of {size} bytes")
    return size


def reason_of(error: BaseException) -> str:
    """Why there was no reply, in a few words that are the same each time."""
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, EOFError):
        return "the server hung up"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {(error.reason or 'unknown').lower().replace('_', ' ')}"
    if isinstance(error, socket.gaierror):
        return "the host is not known"
    if isinstance(error, OSError):
        return os.strerror(error.errno).lower() if error.errno else "no connection"
    return "the answer was not HTTP"

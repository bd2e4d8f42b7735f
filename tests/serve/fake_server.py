"""A server that answers as it is told to, at once or after so many seconds; and the command line, called inside."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from typer.testing import CliRunner

from pellucid.cli import app

TIMINGS = {"wait": 0.01, "encode": 0.002, "denoise": 0.03, "decode": 0.008}  # 0.05 s
Made = tuple[int, dict[str, Any], dict[str, str]]  # status, body, headers


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def words(self) -> str:
        return " ".join(self.out.split())


def ask(*words: str) -> Answer:
    result = CliRunner().invoke(app, list(words), prog_name="pellucid")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Answer(result.exit_code, result.stdout, result.stderr)


def refused(*words: str) -> str:
    """The line on stderr of a command that must fail as bad input does."""
    answer = ask(*words)
    assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1)
    return answer.err.rstrip("\n")


def images(body: dict[str, Any]) -> Made:
    """An answer like the server's; the last image took longest."""
    count = body.get("n", 1)
    data = [{"b64_json": "", "timings": {k: v * (i + 1) / count for k, v in TIMINGS.items()}} for i in range(count)]
    return 200, {"data": data}, {}


def error(status: int, code: str, **headers: str) -> Made:
    return status, {"error": {"code": code, "message": "…"}}, {k.replace("_", "-"): v for k, v in headers.items()}


class FakeServer:
    """`answer(number, body)` says what the request of this number is answered; each takes `delay` seconds."""

    def __init__(self, answer: Callable[[int, dict[str, Any]], Made] | None = None, delay: float = 0.0) -> None:
        self.answer, self.delay = answer or (lambda _, body: images(body)), delay
        self.bodies: list[dict[str, Any]] = []
        self.running = self.most_running = 0
        self.lock, self.key = threading.Lock(), ""
        self.state: dict[str, Any] = {
            "version": "0.1.0",
            "ready": True,
            "why": "",
            "draining": False,
            "restarts": 0,
            "unanswered": 3,
            "queue": 8,
            "images_per_second": 2.5,
            "models": {"toy": {}},
            "engine": {
                "queues": {"encode": 1, "denoise": 2, "decode": 0},
                "ages": {"encode": 0.5, "denoise": 1.25, "decode": 0.0},
                "lanes": [{"images": 2, "limit": 4, "shape": [4, 16, 16], "step_ms": {"1": 9.0, "2": 12.5, "4": 20.0}}],
                "steps": 0,
                "step_images": 0,
            },
            "seconds": {"wait": {"p50": 0.1, "p95": 0.2, "p99": 0.3}, "total": {}},
        }
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(self), bind_and_activate=False)
        self.http.request_queue_size = 128
        self.http.server_bind()
        self.http.server_activate()
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def post(self, body: dict[str, Any]) -> Made:
        with self.lock:
            number = len(self.bodies)
            self.bodies.append(body)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        time.sleep(self.delay)
        with self.lock:
            self.running -= 1
        return self.answer(number, body)

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def handler_of(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if server.key and self.headers["authorization"] != f"Bearer {server.key}":
                self.reply(*error(401, "invalid_api_key"))
            else:
                engine = server.state["engine"]
                engine["steps"], engine["step_images"] = engine["steps"] + 10, engine["step_images"] + 25
                self.reply(200, server.state, {})

        def do_POST(self) -> None:
            self.reply(*server.post(json.loads(self.rfile.read(int(self.headers["content-length"])))))

        def reply(self, status: int, body: dict[str, Any], headers: dict[str, str]) -> None:
            data = json.dumps(body).encode()
            try:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except OSError:  # the client has gone
                pass

        def log_message(self, *_: Any) -> None:
            pass

    return Handler

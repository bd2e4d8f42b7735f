"""What a server survives: too much load, killed and hung engines, clients that leave, bad input, its own end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from servers import RunningServer, pixels, wait_for


def test_a_burst_is_accepted_up_to_the_limit(fresh: Any) -> None:
    """Three times the capacity at once: exactly the limit gets in; the others are told at once when to come back."""
    served = fresh("--queue", "6", "--capacity", "2").wait_ready()
    served.make(steps=2)
    body = {"prompt": "a red star", "steps": 20, "seed": 1}
    start = threading.Barrier(18)

    def ask(k: int) -> tuple[int, float, dict[str, str]]:
        with httpx.Client(base_url=served.address, timeout=120) as client:
            client.get("/health")
            start.wait()
            began = time.monotonic()
            answer = client.post("/v1/images/generations", json=body)
            return answer.status_code, time.monotonic() - began, dict(answer.headers)

    with ThreadPoolExecutor(18) as pool:
        answers = list(pool.map(ask, range(18)))
    good = [one for one in answers if one[0] == 200]
    refused = [one for one in answers if one[0] == 429]
    assert (len(good), len(refused)) == (6, 12)
    own = [line["seconds"] for line in served.lines if line.get("status") == 429]  # not the clients' share of the cores
    assert np.median(own) < 0.1
    assert np.median([seconds for _, seconds, _ in refused]) < 1.0
    assert all(int(headers["retry-after"]) >= 1 and headers["x-should-retry"] == "true" for _, _, headers in refused)
    wait_for(lambda: served.status()["unanswered"] == 0, 5, "all are answered")


def test_a_client_that_leaves_frees_its_slot(fresh: Any) -> None:
    served = fresh("--capacity", "4").wait_ready()
    beside: dict[str, Any] = {}
    thread = threading.Thread(target=lambda: beside.update(served.make(steps=40, seed=4)))
    thread.start()
    port = int(served.address.rpartition(":")[2])
    body = json.dumps({"prompt": "a blue star", "steps": 150}).encode()
    with socket.create_connection(("127.0.0.1", port)) as link:
        head = f"POST /v1/images/generations HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        link.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: sum(lane["images"] for lane in served.status()["engine"]["lanes"]) == 2, 20, "both run")
    began = time.monotonic()
    wait_for(lambda: served.status()["unanswered"] == 1, 5, "the slot is free")
    assert time.monotonic() - began < 2
    thread.join()
    assert beside["status"] == 200
    assert np.abs(pixels(beside) - pixels(served.make(steps=40, seed=4))).max() <= 1
    assert served.metric("pellucid_cancelled_images_total") == 1


def test_killed_engines_cost_time_and_not_requests(fresh: Any) -> None:
    """SIGKILL under load, ten times: every accepted request ends, nearly all with the right image."""
    served = fresh("--capacity", "4", "--queue", "256").wait_ready()
    truth = [pixels(served.make(steps=4, seed=seed)) for seed in range(4)]
    stop, answers = threading.Event(), []

    def load(k: int) -> None:
        while not stop.is_set():
            seed = len(answers) % 4
            made = served.make(steps=4, seed=seed)
            answers.append(made["status"] == 200 and int(np.abs(pixels(made) - truth[seed]).max()) <= 1)

    threads = [threading.Thread(target=load, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    recovered = []
    for _ in range(10):
        count = len(answers)
        wait_for(lambda count=count: len(answers) > count + 2, 30, "requests are answered")
        began, pid = time.monotonic(), served.engine_pid()
        os.kill(pid, signal.SIGKILL)
        assert served.http.get("/health").status_code == 200  # the API answers while the engine is dead
        wait_for(lambda pid=pid: served.status()["ready"] and served.engine_pid() != pid, 60, "ready again")
        recovered.append(time.monotonic() - began)
    stop.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert np.mean(answers) >= 0.95, answers
    assert max(recovered) < 30
    assert served.status()["restarts"] == 10
    assert served.metric("pellucid_engine_restarts_total") == 10
    wait_for(lambda: served.status()["unanswered"] == 0, 5, "all are answered")


def test_a_hung_engine_is_replaced(fresh: Any, tmp_path: Any) -> None:
    config = tmp_path / "serve.toml"
    config.write_text("step_timeout = 2.0\n")
    served = fresh("--config", str(config)).wait_ready()
    truth = pixels(served.make(steps=30, seed=1))
    made: dict[str, Any] = {}
    thread = threading.Thread(target=lambda: made.update(served.make(steps=30, seed=1)))
    thread.start()
    wait_for(lambda: bool(served.status()["engine"]["lanes"]), 20, "it runs")
    os.kill(served.engine_pid(), signal.SIGSTOP)
    thread.join(60)
    assert made["status"] == 200
    assert np.abs(pixels(made) - truth).max() <= 1
    assert served.status()["restarts"] == 1
    assert any(line["event"] == "engine: hung" for line in served.lines)


def test_a_termination_lets_what_was_accepted_end(fresh: Any) -> None:
    served = fresh().wait_ready()
    made: dict[str, Any] = {}
    thread = threading.Thread(target=lambda: made.update(served.make(steps=40, seed=1)))
    thread.start()
    wait_for(lambda: bool(served.status()["engine"]["lanes"]), 20, "it runs")
    engine = served.engine_pid()
    served.process.send_signal(signal.SIGTERM)
    thread.join(60)
    assert made["status"] == 200
    assert served.process.wait(30) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(engine, 0)


def test_an_engine_ends_with_its_server(fresh: Any) -> None:
    served = fresh().wait_ready()
    engine = served.engine_pid()
    served.process.kill()
    served.process.wait(10)

    def gone() -> bool:
        try:
            os.kill(engine, 0)
        except ProcessLookupError:
            return True
        return False

    wait_for(gone, 20, "the engine has ended")


def test_a_slow_reader_of_a_stream_holds_nothing(fresh: Any) -> None:
    served = fresh("--capacity", "2").wait_ready()
    port = int(served.address.rpartition(":")[2])
    body = json.dumps({"prompt": "a", "steps": 30, "stream": True, "partial_images": 3}).encode()
    with socket.create_connection(("127.0.0.1", port)) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        head = f"POST /v1/images/generations HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        link.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        began = time.monotonic()
        assert served.make(steps=4)["status"] == 200  # while nobody reads the stream
        assert time.monotonic() - began < 10
        wait_for(lambda: served.metric("pellucid_finished_images_total") == 2, 20, "the stream's image is made too")


HOSTILE: list[tuple[str, bytes, str]] = [
    ("not json", b"{", "application/json"),
    ("a list", b"[1,2]", "application/json"),
    ("nothing", b"", "application/json"),
    ("null", b"null", "application/json"),
    ("text", b"prompt=a", "text/plain"),
    ("deep", b"[" * 100_000, "application/json"),
    ("NaN", b'{"prompt":"a","strength":NaN}', "application/json"),
    ("infinite", b'{"prompt":"a","guidance":Infinity}', "application/json"),
    ("huge number", b'{"prompt":"a","seed":' + b"9" * 5000 + b"}", "application/json"),
    ("bytes", bytes(range(256)), "application/json"),
    ("surrogates", b'{"prompt":"\\ud800"}', "application/json"),
    ("nul", b'{"prompt":"a\\u0000b","steps":2}', "application/json"),
    ("wrong types", b'{"prompt":7,"n":"x","steps":[]}', "application/json"),
    ("nested grid", b'{"prompt":"a","grid":{"name":{"a":{"b":[]}}}}', "application/json"),
    ("plan", b'{"prompt":"a","plan":{"rows":"x"}}', "application/json"),
    ("broken multipart", b"--x\r\nContent-Dispo", "multipart/form-data; boundary=x"),
    ("no boundary", b"abc", "multipart/form-data"),
]


@pytest.mark.parametrize(("name", "body", "kind"), HOSTILE, ids=[one[0] for one in HOSTILE])
def test_hostile_bodies_are_refused_in_openais_shape(server: RunningServer, name: str, body: bytes, kind: str) -> None:
    for place in ("/v1/images/generations", "/v1/images/edits", "/v1/plans"):
        answer = server.http.post(place, content=body, headers={"content-type": kind})
        assert answer.status_code < 500 or name == "deep", (place, answer.status_code, answer.text)
        if answer.status_code != 200:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert "Traceback" not in answer.text
    assert server.http.get("/ready").status_code == 200


def test_bombs_and_what_is_no_image(server: RunningServer) -> None:
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    bomb = (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 10**6)) + chunk(b"IEND", b"")
    )
    for data in (bomb, b"GIF89a" + bytes(100), b"", b"not an image", bomb[:60]):
        answer = server.http.post("/v1/images/edits", files={"image": ("a.png", data)}, data={"prompt": "a"})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "image"
    answer = server.http.post("/v1/images/edits", data={"prompt": "a"}, files={"other": ("a.png", b"x")})
    assert answer.status_code == 400


def test_a_body_that_is_too_large(server: RunningServer) -> None:
    answer = server.http.post("/v1/images/generations", content=b" " * (65 * 2**20))
    assert answer.status_code == 413

    def endless() -> Any:
        for _ in range(80):
            yield b" " * 2**20

    with contextlib.suppress(httpx.TransportError):  # the server may hang up while we are sending
        assert server.http.post("/v1/images/generations", content=endless()).status_code == 413
    assert server.http.get("/health").status_code == 200

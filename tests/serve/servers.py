"""Real servers: processes on 127.0.0.1 with ports of their own, ended by their id."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
from PIL import Image

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class RunningServer:
    """A server's process, and clients of it."""

    def __init__(self, *words: str, key: str = "none") -> None:
        command = [sys.executable, "-m", "pellucid.cli", "serve", "--port", "0", *words]
        self.process = subprocess.Popen(
            command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.lines: list[dict[str, Any]] = []
        assert self.process.stdout is not None
        first = self.process.stdout.readline()
        if not first:
            raise RuntimeError(self.process.communicate(timeout=10)[1])  # which closes its streams
        self.address = json.loads(first)["address"]
        self.key = key
        headers = {"authorization": f"Bearer {key}"}
        self.http = httpx.Client(base_url=self.address, headers=headers, timeout=120)
        self.client = openai.OpenAI(base_url=f"{self.address}/v1", api_key=key, max_retries=0, timeout=120)
        self.log = threading.Thread(target=self._read_log, daemon=True)
        self.log.start()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with contextlib.suppress(ValueError):
                self.lines.append(json.loads(line))

    def wait_ready(self, seconds: float = 60.0) -> RunningServer:
        wait_for(lambda: self.http.get("/ready").status_code == 200, seconds, "the server is ready")
        return self

    def make(self, prompt: str = "a red star", **fields: Any) -> dict[str, Any]:
        """The answer to one request, or the error's status and body."""
        answer = self.http.post("/v1/images/generations", json={"prompt": prompt, **fields})
        return answer.json() | {"status": answer.status_code, "headers": answer.headers}

    def status(self) -> dict[str, Any]:
        return self.http.get("/v1/status").json()

    def engine_pid(self) -> int:
        """The engine's process: the server's only child."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                    if int(parent) == self.process.pid:
                        return int(entry.name)
        raise LookupError("no engine")

    def metric(self, name: str) -> float:
        """The sum over the labels of a metric."""
        lines = self.http.get("/metrics").text.splitlines()
        found = [float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0].split(" ")[0] == name]
        return sum(found)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(10)
        finally:
            self.http.close()
            self.client.close()
            self.log.join(5)
            for stream in (self.process.stdout, self.process.stderr):
                assert stream is not None
                stream.close()


def wait_for(true: Callable[[], bool], seconds: float, what: str) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(httpx.TransportError):
            if true():
                return
        time.sleep(0.05)
    raise TimeoutError(f"not within {seconds} s: {what}")


def pixels(answer: dict[str, Any], k: int = 0) -> np.ndarray:
    data = base64.b64decode(answer["data"][k]["b64_json"])
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)


def png(image: Image.Image) -> bytes:
    whole = io.BytesIO()
    image.save(whole, "PNG")
    return whole.getvalue()

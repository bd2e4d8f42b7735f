"""The server on this machine's CPU: images per second of many clients beside one by one, and what the service costs.

    python bench/serve_cpu.py                  # scenes-128; 4 rounds of 24 requests each way, 40 for the overhead

Both ways in one run, in turns. The requests are of eight samplers and 6 to 20 steps. The overhead is the median time
of a request on an idle server less that of `pipe(...)` with the same options in this process, in turns too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pellucid

SAMPLERS = ("euler", "dpmpp_2m", "unipc", "ddim", "euler_a", "dpmpp_2m_sde", "lms", "deis")


@contextlib.contextmanager
def server(*words: str) -> Iterator[str]:
    command = [sys.executable, "-m", "pellucid.cli", "serve", "--port", "0", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["address"]
        for _ in range(600):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/ready", timeout=5).close()
                break
            time.sleep(0.1)
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(40)


def ask(address: str, **fields: Any) -> float:
    """Seconds of one request."""
    began = time.perf_counter()
    body = json.dumps({"prompt": "a red star above a blue square", **fields}).encode()
    request = urllib.request.Request(f"{address}/v1/images/generations", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        answer.read()
    return time.perf_counter() - began


def requests(count: int) -> list[dict[str, Any]]:
    return [{"sampler": SAMPLERS[k % 8], "steps": 6 + 2 * (k % 8), "seed": k} for k in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--capacity", type=int, default=8)
    asked = parser.parse_args()
    wanted = requests(asked.requests)
    together, alone = [], []
    with server("--capacity", str(asked.capacity)) as address:
        for one in wanted[:8]:
            ask(address, **one)
        for _ in range(asked.rounds):
            began = time.perf_counter()
            with ThreadPoolExecutor(len(wanted)) as pool:
                list(pool.map(lambda one: ask(address, **one), wanted))
            together.append(len(wanted) / (time.perf_counter() - began))
            began = time.perf_counter()
            for one in wanted:
                ask(address, **one)
            alone.append(len(wanted) / (time.perf_counter() - began))
        pipe = pellucid.load("scenes-128")
        options: dict[str, Any] = {"steps": 8, "sampler": "euler", "seed": 1}
        service, own = [], []
        for _ in range(40):
            service.append(ask(address, **options))
            began = time.perf_counter()
            pipe("a red star above a blue square", **options)
            own.append(time.perf_counter() - began)
    found = {
        "cores": os.cpu_count(),
        "together images/s": round(statistics.median(together), 3),
        "one by one images/s": round(statistics.median(alone), 3),
        "ratio": round(statistics.median(together) / statistics.median(alone), 3),
        "request ms": round(1000 * statistics.median(service), 1),
        "pipe ms": round(1000 * statistics.median(own), 1),
        "overhead ms": round(1000 * (statistics.median(service) - statistics.median(own)), 1),
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

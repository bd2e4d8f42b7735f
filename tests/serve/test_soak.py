"""Half an hour of mixed traffic: flat memory, bounded waits, counters that equal what clients saw.

`PELLUCID_SOAK_SECONDS=120 pytest -m slow tests/serve/test_soak.py` for a shorter one.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import numpy as np
import pytest
from servers import RunningServer, wait_for

SECONDS = float(os.environ.get("PELLUCID_SOAK_SECONDS", "1800"))
SAMPLERS = ("euler", "dpmpp_2m", "heun", "unipc", "ddim", "euler_a", "dpmpp_2m_sde", "lms")
SIZES = ("128x128", "128x160", "192x128", "96x96")


def resident(pid: int) -> float:
    """MiB of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20


@pytest.mark.slow
def test_a_long_time_of_mixed_traffic() -> None:
    served = RunningServer("--capacity", "4", "--queue", "8", "--lora", "night=scenes-128/lora").wait_ready()
    stop, seen, lock = time.monotonic() + SECONDS, Counter[str](), threading.Lock()
    memory: list[float] = []
    oldest: list[float] = []

    def client(k: int) -> None:
        rng = random.Random(k)
        with httpx.Client(base_url=served.address, timeout=300) as http:
            while time.monotonic() < stop:
                body = {
                    "prompt": "a red star", "sampler": rng.choice(SAMPLERS), "steps": rng.randint(2, 16),
                    "size": rng.choice(SIZES), "guidance": rng.choice(("7", "off", "guarded 7", "5 + apg")),
                    "n": rng.choice((1, 1, 2)), "seed": rng.randrange(1000),
                }  # fmt: skip
                if rng.random() < 0.2:
                    body["lora"] = [{"name": "night", "scale": rng.choice((0.5, 1.0))}]
                if rng.random() < 0.1:
                    body["deadline_ms"] = rng.choice((50, 60_000))
                if rng.random() < 0.1:
                    job = http.post("/v1/images/generations", json={**body, "background": True})
                    if job.status_code == 202:
                        time.sleep(rng.random() * 0.2)
                        http.delete(f"/v1/jobs/{job.json()['id']}")
                    continue
                answer = http.post("/v1/images/generations", json=body)
                with lock:
                    seen[str(answer.status_code)] += 1
                    seen["images"] += len(answer.json().get("data", ()))
                if answer.status_code == 429:
                    time.sleep(0.1)

    threads = [threading.Thread(target=client, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(min(2.0, SECONDS / 30))
        memory.append(resident(served.engine_pid()) + resident(served.process.pid))
        oldest.append(max(served.status()["engine"].get("ages", {"none": 0.0}).values()))
    wait_for(lambda: served.status()["unanswered"] == 0, 30, "all are answered")
    status = served.status()
    made = served.metric("pellucid_finished_images_total")
    admitted = served.metric("pellucid_admitted_images_total")
    ended = served.metric("pellucid_cancelled_images_total") + served.metric("pellucid_failed_images_total")
    assert served.stop() == 0
    print(dict(seen), f"memory {memory[0]:.0f} … {memory[-1]:.0f} MiB, oldest {max(oldest):.1f} s")
    assert status["restarts"] == 0
    assert set(seen) <= {"200", "429", "504", "images"}
    assert admitted == made + ended
    assert made >= seen["images"] > 0
    half = len(memory) // 2
    assert np.median(memory[-half // 2 :]) <= 1.1 * np.median(memory[half // 2 : half + 1])
    assert max(oldest) < 60

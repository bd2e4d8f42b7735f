"""The real Ray, on this machine: two replicas behind the same API, one of them killed under load."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np
import pytest
from servers import RunningServer, pixels, wait_for

pytest.importorskip("ray")
pytestmark = pytest.mark.slow  # a cluster of its own; `make test-all`


@pytest.fixture(scope="module")
def served() -> Any:
    made = RunningServer("--ray", "--replicas", "2", "--capacity", "2", "--queue", "64").wait_ready(180)
    wait_for(lambda: made.status()["engine"].get("replicas") == 2, 60, "both replicas answer")
    yield made
    assert made.stop() == 0


def replica_pids() -> list[int]:
    """Processes that Ray calls by the deployment's class."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    if b"ServeReplica:pellucid-engines" in file.read():
                        found.append(int(entry))
            except OSError:
                continue
    return found


def test_the_same_images_and_errors_as_one_engine(served: RunningServer, server: RunningServer) -> None:
    asked = {"steps": 4, "sampler": "unipc", "seed": 3, "guidance": "guarded 6"}
    assert np.abs(pixels(served.make(**asked)) - pixels(server.make(**asked))).max() <= 1
    wrong = served.make(sampler="nope")
    assert (wrong["status"], wrong["error"]["code"]) == (400, "unknown-sampler")
    plan = served.http.post("/v1/plans", json={"prompt": "x", "steps": 9, "sampler": "heun"}).json()
    assert plan["calls"] == 17
    for _ in range(2):  # the first leaves nothing behind
        answer = served.http.post("/v1/rollouts", json={"path": "scenes-128"})
        assert answer.json()["error"]["code"] == "rollout_by_ray"


def test_a_cancelled_request_leaves_its_replica(served: RunningServer) -> None:
    begun = served.make(background=True, steps=150)
    place = f"/v1/jobs/{begun['id']}"
    wait_for(lambda: served.http.get(place).json()["status"] == "in_progress", 20, "it runs")
    assert served.http.delete(place).json()["status"] == "cancelled"
    wait_for(lambda: not served.status()["engine"]["lanes"], 10, "its slot is free")


def test_a_killed_replica_costs_time_and_not_requests(served: RunningServer) -> None:
    truth = [pixels(served.make(steps=4, seed=seed)) for seed in range(4)]
    pids = replica_pids()
    assert len(pids) == 2
    stop, answers = threading.Event(), []

    def load() -> None:
        while not stop.is_set():
            seed = len(answers) % 4
            made = served.make(steps=4, seed=seed)
            answers.append(made["status"] == 200 and int(np.abs(pixels(made) - truth[seed]).max()) <= 1)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(answers) >= 4, 30, "requests are answered")
    os.kill(pids[0], signal.SIGKILL)
    wait_for(lambda: len(set(replica_pids()) - set(pids)) == 1, 90, "Ray has started another replica")
    count = len(answers)
    wait_for(lambda: len(answers) > count + 8, 60, "requests are answered")
    stop.set()
    for thread in threads:
        thread.join(60)
    assert all(answers), answers
    wait_for(lambda: served.status()["unanswered"] == 0, 5, "all are answered")

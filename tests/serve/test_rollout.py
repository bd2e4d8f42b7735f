"""New versions under load: good ones come in without an error, bad ones never reach anybody."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from servers import ENVIRONMENT, RunningServer, pixels, wait_for

import pellucid
from pellucid.core.errors import PellucidError
from pellucid.serve.rollout import Rollout, RolloutSettings, check_inside

# --- the decision -----------------------------------------------------------------------------------------------------


def rollout(**more: Any) -> tuple[Rollout, list[str]]:
    ended: list[str] = []
    made = Rollout(
        "r", RolloutSettings("m", "path", **{"requests": 4, "canary": 0.25, **more}), lambda r: ended.append(r.why)
    )
    return made, ended


def test_a_good_version_passes_all_stages() -> None:
    made, ended = rollout()
    made.loaded({"distance": 1.0})
    assert made.stage == "shadow"
    for _ in range(4):
        made.saw("shadow", "old", 1.0)
        made.saw("shadow", "new", 1.2)
    assert made.stage == "canary"
    assert [made.wants() for _ in range(8)].count("canary") == 2
    for _ in range(4):
        made.saw("canary", "old", 1.0)
        made.saw("canary", "new", 1.0)
    assert made.stage == "promoted"
    assert ended == ["4 requests in canary were as good and as fast"]
    made.saw("canary", "new", None)
    assert made.stage == "promoted"


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ({"error": "the doctor: wrong target"}, "the doctor: wrong target"),
        ({"distance": 70.0}, "images of fixed seeds differ by 70.0 of 255"),
        ({"distance": 1.0, "adherence": [0.9, 0.5]}, "adherence fell from 90% to 50%"),
    ],
)
def test_a_version_that_is_found_bad_sees_no_traffic(found: dict[str, Any], why: str) -> None:
    made, ended = rollout(distance=60.0, adherence=0.1)
    made.loaded({"adherence": [1.0, 1.0], **found})
    assert (made.stage, ended) == ("rolled back", [why])
    assert made.wants() == ""


def test_errors_and_slowness_roll_back() -> None:
    made, ended = rollout(shadow=False)
    made.loaded({"distance": 1.0})
    made.saw("canary", "new", None)
    assert (made.stage, ended) == ("rolled back", ["1 of 1 requests failed in canary"])
    made, ended = rollout(shadow=False)
    made.loaded({"distance": 1.0})
    for _ in range(4):
        made.saw("canary", "old", 1.0)
        made.saw("canary", "new", 2.0)
    assert ended == ["the median took 2.00 times as long in canary"]


def test_only_what_the_server_may_load(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    assert check_inside(str(tmp_path / "good"), [str(tmp_path)], []) == str(tmp_path / "good")
    assert check_inside("scenes-128", [], ["scenes-128"]) == "scenes-128"
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "link").symlink_to("/etc")
    for path in ("/etc", str(tmp_path / "inside" / ".." / ".." / "x"), str(tmp_path / "inside" / "link")):
        with pytest.raises(PellucidError, match="inside the folders"):
            check_inside(path, [str(tmp_path / "inside")], [])


# --- under load -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good version, whose weights differ a little; one with NaN in its weights; one that predicts something else."""
    folder = tmp_path_factory.mktemp("versions")
    pipe = pellucid.load("scenes-128")
    for name in ("good", "nan", "target"):
        pipe.save(folder / name)
    for name in ("good", "nan"):
        (file,) = (folder / name / "unet").glob("*.safetensors")
        weights = load_file(file)
        key = next(key for key in weights if key.endswith("conv_out.weight"))
        weights[key] = weights[key] * 1.001 if name == "good" else torch.full_like(weights[key], float("nan"))
        save_file(weights, file, metadata={"format": "pt"})
    config = folder / "target" / "scheduler" / "scheduler_config.json"
    kind = json.loads(config.read_text())
    kind["prediction_type"] = "epsilon" if kind.get("prediction_type") == "v_prediction" else "v_prediction"
    config.write_text(json.dumps(kind))
    return folder


class Load:
    """Requests one after another, in two threads, and what they were answered."""

    def __init__(self, served: RunningServer) -> None:
        self.stop, self.statuses, self.served = threading.Event(), [], served
        self.threads = [threading.Thread(target=self.run, args=(k,)) for k in range(2)]

    def run(self, k: int) -> None:
        while not self.stop.is_set():
            self.statuses.append(self.served.make(steps=2, seed=k)["status"])

    def __enter__(self) -> Load:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join(30)


@pytest.fixture
def served(versions: Path, tmp_path: Path) -> Iterator[RunningServer]:
    made = RunningServer("--candidates", str(versions), "--records", str(tmp_path / "records")).wait_ready()
    yield made
    made.stop()


def test_a_rollout_under_load(served: RunningServer, versions: Path, tmp_path: Path) -> None:
    before = pixels(served.make(steps=4, seed=9))
    words = ["rollout", served.address, str(versions / "good"), "--canary", "50%", "--shadow", "--requests", "5"]
    with Load(served) as load:
        done = subprocess.run(
            [sys.executable, "-m", "pellucid.cli", *words, "--slowdown", "50", "--json"],
            env=ENVIRONMENT, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["stage"] == "promoted"
    assert [found["stages"][stage]["new"]["errors"] for stage in ("shadow", "canary")] == [0, 0]
    assert set(load.statuses) == {200}
    (record,) = (tmp_path / "records").glob("*.json")
    assert json.loads(record.read_text())["why"] == found["why"]
    own = pellucid.load(versions / "good")("a red star", steps=4, seed=9)
    after = pixels(served.make(steps=4, seed=9))
    assert np.abs(after - np.asarray(own.images[0])).max() <= 1
    assert not np.array_equal(after, before)
    import os
    import signal

    os.kill(served.engine_pid(), signal.SIGKILL)  # the next engine has the new version too
    time.sleep(0.5)
    wait_for(lambda: served.status()["ready"], 60, "ready again")
    assert np.abs(pixels(served.make(steps=4, seed=9)) - after).max() <= 1


@pytest.mark.parametrize(("name", "why"), [("nan", "finite|nan|NaN"), ("target", "doctor")])
def test_a_bad_version_never_reaches_anybody(served: RunningServer, versions: Path, name: str, why: str) -> None:
    import re

    truth = pixels(served.make(steps=4, seed=9))
    with Load(served) as load:
        begun = served.http.post("/v1/rollouts", json={"path": str(versions / name), "requests": 3}).json()
        place = f"/v1/rollouts/{begun['id']}"
        wait_for(lambda: served.http.get(place).json()["stage"] in ("promoted", "rolled back"), 90, "it ended")
    found = served.http.get(place).json()
    assert found["stage"] == "rolled back"
    assert re.search(why, found["why"]), found["why"]
    assert found["stages"] == {}  # no traffic
    assert set(load.statuses) == {200}
    assert np.abs(pixels(served.make(steps=4, seed=9)) - truth).max() <= 1


def test_what_may_not_be_loaded_is_refused(served: RunningServer) -> None:
    answer = served.http.post("/v1/rollouts", json={"path": "/etc"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "rollout-path"
    assert served.http.get("/v1/rollouts/unknown").status_code == 404

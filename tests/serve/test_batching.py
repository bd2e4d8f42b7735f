"""Requests that share step batches: each image is its own, whoever is beside it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from servers import RunningServer, pixels

import pellucid
from pellucid.serve.engine import Device, Engine
from pellucid.serve.jobs import Job

MIXED: list[dict[str, Any]] = [
    {"sampler": "euler", "steps": 4, "guidance": 7.5},
    {"sampler": "dpmpp_2m", "steps": 6},
    {"sampler": "heun", "steps": 3, "guidance": "off"},
    {"sampler": "unipc", "steps": 5, "guidance": "guarded 6"},
    {"sampler": "euler_a", "steps": 6, "guidance": "5 + apg"},
    {"sampler": "ddim", "steps": 7, "guidance": "linear:7:2"},
    {"sampler": "dpmpp_2m_sde", "steps": 5, "negative_prompt": "a square"},
    {"sampler": "lms", "steps": 4, "grid": "karras"},
]


def test_a_mixed_batch_makes_each_image_as_if_alone(server: RunningServer) -> None:
    """Samplers, steps, guidance rules and prompts side by side; joins and leaves at every step."""
    asked = [{"prompt": f"a {colour} star", "seed": k, **one} for k, (colour, one) in enumerate(
        zip(("red", "blue", "green", "yellow") * 2, MIXED, strict=True)
    )]  # fmt: skip
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda one: server.make(**one), asked))
    for one, made in zip(asked, together, strict=True):
        assert made["status"] == 200, made
        alone = server.make(**one)
        assert np.abs(pixels(made) - pixels(alone)).max() <= 1
    own = pellucid.load("scenes-128")(**asked[1])
    assert np.abs(pixels(together[1]) - np.asarray(own.images[0])).max() <= 1


# --- the engine, without processes ------------------------------------------------------------------------------------


class Recorder:
    """What an engine says, by job."""

    def __init__(self) -> None:
        self.said: dict[str, list[tuple[str, dict[str, Any]]]] = {}
        self.changed = threading.Condition()

    def __call__(self, what: str, id: str = "", **facts: Any) -> None:
        with self.changed:
            self.said.setdefault(id, []).append((what, facts))
            self.changed.notify_all()

    def end_of(self, id: str, seconds: float = 30.0) -> tuple[str, dict[str, Any]]:
        """How a job ended."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.ends(id), seconds), self.said
            return self.ends(id)[0]

    def ends(self, id: str) -> list[tuple[str, dict[str, Any]]]:
        return [(what, facts) for what, facts in self.said.get(id, ()) if what in ("done", "failed")]


@pytest.fixture(scope="module")
def pipe() -> Any:
    return pellucid.load("scenes-128")


@pytest.fixture
def engine(pipe: Any) -> Iterator[tuple[Engine, Recorder]]:
    said = Recorder()
    made = Engine({"m": pipe}, said, capacity=4)
    yield made, said
    made.close()


def job(id: str, **fields: Any) -> Job:
    more = {name: fields.pop(name) for name in ("deadline", "previews") if name in fields}
    return Job(id, "m", {"prompt": "a red star", "steps": 4, "sampler": "euler", "seed": 1, **fields},
               arrived=time.monotonic(), **more)  # fmt: skip


def opened(facts: dict[str, Any]) -> np.ndarray:
    import io

    return np.asarray(Image.open(io.BytesIO(facts["images"][0]))).astype(int)


def waiting(true: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.002)


def test_an_image_that_runs_alone_is_bit_equal_to_the_pipelines(engine: Any, pipe: Any) -> None:
    made, said = engine
    made.submit(job("a", guidance="guarded 7"))
    what, facts = said.end_of("a")
    assert what == "done"
    own = pipe("a red star", steps=4, sampler="euler", seed=1, guidance="guarded 7")
    assert np.array_equal(opened(facts), np.asarray(own.images[0]))


def test_the_slot_of_a_cancelled_job_is_free_after_one_step(engine: Any) -> None:
    made, said = engine
    made.submit(job("long", steps=60))
    made.submit(job("beside", steps=60, seed=2))
    waiting(lambda: sum(len(lane.batch) for lane in made.lanes.values()) == 2 and made.steps > 3)
    before = made.steps
    made.cancel("long")
    what, facts = said.end_of("long")
    assert (what, facts["code"]) == ("failed", "cancelled")
    assert made.steps <= before + 2
    assert sum(len(lane.batch) for lane in made.lanes.values()) == 1
    made.cancel("long")  # nothing happens
    made.cancel("unknown")
    assert said.end_of("beside")[0] == "done"
    assert sum(what in ("done", "failed") for what, _ in said.said["long"]) == 1


def test_cancelled_while_queued_encoding_and_decoding(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, said = engine
    blocked = threading.Event()
    made.device.pool.submit(blocked.wait, 10)  # no stage gets on
    made.submit(job("encoding"))
    made.submit(job("queued"))
    waiting(lambda: "encode" in made.busy)
    made.cancel("encoding")
    made.cancel("queued")
    assert said.end_of("queued")[1]["code"] == "cancelled"
    blocked.set()
    assert said.end_of("encoding")[1]["code"] == "cancelled"
    holding, decode = threading.Event(), type(made)._decode
    monkeypatch.setattr(type(made), "_decode", lambda self, item: (holding.wait(10), decode(self, item)))
    made.submit(job("decoding"))
    waiting(lambda: "decode" in made.busy)
    made.cancel("decoding")
    holding.set()
    assert said.end_of("decoding")[1]["code"] == "cancelled"
    assert not made.tasks


def test_a_deadline_that_passes_ends_a_job(engine: Any) -> None:
    made, said = engine
    made.submit(job("late", steps=200, deadline=time.monotonic() + 0.3))
    what, facts = said.end_of("late")
    assert (what, facts["code"], facts["status"]) == ("failed", "deadline", 504)


def test_what_fails_fails_alone(engine: Any, pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, said = engine
    prepare = type(pipe).prepare

    def spoilt(self: Any, request: Any, *given: Any, **more: Any) -> Any:
        found = prepare(self, request, *given, **more)
        if request.prompt == "nan":
            found.start.fill_(float("nan"))
        if request.prompt == "raises":
            watch = found.observers
            object.__setattr__(found, "observers", (*watch, lambda seen: 1 / 0))
        return found

    monkeypatch.setattr(type(pipe), "prepare", spoilt)
    for name in ("nan", "raises", "good"):
        made.submit(job(name, prompt=name, steps=6))
    assert said.end_of("nan")[1]["code"] == "nan"
    assert said.end_of("raises")[1]["code"] == "internal_error"
    what, facts = said.end_of("good")
    assert what == "done"
    assert np.abs(opened(facts) - np.asarray(pipe("good", steps=6, sampler="euler", seed=1).images[0])).max() <= 1


def test_out_of_memory_in_a_step_runs_in_a_smaller_batch(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, said = engine
    from pellucid.core.batch import Batch

    step, most = Batch._predict, []

    def small(self: Batch, x: Any) -> Any:
        most.append(len(x))
        if len(x) > 2:
            raise torch.OutOfMemoryError("too much")
        return step(self, x)

    monkeypatch.setattr(Batch, "_predict", small)
    for k in range(4):
        made.submit(job(f"j{k}", steps=8, seed=k))
    ends = [said.end_of(f"j{k}") for k in range(4)]
    assert max(most) > 2
    assert [what for what, _ in ends] == ["done"] * 4, ends
    assert made.limits
    assert all(limit <= 2 for limit in made.limits.values())


def test_out_of_memory_that_stays_is_an_answer(engine: Any, pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, said = engine

    def never(self: Any, request: Any, **more: Any) -> Any:
        raise torch.OutOfMemoryError("too much")

    with monkeypatch.context() as patch:
        patch.setattr(type(pipe), "prepare", never)
        made.submit(job("big"))
        what, facts = said.end_of("big")
    assert (what, facts["code"], facts["status"], facts["retry"]) == ("failed", "out_of_memory", 503, True)
    made.submit(job("after"))
    assert said.end_of("after")[0] == "done"


def test_what_does_not_fit_the_memory_is_refused_by_the_prediction(pipe: Any) -> None:
    said = Recorder()
    weights = sum(w.numel() * w.element_size() for net in pipe.networks().values() for w in net.parameters())
    made = Engine({"m": pipe}, said, capacity=4, memory=4 * weights + 100 * 2**20)
    try:
        made.submit(job("small"))
        assert said.end_of("small")[0] == "done"
        made.submit(job("large", width=2048, height=2048))
        what, facts = said.end_of("large", 60)
        assert (what, facts["code"]) == ("failed", "memory")
        assert "GiB" in facts["message"]
    finally:
        made.close()


def test_a_short_job_passes_long_ones(engine: Any) -> None:
    """Also where the long ones have taken all of their lane."""
    made, said = engine
    for k in range(6):
        made.submit(job(f"long{k}", steps=80, seed=k))
    waiting(lambda: sum(len(lane.batch) for lane in made.lanes.values()) >= 3)
    made.submit(job("short", steps=2))
    assert said.end_of("short")[0] == "done"
    assert not any(said.said.get(f"long{k}", [("", {})])[-1][0] == "done" for k in range(6))
    for k in range(6):
        made.cancel(f"long{k}")


def test_equal_jobs_fill_their_lane(engine: Any) -> None:
    made, said = engine
    for k in range(6):
        made.submit(job(f"j{k}", steps=12, seed=k))
    waiting(lambda: any(len(lane.batch) == 4 for lane in made.lanes.values()))
    assert all(said.end_of(f"j{k}")[0] == "done" for k in range(6))


def test_previews_never_hold_the_steps(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, said = engine
    slow = type(made)._preview

    def preview(self: Any, *item: Any) -> None:
        time.sleep(0.3)
        slow(self, *item)

    monkeypatch.setattr(type(made), "_preview", preview)
    for k in range(4):
        made.submit(job(f"p{k}", steps=12, seed=k, previews=3))
    assert all(said.end_of(f"p{k}")[0] == "done" for k in range(4))
    assert len(made.previews) <= 4


def test_a_cpu_computes_in_one_thread_in_the_order_asked() -> None:
    device, order = Device(cpu=True), []
    blocked = threading.Event()
    device.pool.submit(blocked.wait, 10)
    threads = []
    for k in range(5):
        work = partial(order.append, k)
        threads.append(threading.Thread(target=device, args=(work,)))
        threads[-1].start()
        time.sleep(0.02)
    blocked.set()
    for thread in threads:
        thread.join()
    assert order == list(range(5))
    with pytest.raises(ZeroDivisionError):
        device(lambda: 1 / 0)
    device.close()

"""An open-loop load on a server: requests come at random times that are drawn beforehand, and none waits for others.

Latencies count from when a request was due, so that neither a slow server nor a slow client can hide one.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.core.reader import read_toml, typed
from pellucid.serve.client import Remote, Reply, reason_of
from pellucid.serve.metrics import STAGES
from pellucid.serve.schemas import ImageRequest

PATH = "/v1/images/generations"
_EVERY = 1.0  # seconds between two looks at the server's state
_MOST_KINDS = 100
_MOST_BYTES = 1 << 20  # of a mix
_LIMITS: dict[str, tuple[float, float]] = {
    "rate": (0.001, 10_000),
    "requests": (1, 100_000),
    "seed": (0, 2**63 - 1),
    "timeout": (0.05, 3600),
}


@dataclass(frozen=True)
class Kind:
    """A kind of request: how often it comes, against the others, and its body."""

    name: str
    weight: float
    body: Mapping[str, Any]

    @property
    def images(self) -> int:
        return int(self.body.get("n", 1))


# What people ask of a small model: drafts, the usual, something careful, two to choose from, another shape.
DEFAULT_MIX = (
    Kind("draft", 4, {"prompt": "a red star", "sampler": "euler", "steps": 6, "guidance": 3}),
    Kind("usual", 3, {"prompt": "a small blue circle on a grey background", "steps": 15, "guidance": 5}),
    Kind("careful", 1, {"prompt": "a large striped green square", "sampler": "heun", "steps": 15, "guidance": 5}),
    Kind("two", 1, {"prompt": "a yellow triangle", "steps": 10, "guidance": 4, "n": 2}),
    Kind("wide", 1, {"prompt": "a red star and a blue circle", "steps": 12, "guidance": 4, "size": "192x128"}),
)


@dataclass(frozen=True)
class Load:
    """`rate` is in requests per second. `timeout` is in seconds from when a request is sent."""

    rate: float = 4.0
    requests: int = 200
    seed: int = 0
    timeout: float = 120.0
    mix: Sequence[Kind] = DEFAULT_MIX

    def __post_init__(self) -> None:
        for name, (low, high) in _LIMITS.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise PellucidError(rule(f"--{name}", f"from {low:g} to {high:g}", value), "bench-load")


@dataclass(frozen=True)
class Arrival:
    """A request that will be sent `due` seconds after the load began."""

    due: float
    kind: Kind
    seed: int

    @property
    def payload(self) -> bytes:
        return json.dumps({"seed": self.seed, **self.kind.body}).encode()


@dataclass(frozen=True)
class Outcome:
    """What became of a request; times are seconds since the load began."""

    kind: str
    images: int
    due: float
    sent: float
    done: float
    status: int = 0  # 0 where there was no answer
    code: str = ""  # of an error, or why there was no answer
    retry_after: float | None = None
    stages: Mapping[str, float] = field(default_factory=dict)  # seconds, of the image that took longest

    @property
    def result(self) -> str:
        """ok, refused, timeout, or what went wrong."""
        if self.status == 200 and not self.code:
            return "ok"
        if self.status == 429:
            return "refused"
        return f"{self.status} {self.code}".strip() if self.status else self.code

    @property
    def latency(self) -> float:
        return self.done - self.due

    @property
    def from_sending(self) -> float:
        return self.done - self.sent

    @property
    def lag(self) -> float:
        """Seconds by which the request was sent late."""
        return max(self.sent - self.due, 0.0)

    @property
    def split(self) -> dict[str, float]:
        """Where the time since sending went; `rest` is what no stage took: HTTP, queues between processes."""
        if not self.stages:
            return {}
        return {**self.stages, "rest": max(self.from_sending - sum(self.stages.values()), 0.0)}


@dataclass(frozen=True)
class Sample:
    """The server's state at a moment of the load."""

    seconds: float
    unanswered: int
    waiting: int  # images in the queues of the stages
    running: int  # images in step batches
    room: int  # for images in the step batches that there are
    steps: int
    step_images: int
    restarts: int

    @staticmethod
    def of(seconds: float, status: Mapping[str, Any]) -> Sample:
        engine = status.get("engine", {})
        lanes = engine.get("lanes", ())
        return Sample(
            seconds,
            status.get("unanswered", 0),
            sum(engine.get("queues", {}).values()),
            sum(lane["images"] for lane in lanes),
            sum(lane["limit"] for lane in lanes),
            engine.get("steps", 0),
            engine.get("step_images", 0),
            status.get("restarts", 0),
        )


@dataclass(frozen=True)
class BenchRun:
    """A load that has been sent: its outcomes as they were due, and the server's state meanwhile."""

    load: Load
    url: str
    began: str
    server: Mapping[str, Any]  # its state before
    outcomes: Sequence[Outcome]
    samples: Sequence[Sample]


# --- The mix ------------------------------------------------------------------------------------------------------


def read_mix(path: str | Path) -> tuple[Kind, ...]:
    """The kinds of a TOML file: tables `[[request]]` with `weight`, `name` and fields of a request's body."""
    raw = read_toml(path, "--mix", _MOST_BYTES, "mix")
    for key in raw:
        if key != "request":
            raise PellucidError(rule("--mix", "a list of [[request]] tables", key), "mix")
    tables = raw.get("request", [])
    if not isinstance(tables, list) or not 1 <= len(tables) <= _MOST_KINDS:
        got = len(tables) if isinstance(tables, list) else tables
        raise PellucidError(rule("--mix", f"1 to {_MOST_KINDS} [[request]] tables", got), "mix")
    kinds: list[Kind] = []
    for number, one in enumerate(tables, 1):
        kind = read_kind(one, f"request {number}")
        if kind.name in [other.name for other in kinds]:
            must = "different from the others"
            raise PellucidError(rule(f"request {number}.name", must, kind.name, "Give each a name."), "mix")
        kinds.append(kind)
    return tuple(kinds)


def read_kind(raw: Any, where: str) -> Kind:
    """One table of a mix, checked as the server would check it."""
    if not isinstance(raw, Mapping):
        raise PellucidError(rule(where, "a [[request]] table", raw), "mix")
    body = {key: typed(Any, value, f"{where}.{key[:80]}", code="mix") for key, value in raw.items()}
    weight = typed(float, body.pop("weight", 1.0), f"{where}.weight", code="mix")
    if weight <= 0:
        raise PellucidError(rule(f"{where}.weight", "above 0", weight), "mix")
    name = typed(str, body.pop("name", name_of(body)), f"{where}.name", code="mix")
    if not 1 <= len(name) <= 60 or not name.isprintable():
        raise PellucidError(rule(f"{where}.name", "a text of 1 to 60 characters", name), "mix")
    for key in body:
        if key not in ImageRequest.model_fields:
            hint = nearest(key, [*ImageRequest.model_fields, "weight", "name"])
            raise PellucidError(f"{where}.{key[:80]} must be a field of a request. {hint}", "mix")
    try:
        checked = ImageRequest(**body)
    except ValidationError as error:
        first = error.errors()[0]
        place, message = str(first["loc"][0]), str(first["msg"]).rstrip(".")
        raise PellucidError(f"{where}.{place}: {message}; got {first['input']!r:.80}.", "mix") from None
    for field_name, streams in (("stream", checked.stream), ("background", checked.in_background)):
        if streams:
            raise PellucidError(rule(f"{where}.{field_name}", "left out: whole answers are timed", True), "mix")
    return Kind(name, weight, body)


def name_of(body: Mapping[str, Any]) -> str:
    """A request in a few words, as `heun, 8 steps`."""
    words = [str(body[key]) for key in ("model", "sampler", "size") if key in body]
    words += [f"{body[key]} {unit}" for key, unit in (("steps", "steps"), ("n", "images")) if key in body]
    words += [f"guidance {body['guidance']}"] if "guidance" in body else []
    return ", ".join(words)[:60] or "plain"


# --- The load -----------------------------------------------------------------------------------------------------


def arrivals(load: Load) -> list[Arrival]:
    """A Poisson process: times, kinds and seeds follow from the load's seed, and times do not depend on the mix."""
    gaps, kinds, seeds = (random.Random(f"{what} {load.seed}") for what in ("gaps", "kinds", "seeds"))
    times = itertools.accumulate(gaps.expovariate(load.rate) for _ in range(load.requests))
    chosen = kinds.choices(load.mix, [kind.weight for kind in load.mix], k=load.requests)
    return [Arrival(due, kind, seeds.randrange(2**32)) for due, kind in zip(times, chosen, strict=True)]


async def run(remote: Remote, load: Load, tell: Callable[[], None] = lambda: None) -> BenchRun:
    """Sends each request when it is due and waits for the last answer; `tell` is called after each answer."""
    server = await remote.status()
    if not server["ready"]:
        advice = str(server.get("why") or "Wait until GET /ready answers 200.")
        raise PellucidError(rule("the server", "ready", "one that is not", advice), "no-server")
    loop = asyncio.get_running_loop()
    start, began = loop.time(), datetime.now(UTC).isoformat(timespec="seconds")
    ended, tasks = asyncio.Event(), []

    def clock() -> float:
        return loop.time() - start

    async with asyncio.TaskGroup() as group:
        watch = group.create_task(watched(remote, clock, ended))
        for arrival in arrivals(load):
            await asyncio.sleep(max(arrival.due - clock(), 0.0))
            tasks.append(group.create_task(sent(remote, arrival, clock, load.timeout)))
            tasks[-1].add_done_callback(lambda _: tell())
        await asyncio.wait(tasks)
        ended.set()
    return BenchRun(load, remote.url, began, server, [task.result() for task in tasks], watch.result())


async def sent(remote: Remote, arrival: Arrival, clock: Callable[[], float], timeout: float) -> Outcome:
    """Sends a request now and says what became of it."""
    began, kind = clock(), arrival.kind
    about: dict[str, Any] = {"kind": kind.name, "images": kind.images, "due": arrival.due, "sent": began}
    try:
        async with asyncio.timeout(timeout):
            reply = await remote.fetch(PATH, arrival.payload)
    except (OSError, EOFError, ValueError) as error:
        return Outcome(**about, done=clock(), code=reason_of(error))
    return Outcome(**about, done=clock(), status=reply.status, **facts_of(reply))


def facts_of(reply: Reply) -> dict[str, Any]:
    """The stages of an answer, or the code of an error."""
    body = reply.json
    if reply.status != 200:
        error = body.get("error")
        after = reply.headers.get("retry-after", "")
        code = str(error.get("code") or "") if isinstance(error, Mapping) else ""
        return {"code": code[:60], "retry_after": float(after) if after.isdecimal() else None}
    try:
        timings = [image.get("timings", {}) for image in body["data"]]
        stages = [{name: float(one[name]) for name in STAGES if name in one} for one in timings]
        return {"stages": max(stages, key=lambda one: sum(one.values()))}
    except (KeyError, TypeError, ValueError, AttributeError):
        return {"code": "no images"}


async def watched(remote: Remote, clock: Callable[[], float], ended: asyncio.Event) -> list[Sample]:
    """The server's state once a second, and once after the end; without what could not be asked."""
    found: list[Sample] = []
    while True:
        last = ended.is_set()
        with suppress(PellucidError):
            status = await remote.status()
            found.append(Sample.of(clock(), status))
        if last:
            return found
        with suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), _EVERY)

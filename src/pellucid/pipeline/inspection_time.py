"""Milliseconds by stage and by network: medians of a few warm runs of a loaded pipeline."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from pellucid.core.loop import StepSeen
from pellucid.pipeline.inspection import Times
from pellucid.pipeline.inspection_run import Added, networks_by_name
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.planning import STEPS, make_plan
from pellucid.pipeline.request import Request
from pellucid.pipeline.stages import NAMES

SHORT = 2  # steps of the runs that repeat text and decoding
REPEATS = 2  # short runs that count, after one that only warms up and before the whole one


@dataclass
class Stopwatch:
    """Laps of the denoising rows and of the networks, each after the device has finished."""

    device: torch.device
    tick: Callable[[], None]
    rows: list[list[float]] = field(default_factory=list)  # when each row ended, run by run
    laps: dict[str, list[float]] = field(default_factory=dict)
    begun: dict[str, float] = field(default_factory=dict)

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def see(self, _: StepSeen) -> None:
        self.rows[-1].append(self.now())
        self.tick()

    def start(self, name: str, *_: Any) -> None:
        self.begun[name] = self.now()

    def stop(self, name: str, *_: Any) -> None:
        self.laps.setdefault(name, []).append(self.now() - self.begun[name])

    @contextmanager
    def on(self, networks: Mapping[str, nn.Module]) -> Iterator[None]:
        with ExitStack() as hooks:
            for name, network in networks.items():
                hooks.enter_context(network.register_forward_pre_hook(partial(self.start, name)))
                hooks.enter_context(network.register_forward_hook(partial(self.stop, name)))
            yield


def rows_of(pipe: Pipeline, request: Request) -> int:
    """How often `measure` ticks: once a row of every run."""
    short, whole = (make_plan(pipe.components, each).plan.nfe for each in (shortened(request), request))
    return (1 + REPEATS) * short + whole


def shortened(request: Request) -> Request:
    return replace(request, steps=min(SHORT, STEPS if request.steps is None else request.steps))


def measure(
    pipe: Pipeline, request: Request, added: Added, tick: Callable[[], None] = lambda: None
) -> tuple[Times, dict[str, float]]:
    """The request short, to warm up; short again, to repeat text and decoding; then whole. Milliseconds."""
    watch = Stopwatch(pipe.device, tick)
    watched = replace(request, observers=[watch.see])
    runs = []
    with watch.on(networks_by_name(pipe.components, added)):
        for number in range(2 + REPEATS):
            watch.rows.append([])
            whole = number == 1 + REPEATS
            made = pipe.run(watched if whole else shortened(watched))
            if number == 0:
                watch.laps.clear()
            else:
                runs.append(made.stages)
    taken = [{name: sum(s.seconds for s in stages if s.name == name) for name in NAMES} for stages in runs]
    gaps = [after - before for ends in watch.rows[1:] for before, after in pairwise(ends)]
    steps = gaps or [run["denoise"] for run in taken]  # a plan of one row has no gaps
    middle = {name: 1000 * statistics.median(run[name] for run in taken) for name in NAMES}
    peaks = [(s.name, s.peak) for stages in runs for s in stages if s.peak is not None]
    times = Times(
        device=str(pipe.device),
        text=middle["text"],
        encode=middle["encode"],
        step=1000 * statistics.median(steps),
        decode=middle["decode"],
        whole=1000 * sum(taken[-1].values()),
        runs=len(runs),
        peaks={name: max(peak for other, peak in peaks if other == name) for name, _ in peaks},
    )
    networks = {name: 1000 * statistics.median(laps) for name, laps in watch.laps.items()}
    return times, {**networks, **({} if pipe.components.vae is None else {"vae": times.decode})}

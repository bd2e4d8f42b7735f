"""One run for the page: its steps as they come, its trace beside it, its image with its recipe at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from pellucid.core.loop import StepSeen
from pellucid.evidence.trace import looks
from pellucid.evidence.trace.recorder import Recorder
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.planning import make_plan
from pellucid.pipeline.recipe import Recipe, write_png
from pellucid.studio import html, jobs
from pellucid.studio.asking import Setup
from pellucid.studio.jobs import Job
from pellucid.studio.session import Session

EAGER = 0.25  # seconds that a decoded preview may take; slower ones are mapped linearly


@dataclass(frozen=True)
class Moment:
    """A step that was made: `x0` is what the network believes the image to be."""

    step: int
    steps: int
    sigma: float
    lam: float
    seconds: float
    x0: Tensor

    @property
    def words(self) -> str:
        left = self.seconds / self.step * (self.steps - self.step)
        return f"step {self.step} of {self.steps} · σ {self.sigma:.3g} · λ {self.lam:+.2f} · {left:.1f} s left"


@dataclass(frozen=True)
class Finished:
    """The image, the file that holds it with its recipe, and its trace."""

    image: Image.Image
    file: Path
    trace: Path
    recipe: Recipe
    notes: tuple[str, ...]
    seconds: float


def run(pipe: Pipeline, setup: Setup, session: Session, job: Job) -> Finished:
    """Runs a set-up and tells its moments; the trace is recorded with tensors."""
    began = time.perf_counter()
    request = setup.request(cancelled=job.cancelled)
    steps = make_plan(pipe.components, request).plan.nfe

    def see(seen: StepSeen) -> None:
        level, taken = seen.next_levels[0], time.perf_counter() - began
        job.tell(Moment(seen.index + 1, steps, level.sigma, level.lam, taken, seen.x0[:1].detach().clone()))

    trace = session.new_file(".trace.safetensors")
    with Recorder(trace, tensors=True) as recorder:
        made = pipe.run(replace(request, observers=(recorder, see)))
    file = session.new_file(".png")
    write_png(made.images[0], file, made.recipe)
    return Finished(made.images[0], file, trace, made.recipe, made.notes, time.perf_counter() - began)


def follow(pipe: Pipeline, setup: Setup, session: Session, tab: str) -> Iterator[Moment | Finished]:
    """The moments of a run as they come, the newest only, and then what was made."""
    job = session.begin(tab, lambda job: run(pipe, setup, session, job))
    yield from jobs.follow(job)
    yield job.result


class Preview:
    """x0 as an image: by the model's VAE where that is quick, else by the linear map that explains it best."""

    def __init__(self, pipe: Pipeline) -> None:
        self.vae, self.look = pipe.components.vae, None
        self.quick = True

    def warm(self) -> None:
        """A first look, at grey: what a decoder sets up at its first call is then there."""
        channels = None if self.vae is None else self.vae.config.latent_channels
        if channels is not None:
            self.image(torch.zeros(1, channels, 16, 16))

    def image(self, x0: Tensor) -> Image.Image | None:
        x0 = x0.float().cpu()
        if self.look is None or self.quick:
            began = time.perf_counter()
            self.look = looks.look_for(x0, self.vae)
            self.quick = time.perf_counter() - began < EAGER
        if self.look is None:
            return None
        linear: Any = self.look if self.quick else getattr(self.look, "linear", self.look)
        return html.of_unit(linear.image(x0))

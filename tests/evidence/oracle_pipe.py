"""A pipeline without a network: the exact denoiser of Gaussian images, run by the true plans and the true loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pellucid.core import schedule as schedules
from pellucid.core.compile import compile_plan
from pellucid.core.loop import run
from pellucid.core.noise import Philox
from pellucid.core.oracle import Mixture
from pellucid.core.plan import Plan
from pellucid.evidence.study.subject import Subject
from pellucid.pipeline.images import to_images

SHAPE = (3, 4, 4)
SCHEDULE = schedules.make("scaled_linear")


class Cut(Exception):  # noqa: N818
    """The moment at which a study is killed."""


class OraclePipe:
    """Pictures whose colours have the mean of their prompt's number and a spread of 0.3; `calls` counts requests."""

    def __init__(self, data: Mixture | None = None, stop: int | None = None) -> None:
        count = 48
        generator = torch.Generator().manual_seed(3)
        means = 0.4 * torch.randn(1, count, generator=generator, dtype=torch.float64)
        one = torch.ones(1, dtype=torch.float64)
        self.data = data or Mixture(means, 0.3 * one, one)
        self.calls: list[dict[str, Any]] = []
        self.stop = stop

    def __call__(self, prompt: Sequence[str] = (), /, *, seed: Sequence[int], **options: Any) -> SimpleNamespace:
        self.calls.append(options | {"prompt": list(prompt), "seed": list(seed)})
        if self.stop is not None and len(self.calls) > self.stop:
            raise Cut
        plan = self.plan(options)
        noise = options.get("noise") or Philox(seed)
        x = noise.first(SHAPE, torch.empty(0, dtype=torch.float64), range(len(seed))) * plan.initial_scale
        x = run(plan, self.data, x, noise=noise)
        return SimpleNamespace(images=to_images(x.float()), latents=x, plan=plan)

    def plan(self, options: dict[str, Any]) -> Plan:
        if "plan" in options:
            return Plan.from_json(Path(options["plan"]).read_text("utf-8"))
        own = {"grid": options.get("grid"), "steps": options["steps"], **options.get("options", {})}
        return compile_plan(options["sampler"], schedule=SCHEDULE, target="eps", **own)

    def flow(self, seeds: Sequence[int], plan: Plan) -> Tensor:
        """Where the exact flow of one Gaussian leads from the first noise to the last call, and from there to the mean
        of what x may come from: in closed form, without any sampler."""
        first = Philox(seeds).first(SHAPE, torch.empty(0, dtype=torch.float64), range(len(seeds))).flatten(1)
        mean, spread, start, end = self.data.means[0], self.data.spreads[0], plan.start, plan.rows[-1].level
        wide, narrow = (level.alpha**2 * spread**2 + level.sigma**2 for level in (start, end))
        gap = (narrow / wide).sqrt() * (first * plan.initial_scale - start.alpha * mean)  # x − alpha·mean at the end
        return mean + end.alpha * spread**2 / narrow * gap


def subject(pipe: OraclePipe, **changes: Any) -> Subject:
    return Subject(**{"pipe": pipe, "name": "oracle", "schedule": SCHEDULE, "target": "eps", "mark": "exact"} | changes)

"""Images from a network in training: many, fast, and the same for the same seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pellucid.core.compile import compile_plan
from pellucid.core.denoiser import NetworkDenoiser
from pellucid.core.filters import Filter
from pellucid.core.loop import run
from pellucid.core.plan import Plan
from pellucid.core.schedule import Schedule, Target
from pellucid.models.guidance import Guidance
from pellucid.models.guided import GuidedDenoiser
from pellucid.train.draws import mixed


@dataclass(frozen=True)
class SamplingConfig:
    """How sample images are made on the way."""

    sampler: str = "ddim"
    grid: str = "leading"
    steps: int = 50
    guidance: float = 1.0


@dataclass(frozen=True)
class Sampling:
    """A network as a maker of images. `x0_filter` clips what it predicts, as pixel models want."""

    schedule: Schedule
    target: Target
    config: SamplingConfig
    x0_filter: Filter | None = None

    def plan(self) -> Plan:
        """The table of the run; names that nobody knows are refused here."""
        c = self.config
        return compile_plan(c.sampler, schedule=self.schedule, target=self.target, grid=c.grid, steps=c.steps)

    def batches(
        self,
        network: Callable[..., Tensor],
        shape: Sequence[int],
        count: int,
        seed: int,
        *,
        device: torch.device,
        batch: int = 512,
        inputs: Callable[[int, int], Mapping[str, Any]] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Iterator[Tensor]:
        """Batches of x0, (≤ batch, *shape) float32. `inputs(first, last)` gives the conditions of those images.

        Every batch is of the full size, so that a compiled network meets one shape; what is too much is cut off.
        """
        plan = self.plan()
        for first in range(0, count, batch):
            told = inputs(first, first + batch) if inputs is not None else {}
            generator = torch.Generator(device).manual_seed(mixed(seed, first))
            x = torch.randn(batch, *shape, generator=generator, device=device) * plan.initial_scale
            reads = self.reader(network, device, dtype, told)
            with torch.no_grad():
                made = run(plan, reads, x, seeds=[mixed(seed, first + i) for i in range(batch)])
            yield made[: count - first]

    def reader(
        self, network: Callable[..., Tensor], device: torch.device, dtype: torch.dtype | None, told: Mapping[str, Any]
    ) -> NetworkDenoiser:
        """The network as the loop asks it, with what it is told beside x, under autocast where a dtype is given."""

        def ask(x: Tensor, time: Tensor) -> Tensor:
            with torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None):
                return network(x, time, **told).float()

        return NetworkDenoiser(ask, self.schedule, self.target, self.x0_filter)

    @torch.no_grad()
    def last_calls(
        self,
        network: Callable[..., Tensor],
        x0: Tensor,
        seed: int,
        *,
        batch: int = 512,
        dtype: torch.dtype | None = None,
    ) -> Iterator[Tensor]:
        """Batches of what the plan's last call makes of x0 (N, …), noised to its level: what the end of a grid costs,
        however good the way to it. Fewer than a full batch are left out, so that a compiled network meets one shape."""
        row, reads = self.plan().rows[-1], self.reader(network, x0.device, dtype, {})
        for first in range(0, len(x0) - batch + 1, batch):
            generator = torch.Generator(x0.device).manual_seed(mixed(seed, first))
            given = x0[first : first + batch]
            noise = torch.randn(given.shape, generator=generator, device=x0.device)
            yield reads(given * row.level.alpha + noise * row.level.sigma, row.level, row.time)

    @torch.no_grad()
    def guided(
        self,
        network: Callable[..., Tensor],
        told: Mapping[str, Any],
        untold: Mapping[str, Any],
        shape: Sequence[int],
        seed: int,
        device: torch.device,
    ) -> Tensor:
        """x0 (B, …) of a shape with its B, cond and uncond in one batch; every image starts from noise of its own."""
        reads = GuidedDenoiser(network, self.schedule, self.target, told, untold, Guidance(self.config.guidance))
        plan, seeds = self.plan(), [mixed(seed, i) for i in range(shape[0])]
        streams = [torch.Generator(device).manual_seed(own) for own in seeds]
        x = torch.stack([torch.randn(*shape[1:], generator=one, device=device) for one in streams])
        return run(plan, reads, x * plan.initial_scale, seeds=seeds)

"""Small guided runs to trace: a toy network with a prompt of one number, on tiny latents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pellucid
from pellucid import Guidance, Plan
from pellucid.core import schedule as schedules
from pellucid.core.loop import run
from pellucid.evidence import trace
from pellucid.evidence.trace import Recorder, Trace
from pellucid.models.guided import GuidedDenoiser

SHAPE = (4, 6, 6)
SEEDS = (3, 4)


def network(x: Tensor, time: Tensor, prompt: Tensor, shift: float = 0.0) -> Tensor:
    """Predicts eps: each image by itself, bent by its prompt."""
    told = time.reshape(-1, 1, 1, 1) / 1000
    bend = (prompt.reshape(-1, 1, 1, 1) + shift) * 0.1
    return x * (0.9 - 0.2 * told) + bend * torch.tanh(x.roll(1, 1) + bend)


def denoiser(
    guidance: Any = 4.0,
    prompt: float = 1.0,
    negative: float = 0.0,
    count: int = len(SEEDS),
    shift: float = 0.0,
    schedule: str = "scaled_linear",
) -> GuidedDenoiser:
    def called(x: Tensor, time: Tensor, prompt: Tensor) -> Tensor:
        return network(x, time, prompt, shift)

    told = [{"prompt": torch.full((count,), value)} for value in (prompt, negative)]
    return GuidedDenoiser(called, schedules.make(schedule), "eps", *told, Guidance.parse(guidance))


def plan_of(sampler: str = "dpmpp_2m", steps: int = 6, **options: Any) -> Plan:
    return pellucid.compile_plan(sampler, steps=steps, **options)


def record(
    path: Path, plan: Plan, model: Any, *, tensors: bool = True, seeds: Sequence[int] = SEEDS, **more: Any
) -> Trace:
    """One run, traced and read back."""
    every, limit = more.pop("every", 1), more.pop("limit", None)
    observers = more.pop("observers", ())
    with Recorder(path, tensors, every, limit=limit) as recorder:
        run(plan, model, shape=SHAPE, seeds=seeds, observers=[recorder, *observers], **more)
    return trace.read(path)

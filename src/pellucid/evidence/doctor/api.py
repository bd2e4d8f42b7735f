"""`pellucid.doctor`: in Python what the command answers, for a model on disk, a loaded one or a network of your own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from pellucid.core.denoiser import denoiser
from pellucid.core.errors import PellucidError, rule
from pellucid.core.schedule import Schedule
from pellucid.evidence.doctor.checks import Report, examine
from pellucid.evidence.doctor.probe import Probe
from pellucid.evidence.doctor.subject import (
    KnownImages,
    RunSpec,
    Subject,
    SubjectSpec,
    of_pipeline,
    open_subject,
    with_data,
)
from pellucid.pipeline.pipeline import Pipeline


def doctor(
    model: str | Path | Pipeline | None = None,
    *,
    network: Callable[[Tensor, Tensor], Tensor] | None = None,
    schedule: str | Schedule | None = None,
    target: str | None = None,
    data: str | Path | Tensor | None = None,
    steps: int | None = None,
    device: str | None = None,
) -> Report:
    """What is wrong, as `pellucid doctor` says it: of a model, or of a network (x, time) → what it predicts.

    A model (a folder, a file, a name, a loaded pipeline) brings its schedule and target; `data` is a folder of images
    or "scenes" then, and may be left out. A network comes with both, `target` being eps if left out, and with `data`:
    clean images (N, C, H, W) as it was trained on, 16 or more.
    """
    if (model is None) == (network is None):
        got = "none of them" if model is None else "both"
        raise PellucidError(f"model or network must be given; got {got}.", "usage")
    asked = RunSpec(steps=steps, device=device)
    if network is not None:
        subject = _of_network(network, schedule, target, data, asked)
    elif schedule is not None or target is not None:
        raise PellucidError("schedule and target must come with network; a model brings its own.", "usage")
    elif isinstance(data, Tensor):
        raise PellucidError(rule("data", 'a folder or "scenes" with a model', "a tensor"), "data")
    elif isinstance(model, Pipeline):
        subject = of_pipeline(model, asked)
        subject = subject if data is None else with_data(subject, str(data))
    else:
        subject = open_subject(SubjectSpec(str(model), data=None if data is None else str(data)), asked)
    return examine(subject)


def _of_network(
    network: Callable[[Tensor, Tensor], Tensor],
    schedule: str | Schedule | None,
    target: str | None,
    data: str | Path | Tensor | None,
    asked: RunSpec,
) -> Subject:
    """A network as a subject; it is asked where its data are."""
    if schedule is None:
        raise PellucidError(rule("schedule", "that of the network's training", None), "schedule")
    if not isinstance(data, Tensor) or data.ndim != 4 or not data.is_floating_point():
        got = tuple(data.shape) if isinstance(data, Tensor) else data
        raise PellucidError(rule("data", "clean images (N, C, H, W) as the network was trained on", got), "data")
    if asked.steps is not None:
        raise PellucidError("steps must come with a model; a network has no run of its own.", "usage")
    read = denoiser(network, schedule, target or "eps")
    clean = data.detach().to(asked.device or data.device, torch.float32)
    probe = Probe(network, read.schedule, read.target, clean)
    name = network.__name__ if hasattr(network, "__name__") else type(network).__name__
    return Subject(name, asked, probe=probe, data=KnownImages(clean))

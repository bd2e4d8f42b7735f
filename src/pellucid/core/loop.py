"""A run: a plan over a batch, or a batch in which each image runs its own plan, until all have ended."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid.core.batch import Batch, Constraint, Denoiser, Entry, Observer, Stepper
from pellucid.core.errors import PellucidError, PellucidWarning, PlanError, rule
from pellucid.core.noise import NoiseSource, PerImage, Philox, seed_list
from pellucid.core.plan import Plan
from pellucid.core.schedule import Schedule, to_dict

_MOST_POWER = (
    10.0  # mean square of an image at a run's end; measured: 2.7² with plain guidance 30, 1.2 at most with 7.5
)


def run(
    plan: Plan,
    denoiser: Denoiser,
    x: Tensor | None = None,
    *,
    shape: Sequence[int] | None = None,
    seeds: int | Sequence[int] = 0,
    noise: NoiseSource | None = None,
    observers: Sequence[Observer] = (),
    constraints: Sequence[Constraint] = (),
    cancelled: Callable[[], bool] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    gradients: bool = False,
) -> Tensor:
    """Runs a plan. Give `x` (already at the plan's first level), or `shape` of one image and seeds.

    One seed for a batch gives consecutive ones. A `noise` source with seeds of its own brings these instead.
    No gradients are kept unless `gradients` asks for them; a denoiser of a network needs its own `gradients` too.

    Returns x at the plan's end, in float32 or better whatever dtype the network works in. Warns where it is far larger
    than data are: a network may send x0 out of their range where there is much noise, and never find back.
    """
    if x is not None and (x.ndim < 1 or len(x) == 0):
        raise PellucidError(rule("x", "a batch of at least one image", tuple(x.shape)), "shape")
    check_fits(plan, getattr(denoiser, "schedule", None), getattr(denoiser, "target", None))
    if gradients and getattr(denoiser, "gradients", True) is False:
        raise PellucidError(
            "the denoiser must have gradients enabled; got one without. "
            "Make it with pellucid.denoiser(…, gradients=True).",
            "gradients",
        )
    x, source = starting_point(x, plan.initial_scale, shape, seeds, noise, dtype, device)
    plans = [plan] * len(x)
    with torch.set_grad_enabled(gradients):
        return _in_range(plans, denoiser, loop(plans, denoiser, x, source, observers, constraints, cancelled))


def check_fits(plan: Plan, schedule: object, target: object, owner: str = "denoiser") -> None:
    """Refuses a plan for another schedule or target than its owner's, where the owner says what these are."""
    own = to_dict(schedule) if isinstance(schedule, Schedule) else plan.schedule
    if plan.schedule == own and (target is None or plan.target == target):
        return
    names = own.get("name", "?"), plan.schedule.get("name", "?")
    detail = ", with other settings of the schedule" if names[0] == names[1] and plan.target == target else ""
    raise PlanError(
        f"plan must be made for the {owner}'s schedule and target ({names[0]}, {target}); "
        f"got one for {names[1]}, {plan.target}{detail}.",
        "plan-model",
    )


def starting_point(
    x: Tensor | None,
    scale: float,
    shape: Sequence[int] | None,
    seeds: int | Sequence[int],
    noise: NoiseSource | None,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> tuple[Tensor, NoiseSource]:
    """x as given, or the first noise of a shape; float32 or better; and where the other noise comes from."""
    if x is not None and shape is not None:
        raise PellucidError("x and shape must not be given together; x has a shape of its own.", "shape")
    own = getattr(noise, "seeds", None)
    listed = seed_list(seeds if own is None else own, None if x is None else len(x))
    source = noise or Philox(listed)
    if x is None:
        if shape is None:
            raise PellucidError("x or shape must be given; got neither.", "shape")
        like = torch.empty(0, dtype=dtype or torch.float32, device=device)
        x = source.first(shape, like, range(len(listed))) * scale
    else:
        x = x.to(device=device, dtype=dtype)
    if not x.is_floating_point() or x.dtype in (torch.float16, torch.bfloat16):
        x = x.to(torch.float32)
    return x, source


@dataclass(frozen=True)
class Job:
    """One image of a mixed batch: its own plan, seed, first x (noise of the plan's scale where None) and noise source.

    A source of its own, such as `TorchStream(3)`, is of one image; by default it is `Philox(seed)`.
    """

    plan: Plan
    seed: int = 0
    x: Tensor | None = None
    noise: NoiseSource | None = None


def run_batch(
    jobs: Sequence[Job],
    denoiser: Denoiser,
    *,
    shape: Sequence[int] | None = None,
    observers: Sequence[Observer] = (),
    constraints: Sequence[Constraint] = (),
    cancelled: Callable[[], bool] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Runs images with different plans in one batch, each at its own row; equal to running each alone."""
    if not jobs:
        raise PellucidError(rule("jobs", "at least one", 0), "jobs")
    source: NoiseSource = Philox([job.seed for job in jobs])
    if any(job.noise is not None for job in jobs):
        source = PerImage([Philox(job.seed) if job.noise is None else job.noise for job in jobs])
    like = torch.empty(0, dtype=dtype, device=device)
    starts = []
    for i, job in enumerate(jobs):
        if job.x is None and shape is None:
            raise PellucidError("x or shape must be given; got neither.", "shape")
        own = job.x if job.x is not None else source.first(shape or (), like, [i])[0] * job.plan.initial_scale
        starts.append(own)
    plans = [job.plan for job in jobs]
    for plan in plans:
        check_fits(plan, getattr(denoiser, "schedule", None), getattr(denoiser, "target", None))
    for one in starts:
        if one.shape != starts[0].shape:
            must = f"of one shape in a batch, {tuple(starts[0].shape)}"
            raise PellucidError(rule("x", must, tuple(one.shape), "Run other sizes as another batch."), "shape")
    x = torch.stack(starts)
    with torch.no_grad():
        return _in_range(plans, denoiser, loop(plans, denoiser, x, source, observers, constraints, cancelled))


def _in_range(plans: Sequence[Plan], denoiser: Denoiser, x: Tensor) -> Tensor:
    """x at the end of a run; with a warning where a network that is not clipped made it far too large.

    The scale of an exact density is its own affair: only what says that it is `unclipped` is judged.
    """
    clean = [i for i, plan in enumerate(plans) if plan.end.ratio < 1]
    if not clean or not getattr(denoiser, "unclipped", False):
        return x
    power = float(x.detach()[clean].reshape(len(clean), -1).square().mean(1).max())
    if power > _MOST_POWER:
        warnings.warn(
            f"x0 left the range of the data: x ends with a root mean square of {math.sqrt(power):.3g}, where images in "
            "[-1, 1] have at most 1 and latents about 1. For data in [-1, 1] use "
            "pellucid.denoiser(..., x0_filter=pellucid.Clip(1.0)).",
            PellucidWarning,
            stacklevel=3,
        )
    return x


def loop(
    plans: Sequence[Plan],
    denoiser: Denoiser,
    x: Tensor,
    source: NoiseSource,
    observers: Sequence[Observer],
    constraints: Sequence[Constraint],
    cancelled: Callable[[], bool] | None,
    stepper: Stepper | None = None,
) -> Tensor:
    """Images that begin together in a batch of their own: all join, and step until it is empty."""
    entry, batch = Entry(plans, denoiser, x, source, observers, constraints, cancelled), Batch(stepper=stepper)
    batch.join(entry)
    try:
        while batch.entries:
            batch.step()
    finally:
        if stepper is not None:
            stepper.close()
    if entry.error is not None:
        raise entry.error
    return entry.result

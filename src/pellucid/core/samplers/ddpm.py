"""DDPM and DDIM, their inversion, and the distilled samplers that re-noise (LCM, TCD)."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

from pellucid.core.grid import Path
from pellucid.core.plan import P0, U, X, Z, row
from pellucid.core.samplers.registry import Draft, sampler
from pellucid.core.samplers.steps import (
    ancestral,
    check_choice,
    check_eta,
    first_order,
    first_order_eps,
    span,
)
from pellucid.core.schedule import Level


@sampler(
    name="ddpm",
    title="DDPM",
    family="ddpm",
    order=1,
    deterministic=False,
    suits="many steps, the reference for diversity; weak below 50 steps",
    paper="Ho et al. 2020, Denoising Diffusion Probabilistic Models",
    peer="training",
    aliases=("DDPMScheduler", "DDPMParallelScheduler"),
)
def ddpm(path: Path, *, variance: str = "small", noise_at_end: bool = False) -> Draft:
    """The ancestral posterior. `small` has the variance of the true posterior; `large` has β, which is too much."""
    check_choice("variance", variance, ("small", "large"))
    rows = []
    for leg in path.legs:
        down, up = ancestral(leg.start, leg.end, 1.0)
        if variance == "large" and (leg.end.sigma > 0 or noise_at_end):
            a, b = leg.start.to("vp"), leg.end.to("vp")
            up = math.sqrt(1.0 - (a.alpha / b.alpha) ** 2) * leg.end.alpha / b.alpha
        noise = Z * up
        rows.append(row(leg.time, leg.start, first_order(leg.start, down) + noise, span=span(leg.start, leg.end)))
    return Draft(rows, declared="the large variance adds β, more than the posterior has" if variance == "large" else "")


@sampler(
    name="ddim",
    title="DDIM",
    family="ddpm",
    order=1,
    deterministic=True,
    suits="any model and step count; eta adds noise; the same step as Euler",
    paper="Song et al. 2020, Denoising Diffusion Implicit Models",
    peer="training",
    aliases=("DDIMScheduler", "DDIMParallelScheduler"),
)
def ddim(path: Path, *, eta: float = 0.0, keep_eps: bool = False) -> Draft:
    """x0 and eps recombined at the next level; eta of the posterior's noise is put back.

    `keep_eps` takes eps from the prediction before an x0 filter (register u), as diffusers does.
    """
    check_eta(eta)
    rows = []
    for leg in path.legs:
        a = leg.start
        down, up = ancestral(a, leg.end, eta)
        moved = P0 * down.alpha + (X - U * a.alpha) * (down.sigma / a.sigma) if keep_eps else first_order(a, down)
        rows.append(row(leg.time, a, moved + Z * up, span=span(a, leg.end)))
    return Draft(rows)


@sampler(
    name="ddim_inversion",
    title="DDIM inversion",
    family="inversion",
    order=1,
    deterministic=True,
    suits="from an image to the noise that gives it; start at x0 and run the plan",
    paper="Song et al. 2020, section 4.3; Mokady et al. 2022",
    peer="training",
    aliases=("DDIMInverseScheduler", "ddim_inverse"),
)
def ddim_inversion(path: Path, *, keep_eps: bool = False) -> Draft:
    """DDIM run upwards: the network gets the time of the level that the step goes to (the usual approximation).

    `keep_eps` takes x0 from a filter (register u) beside eps as it is, as diffusers does.
    """
    legs = [replace(leg, start=leg.end, end=leg.start) for leg in reversed(path.legs)]
    rows = []
    for leg in legs:
        kept = U * leg.end.alpha + P0 * leg.end.sigma
        rows.append(row(leg.time, leg.start, kept if keep_eps else first_order_eps(leg.start, leg.end)))
    return Draft(rows, basis="eps", end=legs[-1].end)


@sampler(
    name="lcm",
    title="LCM",
    family="distilled",
    order=1,
    deterministic=False,
    suits="consistency-distilled models (LCM, LCM-LoRA) at 1 to 8 steps",
    paper="Luo et al. 2023, Latent Consistency Models",
    peer="training",
    aliases=("LCMScheduler",),
)
def lcm(path: Path, *, timestep_scaling: float = 10.0, sigma_data: float = 0.5) -> Draft:
    """Jump to x0, then noise it to the next level. c_skip keeps a trace of x, as the models were distilled."""
    rows = []
    for i, leg in enumerate(path.legs):
        scaled = leg.time * timestep_scaling
        c_skip = sigma_data**2 / (scaled**2 + sigma_data**2)
        c_out = scaled / math.sqrt(scaled**2 + sigma_data**2)
        clean = P0 * c_out + X * (c_skip / math.hypot(leg.start.alpha, leg.start.sigma))
        if i == len(path.legs) - 1:
            rows.append(row(leg.time, leg.start, clean))
        else:
            noised = clean * leg.end.alpha + Z * leg.end.sigma
            rows.append(row(leg.time, leg.start, noised, span=span(leg.start, leg.end)))
    return Draft(rows, end=Level(1.0, 0.0), declared="c_skip and c_out keep a trace of x in the clean image")


@sampler(
    name="tcd",
    title="TCD",
    family="distilled",
    order=1,
    deterministic=False,
    suits="trajectory-consistency-distilled models (TCD, Hyper-SD) at 2 to 8 steps",
    paper="Zheng et al. 2024, Trajectory Consistency Distillation",
    peer="training",
    aliases=("TCDScheduler",),
)
def tcd(path: Path, *, eta: float = 0.3, round_times: bool = False) -> Draft:
    """Go to time (1 − eta)·t_next without noise, then noise up to t_next."""
    check_eta(eta)
    rows = []
    low = path.schedule.span[0]
    for leg, following in pairwise(path.legs):
        past = low + (1.0 - eta) * (following.time - low)
        below = path.at_time(math.floor(past) if round_times else past)
        if (
            eta == 0.0 or below.ratio > leg.end.ratio
        ):  # outside of the schedule a level gets the time of its nearest end
            below = leg.end
        scale = leg.end.alpha / below.alpha
        up = leg.end.alpha * math.sqrt(max(leg.end.ratio**2 - below.ratio**2, 0.0))
        moved = first_order(leg.start, below) * scale + Z * up
        rows.append(row(leg.time, leg.start, moved, span=span(leg.start, leg.end)))
    final, least = path.legs[-1], path.at_time(low)
    rows.append(row(final.time, final.start, first_order(final.start, least)))
    return Draft(rows, end=least)

"""Lab 01: ᾱ from betas, one step, the jump, and the signal-to-noise ratio."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor

import pellucid
from pellucid import scenes
from pellucid.labs.answers import Check, Mistake
from pellucid.labs.checks.tensors import off

CLOSE = 1e-5
SCHEDULES = ("scaled_linear", "cosine")


def table(name: str) -> dict[str, Tensor]:
    return {column: torch.from_numpy(values) for column, values in pellucid.schedules.make(name).table().items()}


def fits(got: object, wanted: Tensor, what: str, mistakes: Mapping[str, Tensor], otherwise: str) -> None:
    """Raises with the mistake that gives exactly this, or with a general hint."""
    far, size = off(got, wanted, what), float(wanted.abs().max())
    if not far < CLOSE * size:
        found = [name for name, wrong in mistakes.items() if float((got - wrong).abs().max()) < CLOSE * size]
        hint = f"this is what you get with {found[0]}" if found else otherwise
        raise Mistake(f"{what} must be right to {CLOSE:g} of its size, {size:.3g}; off by {far:.3g}; {hint}.")


def check_alpha_bar(answer: ModuleType) -> None:
    for name in SCHEDULES:
        columns = table(name)
        betas = columns["beta"]
        mistakes = {
            "1 − β of each time alone: take the product of all up to it": 1 - betas,
            "the product of the betas themselves: a step keeps 1 − β": betas.cumprod(0),
            "the square root of it, which is α": columns["alpha_bar"].sqrt(),
            "1 minus the sum of the betas: what is kept multiplies": 1 - betas.cumsum(0),
        }
        got = answer.alpha_bar(betas)
        fits(got, columns["alpha_bar"], f"ᾱ of {name}", mistakes, "it is the running product of 1 − β")


def check_stepped(answer: ModuleType) -> None:
    draw = torch.Generator().manual_seed(1)
    x, z = (torch.randn(2, 3, 8, 8, generator=draw, dtype=torch.float64) for _ in range(2))
    for beta in (0.02, 0.3):
        mistakes = {
            "β and 1 − β without their roots: variances add, so the weights are roots": (1 - beta) * x + beta * z,
            "all of x kept: then the spread grows with every step": x + beta**0.5 * z,
            "β in the place of its root": (1 - beta) ** 0.5 * x + beta * z,
            "the two weights swapped": beta**0.5 * x + (1 - beta) ** 0.5 * z,
        }
        wanted = (1 - beta) ** 0.5 * x + beta**0.5 * z
        fits(answer.stepped(x, beta, z), wanted, f"a step with β {beta}", mistakes, "it is √(1−β)·x + √β·z")


def check_noised(answer: ModuleType) -> None:
    """A batch whose four images have four times."""
    x0 = scenes.render(scenes.sample(torch.arange(4), seed=2), 32)
    eps = torch.randn(x0.shape, generator=torch.Generator().manual_seed(2))
    times = torch.tensor([0, 300, 700, 999])
    for name in SCHEDULES:
        bars = table(name)["alpha_bar"].float()
        bar = bars[times][:, None, None, None]
        mistakes = {
            "ᾱ and 1 − ᾱ without their roots": bar * x0 + (1 - bar) * eps,
            "the weights of image and noise swapped": (1 - bar).sqrt() * x0 + bar.sqrt() * eps,
            "all of the image kept": x0 + (1 - bar).sqrt() * eps,
            "the time of the first image for all": bar[:1].sqrt() * x0 + (1 - bar[:1]).sqrt() * eps,
        }
        wanted = bar.sqrt() * x0 + (1 - bar).sqrt() * eps
        hint = "it is √ᾱ·x0 + √(1−ᾱ)·eps, with ᾱ as (batch, 1, 1, 1)"
        fits(answer.noised(x0, eps, bars, times), wanted, f"x under {name}", mistakes, hint)


def check_snr(answer: ModuleType) -> None:
    for name in SCHEDULES:
        columns = table(name)
        bars, wanted = columns["alpha_bar"], columns["snr"]
        mistakes = {
            "α / σ, the root of it: power is the square": wanted.sqrt(),
            "noise over signal": 1 / wanted,
            "its logarithm": wanted.log(),
        }
        fits(answer.snr(bars).log(), wanted.log(), f"log of the SNR of {name}", logs(mistakes), "it is ᾱ / (1 − ᾱ)")


def logs(mistakes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.log() for name, value in mistakes.items()}


CHECKS: list[Check] = [
    Check("ᾱ is what all steps leave", check_alpha_bar),
    Check("one step", check_stepped),
    Check("the jump, a time for each image", check_noised),
    Check("the signal-to-noise ratio", check_snr),
]

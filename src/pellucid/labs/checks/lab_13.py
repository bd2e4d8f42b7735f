"""What an answer to lab 13 must do."""

from __future__ import annotations

import math
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from pellucid.core import schedule as schedules
from pellucid.labs.answers import Check, Mistake
from pellucid.labs.checks.tensors import close, diagnosis
from pellucid.train.objective import Objective, Weighting

TIMES = (20.0, 300.0, 700.0, 980.0)
SHAPE = (4, 2, 3, 5)  # B, C, H, W: no two alike, so that a wrong axis shows


def check_question(answer: ModuleType) -> None:
    cosine = schedules.make("cosine")
    generator = torch.Generator().manual_seed(13)
    x0, noise = (torch.randn(SHAPE, generator=generator) for _ in range(2))
    levels = [cosine.level(time) for time in TIMES]
    alpha, sigma = (torch.tensor([getattr(level, name) for level in levels]).float() for name in ("alpha", "sigma"))
    objective = Objective(cosine, "v")
    wanted = objective.pose(x0, noise, torch.tensor([objective.row(time) for time in TIMES], dtype=torch.float64).T)
    x, target = answer.question(x0, noise, alpha, sigma)
    if not close(x, wanted.x):
        raise Mistake(
            "the network must be shown alpha·x0 + sigma·noise, each image at its own level; got something else. "
            "A level (B,) multiplies (B, C, H, W) as (B, 1, 1, 1)."
        )
    if not close(target, wanted.answer):
        slips = {
            "-v: v is alpha·noise − sigma·x0": -wanted.answer,
            "eps": noise,
            "x0": x0,
            "the flow's noise − x0": noise - x0,
        }
        hint = diagnosis(slips, partial(close, target), "v = alpha·eps − sigma·x0")
        raise Mistake(f"the right answer of a network that predicts v is another: {hint}.")


def check_weight(answer: ModuleType) -> None:
    cosine = schedules.make("cosine")
    for time in (*TIMES, 990.0):
        level = cosine.level(time)
        for gamma in (5.0, 1.0):
            wanted = Weighting("min_snr", gamma).on("v", level)
            got = answer.min_snr_on_v(level.alpha, level.sigma, gamma)
            if math.isclose(got, wanted, rel_tol=1e-6, abs_tol=1e-12):
                continue
            snr = (level.alpha / level.sigma) ** 2
            slips = {
                "the weight on x0": min(snr, gamma),
                "the weight on eps": min(snr, gamma) / snr,
                "max in the place of min": max(snr, gamma) * level.sigma**2,
                "sigma in the place of sigma²: the error is squared": min(snr, gamma) * level.sigma,
                "a division by sigma²: it is the other way round": min(snr, gamma) / level.sigma**2,
            }
            hint = diagnosis(slips, partial(math.isclose, got, rel_tol=1e-6), "something else", "{}")
            raise Mistake(
                f"at λ = {level.lam:.2f}, gamma {gamma:g} the weight must be {wanted:.5g}; got {got:.5g}: {hint}."
            )


def check_share(answer: ModuleType) -> None:
    shares = {}
    for name in ("linear", "cosine"):
        lams = [schedules.make(name).level(float(time)).lam for time in range(1000)]
        wanted = sum(lam < -2 for lam in lams) / 1000
        shares[name] = answer.share_below(lams, -2.0)
        if not math.isclose(shares[name], wanted, abs_tol=1e-9):
            raise Mistake(
                f"of the times of {name} {wanted:.3f} are below λ = −2; got {shares[name]:.3f}. A share, not a count."
            )


def check_gradient(answer: ModuleType) -> None:
    weight = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    data = torch.randn(12, 2, generator=torch.Generator().manual_seed(13), dtype=torch.float64)

    def gradient(rows: Tensor) -> Tensor:
        return torch.autograd.grad((rows @ weight - 1).square().mean(), weight)[0]

    for counts in ((6, 6), (2, 4, 6)):
        parts = [gradient(rows) for rows in torch.split(data, list(counts))]
        got, wanted = answer.mean_gradient(parts, list(counts)), gradient(data)
        if close(got, wanted):
            continue
        if close(got, torch.stack(parts).sum(0)):
            raise Mistake(
                f"of {len(counts)} ranks got the sum of the gradients: the loss is a mean, so they are averaged."
            )
        if close(got, torch.stack(parts).mean(0)):
            raise Mistake(f"ranks with {counts} images do not count alike: got the plain mean of their gradients.")
        raise Mistake(f"ranks with {counts} images must give the gradient of all {sum(counts)}; got another one.")


CHECKS = [
    Check("what is asked, and the right answer", check_question),
    Check("min-SNR's weight on v", check_weight),
    Check("a schedule as a density over λ", check_share),
    Check("the gradient of all ranks", check_gradient),
]

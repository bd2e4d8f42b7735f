"""Lab 03: a grid, its sigmas, the scale of the input, and Euler's run."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

import pellucid
from pellucid.labs.answers import Check, Mistake
from pellucid.labs.checks.tensors import off, tensor

CLOSE = 1e-5
SETTINGS = ((1000, 5), (1000, 20), (1000, 30), (100, 4))


def bars(name: str) -> Tensor:
    """ᾱ of a schedule."""
    return torch.from_numpy(pellucid.schedules.make(name).table()["alpha_bar"])


def numbers(got: object, count: int, what: str) -> list[float]:
    try:
        found = [float(value) for value in got]  # type: ignore[attr-defined]
    except TypeError:
        raise Mistake(f"{what} must be {count} numbers; got {type(got).__name__}.") from None
    if len(found) != count:
        raise Mistake(f"{what} must be {count} numbers; got {len(found)}.")
    return found


def check_trailing(answer: ModuleType) -> None:
    for num_train, steps in SETTINGS:
        stride = num_train / steps
        wanted = [round(num_train - i * stride) - 1 for i in range(steps)]
        got = numbers(answer.trailing(num_train, steps), steps, f"{steps} times of {num_train}")
        if all(abs(a - b) <= 1 for a, b in zip(got, wanted, strict=True)) and got[0] == wanted[0]:
            continue
        mistakes: dict[str, list[float]] = {
            "leading, which never calls at the last time": [round(i * stride) for i in reversed(range(steps))],
            "linspace, which ends at time 0 and has other strides": [
                (num_train - 1) * (steps - 1 - i) / (steps - 1) for i in range(steps)
            ],
            "the least noise first: a run goes from noise to image": [*map(float, wanted[::-1])],
            "times from num_train on: the last time is num_train − 1": [time + 1 for time in wanted],
        }
        same = [
            name for name, times in mistakes.items() if all(abs(a - b) < 0.51 for a, b in zip(got, times, strict=True))
        ]
        hint = f"this is {same[0]}" if same else "go back from num_train in strides of num_train / steps, then take 1"
        raise Mistake(f"the times must begin {wanted[:3]}; got {[round(time, 1) for time in got[:3]]}; {hint}.")


def check_sigmas(answer: ModuleType) -> None:
    times = [999, 799, 599, 399, 199]
    for name in ("scaled_linear", "cosine"):
        bar = bars(name)
        wanted = [float(((1 - bar[t]) / bar[t]) ** 0.5) for t in times]
        got = numbers(answer.sigmas(bar, times), len(times) + 1, "the sigmas of 5 times, and where the run ends,")
        if got[-1] != 0.0:
            raise Mistake(f"the last sigma must be 0, where no noise is left; got {got[-1]:.4g}.")
        if all(abs(a - b) <= CLOSE * b for a, b in zip(got, wanted, strict=False)):
            continue
        vp = [float((1 - bar[t]) ** 0.5) for t in times]
        hint = "it is √((1−ᾱ)/ᾱ)"
        if all(abs(a - b) <= CLOSE for a, b in zip(got, vp, strict=False)):
            hint = "√(1−ᾱ) is the σ beside α = √ᾱ; in Euler's space α is 1, so divide by √ᾱ"
        elif all(abs(a - b * b) <= CLOSE * b * b for a, b in zip(got, wanted, strict=False)):
            hint = "this is its square, the noise's power"
        raise Mistake(f"σ under {name} must begin {wanted[0]:.4g}; got {got[0]:.4g}; {hint}.")


def check_scaled(answer: ModuleType) -> None:
    x0, eps = (torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    for bar in bars("scaled_linear")[[50, 500, 999]].tolist():
        sigma = ((1 - bar) / bar) ** 0.5
        x = x0 + sigma * eps
        wanted = bar**0.5 * x0 + (1 - bar) ** 0.5 * eps
        got = tensor(answer.scaled(x, sigma), wanted, "the input")
        if (far := float((got - wanted).abs().max())) > CLOSE * 10:
            hint = "divide by √(1 + σ²)"
            if torch.allclose(got, x):
                hint = "x itself is what Euler keeps: its spread is √(1 + σ²), and the network was trained on spread 1"
            elif torch.allclose(got, x / sigma):
                hint = "x / σ forgets the image's own part: divide by √(1 + σ²)"
            raise Mistake(f"the input at σ {sigma:.3g} must be √ᾱ·x0 + √(1−ᾱ)·eps; off by {far:.3g}; {hint}.")


def check_euler(answer: ModuleType) -> None:
    """Against our scheduler, on a network that is exact for one image."""
    scheduler = pellucid.Scheduler("euler", schedule="scaled_linear", target="eps", grid="trailing")
    scheduler.set_timesteps(6)
    times = [round(float(time)) for time in scheduler.timesteps]
    bar = bars("scaled_linear")
    sigmas = [*(float(((1 - bar[t]) / bar[t]) ** 0.5) for t in times), 0.0]
    called: list[int] = []
    spreads: list[float] = []

    def network(x: Tensor, time: int) -> Tensor:
        called.append(int(time))
        spreads.append(float(x.std()))
        return 0.9 * x + 0.05 * torch.sin(x + int(time) / 300)

    x = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * sigmas[0]
    wanted = x
    for time, here, there in zip(times, sigmas, sigmas[1:], strict=False):
        wanted = wanted + (there - here) * network(wanted / (1 + here**2) ** 0.5, time)
    right_spreads = list(spreads)
    called.clear()
    spreads.clear()
    got = answer.euler(x, network, times, sigmas)
    if called != times:
        raise Mistake(f"the network must be called at {times[:3]}…, once each; got {called[:3]}…, {len(called)} calls.")
    if max(abs(a - b) for a, b in zip(spreads[:1], right_spreads, strict=False)) > 0.01:
        raise Mistake(
            f"the network's first input must have spread {right_spreads[0]:.2f}; got {spreads[0]:.4g}; scale it."
        )
    if (far := off(got, wanted, "the result")) > CLOSE:
        raise Mistake(
            f"x at the end must be ours to {CLOSE:g}; off by {far:.3g}; a step is x + (σ' − σ)·eps, on the x that was "
            "not scaled, and σ' is the smaller one."
        )


CHECKS: list[Check] = [
    Check("trailing times", check_trailing),
    Check("sigmas of Euler's space", check_sigmas),
    Check("the scale of the input", check_scaled),
    Check("a whole run of Euler", check_euler),
]

"""What an answer to lab 09 must do."""

from __future__ import annotations

from types import ModuleType

import torch

from pellucid import scenes
from pellucid.labs.answers import Check, Mistake
from pellucid.labs.checks.tensors import close
from pellucid.pipeline.request import Control

CHANNELS = 6
SHAPES = ((2, 8, 16, 16), (2, 8, 8, 8), (2, 12, 8, 8))  # of skips
SPANS = ((10, 0.0, 1.0), (10, 0.0, 0.5), (10, 0.5, 1.0), (7, 0.3, 0.8), (3, 0.4, 0.6))  # steps, start, end


def check_zero(answer: ModuleType) -> None:
    conv = answer.zero_convolution(CHANNELS)
    x = torch.randn(2, CHANNELS, 5, 5, generator=torch.Generator().manual_seed(9))
    out = conv(x)
    if out.shape != x.shape:
        raise Mistake(f"the convolution must keep {tuple(x.shape)}; got {tuple(out.shape)}. Its kernel is 1 × 1.")
    if bool(out.ne(0).any()):
        most = float(out.abs().max().detach())
        raise Mistake(
            f"a new one must give 0 for every input; got up to {most:.3g}. Weight and bias both begin at zero."
        )
    if out.requires_grad:
        (out - 1).square().sum().backward()
    for name, parameter in conv.named_parameters():
        if not parameter.requires_grad or parameter.grad is None or not bool(parameter.grad.ne(0).any()):
            raise Mistake(
                f"{name} must get a gradient; got none. A zero convolution is a zero *start*: to freeze it, or to "
                "multiply its output by 0, would keep it at zero for ever."
            )


def check_steered(answer: ModuleType) -> None:
    generator = torch.Generator().manual_seed(9)
    skips, residuals = ([torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(2))
    kept = [skip.clone() for skip in skips]
    for strength in (1.0, 0.4):
        got = list(answer.steered(skips, residuals, strength))
        if not all(torch.equal(a, b) for a, b in zip(skips, kept, strict=True)):
            raise Mistake(
                "steered changed the skips that it was given: return new ones, the next guidance branch needs them."
            )
        wanted = [skip + strength * residual for skip, residual in zip(kept, residuals, strict=True)]
        if len(got) != len(wanted) or not all(map(close, got, wanted)):
            averaged = [skip * (1 - strength) + strength * r for skip, r in zip(kept, residuals, strict=True)]
            slip = "a residual is added, it does not replace a share of the skip"
            hint = (
                slip if len(got) == len(wanted) and all(map(close, got, averaged)) else "is each scaled by the strength"
            )
            raise Mistake(f"steered must add each residual times {strength:g} to its skip; got other values: {hint}.")


def check_acts(answer: ModuleType) -> None:
    for steps, start, end in SPANS:
        control = Control("", None, start=start, end=end)
        wanted = [step for step in range(steps) if control.acts_at(step, steps)]
        got = [step for step in range(steps) if answer.acts_at(step, steps, start, end)]
        if got != wanted:
            raise Mistake(
                f"of {steps} steps {wanted} act between {start:g} and {end:g}; got {got}. Step i covers the share from "
                "i / steps to (i + 1) / steps, and all of it must lie inside."
            )


def check_f1(answer: ModuleType) -> None:
    drawn = scenes.sample(torch.arange(3), seed=9, styles=("flat",))
    images, edges = scenes.render(drawn), scenes.edges(drawn)
    for name, exact in (
        ("the scene's own", edges),
        ("another scene's", edges.roll(1, 0)),
        ("moved", edges.roll(2, -1)),
    ):
        wanted = scenes.edge_f1(images, exact)
        seen = scenes.outlines(images)
        for i in range(len(images)):
            got = float(answer.f1(seen[i], exact[i, 0] >= 0.5))
            if abs(got - float(wanted[i])) > 1e-3:
                raise Mistake(
                    f"F1 against {name} edges must be {float(wanted[i]):.3f}; got {got:.3f}. A pixel counts as met "
                    "within one pixel, diagonals included, and each map is counted on its own."
                )
    if float(answer.f1(torch.zeros(8, 8, dtype=torch.bool), torch.eye(8, dtype=torch.bool))) != 0:
        raise Mistake("F1 of an empty map must be 0; it is a share of nothing.")


CHECKS = [
    Check("a zero convolution", check_zero),
    Check("residuals on skips", check_steered),
    Check("when a control acts", check_acts),
    Check("F1 of outlines", check_f1),
]

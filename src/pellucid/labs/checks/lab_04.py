"""Lab 04: the formula, one call for both branches, rescale, and what a run costs."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

import pellucid
from pellucid.labs.answers import Check, Mistake
from pellucid.labs.checks.tensors import off
from pellucid.models.guided import GuidedDenoiser
from pellucid.models.unet import UNet
from pellucid.pipeline.encoders.text import encode_prompts

PROMPTS = ("a large red star on a white background", "a small blue ring on a grey background")
NEGATIVE = "a green heart"
TIME = 800.0
CLOSE = 1e-3


class Case(NamedTuple):
    """Two images in the middle of a run, and what the network predicts of them."""

    pipe: pellucid.Pipeline
    x: Tensor
    time: Tensor
    texts: Tensor
    other: Tensor
    cond: Tensor
    uncond: Tensor


@cache
def case() -> Case:
    """The same for all checks."""
    pipe = pellucid.load("scenes-128", device="cpu")
    parts = pipe.components
    x = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(4))
    time = torch.full((2,), TIME)
    texts = encode_prompts(parts.text_encoders, parts.tokenizers, [*PROMPTS, NEGATIVE]).context
    other = texts[2:].expand(2, -1, -1)
    with torch.no_grad():
        cond, uncond = parts.network(x, time, texts[:2]), parts.network(x, time, other)
    return Case(pipe, x, time, texts[:2], other, cond, uncond)


def check_formula(answer: ModuleType) -> None:
    """At five scales."""
    c = case()
    for scale in (4.0, 0.0, 1.0, 1.5, 12.0):
        wanted = torch.lerp(c.uncond, c.cond, scale)
        got = answer.guided(c.cond, c.uncond, scale)
        far = off(got, wanted, "the guided prediction")
        if far > CLOSE:
            hint = "it is uncond + scale·(cond − uncond)"
            if off(got, c.cond + scale * (c.cond - c.uncond), "") < CLOSE:
                hint = "this is what you get when the push is added to cond, which is one scale too strong"
            elif off(got, torch.lerp(c.cond, c.uncond, scale), "") < CLOSE:
                hint = "this is what you get when cond and uncond are swapped"
            raise Mistake(f"guided must be exact at scale {scale:g}; off by {far:.3f}; {hint}.")


def check_both(answer: ModuleType) -> None:
    """One call, and the branches where they belong."""
    c = case()
    batches: list[int] = []

    def network(x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        batches.append(len(x))
        out: Tensor = c.pipe.components.network(x, time, text)
        return out

    with torch.no_grad():
        made = answer.both(network, c.x, c.time, c.texts, c.other)
    if batches != [4]:
        raise Mistake(
            f"two images must go as one call with a batch of 4; got calls with batches {batches}; stack x twice."
        )
    if not isinstance(made, tuple) or len(made) != 2:
        raise Mistake(f"both must return cond and uncond; got {type(made).__name__}.")
    if off(made[0], c.uncond, "cond") < CLOSE and off(made[1], c.cond, "uncond") < CLOSE:
        raise Mistake("cond must be the half with the prompt; got the halves swapped: return them in the order asked.")
    for name, got, wanted in (("cond", made[0], c.cond), ("uncond", made[1], c.uncond)):
        if (far := off(got, wanted, name)) > CLOSE:
            raise Mistake(
                f"{name} must be what a call alone gives, to {CLOSE:g}; off by {far:.3f}; the order of x and of the "
                "texts must match (all prompts, then all others), and so must the split."
            )


def check_rescaled(answer: ModuleType) -> None:
    """Against the engine's rule in v."""
    c = case()
    parts = c.pipe.components
    assert isinstance(parts.network, UNet)
    level = parts.schedule.level(TIME)
    for phi in (0.0, 0.7, 1.0):
        rule = pellucid.Guidance.parse(f"9 + rescale phi={phi}")
        texts = {"context": c.texts}, {"context": c.other}
        with torch.no_grad():
            x0 = GuidedDenoiser(parts.network, parts.schedule, "v", *texts, rule)(c.x, level, TIME).x0
        wanted = (level.alpha * c.x - x0) / level.sigma
        got = answer.rescaled(c.cond, c.uncond, 9.0, phi)
        far = off(got, wanted, "the rescaled prediction")
        if far > 2 * CLOSE:
            plain = torch.lerp(c.uncond, c.cond, 9.0)
            batch = plain * (1 + phi * (c.cond.std() / plain.std() - 1))
            hint = "multiply the guided v by 1 + phi·(std of cond / std of guided − 1)"
            if off(got, batch, "") < CLOSE:
                hint = "this is what you get with one spread for the whole batch: each image has its own"
            raise Mistake(f"rescaled must be the engine's at phi {phi:g} to {2 * CLOSE:g}; off by {far:.3f}; {hint}.")


def check_cost(answer: ModuleType) -> None:
    """Counted by running the model."""
    pipe = case().pipe
    for scales in ([4.0] * 3, [1.0] * 3, [4.0, 1.0, 1.0], [0.0] * 2):
        rows: list[int] = []
        hook = pipe.components.network.register_forward_pre_hook(lambda _, given, rows=rows: rows.append(len(given[0])))
        try:
            pipe(PROMPTS[0], guidance=scales, sampler="euler", steps=len(scales), seed=1, decode=False)
        finally:
            hook.remove()
        if (got := answer.latents_called(scales)) != sum(rows):
            raise Mistake(
                f"scales {scales} must cost {sum(rows)} latents; got {got}; at scale 1 uncond has no weight and is not "
                "asked for, at every other scale (0 too) both are."
            )


CHECKS: list[Check] = [
    Check("the formula", check_formula),
    Check("both predictions from one call", check_both),
    Check("rescale", check_rescaled),
    Check("what a run costs", check_cost),
]

"""Lab 02: x0 and eps from v, one step, a whole run."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

import pellucid
from pellucid.core.batch import StepSeen
from pellucid.labs.answers import Check, Mistake
from pellucid.labs.checks.tensors import off
from pellucid.pipeline.encoders.text import encode_prompts

PROMPT = "a small blue heart in the top left on a cream background"
CLOSE = 1e-4


@cache
def watched() -> tuple[pellucid.Pipeline, pellucid.Result, list[StepSeen]]:
    """One DDIM run of the model, and what each of its steps saw."""
    pipe = pellucid.load("scenes-128", device="cpu")
    seen: list[StepSeen] = []
    made = pipe(
        PROMPT, sampler="ddim", grid="trailing", steps=8, guidance=1.0, seed=5, decode=False, observers=[seen.append]
    )
    return pipe, made, seen


def velocity(step: StepSeen) -> Tensor:
    """The v that the network gave at a step: sigma·v = alpha·x − x0."""
    level = step.row.level
    return (level.alpha * step.x - step.x0) / level.sigma


def check_predicted(answer: ModuleType) -> None:
    """Made from an x0 and an eps that are known."""
    _, _, steps = watched()
    draw = torch.Generator().manual_seed(1)
    x0, eps = (torch.randn(1, 4, 16, 16, generator=draw) for _ in range(2))
    for step in reversed(steps):
        level = step.row.level
        x, v = level.alpha * x0 + level.sigma * eps, level.alpha * eps - level.sigma * x0
        made = answer.predicted(x, v, level)
        if not isinstance(made, tuple) or len(made) != 2:
            raise Mistake(f"predicted must return x0 and eps, two tensors; got {type(made).__name__}.")
        if level.alpha > 0.01 and off(made[0], (x - level.sigma * v) / level.alpha, "x0") < CLOSE:
            raise Mistake("x0 must be alpha·x − sigma·v; got (x − sigma·v) / alpha, which takes v for eps.")
        for name, got, wanted in (("x0", made[0], x0), ("eps", made[1], eps)):
            if (far := off(got, wanted, name)) > CLOSE:
                hint = "check the sign: v = alpha·eps − sigma·x0" if name == "x0" else "v is not eps: add sigma·x"
                raise Mistake(
                    f"{name} must come back to {CLOSE:g} at alpha {level.alpha:.3f}; off by {far:.3f}; {hint}."
                )


def check_step(answer: ModuleType) -> None:
    """Against every step of the engine."""
    _, _, steps = watched()
    for step in steps:
        here, there, v = step.row.level, step.next_levels[0], velocity(step)
        got = answer.step(step.x, v, here, there)
        far = off(got, step.x_next, "the next x")
        if far < CLOSE:
            continue
        eps = here.sigma * step.x + here.alpha * v
        mistakes = {
            "x0 alone, without the noise of the next level": step.x0,
            "v in the place of eps": there.alpha * step.x0 + there.sigma * v,
            "the level that x has already, not the next one": here.alpha * step.x0 + here.sigma * eps,
            "x0 that is not multiplied by the next alpha": step.x0 + there.sigma * eps,
        }
        found = [name for name, wrong in mistakes.items() if off(got, wrong, "the next x") < CLOSE]
        hint = f"this is what you get with {found[0]}" if found else "it is alpha'·x0 + sigma'·eps, ' at `there`"
        raise Mistake(
            f"the next x must be the engine's to {CLOSE:g} at time {step.row.time:g}; off by {far:.3f}; {hint}."
        )


def check_sample(answer: ModuleType) -> None:
    """The latents of the engine, from the same noise."""
    pipe, made, steps = watched()
    parts = pipe.components
    context = encode_prompts(parts.text_encoders, parts.tokenizers, [PROMPT]).context
    times: list[float] = []

    def network(x: Tensor, time: float) -> Tensor:
        times.append(float(time))
        out: Tensor = parts.network(x, torch.tensor([float(time)]), context)
        return out

    levels = [*(step.row.level for step in steps), made.plan.end]
    with torch.no_grad():
        got = answer.sample(steps[0].x, network, list(made.plan.timesteps), levels)
    if times != list(made.plan.timesteps):
        raise Mistake(
            f"the network must be called at {made.plan.timesteps[:3]}…, once each; "
            f"got {tuple(times[:3])}…, {len(times)} calls; "
            "pass the time, not the number of the step."
        )
    if (far := off(got, made.latents, "the result")) > 1e-2:
        raise Mistake(
            f"the latents must be the engine's to 0.01; off by {far:.3f}; go from levels[i] to levels[i + 1]."
        )


CHECKS: list[Check] = [
    Check("x0 and eps from v", check_predicted),
    Check("one step", check_step),
    Check("a whole run", check_sample),
]

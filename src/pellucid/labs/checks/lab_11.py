"""Lab 11: guidance on a doubled batch, x0 from v, a weighted sum, and the loop for any sampler."""

from __future__ import annotations

import math
from types import ModuleType

import torch
from torch import Tensor

import pellucid
from pellucid.core import oracle
from pellucid.labs.answers import Check, Mistake
from pellucid.labs.checks.tensors import tensor

CLOSE = 1e-6
SAMPLERS = ("ddim", "dpmpp_2m", "dpmpp_3m")


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def same(got: Tensor, wanted: Tensor) -> bool:
    return bool((got - wanted).abs().max() < CLOSE)


def check_guided(answer: ModuleType) -> None:
    uncond, cond = drawn(1, 3, 4, 16, 16), drawn(2, 3, 4, 16, 16)
    for scale in (4.0, 1.0, 0.0):
        wanted = uncond + scale * (cond - uncond)
        got = tensor(answer.guided(torch.cat([uncond, cond]), scale), wanted, "the guided prediction of 3 images")
        if same(got, wanted):
            continue
        hint = "it is uncond + scale·(cond − uncond)"
        if same(got, cond + scale * (uncond - cond)):
            hint = "the halves are swapped: uncond comes first"
        elif same(got, cond + scale * (cond - uncond)):
            hint = "the difference is added to uncond, not to cond: scale 1 must give cond"
        elif same(got, evens(uncond, cond, scale)):
            hint = "the halves are stacked, not interleaved: chunk(2), not [::2]"
        raise Mistake(f"guidance of scale {scale:g} must be right to {CLOSE:g}; got something else; {hint}.")


def evens(uncond: Tensor, cond: Tensor, scale: float) -> Tensor:
    """What comes of taking every second of the batch."""
    both = torch.cat([uncond, cond])
    return both[::2] + scale * (both[1::2] - both[::2])


def check_clean(answer: ModuleType) -> None:
    plan = pellucid.compile_plan("ddim", schedule="cosine", target="v", grid="trailing", steps=8)
    x0, eps = drawn(3, 2, 4, 16, 16), drawn(4, 2, 4, 16, 16)
    for row in plan.rows[::-1]:
        alpha, sigma = row.level.alpha, row.level.sigma
        x, v = alpha * x0 + sigma * eps, alpha * eps - sigma * x0
        got = tensor(answer.clean(x, v, row), x0, "x0")
        if same(got, x0):
            continue
        hint = "it is alpha·x − sigma·v"
        if alpha > 0.01 and same(got, (x - sigma * v) / alpha):
            hint = "this is what you get when v is taken for eps; for v it is alpha·x − sigma·v"
        elif same(got, alpha * x + sigma * v):
            hint = "check the sign: v = alpha·eps − sigma·x0"
        raise Mistake(f"x0 must come back to {CLOSE:g} at σ {sigma:.3f}; got something else; {hint}.")


def check_mixed(answer: ModuleType) -> None:
    registers = {"x": drawn(5, 1, 4, 16, 16), "p0": drawn(6, 1, 4, 16, 16), "p1": drawn(7, 1, 4, 16, 16)}
    before = {name: value.clone() for name, value in registers.items()}
    for parts in ({"x": 0.92, "p0": 0.16, "p1": -0.05}, {"p0": 1.0}, {"x": 1.0, "p1": -0.5}):
        wanted = torch.stack([weight * before[name] for name, weight in parts.items()]).sum(0)
        got = tensor(answer.mixed(parts, registers), wanted, "the sum")
        if any(not torch.equal(registers[name], before[name]) for name in registers):
            raise Mistake("the registers must stay as they are; one was changed in place: make a new tensor.")
        if not same(got, wanted):
            raise Mistake(
                f"the sum of {parts} must be right to {CLOSE:g}; got something else; use only the names given."
            )


def check_loop(answer: ModuleType) -> None:
    """Against our loop, for samplers with no history, with one and with two earlier predictions; each twice."""
    density = oracle.smooth()
    x = drawn(8, 5, 4)
    for name in SAMPLERS:
        plan = pellucid.compile_plan(name, schedule="cosine", target="v", grid="trailing", steps=7)
        levels = {row.time: row.level for row in plan.rows}
        times: list[float] = []

        def network(
            x: Tensor, time: float, levels: dict[float, pellucid.Level] = levels, times: list[float] = times
        ) -> Tensor:
            level = levels.get(float(time))
            if level is None:
                raise Mistake(f"the network must be called at row.time, one of {sorted(levels)[-2:]}…; got {time!r}.")
            times.append(float(time))
            return (level.alpha * x - tensor_of(density(x, level, time))) / level.sigma

        wanted = pellucid.run(plan, density, x * plan.initial_scale, dtype=torch.float64)
        for attempt in ("a first", "a second"):
            times.clear()
            got = tensor(answer.loop(x * plan.initial_scale, plan.rows, network), wanted, "x at the end")
            if len(times) != plan.nfe:
                raise Mistake(f"{name} must call the network {plan.nfe} times, once per row; got {len(times)} calls.")
            far = float((got - wanted).abs().max())
            if not math.isfinite(far) or far > CLOSE * 100:
                hint = "p0 is this call's x0, p1 the one before: put the newest first"
                if attempt == "a second":
                    hint = "the first run was right: the history of a run must be empty at its start"
                elif name == "ddim":
                    hint = "ddim needs no history: call, take x0, sum"
                raise Mistake(f"{attempt} run of {name} must be ours to {CLOSE * 100:g}; off by {far:.3g}; {hint}.")


def tensor_of(found: object) -> Tensor:
    return found if isinstance(found, Tensor) else found.x0  # type: ignore[attr-defined]


CHECKS: list[Check] = [
    Check("guidance on a doubled batch", check_guided),
    Check("x0 from v", check_clean),
    Check("a weighted sum", check_mixed),
    Check("the loop, for three samplers", check_loop),
]

"""What an answer to lab 12 must do."""

from __future__ import annotations

import math
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from pellucid.core import oracle
from pellucid.core.compile import compile_plan
from pellucid.core.loop import run
from pellucid.core.plan import REGISTERS, Plan
from pellucid.core.schedule import Level
from pellucid.labs.answers import Check, Mistake
from pellucid.labs.checks.tensors import diagnosis

STEPS = 6
Row = dict[str, float]


def plan_of(sampler: str) -> Plan:
    return compile_plan(sampler, schedule="linear", grid="trailing", steps=STEPS)


def levels_of(plan: Plan) -> list[tuple[float, float]]:
    """Of every call, and of the end."""
    return [(level.alpha, level.sigma) for level in (*(row.level for row in plan.rows), plan.end)]


def rows_of(plan: Plan) -> list[Row]:
    return [{REGISTERS[register]: weight for register, weight in row.x} for row in plan.rows]


def close(got: Row, wanted: Row) -> bool:
    return all(math.isclose(got.get(k, 0.0), wanted.get(k, 0.0), rel_tol=1e-6, abs_tol=1e-9) for k in {*got, *wanted})


def text(row: Row) -> str:
    return "{" + ", ".join(f"{name}: {weight:.4f}" for name, weight in sorted(row.items())) + "}"


def check_ddim(answer: ModuleType) -> None:
    plan = plan_of("ddim")
    levels = levels_of(plan)
    for i, wanted in enumerate(rows_of(plan)):
        here, after = levels[i], levels[i + 1]
        got = answer.ddim_row(here, after)
        if close(got, wanted):
            continue
        slips = {
            "the weight of p0 as if it were eps": {
                "x": after[0] / here[0],
                "p0": after[1] - here[1] * after[0] / here[0],
            },
            "Euler's row, which is for alpha = 1": euler(here, after),
            "x0 added in full: x holds alpha times x0 already": {"x": after[1] / here[1], "p0": after[0]},
        }
        hint = diagnosis(slips, partial(close, got), "where does x0 + noise land?")
        raise Mistake(f"row {i} of DDIM must be {text(wanted)}; got {text(got)}: {hint}.")


def euler(here: tuple[float, float], after: tuple[float, float]) -> Row:
    """Euler's row between the same levels, in the frame where alpha is 1."""
    ratio = after[1] / after[0] / (here[1] / here[0])
    return {"x": ratio, "p0": 1 - ratio}


def check_dpmpp(answer: ModuleType) -> None:
    plan = plan_of("dpmpp_2m")
    levels, rows = levels_of(plan), rows_of(plan)
    for i in range(1, STEPS - 1):
        got = answer.dpmpp_2m_row(levels[i - 1], levels[i], levels[i + 1])
        if close(got, rows[i]):
            continue
        base, full = rows_of(plan_of("ddim"))[i], rows[i]["p1"]
        slips = {
            "DDIM's row: p1 is not used": {**base},
            "the other sign of the correction": {**base, "p0": base["p0"] + full, "p1": -full},
            "a correction that is twice as large: the step is divided by 2·h_before": {
                **base,
                "p0": base["p0"] - 2 * full,
                "p1": 2 * full,
            },
        }
        hint = diagnosis(slips, partial(close, got), "D goes in the place of p0")
        raise Mistake(f"row {i} of DPM++ 2M must be {text(rows[i])}; got {text(got)}: {hint}.")


def check_ancestral(answer: ModuleType) -> None:
    plan = plan_of("euler_a")
    levels, rows = levels_of(plan), rows_of(plan)
    for i, wanted in enumerate(rows):
        sigma, after = levels[i][1], levels[i + 1][1]
        got = answer.ancestral_row(sigma, after)
        if close(got, wanted):
            continue
        noise = math.hypot(got.get("x", 0.0) * sigma, got.get("z", 0.0))
        raise Mistake(
            f"row {i} of Euler a must be {text(wanted)}; got {text(got)}. Its noise comes to {noise:.4f} and the "
            f"next level is {after:.4f}: Euler goes down to sigma_down, and only then is noise added."
        )


def check_run(answer: ModuleType) -> None:
    mixture = oracle.smooth()
    noise = torch.randn(16, 4, generator=torch.Generator().manual_seed(12), dtype=torch.float64)

    def denoise(x: Tensor, level: tuple[float, float]) -> Tensor:
        return mixture(x, Level(*level))

    for sampler in ("ddim", "dpmpp_2m", "dpmpp_3m"):
        plan = plan_of(sampler)
        start = noise * plan.initial_scale
        kept = start.clone()
        got, wanted = answer.run(rows_of(plan), levels_of(plan), start, denoise), run(plan, mixture, start)
        if not torch.equal(start, kept):
            raise Mistake("run changed the tensor that it was given; make a new x in each row.")
        apart = float((got - wanted).abs().max())
        if not apart < 1e-9:
            raise Mistake(
                f"{sampler} must end where the engine ends, to 1e-9; got {apart:.2g} apart. Is p1 the prediction of "
                "the call before, and is p0 asked for at the level of its own row?"
            )


CHECKS = [
    Check("a row of DDIM", check_ddim),
    Check("a row of DPM++ 2M", check_dpmpp),
    Check("a row of Euler a", check_ancestral),
    Check("the loop over a table", check_run),
]

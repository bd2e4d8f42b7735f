"""Samplers by the names that flow models know them by."""

from __future__ import annotations

from pellucid.core.grid import Path
from pellucid.core.plan import P0, Z, row
from pellucid.core.samplers.euler import heun
from pellucid.core.samplers.registry import Draft, sampler
from pellucid.core.samplers.steps import first_order, span


@sampler(
    name="flow_euler",
    title="Flow Euler",
    family="flow",
    order=1,
    deterministic=True,
    suits="rectified-flow models (SD3, FLUX) at 20 to 50 steps; 1 to 4 when distilled, with stochastic=True",
    paper="Liu et al. 2022, Rectified Flow; Esser et al. 2024",
    frame="line",
    peer="flow",
    aliases=("FlowMatchEulerDiscreteScheduler", "rectified_flow_euler"),
)
def flow_euler(path: Path, *, stochastic: bool = False) -> Draft:
    """Euler along the flow; `stochastic` goes to x0 and takes fresh noise, as distilled models want."""
    rows = []
    for leg in path.legs:
        if stochastic:
            form = P0 * leg.end.alpha + Z * leg.end.sigma
            rows.append(row(leg.time, leg.start, form, span=span(leg.start, leg.end)))
        else:
            rows.append(row(leg.time, leg.start, first_order(leg.start, leg.end)))
    return Draft(rows)


@sampler(
    name="flow_heun",
    title="Flow Heun",
    family="flow",
    order=2,
    deterministic=True,
    suits="rectified-flow models where accuracy matters; two calls per step",
    paper="Karras et al. 2022, alg. 1, along the flow",
    frame="line",
    straight=True,
    calls=2,
    peer="flow",
    aliases=("FlowMatchHeunDiscreteScheduler",),
)
def flow_heun(path: Path) -> Draft:
    """The trapezoid rule along the flow."""
    return heun(path)

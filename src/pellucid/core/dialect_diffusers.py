"""The diffusers dialect: how each of its scheduler classes lays the grid, rounds, starts and stops.

What is reproduced here, defects included, was read off diffusers 0.42.1 and is compared with it in tests/parity.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from pellucid.core import grid as grids
from pellucid.core.errors import PlanError, nearest, rule
from pellucid.core.grid import Grid, Leg, Path, Setup
from pellucid.core.plan import Plan, Row
from pellucid.core.samplers.registry import Sampler
from pellucid.core.schedule import EDM, Array, DiscreteVP, Flow, Level, Schedule, Target, in_frame

SPACINGS = ("leading", "linspace", "trailing")
_RULES = ("karras", "exponential", "beta", "lu")
# The spacing that each diffusers class has by default.
SPACING = {"training": "leading", "k": "linspace", "solver": "linspace"}
ZERO_SNR_RATIO = math.sqrt((1 - 2.0**-24) / 2.0**-24)  # diffusers never lets sigma be infinite
PREVIOUS = "diffusers' previous timestep is t − T // N, not the next call's (scheduling_ddim.py, `step`)"
COUNTED = (
    "calls are counted from 0 wherever a run starts, which leaves x noisier than it is taken for (scheduling_pndm.py)"
)
_REPEATED = "the last sigma is repeated, so the last step does nothing (scheduling_deis_multistep.py, `set_timesteps`)"


def as_diffusers(
    sampler: Sampler,
    schedule: Schedule,
    grid: Grid,
    steps: int | None,
    target: Target,
    options: dict[str, Any],
) -> Setup:
    """Dispatch on how the diffusers class of this sampler lays its grid."""
    if grid.name == "explicit":
        grids.explicit(schedule, grid, steps)  # refuses what is not finite or does not decrease
    if isinstance(schedule, EDM):
        return _diffusers_edm(sampler, schedule, grid, steps, options)
    if isinstance(schedule, Flow) and sampler.peer in ("flow", "solver"):
        return _diffusers_flow(sampler, schedule, grid, steps, options)
    if sampler.peer == "ipndm":
        return _diffusers_ipndm(schedule, grids.check_steps(steps))
    if not isinstance(schedule, DiscreteVP) or sampler.peer not in SPACING:
        raise PlanError(
            f"sampler must be one that diffusers has for schedule {schedule.name}; got {sampler.name!r}. "
            "Use the exact dialect.",
            "dialect",
        )
    lay = {"k": _diffusers_k, "solver": _diffusers_solver, "training": _diffusers_training}[sampler.peer]
    return lay(sampler, schedule, grid, steps, target, options)


def discards_noise(plan: Plan, row: Row) -> bool:
    """Whether diffusers' class draws noise at this row and gives it no weight: its generator moves all the same."""
    if plan.dialect != "diffusers" or row.draws:
        return False
    options = plan.options
    if plan.name == "ddpm":
        return row.time > 0
    return (
        plan.name in ("euler_a", "sa_solver", "dpmpp_2m_sde", "dpmpp_3m_sde")
        or (plan.name == "ddim" and options.get("eta", 0.0) > 0)
        or (plan.name == "flow_euler" and bool(options.get("stochastic")))
        or (plan.name in ("dpm_multistep", "dpm_singlestep") and str(options.get("algorithm")).startswith("sde"))
    )


def _spacing_of(grid: Grid, peer: str) -> str:
    found = grid.name if grid.name in SPACINGS else grid.spacing or SPACING[peer]
    if found not in SPACINGS:
        raise PlanError(rule("spacing", "leading, linspace or trailing in the diffusers dialect", found), "dialect")
    return found


def _rule_of(grid: Grid) -> str | None:
    if grid.name in (*SPACINGS, "explicit"):
        return None
    if grid.name not in _RULES:
        raise PlanError(rule("grid", "one that diffusers has", grid.name, nearest(grid.name, _RULES)), "dialect")
    return grid.name


def _spread(rule_name: str, grid: Grid, low: float, high: float, count: int) -> Array:
    """Sigmas by a rule between two ends, as diffusers converts them."""
    low = low if grid.sigma_min is None else grid.sigma_min
    high = high if grid.sigma_max is None else grid.sigma_max
    if rule_name == "karras":
        return grids.karras(count, low, high, 7.0)
    if rule_name == "beta":
        return low + grids.beta_quantile(1.0 - np.linspace(0, 1, count), 0.6, 0.6) * (high - low)
    return grids.exponential(count, low, high, 1.0)


def finite_table(schedule: DiscreteVP) -> Array:
    return np.where(np.isinf(schedule.ratios), ZERO_SNR_RATIO, schedule.ratios)


def _sigma_to_time(table: Array) -> Callable[[Any], Any]:
    logs = np.log(table)

    def time_at(ratio: Any) -> Any:
        found = np.interp(np.log(np.maximum(ratio, 1e-10)), logs, np.arange(len(logs)))
        whole = np.round(found)
        return np.where(np.abs(found - whole) < 1e-9, whole, found)  # the ends of a rule are whole except for rounding

    return time_at


def _diffusers_k(
    sampler: Sampler, schedule: DiscreteVP, grid: Grid, steps: int | None, target: Target, options: dict[str, Any]
) -> Setup:
    """Euler, Heun, LMS, DPM2 …: fractional times, sigma interpolated linearly, sigma rules between the spaced ends."""
    table = finite_table(schedule)
    to_time = _sigma_to_time(table)
    final = 0.0 if grid.final == "zero" else float(table[0])
    if grid.sigmas is not None:
        ratios = np.asarray(grid.sigmas, np.float64)
        ratios, final = ratios[:-1], float(ratios[-1])
        times = to_time(ratios)
        spacing = "linspace" if grid.spacing is None else grid.spacing
    else:
        times, spacing = _k_times(schedule, grid, steps)
        ratios = np.interp(times, np.arange(len(table)), table)
        rule_name = _rule_of(grid)
        if rule_name is not None:
            ratios = _spread(rule_name, grid, float(ratios[-1]), float(ratios[0]), len(ratios))
            times = to_time(ratios)
            if rule_name == "karras" and sampler.name in ("dpm2", "dpm2_a"):
                times = np.round(times)
    ends = np.append(ratios[1:], final)
    path = grids.build(schedule, "ve", times, ratios, ends, lambda r: float(to_time(r)))
    top = float(np.max(ratios))
    scale = top if spacing in ("linspace", "trailing") else math.hypot(top, 1.0)
    null = "levels repeat" if np.any(ends >= ratios) else ""
    return Setup(path, scale, declared=null)


def _k_times(schedule: DiscreteVP, grid: Grid, steps: int | None) -> tuple[Array, str]:
    total = schedule.num_train
    spacing = _spacing_of(grid, "k")
    if grid.timesteps is not None:
        return np.asarray(grid.timesteps, np.float64), spacing
    count = grids.check_steps(steps)
    if spacing == "linspace":
        return np.linspace(0, total - 1, count)[::-1].copy(), spacing
    if spacing == "leading":
        return np.arange(count)[::-1] * float(total // count) + grid.offset, spacing
    return np.round(np.arange(total, 0, -total / count)) - 1.0, spacing


def _diffusers_solver(
    sampler: Sampler, schedule: DiscreteVP, grid: Grid, steps: int | None, target: Target, options: dict[str, Any]
) -> Setup:
    """DPM-Solver, UniPC, DEIS, SA-Solver: N + 1 points of which the last is dropped, whole times."""
    table = finite_table(schedule)
    to_time = _sigma_to_time(table)
    rule_name = _rule_of(grid)
    repeats = sampler.name in ("deis", "sa_solver")
    if rule_name is not None:
        count = grids.check_steps(steps)
        ratios = _spread(rule_name, grid, float(table[0]), float(table[-1]), count)
        times = to_time(ratios)
        rounds = rule_name in ("karras", "lu")
        if rounds and (schedule.kind != "cosine" or sampler.name not in ("dpm_multistep", *_MULTISTEP)):
            times = np.round(times)
        times = np.trunc(times)
    else:
        times = _solver_times(sampler, schedule, grid, steps)
        ratios = np.interp(times, np.arange(len(table)), table)
    final, declared = 0.0, ""
    if repeats or grid.final == "sigma_min":
        final = float(ratios[-1]) if rule_name is not None and (repeats or sampler.name == "unipc") else float(table[0])
    ends = np.append(ratios[1:], final)
    if np.any(ends >= ratios):
        declared = _REPEATED
    path = grids.build(schedule, "vp", times, ratios, ends, lambda r: float(to_time(r)))
    return Setup(path, 1.0, _solver_options(sampler, len(ratios), options, schedule.num_train), declared)


# `multistep_dpm_solver_third_order_update` of scheduling_dpmsolver_multistep.py: D2 is half of the second derivative.
_HALF_CURVATURE = 0.5
_MULTISTEP = ("dpmpp_2m", "dpmpp_3m", "dpmpp_2m_sde", "dpmpp_3m_sde")


def _solver_options(sampler: Sampler, count: int, options: dict[str, Any], train: float = 1000.0) -> dict[str, Any]:
    """What the diffusers class does by itself: low orders at the end of short runs, its third-order SDE sign."""
    extra: dict[str, Any] = {}
    known = sampler.options()
    if "lower_order_final" in known and sampler.name != "dpm_singlestep":
        asked = bool(options.get("lower_order_final", True))
        extra["lower_order_final"] = asked and (count < 15 or sampler.name in ("unipc", "sa_solver"))
    if sampler.name == "sa_solver":
        extra["tau_range"] = (200.0 / train, 800.0 / train)
    if "curvature_scale" in known:
        extra["curvature_scale"] = _HALF_CURVATURE
    stochastic = options.get("algorithm") == "sde-dpmsolver++" or sampler.name == "dpmpp_3m_sde"
    if "curvature_sign" in known and stochastic:
        extra["curvature_sign"] = -1.0
    return extra


def _solver_times(sampler: Sampler, schedule: DiscreteVP, grid: Grid, steps: int | None) -> Array:
    total = schedule.num_train
    if grid.timesteps is not None:
        return np.asarray(grid.timesteps, np.float64)
    count = grids.check_steps(steps)
    spacing = "linspace" if sampler.name == "dpm_singlestep" else _spacing_of(grid, "solver")
    if spacing == "linspace":
        return np.round(np.linspace(0, total - 1, count + 1))[::-1][:-1].copy()
    if spacing == "leading":
        return (np.arange(count + 1) * float(total // (count + 1)))[::-1][:-1] + grid.offset
    return np.round(np.arange(total, 0, -total / count)) - 1.0


def _diffusers_training(
    sampler: Sampler, schedule: DiscreteVP, grid: Grid, steps: int | None, target: Target, options: dict[str, Any]
) -> Setup:
    """DDPM, DDIM, PNDM, LCM, TCD: whole training times, levels straight from the table."""
    total = schedule.num_train
    if grid.timesteps is not None:
        times = np.asarray(grid.timesteps, np.float64)
    else:
        times = _training_times(sampler, schedule, grid, grids.check_steps(steps))
    clean = 0.0 if grid.final == "zero" else float(schedule.ratios[0])
    ratios = [_in_table(schedule, t, clean) for t in times]
    stride = total // len(times)
    if sampler.name == "ddim_inversion":
        comes = times - stride if grid.timesteps is None else np.append(times[1:], -1.0)
        return _inverse_setup(schedule, times, comes, clean)
    if sampler.name in ("pndm", "plms"):
        return _pndm_setup(sampler, schedule, times, stride, clean, target)
    declared, extra = "", {}
    if sampler.name == "ddim" and grid.timesteps is None:
        ends = [_in_table(schedule, t - stride, clean) for t in times]
        declared = PREVIOUS if not np.allclose(times[:-1] - stride, times[1:]) else ""
    else:
        ends = [*ratios[1:], clean if sampler.name == "ddim" else 0.0]
    if sampler.name == "ddpm" and options.get("variance") == "large":
        extra["noise_at_end"] = bool(times[-1] > 0)
    if sampler.name == "tcd":
        extra["round_times"] = True
    return Setup(grids.build(schedule, "vp", times, ratios, ends), 1.0, extra, declared)


def _training_times(sampler: Sampler, schedule: DiscreteVP, grid: Grid, count: int) -> Array:
    total = schedule.num_train
    if sampler.name in ("lcm", "tcd"):
        return grids.distilled(count, total, grid.original)
    if count > total:
        raise PlanError(rule("steps", f"at most {total} in the diffusers dialect", count), "steps")
    spacing = _spacing_of(grid, "training")
    if spacing == "linspace":
        return np.round(np.linspace(0, total - 1, count))[::-1].copy()
    if spacing == "leading":
        times = np.arange(count)[::-1] * float(total // count) + grid.offset
        if times[0] > total - 1:
            raise PlanError(
                rule(
                    "offset",
                    f"one that keeps {count} steps below {total}",
                    grid.offset,
                    "diffusers raises here too.",
                ),
                "offset",
            )
        return times
    return np.round(np.arange(total, 0, -total / count)) - 1.0


def _in_table(schedule: DiscreteVP, time: float, clean: float) -> float:
    return clean if time < 0 else float(schedule.ratios[int(min(time, schedule.num_train - 1))])


def _inverse_setup(schedule: DiscreteVP, times: Array, comes: Array, clean: float) -> Setup:
    """DDIM inversion: each row goes from t − T // N (or the next lower time) up to t, the network's time."""
    goes = [_in_table(schedule, t, clean) for t in times]
    starts = [_in_table(schedule, t, clean) for t in comes]
    declared = "" if np.allclose(comes[:-1], times[1:]) else PREVIOUS
    return Setup(grids.build(schedule, "vp", times, goes, starts), 1.0, {}, declared)


def _pndm_setup(
    sampler: Sampler, schedule: DiscreteVP, times: Array, stride: int, clean: float, target: Target, skip: int = 0
) -> Setup:
    """PNDM and PLMS, a leg for each call: it goes from t to t − T // N whatever the next call is.

    diffusers counts the calls from 0 wherever a run starts, so a late start too does its first leg twice, or goes
    through twelve Runge-Kutta calls from the levels of the whole run.
    """

    def level(t: float) -> Any:
        return in_frame(_in_table(schedule, t, clean), "vp")

    even, half = bool(np.allclose(times[:-1] - stride, times[1:])), stride // 2
    if sampler.name == "plms":
        called = np.insert(times, 1, times[1:2])
        goals = called - stride
        goals[skip + 1 : skip + 2] += stride
        bases = called[skip + 1 : skip + 2] + stride
    else:
        if len(times) < 4:
            raise PlanError(
                rule("steps", "at least 4 for pndm in the diffusers dialect", len(times), "Use plms."),
                "steps",
            )
        middles = times[1:4] + half
        first = np.stack([times[:3], middles, middles, times[1:4]], axis=1).ravel()
        called = np.append(first, times[3:])
        goals, early = called - stride, slice(skip, skip + len(first))
        goals[early] = called[early] - np.where(np.arange(len(called[early])) % 2, 0, half)
        bases, even = times[:3], even and stride % 2 == 0
    legs = tuple(Leg(float(t), level(t), level(goal)) for t, goal in zip(called[skip:], goals[skip:], strict=True))
    path = Path(legs, "vp", schedule, lambda r: float(schedule.time_at(r)))
    extra = {"basis": "v" if target == "v" else "eps", "bases": tuple(level(t) for t in bases)}
    late = partial(_pndm_setup, sampler, schedule, times, stride, clean, target)
    return Setup(path, 1.0, extra, COUNTED if skip else "" if even else PREVIOUS, len(times), late)


def start_late(sampler: Sampler, setup: Setup, skip: int) -> Setup:
    """What the class keeps of the whole run when a pipeline begins with a later call (image-to-image)."""
    legs = setup.path.legs
    kept: dict[str, Any] = {}
    if sampler.name == "lms":
        kept["earlier"] = tuple(leg.start.sigma for leg in legs[:skip])
    elif sampler.name == "dpm_singlestep":
        kept["skipped"] = skip
    return replace(setup, path=replace(setup.path, legs=legs[skip:]), options={**setup.options, **kept})


def known_level(plan: Plan, i: int) -> Level:
    """The level that diffusers' `add_noise` has for call i: between two steps, that of the next step."""
    between = plan.dialect == "diffusers" and plan.name in ("dpm2", "dpmpp_sde") and i % 2 == 1
    return plan.rows[min(i + between, len(plan.rows) - 1)].level


def _diffusers_edm(sampler: Sampler, schedule: EDM, grid: Grid, steps: int | None, options: dict[str, Any]) -> Setup:
    """EDMEuler, EDMDPMSolverMultistep: karras or exponential sigmas; the first noise is √(sigma_max² + 1)."""
    path = grids.make_path(schedule, replace(grid, final="zero"), steps, "ve")
    legs = path.legs
    if len(legs) == 1 and grid.name == "exponential":  # torch.linspace of one point gives the low end
        legs = (Leg(float(schedule.time_at(schedule.sigma_min)), in_frame(schedule.sigma_min, "ve"), legs[0].end),)
    if grid.final == "sigma_min":  # the last sigma again, or the schedule's least: one and the same but in one step
        last = in_frame(schedule.sigma_min, "ve") if sampler.peer == "solver" else legs[-1].start
        legs = (*legs[:-1], replace(legs[-1], end=last))
    declared = _REPEATED if grid.final == "sigma_min" else ""
    extra = _solver_options(sampler, len(legs), options) if sampler.peer == "solver" else {}
    top = schedule.sigma_max if grid.spacing in ("linspace", "trailing") else math.hypot(schedule.sigma_max, 1.0)
    return Setup(replace(path, legs=legs), top, extra, declared)


def _diffusers_flow(sampler: Sampler, schedule: Flow, grid: Grid, steps: int | None, options: dict[str, Any]) -> Setup:
    """FlowMatchEuler and Heun: the ends of the grid are shifted already, and the grid is shifted again."""
    if sampler.peer == "solver":
        return _diffusers_flow_solver(sampler, schedule, grid, grids.check_steps(steps), options)
    if grid.sigmas is not None:
        sigmas = np.asarray(grid.sigmas, np.float64)
        sigmas = schedule.bend(sigmas[:-1] if sigmas[-1] == 0 else sigmas)
    else:
        low = float(schedule.bend(schedule.sigma_min))
        sigmas = schedule.bend(np.linspace(1.0, low, grids.check_steps(steps)))
    sigmas = schedule.stretch(sigmas)
    rule_name = _rule_of(grid)
    if rule_name is not None:
        sigmas = _spread(rule_name, grid, float(sigmas[-1]), float(sigmas[0]), len(sigmas))
    ratios = schedule.ratio_of_sigma(sigmas)
    return Setup(grids.build(schedule, "flow", sigmas * schedule.scale, ratios, np.append(ratios[1:], 0.0)), 1.0)


def _diffusers_flow_solver(sampler: Sampler, schedule: Flow, grid: Grid, count: int, options: dict[str, Any]) -> Setup:
    """`use_flow_sigmas` of the solver classes: N + 1 points; times are cut to whole numbers."""
    least = schedule.sigma_min
    if sampler.name == "unipc":
        sigmas = schedule.stretch(schedule.bend(np.linspace(1.0, least, count + 1)[:-1]))
        sigmas[0] -= 1e-6 if abs(sigmas[0] - 1.0) < 1e-6 else 0.0
    else:
        sigmas = schedule.bend(1.0 - np.linspace(1.0, least, count + 1))[::-1][:-1].copy()
    repeats = sampler.name in ("deis", "sa_solver")
    ratios = schedule.ratio_of_sigma(sigmas)
    ends = np.append(ratios[1:], ratios[-1] if repeats else 0.0)
    path = grids.build(schedule, "flow", np.trunc(sigmas * schedule.scale), ratios, ends)
    return Setup(path, 1.0, _solver_options(sampler, count, options), _REPEATED if repeats else "")


def _diffusers_ipndm(schedule: Schedule, steps: int) -> Setup:
    """IPNDM has its own schedule, sigma = sin²(πu/2), and starts at alpha 0 where it takes x0 as 0."""
    sigma = np.sin(np.linspace(1.0, 0.0, steps + 1) * math.pi / 2) ** 2
    alpha = np.sqrt(1.0 - sigma**2)
    ratios = np.where(alpha > 0, sigma / np.where(alpha > 0, alpha, 1.0), np.inf)
    times = np.arctan2(sigma, alpha) / (math.pi / 2)
    path = grids.build(schedule, "vp", times[:-1], ratios[:-1], ratios[1:])
    return Setup(path, 1.0, {"blind_start": True})

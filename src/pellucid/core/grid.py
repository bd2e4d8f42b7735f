"""Grids: where a run calls the model. A grid and a schedule give a path of legs, each from one level to the next.

Times stay fractional. Grids over time (leading, linspace, trailing, …) walk the training time; grids over sigma
(karras, exponential, …) walk sigma between the ends of the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from pellucid.core.errors import PlanError, nearest, rule
from pellucid.core.reader import hints_of, typed
from pellucid.core.schedule import Array, Flow, Frame, Level, Schedule, in_frame

MAX_STEPS = 10_000
Final = Literal["zero", "sigma_min"]


@dataclass(frozen=True, slots=True)
class Leg:
    """One step of the path: x is at `start` and goes to `end`; `time` is passed to the network."""

    time: float
    start: Level
    end: Level

    @property
    def h(self) -> float:
        """The step in λ; infinite to a clean x and from pure noise."""
        return self.end.lam - self.start.lam


@dataclass(frozen=True)
class Path:
    """What a sampler walks. `time_at` gives the time for the network at any sigma / alpha between the legs."""

    legs: tuple[Leg, ...]
    frame: Frame
    schedule: Schedule
    time_at: Callable[[float], float]

    def level(self, ratio: float) -> Level:
        return in_frame(ratio, self.frame)

    def at_time(self, time: float) -> Level:
        return in_frame(float(self.schedule.ratio_at(time)), self.frame)

    def between(self, a: Level, b: Level, part: float) -> Level:
        """The level `part` of the way from a to b in λ; from pure noise, where λ is infinite, in the flow's sigma."""
        if part == 0.0:
            return a
        if math.isinf(a.ratio):
            alpha = part * b.to("flow").alpha
            return self.level((1.0 - alpha) / alpha)
        return self.level(a.ratio ** (1.0 - part) * b.ratio**part)


@dataclass(frozen=True)
class Setup:
    """What a dialect decides before a sampler writes its rows."""

    path: Path
    initial_scale: float
    options: dict[str, Any] = field(default_factory=dict)
    declared: str = ""
    steps: int | None = None  # where a leg is a call, and not a step
    late: Callable[[int], Setup] | None = None  # the same from a later leg, where that is not just fewer legs


@dataclass(frozen=True)
class Grid:
    """A named grid and its parameters. `spacing` sets the range that a sigma rule spans in the diffusers dialect."""

    name: str = "trailing"
    final: Final = "zero"
    rho: float | None = None
    sigma_min: float | None = None
    sigma_max: float | None = None
    timesteps: tuple[float, ...] | None = None
    sigmas: tuple[float, ...] | None = None
    offset: float = 0.0
    start: float | None = None
    spacing: str | None = None
    original: int = 50

    def to_dict(self) -> dict[str, Any]:
        default = Grid()
        changed = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: v for k, v in changed.items() if k == "name" or v != getattr(default, k)}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Grid:
        """A grid from its fields, of which each has its type."""
        return Grid(**{key: Grid.check(key, value) for key, value in data.items()})

    @staticmethod
    def check(key: str, value: Any) -> Any:
        """The value of one field, typed."""
        hints = hints_of(Grid)
        if key not in hints:
            raise PlanError(rule("grid", f"made of {', '.join(hints)}", key), "grid")
        return typed(hints[key], value, f"grid.{key}", (-1e12, 1e12), "grid")


# (count, low, high, unit of time or rho) → the points, noisiest first
_Rule = Callable[[int, float, float, float], Array]


def _pitch(count: int, low: float, high: float, unit: float) -> float:
    """The distance of `count` evenly spread times; beyond one step a training time, the ends are kept."""
    return unit / count if count * (unit - (high - low)) <= unit else (high - low) / max(count - 1, 1)


def _leading(count: int, low: float, high: float, unit: float) -> Array:
    return low + np.arange(count)[::-1] * _pitch(count, low, high, unit)


def linspace(count: int, low: float, high: float, unit: float) -> Array:
    return np.linspace(high, low, count)


def _trailing(count: int, low: float, high: float, unit: float) -> Array:
    return high - np.arange(count) * _pitch(count, low, high, unit)


def _sgm_uniform(count: int, low: float, high: float, unit: float) -> Array:
    return np.linspace(high, low, count + 1)[:-1]


def _quadratic(count: int, low: float, high: float, unit: float) -> Array:
    """Times whose roots are even (Song et al. 2020, appendix D.3); they start at 0.8 of the range."""
    return low + np.linspace(math.sqrt(0.8 * (high - low)), 0.0, count) ** 2


def _beta_times(count: int, low: float, high: float, unit: float) -> Array:
    """Times at the quantiles of Beta(0.6, 0.6): dense at both ends (Lee et al. 2024)."""
    return low + beta_quantile(1.0 - np.arange(count) / max(count - 1, 1), 0.6, 0.6) * (high - low)


def karras(count: int, low: float, high: float, rho: float) -> Array:
    """Even in sigma^(1/rho) (Karras et al. 2022, eq. 5)."""
    ramp = np.linspace(0.0, 1.0, count)
    return (high ** (1 / rho) + ramp * (low ** (1 / rho) - high ** (1 / rho))) ** rho


def exponential(count: int, low: float, high: float, rho: float) -> Array:
    """Even in log sigma, which is even in λ."""
    return np.exp(np.linspace(math.log(high), math.log(low), count))


def _polyexponential(count: int, low: float, high: float, rho: float) -> Array:
    ramp = np.linspace(1.0, 0.0, count) ** rho
    return np.exp(ramp * (math.log(high) - math.log(low)) + math.log(low))


def _kl_optimal(count: int, low: float, high: float, rho: float) -> Array:
    """Even in atan sigma (Sabour et al. 2024, theorem 3.1)."""
    ramp = np.linspace(0.0, 1.0, count)
    to_pure = ramp * math.atan2(1.0, low) + (1.0 - ramp) * math.atan2(1.0, high)  # exact where sigma is huge
    return 1.0 / np.tan(to_pure)


def linear_quadratic(count: int, low: float, high: float, rho: float) -> Array:
    """sigma falls linearly to 1 − rho of the top in half of the steps, then as the parabola that joins smoothly
    and would reach 0 one step later (Polyak et al. 2024)."""
    half = count // 2
    if half == 0:
        return np.array([high])
    i = np.arange(count, dtype=np.float64)
    slope = rho / half
    bend = (1.0 - rho - slope * (count - half)) / (count - half) ** 2
    fallen = np.where(i < half, slope * i, rho + slope * (i - half) + bend * (i - half) ** 2)
    return high * (1.0 - fallen)


# sigmas published with Align Your Steps (Sabour et al. 2024), ten steps; other counts interpolate log sigma.
AYS: dict[str, tuple[float, ...]] = {
    "ays": (14.615, 6.475, 3.861, 2.697, 1.886, 1.396, 0.963, 0.652, 0.399, 0.152, 0.029),
    "ays_sdxl": (14.615, 6.315, 3.771, 2.181, 1.342, 0.862, 0.555, 0.380, 0.234, 0.113, 0.029),
    "ays_svd": (700.0, 54.5, 15.886, 7.977, 4.248, 1.789, 0.981, 0.403, 0.173, 0.034, 0.02),
}

OVER_TIME: dict[str, _Rule] = {
    "leading": _leading,
    "linspace": linspace,
    "trailing": _trailing,
    "simple": _trailing,
    "sgm_uniform": _sgm_uniform,
    "quadratic": _quadratic,
    "beta": _beta_times,
}
OVER_SIGMA: dict[str, tuple[_Rule, float]] = {
    "karras": (karras, 7.0),
    "exponential": (exponential, 1.0),
    "lu": (exponential, 1.0),
    "polyexponential": (_polyexponential, 1.0),
    "kl_optimal": (_kl_optimal, 1.0),
    "linear_quadratic": (linear_quadratic, 0.025),
}
_ALIASES = {
    "normal": "linspace",
    "uniform": "linspace",
    "log": "exponential",
    "lu_lambdas": "lu",
    "polyexp": "polyexponential",
    "ays_sd15": "ays",
    "align_your_steps": "ays",
    "ddim_uniform": "leading",
    "quad": "quadratic",
}


def distilled(count: int, num_train: int, original: int) -> Array:
    """`count` of the `original` times that a consistency model was distilled on (Luo et al. 2023, alg. 3)."""
    if not 1 <= original <= num_train or count > original:
        raise PlanError(rule("steps", f"at most the {original} times of the distillation", count), "steps")
    known = np.arange(1, original + 1)[::-1] * (num_train // original) - 1.0
    return known[np.floor(np.linspace(0, original, count, endpoint=False)).astype(np.int64)]


def names() -> tuple[str, ...]:
    return (*OVER_TIME, *OVER_SIGMA, *AYS, "lcm", "explicit")


def named(grid: str | Grid) -> Grid:
    """A grid from its name, checked."""
    made = Grid(name=grid) if isinstance(grid, str) else grid
    key = _ALIASES.get(made.name, made.name)
    if made.timesteps is not None or made.sigmas is not None:
        key = "explicit"
    if key not in names():
        raise PlanError(
            rule("grid", "a known name", made.name, nearest(made.name, [*names(), *_ALIASES])), "unknown-grid"
        )
    if made.final not in ("zero", "sigma_min"):
        raise PlanError(rule("final", "zero or sigma_min", made.final), "final")
    for option in ("rho", "sigma_min", "sigma_max"):
        value = getattr(made, option)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise PlanError(rule(option, "a positive number", value), "rho" if option == "rho" else "sigmas")
    return replace(made, name=key)


def check_steps(steps: object) -> int:
    if isinstance(steps, bool) or not isinstance(steps, (int, np.integer)) or not 1 <= steps <= MAX_STEPS:
        raise PlanError(rule("steps", f"a whole number from 1 to {MAX_STEPS}", steps), "steps")
    return int(steps)


def make_path(schedule: Schedule, grid: Grid, steps: int | None, frame: Frame) -> Path:
    """The exact path: fractional times, levels straight from the schedule."""
    ratios, times = points(schedule, grid, steps)
    own = grid.sigma_min if grid.name in OVER_SIGMA else None
    last = schedule.ratio_at(schedule.span[0]) if own is None else schedule.ratio_of_sigma(own)
    if grid.name == "explicit" and ratios[-1] == 0.0:
        ends = ratios[1:]
        ratios, times = ratios[:-1], times[:-1]
    elif grid.final == "zero":
        ends = np.append(ratios[1:], 0.0)
    elif ratios[-1] > last * (1 + 1e-9):
        ends = np.append(ratios[1:], last)
    else:  # the grid stops at the least noise already: one point more, and its last one is the end
        more, more_times = points(schedule, grid, len(ratios) + 1)
        ratios, times, ends = more[:-1], more_times[:-1], more[1:]
    return build(schedule, frame, times, ratios, ends)


def build(
    schedule: Schedule,
    frame: Frame,
    times: Sequence[float] | Array,
    starts: Sequence[float] | Array,
    ends: Sequence[float] | Array,
    time_at: Callable[[float], float] | None = None,
) -> Path:
    """A path from parallel lists of times and of sigma / alpha at both ends of each leg."""
    legs = tuple(
        Leg(float(t), in_frame(float(a), frame), in_frame(float(b), frame))
        for t, a, b in zip(times, starts, ends, strict=True)
    )
    return Path(legs, frame, schedule, time_at or (lambda ratio: float(schedule.time_at(ratio))))


def cut(path: Path, start: float | None, end: float | None) -> Path:
    """The part of a path between two training times, exactly: legs outside go, the two at the ends are shortened.

    A piece less than half as long as its neighbour joins it, so that no model call is spent on a sliver.
    """
    low, high = path.schedule.span
    first = high if start is None else start
    last = low if end is None else end
    if not low <= last < first <= high:
        raise PlanError(rule("between", f"two times, {high:g} ≥ start > end ≥ {low:g}", (start, end)), "between")
    stops = [float(path.schedule.time_at(leg.start.ratio)) for leg in path.legs]
    final = path.legs[-1].end
    stops.append(low if final.ratio == 0.0 else float(path.schedule.time_at(final.ratio)))
    kept = [t for t in stops[1:-1] if last < t < first]
    begin = stops[0] if start is None else first
    finish = stops[-1] if end is None else last
    if start is not None and kept and begin - kept[0] < 0.5 * (kept[0] - [*kept[1:], finish][0]):
        kept = kept[1:]
    if end is not None and kept and kept[-1] - finish < 0.5 * ([begin, *kept[:-1]][-1] - kept[-1]):
        kept = kept[:-1]
    at = dict(zip(stops, [*(leg.start for leg in path.legs), final], strict=True))
    times = [begin, *kept, finish]
    levels = [at.get(t, path.at_time(t)) for t in times]
    levels[0] = levels[0] if start is None else path.at_time(first)
    levels[-1] = final if end is None else path.at_time(last)
    legs = [Leg(path.time_at(a.ratio), a, b) for a, b in pairwise(levels)]
    return replace(path, legs=tuple(legs))


def points(schedule: Schedule, grid: Grid, steps: int | None) -> tuple[Array, Array]:
    """The ratios and times at which the grid calls the model, noisiest first."""
    if grid.name == "explicit":
        return explicit(schedule, grid, steps)
    count = check_steps(steps)
    low, high = schedule.span
    if grid.name == "lcm":
        times = distilled(count, schedule.num_train or 1000, grid.original) * (
            high / ((schedule.num_train or 1000) - 1)
        )
        return _decreasing(schedule.ratio_at(times)), times
    if grid.start is not None:
        if not low < grid.start <= high:
            raise PlanError(rule("start", f"a time above {low:g} and up to {high:g}", grid.start), "start")
        high = (
            float(schedule.unbend(grid.start)) if isinstance(schedule, Flow) and grid.name in OVER_TIME else grid.start
        )
    if grid.name in OVER_TIME:
        unit = schedule.num_train or high - low
        times = OVER_TIME[grid.name](count, low, high, unit * (high - low) / (schedule.span[1] - low))
        times = np.clip(times + grid.offset, low, high)
        if isinstance(schedule, Flow):
            sigmas = schedule.stretch(schedule.bend(times / schedule.scale))
            return _decreasing(schedule.ratio_of_sigma(sigmas)), sigmas * schedule.scale
        return _decreasing(schedule.ratio_at(times)), times
    sigmas = _over_sigma(schedule, grid, count, high)
    ratios = _decreasing(schedule.ratio_of_sigma(sigmas))
    return ratios, schedule.time_at(ratios)


def _over_sigma(schedule: Schedule, grid: Grid, count: int, high_time: float) -> Array:
    bottom = float(schedule.sigma_of(schedule.ratio_at(schedule.span[0])))
    top = float(schedule.sigma_of(schedule.ratio_at(high_time)))
    if grid.name in AYS:
        if schedule.frame == "flow":
            advice = "Align Your Steps publishes sigmas of vp and ve models."
            raise PlanError(rule("grid", "one for flow models", grid.name, advice), "grid-schedule")
        knots = np.log(np.array(AYS[grid.name]))
        found = np.interp(np.linspace(0, 1, count + 1), np.linspace(0, 1, len(knots)), knots)
        return np.asarray(np.exp(found[:-1]))
    low = bottom if grid.sigma_min is None else grid.sigma_min
    high = top if grid.sigma_max is None else grid.sigma_max
    if not (0 < low < high) or math.isinf(high):
        advice = "A schedule with zero terminal SNR has no largest sigma: give sigma_max, or use a grid over time."
        raise PlanError(rule("sigma_min, sigma_max", "0 < sigma_min < sigma_max < inf", (low, high), advice), "sigmas")
    function, default_rho = OVER_SIGMA[grid.name]
    sigmas = function(count, low, high, default_rho if grid.rho is None else grid.rho)
    sigmas[0] = high  # not a rounding away
    if count > 1 and grid.name != "linear_quadratic":
        sigmas[-1] = low
    return sigmas


def explicit(schedule: Schedule, grid: Grid, steps: int | None) -> tuple[Array, Array]:
    if (grid.timesteps is None) == (grid.sigmas is None):
        raise PlanError("timesteps, sigmas must be given one at a time; got both or neither.", "explicit")
    values = np.asarray(grid.timesteps if grid.timesteps is not None else grid.sigmas, np.float64)
    what = "timesteps" if grid.timesteps is not None else "sigmas"
    if values.ndim != 1 or not 1 <= len(values) <= MAX_STEPS + 1:
        raise PlanError(rule(what, f"a list of 1 to {MAX_STEPS} numbers", values.shape), "explicit")
    if not np.all(np.isfinite(values)) or values.min() < 0 <= schedule.span[0]:
        raise PlanError(rule(what, "finite and not negative", values.tolist()[:8]), "not-finite")
    if steps is not None and steps not in (len(values), len(values) - 1):
        raise PlanError(rule("steps", f"{len(values)} or left out with {what} given", steps), "steps")
    if what == "sigmas":
        if len(values) == 1 and values[0] == 0:
            raise PlanError(rule("sigmas", "more than a final 0", values.tolist()), "explicit")
        ratios = _decreasing(schedule.ratio_of_sigma(values), what)
        return ratios, schedule.time_at(np.maximum(ratios, 1e-300))
    low, high = schedule.span
    if values.max() > high or values.min() < low:
        raise PlanError(rule(what, f"between {low:g} and {high:g}", values.tolist()[:8]), "explicit")
    return _decreasing(schedule.ratio_at(values), what), values


def _decreasing(ratios: Array, what: str = "levels") -> Array:
    """Refuses a path that does not lose noise at each step."""
    if len(ratios) > 1 and not np.all(ratios[1:] < ratios[:-1]):
        i = int(np.argmin(ratios[1:] < ratios[:-1]))
        raise PlanError(
            rule(what, "strictly decreasing in noise", (float(ratios[i]), float(ratios[i + 1]))),
            "not-decreasing",
        )
    return ratios


def beta_quantile(p: Array, a: float, b: float) -> Array:
    """The inverse of the Beta(a, b) distribution function, by Newton's rule in the angle of x = sin²(angle).

    For a = b = ½ the angle is p·π/2 exactly, so the grid's 0.6 starts close. A step that leaves its bracket halves it.
    """
    norm = 2.0 * math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b))
    low, high = np.zeros_like(p), np.full_like(p, math.pi / 2)
    edge = 1e-9  # in the angle: 1e-18 in x
    angle = np.clip(p * math.pi / 2, edge, math.pi / 2 - edge)
    for _ in range(50):
        sin, cos = np.sin(angle), np.cos(angle)
        gap = _beta_cdf(sin * sin, a, b) - p
        low, high = np.where(gap < 0, angle, low), np.where(gap < 0, high, angle)
        moved = angle - gap / (norm * sin ** (2 * a - 1) * cos ** (2 * b - 1))
        moved = np.where((low <= moved) & (moved <= high), moved, (low + high) / 2)
        before, angle = angle, np.clip(moved, edge, math.pi / 2 - edge)
        if np.abs(angle - before).max() < 1e-15:
            break
    return np.where(p <= 0, 0.0, np.where(p >= 1, 1.0, np.sin(angle) ** 2))


def _beta_cdf(x: Array, a: float, b: float) -> Array:
    """The regularised incomplete beta function (Abramowitz and Stegun 26.5.8, by Lentz's rule)."""
    swap = x > (a + 1) / (a + b + 2)
    y = np.clip(np.where(swap, 1 - x, x), 1e-300, 1 - 1e-16)
    p, q = np.where(swap, b, a), np.where(swap, a, b)
    front = np.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + p * np.log(y) + q * np.log1p(-y)) / p
    c, d = np.ones_like(y), 1.0 / (1.0 - (p + q) * y / (p + 1))
    h = d.copy()
    for m in range(1, 20):
        for num in (
            m * (q - m) * y / ((p + 2 * m - 1) * (p + 2 * m)),
            -(p + m) * (p + q + m) * y / ((p + 2 * m) * (p + 2 * m + 1)),
        ):
            d = 1.0 / (1.0 + num * d)
            c = 1.0 + num / c
            h = h * c * d
    part = front * h
    return np.where(swap, 1 - part, part)

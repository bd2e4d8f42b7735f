"""A plan: a sampler as a table. One row is one model call followed by linear updates of the state.

The state is a handful of registers: `x`; `anchor`, a second copy of x for methods that return to where a step
began; `p0`, this call's prediction, and `p1…p3`, earlier ones; `u`, the unconditional prediction of this call;
`z`, fresh noise. Formulas are written over symbolic linear forms (`X * (s1 / s0) + P0 * (1 - s1 / s0)`), so the
source reads like the paper and the table falls out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from pellucid.core import schedule as schedules
from pellucid.core import target as targets
from pellucid.core.errors import PellucidError, PlanError, rule
from pellucid.core.grid import Grid
from pellucid.core.reader import parse_json, typed
from pellucid.core.schedule import EDM, Array, Frame, Level, Schedule, Target

_SCHEMA = 1
_MAX_ROWS, _MAX_NOISY, _MAX_DRAWS = 100_000, 20_000, 2_000_000  # of a plan that is read
_TIME_BEYOND, _TIME_AWAY = 0.01, 0.5  # of a schedule's span
_SCALE_TOLERANCE = 1e-6
TOLERANCE = 1e-9
_BLURRED = 1e-3  # rounding that grows beyond this part of x is refused
REGISTERS = ("x", "anchor", "p0", "p1", "p2", "p3", "u", "z")
DEPTH = 4
Weights = tuple[tuple[int, float], ...]
Clock = Literal["snr", "sigma"]
UNBOUNDED = {math.inf: "inf", -math.inf: "-inf"}  # options that JSON has no number for
BOUNDS = {text: number for number, text in UNBOUNDED.items()}


class Form:
    """A linear form over the registers."""

    __slots__ = ("terms",)

    def __init__(self, terms: dict[int, float]) -> None:
        self.terms = terms

    def __add__(self, other: Form) -> Form:
        terms = dict(self.terms)
        for register, weight in other.terms.items():
            terms[register] = terms.get(register, 0.0) + weight
        return Form(terms)

    def __sub__(self, other: Form) -> Form:
        return self + other * -1.0

    def __mul__(self, factor: float) -> Form:
        return Form({register: weight * factor for register, weight in self.terms.items()})

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Form:
        return self * (1.0 / divisor)

    def weights(self) -> Weights:
        """The non-zero weights, in register order."""
        found = tuple((r, float(self.terms[r])) for r in sorted(self.terms) if self.terms[r] != 0.0)
        for register, weight in found:
            if not math.isfinite(weight):
                raise PlanError(
                    f"weight of {REGISTERS[register]} must be finite; got {weight}. The sampler cannot take this "
                    "step: at alpha 0 or sigma 0 use ddim, euler or dpmpp_2m, or start below the last level.",
                    "not-finite",
                )
        return found


X, ANCHOR, P0, P1, P2, _P3, U, Z = (Form({i: 1.0}) for i in range(len(REGISTERS)))
HISTORY = (P0, P1, P2, _P3)


def total(forms: Iterable[Form]) -> Form:
    """The sum of forms."""
    terms: dict[int, float] = {}
    for form in forms:
        for register, weight in form.terms.items():
            terms[register] = terms.get(register, 0.0) + weight
    return Form(terms)


@dataclass(frozen=True, slots=True)
class Span:
    """An address of noise: the stretch of sigma / alpha that it covers, and which pass over it this is."""

    start: float
    end: float
    visit: int = 0


@dataclass(frozen=True, slots=True)
class Draw:
    """One elementary piece of noise: which interval, which pass, and its share of the whole."""

    interval: int
    visit: int
    weight: float


@dataclass(frozen=True, slots=True)
class Row:
    """One model call at `level` and `time`; then x, and the anchor, become these combinations of the registers.

    `pre_noise` is added to x before the call (churn). A `held` prediction does not enter the history.
    """

    level: Level
    time: float
    x: Weights
    anchor: Weights | None = None
    held: bool = False
    pre_noise: float = 0.0
    pre_span: Span | None = None
    span: Span | None = None
    pre_draws: tuple[Draw, ...] = ()
    draws: tuple[Draw, ...] = ()

    def uses(self, register: str) -> bool:
        index = REGISTERS.index(register)
        return any(r == index for r, _ in (*self.x, *(self.anchor or ())))


def row(
    time: float,
    level: Level,
    x: Form,
    anchor: Form | None = None,
    *,
    held: bool = False,
    span: Span | None = None,
    pre_noise: float = 0.0,
    pre_span: Span | None = None,
) -> Row:
    """A row from symbolic forms. Noise without weight has no address."""
    weights = x.weights()
    kept = None if anchor is None else anchor.weights()
    noisy = any(r == 7 for r, _ in (*weights, *(kept or ())))
    if noisy and span is None:
        raise AssertionError("a row that draws noise names its span")
    return Row(level, float(time), weights, kept, held, pre_noise, pre_span, span if noisy else None)


@dataclass(frozen=True)
class Difference:
    """One field of one row (or of the plan, row −1) that differs between two plans."""

    row: int
    field: str
    mine: Any
    theirs: Any


@dataclass(frozen=True)
class Plan:
    """A frozen table of rows, and all that is needed to read it. `len(rows)` is the number of model calls."""

    name: str
    rows: tuple[Row, ...]
    basis: Target
    start: Level
    end: Level
    frame: Frame
    initial_scale: float
    clock: Clock = "snr"
    target: Target = "eps"
    schedule: dict[str, Any] = field(default_factory=dict)
    grid: dict[str, Any] = field(default_factory=dict)
    dialect: str = "exact"
    options: dict[str, Any] = field(default_factory=dict)
    declared: str = ""
    deviation: float = 0.0
    evidence: dict[str, Any] = field(default_factory=dict)  # how a tuned plan was made, and what was measured of it

    @property
    def nfe(self) -> int:
        return len(self.rows)

    @cached_property
    def depth(self) -> int:
        """How many earlier predictions the loop must keep."""
        return max((k for k in range(1, DEPTH) if any(r.uses(f"p{k}") for r in self.rows)), default=0)

    @cached_property
    def stochastic(self) -> bool:
        return any(r.draws or r.pre_draws for r in self.rows)

    @cached_property
    def guided(self) -> bool:
        """Whether a row needs the unconditional prediction apart (the CFG++ family)."""
        return any(r.uses("u") for r in self.rows)

    @property
    def timesteps(self) -> tuple[float, ...]:
        return tuple(r.time for r in self.rows)

    def to_json(self, indent: int | None = 1) -> str:
        """The plan as JSON, float64 in full precision (infinity and NaN never occur)."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": _SCHEMA,
            "kind": "pellucid-plan",
            "name": self.name,
            "dialect": self.dialect,
            "schedule": self.schedule,
            "grid": self.grid,
            "target": self.target,
            "options": {k: UNBOUNDED.get(v, v) if isinstance(v, float) else v for k, v in self.options.items()},
            "basis": self.basis,
            "frame": self.frame,
            "clock": self.clock,
            "start": [self.start.alpha, self.start.sigma],
            "end": [self.end.alpha, self.end.sigma],
            "initial_scale": self.initial_scale,
            "declared": self.declared,
            "deviation": self.deviation,
            "rows": [_row_to_dict(r) for r in self.rows],
            **({"evidence": self.evidence} if self.evidence else {}),
        }

    @staticmethod
    def from_json(text: str | bytes) -> Plan:
        """Reads a plan back and proves it again: a changed weight breaks the marginal law and is refused."""
        with _as_plan_errors():
            data = parse_json(text, "plan", "plan-json")
        return Plan.from_dict(data)

    @staticmethod
    def from_dict(data: dict[str, Any], *, ran: bool = False) -> Plan:
        """A plan of a table: types, the law, and times and first noise that agree with the schedule.

        One that `ran`, from a trace, keeps the times and the first noise that it ran with.
        """
        if not isinstance(data, dict) or data.get("kind") != "pellucid-plan":
            raise PlanError("plan must be a JSON object of kind pellucid-plan; got something else.", "plan-json")
        if data.get("schema") != _SCHEMA:
            raise PlanError(rule("schema", str(_SCHEMA), data.get("schema"), "Made by another version."), "schema")
        with _as_plan_errors():
            plan = Plan._read(data)
        sealed = seal(plan)
        found = sealed.deviation
        if not abs(found - plan.deviation) <= TOLERANCE * (1 + plan.deviation):
            raise PlanError(
                f"plan must keep the marginal law with deviation {plan.deviation:.3g}; got {found:.3g}. "
                "A weight, a level or the deviation itself was changed. Compile the plan again.",
                "marginal-law",
            )
        if not ran:
            _check_agreement(plan)
        return replace(sealed, deviation=plan.deviation)

    @staticmethod
    def _read(data: dict[str, Any]) -> Plan:
        """The fields of a table, each of its type; nothing is proven yet."""
        held = _Fields(data)
        try:
            rows = [_row_from_dict(r) for r in held.rows()]
            plan = Plan(
                name=held.text("name"),
                rows=tuple(rows),
                basis=targets.named(data["basis"]),
                start=_level_from_pair("start", data["start"]),
                end=_level_from_pair("end", data["end"]),
                frame=_one_of("frame", data["frame"], get_args(Frame)),
                initial_scale=_finite("initial_scale", data["initial_scale"]),
                clock=_one_of("clock", data["clock"], get_args(Clock)),
                target=targets.named(data["target"]),
                schedule=held.table("schedule"),
                grid=held.table("grid"),
                dialect=held.text("dialect"),
                options={k: BOUNDS.get(v, v) if isinstance(v, str) else v for k, v in held.table("options").items()},
                declared=held.text("declared"),
                deviation=_finite("deviation", data["deviation"]),
                evidence=held.table("evidence") if "evidence" in data else {},
            )
        except PellucidError:
            raise
        except (KeyError, TypeError, IndexError, ValueError, AttributeError, OverflowError) as error:
            got = f"{type(error).__name__}: {str(error)[:80]}"
            raise PlanError(rule("plan", "made of every field of its schema", got), "plan-json") from None
        _check_grid(plan.grid)
        return plan

    def diff(self, other: Plan, tolerance: float = 0.0) -> list[Difference]:
        """What differs from another plan, field by field and row by row."""
        found = [
            Difference(-1, name, getattr(self, name), getattr(other, name))
            for name in ("basis", "frame", "clock", "initial_scale", "target", "start", "end")
            if getattr(self, name) != getattr(other, name)
        ]
        if self.nfe != other.nfe:
            found.append(Difference(-1, "nfe", self.nfe, other.nfe))
        for i, (mine, theirs) in enumerate(zip(self.rows, other.rows, strict=False)):
            found += [Difference(i, *change) for change in row_changes(mine, theirs, tolerance)]
        return found


def row_changes(a: Row, b: Row, tolerance: float) -> list[tuple[str, Any, Any]]:
    values = [
        ("alpha", a.level.alpha, b.level.alpha),
        ("sigma", a.level.sigma, b.level.sigma),
        ("time", a.time, b.time),
        ("pre_noise", a.pre_noise, b.pre_noise),
        *(
            (f"visit.{k}", p.visit, q.visit)
            for k, p, q in (("z", a.span, b.span), ("pre", a.pre_span, b.pre_span))
            if p and q
        ),
    ]
    for label, mine, theirs in (("x", a.x, b.x), ("anchor", a.anchor, b.anchor)):
        left, right = dict(mine or ()), dict(theirs or ())
        for register in sorted(left.keys() | right.keys()):
            values.append((f"{label}.{REGISTERS[register]}", left.get(register, 0.0), right.get(register, 0.0)))
    changed = [v for v in values if abs(v[1] - v[2]) > tolerance * max(abs(v[1]), abs(v[2]))]
    return changed + ([("held", a.held, b.held)] if a.held != b.held else [])


def _row_to_dict(r: Row) -> dict[str, Any]:
    out: dict[str, Any] = {
        "alpha": r.level.alpha,
        "sigma": r.level.sigma,
        "time": r.time,
        "x": {REGISTERS[i]: w for i, w in r.x},
    }
    if r.anchor is not None:
        out["anchor"] = {REGISTERS[i]: w for i, w in r.anchor}
    if r.held:
        out["held"] = True
    if r.pre_noise:
        out["pre_noise"] = r.pre_noise
    for label, span in (("pre_span", r.pre_span), ("span", r.span)):
        if span is not None:
            out[label] = [span.start, span.end, span.visit]
    return out


@contextmanager
def _as_plan_errors() -> Iterator[None]:
    """A value of a wrong type in a plan's table is a plan error of one code, whichever the field."""
    try:
        yield
    except PlanError:
        raise
    except PellucidError as error:
        if error.code not in ("plan-json", "plan-type", "plan-value", "grid-type", "grid-value", "not-finite"):
            raise
        raise PlanError(str(error), "not-finite" if error.code == "not-finite" else "plan-json") from None


@dataclass(frozen=True)
class _Fields:
    """The fields of a plan's table, each of its type."""

    data: dict[str, Any]

    def text(self, key: str) -> str:
        return str(typed(str, self.data[key], f"{key} of the plan", code="plan"))

    def table(self, key: str) -> dict[str, Any]:
        return dict(typed(Mapping[str, Any], self.data[key], f"{key} of the plan", code="plan"))

    def rows(self) -> list[dict[str, Any]]:
        found = self.data["rows"]
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise PlanError(rule("rows", "a list of tables", found), "plan-json")
        noisy = sum("span" in one or "pre_span" in one for one in found)
        if not 1 <= len(found) <= _MAX_ROWS or noisy > _MAX_NOISY:
            must = f"1 to {_MAX_ROWS}, of which at most {_MAX_NOISY} draw noise"
            raise PlanError(rule("rows", must, (len(found), noisy)), "plan-json")
        return found


def _check_grid(grid: dict[str, Any]) -> None:
    """Refuses a grid whose fields are of other types than a grid's, or that no grid has."""
    for key, value in grid.items():
        if key in ("steps", "skip", "stop"):
            typed(int | None, value, f"grid.{key} of the plan", (0, _MAX_ROWS), "plan")
        elif key == "between":
            typed(tuple[float | None, float | None], value, "grid.between of the plan", code="plan")
        else:
            Grid.check(key, value)


def _check_agreement(plan: Plan) -> None:
    """Refuses times and a first noise that do not belong to the schedule and the start of a plan.

    The law does not see them. Times stay inside of the schedule (diffusers goes 0.1 % of it beyond), and within half of
    it of the level's own: tuning moved them by 7 %, diffusers' PNDM by 14 %. Two are free in it: inversion takes the
    time of the level it goes to; diffusers' iPNDM, that of a curve of its own. The first noise is sigma of the start,
    or what a dialect makes of it. Of a custom schedule, which has no known name, only the order is checked: times rise
    with the noise.
    """
    name, inversion = plan.schedule.get("name"), plan.name == "ddim_inversion"
    known = isinstance(name, str) and (name in schedules.MAKERS or name in schedules.ALIASES)
    curve = schedules.from_dict(plan.schedule) if known or not isinstance(name, str) else None
    if curve is not None:
        _check_times(plan, curve, inversion)
    else:
        least, most = (choose(plan.rows, key=lambda r: r.level.ratio) for choose in (min, max))
        if least.time > most.time and not inversion:
            raise PlanError(rule("times", "higher where there is more noise", (least.time, most.time)), "plan-time")
    noises = _first_noises(plan, curve, inversion)
    if not any(math.isclose(plan.initial_scale, one, rel_tol=_SCALE_TOLERANCE) for one in noises):
        must = " or ".join(f"{one:.6g}" for one in dict.fromkeys(noises))
        advice = "It is the size of the first noise. Compile the plan again."
        raise PlanError(rule("initial_scale", must, plan.initial_scale, advice), "plan-scale")


def _check_times(plan: Plan, curve: Schedule, inversion: bool) -> None:
    low, high = curve.span
    free = inversion or (plan.dialect == "diffusers" and plan.name == "ipndm")
    for i, r in enumerate(plan.rows):
        beyond = max(low - r.time, r.time - high)
        away = 0.0 if free else abs(r.time - curve.time(r.level))
        if beyond > _TIME_BEYOND * (high - low) or away > _TIME_AWAY * (high - low):
            must = f"near {curve.time(r.level):.6g}, the time of its level in {curve.name}, and in {low:g} … {high:g}"
            raise PlanError(rule(f"time of row {i}", must, r.time, "Compile the plan again."), "plan-time")


def _first_noises(plan: Plan, curve: Schedule | None, inversion: bool) -> list[float]:
    """Sigma of the start; in ComfyUI's dialect with the data's size added; in diffusers' 1 in its solvers, and the
    largest sigma of the run or of the schedule in the others, with and without the data's size."""
    found = [1.0 if inversion else plan.start.sigma]
    if plan.dialect in ("comfyui", "diffusers"):
        found.append(math.hypot(plan.start.alpha, plan.start.sigma))
    if plan.dialect == "diffusers":
        tops = [max(r.level.ratio for r in plan.rows)] + ([curve.sigma_max] if isinstance(curve, EDM) else [])
        found += [1.0, *(size for top in tops for size in (top, math.hypot(top, 1.0)))]
    return [one for one in found if math.isfinite(one)]


def _row_from_dict(data: dict[str, Any]) -> Row:
    def read(weights: dict[str, float]) -> Weights:
        return tuple(sorted((REGISTERS.index(k), _finite(k, v)) for k, v in weights.items()))

    def span(key: str) -> Span | None:
        if key not in data:
            return None
        start, end, visit = data[key]
        return Span(_positive(key, start), _positive(key, end), typed(int, visit, key, (0, 1e9), "plan"))

    unknown = set(data) - {"alpha", "sigma", "time", "x", "anchor", "held", "pre_noise", "pre_span", "span"}
    if unknown:
        raise PlanError(rule("row", "made of known fields", sorted(unknown)), "plan-json")
    if ("pre_noise" in data) != ("pre_span" in data):
        raise PlanError("pre_noise must come with its pre_span; got one of the two.", "plan-json")
    for register in (*data["x"], *data.get("anchor", ())):
        if register not in REGISTERS:
            raise PlanError(rule("register", "one of " + ", ".join(REGISTERS), register), "plan-json")
    return Row(
        level=Level(_finite("alpha", data["alpha"]), _finite("sigma", data["sigma"])),
        time=_finite("time", data["time"]),
        x=read(data["x"]),
        anchor=read(data["anchor"]) if "anchor" in data else None,
        held=typed(bool, data.get("held", False), "held", code="plan"),
        pre_noise=_finite("pre_noise", data.get("pre_noise", 0.0)),
        pre_span=span("pre_span"),
        span=span("span"),
    )


def _level_from_pair(name: str, pair: Sequence[float]) -> Level:
    alpha, sigma = pair
    return Level(_finite(name, alpha), _finite(name, sigma))


def _one_of(name: str, value: Any, known: Sequence[str]) -> Any:
    if value not in known:
        raise PlanError(rule(name, "one of " + ", ".join(known), value), "plan-json")
    return value


def _positive(name: str, value: object) -> float:
    found = _finite(name, value)
    if found < 0:
        raise PlanError(rule(name, "not negative", value), "plan-json")
    return found


def _finite(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise PlanError(rule(name, "a finite number", value), "not-finite")
    return float(value)


# --- noise addresses -------------------------------------------------------------------------------------------


def clock_time(ratio: float, clock: Clock) -> float:
    """The variance clock of the path of noise: SNR is exact for eta 1, sigma is k-diffusion's."""
    return 1.0 / ratio**2 if clock == "snr" else ratio


def _address(rows: Sequence[Row], clock: Clock) -> tuple[Row, ...]:
    """Cuts the spans of all rows into elementary intervals, so that overlapping draws share their noise."""
    spans = [s for r in rows for s in (r.pre_span, r.span) if s is not None]
    if not spans:
        return tuple(rows)
    cuts = sorted({edge for s in spans for edge in (s.start, s.end)}, reverse=True)
    place = {edge: i for i, edge in enumerate(cuts)}
    pieces = sum(abs(place[s.start] - place[s.end]) for s in spans)
    if pieces > _MAX_DRAWS:
        raise PlanError(rule("noise of the plan", f"cut into at most {_MAX_DRAWS} pieces", pieces), "plan-noise")

    def draws(span: Span | None) -> tuple[Draw, ...]:
        if span is None:
            return ()
        first, last = sorted((place[span.start], place[span.end]))
        edges = [clock_time(c, clock) if c > 0 else math.inf for c in cuts[first : last + 1]]
        if last - first == 1 or not all(map(math.isfinite, edges)):
            return (Draw(first, span.visit, 1.0),)
        whole = abs(edges[-1] - edges[0])
        return tuple(
            Draw(first + k, span.visit, math.sqrt(abs(edges[k + 1] - edges[k]) / whole)) for k in range(last - first)
        )

    return tuple(replace(r, pre_draws=draws(r.pre_span), draws=draws(r.span)) for r in rows)


# --- the marginal law ------------------------------------------------------------------------------------------


def deviation(plan: Plan) -> tuple[float, float]:
    """(the largest distance between where the rows land and the levels that they claim, what rounding explains)."""
    gaps, blurs = zip(*landings(plan), strict=True)
    return max(gaps), max(blurs)


@np.errstate(over="ignore", invalid="ignore")  # what overflows lands nowhere, and is refused for that
def landings(plan: Plan) -> list[tuple[float, float]]:
    """How far x is off the level of each call and off the end, as a part of x; and what of it rounding explains.

    The denoiser is perfect and the data are one point μ, so each register is a combination of μ, of the first
    noise and of the drawn noises; x must be alpha·μ plus noise of standard deviation sigma at every call. Beside
    each register runs a bound of its rounding error, for methods that amplify it (big first steps on eps).
    """
    point, first = (np.zeros(_lines_of(plan)) for _ in range(2))
    point[0], first[1] = 1.0, 1.0

    def exact(level: Level, x: _Value) -> tuple[_Value, _Value]:
        return _one_point(plan.basis, level, x, point, first), (point, 0.0)

    visited = _course(plan, plan.start.alpha * point + plan.start.sigma * first, exact)
    return [_distance(x, level) for level, x in visited]


_Value = tuple[Array, float]  # what a register holds, one line per source; and a bound of its rounding error
_ROUNDING = 2.0**-51


def _draws_of(plan: Plan) -> list[tuple[int, int]]:
    """The interval and the visit of every normal number that a run draws."""
    return sorted({(d.interval, d.visit) for r in plan.rows for d in (*r.pre_draws, *r.draws)})


def _lines_of(plan: Plan) -> int:
    """The sources of x: the data, the first noise, and each draw."""
    return 2 + len(_draws_of(plan))


def _course(
    plan: Plan, start: Array, predict: Callable[[Level, _Value], tuple[_Value, _Value]]
) -> Iterator[tuple[Level, _Value]]:
    """x at the level of each call and at the end, (lines, …), where `predict` (level, x) → (prediction, x0) is linear:
    then x is a sum over its sources, and what each of them brings is a line."""
    index = {key: 2 + i for i, key in enumerate(_draws_of(plan))}

    def noise(draws: tuple[Draw, ...]) -> _Value:
        out = np.zeros_like(start)
        for d in draws:
            out[index[d.interval, d.visit]] += d.weight
        return out, 0.0

    zero = (np.zeros_like(start), 0.0)
    x: _Value = (start, 0.0)
    anchor, history = zero, [zero] * DEPTH
    for r in plan.rows:
        if r.pre_noise:
            x = (x[0] + r.pre_noise * noise(r.pre_draws)[0], x[1])
        yield r.level, x
        p0, x0 = predict(r.level, x)
        registers = [x, anchor, p0, *history[: DEPTH - 1], x0, noise(r.draws) if r.draws else zero]
        x = _mix(r.x, registers, zero[0])
        if r.anchor is not None:
            anchor = _mix(r.anchor, registers, zero[0])
        if not r.held:
            history = [p0, *history[: DEPTH - 1]]
    yield plan.end, x


def kept(plan: Plan, scales: Sequence[float]) -> Array:
    """How large Gaussian data come out of a plan, over how large they are, for components of these standard deviations.

    1 is right; less is smoothed away, whatever the network. Exact: with Gaussian data the best denoiser is linear.
    """
    size = np.asarray(scales, np.float64)
    start = np.zeros((_lines_of(plan), len(size)))
    start[1] = plan.initial_scale
    if {"skip", "between"} & set(plan.grid):
        start[0] = plan.start.alpha * size  # a run that starts inside of the schedule starts from data

    def wiener(level: Level, x: _Value) -> tuple[_Value, _Value]:
        x0 = x[0] * (level.alpha * size**2 / (level.alpha**2 * size**2 + level.sigma**2))
        c_x, c_0 = targets.from_x0(plan.basis, level)
        return (c_x * x[0] + c_0 * x0, 0.0), (x0, 0.0)

    *_, (end, x) = _course(plan, start, wiener)
    return np.sqrt((x[0] ** 2).sum(0)) / end.alpha / size


def _one_point(basis: Target, level: Level, x: _Value, point: Array, first: Array) -> _Value:
    if basis == "eps" and level.sigma == 0.0:
        return first, 0.0  # a clean x determines no eps: inversion starts along the direction that it will add
    c_x, c_0 = targets.from_x0(basis, level)
    size = abs(c_x) * float(np.abs(x[0]).max()) + abs(c_0)
    return c_x * x[0] + c_0 * point, abs(c_x) * x[1] + _ROUNDING * size


def _mix(weights: Weights, registers: Sequence[_Value], zero: Array) -> _Value:
    out, error = zero, 0.0
    for register, weight in weights:
        value, blur = registers[register]
        out = out + weight * value
        error += abs(weight) * (blur + _ROUNDING * float(np.abs(value).max()))
    return out, error


def _distance(x: _Value, level: Level) -> tuple[float, float]:
    scale = math.hypot(level.alpha, level.sigma) or math.nan
    spread = float(np.sqrt(np.dot(x[0][1:], x[0][1:])))
    gap = max(abs(float(x[0][0]) - level.alpha), abs(spread - level.sigma)) / scale
    landed = math.isfinite(spread) and math.isfinite(gap)  # max() would drop a NaN
    return gap if landed else math.inf, x[1] / scale


def _check_registers(rows: Sequence[Row]) -> None:
    """A row may read only what an earlier row has written, and noise that it draws."""
    known, anchored = 0, False
    for i, r in enumerate(rows):
        for register, _ in (*r.x, *(r.anchor or ())):
            name = REGISTERS[register]
            empty = (
                (name == "anchor" and not anchored)
                or (name in ("p1", "p2", "p3") and int(name[1]) > known)
                or (name == "z" and r.span is None)
            )
            if empty:
                raise PlanError(rule(f"row {i}", "made of registers that are filled by then", name), "register")
        anchored = anchored or r.anchor is not None
        known += not r.held


def seal(plan: Plan) -> Plan:
    """Addresses the noise, applies the marginal law, and records the deviation. Undeclared deviation raises."""
    sealed = replace(plan, rows=_address(plan.rows, plan.clock))
    _check_registers(sealed.rows)
    with np.errstate(all="ignore"):
        found, floor = deviation(sealed)
    if _BLURRED < found <= TOLERANCE + floor and not plan.declared and plan.dialect == "exact":
        raise PlanError(
            f"plan {plan.name} must not amplify rounding; here it grows to {found:.1g} of x. "
            "Use more steps, a grid that starts lower, or ddim, dpmpp_2m or unipc.",
            "ill-conditioned",
        )
    if not math.isfinite(found) or (found > TOLERANCE + floor and not plan.declared):
        raise PlanError(
            f"plan {plan.name} must keep the marginal law; a row lands {found:.3g} off its level. "
            "A sampler that deviates on purpose declares it.",
            "marginal-law",
        )
    return replace(sealed, deviation=found)

"""Quality against NFE where the truth is known: every sampler on every grid, with exact denoisers of mixtures.

A cell is one sampler on one grid of one schedule, at all budgets of model calls. Deterministic samplers are judged by
the distance from the exact flow of the same noise, all by the distance of their law from that of the data. Runs begin
with noise alone at the grid's first level and end in a clean x, as images do: what a grid leaves out above its first
level is part of its error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, groupby
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pellucid.core import grid as grids
from pellucid.core import oracle
from pellucid.core import schedule as schedules
from pellucid.core.compile import compile_plan
from pellucid.core.errors import PellucidError, rule
from pellucid.core.loop import run
from pellucid.core.oracle import Mixture
from pellucid.core.plan import Draw, Plan
from pellucid.core.samplers import REGISTRY
from pellucid.core.schedule import Level, Schedule, in_frame
from pellucid.evidence.study import oracle_orders as orders
from pellucid.evidence.study.kernel import Study, check_lists
from pellucid.evidence.study.setups import SamplerSetup, entry_of, setup_without_grid

# --- The truth: the exact flow of the same noise, and the exact law of the data -------------------------------------
#
# The flow is that of dx/dλ = alpha·x0(x, λ) − alpha²·x in the variance-preserving frame, where the slope vanishes at
# both ends, by the classical rule of Runge and Kutta. It shares no code with the samplers.

FLOW_PACE = 0.03  # the longest step of the exact flow in λ
_FLOW_TOP = 1e5  # sigma / alpha where the flow of pure noise is begun
_FLOW_BOTTOM = 1e-5  # and where it ends: what is left is x0 to 1e-9
_DIRECTIONS = 16  # of sliced distances


def exact_flow(mixture: Mixture, noise: Tensor, top: float, pace: float = FLOW_PACE) -> Tensor:
    """Where the exact flow takes x = sigma·noise [N, D] from sigma / alpha = top; infinite: pure noise.

    From pure noise, x at a large ratio r is alpha·(mean of the data) + sigma·noise up to 1/r, of which the flow keeps
    1/r.
    """
    begin = in_frame(min(top, _FLOW_TOP), "vp")
    x = begin.sigma * noise
    if top > _FLOW_TOP:
        x = x + begin.alpha * (mixture.weights @ mixture.means)
    length = -math.log(_FLOW_BOTTOM) - begin.lam
    steps = math.ceil(length / pace)
    h = length / steps

    def slope(x: Tensor, lam: float) -> Tensor:
        level = in_frame(math.exp(-lam), "vp")
        return level.alpha * mixture(x, level) - level.alpha**2 * x

    return mixture(orders.runge_kutta(slope, x, begin.lam, h, steps), in_frame(_FLOW_BOTTOM, "vp"))


def top_of(schedule: Schedule) -> float:
    """sigma / alpha at the noisiest time."""
    return float(schedule.ratio_at(schedule.span[1]))


def starting_noise(mixture: Mixture, count: int, seed: int) -> Tensor:
    """[count, D], the same for all samplers, grids and schedules: normal, and whitened, so that the chance of the draw
    is not in its mean and covariance."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(count, mixture.means.shape[1], generator=generator, dtype=torch.float64)
    drawn = drawn - drawn.mean(0)
    root = torch.linalg.cholesky(drawn.T @ drawn / count)
    return torch.linalg.solve_triangular(root, drawn.T, upper=False).T.contiguous()


@dataclass(frozen=True)
class Cloud:
    """A mixture as the denoiser of one image that holds all points, [1, N, D]: the loop minds one image."""

    mixture: Mixture

    def __call__(self, x: Tensor, level: Level, time: Any) -> Tensor:
        return self.mixture(x[0], level)[None]


@dataclass(frozen=True)
class CloudNoise:
    """Noise by address for a cloud: torch's generator, seeded by (seed, interval, visit)."""

    seed: int

    def step(self, draws: Sequence[Draw], span: Any, like: Tensor, images: Any) -> Tensor:
        out = torch.zeros_like(like)
        for draw in draws:
            key = (self.seed * 1_000_003 + draw.interval) * 10_007 + draw.visit
            generator = torch.Generator().manual_seed(key)
            out.add_(torch.randn(like.shape, generator=generator, dtype=like.dtype), alpha=draw.weight)
        return out

    first = beside = None


@dataclass(frozen=True)
class LawSlices:
    """The law of a mixture along a few directions: its exact quantiles there, [R, N]."""

    directions: Tensor
    quantiles: Tensor

    @staticmethod
    def of(mixture: Mixture, count: int, directions: int = _DIRECTIONS, seed: int = 5) -> LawSlices:
        """The quantiles of `count` points, at the middles of as many equal parts."""
        generator = torch.Generator().manual_seed(seed)
        found = torch.randn(directions, mixture.means.shape[1], generator=generator, dtype=torch.float64)
        found = found / found.norm(dim=1, keepdim=True)
        return LawSlices(found, torch.stack([quantiles(mixture, one, count) for one in found]))

    def distance(self, x: Tensor) -> float:
        """The sliced Wasserstein distance (the first) of points [N, D] from the law, in its standard deviations."""
        along = torch.from_numpy(np.sort((self.directions @ x.T).numpy(), axis=1))
        return float((along - self.quantiles).abs().mean() / self.quantiles.std(dim=1).mean())

    def floor(self, mixture: Mixture, repeats: int = 20, seed: int = 1) -> float:
        """What as many true draws measure on average: a sampler at or below that is as good as perfect."""
        generator = torch.Generator().manual_seed(seed)
        count = self.quantiles.shape[1]
        return float(np.mean([self.distance(mixture.sample(count, generator)) for _ in range(repeats)]))


def quantiles(mixture: Mixture, direction: Tensor, count: int, cells: int = 20_000) -> Tensor:
    """Of the mixture along a direction, where it is a mixture in one dimension with a distribution in closed form."""
    means, spreads = mixture.means @ direction, mixture.spreads
    low, high = float((means - 9 * spreads).min()), float((means + 9 * spreads).max())
    at = torch.linspace(low, high, cells, dtype=torch.float64)
    below = torch.special.ndtr((at[:, None] - means) / spreads) @ mixture.weights
    middles = (np.arange(count) + 0.5) / count
    return torch.from_numpy(np.interp(middles, below.numpy(), at.numpy()))


# --- The study ------------------------------------------------------------------------------------------------------

MIXTURES: dict[str, Callable[[], Mixture]] = {"smooth": oracle.smooth, "sharp": oracle.sharp}
NFE = (5, 8, 10, 14, 20, 30, 50)
_SCHEDULES = ("linear", "cosine", "edm", "flow")
GRIDS = tuple(name for name in grids.names() if name != "explicit")
# An inversion goes the other way. Beside the defaults: UniPC at the order that its paper advises without guidance.
SAMPLERS = (*(name for name in REGISTRY if name != "ddim_inversion"), "unipc:order=3")
_ASTRAY = 0.5  # a point is astray where it ends further from its truth than this part of the data's size


@dataclass(frozen=True)
class OracleStudyConfig:
    """What is compared. `nfe` are budgets of model calls: a sampler takes as many steps as fit into each."""

    samplers: tuple[str, ...] = SAMPLERS
    nfe: tuple[int, ...] = NFE
    grids: tuple[str, ...] = GRIDS
    schedules: tuple[str, ...] = _SCHEDULES
    mixtures: tuple[str, ...] = tuple(MIXTURES)
    points: int = 1024  # paths of each run
    orders: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses at once what no cell could run."""
        check_lists(self, "samplers", "nfe", "grids", "schedules", "mixtures")
        if list(self.nfe) != sorted(self.nfe) or not 1 <= self.nfe[0] <= self.nfe[-1] <= grids.MAX_STEPS:
            must = f"numbers of model calls that grow, from 1 to {grids.MAX_STEPS}"
            raise PellucidError(rule("nfe", must, list(self.nfe)), "study-nfe")
        for name, low in (("points", 16), ("seed", 0)):
            if getattr(self, name) < low:
                raise PellucidError(rule(name, f"at least {low}", getattr(self, name)), "study-count")
        for grid in self.grids:
            if grids.named(grid).name == "explicit":
                raise PellucidError(rule("grid", "one that has a level at any number of steps", grid), "study-grid")
        for mixture in self.mixtures:
            if mixture not in MIXTURES:
                raise PellucidError(rule("mixture", "one of " + ", ".join(MIXTURES), mixture), "study-mixture")
        for schedule in self.schedules:
            schedules.make(schedule)
        for one in map(setup_without_grid, self.samplers):
            if entry_of(one).family == "inversion":
                raise PellucidError(rule("sampler", "one that ends in an image", one.sampler), "study-sampler")
            compile_plan(one.sampler, steps=3, **dict(one.options))


class OracleCell(NamedTuple):
    part: str  # error or order
    schedule: str
    grid: str
    sampler: str


class OracleStudy(Study[OracleStudyConfig, OracleCell]):
    kind = "oracle"
    cell = OracleCell
    progress = "samplers × grids × schedules"
    bench: OracleBench | None = None  # of the schedule that is at work

    def cells(self) -> Iterator[OracleCell]:
        c = self.config
        for schedule in c.schedules:
            for grid in distinct_grids(schedule, c.grids):
                for sampler in c.samplers:
                    yield OracleCell("error", schedule, grid, sampler)
        for sampler in c.samplers if c.orders else ():
            yield OracleCell("order", "edm", "exponential", sampler)

    def make(self, cell: OracleCell) -> dict[str, Any]:
        started = time.perf_counter()
        setup = setup_without_grid(cell.sampler)
        if cell.part == "order":
            found = orders.of_sampler(setup)
        else:
            if self.bench is None or self.bench.name != cell.schedule:
                self.bench = OracleBench(self.config, cell.schedule)
            found = self.bench.measure(setup, cell.grid)
        return {**found, "seconds": round(time.perf_counter() - started, 4)}

    def results(self) -> OracleResults:
        return OracleResults.of(self.records.rows)

    def report(self) -> OracleResults:
        from pellucid.evidence.study import oracle_report

        oracle_report.write(self)
        return self.results()


def distinct_grids(schedule: str, names: tuple[str, ...]) -> list[str]:
    """The grids that lay levels of their own; one that lays those of an earlier one (lu, simple) is left out."""
    twins = same_levels(schedule, names)
    return [name for name in names if name not in twins]


def same_levels(schedule: str, names: tuple[str, ...]) -> dict[str, str]:
    """Grids that lay the levels of an earlier grid, and that one."""
    seen: dict[tuple[float, ...], str] = {}
    found: dict[str, str] = {}
    for name in names:
        levels: list[float] = []
        for steps in (5, 11):
            try:
                plan = compile_plan("ddim", schedule=schedule, grid=name, steps=steps)
            except PellucidError:
                break  # refused: recorded cell by cell
            levels += [float(f"{row.level.ratio:.9g}") for row in plan.rows]
        first = seen.setdefault(tuple(levels), name)
        found |= {name: first} if levels and first != name else {}
    return found


@dataclass(frozen=True)
class _MixtureField:
    """A mixture with the noise that its paths begin with, where the exact flow takes them, and its law."""

    mixture: Mixture
    noise: Tensor
    exact: Tensor
    law: LawSlices

    @staticmethod
    def of(mixture: Mixture, top: float, config: OracleStudyConfig) -> _MixtureField:
        noise = starting_noise(mixture, config.points, config.seed)
        return _MixtureField(mixture, noise, exact_flow(mixture, noise, top), LawSlices.of(mixture, config.points))

    def figures(self, plan: Plan, seed: int) -> dict[str, float] | None:
        """What a plan makes of the noise: how far off it is, and its law; None where it overflows."""
        begin = (self.noise * plan.initial_scale)[None]
        x = run(plan, Cloud(self.mixture), begin, noise=CloudNoise(seed))[0]
        if not bool(torch.isfinite(x).all()):
            return None
        return ({} if plan.stochastic else _distance_from(x, self.exact)) | {"sliced": self.law.distance(x)}


class OracleBench:
    """One schedule with what its runs are compared with."""

    def __init__(self, config: OracleStudyConfig, schedule: str) -> None:
        self.config, self.name = config, schedule
        self.schedule = schedules.make(schedule)
        top = top_of(self.schedule)
        self.fields = {name: _MixtureField.of(MIXTURES[name](), top, config) for name in config.mixtures}

    def measure(self, one: SamplerSetup, grid: str) -> dict[str, Any]:
        """A line for each budget: what was run, and how far off it ended; or why it cannot be run."""
        lines = []
        for nfe in self.config.nfe:
            try:
                plan = fitting_plan(one, self.schedule, grid, nfe)
            except PellucidError as error:
                lines.append({"nfe": nfe, "refused": error.code, "why": str(error)})
                continue
            found = {name: field.figures(plan, self.config.seed + 1) for name, field in self.fields.items()}
            about = {"nfe": nfe, "calls": plan.nfe, "steps": plan.grid["steps"], "stochastic": plan.stochastic}
            lost = {"refused": "overflow", "why": "x is not finite at the end"} if None in found.values() else {}
            lines.append(about | (lost or found))
        return {"runs": lines}


def fitting_plan(one: SamplerSetup, schedule: Schedule, grid: str, nfe: int) -> Plan:
    """The plan of the most steps whose calls fit into a budget."""
    steps = nfe
    while True:
        plan = compile_plan(one.sampler, schedule=schedule, grid=grid, steps=steps, **dict(one.options))
        if plan.nfe <= nfe:
            return plan
        steps -= max(1, (plan.nfe - nfe) // math.ceil(plan.nfe / steps))


def _distance_from(x: Tensor, exact: Tensor) -> dict[str, float]:
    """How far points ended from their truths: root mean square and its interval, median, share astray."""
    size = float(exact.pow(2).sum(1).mean().sqrt())
    square = ((x - exact) / size).pow(2).sum(1)
    mean, half = float(square.mean()), 1.96 * float(square.std()) / math.sqrt(len(square))
    return {
        "error": math.sqrt(mean),
        "low": math.sqrt(max(mean - half, 0.0)),
        "high": math.sqrt(mean + half),
        "median": float(square.median().sqrt()),
        "astray": float((square > _ASTRAY**2).double().mean()),
    }


# --- Results: the best at each NFE, equal samplers, where ranks change ------------------------------------------------

OracleFigure = Literal["error", "median", "sliced"]
_EQUAL = 1e-6  # errors of one table under two names differ by rounding alone


@dataclass(frozen=True)
class OracleRun:
    """One run on one mixture."""

    schedule: str
    grid: str
    sampler: str
    mixture: str
    nfe: int
    calls: int
    steps: int
    stochastic: bool
    figures: Mapping[str, float]

    @property
    def name(self) -> str:
        return f"{self.sampler} · {self.grid}"


@dataclass(frozen=True)
class OracleResults:
    """All lines of a study, and the orders of its samplers."""

    lines: tuple[OracleRun, ...]
    orders: tuple[Mapping[str, Any], ...]

    @staticmethod
    def of(rows: Iterable[Mapping[str, Any]]) -> OracleResults:
        lines, orders = [], []
        for row in rows:
            if row["part"] == "order":
                orders.append(row)
                continue
            place = (row["schedule"], row["grid"], row["sampler"])
            for one in (one for one in row["runs"] if "refused" not in one):
                about = (one["nfe"], one["calls"], one["steps"], is_noisy(row["sampler"]))
                held = {mixture: figures for mixture, figures in one.items() if isinstance(figures, dict)}
                lines += [OracleRun(*place, mixture, *about, figures) for mixture, figures in held.items()]
        return OracleResults(tuple(lines), tuple(orders))

    @cached_property
    def by_place(self) -> dict[tuple[str, str, int], list[OracleRun]]:
        found: dict[tuple[str, str, int], list[OracleRun]] = {}
        for line in self.lines:
            found.setdefault((line.schedule, line.mixture, line.nfe), []).append(line)
        return found

    @cached_property
    def by_all(self) -> dict[tuple[str, str, int, str, str], OracleRun]:
        return {(line.schedule, line.mixture, line.nfe, line.sampler, line.grid): line for line in self.lines}

    @cached_property
    def least(self) -> dict[tuple[str, str, int], float]:
        """The error of the best at each place where there is one."""
        found = {
            place: [x.figures["error"] for x in there if not x.stochastic] for place, there in self.by_place.items()
        }
        return {place: min(errors) for place, errors in found.items() if errors}

    @cached_property
    def schedules(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(line.schedule for line in self.lines))

    @cached_property
    def mixtures(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(line.mixture for line in self.lines))

    @cached_property
    def budgets(self) -> tuple[int, ...]:
        return tuple(sorted({line.nfe for line in self.lines}))

    @cached_property
    def samplers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(line.sampler for line in self.lines))

    @cached_property
    def grids(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(line.grid for line in self.lines))

    @cached_property
    def twins(self) -> dict[str, str]:
        """Samplers whose tables are those of an earlier one wherever both run, and that one."""
        runs: dict[str, dict[tuple[str, str, str, int], OracleRun]] = {}
        for line in self.lines:
            runs.setdefault(line.sampler, {})[line.schedule, line.grid, line.mixture, line.nfe] = line
        found: dict[str, str] = {}
        for i, name in enumerate(self.samplers):
            firsts = (one for one in self.samplers[:i] if one not in found and _same_tables(runs[name], runs[one]))
            if (first := next(firsts, None)) is not None:
                found[name] = first
        return found

    def at(self, schedule: str, mixture: str, nfe: int, figure: OracleFigure = "error") -> list[OracleRun]:
        """The lines at a place that have a figure, the best first; a table that has two names is there once."""
        kept = [one for one in self.by_place.get((schedule, mixture, nfe), []) if one.sampler not in self.twins]
        chosen = [one for one in kept if figure in one.figures and (figure == "sliced" or not one.stochastic)]
        return sorted(chosen, key=lambda line: line.figures[figure])

    def ranked(self, schedule: str, mixture: str, nfe: int, figure: OracleFigure = "error") -> list[OracleRun]:
        """The samplers at a place, each on its best grid, the best first."""
        return _firsts(self.at(schedule, mixture, nfe, figure), "sampler")

    def ranked_grids(self, schedule: str, mixture: str, nfe: int) -> list[OracleRun]:
        """The grids at a place, each with its best sampler, the best first."""
        return _firsts(self.at(schedule, mixture, nfe), "grid")

    def one(self, schedule: str, mixture: str, nfe: int, sampler: str, grid: str) -> OracleRun | None:
        return self.by_all.get((schedule, mixture, nfe, sampler, grid))

    def names_of(self, sampler: str) -> str:
        """A sampler with the other names of its table."""
        others = [name for name, first in self.twins.items() if first == sampler]
        return " = ".join([sampler, *others])


def is_noisy(sampler: str) -> bool:
    """Whether a sampler draws noise where it has steps enough for it; some do not at few steps."""
    return not entry_of(setup_without_grid(sampler)).deterministic


def _same_tables(a: Mapping[Any, OracleRun], b: Mapping[Any, OracleRun]) -> bool:
    both = a.keys() & b.keys()
    if not both or any(line.stochastic for line in (*a.values(), *b.values())):
        return False
    return all(math.isclose(a[k].figures["error"], b[k].figures["error"], rel_tol=_EQUAL) for k in both)


def _firsts(lines: Sequence[OracleRun], what: str) -> list[OracleRun]:
    kept: dict[str, OracleRun] = {}
    for line in lines:
        kept.setdefault(getattr(line, what), line)
    return list(kept.values())


def agreement(a: Sequence[str], b: Sequence[str]) -> float:
    """Kendall's τ between two orders of the names that are in both: 1 the same, −1 reversed."""
    place = {name: i for i, name in enumerate(b)}
    signs = [1.0 if x < y else -1.0 for x, y in combinations([place[name] for name in a if name in place], 2)]
    return sum(signs) / len(signs) if signs else math.nan


def changes(found: OracleResults, schedule: str, mixture: str) -> str:
    """Who is best from where to where: `deis · karras to 14, ipndm · karras from 20`."""
    bests = [(ranking[0].name, nfe) for nfe in found.budgets if (ranking := found.at(schedule, mixture, nfe))]
    runs = [(name, [nfe for _, nfe in own]) for name, own in groupby(bests, key=itemgetter(0))]
    return ", ".join(f"{name} at {a}" if not b else f"{name} from {a} to {b[-1]}" for name, (a, *b) in runs)

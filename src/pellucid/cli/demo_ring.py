"""`pellucid demo` without a bundle: five samplers carry noise to a ring of eight modes through its exact denoiser."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.cli import output
from pellucid.cli.demo_scenes import one_thread

if TYPE_CHECKING:
    from torch import Tensor

    from pellucid.core.oracle import Mixture
    from pellucid.core.plan import Plan
    from pellucid.core.schedule import Level

SAMPLERS = ("ddim", "euler_a", "heun", "dpmpp_2m", "unipc")
SCHEDULE, GRID = "scaled_linear", "karras"
CONVERGED, FINER = "dpmpp_3m", 200  # the trajectory that counts as converged: 3e-5 from its limit
SHOWN = 2000  # points that are drawn, and followed to the converged trajectory
COUNT = 8_000  # points whose distribution is measured
MOMENTS = 6
FORMING = (1.1, 0.14)  # sigma / alpha between which the modes form: most moments are drawn there
DIRECTIONS = 32
TRUTHS = 8  # times COUNT true draws stand for the truth
SEED = 3
STEPS = 12


def show(out: Path, steps: int, as_json: bool) -> None:
    """Samples a ring of eight modes with five samplers; draws the way from noise to data and prints the errors."""
    from pellucid.cli import draw, draw_ring
    from pellucid.core import oracle

    out = draw.destination(out, "--out")
    ring = oracle.ring()
    with output.progress("noise to data", len(SAMPLERS) + 2) as done, one_thread():
        truth = Truth(ring)
        shows = sample(ring, steps, truth, done)
        draw_ring.journey(ring, shows, out)
        done()
    if as_json:
        rows = [vars(show.score) for show in shows]
        output.print_json({"out": str(out), "steps": steps, "points": COUNT, "floor": truth.floor, "samplers": rows})
    else:
        show_scores([show.score for show in shows], truth, steps, out)


@dataclass(frozen=True)
class Score:
    """How good a run was. `error` is for deterministic samplers: the distance to the converged trajectory."""

    sampler: str
    title: str
    nfe: int
    error: float | None
    distance: float


@dataclass(frozen=True)
class Moment:
    """The points that are drawn, scaled to alpha² + sigma² = 1 so that every moment fits one frame."""

    ratio: float  # sigma / alpha
    x: Tensor  # [SHOWN, 2]


@dataclass(frozen=True)
class Show:
    """One line of the picture."""

    score: Score
    modes: Tensor  # [SHOWN] the mode in which a point ends
    moments: list[Moment]


# --- sampling --------------------------------------------------------------------------------------------------


def flat(ring: Mixture) -> Callable[..., Tensor]:
    """The exact denoiser of a cloud: all points are one image [1, points, 2], so that their noise is one draw."""
    return lambda x, level, time: ring(x.reshape(-1, 2), level).reshape(x.shape)


def sample(ring: Mixture, steps: int, truth: Truth, done: Callable[[], None]) -> list[Show]:
    """Every sampler from the same noise, and its score."""
    from pellucid.core import oracle
    from pellucid.core.compile import compile_plan
    from pellucid.core.loop import run
    from pellucid.core.samplers import REGISTRY

    made: dict[str, Any] = {"schedule": SCHEDULE, "grid": GRID}
    converged = compile_plan(CONVERGED, steps=finer(steps), **made)
    limit = run(converged, flat(ring), first(converged)[:, :SHOWN])[0]
    done()
    shows = []
    for name in SAMPLERS:
        plan = compile_plan(name, steps=steps, **made)
        watch = Watch(plan)
        end = run(plan, flat(ring), first(plan), seeds=[SEED], observers=[watch])[0]
        modes = mode_of(ring, end[:SHOWN])
        error = oracle.distance(end[:SHOWN], limit) if REGISTRY[name].deterministic else None
        score = Score(name, REGISTRY[name].title, plan.nfe, error, truth.distance(end))
        shows.append(Show(score, modes, watch.chosen()))
        done()
    return shows


def finer(steps: int) -> int:
    """The steps of the converged trajectory; more for long runs, which are near it themselves."""
    return max(FINER, 4 * steps)


def first(plan: Plan) -> Tensor:
    """The same noise for every plan, at its initial scale: [1, COUNT, 2]."""
    import torch

    from pellucid.core.noise import first_noise

    return first_noise(plan, SEED, (COUNT, 2), torch.empty(0, dtype=torch.float64))


def mode_of(ring: Mixture, x: Tensor) -> Tensor:
    return (x[:, None] - ring.means).norm(dim=2).argmin(dim=1)


class Watch:
    """An observer that keeps what the drawn points were at each level; the last word at a level counts."""

    def __init__(self, plan: Plan) -> None:
        self.seen: dict[float, Moment] = {}
        self.keep(plan.start, first(plan))

    def __call__(self, step: Any) -> None:
        self.keep(step.next_levels[0], step.x_next)

    def keep(self, level: Level, x: Tensor) -> None:
        common = level.to("vp")
        scale = (common.alpha + common.sigma) / (level.alpha + level.sigma)
        self.seen[round(level.ratio, 9)] = Moment(level.ratio, x[0, :SHOWN] * scale)

    def chosen(self) -> list[Moment]:
        """The first, the last, and those between nearest to even in log sigma where the modes form."""
        moments = sorted(self.seen.values(), key=lambda m: -m.ratio)
        middle = moments[1:-1]
        wanted = MOMENTS - 2
        if len(middle) > wanted:
            high, low = map(math.log, FORMING)
            goals = [high + i * (low - high) / (wanted - 1) for i in range(wanted)]
            middle = nearest_of(middle, goals)
        return [moments[0], *middle, moments[-1]]


def nearest_of(moments: Sequence[Moment], goals: Sequence[float]) -> list[Moment]:
    """For each goal in turn the moment nearest to it in log sigma, none of them twice, noisiest first."""
    left, found = list(moments), []
    for goal in goals:
        best = min(left, key=lambda m: abs(math.log(m.ratio) - goal))
        left.remove(best)
        found.append(best)
    return sorted(found, key=lambda m: -m.ratio)


# --- measuring -------------------------------------------------------------------------------------------------


class Truth:
    """True draws, seen from many directions: how far a cloud is from them, and how far a true cloud would be."""

    def __init__(self, ring: Mixture) -> None:
        import torch

        generator = torch.Generator().manual_seed(SEED)
        angle = torch.arange(DIRECTIONS, dtype=torch.float64) * (math.pi / DIRECTIONS)
        self.directions = torch.stack([angle.cos(), angle.sin()], dim=1)  # [DIRECTIONS, 2]
        ordered = self.ordered(ring.sample(COUNT * TRUTHS, generator))
        self.quantiles = ordered.reshape(DIRECTIONS, COUNT, TRUTHS).mean(dim=2)
        chance = [self.distance(ring.sample(COUNT, generator)) for _ in range(TRUTHS)]
        self.floor, self.spread = statistics.mean(chance), statistics.stdev(chance)

    def ordered(self, points: Tensor) -> Tensor:
        """Projections of the points, sorted: [DIRECTIONS, points]."""
        return (self.directions @ points.T).sort(dim=1).values

    def distance(self, points: Tensor) -> float:
        """The sliced Wasserstein-2 distance: the root mean square gap between quantiles."""
        return float((self.ordered(points) - self.quantiles).square().mean().sqrt())


def show_scores(scores: Sequence[Score], truth: Truth, steps: int, out: Path) -> None:
    columns = ("sampler", "NFE", "error", "distance")
    made = output.table(*columns, right=columns[1:])
    for score in scores:
        error = "–" if score.error is None else f"{score.error:.4f}"
        made.add_row(f"{score.title} [dim]({score.sampler})[/]", str(score.nfe), error, f"{score.distance:.4f}")
    made.add_row("[dim]true draws[/]", "", "", f"{truth.floor:.4f} ± {truth.spread:.4f}")
    screen = output.console()
    screen.print(f"A ring of eight modes in {steps} steps ({SCHEDULE}, {GRID} grid)", style="bold")
    screen.print(made)
    for words in (
        f"error: relative distance to the converged trajectory of the same start ({CONVERGED}, {finer(steps)} steps);",
        "       – where fresh noise leads elsewhere.",
        f"distance: sliced Wasserstein of {COUNT} points to the true density; last line: that of true draws.",
        f"wrote {out}",
    ):
        screen.print(words, soft_wrap=True, markup=False)

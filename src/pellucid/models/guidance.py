"""Guidance as a value: a scale, or how it changes over a run, and rules. It is recorded in the recipe of an image.

`Guidance(7.5)`, `Guidance(Ramp(10, 2, "cosine"), (Rescale(0.7), PAG(3.0)))`, `guarded(12)`, `Guidance.parse("7.5")`.
`Guidance.parse` is the one place that gives words a meaning: in Python, on the command line, in studies and in the
studio a number is plain classifier-free guidance, and `guarded NUMBER` is the preset.
Steps of a run are its distinct levels in order, so a level has one scale however often a sampler calls there
(Heun calls twice), and solvers of any order see one vector field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

from pellucid.core.errors import PellucidError, rule
from pellucid.core.plan import Plan
from pellucid.core.schedule import Level, Schedule
from pellucid.models import rules as kinds
from pellucid.models.rules import (
    APG,
    CFG,
    MOST,
    CFGZero,
    Combination,
    Correction,
    Extra,
    Interval,
    Rescale,
    Rule,
    SigmaInterval,
    check_choice,
    check_number,
    within,
)

GUARDED_SCALE = 7.0
_GUARDED_PHI = 0.7
_TAMING = (Correction, APG, Interval, SigmaInterval)  # rules that tame a large scale
_SAME = 1e-9  # levels whose sigma / alpha agree to this are one step


@dataclass(frozen=True)
class Ramp:
    """A scale that goes from `first` at the first step to `last` at the last one."""

    first: float
    last: float
    shape: Literal["linear", "cosine"] = "linear"

    def __post_init__(self) -> None:
        for name in ("first", "last"):
            check_number(f"{name} of the scale", getattr(self, name), 0, MOST)
        check_choice("shape of the scale", self.shape, ("linear", "cosine"))

    @property
    def ends(self) -> tuple[float, ...]:
        return (self.first, self.last)

    def at(self, step: int, steps: int) -> float:
        progress = step / (steps - 1) if steps > 1 else 0.0
        share = progress if self.shape == "linear" else (1.0 - math.cos(math.pi * progress)) / 2.0
        return self.first + (self.last - self.first) * share


@dataclass(frozen=True)
class ScaleList:
    """One scale per step; a shorter list is spread evenly over the run."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise PellucidError(rule("scale", "a number, or a list of at least one", ()), "guidance")
        for value in self.values:
            check_number("scale", value, 0, MOST)

    @property
    def ends(self) -> tuple[float, ...]:
        return self.values

    def at(self, step: int, steps: int) -> float:
        if len(self.values) > steps:
            raise PellucidError(
                rule("scale", f"a list of at most {steps} values, one per step", self.values), "guidance"
            )
        return float(self.values[step * len(self.values) // steps])


Scale = float | Ramp | ScaleList


@dataclass(frozen=True)
class Dose:
    """What one image gets at one level: its scale, the weight of each extra term, and whether its output is zeroed."""

    scale: float
    extras: tuple[float, ...] = ()
    inside: bool = True  # in the interval, where a sampler that keeps uncond apart may ask for it
    zero: bool = False

    @property
    def guided(self) -> bool:
        return self.scale != 1.0

    @property
    def changed(self) -> bool:
        return self.guided or any(self.extras)

    @property
    def moved(self) -> bool:
        """Whether the prediction is another one than with the prompt alone."""
        return self.changed or self.zero


@dataclass(frozen=True)
class Guidance:
    """A scale and rules. At scale 1 and without an extra term the prediction is cond itself, untouched."""

    scale: Scale = 7.5
    rules: tuple[Rule, ...] = ()
    notes: tuple[str, ...] = field(default=(), compare=False)  # what a preset changed, in words

    def __post_init__(self) -> None:
        scale, given = self.scale, self.rules
        if isinstance(scale, list | tuple):
            scale = ScaleList(tuple(scale))
        elif not isinstance(scale, Ramp | ScaleList):
            check_number("guidance scale", scale, 0, MOST)
            scale = float(scale)
        if not isinstance(given, list | tuple) or not all(isinstance(r, Rule) for r in given):
            raise PellucidError(rule("rules", f"a tuple of {', '.join(kinds.RULES)}", given), "guidance")
        for group in (*kinds.ONE_OF, *((kind,) for kind in kinds.ORDER)):
            if sum(isinstance(r, group) for r in given) > 1:
                raise PellucidError(
                    rule("rules", f"at most one {' or '.join(k.name for k in group)}", [r.name for r in given]),
                    "guidance-twice",
                )
        object.__setattr__(self, "scale", scale)
        object.__setattr__(self, "rules", tuple(sorted(given, key=lambda r: kinds.ORDER.index(type(r)))))

    @cached_property
    def combination(self) -> Combination:
        return next((r for r in self.rules if isinstance(r, Combination)), CFG())

    @cached_property
    def extras(self) -> tuple[Extra, ...]:
        return tuple(r for r in self.rules if isinstance(r, Extra))

    @cached_property
    def corrections(self) -> tuple[Correction, ...]:
        return tuple(r for r in self.rules if isinstance(r, Correction))

    @cached_property
    def acts(self) -> tuple[Rule, ...]:
        """The rules without those that say when: what images of one batch must share."""
        return tuple(r for r in self.rules if not isinstance(r, Interval | SigmaInterval))

    @property
    def most(self) -> float:
        """The largest scale of a run."""
        return self.scale if isinstance(self.scale, float) else max(self.scale.ends)

    @property
    def untamed(self) -> bool:
        """Whether a scale is above the guard's, with no rule to tame it."""
        return self.most > GUARDED_SCALE and not any(isinstance(r, _TAMING) for r in self.rules)

    def same_rules(self, other: Guidance) -> bool:
        """Whether two are the same scale and rules; a dialect sets the space in which they act."""
        return self._on_raw() == other._on_raw()

    @property
    def needs_uncond(self) -> bool:
        return self.scale != 1.0 if isinstance(self.scale, float) else any(v != 1.0 for v in self.scale.ends)

    @property
    def needs_plan(self) -> bool:
        """Whether anything depends on where a run stands, or on what came before in it."""
        timed = any(
            isinstance(r, Interval) or (isinstance(r, Extra) and (r.start, r.stop) != (0, 1)) for r in self.rules
        )
        first = self.combination
        kept = (isinstance(first, APG) and first.momentum) or (isinstance(first, CFGZero) and first.zero_steps)
        return timed or bool(kept) or not isinstance(self.scale, float)

    def dose(self, sigma: float, step: int = 0, steps: int = 1) -> Dose:
        """What step `step` of `steps`, at a sigma as the schedule quotes it, gets."""
        inside = True
        for r in self.rules:
            if isinstance(r, Interval):
                inside = within(r.start, r.stop, step, steps)
            elif isinstance(r, SigmaInterval):
                inside = r.low < sigma <= r.high
        scale = self.scale if isinstance(self.scale, float) else self.scale.at(step, steps)
        extras = tuple(r.weight if within(r.start, r.stop, step, steps) else 0.0 for r in self.extras)
        zero = isinstance(self.combination, CFGZero) and step < self.combination.zero_steps
        return Dose(scale if inside else 1.0, extras, inside, zero)

    def bind(self, plan: Plan | None, schedule: Schedule) -> PlanGuidance:
        """The guidance along one plan: a dose for each of its levels."""
        return PlanGuidance(self, schedule, plan)

    def as_diffusers(self) -> Guidance:
        """As diffusers' pipelines guide: rules act on the raw output, and a scale below 1 guides no more than 1."""
        return self.at_least_one()._on_raw()

    def at_least_one(self) -> Guidance:
        """A scale below 1 as diffusers' pipelines take it: the conditional prediction alone, which is scale 1."""
        if not isinstance(self.scale, float) or self.scale >= 1.0:
            return self
        note = f"a guidance scale of {self.scale:g} was run as 1, without guidance, as diffusers does below 1"
        return replace(self, scale=1.0, notes=(*self.notes, note))

    def _on_raw(self) -> Guidance:
        """The rules as diffusers' pipelines and guiders apply them: on the raw output; APG from uncond."""
        changed = [replace(r, space="raw") if isinstance(r, Combination | Correction) else r for r in self.rules]
        return replace(self, rules=tuple(replace(r, base="uncond") if isinstance(r, APG) else r for r in changed))

    def to_dict(self) -> dict[str, Any]:
        scale: Any = self.scale
        if isinstance(scale, Ramp):
            scale = {"first": scale.first, "last": scale.last, "shape": scale.shape}
        elif isinstance(scale, ScaleList):
            scale = list(scale.values)
        out = {"scale": scale, "rules": [r.to_dict() for r in self.rules]}
        return {**out, "notes": list(self.notes)} if self.notes else out

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Guidance:
        unknown = sorted(set(data) - {"scale", "rules", "notes"}) if isinstance(data, Mapping) else [data]
        if unknown or not isinstance(data.get("rules", []), list | tuple):
            raise PellucidError(rule("guidance", "an object with scale, rules and notes", data), "guidance")
        scale = data.get("scale", 7.5)
        if isinstance(scale, Mapping):
            if not {"first", "last"} <= set(scale) <= {"first", "last", "shape"}:
                raise PellucidError(rule("scale", "a number, a list, or first, last and shape", scale), "guidance")
            scale = Ramp(**scale)
        made = []
        for entry in data.get("rules", []):
            if not isinstance(entry, Mapping) or not isinstance(entry.get("rule"), str):
                raise PellucidError(rule("rules", "objects with a rule's name under `rule`", entry), "guidance")
            made.append(kinds.make(entry["rule"], {k: v for k, v in entry.items() if k != "rule"}))
        return Guidance(scale, tuple(made), tuple(str(n) for n in data.get("notes", ())))

    @staticmethod
    def parse(value: Any) -> Guidance:
        """From a number, a list of scales, a dict, a text such as `7.5 + rescale phi=0.7`, or as it is."""
        if isinstance(value, Guidance):
            return value
        if isinstance(value, str):
            return _from_text(value)
        return Guidance.from_dict(value) if isinstance(value, Mapping) else Guidance(value)

    def text(self) -> str:
        """The guidance as `parse` reads it: scale, then rules with the options that are not the default."""
        return " + ".join([_scale_text(self.scale), *(_rule_text(r) for r in self.rules)])


def scale_notes(guidance: Guidance) -> list[str]:
    """What a scale below 1 does, and what a high one may do where no rule is there to tame it."""
    if isinstance(guidance.scale, float) and guidance.scale < 1.0:
        effect = "weakens the prompt" if guidance.scale else "leaves the prompt out"
        return [
            f"a guidance scale of {guidance.scale:g} {effect}; 1 follows it without guidance, "
            "which is what any scale up to 1 does in diffusers"
        ]
    if not guidance.untamed:
        return []
    return [
        f"a guidance scale of {guidance.most:g} may burn colours, repeat shapes and make all images alike; "
        f"'guarded {guidance.most:g}' caps it at {GUARDED_SCALE:g} and rescales"
    ]


def guarded(asked: Any = GUARDED_SCALE) -> Guidance:
    """The default preset: no scale above 7, and rescale on. What it changed is in `notes`."""
    wish = Guidance.parse(asked)
    scale, notes = wish.scale, list(wish.notes)
    if wish.most > GUARDED_SCALE:
        notes.append(f"guidance scale {wish.most:g} was capped at {GUARDED_SCALE:g} by the guarded preset")
        if isinstance(scale, Ramp):
            scale = replace(scale, first=min(scale.first, GUARDED_SCALE), last=min(scale.last, GUARDED_SCALE))
        elif isinstance(scale, ScaleList):
            scale = ScaleList(tuple(min(v, GUARDED_SCALE) for v in scale.values))
        else:
            scale = GUARDED_SCALE
    rest = tuple(r for r in wish.rules if not (isinstance(r, Rescale) and r.phi == 0))
    on = any(isinstance(r, Rescale) for r in rest)
    return Guidance(scale, rest if on else (*rest, Rescale(_GUARDED_PHI)), tuple(notes))


# --- along a plan ------------------------------------------------------------------------------------------------


class PlanGuidance:
    """A guidance along one plan: which dose each level gets. Levels between two steps count as the later one."""

    def __init__(self, guidance: Guidance, schedule: Schedule, plan: Plan | None) -> None:
        self.guidance, self.schedule = guidance, schedule
        self.falling = plan is None or plan.end.ratio <= plan.rows[0].level.ratio  # an inversion climbs
        self.ratios = [] if plan is None else steps_of(plan, self.falling)
        self.doses = {} if plan is None else {r.level: self.find(r.level) for r in plan.rows}

    def at(self, level: Level) -> Dose:
        found = self.doses.get(level)
        return self.find(level) if found is None else found

    def find(self, level: Level) -> Dose:
        sigma = float(self.schedule.sigma_of(level.ratio))
        steps = max(len(self.ratios), 1)
        return self.guidance.dose(sigma, min(self.step(level.ratio), steps - 1), steps)

    def step(self, ratio: float) -> int:
        return steps_before(self.ratios, ratio, self.falling)


def steps_before(ratios: Sequence[float], ratio: float, falling: bool = True) -> int:
    """How many of a run's levels come before one."""
    if falling:
        return sum(r > ratio * (1 + _SAME) for r in ratios)
    return sum(r < ratio * (1 - _SAME) for r in ratios)


def steps_of(plan: Plan, falling: bool) -> list[float]:
    """sigma / alpha of the distinct levels of a plan, in the order of the run. Restarts pass old levels again."""
    distinct: list[float] = []
    for ratio in sorted((r.level.ratio for r in plan.rows), reverse=falling):
        if not distinct or not math.isclose(ratio, distinct[-1], rel_tol=_SAME):
            distinct.append(ratio)
    return distinct


# --- as text -----------------------------------------------------------------------------------------------------


def _from_text(text: str) -> Guidance:
    """`7.5`, `linear:10:2`, `7.5,5,3`, `off`, `guarded 9`, each with ` + rule option=value` behind it."""
    first, *others = (part.strip() for part in text.split(" + "))
    preset, _, rest = first.partition(" ")
    capped = preset == "guarded"
    scale = _scale_from_text((rest.strip() or str(GUARDED_SCALE)) if capped else first)
    made = []
    for part in others:
        name, *options = part.split() or [""]
        pairs = [option.partition("=") for option in options]
        if any(not sign or not value for _, sign, value in pairs):
            raise PellucidError(rule(f"options of {name}", "words such as phi=0.7", part), "guidance")
        made.append(kinds.make(name, {key: _value_from_text(value) for key, _, value in pairs}))
    found = Guidance(scale, tuple(made))
    return guarded(found) if capped else found


def _scale_from_text(text: str) -> Scale:
    if text == "off":
        return 1.0
    shape, *ends = text.split(":")
    try:
        if shape in ("linear", "cosine") and len(ends) == 2:
            return Ramp(float(ends[0]), float(ends[1]), shape)  # type: ignore[arg-type]
        values = [float(v) for v in text.removesuffix(",").split(",")]
    except PellucidError:
        raise
    except ValueError:
        must = "a number, `off`, `guarded`, numbers with commas, or linear:FIRST:LAST or cosine:FIRST:LAST"
        raise PellucidError(rule("guidance", must, text), "guidance") from None
    return ScaleList(tuple(values)) if "," in text else values[0]


def _value_from_text(text: str) -> Any:
    if "," in text:
        return tuple(_value_from_text(part) for part in text.split(",") if part)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _scale_text(scale: Scale) -> str:
    if isinstance(scale, float):
        return short(scale)
    if isinstance(scale, ScaleList):
        return ",".join(short(v) for v in scale.values) + ("," if len(scale.values) == 1 else "")
    return f"{scale.shape}:{short(scale.first)}:{short(scale.last)}"


def _rule_text(r: Rule) -> str:
    words = [r.name]
    for f in fields(r):
        value = getattr(r, f.name)
        if value != f.default:
            words.append(f"{f.name}=" + (",".join(map(str, value)) if isinstance(value, tuple) else short(value)))
    return " ".join(words)


def short(value: Any) -> str:
    """A number in full precision without a needless `.0`; anything else as it is."""
    return repr(int(value)) if isinstance(value, float) and value.is_integer() else str(value)

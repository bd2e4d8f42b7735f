"""Two traces compared: the first step that diverges, and by what.

Within a step things are compared in the order in which a run makes them, and the first that differs names the cause:

1. the row's level, or the time that is passed to the network: **level**;
2. x, as the network is called with it: **noise** (at the first step: the first noise, or another start; later: churn),
   or **plan** where the same noise is scaled differently;
3. the prediction with the prompt, and then the one without: **model** (weights, prompt, adapters, kernels), or
   **guidance** where the recipes differ in it, and not in the model, and by no more than rounding: other batches;
4. x0, where these were the same, or a prediction that only one of the runs made: **guidance** (or a filter);
5. the level where the row lands: **level**; its weights: **plan**;
6. the next x: **noise** where the row draws some, else **constraint** (a mask, or a function of the caller's).

All before were the same, bit by bit, so that nothing but the named cause can have made the difference. Which bits are
the same is known from digests, with tensors or without; how far apart two tensors are, from the tensors. Of traces
without them only the norms are known, whose difference is a lower bound of that distance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from pellucid.core.plan import Row, row_changes
from pellucid.core.schedule import Level
from pellucid.core.wording import counted, short
from pellucid.evidence.trace.header import Header
from pellucid.evidence.trace.measures import DIGESTED
from pellucid.evidence.trace.reading import OLD, Step, Trace
from pellucid.models.guidance import Guidance
from pellucid.pipeline import fingerprint

# --- differences of headers -------------------------------------------------------------------------------------------

Cause = Literal["plan", "level", "noise", "model", "guidance", "constraint", "nan"]
_SHOWN = 60  # characters of a value

# The fields of a recipe, and what they can change first. What the plan has too is compared there, seeds with noise.
_FIELDS: dict[str, tuple[Cause, ...]] = {
    "strength": ("level", "noise"),
    "denoising_start": ("level", "noise"),
    "denoising_end": ("level",),
    "inputs": ("noise", "model", "constraint"),
    "model": ("model",),
    "model_hash": ("model", "noise"),
    "prompt": ("model",),
    "negative_prompt": ("model",),
    "weighting": ("model",),
    "clip_skip": ("model",),
    "conditioning": ("model",),
    "adapters": ("model",),
    "size": ("noise", "model"),
    "dtype": ("model",),
    "policy": ("model",),
    "guidance": ("guidance",),
}
_PLANS: dict[str, tuple[Cause, ...]] = {
    "name": ("plan", "level"),
    "basis": ("plan",),
    "target": ("model",),
    "schedule": ("level", "model"),
    "grid": ("level",),
    "dialect": ("plan", "level"),
    "options": ("plan",),
    "initial_scale": ("plan", "noise"),
    "rows": ("level", "plan"),
}


@dataclass(frozen=True)
class HeaderDiff:
    """One difference of two headers, for one image or (None) for all, and what it can change."""

    name: str
    mine: str
    theirs: str
    causes: tuple[Cause, ...]
    image: int | None = None

    def text(self) -> str:
        where = "" if self.image is None else f" of image {self.image}"
        return f"{self.name}{where}: {self.mine} → {self.theirs}"


def header_diff(a: Header, b: Header) -> list[HeaderDiff]:
    """All differences of two headers."""
    rows: list[tuple[str, Any, Any, tuple[Cause, ...]]] = [
        ("images", a.images, b.images, ()),
        ("shape", a.shape, b.shape, ("noise", "model")),
        ("dtype of x", a.dtype, b.dtype, ("noise", "model")),
        ("noise", a.noise.get("kind"), b.noise.get("kind"), ("noise",)),
        ("clock of the noise", a.noise.get("clock"), b.noise.get("clock"), ("noise",)),
        ("seeds", a.noise.get("seeds"), b.noise.get("seeds"), ("noise",)),
        *((f"version of {k}", v, b.versions.get(k), ("model", "plan")) for k, v in a.versions.items()),
        *((f"{k} of the machine", v, b.machine.get(k), ("model",)) for k, v in a.machine.items()),
        ("recipes", len(a.recipes), len(b.recipes), ()),
    ]
    found = [HeaderDiff(name, _shown(x), _shown(y), causes) for name, x, y, causes in rows if x != y]
    for name, causes in _PLANS.items():
        mine, theirs = (_short_plans(header, name) for header in (a, b))
        if mine != theirs:
            what = "model calls" if name == "rows" else name
            found.append(HeaderDiff(f"{what} of the plan", mine, theirs, causes))
    pairs = list(zip(a.recipes, b.recipes, strict=False))
    every = [_recipe_diff(x, y) for x, y in pairs]
    shared = [diff for diff in every[0] if all(diff in other for other in every)] if every else []
    for image, own in enumerate(every):
        where = image if len(pairs) > 1 else None
        found += [replace(diff, image=where) for diff in own if diff not in shared]
    return found + shared


def _short_plans(header: Header, name: str) -> str:
    """A field of the plans in short, of the rows their number."""
    values = [header.plan_tables[which].get(name) for which in header.plan_of]
    texts = [_shown(len(value) if name == "rows" and isinstance(value, list) else value) for value in values]
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts)[:_SHOWN]


def _recipe_diff(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[HeaderDiff]:
    found = []
    for name, causes in _FIELDS.items():
        mine, theirs = a.get(name), b.get(name)
        if mine == theirs:
            continue
        if name == "model_hash":
            parts = fingerprint.differing(str(mine), str(theirs))
            found.append(HeaderDiff("weights or settings", ", ".join(parts), "others", causes))
        elif name == "model" and a.get("model_hash") and a["model_hash"] == b.get("model_hash"):
            found.append(HeaderDiff("name of the same model", _shown(mine), _shown(theirs), ()))
        else:
            found.append(HeaderDiff(name, _shown(mine), _shown(theirs), causes))
    return found


def _shown(value: Any) -> str:
    """A value in a few words."""
    if isinstance(value, Mapping) and "scale" in value and "rules" in value:
        return Guidance.from_dict(value).text()
    if isinstance(value, Mapping):
        text = ", ".join(f"{k}={v}" for k, v in value.items() if v not in (None, {}, [])) or "none"
    else:
        text = "none" if value is None else str(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


# --- differences of steps ---------------------------------------------------------------------------------------------

_ROUNDING = 1e-2  # of a prediction: no more than this is made by a batch of another size, in bfloat16 either
_CLOSE = 1e-12  # levels, times and weights that agree to this are the same: compilers round


@dataclass(frozen=True)
class Divergence:
    """Where one image of two runs diverges. `distance` is relative; `least` where it is a lower bound, from norms."""

    step: int
    image: int
    cause: Cause
    what: str
    detail: str
    distance: float | None = None
    least: bool = False


@dataclass(frozen=True)
class StepDistance:
    """How far apart two runs are at a step, relative, over all images; NaN where it is not known."""

    step: int
    x: float
    x0: float


@dataclass(frozen=True)
class Comparison:
    """Two traces, compared. `why` are the differences of the headers that can have caused the first divergence."""

    first: Divergence | None
    images: tuple[Divergence, ...]  # the first of each image that diverges
    headers: tuple[HeaderDiff, ...]
    distances: tuple[StepDistance, ...]
    notes: tuple[str, ...]
    steps: int  # that both have

    @property
    def same(self) -> bool:
        return self.first is None

    @property
    def why(self) -> tuple[HeaderDiff, ...]:
        first = self.first
        if first is None:
            return ()
        return tuple(d for d in self.headers if first.cause in d.causes and d.image in (None, first.image))


def compare(a: Trace, b: Trace, tolerance: float = 0.0, *, parts: bool = True) -> Comparison:
    """The first step at which two runs diverge, and by what; `parts` False leaves out cond and uncond.

    With a `tolerance`, tensors that are no farther apart than this part of their norm count as the same.
    """
    for one in (a, b):
        one.verify()
    steps = min(len(a.steps), len(b.steps))
    images = range(min(a.header.images, b.header.images))
    found = [_ImagePair(a, b, image, tolerance, parts).first() for image in images]
    parted = sorted((d for d in found if d is not None), key=lambda d: (d.step, d.image))
    first = parted[0] if parted else _ending(a, b, steps)
    headers = tuple(header_diff(a.header, b.header))
    return Comparison(first, tuple(parted), headers, _distances(a, b), tuple(_notes(a, b, tolerance)), steps)


def _ending(a: Trace, b: Trace, steps: int) -> Divergence | None:
    """Runs of different length that are the same as far as both go, though the shorter plan is at its end."""
    if len(a.steps) == len(b.steps) or not (a.whole and b.whole):
        return None
    return Divergence(steps, 0, "plan", "end", f"one run ends after {steps} model calls, the other continues")


def _notes(a: Trace, b: Trace, tolerance: float) -> list[str]:
    found = [
        f"{name} was broken off after {len(t.steps)} of {t.header.steps} steps: {t.header.ended or 'killed or cut'}"
        for name, t in (("A", a), ("B", b))
        if not t.whole
    ]
    if a.header.images != b.header.images:
        found.append(f"A has {a.header.images} images, B {b.header.images}: those in both are compared, by place")
    found += [f"{name}: {OLD}" for name, t in (("A", a), ("B", b)) if t.found.sound is None]
    blind = not (a.has_images and b.has_images)
    if blind and tolerance:
        found.append("without tensors the tolerance is of norms: other tensors of the same norm count as the same")
    return found


@dataclass(frozen=True)
class _ImagePair:
    """One image in two traces."""

    a: Trace
    b: Trace
    image: int
    tolerance: float
    parts: bool

    def first(self) -> Divergence | None:
        """Where the image parts, among the steps that both traces have."""
        for index, steps in enumerate(zip(self.a.steps, self.b.steps, strict=False)):
            runs = [self.image in step.images for step in steps]
            if not all(runs):
                detail = f"one run of image {self.image} ends after {index} model calls, the other continues"
                return Divergence(index, self.image, "plan", "end", detail) if any(runs) else None
            found = self.within(index)
            if found is not None:
                return found
        return None

    def step_of(self, trace: Trace, index: int) -> tuple[Step, Row, Level]:
        """A step, the image's row in it, and the level where the row lands."""
        step = trace.steps[index]
        place = step.of(self.image)
        return step, step.rows[place], step.next_levels[place]

    def within(self, index: int) -> Divergence | None:
        """The first difference within a step, in the order in which a run makes things."""
        (_, one, landing), (_, other, landing_b) = (self.step_of(trace, index) for trace in (self.a, self.b))
        changed = _called_elsewhere(one, other)
        if changed:
            return Divergence(index, self.image, "level", changed[0], changed[1])
        for what in ("x", *(("cond", "uncond") if self.parts else ()), "x0"):
            found = self.both_nan(index, "x" if what == "x" else "x0") or self.tensor(index, what)
            if found is not None:
                return found
        if not _near_level(landing, landing_b):
            detail = f"the row lands at sigma {landing.sigma:.6g}, the other at {landing_b.sigma:.6g}"
            return Divergence(index, self.image, "level", "landing", detail)
        weights = _weight_changes(one, other, _CLOSE)
        if weights:
            return Divergence(index, self.image, "plan", weights[0][0], _weight_words(weights))
        return self.both_nan(index, "x_next") or self.tensor(index, "x_next")

    def both_nan(self, index: int, what: str) -> Divergence | None:
        """Where both runs are NaN there is nothing left to compare, whatever their bits: they are not the same."""
        if not all(_is_nan(trace, index, what, self.image) for trace in (self.a, self.b)):
            return None
        detail = f"{'the next x' if what == 'x_next' else what} holds NaN in both: the rest cannot be compared"
        return Divergence(index, self.image, "nan", what, detail)

    def tensor(self, index: int, what: str) -> Divergence | None:
        """Where a tensor differs, and by the rows, which cause it has."""
        steps = [trace.steps[index] for trace in (self.a, self.b)]
        left, right = (int(step.digests[what][step.of(self.image)]) for step in steps)
        if left == right:
            return None
        if 0 in (left, right):  # one of the runs did not predict it
            having = "the first" if right == 0 else "the second"
            which = {"cond": "with the prompt", "uncond": "without the prompt"}.get(what, what)
            return Divergence(index, self.image, "guidance", what, f"only {having} run made a prediction {which}")
        distance, least = self.distance(index, what)
        unseen = what == "uncond"  # neither its tensor nor its norm is kept: its effect shows in x0
        if self.tolerance and (unseen or (distance is not None and distance <= self.tolerance)):
            return None
        cause, detail = self.grown(index, what) or self.regrouped(what, distance) or self.blame(index, what)
        return Divergence(index, self.image, cause, what, detail, distance, least)

    def grown(self, index: int, what: str) -> tuple[Cause, str] | None:
        """With a tolerance, x may exceed it because of what was within it before: then that is the cause."""
        row = self.step_of(self.a, index)[1]
        if not self.tolerance or what not in ("x", "x_next"):
            return None
        if (row.draws or row.pre_noise) and self.a.header.noise != self.b.header.noise:
            return None
        root = replace(self, tolerance=0.0).first()
        assert root is not None
        if (root.step, root.what) == (index, what):
            return None
        return root.cause, f"grown beyond the tolerance from step {root.step}, where {root.detail}"

    def regrouped(self, what: str, distance: float | None) -> tuple[Cause, str] | None:
        """Another guidance calls the network with other batches, which round otherwise: then that is the cause."""
        recipes = [trace.header.recipes[self.image : self.image + 1] for trace in (self.a, self.b)]
        hashes = {recipe.get("model_hash") for held in recipes for recipe in held}
        small = distance is None or distance <= _ROUNDING
        if what not in ("cond", "uncond") or not small or len(hashes) != 1 or None in hashes:
            return None
        diffs = header_diff(self.a.header, self.b.header)
        causes = {cause for diff in diffs if diff.image in (None, self.image) for cause in diff.causes}
        if "guidance" not in causes or "model" in causes:
            return None
        may = "that rounds otherwise" if distance is not None else "that may round otherwise"
        return "guidance", f"the model is the same, guidance calls it in another batch, and {may}"

    def blame(self, index: int, what: str) -> tuple[Cause, str]:
        """The cause, by what differs although all before it was the same."""
        (step, one, _), (_, other, _) = (self.step_of(trace, index) for trace in (self.a, self.b))
        if what == "x":
            scales = [t.header.plan_tables[t.header.plan_of[self.image]]["initial_scale"] for t in (self.a, self.b)]
            if index == 0 and scales[0] != scales[1] and self.a.header.noise == self.b.header.noise:
                return "plan", f"the first noise is scaled by {scales[0]:.9g}, the other by {scales[1]:.9g}"
            if one.pre_noise != other.pre_noise:
                return "plan", f"churn adds {one.pre_noise:.6g} of noise, the other {other.pre_noise:.6g}"
            if index == 0:
                return "noise", "the first x differs: other noise, or another start"
            return "noise", "x was the same after the row before and differs at the call: other noise was added"
        if what == "cond":
            return "model", "at the same x and level the network predicts something else with the prompt"
        if what == "uncond":
            return "model", "with the prompt the prediction is the same, without it it is another"
        if what == "x0":
            if self.parts and step.digests["cond"][step.of(self.image)] != 0:
                return "guidance", "the predictions are the same; what guidance or a filter makes of them is not"
            return "model", "at the same x and level the denoiser predicts something else"
        slight = _weight_changes(one, other, 0.0)
        if slight:
            return "plan", _weight_words(slight)
        if one.draws or other.draws:
            return "noise", "the row is the same and so is all that it combines, except the noise that it draws"
        return "constraint", "the row and all that it combines are the same: something changed x after it"

    def distance(self, index: int, what: str) -> tuple[float | None, bool]:
        """(the relative distance, whether it is a lower bound): of tensors where both have them, or of norms."""
        left, right = (_value_of(trace, index, what, self.image) for trace in (self.a, self.b))
        if left is not None and right is not None:
            return _relative(left, right), False
        mine, theirs = (_norm_of(trace, index, what, self.image) for trace in (self.a, self.b))
        if mine is None or theirs is None:
            return None, True
        return abs(mine - theirs) / (theirs or math.nan), True


def _called_elsewhere(one: Row, other: Row) -> tuple[str, str] | None:
    """Whether the network is called at another level, or passed another time, and how."""
    if not _near_level(one.level, other.level):
        mine, theirs = (f"(alpha {row.level.alpha:.6g}, sigma {row.level.sigma:.6g})" for row in (one, other))
        return "level", f"the network is called at {mine}, in the other run at {theirs}"
    if abs(one.time - other.time) > _CLOSE * max(abs(one.time), abs(other.time)):
        return "time", f"at one level the network is passed time {one.time:.6g}, in the other run {other.time:.6g}"
    return None


def _near_level(a: Level, b: Level) -> bool:
    return all(abs(x - y) <= _CLOSE * max(abs(x), abs(y)) for x, y in ((a.alpha, b.alpha), (a.sigma, b.sigma)))


def _weight_changes(one: Row, other: Row, tolerance: float) -> list[tuple[str, Any, Any]]:
    """Weights, held predictions and addresses of noise that differ between two rows of one level."""
    return [c for c in row_changes(one, other, tolerance) if c[0] not in ("alpha", "sigma", "time", "pre_noise")]


def _weight_words(changed: Sequence[tuple[str, Any, Any]]) -> str:
    words = [f"{name} {mine:.6g} → {theirs:.6g}" for name, mine, theirs in changed[:3]]
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return f"the row's weights differ: {', '.join(words)}{more}"


def _value_of(trace: Trace, index: int, what: str, image: int) -> Tensor | None:
    """A tensor of one image at a step, as far as the trace holds it."""
    if what == "x_next":
        plan = trace.header.plans[image]
        if index + 1 == len(plan.rows):
            return trace.tensor("end")[image] if trace.has("end") else None
        if plan.rows[index + 1].pre_noise:
            return None
        return _value_of(trace, index + 1, "x", image)
    names = {"x": ("x",), "x0": ("x0",), "cond": ("x0", "delta")}.get(what, ())
    if not names or index >= len(trace.steps) or not all(trace.has(name, index) for name in names):
        return None
    place = trace.steps[index].of(image)
    held = [trace.tensor(name, index)[place] for name in names]
    return held[0] if len(held) == 1 else held[0] - held[1]


def _norm_of(trace: Trace, index: int, what: str, image: int) -> float | None:
    if what == "x_next":
        index, what = index + 1, "x"
    if index >= len(trace.steps) or image not in trace.steps[index].images:
        return None
    norms = trace.steps[index].norms.get(what)
    return None if norms is None else float(norms[trace.steps[index].of(image)])


def _is_nan(trace: Trace, index: int, what: str, image: int) -> bool:
    """Whether a tensor of one image holds NaN, by its norm or, of the last x, by itself."""
    norm = _norm_of(trace, index, what, image)
    if norm is not None:
        return math.isnan(norm)
    value = _value_of(trace, index, what, image)
    return value is not None and bool(value.isnan().any())


def _relative(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return math.nan
    return float((a.double() - b.double()).norm() / (b.double().norm() or math.nan))


def _distances(a: Trace, b: Trace) -> tuple[StepDistance, ...]:
    """How far apart the runs are, as long as they are at the same levels."""

    def overall(index: int, name: str) -> float:
        if a.has(name, index) and b.has(name, index):
            return _relative(a.tensor(name, index), b.tensor(name, index))
        same = bool((a.steps[index].digests[name] == b.steps[index].digests[name]).all())
        return 0.0 if same else math.nan

    found = []
    for index, (mine, theirs) in enumerate(zip(a.steps, b.steps, strict=False)):
        if mine.images != theirs.images or not all(map(_near_level, mine.levels, theirs.levels)):
            break
        found.append(StepDistance(index, overall(index, "x"), overall(index, "x0")))
    return tuple(found)


# --- in words ---------------------------------------------------------------------------------------------------------

_NAMES = {"x_next": "the next x", "cond": "the prediction with the prompt"}


def headline(found: Comparison) -> str:
    """Whether two runs diverge, and if so where and by what."""
    if found.first is None:
        return f"the same in all of {counted(found.steps, 'step')}"
    others = len(found.images) - 1
    more = f" (and {counted(others, 'image')} more)" if others > 0 else ""
    if found.first.cause == "nan":
        return f"both are NaN from step {found.first.step}, image {found.first.image}{more}; the same before"
    return f"they diverge at step {found.first.step}, image {found.first.image}{more}, by {found.first.cause}"


def details(found: Comparison) -> list[str]:
    """What the cause did, by how much, and what the headers say of it; nothing where the runs are the same."""
    first = found.first
    if first is None:
        return []
    lines = [first.detail]
    if first.distance is not None:
        least = "at least " if first.least else ""
        lines.append(f"{_NAMES.get(first.what, first.what)} differs by {least}{short(first.distance, 3)} of its norm")
    elif first.what in DIGESTED and first.cause != "nan":
        lines.append("by how much is not in these traces: record with tensors to know")
    lines += [diff.text() for diff in found.why]
    if not found.why and first.cause in ("noise", "model", "guidance"):
        lines.append(f"the headers say nothing that differs in {first.cause}")
    return lines

"""What the headers of two traces say differently, and which part of a run each of it can change."""

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
from pellucid.evidence.trace.reading import OLD, Step, Trace
from pellucid.models.guidance import Guidance
from pellucid.pipeline import fingerprint

# --- Differences of headers -----------------------------------------------------------------------------------------

Cause = Literal["plan", "level", "noise", "model", "guidance", "constraint", "nan"]
CAUSES: tuple[Cause, ...] = ("plan", "level", "noise", "model", "guidance", "constraint")
SHOWN = 60  # characters of a value

# The fields of a recipe, and what they can change first. What the plan says too is compared there, seeds with noise.
FIELDS: dict[str, tuple[Cause, ...]] = {
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
PLANS: dict[str, tuple[Cause, ...]] = {
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
    """One thing that two headers say differently, for one image or (None) for all, and what it can change."""

    name: str
    mine: str
    theirs: str
    causes: tuple[Cause, ...]
    image: int | None = None

    def text(self) -> str:
        where = "" if self.image is None else f" of image {self.image}"
        return f"{self.name}{where}: {self.mine} → {self.theirs}"


def header_diff(a: Header, b: Header) -> list[HeaderDiff]:
    """All that the headers say differently."""
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
    found = [HeaderDiff(name, shown(x), shown(y), causes) for name, x, y, causes in rows if x != y]
    found += of_plans(a, b)
    pairs = list(zip(a.recipes, b.recipes, strict=False))
    every = [of_recipes(x, y) for x, y in pairs]
    shared = [told for told in every[0] if all(told in other for other in every)] if every else []
    for image, own in enumerate(every):
        rest = [told for told in own if told not in shared]
        found += [HeaderDiff(t.name, t.mine, t.theirs, t.causes, image if len(pairs) > 1 else None) for t in rest]
    return found + shared


def of_plans(a: Header, b: Header) -> list[HeaderDiff]:
    """The plans in short: their sampler, their grid, how many rows they have and where they start."""
    found = []
    for name, causes in PLANS.items():
        mine, theirs = (short_plans(h, name) for h in (a, b))
        if mine != theirs:
            found.append(HeaderDiff(f"{'model calls' if name == 'rows' else name} of the plan", mine, theirs, causes))
    return found


def short_plans(header: Header, name: str) -> str:
    values = [header.plan_tables[which].get(name) for which in header.plan_of]
    texts = [shown(len(value) if name == "rows" and isinstance(value, list) else value) for value in values]
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts)[:SHOWN]


def of_recipes(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[HeaderDiff]:
    found = []
    for name, causes in FIELDS.items():
        mine, theirs = a.get(name), b.get(name)
        if mine == theirs:
            continue
        if name == "model_hash":
            parts = fingerprint.differing(str(mine), str(theirs))
            found.append(HeaderDiff("weights or settings", ", ".join(parts), "others", causes))
        elif name == "model" and a.get("model_hash") and a["model_hash"] == b.get("model_hash"):
            found.append(HeaderDiff("name of the same model", shown(mine), shown(theirs), ()))
        else:
            found.append(HeaderDiff(name, shown(mine), shown(theirs), causes))
    return found


def shown(value: Any) -> str:
    """A value in a few words."""
    if isinstance(value, Mapping) and "scale" in value and "rules" in value:
        return Guidance.from_dict(value).text()
    if isinstance(value, Mapping):
        text = ", ".join(f"{k}={v}" for k, v in value.items() if v not in (None, {}, [])) or "none"
    else:
        text = "none" if value is None else str(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


# --- Differences of steps -------------------------------------------------------------------------------------------

ROUNDING = 1e-2  # of a prediction: no more than this is made by a batch of another size, in bfloat16 either
CLOSE = 1e-12  # levels, times and weights that agree to this are the same: compilers round


@dataclass(frozen=True)
class Divergence:
    """Where one image of two runs parts. `distance` is relative; `least` where it is a lower bound, from norms."""

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
    """Two traces, compared. `why` is what the headers say differently that can be the cause of the first divergence."""

    first: Divergence | None
    images: tuple[Divergence, ...]  # the first of each image that diverges
    told: tuple[HeaderDiff, ...]
    apart: tuple[StepDistance, ...]
    notes: tuple[str, ...]
    steps: int  # that both have

    @property
    def same(self) -> bool:
        return self.first is None

    @property
    def why(self) -> tuple[HeaderDiff, ...]:
        if self.first is None:
            return ()
        mine = (None, self.first.image)
        return tuple(t for t in self.told if self.first.cause in t.causes and t.image in mine)


def compare(a: Trace, b: Trace, tolerance: float = 0.0, *, parts: bool = True) -> Comparison:
    """The first step at which two runs diverge, and by what; `parts` False leaves out cond and uncond.

    With a `tolerance`, tensors that are no farther apart than this part of their norm count as the same.
    """
    for one in (a, b):
        one.verify()
    steps = min(len(a.steps), len(b.steps))
    images = range(min(a.header.images, b.header.images))
    found = [ImagePair(a, b, image, tolerance, parts).first(steps) for image in images]
    parted = sorted((d for d in found if d is not None), key=lambda d: (d.step, d.image))
    first = parted[0] if parted else ending(a, b, steps)
    told = tuple(header_diff(a.header, b.header))
    return Comparison(first, tuple(parted), told, distances(a, b, steps), tuple(notes(a, b, tolerance)), steps)


def ending(a: Trace, b: Trace, steps: int) -> Divergence | None:
    """Runs of different length that are the same as far as both go, though the shorter plan is at its end."""
    if len(a.steps) == len(b.steps) or not (a.whole and b.whole):
        return None
    return Divergence(steps, 0, "plan", "end", f"one run ends after {steps} model calls, the other goes on")


def notes(a: Trace, b: Trace, tolerance: float) -> list[str]:
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
class ImagePair:
    """One image in two traces."""

    a: Trace
    b: Trace
    image: int
    tolerance: float
    parts: bool

    def first(self, steps: int) -> Divergence | None:
        for index in range(steps):
            mine, theirs = self.a.steps[index], self.b.steps[index]
            if self.image not in mine.images or self.image not in theirs.images:
                return None if self.image not in mine.images and self.image not in theirs.images else self.ended(index)
            found = self.at(index, mine, theirs)
            if found is not None:
                return found
        return None

    def ended(self, index: int) -> Divergence:
        detail = f"one run of image {self.image} ends after {index} model calls, the other goes on"
        return Divergence(index, self.image, "plan", "end", detail)

    def at(self, index: int, mine: Step, theirs: Step) -> Divergence | None:
        """The first difference within a step, in the order in which a run makes things."""
        one, other = (step.rows[step.of(self.image)] for step in (mine, theirs))
        landed = [step.next_levels[step.of(self.image)] for step in (mine, theirs)]
        changed = called_elsewhere(one, other)
        if changed:
            return Divergence(index, self.image, "level", changed[0], changed[1])
        for what in ("x", *(("cond", "uncond") if self.parts else ()), "x0"):
            found = self.both_nan(index, "x" if what == "x" else "x0", mine, theirs)
            found = found or self.tensor(index, what, mine, theirs)
            if found is not None:
                return found
        if not near_level(landed[0], landed[1]):
            detail = f"the row lands at sigma {landed[0].sigma:.6g}, the other at {landed[1].sigma:.6g}"
            return Divergence(index, self.image, "level", "landing", detail)
        weights = weight_changes(one, other, CLOSE)
        if weights:
            return Divergence(index, self.image, "plan", weights[0][0], weight_words(weights))
        return self.both_nan(index, "x_next", mine, theirs) or self.tensor(index, "x_next", mine, theirs)

    def both_nan(self, index: int, what: str, mine: Step, theirs: Step) -> Divergence | None:
        """Where both runs are NaN there is nothing left to compare, whatever their bits: they are not the same."""
        if not all(is_nan(t, step, what, self.image) for t, step in ((self.a, mine), (self.b, theirs))):
            return None
        detail = f"{'the next x' if what == 'x_next' else what} holds NaN in both: the rest cannot be compared"
        return Divergence(index, self.image, "nan", what, detail)

    def tensor(self, index: int, what: str, mine: Step, theirs: Step) -> Divergence | None:
        """Where a tensor differs, and what of the rows says whose doing that is."""
        left, right = (int(step.digests[what][step.of(self.image)]) for step in (mine, theirs))
        if left == right:
            return None
        if 0 in (left, right):  # one of the runs did not ask for it
            having = "the first" if right == 0 else "the second"
            asked = {"cond": "with the prompt", "uncond": "without the prompt"}.get(what, what)
            return Divergence(index, self.image, "guidance", what, f"only {having} run asked for a prediction {asked}")
        distance, least = self.distance(index, what, mine, theirs)
        unseen = what == "uncond"  # of which neither a tensor nor a norm is kept: what it does shows in x0
        if self.tolerance and (unseen or (distance is not None and distance <= self.tolerance)):
            return None
        one, other = (step.rows[step.of(self.image)] for step in (mine, theirs))
        known = self.grown(index, what, one) or self.regrouped(what, distance)
        cause, detail = known or self.blame(index, what, one, other, mine)
        return Divergence(index, self.image, cause, what, detail, distance, least)

    def grown(self, index: int, what: str, row: Row) -> tuple[Cause, str] | None:
        """With a tolerance, x may leave it because of what was within it before: then that is the cause."""
        if not self.tolerance or what not in ("x", "x_next"):
            return None
        if (row.draws or row.pre_noise) and self.a.header.noise != self.b.header.noise:
            return None
        root = replace(self, tolerance=0.0).first(min(len(self.a.steps), len(self.b.steps)))
        assert root is not None
        if (root.step, root.what) == (index, what):
            return None
        return root.cause, f"grown beyond the tolerance from step {root.step}, where {root.detail}"

    def regrouped(self, what: str, distance: float | None) -> tuple[Cause, str] | None:
        """Another guidance asks the network in other batches, which round otherwise: then that is the cause."""
        recipes = [t.header.recipes[self.image : self.image + 1] for t in (self.a, self.b)]
        hashes = {recipe.get("model_hash") for held in recipes for recipe in held}
        if (
            what not in ("cond", "uncond")
            or (distance is not None and not distance <= ROUNDING)
            or len(hashes) != 1
            or None in hashes
        ):
            return None
        told = header_diff(self.a.header, self.b.header)
        causes = {cause for t in told if t.image in (None, self.image) for cause in t.causes}
        if "guidance" not in causes or "model" in causes:
            return None
        may = "that rounds otherwise" if distance is not None else "that may round otherwise"
        return "guidance", f"the model is the same, guidance asks it in another batch, and {may}"

    def blame(self, index: int, what: str, one: Row, other: Row, mine: Step) -> tuple[Cause, str]:
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
            if self.parts and mine.digests["cond"][mine.of(self.image)] != 0:
                return "guidance", "the predictions are the same; what guidance or a filter makes of them is not"
            return "model", "at the same x and level the denoiser predicts something else"
        slight = weight_changes(one, other, 0.0)
        if slight:
            return "plan", weight_words(slight)
        if one.draws or other.draws:
            return "noise", "the row is the same and so is all that it combines, but for the noise that it draws"
        return "constraint", "the row and all that it combines are the same: something changed x after it"

    def distance(self, index: int, what: str, mine: Step, theirs: Step) -> tuple[float | None, bool]:
        """(the relative distance, whether it is a lower bound): of tensors where both have them, or of norms."""
        held = [value_of(t, index, what, self.image) for t in (self.a, self.b)]
        if held[0] is not None and held[1] is not None:
            return relative(held[0], held[1]), False
        sizes = [norm_of(t, step, what, self.image) for t, step in ((self.a, mine), (self.b, theirs))]
        if None in sizes:
            return None, True
        return abs(sizes[0] - sizes[1]) / (sizes[1] or math.nan), True  # type: ignore[operator]


def called_elsewhere(one: Row, other: Row) -> tuple[str, str] | None:
    if not near_level(one.level, other.level):
        got = [f"(alpha {r.level.alpha:.6g}, sigma {r.level.sigma:.6g})" for r in (one, other)]
        return "level", f"the network is called at {got[0]}, in the other run at {got[1]}"
    if abs(one.time - other.time) > CLOSE * max(abs(one.time), abs(other.time)):
        return "time", f"at one level the network is told time {one.time:.6g}, in the other run {other.time:.6g}"
    return None


def near_level(a: Level, b: Level) -> bool:
    return all(abs(x - y) <= CLOSE * max(abs(x), abs(y)) for x, y in ((a.alpha, b.alpha), (a.sigma, b.sigma)))


def weight_changes(one: Row, other: Row, tolerance: float) -> list[tuple[str, Any, Any]]:
    """Weights, held predictions and addresses of noise that differ between two rows of one level."""
    return [c for c in row_changes(one, other, tolerance) if c[0] not in ("alpha", "sigma", "time", "pre_noise")]


def weight_words(changed: Sequence[tuple[str, Any, Any]]) -> str:
    words = [f"{name} {mine:.6g} → {theirs:.6g}" for name, mine, theirs in changed[:3]]
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return f"the row's weights differ: {', '.join(words)}{more}"


def value_of(trace: Trace, index: int, what: str, image: int) -> Tensor | None:
    """A tensor of one image at a step, as far as the trace holds it."""
    if what == "x_next":
        plan = trace.header.plans[image]
        if index + 1 == len(plan.rows):
            return trace.tensor("end")[image] if trace.has("end") else None
        if plan.rows[index + 1].pre_noise:
            return None
        return value_of(trace, index + 1, "x", image)
    names = {"x": ("x",), "x0": ("x0",), "cond": ("x0", "delta")}.get(what, ())
    if not names or index >= len(trace.steps) or not all(trace.has(name, index) for name in names):
        return None
    place = trace.steps[index].of(image)
    held = [trace.tensor(name, index)[place] for name in names]
    return held[0] if len(held) == 1 else held[0] - held[1]


def norm_of(trace: Trace, step: Step, what: str, image: int) -> float | None:
    if what == "x_next":
        following = step.index + 1
        if following >= len(trace.steps) or image not in trace.steps[following].images:
            return None
        step, what = trace.steps[following], "x"
    found = step.norms.get(what)
    return None if found is None else float(found[step.of(image)])


def is_nan(trace: Trace, step: Step, what: str, image: int) -> bool:
    """Whether a tensor of one image holds NaN, by its norm or, of the last x, by itself."""
    norm = norm_of(trace, step, what, image)
    if norm is not None:
        return math.isnan(norm)
    held = value_of(trace, step.index, what, image)
    return held is not None and bool(held.isnan().any())


def relative(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return math.nan
    return float((a.double() - b.double()).norm() / (b.double().norm() or math.nan))


def distances(a: Trace, b: Trace, steps: int) -> tuple[StepDistance, ...]:
    """How far apart the runs are, as long as they stand at the same levels."""
    found = []
    for index in range(steps):
        mine, theirs = a.steps[index], b.steps[index]
        if mine.images != theirs.images or not all(map(near_level, mine.levels, theirs.levels)):
            break
        found.append(StepDistance(index, *(overall(a, b, index, name) for name in ("x", "x0"))))
    return tuple(found)


def overall(a: Trace, b: Trace, index: int, name: str) -> float:
    if a.has(name, index) and b.has(name, index):
        return relative(a.tensor(name, index), b.tensor(name, index))
    same = bool((a.steps[index].digests[name] == b.steps[index].digests[name]).all())
    return 0.0 if same else math.nan


# --- In words -------------------------------------------------------------------------------------------------------

NAMES = {"x_next": "the next x", "cond": "the prediction with the prompt"}
DIGESTED_NAMES = ("x", "cond", "uncond", "x0", "x_next")


def headline(found: Comparison) -> str:
    """Whether two runs part, and if so where and by what."""
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
    said = [first.detail]
    if first.distance is not None:
        least = "at least " if first.least else ""
        said.append(f"{NAMES.get(first.what, first.what)} differs by {least}{short(first.distance, 3)} of its norm")
    elif first.what in DIGESTED_NAMES and first.cause != "nan":
        said.append("by how much is not in these traces: record with tensors to know")
    said += [told.text() for told in found.why]
    if not found.why and first.cause in ("noise", "model", "guidance"):
        said.append(f"the headers say nothing that differs in {first.cause}")
    return said

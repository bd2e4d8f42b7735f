"""What the headers of two traces say differently, and which part of a run each of it can change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pellucid.evidence.trace.header import Header
from pellucid.models.guidance import Guidance
from pellucid.pipeline import fingerprint

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
class Told:
    """One thing that two headers say differently, for one image or (None) for all, and what it can change."""

    name: str
    mine: str
    theirs: str
    causes: tuple[Cause, ...]
    image: int | None = None

    def text(self) -> str:
        where = "" if self.image is None else f" of image {self.image}"
        return f"{self.name}{where}: {self.mine} → {self.theirs}"


def differences(a: Header, b: Header) -> list[Told]:
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
    found = [Told(name, shown(x), shown(y), causes) for name, x, y, causes in rows if x != y]
    found += of_plans(a, b)
    pairs = list(zip(a.recipes, b.recipes, strict=False))
    every = [of_recipes(x, y) for x, y in pairs]
    shared = [told for told in every[0] if all(told in other for other in every)] if every else []
    for image, own in enumerate(every):
        rest = [told for told in own if told not in shared]
        found += [Told(t.name, t.mine, t.theirs, t.causes, image if len(pairs) > 1 else None) for t in rest]
    return found + shared


def of_plans(a: Header, b: Header) -> list[Told]:
    """The plans in short: their sampler, their grid, how many rows they have and where they start."""
    found = []
    for name, causes in PLANS.items():
        mine, theirs = (short_plans(h, name) for h in (a, b))
        if mine != theirs:
            found.append(Told(f"{'model calls' if name == 'rows' else name} of the plan", mine, theirs, causes))
    return found


def short_plans(header: Header, name: str) -> str:
    values = [header.plan_tables[which].get(name) for which in header.plan_of]
    texts = [shown(len(value) if name == "rows" and isinstance(value, list) else value) for value in values]
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts)[:SHOWN]


def of_recipes(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Told]:
    found = []
    for name, causes in FIELDS.items():
        mine, theirs = a.get(name), b.get(name)
        if mine == theirs:
            continue
        if name == "model_hash":
            parts = fingerprint.differing(str(mine), str(theirs))
            found.append(Told("weights or settings", ", ".join(parts), "others", causes))
        elif name == "model" and a.get("model_hash") and a["model_hash"] == b.get("model_hash"):
            found.append(Told("name of the same model", shown(mine), shown(theirs), ()))
        else:
            found.append(Told(name, shown(mine), shown(theirs), causes))
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

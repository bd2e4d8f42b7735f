"""A new version of a model beside the old one: examined, shown copies of the traffic, then a share of it, then all.

`Trial` is the part in the engine's process: it loads the version, asks the doctor, and compares images of fixed seeds.
`Rollout` is the part in the API's: it sends requests to either version, watches both, and decides.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pellucid.core.errors import PellucidError, rule

Stage = Literal["examined", "shadow", "canary", "promoted", "rolled back"]


@dataclass(frozen=True)
class RolloutSettings:
    """How a version is tried. Shares and rates are of 1; `distance` is of 255, None for no limit."""

    model: str  # that it is to replace
    path: str
    canary: float = 0.05
    shadow: bool = True
    requests: int = 20  # that it must answer in each stage
    error_rate: float = 0.02  # more than the old version's
    slowdown: float = 1.5  # of the median, against the old version's
    distance: float | None = None
    adherence: float | None = None  # lost on scenes' prompts; None: not measured
    seeds: int = 4

    def __post_init__(self) -> None:
        for name, low, high in (
            ("canary", 0.0, 1.0),
            ("requests", 1, 100_000),
            ("error_rate", 0.0, 1.0),
            ("slowdown", 0.1, 1000.0),
            ("distance", 0.0, 255.0),
            ("adherence", 0.0, 1.0),
            ("seeds", 1, 1000),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise PellucidError(rule(name, f"from {low:g} to {high:g}", value), "rollout")


@dataclass
class Arm:
    """What one version answered."""

    seconds: list[float] = field(default_factory=list)
    errors: int = 0

    @property
    def count(self) -> int:
        return len(self.seconds) + self.errors

    @property
    def error_rate(self) -> float:
        return self.errors / self.count if self.count else 0.0

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None

    def summary(self) -> dict[str, Any]:
        return {"answers": self.count, "errors": self.errors, "median_seconds": self.median}


class Rollout:
    """One version on its way in. `decide` is called after every answer; `ended` is told of the end."""

    def __init__(self, id: str, settings: RolloutSettings, ended: Callable[[Rollout], None]) -> None:
        self.id, self.settings, self.ended = id, settings, ended
        self.key = f"{settings.model}@{id}"
        self.stage: Stage | Literal["loading"] = "loading"
        self.why = ""
        self.began = time.time()
        self.examined: dict[str, Any] = {}
        self.arms: dict[str, dict[str, Arm]] = {}  # by stage, then old and new
        self.drawn = 0.0

    @property
    def over(self) -> bool:
        return self.stage in ("promoted", "rolled back")

    def wants(self) -> Literal["", "shadow", "canary"]:
        """Whether the next request goes to the new version too, or instead. Shares are exact, not drawn."""
        if self.stage == "shadow":
            return "shadow"
        if self.stage == "canary":
            self.drawn += self.settings.canary
            if self.drawn >= 1.0 - 1e-9:
                self.drawn -= 1.0
                return "canary"
        return ""

    def loaded(self, facts: dict[str, Any]) -> None:
        """What the trial in the engine found, before any traffic."""
        self.examined = {name: value for name, value in facts.items() if name != "error"}
        if "error" in facts:
            self.end("rolled back", facts["error"])
            return
        asked = self.settings
        if asked.distance is not None and facts["distance"] > asked.distance:
            self.end("rolled back", f"images of fixed seeds differ by {facts['distance']:.1f} of 255")
        elif asked.adherence is not None and facts["adherence"][0] - facts["adherence"][1] > asked.adherence:
            old, new = facts["adherence"]
            self.end("rolled back", f"adherence fell from {old:.0%} to {new:.0%}")
        else:
            self._enter("shadow" if asked.shadow else "canary")

    def _enter(self, stage: Literal["shadow", "canary"]) -> None:
        self.stage = stage
        self.arms[stage] = {"old": Arm(), "new": Arm()}

    def saw(self, stage: str, arm: str, seconds: float | None) -> None:
        """An answer of a version in a stage: how long it took, or None where it failed."""
        if self.over or stage not in self.arms:
            return
        one = self.arms[stage][arm]
        if seconds is None:
            one.errors += 1
        else:
            one.seconds.append(seconds)
        if stage == self.stage:
            self.decide()

    def decide(self) -> None:
        old, new = (self.arms[self.stage][arm] for arm in ("old", "new"))
        asked = self.settings
        allowed = old.error_rate + asked.error_rate
        if new.errors and new.errors > allowed * asked.requests:
            self.end("rolled back", f"{new.errors} of {new.count} requests failed in {self.stage}")
            return
        if new.count < asked.requests:
            return
        if new.error_rate > allowed:
            self.end("rolled back", f"{new.error_rate:.1%} of the requests failed in {self.stage}")
        elif new.median is not None and old.median is not None and new.median > asked.slowdown * old.median:
            ratio = new.median / old.median
            self.end("rolled back", f"the median took {ratio:.2f} times as long in {self.stage}")
        elif self.stage == "shadow" and asked.canary > 0:
            self._enter("canary")
        else:
            self.end("promoted", f"{new.count} requests in {self.stage} were as good and as fast")

    def end(self, stage: Literal["promoted", "rolled back"], why: str) -> None:
        if not self.over:
            self.stage, self.why = stage, why
            self.ended(self)

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "rollout",
            "model": self.settings.model,
            "stage": self.stage,
            "why": self.why,
            "began": self.began,
            "settings": asdict(self.settings),
            "examined": self.examined,
            "stages": {s: {name: arm.summary() for name, arm in arms.items()} for s, arms in self.arms.items()},
        }

    def write(self, folder: str | Path) -> None:
        """What was decided and why, as a file."""
        from pellucid.interop.atomic_files import put

        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        put(place / f"{self.id}.json", json.dumps(self.to_dict(), indent=1) + "\n")


# --- in the engine's process ------------------------------------------------------------------------------------------


def check_inside(path: str, folders: list[str], known: list[str]) -> str:
    """The path of a version, which must be a bundle's or lie in a folder that the server was started with."""
    if path in known:
        return path
    place = Path(path).resolve()
    if not any(place.is_relative_to(Path(folder).resolve()) for folder in folders):
        must = "one of a bundle, or inside the folders of --candidates"
        raise PellucidError(rule("path of the version", must, path), "rollout-path")
    return str(place)


class Trial:
    """Loads a version and examines it, an image at a time between the steps of what is served."""

    def __init__(self, engine: Any, settings: RolloutSettings, key: str, device: str | None, dtype: str | None) -> None:
        self.engine, self.settings, self.key = engine, settings, key
        self.device, self.dtype = device, dtype

    def run(self) -> dict[str, Any]:
        """What was found; with an `error` where the version must not see traffic."""
        import torch

        from pellucid.evidence.doctor.checks import doctor
        from pellucid.pipeline.load import load
        from pellucid.pipeline.memory import available

        torch.set_num_threads(1)  # of this thread, which computes beside the engine's
        old = self.engine.pipes[self.settings.model]
        need, free = weight_bytes(self.settings.path), available(old.device)
        if free is not None and need > free:
            return {"error": f"it needs {need / 2**30:.2f} GiB beside the old version; {free / 2**30:.2f} are free"}
        try:
            pipe = load(self.settings.path, device=self.device, dtype=self.dtype)
        except Exception as error:
            return {"error": f"it does not load: {error}"}
        report = doctor(pipe)
        found: dict[str, Any] = {"findings": [finding.to_dict() for finding in report.findings]}
        wrong = [finding for finding in report.findings if finding.severity == "error"]
        if wrong:
            return {**found, "error": f"the doctor: {wrong[0].title}"}
        try:
            found |= self.compare(old, pipe)
        except PellucidError as error:
            return {**found, "error": f"an image of a fixed seed: {error}"}
        self.engine.pipes[self.key] = pipe
        return found

    def compare(self, old: Any, new: Any) -> dict[str, Any]:
        """The mean distance of images of the same seeds, of 255, and adherence to scenes' prompts where it is asked."""
        import numpy as np

        from pellucid.pipeline.encoders.conditions import takes_text

        apart, right = [], [0, 0]
        asked = fixed_prompts(self.settings.seeds)
        for seed, (prompt, query) in enumerate(asked):
            options: dict[str, Any] = {"seed": seed, "steps": 8}
            if takes_text(old.components.network):
                options["prompt"] = prompt
            made = []
            for pipe in (old, new):
                made.append(self.engine.device(partial(pipe, **options)).images[0])
            a, b = (np.asarray(image).astype(float) for image in made)
            if a.shape != b.shape:
                raise PellucidError(rule("size of its images", f"{a.shape[1]}x{a.shape[0]}", b.shape), "size")
            apart.append(float(np.abs(a - b).mean()))
            if self.settings.adherence is not None:
                right = [count + shows(image, query) for count, image in zip(right, made, strict=True)]
        found: dict[str, Any] = {"distance": statistics.fmean(apart), "seeds": len(asked)}
        if self.settings.adherence is not None:
            found["adherence"] = [count / len(asked) for count in right]
        return found


def weight_bytes(path: str) -> int:
    """Bytes of the files that a version brings."""
    from pellucid.interop.source import bundled

    place = Path(bundled(path))
    files = place.rglob("*.safetensors") if place.is_dir() else [place]
    return sum(file.stat().st_size for file in files if file.is_file())


def fixed_prompts(count: int) -> list[tuple[str, Any]]:
    from pellucid import scenes

    return list(scenes.prompts(count, (1, 2), 0, split="held_out"))


def shows(image: Any, query: Any) -> bool:
    """Whether an image of scenes shows what the prompt says."""
    from pellucid import scenes
    from pellucid.evidence.adherence.judging import judge
    from pellucid.pipeline.images import to_tensor

    (reading,) = scenes.read(to_tensor([image]))
    return judge(reading, query).right

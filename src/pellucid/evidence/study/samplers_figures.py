"""All that is known of a sampler study at one moment: measures, times, verdict, and what a reader must heed."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.metrics.fid import FEW, Statistics
from pellucid.evidence.metrics.images import open_images
from pellucid.evidence.metrics.inception import Inception
from pellucid.evidence.metrics.measured import measure_cached
from pellucid.evidence.study.cells import Cell
from pellucid.evidence.study.front import Array
from pellucid.evidence.study.page_chart import short
from pellucid.evidence.study.prompts import queries
from pellucid.evidence.study.samplers import Study
from pellucid.evidence.study.samplers_latency import Clock, Latency
from pellucid.evidence.study.samplers_results import RESAMPLES, Column, Results
from pellucid.evidence.study.samplers_scores import (
    ClipScorer,
    InceptionScorer,
    SceneScorer,
    Scorer,
    find_clip,
    find_inception,
)
from pellucid.evidence.study.samplers_verdict import Verdict, names, verdict
from pellucid.pipeline.pipeline import Pipeline

SAME = 1e-2  # distances that agree to this part in the median are those of one sampler; rounding moves some far
UNRESOLVED = 3.0  # a distance below so many times what the converged run still moves is not told apart from it


@dataclass(frozen=True)
class Judges:
    """Who looks at the images, and `reasons` for what is left out, by measure."""

    scorers: tuple[Scorer, ...] = ()
    inception: Inception | None = None
    reference: str | None = None
    reasons: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def open(
        study: Study,
        *,
        inception: str | Path | None = None,
        clip: str | Path | None = None,
        reference: str | None = None,
    ) -> Judges:
        """What was named, what lies beside the model, and what needs nothing."""
        config, subject = study.config, study.subject
        scorers: list[Scorer] = []
        reasons: dict[str, str] = {}
        network, why = find_inception(inception, subject.device)
        if network is not None:
            scorers.append(InceptionScorer(network))
        judge = find_clip(clip, subject.image_text, subject.device)
        if judge is not None and subject.asks == "prompt":
            scorers.append(ClipScorer(judge))
        elif judge is not None:
            reasons["image_text"] = f"{subject.name} takes no text"
        else:
            reasons["image_text"] = "no CLIP: name one with --clip"
        if reference is not None and network is None:
            must = "given with Inception weights"
            raise PellucidError(rule("--reference", must, reference, f"There are {why}."), "reference")
        if network is None:
            reasons["fid"] = why
            if judge is None or "image_text" in reasons:
                reasons["kid"] = why
        if queries(config.prompts) is not None and subject.asks == "prompt":
            scorers.append(SceneScorer(subject.device))
        else:
            reasons["right"] = "the prompts are no captions of scenes"
        if config.by in reasons:
            raise PellucidError(rule("--by", "a measure that can be taken", config.by, reasons[config.by] + "."), "by")
        return Judges(tuple(scorers), network, reference, reasons)


class Figures:
    """The figures of a study, computed when they are asked for."""

    def __init__(self, study: Study, judges: Judges, resamples: int = RESAMPLES) -> None:
        self.study, self.judges = study, judges
        self.results = Results(study, resamples)
        if not self.results.firsts:
            raise PellucidError(rule("study", "of at least one whole batch", "none"), "study-empty")
        self.clock = Clock(study)

    @property
    def cells(self) -> list[Cell]:
        return self.study.cells

    @cached_property
    def latencies(self) -> list[Latency]:
        return [self.clock.of(cell) for cell in self.cells]

    @cached_property
    def columns(self) -> dict[str, Column]:
        """Every measure that can be taken, the distances first."""
        found = {name: self.results.distance(name) for name in ("distance", "latent")}
        for scorer in self.judges.scorers:
            if not self.results.scored(scorer.what):
                continue
            if isinstance(scorer, InceptionScorer):
                found |= self.inception_columns(scorer)
            elif isinstance(scorer, ClipScorer):
                found["image_text"] = self.results.image_text(scorer.what)
                if self.judges.inception is None and self.results.count > 1:
                    found["kid"] = self.results.kid(scorer.what, None, self.device)
            else:
                found["right"] = self.results.right()
        return found

    def inception_columns(self, scorer: InceptionScorer) -> dict[str, Column]:
        if self.results.count < 2:
            return {}
        features, statistics = self.reference
        found = {}
        if features is not None or self.judges.reference is None:
            found["kid"] = self.results.kid(scorer.what, features, self.device)
        fid = self.results.fid(scorer.what, statistics, self.device)
        return found | ({} if fid is None else {"fid": fid})

    @cached_property
    def reference(self) -> tuple[Tensor | None, Statistics | None]:
        """Features and statistics of the reference images, where there are some: computed once for the folder."""
        if self.judges.reference is None:
            return None, None
        given = open_images(self.judges.reference)
        if isinstance(given, Statistics):
            return None, given
        assert self.judges.inception is not None
        held = measure_cached(given, self.judges.inception, self.study.folder / "features")
        return held.features, held.statistics

    @property
    def device(self) -> torch.device:
        return self.study.subject.device

    @cached_property
    def main(self) -> Column:
        """The measure that decides."""
        by = self.study.config.by
        if by not in self.columns:
            raise PellucidError(rule("--by", f"measured: {', '.join(self.columns)}", by), "by")
        return self.columns[by]

    @cached_property
    def verdict(self) -> Verdict:
        config = self.study.config
        asked = {"prompt": ' "…"', "label": " --label …", "nothing": ""}[self.study.subject.asks]
        start = config.model + asked if isinstance(self.study.subject.pipe, Pipeline) else None
        return verdict(self.cells, self.main, self.latencies, config.guidance, start)

    # --- what a reader must heed ----------------------------------------------------------------------------------

    def notes(self) -> list[str]:
        found = [self.about_intervals(), *self.about_converged(), *self.about_noise(), *self.about_kid()]
        found += self.about_twins()
        if old := len(self.study.files.unchecked):
            found.append(f"{old} files were written by an older version without digests: they were read unchecked.")
        found += [f"{name} is left out: {why}." for name, why in self.judges.reasons.items()]
        broken = [c.key for c, v in zip(self.cells, self.columns["distance"].values, strict=True) if not np.isfinite(v)]
        found += [f"{key} made images that are not finite; it is on no front." for key in broken]
        return found

    def about_intervals(self) -> str:
        unit = "prompts" if self.results.by_prompt else "images"
        return (
            f"Intervals hold 95 % of {self.results.resamples:,} resamples in which {unit} were drawn again, the same "
            "ones for every cell: differences between cells are surer than their intervals. They say nothing of other "
            "models."
        )

    def about_converged(self) -> list[str]:
        """Each converged run: how far it still moved when its steps were doubled, in latents, which nothing rounds."""
        found = []
        for key, floor in self.results.floor("latent").items():
            words = f"{key}: its latents moved by {short(floor, 3)} RMSE when its steps were doubled to that many."
            own, near = self.unresolved(key, floor)
            if near:
                words += (
                    f" {len(near)} of {len(own)} distances to it are below {UNRESOLVED:g} times that: not resolved."
                )
            found.append(words)
        return found

    def unresolved(self, key: str, floor: float) -> tuple[list[int], list[int]]:
        """The cells that are compared with a converged run, and those of them that are not told apart from it."""
        own = [i for i, cell in enumerate(self.cells) if cell.against == key]
        return own, [i for i in own if self.columns["latent"].values[i] < UNRESOLVED * floor]

    def doubts(self) -> list[str]:
        """Why the recommendation may be wrong: what it was measured with is not converged."""
        if self.main.measure.name not in ("distance", "latent"):
            return []
        found = []
        for cell in self.study.converged:
            floor = self.results.floor("latent").get(cell.key, 0.0)
            own, near = self.unresolved(cell.key, floor)
            if 2 * len(near) > len(own):
                steps = "--path-steps" if cell.stochastic else "--converged-steps"
                found.append(
                    f"Doubtful: {cell.setup.text} with {cell.steps} steps, which stands for the converged images, is "
                    f"not converged: {len(near)} of {len(own)} distances to it are not resolved. Give more {steps}."
                )
        return found

    def about_noise(self) -> list[str]:
        noisy = list(dict.fromkeys(c.setup.label for c in self.cells if c.stochastic))
        if not noisy:
            return []
        return [
            f"{', '.join(noisy)}: stochastic. Their distances are to their own converged image on the same Brownian "
            "path, which is another image than the deterministic samplers' one."
        ]

    def about_twins(self) -> list[str]:
        """Samplers that are one and the same under two names: in a chart one line hides the other."""
        kept: list[tuple[list[str], list[Array]]] = []
        for text in names(self.cells):
            own = [cell for cell in self.cells if cell.setup.label == text]
            far = [self.results.per_image(cell, "pictures", "latent") for cell in own]
            same = (held for held, other in kept if len(far) == len(other) and all(map(alike, far, other)))
            twin = next(same, None)
            if twin is None:
                kept.append(([text], far))
            else:
                twin.append(text)
        told = "make the same images, but for rounding: in charts one line hides the other."
        return [f"{' and '.join(held)} {told}" for held, _ in kept if len(held) > 1]

    def about_kid(self) -> list[str]:
        if "kid" not in self.columns:
            return []
        against = f"{self.judges.reference}" if self.judges.reference else "the converged images of the same prompts"
        eyes = "Inception" if self.judges.inception is not None else "CLIP embeddings"
        words = f"KID is on {eyes}, against {against}"
        paired = "" if self.judges.reference else "; an image is never compared with its own twin"
        few = "" if self.results.count >= FEW else f". FID needs {FEW:,} images; here are {self.results.count:,}"
        return [f"{words}{paired}{few}."]


def alike(a: Array, b: Array) -> bool:
    """Whether the distances of two cells, image by image, are those of one sampler."""
    return len(a) == len(b) and bool(np.median(np.abs(a - b)) <= SAME * np.median(np.abs(a)))

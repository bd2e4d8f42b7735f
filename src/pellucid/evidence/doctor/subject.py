"""What the doctor looks at: all that is known of a model, a config or a run, and why the rest is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.core.grid import MAX_STEPS, Grid
from pellucid.core.plan import Plan
from pellucid.evidence.metrics.images import ImageSet
from pellucid.interop.diffusers_config import Reading
from pellucid.pipeline.adapters import Control, ImagePrompt, Lora
from pellucid.pipeline.pipeline import Pipeline

if TYPE_CHECKING:
    from pellucid.evidence.doctor.probe import Probe
    from pellucid.evidence.trace import Trace

# What a check may need, and what to say where it is not there; what begins with OTHER is no fault and no news.
OTHER = "the subject is not "
NEEDS: dict[str, str] = {
    "folder": "the subject is not a diffusers folder",
    "file": "the subject is not a single-file checkpoint",
    "scheduler": "the subject is not a scheduler",
    "reading": "the subject is not a scheduler",
    "plan": "the subject is not a plan",
    "plan_file": "the subject is not a plan",
    "recipe": "the subject is not a recipe",
    "pipeline": "the subject is not a model",
    "network": "the subject is not a model",
    "vae": "the subject is not a model with a VAE",
    "data": "no data: give --data FOLDER or --data scenes",
    "trace": "no trace: give --trace FILE",
    "images": "no images: give --images FOLDER",
}


@dataclass(frozen=True)
class Asked:
    """How the subject is to be run; None leaves it to the subject."""

    steps: int | None = None
    strength: float | None = None
    sampler: str | None = None
    grid: str | Grid | None = None
    dialect: str | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and not 1 <= self.steps <= MAX_STEPS:
            raise PellucidError(rule("steps", f"from 1 to {MAX_STEPS}", self.steps), "request")
        if self.strength is not None and not 0 < self.strength <= 1:
            raise PellucidError(rule("strength", "above 0 and at most 1", self.strength), "request")

    @property
    def own(self) -> bool:
        """Whether the subject's own scheduler runs: nothing names another sampler or grid."""
        return self.sampler is None and self.grid is None

    @property
    def whole_steps(self) -> bool:
        """Whether a run is cut at whole steps, as diffusers does it."""
        return self.own or self.dialect == "diffusers"


@dataclass(frozen=True)
class Data:
    """Images that are known to be of the model's kind, cut to the size that it makes."""

    pixels: Tensor = field(repr=False)  # (N, 3, H, W) in [0, 1]; of a network alone as it takes them
    captions: tuple[str, ...] | None = None  # one per image, where they are known
    labels: tuple[int, ...] | None = None  # the same for classes
    name: str = "data"


@dataclass(frozen=True)
class Subject:
    """All that is known; a field that is None is not, and `absent` says why where it is not obvious."""

    name: str
    asked: Asked = Asked()
    folder: Path | None = None  # of a diffusers model
    file: Path | None = None  # a single-file checkpoint
    index: Mapping[str, Any] | None = None  # model_index.json
    scheduler: Mapping[str, Any] | None = None  # its config, as it is written
    reading: Reading | None = None  # that config, understood
    plan: Plan | None = None  # what a run would do: a plan file's, or the config's at the asked steps
    plan_file: Mapping[str, Any] | None = None  # a plan as it is written, whether it keeps its law or not
    recipe: Mapping[str, Any] | None = None  # how an image was made
    pipeline: Pipeline | None = None  # with weights
    vae: Any = None  # with weights; of the pipeline, or alone
    probe: Probe | None = None  # a network alone, with its data
    adapters: tuple[Lora | Control | ImagePrompt, ...] = ()  # that are to be worn
    data: Data | None = None
    trace: Trace | None = None  # of evidence/trace
    images: ImageSet | None = None
    refused: PellucidError | None = None  # why the model does not load
    quick: bool = False  # weights are not looked at
    absent: Mapping[str, str] = field(default_factory=dict)
    memo: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)  # measured once

    @property
    def network(self) -> Any:
        """The denoising network, of a pipeline or alone."""
        if self.probe is not None:
            return self.probe.network
        return None if self.pipeline is None else self.pipeline.components.network

    @property
    def is_model(self) -> bool:
        """Whether it is a model, or what says how to read one's output: target and schedule can be wrong."""
        return any(one is not None for one in (self.folder, self.file, self.scheduler, self.pipeline, self.probe))

    @property
    def is_run(self) -> bool:
        """Whether the plan is that of the recorded run, and not what a model would do."""
        return self.trace is not None and self.plan is self.trace.header.plans[0]

    def lacks(self, needs: tuple[str, ...]) -> str | None:
        """Why a check that needs these cannot run, or None where it can."""
        missing = [need for need in needs if getattr(self, need) is None]
        return "; ".join(self.absent.get(need, NEEDS[need]) for need in missing) or None

"""Pellucid: the diffusion engine that you can see through.

The public API, and nothing else. Names load on first use, so that `pellucid --help` does not wait for torch.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# torch's threads spin while they wait for each other. Two processes on the same cores then wait for threads that cannot
# run: 59 s for an image that takes 0.5 (bench/waiting_threads.py). So they spin for a short while, and then sleep.
# torch reads this when it is imported; where it came first, pipeline/threads.py measures whether its threads wait.
if "torch" not in sys.modules and not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "1000"

if TYPE_CHECKING:
    from pellucid.core import oracle, samplers
    from pellucid.core import schedule as schedules
    from pellucid.core.adaptive import AdaptiveResult, run_adaptive
    from pellucid.core.compile import compile_plan
    from pellucid.core.denoiser import denoiser
    from pellucid.core.errors import Cancelled, PellucidError, PellucidWarning, PlanError
    from pellucid.core.filters import Clip, DynamicThreshold
    from pellucid.core.grid import Grid
    from pellucid.core.loop import Job, Prediction, StepSeen, run, run_batch
    from pellucid.core.noise import Brownian, Philox, TorchStream
    from pellucid.core.plan import Plan, Row
    from pellucid.core.schedule import Level
    from pellucid.evidence.doctor.checks import doctor
    from pellucid.evidence.public import study, trace, tune
    from pellucid.interop.scheduler import Scheduler
    from pellucid.models.guidance import Guidance, guarded
    from pellucid.pipeline.encoders.text import Embedding
    from pellucid.pipeline.load import load
    from pellucid.pipeline.pipeline import Pipeline
    from pellucid.pipeline.policy import Policy
    from pellucid.pipeline.request import Control, ImagePrompt, Lora, Request
    from pellucid.pipeline.result import Result
    from pellucid.pipeline.wrapped import wrap

# public name → (module, name there; None for the module itself)
_HOMES: dict[str, tuple[str, str | None]] = {
    "AdaptiveResult": ("pellucid.core.adaptive", "AdaptiveResult"),
    "Brownian": ("pellucid.core.noise", "Brownian"),
    "Cancelled": ("pellucid.core.errors", "Cancelled"),
    "Clip": ("pellucid.core.filters", "Clip"),
    "Control": ("pellucid.pipeline.request", "Control"),
    "DynamicThreshold": ("pellucid.core.filters", "DynamicThreshold"),
    "Embedding": ("pellucid.pipeline.encoders.text", "Embedding"),
    "Grid": ("pellucid.core.grid", "Grid"),
    "Guidance": ("pellucid.models.guidance", "Guidance"),
    "ImagePrompt": ("pellucid.pipeline.request", "ImagePrompt"),
    "Job": ("pellucid.core.loop", "Job"),
    "Level": ("pellucid.core.schedule", "Level"),
    "Lora": ("pellucid.pipeline.request", "Lora"),
    "PellucidError": ("pellucid.core.errors", "PellucidError"),
    "PellucidWarning": ("pellucid.core.errors", "PellucidWarning"),
    "Philox": ("pellucid.core.noise", "Philox"),
    "Pipeline": ("pellucid.pipeline.pipeline", "Pipeline"),
    "Plan": ("pellucid.core.plan", "Plan"),
    "PlanError": ("pellucid.core.errors", "PlanError"),
    "Policy": ("pellucid.pipeline.policy", "Policy"),
    "Prediction": ("pellucid.core.loop", "Prediction"),
    "Request": ("pellucid.pipeline.request", "Request"),
    "Result": ("pellucid.pipeline.result", "Result"),
    "Row": ("pellucid.core.plan", "Row"),
    "Scheduler": ("pellucid.interop.scheduler", "Scheduler"),
    "StepSeen": ("pellucid.core.loop", "StepSeen"),
    "TorchStream": ("pellucid.core.noise", "TorchStream"),
    "compile_plan": ("pellucid.core.compile", "compile_plan"),
    "denoiser": ("pellucid.core.denoiser", "denoiser"),
    "doctor": ("pellucid.evidence.doctor.checks", "doctor"),
    "guarded": ("pellucid.models.guidance", "guarded"),
    "load": ("pellucid.pipeline.load", "load"),
    "oracle": ("pellucid.core.oracle", None),
    "run": ("pellucid.core.loop", "run"),
    "run_adaptive": ("pellucid.core.adaptive", "run_adaptive"),
    "run_batch": ("pellucid.core.loop", "run_batch"),
    "samplers": ("pellucid.core.samplers", None),
    "schedules": ("pellucid.core.schedule", None),
    "study": ("pellucid.evidence.public", "study"),
    "trace": ("pellucid.evidence.public", "trace"),
    "tune": ("pellucid.evidence.public", "tune"),
    "wrap": ("pellucid.pipeline.wrapped", "wrap"),
}

__all__ = [
    "AdaptiveResult",
    "Brownian",
    "Cancelled",
    "Clip",
    "Control",
    "DynamicThreshold",
    "Embedding",
    "Grid",
    "Guidance",
    "ImagePrompt",
    "Job",
    "Level",
    "Lora",
    "PellucidError",
    "PellucidWarning",
    "Philox",
    "Pipeline",
    "Plan",
    "PlanError",
    "Policy",
    "Prediction",
    "Request",
    "Result",
    "Row",
    "Scheduler",
    "StepSeen",
    "TorchStream",
    "__version__",
    "compile_plan",
    "denoiser",
    "doctor",
    "guarded",
    "load",
    "oracle",
    "run",
    "run_adaptive",
    "run_batch",
    "samplers",
    "schedules",
    "study",
    "trace",
    "tune",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        theirs = name.endswith("Pipeline") or name.startswith("AutoPipeline") or name == "from_pretrained"
        hint = "; use pellucid.load(…), which opens every kind of model" if theirs else ""
        raise AttributeError(f"module 'pellucid' has no attribute {name!r}{hint}")
    module, attribute = _HOMES[name]
    found = import_module(module)
    value = found if attribute is None else getattr(found, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

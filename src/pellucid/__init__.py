"""Pellucid: the diffusion engine that you can see through.

The public API, and nothing else. Names load on first use, so that `pellucid --help` does not wait for torch.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pellucid._version import __version__

# torch's threads spin while they wait for each other. Two processes on the same cores then wait for threads that cannot
# run: 59 s for an image that takes 0.5 (bench/waiting_threads.py). So they spin for a short while, and then sleep.
# torch reads this when it is imported; where it came first, pipeline/threads.py measures whether its threads wait.
if "torch" not in sys.modules and not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "1000"

if TYPE_CHECKING:
    from pellucid.core import oracle, samplers
    from pellucid.core import schedule as schedules
    from pellucid.core.adaptive import AdaptiveResult, run_adaptive
    from pellucid.core.batch import Prediction, StepSeen
    from pellucid.core.compile import compile_plan
    from pellucid.core.denoiser import denoiser
    from pellucid.core.errors import Cancelled, PellucidError, PellucidWarning, PlanError
    from pellucid.core.filters import Clip, DynamicThreshold
    from pellucid.core.grid import Grid
    from pellucid.core.loop import Job, run, run_batch
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

# Where the public names are, and the modules that are public themselves.
_NAMES = {
    "core.adaptive": ("AdaptiveResult", "run_adaptive"),
    "core.compile": ("compile_plan",),
    "core.denoiser": ("denoiser",),
    "core.errors": ("Cancelled", "PellucidError", "PellucidWarning", "PlanError"),
    "core.filters": ("Clip", "DynamicThreshold"),
    "core.grid": ("Grid",),
    "core.batch": ("Prediction", "StepSeen"),
    "core.loop": ("Job", "run", "run_batch"),
    "core.noise": ("Brownian", "Philox", "TorchStream"),
    "core.plan": ("Plan", "Row"),
    "core.schedule": ("Level",),
    "evidence.doctor.checks": ("doctor",),
    "evidence.public": ("study", "trace", "tune"),
    "interop.scheduler": ("Scheduler",),
    "models.guidance": ("Guidance", "guarded"),
    "pipeline.encoders.text": ("Embedding",),
    "pipeline.load": ("load",),
    "pipeline.pipeline": ("Pipeline",),
    "pipeline.policy": ("Policy",),
    "pipeline.request": ("Control", "ImagePrompt", "Lora", "Request"),
    "pipeline.result": ("Result",),
    "pipeline.wrapped": ("wrap",),
}
_MODULES = {"oracle": "core.oracle", "samplers": "core.samplers", "schedules": "core.schedule"}

__all__ = [
    "AdaptiveResult", "Brownian", "Cancelled", "Clip", "Control", "DynamicThreshold", "Embedding", "Grid",
    "Guidance", "ImagePrompt", "Job", "Level", "Lora", "PellucidError", "PellucidWarning", "Philox", "Pipeline",
    "Plan", "PlanError", "Policy", "Prediction", "Request", "Result", "Row", "Scheduler", "StepSeen", "TorchStream",
    "__version__", "compile_plan", "denoiser", "doctor", "guarded", "load", "oracle", "run", "run_adaptive",
    "run_batch", "samplers", "schedules", "study", "trace", "tune", "wrap",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _NAMES.items() if name in names), None)
    if home is None and name not in _MODULES:
        theirs = name.endswith("Pipeline") or name.startswith("AutoPipeline") or name == "from_pretrained"
        hint = "; use pellucid.load(…), which opens every kind of model" if theirs else ""
        raise AttributeError(f"module 'pellucid' has no attribute {name!r}{hint}")
    found = import_module(f"pellucid.{home or _MODULES[name]}")
    globals()[name] = value = found if home is None else getattr(found, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

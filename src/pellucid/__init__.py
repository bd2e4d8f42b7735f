"""Pellucid: the diffusion engine that you can see through.

The public API, and nothing else. Names load on first use, so that `pellucid --help` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pellucid.core import oracle, samplers
    from pellucid.core import schedule as schedules
    from pellucid.core.adaptive import AdaptiveResult, run_adaptive
    from pellucid.core.compile import compile_plan
    from pellucid.core.denoiser import denoiser
    from pellucid.core.errors import Cancelled, PellucidError, PlanError
    from pellucid.core.filters import Clip, DynamicThreshold
    from pellucid.core.grid import Grid
    from pellucid.core.loop import Job, Prediction, StepSeen, run, run_batch
    from pellucid.core.noise import Brownian, Philox
    from pellucid.core.plan import Plan, Row
    from pellucid.core.schedule import Level
    from pellucid.interop.scheduler import Scheduler

# public name → (module, name there; None for the module itself)
_HOMES: dict[str, tuple[str, str | None]] = {
    "AdaptiveResult": ("pellucid.core.adaptive", "AdaptiveResult"),
    "Brownian": ("pellucid.core.noise", "Brownian"),
    "Cancelled": ("pellucid.core.errors", "Cancelled"),
    "Clip": ("pellucid.core.filters", "Clip"),
    "DynamicThreshold": ("pellucid.core.filters", "DynamicThreshold"),
    "Grid": ("pellucid.core.grid", "Grid"),
    "Job": ("pellucid.core.loop", "Job"),
    "Level": ("pellucid.core.schedule", "Level"),
    "PellucidError": ("pellucid.core.errors", "PellucidError"),
    "Philox": ("pellucid.core.noise", "Philox"),
    "Plan": ("pellucid.core.plan", "Plan"),
    "PlanError": ("pellucid.core.errors", "PlanError"),
    "Prediction": ("pellucid.core.loop", "Prediction"),
    "Row": ("pellucid.core.plan", "Row"),
    "Scheduler": ("pellucid.interop.scheduler", "Scheduler"),
    "StepSeen": ("pellucid.core.loop", "StepSeen"),
    "compile_plan": ("pellucid.core.compile", "compile_plan"),
    "denoiser": ("pellucid.core.denoiser", "denoiser"),
    "oracle": ("pellucid.core.oracle", None),
    "run": ("pellucid.core.loop", "run"),
    "run_adaptive": ("pellucid.core.adaptive", "run_adaptive"),
    "run_batch": ("pellucid.core.loop", "run_batch"),
    "samplers": ("pellucid.core.samplers", None),
    "schedules": ("pellucid.core.schedule", None),
}

__all__ = [
    "AdaptiveResult",
    "Brownian",
    "Cancelled",
    "Clip",
    "DynamicThreshold",
    "Grid",
    "Job",
    "Level",
    "PellucidError",
    "Philox",
    "Plan",
    "PlanError",
    "Prediction",
    "Row",
    "Scheduler",
    "StepSeen",
    "__version__",
    "compile_plan",
    "denoiser",
    "oracle",
    "run",
    "run_adaptive",
    "run_batch",
    "samplers",
    "schedules",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pellucid' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    found = import_module(module)
    value = found if attribute is None else getattr(found, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

"""Every sampler, by family. Importing this package fills the registry."""

from pellucid.core.samplers import ddpm, dpm, euler, exponential, flow, pndm
from pellucid.core.samplers.registry import NAMES, REGISTRY, Draft, Sampler, resolve

__all__ = [
    "NAMES",
    "REGISTRY",
    "Draft",
    "Sampler",
    "ddpm",
    "dpm",
    "euler",
    "exponential",
    "flow",
    "names",
    "pndm",
    "resolve",
]


def names() -> tuple[str, ...]:
    """The samplers' own names."""
    return tuple(REGISTRY)

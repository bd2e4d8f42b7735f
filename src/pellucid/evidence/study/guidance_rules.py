"""The rules of a guidance study by name: what each becomes for one model, at one scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.models.guidance import Guidance, short
from pellucid.models.rules import RULES, CFGZero
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.wrapped import WrappedPipeline, read_scheduler

NAMES = ("plain", "rescale", "dynamic", "interval", "apg", "cfg_zero")
SPAN = (0.28, 5.42)  # sigma / alpha between which `interval` guides: Kynkäänniemi et al. 2024, for SDXL


@dataclass(frozen=True)
class Nature:
    """What of a model decides how a rule is spelled: whether it works on latents, and whether it is a flow."""

    latent: bool = False
    flow: bool = False

    @staticmethod
    def of(pipe: Any) -> Nature:
        """Of a pipeline of ours or a wrapped one; what stands in for one works on pixels."""
        if isinstance(pipe, Pipeline):
            return Nature(pipe.components.vae is not None, pipe.components.schedule.frame == "flow")
        if isinstance(pipe, WrappedPipeline):
            peer = pipe.peer.pipeline
            return Nature(getattr(peer, "vae", None) is not None, read_scheduler(peer).schedule.frame == "flow")
        return Nature()


def guidance_of(words: str, scale: float, nature: Nature) -> Guidance:
    """A rule of the study, with options behind its name where it has any, at a scale.

    `dynamic` is `threshold` on pixels and `mimic` on latents; `interval` without options guides in the SPAN of sigmas.
    At scale 1 rules that then do nothing are plain, so that their images are made once.
    """
    name, *options = words.split() or [""]
    if name not in (*NAMES, *RULES):
        known = (*NAMES, *(one for one in RULES if one not in NAMES))
        raise PellucidError(rule("rules", f"of {', '.join(known)}", name, nearest(name, known)), "study-rules")
    if name == "plain" and options:
        raise PellucidError(rule("options of plain", "none", " ".join(options)), "study-rules")
    spelled = {"plain": "", "dynamic": "mimic" if nature.latent else "threshold"}.get(name, name)
    if name == "interval" and not options:
        low, high = (value / (1 + value) if nature.flow else value for value in SPAN)
        spelled, options = "sigma_interval", [f"low={low:.4g}", f"high={high:.4g}"]
    found = Guidance.parse(" + ".join(filter(None, (short(float(scale)), " ".join([spelled, *options]).strip()))))
    return Guidance(1.0) if scale == 1 and idle(found) else found


def idle(guidance: Guidance) -> bool:
    """Whether rules do nothing at scale 1: no term is added and no step is zeroed."""
    way = guidance.combination
    return not guidance.extras and not (isinstance(way, CFGZero) and way.zero_steps)


def check(words: str, scale: float) -> None:
    """Refuses a rule that no model could take."""
    for nature in (Nature(latent=True), Nature()):
        try:
            guidance_of(words, scale, nature)
        except PellucidError as error:
            wrong = error
        else:
            return
    raise wrong

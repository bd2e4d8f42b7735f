"""Rules of guidance: small functions over named predictions, each with the space in which it works.

Where `cond` and `uncond` are only added and scaled, the space does not matter: every space is affine in the output at
one level. Where a norm, a range or an angle is taken it does, so such a rule declares its space: `raw` (the network's
output as it is), `eps`, `x0`, `v` or `flow`. The default is the space of its paper; diffusers works in `raw`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.core.filters import DynamicThreshold

Space = Literal["raw", "eps", "x0", "v", "flow"]
_SPACES: tuple[Space, ...] = get_args(Space)
MOST = 1000.0  # of any scale: float32 must hold it times a prediction


def check_number(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise PellucidError(rule(name, f"a number from {low:g} to {high:g}", value), "guidance")


def check_choice(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise PellucidError(rule(name, f"one of {', '.join(known)}", value, nearest(str(value), known)), "guidance")


def _dims_of(x: Tensor) -> tuple[int, ...]:
    """All but the batch."""
    return tuple(range(1, x.ndim))


def _bounded(low: float, high: float, default: Any = MISSING) -> Any:
    """A field with a number from low to high."""
    return field(default=default, metadata={"bounds": (low, high)})


@dataclass(frozen=True)
class Rule:
    """A rule as a value: it says what to do, checks itself, and reads and writes as a dict."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        for f in fields(self):
            value, where = getattr(self, f.name), f"{f.name} of {self.name}"
            if "bounds" in f.metadata:
                check_number(where, value, *f.metadata["bounds"])
            elif f.name == "space":
                check_choice(where, value, _SPACES)
            elif f.name == "layers":
                object.__setattr__(self, "layers", _layer_names(where, value))
        start, stop = getattr(self, "start", 0.0), getattr(self, "stop", 1.0)
        if start > stop:
            raise PellucidError(rule(f"start of {self.name}", f"at most its stop {stop:g}", start), "guidance")

    def to_dict(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"rule": self.name, **{k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}}


def _layer_names(where: str, value: Any) -> tuple[str | int, ...]:
    """One name or index of a block, or several, as a tuple."""
    given = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not given or any(isinstance(v, bool) or not isinstance(v, str | int) or v == "" for v in given):
        raise PellucidError(rule(where, "names or indices of blocks", value), "guidance")
    return given


# --- when --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interval(Rule):
    """Guides in a part of the run: step i of n when int(start·n) ≤ i < int(stop·n), as diffusers' guiders count."""

    name = "interval"
    start: float = _bounded(0, 1, 0.0)
    stop: float = _bounded(0, 1, 1.0)


@dataclass(frozen=True)
class SigmaInterval(Rule):
    """Guides where low < sigma ≤ high (Kynkäänniemi et al. 2024): sigma / alpha, or the flow's own sigma."""

    name = "sigma_interval"
    low: float = _bounded(0, 1e6)
    high: float = _bounded(0, 1e6)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.low < self.high:
            raise PellucidError(rule("low of sigma_interval", f"below its high {self.high}", self.low), "guidance")


def within(start: float, stop: float, step: int, steps: int) -> bool:
    return int(start * steps) <= step < int(stop * steps)


# --- how cond and uncond combine ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Combination(Rule, ABC):
    """How cond and uncond become one prediction; `past` is what the rule remembers from call to call of one run."""

    space: Space = field(default="raw", kw_only=True)

    @abstractmethod
    def combine(self, cond: Tensor, uncond: Tensor, scale: Any, past: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The combined prediction, and what to remember."""


@dataclass(frozen=True)
class CFG(Combination):
    """Classifier-free guidance (Ho & Salimans 2022): uncond + scale·(cond − uncond), the same in every space."""

    name = "cfg"

    def combine(self, cond: Tensor, uncond: Tensor, scale: Any, past: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return along(uncond, cond - uncond, scale), None


def along(start: Tensor, direction: Tensor, scale: Any) -> Tensor:
    """start + scale·direction, for one scale or one per image."""
    if isinstance(scale, float):
        return torch.add(start, direction, alpha=scale)
    return torch.addcmul(start, direction, scale)


@dataclass(frozen=True)
class APG(Combination):
    """Adaptive projected guidance (Sadat et al. 2024): the difference, bounded, with less of its part along cond.

    `eta` is how much of the parallel part stays, `norm` bounds the difference (0: no bound), `momentum` mixes in the
    differences of earlier calls (negative: pushes away from them). The update is added to `base`: cond, with
    scale − 1, in the paper; uncond, with the scale, in diffusers.
    """

    name = "apg"
    eta: float = _bounded(-MOST, MOST, 0.0)
    norm: float = _bounded(0, 1e6, 15.0)
    momentum: float = _bounded(-1, 1, -0.5)
    base: Literal["cond", "uncond"] = "cond"
    space: Space = field(default="x0", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("base of apg", self.base, ("cond", "uncond"))

    def combine(self, cond: Tensor, uncond: Tensor, scale: Any, past: Tensor | None) -> tuple[Tensor, Tensor | None]:
        difference = cond - uncond
        if self.momentum:
            difference = past = difference if past is None else difference + self.momentum * past
        dims = _dims_of(cond)
        if self.norm:
            size = torch.linalg.vector_norm(difference, dim=dims, keepdim=True)
            difference = difference * (self.norm / size).clamp(max=1.0)
        square = (cond * cond).sum(dims, keepdim=True).clamp_min(torch.finfo(cond.dtype).tiny)
        parallel = cond * ((difference * cond).sum(dims, keepdim=True) / square)
        update = difference - (1.0 - self.eta) * parallel
        return (along(cond, update, scale - 1.0) if self.base == "cond" else along(uncond, update, scale)), past


@dataclass(frozen=True)
class CFGZero(Combination):
    """CFG-Zero* (Fan et al. 2025): uncond times the s that brings it nearest to cond; the first steps are zero.

    `zero_steps` steps at the start of a run take a zero prediction in `space`, and do not call the network.
    """

    name = "cfg_zero"
    zero_steps: int = _bounded(0, 1000, 1)
    space: Space = field(default="flow", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.zero_steps, int):
            raise PellucidError(rule("zero_steps of cfg_zero", "a whole number", self.zero_steps), "guidance")

    def combine(self, cond: Tensor, uncond: Tensor, scale: Any, past: Tensor | None) -> tuple[Tensor, Tensor | None]:
        dims = _dims_of(cond)
        square = (uncond * uncond).sum(dims, keepdim=True) + 1e-8  # as the paper's code
        nearest_uncond = uncond * ((cond * uncond).sum(dims, keepdim=True) / square)
        return along(nearest_uncond, cond - nearest_uncond, scale), None


# --- what is added: away from a worse prediction -----------------------------------------------------------------


@dataclass(frozen=True)
class Extra(Rule):
    """Adds weight·(cond − term), where the term is a worse prediction of the same thing; the same in every space."""

    term: ClassVar[str]
    scale: float = _bounded(0, MOST)
    start: float = _bounded(0, 1, 0.0)
    stop: float = _bounded(0, 1, 1.0)

    @property
    def weight(self) -> float:
        return float(self.scale)

    @property
    def told(self) -> dict[str, Any]:
        """What is also passed to the network to make the term."""
        return {}


@dataclass(frozen=True)
class LayerExtra(Extra):
    """An extra whose term comes from the same network, with some blocks weakened."""

    layers: tuple[str | int, ...] = ()

    @property
    def told(self) -> dict[str, Any]:
        return {self.term: self.layers}


@dataclass(frozen=True)
class PAG(LayerExtra):
    """Perturbed-attention guidance (Ahn et al. 2024): self-attention of `layers` is the identity."""

    name = "pag"
    term = "perturbed"
    scale: float = _bounded(0, MOST, 3.0)
    layers: tuple[str | int, ...] = ("mid",)


@dataclass(frozen=True)
class SkipLayer(LayerExtra):
    """Skip-layer guidance (Stable Diffusion 3.5): whole blocks, `layers`, are left out; SD 3.5's defaults."""

    name = "skip_layer"
    term = "skipped"
    scale: float = _bounded(0, MOST, 2.8)
    start: float = _bounded(0, 1, 0.01)
    stop: float = _bounded(0, 1, 0.2)
    layers: tuple[str | int, ...] = (7, 8, 9)


@dataclass(frozen=True)
class AutoGuidance(Extra):
    """Autoguidance (Karras et al. 2024): weak + scale·(cond − weak), with a weaker network; 1 is off."""

    name = "autoguidance"
    term = "weak"
    scale: float = _bounded(0, MOST, 2.0)

    @property
    def weight(self) -> float:
        return self.scale - 1.0


# --- what is corrected afterwards --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Correction(Rule, ABC):
    """Changes the guided prediction in the light of cond (and uncond, where `compares` says so)."""

    compares: ClassVar[bool] = False
    space: Space = field(default="x0", kw_only=True)

    @abstractmethod
    def correct(self, guided: Tensor, cond: Tensor, uncond: Tensor | None) -> Tensor:
        """The corrected prediction."""


@dataclass(frozen=True)
class Rescale(Correction):
    """Brings the spread of each image back to that of cond, by the share `phi` (Lin et al. 2023, eq. 15–16).

    The paper's network predicts v. On raw eps (as diffusers) the same factor shrinks the noise itself, and x0 takes
    the difference times sigma / alpha.
    """

    name = "rescale"
    phi: float = _bounded(0, 1, 0.7)
    space: Space = field(default="v", kw_only=True)

    def correct(self, guided: Tensor, cond: Tensor, uncond: Tensor | None) -> Tensor:
        have = _spread(guided)
        ratio = torch.where(have > 0, _spread(cond) / have, 1.0)  # (B, 1, 1, 1)
        return guided * (1.0 + self.phi * (ratio - 1.0))


def _spread(value: Tensor) -> Tensor:
    """The standard deviation of each image times √numbers, which a ratio does not see; torch's std is slow here."""
    dims = _dims_of(value)
    size: Tensor = torch.linalg.vector_norm(value - value.mean(dims, keepdim=True), dim=dims, keepdim=True)
    return size


@dataclass(frozen=True)
class Mimic(Correction):
    """Dynamic thresholding for latents: the range of each channel is that of plain guidance at a smaller `scale`.

    Around each channel's mean, values beyond the `percentile` are clipped, and the rest is shrunk to the range that
    plain guidance at `scale` would have; it never grows. After the extension that made a mimic scale popular.
    """

    name = "mimic"
    compares = True
    scale: float = _bounded(0, MOST, 7.0)
    percentile: float = _bounded(0, 1, 1.0)
    phi: float = _bounded(0, 1, 1.0)

    def correct(self, guided: Tensor, cond: Tensor, uncond: Tensor | None) -> Tensor:
        assert uncond is not None
        model = self.centred(along(uncond, cond - uncond, float(self.scale)))[0]
        flat, mean = self.centred(guided)
        allowed = model.abs().amax(2, keepdim=True)  # (B, C, 1)
        if self.percentile == 1.0:
            have = flat.abs().amax(2, keepdim=True)
        else:
            have = torch.quantile(flat.abs(), float(self.percentile), dim=2, keepdim=True)
        most = torch.maximum(allowed, have).clamp_min(torch.finfo(flat.dtype).tiny)
        shrunk = flat.clamp(-most, most) * (allowed / most) + mean
        return guided + self.phi * (shrunk.reshape(guided.shape) - guided)

    @staticmethod
    def centred(value: Tensor) -> tuple[Tensor, Tensor]:
        flat = value.reshape(len(value), value.shape[1] if value.ndim > 2 else 1, -1)  # (B, C, H·W)
        mean = flat.mean(2, keepdim=True)
        return flat - mean, mean


@dataclass(frozen=True)
class Threshold(Correction):
    """Dynamic thresholding (Saharia et al. 2022): clips x0 at its percentile and scales it back into [−1, 1].

    For networks on pixels: latents do not live in [−1, 1]; there, take `Mimic`. `most` bounds the divisor.
    """

    name = "threshold"
    percentile: float = _bounded(0, 1, 0.995)
    most: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.most is not None:
            check_number("most of threshold", self.most, 1.0, 1e6)
        self.clip()

    def clip(self) -> DynamicThreshold:
        return DynamicThreshold(self.percentile, math.inf if self.most is None else self.most)

    def correct(self, guided: Tensor, cond: Tensor, uncond: Tensor | None) -> Tensor:
        return self.clip()(guided)


# The order in which they act, whatever the order in which they are given; see docs/decisions/0008.
ORDER: tuple[type[Rule], ...] = (
    Interval,
    SigmaInterval,
    CFG,
    APG,
    CFGZero,
    PAG,
    SkipLayer,
    AutoGuidance,
    Rescale,
    Mimic,
    Threshold,
)
RULES: dict[str, type[Rule]] = {kind.name: kind for kind in ORDER}
ONE_OF: tuple[tuple[type[Rule], ...], ...] = ((Interval, SigmaInterval), (CFG, APG, CFGZero))


def make(name: str, values: dict[str, Any]) -> Rule:
    """A rule by its name and options."""
    if name not in RULES:
        raise PellucidError(rule("rule", f"one of {', '.join(RULES)}", name, nearest(str(name), RULES)), "guidance")
    kind = RULES[name]
    known = {f.name: f for f in fields(kind)}
    for key in values:
        if key not in known:
            raise PellucidError(rule(f"option of {name}", f"one of {', '.join(known)}", key), "guidance")
    missing = [k for k, f in known.items() if f.default is MISSING and k not in values]
    if missing:
        raise PellucidError(f"{name} must have {' and '.join(missing)}; got none.", "guidance")
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})

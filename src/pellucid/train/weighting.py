"""How much each noise level counts, said once as a weight on the error of x0, and true for every target."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pellucid.core import target as targets
from pellucid.core.errors import PellucidError, rule
from pellucid.core.schedule import Level, Target

Kind = Literal["uniform", "snr", "min_snr", "soft_min_snr", "edm", "sigmoid"]
KINDS: tuple[Kind, ...] = ("uniform", "snr", "min_snr", "soft_min_snr", "edm", "sigmoid")


@dataclass(frozen=True)
class Weighting:
    """The weight of a level. `uniform` is the plain squared error of what the network predicts.

    On the squared error of x0, with SNR = (alpha / sigma)²: snr: SNR. min_snr: min(SNR, gamma) (Hang et al. 2023).
    soft_min_snr: their harmonic meeting, SNR·gamma / (SNR + gamma) (Crowson et al. 2024). edm: (1 + sigma_data²·SNR) /
    sigma_data² (Karras et al. 2022). sigmoid: SNR·sigmoid(bias − ln SNR) (Kingma and Gao 2023).
    """

    kind: Kind = "uniform"
    gamma: float = 5.0
    bias: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PellucidError(rule("weighting", f"one of {', '.join(KINDS)}", self.kind), "weighting")
        if not (math.isfinite(self.gamma) and self.gamma > 0) or not math.isfinite(self.bias):
            raise PellucidError(rule("gamma, bias", "finite, gamma above 0", (self.gamma, self.bias)), "weighting")

    def on_x0(self, level: Level, sigma_data: float = targets.SIGMA_DATA) -> float:
        """The weight on (x0 − its prediction)²; `uniform` has none of its own."""
        snr = (level.alpha / level.sigma) ** 2
        if self.kind == "snr":
            return snr
        if self.kind == "min_snr":
            return min(snr, self.gamma)
        if self.kind == "soft_min_snr":
            return snr * self.gamma / (snr + self.gamma)
        if self.kind == "edm":
            return snr + 1.0 / sigma_data**2
        return snr / (1.0 + snr * math.exp(-self.bias))

    def on(self, target: Target, level: Level, sigma_data: float = targets.SIGMA_DATA) -> float:
        """The weight on the squared error of a target. An error of x0 is one of the target, `slope` times as large."""
        if self.kind == "uniform":
            return 1.0
        _, slope = targets.from_x0(target, level, sigma_data)
        if slope == 0.0:  # eps at pure noise says nothing of x0: whatever it is costs nothing
            return 0.0
        return self.on_x0(level, sigma_data) / slope**2

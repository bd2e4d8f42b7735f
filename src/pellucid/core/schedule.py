"""Noise schedules: training time ↔ noise level.

A level is (alpha, sigma): x = alpha·x0 + sigma·eps. A schedule is one increasing curve from *time*, which is
what is passed to the network, to *ratio* = sigma / alpha, which is all that a sampler needs to know. The schedule's
frame says how alpha and sigma are split: `vp` alpha² + sigma² = 1, `ve` alpha = 1, `flow` alpha + sigma = 1.
Everything is float64.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.core.reader import typed

Array = npt.NDArray[np.float64]
Frame = Literal["vp", "ve", "flow"]
Target = Literal["eps", "x0", "v", "flow", "edm", "score"]


@dataclass(frozen=True, slots=True)
class Level:
    """How much signal and how much noise: x = alpha·x0 + sigma·eps."""

    alpha: float
    sigma: float

    @property
    def ratio(self) -> float:
        """sigma / alpha, the noise of x / alpha; infinite where no signal is left."""
        return self.sigma / self.alpha if self.alpha > 0 else math.inf

    @property
    def lam(self) -> float:
        """λ = log(alpha / sigma), half the log-SNR; +∞ at sigma 0, −∞ at alpha 0."""
        if self.sigma == 0:
            return math.inf
        return math.log(self.alpha / self.sigma) if self.alpha > 0 else -math.inf

    def to(self, frame: Frame) -> Level:
        """The same signal-to-noise ratio, split as another frame splits it."""
        return in_frame(self.ratio, frame)


def in_frame(ratio: float, frame: Frame) -> Level:
    """The level with this sigma / alpha in a frame."""
    if math.isinf(ratio):
        if frame == "ve":
            raise PellucidError(
                "level must have some signal in the ve frame; got alpha 0 (zero terminal SNR). "
                "Use a sampler that works in the schedule's own frame: ddim, dpmpp_2m, unipc.",
                code="alpha-zero",
            )
        return Level(0.0, 1.0)
    norm = {"vp": math.hypot(1.0, ratio), "ve": 1.0, "flow": 1.0 + ratio}[frame]
    return Level(1.0 / norm, ratio / norm)


@dataclass(frozen=True)
class Schedule(ABC):
    """Maps training time to levels and back. Subclasses define the curve; this class reads it."""

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def frame(self) -> Frame: ...

    @property
    @abstractmethod
    def span(self) -> tuple[float, float]:
        """The times of the least and of the most noise."""

    @abstractmethod
    def ratio_at(self, times: npt.ArrayLike) -> Array:
        """sigma / alpha at (fractional) times."""

    @abstractmethod
    def time_at(self, ratios: npt.ArrayLike) -> Array:
        """The time of each sigma / alpha; outside the schedule, the nearest end."""

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """What `make` needs, with the name, to build this schedule again."""

    @property
    def num_train(self) -> int | None:
        """The number of discrete training times, or None for a continuous schedule."""
        return None

    @property
    def carries(self) -> tuple[Target, ...]:
        """The targets that a network can be trained for on this schedule, the usual one first."""
        by_frame: dict[Frame, tuple[Target, ...]] = {
            "vp": ("eps", "x0", "v", "score"),
            "ve": ("edm", "eps", "x0", "v", "score"),
            "flow": ("flow", "x0", "eps", "v", "score"),
        }
        return by_frame[self.frame]

    def level(self, time: float) -> Level:
        """The level at one time, in the schedule's own frame."""
        return in_frame(float(self.ratio_at(time)), self.frame)

    def time(self, level: Level) -> float:
        """The time whose level has the same signal-to-noise ratio."""
        return float(self.time_at(level.ratio))

    def sigma_of(self, ratios: npt.ArrayLike) -> Array:
        """The sigma that people quote for this schedule: the flow sigma, or sigma / alpha elsewhere."""
        r = np.asarray(ratios, np.float64)
        if self.frame != "flow":
            return r
        return np.where(np.isinf(r), 1.0, r / (1.0 + np.where(np.isinf(r), 0.0, r)))

    def ratio_of_sigma(self, sigmas: npt.ArrayLike) -> Array:
        """The inverse of `sigma_of`."""
        s = np.asarray(sigmas, np.float64)
        if self.frame != "flow":
            return s
        return np.where(s >= 1.0, np.inf, s / np.where(s >= 1.0, 1.0, 1.0 - s))

    @property
    def sigma_range(self) -> tuple[float, float]:
        """The smallest and the largest sigma of the schedule."""
        low, high = self.sigma_of(self.ratio_at(np.array(self.span)))
        return float(low), float(high)

    def times(self, count: int = 1000) -> Array:
        """The training times, increasing: all of a discrete schedule, `count` of a continuous one."""
        if self.num_train is not None:
            return np.arange(self.num_train, dtype=np.float64)
        return np.linspace(*self.span, count)

    def table(self, count: int = 1000) -> dict[str, Array]:
        """The taxonomy as arrays over `times()`: beta, alpha (1 − beta), alpha_bar, snr, lam, sigma."""
        ratio = self.ratio_at(self.times(count))
        with np.errstate(divide="ignore"):
            alpha_bar = np.where(np.isinf(ratio), 0.0, 1.0 / (1.0 + ratio**2))
            previous = np.concatenate([[1.0], alpha_bar[:-1]])
            step = alpha_bar / previous
            return {
                "time": self.times(count),
                "beta": 1.0 - step,
                "alpha": step,
                "alpha_bar": alpha_bar,
                "snr": 1.0 / ratio**2,
                "lam": -np.log(ratio),
                "sigma": self.sigma_of(ratio),
            }


@dataclass(frozen=True, eq=False)
class DiscreteVP(Schedule):
    """A discrete variance-preserving schedule, given by its betas.

    Between two training times λ is interpolated linearly (as k-diffusion does); in a last cell that ends at
    alpha 0, where λ is infinite, the angle atan(sigma / alpha) is.
    """

    betas: Array = field(repr=False)
    kind: str = "trained"
    made_with: tuple[tuple[str, Any], ...] = ()
    ratios: Array = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        betas = np.asarray(self.betas, np.float64)
        if betas.ndim != 1 or len(betas) < 1 or not np.all(np.isfinite(betas)):
            raise PellucidError(rule("betas", "a list of finite numbers", betas.shape), "betas")
        if betas.min() <= 0 or betas.max() > 1 or np.any(betas[:-1] >= 1):
            raise PellucidError(
                rule("betas", "in (0, 1), and 1 at most at the last time", (betas.min(), betas.max())),
                "betas",
            )
        object.__setattr__(self, "betas", betas)
        alpha_bar = np.cumprod(1.0 - betas)
        with np.errstate(divide="ignore", over="ignore"):
            ratios = np.sqrt((1.0 - alpha_bar) / alpha_bar)
        if not ratios[0] > 0 or not np.all(np.isfinite(ratios[:-1])):
            must = "ones that leave noise at every time, and signal at every time but the last"
            got = f"{len(betas)} from {betas.min():.3g} to {betas.max():.3g}"
            raise PellucidError(rule("betas", must, got), "betas")
        object.__setattr__(self, "ratios", ratios)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DiscreteVP) and self.kind == other.kind and np.array_equal(self.betas, other.betas)

    def __hash__(self) -> int:
        return hash((self.kind, self.betas.tobytes()))

    @property
    def name(self) -> str:
        return self.kind

    @property
    def frame(self) -> Frame:
        return "vp"

    @property
    def span(self) -> tuple[float, float]:
        return 0.0, float(len(self.betas) - 1)

    @property
    def num_train(self) -> int:
        return len(self.betas)

    @property
    def _cells(self) -> int:
        """How many intervals lie between training times; one that is a point where there is a single time."""
        return max(len(self.betas) - 1, 1)

    @property
    def alpha_bar(self) -> Array:
        return np.cumprod(1.0 - self.betas)

    @property
    def zero_terminal(self) -> bool:
        """Whether the last time holds no signal at all."""
        return bool(np.isinf(self.ratios[-1]))

    @property
    def carries(self) -> tuple[Target, ...]:
        return ("v", "x0") if self.zero_terminal else super().carries

    def ratio_at(self, times: npt.ArrayLike) -> Array:
        t = np.clip(np.asarray(times, np.float64), *self.span)
        low = np.minimum(np.floor(t).astype(np.int64), self._cells - 1)
        w = t - low
        a, b = self.ratios[low], self.ratios[np.minimum(low + 1, len(self.ratios) - 1)]
        finite = np.where(np.isinf(b), 1.0, b)
        bent = 1.0 / np.tan(np.where(w < 1.0, 1.0 - w, 1.0) * np.arctan2(1.0, a))
        inside = np.where(np.isinf(b), bent, np.exp((1.0 - w) * np.log(a) + w * np.log(finite)))
        return np.where(w == 0.0, a, np.where(w == 1.0, b, inside))

    def time_at(self, ratios: npt.ArrayLike) -> Array:
        r = np.clip(np.asarray(ratios, np.float64), self.ratios[0], self.ratios[-1])
        if len(self.ratios) == 1:
            return np.zeros_like(r)
        low = np.clip(np.searchsorted(self.ratios, r, side="right") - 1, 0, self._cells - 1)
        a, b = self.ratios[low], self.ratios[low + 1]
        finite = np.where(np.isinf(b), np.e * a, b)
        bent = 1.0 - np.arctan2(1.0, r) / np.arctan2(1.0, a)  # by the small angle: a may be 1e21
        safe = np.where(np.isinf(r), a, r)
        return low + np.where(np.isinf(b), bent, np.log(safe / a) / np.log(finite / a))

    def options(self) -> dict[str, Any]:
        if self.kind == "trained":
            return {"betas": self.betas.tolist()}
        return dict(self.made_with)


def _from_betas(kind: str, betas: npt.ArrayLike, **made_with: Any) -> DiscreteVP:
    return DiscreteVP(np.asarray(betas, np.float64), kind, tuple(sorted(made_with.items())))


def _from_alpha_bar(kind: str, alpha_bar: Callable[[Array], Array], count: int, cap: float, **made: Any) -> DiscreteVP:
    """Betas from a curve ᾱ(u), u in [0, 1], each capped (Nichol and Dhariwal 2021, eq. 17)."""
    bar = alpha_bar(np.arange(count + 1) / count)
    return _from_betas(kind, np.minimum(1.0 - bar[1:] / bar[:-1], cap), num_train=count, max_beta=cap, **made)


def linear(num_train: int = 1000, beta_start: float = 1e-4, beta_end: float = 0.02) -> DiscreteVP:
    """β rises linearly (Ho et al. 2020). CompVis calls this one `sqrt_linear`."""
    betas = np.linspace(beta_start, beta_end, _count_of(num_train))
    return _from_betas("linear", betas, num_train=num_train, beta_start=beta_start, beta_end=beta_end)


def scaled_linear(num_train: int = 1000, beta_start: float = 0.00085, beta_end: float = 0.012) -> DiscreteVP:
    """√β rises linearly: Stable Diffusion's schedule (CompVis calls it `linear`)."""
    if not (beta_start > 0 and beta_end > 0):
        raise PellucidError(rule("beta_start, beta_end", "positive", (beta_start, beta_end)), "betas")
    betas = np.linspace(beta_start**0.5, beta_end**0.5, _count_of(num_train)) ** 2
    return _from_betas("scaled_linear", betas, num_train=num_train, beta_start=beta_start, beta_end=beta_end)


def cosine(num_train: int = 1000, offset: float = 0.008, max_beta: float = 0.999) -> DiscreteVP:
    """ᾱ falls as a squared cosine, β capped (Nichol and Dhariwal 2021)."""
    return _from_alpha_bar(
        "cosine",
        lambda u: np.cos((u + offset) / (1 + offset) * math.pi / 2) ** 2,
        _count_of(num_train),
        max_beta,
        offset=offset,
    )


def sqrt_beta(num_train: int = 1000, beta_start: float = 1e-4, beta_end: float = 0.02) -> DiscreteVP:
    """β = √(linear ramp): the schedule that CompVis calls `sqrt`."""
    betas = np.linspace(beta_start, beta_end, _count_of(num_train)) ** 0.5
    return _from_betas("sqrt_beta", betas, num_train=num_train, beta_start=beta_start, beta_end=beta_end)


def sqrt_alpha_bar(num_train: int = 1000, offset: float = 1e-4, max_beta: float = 0.999) -> DiscreteVP:
    """ᾱ = 1 − √(u + offset): the `sqrt` of Diffusion-LM (Li et al. 2022)."""
    return _from_alpha_bar(
        "sqrt_alpha_bar",
        lambda u: np.maximum(1.0 - np.sqrt(u + offset), 1e-12),
        _count_of(num_train),
        max_beta,
        offset=offset,
    )


def sigmoid(num_train: int = 1000, beta_start: float = 1e-4, beta_end: float = 0.02, reach: float = 6.0) -> DiscreteVP:
    """β rises as a sigmoid over [−reach, reach] (GeoDiff, Xu et al. 2022)."""
    u = np.linspace(-reach, reach, _count_of(num_train))
    betas = (beta_end - beta_start) / (1.0 + np.exp(-u)) + beta_start
    return _from_betas("sigmoid", betas, num_train=num_train, beta_start=beta_start, beta_end=beta_end, reach=reach)


def laplace(num_train: int = 1000, scale: float = 0.5, max_beta: float = 0.999) -> DiscreteVP:
    """log-SNR is Laplace-distributed around 0 (Hang and Gu 2024), as diffusers reads it.

    diffusers' `laplace` takes √(SNR / (1 + SNR)) as ᾱ; that curve is what its models were trained with.
    """

    def alpha_bar(u: Array) -> Array:
        sign = np.where(0.5 - u >= 0, 1.0, -1.0)
        snr = np.exp(-scale * sign * np.log(1.0 - 2.0 * np.abs(0.5 - u) + 1e-6))
        return np.sqrt(snr / (1.0 + snr))

    return _from_alpha_bar("laplace", alpha_bar, _count_of(num_train), max_beta, scale=scale)


def exponential(num_train: int = 1000, rate: float = 12.0, max_beta: float = 0.999) -> DiscreteVP:
    """ᾱ = exp(−rate·u)."""
    return _from_alpha_bar("exponential", lambda u: np.exp(-rate * u), _count_of(num_train), max_beta, rate=rate)


def zero_terminal_snr(schedule: DiscreteVP) -> DiscreteVP:
    """Shifts and stretches √ᾱ so that the last time holds no signal (Lin et al. 2023, algorithm 1)."""
    if not isinstance(schedule, DiscreteVP):
        raise PellucidError(
            rule(
                "schedule",
                "a discrete one for zero terminal SNR",
                schedule.name,
                "Flow schedules have it already.",
            ),
            "zero-snr",
        )
    root = np.sqrt(schedule.alpha_bar)
    root = (root - root[-1]) * root[0] / (root[0] - root[-1])
    bar = root**2
    betas = 1.0 - bar / np.concatenate([[1.0], bar[:-1]])
    return DiscreteVP(betas, schedule.kind, (*schedule.made_with, ("zero_snr", True)))


def _count_of(num_train: int) -> int:
    if not isinstance(num_train, int) or not 1 <= num_train <= 1_000_000:
        raise PellucidError(rule("num_train", "a whole number from 1 to 1000000", num_train), "num-train")
    return num_train


@dataclass(frozen=True)
class ContinuousVP(Schedule):
    """Variance preserving in continuous time u ∈ [u_min, 1]; the network's time is `scale`·u.

    `linear`: β(u) rises linearly, ᾱ = exp(−beta_d·u²/2 − beta_min·u) (Song et al. 2021, eq. 33).
    `cosine`: alpha = cos(πu/2), sigma = sin(πu/2).
    """

    curve: Literal["linear", "cosine"] = "linear"
    beta_min: float = 0.1
    beta_d: float = 19.9
    u_min: float = 1e-3
    scale: float = 999.0

    @property
    def name(self) -> str:
        return f"vp_{self.curve}"

    @property
    def frame(self) -> Frame:
        return "vp"

    @property
    def span(self) -> tuple[float, float]:
        return self.u_min * self.scale, self.scale

    @property
    def carries(self) -> tuple[Target, ...]:
        return ("v", "x0") if self.curve == "cosine" else super().carries

    def ratio_at(self, times: npt.ArrayLike) -> Array:
        u = np.asarray(times, np.float64) / self.scale
        if self.curve == "cosine":
            return np.where(u >= 1.0, np.inf, np.tan(np.minimum(u, 1.0) * math.pi / 2))
        return np.sqrt(np.expm1(self.beta_d * u**2 / 2 + self.beta_min * u))

    def time_at(self, ratios: npt.ArrayLike) -> Array:
        r = np.asarray(ratios, np.float64)
        if self.curve == "cosine":
            u = np.arctan(r) / (math.pi / 2)
        else:
            log_term = np.log1p(np.where(np.isinf(r), 1e300, r) ** 2.0)
            u = (np.sqrt(self.beta_min**2 + 2 * self.beta_d * log_term) - self.beta_min) / self.beta_d
        return np.clip(u * self.scale, *self.span)

    def options(self) -> dict[str, Any]:
        if self.curve == "cosine":
            return {"u_min": self.u_min, "scale": self.scale}
        return {"beta_min": self.beta_min, "beta_d": self.beta_d, "u_min": self.u_min, "scale": self.scale}


@dataclass(frozen=True)
class EDM(Schedule):
    """Variance exploding, alpha 1 (Karras et al. 2022). The network's time is `c_noise`(sigma).

    `log`: ¼·ln sigma (EDM). `atan`: 2/π·atan sigma (Stable Audio). `sigma`: sigma itself (VE score networks).
    """

    sigma_min: float = 0.002
    sigma_max: float = 80.0
    sigma_data: float = 0.5
    c_noise: Literal["log", "atan", "sigma"] = "log"

    def __post_init__(self) -> None:
        if not 0 < self.sigma_min < self.sigma_max < math.inf:
            raise PellucidError(
                rule("sigma_min, sigma_max", "0 < sigma_min < sigma_max", (self.sigma_min, self.sigma_max)),
                "sigmas",
            )
        if self.c_noise not in ("log", "atan", "sigma"):
            raise PellucidError(rule("c_noise", "log, atan or sigma", self.c_noise), "option")

    @property
    def name(self) -> str:
        return "edm"

    @property
    def frame(self) -> Frame:
        return "ve"

    @property
    def span(self) -> tuple[float, float]:
        low, high = self.time_of_sigma(np.array([self.sigma_min, self.sigma_max]))
        return float(low), float(high)

    def time_of_sigma(self, sigma: Array) -> Array:
        if self.c_noise == "sigma":
            return sigma
        return 0.25 * np.log(sigma) if self.c_noise == "log" else np.arctan(sigma) / (math.pi / 2)

    def ratio_at(self, times: npt.ArrayLike) -> Array:
        t = np.asarray(times, np.float64)
        if self.c_noise == "sigma":
            return t
        return np.exp(4.0 * t) if self.c_noise == "log" else np.tan(t * math.pi / 2)

    def time_at(self, ratios: npt.ArrayLike) -> Array:
        return self.time_of_sigma(np.clip(np.asarray(ratios, np.float64), self.sigma_min, self.sigma_max))

    def times(self, count: int = 1000) -> Array:
        return self.time_of_sigma(np.geomspace(self.sigma_min, self.sigma_max, count))

    def options(self) -> dict[str, Any]:
        return {
            "sigma_min": self.sigma_min,
            "sigma_max": self.sigma_max,
            "sigma_data": self.sigma_data,
            "c_noise": self.c_noise,
        }


@dataclass(frozen=True)
class Flow(Schedule):
    """Rectified flow: alpha = 1 − sigma; the network's time is `scale`·sigma.

    Training time u is uniform; sampling grids walk u and the shift bends it: sigma = s·u / (1 + (s − 1)·u)
    (Esser et al. 2024, eq. 23), so more steps fall on high noise for large images. `shift` is s; `mu` (dynamic,
    resolution-dependent) gives s = exp(mu); `terminal` stretches a grid so that its last call is at that sigma.
    """

    shift: float = 1.0
    scale: float = 1000.0
    terminal: float | None = None
    sigma_min: float = 1e-3

    def __post_init__(self) -> None:
        if not (math.isfinite(self.shift) and self.shift > 0):
            raise PellucidError(rule("shift", "a positive number", self.shift), "shift")
        if self.terminal is not None and not 0 < self.terminal < 1:
            raise PellucidError(rule("terminal", "between 0 and 1", self.terminal), "terminal")

    @property
    def name(self) -> str:
        return "flow"

    @property
    def frame(self) -> Frame:
        return "flow"

    @property
    def span(self) -> tuple[float, float]:
        return self.sigma_min * self.scale, self.scale

    def ratio_at(self, times: npt.ArrayLike) -> Array:
        return self.ratio_of_sigma(np.asarray(times, np.float64) / self.scale)

    def time_at(self, ratios: npt.ArrayLike) -> Array:
        return np.clip(self.sigma_of(ratios) * self.scale, 0.0, self.scale)

    def bend(self, u: npt.ArrayLike) -> Array:
        """Uniform training time → shifted sigma."""
        v = np.asarray(u, np.float64)
        return self.shift * v / (1.0 + (self.shift - 1.0) * v)

    def unbend(self, time: float) -> float:
        """The uniform time whose shifted sigma belongs to `time`."""
        sigma = time / self.scale
        return self.scale * sigma / (self.shift - (self.shift - 1.0) * sigma)

    def stretch(self, sigmas: Array) -> Array:
        """Moves the last sigma of a grid to `terminal` and keeps the first (LTX's stretched terminal)."""
        if self.terminal is None or sigmas[-1] == 1.0:
            return sigmas
        return 1.0 - (1.0 - sigmas) / ((1.0 - sigmas[-1]) / (1.0 - self.terminal))

    def options(self) -> dict[str, Any]:
        return {
            "shift": self.shift,
            "scale": self.scale,
            "terminal": self.terminal,
            "sigma_min": self.sigma_min,
        }


def dynamic_shift(
    image_tokens: int, base: tuple[int, float] = (256, 0.5), most: tuple[int, float] = (4096, 1.15)
) -> float:
    """The shift for an image of so many tokens: exp(mu), mu linear between (tokens, mu) pairs (FLUX)."""
    slope = (most[1] - base[1]) / (most[0] - base[0])
    return math.exp(base[1] + slope * (image_tokens - base[0]))


def flow(
    shift: float | None = None,
    image_tokens: int | None = None,
    terminal: float | None = None,
    scale: float = 1000.0,
    sigma_min: float = 1e-3,
) -> Flow:
    """Rectified flow with a static shift, or a dynamic one from the number of image tokens."""
    if shift is not None and image_tokens is not None:
        raise PellucidError(
            "shift must be given alone or left to image_tokens; got both. Drop one: a shift applied twice "
            "is the commonest flow bug.",
            "shift-twice",
        )
    chosen = dynamic_shift(image_tokens) if image_tokens is not None else (1.0 if shift is None else shift)
    return Flow(chosen, scale, terminal, sigma_min)


def vp_linear(beta_min: float = 0.1, beta_d: float = 19.9, u_min: float = 1e-3, scale: float = 999.0) -> ContinuousVP:
    """Continuous VP with linear β (Song et al. 2021)."""
    return ContinuousVP("linear", beta_min, beta_d, u_min, scale)


def vp_cosine(u_min: float = 1e-3, scale: float = 1.0) -> ContinuousVP:
    """Continuous VP on the quarter circle: alpha = cos, sigma = sin."""
    return ContinuousVP("cosine", u_min=u_min, scale=scale)


def trained(betas: npt.ArrayLike) -> DiscreteVP:
    """A schedule from any list of betas."""
    return DiscreteVP(np.asarray(betas, np.float64))


MAKERS: dict[str, Callable[..., Schedule]] = {
    "linear": linear,
    "scaled_linear": scaled_linear,
    "cosine": cosine,
    "sqrt_beta": sqrt_beta,
    "sqrt_alpha_bar": sqrt_alpha_bar,
    "sigmoid": sigmoid,
    "laplace": laplace,
    "exponential": exponential,
    "vp_linear": vp_linear,
    "vp_cosine": vp_cosine,
    "edm": EDM,
    "flow": flow,
    "trained": trained,
}

# Names that other projects use for the same curves.
ALIASES = {
    "squaredcos_cap_v2": "cosine",
    "exp": "exponential",
    "sqrt": "sqrt_beta",
    "sqrt_linear": "linear",
    "ve": "edm",
    "karras": "edm",
    "vp": "vp_linear",
    "rectified_flow": "flow",
    "sd": "scaled_linear",
    "ddpm": "linear",
}


def names() -> tuple[str, ...]:
    """The schedules that `make` knows by name alone."""
    return tuple(name for name in MAKERS if name != "trained")


def make(name: str | Schedule, *, zero_snr: bool = False, **options: Any) -> Schedule:
    """A schedule by name, with its options; `zero_snr=True` applies the zero-terminal-SNR transform."""
    if not isinstance(name, (str, Schedule)):
        raise PellucidError(rule("schedule", "a name or a schedule", name), "unknown-schedule")
    if isinstance(name, Schedule):
        if options:
            raise PellucidError(rule("options", "empty when a schedule object is given", sorted(options)), "option")
        made: Schedule = name
    else:
        key = ALIASES.get(name, name)
        if key not in MAKERS:
            raise PellucidError(
                rule("schedule", "a known name", name, nearest(name, [*names(), *ALIASES])),
                "unknown-schedule",
            )
        try:
            with np.errstate(all="raise"):
                made = MAKERS[key](**options)
                _check_curve(made)
        except PellucidError:
            raise
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            known = ", ".join(inspect.signature(MAKERS[key]).parameters)
            raise PellucidError(
                f"schedule {key} must have usable options; got {str(error)[:120]}. Known: {known}.", "option"
            ) from None
    return zero_terminal_snr(made) if zero_snr else made  # type: ignore[arg-type]


def _check_curve(made: Schedule) -> None:
    """Refuses options that give no curve: noise must grow with time."""
    low, high = made.span
    ratios = made.ratio_at(low + (high - low) * np.array([0.0, 0.25, 0.5, 0.75, 1.0]))
    if not (low < high and ratios[0] > 0 and np.all(ratios[1:] > ratios[:-1])):
        raise PellucidError(rule("options", f"ones for which the noise of {made.name} grows", made.options()), "option")


def to_dict(schedule: Schedule) -> dict[str, Any]:
    return {"name": schedule.name, **schedule.options()}


def from_dict(data: Mapping[str, Any]) -> Schedule:
    """A schedule from its name and its options, as a file holds them."""
    rest = {str(key): value for key, value in data.items()}
    name = typed(str, rest.pop("name", None), "name of the schedule", code="schedule")
    zero_snr = typed(bool, rest.pop("zero_snr", False), "zero_snr of the schedule", code="schedule")
    return make(name, zero_snr=zero_snr, **rest)

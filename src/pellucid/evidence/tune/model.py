"""What a plan is tuned for: a model, or an exact mixture, as a denoiser of pairs of seed and prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pellucid import scenes
from pellucid.core import target as targets
from pellucid.core.batch import Denoiser
from pellucid.core.denoiser import NetworkDenoiser, input_scale, sigma_data_of
from pellucid.core.errors import PellucidError, rule
from pellucid.core.noise import Philox, check_seed
from pellucid.core.oracle import Mixture
from pellucid.core.schedule import Schedule, Target
from pellucid.evidence.study.subject import SCENES, read_lines_of
from pellucid.evidence.tune.table import TIME_STEP, SoftLevel, split_levels
from pellucid.interop import diffusers_config
from pellucid.models.dit import DiT
from pellucid.models.guidance import Guidance
from pellucid.models.guided import GuidedDenoiser
from pellucid.pipeline import fingerprint
from pellucid.pipeline.encoders import image_inputs
from pellucid.pipeline.encoders.conditions import make_conditions, takes_guidance, takes_labels, takes_text
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.prepare import check_layers, input_guidance, working_dtype
from pellucid.pipeline.request import MAX_BATCH, Request

# --- Pairs ----------------------------------------------------------------------------------------------------------

FEWEST_PAIRS, MOST_PAIRS = 4, 100_000
_SHARES = (2, 1, 1)  # of the prompts of a file: to tune, to watch, to judge


@dataclass(frozen=True)
class Pairs:
    """Seeds, and one prompt or class per seed; neither for a model that takes none."""

    seeds: tuple[int, ...]
    prompts: tuple[str, ...] | None = None
    labels: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.seeds)

    def pick(self, chosen: Sequence[int]) -> Pairs:
        held = (self.seeds, self.prompts, self.labels)
        return Pairs(*(None if values is None else tuple(values[i] for i in chosen) for values in held))  # type: ignore

    def first(self, count: int) -> Pairs:
        return self.pick(range(min(count, len(self))))

    def parts(self, size: int) -> Iterator[tuple[slice, Pairs]]:
        for start in range(0, len(self), size):
            part = range(start, min(start + size, len(self)))
            yield slice(part.start, part.stop), self.pick(part)


class PairSets(NamedTuple):
    """Pairs that gradients are taken on, pairs that stop the tuning, and pairs for the evidence alone."""

    tune: Pairs
    watch: Pairs
    judge: Pairs


def make_sets(
    counts: tuple[int, int, int], seed: int, prompts: Sequence[str] | None = None, classes: int | None = None
) -> PairSets:
    """Consecutive seeds from `seed`. Prompts are shuffled and divided, and repeat where they are few."""
    check_seed(seed + sum(counts))
    own = [None] * 3 if prompts is None else _divided(prompts, counts, seed)
    generator = torch.Generator().manual_seed(seed)
    sets, first = [], seed
    for count, texts in zip(counts, own, strict=True):
        labels = None if classes is None else tuple(torch.randint(classes, (count,), generator=generator).tolist())
        repeated = None if texts is None else tuple(texts[i % len(texts)] for i in range(count))
        sets.append(Pairs(tuple(range(first, first + count)), repeated, labels))
        first += count
    return PairSets(*sets)


def _divided(prompts: Sequence[str], counts: tuple[int, int, int], seed: int) -> list[list[str]]:
    """Three lists of prompts that share none."""
    distinct = list(dict.fromkeys(prompts))
    if len(distinct) < sum(_SHARES):
        must = f"at least {sum(_SHARES)} different ones, of which some are held out"
        raise PellucidError(rule("--prompts", must, len(distinct)), "prompts")
    order = torch.randperm(len(distinct), generator=torch.Generator().manual_seed(seed)).tolist()
    wanted = counts if len(distinct) >= sum(counts) else _SHARES
    ends = [len(distinct) * sum(wanted[: k + 1]) // sum(wanted) for k in range(3)]
    return [[distinct[i] for i in order[a:b]] for a, b in zip([0, *ends], ends, strict=False)]


def read_prompts(source: str, count: int, seed: int) -> list[str]:
    """`scenes`: captions of the world of scenes; else the lines of a file that are not empty."""
    if source == SCENES:
        return [caption for caption, _ in scenes.prompts(count, seed=seed, split="train")]
    return list(read_lines_of(Path(source), SCENES))


# --- Models ---------------------------------------------------------------------------------------------------------

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class TuningModel:
    """A model that a plan is tuned for; `denoiser` makes the one of some pairs, `shape` is that of one x."""

    name: str
    schedule: Schedule
    target: Target
    shape: tuple[int, ...]
    denoiser: Callable[[Pairs], Denoiser]
    device: torch.device = _CPU
    dtype: torch.dtype = torch.float32  # of x
    guidance: str = "off"
    fingerprint: str = ""
    takes_text: bool = False
    classes: int | None = None
    most: int = MAX_BATCH  # pairs of one call

    def noise(self, pairs: Pairs) -> Tensor:
        """Unit noise (B, …): that of `pellucid sample` with the same seeds."""
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        return Philox(pairs.seeds).first(self.shape, like, range(len(pairs)))


def model_of(pipe: Pipeline, guidance: Any = None) -> TuningModel:
    """A loaded model at a guidance, by default its own."""
    parts, network = pipe.components, pipe.components.network
    guided = pipe.guidance_of(Request(guidance=guidance))
    words = guided.text()
    check_layers(network, guided)
    if image_inputs.is_inpainting(parts):
        raise PellucidError(rule("--model", "one that begins with noise alone", parts.name), "model")
    if pipe.policy.offload != "none":
        raise PellucidError(rule("offload", "none: gradients need the weights", pipe.policy.offload), "policy")
    size = pipe.size_of(Request())
    reading = diffusers_config.read(parts.scheduler, strict=False) if parts.scheduler else None
    scale = 1.0
    if takes_guidance(network):
        scale, guided = input_guidance(guided), Guidance(1.0)
    called = pipe.policy.ready(network)

    @lru_cache(maxsize=16)  # the watched pairs and those of a sweep come again and again
    def conditions(prompts: tuple[str, ...] | None, labels: tuple[int, ...] | None) -> Any:
        with torch.no_grad():
            request = Request(prompt=prompts, label=labels)
            return make_conditions(parts, request, size, scale, guided.needs_uncond).to(pipe.device)

    def denoiser(pairs: Pairs) -> Denoiser:
        encoded, count = conditions(pairs.prompts, pairs.labels), len(pairs)
        cond, uncond = (None if one is None else _expanded(one, count) for one in (encoded.cond, encoded.uncond))
        filters = {"x0_filter": None if reading is None else reading.x0_filter, "dtype": working_dtype(network)}
        return GuidedDenoiser(called, parts.schedule, parts.target, cond or {}, uncond, guided, **filters)  # type: ignore

    return TuningModel(
        name=parts.name,
        schedule=parts.schedule,
        target=parts.target,  # type: ignore[arg-type]
        shape=(pipe.channels, size[1] // pipe.factor, size[0] // pipe.factor),
        denoiser=denoiser,
        device=pipe.device,
        guidance=words,
        fingerprint=fingerprint.of_model(parts),
        takes_text=takes_text(network),
        classes=_classes_of(network),
    )


def _expanded(inputs: dict[str, Any], count: int) -> dict[str, Any]:
    """Inputs of some number of images: those of an unconditional model are made for one."""
    return {k: v.expand(count, *v.shape[1:]) if len(v) == 1 != count else v for k, v in inputs.items()}


def _classes_of(network: Any) -> int | None:
    """How many classes a network makes images of; None where it has none."""
    if not takes_labels(network):
        return None
    return int(network.config.null_label if isinstance(network, DiT) else network.config.num_class_embeds)


# --- Exact mixtures -------------------------------------------------------------------------------------------------

_MOST_POINTS = 8192  # of one call


@dataclass(frozen=True)
class _ExactNetwork:
    """network(x, time) → the target of the mixture at the level of that time. One time for the whole batch."""

    mixture: Mixture
    schedule: Schedule
    target: Target

    def __call__(self, x: Tensor, time: Tensor) -> Tensor:
        level = self.level(time[0])
        own = x / input_scale(self.schedule, level)  # type: ignore[arg-type]
        x0 = self.mixture(own, level)
        c_x, c_0 = targets.from_x0(self.target, level, sigma_data_of(self.schedule))  # type: ignore[arg-type]
        return own * c_x + x0 * c_0

    def level(self, time: Tensor) -> SoftLevel:
        ratio = float(self.schedule.ratio_at(float(time.detach())))
        if np.isinf(ratio):
            return SoftLevel(*(torch.tensor(v, dtype=torch.float64) for v in (0.0, 1.0)), ratio)
        lam = _LambdaOfTime.apply(time.to(torch.float64), self.schedule)
        alpha, sigma = split_levels(lam, self.schedule.frame)
        return SoftLevel(alpha, sigma, ratio)


class _LambdaOfTime(torch.autograd.Function):
    """Time → λ of the schedule. Its derivative is a central difference."""

    @staticmethod
    def forward(ctx: Any, time: Tensor, schedule: Schedule) -> Tensor:
        low, high = schedule.span
        at, step = float(time), TIME_STEP * (high - low)
        a, b = max(at - step, low), min(at + step, high)
        ratios = schedule.ratio_at(np.array([a, at, b]))
        if np.isinf(ratios[2]):
            b, ratios[2] = at, ratios[1]
        lams = -np.log(ratios)
        ctx.slope = float((lams[2] - lams[0]) / (b - a))
        return torch.tensor(lams[1], dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.slope, None


def oracle_model(name: str, mixture: Mixture, schedule: Schedule, target: Target | None = None) -> TuningModel:
    """A mixture under a schedule, as a model that is tuned for; in float64."""
    kind = schedule.carries[0] if target is None else target
    known = NetworkDenoiser(_ExactNetwork(mixture, schedule, kind), schedule, kind, gradients=True)
    return TuningModel(
        name=f"{name}, {schedule.name}",
        schedule=schedule,
        target=kind,
        shape=(mixture.means.shape[1],),
        denoiser=lambda pairs: known,
        dtype=torch.float64,
        most=_MOST_POINTS,
    )

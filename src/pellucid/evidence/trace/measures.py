"""The numbers of a step, one row per image: measured on the device, finished on the host.

Norms, in float64, and digests are taken on the device. The host makes the rest of them: ratios; the inner product of
cond and uncond, from their norms and that of their difference; the count of saturated values, which is the squared norm
of ones in their places.

The digest of a tensor is Σ bits·weight modulo 2⁶⁴, with a fixed odd weight for each place: integers, so the order of
the sum does not matter, and a tensor has the same digest on every device and in every batch. Equal digests mean equal
bits (except for one chance in about 2⁶³), so two traces can be compared bit by bit without their tensors.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pellucid.core.batch import StepSeen
from pellucid.core.schedule import Level

NUMBERS = ("x", "x0", "eps", "delta", "cosine", "saturation", "local_error")
DIGESTED = ("x", "cond", "uncond", "x0", "x_next")
_SAME = 1e-12  # ratios that agree to this are one level
_PIXELS, _LATENTS = 1.0, 3.0  # where values count as saturated: the edge of images, three deviations of latents


def limit_of(shape: Sequence[int]) -> float:
    """Where saturation begins: 1 for one or three channels, which are pixels; 3 for latents."""
    return _PIXELS if len(shape) < 3 or shape[0] in (1, 3) else _LATENTS


# --- digests ---------------------------------------------------------------------------------------------------


@lru_cache(maxsize=2)
def weights(count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """One odd 64-bit number for each place (SplitMix64, Steele et al. 2014)."""
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)


def digest(stacked: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """(…, n) float32 or float64 → (…,) int64, on the device."""
    bits = stacked.view(torch.int64 if stacked.dtype == torch.float64 else torch.int32)
    return torch.sum(bits * weight, -1, out=out)


def digests_of(x: Tensor) -> list[int]:
    """Of each image of x (B, …)."""
    weight = torch.from_numpy(weights(x[0].numel())).to(x.device)
    return digest(x.reshape(len(x), -1).contiguous(), weight).tolist()


# --- what was before -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EarlierCalls:
    """Of each image that runs: x0 of its last call, and of the last call before it at another level."""

    images: tuple[int, ...] = ()
    ratios: tuple[float, ...] = ()
    x0: Tensor | None = None
    older_ratios: tuple[float, ...] = ()  # NaN where there was none
    older: Tensor | None = None

    def after(self, seen: StepSeen, ratios: tuple[float, ...]) -> EarlierCalls:
        """The past at the call of this step, for its images: `older` is from another level than `ratios`."""
        if self.x0 is None:
            nothing = (math.nan,) * len(ratios)
            return EarlierCalls(seen.images, ratios, seen.x0.detach(), nothing, None)
        held = self.select(seen.images)
        moved = [not _same(a, b) for a, b in zip(held.ratios, ratios, strict=True)]
        older, older_ratios = held.older, held.older_ratios
        if all(moved):
            older, older_ratios = held.x0, held.ratios
        elif any(moved):
            assert held.x0 is not None
            on = torch.tensor(moved, device=held.x0.device).reshape(-1, *([1] * (held.x0.ndim - 1)))
            older = torch.where(on, held.x0, held.x0 if older is None else older)
            pairs = zip(moved, held.ratios, held.older_ratios, strict=True)
            older_ratios = tuple(now if m else before for m, now, before in pairs)
        return EarlierCalls(seen.images, ratios, seen.x0.detach(), older_ratios, older)

    def select(self, images: tuple[int, ...]) -> EarlierCalls:
        if images == self.images:
            return self
        keep = [self.images.index(image) for image in images]
        assert self.x0 is not None
        return replace(
            self,
            images=images,
            ratios=tuple(self.ratios[k] for k in keep),
            x0=self.x0[keep],
            older_ratios=tuple(self.older_ratios[k] for k in keep),
            older=None if self.older is None else self.older[keep],
        )


def _same(a: float, b: float) -> bool:
    return a == b or abs(a - b) <= _SAME * abs(b)


def _error_factor(ratio: float, older: float, landing: Level) -> float:
    """What the change of x0 since an older call is multiplied by to give the error of a first-order step.

    In y = x / alpha and r = sigma / alpha a first-order step (Euler, DDIM) follows eps = (y − x0) / r as if it were
    constant. Along the path its derivative is −x0′ / r, so that the step misses ½·(r_next − r)²·x0′ / r, times alpha in
    x. The derivative is taken over λ = −log r, in which x0 changes evenly: x0′ = −(dx0 / dλ) / r.
    """
    known = 0 < ratio < math.inf and 0 < older < math.inf and landing.alpha > 0
    if not known or _same(ratio, older):
        return math.nan
    return 0.5 * landing.alpha * (landing.ratio / ratio - 1.0) ** 2 / abs(math.log(older / ratio))


# --- one step --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepContext:
    """What the host knows of a step before it is measured, one number per image or one for all."""

    names: tuple[str, ...]  # of its tensors, in an order in which neighbours are what is compared; `older` is last
    readings: tuple[tuple[str, tuple[tuple[float, float], ...]], ...]  # (name, (k_x, k)…): x0 is k_x·x + k·tensor
    alphas: tuple[float, ...]
    sigmas: tuple[float, ...]
    factors: tuple[float, ...]  # local error: of the change of x0, one per image
    corrects: tuple[bool, ...]  # local error: a row that ends at its own level corrects x

    @property
    def measured(self) -> tuple[str, ...]:
        return _measured(self.names)

    @property
    def digested(self) -> tuple[str, ...]:
        """All but the older x0, which has its digest from its own step."""
        return self.names[:-1]


@lru_cache(maxsize=16)
def _measured(names: tuple[str, ...]) -> tuple[str, ...]:
    """What gets a norm: the tensors, "b-a" for neighbours a and b, x − alpha·x0, ones where x0 is saturated."""
    return (*names, *(f"{b}-{a}" for a, b in pairwise(names)), "noise", "saturated")


def levels_of(seen: StepSeen) -> tuple[Level, ...]:
    """The level of the call, one per image."""
    return tuple(seen.rows[k % len(seen.rows)].level for k in range(len(seen.images)))


def _landings_of(seen: StepSeen) -> tuple[Level, ...]:
    return tuple(seen.next_levels[k % len(seen.next_levels)] for k in range(len(seen.images)))


def context_of(seen: StepSeen, past: EarlierCalls, levels: Sequence[Level]) -> tuple[StepContext, list[Tensor]]:
    """What is known of a step, and its tensors; predictions as the network made them, where they are at hand."""
    landings = _landings_of(seen)
    values, readings = {"x": seen.x, "x_next": seen.x_next}, []
    own = getattr(seen.parts, "x", None) is seen.x  # then a prediction can say how it becomes x0, which the block does
    reading = getattr(seen.parts, "reading", None) if own else None
    for name in ("uncond", "cond"):
        if name in seen.parts:
            value, pairs = (seen.parts[name], ()) if reading is None else reading(name)
            values[name] = value.to(seen.x.dtype)
            readings += [(name, tuple(pairs))] if any(pair != (0.0, 1.0) for pair in pairs) else []
    values |= {"x0": seen.x0, "older": seen.x0 if past.older is None else past.older}
    apart = zip(past.ratios, past.older_ratios, landings, strict=True)
    noted = StepContext(
        names=tuple(values),
        readings=tuple(readings),
        alphas=tuple(row.level.alpha for row in seen.rows),
        sigmas=tuple(level.sigma for level in levels),
        factors=tuple(_error_factor(*pair) for pair in apart),
        corrects=tuple(_same(a.ratio, b.ratio) for a, b in zip(levels, landings, strict=True)),
    )
    return noted, list(values.values())


def to_bytes(noted: StepContext, found: np.ndarray[Any, np.dtype[np.int64]], count: int) -> tuple[bytes, bytes]:
    """On the host: the numbers (B, NUMBERS) in float64 and the digests (B, DIGESTED) in int64, as bytes.

    `found` (measured + digested, B) are the bits of norms in float64, then digests; `count` numbers has an image.

    NaN and 0 where there was nothing to measure. Plain Python: a batch is small, and numpy's calls are not free.
    """
    names = noted.measured
    norms, digests = found[: len(names)].view(np.float64), found[len(names) :]
    rows = dict(zip(names, norms.tolist(), strict=True))
    seen = dict(zip(noted.digested, digests.tolist(), strict=True))
    numbers, marks = array("d"), array("q")
    for k, (sigma, factor, corrects) in enumerate(zip(noted.sigmas, noted.factors, noted.corrects, strict=True)):
        row = {name: values[k] for name, values in rows.items()}
        error = row["x_next-x"] if corrects else factor * row["older-x0"]
        cosine = _cosine_of(row["cond"], row["uncond"], row["cond-uncond"]) if "cond-uncond" in row else math.nan
        numbers.extend(
            (
                row["x"],
                row["x0"],
                row["noise"] / sigma if sigma > 0 else math.nan,
                row.get("x0-cond", math.nan),
                cosine,
                round(row["saturated"] ** 2) / count,
                error / (row["x_next"] or math.nan),
            )
        )
        marks.extend(seen[name][k] if name in seen else 0 for name in DIGESTED)
    return numbers.tobytes(), marks.tobytes()


def _cosine_of(a: float, b: float, apart: float) -> float:
    """Between two vectors of these norms whose difference has the norm `apart`; NaN where there is none."""
    cosine = (a * a + b * b - apart * apart) / (2.0 * a * b or math.nan)
    return max(-1.0, min(1.0, cosine)) if cosine == cosine else math.nan


# --- steps measured together on the device ------------------------------------------------------------------------
#
# A small network on a GPU waits for calls, not for numbers. So the tensors of some steps are put into one block, with
# one call per step, and measured with about ten calls for all of them. Their order makes neighbours of what is
# compared, so that one call takes all differences and one all norms. A CPU does not wait, and its steps are measured
# one by one: a process that is killed has written all of them. Large tensors are measured one after the other, to save
# memory.

_MOST = 32  # steps of a block on a GPU
LARGE = 2**19  # numbers of the steps of a block; a step that has more is not laid into one


class StepBlock:
    """Room for steps with the same images and tensors, which follow each other; filled and measured again and again."""

    def __init__(self, like: StepContext, x: Tensor, limit: float) -> None:
        self.names, self.form, self.limit = like.names, _block_form(like), limit
        self.room = min(_MOST if waits(x.device) else 1, LARGE // max(x.numel(), 1))
        self.held = x.new_empty((self.room, 2 * len(self.names) + 1, *x.shape))  # as `_measured` names them
        self.places = self.held[:, : len(self.names)].unbind()
        self.steps: list[StepContext] = []
        self.large: list[Tensor] = []

    def takes(self, step: StepContext, x: Tensor) -> bool:
        """Whether a step can be laid behind the others."""
        return step.names == self.names and _block_form(step) == self.form and self.held.shape[2:] == x.shape

    def add(self, step: StepContext, values: list[Tensor]) -> None:
        if self.room:
            torch.stack(values, out=self.places[len(self.steps)])
        else:
            self.large = values
        self.steps.append(step)

    @property
    def full(self) -> bool:
        return len(self.steps) >= self.room

    def measure(self, weight: Tensor) -> tuple[Tensor, Sequence[Sequence[Tensor]] | Tensor]:
        """Norms and digests, (steps, measured + digested, B) int64; and what was measured, (steps, measured, B, …)."""
        with torch.inference_mode(self.held.is_inference()):  # as the run was in when the block was made
            found = self.together(weight) if self.room else self.apart(weight)
        self.steps, self.large = [], []
        return found

    def together(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        block, count, at = self.held[: len(self.steps)], len(self.names), self.names.index
        x, x0 = block[:, at("x")], block[:, at("x0")]
        alphas, factors = _factors_of(self.steps, x)
        for name, (k_x, k) in factors.items():
            block[:, at(name)].mul_(k).add_(x * k_x)
        torch.diff(block[:, :count], dim=1, out=block[:, count:-2])
        torch.addcmul(x, x0, alphas, value=-1.0, out=block[:, -2])
        torch.abs(x0, out=block[:, -1]).ge_(self.limit)
        flat = block.flatten(3) if block.ndim > 3 else block[..., None]
        digested = count - 1
        found = weight.new_empty((len(block), flat.shape[1] + digested, flat.shape[2]))
        torch.linalg.vector_norm(flat, dim=-1, dtype=torch.float64, out=found[:, :-digested].view(torch.float64))
        digest(flat[:, :digested], weight, out=found[:, -digested:])
        return found, block

    def apart(self, weight: Tensor) -> tuple[Tensor, list[list[Tensor]]]:
        values, at = list(self.large), self.names.index
        x, x0 = values[at("x")], values[at("x0")]
        alphas, factors = _factors_of(self.steps, x[None])
        for name, (k_x, k) in factors.items():
            values[at(name)] = (values[at(name)] * k[0]).add_(x * k_x[0])
        differences = [b - a for a, b in pairwise(values)]
        block = [*values, *differences, torch.addcmul(x, x0, alphas[0], value=-1.0), x0.abs().ge_(self.limit)]
        flats = [one.reshape(len(x), -1).contiguous() for one in block]
        norms = [torch.linalg.vector_norm(flat, dim=-1, dtype=torch.float64).view(torch.int64) for flat in flats]
        digests = [digest(flat, weight) for flat in flats[: len(values) - 1]]
        return torch.stack([*norms, *digests])[None], [block]


def waits(device: torch.device) -> bool:
    """Whether calls to a device are queued ahead, so that a call costs more than its work."""
    return device.type == "cuda"


def _block_form(step: StepContext) -> tuple[object, ...]:
    """What steps of a block have in common beside their tensors: what is converted, and numbers for all or for each."""
    return len(step.alphas), tuple(name for name, _ in step.readings)


def _factors_of(steps: Sequence[StepContext], like: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Of steps: alpha, and of each prediction that becomes x0 (k_x, k); each shaped to broadcast over (steps, B, …)."""
    names = [name for name, _ in steps[0].readings]
    rows = [[step.alphas for step in steps]]
    for i in range(len(names)):
        rows += [[[pair[n] for pair in step.readings[i][1]] for step in steps] for n in (0, 1)]
    width = max(len(row) for table in rows for row in table)
    table = torch.tensor([[list(row) * (width // len(row)) for row in table] for table in rows], dtype=like.dtype)
    alphas, *rest = table.reshape(*table.shape, *([1] * (like.ndim - 2))).to(like.device)  # one small copy
    return alphas, {name: (rest[2 * i], rest[2 * i + 1]) for i, name in enumerate(names)}

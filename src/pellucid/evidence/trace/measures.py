"""The numbers of a step, one row an image: gathered on the device as they come, read back late.

What is taken on the device are norms, one inner product, one count and digests: a dozen small kernels and two small
copies a step. Ratios are made of them on the host, in float64.

The digest of a tensor is Σ bits·weight modulo 2⁶⁴, with a fixed odd weight for each place: integers, so the order of
the sum does not matter, and a tensor has the same digest on every device and in every batch. Equal digests mean equal
bits (but for one chance in about 2⁶³), so that two traces can be compared bit by bit without their tensors.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pellucid.core.loop import StepSeen, column
from pellucid.core.schedule import Level

NUMBERS = ("x", "x0", "eps", "delta", "cosine", "saturation", "local_error")
DIGESTED = ("x", "cond", "uncond", "x0", "x_next")
LARGE = 2**20  # numbers of a batch above which tensors are measured one after the other, to spare memory
SAME = 1e-12  # ratios that agree to this are one level
PIXELS, LATENTS = 1.0, 3.0  # where values count as saturated: the edge of pictures, three deviations of latents


def limit_of(shape: Sequence[int]) -> float:
    """Where saturation begins: 1 for one or three channels, which are pixels; 3 for latents."""
    return PIXELS if len(shape) < 3 or shape[0] in (1, 3) else LATENTS


# --- digests ---------------------------------------------------------------------------------------------------


@lru_cache(maxsize=2)
def weights(count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """One odd 64-bit number for each place (SplitMix64, Steele et al. 2014)."""
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)


def digest(stacked: Tensor, weight: Tensor) -> Tensor:
    """(…, n) float32 or float64 → (…,) int64, on the device."""
    bits = stacked.view(torch.int64 if stacked.dtype == torch.float64 else torch.int32)
    return (bits * weight).sum(-1)


# --- what was before -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Past:
    """Of each image that runs: x0 of its last call, and of the last call before it at another level."""

    images: tuple[int, ...] = ()
    ratios: tuple[float, ...] = ()
    x0: Tensor | None = None
    older_ratios: tuple[float, ...] = ()  # NaN where there was none
    older: Tensor | None = None

    def after(self, seen: StepSeen, ratios: tuple[float, ...]) -> Past:
        """The past as the call of this step finds it, for its images: `older` is from another level than `ratios`."""
        if self.x0 is None:
            nothing = (math.nan,) * len(ratios)
            return Past(seen.images, ratios, seen.x0.detach(), nothing, None)
        held = self.select(seen.images)
        moved = [not same(a, b) for a, b in zip(held.ratios, ratios, strict=True)]
        older, older_ratios = held.older, held.older_ratios
        if all(moved):
            older, older_ratios = held.x0, held.ratios
        elif any(moved):
            assert held.x0 is not None
            on = torch.tensor(moved, device=held.x0.device).reshape(-1, *([1] * (held.x0.ndim - 1)))
            older = torch.where(on, held.x0, held.x0 if older is None else older)
            pairs = zip(moved, held.ratios, held.older_ratios, strict=True)
            older_ratios = tuple(now if m else before for m, now, before in pairs)
        return Past(seen.images, ratios, seen.x0.detach(), older_ratios, older)

    def select(self, images: tuple[int, ...]) -> Past:
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


def same(a: float, b: float) -> bool:
    return a == b or abs(a - b) <= SAME * abs(b)


def missed(ratio: float, older: float, landing: Level) -> float:
    """What the change of x0 since an older call is multiplied by to give the error of a first-order step.

    In y = x / alpha and r = sigma / alpha a first-order step (Euler, DDIM) follows eps = (y − x0) / r as if it were
    constant. Along the path its derivative is −x0′ / r, so that the step misses ½·(r_next − r)²·x0′ / r, times alpha in
    x. The derivative is taken over λ = −log r, in which x0 changes evenly: x0′ = −(dx0 / dλ) / r.
    """
    known = 0 < ratio < math.inf and 0 < older < math.inf and landing.alpha > 0
    if not known or same(ratio, older):
        return math.nan
    return 0.5 * landing.alpha * (landing.ratio / ratio - 1.0) ** 2 / abs(math.log(older / ratio))


# --- one step --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Taken:
    """What the device was asked for at a step, and what the host needs to read it."""

    sizes: Tensor  # (quantities, B): norms, then the inner product and the count
    digests: Tensor  # (digested, B)
    names: tuple[str, ...]  # of the rows of `sizes`
    digested: tuple[str, ...]  # of the rows of `digests`
    sigmas: tuple[float, ...]
    factors: tuple[float, ...]  # local error: of the change of x0, one an image
    corrects: tuple[bool, ...]  # local error: a row that ends at its own level corrects x
    count: int  # numbers an image


def levels_of(seen: StepSeen) -> tuple[Level, ...]:
    """The level of the call, one an image."""
    return tuple(seen.rows[k % len(seen.rows)].level for k in range(len(seen.images)))


def landings_of(seen: StepSeen) -> tuple[Level, ...]:
    return tuple(seen.next_levels[k % len(seen.next_levels)] for k in range(len(seen.images)))


def take(seen: StepSeen, past: Past, weight: Tensor, limit: float) -> tuple[Taken, dict[str, Tensor]]:
    """Starts the measurement of a step; and its tensors by name, as far as there are any. Nothing waits here."""
    x, x0, x_next = seen.x, seen.x0, seen.x_next
    whole = {"x": x, "x0": x0, "x_next": x_next}
    whole |= {name: seen.parts[name].to(x.dtype) for name in ("cond", "uncond") if name in seen.parts}
    levels, landings = levels_of(seen), landings_of(seen)
    corrects = tuple(same(a.ratio, b.ratio) for a, b in zip(levels, landings, strict=True))
    alphas = [level.alpha for level in levels] if len(seen.rows) > 1 else [levels[0].alpha]
    apart = {"noise": minus(x, x0, alphas)}
    if "cond" in whole:
        apart["delta"] = x0 - whole["cond"]
    if past.older is not None:
        apart["change"] = x0 - past.older
    if any(corrects):
        apart["correction"] = x_next - x
    taken = gather(whole, apart, weight, limit)
    pairs = zip(past.ratios, past.older_ratios, landings, strict=True)
    factors = tuple(missed(*pair) for pair in pairs)
    sigmas = tuple(level.sigma for level in levels)
    return replace(taken, sigmas=sigmas, factors=factors, corrects=corrects), {**whole, **apart}


def minus(x: Tensor, x0: Tensor, alphas: list[float]) -> Tensor:
    """x − alpha·x0, which is sigma·eps."""
    if len(alphas) == 1:
        return torch.sub(x, x0, alpha=alphas[0])
    return torch.addcmul(x, x0, column(alphas, x, False), value=-1.0)


def gather(whole: dict[str, Tensor], apart: dict[str, Tensor], weight: Tensor, limit: float) -> Taken:
    """Norms of all, the inner product of cond and uncond, the count of saturated values, and digests."""
    values = {**whole, **apart}
    names = list(values)
    flat = stacked(list(values.values()))  # of each (B, n)
    if isinstance(flat, Tensor):
        norms, digests = torch.linalg.vector_norm(flat, dim=-1), digest(flat[: len(whole)], weight)
    else:
        norms = torch.stack([torch.linalg.vector_norm(one, dim=-1) for one in flat])
        digests = torch.stack([digest(one, weight) for one in flat[: len(whole)]])
    rows = [norms, (flat[names.index("x0")].abs() >= limit).sum(-1, keepdim=True).T.to(norms.dtype)]
    known = [*names, "saturated"]
    if "cond" in whole and "uncond" in whole:
        product = flat[names.index("cond")] * flat[names.index("uncond")]
        rows.append(product.sum(-1, keepdim=True).T)
        known.append("inner")
    return Taken(torch.cat(rows), digests, tuple(known), tuple(whole), (), (), (), weight.numel())


def stacked(values: list[Tensor]) -> Tensor | list[Tensor]:
    """Tensors as one (Q, B, n), which saves calls; large ones apart, which saves memory."""
    if values[0].numel() > LARGE:
        return [value.reshape(len(value), -1).contiguous() for value in values]
    return torch.stack(values).reshape(len(values), len(values[0]), -1)


def settle(taken: Taken, sizes: Any, digests: Any) -> tuple[bytes, bytes]:
    """On the host: the numbers (B, NUMBERS) in float64 and the digests (B, DIGESTED) in int64, as bytes.

    NaN and 0 where there was nothing to measure. Plain Python: a batch is small, and numpy's calls are not free.
    """
    rows = dict(zip(taken.names, sizes.tolist(), strict=True))
    seen = dict(zip(taken.digested, digests.tolist(), strict=True))
    numbers, marks = array("d"), array("q")
    for k, (sigma, factor, corrects) in enumerate(zip(taken.sigmas, taken.factors, taken.corrects, strict=True)):
        row = {name: values[k] for name, values in rows.items()}
        error = row.get("correction", math.nan) if corrects else factor * row.get("change", math.nan)
        cosine = row.get("inner", math.nan) / (row.get("cond", 0.0) * row.get("uncond", 0.0) or math.nan)
        numbers.extend(
            (
                row["x"],
                row["x0"],
                row["noise"] / sigma if sigma > 0 else math.nan,
                row.get("delta", math.nan),
                max(-1.0, min(1.0, cosine)) if cosine == cosine else math.nan,
                row["saturated"] / taken.count,
                error / (row["x_next"] or math.nan),
            )
        )
        marks.extend(seen[name][k] if name in seen else 0 for name in DIGESTED)
    return numbers.tobytes(), marks.tobytes()

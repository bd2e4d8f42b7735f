"""Noise by address: Philox-4x32-10 counters, one stream an image.

The noise of an image depends on its seed and on the address alone, not on the batch, its order or its device:
the integers are exact everywhere. The last bits of log and cos may differ between devices' kernels, no more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.core.plan import Clock, Draw, Plan, Row, Span, clock_time

WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_FIRST, PATH, _TREE, _BESIDE = 0, 1, 2, 3  # what a counter is for
AT_ONCE = 2**21  # numbers drawn together: with their words and logarithms 0.3 GB


def philox(
    counters: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int | Tensor, int | Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words for each counter (Salmon et al. 2011), in int64 arithmetic that wraps as uint64 does."""
    c0, c1, c2, c3 = counters
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & WORD) ^ c1 ^ k0,
            p1 & WORD,
            ((p0 >> 32) & WORD) ^ c3 ^ k1,
            p0 & WORD,
        )
        k0, k1 = (k0 + _WEYL[0]) & WORD, (k1 + _WEYL[1]) & WORD
    return c0, c1, c2, c3


def gaussian(seed: int, shape: Sequence[int], address: tuple[int, int, int], like: Tensor) -> Tensor:
    """Standard normal numbers of one image at an address (three 32-bit words), by Box and Muller."""
    count = math.prod(shape)
    blocks = torch.arange((count + 3) // 4, dtype=torch.int64, device=like.device)
    a, b, c = (torch.full_like(blocks, word & WORD) for word in address)
    words = torch.stack(philox((blocks, a, b, c), (seed & WORD, (seed >> 32) & WORD)))  # [4, blocks]
    return _normals(words, like).T.reshape(-1)[:count].reshape(tuple(shape))


def gaussians(
    seeds: Sequence[int], shape: Sequence[int], addresses: Sequence[tuple[int, int, int]], like: Tensor
) -> Tensor:
    """The same numbers of several images at several addresses, [A, B, *shape]: one launch for all, in parts of at most
    AT_ONCE numbers."""
    count, device = math.prod(shape), like.device
    part = max(1, AT_ONCE // max(1, len(seeds) * count))
    blocks = torch.arange((count + 3) // 4, dtype=torch.int64, device=device)
    low, high = (torch.tensor([(s >> shift) & WORD for s in seeds], device=device)[:, None] for shift in (0, 32))
    made = []
    for start in range(0, len(addresses), part):
        words = torch.tensor([[w & WORD for w in one] for one in addresses[start : start + part]], device=device)
        a, b, c = words.T[:, :, None, None]  # [A, 1, 1] each
        drawn = torch.stack(philox((blocks, a, b, c), (low, high)))  # [4, A, B, blocks]
        made.append(_normals(drawn, like).permute(1, 2, 3, 0).flatten(2)[:, :, :count])
    return torch.cat(made).reshape(len(addresses), len(seeds), *shape)


def _normals(words: Tensor, like: Tensor) -> Tensor:
    """Four normal numbers, [4, …], from the four words of each block."""
    kind = torch.float64 if like.dtype == torch.float64 else torch.float32
    uniform = (words.to(torch.float64) + 0.5) * 2.0**-32
    radius = torch.sqrt(-2.0 * torch.log(uniform[0::2]))
    angle = 2.0 * math.pi * uniform[1::2]
    return torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)]).to(kind)


class NoiseSource(Protocol):
    """Where a run takes its noise from. `images` are the positions in the batch that ask.

    A source may have `seeds`, one per image; a run then takes the number of its images from there. One whose numbers
    depend on the order of the draws has `discard`: it is called where a peer draws noise that it does not use.
    """

    def first(self, shape: Sequence[int], like: Tensor, images: Sequence[int]) -> Tensor: ...

    def step(self, draws: Sequence[Draw], span: Span, like: Tensor, images: Sequence[int]) -> Tensor: ...

    def beside(self, shape: Sequence[int], like: Tensor, images: Sequence[int]) -> Tensor:
        """Noise that is not of the path: what a VAE's encoder draws."""


def check_seed(seed: object) -> int:
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**64:
        raise PellucidError(rule("seed", "a whole number from 0 to 2**64 − 1", seed), "seed")
    return int(seed)


def seed_list(seeds: int | Sequence[int], count: int | None = None) -> list[int]:
    """Checked seeds: a list as it is; one number for a batch of `count` gives consecutive ones."""
    if isinstance(seeds, (int, np.integer, float)):
        first = check_seed(seeds)
        return [(first + k) % 2**64 for k in range(1 if count is None else count)]
    listed = [check_seed(s) for s in seeds]
    if not listed or (count is not None and len(listed) != count):
        wanted = "at least one" if count is None else f"one per image, {count}"
        raise PellucidError(rule("seeds", wanted, len(listed)), "seed")
    return listed


class Philox:
    """The default source: keyed by (seed of the image, elementary interval, visit)."""

    def __init__(self, seeds: int | Sequence[int]) -> None:
        self.seeds = seed_list(seeds)

    def first(self, shape: Sequence[int], like: Tensor, images: Sequence[int]) -> Tensor:
        return torch.stack([gaussian(self.seeds[i], shape, (0, 0, _FIRST), like) for i in images]).to(like.dtype)

    def beside(self, shape: Sequence[int], like: Tensor, images: Sequence[int]) -> Tensor:
        return torch.stack([gaussian(self.seeds[i], shape, (0, 0, _BESIDE), like) for i in images]).to(like.dtype)

    def step(self, draws: Sequence[Draw], span: Span, like: Tensor, images: Sequence[int]) -> Tensor:
        return torch.stack([self.one(self.seeds[i], draws, like) for i in images])

    @staticmethod
    def one(seed: int, draws: Sequence[Draw], like: Tensor) -> Tensor:
        parts = [gaussian(seed, like.shape[1:], (d.interval, d.visit, PATH), like) * d.weight for d in draws]
        return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]


class Brownian:
    """A virtual Brownian path in λ: one seed means one path, whatever the grid, so that grids can be compared.

    The path is a binary tree over λ ∈ [−REACH, REACH]; each node's normal number is addressed by its place in the
    tree, and the bridge between two nodes runs on the variance clock (SNR is exact for eta 1, sigma is
    k-diffusion's).
    """

    REACH = 16.0
    DEPTH = 22

    def __init__(self, seeds: int | Sequence[int], clock: Clock = "snr") -> None:
        if clock not in ("snr", "sigma"):
            raise PellucidError(rule("clock", "snr or sigma", clock), "clock")
        self.plain = Philox(seeds)
        self.seeds, self.clock = self.plain.seeds, clock
        self.cache: dict[tuple[object, ...], Tensor] = {}
        self.trail: tuple[tuple[Any, ...], dict[int, Tensor]] = ((), {})  # the nodes of the last way down, and whose

    def first(self, shape: Sequence[int], like: Tensor, images: Sequence[int]) -> Tensor:
        return self.plain.first(shape, like, images)

    def beside(self, shape: Sequence[int], like: Tensor, images: Sequence[int]) -> Tensor:
        return self.plain.beside(shape, like, images)

    def step(self, draws: Sequence[Draw], span: Span, like: Tensor, images: Sequence[int]) -> Tensor:
        """The path's increment over a span, scaled to variance 1."""
        seeds, visit = tuple(self.seeds[i] for i in images), draws[0].visit
        a, b = (self.at(seeds, ratio, visit, like) for ratio in (span.start, span.end))
        length = abs(self.tick(self.within(span.end)) - self.tick(self.within(span.start)))
        return ((b - a) / math.sqrt(length)).to(like.dtype)

    def within(self, ratio: float) -> float:
        """λ of a ratio, cut to the path's reach: pure noise is its beginning, a clean x its end."""
        return min(max(-math.log(ratio), -self.REACH), self.REACH) if ratio > 0 else self.REACH

    def tick(self, lam: float) -> float:
        return clock_time(math.exp(-lam), self.clock)

    def at(self, seeds: tuple[int, ...], ratio: float, visit: int, like: Tensor) -> Tensor:
        key = (seeds, ratio, visit, tuple(like.shape[1:]), like.device)
        if key not in self.cache:
            while sum(map(len, self.cache.values())) > 4 * len(self.seeds):  # a run looks back one leg at most
                self.cache.pop(next(iter(self.cache)))
            self.cache[key] = self.descend(seeds, ratio, visit, like)
        return self.cache[key]

    def descend(self, seeds: tuple[int, ...], ratio: float, visit: int, like: Tensor) -> Tensor:
        """The path at one place, [B, *shape]. All images go down the tree together."""
        way, shape = self.way(self.within(ratio)), tuple(like.shape[1:])
        wide = torch.empty((), dtype=torch.float64, device=like.device)
        drawn = self.drawn(seeds, [node for node, *_ in way], visit, shape, wide)
        at_low = wide.new_zeros((len(seeds), *shape))
        at_high = drawn[0] * math.sqrt(abs(self.tick(self.REACH) - self.tick(-self.REACH)))
        for node, part, spread, right in way[1:]:
            at_middle = at_low + part * (at_high - at_low) + spread * drawn[node]
            at_low, at_high = (at_middle, at_high) if right else (at_low, at_middle)
        return at_low + way[0][1] * (at_high - at_low)

    def way(self, goal: float) -> list[tuple[int, float, float, bool]]:
        """(node, where the bridge crosses it, its spread, whether the way goes right there), from the top; the first
        one is the path's end, and where it crosses is where the goal lies between the last two nodes."""
        low, high, node = -self.REACH, self.REACH, 1
        found = []
        for _ in range(self.DEPTH):
            middle = (low + high) / 2
            part = (self.tick(middle) - self.tick(low)) / (self.tick(high) - self.tick(low))
            spread = math.sqrt(abs(self.tick(high) - self.tick(low)) * part * (1 - part))
            right = goal >= middle
            found.append((node, part, spread, right))
            low, high = (middle, high) if right else (low, middle)
            node = 2 * node + int(right)
        last = (self.tick(goal) - self.tick(low)) / (self.tick(high) - self.tick(low))
        return [(0, last, 0.0, False), *found]

    def drawn(
        self, seeds: tuple[int, ...], nodes: Sequence[int], visit: int, shape: tuple[int, ...], wide: Tensor
    ) -> dict[int, Tensor]:
        """The normal numbers of nodes, [B, *shape] each. Those of the last way down are not drawn again: of two
        neighbouring places that is half of them."""
        owner = (seeds, visit, shape, wide.device)
        known = self.trail[1] if self.trail[0] == owner else {}
        new = [node for node in nodes if node not in known]
        made = gaussians(seeds, shape, [(node, visit, _TREE) for node in new], wide) if new else ()
        found = {**known, **dict(zip(new, made, strict=True))}
        self.trail = (owner, {node: found[node] for node in nodes})
        return self.trail[1]


class TorchStream:
    """torch's own generator on the CPU, one per image, drawn from in the order in which a run asks: the peers' noise.

    A seed gives the image that diffusers gives with a list of generators. The order is part of the address here:
    another sampler or step count shifts every draw, and a run cannot be repeated from its middle.
    """

    def __init__(self, seeds: int | Sequence[int]) -> None:
        self.seeds = seed_list(seeds)
        self.generators = [torch.Generator().manual_seed(seed) for seed in self.seeds]

    def first(self, shape: Sequence[int], like: Tensor, images: Sequence[int]) -> Tensor:
        kind = like.dtype if like.dtype == torch.float64 else torch.float32
        made = [torch.randn(tuple(shape), generator=self.generators[i], dtype=kind) for i in images]
        return torch.stack(made).to(like)

    beside = first  # the next numbers of the stream

    def step(self, draws: Sequence[Draw], span: Span, like: Tensor, images: Sequence[int]) -> Tensor:
        return self.first(like.shape[1:], like, images)

    def discard(self, like: Tensor, images: Sequence[int]) -> None:
        """Moves the generators on by one draw."""
        self.first(like.shape[1:], like, images)


class PerImage:
    """A source for each image of a batch, so that torch's streams stand beside addressed noise."""

    def __init__(self, sources: Sequence[NoiseSource]) -> None:
        self.sources = list(sources)

    def first(self, shape: Sequence[int], like: Tensor, images: Sequence[int]) -> Tensor:
        return torch.cat([self.sources[i].first(shape, like, [0]) for i in images])

    def beside(self, shape: Sequence[int], like: Tensor, images: Sequence[int]) -> Tensor:
        return torch.cat([self.sources[i].beside(shape, like, [0]) for i in images])

    def step(self, draws: Sequence[Draw], span: Span, like: Tensor, images: Sequence[int]) -> Tensor:
        parts = [self.sources[i].step(draws, span, like[k : k + 1], [0]) for k, i in enumerate(images)]
        return torch.cat(parts)

    def discard(self, like: Tensor, images: Sequence[int]) -> None:
        for k, i in enumerate(images):
            discard = getattr(self.sources[i], "discard", None)
            if discard is not None:
                discard(like[k : k + 1], [0])


def draw(source: NoiseSource, row: Row, pre: bool, like: Tensor, images: Sequence[int]) -> Tensor:
    """The noise that a row asks for."""
    draws, span = (row.pre_draws, row.pre_span) if pre else (row.draws, row.span)
    assert span is not None
    return source.step(draws, span, like, images)


def first_noise(plan: Plan, seeds: int | Sequence[int], shape: Sequence[int], like: Tensor) -> Tensor:
    """x at the start of a plan: noise of the plan's initial scale, shape without the batch."""
    source = Philox(seeds)
    return source.first(shape, like, range(len(source.seeds))) * plan.initial_scale

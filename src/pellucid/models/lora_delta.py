"""What an adapter adds to one layer: the weight difference of LoRA, LoHa, LoKr, DoRA, or a plain difference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Product:
    """A matrix or kernel kept as factors: `a`, `a·b`, or `a·core·b` (Tucker: the kernel is in the small core)."""

    a: Tensor  # (out, r); or the whole tensor where there is no b
    b: Tensor | None = None  # (r, in) or (r, in, h, w)
    core: Tensor | None = None  # (r, r, h, w)

    def __post_init__(self) -> None:
        if self.b is None:
            return
        if self.a.ndim != 2 or self.b.ndim < 2 or (self.core is not None and self.core.ndim < 3):
            self._refuse()
        inner = (self.a.shape[1], self.b.shape[0])
        if tuple(self.core.shape[:2]) != inner if self.core is not None else inner[0] != inner[1]:
            self._refuse()
        if self.core is not None and self.b[0].numel() != self.b.shape[1]:  # two kernels, in b and in the core
            self._refuse()

    def _refuse(self) -> NoReturn:
        parts = [tuple(t.shape) for t in (self.a, self.core, self.b) if t is not None]
        raise PellucidError(rule("factors", "matrices that multiply: (out, r) and (r, in)", parts), "lora-shape")

    @property
    def rank(self) -> int | None:
        return None if self.b is None else self.b.shape[0]

    @property
    def shape(self) -> Shape:
        if self.b is None:
            return tuple(self.a.shape)
        if self.core is None:
            return (self.a.shape[0], *self.b.shape[1:])
        return (self.a.shape[0], self.b.shape[1], *self.core.shape[2:])

    def tensor(self, device: torch.device) -> Tensor:
        """The product, in float32."""
        a = self.a.to(device, torch.float32)
        if self.b is None:
            return a
        b = self.b.to(device, torch.float32).flatten(1)  # (r, in·h·w)
        if self.core is None:
            return (a @ b).reshape(self.shape)
        core = self.core.to(device, torch.float32)
        return torch.einsum("oi,ij...,jn->on...", a, core, b)


@dataclass(frozen=True, eq=False, kw_only=True)
class Delta:
    """ΔW of one layer, and Δb where there is one; `factor` is alpha / rank (of ΔW alone)."""

    factor: float = 1.0
    bias: Tensor | None = None  # (out,)

    @property
    def shape(self) -> Shape:
        """The shape of ΔW; a kernel may be flattened, (out, in·h·w)."""
        raise NotImplementedError

    def difference(self, device: torch.device) -> Tensor:
        """ΔW before alpha and scale, in float32."""
        raise NotImplementedError

    def weight(self, base: Tensor, scale: float = 1.0) -> Tensor:
        """ΔW for a base weight at a scale: float32, of the base's shape, on its device."""
        return self.difference(base.device).reshape(base.shape) * (self.factor * scale)

    def misfit(self, base: Shape) -> Shape | None:
        """The shape that is not for a weight of shape `base`; ones at the end and a flattened kernel are no misfit."""
        mine = self.shape
        size = bool(mine) and mine[0] == base[0] and math.prod(mine) == math.prod(base)
        if not size or (len(mine) != 2 and stripped(mine) != stripped(base)):
            return mine
        return tuple(self.bias.shape) if self.bias is not None and self.bias.shape != base[:1] else None


def stripped(shape: Shape) -> Shape:
    """A shape without the ones at its end: a 1×1 convolution is a matrix."""
    while len(shape) > 2 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


@dataclass(frozen=True, eq=False, kw_only=True)
class LoRA(Delta):
    """ΔW = up·down (Hu et al. 2021); for a convolution down has the kernel, or `core` has it (LoCon)."""

    product: Product

    @property
    def shape(self) -> Shape:
        return self.product.shape

    def difference(self, device: torch.device) -> Tensor:
        return self.product.tensor(device)


@dataclass(frozen=True, eq=False, kw_only=True)
class LoHa(Delta):
    """ΔW = (a₁·b₁) ∘ (a₂·b₂), the Hadamard product of two small products (FedPara, eq. 3)."""

    first: Product
    second: Product

    def __post_init__(self) -> None:
        if self.first.shape != self.second.shape:
            got = (self.first.shape, self.second.shape)
            raise PellucidError(rule("the two products of a LoHa", "of one shape", got), "lora-shape")

    @property
    def shape(self) -> Shape:
        return self.first.shape

    def difference(self, device: torch.device) -> Tensor:
        return self.first.tensor(device) * self.second.tensor(device)


@dataclass(frozen=True, eq=False, kw_only=True)
class LoKr(Delta):
    """ΔW = left ⊗ right, a Kronecker product; each side is whole or a product, the right one may be a kernel."""

    left: Product
    right: Product

    def __post_init__(self) -> None:
        if len(self.left.shape) != 2 or len(self.right.shape) < 2:
            got = (self.left.shape, self.right.shape)
            raise PellucidError(rule("the two sides of a LoKr", "a matrix, and a matrix or kernel", got), "lora-shape")

    @property
    def shape(self) -> Shape:
        (a, c), (b, d, *kernel) = self.left.shape, self.right.shape
        return (a * b, c * d, *kernel)

    def difference(self, device: torch.device) -> Tensor:
        left, right = self.left.tensor(device), self.right.tensor(device)
        return torch.kron(left.reshape(*left.shape, *(1,) * (right.ndim - 2)), right)


@dataclass(frozen=True, eq=False, kw_only=True)
class Full(Delta):
    """ΔW itself."""

    tensor: Tensor

    @property
    def shape(self) -> Shape:
        return tuple(self.tensor.shape)

    def difference(self, device: torch.device) -> Tensor:
        return self.tensor.to(device, torch.float32)


@dataclass(frozen=True, eq=False, kw_only=True)
class DoRA(Delta):
    """W' = m·(W + sΔ)/‖W + sΔ‖ (Liu et al. 2024, eq. 5), so ΔW = W' − W.

    The scale s acts inside, on the direction, as in PEFT; m is used in full at any s. The norm is taken of each slice
    along `axis`: 0 is one norm an output (PEFT), 1 one an input (LyCORIS' older files).
    """

    inner: Delta
    magnitude: Tensor  # (W.shape[axis],)
    axis: int = 0

    @property
    def shape(self) -> Shape:
        return self.inner.shape

    def misfit(self, base: Shape) -> Shape | None:
        if (found := super().misfit(base)) is not None:
            return found
        fits = len(base) >= 2 and self.magnitude.numel() == base[self.axis]
        return None if fits else tuple(self.magnitude.shape)

    def weight(self, base: Tensor, scale: float = 1.0) -> Tensor:
        before = base.float()
        moved = before + self.inner.weight(base, scale)
        others = [d for d in range(base.ndim) if d != self.axis]
        norm: Tensor = torch.linalg.vector_norm(moved, dim=others, keepdim=True)
        magnitude = self.magnitude.to(base.device, torch.float32).reshape(norm.shape)
        return moved * (magnitude / norm) - before

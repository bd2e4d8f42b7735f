"""How the checks compare tensors."""

from __future__ import annotations

from torch import Tensor

from pellucid.labs.answers import Mistake


def tensor(got: object, wanted: Tensor, what: str) -> Tensor:
    """A tensor of the shape that is wanted; `Mistake` says what came instead."""
    if not isinstance(got, Tensor) or got.shape != wanted.shape:
        shape = tuple(got.shape) if isinstance(got, Tensor) else type(got).__name__
        raise Mistake(f"{what} must be a tensor of shape {tuple(wanted.shape)}; got {shape}.")
    return got


def off(got: object, wanted: Tensor, what: str) -> float:
    """The largest difference from what is wanted."""
    return float((tensor(got, wanted, what).double() - wanted.double()).abs().max())

"""How the checks compare an answer with what is right, and with known mistakes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from pellucid.labs.answers import Mistake

_T = TypeVar("_T")


def tensor(got: object, wanted: Tensor, what: str) -> Tensor:
    """A tensor of the shape that is wanted; `Mistake` says what came instead."""
    if not isinstance(got, Tensor) or got.shape != wanted.shape:
        shape = tuple(got.shape) if isinstance(got, Tensor) else type(got).__name__
        raise Mistake(f"{what} must be a tensor of shape {tuple(wanted.shape)}; got {shape}.")
    return got


def off(got: object, wanted: Tensor, what: str) -> float:
    """The largest difference from what is wanted."""
    return float((tensor(got, wanted, what).double() - wanted.double()).abs().max())


def close(got: object, wanted: Tensor, tolerance: float = 1e-5) -> bool:
    """Whether an answer is a tensor of the wanted shape and, within the tolerance, of the wanted values."""
    same = isinstance(got, Tensor) and got.shape == wanted.shape
    return same and torch.allclose(got.double(), wanted.double(), rtol=tolerance, atol=tolerance)


def diagnosis(slips: Mapping[str, _T], fits: Callable[[_T], object], otherwise: str, words: str = "this is {}") -> str:
    """The first known slip whose result fits the answer, in these words; else a general hint."""
    return next((words.format(slip) for slip, result in slips.items() if fits(result)), otherwise)

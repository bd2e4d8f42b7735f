"""What an answer to lab 08 must do."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pellucid.labs.answers import Check, Mistake
from pellucid.labs.checks.tensors import close, diagnosis
from pellucid.models.lora_delta import LoRA, Product

OUT, IN, RANK, BATCH = 48, 40, 4, 6
ALPHA, STRENGTH = 2.0, 0.7
LAYERS = ("down.attn.to_q", "down.attn.to_k", "mid.attn.to_q")


def given() -> tuple[Tensor, Tensor, Tensor]:
    """A weight, a down and an up."""
    generator = torch.Generator().manual_seed(8)
    shapes = ((OUT, IN), (RANK, IN), (OUT, RANK))
    weight, down, up = (torch.randn(shape, generator=generator) for shape in shapes)
    return weight, down, up


def engine(weight: Tensor, down: Tensor, up: Tensor, alpha: float, strength: float) -> Tensor:
    """The weight as the engine makes it."""
    return weight + LoRA(product=Product(up, down), factor=alpha / len(down)).weight(weight, strength)


near = partial(close, tolerance=1e-4)


def check_weight(answer: ModuleType) -> None:
    weight, down, up = given()
    kept = weight.clone()
    got, wanted = answer.merged_weight(weight, down, up, ALPHA, STRENGTH), engine(weight, down, up, ALPHA, STRENGTH)
    if not torch.equal(weight, kept):
        raise Mistake(
            "merged_weight changed the weight that it was given: return a new one, the base must stay usable."
        )
    if near(got, wanted):
        return
    if not isinstance(got, Tensor) or got.shape != wanted.shape:
        raise Mistake(f"merged_weight must give {tuple(wanted.shape)}; got {shown(got)}. It is up @ down that has it.")
    slips = {
        "alpha / rank is left out": engine(weight, down, up, RANK, STRENGTH),
        "alpha is not divided by the rank": engine(weight, down, up, ALPHA * RANK, STRENGTH),
        "the strength is left out": engine(weight, down, up, ALPHA, 1.0),
        "the strength weakens W itself": (1 - STRENGTH) * weight + STRENGTH * engine(0 * weight, down, up, ALPHA, 1.0),
        "W itself is left out": engine(0 * weight, down, up, ALPHA, STRENGTH),
    }
    hint = diagnosis(slips, partial(near, got), "compare with W + s·(alpha/rank)·up·down", "{}")
    apart = float((got - wanted).abs().max())
    raise Mistake(f"merged_weight must be the engine's to 1e-4; it is {apart:.3g} off. What you see when {hint}.")


def check_no_rank_left(answer: ModuleType) -> None:
    weight, down, up = given()
    rank = int(torch.linalg.matrix_rank(answer.merged_weight(weight, down, up, ALPHA, STRENGTH) - weight, rtol=1e-4))
    if rank != RANK:
        raise Mistake(f"the difference to the base must have the rank {RANK} of the LoRA; got {rank}.")
    same = answer.merged_weight(weight, down, up, ALPHA, 0.0)
    if not torch.equal(same, weight):
        raise Mistake(
            "at strength 0 the weight must be the base's, bit for bit; something is added that has no strength."
        )


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the largest tensor that was made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        fresh = isinstance(out, Tensor) and not func.is_view
        self.numbers = max(self.numbers, out.numel() if fresh else 0)
        return out


def check_beside(answer: ModuleType) -> None:
    weight, down, up = given()
    x = torch.randn(BATCH, IN, generator=torch.Generator().manual_seed(9))
    with LargestTensor() as largest:
        got = answer.beside(x, weight, down, up, ALPHA, STRENGTH)
    wanted = x @ engine(weight, down, up, ALPHA, STRENGTH).T
    if not near(got, wanted):
        raise Mistake(
            f"beside must give what the merged weight gives, {tuple(wanted.shape)}; got {shown(got)} with other "
            "values. Both paths see the same x, and alpha / rank and the strength belong to the second one alone."
        )
    if largest.numbers >= OUT * IN:
        raise Mistake(
            f"beside must make nothing of {OUT * IN} numbers; it made a tensor of {largest.numbers}. Go down "
            "to the rank first: (x @ down.T) @ up.T and not x @ (up @ down).T."
        )


def check_unmatched(answer: ModuleType) -> None:
    ends = (".lora_A.weight", ".lora_B.weight")
    fitting = [layer + end for layer in LAYERS for end in ends]
    strange = ["down.attn.to_v.lora_A.weight", "attn.to_q.lora_B.weight", "mid.attn.to_q.alpha"]
    keys = [*fitting[:3], strange[0], *fitting[3:], *strange[1:]]
    got = list(answer.unmatched(iter(keys), iter(LAYERS)))
    if got != strange:
        raise Mistake(
            f"of {len(keys)} keys {strange} fit nothing; got {got}. A name fits as a whole: attn.to_q is not "
            "down.attn.to_q, and an ending that is unknown fits nothing."
        )
    if list(answer.unmatched(fitting, LAYERS)):
        raise Mistake("a file whose keys all fit has nothing left over; got some.")


def shown(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


CHECKS = [
    Check("the merged weight", check_weight),
    Check("its rank, and strength 0", check_no_rank_left),
    Check("the LoRA beside the weight", check_beside),
    Check("keys that fit nothing", check_unmatched),
]

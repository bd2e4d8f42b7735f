"""What is passed to a network besides x and time: keyword inputs whose tensors all have the batch first.

A leaf is a tensor or None; tuples, named tuples, lists and mappings of leaves nest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.core.errors import PellucidError, rule

Inputs = Mapping[str, Any]


def over(work: Callable[..., Any], name: str, *trees: Any) -> Any:
    """work(name, leaf, …) on the leaves of one tree, or on those of several of one form."""
    first = trees[0]
    if all(tree is None for tree in trees):
        return None
    if all(isinstance(tree, Tensor) for tree in trees):
        return work(name, *trees)
    if all(isinstance(tree, Mapping) and tree.keys() == first.keys() for tree in trees):
        return {key: over(work, f"{name}.{key}", *(tree[key] for tree in trees)) for key in first}
    if isinstance(first, tuple | list) and all(type(t) is type(first) and len(t) == len(first) for t in trees):
        parts = [over(work, f"{name}[{i}]", *(tree[i] for tree in trees)) for i in range(len(first))]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    forms = " and ".join(_form(tree) for tree in trees)
    must = "tensors, None, or tuples and mappings of them" + (", of one form" if len(trees) > 1 else "")
    raise PellucidError(f"{name} must be {must}; got {forms}.", "inputs")


def _form(tree: Any) -> str:
    if isinstance(tree, Tensor):
        return f"a tensor {tuple(tree.shape)}"
    if isinstance(tree, Mapping):
        return "the keys " + ", ".join(sorted(map(str, tree)))
    return f"{len(tree)} parts" if isinstance(tree, tuple | list) else repr(tree)


def form(tree: Any) -> Any:
    """The keys and lengths of a tree of inputs, without its tensors: hashable."""
    if isinstance(tree, Mapping):
        return tuple((key, form(tree[key])) for key in sorted(tree))
    if isinstance(tree, tuple | list):
        return (type(tree), *map(form, tree))
    return tree is None


def alike(first: Inputs, second: Inputs) -> bool:
    """Whether two inputs can be one batch as they are."""
    try:
        over(_check_alike, "inputs", first, second)
    except PellucidError:
        return False
    return True


def join(first: Inputs, second: Inputs) -> dict[str, Any]:
    """Two inputs as one batch, the second behind the first."""

    def cat(name: str, a: Tensor, b: Tensor) -> Tensor:
        if a.shape[1:] != b.shape[1:]:
            raise PellucidError(
                f"{name} must have one shape with and without the prompt; got {tuple(b.shape)} and {tuple(a.shape)}.",
                "inputs",
            )
        return torch.cat([a, b])

    joined: dict[str, Any] = over(cat, "inputs", first, second)
    return joined


def even(first: Inputs, second: Inputs) -> tuple[Inputs, Inputs] | None:
    """Two inputs with texts of one length, the shorter padded and masked; None where they cannot be one batch."""
    both = first.get("context"), second.get("context")
    lengths = [text.shape[1] for text in both if isinstance(text, Tensor)]
    if len(lengths) == 2 and ("context_mask" in first or "context_mask" in second or lengths[0] != lengths[1]):
        first, second = (_padded(tree, max(lengths)) for tree in (first, second))
    return (first, second) if alike(first, second) else None


def _padded(inputs: Inputs, length: int) -> Inputs:
    """Inputs with a text of this length, and a mask of the tokens that are seen."""
    context = inputs["context"]
    mask = inputs.get("context_mask")
    mask = context.new_ones(context.shape[:2], dtype=torch.bool) if mask is None else mask
    more = length - context.shape[1]
    return {**inputs, "context": F.pad(context, (0, 0, 0, more)), "context_mask": F.pad(mask, (0, more))}


def _check_alike(name: str, a: Tensor, b: Tensor) -> None:
    if a.shape[1:] != b.shape[1:]:
        raise PellucidError(f"{name} must have one shape; got {tuple(a.shape)} and {tuple(b.shape)}.", "inputs")


def pick(inputs: Inputs, images: Sequence[int]) -> dict[str, Any]:
    """The inputs of some images of the batch, in this order."""
    picked: dict[str, Any] = over(lambda _, leaf: leaf[list(images)], "inputs", inputs)
    return picked


def rows(inputs: Inputs) -> int:
    """How many rows they have; 1 where there is no tensor that could say it."""
    counts: list[int] = []
    over(lambda _, leaf: counts.append(len(leaf)), "inputs", inputs)
    return counts[0] if counts else 1


def check(inputs: Inputs, images: int) -> None:
    """Every tensor has one row per image."""

    def look(name: str, leaf: Tensor) -> None:
        if leaf.ndim == 0 or len(leaf) != images:
            raise PellucidError(
                rule(name, f"a tensor with one row for each of {images} images", tuple(leaf.shape)), "inputs"
            )

    over(look, "inputs", inputs)

"""The tensors that a file has for one layer, made into a weight difference."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import typed
from pellucid.models.lora_delta import Delta, DoRA, Full, LoHa, LoKr, LoRA, Product, Shape

Parts = Mapping[str, Tensor]  # by the names of the endings in lora_keys
Config = Mapping[str, Any]  # PEFT's adapter_config.json, of which alpha, r and their patterns are read


@dataclass(frozen=True)
class Strength:
    """alpha / rank of one layer: from the file's own alpha, else from PEFT's config, else 1."""

    alpha: float | None = None
    config: Config = field(default_factory=dict)
    names: tuple[str, ...] = ()  # the layer's, for the config's patterns

    def factor(self, rank: int | None) -> float:
        """`rank` is None for a LoKr of two whole sides: LyCORIS has no alpha there, PEFT divides by its config's r."""
        if self.alpha is not None:
            return self.alpha / rank if rank else 1.0
        alpha = self.chosen("alpha_pattern", "lora_alpha" if "lora_alpha" in self.config else "alpha")
        rank_or_config = rank or self.chosen("rank_pattern", "r")
        if alpha is None or not rank_or_config:
            return 1.0
        rooted = typed(bool | None, self.config.get("use_rslora"), "use_rslora of the adapter", code="lora")
        return alpha / (math.sqrt(rank_or_config) if rooted else rank_or_config)

    def chosen(self, patterns: str, default: str) -> float | None:
        """The value of the first pattern that ends a name of the layer, as PEFT chooses; else the config's own."""
        table = self.config.get(patterns) or {}
        try:
            hits = (v for p, v in table.items() if any(re.match(rf"(.*\.)?({p})$", name) for name in self.names))
            value = next(hits, self.config.get(default))
            return None if value is None else float(value)
        except (AttributeError, TypeError, ValueError, re.error):
            must = f"a number, and {patterns} numbers by regular expression"
            raise PellucidError(rule(default, must, (self.config.get(default), table)), "lora-config") from None


@dataclass(frozen=True)
class LayerDelta:
    """A difference, and which parts of the layer it used."""

    delta: Delta
    used: set[str]


def make(parts: Parts, strength: Strength, base: Shape) -> LayerDelta | None:
    """The difference that a layer's parts describe, for a base weight of this shape; None where they describe none."""
    kind = next((kind for kind, names in _KINDS.items() if names & parts.keys()), None)
    if kind is None:
        return None
    delta, used = (
        kind(parts, strength, base),
        _KINDS[kind] | {"diff_b"} | ({"alpha"} if kind is not _make_full else set()),
    )
    bias = parts.get("diff_b")
    if isinstance(delta, LoRA) and "up_bias" in parts:
        used |= {"up_bias"}
        shift = parts["up_bias"].float() * delta.factor
        bias = shift if bias is None else bias.float() + shift
    for name in ("magnitude", "dora_scale"):
        if name in parts:
            used |= {name}
            delta = DoRA(inner=delta, magnitude=parts[name].flatten(), axis=_norm_axis(name, parts[name], base))
    return LayerDelta(delta if bias is None else replace(delta, bias=bias), used)


def _norm_axis(name: str, magnitude: Tensor, base: Shape) -> int:
    """Whether magnitudes are norms of outputs (0) or of inputs (1).

    LyCORIS' (out, 1, …) is one an output, its (1, in, …) one an input. PEFT's are one an output, also (1, out, 1, 1)
    of convolutions, which may be found under LyCORIS' name.
    """
    inputs = name == "dora_scale" and magnitude.ndim > 1 and magnitude.shape[0] == 1
    return int(inputs and len(base) > 1 and magnitude.numel() == base[1])


def _make_lora(parts: Parts, strength: Strength, base: Shape) -> Delta:
    up, down = _needed(parts, "up", "down")
    product = Product(up.flatten(1) if up.ndim > 1 else up, down, parts.get("mid"))
    return LoRA(product=product, factor=strength.factor(product.rank))


def _make_loha(parts: Parts, strength: Strength, base: Shape) -> Delta:
    first, second = _side(parts, "hada_w1", "hada_t1"), _side(parts, "hada_w2", "hada_t2")
    return LoHa(first=first, second=second, factor=strength.factor(first.rank))


def _make_lokr(parts: Parts, strength: Strength, base: Shape) -> Delta:
    left, right = _side(parts, "lokr_w1"), _side(parts, "lokr_w2", "lokr_t2")
    return LoKr(left=left, right=right, factor=strength.factor(right.rank or left.rank))


def _make_full(parts: Parts, strength: Strength, base: Shape) -> Delta:
    """A plain difference has no rank, so alpha has no say; a file may have one of the bias alone."""
    return Full(tensor=parts["diff"] if "diff" in parts else torch.zeros(1).expand(base))


_KINDS: dict[Callable[[Parts, Strength, Shape], Delta], set[str]] = {
    _make_lora: {"up", "down", "mid"},
    _make_loha: {f"hada_{part}" for part in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")},
    _make_lokr: {f"lokr_{part}" for part in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")},
    _make_full: {"diff", "diff_b"},
}


def _side(parts: Parts, name: str, core: str = "") -> Product:
    """A side of a LoHa or LoKr: whole, or a·b, or Tucker, where the files keep a as (r, out)."""
    if name in parts:
        return Product(parts[name])
    a, b = _needed(parts, f"{name}_a", f"{name}_b")
    return Product(a.mT, b, parts[core]) if core in parts and a.ndim == 2 else Product(a, b)


def _needed(parts: Parts, *names: str) -> list[Tensor]:
    if not all(name in parts for name in names):
        raise PellucidError(rule("parts", f"complete, {' and '.join(names)}", sorted(parts)), "lora-incomplete")
    return [parts[name] for name in names]

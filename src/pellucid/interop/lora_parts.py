"""The tensors that a file has for one layer, made into a weight difference."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.models.lora_delta import Delta, DoRA, Full, LoHa, LoKr, LoRA, Product, Shape

Parts = Mapping[str, Tensor]  # by the names of lora_keys.ENDINGS
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
        alpha = self.chosen("alpha_pattern", self.config.get("lora_alpha", self.config.get("alpha")))
        rank = rank or self.chosen("rank_pattern", self.config.get("r"))
        if alpha is None or not rank:
            return 1.0
        return alpha / math.sqrt(rank) if self.config.get("use_rslora") else alpha / rank

    def chosen(self, patterns: str, default: Any) -> Any:
        """The first pattern that ends a name of the layer, as PEFT chooses."""
        for pattern, value in (self.config.get(patterns) or {}).items():
            try:
                if any(re.match(rf"(.*\.)?({pattern})$", name) for name in self.names):
                    return value
            except re.error:
                raise PellucidError(rule(patterns, "regular expressions", pattern), "lora-config") from None
        return default


@dataclass(frozen=True)
class Made:
    """A difference, and which parts of the layer it used."""

    delta: Delta
    used: set[str]


def make(parts: Parts, strength: Strength, base: Shape) -> Made | None:
    """The difference that a layer's parts describe, for a base weight of this shape; None where they describe none."""
    for first, make_kind in KINDS.items():
        if any(part.startswith(first) for part in parts):
            made = make_kind(parts, strength)
            break
    else:
        return None
    bias = parts.get("diff_b")
    if "up_bias" in parts and isinstance(made.delta, LoRA):
        shift = parts["up_bias"].float() * made.delta.factor
        bias = shift if bias is None else bias.float() + shift
    if bias is not None:
        made = Made(replace(made.delta, bias=bias), made.used | ({"diff_b", "up_bias"} & set(parts)))
    return with_magnitude(made, parts, base)


def with_magnitude(made: Made, parts: Parts, base: Shape) -> Made:
    """The difference as a DoRA, where the file has magnitudes."""
    name = next((name for name in ("magnitude", "dora_scale") if name in parts), None)
    if name is None:
        return made
    magnitude = parts[name]
    # LyCORIS' (1, in, …) is one norm an input, its (out, 1, …) one an output. PEFT's are all one an output, and its
    # (1, out, 1, 1) for convolutions may be found under LyCORIS' name.
    inputs = name == "dora_scale" and magnitude.ndim > 1 and magnitude.shape[0] == 1
    axis = int(inputs and len(base) > 1 and magnitude.numel() == base[1])
    inner, bias = replace(made.delta, bias=None), made.delta.bias
    return Made(DoRA(inner=inner, magnitude=magnitude.flatten(), axis=axis, bias=bias), made.used | {name})


def make_lora(parts: Parts, strength: Strength) -> Made:
    up, down = needed(parts, "up", "down")
    product = Product(up.flatten(1) if up.ndim > 1 else up, down, parts.get("mid"))
    return Made(LoRA(product=product, factor=strength.factor(product.rank)), {"up", "down", "mid", "alpha"})


def make_loha(parts: Parts, strength: Strength) -> Made:
    used = {f"hada_{part}" for part in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")}
    first, second = (product(parts, f"hada_w{i}", f"hada_t{i}") for i in (1, 2))
    return Made(LoHa(first=first, second=second, factor=strength.factor(first.rank)), used | {"alpha"})


def make_lokr(parts: Parts, strength: Strength) -> Made:
    used = {f"lokr_{part}" for part in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")}
    left, right = product(parts, "lokr_w1"), product(parts, "lokr_w2", "lokr_t2")
    return Made(LoKr(left=left, right=right, factor=strength.factor(right.rank or left.rank)), used | {"alpha"})


def make_full(parts: Parts, strength: Strength) -> Made:
    return Made(Full(tensor=parts["diff"]), {"diff"})


KINDS: dict[str, Callable[[Parts, Strength], Made]] = {
    "up": make_lora,
    "down": make_lora,
    "hada_": make_loha,
    "lokr_": make_lokr,
    "diff": make_full,
}


def product(parts: Parts, name: str, core: str = "") -> Product:
    """A side of a LoHa or LoKr: whole, or a·b, or Tucker, where the files keep a as (r, out)."""
    if name in parts:
        return Product(parts[name])
    a, b = needed(parts, f"{name}_a", f"{name}_b")
    return Product(a.mT, b, parts[core]) if core in parts and a.ndim == 2 else Product(a, b)


def needed(parts: Parts, *names: str) -> list[Tensor]:
    if not all(name in parts for name in names):
        raise PellucidError(rule("parts", f"complete, {' and '.join(names)}", sorted(parts)), "lora-incomplete")
    return [parts[name] for name in names]

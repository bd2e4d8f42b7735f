"""Attention: the one call to the kernel, the one place that chooses its backend, and the layer of UNets and VAEs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.models import ops
from pellucid.models.kernels import QuantizedRows

BACKENDS = {
    "auto": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


_CHOSEN: ContextVar[str] = ContextVar("pellucid_attention", default="auto")


@contextmanager
def backend(name: str = "auto") -> Iterator[None]:
    """Every `attend` inside uses this kernel. torch keeps the choice for the whole process, not for a thread."""
    if name not in BACKENDS:
        raise PellucidError(
            rule("attention backend", f"one of {', '.join(BACKENDS)}", name, nearest(name, BACKENDS)), "attention"
        )
    kernel, token = BACKENDS[name], _CHOSEN.set(name)
    try:
        with nullcontext() if kernel is None else sdpa_kernel(kernel):
            yield
    finally:
        _CHOSEN.reset(token)


def chosen() -> str:
    """The kernel that `backend` asks for here."""
    return _CHOSEN.get()


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool = False) -> Tensor:
    """softmax(q kᵀ / √d) v over (batch, heads, length, d); `mask` is added to the logits, or bool: True is seen."""
    if not causal and ops.few_keys(q, k, mask) and chosen() == "auto":
        return ops.attend_few(q, k, v, mask)
    if not causal and ops.flash_is_wanted(q, k, v, mask) and chosen() == "auto":
        return ops.flash(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)


def split_heads(x: Tensor, heads: int) -> Tensor:
    return torch.unflatten(x, -1, (heads, -1)).transpose(1, 2)  # (B, L, H·D) → (B, H, L, D)


def join_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)  # (B, H, L, D) → (B, L, H·D)


class ImageTokens(NamedTuple):
    """What one image prompt adds to one cross-attention: keys and values made once, a scale, and where it acts."""

    k: Tensor  # (B, H, T, D)
    v: Tensor  # (B, H, T, D)
    scale: Tensor  # (B, 1, 1): one per image, so that images with and without a prompt share a batch
    mask: Tensor | None  # (B, L, 1), or None for everywhere


class Attention(nn.Module):
    """Multi-head attention over tokens: of x on itself, or on `context` where one is given."""

    def __init__(
        self,
        width: int,
        heads: int,
        head_width: int,
        *,
        context: int | None = None,
        bias: bool = False,
        out_bias: bool = True,
    ) -> None:
        super().__init__()
        self.heads, self.crossed = heads, context is not None
        inner = heads * head_width
        self.to_q = nn.Linear(width, inner, bias=bias)
        self.to_k = nn.Linear(context or width, inner, bias=bias)
        self.to_v = nn.Linear(context or width, inner, bias=bias)
        self.to_out = nn.ModuleList([nn.Linear(inner, width, bias=out_bias)])
        self.columns = slice(0)  # of a text, where its keys and values are; the network counts them: see `count_text`

    def forward(self, x: Tensor | QuantizedRows, *told: Any, **more: Any) -> Tensor:
        """What `before_last` makes of the same arguments, through the last layer: (B, L, D)."""
        return ops.linear(self.before_last(x, *told, **more), self.last)

    def before_last(
        self,
        x: Tensor | QuantizedRows,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        image: tuple[ImageTokens, ...] = (),
        identity: bool = False,
        text: Tensor | None = None,
    ) -> Tensor:
        """What the last layer reads: (B, L, H·D).

        `identity` replaces the attention map by the unit matrix: each token sees itself alone (PAG, eq. 16).
        `text` (B, L, S), in place of `context`, has the keys and values of every cross-attention of the network.
        """
        told = None if text is None else text[..., self.columns].chunk(2, dim=-1)  # (B, L, H·D) each
        if identity:
            return told[1] if told else ops.linear(x if context is None else context, self.to_v)
        if told is None and context is None:
            parts = ops.linears(x, *self.projections)
        else:
            k, v = told or (self.to_k(context), self.to_v(context))
            parts = v, ops.linear(x, self.to_q), k
        v, q, k = (split_heads(part, self.heads) for part in parts)
        out = join_heads(attend(q, k, v, mask))  # (B, L, H·D)
        for tokens in image:
            extra = join_heads(attend(q, tokens.k, tokens.v)) * tokens.scale
            out = out + (extra if tokens.mask is None else extra * tokens.mask)
        return out

    @property
    def last(self) -> nn.Linear:
        return self.to_out[0]  # type: ignore[return-value]

    @property
    def projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.to_v, self.to_q, self.to_k

    @property
    def readers(self) -> tuple[nn.Linear, ...]:
        """The layers that read x; none where a hook on the attention wants to see it as it is."""
        if ops.watched(self):
            return ()
        return (self.to_q,) if self.crossed else self.projections


def count_text(attentions: Sequence[Attention]) -> None:
    """Gives every cross-attention of a network its columns in a text."""
    at = 0
    for attention in attentions:
        width = attention.to_k.out_features + attention.to_v.out_features
        attention.columns, at = slice(at, at + width), at + width


def text_layers(attentions: Sequence[Attention]) -> list[nn.Linear]:
    """What makes the keys and values of cross-attentions, in the order of a text's columns."""
    return [layer for attention in attentions for layer in (attention.to_k, attention.to_v)]


def pack(network: nn.Module) -> None:
    """Lets layers that read the same be one product, where operations are fused.

    These are the queries, keys and values of every self-attention, and what the network makes of its text and times
    for a whole run. The weights stay where they are used under their own names, in a storage that the layers share:
    see `ops.pack`.
    """
    for module in network.modules():
        if isinstance(module, Attention) and not module.crossed:
            ops.pack(*module.projections)
    for layers in getattr(network, "hoisted_layers", tuple)():
        ops.pack(*layers)

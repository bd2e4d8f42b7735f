"""Attention: the one call to the kernel, the one place that chooses its backend, and the layer of UNets and VAEs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import NamedTuple

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


class TextTokens(NamedTuple):
    """The keys and values of one cross-attention for one text, made once a prompt."""

    k: Tensor  # (B, H, S, D)
    v: Tensor  # (B, H, S, D)

    def contiguous(self) -> TextTokens:
        return TextTokens(self.k.contiguous(), self.v.contiguous())


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
        self.index = 0  # which of the network's cross-attentions this one is; the network counts them

    def forward(
        self,
        x: Tensor | QuantizedRows,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        image: tuple[ImageTokens, ...] = (),
        identity: bool = False,
        text: tuple[TextTokens, ...] = (),
    ) -> Tensor:
        """`identity` replaces the attention map by the unit matrix: each token sees itself alone (PAG, eq. 16).

        `text`, in place of `context`, has the keys and values of every cross-attention of the network.
        """
        if identity:
            v = join_heads(text[self.index].v) if text else ops.linear(x if context is None else context, self.to_v)
            return ops.linear(v, self.to_out[0])
        if context is None and not text:
            v, q, k = (split_heads(part, self.heads) for part in ops.linears(x, *self.projections))
        else:
            k, v = self.text_tokens(context) if context is not None else text[self.index]
            q = split_heads(ops.linear(x, self.to_q), self.heads)
        out = join_heads(attend(q, k, v, mask))  # (B, L, H·D)
        for tokens in image:
            extra = join_heads(attend(q, tokens.k, tokens.v)) * tokens.scale
            out = out + (extra if tokens.mask is None else extra * tokens.mask)
        return ops.linear(out, self.to_out[0])

    def text_tokens(self, context: Tensor) -> TextTokens:
        v = split_heads(self.to_v(context), self.heads)
        return TextTokens(split_heads(self.to_k(context), self.heads), v)

    @property
    def projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.to_v, self.to_q, self.to_k

    @property
    def readers(self) -> tuple[nn.Linear, ...]:
        """The layers that read x; none where a hook on the attention wants to see it as it is."""
        if ops.watched(self):
            return ()
        return (self.to_q,) if self.crossed else self.projections


def pack(network: nn.Module) -> None:
    """Lets every self-attention make queries, keys and values in one product, where operations are fused.

    The weights stay where they are used under their own names, in a storage that the three share: see `ops.pack`.
    """
    for module in network.modules():
        if isinstance(module, Attention) and not module.crossed:
            ops.pack(*module.projections)

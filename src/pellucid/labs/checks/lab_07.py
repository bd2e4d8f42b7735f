"""Lab 07: attention weights and maps of the model's own UNet, adaLN, and the tokens of a DiT."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import pellucid
from pellucid.labs.answers import Check, Mistake
from pellucid.labs.checks.tensors import off
from pellucid.models.attention import split_heads
from pellucid.models.dit import DiT, DiTConfig
from pellucid.models.ops import modulate
from pellucid.models.unet import UNet
from pellucid.pipeline.encoders.text import encode_prompts

PROMPTS = ["a large red star on a white background", "a small blue ring on a grey background"]
CLOSE = 1e-5


@cache
def attended() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k and v of the UNet's first cross-attention for two texts, and what the fused kernel makes of them."""
    parts = pellucid.load("scenes-128", device="cpu").components
    assert isinstance(parts.network, UNet)
    attention = parts.network.cross_attentions()[0][0].attn2
    found: dict[str, Tensor] = {}

    def hook(_: Any, given: tuple[Any, ...]) -> None:
        found.update(x=given[0], text=given[1])

    handle = attention.register_forward_pre_hook(hook)
    x = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        context = encode_prompts(parts.text_encoders, parts.tokenizers, PROMPTS).context
        parts.network(x, torch.full((2,), 600.0), context)
        handle.remove()
        made = (attention.to_q(found["x"]), attention.to_k(found["text"]), attention.to_v(found["text"]))
        q, k, v = (split_heads(part, attention.heads) for part in made)
    return q, k, v, torch.nn.functional.scaled_dot_product_attention(q, k, v)


def check_weights(answer: ModuleType) -> None:
    """Applied to v they must give what the kernel gives."""
    q, k, v, wanted = attended()
    got = answer.attention_weights(q, k)
    shape = (*q.shape[:-1], k.shape[-2])
    if not isinstance(got, Tensor) or tuple(got.shape) != shape:
        raise Mistake(
            f"weights must have the shape (batch, heads, places, tokens) = {shape}; got {getattr(got, 'shape', got)}."
        )
    if (far := float((got.sum(-1) - 1).abs().max())) > CLOSE * 10:
        raise Mistake(
            f"the weights of a place must add up to 1 over the tokens; off by {far:.3f}: softmax over the last axis."
        )
    far = off(got @ v, wanted, "weights @ v")
    if far > CLOSE * float(wanted.abs().max()) * 10:
        sharp = (q @ k.transpose(-1, -2)).softmax(-1)
        hint = "divide by √d, the width of one head"
        if off(got, sharp, "weights") > 1e-4:
            hint = "it is softmax(q kᵀ / √d)"
        raise Mistake(f"weights @ v must be what the kernel gives; off by {far:.4f}; {hint}.")


def check_map(answer: ModuleType) -> None:
    """A map of known places, and one of the model."""
    weights = torch.zeros(1, 2, 6 * 6, 5)
    weights[0, :, 6 * 1 + 4, 3] = torch.tensor([0.2, 0.6])  # row 1, column 4
    wanted = torch.zeros(1, 6, 6)
    wanted[0, 1, 4] = 0.4
    got = answer.word_map(weights, 3, 6)
    if off(got, wanted, "the map") > CLOSE:
        hint = "take the mean over heads, then the token, then rows and columns"
        if off(got, wanted.transpose(1, 2), "the map") < CLOSE:
            hint = "rows and columns are swapped: places are counted row by row"
        elif off(got, 2 * wanted, "the map") < CLOSE:
            hint = "heads are averaged, not added"
        raise Mistake(
            f"the map must be 0.4 in row 1, column 4 and 0 elsewhere; largest is {float(got.max()):.2f}; {hint}."
        )
    q, k, _, _ = attended()
    real = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
    total = sum(answer.word_map(real, token, 16) for token in range(real.shape[-1]))
    if off(total, torch.ones(2, 16, 16), "the map of a batch of two") > 1e-4:
        raise Mistake(
            "the maps of all tokens must add up to 1 at every place; they do not: keep the weights as they are."
        )


def check_modulated(answer: ModuleType) -> None:
    """Against the DiT's own."""
    draw = torch.Generator().manual_seed(2)
    x, shift, scale = 3 * torch.randn(2, 5, 8, generator=draw) + 1, *torch.randn(2, 2, 8, generator=draw)
    wanted = modulate(x, shift[:, None], scale[:, None], 1e-6)
    got = answer.modulated(x, shift, scale, 1e-6)
    far = off(got, wanted, "modulated")
    if far > 1e-4:
        normed = modulate(x, 0 * shift[:, None], 0 * scale[:, None], 1e-6)
        hint = "norm over the last axis, times 1 + scale, plus shift"
        if off(got, normed * scale[:, None] + shift[:, None], "modulated") < 1e-4:
            hint = "this is what you get with scale in the place of 1 + scale: a new network would be silent"
        elif off(got, x * (1 + scale[:, None]) + shift[:, None], "modulated") < 1e-4:
            hint = "the norm is missing"
        raise Mistake(f"modulated must be the DiT's to 1e-4; off by {far:.3f}; {hint}.")


def check_tokens(answer: ModuleType) -> None:
    """Counted in a DiT."""
    for height, width, patch in ((128, 128, 2), (128, 256, 2), (512, 512, 4), (96, 64, 1)):
        config = DiTConfig(
            num_attention_heads=1, attention_head_dim=8, num_layers=1, patch_size=patch, num_embeds_ada_norm=2
        )
        dit = DiT(config)
        wanted = dit.pos_embed(torch.zeros(1, 4, height // 8, width // 8)).shape[1]
        if (got := answer.num_tokens(height, width, 8, patch)) != wanted:
            hint = (
                "count latents, not pixels: divide by the factor of the VAE"
                if got == wanted * 64
                else ("a patch is `patch` latents a side, so it takes patch² of them")
            )
            raise Mistake(f"{height}×{width} pixels at patch {patch} must be {wanted} tokens; got {got}; {hint}.")


CHECKS: list[Check] = [
    Check("attention weights", check_weights),
    Check("the map of a word", check_map),
    Check("adaLN", check_modulated),
    Check("tokens of a DiT", check_tokens),
]

"""The networks that the benchmarks compare: ours and diffusers' with one set of random weights, timed in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.models import dit, unet_config
from pellucid.models.unet import UNet
from pellucid.models.vae import AutoencoderKL, VAEConfig

SD15 = {"cross_attention_dim": 768, "attention_head_dim": 8, "sample_size": 64}
SDXL = {
    "sample_size": 128,
    "block_out_channels": [320, 640, 1280],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "attention_head_dim": [5, 10, 20],
    "transformer_layers_per_block": [1, 2, 10],
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
VAE = {
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
    "latent_channels": 4,
}
DIT = {
    "sample_size": 32,
    "num_layers": 28,
    "patch_size": 2,
    "attention_head_dim": 72,
    "num_attention_heads": 16,
    "in_channels": 4,
    "out_channels": 8,
    "attention_bias": True,
    "activation_fn": "gelu-approximate",
    "num_embeds_ada_norm": 1000,
    "norm_type": "ada_norm_zero",
    "norm_elementwise_affine": False,
}

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Duel:
    """One network twice: calls that do the same work on the same weights."""

    name: str
    ours: nn.Module
    theirs: nn.Module
    call_ours: Callable[[Any], Tensor]
    call_theirs: Callable[[Any], Tensor]


def twins(build_ours: Callable[[], nn.Module], build_theirs: Callable[[], nn.Module], like: Tensor) -> Any:
    """Both networks on one set of random weights, at a device and dtype."""
    with torch.device("meta"):
        ours, theirs = build_ours(), build_theirs()
    theirs = theirs.to(like.dtype).to_empty(device=like.device)
    with torch.no_grad():
        for weight in theirs.parameters():
            fan = max(weight[0].numel(), 1) if weight.ndim > 1 else 1
            weight.normal_(0, fan**-0.5 if weight.ndim > 1 else 0.02)
        for name, buffer in theirs.named_buffers():  # positions are computed, not drawn
            if "pos_embed" in name:
                fresh = build_theirs().get_buffer(name)
                buffer.copy_(fresh)
    ours.load_state_dict(theirs.state_dict(), assign=True, strict=True)
    return ours.eval().requires_grad_(False), theirs.eval().requires_grad_(False)


def unet_duel(name: str, raw: dict[str, Any], batch: int, side: int, like: Tensor) -> Duel:
    from diffusers import UNet2DConditionModel

    ours, theirs = twins(
        lambda: UNet(unet_config.read({"_class_name": "UNet2DConditionModel", **raw})),
        lambda: UNet2DConditionModel.from_config(raw),
        like,
    )
    x = torch.randn(batch, 4, side, side).to(like)
    time = torch.full((batch,), 501.0, device=like.device)
    context = torch.randn(batch, 77, raw["cross_attention_dim"]).to(like)
    more: dict[str, Tensor] = {}
    if "addition_embed_type" in raw:
        sizes = torch.tensor([[1024.0, 1024.0, 0.0, 0.0, 1024.0, 1024.0]], device=like.device).expand(batch, -1)
        more = {"pooled": torch.randn(batch, 1280).to(like), "sizes": sizes}
    added = {"text_embeds": more["pooled"], "time_ids": more["sizes"]} if more else None
    return Duel(
        name,
        ours,
        theirs,
        lambda net: net(x, time, context, **more),
        lambda net: net(x, time, context, added_cond_kwargs=added, return_dict=False)[0],
    )


def dit_duel(name: str, batch: int, like: Tensor) -> Duel:
    from diffusers import DiTTransformer2DModel

    raw = {"_class_name": "DiTTransformer2DModel", **DIT}
    ours, theirs = twins(lambda: dit.build(dit.read(raw)), lambda: DiTTransformer2DModel.from_config(DIT), like)
    x = torch.randn(batch, 4, 32, 32).to(like)
    time = torch.full((batch,), 501.0, device=like.device)
    labels = torch.arange(batch, device=like.device)
    return Duel(
        name,
        ours,
        theirs,
        lambda net: net(x, time, labels=labels),
        lambda net: net(x, time, labels, return_dict=False)[0],
    )


def vae_duel(name: str, batch: int, side: int, like: Tensor) -> Duel:
    from diffusers import AutoencoderKL as Theirs

    ours, theirs = twins(lambda: AutoencoderKL(VAEConfig(**tupled(VAE))), lambda: Theirs.from_config(VAE), like)
    latents = torch.randn(batch, 4, side, side).to(like)
    return Duel(
        name,
        ours,
        theirs,
        lambda net: net.decode(latents),
        lambda net: net.decode(latents, return_dict=False)[0],
    )


def tupled(raw: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}


@dataclass(frozen=True)
class Outcome:
    """Milliseconds of both, the ratio of medians, the spread of the ratio over the rounds, peaks in bytes."""

    name: str
    ours_ms: float
    theirs_ms: float
    ratio: float
    quartiles: tuple[float, float]
    difference: float
    ours_peak: int | None = None
    theirs_peak: int | None = None


def in_turns(name: str, ours: Call, theirs: Call, rounds: int, clock: Callable[[Call], float]) -> Outcome:
    """Interleaved runs, the order changing every round, so that neither has the warmer machine."""
    mine, other, ratios = [], [], []
    for i in range(rounds):
        pair = {}
        for who in ("ours", "theirs") if i % 2 else ("theirs", "ours"):
            pair[who] = clock(ours if who == "ours" else theirs)
        mine.append(pair["ours"])
        other.append(pair["theirs"])
        ratios.append(pair["ours"] / pair["theirs"])
    low, _, high = statistics.quantiles(ratios, n=4)
    a, b = ours().float(), theirs().float()
    gap = float((a - b).abs().max() / b.abs().max())
    median = statistics.median
    return Outcome(name, median(mine), median(other), median(mine) / median(other), (low, high), gap)


def table(outcomes: list[Outcome]) -> str:
    """A table in Markdown."""
    head = "| network | Pellucid ms | diffusers ms | ratio (quartiles) | peak MB, ours / theirs | output differs by |"
    lines = [head, "|---|---|---|---|---|---|"]
    for o in outcomes:
        peaks = "" if o.ours_peak is None else f"{o.ours_peak / 2**20:.0f} / {(o.theirs_peak or 0) / 2**20:.0f}"
        spread = f"{o.ratio:.3f} ({o.quartiles[0]:.3f}–{o.quartiles[1]:.3f})"
        lines.append(f"| {o.name} | {o.ours_ms:.2f} | {o.theirs_ms:.2f} | {spread} | {peaks} | {o.difference:.1e} |")
    return "\n".join(lines)

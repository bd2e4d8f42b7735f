"""From latents to images, and the result that says how they were made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from pellucid.models import tiles
from pellucid.models.vae import from_diffusion
from pellucid.pipeline import images
from pellucid.pipeline.model import RunSettings
from pellucid.pipeline.recipe import Recipe
from pellucid.pipeline.result import Result
from pellucid.pipeline.stages import Stages


@dataclass(frozen=True)
class Latents:
    """x at the end of a run, and what its decoding and its result need: no inputs of the denoiser are held."""

    x: Tensor
    settings: RunSettings
    stages: Stages
    recipes: Callable[[], list[Recipe]]
    notes: tuple[str, ...] = ()


@torch.no_grad()
def decode(latents: Latents) -> Result:
    """The images of a run, unless its request wants latents alone."""
    settings = latents.settings
    made = decode_images(latents) if settings.request.decode else []
    return Result(
        images=made,
        latents=latents.x,
        plan=settings.plan,
        recipes=latents.recipes(),
        stages=tuple(latents.stages.taken),
        receipt=settings.receipt,
        notes=latents.notes,
    )


def decode_images(latents: Latents) -> list[Image.Image]:
    x, plan, vae = latents.x, latents.settings.plan, latents.settings.components.vae
    policy = latents.settings.model.policy
    with latents.stages.run("decode", vae):
        if plan.dialect == "exact" and plan.end.alpha > 0:  # an end with noise left: x0 has alpha 1
            x = x / plan.end.alpha
        if vae is None:
            return images.to_images(x)
        images.check_finite("latents", x, "The network overflowed: run it in float32 or bfloat16.")
        scaled = from_diffusion(vae.config, x).to(next(vae.parameters()))
        if policy.vae_tile is not None:
            pixels = tiles.decode_tiled(vae, scaled, policy.vae_tile)
        elif policy.vae_slicing:
            pixels = tiles.decode_sliced(vae, scaled)
        else:
            pixels = vae.decode(scaled)
        return images.to_images(pixels.float())

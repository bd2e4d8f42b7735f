"""Training a VAE: images to latents and back, sharp at edges, with latents that a diffusion can start from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pellucid.core.errors import PellucidError, rule
from pellucid.interop import source
from pellucid.interop.save import save_component
from pellucid.models.vae import AutoencoderKL, Posterior, from_diffusion, to_diffusion
from pellucid.train.config import check_beginning
from pellucid.train.draws import Draws
from pellucid.train.initial import fresh
from pellucid.train.objective import BatchLoss
from pellucid.train.source import Batch

# --- A frozen VAE -----------------------------------------------------------------------------------------------------

DECODED_AT_ONCE = 16  # images: a decoder's activations are large


def read_vae(where: str) -> AutoencoderKL:
    """A frozen VAE in float32, from its folder, file or hub id."""
    vae = source.load_component(where, dtype=torch.float32)
    if not isinstance(vae, AutoencoderKL):
        raise PellucidError(rule("vae", "an AutoencoderKL", type(vae).__name__), "component-kind")
    return vae.eval().requires_grad_(False)


def posterior_of(vae: nn.Module, images: Tensor, *, bf16: bool) -> Posterior:
    """The Gaussians, in float32, that a VAE makes of images (B, 3, H, W) in [−1, 1]."""
    weight = next(vae.parameters())
    with torch.autocast(weight.device.type, torch.bfloat16, enabled=bf16):
        mean, logvar = vae.encode(images.to(weight))  # type: ignore[operator]
    return Posterior(mean.float(), None if logvar is None else logvar.float())


def drawn_latents(vae: AutoencoderKL, images: Tensor, draws: Draws) -> Tensor:
    """Latents (B, C, h, w) of images as the diffusion sees them; a GPU encodes in bfloat16."""
    posterior = posterior_of(vae, images, bf16=next(vae.parameters()).is_cuda)
    noise = draws.normal("posterior", posterior.mean.shape[1:], images.device)
    return to_diffusion(vae.config, posterior.sample(noise))


@torch.no_grad()
def decoded(vae: AutoencoderKL, x0: Tensor) -> Tensor:
    """Images (B, 3, H, W) in about [−1, 1] of latents as the diffusion sees them, a few at a time."""
    return torch.cat([vae.decode(part) for part in from_diffusion(vae.config, x0).split(DECODED_AT_ONCE)])


# --- A VAE in training ------------------------------------------------------------------------------------------------

WINDOW = 200  # steps over which the spread of the latents is measured
_LEAST_STD = 1e-6  # a channel that carries nothing is not blown up


@dataclass(frozen=True)
class AutoencoderConfig:
    """`network` is diffusers' config of an AutoencoderKL; or `start` is the folder of one that is trained further. The
    loss is the mean distance of pixels, plus `edges` times that of their differences to neighbours at `scales` sizes,
    each half of the one before, plus `squares` times the mean square distance, which minds the worst pixels most, plus
    `kl` times the mean divergence of a latent from a standard normal."""

    network: Mapping[str, Any] = field(default_factory=dict)
    start: str = ""
    edges: float = 1.0
    scales: int = 3
    squares: float = 0.0
    kl: float = 1e-4

    def __post_init__(self) -> None:
        check_beginning(self.network, self.start)
        if min(self.edges, self.squares, self.kl) < 0:
            got = (self.edges, self.squares, self.kl)
            raise PellucidError(rule("edges, squares, kl", "0 or more", got), "config-value")
        if not 1 <= self.scales <= 6:
            raise PellucidError(rule("scales", "from 1 to 6", self.scales), "config-value")

    def build(self, seed: int, device: torch.device) -> AutoencoderTask:
        return AutoencoderTask(self, seed, device)


class Reconstruction(NamedTuple):
    images: Tensor  # (B, 3, H, W) in about −1 … 1
    mean: Tensor  # (B, C, h, w), of the latents
    logvar: Tensor  # (B, C, h, w)


class Autoencoder(nn.Module):
    """A VAE in training. Beside it, the mean and the mean square of every latent channel over about the last 200 steps:
    what is needed to scale the latents once it is trained."""

    def __init__(self, vae: AutoencoderKL) -> None:
        super().__init__()
        self.vae = vae
        channels = vae.config.latent_channels
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("latent_mean", torch.zeros(channels))
        self.register_buffer("latent_square", torch.zeros(channels))

    def forward(self, images: Tensor, noise: Tensor) -> Reconstruction:
        """Images (B, 3, H, W) through latents that `noise` (B, C, h, w) draws from their Gaussian."""
        posterior = self.vae.encode(images)
        assert posterior.logvar is not None
        latents = posterior.sample(noise)
        if self.training:
            self.watch(latents.detach().float())
        return Reconstruction(self.vae.decode(latents), posterior.mean, posterior.logvar)

    @torch.no_grad()
    def watch(self, latents: Tensor) -> None:
        self.steps += 1
        share = 1.0 / self.steps.clamp(max=WINDOW)
        self.latent_mean.lerp_(latents.mean((0, 2, 3)), share)
        self.latent_square.lerp_(latents.square().mean((0, 2, 3)), share)

    def spread(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation (C,) of the latents."""
        return self.latent_mean, (self.latent_square - self.latent_mean.square()).clamp(min=_LEAST_STD**2).sqrt()


class AutoencoderTask:
    """Encode, draw, decode, compare. Nothing judges the images but the pixels themselves."""

    def __init__(self, config: AutoencoderConfig, seed: int, device: torch.device) -> None:
        self.config, self.device = config, device
        vae = _begun(config, seed)
        self.network: nn.Module = Autoencoder(vae).to(device)
        self.channels, self.factor = vae.config.latent_channels, vae.config.factor
        self.shown: Tensor | None = None

    def prepare(self, batch: Batch, draws: Draws) -> dict[str, Tensor]:
        images = batch.images
        height, width = images.shape[2:]
        if images.shape[1] != 3 or height % self.factor or width % self.factor:
            must = f"images with sides that are multiples of {self.factor}"
            raise PellucidError(rule("data", must, tuple(images.shape[1:])), "data-shape")
        if self.shown is None:
            self.shown = images
        shape = (self.channels, height // self.factor, width // self.factor)
        return {"images": images, "noise": draws.normal("posterior", shape, images.device)}

    def loss(self, network: nn.Module, asked: Mapping[str, Tensor]) -> BatchLoss:
        """The errors are mean squares of pixels in 0 … 1: a PSNR in dB is −10·log10 of one."""
        images, c = asked["images"], self.config
        made = network(images, asked["noise"])
        out = made.images.float()
        loss = (out - images).abs().mean() + c.kl * divergence(made.mean.float(), made.logvar.float())
        if c.edges:
            loss = loss + c.edges * edge_distance(out, images, c.scales)
        if c.squares:
            loss = loss + c.squares * (out - images).square().mean()
        errors = (out.detach() - images).square().flatten(1).mean(1) / 4
        return BatchLoss(loss, errors, torch.zeros_like(errors))

    @torch.no_grad()
    def images(self, network: nn.Module, count: int, seed: int) -> Tensor | None:
        """Images, and below them what came back of them: as many rows of each as fit into `count`."""
        if self.shown is None:
            return None
        originals = self.shown[: max(1, count // 2)]
        shape = (self.channels, originals.shape[2] // self.factor, originals.shape[3] // self.factor)
        made = network(originals, torch.zeros(len(originals), *shape, device=originals.device)).images
        return torch.cat([originals, made.float()]).add(1).div(2).clamp(0, 1)

    def save(self, network: nn.Module, folder: Path) -> None:
        """The folder of an AutoencoderKL whose latents are scaled for diffusion."""
        assert isinstance(network, Autoencoder)
        save_component(normalised(network), folder, overwrite=True)


def _begun(config: AutoencoderConfig, seed: int) -> AutoencoderKL:
    """The VAE as the first step finds it."""
    if config.start:
        return read_vae(config.start).requires_grad_(True)
    vae = fresh({"_class_name": "AutoencoderKL", **config.network}, seed)
    if not isinstance(vae, AutoencoderKL):
        raise PellucidError(rule("network", "an AutoencoderKL", type(vae).__name__), "class")
    return vae


def divergence(mean: Tensor, logvar: Tensor) -> Tensor:
    """KL of the latents' Gaussians from the standard normal, the mean of all latents (Kingma and Welling 2014, B)."""
    return 0.5 * (mean.square() + logvar.exp() - 1.0 - logvar).mean()


def edge_distance(made: Tensor, images: Tensor, scales: int) -> Tensor:
    """The mean distance of differences between neighbours, down and across, over several sizes of the images."""
    wrong = made - images  # all of it is linear in the images
    total = wrong.new_zeros(())
    for scale in range(scales):
        wrong = wrong if scale == 0 else F.avg_pool2d(wrong, 2)
        down, across = wrong.diff(dim=2), wrong.diff(dim=3)
        total = total + (down.abs().mean() + across.abs().mean()) / 2
    return total / scales


@torch.no_grad()
def normalised(network: Autoencoder) -> AutoencoderKL:
    """The VAE with latents of mean 0 and deviation 1 in every channel, and the same images.

    Shift and scale go into the 1×1 convolutions on both sides of the latents, so that any pipeline may use it with a
    scaling_factor of 1. A VAE without these gets a scaling_factor of 1 / deviation, the same for all channels.
    """
    old = network.vae
    vae = AutoencoderKL(old.config)
    vae.load_state_dict(old.state_dict())
    vae.to(network.latent_mean.device)
    if not int(network.steps):
        return vae
    mean, std = network.spread()
    into, out = vae.quant_conv, vae.post_quant_conv
    if into is None or out is None:
        vae.config = replace(old.config, scaling_factor=float(1 / network.latent_square.mean().sqrt()))
        return vae
    assert into.bias is not None
    assert out.bias is not None
    channels = len(mean)
    into.weight[:channels] /= std[:, None, None, None]
    into.bias[:channels] = (into.bias[:channels] - mean) / std
    into.bias[channels:] -= 2 * std.log()
    out.bias += out.weight[:, :, 0, 0] @ mean
    out.weight *= std[None, :, None, None]
    vae.config = replace(old.config, scaling_factor=1.0)
    return vae

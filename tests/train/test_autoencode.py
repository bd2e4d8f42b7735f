"""The VAE task: its loss against plain formulas, that it learns, and latents that are scaled when it is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from scene_cases import CPU, asked, batch, built, loss, train
from tiny_networks import VAE
from torch.distributions import Normal, kl_divergence

from pellucid.core.errors import PellucidError
from pellucid.interop.source import load_component
from pellucid.models.vae import to_diffusion
from pellucid.train.autoencoder import (
    WINDOW,
    Autoencoder,
    AutoencoderConfig,
    AutoencoderTask,
    divergence,
    edge_distance,
    normalised,
)
from pellucid.train.draws import Draws
from pellucid.train.initial import fresh
from pellucid.train.source import Batch


def task_of(**changes: Any) -> AutoencoderTask:
    task: AutoencoderTask = built(AutoencoderConfig, {"network": VAE, **changes})
    return task


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# The loss


def test_divergence_is_that_of_gaussians() -> None:
    mean, logvar = drawn(2, 4, 3, 3), drawn(2, 4, 3, 3, seed=1)
    want = kl_divergence(Normal(mean, (0.5 * logvar).exp()), Normal(0.0, 1.0)).mean()
    assert torch.allclose(divergence(mean, logvar), want, rtol=1e-6)


def test_edges_are_differences_of_neighbours_at_every_size() -> None:
    made, images = drawn(2, 3, 8, 8), drawn(2, 3, 8, 8, seed=1)
    want = 0.0
    for scale in (1, 2):
        a, b = (x.unfold(2, scale, scale).unfold(3, scale, scale).mean((-1, -2)) for x in (made, images))
        down = ((a[:, :, 1:] - a[:, :, :-1]) - (b[:, :, 1:] - b[:, :, :-1])).abs().mean()
        across = ((a[..., 1:] - a[..., :-1]) - (b[..., 1:] - b[..., :-1])).abs().mean()
        want += (down + across) / 2 / 2
    assert torch.allclose(edge_distance(made, images, 2), want, rtol=1e-5)
    assert edge_distance(images + 0.25, images, 2) < 1e-7  # a shift of all pixels has no edges


def test_the_loss_is_its_three_parts_and_the_errors_are_a_psnr() -> None:
    full, pixels = task_of(edges=0.5, kl=0.01, scales=2), task_of(edges=0.0, kl=0.0)
    question = asked(full, 4)
    made = full.network.eval()(**question)
    graded, plain = full.loss(full.network, question), pixels.loss(pixels.network.eval(), question)
    want = (made.images - question["images"]).abs().mean()
    assert torch.allclose(plain.loss, want)
    more = 0.5 * edge_distance(made.images, question["images"], 2) + 0.01 * divergence(made.mean, made.logvar)
    assert torch.allclose(graded.loss, want + more)
    psnr = -10 * (((made.images - question["images"]) / 2).square().mean((1, 2, 3))).log10()
    assert torch.allclose(-10 * graded.errors.log10(), psnr, atol=1e-4)
    assert not graded.lam.any()


def test_the_posterior_is_drawn_by_step_and_part() -> None:
    task, given = task_of(), batch(4)
    whole = task.prepare(given, Draws(1, 2, 4))["noise"]
    half = Batch(given.images[2:])
    assert torch.equal(task.prepare(half, Draws(1, 2, 4, 1, 2))["noise"], whole[2:])
    assert whole.shape == (4, 4, 8, 8)


# The scale of the latents


def watched(network: Autoencoder, images: torch.Tensor, noise: torch.Tensor) -> None:
    network.train()
    with torch.no_grad():
        network(images, noise)


def test_saved_latents_have_mean_0_and_deviation_1_and_the_images_are_the_same() -> None:
    network = Autoencoder(fresh(VAE, 0))
    images, noise = batch(16).images, drawn(16, 4, 8, 8)
    watched(network, images, noise)
    network.eval()
    made = normalised(network)
    with torch.no_grad():
        posterior, want = made.encode(images), network(images, noise)
        latents = to_diffusion(made.config, posterior.sample(noise))
        assert torch.allclose(latents.mean((0, 2, 3)), torch.zeros(4), atol=1e-4)
        assert torch.allclose(latents.std((0, 2, 3), correction=0), torch.ones(4), atol=1e-4)
        assert torch.allclose(made.decode(posterior.sample(noise)), want.images, atol=1e-5)
    assert made.config.scaling_factor == 1.0


def test_without_convolutions_beside_the_latents_the_factor_is_written() -> None:
    network = Autoencoder(fresh({**VAE, "use_quant_conv": False, "use_post_quant_conv": False}, 0))
    images, noise = batch(16).images, drawn(16, 4, 8, 8)
    watched(network, images, noise)
    made = normalised(network)
    with torch.no_grad():
        latents = to_diffusion(made.config, made.encode(images).sample(noise))
    assert torch.allclose(latents.square().mean(), torch.tensor(1.0), rtol=1e-5)


def test_the_spread_is_a_mean_of_the_last_steps() -> None:
    network = Autoencoder(fresh(VAE, 0))
    for step in range(1, 4):
        network.watch(torch.full((2, 4, 1, 1), float(step)) * torch.tensor([1.0, -1.0]).view(2, 1, 1, 1))
    mean, std = network.spread()
    assert torch.allclose(mean, torch.zeros(4), atol=1e-6)
    assert torch.allclose(std, torch.full((4,), ((1 + 4 + 9) / 3) ** 0.5))
    network.steps.fill_(10 * WINDOW)
    network.watch(torch.zeros(1, 4, 1, 1))
    assert torch.allclose(network.spread()[1] ** 2, torch.full((4,), 14 / 3 * (1 - 1 / WINDOW)))


# A run

OFTEN = {"every": 1, "checkpoint_every": 1, "tensorboard": False}


class Stopping:
    """A task whose third step is interrupted."""

    def __init__(self, task: AutoencoderTask) -> None:
        self.network, self.prepare, self.task, self.left = task.network, task.prepare, task, 2

    def loss(self, network: Any, question: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return self.task.loss(network, question)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[AutoencoderTask, float, Path]:
    task, folder = task_of(), tmp_path_factory.mktemp("vae") / "out"
    before = loss(task)
    train(task, folder, steps=40, rate=4e-3)
    return task, before, folder / "model"


def test_it_learns_and_comes_back_from_its_folder(run: tuple[AutoencoderTask, float, Path]) -> None:
    task, before, folder = run
    assert loss(task) < 0.6 * before
    images = batch(8, first=500).images
    found = load_component(folder, device=CPU)
    with torch.no_grad():
        want = task.network(images, torch.zeros(8, 4, 8, 8)).images
        assert torch.allclose(found(images), want, atol=1e-4)
        latents = to_diffusion(found.config, found.encode(images).mean)
    assert 0.5 < latents.std() < 2  # measured while the weights still moved
    theirs = diffusers.AutoencoderKL.from_pretrained(str(folder))
    with torch.no_grad():
        assert torch.allclose(theirs(images).sample, want, atol=1e-4)
    assert theirs.config.scaling_factor == 1.0


def test_a_run_that_stopped_goes_on_with_the_same_weights_and_spread(tmp_path: Path) -> None:
    whole = train(task_of(), tmp_path / "whole", steps=4).network.state_dict()
    with pytest.raises(KeyboardInterrupt):
        train(Stopping(task_of()), tmp_path / "parts", steps=4, log=OFTEN)
    parts = train(task_of(), tmp_path / "parts", steps=4, log=OFTEN).network.state_dict()
    assert int(parts["steps"]) == 4
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_images_are_originals_and_what_came_back(run: tuple[AutoencoderTask, float, Path]) -> None:
    task, _, _ = run
    shown = task.images(task.network.eval(), 8, 0)
    assert shown is not None
    assert shown.shape == (8, 3, 16, 16)
    assert 0 <= shown.min() <= shown.max() <= 1
    assert torch.allclose(shown[:4], (task.shown[:4] + 1) / 2)
    assert (shown[4:] - shown[:4]).square().mean() < (shown[:4] - 0.5).square().mean()
    assert task_of().images(task.network, 8, 0) is None  # before the first batch there is nothing to show


@pytest.mark.parametrize(
    ("table", "code"),
    [
        ({"network": {**VAE, "_class_name": "UNet2DModel"}}, None),
        ({"network": {**VAE, "norm_num_groups": 5}}, "config-groups"),
        ({"network": VAE, "kl": -1.0}, "config-value"),
        ({"network": VAE, "scales": 0}, "config-value"),
        ({"network": VAE, "lpips": 1.0}, "config-key"),
        ({"network": VAE, "squares": -1.0}, "config-value"),
        ({"network": VAE, "start": "runs/vae/model"}, "config-value"),
        ({}, "config-value"),
    ],
)
def test_bad_configs_are_one_line(table: dict[str, Any], code: str | None) -> None:
    with pytest.raises(PellucidError) as caught:
        built(AutoencoderConfig, table)
    assert code is None or caught.value.code == code
    assert "\n" not in str(caught.value)


def test_squares_are_added_to_the_loss() -> None:
    plain, squared = task_of(), task_of(squares=10.0)
    told = asked(plain, 4)
    graded, more = (task.loss(task.network, told) for task in (plain, squared))
    assert torch.allclose(more.loss - graded.loss, 10 * 4 * graded.errors.mean(), rtol=1e-4)


def test_a_saved_vae_is_trained_further(tmp_path: Path) -> None:
    task = task_of()
    task.save(task.network, tmp_path / "model")
    further = built(AutoencoderConfig, {"start": str(tmp_path / "model")})
    images = drawn(2, 3, 16, 16)
    assert torch.equal(further.network.vae.encode(images).mean, task.network.vae.encode(images).mean)
    assert all(p.requires_grad for p in further.network.vae.parameters())


def test_images_that_do_not_divide_are_named() -> None:
    with pytest.raises(PellucidError, match="multiples of 2"):
        task_of().prepare(Batch(torch.zeros(2, 3, 15, 16)), Draws(0, 0, 2))

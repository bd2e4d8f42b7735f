"""A DiT in training, told a class: on pixels, and on the latents of a VAE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from small_runs import SIDE, images, log_of, trainer
from test_latents import small_vae

import pellucid
from pellucid import PellucidError
from pellucid.interop.save import save_component
from pellucid.train.cifar10 import CIFAR10Source
from pellucid.train.draws import Draws

CLASSES = 4
DIT: dict[str, Any] = {
    "_class_name": "DiTTransformer2DModel", "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 3,
    "num_layers": 2, "sample_size": SIDE, "num_embeds_ada_norm": CLASSES,
}  # fmt: skip


def told(**network: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Changes of a small run: a DiT in the place of its UNet."""
    return {"task": {"network": {}}}, {"task": {"network": {**DIT, **network}, "condition": "labels"}, "ema": [16.0]}


def run(folder: Path, *changes: dict[str, Any], source: Any = None) -> Any:
    return trainer(folder, *changes, source=source or CIFAR10Source(images(classes=CLASSES)))


def question() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, SIDE, SIDE, generator=dice), torch.tensor([70.0, 3.0]), torch.tensor([1, CLASSES])


def test_pixels_are_learnt_and_the_model_that_comes_out_is_loaded(tmp_path: Path) -> None:
    """The error falls, and what is loaded predicts what the running mean does, for a class and for none."""
    made = run(tmp_path / "run", *told(), {"steps": 60, "log": {"every": 20, "checkpoint_every": 20}})
    made.run()
    losses = [row["loss"] for row in log_of(tmp_path / "run")]
    assert losses[-1] < 0.7 * losses[0]
    pipe = pellucid.load(tmp_path / "run" / "model", device="cpu")
    x, time, labels = question()
    with torch.no_grad(), made.ema.inside(16.0):
        mine = made.network.eval()(x, time, labels=labels)
        torch.testing.assert_close(pipe.components.network(x, time, labels=labels), mine, rtol=0, atol=1e-6)
    image = pipe(label=2, steps=3, seed=1).images[0]
    assert image.size == (SIDE, SIDE)


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run on the latents of a VAE, from images, to its end."""
    folder = tmp_path_factory.mktemp("latent")
    vae = small_vae()
    save_component(vae, folder / "vae")
    side = SIDE // vae.config.factor
    network = told(in_channels=vae.config.latent_channels, sample_size=side, patch_size=1)
    made = run(folder / "run", *network, {"task": {"vae": str(folder / "vae")}, "log": {"pictures_every": 6}})
    made.run()
    return folder, made


def test_latents_of_images_or_of_a_cache_are_what_is_noised(latent: tuple[Path, Any]) -> None:
    """Pictures are encoded, latents are taken as they are; others are refused."""
    _, made = latent
    task, draws = made.task, Draws(0, 0, 2)
    images = torch.rand(2, *task.pixels) * 2 - 1
    assert task.diffused(images, draws).shape[1:] == task.shape != task.pixels
    kept = torch.randn(2, *task.shape)
    assert task.diffused(kept, draws) is kept
    with pytest.raises(PellucidError, match=r"images of the data must be of shape .*, or latents of") as error:
        task.diffused(images[..., :2], draws)
    assert error.value.code == "data-shape"
    assert task.clip is None
    assert [type(one).__name__ for one in task.frozen] == ["AutoencoderKL"]


def test_diffusers_opens_what_comes_out_and_predicts_the_same(latent: tuple[Path, Any]) -> None:
    folder, made = latent
    model = folder / "run" / "model"
    theirs = diffusers.DiTPipeline.from_pretrained(model)
    mine = pellucid.load(model, device="cpu").components
    x, labels = torch.randn(2, *made.task.shape), torch.tensor([0, CLASSES])
    with torch.no_grad():
        expected = theirs.transformer(x, timestep=torch.tensor([50, 50]), class_labels=labels).sample
        torch.testing.assert_close(mine.network(x, torch.full((2,), 50.0), labels=labels), expected, rtol=0, atol=1e-5)
    assert theirs.scheduler.config.clip_sample is False
    assert list((folder / "run" / "pictures").iterdir())  # decoded, on the way


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"condition": "none"}, "condition", "condition must be labels for a DiT"),
        ({"network": {"out_channels": 6}}, "components-fit", "network.out_channels must be in_channels, 3; got 6"),
    ],
)
def test_parts_that_do_not_fit_are_one_line(changes: dict[str, Any], code: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(PellucidError) as error:
        run(tmp_path / "run", *told(), {"task": changes})
    assert (error.value.code, words in str(error.value)) == (code, True), str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_vae_must_fit_and_is_for_transformers(tmp_path: Path) -> None:
    save_component(small_vae(), tmp_path / "vae")
    vae = {"task": {"vae": str(tmp_path / "vae")}}
    with pytest.raises(PellucidError, match=r"vae must be left out for a UNet; got .*text_denoiser"):
        trainer(tmp_path / "run", vae)
    with pytest.raises(
        PellucidError, match=r"network\.in_channels must be .*, the channels of its VAE's latents; got 3"
    ):
        run(tmp_path / "run", *told(), vae)


def test_a_class_that_the_network_does_not_have_is_one_line(tmp_path: Path) -> None:
    made = run(tmp_path / "run", *told(num_embeds_ada_norm=2))
    with pytest.raises(PellucidError, match="num_embeds_ada_norm must be above the largest label"):
        made.run()
    assert not (tmp_path / "run").exists()

"""Whole pipelines against diffusers' on the same tiny random weights and the same seed: latents and pixels to 1e-4."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import tiny_models as tiny
import torch
from PIL import Image

from pellucid.pipeline.adapters import Control
from pellucid.pipeline.load import load
from pellucid.pipeline.pipeline import Pipeline, Result

CLOSE = 1e-4
BETAS = tiny.LATENT_BETAS
SCHEDULERS: dict[str, Callable[[], Any]] = {
    "ddim": lambda: diffusers.DDIMScheduler(**BETAS, clip_sample=False, set_alpha_to_one=False, steps_offset=1),
    "euler": lambda: diffusers.EulerDiscreteScheduler(**BETAS, steps_offset=1),
    "euler_a": lambda: diffusers.EulerAncestralDiscreteScheduler(**BETAS, steps_offset=1),
    "dpmpp_2m_karras": lambda: diffusers.DPMSolverMultistepScheduler(**BETAS, use_karras_sigmas=True),
    "unipc": lambda: diffusers.UniPCMultistepScheduler(**BETAS),
}
WORDS = {"prompt": "abc bca", "negative_prompt": "cab"}
SIZE = {"height": 32, "width": 48}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    torch.set_num_threads(1)
    diffusers.utils.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the peers' own
        yield


class Model:
    """diffusers' pipeline and ours over one folder; both take any of the schedulers."""

    def __init__(self, folder: Path, peer: Any) -> None:
        self.folder, self.peer = folder, peer
        peer.set_progress_bar_config(disable=True)
        peer.save_pretrained(folder)
        self.mine = load(folder)

    def with_scheduler(self, name: str) -> tuple[Any, Pipeline]:
        self.peer.scheduler = SCHEDULERS[name]()
        config = {**self.peer.scheduler.config, "_class_name": type(self.peer.scheduler).__name__}
        self.mine.components.scheduler = dict(config)
        return self.peer, self.mine

    def as_class(self, name: str, **more: Any) -> Any:
        kind = getattr(diffusers, name)
        made = kind(**{**self.peer.components, **more}, **extra_arguments(name))
        made.set_progress_bar_config(disable=True)
        return made


def extra_arguments(name: str) -> dict[str, Any]:
    return {"add_watermarker": False} if "XL" in name else {"requires_safety_checker": False}


@pytest.fixture(scope="module")
def sd(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("sd")
    return Model(folder / "model", tiny.stable_diffusion(folder))


@pytest.fixture(scope="module")
def xl(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("xl")
    return Model(folder / "model", tiny.stable_diffusion_xl(folder))


def picture(seed: int = 0, size: tuple[int, int] = (48, 32)) -> Image.Image:
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 255, (6, 8, 3), dtype=np.uint8))
    return coarse.resize(size, Image.Resampling.BICUBIC)


def half_mask(size: tuple[int, int] = (48, 32)) -> Image.Image:
    mask = np.zeros((size[1], size[0]), dtype=np.uint8)
    mask[:, size[0] // 2 :] = 255
    return Image.fromarray(mask)


def theirs(peer: Any, seed: int = 3, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents and pixels of diffusers' pipeline, one generator an image."""
    out = []
    for kind in ("latent", "pt"):
        count = given.get("num_images_per_prompt", 1) * (
            len(given["prompt"]) if isinstance(given.get("prompt"), list) else 1
        )
        generators = [torch.Generator().manual_seed(seed + i) for i in range(count)]
        out.append(peer(**given, generator=generators, output_type=kind, return_dict=False)[0])
    return out[0], out[1]


def compare(mine: Result, peer: tuple[torch.Tensor, torch.Tensor]) -> None:
    latents, pixels = peer
    assert float((mine.latents - latents).abs().max() / latents.abs().max()) < CLOSE
    ours = np.stack([np.asarray(image) for image in mine.images])
    other = (pixels.permute(0, 2, 3, 1).numpy() * 255).round()
    assert np.abs(ours.astype(int) - other).max() <= 1  # a rounding at a half


@pytest.mark.parametrize("rescale", [0.0, 0.7])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("name", ["sd", "xl"])
def test_text_to_image(name: str, scheduler: str, rescale: float, request: pytest.FixtureRequest) -> None:
    peer, mine = request.getfixturevalue(name).with_scheduler(scheduler)
    guidance = f"5 + rescale phi={rescale}" if rescale else 5.0
    made = mine(**WORDS, **SIZE, steps=6, guidance=guidance, seed=3)
    compare(made, theirs(peer, **WORDS, **SIZE, num_inference_steps=6, guidance_scale=5.0, guidance_rescale=rescale))


def test_a_batch_of_prompts_with_seeds(sd: Model) -> None:
    peer, mine = sd.with_scheduler("euler_a")
    words = {"prompt": ["abc", "bca bca"], "negative_prompt": ["c", "b"]}
    made = mine(**words, **SIZE, n=2, steps=4, guidance=4.0, seed=9)
    compare(
        made,
        theirs(peer, 9, **words, **SIZE, num_images_per_prompt=2, num_inference_steps=4, guidance_scale=4.0),
    )
    assert [r.seed for r in made.recipes] == [9, 10, 11, 12]
    assert [r.prompt for r in made.recipes] == ["abc", "abc", "bca bca", "bca bca"]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("strength", [0.5, 0.85])
def test_image_to_image(sd: Model, scheduler: str, strength: float) -> None:
    _, mine = sd.with_scheduler(scheduler)
    peer = sd.as_class("StableDiffusionImg2ImgPipeline")
    made = mine(**WORDS, image=picture(), strength=strength, steps=6, guidance=5.0, seed=3)
    compare(
        made,
        theirs(peer, **WORDS, image=picture(), strength=strength, num_inference_steps=6, guidance_scale=5.0),
    )


@pytest.mark.parametrize("rescale", [0.0, 0.7])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_image_to_image_xl(xl: Model, scheduler: str, rescale: float) -> None:
    _, mine = xl.with_scheduler(scheduler)
    peer = xl.as_class("StableDiffusionXLImg2ImgPipeline", image_encoder=None, feature_extractor=None)
    guidance = f"5 + rescale phi={rescale}" if rescale else 5.0
    made = mine(**WORDS, image=picture(), strength=0.6, steps=6, guidance=guidance, seed=3)
    given = {"image": picture(), "strength": 0.6, "num_inference_steps": 6, "guidance_scale": 5.0}
    compare(made, theirs(peer, **WORDS, **given, guidance_rescale=rescale))


@pytest.mark.parametrize("strength", [1.0, 0.7])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_inpainting_by_blending(sd: Model, scheduler: str, strength: float) -> None:
    _, mine = sd.with_scheduler(scheduler)
    peer = sd.as_class("StableDiffusionInpaintPipeline")
    given = {"image": picture(), "strength": strength}
    made = mine(**WORDS, **given, mask=half_mask(), steps=6, guidance=5.0, seed=3)
    more = {"mask_image": half_mask(), "num_inference_steps": 6, "guidance_scale": 5.0, **SIZE}
    compare(made, theirs(peer, **WORDS, **given, **more))


@pytest.fixture(scope="module")
def painter(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("painter")
    unet = {**tiny.SD1_UNET, "in_channels": 9}
    return Model(folder / "model", tiny.stable_diffusion(folder, unet=unet))


@pytest.mark.parametrize("strength", [1.0, 0.7])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_inpainting_with_nine_channels(painter: Model, scheduler: str, strength: float) -> None:
    _, mine = painter.with_scheduler(scheduler)
    peer = painter.as_class("StableDiffusionInpaintPipeline")
    given = {"image": picture(), "strength": strength}
    made = mine(**WORDS, **given, mask=half_mask(), steps=6, guidance=5.0, seed=3)
    more = {"mask_image": half_mask(), "num_inference_steps": 6, "guidance_scale": 5.0, **SIZE}
    compare(made, theirs(peer, **WORDS, **given, **more))


@pytest.fixture(scope="module")
def control(sd: Model, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("control")
    net = diffusers.ControlNetModel.from_unet(sd.peer.unet, conditioning_embedding_out_channels=(8, 16))
    tiny.randomised(net).save_pretrained(folder)
    return net, folder


@pytest.mark.parametrize("span", [(0.0, 1.0), (0.2, 0.7)])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_controlnet(sd: Model, control: tuple[Any, Path], scheduler: str, span: tuple[float, float]) -> None:
    _, mine = sd.with_scheduler(scheduler)
    net, folder = control
    peer = sd.as_class("StableDiffusionControlNetPipeline", controlnet=net)
    small = picture(5)
    made = mine(**WORDS, **SIZE, controls=[Control(folder, small, 0.8, *span)], steps=6, guidance=5.0, seed=3)
    more = {"control_guidance_start": span[0], "control_guidance_end": span[1], "controlnet_conditioning_scale": 0.8}
    given = {"image": small, "num_inference_steps": 6, "guidance_scale": 5.0, **SIZE}
    compare(made, theirs(peer, **WORDS, **given, **more))


def test_two_controlnets(sd: Model, control: tuple[Any, Path]) -> None:
    _, mine = sd.with_scheduler("euler")
    net, folder = control
    peer = sd.as_class("StableDiffusionControlNetPipeline", controlnet=[net, net])
    shown = [picture(5), picture(6)]
    controls = [Control(folder, shown[0], 0.8, 0.0, 0.5), Control(folder, shown[1], 0.3, 0.4, 1.0)]
    made = mine(**WORDS, **SIZE, controls=controls, steps=6, guidance=5.0, seed=3)
    more = {"control_guidance_start": [0.0, 0.4], "control_guidance_end": [0.5, 1.0]}
    given = {"image": shown, "num_inference_steps": 6, "guidance_scale": 5.0, **SIZE}
    compare(made, theirs(peer, **WORDS, **given, **more, controlnet_conditioning_scale=[0.8, 0.3]))

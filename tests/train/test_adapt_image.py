"""IP-Adapter training: what its encoder sees, what is dropped, and a file that we and diffusers read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import adapt_cases as cases
import diffusers
import numpy as np
import pytest
import tiny_models as tiny
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

import pellucid
from pellucid import ImagePrompt
from pellucid.interop.source import load_image_encoder
from pellucid.models.ip_adapter import from_state
from pellucid.pipeline.encoders.image_inputs import DEVIATION, clip_pixels
from pellucid.pipeline.shelf import ADAPTER_EYES, ADAPTER_FILE
from pellucid.train.adapters import AdapterObjectiveConfig
from pellucid.train.ip_adapter import eye_pixels, varied
from pellucid.train.source import Batch

SMALL = {"width": 16, "height": 16, "steps": 3, "seed": 1, "guidance": 3.0}


def image(size: tuple[int, int], seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8))


def as_tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)[None].float() / 127.5 - 1


def said(task: Any, network: Any, image: Tensor, **more: Any) -> Tensor:
    told = task.base.conditions(cases.WORDS, torch.zeros(cases.COUNT, dtype=torch.bool)) | task.base.sizes(
        cases.COUNT, 16, 16
    )
    x, time = cases.drawn(cases.COUNT, 4, 8, 8, seed=7), torch.linspace(0, 999, cases.COUNT).round()
    with torch.no_grad():
        return network(x, time, image=image, **told, **more)


@pytest.mark.parametrize("name", ["sd1", "xl"])
def test_the_saved_file_says_what_the_network_said(name: str, tmp_path: Path) -> None:
    task = cases.task("ip_adapter", base=cases.base(name), tokens=3)
    cases.randomised(task.network)
    image = cases.drawn(cases.COUNT, 20, seed=3)
    wanted = said(task, task.network, image)
    adapter = from_state(load_file(cases.saved(task, tmp_path / "ip") / ADAPTER_FILE))
    unet = pellucid.load(cases.base(name)).components.network
    with torch.no_grad():
        tokens = adapter.tokens(unet, image[:, None])
    assert torch.equal(said(task, unet, tokens), wanted)
    assert (said(task, unet, ()) - wanted).abs().max() > 1e-2 * wanted.abs().max()


def test_diffusers_makes_the_image_that_our_pipeline_makes(tmp_path: Path) -> None:
    from transformers import CLIPImageProcessorPil, CLIPVisionModelWithProjection

    task = cases.task("ip_adapter")
    cases.randomised(task.network)
    folder, shown = cases.saved(task, tmp_path / "ip"), image((40, 56))
    pipe = pellucid.load(cases.base(), image_encoder=folder / ADAPTER_EYES)
    made = pipe("abc", image_prompts=[ImagePrompt(folder / ADAPTER_FILE, shown)], decode=False, **SMALL)
    parts = diffusers.StableDiffusionPipeline.from_pretrained(cases.base()).components
    parts["image_encoder"] = CLIPVisionModelWithProjection.from_pretrained(folder / ADAPTER_EYES)
    parts["feature_extractor"] = CLIPImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    peer = diffusers.StableDiffusionPipeline(**parts, requires_safety_checker=False)
    peer.set_progress_bar_config(disable=True)
    peer.load_ip_adapter(str(folder), subfolder="", weight_name=ADAPTER_FILE)
    theirs = peer(
        "abc", ip_adapter_image=shown, width=16, height=16, num_inference_steps=3, guidance_scale=3.0,
        output_type="latent", generator=torch.Generator().manual_seed(1),
    ).images  # fmt: skip
    assert (made.latents - theirs).abs().max() < 1e-4 * theirs.abs().max()
    plain = pipe("abc", decode=False, **SMALL).latents
    assert (plain - theirs).abs().max() > 1e-3 * theirs.abs().max()


def test_values_may_start_as_the_texts_own() -> None:
    task = cases.task("ip_adapter", values="copy")
    block = task.base.unet.cross_attentions()[0][0].attn2
    pair = task.network.adapter.pairs[0]
    assert torch.equal(pair.to_k_ip.weight, block.to_k.weight)
    assert torch.equal(pair.to_v_ip.weight, block.to_v.weight)
    assert pair.to_v_ip.weight.requires_grad
    zero = cases.task("ip_adapter").network.adapter.pairs[0]
    assert zero.to_v_ip.weight.abs().sum() == 0
    assert torch.equal(zero.to_k_ip.weight, block.to_k.weight)


# --- what the encoder sees ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(40, 56), (32, 32), (61, 33), (20, 17), (128, 128)])
def test_pixels_are_those_of_the_pipeline(size: tuple[int, int]) -> None:
    shown = image(size)
    mine, theirs = eye_pixels(as_tensor(shown), 32), clip_pixels([shown], 32)
    assert mine.shape == theirs.shape
    steps = (mine - theirs).abs() * torch.tensor(DEVIATION)[:, None, None] * 255
    assert steps.max() < 1.01  # a rounding falls on the other side now and then
    assert steps.mean() < 0.01


def test_a_reference_is_seen_as_in_a_run() -> None:
    task, batch = cases.task("ip_adapter"), cases.examples()
    masks = {name: torch.zeros(cases.COUNT, dtype=torch.bool) for name in ("text", "image")}
    found = task.inputs(batch, masks, cases.draws())["image"]
    pixels = [
        Image.fromarray(p) for p in ((batch.hints["reference"] + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    ]
    with torch.no_grad():
        wanted = task.eyes(clip_pixels(pixels, 32)).pooled
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()


def test_the_image_itself_can_be_the_reference() -> None:
    batch, draws = cases.examples(), cases.draws()
    task = cases.task("ip_adapter", reference="itself", image_dropout=0.0, both_dropout=0.0)
    moved = cases.task("ip_adapter", reference="itself", image_dropout=0.0, both_dropout=0.0, crop=0.5, mirror=True)
    plain, other = task.prepare(batch, draws)["image"], moved.prepare(batch, draws)["image"]
    assert not torch.allclose(plain, other, rtol=1e-2)
    assert torch.equal(other, moved.prepare(batch, draws)["image"])
    assert not torch.equal(other, moved.prepare(batch, cases.draws(1))["image"])
    latents = Batch(task.prepare(batch, draws)["x0"], None, batch.captions, batch.hints)
    assert cases.refusal(task.prepare, latents, draws) == "data-hints"


def test_variations_are_crops_and_mirrors() -> None:
    ramp = torch.linspace(-1, 1, 64).expand(cases.COUNT, 3, 64, 64)  # dark left, bright right
    draws = cases.draws()
    assert torch.allclose(varied(ramp, draws, 1.0, False), ramp, atol=1e-6)
    side, across, _, turn = draws.uniform("reference", (4,)).T
    made = varied(ramp, draws, 0.5, True)
    side = 0.5 + 0.5 * side
    middle = (1 - side) * (2 * across - 1)
    step = 2 / 64
    for i in range(cases.COUNT):
        sign = -1 if turn[i] < 0.5 else 1
        ends = made[i, 0, 0, [1, -2]]
        wanted = middle[i] + sign * side[i] * torch.tensor([-1 + 1.5 * step, 1 - 1.5 * step])
        assert torch.allclose(ends, wanted * 64 / 63, atol=2 * step)


# --- dropout -----------------------------------------------------------------------------------------------------


def test_shares_that_are_dropped_are_those_asked() -> None:
    task = cases.task("ip_adapter", image_dropout=0.2, both_dropout=0.1, objective=AdapterObjectiveConfig(dropout=0.3))
    count = 20_000
    masks = task.masks(cases.draws(batch=count), cases.CPU)
    text, image = masks["text"], masks["image"]
    for found, share in ((text & ~image, 0.3), (image & ~text, 0.2), (image & text, 0.1)):
        assert float(found.float().mean()) == pytest.approx(share, abs=4 * (share * (1 - share) / count) ** 0.5)


def test_what_is_dropped_is_the_empty_text_and_no_image() -> None:
    task = cases.task("ip_adapter", image_dropout=0.0, both_dropout=1.0, objective=AdapterObjectiveConfig(dropout=0.0))
    asked = task.prepare(cases.examples(), cases.draws())
    assert asked["image"].abs().sum() == 0
    empty = task.base.conditions([""] * cases.COUNT, torch.zeros(cases.COUNT, dtype=torch.bool))["context"]
    assert torch.allclose(asked["context"], empty, atol=1e-6)


# --- the encoder -------------------------------------------------------------------------------------------------


def test_the_vision_half_of_a_clip(tmp_path: Path) -> None:
    from transformers import CLIPConfig, CLIPModel

    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "image_size": 32, "patch_size": 8}  # fmt: skip
    text = tiny.text_config().to_dict()
    peer = tiny.randomised(CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=20)))
    peer.save_pretrained(tmp_path / "clip")
    task = cases.task("ip_adapter", image_encoder=str(tmp_path / "clip"))
    pixels = cases.drawn(2, 3, 32, 32)
    with torch.no_grad():
        wanted = peer.visual_projection(peer.vision_model(pixels).pooler_output)
        assert torch.allclose(task.eyes(pixels).pooled, wanted, atol=1e-5)
    folder = cases.saved(task, tmp_path / "ip")
    again = load_image_encoder(folder / ADAPTER_EYES)  # by itself, as `pellucid.load` takes it
    with torch.no_grad():
        assert torch.equal(again(pixels).pooled, task.eyes(pixels).pooled)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"tokens": 0}, "config-value"),
        ({"crop": 0.0}, "config-value"),
        ({"image_dropout": 0.9, "both_dropout": 0.2}, "config-value"),
        ({"image_encoder": None}, "ip-encoder"),
        ({"image_encoder": lambda: cases.base() + "/text_encoder"}, "component-kind"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], code: str) -> None:
    assert cases.refusal(cases.task, "ip_adapter", **changes) == code


def test_references_that_are_missing_or_grey() -> None:
    batch, draws = cases.examples(), cases.draws()
    assert cases.refusal(cases.task("ip_adapter", reference="other").prepare, batch, draws) == "data-hints"
    assert cases.refusal(cases.task("ip_adapter", reference="edges").prepare, batch, draws) == "data-hints"

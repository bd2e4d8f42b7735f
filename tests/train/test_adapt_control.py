"""ControlNet training: it starts as the base's first half, and its folder is one that we and diffusers open."""

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
from torch import Tensor

import pellucid
from pellucid import Control
from pellucid.interop.source import load_component
from pellucid.models.controlnet import ControlledUNet
from pellucid.train.controlnet import from_unet, widths_for
from pellucid.train.source import Batch

SMALL = {"width": 16, "height": 16, "steps": 3, "seed": 1, "guidance": 3.0}


def said(task: Any, hint: Tensor) -> Tensor:
    told = task.base.conditions(cases.WORDS, torch.zeros(cases.COUNT, dtype=torch.bool)) | task.base.sizes(
        cases.COUNT, 16, 16
    )
    x, time = cases.drawn(cases.COUNT, 4, 8, 8, seed=7), torch.linspace(0, 999, cases.COUNT).round()
    with torch.no_grad():
        return task.network(x, time, hint=hint, **told)


def test_it_starts_as_diffusers_starts_it() -> None:
    """Every weight that is copied, against ControlNetModel.from_unet."""
    peer = diffusers.ControlNetModel.from_unet(tiny.saved("sd1")[0].unet, conditioning_embedding_out_channels=(16, 32))
    mine = from_unet(pellucid.load(cases.base()).components.network, (16, 32))
    theirs, state = peer.state_dict(), mine.state_dict()
    assert state.keys() == theirs.keys()
    copied = [name for name in state if not name.startswith("controlnet_cond_embedding.")]
    assert len(copied) > 100
    assert all(torch.equal(state[name], theirs[name]) for name in copied)
    assert all(t.abs().sum() == 0 for name, t in state.items() if name.startswith("controlnet_cond_embedding.conv_out"))


@pytest.mark.parametrize("name", ["sd1", "sd2", "xl"])
def test_the_saved_folder_says_what_the_network_said(name: str, tmp_path: Path) -> None:
    task = cases.task("controlnet", base=cases.base(name))
    cases.randomised(task.network)
    hint = cases.examples().hints["edges"].expand(-1, 3, -1, -1)
    wanted = said(task, hint)
    read = load_component(cases.saved(task, tmp_path / "control"))
    unet = pellucid.load(cases.base(name)).components.network
    told = task.base.conditions(cases.WORDS, torch.zeros(cases.COUNT, dtype=torch.bool)) | task.base.sizes(
        cases.COUNT, 16, 16
    )
    x, time = cases.drawn(cases.COUNT, 4, 8, 8, seed=7), torch.linspace(0, 999, cases.COUNT).round()
    control = (read.hint(hint, [1.0] * cases.COUNT),)
    with torch.no_grad():
        found = ControlledUNet(unet, [read])(x, time, control=control, **told)
        plain = unet(x, time, **told)
    assert torch.allclose(found, wanted, rtol=0, atol=2e-6)  # some CPUs sum otherwise where a gradient is recorded
    assert (plain - wanted).abs().max() > 1e-2 * wanted.abs().max()


def test_diffusers_makes_the_image_that_our_pipeline_makes(tmp_path: Path) -> None:
    task = cases.task("controlnet")
    cases.randomised(task.network)
    folder = cases.saved(task, tmp_path / "control")
    shown = Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8))
    pipe = pellucid.load(cases.base())
    made = pipe("abc", controls=[Control(folder, shown)], decode=False, **SMALL)
    net = diffusers.ControlNetModel.from_pretrained(folder)
    parts = diffusers.StableDiffusionPipeline.from_pretrained(cases.base()).components
    peer = diffusers.StableDiffusionControlNetPipeline(**parts, controlnet=net, requires_safety_checker=False)
    peer.set_progress_bar_config(disable=True)
    theirs = peer(
        "abc", image=shown, width=16, height=16, num_inference_steps=3, guidance_scale=3.0, output_type="latent",
        generator=torch.Generator().manual_seed(1),
    ).images  # fmt: skip
    assert (made.latents - theirs).abs().max() < 1e-4 * theirs.abs().max()
    plain = pipe("abc", decode=False, **SMALL).latents
    assert (plain - theirs).abs().max() > 1e-3 * theirs.abs().max()


def test_hints_of_one_channel_are_grey_and_those_of_three_are_taken() -> None:
    task, batch, draws = cases.task("controlnet"), cases.examples(), cases.draws()
    grey = batch.hints["edges"]
    one = task.prepare(batch, draws)["hint"]
    colour = Batch(batch.images, None, batch.captions, {"edges": grey.repeat(1, 3, 1, 1)})
    assert torch.equal(one, task.prepare(colour, draws)["hint"])
    assert one.shape == (cases.COUNT, 3, 16, 16)


def test_cached_latents_keep_their_hints_in_pixels() -> None:
    task, batch, draws = cases.task("controlnet"), cases.examples(), cases.draws()
    asked = task.prepare(batch, draws)
    cached = Batch(asked["x0"], None, batch.captions, batch.hints)
    again = task.prepare(cached, draws)
    assert all(torch.equal(asked[name], again[name]) for name in asked)


def test_saved_in_half_precision(tmp_path: Path) -> None:
    task = cases.task("controlnet", saved_dtype="float16", hint_widths=(8, 12))
    read = load_component(cases.saved(task, tmp_path / "control"))
    assert {p.dtype for p in read.parameters()} == {torch.float16}
    assert read.config.conditioning_embedding_out_channels == (8, 12)


# --- refused -----------------------------------------------------------------------------------------------------


def test_hints_that_are_missing_or_of_another_size() -> None:
    batch, draws = cases.examples(), cases.draws()
    assert cases.refusal(cases.task("controlnet", hint="depth").prepare, batch, draws) == "data-hints"
    task = cases.task("controlnet")
    for wrong in (batch.hints["edges"][..., :8], batch.hints["edges"].repeat(1, 2, 1, 1)):
        odd = Batch(batch.images, None, batch.captions, {"edges": wrong})
        assert cases.refusal(task.prepare, odd, draws) == "data-hints"


@pytest.mark.parametrize("widths", [(16,), (16, 32, 64), (16, 0)])
def test_widths_that_do_not_reach_the_latents(widths: tuple[int, ...]) -> None:
    assert cases.refusal(cases.task, "controlnet", hint_widths=widths) == "control-widths"


def test_widths_by_default() -> None:
    assert widths_for(8, ()) == (16, 32, 96, 256)
    assert widths_for(1, ()) == (16,)
    assert cases.refusal(widths_for, 16, ()) == "control-widths"
    assert cases.refusal(widths_for, 6, (1, 2, 3)) == "control-widths"


def test_a_unet_that_no_controlnet_can_mirror(tmp_path: Path) -> None:
    peer = tiny.stable_diffusion(tmp_path, unet={**tiny.SD1_UNET, "conv_in_kernel": 5})
    peer.save_pretrained(tmp_path / "odd")
    assert cases.refusal(cases.task, "controlnet", base=str(tmp_path / "odd")) == "control-base"

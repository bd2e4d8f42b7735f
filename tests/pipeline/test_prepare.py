"""What a review found: requests that failed in the middle of a run, or whose words were passed over in silence."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import tiny_models as tiny
import torch
from PIL import Image

import pellucid
from pellucid import Control, Lora, PellucidError
from pellucid.pipeline.decode import decode, decode_together
from pellucid.pipeline.encoders.image_inputs import clip_pixels
from pellucid.pipeline.encoders.text import Embedding
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.prepare import denoise
from pellucid.pipeline.request import Request

SMALL = {"width": 16, "height": 16, "steps": 3, "seed": 1}
EULER = {"sampler": "euler", "width": 16, "height": 16, "steps": 6, "seed": 1}
WIDE, NARROW, POOLED = (1, 16, 64), (1, 16, 32), (1, 64)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@cache
def model(name: str) -> Pipeline:
    return pellucid.load(tiny.saved(name)[1])


def image(size: tuple[int, int] = (16, 16)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8))


def half_mask() -> Image.Image:
    return Image.fromarray(np.repeat(np.array([[0] * 8 + [255] * 8], dtype=np.uint8), 16, axis=0))


def code_of(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(PellucidError) as error:
        call(*args, **kwargs)
    assert "\n" not in str(error.value)
    return error.value.code


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"width": 0}, "size"),
        ({"original_size": (3, 3)}, "no-effect"),
        ({"crop": (3, 3)}, "no-effect"),
        ({"aesthetic": (3, 3)}, "no-effect"),
        ({"prompt_2": "b"}, "no-effect"),
        ({"negative_prompt": "b", "negative_prompt_2": ""}, "no-effect"),
        ({"negative_prompt_2": "b"}, "prompt"),
        ({"crop": (1,)}, "sizes"),
        ({"original_size": 512}, "sizes"),
        ({"prompt_embeds": torch.zeros(WIDE)}, "prompt"),
        ({"negative_prompt": "b", "negative_prompt_embeds": torch.zeros(WIDE)}, "prompt"),
        ({"prompt": None, "prompt_embeds": torch.zeros(NARROW), "guidance": 1.0}, "prompt"),
        ({"prompt_embeds": np.zeros(WIDE)}, "request"),
        ({"latents": np.zeros((1, 4, 8, 8))}, "request"),
        ({"image": torch.zeros(1, 4, 4, 4), "strength": 0.7}, "latents"),
        ({"denoising_start": 0.5}, "request"),
        ({"controls": Control("cn", None)}, "request"),
        ({"loras": [7]}, "request"),
        ({"weak": "sd1"}, "weak"),
        ({"sampler": "euler", "options": 5}, "request"),
        ({"sampler": "euler", "grid": {"name": "karras", "zz": 1}}, "grid"),
        ({"noise": 4}, "noise"),
        ({"observers": [5]}, "request"),
        ({"guidance": "3 + pag layers=zzz"}, "guidance"),
        ({"guidance": "3 + skip_layer"}, "guidance"),
    ],
)
def test_a_request_that_cannot_be_met(given: dict[str, Any], code: str) -> None:
    assert code_of(lambda: model("sd1")(**{"prompt": "abc", **SMALL, **given})) == code


def test_what_a_model_is_not_told_is_refused() -> None:
    assert code_of(model("xl"), "abc", aesthetic=(5, 2), **SMALL) == "no-effect"
    assert code_of(model("refiner"), "abc", image=image(), target_size=(9, 9), steps=3) == "no-effect"
    assert code_of(model("refiner"), "abc", image=image(), prompt_2="b", steps=3) == "no-effect"
    assert code_of(model("xl"), ["a", "b"], prompt_2=["a", "b", "c"], **SMALL) == "request"
    assert code_of(model("ddpm"), clip_skip=1, steps=2) == "no-effect"
    assert code_of(model("ddpm"), prompt_embeds=torch.zeros(WIDE), steps=2) == "no-text"
    assert code_of(model("lcm"), "abc", guidance="5 + apg", **SMALL) == "guidance"
    assert code_of(model("dit"), label=3, steps=2, guidance="3 + pag") == "guidance"
    assert code_of(model("dit"), label=3, steps=2, controls=[Control(tiny.saved("sd1")[1], image())]) != ""


def test_pooled_vectors_of_both_prompts() -> None:
    both = Embedding(torch.zeros(1, 16, 128), torch.zeros(POOLED))
    given = {"prompt_embeds": both, "negative_prompt_embeds": both.context}
    assert code_of(model("xl"), **given, **SMALL) == "pooled"
    thin = Embedding(both.context, torch.zeros(1, 32))
    assert code_of(model("xl"), prompt_embeds=thin, **SMALL) == "pooled"


def test_perturbed_attention_acts_by_default() -> None:
    plain, pag = (model("sd1")("abc", guidance=g, **SMALL) for g in (3.0, "3 + pag"))
    assert not torch.equal(plain.latents, pag.latents)


def test_autoguidance_beside_an_inpainting_network() -> None:
    pipe = model("inpaint")
    given = {"image": image(), "mask": half_mask(), "steps": 2, "seed": 1}
    made = pipe("abc", guidance="3 + autoguidance", weak=pipe, **given)
    plain = pipe("abc", guidance=3.0, **given)
    assert torch.allclose(made.latents, plain.latents, atol=1e-5)  # its own weak self leads nowhere


@pytest.mark.parametrize("weak", ["xl", "ddpm", "dit"])
def test_a_weak_model_of_another_kind(weak: str) -> None:
    assert code_of(model("sd1"), "abc", guidance="3 + autoguidance", weak=model(weak), **SMALL) == "weak"


def test_a_weak_model_of_another_dtype() -> None:
    weak = pellucid.load(tiny.saved("sd1")[1], dtype="bfloat16")
    assert code_of(model("sd1"), "abc", guidance="3 + autoguidance", weak=weak, **SMALL) == "weak"


def test_an_autoencoder_of_another_width(tmp_path: Path) -> None:
    diffusers.AutoencoderKL(**{**tiny.VAE, "latent_channels": 16}).save_pretrained(tmp_path)
    assert code_of(pellucid.load, tiny.saved("sd1")[1], vae=tmp_path) == "components-fit"


def test_a_finished_run_is_a_image_to_start_from() -> None:
    pipe = model("sd1")
    first = pipe("abc", **EULER)
    assert first.plan.dialect == "exact"
    again = pipe("abc", image=first, strength=0.5, **EULER)
    same = pipe("abc", image=first.latents, strength=0.5, **EULER)
    assert torch.allclose(again.latents, same.latents, atol=1e-5)


def test_an_unfinished_run_is_taken_up_as_it_is() -> None:
    pipe = model("sd1")
    half = pipe("abc", denoising_end=0.5, **EULER)
    assert code_of(pipe, "abc", image=half, **EULER) == "denoising"
    bigger = {**EULER, "width": 32, "height": 32}
    assert code_of(pipe, "abc", image=half, denoising_start=0.5, **bigger) == "latents"


def test_inpainting_that_stops_early_keeps_the_noise_of_its_level() -> None:
    """What the mask keeps has the noise of the last level too: a clean half would be read as denoised."""
    pipe = model("sd1")
    clean, noise = torch.zeros(1, 4, 8, 8), torch.ones(1, 4, 8, 8)
    given = {"image": clean, "mask": half_mask(), "latents": noise}
    made = pipe("abc", denoising_end=0.5, **given, **EULER)
    assert made.latents[..., :4].mean() == pytest.approx(made.plan.end.sigma, rel=1e-5)


def test_kinds_of_adapters_and_models() -> None:
    assert code_of(Control, "cn", image(), 1.0, "0") == "scale"
    assert code_of(Lora, None) == "lora"
    assert code_of(pellucid.load, 5) == "not-found"
    assert code_of(pellucid.load, tiny.saved("sd1")[1], policy="fast") == "policy"


def test_a_control_that_acts_at_no_step_is_said(tmp_path: Path) -> None:
    peer = diffusers.ControlNetModel.from_unet(tiny.saved("sd1")[0].unet, conditioning_embedding_out_channels=(8, 16))
    tiny.randomised(peer).save_pretrained(tmp_path)
    made = model("sd1")("abc", controls=[Control(tmp_path, image(), 1.0, 0.4, 0.6)], **{**SMALL, "steps": 2})
    assert any("control 1 has no effect" in note for note in made.notes)


def test_a_network_that_is_told_a_image(tmp_path: Path) -> None:
    """Eight channels in, as InstructPix2Pix: refused by name, not by a convolution."""
    tiny.stable_diffusion(tmp_path / "raw", unet={**tiny.SD1_UNET, "in_channels": 8}).save_pretrained(tmp_path / "sd")
    assert code_of(lambda: pellucid.load(tmp_path / "sd")("abc", **SMALL)) == "components-fit"


def test_sixteen_bits_reach_the_image_encoder() -> None:
    deep = np.linspace(0, 65535, 32 * 32).reshape(32, 32).astype(np.uint16)
    found = clip_pixels([Image.fromarray(deep)], 32)
    assert torch.allclose(found, clip_pixels([Image.fromarray(np.rint(deep / 257).astype(np.uint8))], 32))


def test_runs_decoded_together() -> None:
    """By one call of the autoencoder; one that is no finite numbers fails alone."""
    pipe = model("sd1")
    runs = [denoise(pipe.prepare(Request("abc", **{**SMALL, "seed": seed}))) for seed in range(3)]
    alone = [decode(one) for one in runs]
    bad = replace(runs[1], x=runs[1].x * float("nan"))
    first, broken, last, single = decode_together([runs[0], bad, runs[2], runs[1]])
    assert isinstance(broken, PellucidError)
    assert broken.code == "nan"
    for mine, own in ((first, alone[0]), (last, alone[2]), (single, alone[1])):
        assert not isinstance(mine, PellucidError)
        apart = np.asarray(mine.images[0]).astype(int) - np.asarray(own.images[0])
        assert np.abs(apart).max() <= 1
        assert mine.recipes == own.recipes


def test_controls_of_a_whole_run_step_as_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one network for all requests with these ControlNets, so that they share what was captured."""
    peer = diffusers.ControlNetModel.from_unet(tiny.saved("sd1")[0].unet, conditioning_embedding_out_channels=(8, 16))
    tiny.randomised(peer).save_pretrained(tmp_path)
    pipe = model("sd1")
    asked: dict[str, Any] = {**SMALL, "guidance": 5.0}
    plain = pipe("abc", controls=[Control(tmp_path, image(), 0.7)], **asked)
    steppers = []

    def stepper(self: Any, networks: Any) -> Any:
        steppers.append(self.graphs.stepper(networks, capture=False))
        return steppers[-1]

    monkeypatch.setattr(Pipeline, "stepper", stepper)
    made = pipe("abc", controls=[Control(tmp_path, image(), 0.7)], **asked)
    assert made.plain == {}
    assert torch.allclose(made.latents, plain.latents, atol=1e-5)
    assert not torch.allclose(made.latents, pipe("abc", **asked).latents, atol=1e-2)
    late = pipe("abc", controls=[Control(tmp_path, image(), 0.7, 0.5)], **asked)
    assert late.plain == {"denoiser": len(late.plan.rows)}  # which changes from step to step what it calls
    pipe("abc", controls=[Control(tmp_path, image(), 0.2)], **asked)
    first, without, _, last = (one.networks[0] for one in steppers)
    assert last is first
    assert last is not without

"""What `wrap` takes and refuses, and how it reads a pipeline's own mixture."""

from __future__ import annotations

import warnings
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from pellucid.core.errors import PellucidError
from pellucid.interop.wrap import look, refuse_other_work
from pellucid.interop.wrap_branches import recognise
from pellucid.interop.wrap_proxies import Branch, Call, Reply, doubled, tensor_of

TEXT = [
    "StableDiffusion",
    "StableDiffusionXL",
    "StableDiffusion3",
    "StableDiffusionPAG",
    "Flux",
    "FluxKontext",
    "Chroma",
    "PixArtAlpha",
    "PixArtSigma",
    "Sana",
    "AuraFlow",
    "Lumina",
    "Lumina2",
    "HunyuanDiT",
    "CogView3Plus",
    "CogView4",
    "QwenImage",
    "ZImage",
    "Kandinsky3",
    "OvisImage",
    "HiDreamImage",
    "Krea2",
    "PRX",
    "LatentConsistencyModel",
]
IMAGES = [
    "StableDiffusionImg2Img",
    "StableDiffusionInpaint",
    "StableDiffusionXLImg2Img",
    "StableDiffusion3Img2Img",
    "FluxImg2Img",
    "FluxInpaint",
    "FluxFill",
    "FluxControl",
    "StableDiffusionControlNet",
    "StableDiffusionXLInpaint",
    "StableDiffusionUpscale",
    "StableDiffusionInstructPix2Pix",
    "QwenImageEdit",
    "ZImageImg2Img",
    "LatentConsistencyModelImg2Img",
]


def shell(name: str) -> Any:
    """A pipeline of a class, without its parts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a class imports
        kind = getattr(diffusers, f"{name}Pipeline")
    made = kind.__new__(kind)
    vars(made)["scheduler"] = object()
    return made


@pytest.mark.parametrize("name", TEXT)
def test_every_text_to_image_class_is_of_a_kind_that_it_takes(name: str) -> None:
    """Without its network it is refused for that, not for what it does."""
    with pytest.raises(PellucidError, match="single transformer or unet") as caught:
        look(shell(name))
    assert caught.value.code == "wrap-family"
    assert "pipe.scheduler = pellucid.Scheduler.from_config" in str(caught.value)


@pytest.mark.parametrize("name", IMAGES)
def test_images_from_images_are_refused_by_name(name: str) -> None:
    with pytest.raises(PellucidError, match=f"{name}Pipeline starts from an image") as caught:
        look(shell(name))
    assert caught.value.code == "wrap-kind"


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("Wan", "makes video"),
        ("CogVideoX", "makes video"),
        ("AnimateDiff", "makes video"),
        ("LTX", "makes video"),
        ("HunyuanVideo", "makes video"),
        ("Mochi", "makes video"),
        ("AudioLDM2", "makes sound"),
        ("StableAudio", "makes sound"),
        ("DiT", "takes no prompt"),
        ("DDPM", "takes no prompt"),
    ],
)
def test_other_work_is_refused_by_name(name: str, work: str) -> None:
    with pytest.raises(PellucidError, match=f"pipeline must make images from text alone; {name}Pipeline {work}"):
        look(shell(name))


@pytest.mark.parametrize("thing", [None, 3, "model", torch.nn.Linear(2, 2), diffusers.FluxPipeline, print], ids=str)
def test_what_is_no_pipeline_is_refused(thing: Any) -> None:
    with pytest.raises(PellucidError, match="pipeline must be a live diffusers text-to-image pipeline"):
        look(thing)


def test_the_words_of_a_call_count_more_than_its_name() -> None:
    refuse_other_work("Anything", {"prompt": None, "guidance_scale": 5.0})
    with pytest.raises(PellucidError, match="Anything makes video"):
        refuse_other_work("Anything", {"prompt": None, "num_frames": 16})


# --- the mixture ----------------------------------------------------------------------------------------------------


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("extra", [0, 4])
@pytest.mark.parametrize("plain", [True, False])
def test_order_sign_and_scale_are_read_off_one_step(sign: int, index: int, calls: int, extra: int, plain: bool) -> None:
    x = numbers(0, 2, 4, 3, 5)
    both = [numbers(1, 2, 4 + extra, 3, 5), numbers(2, 2, 4 + extra, 3, 5)]  # with the channels of a variance
    cond, uncond = both[index][:, :4], both[1 - index][:, :4]
    mixed = uncond + 5.0 * (cond - uncond)
    if not plain:
        mixed = mixed * cond.norm(dim=-1, keepdim=True) / mixed.norm(dim=-1, keepdim=True)
    asked = [Call((), {}, torch.cat(both))] if calls == 1 else [Call((), {}, out) for out in both]
    mixing = recognise(Reply(sign * mixed, asked), x, [4.0, 5.0])
    assert mixing is not None
    assert (mixing.calls, mixing.predictions, mixing.index, mixing.sign) == (calls, 2, index, sign)
    assert (mixing.scale, mixing.plain, mixing.sure) == (5.0, plain, True)


def test_a_scale_that_counts_from_zero() -> None:
    cond, uncond = numbers(1, 1, 4, 3, 3), numbers(2, 1, 4, 3, 3)
    mixing = recognise(Reply(cond + 5.0 * (cond - uncond), [Call((), {}, torch.cat([cond, uncond]))]), cond, [5.0])
    assert mixing is not None
    assert (mixing.scale, mixing.index) == (6.0, 0)


def test_what_is_no_mixture_is_not_guessed() -> None:
    x = numbers(0, 1, 4, 3, 3)
    cond, uncond = numbers(1, 1, 4, 3, 3), numbers(2, 1, 4, 3, 3)
    pair = [Call((), {}, torch.cat([uncond, cond]))]
    assert recognise(Reply((uncond + 5.0 * (cond - uncond)).tanh(), pair), x, [5.0]) is None
    assert recognise(Reply(uncond + 3.3 * (cond - uncond), pair), x, [5.0]) is None
    assert recognise(Reply(cond, [*pair, Call((), {}, cond)]), x, [5.0]) is None  # three predictions
    assert recognise(Reply(cond, [Call((), {}, cond[:, :3])]), x, [5.0]) is None  # of another form
    assert recognise(Reply(cond * float("nan"), pair), x, [5.0]) is None


def test_where_nothing_tells_the_two_apart_it_says_so() -> None:
    x = cond = numbers(1, 1, 4, 3, 3)
    batched = recognise(Reply(cond, [Call((), {}, torch.cat([cond, cond]))]), x, [5.0])
    apart = recognise(Reply(cond, [Call((), {}, cond), Call((), {}, cond)]), x, [5.0])
    assert batched is not None
    assert apart is not None
    assert (batched.sure, batched.index) == (False, 1)  # the usual order: uncond first in a batch, cond first in calls
    assert (apart.sure, apart.index) == (False, 0)


def test_one_prediction_may_have_its_sign_turned() -> None:
    x = out = numbers(1, 1, 4, 3, 3)
    mixing = recognise(Reply(-out, [Call((), {}, out[:, :, None])]), x, [])
    assert mixing is not None
    assert (mixing.predictions, mixing.sign) == (1, -1)


# --- halves of a batch ----------------------------------------------------------------------------------------------


def test_half_of_what_a_network_is_told() -> None:
    told = {
        "hidden": numbers(1, 4, 3),
        "added": {"time_ids": numbers(2, 4, 6), "none": None},
        "texts": [numbers(i, 2) for i in range(4)],
        "img_ids": numbers(3, 4, 3),  # four tokens, not four images
        "image_rotary_emb": (numbers(4, 4, 8), numbers(5, 4, 8)),
        "timestep": torch.tensor(5),
        "flag": True,
    }
    (time,), half = Branch(1, 1, 2).half(((numbers(6, 4),), told))
    assert torch.equal(time, numbers(6, 4)[2:])
    assert torch.equal(half["hidden"], told["hidden"][2:])
    assert torch.equal(half["added"]["time_ids"], told["added"]["time_ids"][2:])
    assert half["added"]["none"] is None
    assert len(half["texts"]) == 2
    assert half["texts"][0] is told["texts"][2]
    for whole in ("img_ids", "image_rotary_emb", "timestep", "flag"):
        assert half[whole] is told[whole]
    assert Branch(1, 2, 2).half(((), told)) == ((), told)  # two calls: each is whole


@pytest.mark.parametrize("form", ["tensor", "tuple", "list", "sample"])
def test_answers_of_every_form(form: str) -> None:
    out = numbers(1, 2, 3)
    sample = diffusers.models.unets.unet_2d_condition.UNet2DConditionOutput(sample=out)
    answer = {"tensor": out, "tuple": (out, "rest"), "list": (list(out),), "sample": sample}[form]
    assert torch.equal(tensor_of(answer), out)
    assert torch.equal(tensor_of(doubled(answer)), torch.cat([out, out]))
    assert torch.equal(tensor_of(answer), out)  # and the answer itself is left alone

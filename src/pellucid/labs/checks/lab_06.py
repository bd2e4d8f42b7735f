"""Lab 06: each stage against the pipeline's own, then all of them against its image."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

import pellucid
from pellucid.labs.answers import Check, Mistake
from pellucid.labs.checks.tensors import off
from pellucid.models.vae import AutoencoderKL
from pellucid.pipeline.images import to_tensor

PROMPT = "a large dotted purple ring on a cream background"
STEPS, SCALE, SEED = 6, 3.0, 11
FACTOR = 0.18215


@cache
def made() -> tuple[pellucid.Pipeline, pellucid.Result]:
    """The pipeline and its image."""
    pipe = pellucid.load("scenes-128", device="cpu")
    return pipe, pipe(PROMPT, steps=STEPS, guidance=SCALE, seed=SEED)


def right_ids() -> Tensor:
    tokenizer = made()[0].components.tokenizers[0]
    return torch.tensor([tokenizer.encode(""), tokenizer.encode(PROMPT)])


def first_noise() -> Tensor:
    return torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(SEED))


def check_tokens(answer: ModuleType) -> None:
    """With this tokenizer, and with one whose padding and window are others."""
    tokenizer = made()[0].components.tokenizers[0]
    for one in (tokenizer, replace(tokenizer, pad=0, length=40)):
        wanted = torch.tensor([one.encode(""), one.encode(PROMPT)])
        got = answer.tokens(one, ["", PROMPT])
        if off(got, wanted, "ids") > 0:
            place = int((got != wanted).any(0).nonzero()[0])
            raise Mistake(
                f"ids must be BOS, the words, EOS, then tokenizer.pad ({one.pad}) up to {one.length}; the first that "
                f"differs is at place {place}: wanted {wanted[:, place].tolist()}, got {got[:, place].tolist()}."
            )


def check_states(answer: ModuleType) -> None:
    """The last states, after the final norm."""
    encoder = made()[0].components.text_encoders[0]
    ids = right_ids()
    with torch.no_grad():
        all_states = encoder(ids)
        got = answer.states(encoder, ids)
    far = off(got, all_states.last, "states")
    if far > 1e-4:
        hint = "take `last` of what the encoder gives"
        if off(got, all_states.hidden[-1], "states") < 1e-4:
            hint = "this is the last layer without the final norm, which this model was not trained on"
        raise Mistake(f"states must be the encoder's last to 1e-4; off by {far:.3f}; {hint}.")


def check_denoise(answer: ModuleType) -> None:
    """With the folder's scheduler, and with Euler, whose table scales x."""
    pipe, result = made()
    parts = pipe.components
    with torch.no_grad():
        context = parts.text_encoders[0](right_ids()).last
        for kind in ("DPMSolverMultistepScheduler", "EulerDiscreteScheduler"):
            scheduler = pellucid.Scheduler.from_config({**parts.scheduler, "_class_name": kind})
            scheduler.set_timesteps(STEPS)
            if kind.startswith("DPM"):
                wanted = result.latents
            else:
                options = {"sampler": "euler", "grid": "trailing", "dialect": "diffusers", "noise": "torch"}
                wanted = pipe(PROMPT, steps=STEPS, guidance=SCALE, seed=SEED, decode=False, **options).latents
            got = answer.denoise(parts.network, scheduler, first_noise(), context, SCALE)
            if (far := off(got, wanted, "latents")) > 1e-2:
                raise Mistake(
                    f"latents must be the pipeline's to 0.01 with {kind}; off by {far:.3f}; scale the noise by "
                    "init_noise_sigma and the input by scale_model_input, and the first row of the context is uncond."
                )


def check_decode(answer: ModuleType) -> None:
    """With the model's VAE, and with the same one whose latents are larger, by a factor in its config."""
    pipe, result = made()
    vae = pipe.components.vae
    assert isinstance(vae, AutoencoderKL)
    large = copy.deepcopy(vae)
    large.config = replace(vae.config, scaling_factor=FACTOR)
    assert large.post_quant_conv is not None
    with torch.no_grad():
        large.post_quant_conv.weight *= FACTOR
        wanted = ((vae.decode(result.latents) + 1) / 2).clamp(0, 1)
        for one in (vae, large):
            got = answer.decode(one, result.latents)
            far = off(got, wanted, "the image")
            if far > 2e-3:
                hint = "divide the latents by config.scaling_factor, decode, and bring [−1, 1] to [0, 1]"
                if off(got, 2 * wanted - 1, "the image") < 2e-3:
                    hint = "this is the image in [−1, 1]: add 1 and halve"
                elif one is large and off(got, ((one.decode(result.latents) + 1) / 2).clamp(0, 1), "the image") < 2e-3:
                    hint = "this is what you get without scaling_factor; it is 1 in scenes-128 and 0.18215 elsewhere"
                raise Mistake(f"the image must be the decoder's to 0.002; off by {far:.3f}; {hint}.")


def check_whole(answer: ModuleType) -> None:
    """The image of `pipe(prompt)`, within one of 255."""
    pipe, result = made()
    parts = pipe.components
    scheduler = pellucid.Scheduler.from_config(parts.scheduler)
    scheduler.set_timesteps(STEPS)
    with torch.no_grad():
        context = answer.states(parts.text_encoders[0], answer.tokens(parts.tokenizers[0], ["", PROMPT]))
        latents = answer.denoise(parts.network, scheduler, first_noise(), context, SCALE)
        got = answer.decode(parts.vae, latents)
    wanted = (to_tensor(result.images) + 1) / 2
    if (far := off(got, wanted, "the image")) > 1.6 / 255:
        raise Mistake(f"the image must be that of pipe(prompt) within 1 of 255; off by {255 * far:.1f} of 255.")


CHECKS: list[Check] = [
    Check("tokenizer", check_tokens),
    Check("text encoder", check_states),
    Check("the loop", check_denoise),
    Check("VAE", check_decode),
    Check("the whole image", check_whole),
]

"""Models, runs and images that are broken in one way, as far as that is only seen when they are run or looked at.

The networks are exact ones (exact_pipelines.py), so that nothing else is wrong with them; those that were truly trained
are in the tests of the detectors.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import exact_pipelines as exact
import guided_runs as runs
import spoilt_images as images
import tiny_models as tiny
import tiny_scenes
import torch
from sabotages import healthy, sabotage
from safetensors.torch import load_file, save_file
from torch import Tensor

import pellucid
from pellucid.core import schedule as schedules
from pellucid.core.batch import Prediction
from pellucid.evidence import trace
from pellucid.evidence.doctor.subject import KnownImages, RunSpec, Subject, SubjectSpec, of_pipeline, open_subject
from pellucid.evidence.metrics.images import Pixels, folder_of
from pellucid.pipeline.request import Lora

# --- target, schedule, scale ---------------------------------------------------------------------------------------


@sabotage("target-mismatch", "trained for v", "read as eps")
def a_v_network_that_is_called_eps(folder: Path) -> Subject:
    return exact.subject(target="v", said_target="eps")


@sabotage("target-mismatch", "trained for eps", "read as v")
def an_eps_network_over_latents_that_is_called_v(folder: Path) -> Subject:
    return exact.subject(target="eps", said_target="v", latent=True)


@sabotage("target-mismatch", "trained for flow")
def a_flow_network_that_is_called_eps(folder: Path) -> Subject:
    return exact.subject("flow", "flow", said_schedule="scaled_linear", said_target="eps")


@sabotage("target-mismatch", "trained for x0")
def an_x0_network_that_is_called_eps(folder: Path) -> Subject:
    return exact.subject("linear", "x0", said_target="eps")


@sabotage("schedule-mismatch", "trained on linear", "times of scaled_linear")
def a_linear_network_with_stable_diffusions_schedule(folder: Path) -> Subject:
    return exact.subject("linear", said_schedule="scaled_linear")


@sabotage("schedule-mismatch", "trained on cosine", "times of linear")
def a_cosine_network_over_latents_with_a_linear_schedule(folder: Path) -> Subject:
    return exact.subject("cosine", "v", said_schedule="linear", latent=True)


@sabotage("schedule-unknown", "betas of its own")
def a_network_on_betas_that_its_config_has_lost(folder: Path) -> Subject:
    """Trained from beta 0.0001 to 0.04; the config has the two ends of Stable Diffusion."""
    subject = exact.subject("scaled_linear")
    assert subject.pipeline is not None
    network: Any = subject.pipeline.components.network
    own = schedules.make("scaled_linear", beta_start=0.0001, beta_end=0.04)
    network.believer = replace(network.believer, schedule=own)
    return subject


@sabotage("latent-scale", "scaling_factor 2 of the VAE")
def latents_that_are_too_large(folder: Path) -> Subject:
    return exact.subject(latent=True, said_factor=2.0)


@sabotage("latent-scale", "scaling_factor 0.18215 of the VAE", "5.")
def latents_by_the_factor_of_another_vae(folder: Path) -> Subject:
    return exact.subject(latent=True, said_factor=0.18215)


@sabotage("data-scale", "pixels of another range")
def a_network_of_pixels_from_0_to_1(folder: Path) -> Subject:
    return exact.subject(trained_on=0.5)


@sabotage("denoises-nothing", "untrained or damaged")
def a_network_that_says_noise(folder: Path) -> Subject:
    return exact.subject(deaf=True)


@sabotage("scale-drift", "too strong")
def a_network_that_is_weak_at_much_noise(folder: Path) -> Subject:
    return exact.subject("linear", gain=0.3)


@healthy
def an_exact_network_of_pixels(folder: Path) -> Subject:
    return exact.subject()


@healthy
def an_exact_network_of_x0(folder: Path) -> Subject:
    return exact.subject("linear", "x0")


@healthy
def an_exact_network_over_latents(folder: Path) -> Subject:
    return exact.subject("cosine", "v", latent=True)


@healthy
def an_exact_flow(folder: Path) -> Subject:
    return exact.subject("flow", "flow", latent=True)


# --- numbers that are none, adapters -------------------------------------------------------------------------------


@cache
def bundle() -> Path:
    return tiny_scenes.write_model(Path(tempfile.mkdtemp(prefix="pellucid-tiny-")) / "tiny")


@sabotage("float16-overflow", "65504")
def a_layer_that_leaves_float16(folder: Path) -> Subject:
    pipe = pellucid.load(bundle(), dtype="float16", device="cpu")
    pipe.components.network.up_blocks[0].resnets[0].conv2.weight.data.fill_(3e4)
    return of_pipeline(pipe)


def stretched(times: float, dtype: str) -> Subject:
    """The tiny model with the weights of one layer so many times as large; it leaves float16 from 26,000 on."""
    pipe = pellucid.load(bundle(), dtype=dtype, device="cpu")
    pipe.components.network.up_blocks[0].resnets[0].conv1.weight.data.mul_(times)
    return of_pipeline(pipe)


@sabotage("float16-near-overflow", "% of what float16 holds", "another prompt")
def a_layer_that_comes_near_the_end_of_float16(folder: Path) -> Subject:
    return stretched(2e4, "float16")


@sabotage("module-not-finite", "numbers of its own weights")
def a_weight_that_is_not_finite(folder: Path) -> Subject:
    pipe = pellucid.load(bundle(), device="cpu")
    vae = pipe.components.vae
    assert vae is not None
    vae.decoder.conv_in.weight.data[0, 0, 0, 0] = torch.nan
    return of_pipeline(pipe)


def lora(folder: Path, old: str = "", new: str = "", times: float = 1.0) -> Path:
    """The tiny LoRA with other names, or other sizes."""
    (file,) = (bundle() / "lora").glob("*.safetensors")
    held = {key.replace(old, new) if old else key: value * times for key, value in load_file(file).items()}
    save_file(held, folder / "style.safetensors")
    return folder / "style.safetensors"


@sabotage("adapter-no-effect", "keys for layers")
def a_lora_whose_keys_fit_nothing(folder: Path) -> Subject:
    pipe = pellucid.load(bundle(), device="cpu")
    return of_pipeline(pipe, adapters=(Lora(lora(folder, "blocks", "blobs")),))


@sabotage("adapter-no-effect", "zero")
def a_lora_that_was_never_trained(folder: Path) -> Subject:
    pipe = pellucid.load(bundle(), device="cpu")
    return of_pipeline(pipe, adapters=(Lora(lora(folder, times=0.0)),))


@sabotage("adapter-keys-unused", "another base")
def a_lora_that_fits_in_part(folder: Path) -> Subject:
    file = lora(folder, "up_blocks", "up_blobs")
    given = SubjectSpec(model=str(bundle()), loras=(str(file),))
    return open_subject(given, RunSpec(device="cpu"))


@sabotage("adapter-no-effect", "never trained")
def a_control_net_that_was_never_trained(folder: Path) -> Subject:
    given = SubjectSpec(model=str(bundle()), controlnets=(str(bundle() / "controlnet"),))
    return open_subject(given, RunSpec(device="cpu"))


@sabotage("adapter-misfit", "as in the base", "another base model")
def a_lora_of_a_wider_base(folder: Path) -> Subject:
    file = lora(folder)
    held = load_file(file)
    save_file({key: torch.cat([value] * 2, 1) if "lora_A" in key else value for key, value in held.items()}, file)
    return of_pipeline(pellucid.load(bundle(), device="cpu"), adapters=(Lora(file),))


@sabotage("adapter-misfit", "block_out_channels of the ControlNet", "another base")
def a_control_net_of_a_wider_base(folder: Path) -> Subject:
    tiny.controlnet().save_pretrained(folder / "controlnet")
    given = SubjectSpec(model=str(bundle()), controlnets=(str(folder / "controlnet"),))
    return open_subject(given, RunSpec(device="cpu"))


@healthy
def a_lora_that_acts(folder: Path) -> Subject:
    return of_pipeline(pellucid.load(bundle(), device="cpu"), adapters=(Lora(lora(folder)),))


# --- traces --------------------------------------------------------------------------------------------------------


@sabotage("oversaturated", "Guidance pushes")
def a_run_with_too_much_guidance(folder: Path) -> Subject:
    return runs.recorded(folder, runs.Guided(15.0))


@sabotage("guidance-overshoots", "guidance of 12", "later steps keep")
def a_run_of_the_true_model_with_too_much_guidance(folder: Path) -> Subject:
    """Its image ends in range, and half of its first prediction is not."""
    pipe = pellucid.load("scenes-128", device="cpu")
    prompt = "a large red star on a white background"
    with trace.Recorder(folder / "run.trace") as recorder:
        pipe(prompt, steps=12, guidance=12.0, seed=1, decode=False, observers=[recorder])
    return Subject("run", trace=trace.read(folder / "run.trace"))


@dataclass(frozen=True)
class Darkened(runs.Guided):
    """Numbers about 1, guided to those about 0.6: guidance works against what it is added to."""

    def __call__(self, x: Tensor, level: Any, time: Any) -> Prediction:
        uncond, cond = (runs.each(runs.part(mean, 0.2), x, level) for mean in (1.0, 0.6))
        return Prediction(uncond + self.scale * (cond - uncond), uncond, {"cond": cond, "uncond": uncond})


@sabotage("guidance-leads", "and not the network", "little noise is left")
def a_run_that_guidance_makes(folder: Path) -> Subject:
    return runs.recorded(folder, Darkened(3.0))


@healthy
def the_same_run_without_guidance(folder: Path) -> Subject:
    return runs.recorded(folder, Darkened(1.0))


@sabotage("prompt-no-effect", "with and without the prompt")
def a_run_whose_prompt_is_not_heard(folder: Path) -> Subject:
    return runs.recorded(folder, runs.Guided(7.0, prompt=False))


@sabotage("wrong-final-level", "sigma 0")
def a_run_that_ends_in_noise(folder: Path) -> Subject:
    return runs.recorded(folder, runs.Guided(), runs.cut())


@sabotage("wrong-start-level", "not scaled to its level")
def a_run_from_noise_of_another_level(folder: Path) -> Subject:
    noise = 14.6 * torch.randn(2, *runs.SHAPE, generator=torch.Generator().manual_seed(0))
    return runs.recorded(folder, runs.Guided(1.0), None, noise)


@sabotage("run-not-finite", "prediction is not finite")
def a_run_that_breaks(folder: Path) -> Subject:
    return runs.recorded(folder, runs.Guided(3.0, breaks_below=1.0))


@healthy
def a_run_that_is_guided_well(folder: Path) -> Subject:
    return runs.recorded(folder, runs.Guided(5.0))


# --- images ------------------------------------------------------------------------------------------------------


def looked_at(pixels: torch.Tensor, reference: bool = False) -> Subject:
    data = KnownImages(images.true(first=500)) if reference else None
    return Subject("images", images=Pixels(images.as_bytes(pixels)), data=data)


@sabotage("low-sharpness", "fine detail is missing")
def images_that_are_soft(folder: Path) -> Subject:
    return looked_at(images.blurred(images.true(), 1.0), reference=True)


@sabotage("residual-noise", "Noise of")
def images_with_noise_left(folder: Path) -> Subject:
    return looked_at(images.noisy(images.true(), 0.05))


@sabotage("oversaturated-images", "out of the range")
def images_that_are_clipped(folder: Path) -> Subject:
    return looked_at(images.clipped(images.true()))


@sabotage("tile-seams", "tiles")
def images_of_tiles_that_do_not_meet(folder: Path) -> Subject:
    return looked_at(images.tiled(images.true()))


@sabotage("colour-bleeding", "bound to the wrong objects", "guidance 15")
def images_whose_colours_bled(folder: Path) -> Subject:
    told = images.drawn(objects=(2,))
    return Subject("images", images=folder_of(images.write(folder, images.swapped(told), told, 15.0)))


@sabotage("not-as-asked", "do not show why")
def images_of_other_prompts(folder: Path) -> Subject:
    told = images.drawn(16, objects=(1,))
    shown = told[[*range(1, len(told)), 0]]
    return Subject("images", images=folder_of(images.write(folder, shown, told, 4.0)))


@healthy
def images_of_their_prompts(folder: Path) -> Subject:
    told = images.drawn(16, objects=(1,))
    return Subject("images", images=folder_of(images.write(folder, told, told, 4.0)))


@healthy
def images_that_are_true(folder: Path) -> Subject:
    return looked_at(images.true(), reference=True)

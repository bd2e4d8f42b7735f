"""Set-ups of which something is worth knowing that breaks nothing; and their counterparts, of which nothing is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import diffusers
import tiny_models as tiny
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from published import CONFIGS, LATENT, SD15, SDXL
from sabotages import noted, silent
from sabotages_config import IN_PIXELS, config, in_pixels, swapped
from sabotages_family import a_pipeline_that_only_diffusers_opens, scaled, single
from sabotages_folder import INDEX, SCHEDULER, WEIGHTS, edit, look, rewrite
from sabotages_model import stretched
from safetensors.torch import load_file

from pellucid.evidence.doctor.subject import RunSpec, Subject, SubjectSpec, of_model, open_subject

YAML = 'model:\n  params:\n    parameterization: "eps"\n'  # as it lies beside a file of CompVis

# --- configs and their plans -----------------------------------------------------------------------------------


@noted("eps-faint-signal", "almost no signal", "divides by it")
def eps_on_cosine_betas(folder: Path) -> Subject:
    """The last beta is capped at 0.999, so that a trace of the image is left at the noisiest level."""
    return config(SDXL, beta_schedule="squaredcos_cap_v2", timestep_spacing="trailing")


@noted("far-last-call", "noise of 10 in 255")
def pixels_with_a_leap_at_the_end(folder: Path) -> Subject:
    return in_pixels()


@silent
def latents_with_a_leap_at_the_end(folder: Path) -> Subject:
    return replace(in_pixels(), index=IN_PIXELS | {"_class_name": "LDMPipeline"})


@noted("inert-keys", "DPMSolverMultistepScheduler does not read them", "from another one's config")
def a_scheduler_made_from_another(folder: Path) -> Subject:
    return config(swapped("DPMSolverMultistepScheduler", SD15))


@noted("not-supported", "CogVideoXDDIMScheduler", "no sampler here")
def a_class_that_only_diffusers_runs(folder: Path) -> Subject:
    return config(CONFIGS["CogVideoX"])


@noted("not-supported", "variance_type must be fixed", "learned variance is refused")
def a_variance_that_was_learned(folder: Path) -> Subject:
    return config(CONFIGS["ddpm-cifar10-32"], variance_type="learned_range")


@noted("off-the-level", "large variance adds β")
def steps_with_the_large_variance(folder: Path) -> Subject:
    return config(CONFIGS["ddpm-cifar10-32"])


@noted("off-the-level", "v predictions of several levels are mixed")
def v_in_a_sampler_that_mixes_levels(folder: Path) -> Subject:
    return config(CONFIGS["stable-diffusion-2-1 with PNDM"])


@noted("offset-unread", "times of leading only")
def an_offset_with_trailing_times(folder: Path) -> Subject:
    return config(SDXL, timestep_spacing="trailing")


@noted("same-time-told", "rounds times to whole numbers", "denser than they are")
def a_grid_that_is_denser_than_the_times(folder: Path) -> Subject:
    return config(swapped("DPMSolverMultistepScheduler", SD15, use_karras_sigmas=True), RunSpec(steps=400))


@silent
def a_config_of_its_own_keys(folder: Path) -> Subject:
    return config(LATENT, _class_name="EulerDiscreteScheduler", timestep_spacing="trailing")


# --- recipes ---------------------------------------------------------------------------------------------------


def of_another_program(folder: Path, more: str = "") -> Subject:
    """An image with the text of A1111's web UI."""
    held = PngInfo()
    held.add_text("parameters", f"a cat\nSteps: 20, Sampler: Euler a, CFG scale: 7, Seed: 5, Size: 8x8{more}")
    Image.new("RGB", (8, 8)).save(folder / "made.png", pnginfo=held)
    return open_subject(SubjectSpec(model=str(folder / "made.png")))


@noted("recipe-unread", "Another program made the image")
def a_image_that_was_enlarged_elsewhere(folder: Path) -> Subject:
    return of_another_program(folder, ", Hires upscale: 2, Hires upscaler: Latent")


@silent
def a_image_of_another_program(folder: Path) -> Subject:
    return of_another_program(folder)


# --- folders and files -----------------------------------------------------------------------------------------


@noted("mended-key", "steps_offset=0", "StableDiffusionPipeline sets 1")
def a_folder_from_before_the_offset(folder: Path) -> Subject:
    model = tiny.copied("sd1", folder)
    edit(model / SCHEDULER, steps_offset=0)
    return look(model)


@noted("mended-key", "clip_sample=True", "StableDiffusionPipeline sets False")
def a_folder_that_clips_by_default(folder: Path) -> Subject:
    model = tiny.copied("sd1", folder)
    diffusers.DDIMScheduler(**tiny.LATENT_BETAS, steps_offset=1).save_pretrained(model / "scheduler")
    edit(model / INDEX, scheduler=["diffusers", "DDIMScheduler"])
    return look(model)


@noted("weights-mixed", "opened in the widest of them")
def weights_whose_norms_are_wider(folder: Path) -> Subject:
    model = tiny.copied("dit", folder)
    rewrite(model / "vae" / WEIGHTS, lambda held: {k: t if "norm" in k else t.half() for k, t in held.items()})
    return look(model)


@noted("weights-pickle", "may hold code")
def weights_that_are_pickled(folder: Path) -> Subject:
    model = tiny.copied("dit", folder)
    held = model / "transformer" / WEIGHTS
    torch.save(load_file(held), held.with_suffix(".bin"))
    held.unlink()
    return look(model)


@noted("not-supported", "got FluxPipeline", "pellucid.wrap")
def a_pipeline_that_is_not_read(folder: Path) -> Subject:
    return a_pipeline_that_only_diffusers_opens(folder)


@noted("not-supported", "A single file contains no tokenizer")
def a_file_without_a_tokenizer(folder: Path) -> Subject:
    file = single(folder, "sd1")
    (folder / "tokenizer").unlink()
    return look(file, quick=False)


@noted("target-assumed", "Nothing in the file says", "as Stable Diffusion 1 does")
def a_file_of_a_family_with_one_target(folder: Path) -> Subject:
    return look(single(folder, "sd1"))


@silent
def a_file_with_its_yaml(folder: Path) -> Subject:
    file = single(folder, "sd1")
    file.with_suffix(".yaml").write_text(YAML, encoding="utf-8")
    return of_model(
        str(file), RunSpec(sampler="ddim"), SubjectSpec(quick=True)
    )  # the family's own scheduler ends above 0


@silent
def a_folder_of_the_first_pipeline(folder: Path) -> Subject:
    model = tiny.copied("sd1", folder)
    made = diffusers.EulerDiscreteScheduler(**tiny.LATENT_BETAS, steps_offset=1, timestep_spacing="leading")
    made.save_pretrained(model / "scheduler")
    edit(model / INDEX, scheduler=["diffusers", "EulerDiscreteScheduler"])
    return look(model)


# --- numbers of a model ----------------------------------------------------------------------------------------


@noted("too-large-for-float16", "works in float32 now", "would overflow")
def a_layer_that_needs_float32(folder: Path) -> Subject:
    return stretched(5e4, "float32")


@noted("vae-shift", "mean is far from 0", "shift_factor")
def a_vae_without_its_shift(folder: Path) -> Subject:
    """Its latents lie one standard deviation beside 0, and its config does not say so."""
    subject = scaled(folder, 1.0)
    means, _ = subject.vae.quant_conv.bias.data.chunk(2)  # the other half are logarithms of variances
    means += 1 / subject.vae.config.scaling_factor
    return subject


@silent
def a_vae_with_its_shift(folder: Path) -> Subject:
    subject = a_vae_without_its_shift(folder)
    shift = 1 / subject.vae.config.scaling_factor
    subject.vae.config = replace(subject.vae.config, shift_factor=shift)
    return subject


@silent
def a_whole_model(folder: Path) -> Subject:
    return look(tiny.copied("dit", folder), quick=False)

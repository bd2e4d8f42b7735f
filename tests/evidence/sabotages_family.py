"""Models and files that contradict their family, or the scale of their own VAE; and those that do not."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import tiny_models as tiny
import torch
from diffusers import AutoencoderKL
from PIL import Image
from sabotages import HEALTHY, healthy, sabotage
from sabotages_folder import INDEX, SCHEDULER, WEIGHTS, edit, linked, look, rewrite
from safetensors.torch import save_file
from tiny_bundle import NAME, bundles
from torch import Tensor
from transformers import CLIPTextModel

from pellucid.evidence.doctor.probe import open_data
from pellucid.evidence.doctor.subject import RunSpec, Subject, SubjectSpec, open_subject
from pellucid.pipeline.recipe import Recipe, write_png

# --- families --------------------------------------------------------------------------------------------------


@cache
def family(width: int, sample: int) -> Path:
    """A small network that has the width and the size by which a published family is known."""
    unet = {**tiny.SD1_UNET, "cross_attention_dim": width, "sample_size": sample}
    text = tiny.text_config(hidden_size=width, num_hidden_layers=1)
    raw = tiny.root() / f"family-{width}-{sample}"
    pipe = tiny.stable_diffusion(
        raw, unet=unet, text_encoder=tiny.randomised(CLIPTextModel(text)),
        scheduler=diffusers.PNDMScheduler(
            **tiny.LATENT_BETAS, skip_prk_steps=True, steps_offset=1,
            prediction_type="v_prediction" if sample == 96 else "epsilon",
        ),
    )  # fmt: skip
    pipe.save_pretrained(raw / "model")
    return raw / "model"


def family_copy(folder: Path, width: int = 768, sample: int = 64) -> Path:
    return linked(family(width, sample), folder / "model")


@sabotage("target-family", "Stable Diffusion 2 at 768 pixels", "trained for v")
def sd2_v_that_is_said_to_predict_eps(folder: Path) -> Subject:
    model = family_copy(folder, 1024, 96)
    edit(model / SCHEDULER, prediction_type="epsilon")
    return look(model)


@sabotage("schedule-family", "not made from the model's own config")
def sd1_with_a_scheduler_made_anew(folder: Path) -> Subject:
    """`pipe.scheduler = EulerDiscreteScheduler()`, and not from the config."""
    model = family_copy(folder)
    diffusers.EulerDiscreteScheduler().save_pretrained(model / "scheduler")
    edit(model / INDEX, scheduler=["diffusers", "EulerDiscreteScheduler"])
    return look(model)


@sabotage("scaling-family", "0.72 times as large")
def sd1_with_the_scale_of_xl(folder: Path) -> Subject:
    model = family_copy(folder)
    edit(model / "vae/config.json", scaling_factor=0.13025)
    return look(model)


@sabotage("target-name", "named so")
def a_name_that_speaks_of_v(folder: Path) -> Subject:
    return look(tiny.copied("sd1", folder).rename(folder / "wonder-vpred-v1"))


@sabotage("clipped-latents", "cuts the predicted x0")
def latents_that_are_clipped(folder: Path) -> Subject:
    model = tiny.copied("dit", folder)
    edit(model / SCHEDULER, clip_sample=True)
    return look(model)


@sabotage("threshold-latents", "made for pixels")
def latents_under_a_threshold(folder: Path) -> Subject:
    model = tiny.copied("dit", folder)
    edit(model / SCHEDULER, thresholding=True)
    return look(model)


@sabotage("distilled-scheduler", "a consistency model")
def a_consistency_model_in_a_solver(folder: Path) -> Subject:
    model = tiny.copied("lcm", folder)
    diffusers.DPMSolverMultistepScheduler(**tiny.LATENT_BETAS).save_pretrained(model / "scheduler")
    edit(model / INDEX, scheduler=["diffusers", "DPMSolverMultistepScheduler"])
    return look(model)


@sabotage("flow-in-eps-sampler", "a schedule of betas")
def a_flow_network_with_a_solver_of_betas(folder: Path) -> Subject:
    """SD3's index and configs with DDIM; no weights are needed to see it."""
    made = diffusers.SD3Transformer2DModel(sample_size=8, num_layers=1, num_attention_heads=1, attention_head_dim=8,
                                           joint_attention_dim=8, caption_projection_dim=8, pooled_projection_dim=8,
                                           in_channels=4, out_channels=4, pos_embed_max_size=8)  # fmt: skip
    made.save_pretrained(folder / "transformer")
    diffusers.DDIMScheduler(**tiny.LATENT_BETAS).save_pretrained(folder / "scheduler")
    index = {
        "_class_name": "StableDiffusion3Pipeline",
        "scheduler": ["diffusers", "DDIMScheduler"],
        "transformer": ["diffusers", "SD3Transformer2DModel"],
    }
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    return look(folder)


# --- the VAE's scale -------------------------------------------------------------------------------------------


def scaled(folder: Path, times: float) -> Subject:
    """A VAE whose factor is so many times the one that diffusers' own encoder measures."""
    model = tiny.copied("dit", folder)
    data = open_data("scenes", 16)
    with torch.no_grad():
        raw = AutoencoderKL.from_pretrained(model / "vae").encode(data.pixels * 2 - 1).latent_dist.mean
    edit(model / "vae/config.json", scaling_factor=times / float(raw.std()))
    subject = open_subject(SubjectSpec(model=str(model), data="scenes"), RunSpec(device="cpu"))
    return replace(subject, pipeline=None)  # its network was never trained, which is another finding


@sabotage("vae-scale", "standard deviation 1", "5.5 times too clean")
def a_vae_without_its_scale(folder: Path) -> Subject:
    return scaled(folder, 1 / 0.18215)


@healthy
def a_vae_with_its_scale(folder: Path) -> Subject:
    return scaled(folder, 1.0)


# --- single files ----------------------------------------------------------------------------------------------


def single(folder: Path, name: str, **more: Tensor) -> Path:
    pipe, saved = tiny.saved(name)
    tensors = {k: t.contiguous().clone() for k, t in tiny.checkpoint(pipe).items()}
    save_file({**tensors, **more}, folder / "model.safetensors")
    (folder / "tokenizer").symlink_to(saved / "tokenizer")
    return folder / "model.safetensors"


@sabotage("target-unknown", "exists as eps and as v")
def a_file_that_does_not_say_its_target(folder: Path) -> Subject:
    return look(single(folder, "sd2"))


@sabotage("target-sources", "the yaml beside it says eps")
def a_file_whose_yaml_disagrees(folder: Path) -> Subject:
    file = single(folder, "sd2", v_pred=torch.tensor([]))
    file.with_suffix(".yaml").write_text('model:\n  params:\n    parameterization: "eps"\n', encoding="utf-8")
    return look(file)


@sabotage("does-not-load", "truncated or corrupt")
def a_file_that_is_cut_off(folder: Path) -> Subject:
    file = single(folder, "sd1")
    file.write_bytes(file.read_bytes()[:-1000])
    return look(file)


@sabotage("size-off", "know")
def a_recipe_of_another_size(folder: Path) -> Subject:
    write_png(Image.new("RGB", (8, 8)), folder / "made.png", Recipe(model=str(tiny.saved("dit")[1]), size=(64, 64)))
    return open_subject(SubjectSpec(model=str(folder / "made.png")), RunSpec(device="cpu"))


# --- what is well ----------------------------------------------------------------------------------------------


def as_saved(name: str) -> Any:
    """As diffusers saved it, but for images of few pixels, which take less time."""

    def make(folder: Path) -> Subject:
        model = linked(tiny.saved(name)[1], folder / "model")
        for network in (model / "unet", model / "transformer"):
            if network.is_dir():
                edit(network / "config.json", sample_size=8)
        return look(model, quick=False)

    return make


HEALTHY.update({f"tiny {name}": as_saved(name) for name in tiny.FOLDERS})


def unrun(file: Path) -> Subject:
    """A single file that loads; a run of it takes long, for its size is that of its family."""
    subject = look(file, quick=False)
    assert subject.pipeline is not None
    return replace(subject, pipeline=None)


@healthy
def a_single_file(folder: Path) -> Subject:
    return unrun(single(folder, "sd1"))


@healthy
def a_single_file_that_says_v(folder: Path) -> Subject:
    return unrun(single(folder, "sd2", v_pred=torch.tensor([])))


@healthy
def a_bundle_like_scenes_128(folder: Path) -> Subject:
    return look(bundles() / NAME, quick=False)


@healthy
def its_transformer_which_shares_parts(folder: Path) -> Subject:
    return look(bundles() / NAME / "dit", quick=False)


@healthy
def sd1_by_its_width(folder: Path) -> Subject:
    return look(family(768, 64))


@healthy
def sd2_v_by_its_width(folder: Path) -> Subject:
    return look(family(1024, 96))


@healthy
def sd1_fine_tuned_for_v(folder: Path) -> Subject:
    model = family_copy(folder)
    options = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    diffusers.DDIMScheduler(**tiny.LATENT_BETAS, **options).save_pretrained(model / "scheduler")
    edit(model / INDEX, scheduler=["diffusers", "DDIMScheduler"])
    return look(model)


@healthy
def half_precision(folder: Path) -> Subject:
    model = tiny.copied("dit", folder)
    for part in ("transformer", "vae"):
        rewrite(model / part / WEIGHTS, lambda held: {k: t.half() for k, t in held.items()})
    return look(model, quick=False)


@healthy
def a_pipeline_that_only_diffusers_opens(folder: Path) -> Subject:
    """Flux's index with parts that we do not have, a processor and a second scheduler among them."""
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=1,
        joint_attention_dim=8, pooled_projection_dim=8, axes_dims_rope=(2, 2, 4),
    )  # fmt: skip
    transformer.save_pretrained(folder / "transformer")
    for part in ("scheduler", "image_noising_scheduler"):
        diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(folder / part)
    for part, file, held in (
        ("text_encoder", "config.json", {"architectures": ["Gemma2ForCausalLM"]}),
        ("tokenizer", "tokenizer_config.json", {}),
        ("feature_extractor", "preprocessor_config.json", {}),
    ):
        (folder / part).mkdir()
        (folder / part / file).write_text(json.dumps(held), encoding="utf-8")
    index = {
        "_class_name": "FluxPipeline",
        "feature_extractor": ["transformers", "CLIPImageProcessor"],
        "image_noising_scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "safety_checker": [None, None],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Gemma2Model"],
        "tokenizer": ["transformers", "GemmaTokenizerFast"],
        "transformer": ["diffusers", "FluxTransformer2DModel"],
    }
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    return look(folder, quick=False)

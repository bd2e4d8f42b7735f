"""Scheduler configs, plans and requests that are broken in one way; and the published ones, which are not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
from PIL import Image
from published import CONFIGS, FLUX, LATENT, SD15, SD21_V, SDXL
from sabotages import HEALTHY, healthy, sabotage

from pellucid import compile_plan
from pellucid.core.schedule import make
from pellucid.evidence.doctor.subject import RunSpec, Subject, SubjectSpec, of_config, open_subject
from pellucid.pipeline.recipe import Recipe, write_png


def config(base: dict[str, Any], asked: RunSpec | None = None, **changes: Any) -> Subject:
    return of_config({**base, **changes}, asked or RunSpec())


def swapped(name: str, base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The config that diffusers saves when one scheduler is made from another's."""
    made = getattr(diffusers, name).from_config(base, **changes)
    return json.loads(made.to_json_string())


# --- schedule and target ---------------------------------------------------------------------------------------


@sabotage("eps-zero-snr", "rescale_betas_zero_snr is set", "not determined by eps")
def eps_with_rescaled_betas(folder: Path) -> Subject:
    return config(SDXL, rescale_betas_zero_snr=True, timestep_spacing="trailing")


@sabotage("eps-zero-snr", "the last beta is 1")
def eps_with_betas_that_end_at_one(folder: Path) -> Subject:
    return config(SD15, trained_betas=[0.1 * n for n in range(1, 11)], _class_name="DDIMScheduler")


@sabotage("flow-in-eps-sampler", "a schedule of betas", "(1 − t)·x0 + t·eps")
def flow_model_in_a_solver_of_betas(folder: Path) -> Subject:
    """What users get from `DPMSolverMultistepScheduler.from_config(flux.scheduler.config)`."""
    return config(swapped("DPMSolverMultistepScheduler", FLUX))


@sabotage("flow-in-eps-sampler", "a schedule of betas")
def flow_target_without_flow_sigmas(folder: Path) -> Subject:
    return config(swapped("UniPCMultistepScheduler", SD15), prediction_type="flow_prediction")


@sabotage("eps-in-flow-sampler", "FlowMatchEulerDiscreteScheduler lays", "was never trained")
def eps_model_in_a_flow_sampler(folder: Path) -> Subject:
    return config(swapped("FlowMatchEulerDiscreteScheduler", SDXL))


@sabotage("eps-in-flow-sampler", "use_flow_sigmas lays")
def eps_model_on_flow_sigmas(folder: Path) -> Subject:
    return config(swapped("DPMSolverMultistepScheduler", SD15, use_flow_sigmas=True))


@sabotage("schedule-ends-early", "holds 87% of the image")
def few_training_times(folder: Path) -> Subject:
    return config(SD15, num_train_timesteps=50, _class_name="DDIMScheduler")


@sabotage("zero-snr-not-reached", "start from pure noise")
def zero_snr_with_leading_times(folder: Path) -> Subject:
    return config(SD21_V, rescale_betas_zero_snr=True, timestep_spacing="leading")


# --- keys ------------------------------------------------------------------------------------------------------


@sabotage("unknown-key", "ignores use_karas_sigmas")
def a_key_with_a_slip(folder: Path) -> Subject:
    return config(SDXL, use_karas_sigmas=True)


@sabotage("unheard-key", "DDIMScheduler does not read use_karras_sigmas")
def karras_where_it_is_not_read(folder: Path) -> Subject:
    return config(SD21_V, use_karras_sigmas=True)


@sabotage("unheard-key", "HeunDiscreteScheduler does not read rescale_betas_zero_snr")
def zero_snr_where_it_is_not_read(folder: Path) -> Subject:
    base = {**SDXL, "prediction_type": "v_prediction", "rescale_betas_zero_snr": True}
    return config(swapped("HeunDiscreteScheduler", base))


@sabotage("scheduler-class", "EulerDiscretScheduler")
def a_class_with_a_slip(folder: Path) -> Subject:
    return config(SDXL, _class_name="EulerDiscretScheduler")


@sabotage("config-value", "timestep_spacing must be one of leading")
def a_spacing_with_a_slip(folder: Path) -> Subject:
    return config(SDXL, timestep_spacing="trailling")


@sabotage("config-value", "use_karras_sigmas, use_exponential_sigmas")
def two_sigma_rules(folder: Path) -> Subject:
    return config(SDXL, use_karras_sigmas=True, use_beta_sigmas=True)


@sabotage("offset-large", "published configs say 0 or 1")
def an_offset_of_a_hundred(folder: Path) -> Subject:
    return config(SDXL, steps_offset=100)


# --- the plan --------------------------------------------------------------------------------------------------


@sabotage("repeated-last-sigma", "last sigma of the grid is repeated", "x stays what it was")
def karras_with_a_null_last_step(folder: Path) -> Subject:
    return config(swapped("DEISMultistepScheduler", SD15, use_karras_sigmas=True))


@sabotage("repeated-last-sigma", "x stays what it was")
def least_sigma_twice(folder: Path) -> Subject:
    options = {"use_karras_sigmas": True, "final_sigmas_type": "sigma_min"}
    return config(swapped("DPMSolverMultistepScheduler", SD15, **options))


COSINE_V = {"_class_name": "DDIMScheduler", "beta_schedule": "squaredcos_cap_v2", "prediction_type": "v_prediction"}
IN_PIXELS = {"_class_name": "DDIMPipeline", "unet": ["diffusers", "UNet2DModel"]}


def in_pixels(**changes: Any) -> Subject:
    """A config of DDIM in a folder without a VAE, with 50 steps."""
    base = {"_class_name": "DDIMScheduler", "beta_schedule": "linear", "timestep_spacing": "trailing"}
    return replace(config(base, RunSpec(steps=50), **changes), index=IN_PIXELS)


@sabotage("far-last-call", "noise of 50 in 255", "smoother than images are")
def pixels_that_end_far_from_the_data(folder: Path) -> Subject:
    """The sqrt schedule leaves the data so fast that its twentieth time holds noise of 0.39."""
    return in_pixels(trained_betas=make("sqrt_alpha_bar").betas.tolist(), prediction_type="v_prediction")


@healthy
def pixels_to_the_first_time(folder: Path) -> Subject:
    return in_pixels(timestep_spacing="leading")


@sabotage("plan-exaggerates", "heun steps too far", "come out as 5.81")
def heun_from_pure_noise(folder: Path) -> Subject:
    """Its second call of the first step is trusted as much as the first, which saw nothing."""
    return config(COSINE_V, RunSpec(steps=20, sampler="heun", grid="trailing"))


@healthy
def ddim_from_pure_noise(folder: Path) -> Subject:
    return config(COSINE_V, RunSpec(steps=20, sampler="ddim", grid="trailing"))


@sabotage("previous-step", "diffusers steps to t − 33")
def ddim_off_leading(folder: Path) -> Subject:
    return config(SD21_V, timestep_spacing="linspace")


@sabotage("steps-beyond", "500 or more steps would repeat")
def more_steps_than_times(folder: Path) -> Subject:
    return config(SDXL, RunSpec(steps=1500))


@sabotage("steps-beyond", "50 whole times")
def more_steps_than_the_distillation(folder: Path) -> Subject:
    return config(CONFIGS["LCM_Dreamshaper_v7"], RunSpec(steps=60))


@sabotage("no-plan", "keeps 1000 steps below 1000")
def an_offset_beyond_the_last_time(folder: Path) -> Subject:
    return config(SD21_V, RunSpec(steps=1000))


@sabotage("strength-below-a-step", "which is 0")
def strength_for_no_step(folder: Path) -> Subject:
    return config(SDXL, RunSpec(steps=20, strength=0.04))


@sabotage("late-start", "starts from noise that holds none")
def one_step_from_the_clean_end(folder: Path) -> Subject:
    return config(SDXL, RunSpec(steps=1), timestep_spacing="linspace")


@sabotage("calls-in-noise", "8 calls are left for all of the image")
def karras_on_cosine_betas(folder: Path) -> Subject:
    return config(SD21_V, RunSpec(steps=20), beta_schedule="squaredcos_cap_v2", use_karras_sigmas=True,
                  _class_name="DPMSolverMultistepScheduler")  # fmt: skip


@sabotage("noisy-end", "and is visible")
def a_noisy_end(folder: Path) -> Subject:
    return config(SDXL, final_sigmas_type="sigma_min", beta_start=0.02, beta_end=0.03)


@sabotage("null-step", "repeats a level")
def a_grid_that_repeats_levels(folder: Path) -> Subject:
    return config(SDXL, RunSpec(steps=999), timestep_spacing="trailing", num_train_timesteps=999, steps_offset=0,
                  trained_betas=[0.01] * 400)  # fmt: skip


@sabotage("plan-broken", "marginal law")
def a_plan_with_a_changed_weight(folder: Path) -> Subject:
    held = compile_plan("ddim", steps=8).to_dict()
    held["rows"][3]["x"]["x"] *= 1.01
    (folder / "plan.json").write_text(json.dumps(held), encoding="utf-8")
    return open_subject(SubjectSpec(model=str(folder / "plan.json")))


# --- recipes ---------------------------------------------------------------------------------------------------


def image(folder: Path, **fields: Any) -> Path:
    write_png(Image.new("RGB", (8, 8)), folder / "made.png", Recipe(**fields))
    return folder / "made.png"


@sabotage("guidance-high", "colours saturate")
def a_recipe_with_much_guidance(folder: Path) -> Subject:
    return open_subject(SubjectSpec(model=str(image(folder, guidance={"scale": 20.0, "rules": []}))))


@healthy
def a_recipe(folder: Path) -> Subject:
    return open_subject(SubjectSpec(model=str(image(folder, sampler="euler", steps=20, guidance={"scale": 5.0}))))


@healthy
def a_plan(folder: Path) -> Subject:
    (folder / "plan.json").write_text(compile_plan("dpmpp_2m", grid="karras", steps=8).to_json(), encoding="utf-8")
    return open_subject(SubjectSpec(model=str(folder / "plan.json")))


@healthy
def strength_for_one_step(folder: Path) -> Subject:
    return config(SDXL, RunSpec(steps=20, strength=0.05))


@healthy
def many_steps_of_a_named_sampler(folder: Path) -> Subject:
    return config(SDXL, RunSpec(steps=1500, strength=0.0001, sampler="ddim"))


@healthy
def betas_of_training(folder: Path) -> Subject:
    return config({**LATENT, "_class_name": "DDIMScheduler"}, trained_betas=[0.0001 + 0.00002 * n for n in range(1000)])


def as_published(name: str) -> Any:
    return lambda folder: of_config(CONFIGS[name], RunSpec())


HEALTHY.update({name: as_published(name) for name in CONFIGS})

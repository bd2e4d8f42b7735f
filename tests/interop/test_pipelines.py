"""Scheduler inside diffusers' own pipelines: the same images as with diffusers' class, and many calls at once.

Both sides work in float32 and their sums are ordered differently, so they part by rounding, which the network
amplifies over the steps: 1e-4 of the largest latent leaves an order of magnitude above what was seen.
"""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    FluxPipeline,
    FluxTransformer2DModel,
    LatentConsistencyModelImg2ImgPipeline,
    LatentConsistencyModelPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from torch import Tensor

import pellucid
from pellucid import Grid, Scheduler

BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
SD = {**BETAS, "steps_offset": 1}  # pipelines rewrite any other offset, with a warning
CLOSE = 1e-4
LEADING = {**SD, "timestep_spacing": "leading"}
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddim": ("DDIMScheduler", {**LEADING, "clip_sample": False, "set_alpha_to_one": False}),
    "ddim-trailing": ("DDIMScheduler", {**SD, "timestep_spacing": "trailing", "clip_sample": False}),
    "pndm": ("PNDMScheduler", {**LEADING, "skip_prk_steps": True}),
    "euler": ("EulerDiscreteScheduler", LEADING),
    "euler-trailing": ("EulerDiscreteScheduler", {**SD, "timestep_spacing": "trailing"}),
    "euler-a": ("EulerAncestralDiscreteScheduler", LEADING),
    "heun": ("HeunDiscreteScheduler", LEADING),
    "dpmpp-2m": ("DPMSolverMultistepScheduler", LEADING),
    "dpmpp-2m-karras": ("DPMSolverMultistepScheduler", {**SD, "use_karras_sigmas": True}),
    "dpmpp-2m-sde": ("DPMSolverMultistepScheduler", {**SD, "algorithm_type": "sde-dpmsolver++"}),
    "dpmpp-2s": ("DPMSolverSinglestepScheduler", BETAS),
    "unipc": ("UniPCMultistepScheduler", LEADING),
    "unipc-3": ("UniPCMultistepScheduler", {**SD, "solver_order": 3}),
    "lms": ("LMSDiscreteScheduler", SD),
    "kdpm2": ("KDPM2DiscreteScheduler", SD),
    "kdpm2-a": ("KDPM2AncestralDiscreteScheduler", SD),
    "deis": ("DEISMultistepScheduler", {**SD, "solver_order": 3}),
    "sa": ("SASolverScheduler", SD),
    "ddpm": ("DDPMScheduler", {**LEADING, "clip_sample": False}),
    "lcm": ("LCMScheduler", {**SD}),
    "tcd": ("TCDScheduler", {**SD}),
}


def pipeline(kind: type, components: dict[str, Any], scheduler: Any) -> Any:
    made = kind(**components, scheduler=scheduler, requires_safety_checker=False)
    made.set_progress_bar_config(disable=True)
    return made


def peer(name: str) -> Any:
    class_name, config = PEERS[name]
    return getattr(diffusers, class_name)(**config)


def latents(pipe: Any, seed: int = 1, **settings: Any) -> Tensor:
    call = {
        "prompt": "a cat",
        "num_inference_steps": 6,
        "generator": torch.Generator().manual_seed(seed),
        "output_type": "latent",
        **settings,
    }
    return pipe(**call).images


def apart(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    assert b.isfinite().all()
    return float((a - b).abs().max() / b.abs().max())


# --- text to image ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize("name", PEERS)
def test_text_to_image_equals_diffusers(name: str, steps: int, components: dict[str, Any]) -> None:
    theirs = pipeline(StableDiffusionPipeline, components, peer(name))
    ours = pipeline(StableDiffusionPipeline, components, Scheduler.from_config(peer(name)))
    want, got = (latents(p, num_inference_steps=steps) for p in (theirs, ours))
    assert apart(got, want) < CLOSE
    assert apart(latents(ours, seed=2, num_inference_steps=steps), want) > 0.01


def test_pixels_are_equal_too(components: dict[str, Any]) -> None:
    theirs, ours = (
        pipeline(StableDiffusionPipeline, components, s)
        for s in (peer("dpmpp-2m"), Scheduler.from_config(peer("dpmpp-2m")))
    )
    want, got = (latents(p, output_type="pt") for p in (theirs, ours))
    assert want.shape == (1, 3, 16, 16)
    assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("eta", [0.0, 0.3, 1.0])
def test_eta_reaches_ddim(eta: float, components: dict[str, Any]) -> None:
    theirs = pipeline(StableDiffusionPipeline, components, peer("ddim"))
    ours = pipeline(StableDiffusionPipeline, components, Scheduler.from_config(peer("ddim")))
    want, got = (latents(p, eta=eta) for p in (theirs, ours))
    assert apart(got, want) < CLOSE
    assert (apart(got, latents(ours)) > 0.01) == (eta > 0)


@pytest.mark.parametrize("name", ["ddim", "euler-a", "dpmpp-2m-sde", "lcm"])
def test_several_images_with_a_generator_each(name: str, components: dict[str, Any]) -> None:
    def seeds() -> list[torch.Generator]:
        return [torch.Generator().manual_seed(s) for s in (3, 4)]

    theirs = pipeline(StableDiffusionPipeline, components, peer(name))
    ours = pipeline(StableDiffusionPipeline, components, Scheduler.from_config(peer(name)))
    settings: dict[str, Any] = {"num_images_per_prompt": 2, "eta": 0.5 if name == "ddim" else 0.0}
    want, got = (latents(p, generator=seeds(), **settings) for p in (theirs, ours))
    assert want.shape == (2, 4, 8, 8)
    assert apart(got, want) < CLOSE
    alone = latents(ours, seed=4, eta=settings["eta"])
    assert apart(got[1:], alone) < CLOSE  # a generator each: the image does not depend on its batch


@pytest.mark.parametrize("name", ["dpmpp-2m", "euler", "heun"])
def test_explicit_sigmas_and_timesteps_pass_through_the_pipeline(name: str, components: dict[str, Any]) -> None:
    theirs = pipeline(StableDiffusionPipeline, components, peer(name))
    ours = pipeline(StableDiffusionPipeline, components, Scheduler.from_config(peer(name)))
    want, got = (latents(p, timesteps=[901, 600, 333, 90], num_inference_steps=None) for p in (theirs, ours))
    assert apart(got, want) < CLOSE


def test_guidance_rescale_and_callbacks(components: dict[str, Any]) -> None:
    seen: dict[str, list[int]] = {"theirs": [], "ours": []}

    def call(name: str, pipe: Any) -> Tensor:
        def on_step(pipe: Any, i: int, t: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
            seen[name].append(int(t))
            return kwargs

        return latents(pipe, guidance_scale=9.0, guidance_rescale=0.7, callback_on_step_end=on_step)

    want = call("theirs", pipeline(StableDiffusionPipeline, components, peer("dpmpp-2m-karras")))
    got = call("ours", pipeline(StableDiffusionPipeline, components, Scheduler.from_config(peer("dpmpp-2m-karras"))))
    assert apart(got, want) < CLOSE
    assert seen["ours"] == seen["theirs"]
    assert len(seen["ours"]) == 6


@pytest.mark.parametrize(
    "scheduler",
    [
        Scheduler("dpmpp_2m", grid="karras"),
        Scheduler("DPM++ 2M Karras"),
        Scheduler("er_sde"),
        Scheduler("res_multistep"),
        Scheduler("restart"),
        Scheduler("heunpp2"),
        Scheduler("gradient_estimation"),
        Scheduler("dpm_fast"),
        Scheduler("dpmpp_2s_a", eta=0.5),
        Scheduler("dpmpp_sde", grid="exponential"),
        Scheduler("unipc", order=3, grid="kl_optimal"),
        Scheduler("dpmpp_3m_sde", grid="ays"),
    ],
    ids=lambda s: f"{s.reading.sampler}-{s.reading.grid.name}",
)
def test_samplers_that_diffusers_has_not(scheduler: Scheduler, components: dict[str, Any]) -> None:
    pipe = pipeline(StableDiffusionPipeline, components, scheduler)
    got = latents(pipe, num_inference_steps=8)
    assert got.shape == (1, 4, 8, 8)
    assert got.isfinite().all()
    assert torch.equal(got, latents(pipe, num_inference_steps=8))
    assert apart(latents(pipe, seed=2, num_inference_steps=8), got) > 0.01


def test_native_exact_sampler_is_near_its_diffusers_dialect(components: dict[str, Any]) -> None:
    """Exact and dialect differ by rounding of times and the first noise only: the same image, not the same bits."""
    pipes = [
        pipeline(StableDiffusionPipeline, components, Scheduler("ddim", grid="leading", dialect=d))
        for d in ("exact", "diffusers")
    ]
    exact, dialect = (latents(p, num_inference_steps=10) for p in pipes)
    assert 0 < apart(exact, dialect) < 0.2


# --- image to image and inpainting -----------------------------------------------------------------------------


def image() -> Tensor:
    return torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(9))


IMG2IMG = [
    "ddim",
    "ddim-trailing",
    "euler",
    "euler-trailing",
    "euler-a",
    "dpmpp-2m",
    "dpmpp-2m-karras",
    "unipc",
    "heun",
    "deis",
    "kdpm2",
    "ddpm",
    "dpmpp-2m-sde",
    "dpmpp-2s",
    "pndm",
    "lms",
    "kdpm2-a",
]


@pytest.mark.parametrize("strength", [0.3, 0.75, 1.0])
@pytest.mark.parametrize("name", IMG2IMG)
def test_image_to_image_equals_diffusers(name: str, strength: float, components: dict[str, Any]) -> None:
    theirs = pipeline(StableDiffusionImg2ImgPipeline, components, peer(name))
    ours = pipeline(StableDiffusionImg2ImgPipeline, components, Scheduler.from_config(peer(name)))
    want, got = (latents(p, image=image(), strength=strength, num_inference_steps=10) for p in (theirs, ours))
    assert apart(got, want) < CLOSE


INPAINT = [
    "ddim", "euler", "euler-a", "dpmpp-2m", "dpmpp-2m-karras", "unipc", "heun",
    "pndm", "lms", "dpmpp-2s", "kdpm2", "kdpm2-a",
]  # fmt: skip


@pytest.mark.parametrize("strength", [0.6, 1.0])
@pytest.mark.parametrize("name", INPAINT)
def test_inpainting_equals_diffusers(name: str, strength: float, components: dict[str, Any]) -> None:
    """The four-channel way: after each step the known half is put back with the noise of the next level."""
    mask = torch.zeros(1, 1, 16, 16)
    mask[..., 8:] = 1.0
    theirs = pipeline(StableDiffusionInpaintPipeline, components, peer(name))
    ours = pipeline(StableDiffusionInpaintPipeline, components, Scheduler.from_config(peer(name)))
    settings: dict[str, Any] = {"image": image(), "mask_image": mask, "strength": strength, "height": 16, "width": 16}
    want, got = (latents(p, num_inference_steps=8, **settings) for p in (theirs, ours))
    assert apart(got, want) < CLOSE


# --- other pipelines -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("kind", [LatentConsistencyModelPipeline, LatentConsistencyModelImg2ImgPipeline])
def test_lcm_pipelines_equal_diffusers(kind: type, steps: int, components: dict[str, Any]) -> None:
    """They pass original_inference_steps and strength, and take (sample, denoised) back."""
    torch.manual_seed(2)
    plain = {k: v for k, v in components["unet"].config.items() if not k.startswith("_")}
    parts = {**components, "unet": UNet2DConditionModel(**{**plain, "time_cond_proj_dim": 8}).eval()}
    theirs = pipeline(kind, parts, peer("lcm"))
    ours = pipeline(kind, parts, Scheduler.from_config(peer("lcm")))
    settings: dict[str, Any] = {"original_inference_steps": 40}
    if kind is LatentConsistencyModelImg2ImgPipeline:
        settings |= {"image": image(), "strength": 0.6}
    want, got = (latents(p, num_inference_steps=steps, **settings) for p in (theirs, ours))
    assert apart(got, want) < CLOSE


@pytest.mark.parametrize(
    "config", [{"shift": 3.0, "use_dynamic_shifting": True}, {"shift": 1.0}, {"shift": 3.0}], ids=str
)
def test_flux_pipeline_equals_diffusers(config: dict[str, Any]) -> None:
    """A flow pipeline: it reads base_shift and the like from the config and passes sigmas and mu."""
    torch.manual_seed(1)
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        axes_dims_rope=[4, 4, 8],
    ).eval()
    vae = AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=1,
        sample_size=16,
        block_out_channels=(4,),
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.06,
        scaling_factor=1.5,
    ).eval()
    text = {"prompt_embeds": torch.randn(1, 5, 8), "pooled_prompt_embeds": torch.randn(1, 8)}
    nothing = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**config)
    results = []
    for chosen in (scheduler, Scheduler.from_config(scheduler)):
        pipe = FluxPipeline(scheduler=chosen, vae=vae, transformer=transformer, **nothing)
        pipe.set_progress_bar_config(disable=True)
        results.append(latents(pipe, prompt=None, height=8, width=8, **text))
    assert apart(results[1], results[0]) < CLOSE


# --- many calls at once ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dpmpp-2m-karras", "unipc", "heun", "pndm", "euler-a"])
def test_four_threads_on_one_pipeline(name: str, components: dict[str, Any]) -> None:
    """One pipeline object, one scheduler object, four requests at once: each gives the image that it gives alone."""
    pipe = pipeline(StableDiffusionPipeline, components, Scheduler.from_config(peer(name)))
    requests = [("a cat", 5, 1), ("a dog", 9, 2), ("a red fox", 7, 3), ("a cat", 12, 4)]
    # encoded before: the padding of a fast tokenizer is state of the object, and races with any scheduler
    encoded = {prompt: pipe.encode_prompt(prompt, "cpu", 1, True) for prompt, _, _ in requests}

    def ask(prompt: str, steps: int, seed: int) -> Tensor:
        cond, uncond = encoded[prompt]
        given = {"prompt": None, "prompt_embeds": cond, "negative_prompt_embeds": uncond}
        return latents(pipe, seed=seed, num_inference_steps=steps, **given)

    alone = [ask(*request) for request in requests]
    together: list[Any] = [None] * len(requests)
    gate = threading.Barrier(len(requests))

    def work(i: int) -> None:
        torch.set_num_threads(1)
        gate.wait(30)
        try:
            together[i] = ask(*requests[i])
        except Exception as error:
            together[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for got, want in zip(together, alone, strict=True):
        assert isinstance(got, Tensor), got
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["dpmpp-2m-karras", "unipc"])
def test_tasks_of_one_event_loop(name: str) -> None:
    """asyncio tasks that take turns after every step on one scheduler: each has its own run."""
    scheduler = Scheduler.from_config(peer(name))

    async def request(steps: int, size: float) -> Tensor:
        scheduler.set_timesteps(steps)
        x = torch.full((1, 4, 2, 2), size)
        for t in scheduler.timesteps:
            await asyncio.sleep(0)
            out = torch.tanh(scheduler.scale_model_input(x, t)) * (1 + float(t) / 1000)
            await asyncio.sleep(0)
            x = scheduler.step(out, t, x, return_dict=False)[0]
        return x

    async def together() -> list[Tensor]:
        return await asyncio.gather(*(request(n, s) for n, s in ((5, 1.0), (9, 0.5), (7, -2.0))))

    alone = [asyncio.run(request(n, s)) for n, s in ((5, 1.0), (9, 0.5), (7, -2.0))]
    for got, want in zip(asyncio.run(together()), alone, strict=True):
        assert torch.equal(got, want)


def test_a_run_does_not_leak_into_other_threads_or_tasks() -> None:
    scheduler = Scheduler("euler")
    scheduler.set_timesteps(5)
    seen: list[Any] = []

    def other() -> None:
        try:
            seen.append(scheduler.timesteps)
        except ValueError as error:
            seen.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert "set_timesteps must be called first in this thread" in str(seen[0])
    assert len(scheduler.timesteps) == 5


# --- configs that pipelines rewrite ----------------------------------------------------------------------------


def test_a_pipeline_rewrites_an_old_config_and_the_result_follows(components: dict[str, Any]) -> None:
    """StableDiffusionPipeline turns steps_offset to 1 and clip_sample to False with a warning; ours takes it too."""
    old = {**BETAS, "steps_offset": 0, "clip_sample": True, "set_alpha_to_one": False}
    made = []
    for scheduler in (
        diffusers.DDIMScheduler(**old),
        Scheduler.from_config({"_class_name": "DDIMScheduler", **old}),
    ):
        with pytest.warns(FutureWarning) as caught:
            made.append(pipeline(StableDiffusionPipeline, components, scheduler))
        assert [w for w in caught if "steps_offset" in str(w.message)]
        assert scheduler.config.steps_offset == 1
        assert scheduler.config.clip_sample is False
    theirs, ours = (latents(p) for p in made)
    assert apart(ours, theirs) < CLOSE


def test_a_named_sampler_is_not_rewritten(components: dict[str, Any]) -> None:
    """What was chosen by name is not an old config: no warning, no change (warnings are errors here)."""
    for scheduler in (Scheduler("ddim", grid="leading"), Scheduler("er_sde"), Scheduler("pndm", grid="leading")):
        before = scheduler.reading
        pipeline(StableDiffusionInpaintPipeline, components, scheduler)
        assert scheduler.reading is before
    with pytest.raises(ValueError, match="config must be left as it is"):
        scheduler._internal_dict = {"steps_offset": 1}


def test_swapping_the_scheduler_back_by_its_config(components: dict[str, Any]) -> None:
    """The idiom `OtherScheduler.from_config(pipe.scheduler.config)` keeps the model's betas and target."""
    for scheduler in (
        Scheduler.from_config(peer("ddim")),
        Scheduler("er_sde", schedule="linear", target="v"),
        Scheduler("dpmpp_2m", schedule="linear", target="v"),
    ):
        swapped = diffusers.EulerDiscreteScheduler.from_config(
            pipeline(StableDiffusionPipeline, components, scheduler).scheduler.config
        )
        assert swapped.config.prediction_type == {"eps": "epsilon", "v": "v_prediction"}[scheduler.reading.target]
        assert torch.allclose(swapped.betas.double(), torch.tensor(scheduler.reading.schedule.betas), rtol=1e-5)


@pytest.mark.parametrize(
    "scheduler",
    [
        Scheduler.from_config(peer("dpmpp-2m-karras")),
        Scheduler("unipc", dialect="diffusers", grid=Grid("linspace", offset=1.0)),
    ],
    ids=repr,
)
def test_a_pipeline_with_our_scheduler_saves_a_folder_that_diffusers_reads(
    scheduler: Scheduler, components: dict[str, Any], tmp_path: Path
) -> None:
    """`pipe.save_pretrained` writes the class and its config; diffusers opens it, with its class or with ours."""
    ours = pipeline(StableDiffusionPipeline, components, scheduler)
    ours.save_pretrained(tmp_path)
    kind = scheduler.export()["_class_name"]
    assert json.loads((tmp_path / "model_index.json").read_text("utf-8"))["scheduler"] == ["diffusers", kind]
    theirs = StableDiffusionPipeline.from_pretrained(tmp_path, safety_checker=None)
    assert type(theirs.scheduler).__name__ == kind
    theirs.set_progress_bar_config(disable=True)
    assert apart(latents(ours), latents(theirs)) < CLOSE
    again = StableDiffusionPipeline.from_pretrained(tmp_path, safety_checker=None, scheduler=scheduler)
    assert again.scheduler is scheduler


def test_a_saved_pipeline_opens_in_pellucid(components: dict[str, Any], tmp_path: Path) -> None:
    ours = pipeline(StableDiffusionPipeline, components, Scheduler.from_config(peer("unipc")))
    ours.save_pretrained(tmp_path)
    reading = pellucid.load(tmp_path).components.scheduler
    assert Scheduler.from_config(reading).config == Scheduler.from_pretrained(tmp_path / "scheduler").config


# --- pipelines that do more than three calls -------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["ddim", "pndm", "euler", "dpmpp-2m", "unipc"])
def test_panorama_steps_several_views_at_each_time(name: str, components: dict[str, Any]) -> None:
    """It keeps a copy of the scheduler's `__dict__` for each view and puts it back before the view's step."""
    want, got = (
        latents(pipeline(diffusers.StableDiffusionPanoramaPipeline, components, s), height=16, width=600)
        for s in (peer(name), Scheduler.from_config(peer(name)))
    )
    assert apart(got, want) < CLOSE


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["ddim", "dpmpp-2m"])
def test_self_attention_guidance_reads_alphas_cumprod(name: str, components: dict[str, Any]) -> None:
    want, got = (
        latents(pipeline(diffusers.StableDiffusionSAGPipeline, components, s), height=16, width=16)
        for s in (peer(name), Scheduler.from_config(peer(name)))
    )
    assert apart(got, want) < CLOSE

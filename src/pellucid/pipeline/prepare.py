"""From a request to latents: its plan, where it starts, and the network as the request uses it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor, nn

from pellucid.core.compile import compile_plan
from pellucid.core.dialect_diffusers import known_level
from pellucid.core.errors import PellucidError, rule
from pellucid.core.filters import Filter
from pellucid.core.grid import Grid
from pellucid.core.loop import Constraint, Denoiser, StepSeen, check_fits, loop
from pellucid.core.noise import NoiseSource
from pellucid.core.plan import Plan
from pellucid.core.reader import naming, read_text
from pellucid.interop import diffusers_config, source
from pellucid.interop.components import Components
from pellucid.interop.diffusers_plan import compile_reading, pipeline_options
from pellucid.models import tiles
from pellucid.models.controlnet import Controlled
from pellucid.models.guidance import Guidance
from pellucid.models.guided import GuidedDenoiser
from pellucid.models.vae import from_diffusion, to_diffusion
from pellucid.pipeline import images
from pellucid.pipeline.adapters import ControlledDenoiser, HintSwitch
from pellucid.pipeline.encoders import image_inputs
from pellucid.pipeline.encoders.conditions import takes_text
from pellucid.pipeline.request import Request
from pellucid.pipeline.result import Result
from pellucid.pipeline.stages import Stages

if TYPE_CHECKING:
    from pellucid.pipeline.pipeline import Pipeline


# --- The plan -------------------------------------------------------------------------------------------------------

STEPS = 30
MAX_PLAN_BYTES = 64 * 2**20


@dataclass(frozen=True)
class RunPlan:
    """A plan, and the filter on x0 that the model's own scheduler asks for."""

    plan: Plan
    x0_filter: Filter | None = None


def make_plan(components: Components, request: Request) -> RunPlan:
    """The plan of a request: the one given, that of the sampler named, or that of the model's own scheduler."""
    reading = diffusers_config.read(components.scheduler, strict=False) if components.scheduler else None
    keep = reading.x0_filter if reading is not None else None
    if request.plan is not None:
        return RunPlan(given_plan(components, request), keep)
    steps = STEPS if request.steps is None else request.steps
    if request.sampler is None and request.grid is None and reading is not None:
        dialect = request.dialect or "diffusers"
        passes_eta = dialect == "diffusers" and takes_text(components.network)
        options = {**pipeline_options(reading, passes_eta), **request.options}

        def from_config(**cuts: Any) -> Plan:
            return compile_reading(reading, steps, dialect=dialect, overrides=options, **cuts)

        return RunPlan(cut_plan(components, request, dialect, from_config), keep)
    if request.options and request.sampler is None and reading is None:
        raise PellucidError("options must come with a sampler: the model has no scheduler of its own.", "request")
    grid = grid_of(request.grid) if isinstance(request.grid, Mapping) else request.grid
    dialect = request.dialect or "exact"

    def from_name(**cuts: Any) -> Plan:
        return compile_plan(
            request.sampler or (reading.sampler if reading else "dpmpp_2m"),
            schedule=components.schedule,
            target=components.target,
            grid=grid,
            steps=None if isinstance(grid, Grid) and grid.name == "explicit" else steps,
            dialect=dialect,
            **cuts,
            **request.options,
        )

    return RunPlan(cut_plan(components, request, dialect, from_name), keep)


def grid_of(table: Mapping[str, Any]) -> Grid:
    return Grid.from_dict(dict(table))


def given_plan(components: Components, request: Request) -> Plan:
    for name in ("strength", "denoising_start", "denoising_end"):
        if getattr(request, name) is not None:
            raise PellucidError(
                rule(name, "left out with a plan, which says where it starts and ends", "both"), "request"
            )
    plan = read_plan(request.plan)  # type: ignore[arg-type]
    check_fits(plan, components.schedule, components.target, "model")
    return plan


def read_plan(given: Plan | str | os.PathLike[str]) -> Plan:
    """A plan, or that of a file or of a bundle's part, such as scenes-128/plans/8.json."""
    if isinstance(given, Plan):
        return given
    path = source.bundled(given)
    text = read_text(path, "plan", MAX_PLAN_BYTES, "plan-file")
    with naming(path.name):
        return Plan.from_json(text)


def cut_plan(components: Components, request: Request, dialect: str, make: Any) -> Plan:
    """Starts and ends where the request says: exactly, or on the whole legs that diffusers counts."""
    ends = (request.strength, request.denoising_start, request.denoising_end)
    if all(end is None for end in ends):
        return make()
    if dialect == "diffusers":
        return cut_as_diffusers(request, make)
    low, high = components.schedule.span
    start = request.strength if request.strength is not None else request.denoising_start
    if request.denoising_start is not None:
        start = 1.0 - request.denoising_start
    begin = None if start is None else low + start * (high - low)
    end = None if request.denoising_end is None else low + (1.0 - request.denoising_end) * (high - low)
    return make(between=(begin, end))


def cut_as_diffusers(request: Request, make: Any) -> Plan:
    """diffusers keeps int(steps · strength) of the steps, and hands over at the first time below a rounded one."""
    whole = make()
    count = int(whole.grid["steps"])
    skip = 0
    if request.strength is not None:
        kept = min(int(count * request.strength), count)
        if kept < 1:
            raise PellucidError(
                f"strength × steps must be at least 1 in the diffusers dialect; got {request.strength} × {count}. "
                "Use more steps, or name a sampler: the exact dialect starts at any level.",
                "strength",
            )
        skip = count - kept
    cuts: dict[str, Any] = {"skip": skip} if skip else {}
    if request.denoising_start is not None:
        cuts = {"skip": starts_before(whole, request.denoising_start)}
    if request.denoising_end is not None:
        stop = starts_before(whole, request.denoising_end)
        cuts |= {"stop": stop} if stop < len(starts_of(whole)) else {}
    return make(**cuts) if cuts else whole


def starts_of(whole: Plan) -> list[float]:
    """The times that diffusers counts when it cuts a run: one per step, and in PNDM one per call."""
    if whole.name in ("plms", "pndm"):
        return list(whole.timesteps)
    starts = list(dict.fromkeys(whole.timesteps))  # several calls per step tell the start of the next one twice
    if len(starts) != whole.grid["steps"]:
        raise PellucidError(
            f"denoising_start, denoising_end must be left out for {whole.name} in the diffusers dialect: it calls the "
            "model between two steps. Name a sampler: the exact dialect cuts anywhere.",
            "denoising",
        )
    return starts


def starts_before(whole: Plan, part: float) -> int:
    """How many of them lie before a part of the run, as diffusers counts: by whole training times."""
    total = whole.schedule.get("num_train", 1000)
    return sum(time >= round(total - part * total) for time in starts_of(whole))


# --- From noise to pixels -------------------------------------------------------------------------------------------


@dataclass
class Run:
    """One request on its way from noise to pixels."""

    pipe: Pipeline
    parts: Components
    request: Request
    planned: RunPlan
    guidance: Guidance
    source: NoiseSource
    stages: Stages
    size: tuple[int, int]
    count: int

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    @property
    def shape(self) -> tuple[int, int, int]:
        factor = self.pipe.factor
        return self.pipe.channels, self.size[1] // factor, self.size[0] // factor

    def denoise(self, cond: dict[str, Any], uncond: dict[str, Any] | None) -> Tensor:
        request, network = self.request, self.parts.network
        with self.stages.run("encode", *image_inputs.encoding_networks(self)):
            clean = self.clean_latents()
            noise = self.first_noise()
            network, denoiser_extra = self.prepared(network, cond, uncond, clean)
        x = self.start(clean, noise)
        guided = GuidedDenoiser(
            network,
            self.parts.schedule,
            self.parts.target,  # type: ignore[arg-type]
            cond,
            uncond,
            self.guidance,
            weak=None if request.weak is None else self.second(request.weak),
            x0_filter=self.planned.x0_filter,
            dtype=working_dtype(self.parts.network),
            keep_raw=bool(self.plan.options.get("keep_eps")),
        )
        denoiser: Denoiser = guided if denoiser_extra is None else denoiser_extra(guided)  # type: ignore[assignment]
        constraints = [*self.blend(clean, noise), *request.constraints]
        with self.stages.run("denoise", *self.denoising_networks(network)):
            plans = [self.plan] * len(x)
            return loop(plans, denoiser, x, self.source, request.observers, constraints, request.cancelled)

    def second(self, weak: Any) -> Any:
        """The worse network of autoguidance, which must take what the network takes."""
        network, parts = self.parts.network, getattr(weak, "components", None)
        if not isinstance(getattr(parts, "network", None), type(network)):
            raise PellucidError(
                rule("weak", f"a pipeline with a {type(network).__name__}", type(weak).__name__), "weak"
            )
        if self.request.controls:
            raise PellucidError("weak must be left out with controls, which only the model itself follows.", "weak")
        for name in ("in_channels", "cross_attention_dim", "addition_embed_type", "time_cond_proj_dim"):
            mine, other = (getattr(one.config, name, None) for one in (network, parts.network))
            if mine != other:
                raise PellucidError(rule(f"{name} of weak", f"{mine}, as the model's", other), "weak")
        mine, other = (next(one.parameters()).dtype for one in (network, parts.network))
        if mine != other:
            raise PellucidError(rule("dtype of weak", f"{mine}, as the model's", other, "Load it with dtype=."), "weak")
        return image_inputs.Inpainting(parts.network) if image_inputs.is_inpainting(self.parts) else parts.network

    def denoising_networks(self, network: Any) -> list[nn.Module]:
        while isinstance(network, HintSwitch | image_inputs.Inpainting):
            network = network.network
        weak = self.request.weak
        return [network] if weak is None else [network, weak.components.network]

    # --- the start ------------------------------------------------------------------------------------------------

    def first_noise(self) -> Tensor:
        """Unit noise, (B, C, H, W): given, or drawn by seed."""
        like = torch.empty(0, device=self.pipe.device)
        if self.request.latents is None:
            return self.source.first(self.shape, like, range(self.count))
        given = self.request.latents
        if tuple(given.shape) != (self.count, *self.shape):
            raise PellucidError(rule("latents", f"of shape {(self.count, *self.shape)}", tuple(given.shape)), "latents")
        images.check_finite("latents", given)
        return given.to(like)

    def clean_latents(self) -> Tensor | None:
        """The image as latents (B, C, H, W), scaled for diffusion; None without one."""
        image = self.request.image
        if image is None or (self.all_new and image_inputs.is_inpainting(self.parts)):
            return None
        if isinstance(image, Result):
            return self.fitting(self.taken_up(image))
        if image_inputs.is_latent(image, self.channels_if_latent()):
            return self.fitting(image)
        return self.encode(images.to_tensor(image, self.size).to(self.pipe.device))

    def taken_up(self, earlier: Result) -> Tensor:
        """The end of an earlier run: still noisy, in this plan's frame, or the latents of what it finished."""
        end = earlier.plan.end
        if self.request.denoising_start is not None:
            return earlier.latents * (self.plan.start.alpha / end.alpha)
        if earlier.recipe.denoising_end is not None:
            raise PellucidError("denoising_start must be given to take up an unfinished run; got none.", "denoising")
        return earlier.latents / end.alpha if earlier.plan.dialect == "exact" else earlier.latents

    def fitting(self, latents: Tensor) -> Tensor:
        """Latents that were given, one per image, of the size that is asked for."""
        if tuple(latents.shape[1:]) != self.shape:
            raise PellucidError(rule("latents of image", f"of shape {self.shape}", tuple(latents.shape[1:])), "latents")
        images.check_finite("latents of image", latents)
        return image_inputs.spread(latents.to(self.pipe.device, torch.float32), self.count)

    @property
    def all_new(self) -> bool:
        """Whether an inpainting starts from noise alone."""
        request = self.request
        return request.mask is not None and request.strength in (None, 1.0) and request.denoising_start is None

    def channels_if_latent(self) -> int | None:
        return None if self.parts.vae is None else self.pipe.channels

    def encode(self, pixels: Tensor) -> Tensor:
        """Pixels (1 or more, 3, H, W) in [−1, 1] → latents (B, C, H, W), sampled with the noise of each image.

        diffusers' inpainting encodes an image once for the whole batch, with the noise of the first.
        """
        vae, once = self.parts.vae, self.request.mask is not None and self.plan.dialect == "diffusers"
        spread = partial(image_inputs.spread, count=self.count)
        if vae is None:
            return spread(pixels)
        pixels = pixels if once else spread(pixels)
        weight, policy = next(vae.parameters()), self.pipe.policy
        if policy.vae_tile is not None:
            posterior = tiles.encode_tiled(vae, pixels.to(weight), policy.vae_tile)
        elif policy.vae_slicing:
            posterior = tiles.encode_sliced(vae, pixels.to(weight))
        else:
            posterior = vae.encode(pixels.to(weight))
        noise = self.source.beside(posterior.mean.shape[1:], torch.empty(0, device=pixels.device), range(len(pixels)))
        return spread(to_diffusion(vae.config, posterior.sample(noise.to(posterior.mean))).float())

    def start(self, clean: Tensor | None, noise: Tensor) -> Tensor:
        """x at the plan's first level."""
        plan, request = self.plan, self.request
        if clean is None:
            return noise * plan.initial_scale
        if request.denoising_start is not None:
            return clean  # x of an earlier run, still noisy
        if self.all_new and plan.dialect == "diffusers":
            return noise * plan.initial_scale
        return clean * plan.start.alpha + noise * plan.start.sigma

    # --- inpainting, ControlNets, image prompts -------------------------------------------------------------------

    def prepared(self, network: Any, cond: dict[str, Any], uncond: dict[str, Any] | None, clean: Tensor | None) -> Any:
        """The network as this request uses it, and what wraps its denoiser; adds inputs to both conditions."""
        request = self.request
        extra = None
        if request.image_prompts:
            image_inputs.add_image_prompts(self, network, cond, uncond)
        if request.controls:
            image_inputs.check_controlled(network)
            controlled = Controlled(network, [image_inputs.controlnet_of(self.pipe, c) for c in request.controls])
            image_inputs.add_hints(self, controlled, cond, uncond)
            network = switch = HintSwitch(self.stages.policy.ready(controlled))

            def extra(guided: GuidedDenoiser) -> ControlledDenoiser:
                return ControlledDenoiser(guided, request.controls, switch)

        else:
            network = self.stages.policy.ready(network)
        if image_inputs.is_inpainting(self.parts):
            beside = image_inputs.beside_latents(self)
            for inputs in (cond, uncond):
                if inputs is not None:
                    inputs["beside"] = beside.to(self.pipe.device, next(self.parts.network.parameters()).dtype)
            network = image_inputs.Inpainting(network)
        elif self.parts.network.config.in_channels != self.pipe.channels:
            wide = self.parts.network.config.in_channels
            raise PellucidError(rule("in_channels of the network", f"{self.pipe.channels}", wide), "components-fit")
        elif request.mask is not None and self.plan.dialect == "diffusers" and clean is not None:
            # diffusers encodes the masked image here whether it is used or not, and draws noise for it
            drawn = 1 if image_inputs.one_for_all(self) else self.count
            self.source.beside(clean.shape[1:], torch.empty(0), range(drawn))
        return network, extra

    def blend(self, clean: Tensor | None, noise: Tensor) -> list[Constraint]:
        """Keeps what the mask does not paint: after each row, the image at the level that x has now."""
        if self.request.mask is None or clean is None or image_inputs.is_inpainting(self.parts):
            return []
        mask = image_inputs.latent_mask(self)  # (B, 1, H, W), 1 is painted
        last = len(self.plan.rows) - 1

        def keep(seen: StepSeen) -> Tensor:
            level = seen.next_levels[0] if seen.index == last else known_level(self.plan, seen.index + 1)
            done = seen.index == last and self.plan.dialect == "diffusers"  # which ends on the image, wherever it ends
            kept = clean if done else clean * level.alpha + noise * level.sigma
            return kept * (1 - mask) + seen.x_next * mask

        return [keep]

    # --- the end --------------------------------------------------------------------------------------------------

    def decode(self, x: Tensor) -> list[Image.Image]:
        vae, policy = self.parts.vae, self.pipe.policy
        with self.stages.run("decode", vae):
            if self.plan.dialect == "exact" and self.plan.end.alpha > 0:  # an end with noise left: x0 has alpha 1
                x = x / self.plan.end.alpha
            if vae is None:
                return images.to_images(x)
            images.check_finite("latents", x, "The network overflowed: run it in float32 or bfloat16.")
            latents = from_diffusion(vae.config, x).to(next(vae.parameters()))
            if policy.vae_tile is not None:
                pixels = tiles.decode_tiled(vae, latents, policy.vae_tile)
            elif policy.vae_slicing:
                pixels = tiles.decode_sliced(vae, latents)
            else:
                pixels = vae.decode(latents)
            return images.to_images(pixels.float())


def working_dtype(network: nn.Module) -> torch.dtype | None:
    """The dtype that the network works in, where it is not x's."""
    dtype = next(network.parameters()).dtype
    return None if dtype == torch.float32 else dtype

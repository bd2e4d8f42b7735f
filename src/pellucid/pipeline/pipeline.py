"""The pipeline: a loaded model and a request → images, with the plan, the recipe and what each stage took."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.core.loop import Constraint, Denoiser, StepSeen, run
from pellucid.core.noise import NoiseSource, Philox, TorchStream
from pellucid.core.plan import Plan
from pellucid.interop import lora_file
from pellucid.interop.components import Components
from pellucid.interop.save import save_components
from pellucid.models import lora, tiles
from pellucid.models.controlnet import Controlled
from pellucid.models.dit import DiT
from pellucid.models.guidance import Guidance, guarded
from pellucid.models.guided import GuidedDenoiser
from pellucid.models.lora import AdapterSet, Receipt
from pellucid.models.unet import UNet
from pellucid.models.vae import from_diffusion, to_diffusion
from pellucid.pipeline import images as pictures
from pellucid.pipeline import pictures_in
from pellucid.pipeline.adapters import ControlledDenoiser, HintSwitch, Lora
from pellucid.pipeline.conditions import make_conditions, takes_text
from pellucid.pipeline.planning import Planned, make_plan
from pellucid.pipeline.policy import Policy
from pellucid.pipeline.recipe import Recipe
from pellucid.pipeline.recording import recipes_of
from pellucid.pipeline.request import Request
from pellucid.pipeline.stages import Stage, Stages

CLASS_GUIDANCE = 4.0  # of class-conditional models: DiT's own setting


@dataclass(frozen=True)
class Result:
    """What a request made. `recipes` repeat each image; `latents` are x at the plan's end."""

    images: list[Image.Image]
    latents: Tensor
    plan: Plan
    recipes: list[Recipe]
    stages: tuple[Stage, ...] = ()
    receipt: Receipt | None = None
    notes: tuple[str, ...] = ()

    @property
    def recipe(self) -> Recipe:
        return self.recipes[0]


@dataclass
class Pipeline:
    """A model ready to run. Calls share nothing but its weights: several threads may use one pipeline at once."""

    components: Components
    policy: Policy = field(default_factory=Policy)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _files: dict[tuple[str, str], Any] = field(default_factory=dict, repr=False)

    def __call__(self, prompt: str | Sequence[str] | None = None, /, **options: Any) -> Result:
        """pipe("a red star", steps=20, seed=1): the options are the fields of `Request`."""
        known = [f.name for f in fields(Request)]
        for name in options:
            if name not in known:
                raise PellucidError(rule(name, "an option of a request", options[name], nearest(name, known)), "option")
        if prompt is not None and "prompt" in options:
            raise PellucidError("prompt must be given once; got it twice.", "prompt")
        return self.run(Request(**({"prompt": prompt} if prompt is not None else {}), **options))

    @torch.no_grad()
    def run(self, request: Request) -> Result:
        """Encodes, denoises and decodes one request."""
        stages = Stages(self.policy, self.device, lambda stage: self.explain(request, stage))
        parts, receipt = self.with_loras(request)
        guidance = self.guidance_of(request)
        planned = make_plan(parts, request)
        guidance = guidance.as_diffusers() if planned.plan.dialect == "diffusers" else guidance
        size = self.size_of(request)
        seeds = request.seeds()
        source = noise_source(request, planned.plan, seeds)
        embedded = isinstance(parts.network, UNet) and parts.network.config.time_cond_proj_dim is not None
        asked = guidance
        if embedded:  # a network that was told its guidance in training takes it as an input
            scale, guidance = told_scale(asked), Guidance(1.0)
        with stages.run("text", *parts.text_encoders):
            both = guidance.needs_uncond or asks_uncond(planned.plan)
            told = make_conditions(parts, request, size, scale if embedded else 1.0, both).to(self.device)
        run_of = Run(self, parts, request, planned, guidance, source, stages, size, len(seeds))
        x = run_of.denoise(told.cond, told.uncond)
        made = run_of.decode(x) if request.decode else []
        return Result(
            images=made,
            latents=x,
            plan=planned.plan,
            recipes=recipes_of(self, request, planned.plan, asked, seeds, size, source),
            stages=tuple(stages.taken),
            receipt=receipt,
            notes=(*parts.notes, *guidance.notes, *unused(request, guidance, planned.plan)),
        )

    # --- what a request leaves open -------------------------------------------------------------------------------

    @property
    def factor(self) -> int:
        """Pixels a latent, along one side."""
        return 1 if self.components.vae is None else self.components.vae.config.factor

    @property
    def channels(self) -> int:
        """Channels of x: those of the latents, or of the pixels."""
        vae, network = self.components.vae, self.components.network
        return network.config.in_channels if vae is None else vae.config.latent_channels

    def size_of(self, request: Request) -> tuple[int, int]:
        """(width, height) in pixels: as asked, the picture's, or what the network was trained on."""
        sample = self.components.network.config.sample_size or 64
        high, wide = (sample, sample) if isinstance(sample, int) else sample
        own = (wide * self.factor, high * self.factor)
        if request.image is not None and not isinstance(request.image, Result):
            own = pictures_in.size_of(request.image, self.channels, self.factor) or own
        elif isinstance(request.image, Result):
            own = (request.image.latents.shape[-1] * self.factor, request.image.latents.shape[-2] * self.factor)
        return pictures.check_size((request.width or own[0], request.height or own[1]), self.factor)

    def guidance_of(self, request: Request) -> Guidance:
        """As asked; otherwise the guarded preset where there is something to guide by."""
        if request.guidance is not None:
            return Guidance.parse(request.guidance)
        network = self.components.network
        if takes_text(network):
            return guarded()
        return Guidance(CLASS_GUIDANCE) if isinstance(network, DiT) else Guidance(1.0)

    # --- adapters -------------------------------------------------------------------------------------------------

    def networks(self) -> dict[str, nn.Module]:
        """The networks that adapters may change, by their names in files."""
        encoders = dict(zip(("text_encoder", "text_encoder_2"), self.components.text_encoders, strict=False))
        name = "unet" if isinstance(self.components.network, UNet) else "transformer"
        return {name: self.components.network, **encoders}

    def load_lora(self, path: Any, name: str | None = None) -> AdapterSet:
        """Reads a LoRA file once; requests then name it with their own scale: `loras=[Lora(adapter, 0.8)]`."""
        return lora_file.load(path, self.networks(), name)

    def lora_of(self, one: Lora) -> AdapterSet:
        """The adapter of a request's LoRA: given, or read once from its file."""
        if isinstance(one.source, AdapterSet):
            return one.source
        return pictures_in.kept(self, "lora", one.source, self.load_lora)

    def with_loras(self, request: Request) -> tuple[Components, Receipt | None]:
        """The components with the request's LoRAs: views that share every other tensor; the model stays as it is."""
        if not request.loras:
            return self.components, None
        views, receipt = lora.apply_all(self.networks(), [(self.lora_of(one), one.scale) for one in request.loras])
        network = views.get("unet", views.get("transformer"))
        encoders = tuple(views[n] for n in ("text_encoder", "text_encoder_2") if n in views)
        return replace(self.components, network=network, text_encoders=encoders), receipt

    def explain(self, request: Request, stage: str) -> str:
        """Who owns the peak of a stage's memory, and what would lower it."""
        from pellucid.pipeline import out_of_memory  # which runs pipelines

        return out_of_memory.explain(self, request, stage)

    def save(self, folder: str | os.PathLike[str], **options: Any) -> None:
        """Writes the model as a folder that diffusers opens too; the options are those of `save_components`."""
        save_components(self.components, folder, **options)

    def to(self, device: torch.device | str) -> Pipeline:
        """The same pipeline with its networks on a device."""
        self.device = torch.device(device)
        if self.policy.offload == "none":
            for network in networks_of(self.components):
                network.to(self.device)
        return self


def told_scale(guidance: Guidance) -> float:
    """The one scale that a guidance-distilled network is told."""
    if not isinstance(guidance.scale, float):
        raise PellucidError(
            rule("guidance", "one number for this network, which takes it as an input", guidance.text()), "guidance"
        )
    return guidance.scale


def unused(request: Request, guidance: Guidance, plan: Plan) -> list[str]:
    """What was asked for and has no effect, in words."""
    if request.negative_prompt and not guidance.needs_uncond and not asks_uncond(plan):
        return ["negative_prompt has no effect: the guidance scale is 1 in every step"]
    return []


def asks_uncond(plan: Plan) -> bool:
    """CFG++ asks for the unconditional prediction at any scale."""
    return plan.guided and not plan.options.get("keep_eps")


def networks_of(components: Components) -> list[nn.Module]:
    """Every network of a model."""
    parts = (components.network, components.vae, *components.text_encoders, components.image_encoder)
    return [network for network in (*parts, *components.controlnets) if network is not None]


def noise_source(request: Request, plan: Plan, seeds: list[int]) -> NoiseSource:
    """Where noise comes from: addressed (philox), or torch's generator, which is what the peers' dialects use."""
    asked = request.noise
    if asked is not None and not isinstance(asked, str):
        return asked
    kind = asked or ("philox" if plan.dialect == "exact" else "torch")
    if kind not in ("philox", "torch"):
        raise PellucidError(rule("noise", "philox, torch, or a noise source", kind), "noise")
    return Philox(seeds) if kind == "philox" else TorchStream(seeds)


@dataclass
class Run:
    """One request on its way from noise to pixels."""

    pipe: Pipeline
    parts: Components
    request: Request
    planned: Planned
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
        with self.stages.run("encode", *pictures_in.encoding_networks(self)):
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
            weak=None if request.weak is None else request.weak.components.network,
            x0_filter=self.planned.x0_filter,
            dtype=half_of(self.parts.network),
            keep_raw=bool(self.plan.options.get("keep_eps")),
        )
        denoiser: Denoiser = guided if denoiser_extra is None else denoiser_extra(guided)  # type: ignore[assignment]
        constraints = [*self.blend(clean, noise), *request.constraints]
        with self.stages.run("denoise", *self.denoising_networks(network)):
            return run(
                self.plan,
                denoiser,
                x,
                noise=self.source,
                observers=request.observers,
                constraints=constraints,
                cancelled=request.cancelled,
            )

    def denoising_networks(self, network: Any) -> list[nn.Module]:
        while isinstance(network, HintSwitch | pictures_in.Inpainting):
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
        return given.to(like)

    def clean_latents(self) -> Tensor | None:
        """The picture as latents (B, C, H, W), scaled for diffusion; None without one."""
        image = self.request.image
        if image is None or (self.all_new and pictures_in.is_inpainting(self.parts)):
            return None
        if isinstance(image, Result):
            end, begin = image.plan.end, self.plan.start
            return image.latents.to(self.pipe.device) * (begin.alpha / end.alpha)
        if pictures_in.is_latent(image, self.channels_if_latent()):
            return pictures_in.spread(image.to(self.pipe.device, torch.float32), self.count)
        pixels = pictures_in.spread(pictures.to_tensor(image, self.size), self.count)
        return self.encode(pixels.to(self.pipe.device))

    @property
    def all_new(self) -> bool:
        """Whether an inpainting starts from noise alone."""
        return self.request.mask is not None and self.request.strength in (None, 1.0)

    def channels_if_latent(self) -> int | None:
        return None if self.parts.vae is None else self.pipe.channels

    def encode(self, pixels: Tensor) -> Tensor:
        """Pixels (B, 3, H, W) in [−1, 1] → latents; the posterior is sampled with the run's own noise."""
        vae = self.parts.vae
        if vae is None:
            return pixels
        weight = next(vae.parameters())
        tile = self.pipe.policy.vae_tile
        posterior = vae.encode(pixels.to(weight)) if tile is None else tiles.encode_tiled(vae, pixels.to(weight), tile)
        noise = self.source.beside(posterior.mean.shape[1:], torch.empty(0, device=pixels.device), range(len(pixels)))
        return to_diffusion(vae.config, posterior.sample(noise.to(posterior.mean))).float()

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
            pictures_in.add_image_prompts(self, network, cond, uncond)
        if request.controls:
            controlled = Controlled(network, [pictures_in.controlnet_of(self.pipe, c) for c in request.controls])
            pictures_in.add_hints(self, controlled, cond, uncond)
            network = HintSwitch(self.stages.ready(controlled))

            def extra(guided: GuidedDenoiser) -> ControlledDenoiser:
                return ControlledDenoiser(guided, request.controls)

        else:
            network = self.stages.ready(network)
        if pictures_in.is_inpainting(self.parts):
            beside = pictures_in.beside_latents(self)
            for inputs in (cond, uncond):
                if inputs is not None:
                    inputs["beside"] = beside.to(self.pipe.device, next(self.parts.network.parameters()).dtype)
            network = pictures_in.Inpainting(network)
        elif request.mask is not None and self.plan.dialect == "diffusers" and clean is not None:
            # diffusers encodes the masked picture here whether it is used or not, and draws noise for it
            self.source.beside(clean.shape[1:], torch.empty(0), range(self.count))
        return network, extra

    def blend(self, clean: Tensor | None, noise: Tensor) -> list[Constraint]:
        """Keeps what the mask does not paint: after each row, the picture at the level that x has now."""
        if self.request.mask is None or clean is None or pictures_in.is_inpainting(self.parts):
            return []
        mask = pictures_in.latent_mask(self)  # (B, 1, H, W), 1 is painted
        last = len(self.plan.rows) - 1

        def keep(seen: StepSeen) -> Tensor:
            level = seen.next_levels[0]
            kept = clean if seen.index == last else clean * level.alpha + noise * level.sigma
            return kept * (1 - mask) + seen.x_next * mask

        return [keep]

    # --- the end --------------------------------------------------------------------------------------------------

    def decode(self, x: Tensor) -> list[Image.Image]:
        vae, policy = self.parts.vae, self.pipe.policy
        with self.stages.run("decode", vae):
            if self.plan.dialect == "exact" and self.plan.end.alpha > 0:  # an end with noise left: x0 has alpha 1
                x = x / self.plan.end.alpha
            if vae is None:
                return pictures.to_images(x)
            latents = from_diffusion(vae.config, x).to(next(vae.parameters()))
            if policy.vae_tile is not None:
                pixels = tiles.decode_tiled(vae, latents, policy.vae_tile)
            elif policy.vae_slicing:
                pixels = tiles.decode_sliced(vae, latents)
            else:
                pixels = vae.decode(latents)
            return pictures.to_images(pixels.float())


def half_of(network: nn.Module) -> torch.dtype | None:
    """The dtype that the network works in, where it is not x's."""
    dtype = next(network.parameters()).dtype
    return None if dtype == torch.float32 else dtype

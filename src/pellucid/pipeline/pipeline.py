"""The pipeline: a loaded model and a request → images, with the plan, the recipe and what each stage took."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pellucid.core.errors import PellucidError, rule
from pellucid.core.noise import NoiseSource, Philox, TorchStream
from pellucid.core.plan import Plan
from pellucid.interop import lora_file
from pellucid.interop.components import Components, text_parts
from pellucid.interop.diffusers_plan import noise_notes
from pellucid.interop.save import save_components
from pellucid.interop.source import bundled
from pellucid.models import lora
from pellucid.models.blocks import within
from pellucid.models.dit import DiT
from pellucid.models.guidance import Guidance, guarded, scale_notes, steps_of
from pellucid.models.lora import AdapterSet, MergeSet, Receipt
from pellucid.models.rules import LayerExtra, Rescale
from pellucid.models.unet import UNet
from pellucid.pipeline import fingerprint, images, stages
from pellucid.pipeline import result as observers
from pellucid.pipeline.adapters import Lora
from pellucid.pipeline.encoders import image_inputs
from pellucid.pipeline.encoders.conditions import make_conditions, takes_text, text_notes
from pellucid.pipeline.encoders.text import with_tokens
from pellucid.pipeline.peer_words import RefusesPeerWords, attribute_error
from pellucid.pipeline.policy import Policy
from pellucid.pipeline.prepare import STEPS, Run, make_plan
from pellucid.pipeline.repeat import recipes_of
from pellucid.pipeline.request import Request, takes
from pellucid.pipeline.result import Result
from pellucid.pipeline.stages import Stages

CLASS_GUIDANCE = 4.0  # of class-conditional models: DiT's own setting


@dataclass(repr=False)
class Pipeline(RefusesPeerWords):
    """A model ready to run. Calls share nothing but its weights: several threads may use one pipeline at once."""

    components: Components
    policy: Policy = field(default_factory=Policy)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _files: dict[tuple[str, str, int], Any] = field(default_factory=dict, repr=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)
    _fitted: int = field(default=0, init=False, repr=False)  # the most pixels of a request that were found to fit

    @takes(Request)
    def __call__(self, *prompt: Any, **options: Any) -> Result:
        """pipe("a red star", steps=20, seed=1): the options are the fields of `Request`."""
        return self.run(Request.of(*prompt, **options))

    def __repr__(self) -> str:
        return description(self)

    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> Pipeline:
        """Not here: `pellucid.load` opens folders, single files, hub ids and bundles."""
        raise attribute_error("from_pretrained")

    def run(self, request: Request) -> Result:
        """Encodes, denoises and decodes one request, without gradients."""
        weak = [request.weak.components.network] if isinstance(request.weak, Pipeline) else []
        with (
            torch.no_grad(),
            lora.running([*self.networks().values(), *weak]),
            stages.faster_threads(self.components.network, self.device) as notes,
        ):
            result = self._run(request, notes)
        return observers.show_result(request.observers, result)

    def _run(self, request: Request, notes: Sequence[str]) -> Result:
        from pellucid.pipeline import memory  # which runs pipelines

        stages = Stages(self.policy, self.device, lambda stage: self.explain(request, stage))
        parts, receipt = self.with_loras(request)
        guidance = self.guidance_of(request)
        check_layers(parts.network, guidance)
        planned = make_plan(parts, request)
        embedded = isinstance(parts.network, UNet) and parts.network.config.time_cond_proj_dim is not None
        if planned.plan.dialect == "diffusers" and not embedded:
            guidance = guidance.as_diffusers()
        size = self.size_of(request)
        seeds = request.seeds()
        memory.check_fits(self, request, size, len(seeds))
        source = noise_source(request, planned.plan, seeds)
        asked = guidance
        if embedded:  # a network that was told its guidance in training takes it as an input
            scale, guidance = input_guidance(asked), Guidance(1.0)
        with stages.run("text", *parts.text_encoders):
            both = guidance.needs_uncond or asks_uncond(planned.plan)
            told = make_conditions(parts, request, size, scale if embedded else 1.0, both).to(self.device)
        recipes = partial(recipes_of, self, request, planned.plan, asked, seeds, size, source)
        observers.show_recipes(request.observers, recipes)
        run_of = Run(self, parts, request, planned, guidance, source, stages, size, len(seeds))
        x = run_of.denoise(told.cond, told.uncond)
        made = run_of.decode(x) if request.decode else []
        return Result(
            images=made,
            latents=x,
            plan=planned.plan,
            recipes=recipes(),
            stages=tuple(stages.taken),
            receipt=receipt,
            notes=(
                *parts.notes,
                *notes,
                *text_notes(parts, request),
                *guidance.notes,
                *scale_notes(guidance),
                *unused_notes(request, guidance, planned.plan),
                *noise_notes(planned.plan, str((parts.scheduler or {}).get("_class_name"))),
                *tuning_notes(planned.plan, self.components, asked),
            ),
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
        """(width, height) in pixels: as asked, the image's, or what the network was trained on."""
        sample = self.components.network.config.sample_size or 64
        high, wide = (sample, sample) if isinstance(sample, int) else sample
        own = (wide * self.factor, high * self.factor)
        if request.image is not None and not isinstance(request.image, Result):
            own = image_inputs.size_of(request.image, self.channels, self.factor) or own
        elif isinstance(request.image, Result):
            own = (request.image.latents.shape[-1] * self.factor, request.image.latents.shape[-2] * self.factor)
        return images.check_size((request.width or own[0], request.height or own[1]), self.factor)

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
        encoders = dict(zip(text_parts(self.components), self.components.text_encoders, strict=True))
        name = "unet" if isinstance(self.components.network, UNet) else "transformer"
        return {name: self.components.network, **encoders}

    def load_lora(self, path: Any, name: str | None = None) -> AdapterSet:
        """Reads a LoRA file once; requests then name it with their own scale: `loras=[Lora(adapter, 0.8)]`."""
        place = bundled(path)
        if name is None and place != Path(path):
            name = os.fspath(path)  # of a bundle's: what finds it again
        return lora_file.load(place, self.networks(), name)

    def lora_of(self, one: Lora) -> AdapterSet:
        """The adapter of a request's LoRA: given, or read once from its file."""
        if isinstance(one.source, AdapterSet):
            return one.source
        return image_inputs.read_once(self, "lora", one.source, self.load_lora)

    def with_loras(self, request: Request) -> tuple[Components, Receipt | None]:
        """The components with the request's LoRAs: views that share every other tensor; the model stays as it is."""
        if not request.loras:
            return self.components, None
        views, receipt = lora.apply_all(self.networks(), [(self.lora_of(one), one.scale) for one in request.loras])
        network = views.get("unet", views.get("transformer"))
        encoders = tuple(views[name] for name in text_parts(self.components))
        worn = replace(self.components, network=network, text_encoders=encoders)
        return with_tokens(worn, [self.lora_of(one) for one in request.loras]), receipt

    def merge(self, *loras: Lora) -> MergeSet:
        """LoRAs written into the model's own weights, for all requests, until `.unmerge()` puts the old ones back.

        No second copy of the changed weights is used in a run; the originals wait in memory for the way back. Both are
        refused while a run is in progress, in this or another thread: it would go on with other weights.
        """
        for adapter in map(self.lora_of, loras):
            if adapter.tokens:
                got, advice = ", ".join(adapter.tokens), "Give it in the loras of each call."
                raise PellucidError(rule(f"LoRA {adapter.name}", "one without tokens", got, advice), "lora-tokens")
        return lora.merge_all(self.networks(), [(self.lora_of(one), one.scale) for one in loras])

    def explain(self, request: Request, stage: str) -> str:
        """Who owns the peak of a stage's memory, and what would lower it."""
        from pellucid.pipeline import memory  # which runs pipelines

        return memory.explain(self, request, stage)

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


def input_guidance(guidance: Guidance) -> float:
    """The one scale that a guidance-distilled network is told."""
    if not isinstance(guidance.scale, float) or any(not isinstance(r, Rescale) for r in guidance.rules):
        raise PellucidError(
            rule("guidance", "one number for this network, which takes it as an input", guidance.text()), "guidance"
        )
    return guidance.scale


def check_layers(network: nn.Module, guidance: Guidance) -> None:
    """The blocks that a rule weakens are there: a name that fits none would change nothing."""
    for extra in guidance.extras:
        for layer in extra.layers if isinstance(extra, LayerExtra) else ():
            if isinstance(network, UNet):
                places = {module.place for module in network.modules() if getattr(module, "place", "")}
                known = isinstance(layer, str) and any(within(place, (layer,)) for place in places)
                must = "names of attention blocks, such as mid"
            else:
                count = len(network.transformer_blocks)
                known = isinstance(layer, int) and 0 <= layer < count
                must = f"block numbers from 0 to {count - 1}"
            if not known:
                raise PellucidError(rule(f"layers of {extra.name}", must, layer), "guidance")


def unused_notes(request: Request, guidance: Guidance, plan: Plan) -> list[str]:
    """What was asked for and has no effect, in words."""
    found = []
    if request.negative_prompt and not guidance.needs_uncond and not asks_uncond(plan):
        found.append("negative_prompt has no effect: the guidance scale is 1 in every step")
    steps = len(steps_of(plan, True))
    for number, control in enumerate(request.controls, 1):
        if not any(control.acts_at(step, steps) for step in range(steps)):
            span = f"{control.start:g}-{control.end:g}"
            found.append(f"control {number} has no effect: none of {steps} steps lies whole in {span} of the run")
    return found


def tuning_notes(plan: Plan, parts: Components | None, guidance: Guidance) -> list[str]:
    """A note where a tuned plan runs with another model or guidance than it was tuned for; `parts` None: who knows."""
    evidence, found = plan.evidence, []
    if evidence.get("kind") != "pellucid-tune":
        return []
    tuned = str(evidence.get("model_hash", ""))
    other = fingerprint.differing(tuned, fingerprint.of_model(parts)) if tuned and parts is not None else ()
    if other:
        words = f"{', '.join(other)} {'differs' if len(other) == 1 else 'differ'}"
        found.append(f"the plan was tuned for other weights (of {evidence.get('model', '?')}): {words}")
    own = evidence.get("guidance")
    if own is not None and not same_guidance(own, guidance):
        found.append(f"the plan was tuned for guidance {own}, and runs with {guidance.text()}")
    return found


def same_guidance(text: Any, guidance: Guidance) -> bool:
    try:
        return Guidance.parse(text).same_rules(guidance)
    except PellucidError:
        return False


def description(pipe: Pipeline) -> str:
    """The model in some ten lines: its networks with their sizes, its defaults, and how to call it."""
    parts = pipe.components
    encoders = dict(zip(text_parts(parts), parts.text_encoders, strict=True))
    held = {"network": parts.network, "vae": parts.vae, **encoders, "image_encoder": parts.image_encoder}
    lines = [f"Pipeline {parts.name}"]
    for name, network in held.items():
        if network is not None:
            count = sum(p.numel() for p in network.parameters()) / 1e6
            kind = str(next(network.parameters()).dtype).removeprefix("torch.")
            lines.append(f"  {name:16}{type(network).__name__}, {count:.1f} M parameters, {kind}")
    request = Request(prompt="" if takes_text(parts.network) else None)
    own = make_plan(parts, request).plan
    (width, height), guidance = pipe.size_of(request), pipe.guidance_of(request).text()
    return "\n".join(
        [
            *lines,
            f"  {'schedule':16}{parts.schedule.name}, predicts {parts.target}",
            f"  {'defaults':16}{own.name}, {STEPS} steps, guidance {guidance}, {width}×{height} pixels",
            f"  {'device':16}{pipe.device}" + (f", policy {pipe.policy.to_dict()}" if pipe.policy != Policy() else ""),
            *([f"  {'notes':16}{'; '.join(parts.notes)}"] if parts.notes else []),
            f"  {'call':16}" + ('pipe("a red star", steps=20, seed=7)' if request.prompt == "" else "pipe(seed=7)"),
        ]
    )


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
        if not hasattr(asked, "first"):
            raise PellucidError(rule("noise", "philox, torch, or a noise source", asked), "noise")
        return asked
    kind = asked or ("philox" if plan.dialect == "exact" else "torch")
    if kind not in ("philox", "torch"):
        raise PellucidError(rule("noise", "philox, torch, or a noise source", kind), "noise")
    return Philox(seeds) if kind == "philox" else TorchStream(seeds)

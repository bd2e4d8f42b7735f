"""A request, made out for one diffusers pipeline: the arguments of its call, whose guidance it is, and the plan."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.core.noise import NoiseSource, TorchStream
from pellucid.core.plan import Plan
from pellucid.core.schedule import Schedule
from pellucid.interop.diffusers_config import Reading
from pellucid.interop.wrap import Peer
from pellucid.interop.wrap_proxies import Times
from pellucid.models.guidance import Guidance
from pellucid.models.rules import PAG, AutoGuidance, SkipLayer
from pellucid.pipeline.recipe import Recipe
from pellucid.pipeline.recording import run_of
from pellucid.pipeline.request import Request
from pellucid.pipeline.wrapped_plan import keeps_uncond, make_plan, told_times

# What a request says itself; the rest of the pipeline's own call goes through `peer_options`.
OURS = (
    "prompt", "negative_prompt", "num_images_per_prompt", "generator", "width", "height", "num_inference_steps",
    "timesteps", "sigmas", "eta", "latents", "output_type", "return_dict", "callback_on_step_end",
)  # fmt: skip
TIMES = ("timesteps", "sigmas")
SCALES = ("true_cfg_scale", "guidance_scale")
PROBE = 8.0  # what the pipeline mixes with while the guidance is ours: large, so that the order of the two shows


def told_its_scale(peer: Peer) -> bool:
    """Whether the network takes the guidance scale as an input, as distilled ones do."""
    config = getattr(peer.network, "config", {})
    read = config.get if isinstance(config, Mapping) else lambda key: getattr(config, key, None)
    return bool(read("guidance_embeds")) or read("time_cond_proj_dim") is not None


class Order:
    """A request, made out for one pipeline: what its call gets, whose guidance it is, and the plan once it is laid."""

    def __init__(
        self, peer: Peer, reading: Reading, request: Request, true_guidance: Any, peer_options: dict[str, Any]
    ) -> None:
        self.peer, self.reading, self.request, self.options = peer, reading, request, peer_options
        self.seeds = request.seeds()
        self.stream = request.noise if isinstance(request.noise, TorchStream) else TorchStream(self.seeds)
        self.check_options()
        self.scale, self.guidance = self.whose_guidance(true_guidance)
        self.check_rules()
        self.both = self.guidance is not None and (self.guidance.needs_uncond or keeps_uncond(reading, request))
        self.plan: Plan
        self.curve: Schedule
        self.call = self.arguments()

    @property
    def device(self) -> torch.device:
        return torch.device(getattr(self.peer.pipeline, "device", "cpu"))

    @property
    def key(self) -> tuple[str, ...]:
        """What may change how the pipeline calls its network."""
        return (*sorted(self.options), *(f"{name}={self.call.get(name)}" for name in SCALES))

    # --- guidance -------------------------------------------------------------------------------------------------

    def whose_guidance(self, true_guidance: Any) -> tuple[float | None, Guidance | None]:
        """(the scale that the network is told, our guidance); None is left to the pipeline."""
        asked = None if self.request.guidance is None else Guidance.parse(self.request.guidance)
        true = None if true_guidance is None else Guidance.parse(true_guidance).at_least_one()
        if not told_its_scale(self.peer):
            if true is not None:
                advice = f"The network of {self.peer.kind} is not told a scale: use guidance."
                raise PellucidError(rule("true_guidance", "left out", true_guidance, advice), "wrap-guidance")
            return None, None if asked is None else asked.at_least_one()
        if asked is not None and (asked.rules or not isinstance(asked.scale, float)):
            advice = "Rules go into true_guidance." if "true_cfg_scale" in self.peer.takes else ""
            must = f"a plain number, since the network of {self.peer.kind} is told it"
            raise PellucidError(rule("guidance", must, asked.text(), advice), "wrap-guidance")
        if true is not None and "true_cfg_scale" not in self.peer.takes:
            must = f"left out: {self.peer.kind} has only the scale that its network is told"
            raise PellucidError(rule("true_guidance", must, true_guidance), "wrap-guidance")
        return None if asked is None else float(asked.scale), true  # type: ignore[arg-type]

    def check_rules(self) -> None:
        """The rules that need the network's help, and the network that autoguidance needs."""
        extras = () if self.guidance is None else self.guidance.extras
        forward = getattr(self.peer.network, "forward", self.peer.network)
        for extra in extras:
            skips = isinstance(extra, SkipLayer) and "skip_layers" in inspect.signature(forward).parameters
            if isinstance(extra, PAG | SkipLayer) and not skips:
                kind = type(self.peer.network).__name__
                advice = "pellucid.load runs it on networks of our own."
                raise PellucidError(rule(extra.name, f"left out: {kind} cannot", extra.term, advice), "wrap-guidance")
        if self.request.weak is not None and not any(isinstance(extra, AutoGuidance) for extra in extras):
            raise PellucidError("weak must come with the rule autoguidance; got weak alone.", "wrap-guidance")

    @property
    def scales(self) -> list[float]:
        """What the pipeline may mix with: our probe, or its own."""
        if self.guidance is not None:
            return [PROBE if self.both else 1.0]
        own = [self.call.get(name, self.peer.takes.get(name)) for name in SCALES]
        return [float(s) for s in own if isinstance(s, int | float)]

    # --- the pipeline's call --------------------------------------------------------------------------------------

    def check_options(self) -> None:
        request = self.request
        own_times = request.sampler is request.grid is request.plan is request.steps is None
        for name, value in self.options.items():
            if name in TIMES and own_times and name in self.peer.takes:
                continue
            if name in TIMES:
                advice = "With a sampler, give them as grid={'name': 'explicit', 'sigmas': [...]}."
                must = "left out where steps, sampler, grid or plan are given"
                raise PellucidError(rule(f"peer_options[{name!r}]", must, value, advice), "option")
            if name in OURS or (name in SCALES and request.guidance is not None):
                raise PellucidError(rule(f"peer_options[{name!r}]", "left out: the request says it", value), "option")
            if name not in self.peer.takes:
                hint = nearest(name, self.peer.takes)
                must = f"an argument of {self.peer.kind}'s call"
                raise PellucidError(rule(f"peer_options[{name!r}]", must, value, hint), "option")

    def arguments(self) -> dict[str, Any]:
        request, takes = self.request, self.peer.takes
        call: dict[str, Any] = {**self.options, "generator": self.stream.generators, **self.texts()}
        call["output_type"] = "pil" if request.decode else "latent"
        for name, value in (
            ("num_inference_steps", request.plan.grid["steps"] if isinstance(request.plan, Plan) else request.steps),
            ("width", request.width),
            ("height", request.height),
            ("guidance_scale", self.scale),
        ):
            if value is not None:
                if name not in takes:
                    raise PellucidError(rule(name, f"left out: {self.peer.kind} takes none", value), "option")
                call[name] = value
        if self.guidance is not None:
            self.turn_guidance(call)
        return call

    def texts(self) -> dict[str, Any]:
        request, takes = self.request, self.peer.takes
        inside = "num_images_per_prompt" in takes
        copies = 1 if inside else request.n
        found: dict[str, Any] = {"num_images_per_prompt": request.n} if inside else {}
        if request.prompt is not None:
            found["prompt"] = [text for text in request.prompts for _ in range(copies)]
        elif "prompt_embeds" not in self.options:
            raise PellucidError("prompt must be given to a text-to-image pipeline; got nothing.", "prompt")
        if request.negative_prompt is not None:
            if "negative_prompt" not in takes:
                raise PellucidError(
                    rule("negative_prompt", f"left out: {self.peer.kind} takes none", request.negative_prompt), "prompt"
                )
            found["negative_prompt"] = [text for text in request.negatives for _ in range(copies)]
        return found

    def turn_guidance(self, call: dict[str, Any]) -> None:
        """Has the pipeline ask its network with and without the prompt, or only with it."""
        assert self.guidance is not None
        name = next((n for n in SCALES if n in self.peer.takes), None)
        if name is None:
            if self.both:
                must = f"1 for {self.peer.kind}, whose call takes no scale"
                raise PellucidError(rule("guidance", must, self.guidance.text()), "wrap-guidance")
            return
        call[name] = PROBE if self.both else 1.0
        if self.both and name == "true_cfg_scale" and "negative_prompt_embeds" not in call:
            call.setdefault("negative_prompt", [""] * len(call.get("prompt", self.request.prompts)))

    def lay(self, times: Times) -> Tensor:
        """The plan, when the pipeline sets its times; what its network is told, one per call."""
        self.plan, self.curve = make_plan(self.reading, self.request, times, "eta" in self.peer.takes)
        if self.guidance is not None and self.plan.dialect == "diffusers":
            self.guidance = self.guidance.as_diffusers()
        return told_times(self.plan, self.guidance, self.curve)

    # --- what is written down -------------------------------------------------------------------------------------

    def recipes(self, guidance: Guidance, source: NoiseSource, size: tuple[int, int] | None) -> list[Recipe]:
        request, weight = self.request, next(self.peer.network.parameters())
        config = getattr(self.peer.pipeline, "config", None)
        given = {name: value for name, value in self.options.items() if isinstance(value, bool | int | float | str)}
        told: dict[str, Any] = {} if self.scale is None else {"guidance_scale": self.scale}
        shared: dict[str, Any] = {
            "model": str(getattr(config, "_name_or_path", None) or self.peer.kind),
            **run_of(self.plan, request, guidance, source, weight),
            "device": self.device.type,
            "size": size or (None if None in (request.width, request.height) else (request.width, request.height)),
            "conditioning": {**told, **({"peer_options": given} if given else {})},
        }
        texts = zip(request.prompts, request.negatives, strict=True)
        pairs = [pair for pair in texts for _ in range(request.n)]
        return [
            Recipe(prompt=prompt, negative_prompt=negative, seed=seed, **shared)
            for (prompt, negative), seed in zip(pairs, self.seeds, strict=True)
        ]

"""`pellucid.wrap`: a live diffusers text-to-image pipeline under our plans, guidance and observers.

    pipe = pellucid.wrap(diffusers_pipeline)
    result = pipe("a red star", sampler="dpmpp_2m", steps=20, guidance="4 + apg", seed=1)

Without a sampler and without guidance it gives the image that the pipeline gives itself for the same seed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from pellucid.core.denoiser import input_scale
from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.core.loop import Prediction, run
from pellucid.core.noise import NoiseSource, Philox, TorchStream
from pellucid.core.plan import Plan
from pellucid.core.schedule import Schedule
from pellucid.interop import diffusers_config
from pellucid.interop.diffusers_config import Reading
from pellucid.interop.wrap import Conversation, Peer, look
from pellucid.interop.wrap_branches import PeerNetwork, Way
from pellucid.interop.wrap_strings import Times
from pellucid.models.guidance import Guidance
from pellucid.models.guided import GuidedDenoiser, GuidedRun
from pellucid.models.rules import PAG, AutoGuidance, SkipLayer
from pellucid.pipeline.pipeline import Result
from pellucid.pipeline.policy import Policy
from pellucid.pipeline.recipe import Recipe
from pellucid.pipeline.recording import noise_name
from pellucid.pipeline.request import Request
from pellucid.pipeline.stages import Stages
from pellucid.pipeline.wrapped_plan import keeps_uncond, make_plan, told_times

TAKEN = (
    "prompt", "negative_prompt", "n", "seed", "width", "height", "sampler", "grid", "steps", "dialect", "options",
    "plan", "guidance", "weak", "noise", "latents", "observers", "constraints", "cancelled", "decode",
)  # fmt: skip
# What a request says itself; the rest of the pipeline's own call goes through `peer_options`.
OURS = (
    "prompt", "negative_prompt", "num_images_per_prompt", "generator", "width", "height", "num_inference_steps",
    "timesteps", "sigmas", "eta", "latents", "output_type", "return_dict", "callback_on_step_end",
)  # fmt: skip
SCALES = ("true_cfg_scale", "guidance_scale")
PROBE = 8.0  # what the pipeline mixes with while the guidance is ours: large, so that the order of the two shows
KEPT = "the guidance is the pipeline's own: it is not a plain mixture with and without the prompt"


def wrap(pipeline: Any) -> WrappedPipeline:
    """A live diffusers text-to-image pipeline as one of ours; the object itself is left as it is."""
    return WrappedPipeline(look(pipeline))


@dataclass
class WrappedPipeline:
    """A diffusers pipeline that is asked step by step. Calls share nothing but its weights."""

    peer: Peer
    _ways: dict[tuple[str, ...], Way] = field(default_factory=dict, repr=False)

    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        /,
        *,
        true_guidance: Any = None,
        peer_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Result:
        """pipe("a red star", steps=20, seed=1): options of `Request`, as far as text to image has them.

        `guidance` is a scale with rules; where the network is told its scale (FLUX dev, LCM), it is that number, and
        `true_guidance` guides with and without the prompt. `peer_options` are further arguments of the pipeline's own
        call (`max_sequence_length`, `clip_skip`, `prompt_embeds`, …).
        """
        known = [f.name for f in fields(Request)]
        for name, value in options.items():
            if name not in TAKEN:
                hint = "A wrapped pipeline makes images from text." if name in known else nearest(name, TAKEN)
                raise PellucidError(rule(name, "an option of a wrapped pipeline", value, hint), "option")
        if prompt is not None:
            if "prompt" in options:
                raise PellucidError("prompt must be given once; got it twice.", "prompt")
            options["prompt"] = prompt
        more = dict(peer_options or {})
        request = Request(**options, prompt_embeds=more.get("prompt_embeds"))
        return self.run(request, true_guidance, more)

    @torch.no_grad()
    def run(self, request: Request, true_guidance: Any = None, peer_options: dict[str, Any] | None = None) -> Result:
        """One request: the pipeline prepares, we denoise with its network, and it decodes."""
        reading = diffusers_config.read(self.peer.pipeline.scheduler)
        order = Order(self.peer, reading, request, true_guidance, peer_options or {})
        talk = Conversation(self.peer, order.call, order.lay)
        stages = Stages(Policy(), order.device)
        try:
            with stages.run("text"):
                first = talk.start()
            journey = Journey(order, talk, self._ways)
            with stages.run("denoise"):
                x = journey.denoise(first)
            with stages.run("decode"):
                made = talk.finish(journey.clean(x))
        finally:
            talk.close()
        images = list(made.images) if request.decode else []
        if journey.network.way is not None and journey.network.way.sure:
            self._ways[order.key] = journey.network.way
        return Result(
            images=images,
            latents=x,
            plan=order.plan,
            recipes=order.recipes(journey, images[0].size if images else None),
            stages=tuple(stages.taken),
            notes=(*journey.notes(), *flagged(made)),
        )


def flagged(made: Any) -> list[str]:
    marks = getattr(made, "nsfw_content_detected", None) or []
    return [f"image {i} was blackened by the pipeline's safety checker" for i, bad in enumerate(marks) if bad]


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
        self.plan: Plan
        self.curve: Schedule
        self.call = self.arguments()

    @property
    def device(self) -> torch.device:
        return torch.device(getattr(self.peer.pipeline, "device", "cpu"))

    @property
    def key(self) -> tuple[str, ...]:
        """What may change how the pipeline calls its network."""
        return (*sorted(self.options), "guided" if self.guidance is not None else "")

    # --- guidance -------------------------------------------------------------------------------------------------

    def whose_guidance(self, true_guidance: Any) -> tuple[float | None, Guidance | None]:
        """(the scale that the network is told, our guidance); None is left to the pipeline."""
        asked = None if self.request.guidance is None else Guidance.parse(self.request.guidance)
        true = None if true_guidance is None else Guidance.parse(true_guidance)
        if not told_its_scale(self.peer):
            if true is not None:
                advice = f"The network of {self.peer.kind} is not told a scale: use guidance."
                raise PellucidError(rule("true_guidance", "left out", true_guidance, advice), "wrap-guidance")
            return None, asked
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
            return [PROBE]
        own = [self.call.get(name, self.peer.takes.get(name)) for name in SCALES]
        return [float(s) for s in own if isinstance(s, int | float)]

    # --- the pipeline's call --------------------------------------------------------------------------------------

    def check_options(self) -> None:
        for name, value in self.options.items():
            if name in OURS or (name in SCALES and self.request.guidance is not None):
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
            raise PellucidError("prompt must be given to a text-to-image pipeline; got None.", "prompt")
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
        wanted = self.guidance.needs_uncond or keeps_uncond(self.reading, self.request)
        if name is None:
            if wanted:
                must = f"1 for {self.peer.kind}, whose call takes no scale"
                raise PellucidError(rule("guidance", must, self.guidance.text()), "wrap-guidance")
            return
        call[name] = PROBE if wanted else 1.0
        if wanted and name == "true_cfg_scale" and "negative_prompt_embeds" not in call:
            call.setdefault("negative_prompt", [""] * len(call.get("prompt", self.request.prompts)))

    def lay(self, times: Times) -> Tensor:
        """The plan, when the pipeline sets its times; what its network is told, one a call."""
        self.plan, self.curve = make_plan(self.reading, self.request, times)
        if self.guidance is not None and self.plan.dialect == "diffusers":
            self.guidance = self.guidance.as_diffusers()
        return told_times(self.plan, self.guidance, self.curve)

    # --- what is written down -------------------------------------------------------------------------------------

    def recipes(self, journey: Journey, size: tuple[int, int] | None) -> list[Recipe]:
        request, plan = self.request, self.plan
        weight = next(iter(self.peer.network.parameters()))
        given = {name: value for name, value in self.options.items() if isinstance(value, bool | int | float | str)}
        told: dict[str, Any] = {} if self.scale is None else {"guidance_scale": self.scale}
        shared: dict[str, Any] = {
            "model": str(getattr(self.peer.pipeline.config, "_name_or_path", "") or self.peer.kind),
            "sampler": plan.name,
            "grid": {k: v for k, v in plan.grid.items() if k not in ("steps", "skip", "stop", "between")},
            "steps": int(plan.grid["steps"]),
            "dialect": plan.dialect,
            "options": dict(plan.options),
            "plan": None if request.plan is None else plan.to_dict(),
            "guidance": journey.guidance.to_dict(),
            "noise": noise_name(journey.source),
            "size": size or (None if None in (request.width, request.height) else (request.width, request.height)),
            "conditioning": {**told, **({"peer_options": given} if given else {})},
            "dtype": str(weight.dtype).removeprefix("torch."),
            "device": weight.device.type,
            "torch": torch.__version__,
        }
        texts = zip(request.prompts, request.negatives, strict=True)
        pairs = [pair for pair in texts for _ in range(request.n)]
        return [
            Recipe(prompt=prompt, negative_prompt=negative, seed=seed, **shared)
            for (prompt, negative), seed in zip(pairs, self.seeds, strict=True)
        ]


class Journey:
    """One request on its way from the pipeline's first noise to the x that it decodes."""

    def __init__(self, order: Order, talk: Conversation, ways: Mapping[tuple[str, ...], Way]) -> None:
        self.order, self.request, self.plan = order, order.request, order.plan
        known = ways.get(order.key) if order.guidance is not None else None
        self.network = PeerNetwork(talk, len(order.seeds), order.scales, known)
        self.guidance = order.guidance or Guidance(1.0)
        self.source = self.noise_source()

    def noise_source(self) -> NoiseSource:
        """The torch stream goes on where the pipeline left it: it has drawn the first noise from it."""
        asked = self.request.noise
        if asked is not None and not isinstance(asked, str):
            return asked
        kind = asked or ("philox" if self.plan.dialect == "exact" else "torch")
        if kind not in ("philox", "torch"):
            raise PellucidError(rule("noise", "philox, torch, or a noise source", kind), "noise")
        return Philox(self.order.seeds) if kind == "philox" else self.order.stream

    def denoise(self, first: Tensor) -> Tensor:
        request, count = self.request, len(self.order.seeds)
        shape = tuple(first.shape)
        if len(first) != count:
            raise PellucidError(rule("latents of the pipeline", f"{count} images", shape), "wrap-loop")
        like = torch.empty(0, device=first.device)
        if request.latents is not None:
            if tuple(request.latents.shape) != shape:
                raise PellucidError(rule("latents", f"of shape {shape}", tuple(request.latents.shape)), "latents")
            noise = request.latents.to(like)
        elif self.source is self.order.stream:
            noise = first.to(like)
        else:
            noise = self.source.first(shape[1:], like, range(count))
        given = self.order.guidance
        denoiser: Any = self.guided(given) if given is not None else OwnGuidance(self)
        return run(
            self.plan,
            denoiser,
            noise * self.plan.initial_scale,
            noise=self.source,
            observers=request.observers,
            constraints=request.constraints,
            cancelled=request.cancelled,
        )

    def guided(self, guidance: Guidance) -> GuidedDenoiser:
        """The pipeline's network under a guidance: cond and uncond are told apart by `which`."""
        self.guidance, count = guidance, len(self.order.seeds)
        weak = self.request.weak
        return GuidedDenoiser(
            self.network,
            self.order.curve,
            self.order.reading.target,  # type: ignore[arg-type]
            {"which": torch.ones(count)},
            {"which": torch.zeros(count)},
            guidance,
            weak=None if weak is None else self.second(weak),
            x0_filter=self.order.reading.x0_filter,
        )

    def second(self, weak: Any) -> Callable[..., Tensor]:
        """The network of autoguidance: that of another pipeline, told the same."""
        peer = weak.peer if isinstance(weak, WrappedPipeline) else look(weak)

        def network(x: Tensor, time: Any, *, which: Tensor) -> Tensor:
            return self.network.again(peer.network, x)

        return network

    def clean(self, x: Tensor) -> Tensor:
        """What the pipeline decodes: an exact plan may end with noise left, where x0 has alpha below 1."""
        end = self.plan.end
        return x / end.alpha if self.plan.dialect == "exact" and end.alpha > 0 else x

    def notes(self) -> tuple[str, ...]:
        way, found = self.network.way, list(self.guidance.notes)
        if self.network.kept:
            found.append(KEPT)
        elif self.request.negative_prompt and way is not None and way.predictions == 1:
            found.append("negative_prompt has no effect: nothing is predicted without the prompt")
        return tuple(found)


class OwnGuidance:
    """The guidance that the pipeline has by itself, seen through: its first step tells what it is."""

    def __init__(self, journey: Journey) -> None:
        self.journey = journey
        self.run: GuidedRun | None = None

    def bind(self, plans: Sequence[Plan]) -> OwnGuidance:
        self.plans = list(plans)
        return self

    def select(self, images: Sequence[int]) -> OwnGuidance:
        raise AssertionError("all images of a request have one plan")

    def __call__(self, x: Tensor, level: Any, time: Any) -> Prediction:
        if self.run is None:
            self.run = self.begin(x * input_scale(self.journey.order.curve, level))
        return self.run(x, level, time)

    def begin(self, x: Tensor) -> GuidedRun:
        journey, network = self.journey, self.journey.network
        way = network.learn(x)
        network.kept = way is None or not way.plain
        if journey.plan.guided and (network.kept or way is None or way.predictions == 1):
            raise network.refusal(way)
        scale = 1.0 if network.kept or way is None else way.scale
        return journey.guided(Guidance(scale)).bind(self.plans)

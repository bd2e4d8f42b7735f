"""`pellucid.wrap`: a live diffusers text-to-image pipeline under our plans, guidance and observers.

    pipe = pellucid.wrap(diffusers_pipeline)
    result = pipe("a red star", sampler="dpmpp_2m", steps=20, guidance="4 + apg", seed=1)

Without a sampler and without guidance it gives the image that the pipeline gives itself for the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from pellucid.core.denoiser import input_scale
from pellucid.core.errors import PellucidError, rule
from pellucid.core.loop import Prediction, run
from pellucid.core.noise import NoiseSource, Philox
from pellucid.core.schedule import Level
from pellucid.interop import diffusers_config
from pellucid.interop.diffusers_config import Reading
from pellucid.interop.diffusers_plan import noise_notes
from pellucid.interop.wrap import Conversation, Peer, look
from pellucid.interop.wrap_branches import PeerNetwork, Way
from pellucid.models.guidance import Guidance, scale_notes
from pellucid.models.guided import GuidedDenoiser, Terms
from pellucid.pipeline import images, observers
from pellucid.pipeline.peer_words import CALL, RefusesPeerWords, option_error
from pellucid.pipeline.pipeline import Result, asks_uncond, tuned_for_another
from pellucid.pipeline.policy import Policy
from pellucid.pipeline.request import Request
from pellucid.pipeline.stages import Stages
from pellucid.pipeline.wrapped_order import Order

TAKEN = (
    "prompt", "negative_prompt", "n", "seed", "width", "height", "sampler", "grid", "steps", "dialect", "options",
    "plan", "guidance", "weak", "noise", "latents", "observers", "constraints", "cancelled", "decode",
)  # fmt: skip
KEPT = "the guidance is the pipeline's own: it is not a plain mixture with and without the prompt"


def wrap(pipeline: Any) -> WrappedPipeline:
    """A live diffusers text-to-image pipeline as one of ours; the object itself is left as it is."""
    return WrappedPipeline(look(pipeline))


@dataclass(repr=False)
class WrappedPipeline(RefusesPeerWords):
    """A diffusers pipeline that is asked step by step. Calls share nothing but its weights."""

    peer: Peer
    _ways: dict[tuple[str, ...], Way] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        return f"WrappedPipeline of {type(self.peer.pipeline).__name__}"

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
                if name in known:
                    hint = "A wrapped pipeline makes images from text."
                    raise PellucidError(rule(name, "an option of a wrapped pipeline", value, hint), "option")
                raise option_error(name, value, TAKEN, CALL)
        if prompt is not None:
            if "prompt" in options:
                raise PellucidError("prompt must be given once; got it twice.", "prompt")
            options["prompt"] = prompt
        more = dict(peer_options or {})
        if more.get("prompt_embeds") is not None:  # the request only counts them
            options["prompt_embeds"] = torch.empty(len(more["prompt_embeds"]))
        request = Request(**options)
        return self.run(request, true_guidance, more)

    @torch.no_grad()
    def run(self, request: Request, true_guidance: Any = None, peer_options: dict[str, Any] | None = None) -> Result:
        """One request: the pipeline prepares, we denoise with its network, and it decodes."""
        reading = read_scheduler(self.peer.pipeline)
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
        result = Result(
            images=images,
            latents=x,
            plan=order.plan,
            recipes=order.recipes(journey.guidance, journey.source, images[0].size if images else None),
            stages=tuple(stages.taken),
            notes=(
                *journey.notes(),
                *scale_notes(journey.guidance),
                *([] if order.guidance is None else tuned_for_another(order.plan, None, order.guidance)),
                *noise_notes(order.plan, reading.class_name),
                *flagged(made),
            ),
        )
        return observers.end(request.observers, result)


def read_scheduler(pipeline: Any) -> Reading:
    """The pipeline's scheduler, understood; one that is not cannot be run under a plan."""
    try:
        return diffusers_config.read(pipeline.scheduler)
    except PellucidError as error:
        line = str(error).removesuffix(" Pass strict=False to go on without.")
        raise PellucidError(f"scheduler of {type(pipeline).__name__}: {line}", error.code) from None


def flagged(made: Any) -> list[str]:
    marks = getattr(made, "nsfw_content_detected", None) or []
    return [f"image {i} was blackened by the pipeline's safety checker" for i, bad in enumerate(marks) if bad]


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
            images.check_finite("latents", request.latents)
            noise = request.latents.to(like)
        elif self.source is self.order.stream:
            noise = first.to(like)
        else:
            noise = self.source.first(shape[1:], like, range(count))
        own = self.order.guidance
        return run(
            self.plan,
            OwnGuidance(self) if own is None else self.guided(own),
            noise * self.plan.initial_scale,
            noise=self.source,
            observers=request.observers,
            constraints=request.constraints,
            cancelled=request.cancelled,
        )

    def guided(self, guidance: Guidance) -> GuidedDenoiser:
        """The pipeline's network under a guidance: cond and uncond are told apart by `which`."""
        count, weak = len(self.order.seeds), self.request.weak
        return GuidedDenoiser(
            self.network,
            self.order.curve,
            self.order.reading.target,  # type: ignore[arg-type]
            {"which": torch.ones(count)},
            {"which": torch.zeros(count)} if self.order.both else None,
            guidance,
            weak=None if weak is None else self.second(weak),
            x0_filter=self.order.reading.x0_filter,
            keep_raw=bool(self.plan.options.get("keep_eps")),
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
        if self.order.guidance is None and (way is None or not way.plain):
            found.append(KEPT)
        elif self.request.negative_prompt and way is not None and way.predictions == 1:
            found.append("negative_prompt has no effect: nothing is predicted without the prompt")
        return tuple(found)


@dataclass
class OwnGuidance:
    """The guidance that the pipeline has by itself, as it mixes; what it mixed is shown where it is recognised."""

    journey: Journey

    def __call__(self, x: Tensor, level: Level, time: float) -> Prediction:
        journey, network, order = self.journey, self.journey.network, self.journey.order
        reply = network.hear(x * input_scale(order.curve, level))
        terms = Terms(x, [level], order.curve, order.reading.target)  # type: ignore[arg-type]
        way, pair = network.way, network.pair(reply, x)
        if pair is None and asks_uncond(journey.plan):
            raise network.refusal()
        name = "cond" if way is not None and way.predictions == 1 else "peer"
        if way is not None and pair is not None:
            terms.put("cond", "raw", pair[0])
            terms.put("uncond", "raw", pair[1])
            terms.scales = (way.scale,)
            if way.plain:
                name, journey.guidance = "cfg", Guidance(way.scale)
        x0 = terms[terms.put(name, "raw", reply.mixed.to(x.dtype))]
        keep, beside = order.reading.x0_filter, None
        if journey.plan.guided:  # what a plan reads beside x0: uncond, or in diffusers' DDIM x0 before it is clipped
            beside = terms["uncond"] if asks_uncond(journey.plan) else x0
        return Prediction(x0 if keep is None else keep(x0), beside, terms)

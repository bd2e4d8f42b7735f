"""`pellucid.wrap`: a live diffusers text-to-image pipeline under our plans, guidance and observers.

    pipe = pellucid.wrap(diffusers_pipeline)
    result = pipe("a red star", sampler="dpmpp_2m", steps=20, guidance="4 + apg", seed=1)

Without a sampler and without guidance it gives the image that the pipeline gives itself for the same seed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pellucid.core.batch import Prediction
from pellucid.core.denoiser import input_scale
from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.core.loop import run
from pellucid.core.noise import NoiseSource, TorchStream
from pellucid.core.plan import Plan
from pellucid.core.samplers import resolve
from pellucid.core.schedule import Flow, Level, Schedule
from pellucid.interop import diffusers_config
from pellucid.interop.diffusers_config import SchedulerSettings
from pellucid.interop.diffusers_plan import compile_reading, distilled_times, noise_notes, pipeline_options, shifted
from pellucid.interop.wrap import Conversation, Peer, look
from pellucid.interop.wrap_branches import Mixing, PeerNetwork
from pellucid.interop.wrap_proxies import Times
from pellucid.models.guidance import Guidance, scale_notes
from pellucid.models.guided import GuidedDenoiser, Terms
from pellucid.models.rules import PAG, AutoGuidance, SkipLayer
from pellucid.pipeline import images
from pellucid.pipeline.decode import run_fields
from pellucid.pipeline.peer_words import CALL, RefusesPeerWords, option_error
from pellucid.pipeline.policy import Policy
from pellucid.pipeline.prepare import asks_uncond, given_plan, named_plan, noise_source, read_plan, tuning_notes
from pellucid.pipeline.recipe import Recipe
from pellucid.pipeline.request import Request
from pellucid.pipeline.result import Result, show_result
from pellucid.pipeline.stages import Stages

# --- The plan -------------------------------------------------------------------------------------------------------


def _make_peer_plan(
    reading: SchedulerSettings, request: Request, times: Times, passes_eta: bool = False
) -> tuple[Plan, Schedule]:
    """The plan, and the schedule as it is bent for this image's size."""
    if request.plan is not None:  # a plan is all of it: the times that are passed to the network, too
        table = _as_table(request)
        curve = _shifted_schedule(reading, "exact" if table is None else table.dialect, times)
        return given_plan(SimpleNamespace(schedule=curve, target=reading.target), request), curve  # type: ignore
    own = request.sampler is None and request.grid is None
    dialect = request.dialect or ("diffusers" if own else "exact")
    curve = _shifted_schedule(reading, dialect, times)
    if own:
        passed = pipeline_options(reading, passes_eta and dialect == "diffusers")
        plan = _as_the_pipeline(reading, dialect, times, {**passed, **request.options})
    else:
        plan = named_plan(request, reading.sampler, curve, reading.target, times.count, dialect)
    if times.timesteps is not None and times.sigmas is not None and isinstance(curve, Flow):
        # the time before the shift is passed to the network (CogView 4)
        plan = replace(plan, rows=tuple(replace(r, time=curve.unbend(r.time)) for r in plan.rows))
    return plan, curve


def _as_table(request: Request) -> Plan | None:
    """The plan that a request gives, from its file where it names one; None where that cannot be read."""
    try:
        return None if request.plan is None else read_plan(request.plan)
    except (OSError, ValueError):
        return None  # `given_plan` says what is wrong with it


def _shifted_schedule(reading: SchedulerSettings, dialect: str, times: Times) -> Schedule:
    return shifted(reading, dialect, times.mu) if reading.values.get("use_dynamic_shifting") else reading.schedule


def _as_the_pipeline(reading: SchedulerSettings, dialect: str, times: Times, options: dict[str, Any]) -> Plan:
    """The plan of the pipeline's own scheduler, with options over those of its config."""
    timesteps: Sequence[float] | None = times.timesteps if times.sigmas is None else None
    if times.original is not None:  # LCM: out of the times of its distillation
        timesteps = distilled_times(reading, times.steps, timesteps, times.original)
    steps = times.steps if timesteps is None and times.sigmas is None else None
    given: dict[str, Any] = {"timesteps": timesteps, "sigmas": times.sigmas, "mu": times.mu}
    return compile_reading(reading, steps, dialect=dialect, overrides=options, **given)


def _keeps_uncond(reading: SchedulerSettings, request: Request) -> bool:
    """Whether the sampler uses the unconditional prediction beside the guided one (the CFG++ family)."""
    table = _as_table(request)
    if table is not None:
        return asks_uncond(table)
    if request.sampler is None:
        return False
    curve = replace(reading.schedule, terminal=None) if isinstance(reading.schedule, Flow) else reading.schedule
    small = replace(request, grid=None, dialect=None)
    return asks_uncond(named_plan(small, reading.sampler, curve, reading.target, 4, "exact"))


def _network_times(plan: Plan, guidance: Guidance | None, curve: Schedule) -> Tensor:
    """The times that are passed to the network, one per call: rows that CFG-Zero* leaves out have none."""
    bound = None if guidance is None else guidance.bind(plan, curve)
    times = [r.time for r in plan.rows if bound is None or not bound.at(r.level).zero]
    whole = plan.dialect == "diffusers" and resolve(plan.name)[0].peer in ("solver", "training")
    kind = torch.int64 if whole and all(t == int(t) for t in times) else torch.float32
    return torch.tensor(times, dtype=kind)


# --- A request for one diffusers pipeline ---------------------------------------------------------------------------

# What a request says itself; the rest of the pipeline's own call goes through `peer_options`.
_OWN_OPTIONS = (
    "prompt", "negative_prompt", "num_images_per_prompt", "generator", "width", "height", "num_inference_steps",
    "timesteps", "sigmas", "eta", "latents", "output_type", "return_dict", "callback_on_step_end",
)  # fmt: skip
_TIMES = ("timesteps", "sigmas")
_PEER_SCALES = ("true_cfg_scale", "guidance_scale")
_PROBE = 8.0  # what the pipeline mixes with while the guidance is ours: large, so that the order of the two shows


def _takes_scale(peer: Peer) -> bool:
    """Whether the network takes the guidance scale as an input, as distilled ones do."""
    config = getattr(peer.network, "config", {})
    held = config if isinstance(config, Mapping) else vars(config)
    return bool(held.get("guidance_embeds")) or held.get("time_cond_proj_dim") is not None


class _PeerRequest:
    """A request, made out for one pipeline: what its call gets, whose guidance it is, and the plan once it is laid."""

    def __init__(
        self, peer: Peer, reading: SchedulerSettings, request: Request, true_guidance: Any, peer_options: dict[str, Any]
    ) -> None:
        self.peer, self.reading, self.request, self.options = peer, reading, request, peer_options
        self.seeds = request.seeds()
        self.stream = request.noise if isinstance(request.noise, TorchStream) else TorchStream(self.seeds)
        self.check_options()
        self.scale, self.guidance = self.whose_guidance(true_guidance)
        self.check_rules()
        self.both = self.guidance is not None and (self.guidance.needs_uncond or _keeps_uncond(reading, request))
        self.plan: Plan
        self.curve: Schedule
        self.call = self.arguments()

    @property
    def device(self) -> torch.device:
        return torch.device(getattr(self.peer.pipeline, "device", "cpu"))

    @property
    def key(self) -> tuple[str, ...]:
        """What may change how the pipeline calls its network."""
        return (*sorted(self.options), *(f"{name}={self.call.get(name)}" for name in _PEER_SCALES))

    # --- guidance -------------------------------------------------------------------------------------------------

    def whose_guidance(self, true_guidance: Any) -> tuple[float | None, Guidance | None]:
        """(the scale that is passed to the network, our guidance); None is left to the pipeline."""
        asked = None if self.request.guidance is None else Guidance.parse(self.request.guidance)
        true = None if true_guidance is None else Guidance.parse(true_guidance).at_least_one()
        if not _takes_scale(self.peer):
            if true is not None:
                advice = f"The network of {self.peer.kind} takes no scale: use guidance."
                raise PellucidError(rule("true_guidance", "left out", true_guidance, advice), "wrap-guidance")
            return None, None if asked is None else asked.at_least_one()
        if asked is not None and (asked.rules or not isinstance(asked.scale, float)):
            advice = "Rules go into true_guidance." if "true_cfg_scale" in self.peer.takes else ""
            must = f"a plain number, since the network of {self.peer.kind} takes it as an input"
            raise PellucidError(rule("guidance", must, asked.text(), advice), "wrap-guidance")
        if true is not None and "true_cfg_scale" not in self.peer.takes:
            must = f"left out: {self.peer.kind} has only the scale that its network takes"
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
            return [_PROBE if self.both else 1.0]
        own = [self.call.get(name, self.peer.takes.get(name)) for name in _PEER_SCALES]
        return [float(s) for s in own if isinstance(s, int | float)]

    # --- the pipeline's call --------------------------------------------------------------------------------------

    def check_options(self) -> None:
        request = self.request
        own_times = all(one is None for one in (request.sampler, request.grid, request.plan, request.steps))
        for name, value in self.options.items():
            if name in _TIMES and own_times and name in self.peer.takes:
                continue
            if name in _TIMES:
                advice = "With a sampler, give them as grid={'name': 'explicit', 'sigmas': [...]}."
                must = "left out where steps, sampler, grid or plan are given"
                raise PellucidError(rule(f"peer_options[{name!r}]", must, value, advice), "option")
            if name in _OWN_OPTIONS or (name in _PEER_SCALES and request.guidance is not None):
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
        name = next((n for n in _PEER_SCALES if n in self.peer.takes), None)
        if name is None:
            if self.both:
                must = f"1 for {self.peer.kind}, whose call takes no scale"
                raise PellucidError(rule("guidance", must, self.guidance.text()), "wrap-guidance")
            return
        call[name] = _PROBE if self.both else 1.0
        if self.both and name == "true_cfg_scale" and "negative_prompt_embeds" not in call:
            call.setdefault("negative_prompt", [""] * len(call.get("prompt", self.request.prompts)))

    def lay(self, times: Times) -> Tensor:
        """The plan, when the pipeline sets its times; the times of its network, one per call."""
        self.plan, self.curve = _make_peer_plan(self.reading, self.request, times, "eta" in self.peer.takes)
        if self.guidance is not None and self.plan.dialect == "diffusers":
            self.guidance = self.guidance.as_diffusers()
        return _network_times(self.plan, self.guidance, self.curve)

    # --- what is written down -------------------------------------------------------------------------------------

    def recipes(self, guidance: Guidance, source: NoiseSource, size: tuple[int, int] | None) -> list[Recipe]:
        request, weight = self.request, next(self.peer.network.parameters())
        config = getattr(self.peer.pipeline, "config", None)
        given = {name: value for name, value in self.options.items() if isinstance(value, bool | int | float | str)}
        scale: dict[str, Any] = {} if self.scale is None else {"guidance_scale": self.scale}
        shared: dict[str, Any] = {
            "model": str(getattr(config, "_name_or_path", None) or self.peer.kind),
            **run_fields(self.plan, request, guidance, source, str(weight.dtype).removeprefix("torch.")),
            "device": self.device.type,
            "size": size or (None if None in (request.width, request.height) else (request.width, request.height)),
            "conditioning": {**scale, **({"peer_options": given} if given else {})},
        }
        texts = zip(request.prompts, request.negatives, strict=True)
        pairs = [pair for pair in texts for _ in range(request.n)]
        return [
            Recipe(prompt=prompt, negative_prompt=negative, seed=seed, **shared)
            for (prompt, negative), seed in zip(pairs, self.seeds, strict=True)
        ]


# --- The wrapped pipeline -------------------------------------------------------------------------------------------

_WRAPPED_OPTIONS = (
    "prompt", "negative_prompt", "n", "seed", "width", "height", "sampler", "grid", "steps", "dialect", "options",
    "plan", "guidance", "weak", "noise", "latents", "observers", "constraints", "cancelled", "decode",
)  # fmt: skip
_OWN_GUIDANCE_NOTE = "the guidance is the pipeline's own: it is not a plain mixture with and without the prompt"


def wrap(pipeline: Any) -> WrappedPipeline:
    """A live diffusers text-to-image pipeline as one of ours; the object itself is left as it is."""
    return WrappedPipeline(look(pipeline))


@dataclass(repr=False)
class WrappedPipeline(RefusesPeerWords):
    """A diffusers pipeline that runs step by step. Calls share nothing but its weights."""

    peer: Peer
    _mixings: dict[tuple[str, ...], Mixing] = field(default_factory=dict, repr=False)

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

        `guidance` is a scale with rules; where it is an input of the network (FLUX dev, LCM), it is that number, and
        `true_guidance` guides with and without the prompt. `peer_options` are further arguments of the pipeline's own
        call (`max_sequence_length`, `clip_skip`, `prompt_embeds`, …).
        """
        known = [f.name for f in fields(Request)]
        for name, value in options.items():
            if name not in _WRAPPED_OPTIONS:
                if name in known:
                    hint = "A wrapped pipeline makes images from text."
                    raise PellucidError(rule(name, "an option of a wrapped pipeline", value, hint), "option")
                raise option_error(name, value, _WRAPPED_OPTIONS, CALL)
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
        order = _PeerRequest(self.peer, reading, request, true_guidance, peer_options or {})
        talk = Conversation(self.peer, order.call, order.lay)
        stages = Stages(Policy(), order.device)
        try:
            with stages.run("text"):
                first = talk.start()
            journey = _WrappedRun(order, talk, self._mixings)
            with stages.run("denoise"):
                x = journey.denoise(first)
            with stages.run("decode"):
                made = talk.finish(journey.clean(x))
        finally:
            talk.close()
        images = list(made.images) if request.decode else []
        if journey.network.mixing is not None and journey.network.mixing.sure:
            self._mixings[order.key] = journey.network.mixing
        result = Result(
            images=images,
            latents=x,
            plan=order.plan,
            recipes=order.recipes(journey.guidance, journey.source, images[0].size if images else None),
            stages=tuple(stages.taken),
            notes=(
                *journey.notes(),
                *scale_notes(journey.guidance),
                *([] if order.guidance is None else tuning_notes(order.plan, None, order.guidance)),
                *noise_notes(order.plan, reading.class_name),
                *_safety_notes(made),
            ),
        )
        return show_result(request.observers, result)


def read_scheduler(pipeline: Any) -> SchedulerSettings:
    """The pipeline's scheduler, understood; one that is not cannot be run under a plan."""
    try:
        return diffusers_config.read(pipeline.scheduler)
    except PellucidError as error:
        line = str(error).removesuffix(" Pass strict=False to ignore it.")
        raise PellucidError(f"scheduler of {type(pipeline).__name__}: {line}", error.code) from None


def _safety_notes(made: Any) -> list[str]:
    marks = getattr(made, "nsfw_content_detected", None) or []
    return [f"image {i} was blackened by the pipeline's safety checker" for i, bad in enumerate(marks) if bad]


class _WrappedRun:
    """One request on its way from the pipeline's first noise to the x that it decodes."""

    def __init__(self, order: _PeerRequest, talk: Conversation, mixings: Mapping[tuple[str, ...], Mixing]) -> None:
        self.order, self.request, self.plan = order, order.request, order.plan
        known = mixings.get(order.key) if order.guidance is not None else None
        self.network = PeerNetwork(talk, len(order.seeds), order.scales, known)
        self.guidance = order.guidance or Guidance(1.0)
        # the torch stream goes on where the pipeline left it: it has drawn the first noise from it
        self.source = noise_source(self.request, self.plan, order.seeds, order.stream)

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
            _OwnGuidance(self) if own is None else self.guided(own),
            noise * self.plan.initial_scale,
            noise=self.source,
            observers=request.observers,
            constraints=request.constraints,
            cancelled=request.cancelled,
        )

    def guided(self, guidance: Guidance) -> GuidedDenoiser:
        """The pipeline's network under a guidance: `which` distinguishes cond from uncond."""
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
        """The network of autoguidance: that of another pipeline, with the same inputs."""
        peer = weak.peer if isinstance(weak, WrappedPipeline) else look(weak)

        def network(x: Tensor, time: Any, *, which: Tensor) -> Tensor:
            return self.network.again(peer.network, x)

        return network

    def clean(self, x: Tensor) -> Tensor:
        """What the pipeline decodes: an exact plan may end with noise left, where x0 has alpha below 1."""
        end = self.plan.end
        return x / end.alpha if self.plan.dialect == "exact" and end.alpha > 0 else x

    def notes(self) -> tuple[str, ...]:
        mixing, found = self.network.mixing, list(self.guidance.notes)
        if self.order.guidance is None and (mixing is None or not mixing.plain):
            found.append(_OWN_GUIDANCE_NOTE)
        elif self.request.negative_prompt and mixing is not None and mixing.predictions == 1:
            found.append("negative_prompt has no effect: nothing is predicted without the prompt")
        return tuple(found)


@dataclass
class _OwnGuidance:
    """The guidance that the pipeline has by itself, as it mixes; what it mixed is shown where it is recognised."""

    journey: _WrappedRun

    def __call__(self, x: Tensor, level: Level, time: float) -> Prediction:
        journey, network, order = self.journey, self.journey.network, self.journey.order
        reply = network.hear(x * input_scale(order.curve, level))
        terms = Terms(x, [level], order.curve, order.reading.target)  # type: ignore[arg-type]
        mixing, pair = network.mixing, network.pair(reply, x)
        if pair is None and asks_uncond(journey.plan):
            raise network.refusal()
        name = "cond" if mixing is not None and mixing.predictions == 1 else "peer"
        if mixing is not None and pair is not None:
            terms.put("cond", "raw", pair[0])
            terms.put("uncond", "raw", pair[1])
            terms.scales = (mixing.scale,)
            if mixing.plain:
                name, journey.guidance = "cfg", Guidance(mixing.scale)
        x0 = terms[terms.put(name, "raw", reply.mixed.to(x.dtype))]
        keep, beside = order.reading.x0_filter, None
        if journey.plan.guided:  # what a plan reads beside x0: uncond, or in diffusers' DDIM x0 before it is clipped
            beside = terms["uncond"] if asks_uncond(journey.plan) else x0
        return Prediction(x0 if keep is None else keep(x0), beside, terms)

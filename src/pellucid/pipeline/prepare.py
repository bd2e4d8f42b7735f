"""From a request to one value that can be held and run: its plan, its start and its inputs; and the run to latents."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.core.batch import Constraint, Observer, Prediction, StepSeen
from pellucid.core.compile import compile_plan
from pellucid.core.denoiser import split
from pellucid.core.dialect_diffusers import known_level
from pellucid.core.errors import PellucidError, rule
from pellucid.core.filters import Filter
from pellucid.core.grid import Grid
from pellucid.core.loop import check_fits, loop
from pellucid.core.noise import NoiseSource, Philox, TorchStream
from pellucid.core.plan import Plan
from pellucid.core.reader import naming, read_text
from pellucid.core.schedule import Level, Schedule
from pellucid.interop import diffusers_config, source
from pellucid.interop.components import Components, Network
from pellucid.interop.diffusers_plan import compile_reading, noise_notes, pipeline_options
from pellucid.models.blocks import within
from pellucid.models.captured import called_through
from pellucid.models.controlnet import ControlledUNet, Hint
from pellucid.models.guidance import Guidance, scale_notes, steps_before, steps_of
from pellucid.models.guided import GuidedDenoiser, GuidedRun
from pellucid.models.rules import LayerExtra, Rescale
from pellucid.models.unet import UNet
from pellucid.pipeline import fingerprint
from pellucid.pipeline.decode import Latents, recipes_of
from pellucid.pipeline.encoders import image_inputs
from pellucid.pipeline.encoders.conditions import Conditions, make_conditions, takes_guidance, takes_text, text_notes
from pellucid.pipeline.model import Model, RunSettings
from pellucid.pipeline.recipe import Recipe
from pellucid.pipeline.request import Control, Request
from pellucid.pipeline.result import show_recipes
from pellucid.pipeline.stages import Stages

# --- The plan -------------------------------------------------------------------------------------------------------

STEPS = 30
_MAX_PLAN_BYTES = 64 * 2**20


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

        return RunPlan(_cut_plan(components, request, dialect, from_config), keep)
    if request.options and request.sampler is None and reading is None:
        raise PellucidError("options must come with a sampler: the model has no scheduler of its own.", "request")
    own = reading.sampler if reading is not None else "dpmpp_2m"
    dialect = request.dialect or "exact"
    from_name = partial(named_plan, request, own, components.schedule, components.target, steps, dialect)
    return RunPlan(_cut_plan(components, request, dialect, from_name), keep)


def named_plan(
    request: Request, own: str, schedule: Schedule, target: str, steps: int | None, dialect: str, **cuts: Any
) -> Plan:
    """The plan of the sampler and the grid that a request names; `own` is the sampler where it names none."""
    grid: Any = Grid.from_dict(dict(request.grid)) if isinstance(request.grid, Mapping) else request.grid
    return compile_plan(
        request.sampler or own,
        schedule=schedule,
        target=target,
        grid=grid,
        steps=None if isinstance(grid, Grid) and grid.name == "explicit" else steps,
        dialect=dialect,
        **cuts,
        **request.options,
    )


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
    text = read_text(path, "plan", _MAX_PLAN_BYTES, "plan-file")
    with naming(path.name):
        return Plan.from_json(text)


def _cut_plan(components: Components, request: Request, dialect: str, make: Any) -> Plan:
    """Starts and ends where the request says: exactly, or on the whole legs that diffusers counts."""
    ends = (request.strength, request.denoising_start, request.denoising_end)
    if all(end is None for end in ends):
        return make()
    if dialect == "diffusers":
        return _cut_as_diffusers(request, make)
    low, high = components.schedule.span
    start = request.strength if request.strength is not None else request.denoising_start
    if request.denoising_start is not None:
        start = 1.0 - request.denoising_start
    begin = None if start is None else low + start * (high - low)
    end = None if request.denoising_end is None else low + (1.0 - request.denoising_end) * (high - low)
    return make(between=(begin, end))


def _cut_as_diffusers(request: Request, make: Any) -> Plan:
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
        cuts = {"skip": _starts_before(whole, request.denoising_start)}
    if request.denoising_end is not None:
        stop = _starts_before(whole, request.denoising_end)
        cuts |= {"stop": stop} if stop < len(_starts_of(whole)) else {}
    return make(**cuts) if cuts else whole


def _starts_of(whole: Plan) -> list[float]:
    """The times that diffusers counts when it cuts a run: one per step, and in PNDM one per call."""
    if whole.name in ("plms", "pndm"):
        return list(whole.timesteps)
    starts = list(dict.fromkeys(whole.timesteps))  # with several calls per step, the start of the next one comes twice
    if len(starts) != whole.grid["steps"]:
        raise PellucidError(
            f"denoising_start, denoising_end must be left out for {whole.name} in the diffusers dialect: it calls the "
            "model between two steps. Name a sampler: the exact dialect cuts anywhere.",
            "denoising",
        )
    return starts


def _starts_before(whole: Plan, part: float) -> int:
    """How many of them lie before a part of the run, as diffusers counts: by whole training times."""
    total = whole.schedule.get("num_train", 1000)
    return sum(time >= round(total - part * total) for time in _starts_of(whole))


# --- The run --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """A request made ready: it can wait, be run, and share a batch with others. `networks` are those that denoise."""

    settings: RunSettings
    start: Tensor  # (B, C, H, W), x at the plan's first level
    conditions: Conditions
    denoiser: GuidedDenoiser | ControlledDenoiser
    constraints: tuple[Constraint, ...]
    observers: tuple[Observer, ...]
    networks: tuple[nn.Module, ...]
    stages: Stages
    recipes: Callable[[], list[Recipe]]
    notes: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan:
        return self.settings.plan

    @property
    def noise(self) -> NoiseSource:
        return self.settings.noise

    def latents(self, x: Tensor) -> Latents:
        """x at the plan's end, where it was stepped elsewhere, as in a batch with others."""
        return Latents(x, self.settings, self.stages.copy(), self.recipes, self.notes)


def settle(model: Model, request: Request, plan: RunPlan | None = None) -> RunSettings:
    """Decides what a request leaves open; `plan` is what `make_plan` made of it, where somebody wanted it before."""
    components, receipt = model.with_loras(request)
    guidance = model.guidance_of(request)
    check_layers(components.network, guidance)
    plan = make_plan(components, request) if plan is None else plan
    if plan.plan.dialect == "diffusers" and not takes_guidance(components.network):
        guidance = guidance.as_diffusers()
    size, seeds = model.size_of(request), request.seeds()
    noise = noise_source(request, plan.plan, seeds)
    return RunSettings(
        model, request, components, plan.plan, plan.x0_filter, guidance, noise, size, tuple(seeds), receipt
    )


@torch.no_grad()
def prepare(
    run: RunSettings,
    *,
    observers: Sequence[Observer] = (),
    explain: Callable[[str], str] | None = None,
    notes: Sequence[str] = (),
) -> Prepared:
    """Encodes all that goes into a run: texts, images, adapters.

    `observers` watch besides those of the request, `explain` says why a stage runs out of memory, and `notes` go into
    the result.
    """
    model, request, parts = run.model, run.request, run.components
    stages = Stages(model.policy, model.device, explain, lambda: model.graph_memory().idle)
    # a network that was trained with its guidance as an input takes the scale, and is called once per step
    embedded = takes_guidance(parts.network)
    scale, guidance = (input_guidance(run.guidance), Guidance(1.0)) if embedded else (1.0, run.guidance)
    with stages.run("text", *parts.text_encoders):
        both = guidance.needs_uncond or asks_uncond(run.plan)
        conditions = make_conditions(parts, request, run.size, scale, both).to(model.device)
    with stages.run("encode", *image_inputs.encoding_networks(run)):
        clean, noise = image_inputs.clean_latents(run), image_inputs.first_noise(run)
        network, conditions = _network_of(run, conditions, clean)
    guided = GuidedDenoiser(
        network,
        parts.schedule,
        parts.target,  # type: ignore[arg-type]
        conditions.cond,
        conditions.uncond,
        guidance,
        weak=None if request.weak is None else _weak_network(run),
        x0_filter=run.x0_filter,
        dtype=working_dtype(parts.network),
        keep_raw=bool(run.plan.options.get("keep_eps")),
    )
    called = called_through(network)
    switch = next((layer for layer in called if isinstance(layer, HintSwitch)), None)
    weak = [] if request.weak is None else [request.weak.components.network]
    return Prepared(
        settings=run,
        start=_start_of(run, clean, noise),
        conditions=conditions,
        denoiser=guided if switch is None else ControlledDenoiser(guided, request.controls, switch),
        constraints=(*_blend(run, clean, noise), *request.constraints),
        observers=(*request.observers, *observers),
        networks=(called[-1], *weak),
        stages=stages,
        recipes=cache(partial(recipes_of, run)),
        notes=(
            *parts.notes,
            *notes,
            *text_notes(parts, request),
            *guidance.notes,
            *scale_notes(guidance),
            *_unused_notes(request, guidance, run.plan),
            *noise_notes(run.plan, str((parts.scheduler or {}).get("_class_name"))),
            *tuning_notes(run.plan, model.components, run.guidance),
        ),
    )


@torch.no_grad()
def denoise(prepared: Prepared) -> Latents:
    """Runs what is prepared; its observers see the recipes first, then every step."""
    settings, stages = prepared.settings, prepared.stages.copy()
    stepper = settings.model.stepper(prepared.networks)
    show_recipes(prepared.observers, prepared.recipes)
    with stages.run("denoise", *prepared.networks):
        x = loop(
            [settings.plan] * settings.count,
            prepared.denoiser,  # type: ignore[arg-type]  # the loop binds it to the plans
            prepared.start,
            settings.noise,
            prepared.observers,
            prepared.constraints,
            settings.request.cancelled,
            stepper,
        )
    plain = {settings.model.why_plain(): settings.plan.nfe} if stepper is None else dict(stepper.plain)
    return Latents(x, settings, stages, prepared.recipes, prepared.notes, plain)


def _start_of(run: RunSettings, clean: Tensor | None, noise: Tensor) -> Tensor:
    """x at the plan's first level."""
    plan = run.plan
    if clean is None:
        return noise * plan.initial_scale
    if run.request.denoising_start is not None:
        return clean  # x of an earlier run, still noisy
    if image_inputs.starts_from_noise(run) and plan.dialect == "diffusers":
        return noise * plan.initial_scale
    return clean * plan.start.alpha + noise * plan.start.sigma


def _blend(run: RunSettings, clean: Tensor | None, noise: Tensor) -> list[Constraint]:
    """Keeps what the mask does not paint: after each row, the image at the level that x has now."""
    if run.request.mask is None or clean is None or image_inputs.is_inpainting(run.components):
        return []
    plan, mask = run.plan, image_inputs.latent_mask(run)  # (B, 1, H, W), 1 is painted
    last = len(plan.rows) - 1

    def keep(seen: StepSeen) -> Tensor:
        level = seen.next_levels[0] if seen.index == last else known_level(plan, seen.index + 1)
        done = seen.index == last and plan.dialect == "diffusers"  # which ends on the image, wherever it ends
        kept = clean if done else clean * level.alpha + noise * level.sigma
        return kept * (1 - mask) + seen.x_next * mask

    return [keep]


def noise_source(request: Request, plan: Plan, seeds: list[int], stream: TorchStream | None = None) -> NoiseSource:
    """Addressed noise (philox), or torch's generators as the peers' dialects use them: a `stream`, or new ones."""
    given = request.noise
    if given is not None and not isinstance(given, str):
        if not hasattr(given, "first"):
            raise PellucidError(rule("noise", "philox, torch, or a noise source", given), "noise")
        return given
    kind = given or ("philox" if plan.dialect == "exact" else "torch")
    if kind not in ("philox", "torch"):
        raise PellucidError(rule("noise", "philox, torch, or a noise source", kind), "noise")
    return Philox(seeds) if kind == "philox" else stream or TorchStream(seeds)


# --- The network as a request uses it -------------------------------------------------------------------------------


def _network_of(run: RunSettings, conditions: Conditions, clean: Tensor | None) -> tuple[Any, Conditions]:
    """The network with ControlNets or beside a mask, and the conditions with what these take."""
    request, network, device = run.request, run.components.network, run.model.device
    if request.image_prompts:
        conditions = conditions.plus("image", *image_inputs.image_tokens(run, network))
    called: Any
    if request.controls:
        network = image_inputs.controllable(network)
        controlled = run.model.controlled(network, request.controls)
        conditions = conditions.plus("control", *image_inputs.hints_of(run, controlled))
        called = run.model.policy.ready(controlled)
        if any(control.start > 0 or control.end < 1 for control in request.controls):
            called = HintSwitch(called)
    else:
        called = run.model.policy.ready(network)
    if image_inputs.is_inpainting(run.components):
        beside = image_inputs.beside_latents(run).to(device, next(network.parameters()).dtype)
        return image_inputs.Inpainting(called), conditions.plus("beside", beside, beside)
    if network.config.in_channels != run.model.channels:
        wide = network.config.in_channels
        raise PellucidError(rule("in_channels of the network", f"{run.model.channels}", wide), "components-fit")
    if request.mask is not None and run.plan.dialect == "diffusers" and clean is not None:
        # diffusers encodes the masked image here whether it is used or not, and draws noise for it
        drawn = 1 if image_inputs.one_for_all(run) else run.count
        run.noise.beside(clean.shape[1:], torch.empty(0), range(drawn))
    return called, conditions


def _weak_network(run: RunSettings) -> Any:
    """The worse network of autoguidance, which must take what the network takes."""
    weak, network = run.request.weak, run.components.network
    parts: Any = getattr(weak, "components", None)
    if not isinstance(getattr(parts, "network", None), type(network)):
        raise PellucidError(rule("weak", f"a pipeline with a {type(network).__name__}", type(weak).__name__), "weak")
    if run.request.controls:
        raise PellucidError("weak must be left out with controls, which only the model itself follows.", "weak")
    for name in ("in_channels", "cross_attention_dim", "addition_embed_type", "time_cond_proj_dim"):
        mine, other = (getattr(one.config, name, None) for one in (network, parts.network))
        if mine != other:
            raise PellucidError(rule(f"{name} of weak", f"{mine}, as the model's", other), "weak")
    mine, other = (next(one.parameters()).dtype for one in (network, parts.network))
    if mine != other:
        raise PellucidError(rule("dtype of weak", f"{mine}, as the model's", other, "Load it with dtype=."), "weak")
    return image_inputs.Inpainting(parts.network) if image_inputs.is_inpainting(run.components) else parts.network


def working_dtype(network: nn.Module) -> torch.dtype | None:
    """The dtype that the network works in, where it is not x's."""
    dtype = next(network.parameters()).dtype
    return None if dtype == torch.float32 else dtype


@dataclass(frozen=True)
class ControlledDenoiser:
    """A guided denoiser whose ControlNets are called only at the steps where they act."""

    guided: GuidedDenoiser
    controls: Sequence[Control]
    switch: HintSwitch

    def bind(self, plans: Sequence[Plan]) -> ControlledRun:
        run = self.guided.bind(list(plans))
        return ControlledRun(run, self.controls, self.switch, [steps_of(plan, True) for plan in plans])


@dataclass
class ControlledRun:
    """One run: it switches the hints of its network on and off before each call."""

    run: GuidedRun
    controls: Sequence[Control]
    switch: HintSwitch
    ratios: list[list[float]]  # of the distinct levels of each image's plan

    def __call__(self, x: Tensor, level: Any, time: Any) -> Prediction:
        levels = [level] * len(self.ratios) if isinstance(level, Level) else split(level)
        asking = self.run.asks_uncond(self.run.doses(levels))
        pairs = [(levels[i], self.ratios[i]) for i in (*asking, *range(len(levels)))]  # of each call
        self.switch.on = tuple(tuple(_acts(control, *pair) for pair in pairs) for control in self.controls)
        return self.run(x, level, time)

    def select(self, images: Sequence[int]) -> ControlledRun:
        return replace(self, run=self.run.select(images), ratios=[self.ratios[i] for i in images])


def _acts(control: Control, level: Level, ratios: list[float]) -> bool:
    step = min(steps_before(ratios, level.ratio), len(ratios) - 1)
    return control.acts_at(step, len(ratios))


class HintSwitch:
    """The network of one run: a UNet with ControlNets, without the hints of those that do not act now."""

    def __init__(self, network: ControlledUNet) -> None:
        self.network = network
        self.on: tuple[tuple[bool, ...], ...] = ()  # by control, of the unconditional calls and of every image's own

    @property
    def hoist(self) -> Any:
        """That of the network, for all of its ControlNets at once."""
        return getattr(self.network, "hoist", None)

    def forward(self, x: Tensor, time: Tensor | None = None, *, control: tuple[Hint, ...], **inputs: Any) -> Tensor:
        hints = tuple(self.hint(hint, on) for hint, on in zip(control, self.on, strict=True))
        return self.network(x, time, control=hints if any(h is not None for h in hints) else (), **inputs)

    __call__ = forward

    @staticmethod
    def hint(hint: Hint, on: tuple[bool, ...]) -> Hint | None:
        if all(on):
            return hint
        if not any(on):
            return None
        own = on[-len(hint.scale) :]  # an extra term of guidance makes no unconditional call
        mask = torch.tensor([float(o) for o in own]).to(hint.scale).reshape(-1, 1, 1, 1)
        return Hint(hint.embedded, hint.scale * mask)


# --- Checks and notes -----------------------------------------------------------------------------------------------


def asks_uncond(plan: Plan) -> bool:
    """CFG++ asks for the unconditional prediction at any scale."""
    return plan.guided and not plan.options.get("keep_eps")


def input_guidance(guidance: Guidance) -> float:
    """The one scale that is an input of a guidance-distilled network."""
    if not isinstance(guidance.scale, float) or any(not isinstance(r, Rescale) for r in guidance.rules):
        raise PellucidError(
            rule("guidance", "one number for this network, which takes it as an input", guidance.text()), "guidance"
        )
    return guidance.scale


def check_layers(network: Network, guidance: Guidance) -> None:
    """The blocks that a rule weakens are there: a name that fits none would change nothing."""
    for extra in guidance.extras:
        for layer in extra.layers if isinstance(extra, LayerExtra) else ():
            if isinstance(network, UNet):
                places = {str(module.place) for module in network.modules() if getattr(module, "place", "")}
                known = isinstance(layer, str) and any(within(place, (layer,)) for place in places)
                must = "names of attention blocks, such as mid"
            else:
                count = len(network.transformer_blocks)
                known = isinstance(layer, int) and 0 <= layer < count
                must = f"block numbers from 0 to {count - 1}"
            if not known:
                raise PellucidError(rule(f"layers of {extra.name}", must, layer), "guidance")


def _unused_notes(request: Request, guidance: Guidance, plan: Plan) -> list[str]:
    """Notes on options that have no effect."""
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
    if own is not None and not _same_guidance(own, guidance):
        found.append(f"the plan was tuned for guidance {own}, and runs with {guidance.text()}")
    return found


def _same_guidance(text: Any, guidance: Guidance) -> bool:
    try:
        return Guidance.parse(text).same_rules(guidance)
    except PellucidError:
        return False
